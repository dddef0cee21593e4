"""DFT-D3: two sums over pairs, with the coordination number between them.

Formulas and sources: `nvalchemiops.interactions.dispersion.formulas`. Everything is in atomic units.
"""

from typing import Any, NamedTuple

import torch

from nvalchemiops.interactions.dispersion import formulas
from nvalchemiops.interactions.dispersion.damping import RationalDamping, ZeroDamping
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.dispersion.coefficients import d3_coefficients
from nvalchemiops.torch.interactions.dispersion.pair_tables import coefficients_of_pairs, pairs_apart
from nvalchemiops.torch.interactions.dispersion.reference_data import D3Parameters, ReferenceStates
from nvalchemiops.torch.interactions.dispersion.three_body import three_body_sum
from nvalchemiops.torch.interactions.pair.potential import (
    EVERYWHERE,
    PairSystem,
    Wanted,
    check_images,
    sum_pairs,
    systems_of,
    without_open_axes,
)
from nvalchemiops.torch.neighbors.rows import NO_PADDING, GivenNeighbors, Rows, build_rows, row_indices, rows_of
from nvalchemiops.torch.operators.segments import system_sums
from nvalchemiops.torch.runtime.cache import cached_by_value
from nvalchemiops.torch.runtime.context import may_read, values_of

K1, K3 = 16.0, -4.0
"""Steepness of the coordination number and of the weights of reference molecules, as published."""


class Range(NamedTuple):
    """How far one of the two sums reaches.

    Attributes
    ----------
    cutoff : float or None
        Pairs beyond are left out; None leaves that to the neighbor list.
    r_switch : float or None
        From here on the sum goes to zero smoothly, with two continuous derivatives; None for a sharp end.
    """

    cutoff: float | None = None
    r_switch: float | None = None


class Ranges(NamedTuple):
    """How far the sums reach: energies of pairs, coordination numbers, and sides of triangles."""

    pairs: Range
    counted: Range
    triples: Range


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
) -> tuple[torch.Tensor, ...]:
    """DFT-D3 dispersion energies, with what is asked for of forces and virial, and coordination numbers.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, bohr
        float32 or float64; results follow. Positions in angstrom give a wrong energy that nothing can detect:
        divide them by `nvalchemiops.constants.BOHR_IN_ANGSTROM`.
    numbers : (n_atoms,) int32 or int64 tensor
        Atomic numbers; 0 for padding that is nobody's neighbor.
    damping : RationalDamping or ZeroDamping
        As from `damping_parameters`; its entries may be tensors with gradients.
    parameters : D3Parameters or ReferenceStates
        The reference data; or what `D3Parameters.states` prepared of them, which ``torch.compile`` needs.
    cell : (3, 3) or (n_systems, 3, 3) tensor, bohr, optional
        Lattice vectors in rows.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value, half_list
        Neighbors in either format, see `nvalchemiops.torch.neighbors`. Pairs beyond the cutoffs are left out, so a list
        may reach further. Without neighbors they are searched for within the larger cutoff.
    cutoff : float, bohr, optional
        Of the energy of pairs. By default all that are listed.
    coordination_cutoff : float, bohr, optional
        Of the coordination number, by default ``cutoff``. A counted pair never falls below 1e-7, so that thousands of
        far ones matter in the fourth digit: compare programs at equal cutoffs.
    smoothing : float, bohr, optional
        All sums go to zero over the last ``smoothing`` before their cutoffs, with two continuous derivatives. Without
        it energies jump by what a pair at the cutoff has.
    s9 : float or tensor, optional
        Factor of the three-body energy of Axilrod, Teller and Muto, mostly 1; by default there is none. It has first
        derivatives only; second ones raise `NotDifferentiableError`.
    three_body_cutoff : float, bohr, optional
        Of the sides of its triangles, by default ``coordination_cutoff``. The cost grows with its sixth power.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        For the search of neighbors.
    num_systems : int, optional
        Needed inside ``torch.compile`` with ``batch_idx``, unless cells (n_systems, 3, 3) tell it.
    compute_forces, compute_virial : bool, optional
    energy_reduction : {"atom", "system"}, optional
        An atom has half the energy of its pairs.
    k1, k3 : float, optional
        Steepness of the coordination number, and of the weights of reference molecules.

    Returns
    -------
    energies : (n_atoms,) or (n_systems,) tensor, hartree
    forces : (n_atoms, 3) tensor, hartree/bohr
        If asked for.
    coordination_numbers : (n_atoms,) tensor
    virial : (n_systems, 3, 3) tensor, hartree
        If asked for: ``-dE/d(strain)``.

        All are differentiable to any order in positions, cell and damping parameters, but for the part of ``s9``.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; elements without parameters.
    """
    ranges = ranges_of(cutoff, coordination_cutoff, three_body_cutoff, smoothing)
    given = GivenNeighbors(
        neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value
    )
    system = System(positions, numbers, cell, batch_idx, num_systems)
    flags = (checks.check_flag("compute_forces", compute_forces), checks.check_flag("compute_virial", compute_virial))
    wanted = Wanted(flags[0], (), flags[1], energy_reduction)
    system, rows = with_neighbors(system, given, half_list, ranges, pbc)
    if cell is not None and pbc is not None:
        system = system._replace(cell=without_open_axes(cell.reshape(-1, 3, 3), pbc))
    return dispersion_sum(system, rows, damping, parameters, ranges, wanted, k1, k3, s9)


