"""No operator waits for a GPU, or asks it for a value, if it is given what decides sizes: proved without a GPU.

Calls, first and second derivatives, on tensors that pretend to be on a GPU (`tests.support.on_device`): reading a
value is an error there. Each call does the same operations and launches with the same shapes for other values, so a
captured graph replays. Compiled graphs have no operation that reads. The table of docs/compile.md says the same of each
operator.
"""

import contextlib
import types

import numpy as np
import pytest
import torch
import warp as wp
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

from nvalchemiops.layout import GPU, replaced_layout
from nvalchemiops.torch import checks, plans, spline
from nvalchemiops.torch.autograd import OutputSpec, arrays, tapes, warp_custom_op, warp_stream_from_torch
from nvalchemiops.torch.interactions import dispersion, electrostatics
from nvalchemiops.torch.interactions.electrostatics.accuracy import choice, sizes
from nvalchemiops.torch.launch import launch_adjoint
from nvalchemiops.torch.neighbors import VerletList, formats, neighbor_list, rebuild_detection, rows
from nvalchemiops.torch.operators.lattice import _geometry
from nvalchemiops.torch.runtime import cache, context, graphs
from nvalchemiops.torch.runtime.context import ValuesNeededError, may_read
from tests.support import cases
from tests.support.comparing import close_to_largest, weighted
from tests.support.given_sizes import (
    ALL,
    ALPHA,
    ATOMS,
    CUTOFF,
    D3_RANGES,
    DAMPING,
    DIFFERENTIABLE,
    LISTS,
    MESH,
    N_ATOMS,
    N_SYSTEMS,
    THREE_BODY,
    WIDTH,
    Call,
    Given,
    derivatives,
    given,
)
from tests.support.gpu import waiting_is_an_error
from tests.support.loads import LoadError, forget_kept
from tests.support.on_device import (
    READS,
    HostReadError,
    WarpStream,
    capturing,
    check_launch_stream,
    events,
    on_gpu,
    on_host,
    on_stream,
    pretended_gpu,
)
from tests.support.systems import in_form, neighbors_of


@pytest.fixture
def gpu():
    """Two sets of values."""
    values = given(0.0), given(1.0)
    with pretended_gpu():
        yield on_gpu(values)


def assert_no_wait(gpu, run):
    first, other = gpu
    run(first)  # what is kept is made, as kernels are loaded

    def seen(values):
        cache._recognized.clear()  # sorted batches
        return events(lambda: run(values))

    done = seen(first)
    assert done == seen(other)
    return done


def by_name(table):
    return pytest.mark.parametrize("name", table)


@by_name(DIFFERENTIABLE)
def test_sums_and_derivatives_of_both_orders_do_not_wait(name, gpu):
    assert assert_no_wait(gpu, derivatives(DIFFERENTIABLE[name], 2))


def test_the_number_of_systems_is_read_once(monkeypatch):
    """Of a pair potential in a cell that systems may share, where only `batch_idx` says how many there are."""
    reads, cpu = [], torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda t: (reads.append(t), cpu(t))[1])
    numbers = given(0.0).idx.long()  # of another dtype than kernels need, as from torch_geometric

    def energies(step):
        g = given(step)._replace(idx=numbers)
        return cases.LENNARD_JONES(g.x, g.cell[:1], sigma=1.7, epsilon=0.2, **g.near)

    with replaced_layout("cpu", GPU), plans.off():
        for step, expected in ((0.0, 1), (1.0, 1)):
            energies(step)
            assert len(reads) == expected
        numbers += 1
        energies(1.0)
    assert len(reads) == 2


@pytest.mark.parametrize("function", [electrostatics.ewald_summation, electrostatics.particle_mesh_ewald])
def test_what_is_chosen_for_a_given_alpha_reads_the_cell_once(function, monkeypatch):
    """A reading is one more wait for a GPU in each call: also the check of the cutoff uses what was read.

    An alpha that is a number is not read at all.
    """
    g, reads = given(0.0), []
    for module in (sizes, choice):
        monkeypatch.setattr(module, "on_host", lambda t: (reads.append(t), context.on_host(t))[1])
    with plans.off():
        for _ in range(2):  # what is chosen is kept
            reads.clear()
            function(g.x, g.q, g.cell, 0.8, cutoff=CUTOFF, accuracy=1e-2, **g.near)
            assert sum(read.shape == g.cell.shape for read in reads) == 1
            assert not any(bool((read == 0.8).all()) for read in reads)


