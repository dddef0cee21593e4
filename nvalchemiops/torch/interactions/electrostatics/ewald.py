"""Public functions for Ewald sums with exact k-vectors."""

from typing import TYPE_CHECKING, Any

import torch

from nvalchemiops.torch.interactions.electrostatics import driver
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB, LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.results import EwaldSum, SumOptions, check_request
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum
from nvalchemiops.torch.systems import System

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain


def ewald_summation(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
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
    pbc: torch.Tensor | None = None,
    slab_correction: bool = False,
    *,
    miller_bounds: Any = None,
    miller_indices: torch.Tensor | None = None,
    energy_reduction: str = "atom",
    cutoff: float | None = None,
    half_list: bool = False,
    exclusions: torch.Tensor | None = None,
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
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Coulomb energy of point charges that repeat in three directions, by Ewald's sum.

    Atom i has the energy ``q_i φ_i / 2``, with its share of the self interaction and of the uniform background that
    neutralises a charged cell (energy ``-π Q² / (2 α² V)``, which makes the total independent of α).

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
        Inside the cell or not.
    charges : (n_atoms,) or (n_atoms, n_channels) tensor, charge
        Channels do not interact with each other; they share the work that depends on positions only.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
        Rows are lattice vectors, in either handedness. None where ``pbc`` is False: such systems need no cell.
    alpha : float or (n_systems,) tensor, 1/length, optional
        Splitting parameter. By default chosen for ``accuracy`` (see Notes).
    k_vectors : (n_k, 3) or (n_systems, n_k, 3) tensor, 1/length, optional
        K-vectors of the cell, as from `generate_k_vectors_ewald_summation`. They say which ones are used; their
        values are computed from the cell again, so that its gradients are complete. Of k and -k one is enough.
    k_cutoff : float or (n_systems,) tensor, 1/length, optional
        Use all k-vectors up to this length. By default what ``accuracy`` needs at this alpha.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    neighbor_list, neighbor_ptr, neighbor_shifts : tensors, optional
        Full list of pairs (2, n_pairs) sorted by the first atom, the first pair of each atom (n_atoms + 1,),
        images (n_pairs, 3), as from `nvalchemiops.torch.neighbors.neighbor_list`. All pairs in it are summed.
        Without neighbors given they are built.
    neighbor_matrix, neighbor_matrix_shifts, mask_value : optional
        The same as matrix (n_atoms, width), (n_atoms, width, 3), and the value of padding (n_atoms by default).
    compute_forces, compute_charge_gradients, compute_virial : bool, optional
        Return forces ``-dE/dR`` at fixed charges, ``dE/dq``, and ``-dE/dstrain``.
    accuracy : float, optional
        RMS error of the forces to aim at, relative to their RMS. Without ``alpha`` it is typically met within a factor
        of 3; very small systems do better, nearly cancelling forces and some virials worse.
    hybrid_forces : bool, optional
        Results depend on positions, cell and alpha as on constants: gradients flow through the charges alone. For
        charges that depend on the geometry, explicit forces and the gradient of this energy add up to the total force.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        True along all axes, or with ``slab_correction`` along all but one. In a system without any periodic axis all
        pairs are summed, whatever neighbors are given; in compiled graphs, which cannot read this, it is NaN, and
        transforms of ``torch.func`` refuse it.
    slab_correction : bool, optional
        Add `compute_slab_correction` for systems with an open axis.
    miller_bounds : (int, int, int), optional
        Use the box of k-vectors up to these Miller indices. Shapes then depend on nothing else.
    miller_indices : (n_k, 3) int tensor or WaveVectors, optional
        Use these k-vectors. `WaveVectors` are prepared by `prepare_wave_vectors`; then nothing is read on the host.
    energy_reduction : {"atom", "system"}, optional
        Energies per atom (n_atoms,), or summed over systems (n_systems,).
    cutoff : float, length, optional
        Reach of the given list (all pairs closer than this are in it), or to which the list is built.
    half_list : bool, optional
        The list has each pair once.
    exclusions : (2, n_pairs) int tensor, optional
        Pairs of atoms, each once, whose nearest images do not interact.
    exclusion_factors : (n_pairs,) tensor, optional
        Factors of their interaction, zero by default.
    potential : LongRangePotential, optional
        Another interaction, such as `power_law(6)` for dispersion. Parameters are then required: error models are for
        the Coulomb potential only.
    domain : Domain, optional
        The system is divided among ranks (`nvalchemiops.torch.distributed`): the atoms are those that this rank owns,
        and results by systems are complete on all ranks.
    dipoles : (n_atoms, 3) or (n_atoms, n_channels, 3) tensor, charge length, optional
        With the channels of the charges.
    quadrupoles : (n_atoms, 3, 3) or (n_atoms, n_channels, 3, 3) tensor, charge length², optional
        Second moments ``∫ ρ x x^T``, of which the symmetric traceless part counts: 2/3 of Buckingham's Θ.
    widths : float or (n_atoms,) tensor, length, optional
        Standard deviations of Gaussian charge distributions, of all moments of an atom alike; zero for points.
    compute_dipole_gradients, compute_quadrupole_gradients : bool, optional
        Return ``dE/dμ`` (minus the field) and ``dE/dQ`` (half the gradient of minus the field, symmetric and
        traceless). Torques follow: ``-(μ x dE/dμ)_a - 2 Σ ε_abc (Q dE/dQ)_bc``.
    self_interaction : bool, optional
        Keep the energy of each Gaussian with itself. Needs positive ``widths``.
    surface_dielectric : float, optional
        Dielectric constant of what surrounds a sphere of many cells: adds ``2π/((2ε + 1) V) M²`` with the dipole
        ``M = Σ q x + μ`` of the cell, positions as they are given. By default a conductor, without this term.

    Returns
    -------
    energies : (n_atoms,) or (n_systems,) tensor, charge²/length
        With channels (n_atoms, n_channels) or (n_systems, n_channels).
    forces : (n_atoms, 3) tensor, charge²/length², if requested
    charge_gradients : tensor like ``charges``, charge/length, if requested
    dipole_gradients, quadrupole_gradients : tensors like ``dipoles`` and ``quadrupoles``, if requested
    virial : (n_systems, 3, 3) tensor, charge²/length, if requested
        At fixed Cartesian dipoles and quadrupoles, with which it is not symmetric.

    The dtype follows ``positions``. All are differentiable to any order in positions, charges, dipoles, quadrupoles,
    cell and alpha.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Warns
    -----
    AccuracyWarning
        Without ``alpha``, the given k-vectors and the reach of the list together miss the accuracy by more than a
        factor of 2: the message says which error to expect, as `estimate_errors` does.
    NeighborListWarning
        Without ``alpha`` and ``cutoff``, the list does not hold both directions of each pair. What it holds is summed.

    Notes
    -----
    Without ``alpha``: a list whose reach (``cutoff``, else its largest distance) covers the ``real_space_cutoff`` of
    `estimate_ewald_parameters` leads to the alpha of that estimate with these charges; with a shorter one alpha grows
    until ``accuracy`` is met at that reach. If given k-vectors are too few for this alpha, it is smaller: the largest
    for which they suffice if the list reaches far enough, else that at which both parts miss the accuracy by the same
    factor. The reach of a list is at least its largest distance, so say ``cutoff`` for small molecules in
    large cells: it saves k-vectors. With ``alpha`` given, the reach of the list is not checked.

    Which k-vectors there are depends on the cell, which is read on the host, unless ``miller_bounds`` are given; so
    are sizes of systems where alpha or neighbors are left open. Inside ``torch.compile`` give alpha or ``cutoff``.

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
    neighbors = driver.given_neighbors(*near)
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
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Short-range part of the Ewald sum: energies ``1/2 Σ_j q_i q_j erfc(α r_ij) / r_ij`` over the neighbors.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
    charges : (n_atoms,) or (n_atoms, n_channels) tensor, charge
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    alpha : float or (n_systems,) tensor, 1/length
        Splitting parameter.
    neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, half_list
        As for `nvalchemiops.torch.interactions.pair.PairPotential`. Without neighbors given they are built, to
        ``cutoff``.
    mask_value : int, optional
        The value of padding; n_atoms by default.
    batch_idx, compute_forces, compute_charge_gradients, compute_virial, hybrid_forces, energy_reduction
        As for `ewald_summation`.
    cutoff : float, length, optional
        Pairs at this distance or farther are left out. By default all pairs in the list count.
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
    options = SumOptions(alpha, None, cutoff)
    return driver.short_range_part(EwaldSum(None, (), atoms, driver.given_neighbors(*near), request, options))


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
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Reciprocal part of the Ewald sum, with self energies and background: all that `ewald_real_space` leaves out.

    Parameters
    ----------
    positions, charges, cell, alpha, batch_idx
        As for `ewald_summation`; alpha is required.
    k_vectors, k_cutoff, miller_bounds, miller_indices
        As for `ewald_summation`; one of them is required.
    compute_forces, compute_charge_gradients, compute_virial, hybrid_forces, energy_reduction, potential, dipoles, \
quadrupoles, compute_dipole_gradients, compute_quadrupole_gradients, domain
        As for `ewald_summation`.
    widths : float or (n_atoms,) tensor, length, optional
        They do not change the reciprocal sum: they add what they change in the background of a charged cell.
    self_interaction : bool, optional
        Keep the self energy: without ``widths`` that of the reciprocal sum, which is then the energy of Gaussians of
        standard deviation 1/2α; with them that of these Gaussians.

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
