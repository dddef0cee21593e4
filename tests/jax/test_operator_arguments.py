"""JAX functions of operators: arguments that they take, name or refuse, signatures, and results in torch's terms."""

import copy
import functools
import importlib
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nvalchemiops.jax import neighbors, spline
from nvalchemiops.jax.interactions import dispersion, electrostatics, pair
from nvalchemiops.torch.interactions import electrostatics as torch_electrostatics
from tests.jax.precision import double_precision  # noqa: F401
from tests.jax.problem import JAX_TABLES, NEAR, NUMBERS, SYSTEM, to_jax
from tests.jax.signatures import SIGNATURES

NUMBERS_OF_TORCH = {
    "coulomb_energy": (
        "cutoff",
        3.0,
        lambda c, x, q: electrostatics.coulomb_energy(x, q, to_jax(SYSTEM.cell), c, **_NEAR),
    ),
    "dsf_coulomb": ("cutoff", 3.0, lambda c, x, q: electrostatics.dsf_coulomb(x, q, c, 0.2, **_MATRIX)[0]),
    "ewald_summation": (
        "surface_dielectric",
        2.0,
        lambda c, x, q: electrostatics.ewald_summation(x, q, to_jax(SYSTEM.cell), surface_dielectric=c),
    ),
    "particle_mesh_ewald": (
        "accuracy",
        1e-4,
        lambda c, x, q: electrostatics.particle_mesh_ewald(x, q, to_jax(SYSTEM.cell), accuracy=c),
    ),
    "dftd3": (
        "k1",
        16.0,
        lambda c, x, q: dispersion.dftd3(x, to_jax(NUMBERS), 0.4, 4.0, 1.9, k1=c, d3_params=JAX_TABLES, cutoff=6.0)[0],
    ),
}
_NEAR = to_jax(NEAR)
_MATRIX = {"neighbor_list": _NEAR["neighbor_list"], "neighbor_ptr": _NEAR["neighbor_ptr"]}


@pytest.mark.parametrize("name", NUMBERS_OF_TORCH)
def test_numbers_of_torch_have_no_derivative(name):
    """Alone and beside positions; they may be traced, and `stop_gradient` lets others be differentiated."""
    argument, value, call = NUMBERS_OF_TORCH[name]
    x, q = to_jax([SYSTEM.positions, SYSTEM.charges])

    def energy(number, x):
        return call(number, x, q).sum()

    for wrt in (0, (0, 1)):
        with pytest.raises(NotImplementedError, match=f"{name}: there is no derivative by `{argument}`"):
            jax.make_jaxpr(jax.grad(energy, wrt))(jnp.asarray(value), x)
    with pytest.raises(NotImplementedError, match=f"`{argument}`"):
        jax.make_jaxpr(jax.jacfwd(energy))(jnp.asarray(value), x)
    constant = jax.jit(jax.grad(lambda c, x: energy(jax.lax.stop_gradient(c), x), (0, 1)))(jnp.asarray(value), x)
    assert constant[0] == 0
    np.testing.assert_array_equal(constant[1], jax.jit(jax.grad(lambda x: energy(jnp.asarray(value), x)))(x))


