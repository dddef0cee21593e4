"""Optimizers of batches: FIRE, FIRE2 and L-BFGS, with the defaults and the steps of ASE.

They see rows of coordinates x and forces (n_rows, 3), and a `Rows` that says which row belongs to which system
(`nvalchemiops.torch.dynamics.chart`). Every system has its own time step, counters and history, so it takes the steps
that it takes alone, to the last bit. Nothing is read on the host.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.dynamics.chart import Rows

OptimizerState = dict[str, Any]
"""The state of an optimizer, by name."""

Form = Mapping[str, tuple[str, int] | None]
"""For each value of the state "rows" or "systems", and the axis along which it has them; None for other values."""


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
    form : dict from str to (str, int) or None
        What the state consists of: see `Form`. These values are kept when systems are taken out of the batch, when
        atoms go to other ranks, and in a `RelaxationState`. What is not named is memory that `step` can make again.
    """

    @property
    def form(self) -> Form:
        """See above."""

    def start(self, rows: Rows, x: torch.Tensor) -> OptimizerState:
        """The state before the first step."""

    def step(self, rows: Rows, state: OptimizerState, x: torch.Tensor, forces: torch.Tensor) -> Move:
        """One step of all systems, from the forces (n_rows, 3) at x."""


class Pace(NamedTuple):
    """How systems go in FIRE."""

    dt: torch.Tensor  # (n_systems,), as the others: the time step
    a: torch.Tensor  # weight of the direction of the forces in the velocities
    downhill_steps: torch.Tensor  # number of steps downhill since the last stop, int


