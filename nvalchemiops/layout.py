"""Which layout launches on a kind of device have: how rows are given to threads, and what is prepared for that.

The one place that decides by the device. Tests put the layout of one device in the place of another one's
(`replaced_layout`), so that what a GPU is prepared for runs on a CPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Layout(NamedTuple):
    """How rows are given to threads.

    Attributes
    ----------
    warps : bool
        In kernels with lanes, the threads of a warp share a row. Otherwise a thread has a row alone, or several.
    block : int, optional
        Threads of a block in kernels without lanes. None: a block is one thread. On a GPU two warps: small blocks give
        more of its processors something to do for a thousand atoms, and as many as it takes fill it for many.
    groups : bool
        In kernels without lanes, a thread goes through a group of rows. Otherwise it has one.
    tabulated : bool
        Phases of Fourier sums are tabulated before they are summed. Otherwise each thread computes them.
    serial : bool
        A kernel of one thread sorts and bins atoms, and small searches write before they count. Otherwise torch sorts.
    reads : bool
        The host reads values where that saves work or finds a mistake. Otherwise it never waits for results.
    """

    warps: bool
    block: int | None
    groups: bool
    tabulated: bool
    serial: bool
    reads: bool

    def block_of(self, lanes: int) -> int | None:
        """Threads of a block for a kernel with this many lanes, 0 for one without; None: one."""
        return lanes if lanes and self.warps else self.block

    def rows_per_thread(self, group: int) -> int:
        """Rows that a thread has, in kernels that can go through ``group`` of them."""
        return group if self.groups else 1


CPU = Layout(warps=False, block=None, groups=True, tabulated=True, serial=True, reads=True)
GPU = Layout(warps=True, block=64, groups=False, tabulated=False, serial=False, reads=False)

_layouts = {"cpu": CPU, "cuda": GPU}


def layout(device_type: str) -> Layout:
    """The layout of launches on devices of this type, "cpu" or "cuda"."""
    return _layouts.get(device_type, GPU)


@contextmanager
def replaced_layout(device_type: str, other: Layout) -> Iterator[None]:
    """Launches on devices of this type have another layout, in all threads; for tests."""
    before = layout(device_type)
    _layouts[device_type] = other
    try:
        yield
    finally:
        _layouts[device_type] = before
