"""Names of older releases: they lead to the same objects, with a warning that says where to import them from."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from nvalchemiops.submodules import found_when_used


def warn_of_path(module: str, home: str) -> None:
    """Warn the importer of ``module``, a path that only older releases have, of its new ``home``; once in a process.

    Called while the module is loaded. If a path has other contents today, only its old names warn (`moved`).
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _LOADERS:
        frame = frame.f_back
    message = f"`{module}` is the path of an older release: import its names from `{home}`"
    place = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "<unknown>"))
    warnings.warn_explicit(message, DeprecationWarning, *place)


_LOADERS = ("nvalchemiops", "importlib", "_frozen_importlib", "_frozen_importlib_external")
"""Packages between an import and the module that is loaded."""


def moved(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module whose names are defined elsewhere now.

    The new home is imported only when a name is requested. So a module below the torch layer can have its new home in
    the torch layer.

    Parameters
    ----------
    module : str
        The old path.
    homes : mapping
        From each name to the module that defines it now.
    """

    def find(name: str) -> Any:
        # `from package import name` asks first whether a package has the name
        if sys._getframe(2).f_code.co_name != "_handle_fromlist":
            message = f"`{module}.{name}` is the path of an older release: import it from `{homes[name]}`"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
        return getattr(importlib.import_module(homes[name]), name)

    return found_when_used(module, homes, find)