class System(NamedTuple):
    """Atoms, as for `d3_dispersion`."""

    positions: torch.Tensor
    numbers: torch.Tensor
    cell: torch.Tensor | None
    batch_idx: torch.Tensor | None
    num_systems: int | None


def with_neighbors(
    system: System, given: GivenNeighbors, half_list: bool, ranges: Ranges, pbc: Any = None
) -> tuple[System, Rows]:
    """The system, and rows of the given neighbors or of a search within the largest cutoff.

    Atoms and cell are checked first. Atoms that are padding are at the origin, wherever they were, without neighbors.
    """
    positions, cell = system.positions, system.cell
    checks.check_positions(positions, finite=False)
    checks.check_index("numbers", system.numbers, positions, (positions.shape[0],))
    if cell is not None:
        checks.check_lattice(cell, positions)
    is_padding = system.numbers == 0
    has_padding = not may_read(system.numbers) or bool(values_of(is_padding).any())
    if has_padding:
        positions = torch.where(is_padding.unsqueeze(1), 0.0, positions)
        system = system._replace(positions=positions)
    half_list = checks.check_flag("half_list", half_list)
    rows = rows_of(given, positions, cell is not None, half_list)
    if rows is None:
        if half_list:
            raise ValueError("`half_list` describes a list, but none is given")
        cutoffs = [reach.cutoff for reach in ranges]
        if None in cutoffs:
            raise ValueError("`neighbor_list` or `neighbor_matrix` is needed: without `cutoff` no list can be built")
        rows = build_rows(positions, max(c for c in cutoffs if c is not None), cell, system.batch_idx, pbc)
    if not has_padding:
        return system, rows
    # atoms that are padding are nobody's neighbors and have none, whatever the list says
    last = positions.shape[0]
    nobody = torch.nn.functional.pad(is_padding, (0, 1))
    listed = torch.where((rows.neighbors < 0) | (rows.neighbors > last), last, rows.neighbors)
    gone = nobody.index_select(0, listed) | nobody.index_select(0, row_indices(rows, last))
    # a list without padding gets a number for it that nobody writes
    padding = max(rows.padding, NO_PADDING + 1)
    return system, rows._replace(neighbors=rows.neighbors.masked_fill(gone, padding), padding=padding)


