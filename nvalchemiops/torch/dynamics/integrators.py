"""Integrators: sequences of flows."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.autograd.functorch import is_differentiated
from nvalchemiops.torch.batching import count_systems
from nvalchemiops.torch.dynamics.cell_flows import Cell, Press, StretchedKick, check_open_axes
from nvalchemiops.torch.dynamics.constraints import PREFIX, Constraints
from nvalchemiops.torch.dynamics.flows import Chain, Flow, Kick, Shake, Stochastic, Tangent
from nvalchemiops.torch.dynamics.model import (
    Evaluation,
    Model,
    as_evaluation,
    check_model,
    check_same,
    check_shapes,
)
from nvalchemiops.torch.dynamics.programs import as_programs
from nvalchemiops.torch.dynamics.state import State
from nvalchemiops.torch.dynamics.sums import Division
from nvalchemiops.torch.dynamics.velocities import (
    angular_momentum,
    check_slopes,
    degrees_of_freedom,
    inertia_of,
    maxwell_boltzmann,
    of_each,
    remove_momentum,
    seeds_of,
)
from nvalchemiops.torch.interactions.pair.shares import must_be_same, together
from nvalchemiops.torch.runtime.context import may_read, values_of
from nvalchemiops.torch.runtime.recorder import read_number
from nvalchemiops.torch.systems import System

FORCES = None
"""Where the forces are computed in a sequence of flows."""

Number = float | torch.Tensor
"""A number for all systems, or a tensor (n_systems,)."""

COUNTED = ("degrees_of_freedom", f"{PREFIX}centre degrees of freedom")
"""Names in ``State.extra`` of numbers of degrees of freedom: of all atoms, and of the centres of clusters."""

OF_CENTRE = "degrees of the centre of mass"
"""Name in ``State.extra`` of the degrees of freedom (n_systems, 1) that are missing since the centre of mass rests, and
molecules do not rotate."""

AT_REST = 1e-9
"""Part of the kinetic energy below which the motion of the centre of mass, or the rotation, is rounding."""


@dataclasses.dataclass(frozen=True, eq=False)
class Integrator:
    """A sequence of flows, each for a fraction of the time step.

    The sequence is the same forwards and backwards in the ready-made integrators, which makes them second order in dt
    and, without noise, reversible.

    Attributes
    ----------
    flows : sequence of (Flow, float) and of FORCES
        FORCES, which is None, stands once, where the model is called.
    parameters : mapping from str to float or (n_systems,) tensor
        ``"dt"`` and all that the flows name. They are copied to ``State.extra`` by `start`.
    constraints : Constraints, optional
        Those that the flows obey. See `constrained`.

    Raises
    ------
    ValueError
        FORCES is not there once, or a parameter is missing.
    """

    flows: Sequence[tuple[Flow, float] | None]
    parameters: Mapping[str, Number | None]
    constraints: Constraints | None = None

    def __post_init__(self) -> None:
        if sum(flow is FORCES for flow in self.flows) != 1:
            raise ValueError("`flows` must have FORCES once")
        for name in ("dt", *(name for flow in self._distinct for name in flow.parameters)):
            if name not in self.parameters:
                raise ValueError(f"`parameters`: '{name}' is missing")
        _ = self._halves  # now, since torch.compile does not follow the lock with which Python 3.11 keeps them

    @functools.cached_property
    def _distinct(self) -> tuple[Flow, ...]:
        return tuple(dict.fromkeys(entry[0] for entry in self.flows if entry is not None))

    @property
    def conserves_momentum(self) -> bool:
        """Whether no flow changes the total momentum, beyond forces."""
        return all(flow.conserves_momentum for flow in self._distinct)

    @property
    def is_reversible(self) -> bool:
        """Whether steps from `reversed` lead back."""
        return all(flow.reversible for flow in self._distinct)

    @property
    def per_atom(self) -> tuple[str, ...]:
        """Variables that flows keep for each atom."""
        return tuple(name for flow in self._distinct for name in flow.per_atom)

    def constrained(self, constraints: Constraints) -> "Integrator":
        """The same integrator for systems with constraints.

        Projections of positions follow each drift, those of velocities each kick and noise: velocity Verlet becomes
        RATTLE, BAOAB becomes g-BAOAB. A cell that changes moves the centres of clusters. Each constraint removes a
        degree of freedom.

        Raises
        ------
        ValueError, TypeError
            The integrator has constraints already, or a flow that is not made for them.
        """
        if self.constraints is not None:
            raise ValueError("`constraints`: the integrator has some already")
        if not isinstance(constraints, Constraints):
            raise TypeError(f"`constraints` must be Constraints, got {type(constraints).__name__}")
        flows: list[tuple[Flow, float] | None] = []
        for entry in self.flows:
            if entry is FORCES:
                flows.append(FORCES)
            else:
                flows += [(flow, part * entry[1]) for flow, part in entry[0].constrained(constraints)]
        return dataclasses.replace(self, flows=_without_repetition(flows), constraints=constraints)

    def start(
        self,
        system: System,
        model: Model,
        *,
        masses: Any = None,
        velocities: Any = None,
        seed: Any = 0,
        keys: Any = None,
        removed: Number | None = None,
    ) -> State:
        """The state from which steps start.

        Parameters
        ----------
        system : System
        model : Model
            Evaluated once.
        masses : (n_atoms,) tensor or array, or number, optional
            Infinite for frozen atoms: they keep their position, or their place in a cell that changes, and count in no
            temperature, pressure or momentum. By default the masses of the elements, in u, if ASE is installed.
        velocities : (n_atoms, 3) tensor or array, optional
            Such as ``atoms.get_velocities()`` of ASE, with eV, angstrom and u. By default drawn for the temperature of
            the integrator, without motion of the centre of mass if that is conserved; zero if the integrator has no
            temperature.
        seed : int or (n_systems,) int tensor or array, optional
            Seed of velocities and noise, of up to 64 bits.
        keys : (n_systems,) int tensor or array, optional
            Number of each system, 0 .. 2³² - 1, by default its index. Random numbers of a system depend on the seed, on
            its key, on the places of its atoms in it, and on the step. So a system has the same noise in any batch.
        removed : float or (n_systems,) tensor, optional
            Number of degrees of freedom that are missing beside those of frozen atoms and `constraints`. By default 3,
            for the centre of mass, in systems without frozen atoms whose centre of mass is at rest, if the integrator
            does not move it; else 0. If such a system has no periodic axis and does not rotate, 3 more (2 for two
            atoms); with one axis, about which it does not rotate, 1 more. Choose 0 in external fields.

        Raises
        ------
        ValueError, TypeError
            A bad argument, a parameter out of range, or a model without what the integrator needs, each with its name.

        Notes
        -----
        With a ``domain`` this is a collective call: masses and velocities are those of the atoms that this rank owns,
        all other arguments are the same on all ranks.
        """
        checks.refuse_atoms("system", system)
        domain = system.domain
        with together(domain):
            system, n_systems = _rows(system)
            positions, batch_idx = system.positions, system.batch_idx
            masses = _masses(system, masses)
            for name, value in self.parameters.items():
                if value is None and name != "temperature":
                    raise ValueError(f"`{name}` is needed: None is that of a state to resume")
            given = {name: value for name, value in self.parameters.items() if value is not None}
            extra = {name: _column(name, value, n_systems, positions) for name, value in given.items()}
            seeds, system_keys = (
                seeds_of(name, value, n_systems, positions.device) for name, value in (("seed", seed), ("keys", keys))
            )
            if velocities is not None:
                velocities = _velocities(velocities, positions)
            held = self.constraints
            same: dict[str, Any] = {**self.parameters, "seed": seed, "keys": keys, "removed": removed}
            same["constraints"] = None if held is None else (held.pairs, held.lengths, held.iterations)
            must_be_same(domain, **same, velocities=velocities is None)
        division = Division(batch_idx if domain is None else domain.batch_idx, n_systems, domain)
        extra |= {"seed": seeds, "key": system_keys}
        extra |= {"inertia": inertia_of(masses), "inverse_masses": (1.0 / masses).unsqueeze(1)}
        if self.constraints is not None:
            system, found = self.constraints.begin(system, extra)
            extra |= found
        if velocities is None:
            velocities = torch.zeros_like(positions)
            if "temperature" in self.parameters:
                kt = self.parameters["temperature"]
                if kt is None:
                    raise ValueError("`velocities` or `temperature` is needed")
                velocities = maxwell_boltzmann(
                    masses, kt, batch_idx, n_systems, seed=seeds, keys=system_keys, domain=domain
                )
                if self.conserves_momentum:
                    frozen = division.sums(masses.isinf().to(masses.dtype).unsqueeze(1))
                    has_frozen = division.of_atoms(frozen, len(masses)) > 0.0
                    still = remove_momentum(velocities, masses, batch_idx, n_systems, domain=domain)
                    velocities = torch.where(has_frozen, velocities, still)
        velocities = torch.where(masses.isinf().unsqueeze(1), 0.0, velocities.to(positions.dtype))
        if self.constraints is not None:
            velocities = self.constraints.of(system.domain).tangent(system.positions, velocities, extra)
        all_of_them = degrees_of_freedom(masses, batch_idx, n_systems, domain=domain)
        less = self._removed(masses, velocities, system, division) if removed is None else removed
        degrees = (all_of_them.unsqueeze(1) - of_each("removed", less, n_systems, positions.device)).clamp(min=0.0)
        of_centre = all_of_them.unsqueeze(1) - degrees if removed is None else torch.zeros_like(degrees)
        extra |= {**_degrees_with(extra, degrees), OF_CENTRE: of_centre}
        if (places := division.places()) is not None:
            extra["place"] = places
        _check_cells(system, self._distinct)
        step = torch.zeros((), dtype=torch.int64, device=positions.device)
        extra |= {f"given {name}": extra[name].clone() for name in given}
        unknown = Evaluation(positions.new_zeros(n_systems), torch.zeros_like(positions))
        return self._started(State(system, velocities, masses, unknown, step, extra), model)

    def resume(self, state: State, model: Model) -> State:
        """The state of an earlier run, of this integrator or another, as a start. The model is called once.

        Parameters that this integrator sets to other values than the earlier one are set; others keep the values that
        they have now. Variables that the state lacks start at rest, and a temperature that neither has is that of the
        velocities. Degrees of freedom stay as they were counted, but for other constraints, and for a centre of mass
        that was at rest and that this integrator moves. Constraints that the state has keep their lengths.
        """
        n_systems, extra = state.extra["dt"].shape[0], dict(state.extra)
        for name, value in self.parameters.items():
            given, now = extra.get(f"given {name}"), extra.get(name)
            if value is None:  # that of the state, or of its velocities
                if now is None and name != "temperature":
                    raise ValueError(f"`{name}` is needed")
                continue
            new = _column(name, value, n_systems, state.system.positions)
            if given is None or now is None:
                extra[name] = new
            else:
                keeps = (given == new) & (now != new) if is_differentiated(new) else given == new
                extra[name] = torch.where(keeps, now, new)
            extra[f"given {name}"] = new.clone()
        _check_cells(state.system, self._distinct)
        system, velocities = state.system, state.velocities
        if not self.conserves_momentum and OF_CENTRE in extra:
            extra |= {name: extra[name] + extra[OF_CENTRE] for name in COUNTED if name in extra}
            extra[OF_CENTRE] = torch.zeros_like(extra[OF_CENTRE])
        holds = self.constraints is not None and self.constraints.holds(extra)
        if f"{PREFIX}pairs" in extra and not holds:
            degrees = extra["degrees_of_freedom"] + extra[f"{PREFIX}counts"][:, :1]
            extra = {name: value for name, value in extra.items() if not name.startswith(PREFIX)}
            extra |= _degrees_with(extra, degrees)
        if self.constraints is not None and holds:
            extra |= self.constraints.constants(system, extra)  # a state of ranks has none
        elif self.constraints is not None:
            system, found = self.constraints.begin(system, extra)
            extra |= found
            extra |= _degrees_with(extra, extra["degrees_of_freedom"])
            velocities = self.constraints.of(system.domain).tangent(system.positions, velocities, extra)
        return self._started(state._replace(system=system, velocities=velocities, extra=extra), model)

    def _started(self, state: State, model: Model) -> State:
        """The state with its evaluation, the variables of all flows and, if it has none, the temperature it is at."""
        if "temperature" in self.parameters and "temperature" not in state.extra:
            kt = state.temperatures.detach().unsqueeze(1)
            state = state._replace(extra={**state.extra, "temperature": kt, "given temperature": kt.clone()})
        _check_values({name: state.extra[name] for name in self.parameters}, self._distinct)
        check_model(model)
        state = state.followed(self.per_atom)
        found = _results(model, state)
        if found.stress is None and any(flow.needs_stress for flow in self._distinct):
            raise ValueError("`model` gave no stress, which this integrator needs")
        check_shapes(found, state.extra["dt"].shape[0], len(state.velocities))
        check_same(found, state.system.domain)
        state = state._replace(evaluation=found)
        for flow in self._distinct:
            state = state._replace(extra={**state.extra, **flow.start(state)})
        return self._pulled(state)

    def _pulled(self, state: State) -> State:
        """The state with the stress of constraint forces, if there is a stress."""
        return state if self.constraints is None else self.constraints.with_stress(state)

    def _removed(self, masses: torch.Tensor, velocities: torch.Tensor, system: System, division: Division) -> Number:
        """Degrees of freedom of centres of mass, and of open systems as a whole, that are at rest and stay so."""
        if not self.conserves_momentum:
            return 0.0
        with torch.no_grad():
            inertia, velocities = inertia_of(masses).to(torch.float64), velocities.to(torch.float64)
            arms, angular = angular_momentum(division, inertia, system.positions, velocities)
            energies, seconds = (inertia * of.square().sum(1, keepdim=True) for of in (velocities, arms))
            columns = inertia * velocities, inertia, masses.isinf().unsqueeze(1), energies, seconds, inertia > 0.0
            momenta, *rest = division.sums(torch.cat(columns, 1)).split([3, 1, 1, 1, 1, 1], 1)
            mass, frozen, twice, second, count = (column.squeeze(1) for column in rest)
            rests = (momenta.square().sum(1) <= AT_REST * twice * mass) & (frozen == 0.0)
            pbc: Any = system.pbc if division.domain is None else division.domain.pbc
            periods = inertia.new_zeros(1, 3, 3) if system.cell is None else system.cell.to(torch.float64)
            if pbc is not None:
                periods = periods * pbc.reshape(-1, 3, 1)
            n_axes = periods.any(2).sum(1)
            # images turn a system, but those along a single axis not about this axis
            along = (angular * torch.nn.functional.normalize(periods.sum(1))).sum(1)
            square = torch.where(n_axes == 1, along.square(), angular.square().sum(1))
            # two atoms turn about two axes, one does not
            ways = (3.0 * count - 4.0).minimum(3.0 - 2.0 * n_axes).clamp(min=0.0)
            of_rotation = torch.where(square > AT_REST * twice * second, 0.0, ways)
            return torch.where(rests, 3.0 + of_rotation, 0.0)

    def step(self, state: State, model: Model) -> State:
        """The state after one step. The model is called once."""
        return self.second_half(self.evaluated(self.first_half(state), model))

    def first_half(self, state: State) -> State:
        """The flows before FORCES: positions and cell are those of the end of the step."""
        return self._halves[0](state)

    def evaluated(self, state: State, model: Model) -> State:
        """The state with energies, forces and stress at its positions. On ranks atoms first go to their new owners."""
        state = state.followed(self.per_atom)
        return state._replace(evaluation=_results(model, state))

    def second_half(self, state: State) -> State:
        """The flows after FORCES, which end the step."""
        state = self._halves[1](state)
        return self._pulled(state._replace(step=state.step + 1))

    @functools.cached_property
    def _halves(self) -> tuple[Callable[[State], State], Callable[[State], State]]:
        """The flows before and after FORCES."""
        place = list(self.flows).index(FORCES)
        before, after = ([e for e in half if e is not None] for half in (self.flows[:place], self.flows[place:]))
        return as_programs(before), as_programs(after)

    def conserved(self, state: State) -> torch.Tensor:
        """The conserved quantity (n_systems,) in float64: the sum of the energies of the flows.

        It is constant up to the error of the time step. Heat from noise is subtracted.
        """
        total: Any = 0.0
        for flow in self._distinct:
            total = total + flow.energy(state)
        return total.squeeze(1)

    def reversed(self, state: State) -> State:
        """The state in which time runs backwards; raises ValueError if the integrator draws random numbers."""
        if not self.is_reversible:
            raise ValueError("steps with random numbers cannot be reversed")
        odd = {name: -state.extra[name] for flow in self._distinct for name in flow.odd()}
        return state._replace(velocities=-state.velocities).having(**odd)


def _results(model: Model, state: State) -> Evaluation:
    """What a model gives, with forces in the precision of the velocities, and without a graph where none is kept."""
    found = as_evaluation(model(state.system))
    if found.forces.dtype != state.velocities.dtype:
        found = found._replace(forces=found.forces.to(state.velocities.dtype))
    # a model that enables gradients for its forces may leave a graph with its energies
    return found if torch.is_grad_enabled() else found.without_graph()


def _without_repetition(flows: Sequence[tuple[Flow, float] | None]) -> list[tuple[Flow, float] | None]:
    """The sequence without projections of velocities that a later one makes superfluous.

    A kick is linear, so a projection after it does for both; and a part along the bonds of the start of a drift changes
    nothing but the multipliers of its projection.
    """
    found: list[tuple[Flow, float] | None] = []
    for entry in reversed(flows):
        following = next((e[0] for e in reversed(found) if e and not isinstance(e[0], Kick | StretchedKick)), None)
        if entry is None or not (isinstance(entry[0], Tangent) and isinstance(following, Tangent | Shake)):
            found.append(entry)
    return found[::-1]


def _column(name: str, value: Number, n_systems: int, positions: torch.Tensor) -> torch.Tensor:
    """A copy of the parameter (n_systems, 1), which the caller may change."""
    return of_each(name, value, n_systems, positions.device).clone()


_POSITIVE = ("dt", "thermostat_time", "barostat_time", "compressibility")


def _check_values(extra: Mapping[str, torch.Tensor], flows: Sequence[Flow]) -> None:
    """Raise for parameters out of range, where they can be read."""
    divides = any(isinstance(flow, Chain | Press) for flow in flows)
    draws = any(isinstance(flow, Stochastic) for flow in flows)
    for name, value in extra.items():
        if not may_read(value):
            continue
        found = values_of(value)
        if not read_number(found.isfinite().all()):
            raise ValueError(f"`{name}` must be finite")
        if name in _POSITIVE or (name == "temperature" and divides):
            if not read_number((found > 0.0).all()):
                raise ValueError(f"`{name}` must be positive, got {float(found.min())}")
        elif name in ("temperature", "friction") and not read_number((found >= 0.0).all()):
            raise ValueError(f"`{name}` must not be negative, got {float(found.min())}")
        if name in ("temperature", "friction") and draws:
            check_slopes(name, value)


def _rows(system: System) -> tuple[System, int]:
    """The system with a row of ``cell`` and ``pbc`` for each system, and the number of systems."""
    checks.check_positions(system.positions, finite=False)
    n_systems = count_systems(system)
    cell, pbc, batch_idx = system.cell, system.pbc, system.batch_idx
    if cell is not None:
        cell = cell.reshape(-1, 3, 3).expand(n_systems, 3, 3)
    if pbc is not None:
        pbc = checks.pbc_tensor(pbc, system.positions.device).expand(n_systems, 3)
    if batch_idx is not None:
        batch_idx = None if n_systems == 1 else checks.int32_of(batch_idx)
    return system._replace(cell=cell, pbc=pbc, batch_idx=batch_idx), n_systems


def _masses(system: System, masses: Any) -> torch.Tensor:
    positions = system.positions
    if masses is None:
        if system.numbers is None:
            raise ValueError("`masses` are needed, since the system has no `numbers`")
        try:
            from ase.data import atomic_masses
        except ImportError:
            raise ValueError(
                "`masses` are needed, since ASE, which has those of the elements, is not installed"
            ) from None
        checks.check_tensor("numbers", system.numbers)
        table = torch.as_tensor(atomic_masses, device=positions.device)
        masses = table[system.numbers.to(torch.int64)]
    if not isinstance(masses, torch.Tensor):
        masses = torch.as_tensor(masses, dtype=positions.dtype, device=positions.device)
    if masses.ndim == 0:
        masses = masses.repeat(len(positions))
    if masses.shape != positions.shape[:1]:
        raise ValueError(f"`masses` must have shape (n_atoms,) = ({len(positions)},), got {tuple(masses.shape)}")
    if may_read(masses) and not read_number((values_of(masses) > 0.0).all()):
        raise ValueError("`masses` must be positive")
    return masses.to(positions)


def _velocities(velocities: Any, positions: torch.Tensor) -> torch.Tensor:
    if not isinstance(velocities, torch.Tensor):
        velocities = torch.tensor(velocities, dtype=positions.dtype, device=positions.device)
    if velocities.shape != positions.shape:
        raise ValueError(
            f"`velocities` must have shape (n_atoms, 3) = {tuple(positions.shape)}, got {tuple(velocities.shape)}"
        )
    return velocities


def _degrees_with(extra: Mapping[str, torch.Tensor], degrees: torch.Tensor) -> dict[str, torch.Tensor]:
    """Degrees of freedom (n_systems, 1), which are those without constraints, with them."""
    counts = extra.get(f"{PREFIX}counts")
    if counts is None:
        return {"degrees_of_freedom": degrees}
    return {name: (degrees - count).clamp(min=0.0) for name, count in zip(COUNTED, counts.split(1, 1))}


def _check_cells(system: System, flows: Sequence[Flow]) -> None:
    """Raise if the cell should change, but there is none, it has no volume, or nothing presses along an axis."""
    if not any(flow.needs_stress for flow in flows):
        return
    if system.cell is None:
        raise ValueError("`cell` of the system is needed: this integrator changes it")
    pbc: Any = system.pbc if system.domain is None else system.domain.pbc
    if not may_read(system.cell):
        return
    if not read_number((values_of(system.volume) > 0.0).all()):
        raise ValueError("`cell` has no volume: this integrator needs three lattice vectors, also along open axes")
    masks = torch.tensor([flow.mask for flow in flows if isinstance(flow, Cell)], device=system.cell.device)
    check_open_axes(masks.any(0), system.cell, pbc, "an integrator without a barostat")
