"""Runs: records, hooks, trajectories, restarts, and arguments that are refused."""

import functools
import sys
from typing import NamedTuple

import ase.build
import ase.io
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from nvalchemiops.torch.distributed import divide
from nvalchemiops.torch.dynamics import (
    Constraints,
    Evaluation,
    FromEnergies,
    SumOfTerms,
    csvr,
    langevin,
    load_state,
    nose_hoover,
    nph,
    npt,
    nve,
    relax,
    save_state,
    simulate,
    to_ase,
)
from nvalchemiops.torch.systems import System

from .systems import argon, crystal, few_atoms, float64, ideal_gas, joined, run, springs, wells

KT = 0.006


def systems():
    return System.from_ase([crystal((2, 2, 2), seed=1), crystal((3, 2, 2), seed=2)])


def test_records_are_those_of_the_states():
    integrator, states = npt(0.2, KT, 1e-4), []
    names = ("potential_energy", "kinetic_energy", "temperature", "conserved", "volume", "pressure", "pressure_tensor")
    found = simulate(systems(), argon(skin=1.0), integrator, 7, record=names, every=3, hooks=[states.append], seed=2)
    assert found.steps == [0, 3, 6] and len(states) == 7 and found.state.step == 7
    for n, state in ((1, states[2]), (2, states[5])):
        assert torch.equal(found.records["conserved"][n], integrator.conserved(state))
        assert torch.equal(found.records["potential_energy"][n], state.evaluation.energies)
        assert torch.equal(found.records["volume"][n], torch.linalg.det(state.system.cell))
        degrees = torch.tensor([93.0, 141.0], dtype=float64)
        kinetic = found.records["kinetic_energy"][n]
        assert (found.records["temperature"][n] - 2.0 * kinetic / degrees).abs().max() < 1e-15
        traces = state.evaluation.stress.diagonal(dim1=1, dim2=2).sum(1)
        pressures = (2.0 * kinetic / state.volumes - traces) / 3.0
        assert (found.records["pressure"][n] - pressures).abs().max() < 1e-15
        motion = [(m[:, None, None] * v[:, :, None] * v[:, None, :]).sum(0) for m, v in parts_of(state)]
        tensors = torch.stack(motion) / state.volumes[:, None, None] - state.evaluation.stress
        assert (found.records["pressure_tensor"][n] - tensors).abs().max() < 1e-15
    record = {"first": lambda state: state.system.positions[0], "P": "pressure"}
    own = simulate(states[-1], argon(), integrator, 1, record=record)
    assert own.records["first"].shape == (2, 3) and own.steps == [7, 8]
    assert torch.equal(own.records["P"][0], states[-1].pressures)


def parts_of(state):
    """Masses and velocities of each system."""
    return [(state.masses[own], state.velocities[own]) for own in (state.system.batch_idx == n for n in (0, 1))]


@pytest.mark.parametrize("make", (langevin, csvr, nose_hoover))
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(make, tmp_path):
    """Forces have other last bits with another list, so here lists have no skin."""
    integrator = make(0.2, KT)
    whole = simulate(systems(), argon(skin=0.0), integrator, 10, seed=5).state
    half = simulate(systems(), argon(skin=0.0), integrator, 4, seed=5).state
    torch.save(half, tmp_path / "state.pt")
    again = torch.load(tmp_path / "state.pt", weights_only=False)
    rest = simulate(again, argon(skin=0.0), integrator, 6).state
    assert torch.equal(whole.system.positions, rest.system.positions)
    assert torch.equal(whole.velocities, rest.velocities)


