"""DFT-D3 dispersion energies; formulas and sources in `nvalchemiops.interactions.dispersion.formulas`."""

from typing import TYPE_CHECKING

import torch

from nvalchemiops.interactions.dispersion.damping import RationalDamping, ZeroDamping
from nvalchemiops.torch.interactions.dispersion.driver import K1, K3, Settings, dispersion_sum, ranges_of
from nvalchemiops.torch.interactions.dispersion.reference_data import D3Parameters, ReferenceStates
from nvalchemiops.torch.interactions.pair.driver import check_pair_request
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.systems import System

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain


def d3_dispersion(
    positions: torch.Tensor,
    numbers: torch.Tensor,
    damping: RationalDamping | ZeroDamping,
    parameters: D3Parameters | ReferenceStates,
    cell: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    *,
    neighbor_list: torch.Tensor | None = None,
    neighbor_ptr: torch.Tensor | None = None,
    neighbor_shifts: torch.Tensor | None = None,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    fill_value: int | None = None,
    half_list: bool = False,
    cutoff: float | None = None,
    coordination_cutoff: float | None = None,
    smoothing: float | None = None,
    s9: float | torch.Tensor = 0.0,
    three_body_cutoff: float | None = None,
    pbc: torch.Tensor | None = None,
    num_systems: int | None = None,
    compute_forces: bool = False,
    compute_virial: bool = False,
    energy_reduction: str = "atom",
    k1: float = K1,
    k3: float = K3,
    domain: "Domain | None" = None,
) -> tuple[torch.Tensor, ...]:
    """DFT-D3 dispersion energies and coordination numbers, and, if requested, forces and virial.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, bohr
        float32 or float64; results follow. Positions in angstrom give a wrong energy without an error:
        divide them by `nvalchemiops.constants.BOHR_IN_ANGSTROM`.
    numbers : (n_atoms,) int32 or int64 tensor
        Atomic numbers; 0 for padding, which has no neighbors and is no neighbor.
    damping : RationalDamping or ZeroDamping
        As from `damping_parameters`; its entries may be tensors with gradients.
    parameters : D3Parameters or ReferenceStates
        The reference data; or those that `D3Parameters.states` has prepared, as ``torch.compile`` needs.
    cell : (3, 3) or (n_systems, 3, 3) tensor, bohr, optional
        Lattice vectors in rows.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value, half_list
        Neighbors in either format, see `nvalchemiops.torch.neighbors`. Pairs beyond the cutoffs are left out, so a list
        may reach further. Without neighbors they are searched for within the larger cutoff.
    cutoff : float, bohr, optional
        Of the energy of pairs. By default all listed pairs count.
    coordination_cutoff : float, bohr, optional
        Of the coordination number, by default ``cutoff``. A counted pair never falls below 1e-7, so that thousands of
        far ones matter in the fourth digit: compare programs at equal cutoffs.
    smoothing : float, bohr, optional
        All sums go to zero over the last ``smoothing`` before their cutoffs, with two continuous derivatives. Without
        it energies jump by that of a pair at the cutoff.
    s9 : float or tensor, optional
        Factor of the three-body energy of Axilrod, Teller and Muto, mostly 1; by default there is none. It has first
        derivatives only; second ones raise `NotDifferentiableError`.
    three_body_cutoff : float, bohr, optional
        Of the sides of its triangles, by default ``coordination_cutoff``. The cost grows with its sixth power.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        For the search of neighbors.
    num_systems : int, optional
        Needed inside ``torch.compile`` with ``batch_idx``, unless there are cells (n_systems, 3, 3).
    compute_forces, compute_virial : bool, optional
    energy_reduction : {"atom", "system"}, optional
        An atom has half the energy of its pairs.
    k1, k3 : float, optional
        Steepness of the coordination number, and of the weights of reference molecules.
    domain : Domain, optional
        The system is divided among ranks (`nvalchemiops.torch.distributed`): the atoms are those that this rank owns,
        and results by systems are complete on all ranks.

    Returns
    -------
    energies : (n_atoms,) or (n_systems,) tensor, hartree
    forces : (n_atoms, 3) tensor, hartree/bohr
        If requested.
    coordination_numbers : (n_atoms,) tensor
    virial : (n_systems, 3, 3) tensor, hartree
        If requested: ``-dE/d(strain)``.

        All are differentiable to any order in positions, cell and damping parameters, but for the part of ``s9``.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; elements without parameters.
    """
    ranges = ranges_of(cutoff, coordination_cutoff, three_body_cutoff, smoothing)
    request = check_pair_request(compute_forces, compute_virial, energy_reduction)
    settings = Settings(damping, ranges, k1, k3, s9, request, num_systems)
    given = GivenNeighbors(
        neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value, half_list
    )
    atoms = System(positions, None, cell, batch_idx, pbc, numbers, domain)
    return dispersion_sum(atoms, parameters, settings, given)
