"""Flows: the terms of the equations of motion, each solved exactly for a time h. Integrators are sequences of flows.

A flow is a function of a state and of h, a column (n_systems, 1). It reads its parameters and its variables from
``State.extra``. It declares what it adds to the conserved quantity, so that of an integrator is a sum. Nothing is read
from a device, and every operation gives a system alone the same bits as in a batch.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch

from nvalchemiops.torch.dynamics.constraints import Constraints
from nvalchemiops.torch.dynamics.state import State, trace
from nvalchemiops.torch.dynamics.velocities import square_root


class Flow:
    """Base of the flows.

    Attributes
    ----------
    parameters : tuple of str
        Parameters that the flow reads from ``State.extra``.
    reversible : bool
        Whether the flow for -h undoes the flow for h; not if it draws random numbers.
    needs_stress : bool
        Whether the model must give the stress.
    conserves_momentum : bool
        Also the angular momentum of systems without a periodic axis.
    per_atom : tuple of str
        Those of its variables that have a row for each atom. On ranks they move with the atoms.
    projected : tuple of str, or None
        What of "positions" and "velocities" constraints project after the flow; None if it is not made for constraints.
    """

    parameters: ClassVar[tuple[str, ...]] = ()
    reversible: ClassVar[bool] = True
    needs_stress: ClassVar[bool] = False
    conserves_momentum: ClassVar[bool] = True
    per_atom: ClassVar[tuple[str, ...]] = ()
    projected: ClassVar[tuple[str, ...] | None] = None

    def __call__(self, state: State, h: torch.Tensor) -> State:
        """The state after the time h (n_systems, 1) of this term alone."""
        raise NotImplementedError

    def start(self, state: State) -> dict[str, torch.Tensor]:
        """The variables of the flow at the start of a run, for a state that has the parameters.

        Variables that the state has already, from an earlier run, stay as they are, if they fit.
        """
        return {}

    def odd(self) -> tuple[str, ...]:
        """Names of the variables in ``State.extra`` that change sign when time is reversed."""
        return ()

    def energy(self, state: State) -> torch.Tensor | float:
        """What the flow adds to the conserved quantity: (n_systems, 1), or 0."""
        return 0.0

    def constrained(self, constraints: Constraints) -> "Sequence[tuple[Flow, float]]":
        """The flows, each for a fraction of h, that do the same to a system with constraints.

        They take lengths and velocities that obey the constraints, and leave them so. Raises TypeError if there are
        none.
        """
        if self.projected is None:
            raise TypeError(f"{type(self).__name__} is not made for constraints")
        flow = Shake(self, constraints) if "positions" in self.projected else self
        return (flow, 1.0), *[(Tangent(constraints), 1.0)] * ("velocities" in self.projected)


def kept(state: State, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """The variable of the state, if it has one of this shape, else this value."""
    found = state.extra.get(name)
    return {name: value if found is None or found.shape != value.shape else found}


@dataclasses.dataclass(frozen=True)
class Kick(Flow):
    """Forces: ``dv/dt = F / m``."""

    projected: ClassVar[tuple[str, ...] | None] = ("velocities",)

    def __call__(self, state: State, h: torch.Tensor) -> State:
        """Change the velocities."""
        weights = state.of_atoms(h) * state.extra["inverse_masses"]
        return state._replace(velocities=state.velocities + weights * state.forces_on_mobile)

    def energy(self, state: State) -> torch.Tensor:
        """The potential energy."""
        return state.evaluation.energies.to(torch.float64).unsqueeze(1)


@dataclasses.dataclass(frozen=True)
class Drift(Flow):
    """Free motion: ``dr/dt = v``."""

    projected: ClassVar[tuple[str, ...] | None] = ("positions", "velocities")

    def __call__(self, state: State, h: torch.Tensor) -> State:
        """Change the positions."""
        return state.at(state.system.positions + state.of_atoms(h) * state.velocities)

    def energy(self, state: State) -> torch.Tensor:
        """The kinetic energy."""
        return 0.5 * trace(state.twice_kinetic())


class Stochastic(Flow):
    """Base of the flows that draw random numbers of their ``stream``. The energy that comes in is counted."""

    stream: int
    reversible: ClassVar[bool] = False

    @property
    def heat(self) -> str:
        """The name in ``State.extra`` of the energy (n_systems, 1) that came in."""
        return f"heat{self.stream}"

    def heated(self, state: State, added: torch.Tensor) -> State:
        """The state with more heat."""
        return state.having(**{self.heat: state.extra[self.heat] + added})

    def start(self, state: State) -> dict[str, torch.Tensor]:
        """No heat."""
        return kept(state, self.heat, torch.zeros_like(state.extra["dt"]))

    def energy(self, state: State) -> torch.Tensor:
        """The heat that came in, with a minus."""
        return -state.extra[self.heat]


@dataclasses.dataclass(frozen=True)
class Noise(Stochastic):
    """Friction and noise ``dv = -γ v dt + sqrt(2 γ kT / m) dW``, an Ornstein-Uhlenbeck process, solved exactly.

    ``v' = c v + sqrt((1 - c²) kT / m) ξ`` with ``c = exp(-γ h)``. The energy that the noise adds is counted, and is
    subtracted from the conserved quantity.

    Source: the conserved quantity is that of G. Bussi and M. Parrinello, Phys. Rev. E 75, 056707 (2007),
    doi:10.1103/PhysRevE.75.056707.
    """

    stream: int = 0
    constraints: Constraints | None = None
    parameters: ClassVar[tuple[str, ...]] = ("temperature", "friction")
    conserves_momentum: ClassVar[bool] = False

    def __call__(self, state: State, h: torch.Tensor) -> State:
        """Change the velocities."""
        extra, old = state.extra, state.velocities
        exponent = h * extra["friction"]
        spread = square_root(-torch.expm1(-2.0 * exponent) * extra["temperature"])
        scale = state.of_atoms(spread) * square_root(extra["inverse_masses"])
        pushes = scale * state.normal(self.stream)
        if self.constraints is not None:
            pushes = self.constraints.of(state.system.domain).tangent(state.system.positions, pushes, extra)
        new = state.of_atoms(torch.exp(-exponent)) * old + pushes
        added = state.of_systems((new - old) * (new + old) * extra["inertia"])
        return self.heated(state._replace(velocities=new), 0.5 * trace(added))

    def constrained(self, constraints: Constraints) -> Sequence[tuple[Flow, float]]:
        """With noise that is projected."""
        return ((Noise(self.stream, constraints), 1.0),)


@dataclasses.dataclass(frozen=True)
class NoisyDrift(Noise):
    """Half a drift, friction and noise, half a drift: the middle "AOA" of BAOAB.

    The two halves of the drift are one product, ``r' = r + h/2 (v + v')``, so without friction this is a drift, bit for
    bit.

    Source: B. Leimkuhler and C. Matthews, J. Chem. Phys. 138, 174102 (2013), doi:10.1063/1.4802990.
    """

    def __call__(self, state: State, h: torch.Tensor) -> State:
        """Change positions and velocities."""
        new = super().__call__(state, h)
        both = state.velocities + new.velocities
        return new.at(state.system.positions + state.of_atoms(0.5 * h) * both)

    def energy(self, state: State) -> torch.Tensor:
        """The kinetic energy, less the heat that came in."""
        return 0.5 * trace(state.twice_kinetic()) + super().energy(state)

    def constrained(self, constraints: Constraints) -> Sequence[tuple[Flow, float]]:
        """Half a drift, noise, half a drift, each projected ("g-BAOAB" with one drift).

        Source: B. Leimkuhler and C. Matthews, Proc. R. Soc. A 472, 20160138 (2016), doi:10.1098/rspa.2016.0138.
        """
        half = [(flow, 0.5) for flow, _ in Drift().constrained(constraints)]
        return *half, *super().constrained(constraints), *half


@dataclasses.dataclass(frozen=True)
class Rescale(Stochastic):
    """Stochastic velocity rescaling (CSVR): the kinetic energy relaxes to a canonical distribution.

    The exact solution for a time h multiplies all velocities by α with
    ``α² = (√c + q R)² + q² S``, ``c = exp(-h/τ)``, ``q² = (1 - c) kT / Σ m v²``, where R is a normal number and S a sum
    of squares of f - 1 normal numbers, for f degrees of freedom. The sign of α is that of ``√c + q R``. Systems at
    rest, or without degrees of freedom, stay as they are.

    Source: G. Bussi, D. Donadio and M. Parrinello, J. Chem. Phys. 126, 014101 (2007), doi:10.1063/1.2408420, appendix.
    """

    stream: int
    parameters: ClassVar[tuple[str, ...]] = ("temperature", "thermostat_time")
    projected: ClassVar[tuple[str, ...] | None] = ()

    def __call__(self, state: State, h: torch.Tensor) -> State:
        """Scale the velocities."""
        extra = state.extra
        twice = trace(state.twice_kinetic())
        # without degrees of freedom motion is rounding, which must not be heated
        moves = torch.where(extra["degrees_of_freedom"] > 0.0, twice, 0.0) > 0.0
        exponent = -h / extra["thermostat_time"]
        q = square_root(-torch.expm1(exponent) * extra["temperature"] / torch.where(moves, twice, 1.0))
        squares = state.chi_square(self.stream)
        along = torch.exp(0.5 * exponent) + q * state.normal(self.stream, by_system=True)
        squared = along * along + q * q * squares
        scale = torch.where(moves, torch.copysign(squared.sqrt(), along), 1.0)
        added = torch.where(moves, 0.5 * twice * (squared - 1.0), 0.0)
        return self.heated(state._replace(velocities=state.of_atoms(scale) * state.velocities), added)


@dataclasses.dataclass(frozen=True)
class Chain(Flow):
    """A Nosé-Hoover chain, which exchanges energy with the velocities of the atoms or of the cell.

    With positions η and velocities u of M thermostats, g degrees of freedom whose ``Σ m v²`` is T, and the masses
    ``Q_1 = g kT τ²`` and ``Q_k = kT τ²``::

        dv/dt   = -u_1 v
        dη/dt   = u
        du_1/dt = (T / (g kT) - 1) / τ² - u_2 u_1
        du_2/dt = g u_1² - 1/τ² - u_3 u_2
        du_k/dt = u_{k-1}² - 1/τ² - u_{k+1} u_k

    without the last term for the last thermostat. The step is split as in the source and repeated ``loops`` times, each
    with three steps of Suzuki and Yoshida.

    Source: G. J. Martyna, M. E. Tuckerman, D. J. Tobias and M. L. Klein, Mol. Phys. 87, 1117 (1996),
    doi:10.1080/00268979600100761.
    """

    length: int = 3
    loops: int = 1
    name: ClassVar[str] = "chain"
    parameters: ClassVar[tuple[str, ...]] = ("temperature", "thermostat_time")
    projected: ClassVar[tuple[str, ...] | None] = ()

    def odd(self) -> tuple[str, ...]:
        """The velocities of the chain."""
        return (f"{self.name}_velocities",)

    def _degrees(self, state: State) -> torch.Tensor:
        """Degrees of freedom (n_systems, 1)."""
        return state.extra["degrees_of_freedom"]

    def _masses(self, state: State) -> torch.Tensor:
        """Q (n_systems, length)."""
        one = state.extra["temperature"] * state.extra[self.parameters[1]] ** 2
        rest = [one.squeeze(1)] * (self.length - 1)
        count = self._degrees(state).clamp(min=1.0)  # without any there is nothing to exchange
        return torch.stack([(count * one).squeeze(1), *rest], 1)

    def _twice_energy(self, state: State) -> torch.Tensor:
        return trace(state.twice_kinetic())

    def _scaled(self, state: State, scale: torch.Tensor) -> State:
        return state._replace(velocities=state.of_atoms(scale) * state.velocities)

    def __call__(self, state: State, h: torch.Tensor) -> State:
        """Change the chain, and scale the velocities."""
        extra, name = state.extra, self.name
        kt = extra["temperature"]
        columns = (column.squeeze(1) for column in (self._twice_energy(state), self._degrees(state) * kt, kt))
        chain = extra[f"{name}_positions"], extra[f"{name}_velocities"]
        moved, pushed, log_scales = state.chains(*chain, *columns, self._masses(state), h.squeeze(1), self.loops)
        state = self._scaled(state, torch.exp(log_scales).unsqueeze(1))
        return state.having(**{f"{name}_positions": moved, f"{name}_velocities": pushed})

    def start(self, state: State) -> dict[str, torch.Tensor]:
        """A chain at rest."""
        zeros = torch.zeros_like(state.extra["dt"]).repeat(1, self.length)
        return kept(state, f"{self.name}_positions", zeros) | kept(state, f"{self.name}_velocities", zeros.clone())

    def energy(self, state: State) -> torch.Tensor:
        """``g kT η_1 + kT Σ η_k + Σ Q u² / 2``."""
        eta, u = (state.extra[f"{self.name}_{of}"] for of in ("positions", "velocities"))
        potential = self._degrees(state) * eta[:, :1] + eta[:, 1:].sum(1, keepdim=True)
        return state.extra["temperature"] * potential + 0.5 * (self._masses(state) * u * u).sum(1, keepdim=True)


# -- constraints ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Shake(Flow):
    """A drift, after which positions are moved along the bonds before it, until the lengths are right (SHAKE).

    Velocities change with the positions, and may have a part along the bonds afterwards: `Tangent` removes it.
    """

    drift: Flow
    constraints: Constraints

    def __call__(self, state: State, h: torch.Tensor) -> State:
        """Change positions, velocities, and the cell if the drift does."""
        constraints = self.constraints.of(state.system.domain)
        directions = constraints.bonds(state.system.positions)
        state = self.drift(state, h)
        added = constraints.correction(directions, state.system.positions, state.extra)
        return state.at(state.system.positions + added, velocities=state.velocities + added / state.of_atoms(h))

    def energy(self, state: State) -> torch.Tensor | float:
        """The energy of the drift."""
        return self.drift.energy(state)


@dataclasses.dataclass(frozen=True)
class Tangent(Flow):
    """Velocities lose their part along the bonds (RATTLE)."""

    constraints: Constraints

    def __call__(self, state: State, h: torch.Tensor) -> State:
        """Project the velocities."""
        constraints = self.constraints.of(state.system.domain)
        return state._replace(velocities=constraints.tangent(state.system.positions, state.velocities, state.extra))
