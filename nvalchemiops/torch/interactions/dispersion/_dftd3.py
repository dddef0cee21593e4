"""DFT-D3 under the path that clients import."""

from nvalchemiops.torch.interactions.dispersion.dftd3 import dftd3
from nvalchemiops.torch.interactions.dispersion.reference_data import D3Parameters

__all__ = ["D3Parameters", "dftd3"]
