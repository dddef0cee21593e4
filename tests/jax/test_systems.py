"""Systems and neighbors of JAX arrays: pytrees whose flags stay static, taken by torch functions and by potentials."""

import functools

import ase.build
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import nvalchemiops.jax
from nvalchemiops.jax.bridge import from_torch
from nvalchemiops.jax.interactions.pair import lennard_jones
from nvalchemiops.jax.neighbors import neighbor_list, prepare_neighbor_list
from nvalchemiops.jax.systems import Neighbors, System
from nvalchemiops.torch import systems as in_torch
from nvalchemiops.torch.interactions.pair import lennard_jones as lennard_jones_in_torch
from tests.jax.precision import double_precision  # noqa: F401

ATOMS = [ase.build.bulk("NaCl", "rocksalt", a=5.6, cubic=True), ase.build.bulk("Ar", "fcc", a=5.2)]
for number, atoms in enumerate(ATOMS):
    atoms.rattle(0.1, seed=number)


def test_systems_of_ase_are_those_of_torch():
    for atoms in (ATOMS, ATOMS[0], ase.build.molecule("H2O")):
        expected = in_torch.System.from_ase(atoms)
        found = System.from_ase(atoms)
        assert type(found) is System
        for name, value in expected._asdict().items():
            assert (getattr(found, name) is None) == (value is None)
            if value is not None:
                np.testing.assert_array_equal(getattr(found, name), value)
                assert isinstance(getattr(found, name), jax.Array)
        if found.cell is not None:
            np.testing.assert_allclose(found.volume, expected.volume, rtol=1e-14)
        assert (found.n_atoms, found.dtype) == (expected.n_atoms, found.positions.dtype)
        assert found.device == found.positions.device
    charges = np.linspace(-1.0, 1.0, 8)
    np.testing.assert_array_equal(System.from_ase(ATOMS[0], charges).charges, charges)
    with jax.enable_x64(False):
        assert System.from_ase(ATOMS[0]).positions.dtype == jnp.float32
    with pytest.raises(ValueError, match="has no volume"):
        _ = System(jnp.zeros((1, 3))).volume
    assert nvalchemiops.jax.System is System and {"System", "Neighbors"} <= set(dir(nvalchemiops.jax))


def test_one_batch_of_several():
    """Those of torch, as arrays."""
    systems, given = [System.from_ase(a) for a in ATOMS], [in_torch.System.from_ase(a) for a in ATOMS]
    near, lists = ([s.neighbors(4.0) for s in parts] for parts in (systems, given))
    found = System.concatenate(systems), Neighbors.concatenate(near, systems)
    expected = in_torch.System.concatenate(given), in_torch.Neighbors.concatenate(lists, given)
    for values, others in zip(found, expected):
        for value, other in zip(values, others):
            assert isinstance(value, jax.Array) == isinstance(other, torch.Tensor)
            np.testing.assert_array_equal(value, other)
    assert [*map(type, found)] == [System, Neighbors]
    with pytest.raises(TypeError, match=r"`systems` must hold System objects, got .*: give a list"):
        System.concatenate(systems[0])
    with pytest.raises(TypeError, match="`systems` are traced: make one batch outside of jit"):
        jax.jit(System.concatenate)(systems)


def test_none_is_no_leaf_and_flags_are_static():
    system = System.from_ase(ATOMS[0])
    near = system.neighbors(4.0, half=True)
    assert len(jax.tree.leaves(system)) == 4 and len(jax.tree.leaves(near)) == 3
    seen = []

    @jax.jit
    def through(system, near):
        seen.append((near.cutoff, near.half, near.padding, near.matrix, system.charges))
        return system._replace(positions=2.0 * system.positions), near._replace(half=False)

    doubled, full = through(system, near)
    through(system, near)
    assert seen == [(4.0, True, None, None, None)]  # traced once
    through(system, near._replace(cutoff=5.0))
    assert seen[1][0] == 5.0
    assert type(doubled) is System and type(full) is Neighbors and full.half is False and full.cutoff == 4.0
    np.testing.assert_array_equal(doubled.positions, 2.0 * system.positions)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(near)]
    assert paths == [".pairs", ".row_pointers", ".shifts"]
    mapped = jax.vmap(lambda s: s.volume)(jax.tree.map(lambda a: jnp.stack([a, a]), system))
    np.testing.assert_allclose(mapped, [5.6**3] * 2, rtol=1e-12)


