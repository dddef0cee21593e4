"""The examples run as users run them."""

import math
import re
from pathlib import Path

import pytest

from tests.support.processes import run_interpreter, run_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def printed(tmp_path, name, *arguments, bars="nothing"):
    """What an example prints. It must succeed, draw, and say nothing else but progress bars with these names."""
    picture = tmp_path / "picture.png"
    # one thread: several that wait for each other are slow where tests run side by side, and results are the same
    finished = run_interpreter(EXAMPLES / name, *arguments, "--output", picture)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert picture.stat().st_size > 20_000
    said = [line for line in re.split(r"[\r\n]+", finished.stderr) if line.strip()]
    assert all(re.match(rf"({bars}):", line) for line in said), finished.stderr
    return finished.stdout


def test_training_charges_shrinks_the_errors(tmp_path):
    text = printed(tmp_path, "01_train_charges.py", "--quick", bars="melting|training|dynamics")
    number = r"\s+([\d.]+)"
    before, after = re.search(rf"force error \(RMS\){number}{number}", text).groups()
    assert float(after) < 0.7 * float(before)
    for name, constant in (("NaCl", 1.747564594633182), ("CsCl", 1.762674773070988)):
        assert abs(float(re.search(rf"{name}{number}", text)[1]) - constant) < 1e-9


@pytest.mark.later
def test_accuracy_is_what_was_asked_for(tmp_path):
    text = printed(tmp_path, "03_accuracy_against_cost.py", "--quick")
    rows = re.findall(r"^(Ewald|PME, order \d)\s+(\S+)\s+(\S+)\s+\S+$", text, re.MULTILINE)
    assert len(rows) > 20
    assert all(float(asked) / 30.0 < float(measured) < 3.0 * float(asked) for _, asked, measured in rows)


@pytest.mark.later
def test_fitting_finds_the_reference(tmp_path):
    text = printed(tmp_path, "02_fit_pair_potential.py")
    found = dict(re.findall(r"(depth|r0|steepness) = ([\d.]+)", text))
    for name, value in {"depth": 0.3429, "steepness": 1.3588, "r0": 2.866}.items():
        assert abs(float(found[name]) - value) < 2e-3 * value
    force_errors = [float(e) for e in re.findall(r"force error \(RMS\) ([\d.]+)", text)]
    assert force_errors[0] > 100.0 and force_errors[2] < 2.0  # Lennard-Jones cannot, Morse must


# -- examples that print tables of numbers ---------------------------------------------------------

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.])")


def numbers(text, label):
    """All numbers in the one line that begins with the label."""
    (line,) = re.findall(rf"^ *{re.escape(label)}(.*)$", text, re.MULTILINE)
    return [float(n) for n in NUMBER.findall(line)]


@pytest.mark.later
def test_own_kernel_has_the_physics_and_gradients_of_its_formula(tmp_path):
    text = printed(tmp_path, "04_own_warp_kernel.py")
    # known for the parameters of 1985: C11 = 151.4 and C12 = 76.4 GPa
    for label, known in {"energy (eV/atom)": -4.3364, "bulk modulus (GPa)": 101.4, "C11 - C12 (GPa)": 75.0}.items():
        by_kernel, by_hand = numbers(text, label)
        assert abs(by_kernel - known) < 1e-3 * abs(known)
        assert abs(by_kernel - by_hand) < 1e-4 * abs(known)
    lowest = {name: numbers(text, name + " ")[0] for name in ("sc", "bcc", "fcc")}
    assert -4.3 < lowest["sc"] < lowest["bcc"] < lowest["fcc"]
    assert numbers(text, "from finite differences")[0] < 1e-5
    assert numbers(text, "of the compiled graph")[0] < 1e-12


@pytest.mark.later
def test_neighbors_fill_the_shells_of_crystals(tmp_path):
    text = printed(tmp_path, "05_neighbor_lists.py", "--quick", bars="melting argon")
    shells = {
        "sc": [6, 12, 8, 6, 24],
        "bcc": [8, 6, 12, 24, 8],
        "fcc": [12, 6, 24, 12, 24],
        "hcp": [12, 6, 2, 18, 12],
        "diamond": [4, 12, 12, 6, 12],
    }
    for name, counts in shells.items():
        assert numbers(text, name + " ")[:5] == counts
    assert len(re.findall("equal$", text, re.MULTILINE)) == 4 and "DIFFERENT" not in text
    searches, calls = numbers(text, "searches")
    assert 1 < searches < 0.2 * calls
    assert numbers(text, "forces against a fresh list")[0] < 1e-12
    assert numbers(text, "total energy stays within")[0] < 20.0  # µeV for an atom, whose well is 10 meV deep
    height, where, _ = numbers(text, "first peak of g(r)")
    assert 2.5 < height < 3.3 and abs(where - 3.7) < 0.15


