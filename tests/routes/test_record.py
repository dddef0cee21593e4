"""Steps of users that are recorded once and done again: the same bits as the function, or an error by name."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch

from nvalchemiops.torch import RecordingError, record
from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping, d3_dispersion
from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.runtime.storage import _has_no_gaps
from tests.support.cases import MIXED, SUMS
from tests.support.systems import triclinic

F64 = torch.float64
CUTOFF = 3.0


@pytest.fixture(scope="module")
def system():
    return triclinic(20, charged=True)


def near_of(system):
    names = ("neighbor_list", "neighbor_ptr", "neighbor_shifts")
    found = neighbor_list(system.positions, CUTOFF, system.cell, return_neighbor_list=True)
    return dict(zip(names, found))


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def force_field(system, charges_of=None):
    """Lennard-Jones, an Ewald sum, a mesh sum and D3, with charges of a network; forces by autograd."""
    near, cell, n = near_of(system), system.cell, len(system.positions)
    potential = lennard_jones(CUTOFF, r_switch=2.2)
    of_pairs = {"sigma": torch.full((n,), 1.7, dtype=F64), "epsilon": torch.full((n,), 0.4, dtype=F64)}
    numbers, states = torch.where(system.charges > 0, 6, 8).int(), D3Parameters.load().states([6, 8])
    damping = RationalDamping(0.43, 4.4, 0.79, 0.9)
    cutoffs = {"cutoff": CUTOFF, "coordination_cutoff": CUTOFF, "smoothing": 1.0}

    def step(positions):
        x = positions.detach().requires_grad_()
        q = system.charges if charges_of is None else system.charges + 0.1 * charges_of(x).squeeze(1)
        energy = potential(x, cell, **of_pairs, **near).sum()
        energy = energy + ewald_summation(x, q, cell, 0.9, k_cutoff=5.0, **near).sum()
        energy = energy + particle_mesh_ewald(x, q, cell, 0.9, mesh_dimensions=(12, 10, 9), **near).sum()
        energy = energy + d3_dispersion(x, numbers, damping, states, cell, **near, **cutoffs)[0].sum()
        (gradient,) = torch.autograd.grad(energy, x)
        return {"energy": energy.detach(), "forces": -gradient, "name": "all"}

    return step


def moved(x, seed):
    return x + 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)


def test_a_whole_force_field_has_the_bits_of_the_function(system):
    """Other positions each time, in other memory; results stay when the plan runs again."""
    step = force_field(system, network())
    again, kept = record(step), []
    for seed in range(4):
        x = moved(system.positions, seed)
        kept.append((again(x), step(x)))
        assert f"last call: {('recorded', 'ordinary', 'replayed', 'replayed')[seed]}" in again.explain()
    for found, expected in kept:
        assert found.keys() == expected.keys() and found["name"] == "all"
        assert all(torch.equal(found[name], expected[name]) for name in ("energy", "forces"))


def test_arguments_of_any_form(system):
    """Containers, strides, gradients of arguments, other shapes, options and modes: each has a plan of its own."""

    @record(most_plans=8)
    def step(parts, scale=1.0, *, others):
        x = parts["x"].detach().requires_grad_()
        (slope,) = torch.autograd.grad((scale * x.sin() * others[0]).sum(), x)
        return [slope, (others[1].mT @ slope,)]

    for n in (4, 5):
        for x in (torch.rand(n, 3), torch.rand(3, n).mT, torch.rand(n, 3, requires_grad=True)):
            for scale in (1.0, 2.0):
                for seed in range(3):
                    x = x.detach().clone().requires_grad_(x.requires_grad) if seed else x
                    with torch.no_grad():
                        x.mul_(1.1)
                    others = (torch.rand(n, 1), torch.rand(n, 3))
                    slope, (product,) = step({"x": x}, scale, others=others)
                    expected = scale * x.detach().cos() * others[0]
                    assert torch.equal(slope, expected) and torch.equal(product, others[1].mT @ expected)


def test_weights_that_are_trained(system):
    """A loss of forces, differentiated by weights that an optimizer changes in place."""
    near, model = near_of(system), network()
    weights = list(model.parameters())

    def gradients(positions, target):
        x = positions.detach().requires_grad_()
        q = system.charges + 0.1 * model(x).squeeze(1)
        energy = ewald_summation(x, q, system.cell, 0.9, k_cutoff=5.0, **near).sum()
        (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = (slope + target).square().sum()
        return loss.detach(), torch.autograd.grad(loss, weights)

    again = record(gradients, changing=weights)
    optimizer = torch.optim.SGD(weights, 1e-3)
    for seed in range(4):
        x, target = moved(system.positions, seed), torch.randn(20, 3, dtype=F64)
        found, expected = again(x, target), gradients(x, target)
        assert torch.equal(found[0], expected[0])
        assert all(map(torch.equal, found[1], expected[1]))
        for weight, slope in zip(weights, found[1]):
            weight.grad = slope
        optimizer.step()
    assert "2 replayed" in again.explain()
    with torch.no_grad():
        weights[0].data = 2.0 * weights[0]  # other memory
    assert torch.equal(again(x, target)[0], gradients(x, target)[0])


def test_weights_of_atoms_that_vary(system):
    near = near_of(system)

    def step(positions, weights):
        x = positions.detach().requires_grad_()
        energies = ewald_summation(x, system.charges, system.cell, 0.9, k_cutoff=5.0, **near)
        return torch.autograd.grad((weights * energies).sum(), x)[0]

    again = record(step)
    for seed in range(3):
        weights = torch.rand(20, generator=torch.Generator().manual_seed(seed), dtype=F64)
        given = moved(system.positions, seed), torch.ones(20, dtype=F64) if seed == 2 else weights
        torch.testing.assert_close(again(*given), step(*given), rtol=1e-12, atol=1e-12)
    assert "1 replayed" in again.explain()


@pytest.mark.parametrize("case", SUMS, ids=[case.name for case in SUMS])
def test_systems_of_atoms_that_vary(case):
    """Replays sort atoms by system, compare numbers of systems with those that exist, and k-vector sums their sizes."""
    inputs, near, systems = case.inputs(MIXED), case.near(MIXED), MIXED.batch_idx

    def step(x, batch_idx):
        return case.results(x, *inputs[1:], near | {"batch_idx": batch_idx}, energy_reduction="system")

    recorded = record(step)
    one_more = torch.where(systems == systems[0], 2, systems)
    for batch_idx in (systems, systems, systems.flip(0), systems.sort().values, one_more):
        for found, expected in zip(recorded(inputs.x, batch_idx), step(inputs.x, batch_idx), strict=True):
            assert torch.equal(found, expected)
    assert "recorded, 0 replayed" not in recorded.explain()
    recorded(inputs.x, torch.zeros_like(systems))
    assert ("no room for these values" in recorded.explain()) == (case.name == "Ewald")
    for wrong in (systems + 1, systems - 1):
        with pytest.raises(ValueError, match="`batch_idx` has the"):
            recorded(inputs.x, wrong)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ({"half_list": True}, "is not a half list"),
        ({"widths": torch.tensor(0.4)}, None),
        ({"exclusions": torch.tensor([[0], [1]])}, "joins atoms of different systems"),
    ],
    ids=["half list", "widths", "exclusions"],
)
def test_what_is_compared_with_systems_and_neighbors_that_vary(given, wrong):
    x, cell = MIXED.positions, MIXED.cell
    systems = torch.arange(len(x)) % 2
    systems[1] = 0

    def step(x, systems, neighbor_list, neighbor_ptr, neighbor_shifts):
        near = {"neighbor_list": neighbor_list, "neighbor_ptr": neighbor_ptr, "neighbor_shifts": neighbor_shifts}
        options = {"batch_idx": systems, "miller_bounds": (3, 3, 3), "compute_forces": True, **near, **given}
        return ewald_summation(x, MIXED.charges, cell, 0.9, **options)

    def neighbors(systems):
        order = systems.argsort(stable=True)
        options = {"batch_idx": systems[order], "half_fill": "half_list" in given, "return_neighbor_list": True}
        pairs, _, shifts = neighbor_list(x[order], 2.5, cell, **options)
        pairs = order[pairs.long()].int()
        by_row = pairs[0].argsort(stable=True)
        pointers = torch.bincount(pairs[0], minlength=len(x)).cumsum(0)
        return pairs[:, by_row], torch.nn.functional.pad(pointers, (1, 0)).int(), shifts[by_row]

    recorded = record(step)
    for seed in range(3):
        near = neighbors(systems)
        now = moved(x, seed)
        for found, expected in zip(recorded(now, systems, *near), step(now, systems, *near), strict=True):
            assert torch.equal(found, expected)
    assert "1 recorded, 1 replayed" in recorded.explain()
    if wrong is not None:
        pairs, pointers, shifts = near
        if "half_list" in given:
            pairs, shifts = pairs[:, [0, 0, *range(2, len(shifts))]], shifts[[0, 0, *range(2, len(shifts))]]
        with pytest.raises(ValueError, match=wrong):
            recorded(x, systems if "half_list" in given else torch.arange(len(x)) % 2, pairs, pointers, shifts)


def test_weights_of_atoms_of_systems_that_vary():
    """Whether weights of atoms are weights of systems is not read where another division comes with a replay."""
    case = SUMS[0]
    inputs, near, systems = case.inputs(MIXED), case.near(MIXED), MIXED.batch_idx
    weights = 1.0 + systems.to(F64)

    def step(x, batch_idx):
        x = x.detach().requires_grad_()
        energies = case.energies(x, *inputs[1:], near | {"batch_idx": batch_idx})
        return torch.autograd.grad((energies * weights).sum(), x)[0]

    recorded = record(step)
    for batch_idx in (systems, systems.flip(0), systems):
        torch.testing.assert_close(recorded(inputs.x, batch_idx), step(inputs.x, batch_idx), rtol=1e-12, atol=1e-12)
    assert "1 replayed" in recorded.explain()


@pytest.mark.parametrize("change", ["in place", "data", "numpy", "other memory"])
def test_tensors_that_are_no_arguments_may_change(system, change):
    charges = system.charges.clone()

    def step(positions):
        return ewald_summation(positions, charges, system.cell, 0.9, k_cutoff=5.0, **near, compute_forces=True)

    near = near_of(system)
    again, strict = record(step), record(step, if_changed="raise")
    for _ in range(2):
        again(system.positions), strict(system.positions)
    if change == "in place":
        charges.mul_(2.0)
    elif change == "data":
        charges.data.mul_(2.0)
    elif change == "numpy":
        charges.numpy()[:] *= 2.0
    else:
        charges.data = 2.0 * charges
    assert all(map(torch.equal, again(system.positions), step(system.positions)))
    with pytest.raises(RecordingError, match="have changed since"):
        strict(system.positions)


@pytest.mark.parametrize("changing", (lambda weight: weight, lambda weight: iter([weight]), lambda weight: {weight}))
def test_tensors_that_change_are_one_or_are_given_once(changing):
    """As ``parameters()`` of a module, which can be looked through once; the rows of one tensor are not meant."""
    weight = torch.eye(2).requires_grad_()
    again = record(lambda x: (weight @ x).detach() + 1.0, changing=changing(weight))
    for seed in range(5):
        with torch.no_grad():
            weight += 0.5
        x = torch.rand(2, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(again(x), weight.detach() @ x + 1.0)
    assert "1 recorded" in again.explain()


def test_shapes_may_change_in_place():
    """Of tensors in memory that stays where it is."""
    outside, trained = torch.arange(6.0), torch.arange(6.0)
    again = record(lambda x: x * outside.sum() + trained.sum(), changing=[trained])
    for length in (6, 6, 3):
        outside.resize_(length), trained.resize_(length)
        for x in (1.0, 2.0, 3.0):
            assert float(again(torch.tensor(x))) == (x + 1.0) * float(outside.sum())


def test_shapes_of_results_in_the_middle_change_in_place():
    """As in ``torch.quantile``. Other matrices are symmetric, and so do not tell whether axes are in order."""

    def step(x):
        y, column = 2.0 * x, x.sum(1)
        product = y @ y
        y.t_()
        column.unsqueeze_(1)
        return y[0] + 1.0, product @ y, column + y, torch.quantile(x, 0.3)

    again = record(step)
    for seed in range(5):
        x = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))
        x = x if seed > 1 else x + x.T
        assert all(map(torch.equal, again(x), step(x)))
    with pytest.raises(RecordingError, match="existed before"):
        record(lambda x: x.t_() + 1.0)(x)


def test_tensors_that_are_conjugated_by_a_flag():
    phases = torch.randn(3, dtype=torch.complex128)

    def step(x):
        return x * phases.conj().imag, (x * conjugated).real, x * negative

    conjugated, negative = phases.conj(), phases.conj().imag
    again = record(step)
    for seed in range(4):
        x = torch.rand(3, generator=torch.Generator().manual_seed(seed), dtype=F64)
        assert all(map(torch.equal, again(x), step(x)))
        if seed == 2:
            phases.mul_(2.0)


def test_complex_results_that_are_no_numbers_are_the_same():
    again = record(lambda x: torch.view_as_complex(x / 0.0))
    for factor in (0.0, -0.0, 0.0):
        assert again(factor * torch.ones(3, 2)).isnan().all()


def test_parts_of_one_tensor_may_change():
    """Each part is looked at, also if an operation takes several of them."""
    whole = torch.arange(10.0)
    first, last = whole[:5], whole[5:]

    def step(x):
        return x * torch.add(first, last)

    again, x = record(step), torch.ones(5)
    for part in (first, last, first, last):
        assert torch.equal(again(x), step(x))
        part += 1.0
    assert torch.equal(again(x), step(x))


def test_rows_of_a_tensor_without_gaps_are_looked_at_with_it():
    """Whatever the order of its axes, as of inverse cells: each tensor outside takes time in each call."""
    outside = torch.rand(5, 4, 3).permute(2, 0, 1)
    again = record(lambda x: sum(x * outside[:, n] for n in range(5)))
    again(torch.rand(4))
    (kind,) = again._kinds.values()
    assert len(kind.recording.plan.external) == 1
    overlapping = outside.as_strided((2, 2, 2), (1, 1, 5))
    for with_gaps in (outside[:, :, :3], outside[:1], overlapping):
        assert not _has_no_gaps(with_gaps)


def test_memory_that_is_constant_until_it_is_not():
    """Read by a step before another one writes into it; written in parts; views of it."""

    def step(x):
        buffer = torch.ones(3, 4)
        first = x * buffer[:, 0] * len(f"{buffer}")
        buffer[:, :2] = 5.0
        torch.add(buffer, x[:, None], out=buffer)
        last = buffer[1]
        total, ones = 2.0 * x, torch.ones(3)
        total.add_(ones)
        ones.zero_()
        empty = torch.empty(2, 3)
        empty[0] = 7.0
        empty[1] = x
        negative = torch.full((2,), -0.0)
        negative[0] = x[0]
        numbers = [torch.tensor([1.0, 2.0]), torch.as_tensor((1.0, 2.0)), x.new_tensor([1.0, 2.0])]
        numbers += [torch.asarray([1.0, 2.0]), x.new([1.0, 2.0])]
        for some in numbers:
            some[0] += x[0]
        return first, buffer, last, total, empty, 1.0 / negative, torch.zeros(2), *numbers

    again = record(step)
    for seed in range(4):
        x = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        assert all(map(torch.equal, again(x), step(x)))


def test_steps_in_compiled_code_where_a_gpu_is_in_use(monkeypatch):
    """The compiler cannot ask whether a graph is captured."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    step, x = record(lambda x: 2.0 * x.sin()), torch.ones(3)
    found = torch.compile(lambda x: step(x) + 1.0, backend="eager", fullgraph=True)(x)
    assert torch.equal(found, 2.0 * x.sin() + 1.0)