@by_name(THREE_BODY)
def test_triples_do_not_wait(name, gpu):
    assert_no_wait(gpu, derivatives(THREE_BODY[name], 1))


@by_name(LISTS)
def test_searches_do_not_wait(name, gpu):
    assert_no_wait(gpu, LISTS[name])


@pytest.mark.parametrize("systems", ["sorted_idx", "idx", "cell"])
def test_a_search_sorts_once(gpu, systems):
    """Also where nobody knows how many systems there are: sorts are most of the launches of a small search."""
    g, _ = gpu
    cell = g.cell if systems == "cell" else None
    idx = g.sorted_idx if systems == "cell" else getattr(g, systems)
    done = events(lambda: neighbor_list(g.x, CUTOFF, cell, batch_idx=idx, max_neighbors=WIDTH, check=False))
    assert sum("sort." in event.name for event in done) == 1


@pytest.mark.gpu
@by_name(DIFFERENTIABLE | THREE_BODY | LISTS)
def test_nothing_waits_on_a_gpu(name):
    """The same calls where there is one."""
    runs = {name: derivatives(call, 2) for name, call in DIFFERENTIABLE.items()}
    runs |= {name: derivatives(call, 1) for name, call in THREE_BODY.items()} | LISTS
    run = runs[name]
    first, other = tree_map_only(torch.Tensor, lambda t: t.to("cuda"), (given(0.0), given(1.0)))
    run(first)
    with waiting_is_an_error():
        run(other)


def test_lattices_of_gpus_are_those_of_cpus():
    """Inverses, volumes and metrics come from other formulas, whose derivatives ask the host for nothing."""
    cells = torch.cat([cases.MIXED.cell, -cases.MIXED.cell]).requires_grad_()

    def found():
        results = [t.sin() for t in _geometry(cells)]
        first = torch.autograd.grad(weighted(results), cells, create_graph=True)
        return [*results, *first, *torch.autograd.grad(weighted(first), cells)]

    expected = found()
    with replaced_layout("cpu", GPU):
        close_to_largest(found(), expected, 1e-13)


@pytest.mark.parametrize("form", ["half list", "half matrix"])
def test_half_lists_of_gpus_are_those_of_cpus(form, monkeypatch):
    """Their pairs are doubled in another way, with padding, without a look at them."""
    system = cases.MIXED
    near = neighbors_of(system, CUTOFF)

    def found(given):
        options = {"sigma": 1.7, "epsilon": 0.2, "batch_idx": system.batch_idx, **given, **ALL}
        return cases.LENNARD_JONES(system.positions, system.cell, **options)

    given = in_form(near, N_ATOMS, form, "fill_value")
    expected = found(given)
    monkeypatch.setattr(rows, "may_read", lambda *_: False)
    close_to_largest(found(given), expected, 1e-13)
    # a full one: kernels find a fault, which on a GPU is NaN
    with pytest.raises(ValueError, match="an atom that does not exist"):
        found({**near, "half_list": True})


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIFFERENTIABLE | THREE_BODY | LISTS)
def test_what_is_kept_is_used_on_its_stream(name, monkeypatch):
    """On another one it may not be there yet; and once it is no longer kept, its memory belongs to its own."""
    forget_kept(monkeypatch)
    inputs, call = on_gpu(given(0.0)), (DIFFERENTIABLE | THREE_BODY | LISTS)[name]
    with pretended_gpu():
        for stream in (1, 1, 2, 1):
            with on_stream(stream):
                call(inputs)


@by_name(DIFFERENTIABLE | THREE_BODY | LISTS)
def test_a_call_is_captured_after_another_one(name, monkeypatch):
    """Which has loaded all kernels. On its own stream, a capture makes again what is kept, but not from the host."""
    forget_kept(monkeypatch)
    run = LISTS.get(name) or derivatives((DIFFERENTIABLE | THREE_BODY)[name], 1 if name in THREE_BODY else 2)
    inputs = on_gpu(given(0.0))
    with pretended_gpu():
        with on_stream(1):
            run(inputs)
        with capturing(2):
            events(lambda: run(inputs))


