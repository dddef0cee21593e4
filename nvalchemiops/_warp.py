"""Starting Warp: safely for a library, and quietly for a command.

`ensure_warp` is called before the first kernel. It leaves the user's ``wp.config`` unchanged, unless Warp could not run
at all. `quiet_warp` is for processes that this library starts (the commands, the demo). It turns Warp's messages off,
so library code must not call it.
"""

import contextlib
import os
import stat
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import warp as wp

import nvalchemiops.compat.installation  # noqa: F401  # also here, in case another `__init__.py` has replaced ours
from nvalchemiops import __version__
from nvalchemiops.locks import fork_safe

NO_DRIVER_MESSAGE = b"Could not find or load the NVIDIA CUDA driver"

_lock = fork_safe(threading.RLock())
_ready = False


def ensure_warp() -> None:
    """Initialise Warp and make sure that its kernel cache can be written. Further calls cost little.

    If the default cache cannot be written (a read-only or missing home), a folder below the system's temporary folder
    is used instead, with a warning. Its name contains the versions of this library and of Warp, and only the current
    user can write to it. A location chosen by the user (``WARP_CACHE_PATH`` or ``wp.config.kernel_cache_dir``) is never
    replaced: errors of Warp about it are raised. It may be read-only, if its kernels were compiled in advance.

    Raises
    ------
    OSError
        If the location that the user chose cannot be created.
    """
    if _ready:
        return
    with _lock:
        if not _ready:
            _start()


def _start() -> None:
    global _ready
    # after a wp.init() elsewhere the setting holds Warp's own choice, not one of the user
    setting = wp.config.kernel_cache_dir
    chosen_by_user = "WARP_CACHE_PATH" in os.environ or setting not in (None, str(_default_cache()))
    if chosen_by_user:
        wp.init()
    elif not _default_cache().is_absolute():
        # without a home Warp would take a folder below the working directory
        _fall_back("there is no home directory")
    else:
        try:
            wp.init()
            _check_writable(wp.config.kernel_cache_dir)
        except OSError as error:
            _fall_back(f"{error.filename or wp.config.kernel_cache_dir}: {error.strerror or error}")
    _ready = True


def _default_cache() -> Path:
    """The default folder of Warp's kernels on Linux."""
    base = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    return Path(base) / "warp" / wp.config.version


def _check_writable(folder: str | None) -> None:
    # by writing a file: permission bits say nothing about read-only mounts and quotas
    with tempfile.TemporaryFile(dir=folder):
        pass


def _fall_back(reason: str) -> None:
    base = _private_temporary_folder()
    folder = base / wp.config.version
    folder.mkdir(exist_ok=True)
    wp.config.kernel_cache_dir = str(base)  # Warp appends its version when it starts ...
    with without_driver_message():  # Warp may be starting for the second time, after it has printed this line
        wp.init()
    wp.config.kernel_cache_dir = str(folder)  # ... but not if it had started before
    warnings.warn(
        f"Warp's kernel cache cannot be written ({reason}); using {folder} instead. "
        "Set WARP_CACHE_PATH to a folder of your choice.",
        RuntimeWarning,
        stacklevel=4,
    )


def _private_temporary_folder() -> Path:
    """A folder that processes of this user share, and into which no other user can put compiled code."""
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    name = f"nvalchemiops-{__version__}-warp-{wp.config.version}-{user}"
    folder = Path(tempfile.gettempdir()) / name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if hasattr(os, "getuid"):
        status = folder.lstat()
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
        if not ours:
            return Path(tempfile.mkdtemp(prefix=f"{name}-"))
    return folder


def quiet_warp() -> None:
    """Initialise Warp without its banner, build messages and missing-driver line. For our own processes only.

    Warnings and errors are still printed.
    """
    wp.config.log_level = max(wp.config.log_level, wp.LOG_WARNING)
    with without_driver_message():
        ensure_warp()


@contextlib.contextmanager
def without_driver_message() -> Iterator[None]:
    """Drop the line about a missing CUDA driver from standard error, and nothing else.

    Warp prints it from native code, past ``sys.stderr`` and its own log level. So the file descriptor is redirected
    inside, and everything else is written afterwards.
    """
    try:
        sys.stderr.flush()
        original = os.dup(2)
    except (AttributeError, OSError):  # a process without standard error, where `sys.stderr` is None
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
            caught.seek(0)
            for line in caught:
                if NO_DRIVER_MESSAGE not in line:
                    os.write(2, line)
