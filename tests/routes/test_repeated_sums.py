"""Sums that are called again and again, which are run by a plan: the same bits, errors and derivatives as without."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nvalchemiops.locks import set_within
from nvalchemiops.notices import AccuracyWarning
from nvalchemiops.torch.interactions.electrostatics import (
    coulomb_energy,
    ewald_real_space,
    ewald_reciprocal_space,
    ewald_summation,
    particle_mesh_ewald,
)
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.runtime import engine, tables
from nvalchemiops.torch.runtime.recorder import current_recorder
from tests.support.plans import ordinary, plan_of, plans_of_calls
from tests.support.repeated import (
    F64,
    NAMES,
    REQUESTS,
    SUMS,
    arguments,
    assert_as_ordinary,
    gradients,
    moved,
    same_bits,
)


@pytest.mark.parametrize("as_matrix", [False, True], ids=["list", "matrix"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("name", SUMS)
def test_bits_are_those_of_the_ordinary_way(name, request_, dtype, as_matrix):
    """Values and memory of positions, charges and neighbors differ in each call."""
    (function, options), asked = SUMS[name], REQUESTS[request_]
    x, q, cell, near = arguments(dtype, as_matrix)
    for step in range(6):
        y, p, here = moved(x, q, near, step)

        def call(y=y, p=p, here=here):
            return function(y, p, cell.clone(), 0.9, **here, **options, **asked)

        same_bits(call(), ordinary(call))
    assert plan_of().steps


@pytest.mark.parametrize("function", [ewald_summation, particle_mesh_ewald, ewald_real_space])
def test_the_layout_of_results_is_the_same_in_each_call(function):
    x, q, cell, near = arguments()
    asked = {"compute_charge_gradients": True, "compute_dipole_gradients": True, "compute_quadrupole_gradients": True}

    def call():
        dyads = x.unsqueeze(2) * x.unsqueeze(1)
        dyads = dyads - dyads.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(3)
        return function(x, q, cell, 0.9, **near, dipoles=0.1 * x, quadrupoles=0.01 * dyads, **asked)

    for results in (ordinary(call), call(), call(), call()):
        assert all(result.is_contiguous() for result in results)
        assert len({result.untyped_storage().data_ptr() for result in results}) == 4
    assert plan_of().steps


@pytest.mark.parametrize("inputs", [(0,), (1,), (0, 1)], ids=["positions", "charges", "both"])
@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_those_of_the_ordinary_way(name, inputs):
    """First and second order, one weight for all atoms and different ones."""
    function, options = SUMS[name]
    x, q, cell, near = arguments()
    weights = torch.linspace(0.5, 1.5, 20, dtype=F64)
    for step in range(5):
        *given, here = moved(x, q, near, step)

        def energies(*leaves, given=given, here=here):
            y, p = (leaves[inputs.index(n)] if n in inputs else given[n] for n in (0, 1))
            return function(y, p, cell, 0.9, **here, **options)

        for w, order in ((torch.ones(20, dtype=F64), 1), (weights, 1), (weights, 2)):
            assert_as_ordinary(gradients, energies, [given[n] for n in inputs], w, order)
    plan_of()


@pytest.mark.parametrize("name", SUMS)
def test_one_plan_for_lists_of_any_length(name):
    """As they are made anew while atoms move."""
    (function, options), lengths = SUMS[name], set()
    x, q, cell, _ = arguments()
    for step in range(8):
        y, p, near = moved(x, q, {}, step)
        near = dict(zip(NAMES[False], neighbor_list(y, 2.7 + 0.1 * step, cell, return_neighbor_list=True)))
        lengths.add(near["neighbor_ptr"][-1].item())

        def call(y=y, p=p, near=near):
            return function(y, p, cell, 0.9, **near, **options, compute_forces=True)

        same_bits(call(), ordinary(call))
    assert plan_of().steps and len(lengths) == 8 and tables.everywhere.replayed == 6
    for wrong in (near["neighbor_shifts"][:-1], near["neighbor_shifts"][:, :2].contiguous()):
        with pytest.raises(ValueError, match="neighbor_shifts"):
            function(y, p, cell, 0.9, **{**near, "neighbor_shifts": wrong}, **options)
    longer = {name: t[..., :-1].contiguous() if name == "neighbor_list" else t for name, t in near.items()}
    longer["neighbor_shifts"] = near["neighbor_shifts"][:-1].contiguous()
    with pytest.raises(ValueError, match="neighbor_ptr"):  # which the kernel compares with the length
        function(y, p, cell, 0.9, **longer, **options, compute_forces=True)
    same_bits(call(), ordinary(call))
    plan_of()


@pytest.mark.parametrize("half_list", [False, True])
def test_lists_without_pointers(half_list):
    """These follow from all pairs: a plan is for one length."""
    x, q, cell, _ = arguments()
    for step in range(6):
        pairs, _, shifts = neighbor_list(
            x, 2.7 + 0.2 * (step % 2), cell, return_neighbor_list=True, half_fill=half_list
        )
        y, p, _ = moved(x, q, {}, step)

        def call(y=y, p=p, pairs=pairs, shifts=shifts):
            listed = {"neighbor_list": pairs, "neighbor_shifts": shifts, "half_list": half_list}
            return ewald_summation(y, p, cell, 0.9, **listed, k_cutoff=6.0, compute_forces=True)

        same_bits(call(), ordinary(call))
        pairs.zero_(), shifts.zero_()
    plan_of(count=2)
    pairs[1, 0] = 100
    with pytest.raises(ValueError, match="neighbor"):
        call()


def test_a_busy_machine_has_plans_too(monkeypatch):
    """A plan without results, since another thread uses it, is left to the ordinary way."""
    x, q, cell, near = arguments()
    monkeypatch.setattr("nvalchemiops.torch.runtime.openmp.core.is_crowded", lambda: True)

    def call():
        return ewald_summation(x, q, cell, 0.9, k_cutoff=6.0, **near)

    for _ in range(4):
        expected = call()
    with plan_of()._lock:
        same_bits(call(), expected)


def test_checkpoints_save_the_same_each_time():
    x, q, cell, near = arguments()

    def energy(y):
        return ewald_summation(y, q, cell, 0.9, k_cutoff=6.0, **near).sum()

    for _ in range(3):
        y = x.clone().requires_grad_()
        twice = checkpoint(energy, y, use_reentrant=False) + checkpoint(energy, y, use_reentrant=False)
        (gradient,) = torch.autograd.grad(twice, y)
    z = x.clone().requires_grad_()
    torch.testing.assert_close(gradient, 2.0 * torch.autograd.grad(energy(z), z)[0])


def test_errors_are_those_of_the_ordinary_way():
    """What kernels notice in values; afterwards the plan works on."""
    x, q, cell, near = arguments()
    for _ in range(4):
        expected = ewald_summation(x, q, cell, 0.9, k_cutoff=6.0, **near)
    plan_of()
    pairs = near["neighbor_list"].clone()
    pairs[1, 0] = 100
    for _ in range(2):
        with pytest.raises(ValueError, match="neighbor"):
            ewald_summation(x, q, cell, 0.9, k_cutoff=6.0, **{**near, "neighbor_list": pairs})
        same_bits(ewald_summation(x, q, cell, 0.9, k_cutoff=6.0, **near), expected)
    with pytest.raises(ValueError, match="cell"):
        ewald_summation(x, q, 0.0 * cell, 0.9, k_cutoff=6.0, **near)
    for wrong in (cell.to(torch.bfloat16), cell.to_sparse(), cell.to(torch.complex128).conj()):
        with pytest.raises(TypeError, match="cell"):
            ewald_summation(x, q, wrong, 0.9, k_cutoff=6.0, **near)


def random_sources(x, n_channels, highest, step):
    """Charges, dipoles and quadrupoles up to some order, other ones in each step."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = (len(x),) if n_channels is None else (len(x), n_channels)
    q, mu, quad = (torch.randn(*shape, *more, generator=generator, dtype=x.dtype) for more in ((), (3,), (3, 3)))
    quad = (
        quad + quad.mT - 2.0 * quad.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * torch.eye(3, dtype=x.dtype)
    )
    return dict(zip(("charges", "dipoles", "quadrupoles")[: highest + 1], (q, mu, quad)))


