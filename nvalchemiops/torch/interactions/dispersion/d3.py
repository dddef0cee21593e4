"""DFT-D3 dispersion energies; see `nvalchemiops.interactions.dispersion.formulas` for formulas and sources."""

from typing import TYPE_CHECKING

import torch

from nvalchemiops.interactions.dispersion.damping import RationalDamping, ZeroDamping
from nvalchemiops.torch.interactions.dispersion.driver import K1, K3, Settings, dispersion_sum, ranges_of
from nvalchemiops.torch.interactions.dispersion.reference_data import D3Parameters, ReferenceStates
from nvalchemiops.torch.interactions.pair.driver import check_pair_request
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.systems import System
from nvalchemiops.torch.types import Pbc

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
    pbc: Pbc | None = None,
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
        float32 or float64, which is also the dtype of the results. Positions in angstrom give a wrong energy without an
        error: divide them by `nvalchemiops.constants.BOHR_IN_ANGSTROM`.
    numbers : (n_atoms,) int32 or int64 tensor
        Atomic numbers; 0 for padding atoms, which take part in no pair.
    damping : RationalDamping or ZeroDamping
        Damping parameters, as from `damping_parameters`; they may be tensors that require gradients.
    parameters : D3Parameters or ReferenceStates
        The reference data, or the states prepared from them by `D3Parameters.states`, which ``torch.compile`` needs.
    cell : (3, 3) or (n_systems, 3, 3) tensor, bohr, optional
        Lattice vectors in rows.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value, half_list
        Neighbors in either format; see `nvalchemiops.torch.neighbors`. Pairs beyond the cutoffs are ignored, so the
        list may reach farther. If no neighbors are given, they are searched for within the largest cutoff; without
        cutoffs all pairs of systems that are not periodic count.
    cutoff : float, bohr, optional
        Cutoff of the pair energies. By default all listed pairs count.
    coordination_cutoff : float, bohr, optional
        Cutoff of the coordination numbers, by default ``cutoff``. The counting function does not fall below 1e-7, so
        thousands of distant pairs change the fourth digit: compare programs at equal cutoffs.
    smoothing : float, bohr, optional
        Width below each cutoff over which the sum is switched off, with two continuous derivatives. By default cutoffs
        are sharp, and energies jump when a pair crosses one.
    s9 : float or tensor, optional
        Factor of the three-body energy of Axilrod, Teller and Muto, usually 1; by default this energy is left out. It
        has first derivatives only; second derivatives raise `NotDifferentiableError`.
    three_body_cutoff : float, bohr, optional
        Cutoff of all three sides of a triple, by default ``coordination_cutoff``. The cost grows with its sixth power.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        Periodicity; True along all axes by default. Along an open axis the lattice vector has no effect.
    num_systems : int, optional
        Needed inside ``torch.compile`` with ``batch_idx``, unless there are cells (n_systems, 3, 3).
    compute_forces, compute_virial : bool, optional
        Return forces, and virial.
    energy_reduction : {"atom", "system"}, optional
        Energies per atom, each with half the energy of its pairs and a third of that of its triples, or summed over
        systems.
    k1, k3 : float, optional
        Steepness of the coordination number, and of the weights of reference molecules.
    domain : Domain, optional
        The system is divided among ranks (`nvalchemiops.torch.distributed`): atoms are those that this rank owns, and
        results per system are complete on all ranks.

    Returns
    -------
    energies : (n_atoms,) or (n_systems,) tensor, hartree
    forces : (n_atoms, 3) tensor, hartree/bohr
        If requested.
    coordination_numbers : (n_atoms,) tensor
    virial : (n_systems, 3, 3) tensor, hartree
        If requested: ``-dE/d(strain)``.

        All are differentiable to any order in positions, cell and damping parameters, except for the three-body energy.

    Raises
    ------
    ValueError, TypeError
        An invalid argument, named in the message; an element without parameters.
    """
    ranges = ranges_of(cutoff, coordination_cutoff, three_body_cutoff, smoothing)
    request = check_pair_request(compute_forces, compute_virial, energy_reduction)
    settings = Settings(damping, ranges, k1, k3, s9, request, num_systems)
    given = GivenNeighbors(
        neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value, half_list
    )
    atoms = System(positions, None, cell, batch_idx, pbc, numbers, domain)
    return dispersion_sum(atoms, parameters, settings, given)
