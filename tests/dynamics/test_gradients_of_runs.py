"""Gradients of runs: checkpoints, parameters of all that a run calls, transforms of torch and both modes."""

import functools
import sys

import ase.build
import ase.io
import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from nvalchemiops.torch.dynamics import (
    Constraints,
    Evaluation,
    FromEnergies,
    Integrator,
    csvr,
    langevin,
    nose_hoover,
    npt,
    nve,
    simulate,
    stochastic_cell,
    to_ase,
)
from nvalchemiops.torch.dynamics.flows import Flow
from nvalchemiops.torch.systems import System

from .systems import few_atoms, float64, joined, springs, wells

KT = 0.006


def test_a_checkpointed_run_has_the_same_results_and_gradients(tmp_path):
    """The last segment is shorter; steps are computed twice, and the model once more to see what it depends on.

    The weight of the model has a graph that is older than the run, which all segments share.
    """
    calls = 0
    half, two = torch.tensor(0.6, dtype=float64, requires_grad=True), torch.tensor(2.0, dtype=float64)
    inner = wells().function

    def energies(system):
        nonlocal calls
        calls += 1
        return weight * inner(system)

    model = FromEnergies(energies, create_graph=True)
    system, masses, velocities = few_atoms()
    system = system._replace(numbers=torch.full((4,), 18))
    results = []
    for every in (None, 4):
        calls, weight = 0, half * two
        start = velocities.clone().requires_grad_()
        found = simulate(
            system,
            model,
            npt(0.1, 0.05, 0.004, cell="full"),
            10,
            masses=masses,
            velocities=start,
            checkpoint_every=every,
            trajectory=tmp_path / "run.xyz",
            removed=0,
        )
        loss = found.state.system.positions.square().sum() + found.records["kinetic_energy"][1:].sum()
        gradients = torch.autograd.grad(loss, [half, start])
        assert calls == (11 if every is None else 22)
        assert len(ase.io.read(tmp_path / "run.xyz", ":")) == 11  # steps that are computed again are not written again
        results.append([loss.detach(), *gradients])
    for direct, again in zip(*results):
        assert torch.equal(direct, again)


@pytest.mark.parametrize("every", [None, 2])
def test_gradients_to_parameters_of_a_model_contain_the_first_evaluation(every):
    """There positions need not depend on anything that requires gradients, by which a model decides to keep a graph."""
    system, masses, velocities = few_atoms(2)
    inner, options = wells().function, {"masses": masses, "velocities": velocities, "removed": 0}

    def last(weight, **more):
        model = FromEnergies(lambda system: weight * inner(system))
        return simulate(system, model, nve(0.3), 4, **options, **more).state.system.positions.square().sum()

    weight, h = torch.tensor(1.2, dtype=float64, requires_grad=True), 1e-5
    (slope,) = torch.autograd.grad(last(weight, gradients=True, checkpoint_every=every), weight)
    expected = (last(1.2 + h) - last(1.2 - h)) / (2 * h)
    assert abs(slope - expected) < 1e-7 * abs(expected)
    with torch.inference_mode():
        options["velocities"], system = velocities.clone(), system._replace(positions=system.positions.clone())
        assert torch.equal(last(1.2, checkpoint_every=every), last(1.2))
    found = last(weight, gradients=True, checkpoint_every=every)  # of tensors that cannot have a graph
    assert abs(found - last(1.2)) < 1e-12


@pytest.mark.parametrize("every", [None, 2])
def test_gradients_contain_the_evaluation_after_a_hook_that_changes_the_system(every):
    """At positions that depend on nothing, with charges that depend on a parameter; the model has another one."""
    system, masses, velocities = few_atoms(2)
    options = {"masses": masses, "velocities": velocities, "removed": 0}

    def last(strength, charge, **more):
        def hook(state):
            charges = charge * torch.ones_like(system.positions[:, 0])
            return state._replace(system=system._replace(charges=charges)) if state.step == 3 else None

        model = FromEnergies(lambda now: strength * (now.charges * now.positions.square().sum(1)).sum()[None])
        start = system._replace(charges=torch.ones_like(masses))
        return simulate(start, model, nve(0.3), 5, hooks=hook, **options, **more).state.velocities.square().sum()

    given = torch.tensor([0.02, 1.3], dtype=float64, requires_grad=True)
    (slope,) = torch.autograd.grad(last(*given, gradients=True, checkpoint_every=every), given)
    found = [(last(*(given.detach() + h)) - last(*(given.detach() - h))) / 2e-6 for h in 1e-6 * torch.eye(2).double()]
    assert (slope - torch.stack(found)).abs().max() < 1e-6 * slope.abs().min()


