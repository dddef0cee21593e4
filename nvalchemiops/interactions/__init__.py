"""Physics: the formulas, and the kernels that sum them, without torch."""

from nvalchemiops.submodules import loaded_when_used

__getattr__ = loaded_when_used(__name__, ["dispersion", "electrostatics", "lj", "pair"])
