"""No operator waits for a GPU, or asks it for a value, if it is given what decides sizes: proved without a GPU.

Calls, first and second derivatives, on tensors that pretend to be on a GPU (`tests.support.on_device`): reading a
value is an error there. Each call does the same operations and launches with the same shapes for other values, so a
captured graph replays. Compiled graphs have no operation that reads. The table of docs/compile.md says the same of each
operator.
"""

import functools
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import warp as wp
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from nvalchemiops.layout import GPU, replaced_layout
from nvalchemiops.locks import Kept
from nvalchemiops.torch import plans, segment_ops, spline
from nvalchemiops.torch.autograd import arrays, tapes, warp_stream_from_torch
from nvalchemiops.torch.interactions import dispersion, electrostatics, lj, pair
from nvalchemiops.torch.launch import launch_adjoint
from nvalchemiops.torch.neighbors import VerletList, formats, neighbor_list, rebuild_detection, rows
from nvalchemiops.torch.operators.lattice import _geometry
from nvalchemiops.torch.runtime import cache, graphs
from nvalchemiops.torch.systems import Neighbors, System
from tests.support import cases
from tests.support.comparing import close_to_largest, weighted
from tests.support.gpu import waiting_is_an_error
from tests.support.on_device import (
    READS,
    HostReadError,
    WarpStream,
    check_launch_stream,
    events,
    on_gpu,
    on_stream,
    pretended_gpu,
)
from tests.support.systems import in_form, neighbors_of

CUTOFF, ALPHA, MESH, WIDTH = cases.CUTOFF, 0.7, (8, 9, 10), 24
ATOMS = cases.MIXED
SORTED = ATOMS._replace(batch_idx=ATOMS.batch_idx.sort().values)  # as the neighbor search asks for
N_ATOMS, N_SYSTEMS = len(ATOMS.charges), len(ATOMS.cell)


class Given(NamedTuple):
    """Arguments of calls, on the GPU."""

    x: torch.Tensor
    q: torch.Tensor
    cell: torch.Tensor
    of_systems: torch.Tensor  # (n_systems,)
    idx: torch.Tensor
    sorted_idx: torch.Tensor
    pbc: torch.Tensor
    numbers: torch.Tensor
    pairs: dict[str, torch.Tensor]
    matrix: dict[str, torch.Tensor]
    excluded: torch.Tensor
    factors: torch.Tensor
    prepared: dict[str, Any]

    @property
    def near(self) -> dict[str, torch.Tensor]:
        return {**self.pairs, "batch_idx": self.idx}

    @property
    def in_matrix(self) -> dict[str, torch.Tensor]:
        return {**self.matrix, "batch_idx": self.idx}


@functools.cache
def given(step: float) -> Given:
    """Values on the host; for any step the same shapes."""
    x, q, cell, idx = ATOMS
    shift = torch.sin(9.0 * torch.arange(x.numel(), dtype=x.dtype)).view_as(x)
    near = neighbors_of(ATOMS, CUTOFF)
    matrix = in_form({**near}, N_ATOMS, "matrix", "fill_value")
    pairs = {name: value.roll(round(step), -1 - (value.ndim > 1)) for name, value in near.items()}
    alpha = torch.full((N_SYSTEMS,), ALPHA, dtype=torch.float64)
    prepared = {
        "k-vectors": electrostatics.prepare_wave_vectors(cell, 2.0),
        "mesh": electrostatics.prepare_mesh(cell, alpha, MESH, 5),
        "states": dispersion.D3Parameters.load().states([6, 8]),
    }
    return Given(
        x + step * shift,
        q + step * shift[:, 0],
        cell + 0.1 * step * torch.eye(3, dtype=torch.float64),
        0.5 + 0.1 * step + 0.01 * torch.arange(N_SYSTEMS, dtype=torch.float64),
        idx.roll(round(step)),
        SORTED.batch_idx,
        torch.tensor([True, step == 0.0, True]),
        torch.where(q + step > 0, 6, 8).int(),
        pairs,
        {name: value for name, value in matrix.items() if isinstance(value, torch.Tensor)},
        torch.tensor([[0, 1], [2, 3 + round(step)]]),
        torch.tensor([0.0, 0.5 + step], dtype=torch.float64),
        prepared,
    )


Call = Callable[[Given], Any]
ALL = {"compute_forces": True, "compute_virial": True}
EVERYTHING = {**ALL, "compute_charge_gradients": True}
FACTORS = pair.PairPotential("c*exp(-a*r) + q1*q2*erf(r)/r", ("q",), (), ("c", "a"), cutoff=CUTOFF, r_switch=2.2)
DAMPING = dispersion.damping_parameters("pbe", "bj")
ZERO_DAMPING = dispersion.damping_parameters("pbe", "zero")
D3_RANGES = {"cutoff": CUTOFF, "coordination_cutoff": CUTOFF, "smoothing": 1.0}