def test_a_state_is_loaded_where_it_is_asked_for(tmp_path):
    """All of its tensors. No machine lacks the device without memory."""
    state = nve(0.2).start(systems(), argon())
    for number, saved in enumerate((state, state.system)):
        save_state(tmp_path / f"{number}.pt", saved)
        for asked, device in ((None, "cpu"), ("meta", "meta"), (torch.device("meta"), "meta")):
            loaded = load_state(tmp_path / f"{number}.pt", device=asked)
            assert type(loaded) is type(saved)
            found = {t.device.type for t in tree_leaves(loaded) if isinstance(t, torch.Tensor)}
            assert found == {device}
    other = tmp_path / "older.pt"
    torch.save(torch.load(tmp_path / "0.pt"), other, _use_new_zipfile_serialization=False)
    assert torch.equal(load_state(other).velocities, state.velocities)
    older, newer = other.read_bytes(), (tmp_path / "0.pt").read_bytes()
    damaged = [older[:k] for k in (40, 400, 3000, len(older) - 8)]
    damaged += [whole.replace(b"positions", b"pos\xf6tions") for whole in (older, newer)]
    damaged += [whole.replace(b"state", b"stake") for whole in (older, newer)]
    for text in (b"header", b"step energy", b"", *damaged):  # torch reads letters as instructions to unpickle
        other.write_bytes(text)
        with pytest.raises(ValueError, match="`path`"):
            load_state(other)


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, True)])
def test_rates_of_the_same_cells_go_on_bit_for_bit(mask):
    """The mean of three equal numbers may be another number."""
    gas, rates = joined([few_atoms(1)[0]] * 200), torch.rand(200, 1, dtype=float64).expand(200, 3)
    integrator = npt(0.1, KT, 1e-4, mask=mask)
    state = integrator.start(gas, ideal_gas, masses=torch.ones(200, dtype=float64))
    state = state.having(strain_rate=rates * state.extra["axes"])
    again = integrator.resume(state, ideal_gas).extra
    assert all(torch.equal(value, again[name]) for name, value in state.extra.items())


def test_parameters_are_copied():
    temperatures = torch.tensor([KT, 2.0 * KT], dtype=float64)
    integrator, model = langevin(0.2, temperatures), argon()
    for state in (integrator.start(systems(), model), integrator.resume(nve(0.2).start(systems(), model), model)):
        state.extra["temperature"].mul_(0.5)
        again = integrator.resume(state, model)  # which looks whether the integrator sets another value than before
        assert torch.equal(again.extra["temperature"][:, 0], 0.5 * temperatures)
    assert temperatures.tolist() == [KT, 2.0 * KT]


def test_a_state_goes_on_with_another_integrator():
    """Its parameters are those of the new one, variables that fit are kept, and forces are of the new model."""
    model = argon(skin=0.0)
    first = simulate(systems(), model, npt(0.2, KT, 1e-4, cell="axes"), 5, seed=5).state
    stiff = SumOfTerms(model, model)
    for integrator in (npt(0.1, KT, 2e-4, mask=(True, True, False)), npt(0.1, KT, 2e-4, cell="full"), nve(0.1)):
        state = integrator.resume(first, stiff)
        assert state.extra["dt"].tolist() == [[0.1], [0.1]] and state.step == 5
        assert (state.evaluation.forces - 2.0 * first.evaluation.forces).abs().max() < 1e-12
        again = simulate(first, stiff, integrator, 3).state
        assert torch.equal(again.system.positions, run(integrator, state, stiff, 3).system.positions)
        if "strain_rate" in integrator.start(systems(), model).extra:
            assert state.extra["pressure"].tolist() == [[2e-4], [2e-4]]
            rate, before = state.extra["strain_rate"], first.extra["strain_rate"]
            kept = rate.ndim == 2
            assert bool(rate.any()) == kept and torch.equal(
                state.extra["chain_velocities"], first.extra["chain_velocities"]
            )
            if kept:
                mean = before[:, :2].mean(1)
                assert (rate - torch.stack([mean, mean, 0.0 * mean], 1)).abs().max() < 1e-16
    cold = first.having(temperature=first.extra["temperature"] * 0.5)
    assert torch.equal(npt(0.2, KT, 1e-4).resume(cold, model).extra["temperature"], cold.extra["temperature"])
    assert (npt(0.2, 0.7 * KT, 1e-4).resume(cold, model).extra["temperature"] == 0.7 * KT).all()
    moving = simulate(systems(), model, nve(0.2), 1, velocities=torch.randn_like(systems().positions)).state
    assert torch.equal(nph(0.2, 1e-4).resume(moving, model).extra["temperature"][:, 0], moving.temperatures)
    with pytest.raises(ValueError, match="`model` gave no stress"):
        npt(0.2, KT, 1e-4).resume(first, lambda system: model(system)._replace(stress=None))


