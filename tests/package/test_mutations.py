"""The list of mistakes that `python -m tests.mutations` makes fits the present files."""

from tests.mutations import stale_entries


def test_no_entry_is_stale():
    assert stale_entries() == []
