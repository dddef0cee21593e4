"""DFT-D3 as a module with fixed parameters and reference data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nvalchemiops.interactions.dispersion.damping import RationalDamping, ZeroDamping, damping_parameters
from nvalchemiops.torch.interactions.dispersion.d3 import d3_dispersion
from nvalchemiops.torch.interactions.dispersion.driver import ranges_of
from nvalchemiops.torch.interactions.dispersion.reference_data import D3Parameters, given_or_published
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime.modules import ExactModule, brief
from nvalchemiops.torch.systems import Neighbors, System, long_arguments, named

CUTOFF, COORDINATION_CUTOFF, THREE_BODY_CUTOFF, SMOOTHING = 60.0, 40.0, 20.0, 5.0
"""Default cutoffs, of which the first two are those of s-dftd3, and the width of the switching below them, in bohr."""


_NUMBERS = ("cutoff", "coordination_cutoff", "smoothing", "s9", "three_body_cutoff")


def _damping_of(functional: Any, damping: Any) -> RationalDamping | ZeroDamping:
    """The damping parameters; ``damping`` is that of a functional, or in the place of one."""
    if functional is None and damping is not None:
        name, given, kind = "damping", damping, "bj"
    else:
        name, given, kind = "functional", functional, "bj" if damping is None else damping
    if isinstance(given, str):
        return damping_parameters(given, kind)
    if isinstance(given, RationalDamping | ZeroDamping):
        return given
    raise TypeError(f"`{name}` must be a functional's name, RationalDamping or ZeroDamping, got {type(given).__name__}")


class DFTD3(ExactModule):
    """DFT-D3 as a module for a set of elements and one functional, in atomic units.

    Parameters
    ----------
    functional : str, RationalDamping or ZeroDamping
        Name of a functional, or damping parameters, as from `damping_parameters`. May be given as ``damping``, too.
    elements : sequence of int
        Atomic numbers of all elements that may occur.
    parameters : D3Parameters, optional
        Reference data, by default those of `D3Parameters.load`.
    damping : {"bj", "zero", "bjm", "zerom"}, optional
        Damping function for a functional given by name, "bj" by default; see `damping_parameters`.
    cutoff, coordination_cutoff : float, bohr, optional
        Cutoffs of the pair energies, and of the coordination numbers.
    s9 : float, optional
        Factor of the three-body energy, which is left out by default; see `d3_dispersion`.
    three_body_cutoff : float, bohr, optional
        Cutoff of all three sides of a triple.
    smoothing : float or None, bohr, optional
        Width below each cutoff over which the sum is switched off, with two continuous derivatives, so that energies
        and forces are smooth when atoms cross a cutoff. None for sharp cutoffs, as in other programs.
    trainable : bool, optional
        Whether the damping parameters are parameters of the module.

    Raises
    ------
    ValueError, TypeError
        An invalid argument, named in the message; an element or functional without parameters.

    Notes
    -----
    A state dict contains the damping parameters, cutoffs and ``s9``, which loading restores. It does not contain the
    reference data: if these, the elements or the damping function differ from those of the module, loading raises.
    Into a module that was made on the meta device it brings the published data; other data stay NaN.
    ``DistributedDataParallel`` synchronises trainable damping parameters, and nothing else.

    Attributes
    ----------
    states : ReferenceStates
        The reference data of the elements, on the device of the module.

    Examples
    --------
    >>> model = DFTD3("pbe", [11, 17], damping="zero")
    >>> energies, coordination_numbers = model(positions / 0.529177, numbers)
    """

    def __init__(
        self,
        functional: str | RationalDamping | ZeroDamping | None = None,
        elements: Sequence[int] | None = None,
        parameters: D3Parameters | None = None,
        *,
        damping: str | RationalDamping | ZeroDamping | None = None,
        cutoff: float = CUTOFF,
        coordination_cutoff: float = COORDINATION_CUTOFF,
        s9: float = 0.0,
        three_body_cutoff: float = THREE_BODY_CUTOFF,
        smoothing: float | None = SMOOTHING,
        trainable: bool = False,
    ) -> None:
        super().__init__()
        damping = _damping_of(functional, damping)
        if elements is None:
            raise TypeError("`elements` is missing: the atomic numbers of all elements that may occur")
        ranges_of(cutoff, coordination_cutoff, three_body_cutoff, smoothing)  # raises if they are invalid
        self.kind = type(damping)
        self._trainable = self.kind._fields
        device = torch.get_default_device()  # as other modules of torch do
        for name, value in damping._asdict().items():
            tensor = torch.as_tensor(value, dtype=torch.float64, device=device).detach().clone()
            setattr(self, name, torch.nn.Parameter(tensor) if trainable else tensor)
        data = given_or_published(parameters)
        self.states = data.states(elements, device)
        self._table = _summary(data, self.states.elements)
        self.cutoff, self.coordination_cutoff, self.smoothing = cutoff, coordination_cutoff, smoothing
        self.s9, self.three_body_cutoff = s9, three_body_cutoff

    @property
    def reach(self) -> float:
        """The distance up to which lists of neighbors must be complete, in bohr: the largest cutoff of a sum."""
        cutoffs = self.cutoff, self.coordination_cutoff, self.three_body_cutoff
        return max(cutoffs if self.s9 else cutoffs[:2])

    def extra_repr(self) -> str:
        """The damping parameters, elements and cutoffs, for ``repr``."""
        names = (*self.kind._fields, *_NUMBERS)
        values = {"elements": self.states.elements} | {name: getattr(self, name) for name in names}
        return ", ".join([self.kind.__name__, *(f"{name}={brief(value)}" for name, value in values.items())])

    def _settings(self) -> dict[str, Any]:
        known = {"damping": self.kind.__name__, "elements": self.states.elements, "parameters": self._table}
        return known | {name: getattr(self, name) for name in (*self.kind._fields, *_NUMBERS)}

    def _restored(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        saved = tuple(settings["elements"])
        if settings["damping"] != self.kind.__name__:
            raise ValueError(f"`damping` is {self.kind.__name__}, but {settings['damping']} in the state dict")
        if saved != self.states.elements:
            raise ValueError(f"`elements` are {self.states.elements}, but {saved} in the state dict")
        table = settings["parameters"]
        if not self._has_table(table):
            raise ValueError("`parameters` have other values for these elements than those of the state dict")
        return {name: settings[name] for name in (*self.kind._fields, *_NUMBERS)} | self._published_again()

    def _published_again(self) -> dict[str, Any]:
        """The reference data of a module that was made on the meta device, if they are the published ones."""
        radii = self.states.radii
        if not radii.is_meta and not bool(radii.isnan().all()):
            return {}
        try:
            data = given_or_published(None)
        except ImportError:  # the module was made with data of its own
            return {}
        is_same = self._has_table(_summary(data, self.states.elements))
        return {"states": data.states(self.states.elements, "cpu")} if is_same else {}

    def _has_table(self, table: Any) -> bool:
        """Whether sums over reference data are those of this module's data."""
        return len(table) == len(self._table) and bool(np.allclose(table, self._table, rtol=1e-8, atol=1e-12))

    @engine.with_own_plans
    def forward(
        self,
        positions: torch.Tensor | System,
        numbers: torch.Tensor | Neighbors | None = None,
        cell: torch.Tensor | None = None,
        batch_idx: torch.Tensor | None = None,
        *,
        neighbors: Neighbors | None = None,
        **options: Any,
    ) -> Any:
        """Energies of atoms in hartree, coordination numbers, and other requested results.

        Parameters
        ----------
        positions : System, or (n_atoms, 3) tensor, bohr
        numbers : (n_atoms,) tensor, or Neighbors
            Atomic numbers; after a `System`, its neighbors may be given here.
        neighbors : Neighbors, optional
            Only with a `System`; they must reach to the cutoffs. By default they are built.
        cell, batch_idx, **options
            As for `d3_dispersion`: neighbors, ``compute_forces``, ``compute_virial``, ``energy_reduction``, ``pbc`` and
            ``num_systems``.

        Returns
        -------
        energies, forces, coordination_numbers, virial
            As from `d3_dispersion`. For a `System`, they have names (`nvalchemiops.torch.systems.Results`).
        """
        if isinstance(positions, System):
            beside = (numbers, cell, batch_idx, neighbors)
            needed, reach = ("numbers",), self.reach
            given = long_arguments(positions, beside, options, needed=needed, padding="fill_value", cutoff=reach)
            values = self(positions.positions, positions.numbers, positions.cell, **given)
            names = ["energies"] + ["forces"] * bool(options.get("compute_forces")) + ["coordination_numbers"]
            return named(names + ["virial"] * bool(options.get("compute_virial")), values)
        self._move_to(positions)
        damping = self.kind(**{name: getattr(self, name).to(positions.dtype) for name in self.kind._fields})
        options = self._with(options, **{name: getattr(self, name) for name in _NUMBERS})
        return d3_dispersion(positions, numbers, damping, self.states, cell, batch_idx, **options)  # type: ignore[arg-type]


def _summary(data: D3Parameters, elements: Sequence[int]) -> list[float]:
    """For each table and each of these elements, the sum of the values: numbers by which tables are compared."""
    chosen = torch.tensor(elements, device="cpu")
    tables = [data.rcov, data.r4r2, data.cn_ref, data.c6ab, data.r0ab]
    rows = [table.detach().to("cpu", torch.float64)[chosen] for table in tables if table is not None]
    # of tables over pairs of elements, the pairs of these elements
    rows = [row[:, chosen] if row.ndim > 1 and row.shape[1] == data.rcov.shape[0] else row for row in rows]
    return [value for row in rows for value in row.reshape(len(elements), -1).sum(1).tolist()]
