"""The description of a call of an operation, and the key that says which calls share a plan.

The key holds the shapes of moving tensors, and the values of fixed arguments.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.launch import active_tape
from nvalchemiops.layout import layout
from nvalchemiops.torch.runtime import graphs, tables
from nvalchemiops.torch.runtime._torch_internals import (
    PLAIN_TYPES,
    has_function_modes,
    has_other_modes,
    has_saved_tensor_hooks,
    is_unobserved,
    version_of,
)
from nvalchemiops.torch.runtime.context import is_capturing, is_eager
from nvalchemiops.torch.runtime.recorder import current_recorder

MOST_ATOMS = 2**16
"""Largest number of atoms for which calls have plans. PME sums of 4,096 to 32,768 ions take 5 to 23 % less time with a
plan: its memory is kept, while a large block that is allocated anew has to be cleared by the system, page by page."""

MOST_ATOMS_ON_GPU = 2**20
"""The same on a GPU, where a launch takes as long for many atoms as for few. A call of 262,144 ions that starts on an
idle device waits 1.6 ms for its launches, beside 2.3 ms of kernels (measured on an H100)."""

LONG_LISTS = 2**24
"""Size of lists, in bytes, from which on a graph reads them in place if they stay where they are. To copy them takes
longer than a launch."""

SMALL = 256
"""Largest number of elements of a tensor whose values are part of a key. Larger tensors, which hold prepared data, are
recognized by identity, and then compared with their earlier values: NumPy and ``.data`` change them without a new
version."""

MOST_OF_SYSTEMS = 9 * 2048
"""The same limit for cells and system indices, of which callers often make new tensors for each call."""

Tensors = tuple[torch.Tensor, ...]

Body = Callable[[Sequence[torch.Tensor] | None, Sequence[bool]], Tensors]
"""``body(inputs, needed)`` returns the results at ``inputs`` (None: at the inputs that were checked), with a graph if
gradients are enabled, followed by the gradients of the sum of the first result with respect to the ``needed``
inputs."""


UNKNOWN = "it depends on values that cannot be compared"


class Call(NamedTuple):
    """A call of an operation."""

    name: str
    prepare: Callable[..., Body]  # ``prepare(inputs, near)`` checks the arguments and returns a `Body`
    # tensors with respect to which results may be differentiated. The first `n_moving` are *moving*: their values
    # differ in each call
    inputs: Tensors
    n_moving: int
    near: Any = ()  # *listed*: neighbors as a named tuple, of any length and at any address
    # *fixed*: cells and system indices. They are compared by value, since callers make new tensors for each call
    systems: tuple[Any, ...] = ()
    # *fixed*: all other arguments on which results depend; or the reason why the call has no plan
    options: tuple[Any, ...] | str = UNKNOWN
    # whether the body returns the gradients of the inputs together with the results. The last input are then the cells;
    # all others have a row for each atom
    along: bool = False
    others: tuple[Any, ...] = ()  # further arguments that hold tensors, which are functions of the tensors above
    batch_idx: torch.Tensor | None = None  # system of each atom, for weights of energies
    n_systems: int = 1
    by_system: bool = False  # whether there is one energy for each system rather than for each atom
    domain: Any = None
    # ``end(results, body)`` makes the return value of the call, in new memory. It runs outside of the plan, so it may
    # read results. Only for calls without derivatives
    end: Callable[[Tensors, Body], Tensors] | None = None
    # ``in_general(call)`` describes the call with more of its inputs moving, or with `prepared` tensors in place of
    # options, for a plan that serves all their values; or returns None. It checks the present values, which the
    # `prepare` of that call does not read in a recording, and may raise as `prepare` does. Without it each value of the
    # fixed inputs and options has a plan
    in_general: Callable[["Call"], "Call | None"] | None = None
    # further moving tensors, without derivatives, which `prepare` then takes after ``near``
    prepared: Tensors = ()
    # the whole call as an operator. It runs where the call can have no plan: if compilers, transforms or modes see the
    # operations, for instance
    op: Callable[[], Tensors] | None = None
    waits: bool = True  # whether `end` reads results. Such a call runs as ``op()`` on a GPU


class Kind(NamedTuple):
    """The cache key of a call, and the tensors that its plan needs.

    Calls with the same key differ only in the values of moving tensors and lists.
    """

    key: tuple[Any, ...]  # of parts that are named in `PARTS`
    place: tuple[torch.device, int] | None  # device and stream of a captured graph; None on a CPU
    # how many inputs a plan copies: on a CPU only the moving ones, since values of the others are part of the key; on a
    # GPU all
    n_copied: int
    used: list[torch.Tensor]  # neighbor lists that only kernels read, so a plan on a CPU uses them in place
    copied: list[torch.Tensor]  # neighbor lists that a plan copies, then `Call.prepared`
    in_place: list[torch.Tensor]  # neighbor lists that a graph reads where they are: the key has their addresses
    length: int  # number of pairs in the lists, if the plan works for lists of any length; otherwise 0
    small: list[torch.Tensor]  # fixed tensors whose values are part of the key; inputs are the first
    large: list[torch.Tensor]  # fixed tensors that are recognized by identity
    n_small: int  # how many of `small` are inputs
    contents: list[bytes]  # values of the small tensors
    table: tables.Plans  # where the plan of the call is kept

    def with_lists_in_place(self) -> "Kind":
        """The kind of calls whose lists are in the same memory. The graph holds no reference to them."""
        parts = list(self.key)
        parts[OF_LISTS] = (*parts[OF_LISTS], *[(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in self.used])
        return self._replace(key=tuple(parts), used=[], in_place=self.used, length=0)

    def with_lists_of_any_length(self) -> "Kind":
        """The kind with lists that a graph copies into its memory: as int32, since only kernels may read what is there.

        Kinds whose lists have one length are unchanged.
        """
        return self._replace(used=[*map(int32_of, self.used)]) if self.length and self.place is not None else self


def int32_of(tensor: torch.Tensor) -> torch.Tensor:
    """Integers as int32. Those that do not fit become the largest one, which is no atom, no place and no system."""
    if tensor.dtype is torch.int32:
        return tensor
    # one less than the smallest int32 wraps around to the largest one; the smallest one itself marks room
    return tensor.clamp(-(2**31) - 1, 2**31 - 1).to(torch.int32)


PARTS = ("name", "layout", "device or stream", "tensors", "neighbors", "cells or systems of atoms", "options")
"""Names of the parts of a key."""

OF_LISTS = PARTS.index("neighbors")


def kind_of(call: Call, tracked: bool) -> Kind | str:
    """The kind of a call, or the reason why it has no plan."""
    inputs, near = call.inputs, call.near
    n_atoms = inputs[0].shape[0] if inputs[0].ndim else 0
    if tables.are_off():
        return "plans are switched off"
    if isinstance(call.options, str):
        return call.options
    device = inputs[0].device
    how = layout(device.type)
    place = None if how.reads else graphs.place_of(device)
    most = MOST_ATOMS if place is None else MOST_ATOMS_ON_GPU
    if not 0 < n_atoms <= most:
        return f"there are more than {most} atoms" if n_atoms else "there are no atoms"
    if current_recorder() is not None or is_capturing() or active_tape() is not None:
        return "it is part of a recording"
    if has_function_modes(but_default_device=True) or has_other_modes():  # the library says where tensors are made
        return "a mode sees the operations"
    listed: list[torch.Tensor] = []
    of_near: list[Any] = []  # with a mark in place of tensors: a list is not a matrix of the same shape
    for value in near:
        is_tensor = isinstance(value, torch.Tensor)
        of_near.append("a tensor" if is_tensor else value)
        if is_tensor:
            listed.append(value)
    tensors = (*inputs, *listed, *call.prepared)
    if not is_unobserved(*tensors, of_inference=True):
        return "autocast, a profiler or a tensor of another kind sees the operations"
    if any([t.device != device for t in tensors]):
        return "tensors are on several devices"
    if place is not None and (obstacle := graphs.obstacle(device)):
        return obstacle
    if tracked and has_saved_tensor_hooks():  # checkpointing counts saved tensors, and a plan saves other tensors
        return "hooks see the tensors that are saved for the backward pass"
    length, is_used = _length(near, listed, n_atoms, how.reads)
    n_copied = call.n_moving if place is None else len(inputs)
    small: list[torch.Tensor] = []
    large: list[torch.Tensor] = []
    contents: list[bytes] = []
    parts: list[list[Any]] = [[], [], [], []]
    forms, of_lists, of_systems, of_options = parts
    for t in (*inputs[:n_copied], *call.prepared):
        forms += (t.shape, t.dtype, t.stride())
    for t in listed:
        if length and length in (shape := t.shape):  # `_length` has checked dtypes and strides
            of_lists.append(tuple([-1 if size == length else size for size in shape]))
        else:
            of_lists += (t.shape, torch.int32 if length else t.dtype, t.stride())  # as which graphs get them
    try:
        _add_fixed(inputs[n_copied:], of_systems, small, large, contents, MOST_OF_SYSTEMS)
        n_small = len(small)
        _add_fixed(call.systems, of_systems, small, large, contents, MOST_OF_SYSTEMS)
        _add_fixed((*of_near, *call.options), of_options, small, large, contents, SMALL)
    except _Unknown as reason:
        return str(reason)
    if len(small) + len(large) > len(inputs) - n_copied and not is_unobserved(*small, *large, of_inference=True):
        return "a tensor of another kind is part of what is fixed"
    used, copied = (listed, []) if is_used or place is not None else ([], listed)
    copied = [*copied, *call.prepared]
    table = tables.current()
    key = (call.name, how, place, *map(tuple, parts))
    return Kind(key, place, n_copied, used, copied, [], length, small, large, n_small, contents, table)


def kind_here(kind: Kind | str, incoming: Sequence[torch.Tensor]) -> Kind | str:
    """The kind of a derivative of a call, for these incoming gradients, or the reason why it has no plan."""
    if isinstance(kind, str):
        return kind
    if current_recorder() is not None:
        return "it is part of a recording"
    is_observed = has_function_modes(but_default_device=True) or not is_unobserved(*incoming)
    if is_observed or not is_eager(*incoming) or has_saved_tensor_hooks():
        return "transforms, modes or hooks see the backward pass"
    here = None if kind.place is None else kind.place[0]
    for t in incoming:
        if t.layout is not torch.strided or (t.device != here if here else not layout(t.device.type).reads):
            return "an incoming gradient is of another layout or elsewhere"
    if here and (graphs.place_of(here) != kind.place or is_capturing()):
        return "the backward pass is on another stream, or part of a recording"
    if kind.contents != [_bytes_of(t) for t in kind.small]:
        return "a fixed argument has changed since the call"
    return kind


def _length(near: Any, listed: Sequence[torch.Tensor], n_atoms: int, reads: bool) -> tuple[int, bool]:
    """The number of pairs of a list, if its plan works for any number, otherwise 0; and whether only kernels read it.

    The number is 0 for a matrix, and for a list whose shape is part of the key.
    """
    if not near:
        return 0, True
    of_pairs, of_pointers, of_half = _places(near.__class__)
    if of_half is not None and near[of_half] is not False:
        return 0, False
    pairs, pointers = near[of_pairs], near[of_pointers]
    is_list = isinstance(pairs, torch.Tensor) and isinstance(pointers, torch.Tensor) and pairs.ndim in (1, 2)
    length = pairs.shape[-1] if is_list else 0
    # only arrays of pairs have an axis this long; on a CPU kernels read the lists in place, so they must be contiguous
    if length > max(n_atoms + 1, 3) and all(
        [t.dtype is torch.int32 and t.is_contiguous() if reads else t.dtype in _INTEGERS for t in listed]
    ):
        return length, True
    return 0, of_half is None or pairs is None


_INTEGERS = (torch.int32, torch.int64)


@functools.cache
def _places(kind: Any) -> tuple[int, int, int | None]:
    """The indices of pairs, pointers and the half-list flag among the fields of this named tuple of neighbors."""
    names = kind._fields
    if "half_list" in names:
        return names.index("neighbor_list"), names.index("neighbor_ptr"), names.index("half_list")
    return names.index("neighbors"), names.index("pointers"), None


def form_of(t: torch.Tensor) -> Hashable:
    """The part of a cache key for a moving tensor: all its properties except its values."""
    return t.shape, t.dtype, t.stride()


class _Unknown(Exception):
    """A value that cannot be compared."""


def _add_fixed(
    values: tuple[Any, ...],
    key: list[Any],
    small: list[torch.Tensor],
    large: list[torch.Tensor],
    contents: list[bytes],
    most: int,
) -> None:
    """Append the identity of ``values`` to ``key``.

    Tensors of up to ``most`` elements enter the key by value. They are appended to ``small``, and their bytes to
    ``contents``. Larger tensors, and tensors on a GPU, enter it by identity and are appended to ``large``.
    """
    for value in values:
        kind = type(value)
        if kind in _IMMUTABLE:  # the usual case
            key += (kind, value if value or kind is not float else str(value))  # zero and minus zero are equal
        elif isinstance(value, torch.Tensor):
            if kind not in PLAIN_TYPES:
                raise _Unknown("a tensor of another kind is part of what is fixed")
            if value.layout is not torch.strided:
                raise _Unknown(f"a tensor has the layout {value.layout}")
            if not layout(value.device.type).reads:
                large.append(value)
                key += (id(value), value.data_ptr(), value.dtype, value.shape, value.stride())
            elif value.numel() <= most:
                small.append(value)
                contents.append(_bytes_of(value))
                key += (value.dtype, value.shape, contents[-1])
            else:
                large.append(value)
                place = (id(value), version_of(value), value.data_ptr())
                key += (*place, value.dtype, value.shape, value.stride())
        elif isinstance(value, tuple):
            key += (kind, len(value))
            _add_fixed(value, key, small, large, contents, most)
        elif isinstance(value, np.generic):
            key += (kind, value.tobytes())
        else:
            raise _Unknown(f"an argument is a {kind.__name__}, which may change")


def _bytes_of(tensor: torch.Tensor) -> bytes:
    try:
        return (tensor.detach() if tensor.requires_grad else tensor).numpy().tobytes()
    except (TypeError, RuntimeError) as error:
        raise _Unknown(f"values of a tensor cannot be read: {error}") from None


_IMMUTABLE = {type(None), bool, int, float, str, torch.dtype, MethodType}
"""Types whose objects do not change. Objects of other types may convert to another number in each call."""


def immutable(kind: type) -> type:
    """Mark a class whose objects do not change, hold no tensors, and compare by value. A decorator."""
    _IMMUTABLE.add(kind)
    return kind
