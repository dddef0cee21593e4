"""The driver of DFT-D3: one sum over pairs for the coordination numbers, then one for the energies that depend on them.

See `nvalchemiops.interactions.dispersion.formulas` for formulas and sources. All quantities are in atomic units.
"""

import functools
from typing import Any, NamedTuple

import torch

from nvalchemiops.interactions.dispersion import formulas
from nvalchemiops.interactions.dispersion.damping import RationalDamping, ZeroDamping
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.torch import checks
from nvalchemiops.torch.distributed.agreement import described
from nvalchemiops.torch.interactions.dispersion.coefficients import d3_coefficients
from nvalchemiops.torch.interactions.dispersion.pair_tables import coefficients_of_pairs, pairs_apart
from nvalchemiops.torch.interactions.dispersion.reference_data import D3Parameters, ReferenceStates
from nvalchemiops.torch.interactions.dispersion.three_body import three_body_sum
from nvalchemiops.torch.interactions.pair import shares
from nvalchemiops.torch.interactions.pair.driver import PairRequest, run, sum_pairs
from nvalchemiops.torch.interactions.pair.system import NO_CUTOFF, PairSystem, pair_system
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.operators.segments import system_sums
from nvalchemiops.torch.runtime._torch_internals import only_inlined
from nvalchemiops.torch.runtime.cache import cached_by_value
from nvalchemiops.torch.runtime.context import ValuesNeededError, is_eager, may_read, on_host, values_of
from nvalchemiops.torch.systems import System

K1, K3 = 16.0, -4.0
"""Steepness of the coordination number and of the weights of reference molecules, as published."""


MOST_OF_SIGN = 48
"""Largest number of coefficients with either sign in one kernel, if there are more than twice as many.

The time to compile a kernel grows faster than this number: with those of all elements it took 20 seconds.
"""


class Range(NamedTuple):
    """Cutoff of a sum."""

    cutoff: float | None = None  # pairs at this distance or beyond are left out; None if all listed pairs count
    r_switch: float | None = None  # where switching begins, with two continuous derivatives; None for a sharp cutoff


class Ranges(NamedTuple):
    """Cutoffs of the three sums: pair energies, coordination numbers, and the sides of triples."""

    pairs: Range
    counted: Range
    triples: Range


class Atoms(NamedTuple):
    """The reference states of the elements, and for each atom its row among them (int32), its radius and its z."""

    states: ReferenceStates
    row: torch.Tensor
    radius: torch.Tensor
    z: torch.Tensor


class Settings(NamedTuple):
    """Arguments of `d3_dispersion` other than atoms, reference data and neighbors."""

    damping: RationalDamping | ZeroDamping
    ranges: Ranges
    k1: float
    k3: float
    s9: float | torch.Tensor
    request: PairRequest
    num_systems: int | None

    def checked(self) -> "Settings":
        """The same settings with ``k3`` and ``s9`` converted; raise if they or the damping have a wrong type."""
        if not isinstance(self.damping, RationalDamping | ZeroDamping):
            raise TypeError(f"`damping` must be RationalDamping or ZeroDamping, got {type(self.damping).__name__}")
        return self._replace(k3=checks.as_float("k3", self.k3), s9=_scalar("s9", self.s9))

    @property
    def has_triples(self) -> bool:
        """Whether there is a three-body energy."""
        return isinstance(self.s9, torch.Tensor) or self.s9 != 0.0

    @property
    def tells_apart(self) -> bool:
        """Whether sums over pairs must distinguish systems: a result, or a damping parameter, is per system."""
        several = any(isinstance(value, torch.Tensor) and value.numel() > 1 for value in self.damping)
        return self.request.virial or several


