"""Torch functions as functions of JAX: modes of torch, many calls at once, threads, devices and imports."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nvalchemiops import launch, threads
from nvalchemiops.jax.bridge import from_torch
from nvalchemiops.torch.segment_ops import segmented_sum
from tests.jax.precision import double_precision  # noqa: F401
from tests.jax.test_bridge import ROWS, Counter, Energy, W, X, assert_same
from tests.support.processes import python_says

# -- state of torch -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "context", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_modes_of_the_caller_do_not_matter(context):
    """In a first call and in later ones."""
    x = np.random.default_rng(0).random((3, 3))

    def gradient():
        return jax.jit(jax.grad(lambda x: from_torch(lambda x: x.float() @ x.float().T)(x).sum()))

    expected, first_inside = gradient(), gradient()
    with context():
        assert np.array_equal(first_inside(x), gradient()(x))
        assert np.array_equal(expected(x), first_inside(x))
    assert np.array_equal(expected(x), first_inside(x))


# -- many calls at once ---------------------------------------------------------------------------


def guarded(function, seconds=120):
    """The result of ``function()``, or a failure where it hangs."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, "it hangs or has failed"
    return results[0]


def test_several_threads():
    """As one after the other, to the last bit."""
    energy = from_torch(Energy.of_torch, scalar=True)
    evaluate = jax.jit(jax.value_and_grad(energy))
    hessian = jax.jit(jax.hessian(energy))

    def work(number):
        x = X * (1 + number / 7)
        with jax.enable_x64(True):  # each thread has its setting
            return [np.asarray(y) for _ in range(10) for y in (*evaluate(x, W, ROWS), hessian(x, W, ROWS))]

    serial = [work(number) for number in range(4)]

    def parallel():
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(work, range(4)))

    for found, expected in zip(guarded(parallel), serial):
        assert all(np.array_equal(a, b) for a, b in zip(found, expected))


def test_functions_in_two_threads_may_wait_for_each_other():
    barrier = threading.Barrier(2, timeout=20)

    def meets(x):
        barrier.wait()
        return x.sum()

    function = jax.jit(from_torch(meets, jax.ShapeDtypeStruct((), np.float32)))
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(function, [jnp.ones(2), jnp.ones(3)])) == [2.0, 3.0]


