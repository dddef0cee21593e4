"""Systems divided among ranks, in processes of their own: the cases are in `cases.py`."""

import pytest

from tests.distributed.cases import CASES
from tests.distributed.ranks import COUNT, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the ranks leave what they found, once for all tests of this file."""
    path = tmp_path_factory.mktemp("ranks")
    try:
        run("tests.distributed.ranks", path, COUNT)
    except AssertionError as error:
        path.joinpath("said").write_text(str(error))
    return path


def test_what_ranks_get_equals_what_one_process_gets(folder):
    failed = [path.read_text() for path in folder.glob("failed_*")]
    # a rank that ends takes the others with it
    first = [text for text in failed if "is gone or late" not in text]
    assert not failed, "\n".join(first or failed)
    passed = {path.name.removeprefix("passed_") for path in folder.glob("passed_*")}
    said = folder / "said"
    assert passed == set(CASES), said.read_text() if said.exists() else "ended early"


def test_a_rank_that_is_gone_is_named(tmp_path):
    said = run("tests.distributed.gone", tmp_path, 2, ignore=(1,))
    assert "rank 1 is gone or late" in said[0], said[0]
