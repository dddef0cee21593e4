"""`State`: what a step of dynamics takes and returns."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nvalchemiops.arguments import hint
from nvalchemiops.torch.dynamics.model import Evaluation
from nvalchemiops.torch.dynamics.sums import Division
from nvalchemiops.torch.dynamics.velocities import of_each, temperature_of
from nvalchemiops.torch.operators.chains import move_chains
from nvalchemiops.torch.operators.noise import chi_square_noise, normal_noise
from nvalchemiops.torch.runtime._torch_internals import named_in_files
from nvalchemiops.torch.runtime.releases import replaceable
from nvalchemiops.torch.systems import PER_ATOM, System, has_rows, printed_in_short

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain

OF_ATOMS = ("inertia", "inverse_masses", "place")
"""Names in ``State.extra`` of what has a row for each atom, beside the variables that flows name (`Flow.per_atom`)."""


@replaceable
@printed_in_short
@named_in_files
class State(NamedTuple):
    """Positions, velocities and everything else that changes in a step: a value, which is never changed in place.

    Made by `Integrator.start`. As a tuple of tensors it is a pytree, which torch saves, maps and differentiates.

    Attributes
    ----------
    system : System
        ``cell`` and ``pbc`` have a row for each system, (1, 3, 3) and (1, 3) for one. ``batch_idx`` is None for one
        system, and with a ``domain``, which knows it: all atoms of the state are then those that this rank owns.
    velocities : (n_atoms, 3) tensor, length / time
        Zero for frozen atoms.
    masses : (n_atoms,) tensor, mass
        Infinite for frozen atoms.
    evaluation : Evaluation
        Energies, forces and stress at the current positions.
    step : () int64 tensor
        Number of steps since the start.
    extra : dict from str to tensor
        Parameters of the integrator and variables of its flows, (n_systems, ...), and constants of the atoms,
        (n_atoms, ...) or of constraints. Numbers of systems are columns (n_systems, 1) in float64. Replace a parameter
        (``"dt"``, ``"temperature"``, ``"pressure"`` ...) to change it during a run.
    """

    system: System
    velocities: torch.Tensor
    masses: torch.Tensor
    evaluation: Evaluation
    step: torch.Tensor
    extra: dict[str, torch.Tensor]

    def at(self, positions: torch.Tensor, cell: torch.Tensor | None = None, **fields: torch.Tensor) -> "State":
        """The state with these positions, this cell (the same by default), and other fields."""
        changes: Any = {"positions": positions} if cell is None else {"positions": positions, "cell": cell}
        changes = {**fields, "system": self.system._replace(**changes)}
        return self._replace(**changes)

    def having(self, **extra: Any) -> "State":
        """The state with these values in ``extra``, in place of those that it has.

        Parameters of the integrator may be numbers, or tensors (n_systems,) or (n_systems, 1); other shapes, and names
        that ``extra`` does not have, raise a ValueError. Flows add variables of their own by `Flow.start`.
        """
        for name, value in extra.items():
            if name not in self.extra:
                parameters = [key.removeprefix("given ") for key in self.extra if key.startswith("given ")]
                raise ValueError(f"this state has no '{name}'{hint(name, parameters)}")
            if f"given {name}" in self.extra:
                n_systems = self.extra["dt"].shape[0]
                is_column = getattr(value, "shape", None) == (n_systems, 1)
                extra[name] = self._column(name, value[:, 0] if is_column else value, n_systems)
        return self._replace(extra={**self.extra, **extra})

    def _column(self, name: str, value: Any, n_systems: int) -> Any:
        """A number, or one for each system, as a column (n_systems, 1)."""
        return of_each(name, value, n_systems, self.velocities.device)

    def less(self, other: "State") -> "State":
        """The state with the positions, velocities and forces of the other subtracted."""
        evaluation = self.evaluation._replace(forces=self.evaluation.forces - other.evaluation.forces)
        positions = self.system.positions - other.system.positions
        return self.at(positions, velocities=self.velocities - other.velocities)._replace(evaluation=evaluation)

    def of_atoms(self, per_system: torch.Tensor) -> torch.Tensor:
        """For each atom the value of its system, with the dtype of the positions.

        One row, which broadcasts, if there is one system.
        """
        return self.division.of_atoms(per_system.to(self.velocities.dtype), self.velocities.shape[0])

    def of_systems(self, per_atom: torch.Tensor) -> torch.Tensor:
        """Sums (n_systems, ...) in float64 of values (n_atoms, ...), with the same bits alone and in a batch.

        On ranks these are sums over all atoms of a system, with the same bits on all ranks.
        """
        return self.division.sums(per_atom.to(torch.float64))

    @property
    def forces_on_mobile(self) -> torch.Tensor:
        """Forces (n_atoms, 3), zero for frozen atoms: theirs may be infinite, as those of two that overlap."""
        return torch.where(self.extra["inverse_masses"] > 0.0, self.evaluation.forces, 0.0)

    @property
    def division(self) -> Division:
        """Which atoms belong to which system, and which of them are on this rank."""
        domain = self.system.domain
        batch_idx = self.system.batch_idx if domain is None else domain.batch_idx
        return Division(batch_idx, self.extra["dt"].shape[0], domain)

    def twice_kinetic(self) -> torch.Tensor:
        """``Σ m v_a²`` (n_systems, 3) along the three axes."""
        return self.of_systems(self.velocities * self.velocities * self.extra["inertia"])

    def normal(self, stream: int, by_system: bool = False) -> torch.Tensor:
        """Normal numbers of this step: (n_atoms, 3) with the dtype of the velocities, or (n_systems, 1) in float64."""
        extra, n_systems = self.extra, self.extra["dt"].shape[0]
        numbers = extra["seed"], extra["key"], self.step
        if by_system:
            return normal_noise(*numbers, None, None, stream, n_systems, 1, True)
        n_atoms = self.velocities.shape[0]
        found = normal_noise(*numbers, self.division.batch_idx, extra.get("place"), stream, n_atoms, 3)
        return found.to(self.velocities.dtype)

    def chi_square(self, stream: int) -> torch.Tensor:
        """Sums (n_systems, 1) of squares of f - 1 normal numbers, for f degrees of freedom."""
        numbers = self.extra["seed"], self.extra["key"], self.step
        return chi_square_noise(*numbers, self.extra["degrees_of_freedom"].squeeze(1) - 1.0, stream).unsqueeze(1)

    def chains(self, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`nvalchemiops.torch.operators.chains.move_chains`."""
        return move_chains(*arguments)

    # -- atoms that are divided among ranks

    def rows(self, names: Iterable[str] = ()) -> dict[str, torch.Tensor]:
        """All values that have a row for each atom, by name; ``names`` are further ones in ``extra``."""
        found = {name: getattr(self.system, name) for name in PER_ATOM if has_rows(getattr(self.system, name))}
        found |= {"velocities": self.velocities, "masses": self.masses, "forces": self.evaluation.forces}
        return found | {name: self.extra[name] for name in (*OF_ATOMS, *names) if name in self.extra}

    def with_rows(self, rows: dict[str, torch.Tensor], **changes: Any) -> "State":
        """The state with these values, which `rows` gave, and changes of the system."""
        fields: Any = {name: value for name, value in rows.items() if name in PER_ATOM} | changes
        system, evaluation = self.system._replace(**fields), self.evaluation._replace(forces=rows["forces"])
        extra = self.extra | {name: value for name, value in rows.items() if name in self.extra}
        return State(system, rows["velocities"], rows["masses"], evaluation, self.step, extra)

    def followed(self, names: Iterable[str] = ()) -> "State":
        """The state with a domain that is valid for its positions and cell, in which all that atoms have moves along.

        The same state without a domain. On ranks a collective call; see `rows` for the names.
        """
        domain = self.system.domain
        if domain is None:
            return self
        rows = self.rows(names)
        positions = rows.pop("positions")
        domain, positions, *moved = domain.follow(positions, *rows.values(), cell=self.system.cell)
        if domain is self.system.domain:
            return self
        return self.with_rows({"positions": positions, **dict(zip(rows, moved))}, domain=domain)

    def collected(self, names: Iterable[str] = ()) -> "State":
        """All atoms, without a domain, on the first rank in the order of their numbers; no atoms on others.

        The same state without a domain. On ranks a collective call; see `rows` for the names.
        """
        domain = self.system.domain
        if domain is None:
            return self
        rows = {name: domain.collect(value) for name, value in self.rows(names).items() if name not in PER_ATOM}
        return self._replace(system=domain.collect(self.system)).with_rows(rows)

    def divided(
        self, domain: "Domain", bring: Callable[[torch.Tensor], torch.Tensor], names: Iterable[str] = ()
    ) -> "State":
        """The state of all atoms, for those that this rank owns in the domain. A collective call; see `rows`.

        ``bring`` takes values of all atoms, and returns those of the owned ones.
        """
        rows = {name: bring(value) for name, value in self.rows(names).items()}
        own = self.with_rows(rows, domain=domain, batch_idx=None, pbc=None)
        places = own.division.places()
        # one process needs no places for one system
        return own if places is None else own._replace(extra={**own.extra, "place": places})

    @property
    def kinetic_energies(self) -> torch.Tensor:
        """Kinetic energies (n_systems,) in float64."""
        return 0.5 * trace(self.twice_kinetic()).squeeze(1)

    @property
    def temperatures(self) -> torch.Tensor:
        """Temperatures kT (n_systems,) in units of energy: ``2 K / degrees of freedom``; zero without any."""
        return temperature_of(self.kinetic_energies, self.extra["degrees_of_freedom"].squeeze(1))

    @property
    def cell(self) -> torch.Tensor:
        """Cells (n_systems, 3, 3)."""
        if self.system.cell is None:
            raise ValueError("a system without `cell` has no volume")
        return self.system.cell

    @property
    def stress(self) -> torch.Tensor:
        """The stress (n_systems, 3, 3) that the model gave."""
        if self.evaluation.stress is None:
            raise ValueError("the model gave no stress")
        return self.evaluation.stress

    @property
    def volumes(self) -> torch.Tensor:
        """Volumes (n_systems,) in float64."""
        return self.system.volume.to(torch.float64)

    @property
    def pressures(self) -> torch.Tensor:
        """Pressures (n_systems,): the trace of ``Σ m v v / volume - stress``, divided by 3.

        The stress is that of the model and of constraint forces.
        """
        stress = self._whole_stress()
        kinetic = trace(self.twice_kinetic()).squeeze(1) / self.volumes
        return (kinetic - trace(diagonal(stress)).squeeze(1)) / 3.0

    @property
    def pressure_tensors(self) -> torch.Tensor:
        """Pressures (n_systems, 3, 3) in float64: ``Σ m v vᵀ / volume - stress``, with the stress of `pressures`.

        The time correlation of the components off the diagonal gives the viscosity (Green and Kubo).
        """
        stress, momenta = self._whole_stress(), self.velocities * self.extra["inertia"]
        motion = self.of_systems(momenta.unsqueeze(-1) * self.velocities.unsqueeze(-2))
        return motion / self.volumes.reshape(-1, 1, 1) - stress

    def _whole_stress(self) -> torch.Tensor:
        """The stress of the model and of constraint forces."""
        stress = self.stress
        return stress + self.extra["constraint stress"] if "constraint stress" in self.extra else stress


def trace(diagonals: torch.Tensor) -> torch.Tensor:
    """The sum (n, 1) of three columns (n, 3)."""
    return diagonals.sum(1, keepdim=True)


def diagonal(matrices: torch.Tensor) -> torch.Tensor:
    """The diagonals (n, 3) of matrices (n, 3, 3), in float64."""
    return matrices.diagonal(dim1=-2, dim2=-1).to(torch.float64)
