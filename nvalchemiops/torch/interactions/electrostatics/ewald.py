"""Ewald's sum with exact wave vectors."""

from typing import Any, NamedTuple

import torch

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.choice import Wish, spacing_of, split
from nvalchemiops.torch.interactions.electrostatics.first_derivatives import summed
from nvalchemiops.torch.interactions.electrostatics.parameters import check_accuracy
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB, LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.real_space import (
    ewald_real_space,
    given_rows,
    self_part,
    tensors_of,
)
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
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import reciprocal_sum
from nvalchemiops.torch.interactions.electrostatics.wave_vectors import (
    WaveVectors,
    box_points,
    check_bounds,
    check_cells_alone,
    per_system,
    points_of_indices,
    points_within,
)
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.runtime.cache import cached_by_value
from nvalchemiops.torch.runtime.context import may_read


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
        Rows are lattice vectors, in either handedness.
    alpha : float or (n_systems,) tensor, 1/length, optional
        Splitting parameter. By default chosen for ``accuracy`` (see Notes).
    k_vectors : (n_k, 3) or (n_systems, n_k, 3) tensor, 1/length, optional
        Wave vectors of the cell, as from `generate_k_vectors_ewald_summation`. They say which ones are used; their
        values are computed from the cell again, so that its gradients are complete. Of k and -k one is enough.
    k_cutoff : float or (n_systems,) tensor, 1/length, optional
        Use all wave vectors up to this length. By default what ``accuracy`` needs at this alpha.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    neighbor_list, neighbor_ptr, neighbor_shifts : tensors, optional
        Full list of pairs (2, n_pairs) sorted by the first atom, where each atom's pairs begin (n_atoms + 1,),
        images (n_pairs, 3), as from `nvalchemiops.torch.neighbors.neighbor_list`. All pairs in it are summed.
        Without neighbors given they are built.
    neighbor_matrix, neighbor_matrix_shifts, mask_value : optional
        The same as matrix (n_atoms, width), (n_atoms, width, 3), and the value of padding (n_atoms by default).
    compute_forces, compute_charge_gradients, compute_virial : bool, optional
        Return forces ``-dE/dR`` at fixed charges, ``dE/dq``, and ``-dE/dstrain``.
    accuracy : float, optional
        Wanted RMS error of the forces, relative to their RMS. Without ``alpha`` it is met within a factor of 3 either
        way, but that few atoms get better forces, and forces that nearly cancel have larger errors; so may virials.
    hybrid_forces : bool, optional
        Results depend on positions, cell and alpha as on constants: gradients flow through the charges alone. For
        charges that depend on the geometry, explicit forces and the gradient of this energy add up to the total force.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        Must be True along all axes, or with ``slab_correction`` along all but one.
    slab_correction : bool, optional
        Add `compute_slab_correction` for systems with an open axis.
    miller_bounds : (int, int, int), optional
        Use the box of wave vectors up to these Miller indices. Shapes then depend on nothing else.
    miller_indices : (n_k, 3) int tensor or WaveVectors, optional
        Use these wave vectors. `WaveVectors` are prepared by `prepare_wave_vectors`; then nothing is read on the host.
    energy_reduction : {"atom", "system"}, optional
        Energies per atom (n_atoms,), or summed over systems (n_systems,).
    cutoff : float, length, optional
        Reach of the given list (all pairs closer than this are in it), or to which the list is built.
    half_list : bool, optional
        The list has each pair once.
    exclusions : (2, n_pairs) int tensor, optional
        Pairs of atoms, each once, whose nearest images do not interact.
    exclusion_factors : (n_pairs,) tensor, optional
        How much they do interact, zero by default.
    potential : LongRangePotential, optional
        Another interaction, as `power_law(6)` for dispersion. Then give parameters: error models are Coulomb's.

    Returns
    -------
    energies : (n_atoms,) or (n_systems,) tensor, charge²/length
        With channels (n_atoms, n_channels) or (n_systems, n_channels).
    forces : (n_atoms, 3) tensor, charge²/length², if asked for
    charge_gradients : tensor like ``charges``, charge/length, if asked for
    virial : (n_systems, 3, 3) tensor, charge²/length, if asked for

    The dtype follows ``positions``. All are differentiable to any order in positions, charges, cell and alpha.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Warns
    -----
    AccuracyWarning
        Without ``alpha``, the given wave vectors and the reach of the list together miss the accuracy by more than a
        factor of 2: the message says which error to expect, as `estimate_errors` does.
    NeighborListWarning
        Without ``alpha`` and ``cutoff``, the list does not hold both directions of each pair. What it holds is summed.

    Notes
    -----
    Without ``alpha``: a list whose reach (``cutoff``, else its largest distance) covers the ``real_space_cutoff`` of
    `estimate_ewald_parameters` gets the alpha of that estimate with these charges; with a shorter one alpha grows until
    ``accuracy`` is met at that reach. Wave vectors that are given, and too few for this alpha, get a smaller one: the
    largest for which they suffice if the list reaches far enough, else that at which both parts miss the accuracy by
    the same factor. The reach of a list is at least its largest distance, so say ``cutoff`` for small molecules in
    large cells: it saves wave vectors. With ``alpha`` given, the list's reach is the caller's business.

    Which wave vectors there are depends on the cell, which is read on the host, unless ``miller_bounds`` are given; so
    are sizes of systems where alpha or neighbors are left open. Inside ``torch.compile`` give alpha or ``cutoff``.

    Formulas and sources: `nvalchemiops.torch.interactions.electrostatics.terms.reciprocal`,
    `nvalchemiops.interactions.pair.potentials.EWALD_REAL_SPACE`.
    """
    system = check_system(positions, charges, cell, batch_idx, energy_reduction)
    accuracy = check_accuracy(accuracy, positions)
    cutoff = None if cutoff is None else checks.check_positive("cutoff", cutoff)
    axes = periodic_axes(pbc, system, slab_correction)
    if checks.check_flag("hybrid_forces", hybrid_forces):
        system = system.at_fixed_geometry()
        alpha = alpha.detach() if isinstance(alpha, torch.Tensor) else alpha
    check_parameters(
        potential, COULOMB, alpha=alpha, k_cutoff=_given(k_vectors, k_cutoff, miller_bounds, miller_indices)
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
        return core.ewald_alpha(n_atoms, volume, target, core.COSTS[positions.device.type], xp)

    chosen = given_waves(system, k_vectors, k_cutoff, miller_bounds, miller_indices)
    wish = Wish(alpha, cutoff, rows, accuracy, (exclusions, exclusion_factors))
    if chosen is not None and alpha is None:
        wish = wish._replace(smooth=wave_errors(chosen, system), smooth_name=chosen.name)
    splitting, rows, target = split(system, wish, best)
    splitting = _valid(refuse_open_axes(splitting, axes, slab_correction), chosen)
    waves = needed_waves(system, splitting, target) if chosen is None else chosen.waves
    wanted = asked_for(compute_forces, compute_charge_gradients, compute_virial)
    slab = axes if slab_correction else None

    def parts(system: ChargedSystem, wanted: WantedParts) -> list[Parts]:
        return [
            *all_but_smooth_part(potential, system, splitting, rows, slab, exclusions, exclusion_factors, wanted),
            reciprocal_sum(potential, system, splitting, waves, wanted),
        ]

    others = (*tensors_of(rows), exclusions, exclusion_factors, slab, *waves)
    return summed(parts, system, wanted, energy_reduction, hybrid_forces, splitting, others, potential)


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
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The part of the Ewald sum in reciprocal space, with self energy and background: what `ewald_real_space` lacks.

    Parameters
    ----------
    positions, charges, cell, alpha, batch_idx
        As for `ewald_summation`; alpha is required.
    k_vectors, k_cutoff, miller_bounds, miller_indices
        As for `ewald_summation`; one of them is required.
    compute_forces, compute_charge_gradients, compute_virial, hybrid_forces, energy_reduction, potential
        As for `ewald_summation`.

    Returns
    -------
    energies, forces, charge_gradients, virial
        As from `ewald_summation`.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    system = check_system(positions, charges, cell, batch_idx, energy_reduction)
    splitting = given_alpha(alpha, system)
    check_potential(potential)
    if checks.check_flag("hybrid_forces", hybrid_forces):
        system, splitting = system.at_fixed_geometry(), splitting.detach()
    chosen = given_waves(system, k_vectors, k_cutoff, miller_bounds, miller_indices)
    if chosen is None:
        raise ValueError("`k_vectors`, `k_cutoff`, `miller_bounds` or `miller_indices` is needed")
    waves, splitting = chosen.waves, _valid(splitting, chosen)
    wanted = asked_for(compute_forces, compute_charge_gradients, compute_virial)

    def parts(system: ChargedSystem, wanted: WantedParts) -> list[Parts]:
        return [
            reciprocal_sum(potential, system, splitting, waves, wanted),
            self_part(potential, system, splitting, wanted),
        ]

    return summed(parts, system, wanted, energy_reduction, hybrid_forces, splitting, waves, potential)


def prepare_wave_vectors(cell: torch.Tensor, k_cutoff: float | torch.Tensor) -> WaveVectors:
    """Choose the wave vectors up to a length once, for repeated calls: ``miller_indices`` of `ewald_summation`.

    They are kept as integers, so that the cell may change, and energies are continuous in it. Reads values on the host.
    Where it is longer by more than a tenth in some direction, wave vectors up to ``k_cutoff`` are missing: on a CPU an
    `AccuracyWarning` says so.

    Parameters
    ----------
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    k_cutoff : float or (n_systems,) tensor, 1/length

    Returns
    -------
    WaveVectors

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    cells = check_cells_alone(cell).detach()
    lengths = per_system("k_cutoff", k_cutoff, cells.shape[0], cell.device).detach()
    # copies, which the caller's tensors may change without
    cells, lengths = cells.to(torch.float64, copy=True), lengths.clone()
    return WaveVectors(*points_within(cells, lengths))._replace(cell=cells, k_cutoff=lengths)


