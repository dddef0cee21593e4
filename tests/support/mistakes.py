"""Many calls with a mistake in one test: to collect and report each of thousands takes longer than to make it."""

import re
from collections.abc import Callable, Iterable
from typing import Any


def assert_named(mistakes: Iterable[tuple[str, Callable[[], Any], type[Exception], str]]) -> None:
    """Each call, which has a name, raises such an error, and its text has the pattern; all that do not are told."""
    wrong, number = [], 0
    for name, call, error, pattern in mistakes:
        number += 1
        try:
            call()
        except Exception as found:
            text = "\n".join([str(found), *getattr(found, "__notes__", ())])
            if not isinstance(found, error) or not re.search(pattern, text):
                wrong.append(f"{name}: {found!r}, not {error.__name__} with {pattern!r}")
        else:
            wrong.append(f"{name}: no error, not {error.__name__} with {pattern!r}")
    assert number, "there is no such call"
    assert not wrong, "\n".join(wrong)
