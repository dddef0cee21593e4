"""The short-ranged part of an Ewald sum, and what excluded pairs have to lose: both by the pair machinery."""

from collections.abc import Callable
from typing import Any

import torch

from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.potentials import EWALD_REAL_SPACE, ewald_short_range
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.potentials import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.results import Parts, WantedParts, asked_for, together
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem, check_system, given_alpha
from nvalchemiops.torch.interactions.pair import driver as pairs
from nvalchemiops.torch.neighbors.rows import NO_PADDING, GivenNeighbors, Rows, build_rows, rows_of
from nvalchemiops.torch.operators.lattice import lattice_of, shortest_vectors
from nvalchemiops.torch.operators.segments import row_pointers
from nvalchemiops.torch.runtime.context import may_read

MOST_CHANNELS = 16
"""Channels that one kernel sums at once: more would take long to compile."""


def pair_part(
    formula: Callable[[int], Formula],
    system: ChargedSystem,
    alpha: torch.Tensor,
    rows: Rows,
    wanted: WantedParts,
    **options: Any,
) -> Parts:
    """Energies and their derivatives of pairs.

    ``formula`` gives the pair potential for a number of charges: quadratic in them, with one global parameter, alpha or
    another length or its inverse.
    """
    n_channels = system.charges.shape[1]
    if n_channels > MOST_CHANNELS:
        blocks = [
            pair_part(formula, system._replace(charges=charges), alpha, rows, wanted, **options)
            for charges in system.charges.split(MOST_CHANNELS, 1)
        ]
        columns: list[Any] = list(zip(*blocks))
        return Parts(
            torch.cat(columns[0], 1),
            sum(columns[1]) if wanted.forces else None,
            torch.cat(columns[2], 1) if wanted.charge_gradients else None,
            sum(columns[3]) if wanted.virial else None,
        )
    of_pair = formula(n_channels)
    names = of_pair.per_atom
    gradients = (names,) if n_channels > 1 or wanted.charge_gradients else ()
    results = pairs.sum_pairs(
        of_pair,
        pairs.PairSystem(system.positions, system.cell, system.batch_idx, system.n_systems, rows),
        {names: system.charges, of_pair.global_parameters[0]: alpha.to(system.positions.dtype)},
        pairs.Wanted(wanted.forces, gradients, wanted.virial),
        **{"cutoff": None} | options,
    )
    found = iter(results if isinstance(results, tuple) else (results,))
    energies = next(found).unsqueeze(1)
    forces = next(found) if wanted.forces else None
    slopes = next(found) if gradients else None
    virial = next(found) if wanted.virial else None
    if n_channels > 1 and slopes is not None:
        # of a quadratic form: the energy of each channel is half its charge times the slope
        energies = 0.5 * system.charges * slopes
    return Parts(energies, forces, slopes if wanted.charge_gradients else None, virial)


def given_rows(given: GivenNeighbors, system: ChargedSystem, half_list: bool) -> Rows | None:
    """The rows of a given list or matrix, or None."""
    half_list = checks.check_flag("half_list", half_list)
    rows = rows_of(given, system.positions, periodic=True, half_list=half_list)
    if rows is None and half_list:
        raise ValueError("`half_list` describes a list, but none is given")
    return rows


def tensors_of(rows: Rows) -> tuple[torch.Tensor | None, ...]:
    """The tensors among the attributes of rows."""
    return rows.begin, rows.neighbors, rows.shifts, rows.first


def self_part(potential: LongRangePotential, system: ChargedSystem, alpha: torch.Tensor, wanted: WantedParts) -> Parts:
    """The self energies alone: what the pair potential gives without a pair."""
    device = system.positions.device
    begin = torch.zeros(system.n_atoms + 1, dtype=torch.int32, device=device)
    nobody = torch.zeros(0, dtype=torch.int32, device=device)
    rows = Rows(begin, nobody, nobody.reshape(0, 3), 0, NO_PADDING, None)
    return pair_part(potential.short_range, system, alpha, rows, wanted)


