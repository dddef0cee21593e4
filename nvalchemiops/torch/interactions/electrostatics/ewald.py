"""Public functions for Ewald sums with exact k-vectors."""

from typing import TYPE_CHECKING, Any

import torch

from nvalchemiops.compat.paths import forwarded
from nvalchemiops.torch.interactions.electrostatics import driver
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB, LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.results import EwaldSum, SumOptions, check_request
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.systems import System
from nvalchemiops.torch.types import Pbc, Tensors

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain
    from nvalchemiops.torch.distributed.pairs import OwnedPairs


__getattr__ = forwarded(
    __name__,
    "nvalchemiops.torch.clients.electrostatics",
    ["ensure_electrostatics_ops_registered", "ewald_energy_corrections", "ewald_energy_corrections_batch"],
)


def ewald_summation(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor | None = None,
    alpha: float | torch.Tensor | None = None,
    k_vectors: torch.Tensor | None = None,
    k_cutoff: float | torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
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
    miller_bounds: Any = None,
    miller_indices: torch.Tensor | None = None,
    energy_reduction: str = "atom",
    cutoff: float | None = None,
    half_list: bool = False,
    exclusions: "torch.Tensor | OwnedPairs | None" = None,
    exclusion_factors: torch.Tensor | None = None,
    potential: LongRangePotential = COULOMB,
    domain: "Domain | None" = None,
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    widths: float | torch.Tensor | None = None,
    compute_dipole_gradients: bool = False,
    compute_quadrupole_gradients: bool = False,
    self_interaction: bool = False,
    surface_dielectric: float | None = None,
    max_atoms_per_system: int | None = None,
) -> Tensors:
    """Coulomb energy of point charges in systems that are periodic in three directions, by Ewald's sum.

    Atom i has the energy ``q_i φ_i / 2``. This includes its share of the self interaction and of the uniform background
    that neutralises a charged cell (energy ``-π Q² / (2 α² V)``, which makes the total independent of α).

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
        Atoms may lie outside the cell.
    charges : (n_atoms,) or (n_atoms, n_channels) tensor, charge
        Channels do not interact with each other. They share the work that depends on positions alone.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
        Rows are lattice vectors, left-handed or right-handed. Needed unless ``pbc`` is False along all axes.
    alpha : float or (n_systems,) tensor, 1/length, optional
        Splitting parameter. By default chosen for ``accuracy`` (see Notes).
    k_vectors : (n_k, 3) or (n_systems, n_k, 3) tensor, 1/length, optional
        K-vectors of the cell, as from `generate_k_vectors_ewald_summation`. Their Miller indices select the terms of
        the sum. Their values are recomputed from the cell, so that gradients with respect to the cell are complete.
        One vector of each pair k and -k is enough.
    k_cutoff : float or (n_systems,) tensor, 1/length, optional
        Use all k-vectors up to this length, if they are not given in another way. By default the length that
        ``accuracy`` needs at this alpha.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    neighbor_list, neighbor_ptr, neighbor_shifts : tensors, optional
        Full list of pairs (2, n_pairs) sorted by the first atom, index of the first pair of each atom (n_atoms + 1,),
        and periodic images (n_pairs, 3), as from `nvalchemiops.torch.neighbors.neighbor_list`. All pairs in the list
        are summed. If no neighbors are given, a list is built. The list of a slab must have images along the
        open axis, too, as from a search with three periodic axes.
    neighbor_matrix, neighbor_matrix_shifts, mask_value : optional
        The neighbors as a matrix (n_atoms, width), images (n_atoms, width, 3), and the padding value (n_atoms by
        default).
    compute_forces, compute_charge_gradients, compute_virial : bool, optional
        Return the forces ``-dE/dR`` at fixed charges, the charge gradients ``dE/dq``, and the virial ``-dE/dstrain``.
    accuracy : float, optional
        Target for the RMS error of the forces, relative to the RMS of the forces. Without ``alpha`` it is typically met
        within a factor of 3. Errors are smaller for very small systems, and larger for nearly cancelling forces and
        some virials.
    hybrid_forces : bool, optional
        Treat positions, cell and alpha as constants: gradients flow through the sources alone. If these depend on the
        geometry, the total force is the explicit force minus the gradient of this energy.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        True along all axes, or with ``slab_correction`` along all but one. In a system without any periodic axis all
        pairs are summed, and given neighbors are ignored. Exported programs, compiled graphs on a GPU and ``vmap`` over
        ``pbc`` cannot read it: there the results of such a system are NaN.
    slab_correction : bool, optional
        Add `compute_slab_correction` for systems with an open axis. It is for the Coulomb potential.
    miller_bounds : (int, int, int), optional
        Use the box of k-vectors up to these Miller indices. Their number then does not depend on the cell.
    miller_indices : (n_k, 3) int tensor or WaveVectors, optional
        Use these k-vectors. With `WaveVectors` from `prepare_wave_vectors` no values are read on the host.
    energy_reduction : {"atom", "system"}, optional
        Energies per atom (n_atoms,), or summed over systems (n_systems,).
    cutoff : float, length, optional
        Cutoff of the given list, which must hold all pairs closer than this, or of the list that is built.
    half_list : bool, optional
        The list holds each pair only once, in either direction.
    exclusions : (2, n_pairs) int tensor or OwnedPairs, optional
        Pairs of atoms, each listed once, whose nearest images do not interact. With a ``domain`` those from
        `Domain.distribute_pairs`, or the numbers of atoms in all pairs, the same on all ranks.
    exclusion_factors : (n_pairs,) tensor, optional
        Scale the interaction of the excluded pairs by these factors, zero by default.
    potential : LongRangePotential, optional
        Another interaction, such as `power_law(6)` for dispersion. The parameters of the sum are then required, because
        the error models hold only for the Coulomb potential.
    domain : Domain, optional
        The system is divided among ranks (`nvalchemiops.torch.distributed`): the atoms are those that this rank owns,
        and results per system are complete on all ranks. By default ``pbc`` is that of the domain.
    dipoles : (n_atoms, 3) or (n_atoms, n_channels, 3) tensor, charge length, optional
        With channels if the charges have channels.
    quadrupoles : (n_atoms, 3, 3) or (n_atoms, n_channels, 3, 3) tensor, charge length², optional
        Second moments ``∫ ρ x x^T``. Only the symmetric traceless part is used, which is 2/3 of Buckingham's Θ.
    widths : float or (n_atoms,) tensor, length, optional
        Standard deviations of Gaussian charge distributions, the same for all moments of an atom; zero for points.
    compute_dipole_gradients, compute_quadrupole_gradients : bool, optional
        Return ``dE/dμ`` (minus the field) and ``dE/dQ`` (minus half the gradient of the field, symmetric and
        traceless). The torque is ``-(μ x dE/dμ)_a - 2 Σ ε_abc (Q dE/dQ)_bc``.
    self_interaction : bool, optional
        Include the energy of each Gaussian with itself. Needs positive ``widths``.
    surface_dielectric : float, optional
        Dielectric constant ε of the medium around a sphere of many cells. Adds ``2π/((2ε + 1) V) M²`` with the dipole
        ``M = Σ q x + μ`` of the cell, from the positions as given. By default the medium is a conductor, for which this
        term vanishes. Systems with an open axis have no such term.
    max_atoms_per_system : int, optional
        Without effect.

    Returns
    -------
    energies : (n_atoms,) or (n_systems,) tensor, charge²/length
        With channels (n_atoms, n_channels) or (n_systems, n_channels).
    forces : (n_atoms, 3) tensor, charge²/length², if requested
    charge_gradients : tensor like ``charges``, charge/length, if requested
    dipole_gradients, quadrupole_gradients : tensors like ``dipoles`` and ``quadrupoles``, if requested
    virial : (n_systems, 3, 3) tensor, charge²/length, if requested
        At fixed Cartesian dipoles and quadrupoles. With these sources it is not symmetric.

    Energies are float64, other results have the dtype of ``positions``. All are differentiable to any order in
    positions, charges, dipoles, quadrupoles, cell and alpha.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Warns
    -----
    AccuracyWarning
        Without ``alpha``, the given k-vectors and the reach of the list together miss the accuracy by more than a
        factor of 2. The message states the expected error, as from `estimate_errors`. With ``alpha``, but no k-vectors,
        if a list up to ``cutoff`` misses it by more than a factor of 10. Also if ``quadrupoles`` have a trace or an
        antisymmetric part, which is not used.
    NeighborListWarning
        Without ``alpha`` and ``cutoff``, the list does not hold both directions of each pair. The pairs in it are
        summed.

    Notes
    -----
    If ``alpha`` is not given, it is chosen as follows. The reach of a list is ``cutoff`` or, if that is not given, the
    largest distance in the list. If the reach covers the ``real_space_cutoff`` of `estimate_ewald_parameters`, alpha is
    taken from this estimate with these charges. With a shorter list, alpha grows until ``accuracy`` is met at the reach
    of the list. Without a list and ``cutoff``, the reach is chosen, too, shorter than in this estimate, since pairs are
    searched in each call. If k-vectors are given and too few for this alpha, a smaller one is used: the largest alpha
    for which they suffice, if the list reaches far enough; otherwise the alpha at which both parts miss the accuracy by
    the same factor. For small molecules in large cells the largest distance in the list may be much shorter than its
    cutoff: give ``cutoff``, which saves k-vectors. With a given ``alpha`` the reach of the list is not measured.

    The set of k-vectors depends on the cell, which is read on the host unless ``miller_bounds`` are given. Sizes of
    systems are read on the host if alpha or neighbors are not given. Exported programs, and compiled graphs on a GPU,
    need alpha or ``cutoff``.

    Formulas and sources: `nvalchemiops.torch.interactions.electrostatics.terms.reciprocal`,
    `nvalchemiops.interactions.pair.potentials.EWALD_REAL_SPACE`.
    """
    vectors = k_vectors, k_cutoff, miller_bounds, miller_indices
    atoms = System(positions, charges, cell, batch_idx, pbc, None, domain, dipoles, quadrupoles, widths)
    near = neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, mask_value, half_list
    wanted = compute_forces, compute_charge_gradients, compute_virial, energy_reduction, hybrid_forces
    request = check_request(*wanted, compute_dipole_gradients, compute_quadrupole_gradients)
    excluded, whole = (exclusions, exclusion_factors), (slab_correction, self_interaction, surface_dielectric)
    options = SumOptions(alpha, accuracy, cutoff, potential, *excluded, *whole)
    neighbors = GivenNeighbors(*near, fill_name="mask_value")
    return driver.ewald_sum(EwaldSum(KVectorSum, vectors, atoms, neighbors, request, options))


