"""Public functions for particle-mesh Ewald."""

from typing import TYPE_CHECKING, Any

import torch

from nvalchemiops.compat.paths import forwarded
from nvalchemiops.torch.interactions.electrostatics import driver
from nvalchemiops.torch.interactions.electrostatics.k_vectors import check_cells_alone, per_system
from nvalchemiops.torch.interactions.electrostatics.parameters import (
    compute_bspline_moduli_1d as compute_bspline_moduli_1d,
)
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB, LongRangePotential, check_potential
from nvalchemiops.torch.interactions.electrostatics.results import EwaldSum, SumOptions, check_request
from nvalchemiops.torch.interactions.electrostatics.terms.mesh import MeshSum, MeshTerm, Precomputed, PreparedMesh
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.operators.lattice import check_spline_order, lattice_of, mesh_and_order
from nvalchemiops.torch.systems import System
from nvalchemiops.torch.types import Pbc, Tensors

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain
    from nvalchemiops.torch.distributed.pairs import OwnedPairs


__getattr__ = forwarded(
    __name__,
    "nvalchemiops.torch.clients.electrostatics",
    [
        "_batch_pme_energy_corrections",
        "_batch_pme_energy_corrections_with_charge_grad",
        "_compute_pme_reciprocal_virial",
        "_pme_energy_corrections",
        "_pme_energy_corrections_with_charge_grad",
        "_prepare_alpha",
        "_prepare_cell",
        "register_pme_ops",
    ],
)


def prepare_mesh(
    cell: torch.Tensor,
    alpha: float | torch.Tensor,
    mesh_dimensions: Any,
    spline_order: int = 5,
    *,
    potential: LongRangePotential = COULOMB,
) -> PreparedMesh:
    """Compute the part of `particle_mesh_ewald` that does not depend on atoms, for repeated calls with fixed cells.

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
    check_potential(potential)
    cells = check_cells_alone(cell).detach()
    mesh, order = mesh_and_order(mesh_dimensions, check_spline_order(spline_order))
    # rounded to the dtype of the cell, which is also the dtype of the positions
    splitting = per_system("alpha", alpha, cells.shape[0], cell.device).detach().to(cell.dtype)
    # copies, unaffected by changes of the caller's tensors
    cells, splitting = (t.to(torch.float64, copy=True) for t in (cells, splitting))
    lattice = lattice_of(cells, None, 0)
    found = MeshTerm(potential, splitting, mesh, order).influence(lattice, True)
    return PreparedMesh(cells, splitting, mesh, order, potential, found)


def particle_mesh_ewald(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor | None = None,
    alpha: float | torch.Tensor | None = None,
    mesh_spacing: float | torch.Tensor | None = None,
    mesh_dimensions: Any = None,
    spline_order: int | None = None,
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
    pbc: Pbc | None = None,
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
    exclusions: "torch.Tensor | OwnedPairs | None" = None,
    exclusion_factors: torch.Tensor | None = None,
    potential: LongRangePotential = COULOMB,
    prepared: PreparedMesh | None = None,
    domain: "Domain | None" = None,
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    widths: float | torch.Tensor | None = None,
    compute_dipole_gradients: bool = False,
    compute_quadrupole_gradients: bool = False,
    self_interaction: bool = False,
    surface_dielectric: float | None = None,
) -> Tensors:
    """Coulomb energy of point charges in systems that are periodic in three directions, by Ewald's sum on a mesh.

    This is the energy of `ewald_summation`, at a cost of N log N for N atoms.

    Parameters
    ----------
    positions, charges, cell, batch_idx, neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, \