def test_a_hook_may_replace_the_state_and_its_parameters():
    def heat(state):
        return state.having(temperature=state.extra["temperature"] * 1.5)

    found = simulate(systems(), argon(), langevin(0.2, KT, friction=1.0), 5, hooks=[heat], seed=1)
    assert (found.state.extra["temperature"] / (KT * 1.5**5) - 1.0).abs().max() < 1e-14
    assert found.records["temperature"][-1].min() > 2.0 * KT


@pytest.mark.parametrize("options", ({}, {"gradients": True}, {"checkpoint_every": 2}))
def test_a_run_goes_on_with_the_forces_of_a_system_that_a_hook_has_changed(options):
    """As if it had ended and begun there: moved atoms, other charges; not if all tensors are the same."""
    calls = []

    def energy(system):
        calls.append(system)
        return (system.charges * system.positions.square().sum(1)).sum()[None]

    def hook(state):
        if state.step == 2:
            return state._replace(system=state.system._replace(positions=1.5 * state.system.positions))
        charges = 2.0 * state.system.charges if state.step == 3 else state.system.charges
        return state._replace(system=state.system._replace(charges=charges))

    system, model = GAS._replace(charges=torch.ones(4, dtype=float64)), FromEnergies(energy)
    found = simulate(system, model, nve(0.1), 4, hooks=hook, record="conserved", **ONE, **options)
    # a checkpoint looks for parameters in one more step
    assert options.get("checkpoint_every") or len(calls) == 1 + 4 + 2
    state = simulate(system, model, nve(0.1), 2, **ONE).state
    for record in found.records["conserved"][2:4]:
        state = nve(0.1).resume(hook(state), model)
        assert torch.equal(record, nve(0.1).conserved(state))
        state = nve(0.1).step(state, model)
    assert torch.equal(found.state.system.positions, state.system.positions)
    assert torch.equal(found.state.velocities, state.velocities)


def test_pressures_of_rigid_bonds_are_those_of_velocities_that_a_hook_has_changed():
    """Also if the hook has called the model by itself; a hook that looks on changes no bit."""
    integrator = nve(0.1).constrained(Constraints([[0, 1], [2, 3]]))
    model, options = wells(), ONE | {"velocities": torch.rand(4, 3, dtype=float64)}
    states, found = [], []
    hooks = (
        lambda state: states.append(state),
        lambda state: state._replace(velocities=1.5 * state.velocities),
        lambda state: integrator.evaluated(state.at(state.system.positions + 0.1), model),
    )
    for hook in hooks:
        run_ = simulate(GAS, model, integrator, 1, hooks=hook, record=("pressure", "pressure_tensor"), **options)
        found.append(run_.records)
    assert torch.equal(found[0]["pressure"][1], states[0].pressures)
    for records, hook in zip(found[1:], hooks[1:]):
        fresh = integrator.resume(hook(states[0]), model)
        assert torch.equal(records["pressure"][1], fresh.pressures)
        assert torch.equal(records["pressure_tensor"][1], fresh.pressure_tensors)


@pytest.mark.parametrize("options", ({}, {"checkpoint_every": 2}))
def test_hooks_alone_and_of_an_iterator_are_called_after_each_step(options):
    def calls(form):
        states = []
        simulate(GAS, ideal_gas, nve(0.1), 3, hooks=form(states.append), **ONE, **options)
        return len(states)

    assert calls(lambda hook: hook) == 3
    assert calls(lambda hook: iter([hook, hook])) == calls(lambda hook: (hook, hook)) == 6
    states = []
    relax(GAS, springs(1.0), fmax=9.0, hooks=states.append)
    assert [state.number for state in states] == [0]


