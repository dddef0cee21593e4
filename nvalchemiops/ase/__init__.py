"""Potentials of this library as an ASE calculator, its neighbor search with ASE's arguments, and graphs for networks.

A calculator is a sum of terms::

    from nvalchemiops.ase import Calculator, Electrostatics, Pair

    atoms.calc = Calculator(
        Pair("buckingham", cutoff=9.0, A={"Mg-O": 1280.0, "*": 0.0}, rho=0.3, C=0.0),
        Electrostatics("pme", {"Mg": 2.0, "O": -2.0}),
    )

Everything is in ASE's units: eV, angstrom and elementary charges.
"""

from nvalchemiops.submodules import installed_by

try:
    import ase  # noqa: F401  (absolute, so this is ASE itself)
except ImportError as error:
    raise ImportError(f"nvalchemiops.ase needs ASE ({error}): {installed_by('ase')}", name=error.name) from error

from nvalchemiops.ase.calculator import Calculator
from nvalchemiops.ase.dispersion import Dispersion
from nvalchemiops.ase.electrostatics import Electrostatics
from nvalchemiops.ase.graphs import Graph, atoms_to_graph
from nvalchemiops.ase.models import FromASE
from nvalchemiops.ase.neighbors import neighbor_list
from nvalchemiops.ase.pair import Pair
from nvalchemiops.ase.ranks import on_ranks
from nvalchemiops.ase.system import Contribution, InBatches, System, Term

__all__ = [
    "Calculator",
    "Contribution",
    "Dispersion",
    "Electrostatics",
    "FromASE",
    "Graph",
    "InBatches",
    "Pair",
    "System",
    "Term",
    "atoms_to_graph",
    "neighbor_list",
    "on_ranks",
]