neighbor_matrix_shifts, mask_value, compute_forces, compute_charge_gradients, compute_virial, hybrid_forces, pbc, \
slab_correction, energy_reduction, cutoff, half_list, exclusions, exclusion_factors, potential, dipoles, quadrupoles, \
widths, compute_dipole_gradients, compute_quadrupole_gradients, self_interaction, surface_dielectric
        As for `ewald_summation`.
    alpha : float or (n_systems,) tensor, 1/length, optional
        Splitting parameter. By default chosen for ``accuracy`` (see Notes).
    mesh_spacing : float or tensor (n_systems,) or (n_systems, 3), length, optional
        Largest distance between mesh points along the vectors of the mesh: the shortest vectors of the lattice if the
        cell is skewed, but those of the cell with a spacing for each vector, with prepared tensors, and with a domain.
    mesh_dimensions : (int, int, int), optional
        Number of mesh points along the lattice vectors, the same for all systems. By default as many as ``accuracy``
        needs, in a skewed cell along the shortest vectors of the lattice.
    spline_order : int, optional
        2 to 10. By default 5 with a given mesh; otherwise the fastest order from 5 to 10, which is 10 if only few atoms
        have dipoles or quadrupoles, unless ``alpha`` is given.
        Energies have ``spline_order - 2`` continuous derivatives, and one more that is piecewise continuous. A mesh
        with fewer points along an axis gets the largest order that fits, with a warning. Dipoles need at least order 4,
        quadrupoles at least 5.
    accuracy : float, optional
        As for `ewald_summation`. Splines of order 5 reach 1e-7, those of order 8 reach 1e-9, those of order 10 reach
        1e-12. If the order, or the given mesh and list, cannot reach the accuracy, a warning states the expected error.
    k_vectors, k_squared, cell_inv_t, volume, moduli_x, moduli_y, moduli_z : tensors, optional
        Accepted for callers that have prepared them. Only the shapes are checked: values are recomputed from the cell,
        so that gradients with respect to the cell are complete.
    prepared : PreparedMesh, optional
        From `prepare_mesh`: alpha, mesh and spline order, with tensors that depend on them and on a fixed cell. Then
        leave alpha and the mesh out; another ``spline_order`` is an error.

    Returns
    -------
    energies, forces, charge_gradients, dipole_gradients, quadrupole_gradients, virial
        As from `ewald_summation`. The mesh has the dtype of ``positions``; sums over atoms are in float64.
        Forces, charge gradients and virial are derivatives of the computed energy. All results are differentiable
        in positions, charges, cell and alpha, as often as the splines are (beyond that: `NotDifferentiableError`).

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Warns
    -----
    AccuracyWarning, NeighborListWarning
        As for `ewald_summation`; also if splines of this order do not reach the accuracy, or do not fit the mesh.

    Notes
    -----
    If ``alpha`` is not given, it is chosen as for `ewald_summation`, with the cutoff of `estimate_pme_parameters`.
    Values are read on the host if alpha, mesh or neighbors are not given. Exported programs, and compiled graphs on a
    GPU, need ``mesh_dimensions``, and alpha or ``cutoff``.

    Formulas and sources: `nvalchemiops.torch.interactions.electrostatics.terms.mesh`.
    """
    if prepared is not None:
        if not isinstance(prepared, PreparedMesh):
            raise TypeError(f"`prepared` must be a PreparedMesh from prepare_mesh, got {type(prepared).__name__}")
        alpha = prepared.alpha_for(alpha, mesh_dimensions, mesh_spacing, potential)
    precomputed = Precomputed(k_vectors, k_squared, cell_inv_t, volume, moduli_x, moduli_y, moduli_z)
    mesh = mesh_dimensions, mesh_spacing, spline_order, precomputed, prepared
    atoms = System(positions, charges, cell, batch_idx, pbc, None, domain, dipoles, quadrupoles, widths)
    near = neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, mask_value, half_list
    wanted = compute_forces, compute_charge_gradients, compute_virial, energy_reduction, hybrid_forces
    request = check_request(*wanted, compute_dipole_gradients, compute_quadrupole_gradients)
    excluded, whole = (exclusions, exclusion_factors), (slab_correction, self_interaction, surface_dielectric)
    options = SumOptions(alpha, accuracy, cutoff, potential, *excluded, *whole)
    neighbors = GivenNeighbors(*near, fill_name="mask_value")
    return driver.ewald_sum(EwaldSum(MeshSum, mesh, atoms, neighbors, request, options))


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
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    widths: float | torch.Tensor | None = None,
    compute_dipole_gradients: bool = False,
    compute_quadrupole_gradients: bool = False,
    self_interaction: bool = False,
    domain: "Domain | None" = None,
) -> Tensors:
    """Reciprocal part on a mesh, with self energies and background: all terms except `ewald_real_space`.

    Parameters
    ----------
    positions, charges, cell, alpha, batch_idx
        As for `particle_mesh_ewald`; alpha is required.
    mesh_dimensions, mesh_spacing
        As for `particle_mesh_ewald`; one of them is required.
    spline_order, compute_forces, compute_charge_gradients, compute_virial, hybrid_forces, energy_reduction, \
potential, dipoles, quadrupoles, compute_dipole_gradients, compute_quadrupole_gradients, domain
        As for `particle_mesh_ewald`.
    widths, self_interaction
        As for `ewald_reciprocal_space`.
    k_vectors, k_squared, cell_inv_t, volume, moduli_x, moduli_y, moduli_z
        As for `particle_mesh_ewald`.

    Returns
    -------
    energies, forces, charge_gradients, dipole_gradients, quadrupole_gradients, virial
        As from `particle_mesh_ewald`, with the same errors.
    """
    precomputed = Precomputed(k_vectors, k_squared, cell_inv_t, volume, moduli_x, moduli_y, moduli_z)
    mesh = mesh_dimensions, mesh_spacing, spline_order, precomputed, None
    wanted = compute_forces, compute_charge_gradients, compute_virial, energy_reduction, hybrid_forces
    request = check_request(*wanted, compute_dipole_gradients, compute_quadrupole_gradients)
    atoms = System(positions, charges, cell, batch_idx, None, None, domain, dipoles, quadrupoles, widths)
    options = SumOptions(alpha, None, None, potential, self_interaction=self_interaction)
    return driver.long_range_part(EwaldSum(MeshSum, mesh, atoms, (), request, options))