def channels(g: Given) -> torch.Tensor:
    return torch.stack([g.q, g.q.cos()], 1)


def tables(g: Given) -> dict[str, torch.Tensor]:
    table = torch.outer(g.q[:2], g.q[:2])
    return {"c": table, "a": table.exp(), "species": (g.numbers == 8).int()}


def memory(g: Given, n: str = "") -> dict[str, torch.Tensor]:
    like = {"dtype": torch.int32, "device": g.x.device}
    shapes = {"neighbor_matrix": (WIDTH,), "num_neighbors": (), "neighbor_matrix_shifts": (WIDTH, 3)}
    return {name + n: torch.empty(N_ATOMS, *shape, **like) for name, shape in shapes.items()}


def module(g: Given, made: Any) -> Any:
    """A module that is prepared as another one was on the host."""
    made.alpha = g.of_systems.new_full((N_SYSTEMS,), ALPHA)
    if isinstance(made, electrostatics.EwaldSummation):
        made.k_cutoff, made._prepared = g.of_systems.new_full((N_SYSTEMS,), 2.0), g.prepared["k-vectors"]
    else:
        made._prepared = g.prepared["mesh"]
    return made


SUMS: dict[str, Call] = {
    "ewald_summation": lambda g: electrostatics.ewald_summation(
        g.x, g.q, g.cell, ALPHA, miller_bounds=(2, 3, 2), **g.near, **EVERYTHING
    ),
    "ewald_summation, prepared, channels, exclusions, slab": lambda g: electrostatics.ewald_summation(
        *(g.x, channels(g), g.cell, g.of_systems),
        **{"miller_indices": g.prepared["k-vectors"], "pbc": g.pbc, "slab_correction": True},
        **{"exclusions": g.excluded, "exclusion_factors": g.factors},
        **{**g.in_matrix, **EVERYTHING},
    ),
    "ewald_summation of one system": lambda g: electrostatics.ewald_summation(
        g.x, g.q, g.cell[:1], ALPHA, miller_bounds=(2, 3, 2), **g.matrix, **EVERYTHING
    ),
    "ewald_summation, hybrid": lambda g: electrostatics.ewald_summation(
        g.x, g.q, g.cell, ALPHA, miller_bounds=(2, 3, 2), hybrid_forces=True, **g.near, compute_forces=True
    )[0],
    "ewald_summation of a power law": lambda g: electrostatics.ewald_summation(
        *(g.x, g.q, g.cell, ALPHA), miller_bounds=(2, 3, 2), potential=electrostatics.power_law(6), **g.near
    ),
    "ewald_summation of Gaussians": lambda g: electrostatics.ewald_summation(
        g.x, g.q, g.cell, ALPHA, miller_bounds=(2, 3, 2), widths=0.3, **g.near
    ),
    "EwaldSummation": lambda g: module(g, electrostatics.EwaldSummation(ALPHA, 2.0, CUTOFF))(
        g.x, g.q, g.cell, **g.near
    ),
    "particle_mesh_ewald": lambda g: electrostatics.particle_mesh_ewald(
        g.x, g.q, g.cell, ALPHA, None, MESH, 6, **g.near, **EVERYTHING
    ),
    "particle_mesh_ewald of one system, channels": lambda g: electrostatics.particle_mesh_ewald(
        g.x, channels(g), g.cell[:1], g.of_systems[:1], None, MESH, 6, **g.matrix, **EVERYTHING
    ),
    "ParticleMeshEwald": lambda g: module(g, electrostatics.ParticleMeshEwald(ALPHA, MESH, 5, CUTOFF))(
        g.x, g.q, g.cell.detach(), **g.near
    ),
    "ewald_real_space": lambda g: electrostatics.ewald_real_space(g.x, g.q, g.cell, ALPHA, **g.near, **EVERYTHING),
    "ewald_reciprocal_space": lambda g: electrostatics.ewald_reciprocal_space(
        g.x, g.q, g.cell, None, ALPHA, g.idx, miller_bounds=(2, 3, 2), **EVERYTHING
    ),
    "pme_reciprocal_space": lambda g: electrostatics.pme_reciprocal_space(
        g.x, g.q, g.cell, ALPHA, MESH, None, 6, g.idx, **EVERYTHING
    ),
    "compute_slab_correction": lambda g: electrostatics.compute_slab_correction(
        g.x, g.q, g.cell, g.pbc, g.idx, **EVERYTHING
    ),
}

