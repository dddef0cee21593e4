"""Particle-mesh Ewald."""

from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd.functorch import is_differentiated
from nvalchemiops.torch.interactions.electrostatics.choice import Wish, split
from nvalchemiops.torch.interactions.electrostatics.first_derivatives import summed
from nvalchemiops.torch.interactions.electrostatics.parameters import (
    check_accuracy,
    compute_bspline_moduli_1d,
    mesh_for,
    mesh_spacing_to_dimensions,
    sizes_of,
)
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB, LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.real_space import given_rows, self_part, tensors_of
from nvalchemiops.torch.interactions.electrostatics.results import Parts, WantedParts, asked_for
from nvalchemiops.torch.interactions.electrostatics.shared_parts import all_but_smooth_part
from nvalchemiops.torch.interactions.electrostatics.system import (
    ChargedSystem,
    check_parameters,
    check_potential,
    check_system,
    given_alpha,
    periodic_axes,
    refuse_open_axes,
)
from nvalchemiops.torch.interactions.electrostatics.terms.mesh import Influence, influence, mesh_sum
from nvalchemiops.torch.interactions.electrostatics.wave_vectors import ELSEWHERE, check_cells_alone, per_system
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.operators.lattice import check_spline_order, lattice_of, mesh_and_order
from nvalchemiops.torch.runtime.context import may_read, on_host, values_of


class PreparedMesh(NamedTuple):
    """What a sum on a mesh needs beside positions and charges, for cells that do not change; from `prepare_mesh`.

    Attributes
    ----------
    cell : (n_systems, 3, 3) tensor
    alpha : (n_systems,) tensor
    mesh_dimensions : (int, int, int)
    spline_order : int
    potential : LongRangePotential
    influence : Influence
        Factors in Fourier space, float64: two numbers for each point of half the mesh.
    """

    cell: torch.Tensor
    alpha: torch.Tensor
    mesh_dimensions: tuple[int, int, int]
    spline_order: int
    potential: LongRangePotential
    influence: Influence

    def check(self, system: ChargedSystem, alpha: Any, mesh_dimensions: Any, mesh_spacing: Any, potential: Any) -> None:
        """Raise if a call says something else than was prepared."""
        if any(value is not None for value in (alpha, mesh_dimensions, mesh_spacing)):
            raise ValueError("`prepared` has its own alpha and mesh: leave `alpha` and `mesh_...` out")
        if potential is not self.potential:
            raise ValueError("`prepared` is for another `potential`")
        if is_differentiated(system.cell):
            raise ValueError("`cell` requires a gradient, but what is `prepared` does not depend on it any more")
        if system.cell.shape != self.cell.shape or system.cell.device != self.cell.device:
            raise ValueError(
                f"`prepared` is for a cell {tuple(self.cell.shape)} on {self.cell.device}, but this one is "
                f"{tuple(system.cell.shape)} on {system.cell.device}. {ELSEWHERE}"
            )
        if may_read(system.cell) and not torch.equal(values_of(system.cell).to(torch.float64), self.cell):
            raise ValueError(f"`prepared` is for another `cell`: prepare again when the cell has changed. {ELSEWHERE}")

    def alpha_for(self, cell: torch.Tensor) -> torch.Tensor:
        """Alpha; NaN where `check` would have raised, had it read the cell."""
        if may_read(cell):
            return self.alpha
        same = (cell.detach().to(torch.float64) == self.cell).flatten(1).all(1)
        return torch.where(same, self.alpha, torch.nan)