@pytest.mark.parametrize("make", (lambda kt: langevin(0.2, kt, friction=0.5), lambda kt: npt(0.2, kt, 1e-5)))
def test_hooks_give_parameters_in_any_form(make):
    """Of three systems: a row (3,) would be broadcast to the three components of velocities."""
    system, values = System.from_ase([crystal(1, seed=n) for n in range(3)]), [0.002, 0.004, 0.006]
    row = torch.tensor(values, dtype=float64)
    found = [
        simulate(system, argon(), make(KT), 3, hooks=[lambda state, form=form: state.having(temperature=form)]).state
        for form in (row[:, None], row, row.float(), 0.004, row[1])
    ]
    for state in found[1:3]:
        assert (state.velocities - found[0].velocities).abs().max() < 1e-7
    assert torch.equal(found[0].velocities, found[1].velocities) and torch.equal(*(s.velocities for s in found[3:]))
    assert torch.equal(found[3].velocities[4:8], found[0].velocities[4:8]) and found[3].extra["temperature"].shape == (
        3,
        1,
    )
    with pytest.raises(ValueError, match="`temperature` must be a number or have shape"):
        found[0].having(temperature=torch.ones(2))
    with pytest.raises(ValueError, match="no 'temperture'; did you mean 'temperature'"):
        found[0].having(temperture=0.004)


def test_simulations_under_vmap():
    start = System.from_ase(crystal(1))

    def harmonic(system):
        return Evaluation(0.5 * system.positions.square().sum().reshape(1), -system.positions)

    def energy(positions):
        system = start._replace(positions=positions, cell=None, pbc=None)
        return simulate(system, harmonic, nve(0.1), 2).records["potential_energy"]

    several = torch.stack([start.positions, 2.0 * start.positions])
    expected = torch.stack([energy(positions) for positions in several])
    torch.testing.assert_close(torch.func.vmap(energy)(several), expected)


@pytest.mark.parametrize("suffix", ("xyz", "traj", "xyz.gz"))
def test_trajectories_are_read_by_ase(suffix, tmp_path):
    paths = [tmp_path / f"{n}.{suffix}" for n in range(2)]
    for path in paths:
        path.write_text("left over from an earlier run")
    masses = torch.full((80,), 39.9, dtype=float64)
    masses[3] = torch.inf
    found = simulate(systems(), argon(), nve(0.2), 4, trajectory=paths, trajectory_every=2, masses=masses)
    for n, path in enumerate(paths):
        frames = ase.io.read(path, ":")
        state, of = found.state, found.state.system.batch_idx == n
        assert len(frames) == 3 and len(frames[0]) == (32, 48)[n]
        last = frames[-1]
        assert abs(last.positions - state.system.positions[of].numpy()).max() < 1e-7
        assert abs(last.get_velocities() - state.velocities[of].numpy()).max() < 1e-7
        assert abs(last.get_potential_energy() - state.evaluation.energies[n].item()) < 1e-7
        assert abs(last.get_stress(voigt=False) - state.evaluation.stress[n].numpy()).max() < 1e-7
    options = {"trajectory_every": 2, "append_trajectory": True}
    paths[1].unlink()  # a file that does not exist begins with the state at the start
    simulate(found.state, argon(), nve(0.2), 4, trajectory=paths, **options)
    steps = [[frame.info["step"] for frame in ase.io.read(path, ":")] for path in paths]
    assert steps == [[0, 2, 4, 6, 8], [4, 6, 8]]
    with pytest.raises(ValueError, match=r"`trajectory` must have a path for each of 2"):
        simulate(systems(), argon(), nve(0.2), 1, trajectory=paths[0])


def test_a_model_may_leave_a_graph_and_reuse_its_memory():
    """Neither is kept: a run that goes on would keep the graphs of all steps, and records would be the last energy."""
    system, masses, velocities = few_atoms(2)
    weight = torch.tensor(0.3, dtype=float64, requires_grad=True)
    energies, forces = torch.zeros(1, dtype=float64), torch.zeros_like(system.positions)

    def compute(system, reuses):
        with torch.enable_grad():
            positions = system.positions.detach().requires_grad_()
            energy = 0.5 * weight * positions.square().sum().reshape(1)
            (slope,) = torch.autograd.grad(energy, positions)
        energies.copy_(energy.detach())
        forces.copy_(-slope)
        return Evaluation(energies if reuses else energy, forces if reuses else -slope)

    found = []
    for reuses in (False, True):
        model = functools.partial(compute, reuses=reuses)
        first = simulate(system, model, nve(0.1), 3, masses=masses, velocities=velocities)
        again = simulate(first.state, model, nve(0.1), 3, record="potential_energy")
        found.append(torch.cat([first.records["potential_energy"], again.records["potential_energy"]]))
        for part in (first, again):
            tensors = [*part.records.values(), *part.state.evaluation[:2], part.state.velocities]
            assert not any(tensor.requires_grad for tensor in tensors)
    assert torch.equal(*found) and len(set(found[0].flatten().tolist())) == 7