PAIRS: dict[str, Call] = {
    "PairPotential": lambda g: cases.LENNARD_JONES(
        g.x, g.cell, sigma=g.q.abs(), epsilon=0.2, **g.near, **ALL, compute_gradients=["sigma"]
    ),
    "PairPotential for a system": lambda g: tuple(
        cases.LENNARD_JONES(
            System(g.x, None, g.cell, g.idx),
            Neighbors.from_list(g.pairs["neighbor_list"], g.pairs["neighbor_shifts"]),
            sigma=1.7,
            epsilon=0.2,
            compute_forces=True,
        )
    ),
    "PairPotential with tables, exclusions, pbc": lambda g: FACTORS(
        *(g.x, g.cell),
        **{"q": g.q, "exclusions": g.excluded, "exclusion_factors": g.factors, "pbc": g.pbc},
        **{**tables(g), **g.in_matrix, **ALL, "energy_reduction": "system"},
    ),
    "PairPotential of a half list": lambda g: cases.LENNARD_JONES(
        g.x, g.cell, sigma=1.7, epsilon=0.2, **g.near, **ALL, half_list=True
    ),
    "PairPotential of a half matrix": lambda g: cases.LENNARD_JONES(
        g.x, g.cell, sigma=1.7, epsilon=0.2, **g.in_matrix, **ALL, half_list=True
    ),
    "PairPotential without a cell": lambda g: cases.LENNARD_JONES(
        *(g.x,), sigma=1.7, epsilon=g.q.abs(), neighbor_list=g.pairs["neighbor_list"], batch_idx=g.idx,
        num_systems=N_SYSTEMS, **ALL,
    ),
    "coulomb_energy_forces": lambda g: electrostatics.coulomb_energy_forces(g.x, g.q, g.cell, CUTOFF, ALPHA, **g.near),
    "dsf_coulomb": lambda g: electrostatics.dsf_coulomb(
        g.x, g.q, CUTOFF, g.of_systems, g.cell, g.idx, g.pairs["neighbor_list"],
        unit_shifts=g.pairs["neighbor_shifts"], compute_virial=True,
    ),
    "lj_energy_forces_virial": lambda g: lj.lj_energy_forces_virial(g.x, 1.7, 0.2, CUTOFF, g.cell, **g.in_matrix),
}  # fmt: skip

DISPERSION: dict[str, Call] = {
    "d3_dispersion": lambda g: dispersion.d3_dispersion(
        g.x, g.numbers, DAMPING, g.prepared["states"], g.cell, **g.near, **D3_RANGES, **ALL
    ),
    "d3_dispersion, zero damping, no cell": lambda g: dispersion.d3_dispersion(
        g.x, g.numbers, ZERO_DAMPING, g.prepared["states"], batch_idx=g.idx, num_systems=N_SYSTEMS,
        neighbor_list=g.pairs["neighbor_list"], **D3_RANGES, **ALL,
    ),
    "dftd3": lambda g: dispersion.dftd3(
        g.x, g.numbers, a1=0.4, a2=4.8, s8=0.8, d3_params=g.prepared["states"], cell=g.cell, batch_idx=g.idx,
        neighbor_list=g.pairs["neighbor_list"], unit_shifts=g.pairs["neighbor_shifts"], compute_virial=True,
    ),
}  # fmt: skip
# the three-body term has first derivatives only
THREE_BODY: dict[str, Call] = {
    "d3_dispersion with triples": lambda g: dispersion.d3_dispersion(
        g.x, g.numbers, DAMPING, g.prepared["states"], g.cell, **g.near, **D3_RANGES, s9=1.0, three_body_cutoff=CUTOFF
    ),
}

SPLINES: dict[str, Call] = {
    "spline_spread": lambda g: spline.spline_spread(g.x, g.q, g.cell, MESH, 6, g.idx),
    "spline_spread_channels": lambda g: spline.spline_spread_channels(g.x, channels(g), g.cell, MESH, 6, g.idx),
    "spline_gather": lambda g: spline.spline_gather(g.x, field(g), g.cell, 6, g.idx),
    "spline_gather_channels": lambda g: spline.spline_gather_channels(
        g.x, torch.stack([field(g)] * 2, 1), g.cell, 6, g.idx
    ),
    "spline_gather_vec3": lambda g: spline.spline_gather_vec3(
        g.x, g.q, torch.stack([field(g)] * 3, -1), g.cell, 6, g.idx
    ),
    "spline_gather_with_force": lambda g: spline.spline_gather_with_force(g.x, g.q, field(g), g.cell, 6, g.idx),
    "spline_gather_gradient": lambda g: spline.spline_gather_gradient(g.x, g.q, field(g), g.cell, 6, g.idx),
    "spline_spread with one cell for all": lambda g: spline.spline_spread(
        g.x, g.q, g.cell[0], MESH, 6, g.idx, num_systems=N_SYSTEMS
    ),
    "spline_spread of one system": lambda g: spline.spline_spread(g.x, g.q, g.cell[0], MESH, 6),
}


