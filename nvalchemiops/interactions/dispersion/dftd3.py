"""DFT-D3 under the path of an older release, in which the function has the name of its module."""

import sys
from types import ModuleType
from typing import Any

from nvalchemiops.compat.deprecation import moved, warn_of_path

_HOME = "nvalchemiops.torch.interactions.dispersion"

warn_of_path(__name__, _HOME)

_HOMES = dict.fromkeys(("D3Parameters", "dftd3"), _HOME)

__all__ = list(_HOMES)
__getattr__ = moved(__name__, _HOMES)


class _CallableModule(ModuleType):
    """The import puts this module where its package has the function, so it takes the function's calls."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dftd3(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