@functools.partial(only_inlined, with_calls=True)
def dispersion_sum(
    structure: System, parameters: D3Parameters | ReferenceStates, settings: Settings, given: GivenNeighbors
) -> tuple[torch.Tensor, ...]:
    """Arguments and results as for `d3_dispersion`; neighbors are searched for within the largest cutoff.

    Padding atoms are moved to the origin and have no neighbors.
    """
    settings = settings.checked()
    damping = settings.damping
    options: tuple[Any, ...] = (type(damping).__name__, *settings[1:4], *settings[5:])
    if structure.domain is None and is_eager():
        _check_numbers(structure)
        if isinstance(parameters, D3Parameters) and structure.numbers is not None and may_read(structure.numbers):
            parameters = _states_of(parameters, structure.numbers)
        options = (*options, parameters)

    def system_of(here: System, near: GivenNeighbors) -> PairSystem:
        return _system(here, settings, near)

    def evaluate(
        near: GivenNeighbors, /, positions: Any, cell: Any, s9: Any, **values: Any
    ) -> tuple[torch.Tensor, ...]:
        here = structure._replace(positions=positions, cell=cell)
        damped = damping._replace(**{name: values[name] for name in damping._fields})
        return _dispersion_sum(here, parameters, settings._replace(damping=damped, s9=s9), near)

    call = "D3", evaluate, structure, given, system_of
    return run(*call, {**damping._asdict(), "s9": settings.s9}, {"numbers": structure.numbers}, options)


def _check_numbers(structure: System) -> None:
    positions, numbers = structure.positions, structure.numbers
    checks.check_positions(positions, finite=False)
    checks.check_index("numbers", numbers, positions, (positions.shape[0],))


def _dispersion_sum(
    structure: System, parameters: D3Parameters | ReferenceStates, settings: Settings, given: GivenNeighbors
) -> tuple[torch.Tensor, ...]:
    domain, request = structure.domain, settings.request
    ranges, positions, numbers = settings.ranges, structure.positions, structure.numbers
    with shares.together(domain):
        _check_numbers(structure)
        assert numbers is not None
        if domain is not None:
            shares.must_be_same(
                domain,
                settings=Settings._make((*settings[:5], None, None)),
                request=request,
                parameters=type(parameters).__name__,
            )
            if may_read(numbers, wait=not domain.is_deferred) and bool((numbers <= 0).any()):
                raise ValueError("`numbers`: padding (0) is not allowed with a `domain`")
    elements, tables = None, parameters
    complete = functools.partial(shares.replicated, domain)
    damping = type(settings.damping)(*map(complete, settings.damping))
    settings = settings._replace(damping=damping, s9=complete(settings.s9))
    if domain is not None and isinstance(parameters, D3Parameters):
        elements = domain._union(numbers, parameters.rcov.shape[0])
    with shares.together(domain):
        if elements is not None:
            assert isinstance(parameters, D3Parameters)
            parameters = parameters.states(elements or parameters.elements[:1], numbers.device)
        atoms = _look_up(parameters, numbers)
        if domain is not None:
            shares.must_be_same(domain, parameters=_tables(tables, atoms.states))
        if domain is not None and atoms.states.pair_c6 is not None:
            raise ValueError("`parameters`: with a `domain` the tables must factorise, as the published ones do")
        dtype = positions.dtype
        system = _system(structure, settings, given)
    pairs = system
    # atoms of different systems are never neighbors: without cells, sums over pairs can ignore systems
    if system.cell is None and not settings.tells_apart:
        pairs = system._replace(batch_idx=None, n_systems=1)

    counting = formulas.COORDINATION if ranges.counted.r_switch is None else formulas.COORDINATION_SWITCHED
    radii: dict[str, Any] = {"radius": atoms.radius.to(dtype), "k1": settings.k1}
    (coordination,) = sum_pairs(counting, pairs, radii, PairRequest(), **ranges.counted._asdict())
    at_counts = _factorised if atoms.states.pair_c6 is None else _by_pair
    found = at_counts(pairs, coordination, atoms, settings)
    energies = found.energies
    if request.energy_reduction == "system":
        energies = system_sums(energies, system.batch_idx, system.n_systems)
        energies = shares.summed(domain, energies)
    if found.by_count is None:
        return energies, coordination

    through = PairRequest(request.forces, (), request.virial)
    weights = found.by_count
    _, *more = sum_pairs(counting, pairs, radii, through, **ranges.counted._asdict(), weights=weights)
    results = [energies]
    if found.forces is not None:
        results.append(found.forces + more[0])
    results.append(coordination)
    if found.virial is not None:
        results.append(shares.summed(domain, found.virial + more[-1]))
    return tuple(results)


