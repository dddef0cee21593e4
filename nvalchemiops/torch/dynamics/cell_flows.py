"""Flows of systems whose cell changes, and the functions of strains that solve them."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.dynamics.constraints import Constraints
from nvalchemiops.torch.dynamics.flows import Chain, Drift, Flow, Kick, Stochastic, kept
from nvalchemiops.torch.dynamics.state import State, diagonal, trace
from nvalchemiops.torch.dynamics.velocities import square_root
from nvalchemiops.torch.runtime.context import may_read, values_of
from nvalchemiops.torch.runtime.recorder import read_number


def cell_arguments(cell: str, mask: Sequence[bool]) -> tuple[str, tuple[bool, bool, bool]]:
    """The arguments that say how cells may change, in dynamics and in relaxation, after a check; see `npt`."""
    cell = checks.as_choice("cell", cell, ("isotropic", "axes", "full"))
    if len(mask) != 3:
        raise ValueError(f"`mask` must have a bool for each of the axes x, y and z, got {len(mask)}")
    x, y, z = (checks.check_flag("mask", axis) for axis in mask)
    if not (x or y or z):
        raise ValueError("`mask` must let at least one axis change")
    return cell, (x, y, z)


def check_open_axes(moves: torch.Tensor, cell: torch.Tensor, pbc: torch.Tensor | None, otherwise: str) -> None:
    """Raise if axes may change along which a system is not periodic, since nothing there withstands a pressure.

    Parameters
    ----------
    moves : (3,) or (n_systems, 3) bool tensor
        Which Cartesian axes may change.
    cell : (n_systems, 3, 3) tensor
    pbc : (n_systems, 3) bool tensor, optional
        Of lattice vectors.
    otherwise : str
        What to choose for a system that has no periodic axis.
    """
    if pbc is None or not may_read(cell, pbc, moves) or read_number(values_of(pbc).all() | ~moves.any()):
        return
    rows = torch.where(values_of(pbc).unsqueeze(-1), values_of(cell).to(torch.float64), 0.0)
    # parts of Cartesian unit vectors that are in the span of the periodic lattice vectors
    inside = (torch.linalg.pinv(rows) @ rows).diagonal(dim1=-2, dim2=-1) > 1.0 - 1e-6
    wrong = (moves & ~inside).any(-1).tolist()
    if any(wrong):
        k = wrong.index(True)
        along = tuple(inside[k].tolist())
        advice = f"mask={along}" if any(along) else otherwise
        raise ValueError(f"`mask` lets axes change along which system {k} is not periodic: choose {advice}")


@dataclasses.dataclass(frozen=True)
class Cell(Flow):
    """Base of the flows of a cell whose strain rate is a variable (Martyna, Tobias and Klein).

    The strain rate ε is a symmetric matrix, by which positions and lattice vectors change: ``dr/dt = v + r ε`` and
    ``dh/dt = h ε``. It is confined to a subspace: ``shape`` says to which.

    Attributes
    ----------
    shape : {"isotropic", "axes", "full"}
        One number along all axes that may change; a number along each of them; or a symmetric matrix. The first two are
        kept as (n_systems, 3), the third as (n_systems, 3, 3).
    mask : (bool, bool, bool)
        Which Cartesian axes may change.
    constraints : Constraints, optional
        The strain then moves the centres of their clusters, in which nothing is stretched: with constraints inside a
        cluster, the equations of motion are those of particles at the centres.
    """

    shape: str
    mask: tuple[bool, bool, bool] = (True, True, True)
    constraints: Constraints | None = None
    needs_stress: ClassVar[bool] = True
    projected: ClassVar[tuple[str, ...] | None] = ()
    inside: ClassVar[Flow | None] = None

    def __call__(self, state: State, h: torch.Tensor) -> State:
        """The state after the time h, with what moves inside of clusters."""
        if self.constraints is None:
            return self._stretched(state, h)
        centred = self.constraints.of(state.system.domain).centred(state)
        moved = self._stretched(centred, h)
        rest = state.less(centred) if self.inside is None else self.inside(state.less(centred), h)
        positions, velocities = state.system.positions, state.velocities
        if moved.system.positions is not centred.system.positions:
            positions = moved.system.positions + rest.system.positions
        if moved.velocities is not centred.velocities:
            velocities = moved.velocities + rest.velocities
        return moved.at(positions, velocities=velocities)._replace(evaluation=state.evaluation)

    def _stretched(self, state: State, h: torch.Tensor) -> State:
        """The state after the time h, without constraints."""
        raise NotImplementedError

    def energy(self, state: State) -> torch.Tensor | float:
        """The energy of the flow inside."""
        return 0.0 if self.inside is None else self.inside.energy(state)

    def constrained(self, constraints: Constraints) -> Sequence[tuple[Flow, float]]:
        """The flow of the centres of clusters."""
        return Flow.constrained(dataclasses.replace(self, constraints=constraints), constraints)

    def _degrees(self, state: State) -> torch.Tensor:
        """Degrees of freedom (n_systems, 1) that the strain couples to."""
        name = "degrees_of_freedom" if self.constraints is None else "constraint centre degrees of freedom"
        return state.extra[name]

    @property
    def n_axes(self) -> int:
        """Number of axes that may change."""
        return sum(self.mask)

    @property
    def dimension(self) -> int:
        """Number of independent components of the strain rate."""
        n = self.n_axes
        return {"isotropic": 1, "axes": n, "full": n * (n + 1) // 2}[self.shape]

    def _axes(self, state: State) -> torch.Tensor:
        """Ones (n_systems, 3) for the axes that may change, zeros for the others."""
        one = torch.ones_like(state.extra["dt"])
        # not in place: torch.func.linearize loses what is written into a part of a constant
        return torch.cat([one if moves else torch.zeros_like(one) for moves in self.mask], 1)

    def _project(self, state: State, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor of forces (n_systems, 3) or (n_systems, 3, 3) that is in the subspace."""
        axes = None if all(self.mask) else state.extra["axes"]
        if self.shape == "full":
            tensor = 0.5 * (tensor + tensor.mT)
            return tensor if axes is None else tensor * axes.unsqueeze(-1) * axes.unsqueeze(-2)
        if axes is not None:
            tensor = tensor * axes
        if self.shape == "axes":
            return tensor
        mean = trace(tensor) / self.n_axes
        return mean.expand(-1, 3) if axes is None else mean * axes

    def _square(self, rate: torch.Tensor) -> torch.Tensor:
        """``Σ ε_ij²`` (n_systems, 1)."""
        squares = rate * rate
        return trace(squares[:, 0] + squares[:, 1] + squares[:, 2] if self.shape == "full" else squares)

    def _exponentials(self, exponent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return of_matrices(exponent) if self.shape == "full" else of_numbers(exponent)

    def _times(self, state: State, vectors: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Vectors (n_atoms, 3) times the factors (n_systems, 3), or matrices (n_systems, 3, 3), of their system."""
        factors = state.of_atoms(factors)
        if self.shape != "full":
            return vectors * factors
        x, y, z = vectors.split(1, 1)
        return x * factors[:, 0] + y * factors[:, 1] + z * factors[:, 2]


@dataclasses.dataclass(frozen=True)
class Press(Cell):
    """The pressure accelerates the strain: ``W dε/dt = Σ m v v - V σ - P V + Σ m v² / f``, projected.

    With f degrees of freedom, W = (f + 3) kT τ² / 3 for a strain rate whose kinetic energy is ``W Σ ε_ij² / 2``; for
    isotropic strains this is the mass (f + 3) kT τ² of the source. Without degrees of freedom, as for one atom at rest,
    ``Σ m v² / f`` is its mean kT, the force of a potential ``-kT log V``, which leaves the volume its distribution.

    Source: G. J. Martyna, D. J. Tobias and M. L. Klein, J. Chem. Phys. 101, 4177 (1994), doi:10.1063/1.467468.
    """

    parameters: ClassVar[tuple[str, ...]] = ("temperature", "pressure", "barostat_time")

    def odd(self) -> tuple[str, ...]:
        """The strain rate."""
        return ("strain_rate",)

    def _stretched(self, state: State, h: torch.Tensor) -> State:
        """Change the strain rate."""
        extra, stress, volume = state.extra, state.stress, state.volumes.unsqueeze(1)
        if self.shape == "full":
            momenta = state.velocities * extra["inertia"]
            motion = state.of_systems(momenta.unsqueeze(-1) * state.velocities.unsqueeze(-2))
            isotropic = self._mean_of_degrees(state, trace(diagonal(motion)))
            one = torch.eye(3, dtype=motion.dtype, device=motion.device)
            outside = (isotropic - extra["pressure"] * volume).unsqueeze(-1) * one
            force = motion - volume.unsqueeze(-1) * stress + outside
        else:
            motion = state.twice_kinetic()
            isotropic = self._mean_of_degrees(state, trace(motion))
            force = motion - volume * diagonal(stress) + (isotropic - extra["pressure"] * volume)
        factor = h / self.mass(state)
        change = self._project(state, force) * (factor.unsqueeze(-1) if self.shape == "full" else factor)
        return state.having(strain_rate=extra["strain_rate"] + change)

    def start(self, state: State) -> dict[str, torch.Tensor]:
        """A cell at rest."""
        dt, size = state.extra["dt"], (3, 3) if self.shape == "full" else (3,)
        (rate,) = kept(state, "strain_rate", dt.new_zeros(dt.shape[0], *size)).values()
        state = state._replace(extra={**state.extra, "axes": self._axes(state)})
        # what all axes share stays as it is, so that runs go on bit for bit: the mean of three equal numbers may differ
        shared = rate[:, [self.mask.index(True)]] * state.extra["axes"] if self.shape == "isotropic" else 0.0
        return {"strain_rate": shared + self._project(state, rate - shared), "axes": state.extra["axes"]}

    def mass(self, state: State) -> torch.Tensor:
        """W (n_systems, 1)."""
        extra = state.extra
        return (self._degrees(state) + 3.0) * (extra["temperature"] * extra["barostat_time"] ** 2 / 3.0)

    def _mean_of_degrees(self, state: State, total: torch.Tensor) -> torch.Tensor:
        """``Σ m v² / f`` (n_systems, 1), or kT without degrees of freedom."""
        degrees = self._degrees(state)
        return torch.where(degrees > 0.0, total / degrees.clamp(min=1.0), state.extra["temperature"])

    def energy(self, state: State) -> torch.Tensor:
        """``P V + W Σ ε_ij² / 2``, less ``kT log V`` without degrees of freedom."""
        extra, volume = state.extra, state.volumes.unsqueeze(1)
        moving = 0.5 * self.mass(state) * self._square(extra["strain_rate"])
        alone = torch.where(self._degrees(state) > 0.0, 0.0, extra["temperature"] * torch.log(volume))
        return extra["pressure"] * volume + moving - alone


@dataclasses.dataclass(frozen=True)
class StretchedKick(Cell):
    """Forces while the cell changes: ``dv/dt = F / m - v (ε + Tr ε / f)``."""

    projected: ClassVar[tuple[str, ...] | None] = Kick.projected
    inside: ClassVar[Flow | None] = Kick()

    def _stretched(self, state: State, h: torch.Tensor) -> State:
        """Change the velocities."""
        rate = state.extra["strain_rate"]
        # Tr ε / f for f degrees of freedom, which makes the ensemble right
        dilution = trace(diagonal(rate) if self.shape == "full" else rate) / self._degrees(state).clamp(min=1.0)
        if self.shape == "full":
            one = torch.eye(3, dtype=rate.dtype, device=rate.device)
            h, dilution = h.unsqueeze(-1), dilution.unsqueeze(-1) * one
        decay, mean = self._exponentials(-h * (rate + dilution))
        pushed = state.forces_on_mobile * state.extra["inverse_masses"]
        velocities = self._times(state, state.velocities, decay) + self._times(state, pushed, h * mean)
        return state._replace(velocities=velocities)


@dataclasses.dataclass(frozen=True)
class StretchedDrift(Cell):
    """Free motion while the cell changes: ``dr/dt = v + r ε``, ``dh/dt = h ε``. Frozen atoms move with the cell."""

    projected: ClassVar[tuple[str, ...] | None] = Drift.projected
    inside: ClassVar[Flow | None] = Drift()

    def _stretched(self, state: State, h: torch.Tensor) -> State:
        """Change the positions and the cell."""
        rate, cell = state.extra["strain_rate"], state.cell
        h = h.unsqueeze(-1) if self.shape == "full" else h
        growth, mean = self._exponentials(h * rate)
        positions = self._times(state, state.system.positions, growth)
        positions = positions + self._times(state, state.velocities, h * mean)
        # in float64, whose products autocast does not round
        grown = cell.to(growth.dtype)
        grown = grown @ growth if self.shape == "full" else grown * growth.unsqueeze(-2)
        return state.at(positions, grown.to(cell.dtype))


@dataclasses.dataclass(frozen=True)
class CellChain(Chain):
    """A Nosé-Hoover chain of the strain rate, whose degrees of freedom are its independent components."""

    cell: Press = Press("isotropic")
    name: ClassVar[str] = "cell_chain"
    parameters: ClassVar[tuple[str, ...]] = ("temperature", "barostat_time")

    def _degrees(self, state: State) -> torch.Tensor:
        return torch.full_like(state.extra["dt"], float(self.cell.dimension))

    def _twice_energy(self, state: State) -> torch.Tensor:
        return self.cell.mass(state) * self.cell._square(state.extra["strain_rate"])

    def _scaled(self, state: State, scale: torch.Tensor) -> State:
        rate = state.extra["strain_rate"]
        return state.having(strain_rate=rate * scale.reshape(-1, *[1] * (rate.ndim - 1)))

    def constrained(self, constraints: Constraints) -> Sequence[tuple[Flow, float]]:
        """For the cell that the centres of clusters move with."""
        return ((dataclasses.replace(self, cell=dataclasses.replace(self.cell, constraints=constraints)), 1.0),)


@dataclasses.dataclass(frozen=True)
class CellNoise(Cell, Stochastic):
    """Stochastic cell rescaling: the volume follows the pressure, with noise that makes its distribution right.

    ``dλ = β λ / (2 τ) (P_int - P + kT / (2 V)) dt + s dW`` with ``λ = √V`` and ``s² = kT β / (2 τ)``, for a
    compressibility β and the pressure P_int along the axes that may change, at the positions of the last forces. With
    the term in kT, noise moves λ like the distance of a Brownian motion in a plane from its origin, which is exact, and
    positive, in ``λ' = |(λ_P + s √h ξ_1, s √h ξ_2)|``. Without noise, the volume grows by
    ``λ_P / λ = (1 + p β P_kin h / (2 τ))^(1/p) + β (P_int - P_kin - P) h / (2 τ)`` with ``p = 2 + 4 / n``, which is
    exact for the kinetic pressure alone: it falls as ``V^(-1 - 2 / n)``. Positions and the cell are multiplied by
    ``exp(ε / n)`` along n axes, velocities are divided by it, with ``ε = log(V' / V)``. The step is of first order in
    h / τ. The change of energy is counted, that of the potential energy by the stress before and after, and is
    subtracted from the conserved quantity. Numbers are those of ``stream`` and of the next one.

    Source: M. Bernetti and G. Bussi, J. Chem. Phys. 153, 114107 (2020), doi:10.1063/5.0020514.
    """

    stream: int = 3
    parameters: ClassVar[tuple[str, ...]] = ("temperature", "pressure", "barostat_time", "compressibility")

    def _slope(self, state: State) -> torch.Tensor:
        """``dU/dε`` (n_systems, 1) of the potential energy."""
        return state.volumes.unsqueeze(1) * self._mean(state, diagonal(state.stress))

    def _mean(self, state: State, along: torch.Tensor) -> torch.Tensor:
        """The mean (n_systems, 1) over the axes that may change."""
        return trace(state.extra["axes"] * along) / self.n_axes

    def _stretched(self, state: State, h: torch.Tensor) -> State:
        """Change positions, velocities and the cell."""
        extra, cell, kt = state.extra, state.cell, state.extra["temperature"]
        volume, slope, motion = state.volumes.unsqueeze(1), self._slope(state), state.twice_kinetic()
        mobility = extra["compressibility"] / (2.0 * extra["barostat_time"])
        root = volume.sqrt()
        power, kinetic = 2.0 + 4.0 / self.n_axes, mobility * h * self._mean(state, motion) / volume
        shrinks = mobility * h * (slope / volume + extra["pressure"])
        spread = square_root(kt * mobility * h)
        along, across = (spread * state.normal(stream, by_system=True) for stream in (self.stream, self.stream + 1))
        pressed = root * (torch.exp(torch.log(1.0 + power * kinetic) / power) - shrinks)
        # NaN tells of a step that is too long for the pressure
        grown = torch.where(pressed > 0.0, ((pressed + along) ** 2 + across**2).sqrt(), torch.nan)
        strain = 2.0 * torch.log(grown / root)
        scale = torch.exp(strain / self.n_axes * extra["axes"])
        added = 0.5 * trace(motion * (scale**-2 - 1.0)) + extra["pressure"] * (grown * grown - volume)
        # the second half of the step before, the first of this
        added = added + 0.5 * slope * (strain + extra["strain"])
        velocities = self._times(state, state.velocities, 1.0 / scale)
        positions = self._times(state, state.system.positions, scale)
        state = state.at(positions, cell * scale.to(cell.dtype).unsqueeze(-2), velocities=velocities)
        return self.heated(state, added).having(strain=strain)

    def start(self, state: State) -> dict[str, torch.Tensor]:
        """No heat, no strain."""
        strain = kept(state, "strain", torch.zeros_like(state.extra["dt"]))
        return Stochastic.start(self, state) | strain | {"axes": self._axes(state)}

    def energy(self, state: State) -> torch.Tensor:
        """``P V``, less the energy that came in."""
        extra = state.extra
        if self.constraints is not None:
            state = self.constraints.of(state.system.domain).centred(state)
        came = extra[self.heat] + 0.5 * self._slope(state) * extra["strain"]
        return extra["pressure"] * state.volumes.unsqueeze(1) - came


# -- functions of strains -------------------------------------------------------------------------


def of_numbers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``exp(x)`` and ``(exp(x) - 1) / x``, whose value and derivatives are right at zero."""
    small = x.abs() < 3e-3
    series = 1.0 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720)))))
    away = torch.where(small, 1.0, x)
    return torch.exp(x), torch.where(small, series, torch.expm1(away) / away)


_ORDER, _DOUBLINGS = 9, 5


def of_matrices(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``exp(x)`` and ``(exp(x) - 1) / x`` of matrices (n, 3, 3), without eigenvectors, so with all derivatives.

    Taylor's series at ``x / 32``, then five doublings of ``d = exp(x) - 1`` and of the quotient p:
    ``d' = d d + 2 d`` and ``p' = p + p d / 2``, which keep the relative accuracy of d. The series is exact to rounding
    up to a norm of 4; larger strains in one step are no dynamics.
    """
    one = torch.eye(3, dtype=x.dtype, device=x.device)
    part = x * 0.5**_DOUBLINGS
    quotient = one + part * (1.0 / (_ORDER + 1))
    for k in range(_ORDER, 1, -1):
        quotient = one + torch.bmm(part, quotient) * (1.0 / k)
    difference = torch.bmm(part, quotient)
    for _ in range(_DOUBLINGS):
        quotient = quotient + 0.5 * torch.bmm(quotient, difference)
        difference = torch.bmm(difference, difference) + 2.0 * difference
    return one + difference, quotient