def test_a_step_without_arguments_is_part_of_a_captured_graph(monkeypatch):
    """Values of a GPU that it uses cannot be compared there."""
    weights = torch.ones(3)
    step = record(weights.sin)
    step()
    monkeypatch.setattr("nvalchemiops.torch.runtime.recorded.is_capturing", lambda: True)
    weights.add_(1.0)
    assert torch.equal(step(), weights.sin()) and "part of a graph" in step.explain()


def test_what_a_kernel_reads_is_not_written(system):
    near, charges = near_of(system), system.charges.clone()

    def step(positions):
        energies = ewald_summation(positions, charges, system.cell, 0.9, k_cutoff=5.0, **near)
        charges.add_(0.1 * energies)
        return energies

    with pytest.raises(RecordingError, match="existed before"):
        record(step)(system.positions)


def test_errors_are_those_of_the_function(system):
    """Of arguments that kernels find wrong, after the function was recorded, and NaN goes through."""
    near = near_of(system)

    def step(positions, charges):
        return ewald_summation(positions, charges, system.cell, 0.9, k_cutoff=5.0, **near)

    again = record(step)
    expected = again(system.positions, system.charges)
    broken = system.positions.clone()
    broken[3, 1] = torch.nan
    assert torch.equal(again(broken, system.charges).isnan(), step(broken, system.charges).isnan())
    assert torch.equal(again(system.positions, system.charges), expected)
    with pytest.raises(ValueError, match="charges"):
        again(system.positions, system.charges[:3])


