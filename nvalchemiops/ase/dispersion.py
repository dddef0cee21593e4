"""`Dispersion`: DFT-D3 as a term of the calculator."""

from typing import Any

import ase
import torch

from nvalchemiops.ase.pair import shown
from nvalchemiops.ase.system import Contribution, InBatches, System
from nvalchemiops.constants import BOHR_IN_ANGSTROM, HARTREE_IN_EV
from nvalchemiops.torch.checks import as_float, check_positive
from nvalchemiops.torch.interactions.dispersion import (
    DFTD3,
    D3Parameters,
    RationalDamping,
    ZeroDamping,
    d3_dispersion,
    damping_parameters,
    modules,
)
from nvalchemiops.torch.interactions.dispersion.driver import ranges_of
from nvalchemiops.torch.interactions.dispersion.reference_data import given_or_published


class Dispersion:
    """DFT-D3 as a term of `Calculator`, to be added to the energies of a density functional or of a model.

    Parameters
    ----------
    functional : str, RationalDamping or ZeroDamping
        Name of a functional such as "pbe", or your own damping parameters, with lengths in bohr.
    damping : {"bj", "zero", "bjm", "zerom"}, optional
        Damping function for a functional given by name, see `damping_parameters`.
    cutoff, coordination_cutoff, three_body_cutoff, smoothing : float, angstrom, optional
        By default 60, 40, 20 and 5 bohr, see `DFTD3`. With smoothing None the cutoffs are sharp.
    s9 : float, optional
        Factor of the three-body energy; by default this energy is left out.
    parameters : D3Parameters, optional
        By default the parameters of `D3Parameters.load`.

    Raises
    ------
    ValueError, TypeError
        A functional without parameters, or another bad argument; when atoms are evaluated, elements without parameters.
    ImportError
        No ``parameters`` are given, and the package with the published ones is not installed.

    Examples
    --------
    >>> term = Dispersion("pbe", cutoff=20.0)
    """

    def __init__(
        self,
        functional: str | RationalDamping | ZeroDamping,
        *,
        damping: str = "bj",
        cutoff: float = modules.CUTOFF * BOHR_IN_ANGSTROM,
        coordination_cutoff: float = modules.COORDINATION_CUTOFF * BOHR_IN_ANGSTROM,
        three_body_cutoff: float = modules.THREE_BODY_CUTOFF * BOHR_IN_ANGSTROM,
        smoothing: float | None = modules.SMOOTHING * BOHR_IN_ANGSTROM,
        s9: float = 0.0,
        parameters: D3Parameters | None = None,
    ) -> None:
        if isinstance(functional, RationalDamping | ZeroDamping):
            self.damping, kind = functional, None
        else:
            self.damping, kind = damping_parameters(functional, damping), damping
        self.parameters = given_or_published(parameters)
        lengths = {
            "cutoff": cutoff,
            "coordination_cutoff": coordination_cutoff,
            "three_body_cutoff": three_body_cutoff,
            "smoothing": smoothing,
        }
        for name, length in lengths.items():
            if length is not None or name != "smoothing":
                check_positive(name, length)
        ranges_of(**lengths)  # raises if they are invalid
        self._reach = max(cutoff, coordination_cutoff, three_body_cutoff if as_float("s9", s9) else 0.0)
        self._options: dict[str, Any] = {
            name: None if v is None else v / BOHR_IN_ANGSTROM for name, v in lengths.items()
        } | {"s9": s9}
        self._shown = [repr(functional), *shown({"damping": kind, "s9": s9 or None} | lengths)]

    def reach(self, _: ase.Atoms) -> float:
        """The distance beyond which pairs do not contribute."""
        return self._reach

    def evaluate(self, system: System) -> Contribution:
        """Energies, forces and virial of these atoms; see `Term`."""
        near = system.neighbors(self._reach)
        if "domain" in near:
            near["domain"] = near["domain"]._in_units(BOHR_IN_ANGSTROM)
        energies, forces, _, *virial = d3_dispersion(
            system.positions / BOHR_IN_ANGSTROM,
            system.of_atoms(system.atoms.numbers, torch.int32),
            self.damping,
            self.parameters,
            None if system.cell is None else system.cell / BOHR_IN_ANGSTROM,
            **near,
            **self._options,
            compute_forces=True,
            compute_virial=system.wants_virial,
        )
        return Contribution(
            energies * HARTREE_IN_EV,
            forces * (HARTREE_IN_EV / BOHR_IN_ANGSTROM),
            virial[0][0] * HARTREE_IN_EV if virial else None,
        )

    def for_batches(self, system: System) -> InBatches:
        """The term for atoms of several systems."""
        elements = sorted(set(system.atoms.numbers.tolist()))
        with system.positions.device:
            return InBatches(DFTD3(self.damping, elements, self.parameters, **self._options))

    def __repr__(self) -> str:
        return f"Dispersion({', '.join(self._shown)})"
