"""A fixture that campaigns of hypothesis share."""

import faulthandler
from collections.abc import Iterator

import pytest

from tests.robustness.campaigns import LONG, PATIENCE


@pytest.fixture
def no_hanging() -> Iterator[None]:
    """An example that hangs in a kernel cannot be interrupted; the whole process can."""
    faulthandler.dump_traceback_later(PATIENCE * (30.0 if LONG else 1.0), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
