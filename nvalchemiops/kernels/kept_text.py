"""A cache on disk for the text of kernels that takes long to derive.

Formulas are differentiated by a computer algebra system, whose import alone takes longer than the first sum of most
programs. The results are stored in Warp's kernel cache, and are as trustworthy as the compiled kernels there.
"""

import hashlib
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import warp as wp

from nvalchemiops._warp import ensure_warp

FOLDER = "nvalchemiops_texts"


def kept_text(sources: tuple[str, ...], key: Any, derive: Callable[[], Any]) -> Any:
    """The result of ``derive()``, from the cache if it was derived before.

    Parameters
    ----------
    sources : tuple of str
        Source files of the code that derives the result: if one of them changes, the result is derived again.
    key : object
        The result may depend on nothing but ``repr(key)``.
    derive : callable
        Returns lists, dictionaries and strings, which can be stored as JSON.
    """
    path = _path_of(sources, key)
    if path is None:
        return derive()
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):  # the file does not exist yet, or is incomplete
        found = derive()
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps(found).encode())
    except OSError:  # the cache cannot be written: derive again in the next process
        pass
    return found


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step, so that other processes never read an incomplete one.

    Whoever may read new files of this user may read it: `tempfile` would keep it to the user, and the compiled kernels
    beside it may be in the image of a container, or be shared.
    """
    part = path.with_name(f"{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            file.write(content)
        part.replace(path)
    except BaseException:  # a full disk: the part, of up to 5 MB, would stay
        part.unlink(missing_ok=True)
        raise


def _path_of(sources: tuple[str, ...], key: Any) -> Path | None:
    """The file of a result; None if the source files of the code that derives it cannot be read."""
    ensure_warp()
    try:
        code = b"".join(Path(source).read_bytes() for source in sources)
    except OSError:
        return None
    name = hashlib.sha256(code + repr(key).encode()).hexdigest()[:32]
    return Path(str(wp.config.kernel_cache_dir), FOLDER, f"{name}.json")
