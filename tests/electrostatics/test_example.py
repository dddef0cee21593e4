"""The examples run as users run them."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


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
