"""Tables of D3 in JAX: as pytrees, dicts and arrays, known or traced, and kept once for all threads."""

import dataclasses
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import torch

from nvalchemiops.jax.interactions import dispersion
from nvalchemiops.locks import Kept
from nvalchemiops.torch.interactions import dispersion as torch_dispersion
from tests.jax.precision import double_precision  # noqa: F401
from tests.jax.problem import D3_TABLES, JAX_TABLES, NUMBERS, SYSTEM, TABLES, to_jax


def test_published_tables_of_d3_are_those_of_torch():
    loaded = dispersion.D3Parameters.load()
    assert loaded.interp_mesh == TABLES.interp_mesh
    for name in D3_TABLES:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(TABLES, name).numpy())


def test_tables_of_d3_may_be_closed_over_or_passed():
    tables, numbers = JAX_TABLES, to_jax(NUMBERS)
    assert tables.max_z == TABLES.rcov.shape[0] - 1 and len(jax.tree.leaves(tables)) == 4
    x = to_jax(SYSTEM.positions) * 1.5
    given = (0.4, 4.0, 1.9)

    def energy(x, tables):
        return dispersion.dftd3(x, numbers, *given, d3_params=tables, cutoff=8.0)

    closed, passed = jax.jit(lambda x: energy(x, tables))(x), jax.jit(energy)(x, tables)
    as_dict = energy(x, {f.name: getattr(tables, f.name) for f in dataclasses.fields(tables)})
    expected = torch_dispersion.dftd3(torch.as_tensor(np.array(x)), NUMBERS, *given, d3_params=TABLES, cutoff=8.0)
    names = {"covalent_radii": "rcov", "r4r2": "r4r2", "c6_reference": "c6ab", "coord_num_ref": "cn_ref"}
    parts = {name: getattr(tables, table) for name, table in names.items()}
    in_parts = jax.jit(lambda x, parts: dispersion.dftd3(x, numbers, *given, cutoff=8.0, **parts))(x, parts)
    for found in (closed, passed, as_dict, in_parts):
        for f, e in zip(found, expected, strict=True):
            np.testing.assert_array_equal(f, e.numpy())


def test_tables_of_d3_that_change_in_place():
    tables = jax.tree.map(np.array, JAX_TABLES)
    x, numbers = to_jax([SYSTEM.positions * 1.5, NUMBERS])
    before = dispersion.dftd3(x, numbers, 0.4, 4.0, 1.9, d3_params=tables, cutoff=8.0)[0]
    tables.c6ab *= 2.0
    after = dispersion.dftd3(x, numbers, 0.4, 4.0, 1.9, d3_params=tables, cutoff=8.0)[0]
    np.testing.assert_allclose(after, 2.0 * before, rtol=1e-12)


def test_tables_of_d3_have_no_derivative():
    x, numbers = to_jax([SYSTEM.positions * 1.5, NUMBERS])

    def energy(x, tables):
        return dispersion.dftd3(x, numbers, 0.4, 4.0, 1.9, d3_params=tables, cutoff=8.0)[0][0]

    with pytest.raises(NotImplementedError, match=r"dftd3: there is no derivative by `d3_params\.rcov` and `d3_params"):
        jax.grad(energy, 1)(x, JAX_TABLES)
    closed = jax.jit(jax.grad(lambda x: energy(x, JAX_TABLES)))(x)
    np.testing.assert_array_equal(jax.jit(jax.grad(energy))(x, JAX_TABLES), closed)
    np.testing.assert_array_equal(jax.grad(jax.jit(energy))(x, JAX_TABLES), closed)


def test_tables_of_d3_of_numpy_may_be_closed_over():
    x, numbers = to_jax([SYSTEM.positions * 1.5, NUMBERS])
    tables = jax.tree.map(lambda table: 1.5 * np.array(table), JAX_TABLES)

    def energy(x):
        return dispersion.dftd3(x, numbers, 0.4, 4.0, 1.9, d3_params=tables, cutoff=8.0)[0]

    np.testing.assert_array_equal(jax.jit(energy)(x), energy(x))


def test_tables_of_d3_are_prepared_for_all_threads_alike(monkeypatch):
    module = importlib.import_module("nvalchemiops.jax.interactions.dispersion._dftd3")
    monkeypatch.setattr(module, "_kept", Kept(2))
    barrier = threading.Barrier(4)
    several = [jax.tree.map(lambda table, n=n: n * table, JAX_TABLES) for n in (1.0, 2.0, 3.0)]

    def prepare(number):
        barrier.wait()
        return [module._prepare({"d3_params": tables})["d3_params"] for tables in several[number % 2 :]]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(prepare, range(4)))
    for row in found:
        for tables, given in zip(reversed(row), reversed(several)):
            np.testing.assert_array_equal(tables.c6ab.numpy(), given.c6ab)
    assert len(module._kept) == 2