@pytest.mark.parametrize("as_matrix", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_potentials_take_them_as_in_torch(as_matrix, half):
    system, tensors = System.from_ase(ATOMS), in_torch.System.from_ase(ATOMS)
    potential, reference = lennard_jones(4.0), lennard_jones_in_torch(4.0)
    options = {"sigma": 2.5, "epsilon": 0.1, "energy_reduction": "system"}
    near = system.neighbors(5.0, as_matrix=as_matrix, half=half)
    expected = reference(
        tensors, tensors.neighbors(5.0, as_matrix=as_matrix, half=half), **options, compute_forces=True
    )
    call = jax.jit(lambda s, n: potential(s, n, **options, compute_forces=True))
    for f, e in zip(call(system, near), expected, strict=True):
        np.testing.assert_array_equal(f, e)
    # as arguments of a torch function they are those of torch
    shapes = [jax.ShapeDtypeStruct((2,), float)] * 2
    wrapped = from_torch(lambda s, n: [reference(s, n, **options).energies, s.volume], shapes)
    energies, volumes = jax.jit(wrapped)(system, near)
    np.testing.assert_array_equal(energies, expected.energies)
    np.testing.assert_array_equal(volumes, tensors.volume)
    with pytest.raises(ValueError, match="`neighbors` reach to"):
        potential(system, near._replace(cutoff=3.0), **options)


def test_neighbors_of_a_state_are_those_of_its_list():
    system = System.from_ase(ATOMS[0])
    arguments = (system.positions, 4.0, system.cell)
    potential = lennard_jones(4.0)
    for options in ({"max_neighbors": 80}, {"return_neighbor_list": True, "coo_capacity": 900}, {"half_fill": True}):
        state = prepare_neighbor_list(*arguments, skin=0.5, **options)

        @jax.jit
        def energy(system, state):
            _, state = neighbor_list(system.positions, state=state)
            near = Neighbors.from_state(state)
            return potential(system, near, sigma=2.5, epsilon=0.1, energy_reduction="system"), near

        found, near = energy(system, state)
        assert near.half == options.get("half_fill", False) and near.cutoff == 4.0
        np.testing.assert_allclose(found, potential(system, sigma=2.5, epsilon=0.1).sum()[None], rtol=1e-12)
    with pytest.raises(ValueError, match="two lists"):
        Neighbors.from_state(prepare_neighbor_list(*arguments, cutoff2=5.0))


def test_neighbors_from_arrays_of_lists():
    system = System.from_ase(ATOMS[0])
    given = (system.positions, 4.0, system.cell)
    potential = functools.partial(lennard_jones(4.0), system, sigma=2.5, epsilon=0.1)
    expected = potential(system.neighbors(4.0))
    pairs, pointers, shifts = neighbor_list(*given, return_neighbor_list=True)
    listed = Neighbors.from_list(pairs, shifts, row_pointers=pointers, cutoff=jnp.array(4.0))
    np.testing.assert_array_equal(potential(listed), expected)
    matrix, counts, shifts = neighbor_list(*given, fill_value=-1, max_neighbors=60)
    static = {"padding": np.array([-1]), "cutoff": jnp.array(4.0)}
    for numbers in (counts, np.asarray(counts), np.asarray(counts).tolist(), None):
        of_matrix = functools.partial(Neighbors.from_matrix, shifts=shifts, counts=numbers, **static)
        for found in (potential(of_matrix(matrix)), jax.jit(lambda m, of=of_matrix: potential(of(m)))(matrix)):
            np.testing.assert_array_equal(found, expected)
    found = jax.jit(lambda counts: potential(Neighbors.from_matrix(matrix, shifts, counts=counts, **static)))(counts)
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match=f"`matrix` has 3 columns, but an atom has {counts.max()} neighbors"):
        Neighbors.from_matrix(matrix[:, :3], shifts[:, :3], counts=counts)
    assert Neighbors.from_matrix(matrix[:0], counts=counts[:0]).matrix.shape == (0, 60)


def test_neighbors_are_found_outside_of_jit_only():
    system = System.from_ase(ATOMS[0])
    with pytest.raises(TypeError, match="prepare_neighbor_list"):
        jax.jit(lambda s: s.neighbors(3.0))(system)
    with pytest.raises(TypeError, match="prepare_neighbor_list"):
        jax.jit(system.neighbors)(3.0)
    # the cutoff is static, also if it is given as an array
    near, other = (system.neighbors(jnp.array(r)) for r in (3.0, [3.0]))
    chosen = jax.jit(lambda p: jax.lax.cond(p, lambda: near, lambda: other))(True)
    assert chosen.cutoff == near.cutoff == 3.0 and type(near.cutoff) is float
    with pytest.raises(TypeError, match="Identity"):
        jax.jit(lambda s: s.positions)(system._replace(domain=torch.nn.Identity()))