def _system(structure: System, settings: Settings, given: GivenNeighbors) -> PairSystem:
    """The atoms with their neighbors within the largest of the ranges."""
    numbers, domain, ranges = structure.numbers, structure.domain, settings.ranges
    assert numbers is not None
    is_padding = numbers == 0
    has_padding = not may_read(numbers) or bool((on_host(numbers) == 0).any())
    if has_padding:
        structure = structure._replace(positions=torch.where(is_padding.unsqueeze(1), 0.0, structure.positions))
    # with a domain, cutoffs of sums that are not requested do not count, so that ranks need fewer ghosts
    cutoffs = [reach.cutoff for reach in (ranges if domain is None or settings.has_triples else ranges[:2])]
    farthest = None if None in cutoffs else max(c for c in cutoffs if c is not None)
    by_system, absent = settings.tells_apart or settings.request.by_system, is_padding if has_padding else None
    return pair_system(structure, given, settings.num_systems, cutoff=farthest, by_system=by_system, is_padding=absent)


class AtCounts(NamedTuple):
    """Energies of atoms as functions of positions and coordination numbers, with the requested partial derivatives."""

    energies: torch.Tensor  # (n_atoms,)
    forces: torch.Tensor | None  # (n_atoms, 3), at fixed coordination numbers, and so the virial
    virial: torch.Tensor | None  # (n_systems, 3, 3)
    # (n_atoms,), with respect to the coordination numbers; None if neither forces nor virial are requested
    by_count: torch.Tensor | None


def _factorised(pairs: PairSystem, coordination: torch.Tensor, atoms: Atoms, settings: Settings) -> AtCounts:
    """Energies with C6 as a sum of products of coefficients of atoms."""
    dtype, states, request = coordination.dtype, atoms.states, settings.request
    derivatives = request.forces or request.virial
    coefficients, by_coordination = d3_coefficients(
        coordination.to(torch.float64), atoms.row, states.coordination, states.places, states.vectors, settings.k3, 0
    )
    coefficients = coefficients.to(dtype)
    first = request._replace(energy_reduction="atom")
    energies, forces, virial, by_coefficient = _sum_of_parts(pairs, coefficients, atoms, settings, first)

    if settings.has_triples:
        s9 = settings.s9
        triples = _three_body(pairs, coefficients, atoms, settings.ranges.triples, derivatives)
        energies = energies + s9 * triples[0]
        forces = None if forces is None else forces - s9 * triples[1]
        virial = None if virial is None else virial + s9 * triples[4]
        by_coefficient = None if by_coefficient is None else by_coefficient + s9 * triples[2]
    if by_coefficient is None:
        return AtCounts(energies, None, None, None)
    by_count = (by_coefficient.to(torch.float64) * by_coordination).sum(1).to(dtype)
    return AtCounts(energies, forces, virial, by_count)


