"""The examples run as users run them."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_training_charges_shrinks_the_errors(tmp_path):
    picture = tmp_path / "picture.png"
    command = [sys.executable, EXAMPLES / "01_train_charges.py", "--quick", "--output", picture]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert picture.stat().st_size > 20_000
    number = r"\s+([\d.]+)"
    before, after = re.search(rf"force error \(RMS\){number}{number}", finished.stdout).groups()
    assert float(after) < 0.7 * float(before)
    for name, constant in (("NaCl", 1.747564594633182), ("CsCl", 1.762674773070988)):
        assert abs(float(re.search(rf"{name}{number}", finished.stdout)[1]) - constant) < 1e-9
    # progress bars only: no banner, no build messages, no warnings
    said = [line for line in re.split(r"[\r\n]+", finished.stderr) if line.strip()]
    assert all(re.match(r"(melting|training|dynamics):", line) for line in said), finished.stderr


def test_accuracy_is_what_was_asked_for(tmp_path):
    picture = tmp_path / "accuracy.png"
    command = [sys.executable, EXAMPLES / "03_accuracy_against_cost.py", "--quick", "--output", picture]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert picture.stat().st_size > 20_000
    rows = re.findall(r"^(Ewald|PME, order \d)\s+(\S+)\s+(\S+)\s+\S+$", finished.stdout, re.MULTILINE)
    assert len(rows) > 20
    assert all(float(asked) / 30.0 < float(measured) < 3.0 * float(asked) for _, asked, measured in rows)
    assert not finished.stderr.strip(), finished.stderr


def test_fitting_finds_the_reference(tmp_path):
    picture = tmp_path / "fit.png"
    command = [sys.executable, EXAMPLES / "02_fit_pair_potential.py", "--output", picture]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert picture.stat().st_size > 20_000
    found = dict(re.findall(r"(depth|r0|steepness) = ([\d.]+)", finished.stdout))
    for name, value in {"depth": 0.3429, "steepness": 1.3588, "r0": 2.866}.items():
        assert abs(float(found[name]) - value) < 2e-3 * value
    force_errors = [float(e) for e in re.findall(r"force error \(RMS\) ([\d.]+)", finished.stdout)]
    assert force_errors[0] > 100.0 and force_errors[2] < 2.0  # Lennard-Jones cannot, Morse must
    assert not finished.stderr.strip(), finished.stderr
