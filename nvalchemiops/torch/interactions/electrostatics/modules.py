"""Ewald sums as modules that keep their parameters, for repeated calls."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nvalchemiops.interactions.electrostatics.error_models import COSTS, DEFAULT_ORDER
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.accuracy.choice import sources_of
from nvalchemiops.torch.interactions.electrostatics.ewald import ewald_summation
from nvalchemiops.torch.interactions.electrostatics.k_vectors import per_system, prepare_wave_vectors
from nvalchemiops.torch.interactions.electrostatics.open_systems import (
    has_slabs,
    open_systems,
    periodic_part,
    periodicity,
)
from nvalchemiops.torch.interactions.electrostatics.parameters import ewald_parameters, of_charges_alone, pme_parameters
from nvalchemiops.torch.interactions.electrostatics.pme import particle_mesh_ewald, prepare_mesh
from nvalchemiops.torch.interactions.electrostatics.potentials import (
    COULOMB,
    LongRangePotential,
    check_potential,
    is_coulomb,
)
from nvalchemiops.torch.interactions.electrostatics.system import check_system
from nvalchemiops.torch.interactions.electrostatics.terms.mesh import NOT_CHOSEN, MeshSum
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum
from nvalchemiops.torch.operators.lattice import check_spline_order, mesh_and_order
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime.context import may_read, on_host, values_of
from nvalchemiops.torch.runtime.modules import ExactModule, brief
from nvalchemiops.torch.systems import BESIDE_TENSORS, Neighbors, System, long_arguments, named, neighbors_beside


def _parameter(name: str, value: float | torch.Tensor | None) -> torch.Tensor | None:
    """A positive number, or one for each system, as a tensor (1,) or (n_systems,); None if each call chooses it."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return per_system(name, value, max(1, value.numel()), value.device).detach().clone()
    # moved to the device on which torch creates parameters of modules
    return per_system(name, value, max(1, np.size(value)), torch.device("cpu")).clone().to(torch.get_default_device())


def _check_same(potential: LongRangePotential, exponent: int | None) -> None:
    """Raise if the saved module had another potential; potentials without an exponent cannot be distinguished."""
    if potential.exponent != exponent:
        saved, here = ("user-defined" if p is None else f"1/r^{p}" for p in (exponent, potential.exponent))
        raise ValueError(f"`potential` is {here}, but {saved} in the state dict")


def _unchanged(name: str, value: float | torch.Tensor, prepared: torch.Tensor) -> torch.Tensor:
    """The value for which data were prepared; raise if the parameter of the module has changed since.

    If values cannot be read, a changed value becomes NaN instead.
    """
    value = per_system(name, value, prepared.shape[0], prepared.device)  # callers may have set a number
    if may_read(value) and np.array_equal(on_host(value), on_host(prepared)):
        return prepared
    # the dtype of a cell may have rounded it
    same = (value.detach() - prepared).abs() <= 1e-6 * prepared
    if not may_read(same):
        return torch.where(same, prepared, torch.nan)
    if not bool(values_of(same).all()):
        raise ValueError(f"`{name}` has changed since `prepare`: call it again")
    return prepared


def _atoms(positions: Any, cell: Any, batch_idx: Any, charges: Any) -> tuple[System, torch.Tensor | None]:
    """`periodic_systems`; separate tensors are made into a system."""
    if not isinstance(positions, System):
        return System(positions, charges, cell, batch_idx), None
    if isinstance(cell, float):  # second in `Electrostatics.estimate`
        raise TypeError("`cell` must be a torch.Tensor, got float: give `accuracy` by name")
    neighbors_beside((), {"cell": cell, "batch_idx": batch_idx, "charges": charges})
    return periodic_systems(positions)


def periodic_systems(system: System) -> tuple[System, torch.Tensor | None]:
    """The systems for which parameters are estimated: those with periodic axes, and their indices, None for all.

    They have no ``pbc``, which has no other effect on parameters. Raise if the atoms are divided among ranks.
    """
    if system.domain is not None:
        raise ValueError("`domain`: estimate parameters for all atoms, before they are divided among ranks")
    system, kept = periodic_part(system)
    return system._replace(pbc=None), kept