def ewald_real_space(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
    alpha: float | torch.Tensor,
    neighbor_list: torch.Tensor | None = None,
    neighbor_ptr: torch.Tensor | None = None,
    neighbor_shifts: torch.Tensor | None = None,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    mask_value: int | None = None,
    batch_idx: torch.Tensor | None = None,
    compute_forces: bool = False,
    compute_charge_gradients: bool = False,
    compute_virial: bool = False,
    hybrid_forces: bool = False,
    *,
    energy_reduction: str = "atom",
    cutoff: float | None = None,
    half_list: bool = False,
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    widths: float | torch.Tensor | None = None,
    compute_dipole_gradients: bool = False,
    compute_quadrupole_gradients: bool = False,
    domain: "Domain | None" = None,
) -> Tensors:
    """Short-range part of the Ewald sum: energies ``1/2 Σ_j q_i q_j erfc(α r_ij) / r_ij`` over the neighbors.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
    charges : (n_atoms,) or (n_atoms, n_channels) tensor, charge
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    alpha : float or (n_systems,) tensor, 1/length
        Splitting parameter.
    neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, half_list
        As for `nvalchemiops.torch.interactions.pair.PairPotential`. If no neighbors are given, a list is built to
        ``cutoff``.
    mask_value : int, optional
        The padding value; n_atoms by default.
    batch_idx, compute_forces, compute_charge_gradients, compute_virial, hybrid_forces, energy_reduction
        As for `ewald_summation`.
    cutoff : float, length, optional
        Pairs at this distance or farther are left out. By default all pairs in the list are summed.
    dipoles, quadrupoles, widths, compute_dipole_gradients, compute_quadrupole_gradients, domain
        As for `ewald_summation`.

    Returns
    -------
    energies, forces, charge_gradients, dipole_gradients, quadrupole_gradients, virial
        As from `ewald_summation`, with the same errors.
    """
    near = neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, mask_value, half_list
    wanted = compute_forces, compute_charge_gradients, compute_virial, energy_reduction, hybrid_forces
    request = check_request(*wanted, compute_dipole_gradients, compute_quadrupole_gradients)
    atoms = System(positions, charges, cell, batch_idx, None, None, domain, dipoles, quadrupoles, widths)
    options = SumOptions(alpha, None, cutoff, COULOMB)  # torch 2.11 cannot trace a default value that holds functions
    neighbors = GivenNeighbors(*near, fill_name="mask_value")
    return driver.short_range_part(EwaldSum(None, (), atoms, neighbors, request, options))


