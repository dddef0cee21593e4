"""Ewald sums in compiled and exported graphs: results, flags and gradients are those of eager mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing

from nvalchemiops.torch.interactions.electrostatics import (
    ewald_summation,
    generate_k_vectors_ewald_summation,
    generate_k_vectors_pme,
    k_vectors,
    particle_mesh_ewald,
)
from nvalchemiops.torch.operators import lattice
from tests.comparing import assert_compiled_equals_eager, close, compiled, leaves_of, weighted
from tests.systems import ALL, csr, triclinic

CUTOFF, ALPHA, MESH = 4.0, 0.8, (8, 9, 10)

Dict = dict[str, Any]


def ewald(x, q, cell, alpha=ALPHA, **options):
    return ewald_summation(x, q, cell, alpha, **{"k_cutoff": 3.3} | options)


def mesh_ewald(x, q, cell, alpha=ALPHA, **options):
    return particle_mesh_ewald(x, q, cell, alpha, mesh_dimensions=MESH, **options)


SUMS: dict[str, Callable] = {"Ewald": ewald, "PME": mesh_ewald}
EACH_SUM = pytest.mark.parametrize("name", SUMS)


ONE = triclinic(5, charged=True)
NEAR = csr(ONE, CUTOFF)


# -- compiled equals eager ------------------------------------------------------------------------


OPTIONS: dict[str, Dict] = {
    "hybrid forces": {"hybrid_forces": True, "compute_forces": True},
    "slab": {"pbc": torch.tensor([True, False, True]), "slab_correction": True},
    "exclusions of systems": {"exclusions": torch.tensor([[0, 1], [2, 4]]), "energy_reduction": "system"},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [("Ewald", "hybrid forces"), ("PME", "slab"), ("PME", "exclusions of systems")],
)
def test_options_that_are_absent_or_there(name, options):
    """Each combination is a graph of its own; those that the sums share are tried with one of them."""
    assert_compiled_equals_eager(lambda *i: SUMS[name](*i, **NEAR, **OPTIONS[options]), ONE[:3])


def test_graph_breaks_before_anything_was_called_eagerly():
    """Neighbors are built inside, which breaks the graph: the host code behind the break is not for a compiler."""
    k_vectors._within.cache_clear()
    lattice._check_values.cache_clear()
    torch.compiler.reset()

    def function(x, q, cell):
        return ewald(x, q, cell, cutoff=CUTOFF)

    expected = function(*ONE[:3])
    k_vectors._within.cache_clear()
    lattice._check_values.cache_clear()
    found = torch.compile(function, backend="aot_eager")(*ONE[:3])
    close([found], [expected])


@EACH_SUM
def test_channels(name):
    q = torch.stack([ONE.charges, ONE.charges.flip(0)], 1)
    assert_compiled_equals_eager(lambda *i: SUMS[name](*i, **NEAR), (ONE.positions, q, ONE.cell))


@pytest.mark.parametrize("what", ["miller_bounds", "k_vectors", "prepared"])
def test_wave_vectors_given(what):
    k_vectors = generate_k_vectors_ewald_summation(ONE.cell, 3.0)
    options = {
        "miller_bounds": {"miller_bounds": (2, 2, 2)},
        "k_vectors": {"k_vectors": k_vectors},
    }
    if what == "prepared":
        mesh_vectors, squares = generate_k_vectors_pme(ONE.cell, MESH)
        options[what] = {"k_vectors": mesh_vectors, "k_squared": squares}
    call = mesh_ewald if what == "prepared" else ewald_summation
    options = options[what] | ({} if what == "prepared" else {"alpha": ALPHA})
    assert_compiled_equals_eager(lambda *i: call(*i, **NEAR, **options), ONE[:3])


@pytest.mark.parametrize(
    ("name", "cutoff"),
    [
        ("Ewald", 2.0),
        ("PME", 2.0),
        ("Ewald", 5.0),
    ],
)
def test_neighbors_built_inside(name, cutoff):
    """With ``cutoff``, and alpha for it."""
    function = {"Ewald": ewald_summation, "PME": particle_mesh_ewald}[name]
    options = {"mesh_dimensions": MESH} if name == "PME" else {}

    def energies(x):
        return function(x, ONE.charges, ONE.cell, cutoff=cutoff, accuracy=1e-3, **options)

    close([compiled(energies)(ONE.positions)], [energies(ONE.positions)])


# -- shapes and recompilations --------------------------------------------------------------------


@EACH_SUM
def test_cells_in_a_row(name):
    """One graph for cells of different size, and so for different numbers of wave vectors."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def results(x, q, cell):
        return SUMS[name](x, q, cell, **NEAR, compute_virial=True)

    call = compiled(results, counter)
    for scale in (1.0, 1.3, 0.9, 1.0):
        found = []
        for function in (results, call):
            leaves = leaves_of((scale * ONE.positions, ONE.charges, scale * ONE.cell))
            outcome = function(*leaves)
            slopes = torch.autograd.grad(weighted(outcome), leaves)
            found.append([*(t.detach() for t in outcome), *slopes])
        close(*found)
    assert counter.frame_count == 1


@pytest.mark.inductor
def test_a_mesh_in_single_precision_with_reduced_overhead():
    """Twice in a row with different cells, gradients too."""
    system = ONE.to(torch.float32)

    def loss(x, q, cell):
        return weighted(mesh_ewald(x, q, cell, **NEAR, **ALL))

    call = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    for scale in (1.0, 1.1, 1.0):
        found = []
        for function in (loss, call):
            leaves = leaves_of((scale * system.positions, system.charges, scale * system.cell))
            value = function(*leaves)
            found.append([value.detach(), *torch.autograd.grad(value, leaves)])
        for a, b in zip(*found):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


# -- what cannot be measured ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Ewald", {}, "`alpha` or `cutoff` is needed"),
        ("PME", {"mesh_dimensions": MESH}, "`alpha` or `cutoff` is needed"),
        ("Ewald", {"alpha": ALPHA}, "`cutoff` is needed inside torch.compile to build neighbors"),
        ("PME", {"alpha": ALPHA, **NEAR}, "`mesh_dimensions` is needed"),
        ("PME", {"alpha": ALPHA, "mesh_spacing": 0.5, **NEAR}, "`mesh_dimensions` is needed"),
        ("PME", {"cutoff": 5.0}, "`mesh_dimensions` is needed"),
    ],
)
def test_what_cannot_be_measured_inside_a_graph_is_asked_for(name, options, message):
    function = {"Ewald": ewald_summation, "PME": particle_mesh_ewald}[name]
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=message):
        compiled(lambda x: function(x, ONE.charges, ONE.cell, **options))(ONE.positions)


# -- export ---------------------------------------------------------------------------------------


@EACH_SUM
def test_export_of_an_energy_that_depends_on_a_cell_of_any_size(name):
    """The number of wave vectors is not fixed by the example."""

    class Model(torch.nn.Module):
        def forward(self, x, q, cell):
            return SUMS[name](x, q, cell, energy_reduction="system", **NEAR)

    program = torch.export.export(Model(), ONE[:3], strict=False).module()
    for scale in (1.0, 1.4):
        arguments = scale * ONE.positions, ONE.charges, scale * ONE.cell
        close([program(*arguments)], [Model()(*arguments)])
