"""DFT-D3 dispersion corrections for torch tensors."""

from nvalchemiops.interactions.dispersion.damping import RationalDamping, ZeroDamping, damping_parameters
from nvalchemiops.torch.interactions.dispersion.d3 import d3_dispersion
from nvalchemiops.torch.interactions.dispersion.dftd3 import dftd3
from nvalchemiops.torch.interactions.dispersion.modules import DFTD3
from nvalchemiops.torch.interactions.dispersion.reference_data import D3Parameters, ReferenceStates

__all__ = [
    "DFTD3",
    "D3Parameters",
    "RationalDamping",
    "ReferenceStates",
    "ZeroDamping",
    "d3_dispersion",
    "damping_parameters",
    "dftd3",
]
