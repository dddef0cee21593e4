"""Whole steps, forces included, compiled, recorded and as captured graphs: they have the results of eager steps."""

import pytest
import torch

from nvalchemiops.torch import plans, record
from nvalchemiops.torch.dynamics import Evaluation
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald
from nvalchemiops.torch.systems import System
from tests.support.plans import counted_graphs

from .systems import SOFT, argon, crystal, few_atoms
from .test_integrators import every, smooth

TIMES = {"thermostat_time": 5.0, "barostat_time": 30.0}


def ions(device="cpu"):
    """Argon atoms with charges in a sheared cell, periodic along all axes, as it is without ``pbc``."""
    atoms = crystal((2, 2, 2))
    atoms.set_initial_charges([0.3, -0.3] * 16)
    system = System.from_ase(atoms)._replace(pbc=None)
    return System(*[t.to(device) if isinstance(t, torch.Tensor) else t for t in system])


def on_given_neighbors(kind, system):
    """A pair potential or PME with a list that is made once: without it a step would decide whether to search."""
    near = system.neighbors(6.5, as_matrix=True)
    options = {"compute_forces": True, "compute_virial": True, "energy_reduction": "system"}
    if kind == "pme":
        mesh = ParticleMeshEwald.estimate(system.positions, system.cell, accuracy=1e-4, real_space_cutoff=6.0)

    def model(here):
        if kind == "pme":
            found = mesh(here, near, **options)
        else:
            found = SOFT(here, near, sigma=3.4, epsilon=0.0104, **options)
        virial = 0.5 * (found.virial + found.virial.mT)
        return Evaluation(found.energies, found.forces, -virial / here.volume.reshape(-1, 1, 1))

    return model


def assert_same(found, expected, moved):
    """All numbers of two states up to rounding; they are not those of the start."""
    for one, two in ((found, expected), (expected, found)):
        assert one.extra.keys() == two.extra.keys()
    pairs = [(found.velocities, expected.velocities), (found.system.positions, expected.system.positions)]
    pairs += [(found.system.cell, expected.system.cell), *zip(found.evaluation, expected.evaluation)]
    pairs += [(found.extra[name], value) for name, value in expected.extra.items()]
    for one, two in pairs:
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13, equal_nan=True)
    assert found.step.item() == expected.step.item() > moved.step.item()
    assert (expected.velocities - moved.velocities).abs().max() > 1e-6


# -- compiled -------------------------------------------------------------------------------------


