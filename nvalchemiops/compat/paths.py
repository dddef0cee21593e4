"""Import paths of nvalchemi-toolkit-ops at which this library has nothing else: their names are found when requested.

A module below the torch layer can so have names that are defined in the torch layer.
"""

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from nvalchemiops.submodules import found_when_used


def forwarded(module: str, home: str, names: Iterable[str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of ``module``: ``names`` are the objects of these names in ``home``."""
    return found_when_used(module, names, lambda name: getattr(importlib.import_module(home), name))
