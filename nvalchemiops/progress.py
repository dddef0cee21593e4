"""Progress bars by tqdm."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def on_terminal() -> bool:
    """Whether somebody sees a bar: standard error is a terminal. It may be None, or an object that only writes."""
    return bool(getattr(sys.stderr, "isatty", bool)())


@contextlib.contextmanager
def progress_bar(total: int, unit: str, shows: bool, name: str | None = None) -> Iterator[Callable[[int], None]]:
    """A context with a function of how many are done, which shows it if ``shows`` is set and tqdm is installed.

    Nothing is shown in a process without standard error.
    """
    tqdm: Any = None
    if shows and sys.stderr is not None:
        with contextlib.suppress(ImportError):
            tqdm = importlib.import_module("tqdm.auto").tqdm
    if tqdm is None:
        yield lambda done: None
        return
    with tqdm(total=total, unit=unit, desc=name) as bar:
        yield lambda done: bar.update(done - bar.n)