def test_a_thousand_queued_calls():
    """In bounded memory and threads."""

    def resident():
        with open("/proc/self/statm") as statistics:
            return int(statistics.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    step = jax.jit(jax.grad(from_torch(lambda x: (x**2).sum() / 2, scalar=True)))
    x = jnp.ones(100_000)

    def queued(x):
        with jax.enable_x64(True):
            for _ in range(1000):
                x = step(x)
            return np.asarray(x)

    guarded(lambda: queued(x))
    before, threads = resident(), threading.active_count()
    assert np.array_equal(guarded(lambda: queued(x)), np.ones(100_000))
    assert resident() - before < 100e6 and threading.active_count() <= threads + 1


def test_launches_are_prepared_once_in_threads_of_xla(monkeypatch):
    """Python forgets these threads between calls."""
    built = []

    class Counted(launch.Command):
        def __init__(self, kernel, *arguments):
            built.append((threading.get_ident(), kernel))
            super().__init__(kernel, *arguments)

    monkeypatch.setattr(launch, "Command", Counted)
    monkeypatch.setattr(threads, "_commands", {})
    numbers = torch.zeros(3, dtype=torch.int32)
    counter = Counter(lambda x: segmented_sum(x, numbers, 1).sum())
    counted_in = []
    number = jax.ShapeDtypeStruct((), "float64")
    energy = from_torch(lambda x: (counted_in.append(threading.get_ident()), counter(x))[1], number, scalar=True)
    evaluate = jax.jit(jax.value_and_grad(energy))
    slow, big = jax.jit(lambda x: (x @ x) / 1000), jnp.ones((1000, 1000))
    for _ in range(10):
        big = slow(big)
        found = evaluate(jnp.asarray(X) + 0 * big[0, :3])  # what is computed when this is called waits for a thread
    assert_same(found, (jnp.sum(X), jnp.ones(3)))
    assert set(counted_in) - {threading.get_ident()}
    assert built and len(set(built)) == len(built)


@pytest.mark.later
def test_two_devices():
    """`jax.shard_map`: each device calls with its own shard; also gradients, which are summed over shards.

    Forces and stress of a model are those of each device's own system. Functions that need values get those of all
    shards. An array whose type says that it is sharded (`jax.sharding.AxisType.Explicit`) is gathered, and its gradient
    is sharded again.
    """
    code = """
        import json
        import jax, jax.numpy as jnp, numpy as np, torch
        from jax.sharding import Mesh, PartitionSpec as P
        from nvalchemiops.jax import System
        from nvalchemiops.jax.bridge import from_torch
        from nvalchemiops.jax.dynamics import FromEnergies
        from nvalchemiops.jax.neighbors import neighbor_list

        jax.config.update("jax_enable_x64", True)
        mesh = Mesh(np.array(jax.devices()), ("shards",))
        sizes = []
        def of_torch(x, w):
            if type(x) is torch.Tensor:
                sizes.append(len(x))
            return (torch.sin(x) * w).sum()
        def of_jax(x, w):
            return (jnp.sin(x) * w).sum()
        x, w = jnp.arange(8.0), jnp.array(1.3)
        errors = []
        for scalar in (True, False):
            for check in (True, False):
                def total(function):
                    def shard(x, w):
                        return jax.lax.psum(function(x, w), "shards")
                    return jax.shard_map(shard, mesh=mesh, in_specs=(P("shards"), P()), out_specs=P(), check_vma=check)
                def evaluated(function):
                    f = total(function)
                    return (
                        jax.jit(jax.value_and_grad(f, (0, 1)))(x, w),
                        jax.jit(lambda x: jax.jvp(jax.grad(f), (x, w), (x, w))[1])(x),
                    )
                found, expected = evaluated(from_torch(of_torch, scalar=scalar)), evaluated(of_jax)
                pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected))
                errors.append(max(float(jnp.abs(a - b).max()) for a, b in pairs))
        positions = jnp.arange(24.0).reshape(8, 3) ** 1.1
        sharded = jax.device_put(positions, jax.sharding.NamedSharding(mesh, P("shards")))
        lists = [neighbor_list(y, 3.0, 20 * jnp.eye(3)) for y in (positions, sharded)]
        errors.append(max(float(jnp.abs(a - b).max()) for a, b in zip(*lists)) + (lists[0][1].max() == 0))
        model = FromEnergies(lambda system, k: k * ((system.positions**2).sum() + jnp.sin(system.cell).sum()))
        def of_one(x, k):
            return model(System(x, cell=jnp.eye(3)), k)
        x, k = positions.reshape(2, 4, 3), jnp.array([0.3, 0.5])
        for axis in (0, None):  # the positions are sharded, or the same on both devices
            def shard(x, k):
                return jax.tree.map(lambda a: a[None], of_one(x if axis is None else x[0], k[0]))
            specs = (P() if axis is None else P("shards"), P("shards"))
            call = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=P("shards"))
            given = (x[0] if axis is None else x, k)
            pairs = zip(jax.jit(call)(*given), jax.vmap(of_one, (axis, 0))(*given))
            errors.append(max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs))
        explicit = jax.make_mesh((2,), ("shards",), axis_types=(jax.sharding.AxisType.Explicit,))
        with jax.set_mesh(explicit):
            sharded = jax.device_put(x, jax.sharding.NamedSharding(explicit, P("shards")))
            of_shard = jax.vmap(jax.grad(from_torch(lambda w, x: (w * x**3).sum(), scalar=True), 1), (None, 0))
            rows = from_torch(lambda x: (x**3).sum(-1))
            slopes = [jax.jit(of_shard)(w, sharded) / w, jax.jit(jax.grad(lambda x: rows(x).sum()))(sharded)]
        errors += [float(jnp.abs(np.asarray(slope) / (3 * x**2 + (x == 0)) - (x != 0)).max()) for slope in slopes]
        print(json.dumps([len(jax.devices()), sorted(set(sizes)), float(max(errors))]))
    """
    devices, sizes, error = python_says(code, XLA_FLAGS="--xla_force_host_platform_device_count=2", timeout=120)
    assert devices == 2 and sizes == [4] and error < 1e-14


@pytest.mark.later
def test_either_is_imported_first(tmp_path):
    """And JAX's persistent cache of compiled programs leaves out those that call torch."""
    code = """
        import importlib, json, sys
        for name in sys.argv[1:3]:
            importlib.import_module(name)
        import jax
        from nvalchemiops.jax.bridge import from_torch

        jax.config.update("jax_compilation_cache_dir", sys.argv[3])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        jax.jit(lambda x: 2 * x)(3.0)  # this one is written
        values = [float(jax.jit(jax.grad(from_torch(lambda x: k * x**2, scalar=True)))(3.0)) for k in (1, 2)]
        print(json.dumps(values))
    """
    assert python_says(code, "jax", "torch", tmp_path, fresh=True) == [6.0, 12.0]
    assert list(tmp_path.iterdir())
    assert python_says(code, "torch", "jax", tmp_path, fresh=True) == [6.0, 12.0]