def _given(*sources: Any) -> Any:
    """The one that is given, or None."""
    return next((source for source in sources if source is not None), None)


def _valid(alpha: torch.Tensor, chosen: "GivenWaves | None") -> torch.Tensor:
    """Alpha; NaN where the given wave vectors are none of the lattice."""
    return alpha if chosen is None or chosen.valid is None else torch.where(chosen.valid, alpha, torch.nan)


class GivenWaves(NamedTuple):
    """The wave vectors that a caller asks for.

    Attributes
    ----------
    waves : WaveVectors
    name : str
        The argument that says so.
    k_cutoff : (n_systems,) tensor or None
        The length up to which all are there, if that is known.
    valid : (n_systems,) bool tensor or None
        False where vectors that could not be looked at are none of the lattice.
    """

    waves: WaveVectors
    name: str
    k_cutoff: torch.Tensor | None = None
    valid: torch.Tensor | None = None


def given_waves(
    system: ChargedSystem, k_vectors: Any, k_cutoff: Any, miller_bounds: Any, miller_indices: Any
) -> GivenWaves | None:
    """The wave vectors that these arguments of `ewald_summation` ask for, if they do."""
    cell, n_systems, device = system.cell.detach(), system.n_systems, system.positions.device
    if sum(source is not None for source in (k_vectors, miller_bounds, miller_indices)) > 1:
        raise ValueError(
            "`k_vectors`, `miller_bounds` and `miller_indices` are different ways to say the same: give one"
        )
    if miller_bounds is not None:
        return GivenWaves(box_points(check_bounds(miller_bounds), n_systems, device), "miller_bounds")
    if isinstance(miller_indices, WaveVectors):
        miller_indices.check(cell)
        return GivenWaves(miller_indices, "miller_indices")
    valid, name = None, "miller_indices"
    if k_vectors is not None:
        (miller_indices, valid), name = _indices_of(k_vectors, system), "k_vectors"
    elif miller_indices is not None:
        checks.check_index("miller_indices", miller_indices, system.positions, (None, 3))
    if miller_indices is not None:
        return GivenWaves(WaveVectors(*points_of_indices(cell, miller_indices)), name, valid=valid)
    if k_cutoff is not None:
        lengths = per_system("k_cutoff", k_cutoff, n_systems, device).detach()
        return GivenWaves(waves_within(cell, lengths), "k_cutoff", k_cutoff=lengths)
    return None