def test_progress_is_shown(capsys):
    system, masses, _ = few_atoms()
    for shows in (False, True):
        simulate(system, wells(), nve(0.1), 3, masses=masses, progress=shows)
        assert ("3/3" in capsys.readouterr().err) == shows


def test_no_systems_at_all():
    nothing = System(torch.zeros(0, 3, dtype=float64), batch_idx=torch.zeros(0, dtype=torch.int32))
    found = simulate(nothing, argon(), nve(0.1), 2, masses=torch.zeros(0))
    assert found.records["conserved"].shape == (3, 0) and relax(nothing, argon()).converged.shape == (0,)


@pytest.mark.parametrize("options", ({"gradients": True}, {"checkpoint_every": 2}))
def test_inference_mode_keeps_no_graph(options):
    """Also of a model whose ops save tensors for their gradients."""
    expected = simulate(systems(), argon(), nve(0.1), 3).state
    with torch.inference_mode():
        found = simulate(systems(), argon(), nve(0.1), 3, **options).state
    assert torch.equal(found.system.positions, expected.system.positions)


def test_no_steps_at_all():
    found = simulate(systems(), argon(), nve(0.1), 0)
    assert found.steps == [0] and found.records["conserved"].shape == (1, 2) and found.state.step == 0


def test_float32_stays_float32():
    system = joined([few_atoms(4, seed)[0] for seed in range(2)])
    system = system._replace(positions=system.positions.float(), cell=system.cell.float())
    for dtype in (torch.float32, float64):  # of the model

        def flat(system, dtype=dtype):
            return Evaluation(*(part.to(dtype) for part in ideal_gas(system)))

        for integrator in (nve(0.1), langevin(0.1, KT), npt(0.1, KT, 1e-5), npt(0.1, KT, 1e-5, cell="full")):
            state = simulate(system, flat, integrator, 3, masses=torch.ones(8)).state
            assert {t.dtype for t in (state.system.positions, state.system.cell, state.velocities)} == {torch.float32}
            assert state.extra["dt"].dtype == float64


@pytest.mark.parametrize("cell", ("isotropic", "full"))
def test_autocast_rounds_nothing(cell):
    """Of float32, as it would round factors of torch's products of matrices. Molecules are made whole."""
    system, masses, velocities = few_atoms(4, edge=6.0)
    system = system._replace(positions=system.positions + system.cell[[0, 1, 2, 2]]).to(torch.float32)
    model = FromEnergies(lambda system: torch.sin(system.positions).sum() + 0.01 * system.cell.square().sum())
    integrator = npt(0.1, KT, 1e-4, cell=cell).constrained(Constraints(torch.tensor([[0, 1], [2, 3]])))
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            run = simulate(system, model, integrator, 3, masses=masses.float(), velocities=velocities.float())
        found.append((run.state.system.positions, run.state.system.cell, run.state.evaluation.stress))
    for plain, cast in zip(*found):
        assert torch.equal(plain, cast)


