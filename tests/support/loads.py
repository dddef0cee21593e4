"""Which kernels a pretended GPU has loaded: while a graph is captured, it cannot load one."""

import contextlib
from collections.abc import Iterator
from typing import Any

from nvalchemiops.locks import Kept
from nvalchemiops.torch.runtime import cache


class LoadError(AssertionError):
    """A capture would fail on a GPU, or wait for it. No error that code expects, which might go on in another way."""


class Loads:
    """The kernels that were launched since this was made: none is loaded before its first launch."""

    def __init__(self) -> None:
        self.kernels: set[Any] = set()
        self.captures = False

    def note(self, kernel: Any) -> None:
        """Note a launch; `LoadError` if it is the first one of the kernel, and part of a capture."""
        if self.captures and kernel not in self.kernels:
            raise LoadError(f"kernel '{kernel.key}' is first launched while a graph is captured")
        self.kernels.add(kernel)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, a graph is captured."""
        self.captures = True
        try:
            yield
        finally:
            self.captures = False


def forget_kept(monkeypatch: Any) -> None:
    """For this test: results that earlier calls have kept, with kernels that its device has not loaded."""
    for name in ("_kept", "_recognized"):
        monkeypatch.setattr(cache, name, Kept(cache.MOST_ENTRIES))
    monkeypatch.setattr(cache, "_captured", {})
