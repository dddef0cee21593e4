"""Systems divided among ranks, in processes of their own: the cases are in `cases.py`."""

import pytest

from tests.distributed.cases import CASES
from tests.distributed.ranks import SIZES, run


def run_cases(folder, count, which):
    try:
        run("tests.distributed.ranks", folder, count, which)
        said = "ended early"
    except AssertionError as error:
        said = str(error)
    failed = [path.read_text() for path in folder.glob("failed_*")]
    # a rank that ends takes the others with it
    first = [text for text in failed if "is gone or late" not in text]
    assert not failed, "\n".join(first or failed)
    assert {path.name.removeprefix("passed_") for path in folder.glob("passed_*")} == set(CASES), said


def test_what_ranks_get_equals_what_one_process_gets(tmp_path):
    run_cases(tmp_path, 4, "some")


@pytest.mark.slow  # three minutes
def test_on_groups_of_all_sizes(tmp_path):
    run_cases(tmp_path, max(SIZES), "all")


def test_a_rank_that_is_gone_is_named(tmp_path):
    said = run("tests.distributed.gone", tmp_path, 2, ignore=(1,))
    assert "rank 1 is gone or late" in said[0], said[0]