def test_where_others_see_the_operations_the_function_is_called(system):
    def step(x):
        return x.sin() * 2.0

    again, x = record(step), torch.rand(5)
    again(x)
    assert torch.equal(torch.func.vmap(again)(x), step(x))
    assert torch.equal(torch.compile(again, backend="eager")(x), step(x))
    with torch.device("meta"):
        assert torch.equal(again(x), step(x))
    assert "ordinary" in again.explain()
    outer = record(lambda x: again(x) + 1.0)
    assert all(torch.equal(outer(k * x), step(k * x) + 1.0) for k in (1.0, 2.0))
    with torch.inference_mode():
        inside = again(x)
    assert torch.equal(inside, step(x)) and torch.equal(again(x), step(x))
    y, product = torch.rand(2, 2), record(torch.mm)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert product(y, y).dtype is torch.bfloat16
    assert torch.equal(product(y, y), y @ y) and "1 recorded" in product.explain()


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in Sqrt")
def test_anomaly_detection_sees_the_backward_pass():
    again, before = (record(lambda x: torch.autograd.grad(x.requires_grad_().sqrt().sum(), x)[0]) for _ in range(2))
    before(torch.ones(3))
    for recorded in (again, before):
        with torch.autograd.detect_anomaly():
            assert torch.equal(recorded(torch.ones(3)), torch.full((3,), 0.5))
            with pytest.raises(RuntimeError, match="SqrtBackward0' returned nan"):
                recorded(torch.full((3,), torch.nan))