def prepare_mesh(
    cell: torch.Tensor,
    alpha: float | torch.Tensor,
    mesh_dimensions: Any,
    spline_order: int = 5,
    *,
    potential: LongRangePotential = COULOMB,
) -> PreparedMesh:
    """Compute once what `particle_mesh_ewald` computes in each call, for cells that do not change.

    Parameters
    ----------
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    alpha : float or (n_systems,) tensor, 1/length
    mesh_dimensions : (int, int, int)
    spline_order : int, optional
    potential : LongRangePotential, optional

    Returns
    -------
    PreparedMesh

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    cells = check_cells_alone(cell).detach()
    check_potential(potential)
    mesh, order = mesh_and_order(mesh_dimensions, check_spline_order(spline_order))
    # as the dtype of the cell, which is that of the positions, has it
    splitting = per_system("alpha", alpha, cells.shape[0], cell.device).detach().to(cell.dtype)
    # copies, which the caller's tensors may change without
    cells, splitting = (t.to(torch.float64, copy=True) for t in (cells, splitting))
    lattice = lattice_of(cells, None, 0)
    found = influence(potential, lattice, splitting, mesh, order, True)
    return PreparedMesh(cells, splitting, mesh, order, potential, found)


def particle_mesh_ewald(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
    alpha: float | torch.Tensor | None = None,
    mesh_spacing: float | torch.Tensor | None = None,
    mesh_dimensions: Any = None,
    spline_order: int = 5,
    batch_idx: torch.Tensor | None = None,
    k_vectors: torch.Tensor | None = None,
    k_squared: torch.Tensor | None = None,
    neighbor_list: torch.Tensor | None = None,
    neighbor_ptr: torch.Tensor | None = None,
    neighbor_shifts: torch.Tensor | None = None,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    mask_value: int | None = None,
    compute_forces: bool = False,
    compute_charge_gradients: bool = False,
    compute_virial: bool = False,
    accuracy: float = 1e-6,
    hybrid_forces: bool = False,
    pbc: torch.Tensor | None = None,
    slab_correction: bool = False,
    *,
    cell_inv_t: torch.Tensor | None = None,
    volume: torch.Tensor | None = None,
    moduli_x: torch.Tensor | None = None,
    moduli_y: torch.Tensor | None = None,
    moduli_z: torch.Tensor | None = None,
    energy_reduction: str = "atom",
    cutoff: float | None = None,
    half_list: bool = False,
    exclusions: torch.Tensor | None = None,
    exclusion_factors: torch.Tensor | None = None,
    potential: LongRangePotential = COULOMB,
    prepared: PreparedMesh | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Coulomb energy of point charges that repeat in three directions, by Ewald's sum on a mesh.

    The same as `ewald_summation`, at a cost of N log N for N atoms.

    Parameters
    ----------
    positions, charges, cell, batch_idx, neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, \
neighbor_matrix_shifts, mask_value, compute_forces, compute_charge_gradients, compute_virial, hybrid_forces, pbc, \
slab_correction, energy_reduction, cutoff, half_list, exclusions, exclusion_factors, potential
        As for `ewald_summation`.
    alpha : float or (n_systems,) tensor, 1/length, optional
        Splitting parameter. By default chosen for ``accuracy`` (see Notes).
    mesh_spacing : float or tensor (n_systems,) or (n_systems, 3), length, optional
        Largest distance of mesh points along lattice vectors.
    mesh_dimensions : (int, int, int), optional
        Points of the mesh along the lattice vectors, the same for all systems. By default what ``accuracy`` needs.
    spline_order : int, optional
        2 to 8. Energies have ``spline_order - 2`` continuous derivatives, and one more in pieces. A mesh with fewer
        points gets the largest order that fits, with a warning.
    accuracy : float, optional
        As for `ewald_summation`. Splines of order 5 reach 1e-7, those of order 8 reach 1e-9; a warning says what to
        expect where an order does not reach it, or where the given mesh and list do not.
    k_vectors, k_squared, cell_inv_t, volume, moduli_x, moduli_y, moduli_z : tensors, optional
        Accepted, because callers may have prepared them; the shapes are checked. Values are computed from the cell
        again, so that its gradients are complete.
    prepared : PreparedMesh, optional
        From `prepare_mesh`: alpha, mesh, spline order and what depends on them and on a cell that does not change.

    Returns
    -------
    energies, forces, charge_gradients, virial
        As from `ewald_summation`. The dtype follows ``positions``, and so does that of the mesh; sums over atoms are in
        float64. Forces, charge gradients and virial are derivatives of the energy as computed. All are differentiable
        in positions, charges, cell and alpha, as often as the splines are (`NotDifferentiableError` beyond).

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Warns
    -----
    AccuracyWarning, NeighborListWarning
        As `ewald_summation` does; splines of this order do not reach the accuracy, or do not fit the mesh.

    Notes
    -----
    Without ``alpha``: as for `ewald_summation`, with the cutoff of `estimate_pme_parameters`. Values are read on the
    host where alpha, mesh or neighbors are left open. Inside ``torch.compile`` give ``mesh_dimensions``, and alpha or
    ``cutoff``.

    Formulas and sources: `nvalchemiops.torch.interactions.electrostatics.terms.mesh`.
    """
    system = check_system(positions, charges, cell, batch_idx, energy_reduction)
    accuracy = check_accuracy(accuracy, positions)
    cutoff = None if cutoff is None else checks.check_positive("cutoff", cutoff)
    if prepared is not None:
        if not isinstance(prepared, PreparedMesh):
            raise TypeError(f"`prepared` must be a PreparedMesh from prepare_mesh, got {type(prepared).__name__}")
        prepared.check(system, alpha, mesh_dimensions, mesh_spacing, potential)
        alpha = prepared.alpha_for(system.cell)
        mesh_dimensions, spline_order = prepared.mesh_dimensions, prepared.spline_order
    order = check_spline_order(spline_order)
    axes = periodic_axes(pbc, system, slab_correction)
    if checks.check_flag("hybrid_forces", hybrid_forces):
        system = system.at_fixed_geometry()
        alpha = alpha.detach() if isinstance(alpha, torch.Tensor) else alpha
    check_parameters(
        potential, COULOMB, alpha=alpha, mesh_dimensions=mesh_spacing if mesh_dimensions is None else mesh_dimensions
    )
    given = GivenNeighbors(
        neighbor_list,
        neighbor_ptr,
        neighbor_shifts,
        neighbor_matrix,
        neighbor_matrix_shifts,
        mask_value,
        fill_name="mask_value",
    )
    rows = given_rows(given, system, half_list)

    def best(n_atoms: Any, volume: Any, target: core.Target, xp: Any) -> Any:
        return core.mesh_alpha(n_atoms, volume, target, order, core.COSTS[positions.device.type], xp)

    given_mesh, order = given_mesh_of(system, order, mesh_dimensions, mesh_spacing)
    wish = Wish(alpha, cutoff, rows, accuracy, (exclusions, exclusion_factors))
    if given_mesh is not None and alpha is None:
        name = "mesh_spacing" if mesh_dimensions is None else "mesh_dimensions"
        cell = system.cell.detach().to(torch.float64)
        smooth = core.mesh_model(cell, lattice_of(cell, None, 0).inverse, given_mesh, order, torch)
        wish = wish._replace(smooth=smooth, smooth_name=name)
    splitting, rows, target = split(system, wish, best)
    splitting = refuse_open_axes(splitting, axes, slab_correction)
    mesh = needed_mesh(system, splitting, target, order) if given_mesh is None else given_mesh
    _check_prepared(system, mesh, k_vectors, k_squared, cell_inv_t, volume, (moduli_x, moduli_y, moduli_z))
    wanted = asked_for(compute_forces, compute_charge_gradients, compute_virial)
    slab = axes if slab_correction else None
    kept = None if prepared is None else prepared.influence

    def parts(system: ChargedSystem, wanted: WantedParts) -> list[Parts]:
        return [
            *all_but_smooth_part(potential, system, splitting, rows, slab, exclusions, exclusion_factors, wanted),
            mesh_sum(potential, system, splitting, mesh, order, wanted, kept),
        ]

    others = (*tensors_of(rows), exclusions, exclusion_factors, slab, *(kept or ()))
    return summed(parts, system, wanted, energy_reduction, hybrid_forces, splitting, others, potential)


