"""A force field with its neighbor search as one module, compiled, exported, captured and run.

The model is that of ``examples/11_compiled_force_field.py``: Buckingham potential, PME, and a neighbor matrix of fixed
width that is built inside. What a CUDA graph needs is looked for on a CPU as well: that nothing on the way reads a
value or has a size that depends on one.
"""

import copy
import functools
import re

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode

from nvalchemiops.layout import CPU, replaced_layout
from nvalchemiops.torch.interactions.pair.op import pair_sum
from nvalchemiops.torch.neighbors import neighbor_list, search
from nvalchemiops.torch.operators import lattice, mesh, mesh_transform, segments
from tests.support.examples import example, said_by
from tests.support.processes import python_says, run_python

ff = example("11_compiled_force_field")
SYSTEM = ff.crystal(2, 0.05)
IMPORT = "import nvalchemiops.torch.interactions.electrostatics"
MODEL = ff.force_field_for(SYSTEM[0], SYSTEM[2])


def assert_same(found, expected, tolerance=1e-12):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def loss(positions, species, cell, call=None):
    """A scalar that sees all results, and the number of neighbors."""
    energy, forces, virial, most = (call or MODEL)(positions, species, cell)
    return energy.square() + forces.square().sum() + virial.square().sum(), most


def slopes(function, system=SYSTEM):
    """Gradients of a loss by positions and cell."""
    positions, species, cell = system
    leaves = [positions.clone().requires_grad_(), cell.clone().requires_grad_()]
    return torch.autograd.grad(function(leaves[0], species, leaves[1])[0], leaves)


# -- compiled -------------------------------------------------------------------------------------