def field(g: Given) -> torch.Tensor:
    points = torch.arange(math.prod(MESH), dtype=torch.float64, device=g.x.device)
    return (g.of_systems[:, None] * points).sin().view(N_SYSTEMS, *MESH)


SEGMENTS: dict[str, Call] = {
    "segmented_max": lambda g: segment_ops.segmented_max(g.x, g.idx, N_SYSTEMS),
    "segmented_mean": lambda g: segment_ops.segmented_mean(g.x, g.idx, N_SYSTEMS),
    "segmented_min": lambda g: segment_ops.segmented_min(g.x, g.idx, N_SYSTEMS),
    "segmented_rms_norm": lambda g: segment_ops.segmented_rms_norm(g.x, g.idx, N_SYSTEMS),
    "segmented_sum": lambda g: segment_ops.segmented_sum(g.x, g.idx, N_SYSTEMS),
    "segmented_dot": lambda g: segment_ops.segmented_dot(g.x, g.x, g.idx, N_SYSTEMS),
    "segmented_mul": lambda g: segment_ops.segmented_mul(g.x, g.of_systems, g.idx, N_SYSTEMS),
    "segmented_matvec": lambda g: segment_ops.segmented_matvec(g.x, g.cell, g.idx, N_SYSTEMS),
}

GEOMETRY: dict[str, Call] = {
    "list_geometry": lambda g: formats.list_geometry(
        g.x, g.pairs["neighbor_list"], g.pairs["neighbor_shifts"], g.cell, g.idx
    ),
    "matrix_geometry": lambda g: formats.matrix_geometry(
        g.x, g.matrix["neighbor_matrix"], None, g.matrix["neighbor_matrix_shifts"], g.cell, g.idx
    ),
}

DIFFERENTIABLE = SUMS | PAIRS | DISPERSION | SPLINES | SEGMENTS | GEOMETRY


def dual(g: Given, **options: Any) -> Any:
    return neighbor_list(
        g.x, CUTOFF, g.cell, cutoff2=2.0, batch_idx=g.sorted_idx, check=False, **memory(g, "1"), **memory(g, "2"),
        **options,
    )  # fmt: skip


LISTS: dict[str, Call] = {
    "neighbor_list": lambda g: neighbor_list(
        g.x, CUTOFF, g.cell, g.pbc, g.sorted_idx, check=False, **memory(g)
    ),
    "neighbor_list, max_neighbors, distances, vectors": lambda g: neighbor_list(
        g.x, CUTOFF, g.cell, batch_idx=g.sorted_idx, check=False, max_neighbors=WIDTH, half_fill=True,
        return_distances=True, return_vectors=True,
    ),
    "neighbor_list, rebuild_flags": lambda g: neighbor_list(
        g.x, CUTOFF, g.cell, batch_idx=g.sorted_idx, check=False, rebuild_flags=g.of_systems > 0.51, **memory(g)
    ),
    "neighbor_list, batch_ptr, no cell": lambda g: neighbor_list(
        g.x, CUTOFF, batch_ptr=torch.arange(N_SYSTEMS + 1, device=g.x.device).int() * 3, check=False,
        max_neighbors=WIDTH,
    ),
    "neighbor_list, target_indices": lambda g: neighbor_list(
        g.x, CUTOFF, g.cell[:1], target_indices=g.idx[:4], check=False, max_neighbors=WIDTH
    ),
    "neighbor_list, two cutoffs": dual,
    "neighbor_list, nearest": lambda g: neighbor_list(
        g.x, CUTOFF, g.cell, batch_idx=g.sorted_idx, nearest=5, ties="index", check=False, return_distances=True
    ),
    "neighbor_list, nearest of either atom": lambda g: neighbor_list(
        g.x, CUTOFF, g.cell, batch_idx=g.sorted_idx, nearest=5, symmetric=True, check=False, max_neighbors=WIDTH
    ),
    "neighbor_list, naive": lambda g: neighbor_list(g.x, CUTOFF, method="naive", check=False, max_neighbors=WIDTH),
    "neighbor_list, cell list": lambda g: neighbor_list(
        g.x, CUTOFF, g.cell, batch_idx=g.sorted_idx, method="batch_cell_list", check=False, max_neighbors=WIDTH
    ),
    "batch_neighbor_list_needs_rebuild": lambda g: rebuild_detection.batch_neighbor_list_needs_rebuild(
        g.x + 0.1, g.x, g.idx, 0.3, num_systems=N_SYSTEMS
    ),
    "neighbor_list_needs_rebuild": lambda g: rebuild_detection.neighbor_list_needs_rebuild(
        g.x + 0.1, g.x, 0.3, update_reference_positions=True
    ),
    "generate_k_vectors_pme": lambda g: electrostatics.generate_k_vectors_pme(g.cell, MESH),
    "prepare_mesh": lambda g: electrostatics.prepare_mesh(g.cell, g.of_systems, MESH, 5),
    "k_vectors_from_miller_indices": lambda g: electrostatics.k_vectors_from_miller_indices(
        g.cell, g.idx[:9].view(3, 3)
    ),
}  # fmt: skip