# all launches above are on the current stream, or `check_launch_stream` raises; these are in none of the calls


@wp.kernel(module=wp.get_module("test_host_on_gpu"))
def square(x: wp.array(dtype=wp.float64), y: wp.array(dtype=wp.float64)):
    i = wp.tid()
    y[i] = x[i] * x[i]


def test_adjoints_of_kernels_and_tapes_are_on_the_current_stream():
    class Tape:
        zeroed = replayed = False

        def zero(self):
            self.zeroed = True

        def backward(self):
            check_launch_stream(WarpStream(0, 5))
            self.replayed = True

    x, y = on_gpu((torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)))
    array = types.SimpleNamespace(grad=types.SimpleNamespace(**{arrays._TENSOR: y}))
    tape = Tape()
    with pretended_gpu(), on_stream(5):
        tapes.replay([tape], {"y": array}, {"y": x.clone()}, "test")
        assert tape.zeroed and tape.replayed
        with warp_stream_from_torch(x):
            done = events(lambda: launch_adjoint(square, 3, [x, y], [x.clone(), y.clone()]))
    assert done[-1].name == "adjoint of square"


@warp_custom_op("tests::with_a_backward_pass_inside", [OutputSpec("y", wp.float64, lambda x: x.shape)])
def with_a_backward_pass_inside(x: torch.Tensor) -> torch.Tensor:
    seen.append(torch._C._is_multithreading_enabled())
    return 2.0 * x


seen: list[bool] = []


def test_backward_passes_inside_of_an_op_are_in_its_thread():
    """That of autograd for a GPU would wait for the stream that the op has bound."""
    (x,) = on_gpu((torch.ones(3, dtype=torch.float64),))
    with pretended_gpu():
        with_a_backward_pass_inside.op.record((x,), 1, x.device)
        assert seen == [False] and torch._C._is_multithreading_enabled()


def test_a_graph_belongs_to_its_stream():
    for number in (0, 3):
        with pretended_gpu(), on_stream(number):
            assert graphs.place_of(torch.device("cuda", 0)) == (torch.device("cuda", 0), number)
    assert graphs.place_of(torch.device("cpu")) == (torch.device("cpu"), 0)


# -- compiled -------------------------------------------------------------------------------------


AT_LEAST = (
    "ewald_summation, prepared, channels, exclusions, slab",
    *("PairPotential with tables, exclusions, pbc", "d3_dispersion", "spline_gather_with_force", "neighbor_list"),
)
COMPILED = {
    name: call
    for name, call in (DIFFERENTIABLE | THREE_BODY | LISTS).items()
    if name not in ("EwaldSummation", "ParticleMeshEwald", "prepare_mesh")  # which make more than tensors
}