@pytest.mark.everyday_cases("pairs-npt", "pme-nve")
@pytest.mark.parametrize("name", ["nve", "langevin", "csvr", "npt", "npt full", "stochastic cell"])
@pytest.mark.parametrize("kind", ["pairs", "pme"])
def test_compiled_steps_are_one_graph(kind, name):
    """Two steps from `Integrator.step`, traced whole. The integrator has made no step before."""
    torch.compiler.reset()
    system = ions()
    model, integrator = on_given_neighbors(kind, system), every(0.1, 0.006, 1e-4, **TIMES)[name]
    state = integrator.start(system, model, seed=1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def steps(state):
        for _ in range(2):
            state = integrator.step(state, model)
        return state

    found = steps(state)
    assert_same(found, integrator.step(integrator.step(state, model), model), state)
    # the graph is for any state
    assert_same(steps(found), integrator.step(integrator.step(found, model), model), found)


@pytest.mark.later
def test_a_compiled_step_decides_in_eager_mode_whether_to_search():
    """`SumOfTerms` has a list with a skin, at which the graph breaks."""
    torch.compiler.reset()
    integrator, model = every(0.1, 0.006, 1e-4, **TIMES)["npt"], argon(skin=0.02)
    state = expected = integrator.start(System.from_ase(crystal()), model, seed=1)
    step = torch.compile(lambda state: integrator.step(state, model), backend="aot_eager")
    start, built = state, model.neighbors.num_builds
    for _ in range(6):
        state = step(state)
    assert model.neighbors.num_builds > built
    for _ in range(6):
        expected = integrator.step(expected, model)
    assert_same(state, expected, start)


# -- recorded -------------------------------------------------------------------------------------


def as_function(integrator, model, state, after):
    """A step as a function of the tensors that change between these states, and those of the second one."""
    names = [name for name, value in after.extra.items() if not torch.equal(value, state.extra[name])]
    cell_moves = not torch.equal(after.system.cell, state.system.cell)

    def tensors(state):
        found = state.evaluation if cell_moves else state.evaluation[:2]
        cell = (state.system.cell,) if cell_moves else ()
        extra = [state.extra[name] for name in names]
        return (state.system.positions, state.velocities, state.step, *found, *cell, *extra)

    def step(*values):
        positions, velocities, number, energies, forces, *rest = values
        stress, cell = (rest.pop(0), rest.pop(0)) if cell_moves else (state.evaluation.stress, None)
        here = state._replace(step=number, evaluation=Evaluation(energies, forces, stress))
        here = here.at(positions, cell, velocities=velocities).having(**dict(zip(names, rest)))
        return tensors(integrator.step(here, model))

    return step, tensors(after)


def assert_replayed(integrator, model, system, *, n_steps=5, **options):
    """Recorded steps have the bits of ordinary ones, operation by operation."""
    with plans.off():
        state = integrator.start(system, model, seed=1, **options)
        step, values = as_function(integrator, model, state, integrator.step(state, model))
    recorded, expected = record(step), values
    for _ in range(n_steps):
        values = recorded(*values)
        with plans.off():
            expected = step(*expected)
        for one, two in zip(values, expected, strict=True):
            assert torch.equal(one, two)
    assert recorded.explain().startswith("last call: replayed") and recorded._counts["recorded"] == 1
    assert (values[1] - state.velocities).abs().max() > 1e-6


@pytest.mark.parametrize("kind", ["pairs", "pme"])
@pytest.mark.parametrize("name", ["nve", "langevin", "csvr"])
def test_a_recorded_step_has_the_same_bits(name, kind):
    system = ions()
    model, integrator = on_given_neighbors(kind, system), every(0.1, 0.006, 1e-4, **TIMES)[name]
    assert_replayed(integrator, model, system)


@pytest.mark.parametrize("name", ["npt", "npt full", "npt axes slab", "stochastic cell"])
def test_a_recorded_step_of_a_cell_has_the_same_bits(name):
    system, masses, velocities = few_atoms()
    integrator = every(0.1)[name]
    assert_replayed(integrator, smooth, system, masses=masses, velocities=velocities, removed=0)


def test_a_recorded_step_is_a_function_of_the_state():
    """Cells of a sum over pairs, too, are arguments."""
    system = ions()
    model, integrator = on_given_neighbors("pairs", system), every(0.1, 0.006, 1e-4, **TIMES)["npt full"]
    state = expected = integrator.start(system, model, seed=1)
    recorded = record(lambda state: integrator.step(state, model))
    for _ in range(4):
        state = recorded(state)
        with plans.off():
            expected = integrator.step(expected, model)
        assert torch.equal(state.velocities, expected.velocities) and torch.equal(state.cell, expected.cell)
    assert "1 recorded, 2 replayed" in recorded.explain()


@pytest.mark.parametrize("kind", ["pairs", "pme"])
@pytest.mark.parametrize("name", ["nve", "langevin", "csvr", "npt", "npt full"])
def test_a_step_is_one_captured_graph(monkeypatch, gpu, name, kind):
    """Also where the cell changes: nothing in a step is read."""
    with counted_graphs(monkeypatch, gpu) as made:
        system = ions(gpu.device)
        model, integrator = on_given_neighbors(kind, system), every(0.1, 0.006, 1e-4, **TIMES)[name]
        assert_replayed(integrator, model, system)
        assert len(made) == 1 and made[0].n_replays == 4
