"""Costs of the parts of an Ewald sum: where they come from, that they are kept, and that they change no accuracy."""

import json
import math
import runpy
import warnings
from pathlib import Path

import pytest
import torch

from nvalchemiops import cli
from nvalchemiops.interactions.electrostatics import costs, error_models
from nvalchemiops.interactions.electrostatics.costs import BUILT_IN, Costs
from nvalchemiops.torch.interactions.electrostatics import (
    estimate_ewald_parameters,
    ewald_summation,
    particle_mesh_ewald,
)
from nvalchemiops.torch.interactions.electrostatics.accuracy import tuning
from tests.support.processes import run_python
from tests.support.systems import crystal

MEASURED = Costs(3.0, 4.0, 0.25, 7.5, 6.0, 8.0, 1e5, 2e5)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """Where costs are kept, for this test."""
    file = tmp_path / "settings" / "costs.json"
    monkeypatch.setenv(costs.VARIABLE, str(file))
    return file


# -- the file -------------------------------------------------------------------------------------


def test_where_they_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv(costs.VARIABLE, "")
    assert costs.file() is None and costs.read() == {}
    with pytest.raises(OSError, match="NVALCHEMIOPS_COSTS is empty"):
        costs.write({"cpu": MEASURED})
    monkeypatch.delenv(costs.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert costs.file() == tmp_path / "nvalchemiops" / "costs.json"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert costs.file() == tmp_path / ".config" / "nvalchemiops" / "costs.json"

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(costs.Path, "home", no_home)
    assert costs.file() is None and costs.read() == {}
    with pytest.raises(OSError, match="no home folder"):
        costs.write({"cpu": MEASURED})


def test_one_device_beside_another(path):
    assert costs.read() == {}
    assert costs.write({"cuda": MEASURED}) == path
    other, third = MEASURED._replace(pair=1.0), MEASURED._replace(pair=0.1)
    costs.write({"cpu": other})
    costs.write({"cuda": third})
    assert costs.read() == {"cuda": third, "cpu": other}
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


GOOD = MEASURED._asdict()


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[1, 2]", "7", '{"cpu": 3}', json.dumps({"tpu": GOOD}), json.dumps({"cpu": {"pair": 1.0}})),
        json.dumps({"cpu": {"pair": 8.0, "k_vectors": 1.3, "mesh": 15.0}}),  # of an older release
        *(json.dumps({"cpu": GOOD | {"mesh": wrong}}) for wrong in (0.0, -1.0, math.nan, math.inf, None, "fast")),
        None,  # a folder
    ],
)
def test_a_file_that_cannot_be_used_is_ignored_with_one_warning(content, path):
    path.parent.mkdir()
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
    with pytest.warns(RuntimeWarning, match="nvalchemiops tune") as caught:
        assert costs.read() == {}
    assert len(caught) == 1
    if content is not None:
        costs.write({"cpu": MEASURED})
        assert costs.read() == {"cpu": MEASURED}


def test_the_next_process_uses_them(path):
    costs.write({"cpu": MEASURED})
    code = "from nvalchemiops.interactions.electrostatics import error_models as e; print(*e.COSTS['cpu'])"
    assert run_python(code).stdout.split() == [str(number) for number in MEASURED]
    path.write_text("spoilt")
    run = run_python(code)
    assert run.stdout.split() == [str(number) for number in BUILT_IN["cpu"]]
    assert run.stderr.count("RuntimeWarning") == 1


# -- the command ----------------------------------------------------------------------------------


def test_the_command_measures_shows_and_forgets(path, monkeypatch, capsys):
    monkeypatch.setattr(tuning, "measure", lambda device: MEASURED)
    assert cli.main(["tune", "--show"]) == 0
    built_in = capsys.readouterr().out
    assert built_in.count("built in") == len(BUILT_IN) and "inf" not in built_in
    assert cli.main(["tune"]) == 0
    assert str(path) in capsys.readouterr().out and costs.read() == {"cpu": MEASURED}
    assert cli.main(["tune", "--show"]) == 0
    shown = capsys.readouterr().out
    assert "pair 3 ns, its search 4 ns, eight k-vectors 0.25 ns, mesh point 7.5 ns, column of a spline 6 ns" in shown
    assert "of one above order 8 8 ns" in shown
    assert f"call with k-vectors 1e+05 ns, with a mesh 2e+05 ns  from {path}" in shown
    assert cli.main(["tune", "--reset"]) == 0 and cli.main(["tune", "--reset"]) == 0
    assert not path.exists() and costs.read() == {}


@pytest.mark.parametrize("device", ["tpu", "meta", "nonsense:3"])
def test_there_is_no_such_device(device, path, capsys):
    assert cli.main(["tune", "--device", device]) == 2
    assert "nvalchemiops tune: " in capsys.readouterr().err and not path.exists()


def test_costs_that_cannot_be_kept_are_printed(monkeypatch, capsys):
    monkeypatch.setenv(costs.VARIABLE, "")
    monkeypatch.setattr(tuning, "measure", lambda device: MEASURED)
    assert cli.main(["tune"]) == 1
    assert "pair 3 ns" in capsys.readouterr().out


def test_a_place_where_nothing_can_be_is_told(tmp_path, monkeypatch, capsys):
    """Of the costs, and of the other file that a command writes."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(costs.VARIABLE, str(tmp_path / "file" / "costs.json"))
    assert cli.main(["tune", "--reset"]) == 1 and "nvalchemiops tune: [Errno" in capsys.readouterr().err
    assert cli.main(["stand-in", "--folder", str(tmp_path / "file")]) == 2
    assert "nvalchemiops stand-in: [Errno" in capsys.readouterr().err


# -- the numbers ----------------------------------------------------------------------------------


def test_costs_of_a_small_crystal():
    found = tuning.measure(torch.device("cpu"), seconds=0.0, side=4, points=8)
    assert all(0.0 < number < math.inf for number in found)


def test_the_model_is_a_roofline():
    model = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "scale_model.py"))
    card, modelled = model["H100"], model["modelled"]
    slower = card._replace(bandwidth=card.bandwidth / 2.0, operations=card.operations / 2.0)
    assert modelled(slower) == pytest.approx(tuple(2.0 * number for number in modelled(card)))
    # the pairs' list and the mesh go through the memory, phases through the units
    no_memory = modelled(card._replace(bandwidth=1e30))
    assert no_memory.k_vectors == modelled(card).k_vectors and no_memory.mesh < 0.5 * modelled(card).mesh


@pytest.mark.parametrize("call", [ewald_summation, particle_mesh_ewald])
def test_any_costs_give_the_same_accuracy(call, monkeypatch):
    """They move work between the parts of a sum; the error stays at the accuracy asked for."""
    system = crystal("rocksalt", 5.64, 3, 0.2)
    arguments = system[:3]
    exact = ewald_summation(*arguments, accuracy=1e-10, compute_forces=True)[1]
    alphas = []
    for pair in (0.4, 8.0, 160.0):
        monkeypatch.setitem(error_models.COSTS, "cpu", BUILT_IN["cpu"]._replace(pair=pair))
        alphas.append(float(estimate_ewald_parameters(system.positions, system.cell).alpha))
        forces = call(*arguments, accuracy=1e-5, compute_forces=True)[1]
        assert (forces - exact).norm() / exact.norm() < 2e-5  # of which errors are estimates
    assert alphas[0] < 0.8 * alphas[1] < 0.8 * 0.8 * alphas[2]


def test_nothing_is_read_for_tests():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert costs.read() == {} and costs.COSTS == BUILT_IN
