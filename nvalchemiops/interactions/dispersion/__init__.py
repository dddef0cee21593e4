"""London dispersion between atoms that depends on their surroundings: formulas and published parameters."""

from nvalchemiops.compat.deprecation import moved

__getattr__ = moved(__name__, dict.fromkeys(("D3Parameters", "dftd3"), "nvalchemiops.torch.interactions.dispersion"))