def latent(x, *, cell, near, **asked):
    return ewald_reciprocal_space(x, cell=cell, k_vectors=None, alpha=0.9, k_cutoff=6.0, self_interaction=True, **asked)


def whole(x, *, cell, near, **asked):
    return ewald_summation(x, cell=cell, alpha=0.9, k_cutoff=6.0, **near, **asked)


def on_a_mesh(x, *, cell, near, **asked):
    options = {"mesh_dimensions": (12, 10, 9), "spline_order": 6}
    return particle_mesh_ewald(x, cell=cell, alpha=0.9, **options, **near, **asked)


@pytest.mark.parametrize("function", [latent, whole, on_a_mesh])
@pytest.mark.parametrize(("n_channels", "highest"), [(3, 0), (None, 1), (3, 2)])
def test_sums_with_sources_and_channels_have_plans(function, n_channels, highest):
    """The same bits as without; first derivatives, and second ones, by all sources."""
    x, q, cell, near = arguments()
    names = ("compute_charge_gradients", "compute_dipole_gradients", "compute_quadrupole_gradients")
    asked = {"compute_forces": True, **dict.fromkeys(names[: highest + 1], True)}
    for step in range(4):
        y, _, here = moved(x, q, near, step)
        given = random_sources(x, n_channels, highest, step)

        def call(y=y, given=given, here=here):
            return function(y, **given, cell=cell, near=here, **asked)

        same_bits(call(), ordinary(call))
    plan_of()

    def energies(y, *sources):
        return function(y, **dict(zip(given, sources)), cell=cell, near=here, energy_reduction="system")

    for step in range(4):
        here = moved(x, q, near, step)[2]
        given = random_sources(x, n_channels, highest, step)
        for order in (1, 2):
            assert_as_ordinary(gradients, energies, [y, *given.values()], 1.0, order, tolerance=1e-11)
    plan_of(count=2)


