"""Dynamics in JAX: steps of torch in jit and scan, with forces of JAX or torch, and derivatives of trajectories."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nvalchemiops.jax import dynamics
from nvalchemiops.jax.interactions.pair import PairPotential
from nvalchemiops.jax.neighbors import check_neighbor_list_state, prepare_neighbor_list
from nvalchemiops.jax.systems import System
from nvalchemiops.notices import NvalchemiopsWarning
from nvalchemiops.torch import dynamics as in_torch
from nvalchemiops.torch.dynamics.flows import Flow
from nvalchemiops.torch.systems import System as TorchSystem
from tests.dynamics.systems import SOFT, argon, crystal, few_atoms, wells
from tests.jax.precision import QUICKLY, double_precision  # noqa: F401

jit = functools.partial(jax.jit, compiler_options=QUICKLY)

TEMPERATURES = np.array([0.05, 0.03])
PRESSURES = np.array([0.01, -0.02])
KINDS = {
    "nve": ((0.05,), {}),
    "langevin": ((0.05, TEMPERATURES), {"friction": 0.3}),
    "nose_hoover": ((np.array([0.05, 0.04]), TEMPERATURES), {"chain_length": 2}),
    "csvr": ((0.05, TEMPERATURES), {"thermostat_time": 0.5}),
    "nph": ((0.05, PRESSURES), {"temperature": TEMPERATURES, "cell": "axes"}),
    "npt": ((0.05, TEMPERATURES, PRESSURES), {"cell": "full", "barostat_time": 2.0}),
    "stochastic_cell": ((0.05, TEMPERATURES, PRESSURES, 1.0), {"barostat_time": 2.0}),
}


def both(kind):
    args, kwargs = KINDS[kind]

    def given(convert):
        plain = [convert(a) if isinstance(a, np.ndarray) else a for a in args]
        return plain, {k: convert(v) if isinstance(v, np.ndarray) else v for k, v in kwargs.items()}

    arrays, named = given(jnp.asarray)
    tensors, named_tensors = given(torch.as_tensor)
    return getattr(dynamics, kind)(*arrays, **named), getattr(in_torch, kind)(*tensors, **named_tensors)


def for_jax(value):
    return jax.tree.map(lambda t: jnp.asarray(t.numpy()), value)


def two_systems():
    """A batch of 4 and 3 atoms in sheared cells, interleaved, with masses and velocities."""
    parts = [few_atoms(4, 0), few_atoms(3, 1)]
    system, masses, velocities = (list(column) for column in zip(*[(p[0], p[1], p[2]) for p in parts]))
    order = torch.tensor([0, 4, 1, 2, 5, 6, 3])
    cells = torch.stack([s.cell.reshape(3, 3) for s in system])
    batch_idx = torch.tensor([0] * 4 + [1] * 3, dtype=torch.int32)[order]
    positions = torch.cat([s.positions for s in system])[order]
    whole = TorchSystem(positions, cell=cells, batch_idx=batch_idx)
    return whole, torch.cat(masses)[order], torch.cat(velocities)[order]


@dynamics.FromEnergies
def jax_wells(system, scale=1.0):
    """The energy of `tests.dynamics.systems.wells`, in JAX."""
    cell = system.cell
    normals = jnp.stack([jnp.cross(cell[:, i - 2], cell[:, i - 1]) for i in range(3)], axis=2)
    frames = normals / (cell[:, 0] * normals[:, :, 0]).sum(1)[:, None, None]
    fractional = (system.positions[:, None] @ frames[system.batch_idx])[:, 0]
    rows = (jnp.cos(2 * jnp.pi * fractional) * jnp.array([0.02, 0.03, 0.04])).sum(1)
    rows += 0.02 * jnp.cos(2 * jnp.pi * (fractional[:, 0] - fractional[:, 1] + 2 * fractional[:, 2]))
    elastic = 0.05 * ((cell @ jnp.swapaxes(cell, 1, 2) / 9.0 - jnp.eye(3)) ** 2).sum((1, 2))
    return scale * (jax.ops.segment_sum(rows, system.batch_idx, len(cell)) + elastic)


start_wells = jax.jit(jax_wells)
"""For calls outside of jit, where each operation would be compiled by itself."""


def assert_states_are_close(found, expected, rtol=1e-11):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b.numpy(), rtol, rtol, err_msg=jax.tree_util.keystr(path))


# -- steps ----------------------------------------------------------------------------------------


@pytest.mark.everyday_cases("torch-*", "jax-npt")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forces", ["jax", "torch"])
def test_steps_are_those_of_torch(kind, forces):
    ours, theirs = both(kind)
    system, masses, velocities = two_systems()
    model = start_wells if forces == "jax" else dynamics.TorchModel(wells())
    options = {"masses": masses, "velocities": velocities, "seed": 5, "keys": torch.tensor([7, 3])}
    expected = theirs.start(system, wells(), **options)
    start = ours.start(
        System(*for_jax(tuple(system))), model, **{k: for_jax(v) if k != "seed" else v for k, v in options.items()}
    )
    assert_states_are_close(start, expected)

    def step(state, _):
        state = ours.step(state, model)
        return state, (ours.conserved(state), state.temperatures, state.pressures, state.kinetic_energies)

    found, records = jit(lambda s: jax.lax.scan(step, s, None, length=4))(start)
    conserved = []
    for _ in range(4):
        expected = theirs.step(expected, wells())
        conserved.append(theirs.conserved(expected))
    assert isinstance(found, dynamics.State) and isinstance(found.system, System)
    assert_states_are_close(found, expected)
    if forces == "torch":
        np.testing.assert_array_equal(found.system.positions, expected.system.positions)
    np.testing.assert_allclose(records[0], torch.stack(conserved), rtol=1e-11)
    for name, record in zip(("temperatures", "pressures", "kinetic_energies"), records[1:]):
        np.testing.assert_allclose(record[-1], getattr(expected, name), rtol=1e-10)
    np.testing.assert_allclose(found.volumes, expected.volumes, rtol=1e-12)
    np.testing.assert_allclose(found.pressure_tensors, expected.pressure_tensors, atol=1e-12)


def springs(system):
    return in_torch.Evaluation(0.5 * system.positions.square().sum()[None], -system.positions, None)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_integrators_and_models_go_to_other_processes(copied):
    integrator, model = copied((dynamics.langevin(0.05, 0.03), dynamics.TorchModel(springs, stress=False)))
    assert model.stress is False and not model.requires_grad
    x, reference = torch.eye(3, dtype=torch.float64), in_torch.langevin(0.05, 0.03)
    expected = reference.step(reference.start(TorchSystem(x), springs, masses=torch.ones(3), seed=1), springs)
    start = integrator.start(System(jnp.eye(3)), model, masses=jnp.ones(3), seed=1)
    np.testing.assert_array_equal(integrator.step(start, model).velocities, expected.velocities)


def test_an_oscillator_follows_the_closed_formula_of_verlet():
    """x_n = x_0 cos(n θ) with cos θ = 1 - (ω dt)² / 2, for velocity Verlet from rest."""
    stiffness, mass, dt, steps = 2.0, 3.0, 0.3, 25
    spring = dynamics.FromEnergies(lambda system: 0.5 * stiffness * (system.positions**2).sum())
    integrator = dynamics.nve(dt)
    x = jnp.array([[1.0, -0.5, 0.25]])
    state = integrator.start(System(x), spring, masses=jnp.array([mass]), velocities=jnp.zeros((1, 3)))
    assert state.evaluation.stress is None and state.system.cell is None
    angle = np.arccos(1.0 - 0.5 * stiffness / mass * dt**2)

    @jit
    def run(state):
        def step(state, _):
            state = integrator.step(state, spring)
            return state, state.system.positions[0]

        return jax.lax.scan(step, state, None, length=steps)[1]

    np.testing.assert_allclose(run(state), np.cos(angle * np.arange(1, steps + 1))[:, None] * x, atol=1e-13)


def test_reversed_steps_lead_back():
    integrator, _ = both("npt")
    system, masses, velocities = (for_jax(v) for v in two_systems())
    start = integrator.start(System(*system), start_wells, masses=masses, velocities=velocities)

    @jit
    def there_and_back(state):
        def several(state):
            return jax.lax.fori_loop(0, 5, lambda _, s: integrator.step(s, jax_wells), state)

        there = several(state)
        return there, integrator.reversed(several(integrator.reversed(there)))

    there, found = there_and_back(start)
    assert jnp.abs(start.system.positions - there.system.positions).max() > 1e-3
    for name in ("positions", "cell"):
        np.testing.assert_allclose(getattr(found.system, name), getattr(start.system, name), atol=1e-13)
    np.testing.assert_allclose(found.velocities, start.velocities, atol=1e-13)


def test_without_x64_torch_still_computes_times_and_noise_in_64_bits():
    system, masses, velocities = two_systems()
    narrow = system._replace(positions=system.positions.float(), cell=system.cell.float())
    _, theirs = both("npt")
    _, noisy = both("langevin")
    with jax.enable_x64(False):
        for kind, reference in (("npt", theirs), ("langevin", noisy)):
            ours, _ = both(kind)
            options = {"masses": masses.float(), "velocities": velocities.float(), "seed": 5}
            expected = reference.start(narrow, wells_in_double, **options)
            options = {k: jnp.asarray(v) for k, v in options.items() if k != "seed"} | {"seed": 5}
            model = dynamics.TorchModel(wells_in_double)
            state = ours.start(System(*for_jax(tuple(narrow))), model, **options)
            assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(state)} <= {1, 4}
            found = jit(lambda s, ours=ours, model=model: jax.lax.fori_loop(0, 3, lambda _, c: ours.step(c, model), s))(
                state
            )
            for _ in range(3):
                expected = reference.step(expected, wells_in_double)
            np.testing.assert_allclose(found.velocities, expected.velocities, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(found.system.positions, expected.system.positions, rtol=1e-6, atol=1e-6)
        dtypes, once = jax.tree.map(jnp.result_type, state), ours.step(state, model)
    again = ours.step(state, model)  # such a state goes on where JAX has 64 bits
    assert jax.tree.map(jnp.result_type, again) == dtypes
    np.testing.assert_array_equal(again.system.positions, once.system.positions)


def wells_in_double(system):
    found = wells()(system._replace(positions=system.positions.double(), cell=system.cell.double()))
    return in_torch.Evaluation(*(value.to(system.positions.dtype) for value in found))


def test_parts_return_only_what_they_change():
    """Masses, parameters and the cell of NVE do not go through torch, so `scan` finds them constant."""
    integrator = dynamics.nve(0.05)
    system, masses, velocities = (for_jax(v) for v in two_systems())
    start = integrator.start(System(*system), start_wells, masses=masses, velocities=velocities)
    after = integrator.step(start, start_wells)
    assert after.masses is start.masses and after.system.cell is start.system.cell
    assert after.extra["dt"] is start.extra["dt"] and after.system.positions is not start.system.positions


# -- derivatives ----------------------------------------------------------------------------------


@pytest.mark.everyday_cases("torch-npt", "jax-langevin")
@pytest.mark.parametrize("kind", ["npt", "langevin"])
@pytest.mark.parametrize("forces", ["jax", "torch"])
def test_derivatives_of_trajectories_are_those_of_finite_differences(kind, forces):
    integrator, _ = both(kind)
    system, masses, velocities = (for_jax(v) for v in two_systems())
    torch_model = dynamics.TorchModel(wells())
    ours = jax_wells if kind == "npt" else dynamics.FromEnergies(jax_wells.function, stress=False)
    model = jax.jit(ours) if forces == "jax" else torch_model
    start = integrator.start(System(*system), model, masses=masses, velocities=velocities, seed=3)
    names = [name for name in ("dt", "temperature", "pressure") if name in start.extra]
    weights = jax.random.normal(jax.random.key(0), velocities.shape)

    def end(factors):
        model = functools.partial(ours, scale=factors["scale"]) if forces == "jax" else torch_model
        extra = {name: start.extra[name] * factors[name] for name in names}
        state = start.at(start.system.positions * factors["positions"], velocities=start.velocities * factors["v"])
        state = integrator.evaluated(state.having(**extra), model)
        state, _ = jax.lax.scan(lambda s, _: (integrator.step(s, model), None), state, None, length=4)
        return (weights * (state.system.positions + state.velocities**2)).sum() + (state.system.cell**3).sum()

    factors = {name: jnp.array(1.0) for name in (*names, "positions", "v", *(["scale"] if forces == "jax" else []))}
    compiled = jit(end)
    slopes = jit(jax.grad(end))(factors)
    (along,) = jit(lambda f: jax.jvp(end, (f,), (jax.tree.map(jnp.ones_like, f),))[1:])(factors)
    for name, slope in slopes.items():
        h = 1e-5
        up, down = (compiled({**factors, name: factors[name] + s * h}) for s in (1, -1))
        difference = float(up - down) / (2 * h)
        assert abs(difference) > 1e-4, name
        assert abs(slope - difference) < 1e-6 * abs(difference) + 1e-8, name
    np.testing.assert_allclose(along, sum(slopes.values()), rtol=1e-10)


# -- models ---------------------------------------------------------------------------------------


def test_stress_and_forces_are_those_of_torch():
    """In a cell, a batch, without a cell or volume, with a list of neighbors. Virials of torch are no derivatives."""
    energies = PairPotential.of(SOFT)
    atoms = crystal((2, 1, 1))
    cell, x = jnp.asarray(atoms.cell.array), jnp.asarray(atoms.positions)
    options = {"sigma": 3.4, "epsilon": 0.0104, "energy_reduction": "system"}
    model = dynamics.FromEnergies(lambda system, *near: energies(system, *near, **options))

    def expected(system):
        found = argon()(TorchSystem(*(None if v is None else torch.as_tensor(np.array(v)) for v in system)))
        return [v.numpy() for v in found if v is not None]

    one = System(x, cell=cell)
    batch = System(
        jnp.concatenate([x, 1.03 * x]), cell=jnp.stack([cell, 1.03 * cell]), batch_idx=jnp.repeat(jnp.arange(2), len(x))
    )
    calls = {
        "cell": (one, ()),
        "neighbors": (one, (one.neighbors(5.5),)),
        "matrix": (one, (one.neighbors(6.0, as_matrix=True, half=True),)),
        "batch": (batch._replace(batch_idx=batch.batch_idx.astype(jnp.int32)), ()),
        "molecule": (System(x), ()),
        "no volume": (System(x, cell=cell.at[2].set(0.0), pbc=jnp.array([True, True, False])), ()),
    }
    for name, (system, near) in calls.items():
        found = [v for v in jit(model)(system, *near) if v is not None]
        for f, e in zip(found, expected(system), strict=True):
            np.testing.assert_allclose(f, e, rtol=1e-9, atol=1e-12, err_msg=name)
    for count in (1, 2):  # a batch whose shapes do not tell how many systems there are: the energies do
        systems = jnp.repeat(jnp.arange(count, dtype=jnp.int32), len(x))
        shared = System(jnp.tile(x, (count, 1)), cell=cell[None], batch_idx=systems)
        counted = dynamics.FromEnergies(functools.partial(energies, num_systems=count, **options))
        for f, e in zip(jit(counted)(shared), expected(one), strict=True):
            np.testing.assert_allclose(f, np.tile(e, (count,) + (1,) * (e.ndim - 1)), rtol=1e-9, atol=1e-12)
    single = one._replace(cell=cell[None], batch_idx=jnp.zeros(len(x), jnp.int32))
    for f, e in zip(dynamics.TorchModel(argon())(single), expected(one), strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="a single system no `batch_idx`"):
        dynamics.TorchModel(argon())(shared._replace(cell=None))
    without = jit(dynamics.FromEnergies(model.function, stress=False))(one)
    assert without.stress is None
    np.testing.assert_allclose(without.forces, jit(model)(one).forces, rtol=1e-12)


def test_torch_models_have_derivatives():
    model = dynamics.TorchModel(wells())
    system = System(*for_jax(tuple(two_systems()[0])))
    weights = jnp.sin(jnp.arange(21.0).reshape(7, 3))

    def loss(scale, model):
        return (weights * model(system._replace(positions=scale * system.positions)).forces).sum()

    slope = jit(jax.grad(loss), static_argnums=1)(1.0, model)
    np.testing.assert_allclose(slope, jit(jax.grad(loss), static_argnums=1)(1.0, jax_wells), rtol=1e-10)
    for found, expected in zip(jit(model)(system), start_wells(system), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)
    assert dynamics.TorchModel(wells(), stress=False)(system).stress is None


def test_npt_with_a_list_that_follows_atoms_and_cell():
    """Argon ends where torch ends, which has a list of its own, although the list was too small at first and later."""
    atoms = crystal()
    masses, velocities = np.full(len(atoms), 40.0), np.random.default_rng(2).normal(0.0, 0.02, (len(atoms), 3))
    energies = PairPotential.of(SOFT)
    model = dynamics.FromEnergies(
        lambda system, near: energies(system, near, sigma=3.4, epsilon=0.0104, energy_reduction="system")
    )
    arguments = (0.3, 0.01, 0.002), {"cell": "full", "barostat_time": 5.0}
    integrator = dynamics.npt(*arguments[0], **arguments[1])
    start = integrator.start(
        System(jnp.asarray(atoms.positions), cell=jnp.asarray(atoms.cell.array)),
        dynamics.TorchModel(argon()),
        masses=masses,
        velocities=jnp.asarray(velocities),
    )

    @jit
    def run(state, near):
        def advance(carry):
            state, near = integrator.step_with_list(carry[0], model, carry[1])
            return state, near, carry[2] + near.rebuilt

        return jax.lax.while_loop(
            lambda carry: (carry[0].step < 40) & carry[1].valid.all(), advance, (state, near, jnp.zeros(1, int))
        )

    # the list has too little room at the start, and again when the atoms have moved
    state, ends, width = start, [], 4
    while state.step < 40:
        near = prepare_neighbor_list(state.system.positions, 5.5, state.system.cell, skin=0.6, max_neighbors=width)
        state, near, rebuilt = run(state, near)
        ends.append((int(state.step), bool(near.valid.all())))
        width = int(near.largest.max())
    assert ends[0] == (0, False) and len(ends) > 2 and ends[-1] == (40, True)
    assert not any(fits for _, fits in ends[:-1])
    check_neighbor_list_state(near)
    assert 0 < rebuilt[0] < 20
    theirs = in_torch.npt(*arguments[0], **arguments[1])
    expected = theirs.start(
        TorchSystem(torch.tensor(atoms.positions), cell=torch.tensor(atoms.cell.array)),
        argon(),
        masses=torch.tensor(masses),
        velocities=torch.tensor(velocities),
    )
    for _ in range(40):
        expected = theirs.step(expected, argon())
    np.testing.assert_allclose(state.system.positions, expected.system.positions, atol=1e-9)
    np.testing.assert_allclose(state.system.cell, expected.system.cell, atol=1e-9)
    assert np.abs(np.array(state.system.cell[0]) - atoms.cell.array).max() > 1e-3


def test_a_list_follows_the_shards_of_positions():
    """`jax.shard_map`, where the state of the start is the same on all devices, and only positions are sharded."""
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    atoms = crystal()
    energies = PairPotential.of(SOFT)
    model = dynamics.FromEnergies(
        lambda system, near: energies(system, near, sigma=3.4, epsilon=0.0104, energy_reduction="system")
    )
    x, cell = jnp.asarray(atoms.positions), jnp.asarray(atoms.cell.array)
    integrator = dynamics.nve(0.3)
    start = integrator.start(System(x, cell=cell), dynamics.TorchModel(argon()), masses=np.full(len(atoms), 40.0))
    near = prepare_neighbor_list(x, 5.5, cell, skin=0.6, max_neighbors=100)

    def step(x):
        state = start._replace(system=start.system._replace(positions=x))
        return integrator.step_with_list(state, model, near)[0].system.positions

    rows = jax.sharding.PartitionSpec("i")
    found = jit(jax.shard_map(step, mesh=mesh, in_specs=rows, out_specs=rows))(x)
    np.testing.assert_array_equal(found, jit(step)(x))
    assert (found != x).any()


# -- errors ---------------------------------------------------------------------------------------


class Counter(Flow):
    """A flow whose variable is not there from the start."""

    def __call__(self, state, h):
        return state._replace(extra={**state.extra, "count": state.extra.get("count", 0.0) + h})


def test_errors_name_what_is_wrong():
    integrator = dynamics.langevin(0.1, 0.1)
    system, spring = System(jnp.ones((2, 3))), dynamics.FromEnergies(lambda system: (system.positions**2).sum())
    with pytest.raises(TypeError, match="`start` reads values: call it outside of jit"):
        jit(lambda x: integrator.start(System(x), spring, masses=jnp.ones(2)))(system.positions)
    with pytest.raises(TypeError, match="`model` is traced"):
        jit(
            lambda k: integrator.start(
                system, dynamics.FromEnergies(lambda s: (k * s.positions).sum()), masses=np.ones(2)
            )
        )(1.0)
    with pytest.raises(TypeError, match=r"state\.having"):
        jit(lambda t: dynamics.langevin(0.1, t))(0.1)
    with pytest.raises(ValueError, match="`masses` are needed"):
        integrator.start(system, spring)
    for seed in (2**40, np.int64(2**40)):
        with jax.enable_x64(False), pytest.raises(ValueError, match="`seed` must fit into 32 bits"):
            integrator.start(system, spring, masses=np.ones(2), seed=seed)
    with pytest.raises(ValueError, match="must be positive"):
        dynamics.nve(-1.0).start(system, spring, masses=jnp.ones(2))
    state = integrator.start(system, spring, masses=jnp.ones(2), seed=np.int64(0))
    assert state.having(temperature=0.2).extra["temperature"].tolist() == [[0.2]]
    with pytest.raises(ValueError, match="`temperature` must be a number or have shape"):
        state.having(temperature=jnp.ones(2))
    with pytest.raises(ValueError, match="random numbers cannot be reversed"):
        integrator.reversed(state)
    with pytest.raises(ValueError, match=r"`model`: energies must have shape \(1,\), got \(2,\)"):
        integrator.step(state, dynamics.FromEnergies(lambda system: (system.positions**2).sum(1)))
    with pytest.warns(NvalchemiopsWarning, match=r"returned energies of shape \(2,\), which is \(1,\) for"):
        dynamics.FromEnergies(lambda system: (system.positions**2).sum(1))(system)
    with pytest.raises(Exception, match="gives no stress"):
        dynamics.TorchModel(lambda s: in_torch.Evaluation(s.positions.sum()[None], s.positions))(
            system._replace(cell=jnp.eye(3))
        )
    with pytest.raises(ValueError, match="gave no stress"):
        dynamics.npt(0.1, 0.1, 0.0).start(
            system._replace(cell=jnp.eye(3)), dynamics.FromEnergies(spring.function, stress=False), masses=jnp.ones(2)
        )
    counting = dynamics.Integrator(in_torch.Integrator([(Counter(), 1.0), in_torch.FORCES], {"dt": 0.1}))
    with pytest.raises(ValueError, match="`first_half`: flows change the fields of the state, which `start` must"):
        counting.step(counting.start(system, spring, masses=jnp.ones(2)), spring)
    for kind in (dynamics.FromEnergies, dynamics.TorchModel):
        with pytest.raises(TypeError, match="must be callable"):
            kind(3)


OF_VELOCITIES = {
    "kinetic_energy": ("velocities", "masses"),
    "kinetic_tensor": ("velocities", "masses"),
    "temperature": ("velocities", "masses"),
    "remove_momentum": ("velocities", "masses"),
    "remove_rotation": ("velocities", "positions", "masses"),
    "degrees_of_freedom": ("masses",),
    "maxwell_boltzmann": ("masses", "temperature"),
}


@pytest.mark.parametrize("name", OF_VELOCITIES)
def test_functions_of_velocities_are_those_of_torch(name):
    rng = np.random.default_rng(0)
    given = {"velocities": rng.normal(size=(5, 3)), "positions": rng.normal(size=(5, 3)), "temperature": TEMPERATURES}
    given |= {"masses": 1.0 + rng.random(5)}
    arguments, batch_idx = [given[key] for key in OF_VELOCITIES[name]], np.array([1, 0, 1, 1, 0])
    call = functools.partial(getattr(dynamics, name), num_systems=2)
    tensors = [torch.tensor(value, requires_grad=True) for value in arguments]
    expected = getattr(in_torch, name)(*tensors, torch.tensor(batch_idx), 2)
    found = jit(call)(*arguments, batch_idx=batch_idx)
    np.testing.assert_allclose(found, expected.detach(), rtol=1e-12, atol=1e-14)
    if OF_VELOCITIES[name][0] == "velocities":
        slope = jit(jax.grad(lambda v: (call(v, *arguments[1:], batch_idx=batch_idx) ** 2).sum()))(arguments[0])
        (of_torch,) = torch.autograd.grad(expected.square().sum(), tensors[0])
        np.testing.assert_allclose(slope, of_torch, rtol=1e-12, atol=1e-13)
    with pytest.raises(ValueError, match="`num_systems` is needed"):
        getattr(dynamics, name)(*arguments, batch_idx=batch_idx)


def test_seeds_and_keys_of_velocities_may_be_traced():
    def drawn(seed, key):
        return dynamics.maxwell_boltzmann(jnp.ones(2), 1.0, seed=seed, keys=key)

    expected = drawn(5, np.array([3]))
    assert np.array_equal(jax.jit(drawn)(jnp.array([5]), jnp.array([3])), expected)
    assert np.array_equal(jax.vmap(drawn)(jnp.array([4, 5]), jnp.array([[3], [3]]))[1], expected)