@pytest.mark.everyday_cases("aot_eager")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor])])
def test_compiled_equals_eager(backend):
    """Results, and the gradients of a loss on all of them, which are second derivatives of the energy."""
    expected = MODEL(*SYSTEM)
    (slope,) = torch.autograd.grad(MODEL(x := SYSTEM[0].clone().requires_grad_(), *SYSTEM[1:])[0], x)
    torch.testing.assert_close(-slope, expected[1], rtol=1e-10, atol=1e-10)
    compiled = torch.compile(MODEL, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert_same(compiled(*SYSTEM), expected)
    if backend == "aot_eager":
        assert_same(slopes(torch.compile(loss, fullgraph=True, backend=backend)), slopes(loss), 1e-10)


def test_a_matrix_that_is_too_narrow_shows():
    """The number of neighbors is that of the atoms, not of the matrix; compiled code cannot raise."""
    narrow = ff.ForceField(MODEL.coulomb, max_neighbors=50)
    compiled = torch.compile(narrow, fullgraph=True, backend="aot_eager")
    for call in (narrow, compiled):
        assert call(*SYSTEM)[3] == MODEL(*SYSTEM)[3] > 50
    with pytest.raises(RuntimeError, match="neighbors: give ForceField at least that"):
        ff.dynamics(lambda *system: (*narrow(*system)[:3], torch.tensor(1000)), *SYSTEM, n_steps=1)


@pytest.mark.later  # each step is what the test above compares, and `tests/dynamics` sees that energies are conserved
def test_dynamics_are_those_of_eager_mode_and_conserve_energy():
    compiled = torch.compile(MODEL, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        energies, end = ff.dynamics(compiled, *SYSTEM, n_steps=300)
        assert_same(ff.dynamics(MODEL, *SYSTEM, n_steps=300), (energies, end), 1e-9)
    assert (end - SYSTEM[0]).norm(dim=1).max() > 0.1  # ions moved
    assert abs(ff.drift(energies, 64)) < 0.2
    assert (energies - energies.mean()).abs().max() / 64 < 2e-4


# -- changing numbers -----------------------------------------------------------------------------


def some_ions(number, n_ions):
    """Ions of a crystal, the others missing."""
    positions, species, cell = SYSTEM
    generator = torch.Generator().manual_seed(number)
    chosen = torch.randperm(len(species), generator=generator)[:n_ions]
    noise = 0.1 * torch.randn(n_ions, 3, generator=generator, dtype=torch.float64)
    return positions[chosen] + noise, species[chosen], cell


def with_a_list(positions, species, cell):
    """What the module does with a matrix, with a list of unknown length."""
    pairs, ptr, shifts = neighbor_list(positions, ff.CUTOFF, cell, return_neighbor_list=True)
    near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts}
    return *MODEL.sums(positions, species, cell, near), ptr.diff().max()


@pytest.mark.later_cases("list")  # as `test_compiled_dynamics_with_changing_counts` of neighbors
@pytest.mark.parametrize("form", ["matrix", "list"])
def test_fifty_steps_with_other_numbers_of_atoms_and_pairs_compile_at_most_twice(form):
    """The number of atoms is marked; that of the pairs follows from values, or from the width of the matrix."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(MODEL if form == "matrix" else with_a_list, fullgraph=True, backend=counter)
    sizes = torch.randint(2, 65, (50,), generator=torch.Generator().manual_seed(4)).tolist()
    pairs = set()
    with torch.no_grad():
        for number, n_ions in enumerate(sizes):
            system = some_ions(number, n_ions)
            for tensor in system[:2]:
                torch._dynamo.mark_dynamic(tensor, 0)
            found = compiled(*system)
            assert_same(found, MODEL(*system), 1e-10)
            pairs.add(int(found[3]))
    assert counter.frame_count <= 2
    assert len(set(sizes)) > 20 and len(pairs) > 10


# -- what a CUDA graph needs ----------------------------------------------------------------------

READS = {"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose"}
SIZED_BY_VALUES = {"nonzero", "masked_select", "bincount", "repeat_interleave", "_unique", "_unique2", "unique_dim"}
WARP_OPS = (
    search.neighbor_matrix,
    pair_sum,
    lattice.usable_cells,
    segments.system_sums,
    segments.spread_systems,
    mesh.mesh_columns,
    mesh.mesh_spread,
    mesh.mesh_gather,
    mesh_transform.mesh_spectrum,
    mesh_transform.mesh_values,
)


class Watched(TorchDispatchMode):
    """Collects the ops of torch that run, and looks into the bodies of this library's ops."""

    def __init__(self):
        super().__init__()
        self.bodies = {op.op.overload: op.op._implementation for op in WARP_OPS}
        self.inside = None
        self.seen = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.namespace == "nvalchemiops":
            self.inside = function
            with self:
                results = self.bodies[function](*arguments)
            self.inside = None
            return results
        self.seen.add((function.overloadpacket.__name__, self.inside))
        return function(*arguments, **options or {})


def captured(function, system=SYSTEM):
    """The graphs of a loss and its backward pass, and the ops that ran in them."""
    graphs, watched = [], Watched()

    def keep(graph, _):
        graphs.append(graph)

        def run(*inputs):
            with watched:
                return graph(*inputs)

        return make_boxed_func(run)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    found = slopes(torch.compile(function, fullgraph=True, backend=backend), system)
    assert len(graphs) == 2
    return found, graphs, watched


def values_of(graph):
    """What each node computes, without values."""
    for node in graph.graph.nodes:
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            yield node, value


def test_nothing_on_the_way_reads_a_value_or_has_a_size_that_depends_on_one():
    """List, pair potential, PME and their backward pass, with alpha, mesh and width given, where a read would wait."""
    with replaced_layout("cpu", CPU._replace(reads=False)):
        found, graphs, watched = captured(loss)
    assert_same(found, slopes(loss), 1e-10)
    for graph in graphs:
        for node, value in values_of(graph):
            assert not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)), node
            if isinstance(value, torch.Tensor):
                assert all(isinstance(size, int) for size in value.shape), node
    assert not {name for name, _ in watched.seen} & SIZED_BY_VALUES
    assert not {name for name, _ in watched.seen} & READS
    inside = {op for _, op in watched.seen if op is not None}
    assert inside == {op.op.overload for op in WARP_OPS}, "ops that this test should look into"


def test_a_width_that_is_not_given_would_be_noticed():
    """What the test above looks for is there without `max_neighbors`."""

    def open_ended(positions, species, cell):
        return neighbor_list(positions, ff.CUTOFF, cell)[1].sum() + positions.square().sum(), None

    graphs = []
    backend = aot_autograd(fw_compiler=lambda graph, _: graphs.append(graph) or make_boxed_func(graph))
    torch.compile(open_ended, fullgraph=True, backend=backend)(*SYSTEM)
    values = [value for _, value in values_of(graphs[0]) if isinstance(value, torch.Tensor)]
    assert any(free_unbacked_symbols(value.shape) for value in values)