def test_a_trace_is_noticed_by_a_plan():
    """Quadrupoles that warn in a later call do so there, and their trace is dropped."""
    x, _, cell, near = arguments()
    given = random_sources(x, 2, 2, 0)
    expected = [latent(x, **given, cell=cell, near=near) for _ in range(4)][-1]
    plan_of()
    given["quadrupoles"] = given["quadrupoles"] + 0.1 * torch.eye(3, dtype=F64)
    with pytest.warns(AccuracyWarning, match="trace"):
        found = latent(x, **given, cell=cell, near=near)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_widths_are_fixed_in_a_plan(as_tensor):
    """A number, or a tensor, which has another plan where its values change."""
    x, q, cell, near = arguments()
    for sigma in (0.2, 0.3):
        widths = torch.linspace(sigma, 0.35, 20, dtype=F64) if as_tensor else sigma
        for step in range(4):
            y, _, here = moved(x, q, near, step)
            given = random_sources(x, None, 1, step)

            def call(y=y, given=given, here=here, widths=widths):
                return whole(y, **given, widths=widths, cell=cell, near=here, compute_forces=True, compute_virial=True)

            same_bits(call(), ordinary(call))
    plan_of(count=2)
    widths = torch.full((20,), 0.3, dtype=F64, requires_grad=True)
    for _ in range(4):
        (gradient,) = torch.autograd.grad(whole(x, **given, widths=widths, cell=cell, near=near).sum(), widths)
    assert (gradient != 0.0).all()
    plan_of(count=2)


def test_gradients_by_sources_that_are_not_there():
    """Those by charges have a plan; those by dipoles are refused, as without it."""
    x, q, cell, near = arguments()
    for _ in range(4):
        ewald_summation(x, q, cell, 0.9, k_cutoff=6.0, compute_charge_gradients=True, **near)
    plan_of()
    with pytest.raises(ValueError, match="compute_dipole_gradients"):
        ewald_summation(x, q, cell, 0.9, k_cutoff=6.0, compute_dipole_gradients=True, **near)


