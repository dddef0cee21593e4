"""Warp-backed PyTorch custom operators for atomistic simulation.

Importing this package loads neither torch nor Warp. Subpackages are loaded when first used:
``import nvalchemiops; nvalchemiops.torch.neighbors`` works without a second import.
"""

from nvalchemiops.compat import installation as installation
from nvalchemiops.notices import AccuracyWarning as AccuracyWarning
from nvalchemiops.notices import NeighborListWarning as NeighborListWarning
from nvalchemiops.notices import NvalchemiopsWarning as NvalchemiopsWarning
from nvalchemiops.submodules import loaded_when_used

__version__ = "1.0.0.dev0"

__getattr__ = loaded_when_used(
    __name__,
    [
        "ase",
        "constants",
        "dynamics",
        "interactions",
        "jax",
        "kernels",
        "launch",
        "neighborlist",
        "neighbors",
        "segment_ops",
        "torch",
        "types",
    ],
)
