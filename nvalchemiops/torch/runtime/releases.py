"""What compiled code can do with some releases of torch, and what stands in place of it with others."""

from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)


def _release() -> tuple[int, ...]:
    """Major and minor number of torch's release."""
    return tuple(int(number) for number in torch.__version__.split(".")[:2])


CONSTANTS_FROM_OBJECTS = _release() >= (2, 12)
"""Whether compiled code can call functions marked by `assume_constant` with objects as arguments."""

RETURNS_REPLACED_TUPLES = _release() >= (2, 12)
"""Whether compiled code can return what ``_replace`` of a named tuple has made. With torch 2.11 that is empty there."""


def replaced(value: Any, /, **changes: Any) -> Any:
    """The same as ``value._replace(**changes)`` of a named tuple, by a call of its class."""
    fields = [changes.pop(name, entry) for name, entry in zip(value._fields, value)]
    if changes:
        raise ValueError(f"Got unexpected field names: {list(changes)!r}")
    return type(value)(*fields)


def replaceable(named_tuple: Class) -> Class:
    """Mark a class of named tuples that compiled code may change and return."""
    if not RETURNS_REPLACED_TUPLES:
        named_tuple._replace = replaced  # type: ignore[attr-defined]  # mypy knows named tuples by their fields only
    return named_tuple