def _sum_of_parts(
    pairs: PairSystem, coefficients: torch.Tensor, atoms: Atoms, settings: Settings, request: PairRequest
) -> tuple[Any, ...]:
    """Energies, forces, virial and derivatives with respect to coefficients; None for those that are not requested.

    Energies are linear in C6. So those of many coefficients are sums over parts with few, of the same kernel.
    """
    n_positive, n_coefficients = atoms.states.n_positive, coefficients.shape[1]
    counts, parts = [n_positive, n_coefficients - n_positive], [coefficients]
    if n_coefficients > 2 * MOST_OF_SIGN:
        of_sign = coefficients.split(counts, 1)
        n_parts = -(-max(counts) // MOST_OF_SIGN)
        width = 8 * -(-max(counts) // (8 * n_parts))  # few different kernels
        padded = [torch.nn.functional.pad(part, (0, n_parts * width - part.shape[1])) for part in of_sign]
        parts = [torch.cat(part, 1) for part in zip(*(part.split(width, 1) for part in padded))]
        counts = [width, width]
    derivatives, found = request.forces or request.virial, []
    for part in parts:
        formula, of_pair, species = _pair_energy(settings, counts[0], counts[1], part, atoms)
        asked = request._replace(gradients=(formula.per_atom[: sum(counts)],) if derivatives else ())
        found.append(sum_pairs(formula, pairs, of_pair, asked, **settings.ranges.pairs._asdict(), species=species))
    energies, *others = (values[0] if len(parts) == 1 else torch.stack(values).sum(0) for values in zip(*found))
    if not derivatives:
        return energies, None, None, None
    by_part = [values[1 + request.forces] for values in found]
    by_coefficient = by_part[0]
    if len(parts) > 1:
        by_sign = [torch.cat(part, 1) for part in zip(*(part.split(counts, 1) for part in by_part))]
        by_coefficient = torch.cat([by_sign[0][:, :n_positive], by_sign[1][:, : n_coefficients - n_positive]], 1)
    return energies, others[0] if request.forces else None, others[-1] if request.virial else None, by_coefficient


def _by_pair(pairs: PairSystem, coordination: torch.Tensor, atoms: Atoms, settings: Settings) -> AtCounts:
    """Energies with a separate C6 for each pair, for tables that do not factorise."""
    if settings.has_triples:
        raise ValueError("`s9`: there is no three-body energy for tables `c6ab` and `cn_ref` that do not factorise")
    dtype, n_atoms, request = coordination.dtype, coordination.shape[0], settings.request
    derivatives = request.forces or request.virial
    first, second, vectors, alone = pairs_apart(pairs)
    coefficients, by_first, by_second = coefficients_of_pairs(
        coordination.to(torch.float64), first, second, atoms.row, atoms.states, settings.k3
    )
    # coefficients of the two atoms of a pair, C6 and 1, whose product is C6
    of_both = torch.stack([coefficients.to(dtype), torch.ones_like(coefficients, dtype=dtype)], 1).reshape(-1, 1)
    both = torch.stack([first, second], 1).reshape(-1)
    atoms_of_pairs = Atoms(atoms.states, *(of_atom.index_select(0, both) for of_atom in atoms[1:]))
    formula, of_pair, species = _pair_energy(settings, 1, 0, of_both, atoms_of_pairs)
    names = formula.per_atom[:1]
    request_of_pairs = PairRequest(derivatives, (names,) if derivatives else ())
    energies, *found = sum_pairs(
        formula, alone, of_pair, request_of_pairs, **settings.ranges.pairs._asdict(), species=species
    )

    def of_atoms(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros((n_atoms, *values.shape[1:]), dtype=torch.float64, device=values.device)
        return sums.index_add(0, index, values.to(torch.float64))

    # each pair is listed in both directions; each time, the half that belongs to its first atom counts
    of_atom = of_atoms(energies[::2], first).to(dtype)
    if not derivatives:
        return AtCounts(of_atom, None, None, None)
    push = 0.5 * found[0][1::2]  # force on the second atom
    forces = (of_atoms(push, second) - of_atoms(push, first)).to(dtype) if request.forces else None
    virial = None
    if request.virial:
        dyads = of_atoms((push.unsqueeze(2) * vectors.unsqueeze(1)).flatten(1), first).unbind(1)
        sums = [system_sums(part, pairs.batch_idx, pairs.n_systems) for part in dyads]
        virial = torch.stack(sums, 1).view(-1, 3, 3).to(dtype)
    by_c6 = 0.5 * found[1][::2, 0].to(torch.float64)
    by_count = of_atoms(by_c6 * by_first, first) + of_atoms(by_c6 * by_second, second)
    return AtCounts(of_atom, forces, virial, by_count.to(dtype))


def _pair_energy(
    settings: Settings, n_positive: int, n_negative: int, coefficients: torch.Tensor, atoms: Atoms
) -> tuple[Formula, dict[Any, Any], torch.Tensor | None]:
    """The formula of the pair energy with these coefficients of atoms, its parameters, and the species."""
    dtype = coefficients.dtype
    damping = settings.damping
    make = formulas.rational if isinstance(damping, RationalDamping) else formulas.zero
    formula = make(n_positive, n_negative, settings.ranges.pairs.r_switch is not None)
    names = formula.per_atom[: n_positive + n_negative]
    of_pair: dict[Any, Any] = {names: coefficients, "z": atoms.z.to(dtype), **damping._asdict()}
    if not formula.per_pair:
        return formula, of_pair, None
    return formula, of_pair | {"r0": _pair_radii(atoms.states, dtype)}, atoms.row


def _scalar(name: str, value: Any) -> Any:
    """A number as a float, or a tensor with one entry reshaped to (); the tensor may require a gradient."""
    if not isinstance(value, torch.Tensor):
        return checks.as_float(name, value)
    if value.numel() != 1:
        raise ValueError(f"`{name}` must be a number or a tensor with one entry, got shape {tuple(value.shape)}")
    return value.reshape(())


def _pair_radii(states: ReferenceStates, dtype: torch.dtype) -> torch.Tensor:
    if states.pair_radii is None:
        raise ValueError("`parameters` lack `r0ab`, the radii of pairs that zero damping and three-body energies need")
    return states.pair_radii.to(dtype)


def _three_body(
    system: PairSystem, coefficients: torch.Tensor, atoms: Atoms, reach: Range, derivatives: bool
) -> tuple[torch.Tensor, ...]:
    """Three-body energies and their derivatives for s9 = 1; see `three_body_sum`."""
    positions, cell, batch_idx, n_systems, rows, domain = system
    species, ghosts = shares.beside_ghosts(domain, atoms.row), shares.ghosts_of(domain, batch_idx)
    of_atoms = (coefficients, species, _pair_radii(atoms.states, coefficients.dtype), batch_idx, n_systems)
    distances = (NO_CUTOFF if distance is None else distance for distance in reach)
    given = (positions, cell, *of_atoms, *rows[:5], atoms.states.n_positive, *distances)
    return three_body_sum(given, ghosts, derivatives)


def ranges_of(cutoff: Any, coordination_cutoff: Any, three_body_cutoff: Any, smoothing: Any) -> Ranges:
    """The cutoffs of the sums, from the arguments of a public function."""
    names = ("cutoff", "coordination_cutoff", "three_body_cutoff")
    cutoffs: list[float | None] = []
    for name, value in zip(names, (cutoff, coordination_cutoff, three_body_cutoff)):
        # by default each cutoff is the previous one
        default = cutoffs[-1] if cutoffs else None
        cutoffs.append(default if value is None else checks.check_positive(name, value))
    if smoothing is None:
        return Ranges(*(Range(c) for c in cutoffs))
    smoothing = checks.check_positive("smoothing", smoothing)
    known = [c for c in cutoffs if c is not None]
    if len(known) < len(cutoffs):
        raise ValueError("`cutoff` is needed with `smoothing`, which ends at the cutoff")
    if smoothing >= min(known):
        raise ValueError(f"`smoothing` = {smoothing} must be smaller than the smallest cutoff, {min(known)}")
    return Ranges(*(Range(c, c - smoothing) for c in known))


def _tables(given: D3Parameters | ReferenceStates, states: ReferenceStates) -> str:
    """A description of the tables, which must be the same on all ranks.

    It contains their values, but not the eigenvectors, which may differ by rounding.
    """
    tables = [states.radii, states.z, states.coordination, states.pair_radii]
    if isinstance(given, D3Parameters):
        there = list(states.elements)
        tables.append(given.c6ab[there][:, there])
    return described(tables)


def _look_up(parameters: Any, numbers: torch.Tensor) -> Atoms:
    """The reference states of the elements present, and their data for each atom."""
    if isinstance(parameters, D3Parameters):
        if not may_read(numbers, wait=True):
            raise ValuesNeededError(
                "`parameters`: prepare them with D3Parameters.states(elements) before torch.compile or vmap, where "
                "atomic numbers cannot be read"
            )
        parameters = _states_of(parameters, numbers)
    if not isinstance(parameters, ReferenceStates):
        raise TypeError(f"`parameters` must be D3Parameters or ReferenceStates, got {type(parameters).__name__}")
    states = parameters
    if states.radii.device != numbers.device:
        raise ValueError(f"`parameters` are on {states.radii.device}, but `numbers` on {numbers.device}")

    def of_atoms() -> tuple[torch.Tensor, ...]:
        row = states.rows(numbers)
        return (row.to(torch.int32), states.radii.index_select(0, row), states.z.index_select(0, row))

    values = (numbers, states.row_of_number, states.radii, states.z)
    return Atoms(states, *cached_by_value("d3 atoms", values, (), of_atoms))


def _states_of(parameters: D3Parameters, numbers: torch.Tensor) -> ReferenceStates:
    """The reference states of the elements present."""
    # atomic numbers beyond the table are reported by `ReferenceStates.rows`
    last = parameters.max_z

    def occur() -> tuple[torch.Tensor, ...]:
        return (values_of(numbers).clamp(0, last + 1).bincount().nonzero().flatten(),)

    (found,) = cached_by_value("d3 elements", (numbers,), last, occur)
    elements = tuple(number for number in found.tolist() if 0 < number <= last)
    # without atoms, any element will do
    return parameters._states(elements or parameters.elements[:1], numbers.device)
