"""Names and identities of ops: where they are registered, and what makes compile caches tell two apart."""

import contextlib
import hashlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import warp as wp

from nvalchemiops import __version__
from nvalchemiops.torch.autograd.specs import OutputSpec

_libraries: dict[str, tuple[Any, tuple[str, str]]] = {}


def library_for(name: str, body: Callable[..., Any]) -> Any:
    """A library to define ``name`` in. Running the same definition again (a notebook cell) replaces it."""
    origin = (body.__module__, body.__qualname__)
    if name in _libraries:
        library, previous = _libraries.pop(name)
        if previous != origin:
            _libraries[name] = (library, previous)
            raise ValueError(f"`name`: '{name}' is taken by {previous[0]}.{previous[1]}")
        library._destroy()
    library = torch.library.Library(name.partition("::")[0], "FRAGMENT")
    _libraries[name] = (library, origin)
    return library


def fingerprint(body: Callable[..., Any], backward: Any, outputs: Sequence[OutputSpec], extra: str) -> int:
    """A number that changes with the release, the body, the backward and the specs (positive, below 2^56)."""
    parts = [__version__, wp.__version__, extra, callable_identity(body), callable_identity(backward)]
    parts += [callable_identity(v) for o in outputs for v in (o.shape, o.dtype)]
    return int(hashlib.sha256("\n".join(parts).encode()).hexdigest()[:14], 16) | 1


def callable_identity(value: Any, _inside: tuple[Any, ...] = ()) -> str:
    """What tells two functions apart: code, defaults, and what they close over; ``repr`` for anything else."""
    op = getattr(value, "op", None)
    if op is not None and hasattr(op, "identity"):
        return str(op.identity)
    if not isinstance(value, types.FunctionType):
        return repr(value)
    captured = list(value.__defaults__ or ())
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # still empty: a backward that refers to its own op
            captured.append(cell.cell_contents)
    inside = (*_inside, value)
    parts = [callable_identity(c, inside) for c in captured if not any(c is v for v in inside)]
    return hashlib.sha256("\n".join([_code_text(value.__code__), *parts]).encode()).hexdigest()


def _code_text(code: types.CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