GAS = System(torch.rand(4, 3, dtype=float64), cell=2.0 * torch.eye(3, dtype=float64))
ONE = {"masses": torch.ones(4, dtype=float64)}
ZERO = torch.zeros((), dtype=float64, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "options", "word"),
    (
        (lambda: nve(-1.0), ONE, "dt"),
        (lambda: nve(torch.ones(3)), ONE, "dt"),
        (lambda: nose_hoover(0.1, 0.0), ONE, "temperature"),
        (lambda: nph(0.1, 1.0, temperature=0.0), ONE, "temperature"),
        (lambda: nose_hoover(0.1, 1.0, chain_length=0), ONE, "chain_length"),
        (lambda: langevin(0.1, 1.0, friction=-1.0), ONE, "friction"),
        (lambda: npt(0.1, 1.0, 1.0, cell="cubic"), ONE, "cell"),
        (lambda: npt(0.1, 1.0, 1.0, mask=(False, False, False)), ONE, "mask"),
        (lambda: npt(0.1, 1.0, 1.0, mask=(True, False)), ONE, "mask"),
        (lambda: npt(0.1, 1.0, float("nan")), ONE, "pressure"),
        (lambda: nve(0.1), {}, "masses"),
        (lambda: nve(0.1), {"masses": torch.zeros(4)}, "masses"),
        (lambda: nve(0.1), {"masses": torch.ones(3)}, "masses"),
        (lambda: nve(0.1), ONE | {"velocities": torch.ones(3, 3)}, "velocities"),
        (lambda: nve(0.1), ONE | {"every": 0}, "every"),
        (lambda: nve(0.1), ONE | {"record": ("energy",)}, "record"),
        (lambda: nve(0.1), ONE | {"record": {"one": lambda state: 1.0}}, "record"),
        (lambda: nve(0.1), ONE | {"keys": torch.tensor([2**32])}, "keys"),
        (lambda: nve(0.1), ONE | {"keys": torch.tensor([-1])}, "keys"),
        (lambda: nve(0.1), ONE | {"hooks": [lambda state: True]}, "hooks"),
        (lambda: nve(0.1), ONE | {"hooks": None}, "hooks"),
        (lambda: nve(0.1), ONE | {"hooks": ["print"]}, "hooks"),
        (lambda: nve(0.1), ONE | {"record": {"one": "energy"}}, "record"),
        (lambda: nve(0.1), ONE | {"record": {"one": 1.0}}, "record"),
        (lambda: nve(0.1), ONE | {"gradients": "yes"}, "gradients"),
        (lambda: nve(0.1), ONE | {"removed": "3"}, "removed"),
        (lambda: nve("0.1"), ONE, "dt"),
        (lambda: nve, ONE, "integrator"),
        (lambda: "nve", ONE, "integrator"),
        (lambda: ideal_gas, ONE, "integrator"),
        (lambda: nve(0.1), ONE | {"hooks": [lambda state: {"a": 1}], "checkpoint_every": 1}, "hooks"),
        (lambda: langevin(0.1, ZERO), ONE, "temperature"),
        (lambda: csvr(0.1, ZERO), ONE, "temperature"),
        (lambda: langevin(0.1, 1.0, friction=ZERO), ONE, "friction"),
        (lambda: npt(0.1, 1.0, None), ONE, "pressure"),
    ),
)
def test_bad_arguments_are_named(make, options, word):
    with pytest.raises((ValueError, TypeError), match=f"`{word}`"):
        simulate(GAS, ideal_gas, make(), 1, **options)


class Wrapped:
    """An integrator that another object stands for."""

    def __init__(self, integrator):
        self.integrator = integrator

    def __getattr__(self, name):
        return getattr(self.integrator, name)


def test_integrators_may_be_wrapped():
    found = [simulate(GAS, springs(1.0), make(nve(0.1)), 2, **ONE).state for make in (Wrapped, lambda same: same)]
    assert torch.equal(found[0].system.positions, found[1].system.positions)


class OfAnotherClass(NamedTuple):
    energies: torch.Tensor
    forces: torch.Tensor
    stress: torch.Tensor | None = None


def test_models_may_return_the_fields_of_an_evaluation():
    def model(system):
        return OfAnotherClass(*springs(1.0)(system))

    for call in (
        lambda model: nve(0.1).start(GAS, model, **ONE).evaluation.forces,
        lambda model: simulate(GAS, model, nve(0.1), 2, **ONE).state.velocities,
        lambda model: relax(GAS, model).system.positions,
    ):
        assert torch.equal(call(model), call(springs(1.0)))


def test_models_return_evaluations():
    for model, words in ((None, "callable with a System, got NoneType"), (lambda _: ZERO, "an Evaluation, got Tensor")):
        for call in (
            lambda model: simulate(GAS, model, nve(0.1), 1, **ONE),
            lambda model: nve(0.1).start(GAS, model, **ONE),
            lambda model: relax(GAS, model),
        ):
            with pytest.raises(TypeError, match=f"`model` must (be|return) {words}"):
                call(model)
    with pytest.raises(TypeError, match="`hooks` must be callables"):
        relax(GAS, ideal_gas, hooks=["print"])


