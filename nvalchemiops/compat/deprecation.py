"""Names of older releases: they lead to the same objects, with a warning that says where to import them from."""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module whose names are defined elsewhere now.

    The new home is imported when a name is asked for, so that a module below the torch layer can have moved to it.

    Parameters
    ----------
    module : str
        The old path.
    homes : mapping
        From each name to the module that defines it now.
    """

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        # `from package import name` asks first whether a package has the name
        if sys._getframe(1).f_code.co_name != "_handle_fromlist":
            message = f"`{module}.{name}` is the path of an older release: import it from `{homes[name]}`"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(homes[name]), name)

    return __getattr__