def pme_reciprocal_space(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
    alpha: float | torch.Tensor,
    mesh_dimensions: Any = None,
    mesh_spacing: float | torch.Tensor | None = None,
    spline_order: int = 5,
    batch_idx: torch.Tensor | None = None,
    k_vectors: torch.Tensor | None = None,
    k_squared: torch.Tensor | None = None,
    compute_forces: bool = False,
    compute_charge_gradients: bool = False,
    compute_virial: bool = False,
    hybrid_forces: bool = False,
    *,
    cell_inv_t: torch.Tensor | None = None,
    volume: torch.Tensor | None = None,
    moduli_x: torch.Tensor | None = None,
    moduli_y: torch.Tensor | None = None,
    moduli_z: torch.Tensor | None = None,
    energy_reduction: str = "atom",
    potential: LongRangePotential = COULOMB,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The part of the sum on the mesh, with self energy and background: what `ewald_real_space` lacks.

    Parameters
    ----------
    positions, charges, cell, alpha, batch_idx
        As for `particle_mesh_ewald`; alpha is required.
    mesh_dimensions, mesh_spacing
        As for `particle_mesh_ewald`; one of them is required.
    spline_order, compute_forces, compute_charge_gradients, compute_virial, hybrid_forces, energy_reduction, potential
        As for `particle_mesh_ewald`.
    k_vectors, k_squared, cell_inv_t, volume, moduli_x, moduli_y, moduli_z
        As for `particle_mesh_ewald`.

    Returns
    -------
    energies, forces, charge_gradients, virial
        As from `particle_mesh_ewald`.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    system = check_system(positions, charges, cell, batch_idx, energy_reduction)
    splitting = given_alpha(alpha, system)
    check_potential(potential)
    order = check_spline_order(spline_order)
    if checks.check_flag("hybrid_forces", hybrid_forces):
        system, splitting = system.at_fixed_geometry(), splitting.detach()
    if mesh_dimensions is None and mesh_spacing is None:
        raise ValueError("`mesh_dimensions` or `mesh_spacing` is needed")
    mesh, order = given_mesh_of(system, order, mesh_dimensions, mesh_spacing)
    assert mesh is not None
    _check_prepared(system, mesh, k_vectors, k_squared, cell_inv_t, volume, (moduli_x, moduli_y, moduli_z))
    wanted = asked_for(compute_forces, compute_charge_gradients, compute_virial)

    def parts(system: ChargedSystem, wanted: WantedParts) -> list[Parts]:
        return [
            mesh_sum(potential, system, splitting, mesh, order, wanted),
            self_part(potential, system, splitting, wanted),
        ]

    return summed(parts, system, wanted, energy_reduction, hybrid_forces, splitting, (), potential)


def given_mesh_of(
    system: ChargedSystem, order: int, mesh_dimensions: Any, mesh_spacing: Any
) -> tuple[tuple[int, int, int] | None, int]:
    """The mesh that the caller asks for, or None; and the order of splines that fits."""
    if mesh_dimensions is not None:
        if mesh_spacing is not None:
            raise ValueError("`mesh_dimensions` and `mesh_spacing` are both given; give one of them")
        return mesh_and_order(mesh_dimensions, order)
    if not may_read():
        raise ValueError("`mesh_dimensions` is needed inside torch.compile, where the size of the cell cannot be read")
    if mesh_spacing is None:
        return None, order
    return mesh_spacing_to_dimensions(system.cell.detach(), mesh_spacing, spline_order=order), order


def needed_mesh(system: ChargedSystem, alpha: torch.Tensor, target: core.Target, order: int) -> tuple[int, int, int]:
    """The mesh that the accuracy asks for. Reads values on the host."""
    sizes = sizes_of(system.cell, system.batch_idx, system.n_atoms)
    return mesh_for(sizes, on_host(alpha.detach()).astype(np.float64), target, order)


def _check_prepared(
    system: ChargedSystem,
    mesh: tuple[int, int, int],
    k_vectors: Any,
    k_squared: Any,
    cell_inv_t: Any,
    volume: Any,
    moduli: tuple[Any, Any, Any],
) -> None:
    """Raise unless what the caller has prepared has the right shapes. The values are not used."""
    n, half = system.n_systems, (mesh[0], mesh[1], mesh[2] // 2 + 1)
    expected = [
        ("k_vectors", k_vectors, (*half, 3)),
        ("k_squared", k_squared, half),
        ("cell_inv_t", cell_inv_t, (3, 3)),
        ("volume", volume, ()),
    ]
    for name, value, shape in expected:
        if value is None:
            continue
        checks.check_tensor(name, value)
        allowed = [(n, *shape)] + [shape] * (n == 1)
        if tuple(value.shape) not in allowed:
            raise ValueError(f"`{name}` must have shape {' or '.join(map(str, allowed))}, got {tuple(value.shape)}")
    for name, value, sizes in zip("xyz", moduli, ((mesh[0],), (mesh[1],), (half[2], mesh[2]))):
        if value is None:
            continue
        checks.check_tensor(f"moduli_{name}", value)
        if value.ndim != 1 or value.shape[0] not in sizes:
            raise ValueError(f"`moduli_{name}` must have shape ({sizes[0]},), got {tuple(value.shape)}")


__all__ = ["PreparedMesh", "compute_bspline_moduli_1d", "particle_mesh_ewald", "pme_reciprocal_space", "prepare_mesh"]