@pytest.mark.parametrize("path", ("POSCAR", "no/run.xyz", "run.abc", "run.xsf", "run.arc", "run.traj.gz"))
def test_a_trajectory_needs_a_format_with_frames(path, tmp_path):
    with pytest.raises(ValueError, match="`trajectory`: "):
        simulate(systems(), argon(), nve(0.1), 1, trajectory=[tmp_path / "run.xyz", tmp_path / path])


@pytest.mark.parametrize("suffix", ("xyz", "traj"))
def test_trajectories_of_molecules_have_neither_cell_nor_stress(suffix, tmp_path):
    path, system = tmp_path / f"run.{suffix}", System.from_ase(ase.build.molecule("H2O"))
    found = simulate(system, springs(0.3), nve(0.1), 2, trajectory=path)
    last = ase.io.read(path, ":")[-1]
    assert not last.pbc.any() and last.cell.rank == 0 and set(last.calc.results) == {"energy", "forces"}
    assert abs(last.positions - found.state.system.positions.numpy()).max() < 1e-7
    assert abs(last.get_potential_energy() - found.state.evaluation.energies.item()) < 1e-7
    both = joined([System(system.positions + 3.0 * n, cell=torch.eye(3)) for n in range(2)])
    shared = both._replace(cell=torch.diag(torch.tensor([9.0, 8.0, 7.0])), numbers=system.numbers.repeat(2))
    shared = shared._replace(charges=torch.linspace(-1.0, 1.0, 6))
    for n, atoms in enumerate(to_ase(shared._replace(pbc=(1, 0, 1)))):
        assert abs(atoms.positions - 3.0 * n - system.positions.numpy()).max() < 1e-14
        assert atoms.cell.lengths().tolist() == [9.0, 8.0, 7.0] and atoms.pbc.tolist() == [True, False, True]
        assert np.allclose(atoms.get_initial_charges(), np.linspace(-1.0, 1.0, 6)[3 * n : 3 * n + 3])
    masses = torch.tensor([torch.inf, 1.0, 1.0], dtype=float64)
    state = nve(0.1).start(system, springs(0.3), masses=masses)
    for _ in range(2):
        (atoms,) = to_ase(state)
        assert atoms.constraints[0].index.tolist() == [0] and atoms.get_masses()[0] > 1.0
        assert state.masses[0] == torch.inf == masses[0]
    with pytest.raises(ValueError, match="`numbers` of the system are needed"):
        to_ase(System(system.positions))


def test_a_run_starts_from_a_system(tmp_path, monkeypatch):
    with pytest.raises(TypeError, match="`start` must be a System or a State, got Atoms"):
        simulate(crystal(1), argon(), nve(0.1), 1)
    for call in (lambda: simulate([GAS], argon(), nve(0.1), 1), lambda: relax((GAS,), argon())):
        with pytest.raises(TypeError, match=r"got (list|tuple): use System.concatenate"):
            call()
    with pytest.raises(TypeError, match="`start` must be a System or a State, got int"):
        simulate(1, argon(), nve(0.1), 1)
    state = nve(0.1).start(GAS, ideal_gas, **ONE)
    with pytest.raises(TypeError, match="`seed` goes with a System; the State has it"):
        simulate(state, ideal_gas, nve(0.1), 1, seed=1)
    with pytest.raises(ValueError, match="`pressure` is needed"):
        npt(0.1, KT, None).resume(state, ideal_gas)
    with pytest.raises(ValueError, match="`velocities` or `temperature` is needed"):
        nph(0.1, 1.0).start(GAS, ideal_gas, **ONE)
    for record, word in (("volume", "`cell`"), ("pressure", "stress")):
        with pytest.raises(ValueError, match=word):
            simulate(GAS._replace(cell=None), springs(1.0), nve(0.1), 1, record=record, **ONE)
    run = simulate(state, ideal_gas, nve(0.1), 0)
    for call in (lambda: save_state(tmp_path / "run.pt", run), lambda: to_ase(run)):
        with pytest.raises(TypeError, match=r"`state` must be a State.*, got Simulation"):
            call()
    with pytest.raises(TypeError, match=r"`atoms` must be a System.*, got Simulation"):
        divide(run, cutoff=1.0)
    torch.save([1], tmp_path / "list.pt")
    torch.save(torch.nn.Identity(), tmp_path / "module.pt")
    np.savez(tmp_path / "arrays.npz", 1.0)
    (tmp_path / "text.xyz").write_text("1\n\nAr 0 0 0\n")
    (tmp_path / "half.pt").write_bytes((tmp_path / "list.pt").read_bytes()[:-100])
    (tmp_path / "empty.pt").touch()
    for path in tmp_path.iterdir():
        with pytest.raises(ValueError, match=rf"`path`: .*{path.name} has another format"):
            load_state(path)
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "none.pt")
    monkeypatch.setitem(sys.modules, "ase.data", None)
    with pytest.raises(ValueError, match="`masses` are needed, since ASE"):
        nve(0.1).start(GAS._replace(numbers=torch.ones(4, dtype=torch.int64)), ideal_gas)