@pytest.mark.parametrize("form", ["function", "block"])
def test_steps_in_inference_mode(system, form):
    """The whole function or a part of it, with operations of torch that have no ``out=`` and writes in place."""
    near = near_of(system)

    def step(x):
        energies = ewald_summation(x, system.charges, system.cell, 0.9, k_cutoff=5.0, **near)
        mesh = particle_mesh_ewald(x, system.charges, system.cell, 0.9, mesh_dimensions=(8, 9, 10), **near)
        buffer = torch.zeros(20, 3, dtype=F64)
        first = x * buffer
        buffer[1:].add_(x[1:])
        return energies + mesh, buffer, first, torch.complex(x, x).conj().imag + x, torch.linalg.inv(x[:3])

    within = torch.inference_mode()(step)
    again = record(within if form == "function" else lambda x: within(1.0 * x))
    for seed in range(4):
        x = moved(system.positions, seed)
        assert all(map(torch.equal, again(x), step(x)))
    assert "2 replayed" in again.explain()


def test_compiled_functions_inside_are_followed():
    compiled = torch.compile(lambda x: x.sin().cos(), backend="aot_eager")
    compiled(torch.rand(4))
    again = record(lambda x: compiled(x) * 2.0)
    for seed in range(4):
        x = torch.rand(4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(again(x), x.sin().cos() * 2.0)
    assert "2 replayed" in again.explain()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3))

    @record
    def slope(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad((self.weight * x.sin()).sum(), x)[0]

    @record
    def height(self, x):
        return self.weight.detach() * x.sin()


def test_methods_and_copies():
    models = [Model(), Model()]
    models.append(copy.deepcopy(models[0]))
    with torch.no_grad():
        models[2].weight.mul_(3.0)
    for seed in range(4):
        x = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        for model in models:
            torch.testing.assert_close(model.slope(x), model.weight.detach() * x.cos())
    assert "last call: replayed" in models[0].slope.explain()
    compiled = torch.compile(lambda x: models[0].height(x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), models[0].height(x))
    again = copy.deepcopy(record(torch.sin, most_plans=2))
    assert torch.equal(again(x), x.sin())
    assert pickle.loads(pickle.dumps(Model.slope)) is Model.slope
    assert torch.equal(pickle.loads(pickle.dumps(record(torch.sin)))(x), x.sin())
    assert torch.equal(pickle.loads(pickle.dumps(models[0].slope))(x), models[0].slope(x))
    reduced = eval("lambda step: step.__reduce__()", {"__name__": "cloudpickle.cloudpickle"})
    assert reduced(Model.slope)[1][0] is Model.slope.__wrapped__  # which it sends by value


def test_threads_share_plans():
    def step(x):
        return (x[:, None] * x).sin().sum(0)

    again, wrong = record(step), []
    again(torch.rand(50))

    def work(seed):
        x = torch.rand(50, generator=torch.Generator().manual_seed(seed))
        wrong.extend(seed for _ in range(200) if not torch.equal(again(x), step(x)))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_few_recordings_are_kept():
    again = record(torch.sin, most_plans=2)
    for n in (1, 2, 3, 1):
        again(torch.rand(n))
    assert "4 recorded" in again.explain() and again.explain().count("steps") == 2
    again.clear()
    assert "none" in again.explain()


def test_arguments_of_record():
    with pytest.raises(ValueError, match="if_changed"):
        record(torch.sin, if_changed="ignore")
    with pytest.raises(ValueError, match="most_plans"):
        record(torch.sin, most_plans=0)
    with pytest.raises(TypeError, match="changing"):
        record(torch.sin, changing=[1.0])
    with pytest.raises(TypeError, match="`function` must be callable, got Tensor"):
        record(torch.ones(2))
    with pytest.raises(TypeError, match="`changing` must be tensors, got float"):
        record(torch.sin, changing=1.0)
    with pytest.raises(TypeError, match="hashable"):
        record(lambda x, options: x.sin())(torch.rand(2), np.ones(2))


def test_zero_and_minus_zero_are_two_recordings():
    divide = record(lambda x, by: x / by)
    for shift in range(3):
        x = torch.arange(1.0, 4.0) + shift
        for by in (0.0, -0.0, np.float64(0.0), np.float64(-0.0)):
            assert torch.equal(divide(x, by), x / float(by))


def test_default_types_are_two_recordings():
    half = record(lambda x: x / 2)
    try:
        for dtype in (torch.float32, F64) * 2:
            torch.set_default_dtype(dtype)
            for n in range(3):
                assert half(torch.tensor(n)).dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert "2 recorded" in half.explain()
