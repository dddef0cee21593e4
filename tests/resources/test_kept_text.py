"""Texts of kernels that are kept on disk: derived once, again after any fault, and never another's."""

import json
import os

import pytest
import warp as wp

from nvalchemiops._warp import ensure_warp
from nvalchemiops.interactions.pair import derivatives
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.kernels import kept_text
from tests.support.processes import output_of, run_interpreter

PROGRAM = """
import sys, torch
from nvalchemiops.torch.interactions.electrostatics import ewald_summation
from nvalchemiops.torch.interactions.pair import lennard_jones
for dtype in (torch.float64, torch.float32):
    x = torch.rand(8, 3, dtype=dtype, generator=torch.Generator().manual_seed(0)) * 6
    cell = 6.0 * torch.eye(3, dtype=dtype)
    lennard_jones(3.0)(x, cell, sigma=1.0, epsilon=1.0, compute_forces=True)
    ewald_summation(x, torch.ones(8, dtype=dtype), cell, compute_forces=True)
print("sympy" in sys.modules)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    ensure_warp()
    monkeypatch.setattr(wp.config, "kernel_cache_dir", str(tmp_path))
    return tmp_path / kept_text.FOLDER


@pytest.mark.later
def test_a_second_process_does_not_import_sympy(tmp_path):
    """Its import takes longer than the sum."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    output_of(run_interpreter(script))  # texts that no test has needed before
    assert output_of(run_interpreter(script)).split()[-1] == "False"


def test_a_text_is_derived_once_for_each_key_and_each_state_of_the_code(folder, tmp_path):
    code, derived = tmp_path / "code.py", []
    code.write_text("one")

    def derive(key):
        return kept_text.kept_text((str(code),), key, lambda: derived.append(key) or [key, len(derived)])

    assert [derive("a"), derive("b"), derive("a")] == [["a", 1], ["b", 2], ["a", 1]]
    code.write_text("two")
    assert derive("a") == ["a", 3]
    for path in folder.iterdir():
        path.write_text(path.read_text()[:-1])  # cut off
    assert derive("b") == ["b", 4] and derive("b") == ["b", 4]
    code.unlink()
    assert derive("b") == ["b", 5] and derive("b") == ["b", 6]


def test_a_folder_that_cannot_be_written(folder):
    folder.write_text("a file is here")
    assert kept_text.kept_text((__file__,), "a", lambda: ["text"]) == ["text"]


def test_no_part_of_a_text_stays_on_a_full_disk(folder, monkeypatch):
    kept_text.kept_text((__file__,), "a", lambda: ["text"])
    before = list(folder.iterdir())

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert kept_text.kept_text((__file__,), "b", lambda: ["other"]) == ["other"]
    assert list(folder.iterdir()) == before


def test_whoever_may_read_compiled_kernels_may_read_a_text(folder):
    """As in a container's image, which root has built: a user would derive the text, in each process."""
    kept_text.kept_text((__file__,), "a", lambda: ["text"])
    (path,) = folder.iterdir()
    (other := folder / "other").touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_a_program_is_the_same_from_its_file():
    request = derivatives.Request(Formula.read(Formula("q1*q2*exp(-k*r)/r", ("q",), ("k",), ()).text), ("r",), "wrg")
    program = derivatives.printed(derivatives.derivatives(request))
    assert derivatives.Program(*json.loads(json.dumps(program))) == program
    assert derivatives.program(request) == program