def _of_all(values: torch.Tensor, kept: torch.Tensor | None, positions: Any) -> torch.Tensor:
    """Values of all systems; those of open ones, which have no effect, are those of the first periodic one."""
    if kept is None:
        return values
    cell = positions.cell
    return values[0].repeat(cell.shape[0]).index_copy(0, kept, values)


def _of_kept(real_space_cutoff: Any, kept: torch.Tensor | None, positions: Any) -> Any:
    """The cutoffs of the systems for which parameters are estimated."""
    if kept is None or real_space_cutoff is None:
        return real_space_cutoff
    cutoffs = per_system("real_space_cutoff", real_space_cutoff, positions.cell.shape[0], kept.device, wait=True)
    return cutoffs.index_select(0, kept)


def _cell_of(cell: Any) -> Any:
    """The cells of a system; in a batch unit cells for molecules without one, which are summed over all pairs."""
    if not isinstance(cell, System):
        return cell
    cells, is_open = cell.cell, open_systems(cell)
    if cells is None or is_open is None or is_open.all():
        return cells
    none = is_open.to(cells.device) & (cells.detach() == 0.0).flatten(1).all(1)
    return torch.where(none[:, None, None], torch.eye(3, dtype=cells.dtype, device=cells.device), cells)


class ConfiguredSum(ExactModule):
    """Base of the modules. Holds alpha, the cutoff of lists, the accuracy, the potential and data for a fixed cell."""

    alpha: torch.Tensor | None
    _trainable: tuple[str, ...] = ("alpha",)

    def __init__(
        self, alpha: float | torch.Tensor | None, cutoff: float | None, accuracy: float, potential: LongRangePotential
    ) -> None:
        super().__init__()
        check_potential(potential)
        self.alpha = _parameter("alpha", alpha)
        self.cutoff = None if cutoff is None else checks.check_positive("cutoff", cutoff)
        self.accuracy = checks.check_positive("accuracy", accuracy)
        self.potential = potential
        self._prepared: Any = None

    @property
    def prepared_cell(self) -> torch.Tensor | None:
        """The cell (n_systems, 3, 3) that was given to `prepare`, in float64."""
        return None if self._prepared is None else self._prepared.cell

    def extra_repr(self) -> str:
        """The parameters that are fixed, for ``repr``; of several systems the smallest and the largest."""
        names = ("alpha", "k_cutoff", "mesh_dimensions", "spline_order", "cutoff", "accuracy")
        values = {name: getattr(self, name, None) for name in names}
        return ", ".join(f"{name}={brief(value)}" for name, value in values.items() if value is not None)

    def _evaluate(self, positions: torch.Tensor, charges: torch.Tensor, cell: torch.Tensor, **options: Any) -> Any:
        """Call the function that the module configures."""
        raise NotImplementedError

    @engine.with_own_plans
    def forward(
        self,
        positions: torch.Tensor | System,
        charges: torch.Tensor | Neighbors | None = None,
        cell: torch.Tensor | None = None,
        *,
        neighbors: Neighbors | None = None,
        **options: Any,
    ) -> Any:
        """Evaluate the sum, for a system and its neighbors or for separate tensors.

        Parameters
        ----------
        positions : System, or (n_atoms, 3) tensor
            A system without a cell is not periodic: all pairs are summed, as with ``pbc=False``. Slabs, with one open
            axis in ``pbc``, get the slab correction, if the potential is Coulomb's.
        charges : tensor, or Neighbors after a System
        cell : tensor, only without a System
        neighbors : Neighbors, optional
            With a System: the neighbors to sum. By default a list is built.
        **options
            Other arguments of the function that the module configures.

        Returns
        -------
        Results
            For a system, results by name; for tensors, the results of the function.

        Raises
        ------
        ValueError
            The neighbors do not reach the ``cutoff`` that belongs to ``alpha``, or that of the call.
        """
        if not isinstance(positions, System):
            if neighbors is not None:
                raise TypeError(BESIDE_TENSORS)
            self._move_to(positions)
            given = {"cutoff": self.cutoff, "accuracy": self.accuracy, "potential": self.potential} | options
            if "slab_correction" not in given and is_coulomb(given["potential"]):
                pbc = given.get("pbc")
                if pbc is None and not getattr(given.get("domain"), "_is_periodic", True):
                    pbc = given["domain"]._axes
                given["slab_correction"] = has_slabs(pbc, if_unknown=True)
            return self._evaluate(positions, charges, cell, **given)  # type: ignore[arg-type]  # checked there
        system, beside = positions, (charges, cell, neighbors)
        if system.cell is None and system.pbc is None:
            system = system._replace(pbc=torch.zeros(3, dtype=torch.bool, device="cpu"))  # as `System` documents
        cutoff = None if self.alpha is None else self.cutoff  # if alpha is None, it is chosen to suit the neighbors
        if options.get("cutoff") is not None:  # for which the call says that they reach this far
            cutoff = max(cutoff or 0.0, checks.check_positive("cutoff", options["cutoff"]))
        if cutoff is not None:
            axes = periodicity(system.pbc, options.get("slab_correction") is not True)
            if axes is not None and not bool(axes.any()):
                cutoff = None  # all pairs of open systems are summed, whatever the neighbors are
        given = long_arguments(
            system, beside, options, needed=("charges",), padding="mask_value", reach="cutoff", cutoff=cutoff
        )
        sources = {name: getattr(system, name) for name in SOURCES}
        given = {name: values for name, values in sources.items() if values is not None} | given
        names = ["energies", *(name for name in DERIVATIVES if options.get(f"compute_{name}"))]
        return named(names, self.forward(system.positions, system.charges, system.cell, **given))