def ewald_reciprocal_space(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
    k_vectors: torch.Tensor | None,
    alpha: float | torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    compute_forces: bool = False,
    compute_charge_gradients: bool = False,
    compute_virial: bool = False,
    hybrid_forces: bool = False,
    *,
    energy_reduction: str = "atom",
    k_cutoff: float | torch.Tensor | None = None,
    miller_bounds: Any = None,
    miller_indices: torch.Tensor | None = None,
    potential: LongRangePotential = COULOMB,
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    widths: float | torch.Tensor | None = None,
    compute_dipole_gradients: bool = False,
    compute_quadrupole_gradients: bool = False,
    self_interaction: bool = False,
    domain: "Domain | None" = None,
    max_atoms_per_system: int | None = None,
) -> Tensors:
    """Reciprocal part of the Ewald sum, with self energies and background: all terms except `ewald_real_space`.

    Parameters
    ----------
    positions, charges, cell, alpha, batch_idx
        As for `ewald_summation`; alpha is required.
    k_vectors, k_cutoff, miller_bounds, miller_indices
        As for `ewald_summation`; one of them is required.
    compute_forces, compute_charge_gradients, compute_virial, hybrid_forces, energy_reduction, potential, dipoles, \
quadrupoles, compute_dipole_gradients, compute_quadrupole_gradients, max_atoms_per_system, domain
        As for `ewald_summation`.
    widths : float or (n_atoms,) tensor, length, optional
        They do not change the reciprocal sum. They change only the background energy of a charged cell.
    self_interaction : bool, optional
        Keep the self energy. Without ``widths`` it is the self energy of the reciprocal sum, which is then the energy
        of Gaussians of standard deviation 1/2α. With ``widths`` it is the self energy of the given Gaussians.

    Returns
    -------
    energies, forces, charge_gradients, dipole_gradients, quadrupole_gradients, virial
        As from `ewald_summation`, with the same errors.
    """
    vectors = k_vectors, k_cutoff, miller_bounds, miller_indices
    wanted = compute_forces, compute_charge_gradients, compute_virial, energy_reduction, hybrid_forces
    request = check_request(*wanted, compute_dipole_gradients, compute_quadrupole_gradients)
    atoms = System(positions, charges, cell, batch_idx, None, None, domain, dipoles, quadrupoles, widths)
    options = SumOptions(alpha, None, None, potential, self_interaction=self_interaction)
    return driver.long_range_part(EwaldSum(KVectorSum, vectors, atoms, (), request, options))
