"""Progress bars by tqdm."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


def on_terminal() -> bool:
    """Whether somebody sees a bar: standard error is a terminal. A process may have none at all."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def progress_bar(total: int, unit: str, shows: bool, name: str | None = None) -> Iterator[Callable[[int], None]]:
    """A context with a function of how many are done, which shows it if ``shows`` is set and tqdm is installed."""
    tqdm: Any = None
    if shows:
        with contextlib.suppress(ImportError):
            tqdm = importlib.import_module("tqdm.auto").tqdm
    if tqdm is None:
        yield lambda done: None
        return
    with tqdm(total=total, unit=unit, desc=name) as bar:
        yield lambda done: bar.update(done - bar.n)
