"""Optimizers of batches: FIRE, FIRE2 and L-BFGS, with the defaults and the steps of ASE.

They see rows of coordinates x and forces (n_rows, 3), and a `Rows` that says which row belongs to which system
(`nvalchemiops.torch.dynamics.chart`). Every system has its own time step, counters and history, so it takes the steps
that it takes alone, to the last bit. Nothing is read on the host.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.dynamics.chart import Rows

OptimizerState = dict[str, Any]
"""What an optimizer remembers: tensors, or tuples of tensors. Those in `Optimizer.of_rows` have a row for each row of
coordinates, all others one for each system."""


class Move(NamedTuple):
    """What a step returns.

    Attributes
    ----------
    x : (n_rows, 3) tensor
        New coordinates.
    state : OptimizerState
    is_step : (n_systems,) bool tensor
        False for systems that take a step back, at whose end forces are needed before the step is complete.
    """

    x: torch.Tensor
    state: OptimizerState
    is_step: torch.Tensor


class Optimizer(Protocol):
    """From forces to the next coordinates.

    Attributes
    ----------
    of_rows : tuple of str
        Entries of the state that belong to rows, not to systems.
    """

    of_rows: ClassVar[tuple[str, ...]]

    def start(self, rows: Rows, x: torch.Tensor) -> OptimizerState:
        """The state before the first step."""

    def step(self, rows: Rows, state: OptimizerState, x: torch.Tensor, forces: torch.Tensor) -> Move:
        """One step of all systems, from the forces (n_rows, 3) at x."""


@dataclass(frozen=True, kw_only=True)
class FIRE:
    """The fast inertial relaxation engine, as in ASE.

    Velocities follow the forces, with unit masses; they are turned towards the forces, and vanish if the system moves
    uphill. The time step is a parameter of this algorithm, with the unit length / sqrt(energy); it has nothing to do
    with the time of molecular dynamics. Defaults are for eV and angstrom.

    Parameters
    ----------
    dt, dtmax : float
        Time step at the start, and the largest one.
    maxstep : float, length
        Largest norm of a step, over all rows of a system.
    Nmin : int
        Number of steps downhill before the time step grows.
    finc, fdec : float
        Factors by which the time step grows and shrinks.
    astart, fa : float
        Weight of the direction of the forces in the velocities after a stop, and the factor by which it shrinks.

    Source: E. Bitzek et al., Phys. Rev. Lett. 97, 170201 (2006), doi:10.1103/PhysRevLett.97.170201.
    """

    dt: float = 0.1
    dtmax: float = 1.0
    maxstep: float = 0.2
    Nmin: int = 5
    finc: float = 1.1
    fdec: float = 0.5
    astart: float = 0.1
    fa: float = 0.99

    of_rows: ClassVar[tuple[str, ...]] = ("velocities",)

    def __post_init__(self) -> None:
        _check(self)

    def start(self, rows: Rows, x: torch.Tensor) -> OptimizerState:
        """The state at rest."""
        return _at_rest(self, rows, x)

    def step(self, rows: Rows, state: OptimizerState, x: torch.Tensor, forces: torch.Tensor) -> Move:
        """One step of all systems."""
        velocities, dt, a, downhill_steps = (state[name] for name in ("velocities", "dt", "a", "downhill_steps"))
        vf, ff, vv = rows.dots((velocities, forces), (forces, forces), (velocities, velocities))
        downhill, fresh = vf > 0.0, state["is_fresh"]
        of_v = torch.where(downhill, 1.0 - a, 0.0)
        of_f = torch.where(downhill, a * (vv / ff).sqrt(), 0.0)
        grows = downhill & (downhill_steps > self.Nmin)
        dt = torch.where(grows, (dt * self.finc).clamp(max=self.dtmax), torch.where(downhill | fresh, dt, dt * self.fdec))
        a = torch.where(grows, a * self.fa, torch.where(downhill | fresh, a, self.astart))
        of_f = of_f + dt
        # the norm of a combination of velocities and forces; without cancellation, since vf > 0 or of_v = 0
        norm = dt * (of_v * of_v * vv + 2.0 * of_v * of_f * vf + of_f * of_f * ff).sqrt()
        scale = dt * torch.where(norm > self.maxstep, self.maxstep / norm, 1.0)
        of_v, of_f, scale = rows.of_rows(of_v, of_f, scale)
        velocities = of_v * velocities + of_f * forces
        new = {
            "velocities": velocities,
            "dt": dt,
            "a": a,
            "downhill_steps": torch.where(downhill, downhill_steps + 1, 0),
            "is_fresh": torch.zeros_like(fresh),
        }
        return Move(x + scale * velocities, new, torch.ones_like(fresh))


@dataclass(frozen=True, kw_only=True)
class FIRE2:
    """FIRE 2.0 by semi-implicit Euler steps, as in ASE; ABC-FIRE on request.

    A system that moves uphill goes back by half a step before it starts again, which takes one more evaluation.

    Parameters
    ----------
    dt, dtmax, dtmin, Nmin, finc, fdec, astart, fa
        As for `FIRE`, and the smallest time step.
    maxstep : float, length
        Largest norm of a step, over all rows of a system; with ``use_abc`` the largest component.
    use_abc : bool
        Whether velocities are corrected for the bias of their start at rest (ABC-FIRE).

    Source: J. Guénolé et al., Comput. Mater. Sci. 175, 109584 (2020), doi:10.1016/j.commatsci.2020.109584;
    S. Echeverri Restrepo and P. Andric, Comput. Mater. Sci. 218, 111978 (2023), doi:10.1016/j.commatsci.2022.111978.
    """

    dt: float = 0.1
    dtmax: float = 1.0
    dtmin: float = 2e-3
    maxstep: float = 0.2
    Nmin: int = 20
    finc: float = 1.1
    fdec: float = 0.5
    astart: float = 0.25
    fa: float = 0.99
    use_abc: bool = False

    of_rows: ClassVar[tuple[str, ...]] = ("velocities",)

    def __post_init__(self) -> None:
        _check(self)

    def start(self, rows: Rows, x: torch.Tensor) -> OptimizerState:
        """The state at rest."""
        return _at_rest(self, rows, x)

    def step(self, rows: Rows, state: OptimizerState, x: torch.Tensor, forces: torch.Tensor) -> Move:
        """One step of all systems, or half a step back."""
        velocities, dt, a, downhill_steps = (state[name] for name in ("velocities", "dt", "a", "downhill_steps"))
        vf, ff, vv = rows.dots((velocities, forces), (forces, forces), (velocities, velocities))
        downhill, fresh = vf > 0.0, state["is_fresh"]
        goes = downhill | fresh
        downhill_steps = torch.where(downhill, downhill_steps + 1, 0)
        grows = downhill & (downhill_steps > self.Nmin)
        dt = torch.where(goes, dt, (dt * self.fdec).clamp(min=self.dtmin))
        dt = torch.where(grows, (dt * self.finc).clamp(max=self.dtmax), dt)
        a = torch.where(grows, a * self.fa, torch.where(goes, a, self.astart))
        if self.use_abc:
            a = a.clamp(min=1e-10)  # below, the correction would divide by zero
        # v + dt f, then a part of it in the direction of f
        norm = (vv + 2.0 * dt * vf + dt * dt * ff).sqrt()
        of_v, of_f = 1.0 - a, (1.0 - a) * dt + torch.where(ff > 0.0, a * norm / ff.sqrt(), 0.0)
        if self.use_abc:
            correction = 1.0 / (1.0 - (1.0 - a) ** (downhill_steps + 1))
            of_v, of_f, scale = of_v * correction, of_f * correction, dt
        else:
            norm = dt * (of_v * of_v * vv + 2.0 * of_v * of_f * vf + of_f * of_f * ff).sqrt()
            scale = dt * torch.where(norm > self.maxstep, self.maxstep / norm, 1.0)
        of_v, of_f, scale, most, back = rows.of_rows(
            torch.where(goes, of_v, 0.0),
            torch.where(goes, of_f, 0.0),
            torch.where(goes, scale, 0.0),
            self.maxstep / dt,
            torch.where(goes, 0.0, 0.5 * dt),
        )
        moved = of_v * velocities + of_f * forces
        if self.use_abc:
            moved = torch.minimum(torch.maximum(moved, -most), most)
        x = x + (scale * moved - back * velocities)
        new = {"velocities": moved, "dt": dt, "a": a, "downhill_steps": downhill_steps, "is_fresh": ~goes}
        return Move(x, new, goes)


@dataclass(frozen=True, kw_only=True)
class LBFGS:
    """Limited-memory BFGS with a fixed curvature at the start and without line search, as in ASE.

    Parameters
    ----------
    memory : int
        Number of steps from which curvatures are estimated.
    maxstep : float, length
        Largest norm of a row in a step; longer steps are scaled.
    damping : float
        Factor of all steps.
    alpha : float, energy / length²
        Curvature before it is known.

    Source: J. Nocedal, Math. Comput. 35, 773 (1980), doi:10.1090/S0025-5718-1980-0572855-7.
    """

    memory: int = 100
    maxstep: float = 0.2
    damping: float = 1.0
    alpha: float = 70.0

    of_rows: ClassVar[tuple[str, ...]] = ("x", "forces", "steps", "changes")

    def __post_init__(self) -> None:
        _check(self)

    def start(self, rows: Rows, x: torch.Tensor) -> OptimizerState:
        """The state without a history."""
        return {"x": None, "forces": None, "steps": (), "changes": (), "weights": ()}

    def step(self, rows: Rows, state: OptimizerState, x: torch.Tensor, forces: torch.Tensor) -> Move:
        """One step of all systems."""
        steps, changes, weights = state["steps"], state["changes"], state["weights"]
        if state["x"] is not None:
            step, change = x - state["x"], state["forces"] - forces
            (curvature,) = rows.dots((step, change))
            # systems that stay have no change, and no pair in their history
            weight = torch.where(curvature == 0.0, 0.0, 1.0 / curvature)
            kept = slice(max(0, len(steps) + 1 - self.memory), None)
            steps, changes, weights = (*steps, step)[kept], (*changes, change)[kept], (*weights, weight)[kept]
        gradient = -forces
        shares = []
        for step, change, weight in zip(reversed(steps), reversed(changes), reversed(weights)):
            share = weight * rows.dots((step, gradient))[0]
            gradient = gradient - rows.of_rows(share)[0] * change
            shares.append(share)
        direction = gradient * (1.0 / self.alpha)
        for step, change, weight, share in zip(steps, changes, weights, reversed(shares)):
            part = share - weight * rows.dots((change, direction))[0]
            direction = direction + rows.of_rows(part)[0] * step
        longest = rows.largest(direction)
        (scale,) = rows.of_rows(-self.damping * torch.where(longest >= self.maxstep, self.maxstep / longest, 1.0))
        new = {"x": x, "forces": forces, "steps": steps, "changes": changes, "weights": weights}
        return Move(x + scale * direction, new, torch.ones_like(longest, dtype=torch.bool))


OPTIMIZERS: dict[str, type[FIRE | FIRE2 | LBFGS]] = {"fire": FIRE, "fire2": FIRE2, "lbfgs": LBFGS}
"""Optimizers by name."""


def _check(optimizer: Any) -> None:
    """Raise unless all parameters are positive numbers of their type."""
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        if field.type in ("int", int):
            if checks.check_count(field.name, value) == 0 and field.name == "memory":
                raise ValueError("`memory` must be positive, got 0")
        elif field.type in ("bool", bool):
            checks.check_flag(field.name, value)
        else:
            checks.check_positive(field.name, value)


def _at_rest(optimizer: FIRE | FIRE2, rows: Rows, x: torch.Tensor) -> OptimizerState:
    of_systems = x.new_zeros(rows.n_systems)
    return {
        "velocities": torch.zeros_like(x),
        "dt": of_systems + optimizer.dt,
        "a": of_systems + optimizer.astart,
        "downhill_steps": of_systems.to(torch.int64),
        "is_fresh": torch.ones_like(of_systems, dtype=torch.bool),
    }


def selected(optimizer: Optimizer, state: OptimizerState, systems: torch.Tensor, rows: torch.Tensor) -> OptimizerState:
    """The state of some systems, whose rows these are."""

    def of(value: Any, index: torch.Tensor) -> Any:
        if isinstance(value, tuple):
            return tuple(of(v, index) for v in value)
        return value if value is None else value.index_select(0, index)

    return {name: of(value, rows if name in optimizer.of_rows else systems) for name, value in state.items()}
