"""Names and identities of ops: the libraries that register them, and hashes that distinguish them in compile caches."""

import builtins
import contextlib
import copyreg
import dis
import functools
import hashlib
import importlib.util
import operator
import os
import pathlib
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import warp as wp

from nvalchemiops import __version__
from nvalchemiops._warp_internals import source_of, struct_fields
from nvalchemiops.torch.autograd.declaration import Declaration
from nvalchemiops.torch.autograd.specs import OutputSpec
from nvalchemiops.types import SCALARS, inner_shape, is_struct, is_warp_dtype, scalar_type

_definitions: dict[str, tuple[tuple[str, str], int]] = {}
_libraries: list[Any] = []  # an op lives as long as its library

_FOREIGN = frozenset({__name__.partition(".")[0], "builtins", "numpy", "torch", "warp"})
"""Packages whose functions are identified by name: their versions are part of every identity."""

_AUTOGRAD = __name__.rpartition(".")[0]
"""Where the classes of ops are, which know their identities."""

_LITERALS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types whose ``repr`` says all."""

_OF_EVERY_CLASS = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__firstlineno__", "__slotnames__", "_abc_impl"}
)
"""What classes hold that does not tell what they do; pickle notes the names of slots when it first sees an object."""

_TORCH_OPS = (type(torch.ops.aten.sin), type(torch.ops.aten.sin.default))

MOST_VALUES = 20_000
"""How many values an identity may look into, for a fifth of a second; some objects lead to all of a program."""

_alone: dict[int, tuple[Any, str]] = {}
"""Values that have an identity of their own in this process, by their addresses, which they so keep."""

_defining: list[str] = []
"""Names that ops will have, to which their backwards may refer."""


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


def fingerprint(declared: Declaration, extra: str) -> int:
    """A number that changes with the release and with what is declared (positive, below 2^56)."""
    versions = [__version__, _files(), sys.version, torch.__version__, wp.__version__, np.__version__]
    tables = [declared.parameters, declared.mutated, declared.diff_outputs, declared.diff_inputs]
    called_by = getattr(declared.backward, "__annotations__", None)
    _defining.append(declared.body.__name__)
    text = value_identity([*versions, extra, declared.body, declared.backward, called_by, declared.outputs, *tables])
    _defining.remove(declared.body.__name__)
    return int(_digest([text])[:14], 16) | 1


@functools.cache
def _files() -> str:
    """A hash of the files of this package while it is under development, when its version does not change with them."""
    if "dev" not in __version__:
        return ""
    found = sorted(pathlib.Path(__file__).parents[2].rglob("*.py"))
    return hashlib.sha256(b"".join([path.read_bytes() for path in found])).hexdigest()


def value_identity(value: Any, _seen: dict[int, tuple[Any, int]] | None = None) -> str:
    """A string that identifies a value, the same in every process.

    Functions are identified by their code, defaults, closures and the globals that they name, also those of modules,
    kernels by their source as well, arrays and containers by their contents, other objects by their class and by what
    pickle would keep of them. A value of which that does not tell all has an identity of its own in each process: two
    that differ must never share one, since a compiled graph of the other would be used.
    """
    seen = {} if _seen is None else _seen
    try:
        if type(value) in _LITERALS:
            return f"{type(value).__name__} {value!r}"
        if id(value) in seen:
            return f"seen {seen[id(value)][1]}"
        if len(seen) >= MOST_VALUES:
            raise _TooManyValues
        seen[id(value)] = value, len(seen)  # kept, so that no other value gets this address meanwhile
        parts = _parts(value, seen)
        return _digest([type(value).__qualname__, *(p if type(p) is _Text else value_identity(p, seen) for p in parts)])
    except Exception as error:  # of any class: parts come from methods of the value, and `repr` has limits
        if isinstance(error, _TooManyValues) and _seen is not None:
            raise
        return _alone.setdefault(id(value), (value, uuid.uuid4().hex))[1]


class _TooManyValues(Exception):
    """An identity would look into more than `MOST_VALUES`."""


class _Text(str):
    """A part of an identity that is text already."""


def _parts(value: Any, seen: dict[int, tuple[Any, int]]) -> Iterable[Any]:
    """What a value is made of. Raises if that cannot be seen."""
    op: Any = vars(value).get("op") if isinstance(value, types.FunctionType) else value
    if type(op).__module__.startswith(_AUTOGRAD) and hasattr(op, "identity") and (op is value or op.public is value):
        return [_Text(op.identity)]
    name = _known_name(value)
    if name is not None:
        return [_Text(name)]
    match value:
        case wp.Kernel() | wp.Function():
            source, function = source_of(value)
            return [value.key, source, function]
        case types.FunctionType():
            return _parts_of_function(value)
        case types.CodeType():
            counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
            names = (value.co_names, value.co_varnames, value.co_cellvars, value.co_freevars)
            return [_Text((value.co_code, value.co_exceptiontable, counts, names)), *value.co_consts]
        case types.MethodType():
            return [value.__func__, value.__self__]
        case functools.partial():
            return [value.func, value.args, value.keywords, vars(value)]
        case functools._lru_cache_wrapper():
            return [value.__wrapped__]
        case staticmethod() | classmethod():
            return [value.__func__]
        case property():
            return [value.fget, value.fset, value.fdel]
        case torch.Tensor():
            content = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
            about = (value.dtype, tuple(value.shape), value.device, value.requires_grad)
            return [*about, hashlib.sha256(content.numpy().tobytes()).hexdigest()]
        case np.ndarray() if type(value) is np.ndarray and not value.dtype.hasobject:
            return [value.dtype, value.shape, hashlib.sha256(value.tobytes()).hexdigest()]
        case tuple() | list() if type(value) in (tuple, list):
            return value
        case dict() if type(value) is dict:
            return [part for item in value.items() for part in item]
        case set() | frozenset() if type(value) in (set, frozenset):  # in an order that differs between processes
            return [_Text(text) for text in sorted(_of_entries(value, seen))]
        case types.MappingProxyType():
            return [dict(value)]
        case type() if is_warp_dtype(value):
            return [_Text(f"{scalar_type(value).__name__}{inner_shape(value)}")]
        case type():
            own = {n: v for n, v in vars(value).items() if n not in _OF_EVERY_CLASS}
            return [value.__module__, value.__qualname__, value.__bases__, own]
        case types.MemberDescriptorType() | types.GetSetDescriptorType():  # their class is known where they are
            return [value.__name__]
        case _ if type(value) in SCALARS:  # a Warp number
            return [value.value]
        case np.generic() if not value.dtype.hasobject:
            return [value.dtype, value.tobytes()]
        case OutputSpec():
            return [value.name, value.dtype, value.shape, value.torch_dtype]
        case _ if isinstance(value, _TORCH_OPS):
            return [_Text(repr(value))]
        case _ if type(value).__module__.startswith(wp.__name__) and is_struct(value):
            # not its module, with all kernels, which changes when they are compiled
            return [value.key, struct_fields(value)]
    return _reduced(value)


def _of_entries(values: Iterable[Any], seen: dict[int, tuple[Any, int]]) -> Iterator[str]:
    """The identities of values of which none has seen what is in another."""
    count = len(seen)
    for value in values:
        yield value_identity(value, seen)
        while len(seen) > count:  # no copy for each value: this may follow a long list
            seen.popitem()


def _reduced(value: Any) -> Sequence[Any]:
    """The parts by which pickle would make the value again. Raises if it would not."""
    reduce = copyreg.dispatch_table.get(type(value))
    made = reduce(value) if reduce else value.__reduce_ex__(2)
    if not isinstance(made, tuple):
        raise TypeError("a name says nothing about what it names")
    function, arguments, state, items, pairs = (*made, None, None, None)[:5]
    return [type(value), function, arguments, state, list(items or ()), list(pairs or ())]


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    parts = [function.__code__, function.__defaults__, function.__kwdefaults__, vars(function)]
    scope, names = function.__globals__, _names(function.__code__)
    held = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # still empty: a backward that refers to its own op
            held[name] = cell.cell_contents
    parts += _found(held, held.keys(), names)
    if _is_released(scope.get("__name__")):
        return parts
    if _is_being_made(scope) and any(name not in scope for name in _globals_of(function.__code__)):
        raise TypeError("it needs what its module defines later")
    imported = {name: sys.modules[name] for name in _imports(function.__code__, scope.get("__package__"))}
    return parts + _found(scope, names, names) + _found(imported, imported, names)


def _found(
    scope: dict[str, Any], wanted: Iterable[str], names: set[str], modules: tuple[types.ModuleType, ...] = ()
) -> list[Any]:
    """The values with the ``wanted`` names in a scope, with their names; of modules, those that a function may use."""
    found: list[Any] = []
    for name in sorted(n for n in wanted if n in scope):
        value = scope[name]
        if not isinstance(value, types.ModuleType):
            found += [name, value]
        elif value not in modules and not _is_released(value.__name__):
            found += _found(vars(value), names, names, (*modules, value))
    return found


def _known_name(value: Any) -> str | None:
    """The name of a function or class of which the versions in every identity say the rest, None for others."""
    parent = getattr(value, "__self__", None)
    if isinstance(value, types.BuiltinFunctionType) and isinstance(parent, types.ModuleType | type):
        module = parent.__name__ if isinstance(parent, types.ModuleType) else parent.__module__
        if not _is_released(module):
            raise TypeError("compiled code cannot be seen")
        return f"{module}.{value.__qualname__}"
    if isinstance(value, types.ModuleType):
        return value.__name__ if _is_released(value.__name__) else None
    is_ufunc = isinstance(value, np.ufunc)
    home = "numpy" if is_ufunc else getattr(value, "__module__", None)
    name = getattr(value, "__name__" if is_ufunc else "__qualname__", None)
    if not isinstance(name, str) or not isinstance(home, str) or not _is_released(home):
        return None
    try:  # a wrapper may have the name of what it wraps, and functions inside of functions differ by what they hold
        return f"{home}.{name}" if operator.attrgetter(name)(sys.modules[home]) is value else None
    except (KeyError, AttributeError):
        return None


def _is_released(module: Any) -> bool:
    """Whether a module belongs to Python or to a package whose version is part of every identity."""
    return isinstance(module, str) and _is_package_released(module.partition(".")[0])


@functools.cache
def _is_package_released(package: str) -> bool:
    if package in _FOREIGN:
        return True
    if package not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(package), "__file__", None)  # a user's file may have such a name, too
    return file is None or pathlib.Path(file).is_relative_to(pathlib.Path(os.__file__).parent)


def _names(code: types.CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return {*code.co_names, *code.co_freevars}.union(*(_names(c) for c in inner))


def _is_being_made(scope: dict[str, Any]) -> bool:
    """Whether names may still come into a scope: that of a script, or of a module that is being imported."""
    spec = scope.get("__spec__")
    return spec is None or getattr(spec, "_initializing", False)


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """The global names that a function reads, without those of Python and those of ops that are being defined."""
    for inner in (c for c in code.co_consts if isinstance(c, types.CodeType)):
        yield from _globals_of(inner)
    for step in dis.get_instructions(code):
        if step.opname == "LOAD_GLOBAL" and not hasattr(builtins, step.argval) and step.argval not in _defining:
            yield step.argval


def _imports(code: types.CodeType, package: str | None) -> Iterator[str]:
    """The full names of the modules that a function imports when it runs, without those whose versions are known."""
    for inner in (c for c in code.co_consts if isinstance(c, types.CodeType)):
        yield from _imports(inner, package)
    if dis.opmap["IMPORT_NAME"] in code.co_code[::2]:
        steps = list(dis.get_instructions(code))
        for level, _, step in zip(steps, steps[1:], steps[2:]):
            if step.opname == "IMPORT_NAME":
                name = importlib.util.resolve_name("." * level.argval + step.argval, package)
                if not _is_released(name):
                    yield name


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
