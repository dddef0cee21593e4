"""Names and identities of ops: the libraries that register them, and hashes that distinguish them in compile caches."""

import contextlib
import functools
import hashlib
import pathlib
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import warp as wp

from nvalchemiops import __version__
from nvalchemiops._warp_internals import source_of
from nvalchemiops.torch.autograd.specs import OutputSpec
from nvalchemiops.types import SCALARS, inner_shape, is_warp_dtype, scalar_type

_definitions: dict[str, tuple[tuple[str, str], int]] = {}
_libraries: list[Any] = []  # an op lives as long as its library

_FOREIGN = frozenset({"builtins", "numpy", "torch", "warp"})
"""Packages whose functions are identified by name: their versions are part of every identity."""

_PACKAGE = __name__.partition(".")[0]
"""This package, whose version and files are part of every identity, so that globals of its functions are not."""


def library_for(name: str, body: Callable[..., Any]) -> tuple[Any, str]:
    """A library in which to define ``name``, and the name to register, without its namespace.

    Running the same definition again (a notebook cell, a factory) registers another op under a numbered name. The first
    op stays registered: functions and compiled graphs may still call it.
    """
    origin = (body.__module__, body.__qualname__)
    previous, count = _definitions.get(name, (origin, 0))
    if previous != origin:
        raise ValueError(f"`name`: '{name}' is taken by {previous[0]}.{previous[1]}")
    _definitions[name] = (origin, count + 1)
    namespace, _, short = name.partition("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    _libraries.append(library)
    return library, short if count == 0 else f"{short}__{count + 1}"


def fingerprint(body: Callable[..., Any], backward: Any, outputs: Sequence[OutputSpec], extra: str) -> int:
    """A number that changes with the release, the body, the backward and the specs (positive, below 2^56)."""
    versions = [__version__, _files(), torch.__version__, wp.__version__, np.__version__]
    parts = [*versions, extra, value_identity(body), value_identity(backward), *map(value_identity, outputs)]
    return int(_digest(parts)[:14], 16) | 1


@functools.cache
def _files() -> str:
    """A hash of the files of this package while it is under development, when its version does not change with them."""
    if "dev" not in __version__:
        return ""
    found = sorted(pathlib.Path(__file__).parents[2].rglob("*.py"))
    return hashlib.sha256(b"".join([path.read_bytes() for path in found])).hexdigest()


def value_identity(value: Any, _inside: tuple[Any, ...] = ()) -> str:
    """A string that identifies a value, the same in every process.

    Functions are identified by their code, defaults, closures and the globals that they name, kernels by their source
    as well, arrays and containers by their contents, other values by their ``repr``.
    """
    if any(value is v for v in _inside):
        return "recursion"
    inside = (*_inside, value)

    def all_of(values: Iterable[Any]) -> list[str]:
        return [value_identity(v, inside) for v in values]

    op = getattr(value, "op", None)
    if op is not None and hasattr(op, "identity"):
        return str(op.identity)
    if isinstance(value, wp.Kernel | wp.Function):
        source, function = source_of(value)
        return _digest([value.key, source, value_identity(function, inside)])
    if isinstance(value, types.MethodType):
        return _digest(all_of((value.__func__, value.__self__)))
    is_named = hasattr(value, "__qualname__") and not isinstance(value, type)
    if is_named and _package_of(value) in _FOREIGN:
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.FunctionType):
        return _function_identity(value, inside)
    if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | type):
        return f"{value.__self__.__name__}.{value.__qualname__}"
    if isinstance(value, functools._lru_cache_wrapper):
        return value_identity(value.__wrapped__, inside)
    if isinstance(value, functools.partial):
        return _digest(all_of((value.func, value.args, value.keywords)))
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _digest([str(value.dtype), str(value.shape), hashlib.sha256(content.tobytes()).hexdigest()])
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _digest([str(value.dtype), str(value.shape), hashlib.sha256(value.tobytes()).hexdigest()])
    if isinstance(value, tuple | list):
        return _digest(all_of(value))
    if isinstance(value, dict):
        return _digest(all_of(value.items()))
    if isinstance(value, set | frozenset):  # in an order that differs between processes
        return _digest(sorted(all_of(value)))
    if is_warp_dtype(value):
        return f"{scalar_type(value).__name__}{inner_shape(value)}"
    if type(value) in SCALARS:  # a Warp number, whose repr is an address
        return f"{type(value).__name__}({value.value})"
    if isinstance(value, OutputSpec):
        return _digest(all_of((value.name, value.dtype, value.shape, value.torch_dtype)))
    return repr(value)


def _package_of(value: Any) -> str:
    return str(value.__module__).partition(".")[0]


def _function_identity(function: types.FunctionType, inside: tuple[Any, ...]) -> str:
    captured = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # still empty: a backward that refers to its own op
            captured.append(cell.cell_contents)
    names = set() if _package_of(function) == _PACKAGE else _names(function.__code__)
    captured += [
        v for n, v in function.__globals__.items() if n in names and not isinstance(v, types.ModuleType | type)
    ]
    return _digest([_code_text(function.__code__), *(value_identity(c, inside) for c in captured)])


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*(_names(c) for c in inner))


def _code_text(code: types.CodeType) -> str:
    constants = [_code_text(c) if isinstance(c, types.CodeType) else value_identity(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