@pytest.mark.later  # `tests/values/test_ase_calculator.py` compares such constants with those of tables, too
def test_madelung_constants_to_many_digits(tmp_path):
    text = printed(tmp_path, "06_madelung_constants.py", "--quick")
    literature = {
        "rock salt": (1.7475645946332, 1e-12),
        "cesium chloride": (1.7626747730710, 1e-12),
        "zincblende": (1.6380550533888, 1e-12),
        "wurtzite": (1.64132162737, 1e-11),
        "fluorite": (2 * 2.51939, 1e-5),  # tables have six digits
        "perovskite": (49.51, 1e-2),
    }
    for name, (constant, digits) in literature.items():
        exact, known, difference, by_mesh = numbers(text, name)
        assert abs(exact - constant) < digits and abs(exact - known) < 1e-11 * constant
        assert abs(difference) < 1e-11 * constant
        assert abs(by_mesh / constant - 1) < max(2e-8, digits)
    bulk, layer = 1.747564594633182, 1.615542626712825
    first, second, third, fourth = numbers(text, "layers:")
    assert abs(first - 0.5 * (bulk + layer)) < 1e-9
    assert 1e-4 < second - bulk < 1e-3 and 1e-6 < bulk - third < 1e-4 and 1e-8 < fourth - bulk < 1e-6
    rows = [numbers(text, f"{vacuum} a ") for vacuum in (2, 4, 8)]
    assert max(row[2] for row in rows) - min(row[2] for row in rows) > 0.1  # without correction vacuum matters
    grown = math.pi / 2 - 2 / math.sqrt(3) * 1.762674773070988
    assert all(abs(row[5] - grown) < 2e-6 for row in rows)


@pytest.mark.later
def test_charges_minimise_the_energy_and_carry_gradients(tmp_path):
    text = printed(tmp_path, "07_charge_equilibration.py", bars="training")
    for name in ("quartz", "cristobalite", "stishovite"):
        silicon, spread, oxygen, _ = numbers(text, name)
        assert abs(silicon + 2 * oxygen) < 2e-4  # neutral
        assert 0.5 < silicon < 2.0 and spread > 1e-3
    assert numbers(text, "difference from a dense solver")[0] < 1e-7
    lowest, highest = numbers(text, "eigenvalues of A")[:2]
    assert 2.0 < lowest < highest < 100.0  # above the smaller J, as the Coulomb energy is not negative
    for loss in ("energy", "charges", "forces"):
        *_, by_positions, by_cell, by_chi, by_hardness = numbers(text.partition("training")[0], loss + " ")
        assert max(by_positions, by_cell, by_chi, by_hardness) < 1e-6
    trained = text.partition("training")[2]
    for name in ("χ(O) - χ(Si)", "J(Si)", "J(O)", "charges"):
        start, found, true = numbers(trained, name)
        assert abs(start - true) > 0.3 and abs(found - true) < 2e-6


@pytest.mark.later
def test_born_charges_are_those_of_clausius_and_mossotti(tmp_path):
    text = printed(tmp_path, "15_born_charges.py")
    for constant in ("5.20", "5.40", "5.64", "5.90", "6.20"):
        born, known_born, eps, known_eps, _ = numbers(text.partition("displacement")[0], constant)
        assert abs(born - known_born) < 1e-6 and abs(eps - known_eps) < 1e-6 and born > 1.3
    spread = {d: numbers(text.partition("displacement")[2], d + " ") for d in ("0.00", "0.10", "0.30")}
    assert all(abs(row[2]) < 1e-8 for row in spread.values())  # a shift of all atoms makes no dipole
    widths = [row[1] - row[0] for row in spread.values()]
    assert widths[0] < 1e-4 < 0.1 < widths[1] < widths[2]


@pytest.mark.later
def test_force_field_is_recovered_within_its_errors(tmp_path):
    text = printed(tmp_path, "08_force_field_parameters.py", "--quick", bars="Adam|Levenberg-Marquardt")
    for name, true in {"charge (e)": 2.0, "A (eV)": 821.6, "rho (Å)": 0.3242, "C (eV Å⁶)": 27.88}.items():
        start, _, found, error, _, off = numbers(text, name)
        assert abs(start / true - 1) > 0.1
        assert abs(off) < 4.0 and abs(found - true) < 4.5 * error + 1e-4
        assert 0.0 < error < 0.03 * true
    assert 0.9 < numbers(text, "residuals, RMS:")[0] < 1.1
    for name in ("energy (meV/atom)", "force (meV/Å)", "stress (MPa)"):
        noise, start, found = numbers(text, name)
        assert start > 10.0 * noise and found < 0.3 * noise


