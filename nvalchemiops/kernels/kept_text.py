"""Texts of kernels that take long to derive, kept beside the compiled kernels.

A formula is differentiated by a computer algebra system, whose import alone takes longer than most programs' first sum.
What was derived once is a file in Warp's kernel cache, and as trusted as the compiled kernels there.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import warp as wp

from nvalchemiops._warp import ensure_warp

FOLDER = "nvalchemiops_texts"


def kept_text(sources: tuple[str, ...], key: Any, derive: Callable[[], Any]) -> Any:
    """``derive()``, made of lists, dictionaries and strings, or the same from before.

    Parameters
    ----------
    sources : tuple of str
        Files of the code that derives it: after a change of theirs it is derived again.
    key : object
        On whose ``repr`` the result depends.
    derive : callable
    """
    path = _path_of(sources, key)
    if path is None:
        return derive()
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):  # there is none yet, or it was cut off
        found = derive()
    try:
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as part:
            json.dump(found, part)
        os.replace(part.name, path)  # all of it at once, for other processes
    except OSError:  # a cache that cannot be written
        pass
    return found


def _path_of(sources: tuple[str, ...], key: Any) -> Path | None:
    """The file of a text; None where the code that derives it is not in files."""
    ensure_warp()
    try:
        code = b"".join(Path(source).read_bytes() for source in sources)
    except OSError:
        return None
    name = hashlib.sha256(code + repr(key).encode()).hexdigest()[:32]
    return Path(str(wp.config.kernel_cache_dir), FOLDER, f"{name}.json")
