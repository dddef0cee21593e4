"""Progress bars by tqdm."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any


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
