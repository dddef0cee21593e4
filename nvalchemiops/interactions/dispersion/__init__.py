"""DFT-D3 dispersion: formulas, kernels and published damping parameters."""

from nvalchemiops.compat.deprecation import moved

__getattr__ = moved(__name__, dict.fromkeys(("D3Parameters", "dftd3"), "nvalchemiops.torch.interactions.dispersion"))