@pytest.mark.gpu
def test_list_potential_and_backward_in_one_cuda_graph():
    """A hundred replays at positions that move, each as in eager mode."""
    model = copy.deepcopy(MODEL).to("cuda")
    positions, species, cell = (t.to("cuda") for t in SYSTEM)
    positions = positions.clone().requires_grad_()

    def step():
        energy, forces, virial, most = model(positions, species, cell)
        (slope,) = torch.autograd.grad(energy + forces.square().sum(), positions)
        return energy.detach(), forces.detach(), virial.detach(), most, slope

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # kernels are loaded, plans of Fourier transforms made
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    generator = torch.Generator("cuda").manual_seed(0)
    allocated = []
    for replay in range(100):
        with torch.no_grad():
            positions += 0.02 * torch.randn(positions.shape, generator=generator, dtype=torch.float64, device="cuda")
        graph.replay()
        if replay % 10 == 9:
            assert all(torch.equal(a, b) for a, b in zip(results, step(), strict=True))
            allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] == allocated[4], "after the first eager steps have got their plans"
    assert int(results[3]) <= ff.MAX_NEIGHBORS


# -- exported -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The force field in a file."""
    path = tmp_path_factory.mktemp("program") / "force_field.pt2"
    with torch.no_grad():
        ff.export(MODEL, SYSTEM, path)
    return path


def test_the_loaded_program_equals_eager_mode(program):
    """Bit by bit, for other numbers of ions, and with gradients."""
    call = ff.load(program)
    for system in (SYSTEM, some_ions(1, 20), ff.crystal(1, 0.1)):
        with torch.no_grad():
            for a, b in zip(call(*system), MODEL(*system), strict=True):
                assert torch.equal(a, b)
    assert_same(slopes(functools.partial(loss, call=call)), slopes(loss), 1e-10)


RUN = """
import json, sys, torch
{imports}
call = {load}
torch.manual_seed(0)
with torch.no_grad():
    results = call(*torch.load(sys.argv[2]))
print(json.dumps([r.tolist() for r in results]))
"""
EXPORTED, PACKAGED = "torch.export.load(sys.argv[1]).module()", "torch._inductor.aoti_load_package(sys.argv[1])"


def results_elsewhere(load, path, folder):
    torch.save(SYSTEM, folder / "system.pt")
    found = python_says(RUN.format(imports=IMPORT, load=load), path, folder / "system.pt")
    return [torch.tensor(values, dtype=torch.float64) for values in found]


@pytest.mark.later
def test_the_program_runs_in_a_process_that_imports_the_library(program, tmp_path):
    expected = MODEL(*SYSTEM)
    found = results_elsewhere(EXPORTED, program, tmp_path)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b.double())


@pytest.mark.later
def test_without_the_import_the_error_names_the_library(program):
    """In the log of torch, and so does the example."""
    run = run_python(f"import sys, torch; {EXPORTED}", program)
    assert run.returncode != 0
    assert re.search(r"failed to resolve torch\.ops\.nvalchemiops\.\w+\.default to an operator", run.stderr)
    assert "Please import the custom op to register it" in run.stderr


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # what torch does with itself
def test_a_package_of_aotinductor(program, tmp_path):
    """Compiled ahead of time, it runs in Python after the import; without it the error names the library."""
    path = torch._inductor.aoti_compile_and_package(
        torch.export.load(program), package_path=str(tmp_path / "force_field_aoti.pt2")
    )
    assert_same(results_elsewhere(PACKAGED, path, tmp_path), [r.double() for r in MODEL(*SYSTEM)], 1e-10)
    run = run_python(f"import sys, torch; {PACKAGED}", path)
    assert run.returncode != 0 and re.search(r"Could not find schema for nvalchemiops::\w+", run.stderr)


def test_a_program_holds_no_infinite_number(program):
    """JSON has none, so packages with one cannot be loaded."""
    for node in torch.export.load(program).graph.nodes:
        for argument in torch.utils._pytree.tree_leaves((node.args, node.kwargs)):
            assert not isinstance(argument, float) or abs(argument) < float("inf"), node


# -- the example ----------------------------------------------------------------------------------


@pytest.mark.later
def test_the_example_runs():
    said = said_by("11_compiled_force_field", "--quick")
    rows = dict(re.findall(r"^(eager|aot_eager|loaded elsewhere) +[\d.]+ +[\d.]+ +(-[\d.]+)", said, re.MULTILINE))
    assert len(rows) == 3 and len(set(rows.values())) == 1
    assert "without the library: failed to resolve torch.ops.nvalchemiops." in said