@pytest.mark.parametrize("module", SIGNATURES)
def test_signatures_are_those_that_clients_know(module):
    functions = importlib.import_module(f"nvalchemiops.jax.{module}")
    for name, text in SIGNATURES[module].items():
        known = inspect.signature(eval(f"lambda {text}: None")).parameters
        ours = inspect.signature(getattr(functions, name)).parameters
        free = any(p.kind is p.VAR_KEYWORD for p in ours.values())
        for place, (parameter, expected) in enumerate(known.items()):
            if expected.kind is expected.KEYWORD_ONLY and free and parameter not in ours:
                continue
            assert parameter in ours, f"{name}: {parameter}"
            if expected.default is not expected.empty:  # what they must give may be optional here
                assert ours[parameter].default == expected.default, f"{name}: {parameter}"
            if expected.kind is not expected.KEYWORD_ONLY:
                assert list(ours)[place] == parameter, f"{name}: {parameter}"


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"energy_reduction": jnp.array(1)}, TypeError, "energy_reduction"),
        ({"cutoff": -1.0}, Exception, "cutoff"),
        ({"positions": SYSTEM.positions}, TypeError, "torch tensor"),
        ({"nonsense": 1}, TypeError, r"ewald_summation\(\) got an unexpected keyword argument 'nonsense'"),
        ({"positions": np.zeros((2, 6, 3))}, ValueError, "`positions` must have shape"),
        ({"positions": "x"}, TypeError, "`positions` must be an array, got str"),
    ],
)
def test_bad_arguments_are_named(change, error, text):
    arguments = {**to_jax({"positions": SYSTEM.positions, "charges": SYSTEM.charges, "cell": SYSTEM.cell}), **change}
    traced = {k: v for k, v in arguments.items() if isinstance(v, jax.Array)}
    fixed = {k: v for k, v in arguments.items() if k not in traced}
    with pytest.raises(error, match=text):
        jax.jit(lambda traced: electrostatics.ewald_summation(**traced, **fixed))(traced)


def test_an_unknown_argument_is_named_with_the_function():
    with pytest.raises(TypeError, match=r"cell_list\(\) got an unexpected keyword argument 'rebuild_flags'"):
        neighbors.cell_list(to_jax(SYSTEM.positions), 3.0, rebuild_flags=None)


def test_shapes_and_dtypes_are_refused_when_a_function_is_traced():
    x, q, cell = to_jax([SYSTEM.positions, SYSTEM.charges, SYSTEM.cell])
    with pytest.raises(TypeError, match="`positions` must be"):
        jax.make_jaxpr(electrostatics.ewald_summation)(x.astype(jnp.int32), q, cell)
    with pytest.raises(ValueError, match="`charges`"):
        jax.make_jaxpr(electrostatics.ewald_summation)(x, q[:-1], cell)
    with pytest.raises(ValueError, match="`epsilon`"):
        jax.make_jaxpr(lambda x: pair.lennard_jones(3.0)(x, cell, sigma=1.0, **to_jax(NEAR)))(x)
    with pytest.raises(ValueError, match="`cell`"):
        jax.make_jaxpr(lambda x: neighbors.neighbor_list(x, 3.0, cell[:, :2], max_neighbors=9))(x)
    with pytest.raises(ValueError, match="`values`"):
        jax.make_jaxpr(lambda x: spline.spline_spread(x, q[1:], cell, (8, 8, 8)))(x)
    with pytest.raises(ValueError, match="`numbers`"):
        jax.make_jaxpr(lambda x: dispersion.dftd3(x, to_jax(NUMBERS)[1:], 0.4, 4.0, 1.9, d3_params=JAX_TABLES))(x)


def test_arrays_that_torch_cannot_have_are_refused_by_their_dtype():
    with pytest.raises(TypeError, match="has dtype key<fry>, which torch does not have"):
        neighbors.neighbor_list(jax.random.key(0), 3.0)
    with pytest.raises(TypeError, match="has dtype int4, which torch does not have"):
        electrostatics.mesh_spacing_to_dimensions(jnp.eye(3, dtype="int4"), 0.5)


def test_parameters_go_through_jit():
    x, q, cell = to_jax(list(SYSTEM[:3]))
    estimated = electrostatics.estimate_pme_parameters(np.asarray(x).tolist(), cell, accuracy=1e-4)

    def energy(p):
        options = {"mesh_dimensions": p.mesh_dimensions, "cutoff": 3.0, "energy_reduction": "system"}
        return electrostatics.particle_mesh_ewald(x, q, cell, p.alpha, **options)[0]

    np.testing.assert_array_equal(jax.jit(energy)(estimated), energy(estimated))
    assert len(jax.tree.leaves(electrostatics.estimate_ewald_parameters(x, cell))) == 3