@pytest.mark.parametrize("where", ["record", "hook", "velocities", "flow", "first record"])
def test_gradients_to_parameters_of_records_hooks_and_flows(where):
    """They are found in every segment, also those that come late, and those that are a part of a state as they are.

    A hook that ends all graphs leaves them to the record of the start.
    """
    system, masses, velocities = few_atoms(2)
    weight = torch.tensor(0.8, dtype=float64, requires_grad=True)

    class Damping(Flow):
        def __call__(self, state, h):
            return state._replace(velocities=state.velocities * weight)

    options, flows = {}, nve(0.3).flows
    if where == "record":
        options["record"] = {"weighted": lambda state: weight * state.system.positions.square().sum()}
    elif where == "first record":
        weight = velocities.clone().requires_grad_()
        options["hooks"] = [lambda state: tree_map_only(torch.Tensor, torch.Tensor.detach, state)]
    elif where == "hook":
        damp, options["record"] = Damping(), ()
        options["hooks"] = [lambda state: damp(state, None) if state.step > 2 else None]
    elif where == "velocities":
        weight = velocities.clone().requires_grad_()
        options["hooks"] = [
            lambda state: state.at(state.system.positions + weight, velocities=weight) if state.step > 2 else None
        ]
    else:
        flows = [(Damping(), 1.0), *flows]
    slopes = []
    for every in (None, 2):
        given = weight if where == "first record" else velocities
        options |= {"masses": masses, "velocities": given, "removed": 0, "checkpoint_every": every}
        found = simulate(system, wells(), Integrator(flows, {"dt": 0.3}), 5, gradients=True, **options)
        loss = found.state.system.positions.square().sum() + sum(record.sum() for record in found.records.values())
        slopes += torch.autograd.grad(loss, weight)
    assert (slopes[1] - slopes[0]).abs().max() < 1e-12 * slopes[0].abs().max()


def test_tensors_that_a_record_makes_for_itself_are_not_kept_as_parameters():
    """Such as the positions of another call of the model: a segment does not depend on those of all segments before."""
    system, masses, velocities = few_atoms(2)
    weight, inner = torch.tensor(1.2, dtype=float64, requires_grad=True), wells().function
    model = FromEnergies(lambda system: weight * inner(system), create_graph=True)
    options = {"masses": masses, "velocities": velocities, "record": {"u": lambda state: model(state.system).energies}}
    states = [simulate(system, model, nve(0.1), steps, checkpoint_every=2, **options).state for steps in (2, 8)]
    first, last = (state.velocities.grad_fn.next_functions for state in states)
    assert len(first) == len(last)


def test_without_leaves_that_require_gradients_there_is_no_graph():
    weight = torch.tensor(1.2, dtype=float64, requires_grad=True)

    def model(system):
        found = wells()(system)
        return Evaluation(weight * found.energies, weight * found.forces, found.stress)

    system, masses, _ = few_atoms()
    assert not simulate(system, model, nve(0.1), 2, masses=masses).state.velocities.requires_grad
    assert simulate(system, model, nve(0.1), 2, masses=masses, gradients=True).state.velocities.requires_grad


@pytest.mark.parametrize("inference", [False, True])
def test_gradients_to_parameters_of_a_run_that_goes_on(inference):
    """Those of the integrator, also if the run before had the same values, without gradients."""
    model = springs(0.8)
    with torch.inference_mode(inference):
        parts, masses, velocities = zip(few_atoms(2), few_atoms(3, 1))
        options = {"masses": torch.cat(masses), "velocities": torch.cat(velocities), "removed": 0}
        first = simulate(joined(parts), model, nose_hoover(0.1, 0.05), 2, **options).state

    def last(kt):
        return simulate(first, model, nose_hoover(0.1, kt), 3).state.system.positions.square().sum()

    kt, h = torch.tensor(0.05, dtype=float64, requires_grad=True), 1e-5
    (slope,) = torch.autograd.grad(last(kt), kt)
    expected = (last(0.05 + h) - last(0.05 - h)) / (2 * h)
    assert abs(slope - expected) < 1e-6 * abs(expected)
    _, slope = torch.func.jvp(last, (kt.detach(),), (torch.ones_like(kt),))
    assert abs(slope - expected) < 1e-6 * abs(expected)


def differentiated(way, function, x, tangent):
    """The derivative of the function along the tangent, by one of torch's ways."""
    if way == "torch.func.jvp":
        return torch.func.jvp(function, (x,), (tangent,))[1]
    if way == "vmap":
        return torch.func.vmap(torch.func.grad(function))(x[None])[0] @ tangent
    if way == "torch.func.grad":
        return torch.func.grad(function)(x) @ tangent
    if way == "around vmap":
        several = torch.stack([x, x + tangent]).requires_grad_()
        return torch.autograd.grad(torch.func.vmap(function)(several).sum(), several)[0][0] @ tangent
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent


@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("way", ["torch.func.grad", "torch.func.jvp", "vmap", "around vmap", "duals"])
def test_trajectories_in_transforms_of_torch(way, every):
    """With respect to the start and to a parameter of the model; what is kept in reverse mode does not matter."""
    system, masses, velocities = few_atoms(2)
    inner, tangent = wells().function, torch.linspace(0.3, 1.0, 13, dtype=float64)

    def last(x, kept=True):
        model = FromEnergies(lambda system: x[0] * inner(system))
        start, velocities = system._replace(positions=x[7:].reshape(2, 3)), x[1:7].reshape(2, 3)
        options = {"masses": masses, "velocities": velocities, "removed": 0, "checkpoint_every": every}
        with torch.set_grad_enabled(kept):
            run = simulate(start, model, npt(0.2, 0.05, 0.004), 3, **options)
        return run.state.system.positions.square().sum() + run.records["kinetic_energy"].sum()

    given = torch.cat([torch.tensor([1.2], dtype=float64), velocities.flatten(), system.positions.flatten()])
    x = given.clone().requires_grad_()
    (expected,) = torch.autograd.grad(last(x), x)
    assert abs(differentiated(way, last, given, tangent) - expected @ tangent) < 1e-12 * expected.norm()
    assert expected.abs().min() > 1e-3
    if way == "torch.func.grad" and every is None:
        assert not torch.func.grad(functools.partial(last, kept=False))(given).any()
    elif way == "torch.func.grad":  # checkpoints ask for gradients
        assert torch.equal(torch.autograd.grad(last(x, kept=False), x)[0], expected)


def test_checkpoints_stay_if_torch_does_not_tell_of_transforms(monkeypatch):
    for name, value in {"DERIVATIVES_KNOWN": False, "derivative_asked": lambda: True}.items():
        monkeypatch.setattr(sys.modules[simulate.__module__], name, value)
    system, masses, velocities = few_atoms(2)
    calls, inner = [], wells()

    def model(system):
        calls.append(1)
        return inner(system)

    given = velocities.clone().requires_grad_()
    run = simulate(system, model, nve(0.1), 4, masses=masses, velocities=given, checkpoint_every=2)
    forward = len(calls)
    run.state.velocities.sum().backward()
    assert len(calls) == forward + 4


def test_frames_of_trajectories_in_transforms_of_torch(tmp_path):
    system, path = System.from_ase(ase.build.molecule("H2O")), tmp_path / "run.traj"

    def last(velocities):
        run = simulate(system, springs(0.3), nve(0.1), 2, velocities=velocities, trajectory=path)
        return run.state.system.positions

    velocities = torch.ones(3, 3, dtype=float64)
    torch.func.jvp(last, (velocities,), (velocities,))
    assert abs(ase.io.read(path).positions - last(velocities).numpy()).max() < 1e-14
    with pytest.raises(ValueError, match="differ between the slices of `vmap`"):
        torch.func.vmap(last)(velocities[None])
    state = nve(0.1).start(system, springs(0.3))

    def frames(energies):
        return to_ase(state._replace(evaluation=state.evaluation._replace(energies=energies)))

    assert frames(torch.full((1,), 0.5, dtype=torch.bfloat16))[0].get_potential_energy() == 0.5
    with pytest.raises(ValueError, match="differ between the slices of `vmap`"):  # by a parameter of the model
        torch.func.vmap(frames)(torch.ones(1, 1))


@pytest.mark.parametrize("of", ["integrator", "constraints"])
def test_parameters_that_require_gradients_keep_the_graph(of):
    parameter = torch.tensor(KT if of == "integrator" else 1.5, dtype=float64, requires_grad=True)
    system, masses, _ = few_atoms(2)
    if of == "integrator":
        integrator = langevin(0.1, parameter)
    else:
        integrator = langevin(0.1, KT).constrained(Constraints(torch.tensor([[0, 1]]), parameter))
    run = simulate(system, wells(), integrator, 2, masses=masses)
    (slope,) = torch.autograd.grad(run.state.velocities.square().sum(), parameter)
    assert slope.isfinite() and slope != 0.0


STILL = {
    "csvr": lambda dt, time: csvr(dt, 0.0, thermostat_time=time),
    "langevin": lambda dt, time: langevin(dt, 0.0, friction=1.0 / time),
    "langevin without friction": lambda dt, time: langevin(dt + 0.0 * time, 0.01, friction=0.0),
    "stochastic_cell": lambda dt, time: stochastic_cell(dt, 0.0, 1e-3, 5.0, thermostat_time=time, barostat_time=time),
}


@pytest.mark.parametrize("name", STILL)
def test_gradients_where_there_is_no_noise(name):
    """At zero temperature and without friction, where the root of the variance has no slope. One atom is frozen."""
    system, masses, velocities = few_atoms(3)
    masses[0] = torch.inf

    def loss(velocities, dt, time, masses):
        state = simulate(
            system, wells(), STILL[name](dt, time), 3, masses=masses, velocities=velocities, record=(), gradients=True
        ).state
        return state.system.positions.square().sum() + state.velocities.sum()

    given = [velocities, torch.tensor(0.1, dtype=float64), torch.tensor(2.0, dtype=float64), masses]
    given = [tensor.clone().requires_grad_() for tensor in given]
    slopes = torch.autograd.grad(loss(*given), given)
    assert slopes[3][0] == 0.0
    ways = [torch.ones_like(tensor) for tensor in given]
    ways[3][0] = 0.0
    for k, (slope, way) in enumerate(zip(slopes, ways)):
        moved = [
            loss(*(tensor.detach() + (sign * 1e-5 * way if n == k else 0.0) for n, tensor in enumerate(given)))
            for sign in (1, -1)
        ]
        assert ((moved[0] - moved[1]) / 2e-5 - (slope * way).sum()).abs() < 1e-7
