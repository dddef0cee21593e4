"""nvalchemiops for JAX: a bridge to torch functions, and with it the operators of `nvalchemiops.torch`.

Submodules are loaded when used.
"""

from typing import Any

from nvalchemiops.submodules import installed_by, loaded_when_used

try:
    import jax as _jax  # noqa: F401  # only to see whether it works
except Exception as error:  # JAX may also raise RuntimeError, for example for a jaxlib of another release
    raise ImportError(
        f"nvalchemiops.jax needs JAX ({type(error).__name__}: {error}): {installed_by('jax')}", name="jax"
    ) from error

_SUBMODULES = frozenset(
    {"bridge", "dynamics", "interactions", "neighbors", "segment_ops", "spline", "systems", "torch_bridge", "utils"}
)
_OF_SYSTEMS = frozenset({"Neighbors", "System"})


_submodule = loaded_when_used(__name__, _SUBMODULES)


def __getattr__(name: str) -> Any:
    return getattr(_submodule("systems"), name) if name in _OF_SYSTEMS else _submodule(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *_OF_SYSTEMS})