DERIVATIVES = ("forces", "charge_gradients", "dipole_gradients", "quadrupole_gradients", "virial")
SOURCES = ("dipoles", "quadrupoles", "widths")


class EwaldSummation(ConfiguredSum):
    """A configured `ewald_summation`: for an accuracy, or with fixed parameters.

    Parameters
    ----------
    alpha : float or (n_systems,) tensor, 1/length, optional
        By default each call chooses alpha and k-vectors for ``accuracy``.
    k_cutoff : float or (n_systems,) tensor, 1/length, optional
    cutoff : float, length, optional
        Cutoff of the lists that calls give or build.
    accuracy : float, optional
        Target for the RMS error of the forces, relative to the RMS of the forces.
    potential : LongRangePotential, optional

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Attributes
    ----------
    prepared_cell : (n_systems, 3, 3) float64 tensor or None
        The cell that was given to `prepare`.

    Notes
    -----
    The k-vectors of each call follow from its cell, until `prepare` fixes their Miller indices. Energies are then
    continuous when the cell changes, as in dynamics at constant pressure, and nothing is read on the host. If the cell
    has become longer by more than a tenth in some direction, an `AccuracyWarning` asks to prepare again (CPU only).

    Loading a state dict restores all parameters and the prepared data, or raises. Under ``DistributedDataParallel``
    processes may have modules with different parameters: no buffers are synchronised.

    Examples
    --------
    >>> result = EwaldSummation(accuracy=1e-6)(System(positions, charges, cell), compute_forces=True)
    >>> ewald = EwaldSummation.estimate(positions, cell, accuracy=1e-5).prepare(cell)
    >>> energies, forces = ewald(positions, charges, cell, compute_forces=True)
    """

    k_cutoff: torch.Tensor | None
    _trainable = ("alpha", "k_cutoff")

    def __init__(
        self,
        alpha: float | torch.Tensor | None = None,
        k_cutoff: float | torch.Tensor | None = None,
        cutoff: float | None = None,
        *,
        accuracy: float = 1e-6,
        potential: LongRangePotential = COULOMB,
    ) -> None:
        super().__init__(alpha, cutoff, accuracy, potential)
        self.k_cutoff = _parameter("k_cutoff", k_cutoff)

    def _settings(self) -> dict[str, Any]:
        names = ("alpha", "k_cutoff", "cutoff", "accuracy", "prepared_cell")
        return {name: getattr(self, name) for name in names} | {"potential": self.potential.exponent}

    def _restored(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        _check_same(self.potential, settings["potential"])
        with torch.device("cpu"):
            made = EwaldSummation(**{name: settings[name] for name in ("alpha", "k_cutoff", "cutoff", "accuracy")})
        if settings["prepared_cell"] is not None:
            made.prepare(settings["prepared_cell"])
        return {name: getattr(made, name) for name in ("alpha", "k_cutoff", "cutoff", "accuracy", "_prepared")}

    @classmethod
    def estimate(
        cls,
        positions: torch.Tensor | System,
        cell: torch.Tensor | None = None,
        batch_idx: torch.Tensor | None = None,
        accuracy: float = 1e-6,
        *,
        real_space_cutoff: float | torch.Tensor | None = None,
        charges: torch.Tensor | None = None,
    ) -> "EwaldSummation":
        """Create a module with parameters from `estimate_ewald_parameters`; takes the same arguments, or a System.

        Dipoles, quadrupoles and widths of a System with charges count as in calls. Without a cell nothing is chosen:
        molecules are summed over all pairs.
        """
        atoms, kept = _atoms(positions, cell, batch_idx, charges)
        if atoms.cell is None and isinstance(positions, System):
            return cls(accuracy=accuracy)
        found = ewald_parameters(atoms, accuracy, _of_kept(real_space_cutoff, kept, positions), KVectorSum())
        reach = float(found.real_space_cutoff.max())
        alpha, k_cutoff = (_of_all(v, kept, positions) for v in (found.alpha, found.reciprocal_space_cutoff))
        return cls(alpha, k_cutoff, reach, accuracy=accuracy)

    def prepare(self, cell: torch.Tensor | System) -> "EwaldSummation":
        """Fix the k-vectors to those of a cell (3, 3) or (n_systems, 3, 3), or of the cell of a system.

        Returns the module.
        """
        if self.k_cutoff is None:
            raise ValueError("`prepare` needs `k_cutoff`: give it, or let `EwaldSummation.estimate` choose it")
        self._prepared = prepare_wave_vectors(_cell_of(cell), self.k_cutoff)
        return self

    def _evaluate(self, positions: torch.Tensor, charges: torch.Tensor, cell: torch.Tensor, **options: Any) -> Any:
        chosen: dict[str, Any] = {"k_cutoff": self.k_cutoff}
        if self._prepared is not None:
            assert self.k_cutoff is not None
            _unchanged("k_cutoff", self.k_cutoff, self._prepared.k_cutoff)
            chosen = {"k_cutoff": None, "miller_indices": self._prepared}
        return ewald_summation(positions, charges, cell, **self._with(options, alpha=self.alpha, **chosen))


class ParticleMeshEwald(ConfiguredSum):
    """A configured `particle_mesh_ewald`: for an accuracy, or with fixed parameters.

    Parameters
    ----------
    alpha : float or (n_systems,) tensor, 1/length, optional
        By default each call chooses alpha for ``accuracy``.
    mesh_dimensions : (int, int, int), optional
        By default each call chooses a mesh for ``accuracy``.
    spline_order : int, optional
        By default 5 with a mesh; without a mesh each call chooses the order.
    cutoff, accuracy, potential
        As for `EwaldSummation`, with the same attributes and errors.

    Notes
    -----
    `prepare` keeps tensors that depend on the cell, for calls at the same cell.

    For state dicts and ``DistributedDataParallel`` see `EwaldSummation`.

    Examples
    --------
    >>> result = ParticleMeshEwald(accuracy=1e-6)(System(positions, charges, cell), compute_forces=True)
    >>> pme = ParticleMeshEwald.estimate(positions, cell, accuracy=1e-5, spline_order=8).prepare(cell)
    >>> energies, forces = pme(positions, charges, cell, compute_forces=True)
    """

    def __init__(
        self,
        alpha: float | torch.Tensor | None = None,
        mesh_dimensions: tuple[int, int, int] | None = None,
        spline_order: int | None = None,
        cutoff: float | None = None,
        *,
        accuracy: float = 1e-6,
        potential: LongRangePotential = COULOMB,
    ) -> None:
        super().__init__(alpha, cutoff, accuracy, potential)
        self.spline_order = None if spline_order is None else check_spline_order(spline_order)
        self.mesh_dimensions: tuple[int, int, int] | None = None
        if mesh_dimensions is not None:
            order = self.spline_order or DEFAULT_ORDER
            self.mesh_dimensions, self.spline_order = mesh_and_order(mesh_dimensions, order)

    def _settings(self) -> dict[str, Any]:
        names = ("alpha", "mesh_dimensions", "spline_order", "cutoff", "accuracy", "prepared_cell")
        # saved besides `alpha`, because the dtype of the cell may have rounded it
        prepared = None if self._prepared is None else self._prepared.alpha
        others = {"prepared_alpha": prepared, "potential": self.potential.exponent}
        return {name: getattr(self, name) for name in names} | others

    def _restored(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        _check_same(self.potential, settings["potential"])
        names = ("alpha", "mesh_dimensions", "spline_order", "cutoff", "accuracy")
        with torch.device("cpu"):
            made = ParticleMeshEwald(**{name: settings[name] for name in names}, potential=self.potential)
        cell, alpha, mesh = settings["prepared_cell"], settings["prepared_alpha"], made.mesh_dimensions
        if cell is not None and mesh is not None and made.spline_order is not None:
            made._prepared = prepare_mesh(cell, alpha, mesh, made.spline_order, potential=self.potential)
        return {name: getattr(made, name) for name in (*names, "_prepared")}

    @classmethod
    def estimate(
        cls,
        positions: torch.Tensor | System,
        cell: torch.Tensor | None = None,
        batch_idx: torch.Tensor | None = None,
        accuracy: float = 1e-6,
        real_space_cutoff: float | torch.Tensor | None = None,
        *,
        spline_order: int | None = None,
        charges: torch.Tensor | None = None,
    ) -> "ParticleMeshEwald":
        """Create a module with parameters from `estimate_pme_parameters`; takes the same arguments, or a System.

        Dipoles, quadrupoles and widths of a System with charges count as in calls. By default ``spline_order`` is the
        order that takes the least time, and the highest one if only few atoms have dipoles or quadrupoles. Without
        a cell nothing is chosen.
        """
        atoms, kept = _atoms(positions, cell, batch_idx, charges)
        if atoms.cell is None and isinstance(positions, System):
            return cls(spline_order=spline_order, accuracy=accuracy)
        order = spline_order
        if order is None:
            checks.check_tensor("positions", atoms.positions)
            checks.check_place("positions", atoms.positions)
            costs = COSTS[atoms.positions.device.type]
            strengths = None if of_charges_alone(atoms) else sources_of(check_system(atoms))[0]
            method = MeshSum(NOT_CHOSEN, None).suited(checks.check_positive("accuracy", accuracy), costs, strengths)
            order = method.spline_order
        reaches = _of_kept(real_space_cutoff, kept, positions)
        found = pme_parameters(atoms, accuracy, reaches, order, long_range=MeshSum(order, None))
        reach = float(found.real_space_cutoff.max())
        return cls(_of_all(found.alpha, kept, positions), found.mesh_dimensions, order, reach, accuracy=accuracy)

    def prepare(self, cell: torch.Tensor | System) -> "ParticleMeshEwald":
        """Compute and keep tensors that depend on a cell (3, 3) or (n_systems, 3, 3), or on the cell of a system.

        Returns the module.
        """
        if self.alpha is None or self.mesh_dimensions is None:
            raise ValueError(
                "`prepare` needs `alpha` and `mesh_dimensions`: give them, or let `ParticleMeshEwald.estimate` choose"
            )
        if self.alpha.requires_grad:
            raise ValueError("`alpha` is trained: prepared data would not follow it")
        mesh, order = self.mesh_dimensions, self.spline_order or DEFAULT_ORDER
        self.spline_order = order
        self._prepared = prepare_mesh(_cell_of(cell), self.alpha, mesh, order, potential=self.potential)
        return self

    def _evaluate(self, positions: torch.Tensor, charges: torch.Tensor, cell: torch.Tensor, **options: Any) -> Any:
        mesh: Any = {"mesh_dimensions": self.mesh_dimensions, "spline_order": self.spline_order}
        prepared = self._prepared
        if prepared is None:
            return particle_mesh_ewald(positions, charges, cell, **self._with(options, alpha=self.alpha, **mesh))
        if (prepared.mesh_dimensions, prepared.spline_order) != (self.mesh_dimensions, self.spline_order):
            raise ValueError("the mesh has changed since `prepare`: call it again")
        # compared by value, not identity: torch.export puts copies of tuples into a module
        if may_read() and prepared.potential != self.potential:
            raise ValueError("`potential` has changed since `prepare`: call it again")
        assert self.alpha is not None
        alpha = _unchanged("alpha", self.alpha, prepared.alpha)
        prepared = prepared._replace(alpha=alpha, potential=self.potential)
        return particle_mesh_ewald(positions, charges, cell, **self._with(options, prepared=prepared))