def test_numbers_may_be_arrays_with_one_entry():
    """`estimate_pme_parameters` returns such cutoffs, and torch takes them."""
    x, q, cell = to_jax(list(SYSTEM[:3]))
    cutoff = electrostatics.estimate_pme_parameters(x, cell, accuracy=1e-2).real_space_cutoff
    for search in (neighbors.neighbor_list, neighbors.prepare_neighbor_list):
        for found, other in zip(*(jax.tree.leaves(search(x, r, cell)) for r in (cutoff, float(cutoff[0])))):
            np.testing.assert_array_equal(found, other)
    given = {"alpha": 0.5, "mesh_dimensions": (8, 8, 8)}
    for transform in (lambda function: function, jax.jit):
        calls = [
            transform(lambda x, r=r: electrostatics.particle_mesh_ewald(x, q, cell, cutoff=r, **given))
            for r in (cutoff, cutoff[0], float(cutoff[0]))
        ]
        for call in calls:
            np.testing.assert_array_equal(call(x), calls[-1](x))


def test_an_alpha_of_another_precision_differentiates():
    x, q, cell = (t.astype(jnp.float32) for t in to_jax(list(SYSTEM[:3])))

    def energy(alpha):
        options = {"miller_bounds": (2, 2, 2), "cutoff": 3.5, "energy_reduction": "system"}
        return electrostatics.ewald_summation(x, q, cell, alpha, **options)[0]

    wide, narrow = jax.grad(energy)(jnp.float64(0.6)), jax.grad(energy)(jnp.float32(0.6))
    assert wide.dtype == jnp.float64 and narrow.dtype == jnp.float32
    assert energy(jnp.float32(0.6)).dtype == jnp.float64
    np.testing.assert_allclose(wide, narrow, rtol=1e-4)


REAL_NUMBERS = {
    "epsilon": lambda e, x, q, c: pair.lennard_jones(3.0)(x, c, sigma=1.2, epsilon=e, **to_jax(NEAR)),
    "alpha": lambda a, x, q, c: electrostatics.dsf_coulomb(x, q, 3.0, a, **_MATRIX)[0],
    "widths": lambda w, x, q, c: electrostatics.ewald_summation(x, q, c, 0.5, miller_bounds=(2, 2, 2), widths=w),
    "s6": lambda s, x, q, c: dispersion.dftd3(
        x, to_jax(NUMBERS), 0.4, 4.0, 1.9, s6=s, d3_params=JAX_TABLES, cutoff=6.0
    )[0],
}


@pytest.mark.parametrize("name", REAL_NUMBERS)
def test_a_whole_number_may_be_given_to_a_jitted_function(name):
    """Where it is an array of integers without axes; or as a number of NumPy."""
    given = to_jax(list(SYSTEM[:3]))
    call = jax.jit(REAL_NUMBERS[name])
    expected = call(1.0, *given)
    np.testing.assert_array_equal(call(1, *given), expected)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda value: call(value, *given)))(jnp.array([1]))[0], expected)
    np.testing.assert_array_equal(REAL_NUMBERS[name](np.int64(1), *given), expected)


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_potentials_without_a_list_name_parameters_that_are_wrong(transform):
    """Not from inside of the compiled program, which searches the neighbors."""
    x, _, cell = to_jax(list(SYSTEM[:3]))
    call = transform(lambda x, **parameters: pair.lennard_jones(3.0)(x, cell, sigma=1.0, **parameters))
    with pytest.raises(ValueError, match=r"^`epsilon` is missing: this potential needs sigma, epsilon"):
        call(x)
    with pytest.raises(TypeError, match=r"^`types` is neither an argument nor a parameter"):
        call(x, epsilon=jnp.ones(()), types=jnp.zeros(len(x), int))


def test_potentials_are_pickled():
    potential = pair.lennard_jones(3.5, r_switch=2.5)
    for found in (pickle.loads(pickle.dumps(potential)), copy.deepcopy(potential)):
        x, cell = to_jax([SYSTEM.positions, SYSTEM.cell])
        given = {"sigma": 1.2, "epsilon": 0.5, **to_jax(NEAR)}
        np.testing.assert_array_equal(found(x, cell, **given), potential(x, cell, **given))