@pytest.mark.later_cases("ewald_summation, prepared, channels, exclusions, slab")
@pytest.mark.parametrize(
    "name", [name if name in AT_LEAST else pytest.param(name, marks=pytest.mark.slow) for name in COMPILED]
)
def test_compiled_graphs_do_not_read(name):
    """Graphs of results, derivatives among them, and of their derivatives, as for a GPU."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.graph)
        return make_boxed_func(graph.forward)

    def backend(graph, inputs):
        return aot_module_simplified(graph, inputs, fw_compiler=keep, bw_compiler=keep)

    values = given(0.0)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, replaced_layout("cpu", GPU):
        g = tree_map_only(torch.Tensor, mode.from_tensor, values)

        def loss(x, q, cell, of_systems):
            found = COMPILED[name](g._replace(x=x, q=q, cell=cell, of_systems=of_systems))
            found = found if isinstance(found, tuple) else (found,)
            return sum((t * t).sum() for t in found if t.is_floating_point()) + x.sum(), *found

        leaves = [t.requires_grad_() for t in (g.x, g.q, g.cell, g.of_systems)]
        torch.compile(loss, backend=backend, fullgraph=True)(*leaves)[0].backward()
    assert len(graphs) == 2 and sum(len(graph.nodes) for graph in graphs) > 8
    for node in (node for graph in graphs for node in graph.nodes):
        if node.op == "get_attr":
            raise AssertionError(f"a constant of the host, which would be copied in each call: {node.target}")
        assert getattr(node.target, "__name__", "").partition(".")[0] not in READS
        shape = getattr(node.meta.get("val"), "shape", ())
        assert all(isinstance(n, int) for n in shape), f"{node.target}: a size that depends on values"


# -- where a check waits, but not in a graph ------------------------------------------------------


def row_pointers(g: Given) -> torch.Tensor:
    pairs = g.pairs["neighbor_list"]
    return torch.searchsorted(pairs[0].contiguous(), torch.arange(N_ATOMS + 1, device=g.x.device).int())


def chain(g: Given) -> tuple[torch.Tensor, ...]:
    """A half list, with its pointers and shifts: each atom and the next one."""
    atoms = torch.arange(N_ATOMS + 1, dtype=torch.int32, device=g.x.device)
    pairs = torch.stack([atoms[:-2], atoms[1:-1]])
    return pairs, atoms.clamp(max=N_ATOMS - 1), pairs.new_zeros(N_ATOMS - 1, 3)


CHECKED: dict[str, Call] = {
    "half_to_full": lambda g: formats.half_to_full(*chain(g)),
    "full_to_half": lambda g: formats.full_to_half(
        g.pairs["neighbor_list"], row_pointers(g), g.pairs["neighbor_shifts"]
    ),
    "get_neighbor_matrix_from_neighbor_list": lambda g: formats.get_neighbor_matrix_from_neighbor_list(
        g.pairs["neighbor_list"], row_pointers(g), g.pairs["neighbor_shifts"], WIDTH
    ),
}


@by_name(CHECKED)
def test_checks_of_lists_do_not_wait_in_a_graph(name):
    first, other = on_gpu((given(0.0), given(1.0)))
    with pretended_gpu():
        CHECKED[name](first)
        with pytest.raises(HostReadError):
            events(lambda: CHECKED[name](first))
        with capturing(1):
            assert_no_wait((first, other), CHECKED[name])


# -- what tells ------------------------------------------------------------------------------------


def test_a_kernel_that_a_capture_would_load_is_found(gpu):
    first, other = gpu
    cases.LENNARD_JONES(first.x, first.cell, sigma=1.0, epsilon=0.1, **first.near)
    with pytest.raises(LoadError, match="pair_"), capturing(1):
        cases.LENNARD_JONES(other.x, other.cell, sigma=1.0, epsilon=0.1, **other.near, compute_virial=True)


READING: dict[str, Call] = {
    "item": lambda g: g.x.sum().item(),
    "bool": lambda g: bool(g.pbc.all()),
    "tolist": lambda g: g.idx.tolist(),
    "index": lambda g: range(100)[g.idx[0]],
    "cpu": lambda g: g.x.cpu(),
    "to": lambda g: g.x.to("cpu", torch.float32),
    "from the host": lambda g: torch.zeros(3).to(g.x.device),
    "constant": lambda g: torch.tensor([1.0, 2.0], device=g.x.device),
    "number as a constant": lambda g: torch.as_tensor(1.0, device=g.x.device),
    "tensors of both": lambda g: g.x[0] + torch.arange(3),
    "places on the host": lambda g: g.x[[0, 1]],
    "copy_": lambda g: g.of_systems.copy_(torch.zeros(N_SYSTEMS)),
    "equal": lambda g: torch.equal(g.x, g.x),
    "nonzero": lambda g: g.pbc.nonzero(),
    "mask": lambda g: g.pbc[g.pbc],
    "unique": lambda g: torch.unique(g.idx),
    "repeat_interleave": lambda g: g.x.repeat_interleave(g.idx, 0),
    "bincount": lambda g: torch.bincount(g.idx, minlength=100),
    "solver": lambda g: torch.linalg.inv(g.cell),
    "eigenvalues": lambda g: torch.linalg.eigvalsh(g.cell),
    "size of a range": lambda g: torch.arange(g.idx[0], device=g.x.device),
}

WAITING: dict[str, Call] = {
    "neighbor_list, checked": lambda g: neighbor_list(g.x, CUTOFF, g.cell, batch_idx=g.sorted_idx, max_neighbors=WIDTH),
    "neighbor_list, any width": lambda g: neighbor_list(g.x, CUTOFF, g.cell, batch_idx=g.sorted_idx, check=False),
    "neighbor_list, pairs": lambda g: neighbor_list(g.x, CUTOFF, check=False, return_neighbor_list=True),
    "VerletList": lambda g: VerletList(CUTOFF, 0.5)(g.x),
    "neighbors built": lambda g: cases.LENNARD_JONES(g.x, sigma=1.0, epsilon=0.1),
    "check": lambda g: cases.LENNARD_JONES(g.x, g.cell, sigma=1.0, epsilon=0.1, **g.near, check=True),
    "number of systems": lambda g: electrostatics.dsf_coulomb(
        g.x, g.q, CUTOFF, batch_idx=g.idx, neighbor_list=g.pairs["neighbor_list"]
    ),
    "alpha chosen": lambda g: electrostatics.ewald_summation(g.x, g.q, g.cell, miller_bounds=(2, 2, 2), **g.near),
    "k-vectors by length": lambda g: electrostatics.ewald_summation(g.x, g.q, g.cell, ALPHA, k_cutoff=2.0, **g.near),
    "k-vectors given": lambda g: electrostatics.ewald_summation(
        g.x, g.q, g.cell, ALPHA, miller_indices=g.idx[:9].view(3, 3), **g.near
    ),
    "mesh chosen": lambda g: electrostatics.particle_mesh_ewald(g.x, g.q, g.cell, ALPHA, mesh_spacing=0.5, **g.near),
    "elements": lambda g: dispersion.d3_dispersion(
        g.x, g.numbers, DAMPING, dispersion.D3Parameters.load(), g.cell, **g.near, **D3_RANGES
    ),
    "estimates": lambda g: electrostatics.estimate_ewald_parameters(g.x, g.cell, g.idx),
    "k-vectors prepared": lambda g: electrostatics.prepare_wave_vectors(g.cell, 2.0),
    "Miller indices": lambda g: electrostatics.generate_ewald_miller_indices(g.cell, 2.0),
    "check_full_list": lambda g: formats.check_full_list(g.pairs["neighbor_list"], row_pointers(g)),
    "systems of positions": lambda g: rebuild_detection.batch_neighbor_list_needs_rebuild(g.x, g.x, g.idx, 0.3),
    "systems of a spline": lambda g: spline.spline_spread(g.x, g.q, g.cell[0], MESH, 6, g.idx),
    "a list of the host": lambda g: electrostatics.ewald_real_space(g.x, g.q, g.cell, [ALPHA] * N_SYSTEMS, **g.near),
    "a number of the host": lambda g: electrostatics.ewald_real_space(g.x, g.q, g.cell, torch.tensor(ALPHA), **g.near),
    "tensor of the host": lambda g: electrostatics.ewald_real_space(
        g.x, g.q, g.cell, torch.full((N_SYSTEMS,), ALPHA), **g.near
    ),
    "periodicity of each system": lambda g: neighbor_list(
        *(g.x, CUTOFF, g.cell, [[True, False, True]] * N_SYSTEMS),
        batch_idx=g.sorted_idx,
        check=False,
        max_neighbors=WIDTH,
    ),
    "pairs of a matrix": lambda g: formats.get_neighbor_list_from_neighbor_matrix(g.matrix["neighbor_matrix"], g.idx),
}


REFUSED = {
    "neighbor_list, checked": "check=False",
    "neighbor_list, any width": "`max_neighbors`",
    "neighbor_list, pairs": "no list of pairs",
    "VerletList": "between replays",
    "neighbors built": "`max_neighbors`",
    "alpha chosen": "give neighbors and parameters",
    "k-vectors by length": "give neighbors and parameters",
    "mesh chosen": "give neighbors and parameters",
    "elements": "D3Parameters.states",
    "k-vectors prepared": "give neighbors and parameters",
    "estimates": "give neighbors and parameters",
    "check": "leave out `check`",
    "check_full_list": "check lists before",
    "pairs of a matrix": "give the matrix itself",
    "tensor of the host": "`alpha` would be copied",
}


@pytest.mark.filterwarnings("ignore")  # of parameters for what the pretended GPU has computed
@by_name(REFUSED)
def test_what_reads_is_refused_by_name_in_a_capture(name, gpu):
    """An error of the driver would end the capture, and torch does not recover from that."""
    with contextlib.suppress(ValueError):  # of checks: lists of the pretended GPU are not full
        WAITING[name](gpu[0])  # as users are told to, so that kernels are loaded
    with capturing(1), pytest.raises(ValuesNeededError, match=REFUSED[name]):
        events(lambda: WAITING[name](gpu[0]))


@by_name(["a list of the host", "a number of the host", "periodicity of each system"])
def test_numbers_of_the_host_are_made_in_a_capture(name, gpu):
    """Since they cannot be copied there."""
    WAITING[name](gpu[0])
    with capturing(1):
        assert events(lambda: WAITING[name](gpu[0]))


MADE = ([[0.0, -0.0, 2.5], [2.5, np.nan, np.nan]], [True] * 4 + [False], [3, 3, 7], 1.5, [])


@pytest.mark.parametrize("values", MADE)
def test_what_is_made_in_a_capture_is_what_would_be_copied(values, gpu):
    for numbers in (np.asarray(values), np.asarray(values).T):
        with capturing(1):
            found = on_host(checks.made_on(gpu[0].x.device, numbers))
        expected = torch.as_tensor(numbers)
        assert found.dtype == expected.dtype and found.numpy().tobytes() == expected.numpy().tobytes()


def test_fake_tensors_of_a_gpu_need_none():
    """Torch without CUDA cannot be asked for captures."""
    with FakeTensorMode(shape_env=ShapeEnv()):
        positions = torch.empty(9, 3, device="cuda")
        pairs, pointers = neighbor_list(positions, CUTOFF, return_neighbor_list=True)
        assert not may_read(positions, wait=True)
    assert pairs.shape[0] == 2 and pointers.shape == (10,)


@by_name(READING | WAITING)
def test_what_reads_is_found(name, gpu):
    with pytest.raises(HostReadError):
        events(lambda: (READING | WAITING)[name](gpu[0]))


NOT_READING: dict[str, Call] = {
    "a number on the host": lambda g: g.x * torch.tensor(3.0),
    "a mask with a number": lambda g: g.of_systems.clone().__setitem__(g.of_systems > 0.5, 1.0),
    "an entry": lambda g: g.of_systems.clone().__setitem__(0, 1.0),
    "one_hot": lambda g: torch.nn.functional.one_hot(g.idx.long(), N_SYSTEMS),
    "repeat_interleave": lambda g: g.x.repeat_interleave(g.idx, 0, output_size=int(ATOMS.batch_idx.sum())),
    "without a check": lambda g: torch.linalg.inv_ex(g.cell),
    "a number of NumPy": lambda g: electrostatics.ewald_reciprocal_space(
        g.x, g.q, g.cell, None, np.float64(ALPHA), g.idx, miller_bounds=(1, 1, 1)
    ),
    "parameters of the host": lambda g: (
        cases.LENNARD_JONES(g.x, g.cell, sigma=torch.tensor(1.0), epsilon=torch.tensor(0.1), **g.near),
        electrostatics.dsf_coulomb(
            *(g.x, g.q, CUTOFF, torch.tensor(ALPHA)),
            batch_idx=g.idx,
            num_systems=N_SYSTEMS,
            neighbor_list=g.pairs["neighbor_list"],
        ),
    ),
    "periodicity as a list": lambda g: neighbor_list(
        g.x, CUTOFF, g.cell[0], [True, True, False], check=False, max_neighbors=WIDTH
    ),
    "made there": lambda g: torch.zeros(3, device=g.x.device) + g.x.new_zeros(3) + torch.ones_like(g.x[0]),
}


@by_name(NOT_READING)
def test_what_does_not_read_is_allowed(name, gpu):
    assert events(lambda: NOT_READING[name](gpu[0]))


def test_a_number_of_the_host_is_no_part_of_a_recorded_step(monkeypatch):
    """It would be an argument of a kernel, whose value a captured graph keeps."""
    number, beside = torch.tensor(3.4), torch.ones(2, 3, device="meta")
    assert checks.as_real("sigma", number, beside).is_meta
    monkeypatch.setattr(checks, "current_recorder", object)
    with pytest.raises(ValueError, match="`sigma`"):
        checks.as_real("sigma", number, beside)
