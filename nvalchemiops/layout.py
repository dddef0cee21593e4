"""Launch layouts by type of device: how rows are assigned to threads, and which data are prepared for that.

This is the only place that depends on the type of device. Tests can replace the layout of one device by the layout of
another (`replaced_layout`), so that code for a GPU runs on a CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Layout(NamedTuple):
    """How rows are assigned to threads.

    Attributes
    ----------
    warps : bool
        Whether the threads of a warp share a row, in kernels with lanes. Otherwise a thread has one row or several.
    block : int, optional
        Threads per block, with lanes or without; None means one thread. On a GPU a block has two warps: 32 blocks, the
        most that a multiprocessor holds, then have its 64 warps. Larger blocks spread a thousand atoms over fewer
        multiprocessors, and keep the place of a short row until the longest row of the block ends.
    groups : bool
        Whether a thread processes a group of rows, in kernels without lanes. Otherwise it has one or less.
    serial : bool
        Whether a kernel of one thread sorts and bins atoms, and small searches write before they count. Otherwise torch
        sorts.
    reads : bool
        Whether the host reads values if that saves work or finds mistakes. Otherwise it never waits for results.
    """

    warps: bool
    block: int | None
    groups: bool
    serial: bool
    reads: bool

    def rows_per_thread(self, group: int) -> int:
        """Rows per thread in kernels that can process ``group`` rows in a thread."""
        return group if self.groups else 1


CPU = Layout(warps=False, block=None, groups=True, serial=True, reads=True)
GPU = Layout(warps=True, block=64, groups=False, serial=False, reads=False)

_layouts = {"cpu": CPU, "cuda": GPU}


def layout(device_type: str) -> Layout:
    """The layout of launches on devices of this type, "cpu" or "cuda"."""
    return _layouts.get(device_type, GPU)


@contextmanager
def replaced_layout(device_type: str, other: Layout) -> Iterator[None]:
    """A context in which launches on devices of this type have another layout, in all threads. For tests."""
    before = layout(device_type)
    _layouts[device_type] = other
    try:
        yield
    finally:
        _layouts[device_type] = before
