"""Warp-backed PyTorch custom operators for atomistic simulation.

Importing this package loads neither torch nor Warp. Subpackages are loaded when first used:
``import nvalchemiops; nvalchemiops.torch.neighbors`` works without a second import.
"""

import importlib
from typing import Any

from nvalchemiops.compat import installation as installation
from nvalchemiops.notices import AccuracyWarning as AccuracyWarning
from nvalchemiops.notices import NeighborListWarning as NeighborListWarning
from nvalchemiops.notices import NvalchemiopsWarning as NvalchemiopsWarning

__version__ = "1.0.0.dev0"

_SUBMODULES = frozenset(
    {"ase", "constants", "interactions", "jax", "kernels", "launch", "neighborlist", "neighbors", "torch", "types"}
)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