def test_the_temperature_of_a_cell_without_thermostat_is_that_of_the_velocities():
    """Of each system, with its degrees of freedom: it is in the mass of the cell."""
    parts, masses, velocities = zip(few_atoms(2), few_atoms(3, 1))
    options = {"masses": torch.cat(masses), "velocities": torch.cat(velocities), "removed": torch.tensor([0.0, 3.0])}
    found = [i.start(joined(parts), wells(), **options) for i in (nph(0.1, 0.01), nph(0.1, 0.01, temperature=KT))]
    for n, (m, v, degrees) in enumerate(zip(masses, velocities, (6, 6))):
        expected = (m.unsqueeze(1) * v.square()).sum() / degrees
        assert abs(found[0].extra["temperature"][n] / expected - 1.0) < 1e-14
    assert (found[1].extra["temperature"] == KT).all()


def test_what_a_barostat_needs():
    for system, model, word in (
        (GAS._replace(cell=None), ideal_gas, "cell"),
        (GAS._replace(cell=torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=float64))), ideal_gas, "cell"),
        (GAS, lambda system: ideal_gas(system)._replace(stress=None), "model"),
        (GAS, lambda system: ideal_gas(system)._replace(energies=torch.zeros(())), "model"),
    ):
        with pytest.raises(ValueError, match=f"`{word}`"):
            npt(0.1, 1.0, 1.0).start(system, model, **ONE)


@pytest.mark.parametrize(
    ("pbc", "cell", "mask", "advice"),
    (
        ("000", [[2, 1, 0], [0, 2, 0], [0, 0, 2]], (True, True, True), "an integrator without a barostat"),
        ("110", [[2, 1, 0], [0, 2, 0], [0, 1, 2]], (True, True, True), r"mask=\(True, True, False\)"),
        ("110", [[2, 1, 0], [0, 2, 0], [0, 1, 2]], (True, True, False), None),
        ("110", [[0, 0, 2], [2, 0, 1], [0, 2, 0]], (True, True, False), r"mask=\(True, False, True\)"),
        ("010", [[2, 1, 0], [0, 2, 0], [0, 1, 2]], (False, True, False), None),
        ("100", [[2, 1, 0], [0, 2, 0], [0, 1, 2]], (True, False, False), "an integrator without a barostat"),
    ),
)
def test_a_barostat_does_not_press_along_open_axes(pbc, cell, mask, advice):
    """``pbc`` is of lattice vectors, the mask of Cartesian axes. In a batch one open system is enough."""
    both = torch.stack([GAS.cell, torch.tensor(cell, dtype=float64)])
    axes = torch.tensor([[True] * 3, [axis == "1" for axis in pbc]])
    two = joined([GAS, GAS])._replace(cell=both, pbc=axes)

    def start():
        return npt(0.1, 1.0, 1.0, mask=mask).start(two, ideal_gas, masses=torch.ones(8))

    if advice is None:
        start()
    else:
        with pytest.raises(ValueError, match=f"`mask`.*system 1 is not periodic: choose {advice}"):
            start()
