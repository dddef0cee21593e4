"""The memory of a launch: copies of its arrays, far apart from each other, and what is known of each of their bytes."""

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import warp as wp

from tests.checker.build import runner

POISON = 0x7FFC5EED
"""What memory holds that nothing was written to, in four bytes: NaN as a number, as an index beyond any array."""

GAP = 1 << 20
"""Bytes between arrays, which an access beyond the end of one does not cross."""

PAGE = 4096


class Region(ctypes.Structure):
    """As in ``runner.cpp``."""

    _fields_ = (
        ("low", ctypes.c_uint64),
        ("high", ctypes.c_uint64),
        ("shift", ctypes.c_int32),
        ("item", ctypes.c_int32),
        ("gaps", ctypes.c_void_p),
        ("cells", ctypes.c_void_p),
    )


class Place(NamedTuple):
    """Memory that arrays of a launch share, in most cases that of one array."""

    low: int
    high: int
    names: tuple[str, ...]
    item: int  # bytes of an element
    shift: int
    gaps: bytes = b""  # for each four bytes of an element, whether they lie between its fields

    @property
    def name(self) -> str:
        return ", ".join(f"`{n}`" for n in self.names)


def gaps_of(dtype: Any, item: int) -> bytes:
    """For each four bytes of a structure, 1 if they lie between its fields; nothing for other types."""
    if not hasattr(dtype, "ctype"):
        return b""
    gaps = bytearray(b"\1" * (item // 4))
    for name, _ in dtype.ctype._fields_:
        field = getattr(dtype.ctype, name)
        for cell in range(field.offset // 4, -(-(field.offset + field.size) // 4)):
            gaps[cell] = 0
    return bytes(gaps)


def _place(name: str, array: Any, dtype: Any) -> Place | None:
    shape, strides = array.shape[: array.ndim], array.strides[: array.ndim]
    if 0 in shape or array.ndim == 0:
        return None
    item = wp.types.type_size_in_bytes(dtype)
    scalar = getattr(dtype, "_wp_scalar_type_", dtype)
    small = scalar in (wp.bool, wp.int8, wp.uint8, wp.int16, wp.uint16, wp.float16)
    length = sum((n - 1) * stride for n, stride in zip(shape, strides)) + item
    return Place(array.data, array.data + length, (name,), item, 0 if small else 2, gaps_of(dtype, item))


def _merged(places: list[Place]) -> list[Place]:
    """Places that overlap, as one."""
    result: list[Place] = []
    for place in sorted(places):
        if result and place.low < result[-1].high:
            last = result.pop()
            high, names = max(place.high, last.high), (*last.names, *place.names)
            place = Place(last.low, high, names, max(place.item, last.item), min(place.shift, last.shift))
        result.append(place)
    return result


class Memory:
    """Copies of all arrays of a launch.

    Parameters
    ----------
    arrays : sequence of tuple
        Name, array descriptor and dtype of each.
    checks : bool
        Whether there are cells.
    """

    def __init__(self, arrays: Sequence[tuple[str, Any, Any]], checks: bool) -> None:
        self.places = _merged([place for a in arrays if (place := _place(*a))])
        sizes = [-(-(p.high - p.low) // PAGE) * PAGE for p in self.places]
        self.size = GAP + sum(size + GAP for size in sizes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.arena = mmap.mmap(-1, self.size, flags=flags)
        self.low = ctypes.addressof(ctypes.c_char.from_buffer(self.arena))
        self.pages = np.zeros(self.size // PAGE + 1, np.uint16)
        self.before = [ctypes.string_at(p.low, p.high - p.low) for p in self.places]
        self.regions = (Region * max(len(self.places), 1))()
        self.cells: list[np.ndarray] = []
        self.gaps: list[Any] = []
        self.checks = checks
        at = self.low + GAP
        for number, (place, size) in enumerate(zip(self.places, sizes)):
            first = (at - self.low) // PAGE
            self.pages[first : first + size // PAGE] = number + 1
            region = self.regions[number]
            # an array begins where it is aligned as it was
            region.low, region.shift, region.item = at + place.low % 64, place.shift, place.item
            if any(place.gaps):
                self.gaps.append(ctypes.create_string_buffer(place.gaps))
                region.gaps = ctypes.addressof(self.gaps[-1])
            region.high = region.low + place.high - place.low
            last = (region.high - 1 - self.low) // PAGE
            self.pages[first : last + 1] = number + 1
            at += size + GAP
        self.restore()

    def restore(self) -> None:
        """Arrays as they were before the launch."""
        self.cells = []
        for region, data in zip(self.regions, self.before):
            ctypes.memmove(region.low, data, len(data))
            if self.checks:
                cells = np.zeros(((len(data) >> region.shift) + 2) * runner().checker_cell_size(), np.uint8)
                self.cells.append(cells)
                region.cells = cells.ctypes.data

    def address(self, original: int) -> int:
        """Where the copy of an array is."""
        for place, region in zip(self.places, self.regions):
            if place.low <= original < place.high:
                return region.low + original - place.low
        return 0

    def results(self) -> list[bytes]:
        """What the arrays hold."""
        return [ctypes.string_at(r.low, p.high - p.low) for p, r in zip(self.places, self.regions)]

    def write_back(self, results: Sequence[bytes]) -> None:
        """Give the arrays of the caller their results."""
        for place, before, after in zip(self.places, self.before, results):
            if before != after:
                ctypes.memmove(place.low, after, len(after))