def wave_errors(given: GivenWaves, system: ChargedSystem) -> core.Smooth:
    """The model of errors of these wave vectors. Those of a list are taken for all up to the largest Miller indices."""
    cell = system.cell.detach().to(torch.float64)
    complete = given.waves.complete_up_to(cell) if given.k_cutoff is None else given.k_cutoff
    if complete is not None:
        return core.Sphere(complete)
    bounds, lengths = given.waves.largest_indices(), cell.norm(dim=2)
    if given.name == "miller_bounds":
        return core.Box(core.faces(bounds + 0.5, lengths))
    return core.Sphere(core.faces(bounds.clamp(min=1.0), lengths).amin(1))


def needed_waves(system: ChargedSystem, alpha: torch.Tensor, target: core.Target) -> WaveVectors:
    """The wave vectors that the accuracy asks for."""
    target = target._replace(force=torch.as_tensor(target.force, device=alpha.device))
    return waves_within(system.cell.detach(), core.reciprocal_cutoff(alpha.detach(), spacing_of(system), target, torch))


def waves_within(cell: torch.Tensor, k_cutoff: torch.Tensor) -> WaveVectors:
    """Wave vectors up to lengths (n_systems,)."""
    return WaveVectors(*cached_by_value("wave vectors", (cell, k_cutoff), (), lambda: points_within(cell, k_cutoff)))


