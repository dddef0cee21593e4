"""Calls of each operation with all that decides sizes given, so that none waits for a GPU, and their derivatives.

A call takes `Given`, whose tensors are on a device, or pretend to be. `tests/resources/test_host_on_gpu.py` runs all of
them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nvalchemiops.torch import segment_ops, spline
from nvalchemiops.torch.interactions import dispersion, electrostatics, lj, pair
from nvalchemiops.torch.neighbors import (
    batch_cell_list,
    batch_naive_neighbor_list_dual_cutoff,
    cell_list,
    formats,
    naive_neighbor_list,
    neighbor_list,
    rebuild_detection,
)
from nvalchemiops.torch.systems import Neighbors, System
from tests.support import cases
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


def traceless(g: Given) -> torch.Tensor:
    off = torch.ones(3, 3, dtype=g.x.dtype, device=g.x.device) - torch.eye(3, dtype=g.x.dtype, device=g.x.device)
    return g.q[:, None, None] * off


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
    "electrostatic_potential": lambda g: electrostatics.electrostatic_potential(
        *(g.x, g.q, g.cell),
        dipoles=g.x.sin(),
        quadrupoles=traceless(g),
        widths=0.3,
        receiver_widths=[0.4, 0.5],
        alpha=ALPHA,
        miller_indices=g.prepared["k-vectors"],
        derivatives=2,
        **g.near,
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
    "cell_list": lambda g: cell_list(g.x, CUTOFF, g.cell[0], g.pbc, check=False, max_neighbors=WIDTH),
    "batch_cell_list": lambda g: batch_cell_list(
        g.x, CUTOFF, g.cell, None, g.sorted_idx, check=False, **memory(g)
    ),
    "naive_neighbor_list": lambda g: naive_neighbor_list(g.x, CUTOFF, check=False, max_neighbors=WIDTH),
    "batch_naive_neighbor_list_dual_cutoff": lambda g: batch_naive_neighbor_list_dual_cutoff(
        g.x, CUTOFF, 2.0, g.sorted_idx, cell=g.cell, check=False, **memory(g, "1"), **memory(g, "2")
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