def derivatives(call: Call, order: int) -> Callable[[Given], None]:
    """The call with derivatives of all results up to this order by all that it depends on."""

    def run(g: Given) -> None:
        leaves = [t.detach().requires_grad_() for t in (g.x, g.q, g.cell, g.of_systems)]
        results = call(g._replace(**dict(zip(("x", "q", "cell", "of_systems"), leaves))))
        results = list(results) if isinstance(results, tuple) else [results]
        assert all(t.is_cuda for t in results)
        for _ in range(order):
            loss = sum((r * r).sum() for r in results if r.requires_grad)
            found = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
            results = [slope for slope in found if slope is not None]
            assert results and all(t.is_cuda for t in results)

    return run


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


@by_name(THREE_BODY)
def test_triples_do_not_wait(name, gpu):
    assert_no_wait(gpu, derivatives(THREE_BODY[name], 1))


@by_name(LISTS)
def test_searches_do_not_wait(name, gpu):
    assert_no_wait(gpu, LISTS[name])


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
    monkeypatch.setattr(rows, "layout", lambda _: GPU)
    close_to_largest(found(given), expected, 1e-13)
    # a full one: kernels find a fault, which on a GPU is NaN
    with pytest.raises(ValueError, match="an atom that does not exist"):
        found({**near, "half_list": True})


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIFFERENTIABLE | THREE_BODY | LISTS)
def test_what_is_kept_is_used_on_its_stream(name, monkeypatch):
    """On another one it may not be there yet; and once it is no longer kept, its memory belongs to its own."""
    monkeypatch.setattr(cache, "_kept", Kept(cache.MOST_ENTRIES))
    monkeypatch.setattr(cache, "_recognized", Kept(cache.MOST_ENTRIES))
    inputs, call = on_gpu(given(0.0)), (DIFFERENTIABLE | THREE_BODY | LISTS)[name]
    with pretended_gpu():
        for stream in (1, 1, 2, 1):
            with on_stream(stream):
                call(inputs)


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


CHECKED: dict[str, Call] = {
    "half_to_full": lambda g: formats.half_to_full(
        g.pairs["neighbor_list"], row_pointers(g), g.pairs["neighbor_shifts"]
    ),
    "full_to_half": lambda g: formats.full_to_half(
        g.pairs["neighbor_list"], row_pointers(g), g.pairs["neighbor_shifts"]
    ),
    "get_neighbor_matrix_from_neighbor_list": lambda g: formats.get_neighbor_matrix_from_neighbor_list(
        g.pairs["neighbor_list"], row_pointers(g), g.pairs["neighbor_shifts"], WIDTH
    ),
}


@by_name(CHECKED)
def test_checks_of_lists_do_not_wait_in_a_graph(name):
    values = given(0.0), given(1.0)
    with pretended_gpu(), pytest.raises(HostReadError):
        events(lambda: CHECKED[name](on_gpu(values[0])))
    with pretended_gpu(capturing=True):
        assert_no_wait(on_gpu(values), CHECKED[name])


# -- what tells ------------------------------------------------------------------------------------


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
    "pairs of a matrix": lambda g: formats.get_neighbor_list_from_neighbor_matrix(g.matrix["neighbor_matrix"], g.idx),
}


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
    "periodicity as a list": lambda g: neighbor_list(
        g.x, CUTOFF, g.cell[0], [True, True, False], check=False, max_neighbors=WIDTH
    ),
    "made there": lambda g: torch.zeros(3, device=g.x.device) + g.x.new_zeros(3) + torch.ones_like(g.x[0]),
}


@by_name(NOT_READING)
def test_what_does_not_read_is_allowed(name, gpu):
    assert events(lambda: NOT_READING[name](gpu[0]))
