"""Modules for different systems in two processes, under all that makes processes equal: see `two_processes.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.two_processes import WAYS


@pytest.mark.later
def test_two_processes_with_different_systems(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.distributed.two_processes"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, said):
        assert process.returncode == 0, text
        assert [line for line in text.splitlines() if line in (*(way.__name__ for way in WAYS), "done")] == [
            *(way.__name__ for way in WAYS),
            "done",
        ]