def test_contexts_in_which_a_plan_is_made_and_used():
    """Inference mode, no gradients; modes that are to see the operations take the ordinary way."""
    x, q, cell, near = arguments()

    def call(x=x):
        return ewald_summation(x, q, cell, 0.9, k_cutoff=6.0, energy_reduction="system", **near)

    expected = ordinary(call)
    with torch.inference_mode():
        for _ in range(4):
            same_bits(call(), expected)
    plan_of()
    with torch.no_grad():
        same_bits(call(), expected)
    same_bits(call(), expected)
    with torch.profiler.profile() as profile:
        call()
    assert any("fourier_gather" in event.key for event in profile.key_averages())
    y = x.clone().requires_grad_()
    hessian = torch.autograd.functional.hessian(lambda y: call(y).sum(), y)
    torch.testing.assert_close(hessian, torch.func.hessian(lambda y: call(y).sum())(x))


def test_threads_share_a_plan():
    """One at a time runs it; others take the ordinary way."""
    x, q, cell, near = arguments()
    inputs = [moved(x, q, near, step) for step in range(4)]

    def call(x, q, near):
        return ewald_summation(x, q, cell, 0.9, k_cutoff=6.0, compute_forces=True, **near)

    expected = [ordinary(lambda given=given: call(*given)) for given in inputs]
    wrong = []

    def work(number):
        for _ in range(100):
            found = call(*inputs[number])
            if not all(torch.equal(a, b) for a, b in zip(found, expected[number])):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong and current_recorder() is None
    assert plans_of_calls()


def test_plans_are_kept_up_to_a_limit_of_memory():
    """Those that ran longest ago go first; the last one always stays."""
    given = {n_atoms: arguments(n_atoms=n_atoms) for n_atoms in range(10, 30)}
    table = tables.Plans(most_bytes=0)
    with set_within(tables._thread, "table", table):
        for n_atoms in (20, 12, 14, 12):
            x, q, cell, near = given[n_atoms]
            for _ in range(3):
                ewald_summation(x, q, cell, 0.9, k_cutoff=3.0, **near)
    # with the one for any cell, since the second call with 12 atoms finds no plan of its cell
    assert table.recorded == 5 and len(table.entries) == 1
    table.most_bytes = tables.MOST_BYTES
    with set_within(tables._thread, "table", table):
        for _ in range(2):
            for x, q, cell, near in given.values():
                for _ in range(tables.PAID):
                    ewald_summation(x, q, cell, 0.9, k_cutoff=3.0, **near)
    # two more for any cell, of 20 and 14 atoms, whose plans were dropped
    assert table.recorded == 5 + 19 + 2 and len(table.entries) == 20 + 2 and not plans_of_calls()


def test_few_plans_where_they_do_not_pay():
    """Each cell is used twice: after some plans for nothing there are no more. A cell that stays gets one.

    Replays of another operation do not pay for them.
    """
    x, q, cell, near = arguments()

    def call(scale):
        ewald_summation(x, q, scale * cell, 0.9, miller_bounds=(2, 2, 2), **near)

    for step in range(30):
        for _ in range(2):
            call(1.0 + 1e-3 * step)
        for _ in range(tables.PAID):
            coulomb_energy(x, q, cell, 3.0, **near)
    # one for any cell is of use: for the first call of each cell, then for both
    before = tables.everywhere.replayed
    assert tables.everywhere.recorded == 8 + 1 + 1 and before == 30 * tables.PAID - 2 + 6 + 2 * 22
    for _ in range(tables.PAID + 1):
        call(1.0)
    assert tables.everywhere.replayed == before + tables.PAID + 1
    for _ in range(tables.PAID + 2):
        call(2.0)
    assert tables.everywhere.recorded == 11 and "sum: plan (replayed)" in engine.explain()