def nearest_images(system: ChargedSystem, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Shifts (n, 3) of the images of the second atoms that are closest to the first ones."""
    with torch.no_grad():
        positions = system.positions.detach().to(torch.float64)
        cell = system.cell.detach().to(torch.float64)
        # along the shortest lattice vectors, where the nearest image is at most one further than rounding has it
        short = shortest_vectors(cell).to(torch.float64)
        cell = short @ cell
        coordinates = lattice_of(cell, system.batch_idx, system.n_atoms).fractional(positions)
        rounded = -(coordinates.index_select(0, second) - coordinates.index_select(0, first)).round()
        near = torch.arange(-1, 2, dtype=torch.float64, device=cell.device)
        around = torch.cartesian_prod(near, near, near)
        shifts = rounded.unsqueeze(1) + around
        if system.batch_idx is not None:
            of_pair = system.batch_idx.index_select(0, first)
            cell, short = cell.index_select(0, of_pair), short.index_select(0, of_pair)
        apart = positions.index_select(0, second) - positions.index_select(0, first)
        nearest = (apart.unsqueeze(1) + shifts @ cell).square().sum(-1).argmin(1)
        found = rounded + around.index_select(0, nearest)
        return (found.unsqueeze(1) @ short).squeeze(1).to(torch.int32)


def exclusion_part(
    formula: Callable[[int], Formula],
    system: ChargedSystem,
    alpha: torch.Tensor,
    exclusions: torch.Tensor,
    factors: torch.Tensor | None,
    wanted: WantedParts,
) -> Parts:
    """What excluded pairs lose of the smooth part of the sum, at their nearest image; ``formula`` says how much.

    The arguments must have passed the checks of the pair machinery, which takes their short-ranged part.
    """
    if system.batch_idx is not None and may_read(system.batch_idx):
        of_pair = system.batch_idx[exclusions.long()]
        if not torch.equal(of_pair[0], of_pair[1]):
            raise ValueError("`exclusions` joins atoms of different systems")
    first, second = exclusions.to(torch.int64)
    shifts = nearest_images(system, first, second)
    row, order = torch.sort(torch.cat([first, second]), stable=True)
    other = torch.cat([second, first]).index_select(0, order).to(torch.int32)
    shifts = torch.cat([shifts, -shifts]).index_select(0, order)
    rows = Rows(row_pointers(row, system.n_atoms), other, shifts, 0, NO_PADDING, row.to(torch.int32))
    lost = None if factors is None else 1.0 - factors
    options = {} if lost is None else {"exclusions": exclusions, "exclusion_factors": lost}
    return pair_part(formula, system, alpha, rows, wanted, **options)


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
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Short-ranged part of the Ewald sum: energies ``1/2 Σ_j q_i q_j erfc(α r_ij) / r_ij`` over the neighbors.

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
        What stands for no neighbor; n_atoms by default.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    compute_forces, compute_charge_gradients, compute_virial : bool, optional
    hybrid_forces : bool, optional
        Results depend on positions, cell and alpha as on constants: gradients flow through the charges alone. For
        charges that depend on the geometry, explicit forces and the gradient of this energy add up to the total force.
    energy_reduction : {"atom", "system"}, optional
    cutoff : float, length, optional
        Pairs at this distance or farther are left out. By default all pairs in the list count.

    Returns
    -------
    energies : (n_atoms,) or (n_systems,) tensor, charge²/length
        With channels (n_atoms, n_channels) or (n_systems, n_channels).
    forces : (n_atoms, 3) tensor, ``-dE/dR`` at fixed charges, if asked for
    charge_gradients : tensor like ``charges``, ``dE/dq``, if asked for
    virial : (n_systems, 3, 3) tensor, ``-dE/dstrain``, if asked for

    Differentiable to any order in positions, charges, cell and alpha.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    system = check_system(positions, charges, cell, batch_idx, energy_reduction)
    cutoff = None if cutoff is None else checks.check_positive("cutoff", cutoff)
    if isinstance(alpha, torch.Tensor):
        checks.check_real("alpha", alpha, positions)
    splitting = given_alpha(alpha, system)
    if checks.check_flag("hybrid_forces", hybrid_forces):
        system, splitting = system.at_fixed_geometry(), splitting.detach()
    given = GivenNeighbors(
        neighbor_list,
        neighbor_ptr,
        neighbor_shifts,
        neighbor_matrix,
        neighbor_matrix_shifts,
        mask_value,
        fill_name="mask_value",
    )
    wanted = asked_for(compute_forces, compute_charge_gradients, compute_virial)
    rows = given_rows(given, system, half_list)
    if rows is None:
        if cutoff is None:
            raise ValueError("`neighbor_list` or `neighbor_matrix` is needed: without `cutoff` no list can be built")
        rows = build_rows(positions, cutoff, system.cell, system.batch_idx)
    part = pair_part(_pairs_alone, system, splitting, rows, wanted, cutoff=cutoff)
    return together([part], positions, system.has_channels, energy_reduction, system.batch_idx, system.n_systems)


def _pairs_alone(n_charges: int) -> Formula:
    """The short-ranged part without the self energy."""
    return EWALD_REAL_SPACE if n_charges == 1 else ewald_short_range(1, n_charges)._replace(self_energy="")
