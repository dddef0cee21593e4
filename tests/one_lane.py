"""The GPU branch of a kernel, built for a CPU as a warp of one thread.

So its logic is tested everywhere. What real lanes tell each other is left to the tests marked `gpu`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import warp as wp

from nvalchemiops.kernels import native

LANES = """
    struct { int x; } threadIdx = {0};
    static const auto __shfl_xor_sync = [](unsigned, auto value, int) { return value; };
    static const auto __ballot_sync = [](unsigned, bool hit) { return static_cast<unsigned>(hit); };
    static const auto __popc = [](unsigned mask) { return __builtin_popcount(mask); };
    static const auto __syncwarp = [] {};
"""


def one_lane(text: str, changes: Mapping[str, str] | None = None, functions: str = "") -> str:
    """The source of a GPU branch for one thread of a CPU.

    Parameters
    ----------
    text : str
    changes : mapping of str to str, optional
        What in the text means a warp of 32, or names a function that a CPU does not have, and what stands for it.
    functions : str, optional
        Definitions of such functions.
    """
    for old, new in (changes or {}).items():
        assert old in text, f"the source no longer has {old!r}"
        text = text.replace(old, new)
    return LANES + functions + text


def use_one_lane(monkeypatch: pytest.MonkeyPatch, source: Any, rewrite: Callable[[str], str] = one_lane) -> None:
    """Kernels that ``source``, a module with ``WARP`` and ``by_device``, makes from now on."""
    monkeypatch.setattr(source, "WARP", 1)
    monkeypatch.setattr(source, "by_device", lambda cpu, gpu="": rewrite(gpu))
    use_other_modules(monkeypatch)


def use_other_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native kernels are made in Warp modules that only tests use, from now on."""
    monkeypatch.setattr(native, "kernel_module", lambda name: wp.get_module(f"test_{name}_one_lane"))
