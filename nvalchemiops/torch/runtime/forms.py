"""The forms of nested containers with tensors, such as arguments of functions that are recorded."""

import collections
import copy
import dataclasses
import gc
import inspect
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.torch.runtime.recorder import current_recorder
from nvalchemiops.torch.runtime.storage import storage_of


class _Place(NamedTuple):
    """The placeholder for a tensor."""

    number: int


def taken_apart(values: Any, takes_apart: bool) -> tuple[Any, list[torch.Tensor]]:
    """The structure of nested containers, with placeholders for tensors, and these tensors.

    Without ``takes_apart`` hashable dataclasses are no containers.

    A tensor in several places is one tensor, since its gradient is the sum over all of them. The structure is hashable
    if all values other than tensors are.
    """
    numbers: dict[torch.Tensor, int] = {}
    return _form(values, numbers, takes_apart), list(numbers)


def _form(values: Any, numbers: dict[torch.Tensor, int], takes_apart: bool) -> Any:
    if isinstance(values, torch.Tensor):
        return _Place(numbers.setdefault(values, len(numbers)))
    if isinstance(values, dict):
        forms = tuple([_form(value, numbers, takes_apart) for value in values.values()])
        return (_kind_of_dict(values), tuple(values), forms, getattr(values, "default_factory", None))
    if isinstance(values, (tuple, list)):
        return (type(values), None, tuple([_form(value, numbers, takes_apart) for value in values]))
    if dataclasses.is_dataclass(values) and _is_container(values, takes_apart):
        names = [field.name for field in dataclasses.fields(values) if hasattr(values, field.name)]
        parts = {name: getattr(values, name) for name in names}
        parts |= getattr(values, "__dict__", {})
        forms = tuple([_form(value, numbers, takes_apart) for value in parts.values()])
        if not all(map(_is_constant, forms)):
            return (type(values), tuple(parts), forms)
    is_zero = isinstance(values, (float, complex, np.generic)) and not values
    mark = str(values) if is_zero else mode_of(values)  # zero and minus zero are equal
    return (None, type(values), values, mark)


def mode_of(values: Any) -> bool | None:
    """Whether a module, or that of a bound method, is in training; None for everything else, and for a frozen one."""
    owner = values.__self__ if isinstance(values, types.MethodType) else values
    return getattr(owner, "training", None) if isinstance(owner, torch.nn.Module) else None


def _kind_of_dict(values: dict[Any, Any]) -> type:
    """The class of a dictionary, or dict if its objects have more than their entries, which would be lost."""
    kind = type(values)
    if kind is dict:
        return dict
    entries = set(map(id, values.values()))
    extra = [value for value in getattr(values, "__dict__", {}).values() if id(value) not in entries]
    return dict if extra or hasattr(kind, "__slots__") else kind


def _is_container(value: Any, also_hashable: bool) -> bool:
    # other dataclasses are the same only if they are the same object
    is_compared = type(value).__eq__ is not object.__eq__ if also_hashable else type(value).__hash__ is None
    return is_compared and not isinstance(value, torch.nn.Module)


def is_hashable(form: Any) -> bool:
    """Whether all values other than tensors are hashable."""
    try:
        hash(form)
    except TypeError:
        return False
    return True


def has_hashable(form: Any) -> bool:
    """Whether a hashable dataclass was taken apart."""
    if type(form) is _Place or form[0] is None:
        return False
    kind, names, parts, *_ = form
    is_hashable = kind is not dict and names is not None and kind.__hash__ is not None
    return is_hashable or any(map(has_hashable, parts))


def _is_constant(form: Any) -> bool:
    return type(form) is not _Place and (form[0] is None or all(map(_is_constant, form[2])))


def _dict_of(kind: Any, entries: dict[Any, Any], default_factory: Any) -> dict[Any, Any]:
    """The entries in an object of this class, or in a dict if it cannot be made, such as one that never changes."""
    try:
        found = kind.__new__(kind)
        if issubclass(kind, collections.defaultdict):
            found.default_factory = default_factory
        for name, part in entries.items():
            found[name] = part
    except Exception:
        return entries
    return found


def put_together(form: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The containers of this form, with these tensors in place of the placeholders."""
    if type(form) is _Place:
        return tensors[form.number]
    kind, names, values, *others = form
    if kind is None:
        return copy.copy(values) if isinstance(values, _CHANGEABLE) else values
    parts = [put_together(value, tensors) for value in values]
    if kind is dict:
        return dict(zip(names, parts))
    if issubclass(kind, dict):
        return _dict_of(kind, dict(zip(names, parts)), *others)
    if names is not None:  # a dataclass
        found = object.__new__(kind)
        for name, part in zip(names, parts):
            object.__setattr__(found, name, part)
        return found
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


_CHANGEABLE = (np.ndarray, set, bytearray, collections.deque)
"""Constants that callers may change: each call gets its own."""


def refuse_hidden(form: Any) -> None:
    """End the recording if a result that counts as a constant has tensors whose values differ, or can be read once."""
    recorder = current_recorder()
    if recorder is None or type(form) is _Place:
        return
    kind, _, value, *_ = form
    if kind is not None:
        for part in value:
            refuse_hidden(part)
    elif any([storage_of(t) in recorder.varying for t in _tensors_behind(value)]):
        recorder.end(
            f"a result is a {type(value).__name__} with tensors: return tensors in tuples, lists, dictionaries or "
            "dataclasses that are compared by their fields, as by default"
        )
    elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        recorder.end(
            f"a result is a {type(value).__name__}, of which only the first reader has something: return a list"
        )


def _tensors_behind(value: Any) -> list[torch.Tensor]:
    """Tensors in an object and in all that it refers to."""
    waiting, seen, found = [value], set[int](), list[torch.Tensor]()
    alive = []  # what is found may be new, with the address of what is gone
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found += [value] if value.layout is torch.strided and value.numel() else []
        elif id(value) not in seen and not isinstance(value, _NOT_FOLLOWED):
            seen.add(id(value))
            alive.append(value)
            waiting += _held_by(value)
    return found


_NOT_FOLLOWED = (torch.nn.Module, types.ModuleType, type, types.FrameType, types.TracebackType)


def _held_by(value: Any) -> Iterable[Any]:
    """What an object refers to: its elements or attributes, values in a function, what an iterator will need."""
    if isinstance(value, types.GeneratorType):
        return inspect.getgeneratorlocals(value).values()
    if isinstance(value, types.FunctionType):  # all but its globals
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    if isinstance(value, np.ndarray):  # of objects, or the memory of a tensor
        return [value.base, *(value.ravel().tolist() if value.dtype == object else ())]
    return gc.get_referents(value)