@pytest.mark.later
def test_molten_salt_has_the_structure_of_the_liquid(tmp_path):
    text = printed(tmp_path, "09_molten_salt.py", "--quick", bars="melting|cooling|sampling")
    assert abs(numbers(text, "temperature")[0] - 1148.0) < 100.0
    peaks = {pair: numbers(text, f"first peak of g(r), {pair}") for pair in ("Na-Na", "Na-Cl", "Cl-Cl")}
    assert 2.55 < peaks["Na-Cl"][1] < 2.8 and 3.2 < peaks["Na-Cl"][0] < 4.5
    assert all(3.7 < peaks[pair][1] < 4.4 and 1.3 < peaks[pair][0] < 2.2 for pair in ("Na-Na", "Cl-Cl"))
    assert 1.4 < numbers(text, "like ions are farther apart by")[0] < 1.65
    assert 4.3 < numbers(text, "neighbors of opposite charge")[0] < 5.8  # a crystal has 6
    assert 3.0 < numbers(text, "order of charges decays over")[0] < 12.0


@pytest.mark.later
def test_slope_and_fluctuations_give_the_same_bulk_modulus(tmp_path):
    text = printed(tmp_path, "17_equation_of_state.py", "--quick", bars=r" *\d+%.*|\d+step.*")
    assert abs(numbers(text, "conserved energy changes by")[0]) < 0.05  # of 5 meV thermal energy
    assert abs(numbers(text, "mean temperature")[0] - 60.0) < 2.0
    rows = [numbers(text, f"{pressure:.1f} ") for pressure in (0.0, 0.3, 0.7)]
    assert rows[0][0] > rows[1][0] > rows[2][0] > 32.0
    assert abs(numbers(text, "ratio of the two, mean:")[0] - 1.0) < 0.3


@pytest.mark.later
def test_perturbed_crystals_relax_to_close_packings(tmp_path):
    text = printed(tmp_path, "18_relax_crystals.py", "--quick", bars="relax")
    assert numbers(text, "converged") == [40]
    assert abs(numbers(text, "face-centred lattice constant")[0] - 3.61) < 0.01
    for name, packed in {"face-centred": 8, "hexagonal": 8, "body-centred": 1, "simple cubic": 3, "diamond": 3}.items():
        before, after, lowest, _, found, of = numbers(text.partition("close packings\n")[2], f"{name} ")
        assert before > after and abs(lowest + 3.531) < 2e-3 and of == 8 and found >= packed


@pytest.mark.later
def test_a_diameter_is_found_by_gradients_through_trajectories(tmp_path):
    text = printed(tmp_path, "19_fit_by_trajectories.py", "--quick", bars="fitting")
    by_gradient, by_difference = (numbers(text, label)[-1] for label in ("d(error)/d(sigma)", "by a finite difference"))
    assert abs(by_gradient) > 0.1 and abs(by_gradient - by_difference) < 1e-3 * abs(by_difference)
    start, found, true = numbers(text, "sigma: start, found, true")
    assert abs(start - true) > 0.15 and abs(found - true) < 0.04
    before, after = numbers(text, "error of g(r): start, fitted")
    assert after < 0.25 * before


@pytest.mark.later
def test_molten_salt_in_jax_and_derivatives_of_its_trajectory(tmp_path):
    pytest.importorskip("jax")
    text = printed(tmp_path, "13_jax_molten_salt.py", "--quick")
    assert abs(numbers(text, "temperature")[0] - 1148.0) < 120.0
    most, room = numbers(text, "neighbors of an ion, at most")
    assert 40 < most < room
    assert 2.5 < numbers(text, "first peak of g(r), Na-Cl")[1] < 2.8
    assert all(3.7 < numbers(text, f"first peak of g(r), {pair}")[1] < 4.5 for pair in ("Na-Na", "Cl-Cl"))
    for name in ("charge", "rho", "A"):
        by_grad, by_difference = numbers(text, name + " ")[:2]
        assert abs(by_grad) > 1e-3 and abs(by_grad - by_difference) < 2e-3 * abs(by_grad)
    assert numbers(text, "jax.jvp and jax.grad differ by")[0] < 1e-9


@pytest.mark.later
def test_force_field_in_jax_is_recovered(tmp_path):
    pytest.importorskip("optax")
    text = printed(tmp_path, "14_jax_force_field.py")
    for name, within in {"charge": 2e-3, "B": 0.02, "rho": 5e-3, "C": 0.15}.items():
        start, true, found = numbers(text.partition("parameter ")[2], name + " ")
        assert abs(start / true - 1) > 0.1 and abs(found / true - 1) < within
        by_grad, by_difference = numbers(text, f"by the step of {name}")
        assert abs(by_grad - by_difference) < 1e-6 * abs(by_grad)
    before, after = numbers(text, "force (meV/Å)")
    assert before > 500.0 and after < 10.0  # the data have 30


@pytest.mark.parametrize("name", ["13_jax_molten_salt.py", "14_jax_force_field.py"])
def test_examples_say_what_to_install_without_jax(name):
    code = (
        f"import runpy, sys; sys.modules['jax'] = None; runpy.run_path({str(EXAMPLES / name)!r}, run_name='__main__')"
    )
    finished = run_python(code)
    assert finished.returncode == 1 and finished.stderr.count("\n") == 1 and "pip install" in finished.stderr
