"""nvalchemiops for JAX: a bridge to torch functions, and with it the operators of `nvalchemiops.torch`.

Submodules are loaded when used.
"""

import importlib
from typing import Any

try:
    import jax as _jax  # noqa: F401  # only to see whether it works
except Exception as error:  # JAX may also raise RuntimeError, for example for a jaxlib of another release
    raise ImportError(
        f'nvalchemiops.jax needs JAX ({type(error).__name__}: {error}): pip install "nvalchemiops[jax]"', name="jax"
    ) from error

_SUBMODULES = frozenset(
    {"bridge", "dynamics", "interactions", "neighbors", "spline", "systems", "torch_bridge", "utils"}
)
_OF_SYSTEMS = frozenset({"Neighbors", "System"})


def __getattr__(name: str) -> Any:
    if name in _OF_SYSTEMS:
        return getattr(importlib.import_module(f"{__name__}.systems"), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *_OF_SYSTEMS})