def test_lists_that_hold_traced_numbers():
    x, q = to_jax([SYSTEM.positions, SYSTEM.charges])

    def energy(length):
        cell = [[length, 0.0, 0.0], [0.0, length, 0.0], [0.0, 0.0, length]]
        return electrostatics.ewald_summation(x, q, cell, 0.5, cutoff=3.0, miller_bounds=(2, 2, 2)).sum()

    np.testing.assert_array_equal(jax.jit(energy)(9.0), energy(9.0))
    with pytest.raises(TypeError, match="`miller_bounds` must be known"):
        jax.jit(lambda n: electrostatics.ewald_summation(x, q, 9.0 * jnp.eye(3), 0.5, miller_bounds=(2, n, 2)))(3)


def test_periodicity_may_be_traced():
    x, q, cell = to_jax(list(SYSTEM[:3]))

    def energy(pbc):
        return electrostatics.compute_slab_correction(x, q, cell, pbc, energy_reduction="system")[0]

    several = [[True, True, False], [True, False, True]]
    np.testing.assert_array_equal(jax.jit(jax.vmap(energy))(jnp.array(several)), [energy(pbc) for pbc in several])


@pytest.mark.parametrize("sum_of", [electrostatics.ewald_summation, electrostatics.particle_mesh_ewald])
def test_molecules_need_no_cell(sum_of):
    """All pairs, as in torch; also with parameters of Ewald sums, under `vmap`, and in a batch that says its size."""
    x, q = to_jax(list(SYSTEM[:2]))
    first, second = np.triu_indices(len(q), 1)

    def expected(x):
        return (q[first] * q[second] / jnp.linalg.norm(x[first] - x[second], axis=1)).sum()

    def energy(x, pbc=False, **options):
        return sum_of(x, q, pbc=pbc, energy_reduction="system", **options)[0]

    several = jnp.stack([x, 1.5 * x])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-11)
    jax.tree.map(close, jax.jit(jax.value_and_grad(energy))(x), jax.value_and_grad(expected)(x))
    close(jax.jit(energy)(x, jnp.zeros(3, bool)), expected(x))
    found = jax.jit(jax.vmap(functools.partial(energy, alpha=0.5, cutoff=3.0)))(several)
    close(found, jax.vmap(expected)(several))
    batch = {"batch_idx": jnp.repeat(jnp.arange(2), len(q)), "energy_reduction": "system"}
    flat, charges = several.reshape(-1, 3), jnp.tile(q, 2)
    close(sum_of(flat, charges, None, pbc=jnp.zeros((2, 3), bool), **batch), found)
    with pytest.raises(ValueError, match=r"need `pbc` \(n_systems, 3\)"):
        sum_of(flat, charges, None, pbc=False, **batch)


def test_periodicity_may_be_integers():
    """As in ASE, also where the function is traced; not in arrays of JAX, which may be traced themselves."""
    (x, q, cell), slab = to_jax([SYSTEM.positions, SYSTEM.charges, SYSTEM.cell]), (True, True, False)
    options = {"slab_correction": True, "alpha": 0.5, "cutoff": 3.0, "k_cutoff": 3.0}
    known = electrostatics.ewald_summation(x, q, cell, pbc=jnp.asarray(slab), **options)
    for pbc in ((1, 1, 0), np.array([1, 1, 0])):
        found = jax.jit(lambda x, pbc=pbc: electrostatics.ewald_summation(x, q, cell, pbc=pbc, **options))(x)
        np.testing.assert_allclose(found, known, rtol=1e-12)
        bins = [neighbors.estimate_batch_cell_list_sizes(x, cell=cell, pbc=axes)[1] for axes in (pbc, slab)]
        assert (bins[0] == bins[1]).all()
    with pytest.raises(TypeError, match="`pbc` must be bool"):
        electrostatics.ewald_summation(x, q, cell, pbc=jnp.asarray([1, 1, 0]), **options)