def dispersion_sum(
    system: System,
    rows: Rows,
    damping: RationalDamping | ZeroDamping,
    parameters: D3Parameters | ReferenceStates,
    ranges: Ranges,
    wanted: Wanted,
    k1: float,
    k3: float,
    s9: float | torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """What `d3_dispersion` returns."""
    if not isinstance(damping, RationalDamping | ZeroDamping):
        raise TypeError(f"`damping` must be RationalDamping or ZeroDamping, got {type(damping).__name__}")
    checks.check_choice("energy_reduction", wanted.energy_reduction, ("atom", "system"))
    k3, s9 = checks.as_float("k3", k3), _scalar("s9", s9)
    states, atoms = _look_up(parameters, system.numbers)
    dtype = system.positions.dtype

    # parameters of the damping may be those of each system
    apart = wanted.virial or any(isinstance(value, torch.Tensor) and value.numel() > 1 for value in damping)
    cell, batch_idx, n_systems = systems_of(
        system.positions, system.cell, system.batch_idx, system.num_systems, apart or wanted.energy_reduction != "atom"
    )
    cell = check_images(rows, cell, batch_idx, system.positions, n_systems)
    if cell is None and not apart:
        pairs = PairSystem(system.positions, None, None, 1, rows)
    else:
        pairs = PairSystem(system.positions, cell, batch_idx, n_systems, rows)

    counting = formulas.COORDINATION if ranges.counted.r_switch is None else formulas.COORDINATION_SWITCHED
    radii: dict[str, Any] = {"radius": atoms.radius.to(dtype), "k1": k1}
    coordination = sum_pairs(counting, pairs, radii, Wanted(), **ranges.counted._asdict())
    assert isinstance(coordination, torch.Tensor)
    at_counts = _factorised if states.pair_c6 is None else _by_pair
    found = at_counts(pairs, coordination, damping, states, atoms, ranges, wanted, k3, s9)
    energies = found.energies
    if wanted.energy_reduction == "system":
        energies = system_sums(energies, batch_idx, n_systems)
    if found.by_count is None:
        return energies, coordination

    through = Wanted(wanted.forces, (), wanted.virial)
    weights = found.by_count
    _, *more = _as_list(sum_pairs(counting, pairs, radii, through, **ranges.counted._asdict(), weights=weights))
    results = [energies]
    if found.forces is not None:
        results.append(found.forces + more.pop(0))
    results.append(coordination)
    if found.virial is not None:
        results.append(found.virial + more.pop())
    return tuple(results)


class AtCounts(NamedTuple):
    """Energies of atoms as functions of positions and coordination numbers, and what is wanted of their slopes.

    Attributes
    ----------
    energies : (n_atoms,) tensor
    forces : (n_atoms, 3) tensor or None
    virial : (n_systems, 3, 3) tensor or None
    by_count : (n_atoms,) tensor or None
        Slopes by the coordination numbers; None if neither forces nor virial are wanted.
    """

    energies: torch.Tensor
    forces: torch.Tensor | None
    virial: torch.Tensor | None
    by_count: torch.Tensor | None


def _factorised(
    pairs: PairSystem,
    coordination: torch.Tensor,
    damping: RationalDamping | ZeroDamping,
    states: ReferenceStates,
    atoms: "Atoms",
    ranges: Ranges,
    wanted: Wanted,
    k3: float,
    s9: float | torch.Tensor,
) -> AtCounts:
    """With coefficients of atoms."""
    dtype = coordination.dtype
    derivatives = wanted.forces or wanted.virial
    coefficients, slopes = d3_coefficients(
        coordination.to(torch.float64), atoms.row, states.coordination, states.places, states.vectors, k3, 0
    )
    coefficients = coefficients.to(dtype)
    n_coefficients = coefficients.shape[1]
    formula, of_pair, species = _pair_energy(
        damping, states.n_positive, n_coefficients - states.n_positive, coefficients, atoms, states, ranges
    )
    names = formula.per_atom[:n_coefficients]
    first = wanted._replace(gradients=(names,) if derivatives else (), energy_reduction="atom")
    energies, *found = _as_list(sum_pairs(formula, pairs, of_pair, first, **ranges.pairs._asdict(), species=species))
    forces = found.pop(0) if wanted.forces else None
    virial = found.pop() if wanted.virial else None
    by_coefficient = found[0] if derivatives else None

    if isinstance(s9, torch.Tensor) or s9 != 0.0:
        triples = _three_body(pairs, coefficients, atoms.row, states, ranges.triples, derivatives)
        energies = energies + s9 * triples[0]
        forces = None if forces is None else forces - s9 * triples[1]
        virial = None if virial is None else virial + s9 * triples[4]
        by_coefficient = None if by_coefficient is None else by_coefficient + s9 * triples[2]
    if by_coefficient is None:
        return AtCounts(energies, None, None, None)
    by_count = (by_coefficient.to(torch.float64) * slopes).sum(1).to(dtype)
    return AtCounts(energies, forces, virial, by_count)


def _by_pair(
    pairs: PairSystem,
    coordination: torch.Tensor,
    damping: RationalDamping | ZeroDamping,
    states: ReferenceStates,
    atoms: "Atoms",
    ranges: Ranges,
    wanted: Wanted,
    k3: float,
    s9: float | torch.Tensor,
) -> AtCounts:
    """With a coefficient of each pair, for tables that do not factorise."""
    if isinstance(s9, torch.Tensor) or s9 != 0.0:
        raise ValueError("`s9`: there is no three-body term for tables `c6ab` and `cn_ref` that do not factorise")
    dtype, n_atoms = coordination.dtype, coordination.shape[0]
    derivatives = wanted.forces or wanted.virial
    first, second, vectors, alone = pairs_apart(pairs)
    coefficients, *slopes = coefficients_of_pairs(coordination.to(torch.float64), first, second, atoms.row, states, k3)
    # of both atoms of a pair, whose product is C6
    of_both = torch.stack([coefficients.to(dtype), torch.ones_like(coefficients, dtype=dtype)], 1).reshape(-1, 1)
    both = torch.stack([first, second], 1).reshape(-1)
    those = Atoms(*(of_atom.index_select(0, both) for of_atom in atoms))
    formula, of_pair, species = _pair_energy(damping, 1, 0, of_both, those, states, ranges)
    names = formula.per_atom[:1]
    asked = Wanted(derivatives, (names,) if derivatives else ())
    energies, *found = _as_list(sum_pairs(formula, alone, of_pair, asked, **ranges.pairs._asdict(), species=species))

    def of_atoms(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros((n_atoms, *values.shape[1:]), dtype=torch.float64, device=values.device)
        return sums.index_add(0, index, values.to(torch.float64))

    # each pair is there twice, and half of it counts: its first atom's half
    of_atom = of_atoms(energies[::2], first).to(dtype)
    if not derivatives:
        return AtCounts(of_atom, None, None, None)
    push = 0.5 * found[0][1::2]  # on the second atom
    forces = (of_atoms(push, second) - of_atoms(push, first)).to(dtype) if wanted.forces else None
    virial = None
    if wanted.virial:
        dyads = of_atoms((push.unsqueeze(2) * vectors.unsqueeze(1)).flatten(1), first).unbind(1)
        sums = [system_sums(part, pairs.batch_idx, pairs.n_systems) for part in dyads]
        virial = torch.stack(sums, 1).view(-1, 3, 3).to(dtype)
    by_c6 = 0.5 * found[1][::2, 0].to(torch.float64)
    by_count = of_atoms(by_c6 * slopes[0], first) + of_atoms(by_c6 * slopes[1], second)
    return AtCounts(of_atom, forces, virial, by_count.to(dtype))


def _pair_energy(
    damping: RationalDamping | ZeroDamping,
    n_positive: int,
    n_negative: int,
    coefficients: torch.Tensor,
    atoms: "Atoms",
    states: ReferenceStates,
    ranges: Ranges,
) -> tuple[Formula, dict[Any, Any], torch.Tensor | None]:
    """The energy of a pair with these coefficients of atoms, its parameters, and the species."""
    dtype = coefficients.dtype
    make = formulas.rational if isinstance(damping, RationalDamping) else formulas.zero
    formula = make(n_positive, n_negative, ranges.pairs.r_switch is not None)
    names = formula.per_atom[: n_positive + n_negative]
    of_pair: dict[Any, Any] = {names: coefficients, "z": atoms.z.to(dtype), **damping._asdict()}
    if not formula.per_pair:
        return formula, of_pair, None
    return formula, of_pair | {"r0": _pair_radii(states, dtype)}, atoms.row


def _scalar(name: str, value: Any) -> Any:
    """A number, or a tensor with one entry, which may have a gradient."""
    if not isinstance(value, torch.Tensor):
        return checks.as_float(name, value)
    if value.numel() != 1:
        raise ValueError(f"`{name}` must be a number or a tensor with one entry, got shape {tuple(value.shape)}")
    return value.reshape(())


def _as_list(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def _pair_radii(states: ReferenceStates, dtype: torch.dtype) -> torch.Tensor:
    if states.pair_radii is None:
        raise ValueError("`parameters` lack `r0ab`, the radii of pairs, which zero damping and three-body terms need")
    return states.pair_radii.to(dtype)


def _three_body(
    system: PairSystem,
    coefficients: torch.Tensor,
    row: torch.Tensor,
    states: ReferenceStates,
    reach: Range,
    derivatives: bool,
) -> tuple[torch.Tensor, ...]:
    """Three-body energies and their derivatives for s9 = 1, see `three_body_sum`."""
    positions, cell, batch_idx, n_systems, rows = system
    return three_body_sum(
        positions,
        cell,
        coefficients,
        row,
        _pair_radii(states, coefficients.dtype),
        batch_idx,
        n_systems,
        rows.begin,
        rows.neighbors,
        rows.shifts,
        rows.width,
        rows.padding,
        states.n_positive,
        EVERYWHERE if reach.cutoff is None else reach.cutoff,
        EVERYWHERE if reach.r_switch is None else reach.r_switch,
        derivatives=derivatives,
    )


def ranges_of(cutoff: Any, coordination_cutoff: Any, three_body_cutoff: Any, smoothing: Any) -> Ranges:
    """How far the sums reach."""
    names = ("cutoff", "coordination_cutoff", "three_body_cutoff")
    cutoffs: list[float | None] = []
    for name, value in zip(names, (cutoff, coordination_cutoff, three_body_cutoff)):
        # each is that of the sum before by default
        default = cutoffs[-1] if cutoffs else None
        cutoffs.append(default if value is None else checks.check_positive(name, value))
    if smoothing is None:
        return Ranges(*(Range(c) for c in cutoffs))
    smoothing = checks.check_positive("smoothing", smoothing)
    known = [c for c in cutoffs if c is not None]
    if len(known) < len(cutoffs):
        raise ValueError("`cutoff` is needed with `smoothing`, which ends there")
    if smoothing >= min(known):
        raise ValueError(f"`smoothing` = {smoothing} must be smaller than the cutoffs, of which one is {min(known)}")
    return Ranges(*(Range(c, c - smoothing) for c in known))


class Atoms(NamedTuple):
    """What `ReferenceStates` says of each atom: its row there (int32), radius and z."""

    row: torch.Tensor
    radius: torch.Tensor
    z: torch.Tensor


def _look_up(parameters: Any, numbers: torch.Tensor) -> tuple[ReferenceStates, Atoms]:
    """The states of the elements that are there, and what they say of each atom."""
    if isinstance(parameters, ReferenceStates):
        if parameters.radii.device != numbers.device:
            raise ValueError(f"`parameters` are on {parameters.radii.device}, but `numbers` on {numbers.device}")
        states = parameters
        return states, Atoms(*cached_by_value("d3 atoms", (numbers,), states.serial, lambda: _atoms(numbers, states)))
    if not isinstance(parameters, D3Parameters):
        raise TypeError(f"`parameters` must be D3Parameters or ReferenceStates, got {type(parameters).__name__}")
    if not may_read(numbers, wait=True):
        raise ValueError(
            "`parameters`: prepare them with D3Parameters.states(elements) before torch.compile or vmap, where atomic "
            "numbers cannot be read"
        )
    # what is not in the table at all, `ReferenceStates.rows` will name
    last = parameters.rcov.shape[0] - 1

    def states_of(found: torch.Tensor) -> ReferenceStates:
        elements = [number for number in found.tolist() if 0 < number <= last]
        # without atoms the states of any element will do
        return parameters.states(elements or parameters.elements[:1], numbers.device)

    def look_up() -> tuple[torch.Tensor, ...]:
        found = values_of(numbers).clamp(0, last + 1).bincount().nonzero().flatten()
        return found, *_atoms(numbers, states_of(found))

    found, *of_atoms = cached_by_value("d3 elements", (numbers,), parameters.token, look_up)
    return states_of(found), Atoms(*of_atoms)


def _atoms(numbers: torch.Tensor, states: ReferenceStates) -> Atoms:
    row = states.rows(numbers)
    return Atoms(row.to(torch.int32), states.radii.index_select(0, row), states.z.index_select(0, row))
