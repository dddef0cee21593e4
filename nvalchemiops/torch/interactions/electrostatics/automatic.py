"""Electrostatics of any system for an accuracy: the method and all of its parameters are chosen."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.accuracy import methods
from nvalchemiops.torch.interactions.electrostatics.accuracy.choice import check_accuracy
from nvalchemiops.torch.interactions.electrostatics.accuracy.sizes import Sizes, counted, sizes_of
from nvalchemiops.torch.interactions.electrostatics.ewald import ewald_summation
from nvalchemiops.torch.interactions.electrostatics.modules import (
    ConfiguredSum,
    EwaldSummation,
    ParticleMeshEwald,
    periodic_systems,
)
from nvalchemiops.torch.interactions.electrostatics.open_systems import open_systems, periodicity
from nvalchemiops.torch.interactions.electrostatics.pme import particle_mesh_ewald
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB
from nvalchemiops.torch.runtime.context import may_read, on_host
from nvalchemiops.torch.runtime.recorder import read_number
from nvalchemiops.torch.systems import Neighbors, System

_SUMS: dict[str, Any] = {"ewald": ewald_summation, "pme": particle_mesh_ewald}
_MODULES: dict[str, Any] = {"ewald": EwaldSummation, "pme": ParticleMeshEwald}


class Electrostatics(ConfiguredSum):
    """Coulomb energies, forces and virials of crystals, slabs, molecules and batches of them, for an accuracy.

    Each call chooses how to sum:

    - Systems without any periodic axis: all pairs.
    - Periodic systems: k-vectors (`ewald_summation`) or a mesh (`particle_mesh_ewald`), whichever takes less time, with
      the fastest splitting parameter, cutoff and spline order. The choice depends on the number of atoms, in a batch
      also on the cells, on the device, and on whether neighbors are given or searched in each call. It does not depend
      on positions or the cutoff.
    - Slabs, with one open axis in ``pbc``: as periodic systems, with the slab correction.

    Parameters
    ----------
    accuracy : float, optional
        Target for the RMS error of the forces, relative to the RMS of the forces.
    method : {"auto", "ewald", "pme"}, optional
        Method for periodic systems, by default the faster one, which ``"auto"`` names.
    cutoff : float, length, optional
        Cutoff of the lists that calls give or build; by default the one that is fastest.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Notes
    -----
    Calls take a `System`, optionally `Neighbors`, and the options of `ewald_summation` that do not describe k-vectors.
    Sources are charges, dipoles, quadrupoles and Gaussian widths.

    Inside ``torch.compile`` and in exported programs k-vectors are used; there, except for compiled graphs on a CPU,
    ``cutoff`` must be given. The module that `estimate` returns also has a mesh there.

    Examples
    --------
    >>> electrostatics = Electrostatics(accuracy=1e-5)
    >>> result = electrostatics(System(positions, charges, cell), compute_forces=True)
    >>> print(electrostatics.explain(System(positions, charges, cell)))  # doctest: +SKIP
    """

    _trainable = ()

    def __init__(self, accuracy: float = 1e-6, method: str | None = None, *, cutoff: float | None = None) -> None:
        super().__init__(None, cutoff, check_accuracy(accuracy), COULOMB)
        if method is not None:
            method = checks.as_choice("method", method, ("auto", *methods.METHODS))
        self.method = None if method == "auto" else method

    def _settings(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "method": self.method, "cutoff": self.cutoff}

    def _restored(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        made = Electrostatics(**settings)
        return {name: getattr(made, name) for name in settings}

    def _evaluate(self, positions: torch.Tensor, charges: torch.Tensor, cell: torch.Tensor, **options: Any) -> Any:
        batch_idx, pbc, domain = (options.get(name) for name in ("batch_idx", "pbc", "domain"))
        atoms = System(positions, charges, cell, batch_idx, pbc, None, domain)
        is_listed = options.get("neighbor_list") is not None or options.get("neighbor_matrix") is not None
        accuracy = checks.check_positive("accuracy", options["accuracy"])
        finds_neighbors = not is_listed and domain is None
        return _SUMS[self._method_for(atoms, accuracy, finds_neighbors)](positions, charges, cell, **options)

    def _method_for(self, atoms: System, accuracy: float, finds_neighbors: bool) -> str:
        """The name of the method. If arguments do not fit together, any: the function raises."""
        positions, cell, batch_idx, domain = atoms.positions, atoms.cell, atoms.batch_idx, atoms.domain
        costs = core.COSTS.get(getattr(getattr(positions, "device", None), "type", ""))
        if self.method is not None or cell is None or costs is None:
            return self.method or "ewald"
        if not may_read(cell, batch_idx, wait=True):
            return "ewald"
        one = not (isinstance(cell, torch.Tensor) and cell.ndim == 3 and cell.shape[0] > 1)
        if one and isinstance(positions, torch.Tensor) and positions.ndim == 2:
            n_atoms = positions.shape[0] if domain is None else domain.n_atoms
            return methods.method_of_one(n_atoms, accuracy, costs, finds_neighbors)
        sizes = periodic_sizes(atoms)
        if sizes is None:
            return "ewald"
        return methods.method_of_several(sizes, accuracy, costs, finds_neighbors)

    @classmethod
    def estimate(
        cls,
        system: System,
        accuracy: float = 1e-6,
        *,
        method: str | None = None,
        real_space_cutoff: float | torch.Tensor | None = None,
    ) -> EwaldSummation | ParticleMeshEwald:
        """The faster method as a module with fixed parameters, for calls that give neighbors up to its ``cutoff``.

        Parameters
        ----------
        system : System
            With charges, the magnitude of the forces is estimated from the positions, as in calls; its dipoles,
            quadrupoles and widths then count, too. In a batch, systems without a periodic axis in ``pbc`` do not count.
        accuracy : float, optional
        method : {"auto", "ewald", "pme"}, optional
        real_space_cutoff : float or (n_systems,) tensor, length, optional
            As for `estimate_ewald_parameters`: the reach of lists that are given; by default the fastest one.
        """
        accuracy = check_accuracy(accuracy)
        chosen = cls(accuracy, method)._method_for(periodic_systems(system)[0], accuracy, False)
        return _MODULES[chosen].estimate(system, accuracy=accuracy, real_space_cutoff=real_space_cutoff)

    def explain(self, system: System, neighbors: Neighbors | None = None) -> str:
        """Say which method a call would use, and what is expected of it and of the alternative, as a table.

        Parameters
        ----------
        system : System
        neighbors : Neighbors, optional
            If the call will give them.

        Raises
        ------
        ValueError
            Cells, numbers of atoms and ``pbc`` do not fit together, or a system is periodic along one axis only.
        """
        if system.cell is None and system.pbc is None:
            system = system._replace(pbc=torch.zeros(3, dtype=torch.bool, device="cpu"))  # as `System` documents
        is_open = open_systems(system)
        n_open = 0 if is_open is None else int(is_open.sum())
        sizes = None if system.cell is None else periodic_sizes(system)
        lines = [f"{_counted(n_open, 'open system')}: all pairs, exactly"] * bool(n_open)
        if sizes is None:
            if system.cell is not None and system.cell.shape[0] == 0:
                raise ValueError("`cell` holds no system: there is nothing to choose")
            if is_open is None or not read_number(is_open.all()):
                raise ValueError("`cell`, `batch_idx` and `pbc` of the system do not fit together")
            return "\n".join(lines)
        axes = periodicity(system.pbc)
        if axes is not None and bool((axes.sum(1) == 1).any()):
            raise ValueError("`pbc`: the slab correction is for at most one open axis")
        costs, finds_neighbors = core.COSTS[system.positions.device.type], neighbors is None and system.domain is None
        reach = self.cutoff if neighbors is None or neighbors.cutoff is None else neighbors.cutoff
        found = methods.ways(sizes, self.accuracy, costs, finds_neighbors, reach)
        chosen = self._method_for(system, self.accuracy, finds_neighbors)
        n_systems, n_atoms = len(sizes.n_atoms), int(sizes.n_atoms.sum())
        lines += [f"{_counted(n_systems, 'periodic system')}, {_counted(n_atoms, 'atom')}, accuracy {self.accuracy:g}"]
        lines += _table(sorted(found, key=lambda way: way.method != chosen))
        lines += ["Times are estimates, for energies and forces; `nvalchemiops tune` measures this machine."]
        return "\n".join(lines)

    def extra_repr(self) -> str:
        """The arguments, for ``repr``."""
        return f"accuracy={self.accuracy:g}, method={self.method!r}, cutoff={self.cutoff}"


def fastest_cutoff(module: ConfiguredSum, system: System, options: Mapping[str, Any]) -> float | None:
    """The cutoff with which a sum that chooses all parameters takes the least time, if its list is kept.

    None if parameters are given, to the module or in the ``options`` of its calls, if no system is periodic, and if
    values cannot be read.
    """
    costs = core.COSTS.get(system.positions.device.type)
    names = ("alpha", "k_cutoff", "mesh_dimensions", "mesh_spacing")
    given = [options.get(name, getattr(module, name, None)) for name in names]
    if any(value is not None for value in given) or costs is None:
        return None
    if not may_read(system.cell, system.batch_idx, wait=True) or (sizes := periodic_sizes(system)) is None:
        return None
    if isinstance(module, Electrostatics):
        method = module._method_for(system, module.accuracy, False)
    else:
        (method,) = [name for name, kind in _MODULES.items() if isinstance(module, kind)]
    (way,) = [way for way in methods.ways(sizes, module.accuracy, costs, False) if way.method == method]
    return float(way.cutoff.max())


def periodic_sizes(atoms: System) -> Sizes | None:
    """Sizes of the systems that are not open; None if there are none, or if the arguments do not fit together."""
    positions, batch_idx = atoms.positions, atoms.batch_idx
    cell: Any = atoms.cell
    if not all(isinstance(t, torch.Tensor) for t in (positions, cell)) or cell.shape[-2:] != (3, 3):
        return None
    if batch_idx is not None and not _is_index(batch_idx):
        return None
    cells = cell.reshape(-1, 3, 3)
    if atoms.domain is not None:
        count = on_host(atoms.domain.atoms_in_systems)
    else:
        count = counted(batch_idx, cells.shape[0], positions.shape[0])
    if count.shape != cells.shape[:1]:
        return None
    is_open = open_systems(atoms)
    kept = np.ones(len(count), dtype=bool) if is_open is None else ~on_host(is_open)
    with np.errstate(invalid="ignore"):  # the function names cells that are not finite
        sizes = sizes_of(cells, count)
        kept &= sizes.volume > 0.0
    return Sizes(*(values[kept] for values in sizes)) if kept.any() else None


def _is_index(batch_idx: Any) -> bool:
    """Whether these are systems of atoms, as far as `counted` needs it."""
    is_int = isinstance(batch_idx, torch.Tensor) and batch_idx.dtype in (torch.int32, torch.int64)
    return is_int and batch_idx.ndim == 1 and bool((on_host(batch_idx) >= 0).all())


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _table(ways: list[methods.Way]) -> list[str]:
    """One row for each way; the first is the one that is used."""
    rows = [["", "method", "cutoff", "alpha", "reciprocal part", "expected error", "time (ms)", "of which"]]
    for number, way in enumerate(ways):
        if way.method == "pme":
            part = "mesh " + " x ".join(map(str, way.mesh)) + f", splines of order {way.order}"
        else:
            part = f"k-vectors up to {_span(way.k_cutoff)}"
        times = ", ".join(f"{name} {1e3 * time:.2g}" for name, time in way.times.items())
        row = ["used" if number == 0 else "", way.method, _span(way.cutoff), _span(way.alpha), part]
        rows.append([*row, f"{way.error:.1e}", f"{1e3 * way.time:.2g}", times])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in rows]


def _span(values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.3g}" if high <= low * (1.0 + 0.1 / core.STEPS) else f"{low:.3g} to {high:.3g}"