def _indices_of(k_vectors: Any, system: ChargedSystem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Miller indices of wave vectors; and for which systems they are some, if that could not be looked at."""
    cell = system.cell.detach().to(torch.float64)
    checks.check_tensor("k_vectors", k_vectors)
    if k_vectors.is_complex():
        raise TypeError(f"`k_vectors` must be real numbers, got {k_vectors.dtype}")
    if k_vectors.device != cell.device:
        raise ValueError(f"`k_vectors` is on {k_vectors.device}, but `positions` is on {cell.device}")
    if (
        k_vectors.ndim not in (2, 3)
        or k_vectors.shape[-1] != 3
        or k_vectors.shape[:-2] not in ((), (1,), cell.shape[:1])
    ):
        raise ValueError(
            f"`k_vectors` must have shape (n_k, 3) or ({system.n_systems}, n_k, 3), got {tuple(k_vectors.shape)}"
        )
    k = k_vectors.detach().to(torch.float64)
    k = k.unsqueeze(0) if k.ndim == 2 else k
    numbers = k.expand(system.n_systems, -1, 3) @ cell.mT / (2.0 * torch.pi)
    indices = numbers.round()
    # float32 rounds numbers of some hundreds by 1e-5
    if not numbers.shape[1]:
        return indices.to(torch.int64), None
    fits = (numbers - indices).abs().amax((1, 2)) < 1e-3
    valid = None
    if not may_read(cell, k_vectors):
        valid = fits
    elif not bool(fits.all()):
        raise ValueError(
            "`k_vectors` are no vectors of the reciprocal lattice of `cell`: make them for this cell, or give "
            "`miller_indices`, which stay the same when the cell changes"
        )
    return torch.nan_to_num(indices).to(torch.int64), valid


__all__ = ["ewald_real_space", "ewald_reciprocal_space", "ewald_summation", "prepare_wave_vectors"]
