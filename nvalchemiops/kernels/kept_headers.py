"""The header of Warp that all kernels include, precompiled, and kept from one process to the next.

Before the first kernel that a thread compiles for a CPU, Warp precompiles this header, for the other kernels of the
thread. It takes a second, longer than most kernels, and is lost with the process, as when a program has one new
formula. So files that Warp has made are copied to its kernel cache, and from there to where it looks for them.

Clang compares what it has precompiled with its flags and with the dates of its sources, and Warp goes without a file
that does not fit. A damaged one could crash the compiler, so names hold a hash of the contents.
"""

import contextlib
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import warp as wp

from nvalchemiops._warp_internals import header_folder, header_identity
from nvalchemiops.kernels.kept_text import write_whole

FOLDER = "nvalchemiops_headers"

KEPT = 8
"""Number of installations and processors whose headers, of five megabytes each, are kept: those written last."""


@contextlib.contextmanager
def kept_headers() -> Iterator[None]:
    """Give Warp what other processes have precompiled, and keep what it precompiles in the block.

    Files that cannot be read or written are ignored: Warp then precompiles the header itself.
    """
    at = header_folder() if wp.config.cache_kernels else None
    identity = None if at is None else header_identity()
    if at is None or identity is None:
        yield
        return
    cache = Path(str(wp.config.kernel_cache_dir), FOLDER, _digest(identity.encode()))
    given = _give(cache, at)
    before = _names(at)
    yield
    after = _names(at)
    with contextlib.suppress(OSError):  # the cache cannot be written: precompile again in the next process
        for name in after - before:
            content = (at / name).read_bytes()
            cache.mkdir(parents=True, exist_ok=True)
            if not any(cache.glob(f"*_{name}")):  # another process was faster
                write_whole(cache / f"{_digest(content)}_{name}", content)
        if after - before:
            others = [folder for folder in cache.parent.iterdir() if folder != cache]
            for old in sorted(others, key=lambda folder: folder.stat().st_mtime_ns)[: 1 - KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        for name in given.keys() - after:  # Warp removes what does not fit
            given[name].unlink(missing_ok=True)


def _give(cache: Path, at: Path) -> dict[str, Path]:
    """Copy files that the cache has and Warp has not; return where they come from, by name."""
    given: dict[str, Path] = {}
    with contextlib.suppress(OSError):
        for path in sorted(cache.glob("*.pch")):
            digest, _, name = path.name.partition("_")
            if not (at / name).exists():
                content = path.read_bytes()
                if _digest(content) == digest:
                    write_whole(at / name, content)
                    given[name] = path
                else:
                    path.unlink()
    return given


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.pch")}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
