"""The bridge and operators on a GPU, where torch and JAX both have one: XLA's stream and memory, the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nvalchemiops.jax.bridge import from_torch
from nvalchemiops.jax.interactions.electrostatics import ewald_summation
from nvalchemiops.jax.neighbors import neighbor_list
from nvalchemiops.jax.operators import to_torch
from nvalchemiops.torch.interactions import electrostatics as in_torch
from tests.jax.precision import double_precision  # noqa: F401
from tests.support.systems import triclinic

pytestmark = pytest.mark.gpu
SYSTEM = triclinic(40, seed=3)
OPTIONS = {"alpha": 0.6, "miller_bounds": (3, 3, 3), "cutoff": 4.0, "energy_reduction": "system"}


@pytest.fixture(autouse=True)
def gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    return jax.devices()[0]


def test_a_function_works_on_the_device_and_stream_of_xla():
    """On a copy of its arguments, which it may change."""
    seen = []

    def function(x):
        seen.append((x.device.type, x.data_ptr(), torch.cuda.current_stream().cuda_stream))
        return torch.sin(x) * 2.0

    x = jnp.arange(1000.0)
    call = jax.jit(lambda x: from_torch(function, x)(x) + 1.0)
    found = call(x)
    np.testing.assert_allclose(found, 2.0 * np.sin(np.arange(1000.0)) + 1.0, rtol=1e-12)
    assert seen[-1][0] == "cuda" and seen[-1][1] != x.unsafe_buffer_pointer()
    assert seen[-1][2] != torch.cuda.default_stream().cuda_stream


def test_calls_are_ordered_with_what_xla_computes_before_and_after():
    square = from_torch(lambda x: x @ x, jax.ShapeDtypeStruct((512, 512), jnp.float64))

    @jax.jit
    def many(x):
        return jax.lax.fori_loop(0, 20, lambda _, y: square(y / jnp.linalg.norm(y)) + 0.1 * x, x)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(512, 512)))
    expected = np.array(x)
    for _ in range(20):
        y = expected / np.linalg.norm(expected)
        expected = y @ y + 0.1 * np.array(x)
    np.testing.assert_allclose(many(x), expected, rtol=1e-9, atol=1e-9)


def test_sums_and_their_gradients_are_those_of_torch_on_a_cpu():
    leaves = [t.clone().requires_grad_() for t in SYSTEM[:3]]
    energy = in_torch.ewald_summation(*leaves, **OPTIONS).sum()
    expected = torch.autograd.grad(energy, leaves)
    arrays = [jnp.asarray(t.numpy()) for t in SYSTEM[:3]]
    value, found = jax.jit(jax.value_and_grad(lambda *a: ewald_summation(*a, **OPTIONS).sum(), (0, 1, 2)))(*arrays)
    np.testing.assert_allclose(value, energy.item(), rtol=1e-12)
    for f, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=1e-9, atol=1e-10)


def test_arrays_are_copied_before_jax_uses_their_memory_again():
    """Those of NumPy go through an array of JAX that nobody keeps."""
    factor = torch.rand(4096, 4096, device="cuda")
    for k in range(8):
        for _ in range(20):  # so that the copy by torch has to wait
            factor @ factor
        found = to_torch(np.full(2**20, float(k)))
        jnp.asarray(np.full(2**20, -1.0)).block_until_ready()
        assert bool((found == k).all())


def test_lists_are_those_of_a_cpu():
    x, cell = (jnp.asarray(t.numpy()) for t in (SYSTEM.positions, SYSTEM.cell))
    found = jax.jit(lambda x: neighbor_list(x, 3.0, cell, max_neighbors=100))(x)
    with jax.default_device(jax.devices("cpu")[0]):
        expected = neighbor_list(*(jnp.asarray(np.array(a)) for a in (x,)), 3.0, jnp.asarray(np.array(cell)))
    np.testing.assert_array_equal(found[1], expected[1])
