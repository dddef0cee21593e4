"""``sympy``, imported at its first use: that takes half a second, and most processes find kernels that are kept."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import sympy
else:

    class _Module:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("sympy"), name)

    sympy = _Module()

__all__ = ["sympy"]