def adapted(
    pace: Pace, power: torch.Tensor, at_rest: torch.Tensor, *, Nmin: Any, finc: Any, dtmax: Any, fdec: Any, dtmin: Any,
    astart: Any, fa: Any
) -> tuple[Pace, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The rule of all kinds of FIRE: how systems go on, which move downhill, which need not stop, each (n_systems,).

    After more than Nmin steps downhill, this one among them, the time step grows and the weight of the forces shrinks.
    A system that moves uphill is to stop, and starts again with a shorter time step. ``power`` is ``Σ f·v``; systems
    ``at_rest``, without velocities, keep their pace. The other parameters are as for `FIRE2`, numbers or (n_systems,).
    """
    dt, a, steps = pace
    downhill = power > 0.0
    goes = downhill | at_rest
    steps = torch.where(downhill, steps + 1, torch.where(goes, steps, 0))
    grows = downhill & (steps > Nmin)
    dt = torch.where(goes, dt, (dt * fdec).clamp(min=dtmin))
    dt = torch.where(grows, (dt * finc).clamp(max=dtmax), dt)
    a = torch.where(grows, a * fa, torch.where(goes, a, astart))
    return Pace(dt, a, steps), downhill, goes


class _WithPace:
    """What FIRE and FIRE2 share."""

    form: ClassVar[Form] = {
        "velocities": ("rows", 0),
        **dict.fromkeys(("dt", "a", "downhill_steps", "is_fresh"), ("systems", 0)),
    }
    dt: float
    dtmax: float
    maxstep: float
    Nmin: int
    finc: float
    fdec: float
    astart: float
    fa: float

    def __post_init__(self) -> None:
        _check(self)

    def start(self, rows: Rows, x: torch.Tensor) -> OptimizerState:
        """The state at rest."""
        of_systems = x.new_zeros(rows.n_systems)
        return {
            "velocities": torch.zeros_like(x),
            "dt": of_systems + self.dt,
            "a": of_systems + self.astart,
            "downhill_steps": of_systems.to(torch.int64),
            "is_fresh": torch.ones_like(of_systems, dtype=torch.bool),
        }

    def _adapted(
        self, state: OptimizerState, power: torch.Tensor, Nmin: int, dtmin: float
    ) -> tuple[Pace, torch.Tensor, torch.Tensor]:
        rule = {"finc": self.finc, "dtmax": self.dtmax, "fdec": self.fdec, "astart": self.astart, "fa": self.fa}
        pace = Pace(*(state[name] for name in Pace._fields))
        return adapted(pace, power, state["is_fresh"], Nmin=Nmin, dtmin=dtmin, **rule)

    def _limited(
        self, dt: torch.Tensor, of_v: torch.Tensor, of_f: torch.Tensor, *products: torch.Tensor
    ) -> torch.Tensor:
        """``dt``, or less, so that the step ``dt (of_v v + of_f f)`` is not longer than ``maxstep``."""
        norm = dt * _norm(of_v, of_f, *products)
        return dt * torch.where(norm > self.maxstep, self.maxstep / norm, 1.0)


def _norm(of_v: Any, of_f: Any, vv: torch.Tensor, vf: torch.Tensor, ff: torch.Tensor) -> torch.Tensor:
    """The norm of a combination of velocities and forces, from their products."""
    return (of_v * of_v * vv + 2.0 * of_v * of_f * vf + of_f * of_f * ff).sqrt()


@dataclass(frozen=True, kw_only=True)
class FIRE(_WithPace):
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

    def step(self, rows: Rows, state: OptimizerState, x: torch.Tensor, forces: torch.Tensor) -> Move:
        """One step of all systems."""
        velocities, a = state["velocities"], state["a"]
        vf, ff, vv = rows.dots((velocities, forces), (forces, forces), (velocities, velocities))
        # here the steps before this one are counted
        pace, downhill, _ = self._adapted(state, vf, self.Nmin + 1, 0.0)
        of_v = torch.where(downhill, 1.0 - a, 0.0)
        of_f = torch.where(downhill, a * (vv / ff).sqrt(), 0.0) + pace.dt
        # without cancellation, since vf > 0 or of_v = 0
        scale = self._limited(pace.dt, of_v, of_f, vv, vf, ff)
        of_v, of_f, scale = rows.of_rows(of_v, of_f, scale)
        velocities = of_v * velocities + of_f * forces
        new = {"velocities": velocities, **pace._asdict(), "is_fresh": torch.zeros_like(downhill)}
        return Move(x + scale * velocities, new, torch.ones_like(downhill))


@dataclass(frozen=True, kw_only=True)
class FIRE2(_WithPace):
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

    def step(self, rows: Rows, state: OptimizerState, x: torch.Tensor, forces: torch.Tensor) -> Move:
        """One step of all systems, or half a step back."""
        velocities = state["velocities"]
        vf, ff, vv = rows.dots((velocities, forces), (forces, forces), (velocities, velocities))
        pace, _, goes = self._adapted(state, vf, self.Nmin, self.dtmin)
        if self.use_abc:
            pace = pace._replace(a=pace.a.clamp(min=1e-10))  # below, the correction would divide by zero
        dt, a, downhill_steps = pace
        # v + dt f, then a part of it in the direction of f
        turned = torch.where(ff > 0.0, a * _norm(1.0, dt, vv, vf, ff) / ff.sqrt(), 0.0)
        of_v, of_f = 1.0 - a, (1.0 - a) * dt + turned
        if self.use_abc:
            correction = 1.0 / (1.0 - (1.0 - a) ** (downhill_steps + 1))
            of_v, of_f, scale = of_v * correction, of_f * correction, dt
        else:
            scale = self._limited(dt, of_v, of_f, vv, vf, ff)
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
        return Move(x, {"velocities": moved, **pace._asdict(), "is_fresh": ~goes}, goes)


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

    The steps are those of the two loops of J. Nocedal, Math. Comput. 35, 773 (1980),
    doi:10.1090/S0025-5718-1980-0572855-7, computed by products with the whole history: R. H. Byrd, J. Nocedal and
    R. B. Schnabel, Math. Program. 63, 129 (1994), doi:10.1007/BF01582063, eq. 3.1.
    """

    memory: int = 100
    maxstep: float = 0.2
    damping: float = 1.0
    alpha: float = 70.0
    form: ClassVar[Form] = {
        "x": ("rows", 0),
        "forces": ("rows", 0),
        "count": None,
        "steps": ("rows", 2),
        "changes": ("rows", 2),
        "curvatures": ("systems", 1),
        "inverse": ("systems", 2),
    }

    def __post_init__(self) -> None:
        _check(self)

    def start(self, rows: Rows, x: torch.Tensor) -> OptimizerState:
        """The state without a history. Steps write into it: it belongs to one relaxation."""
        none = x.new_zeros((0, 3, x.shape[0]))
        return {
            "x": None,
            "forces": None,
            "count": 0,  # number of steps that entered the history; the latest ones are kept, in turns
            "steps": none,  # (m, 3, n_rows), S of the source
            "changes": none,  # (m, 3, n_rows), Y
            "curvatures": x.new_zeros((0, rows.n_systems)),  # (m, n_systems), D: the diagonal of Sᵀ Y
            "inverse": x.new_zeros((0, 0, rows.n_systems)),  # (m, m, n_systems), of R: the upper triangle of Sᵀ Y
        }

    def step(self, rows: Rows, state: OptimizerState, x: torch.Tensor, forces: torch.Tensor) -> Move:
        """One step of all systems."""
        if "work" not in state:  # memory for products: new memory of this size would take longer than they do
            state = state | {"work": x.new_empty(max(state["steps"].numel(), state["inverse"].numel()))}
        if state["x"] is not None:
            state = self._extended(rows, state, x, forces)
        size = min(state["count"], self.memory)
        steps, changes, inverse = state["steps"][:size], state["changes"][:size], state["inverse"][:size, :size]
        # H g = q / α + S b with q = g - Y a: the coefficients of the two loops, each for the whole history at once
        gradient, scale = -forces.mT, 1.0 / self.alpha
        work = state["work"]
        a = _sum_of_products(inverse, _dots(rows, steps, gradient, work), 1, work)
        q = gradient - _sum_of_products(changes, rows.spread(a)[:, None], 0, work)
        b = state["curvatures"][:size] * a - scale * _dots(rows, changes, q, work)
        b = _sum_of_products(inverse, b[:, None], 0, work)
        direction = (scale * q + _sum_of_products(steps, rows.spread(b)[:, None], 0, work)).mT
        longest = rows.largest(direction)
        (factor,) = rows.of_rows(-self.damping * torch.where(longest >= self.maxstep, self.maxstep / longest, 1.0))
        return Move(
            x + factor * direction, state | {"x": x, "forces": forces}, torch.ones_like(longest, dtype=torch.bool)
        )

    def _extended(self, rows: Rows, state: OptimizerState, x: torch.Tensor, forces: torch.Tensor) -> OptimizerState:
        """The state with the latest step in its history, in the place of the oldest one if it is full."""
        place, size = state["count"] % self.memory, min(state["count"] + 1, self.memory)
        if size > state["steps"].shape[0]:
            state = _with_room(state, min(max(8, 2 * size), self.memory))
        change = (state["forces"] - forces).mT
        state["steps"][place], state["changes"][place] = (x - state["x"]).mT, change
        upper = _dots(rows, state["steps"][:size], change, state["work"])
        # systems that stay have no change, and nothing in their history
        state["curvatures"][place] = upper[place]
        reciprocal = torch.where(upper[place] == 0.0, 0.0, 1.0 / upper[place])
        # R loses a row and a column, and so does its inverse; then it gains a column
        inverse = state["inverse"][:size, :size]
        inverse[place], inverse[:, place] = 0.0, 0.0
        column = -reciprocal * _sum_of_products(inverse, upper, 1, state["work"])
        column[place] = reciprocal
        inverse[:, place] = column
        return state | {"count": state["count"] + 1}


OPTIMIZERS: dict[str, type[FIRE | FIRE2 | LBFGS]] = {"fire": FIRE, "fire2": FIRE2, "lbfgs": LBFGS}
"""Optimizers by name."""


def _check(optimizer: Any) -> None:
    """Raise unless all parameters are positive numbers of their type."""
    for field in fields(optimizer):
        value = getattr(optimizer, field.name)
        if field.type in ("int", int):
            checks.check_count(field.name, value, 1 if field.name == "memory" else 0)
        elif field.type in ("bool", bool):
            checks.check_flag(field.name, value)
        else:
            checks.check_positive(field.name, value)


# -- products with a history, in an order of sums that depends on its length only ----------------------------------


def _product_in(work: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a * b``, of the shape of a, in this memory."""
    return torch.mul(a, b, out=work[: a.numel()].view(a.shape))


def _sum_of_products(a: torch.Tensor, b: torch.Tensor, axis: int, work: torch.Tensor) -> torch.Tensor:
    """The sum of ``a * b``, of the shape of a, over an axis."""
    terms = _product_in(work, a, b).movedim(axis, 0)
    n = terms.shape[0]
    while n > 1:
        half = (n + 1) // 2
        terms[: n - half] += terms[half:n]
        n = half
    return terms[0].clone() if n else terms.sum(0)


def _dots(rows: Rows, history: torch.Tensor, vectors: torch.Tensor, work: torch.Tensor) -> torch.Tensor:
    """Scalar products (m, n_systems) of a history (m, 3, n_rows) and vectors (3, n_rows)."""
    products = _product_in(work, history, vectors)
    products[:, 0] += products[:, 1]
    products[:, 0] += products[:, 2]
    return rows.sums(products[:, 0].mT.contiguous()).mT


def _with_room(state: OptimizerState, size: int) -> OptimizerState:
    """The state with room for a history of this length."""
    new = dict(state)
    for name, axes in (("steps", 1), ("changes", 1), ("curvatures", 1), ("inverse", 2)):
        old = state[name]
        new[name] = old.new_zeros((*[size] * axes, *old.shape[axes:]))
        new[name][tuple(slice(n) for n in old.shape)] = old
    new["work"] = old.new_empty(max(new["steps"].numel(), new["inverse"].numel()))
    return new
