"""Systems divided among ranks, in processes of their own: the cases are in the files that `ranks` names."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import FEW, SIZES, TIMEOUT, all_cases, run


def run_cases(folder, count, which, seconds=TIMEOUT):
    try:
        run("tests.distributed.ranks", folder, count, which, seconds=seconds)
        said = "ended early"
    except AssertionError as error:
        said = str(error)
    failed = [path.read_text() for path in folder.glob("failed_*")]
    # a rank that ends takes the others with it
    first = [text for text in failed if "is gone or late" not in text]
    assert not failed, "\n".join(first or failed)
    assert {path.name.removeprefix("passed_") for path in folder.glob("passed_*")} == set(all_cases()), said


def test_two_ranks_get_what_one_process_gets(tmp_path):
    assert set(all_cases()) >= FEW
    run_cases(tmp_path, 2, "few")


@pytest.mark.later
def test_what_ranks_get_equals_what_one_process_gets(tmp_path):
    run_cases(tmp_path, 4, "some", seconds=900)  # two minutes on a quiet machine, six beside other work


@pytest.mark.slow  # some minutes: seven ranks share the cores
def test_on_groups_of_all_sizes(tmp_path):
    run_cases(tmp_path, max(SIZES), "all", seconds=1800)


@pytest.mark.later
def test_a_rank_that_is_gone_is_named(tmp_path):
    said = run("tests.distributed.gone", tmp_path, 2, ignore=(1,))
    assert said[0].count("rank 1 is gone or late") == 2, said[0]  # of a sum, and of a calculator


@pytest.mark.slow  # a minute or two
def test_a_soak_with_random_faults(tmp_path):
    """500 steps: no rank waits for one that has failed, and what is computed after that is right."""
    said = run("tests.distributed.soak", tmp_path, 3, "500", seconds=1200)
    ends = [ast.literal_eval(re.search(r"\{.*\}", text)[0]) for text in said]
    assert all(end["new groups"] > 50 and end["failed"] > 10 and end["right"] > 300 for end in ends), ends
    assert len({sum(end.values()) for end in ends}) == 1


def printed(name, *options):
    """What an example prints under torchrun, with two ranks."""
    example = Path(__file__).parents[2] / "examples" / name
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    finished = subprocess.run(
        [*command, str(example), *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.later
def test_dynamics_on_ranks_by_one_command():
    """The example: a conserved quantity, and the trajectory of one process."""
    text = printed("20_argon_on_ranks.py")
    assert float(re.search(r"differ from those of one process by (\S+)", text)[1]) < 1e-11
    assert float(re.search(r"has changed by (\S+) meV/atom", text)[1]) < 0.02


@pytest.mark.later
def test_networks_on_ranks_by_one_command():
    """The examples: second derivatives by weights, and a run that goes on from a file on one process and on ranks."""
    text = printed("21_messages_on_ranks.py")
    errors = re.findall(r"differ by (\S+)", text)
    assert len(errors) == 3 and max(map(float, errors)) < 1e-11
    text = printed("22_charges_on_ranks.py")
    errors = re.findall(r"step 40, continued on .*: positions differ by (\S+) A", text)
    assert len(errors) == 2 and max(map(float, errors)) < 1e-10
    assert float(re.search(r"moved by up to (\S+) A", text)[1]) > 0.2


@pytest.mark.later
def test_salt_on_ranks_by_one_command():
    """The example under torchrun: energy is conserved, and the first step is that of one process."""
    text = printed("16_salt_on_ranks.py", "--quick", "--steps", "20")
    errors = re.search(r"energies differ by (\S+), forces by (\S+)", text).groups()
    assert max(map(float, errors)) < 1e-10
    assert "owns 864 ions" in text
    assert abs(float(re.search(r"changed by (\S+) meV", text)[1])) < 0.1  # of 200 that move between forms
    assert int(re.findall(r"divided (\d+) times", text)[-1]) > 1