def test_potentials_in_molecules_need_no_cell():
    x, q = to_jax(list(SYSTEM[:2]))
    first, second = np.triu_indices(len(q), 1)
    for pbc in (False, jnp.zeros(3, bool)):
        potential = jax.jit(lambda x, pbc=pbc: electrostatics.electrostatic_potential(x, q, None, pbc=pbc)[0])(x)
        pairs = (q[first] * q[second] / jnp.linalg.norm(x[first] - x[second], axis=1)).sum()
        np.testing.assert_allclose((potential[:, 0] * q).sum() / 2, pairs, rtol=1e-12)


def test_coulomb_energies_have_the_channels_of_charges():
    x, q, cell = SYSTEM[:3]
    several = torch.stack([q, 2.0 * q], 1)
    found = electrostatics.coulomb_energy(*to_jax([x, several, cell]), 3.5)
    np.testing.assert_array_equal(found, torch_electrostatics.coulomb_energy(x, several, cell, 3.5).numpy())


MESSAGES = {
    "sums": (lambda x, q, c: electrostatics.ewald_summation(x, q.astype("f2"), c), r"`charges` has dtype float16"),
    "lists": (lambda x, q, c: neighbors.neighbor_list(x, 3.0, c.astype("f2")), "`cell` has dtype float16"),
    "choices": (lambda x, q, c: electrostatics.estimate_pme_parameters(x, c.astype("f2")), "`cell` has dtype float16"),
    "potentials": (
        lambda x, q, c: pair.lennard_jones(3.0)(x, c, sigma=None, epsilon=1.0, **to_jax(NEAR)),
        r"a number or a jax\.Array",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_have_the_terms_of_jax(name):
    call, text = MESSAGES[name]
    with pytest.raises(TypeError, match=text) as caught:
        call(*to_jax(list(SYSTEM[:3])))
    assert "torch" not in str(caught.value) and ".to(" not in str(caught.value)


def test_choices_of_parameters_are_torchs_and_need_values():
    x, cell = to_jax([SYSTEM.positions, SYSTEM.cell])
    ours = electrostatics.estimate_pme_parameters(x, cell, accuracy=1e-4)
    theirs = torch_electrostatics.estimate_pme_parameters(SYSTEM.positions, SYSTEM.cell, accuracy=1e-4)
    assert ours.mesh_dimensions == theirs.mesh_dimensions
    np.testing.assert_array_equal(ours.alpha, theirs.alpha.numpy())
    assert type(ours) is electrostatics.PMEParameters
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(electrostatics.estimate_pme_parameters)(x, cell)
    bounded = jax.jit(lambda c: electrostatics.generate_k_vectors_ewald_summation(c, 3.0, (2, 2, 2)))(cell)
    expected = torch_electrostatics.generate_k_vectors_ewald_summation(SYSTEM.cell, 3.0, (2, 2, 2))
    np.testing.assert_array_equal(bounded, expected.numpy())
    assert electrostatics.generate_k_vectors_ewald_summation(cell, 2.0).shape[1] == 3


def test_without_64_bits_everything_is_in_32():
    with jax.enable_x64(False):
        x, q, cell = (jnp.asarray(t.numpy(), jnp.float32) for t in SYSTEM[:3])
        energies, forces = jax.jit(lambda *a: electrostatics.ewald_summation(*a, compute_forces=True))(x, q, cell)
        assert energies.dtype == forces.dtype == jnp.float32
        single = [t.to(torch.float32) for t in SYSTEM[:3]]
        expected = torch_electrostatics.ewald_summation(*single, compute_forces=True)
        np.testing.assert_array_equal(forces, expected[1].numpy())


def test_operators_are_functions_with_documentation():
    for module in (electrostatics, dispersion, spline):
        for name in module.__all__:
            found = getattr(module, name)
            assert isinstance(found, type) or inspect.isfunction(found), name
            assert found.__name__ == name and "tensor" not in (inspect.getdoc(found) or "tensor"), name
