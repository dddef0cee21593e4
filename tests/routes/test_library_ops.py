"""Every op of the library, one property after the other: opcheck, layouts, in-place changes, stored values."""

import ast
import inspect
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import nvalchemiops.torch.ops
from nvalchemiops.interactions.pair.potentials import DSF, moment_short_range
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.autograd import live_recordings
from nvalchemiops.torch.interactions.dispersion.coefficients import d3_coefficients
from nvalchemiops.torch.interactions.dispersion.three_body import three_body_derivatives, three_body_energies
from nvalchemiops.torch.interactions.electrostatics import ewald_summation, k_vectors
from nvalchemiops.torch.interactions.electrostatics.terms import reciprocal
from nvalchemiops.torch.interactions.pair.moments import pair_moments
from nvalchemiops.torch.interactions.pair.op import pair_sum
from nvalchemiops.torch.neighbors import pairs as geometry
from nvalchemiops.torch.neighbors import rows, search
from nvalchemiops.torch.operators import chains, fourier, mesh, mesh_transform, noise, segments
from nvalchemiops.torch.operators.influence import mesh_influence, multiply_by_influence
from nvalchemiops.torch.operators.lattice import (
    lattice_geometry,
    lattice_of,
    shortest_vectors,
    transform_vectors,
    usable_cells,
)
from tests.support.processes import python_says
from tests.support.systems import ALL, SYSTEMS, System, batch, crystal, triclinic

EWALD_MOMENTS = moment_short_range(False)
STORED = Path(__file__).parent / "stored_values.json"


@torch.random.fork_rng(devices=())
def op_calls(system: System):
    """Each op of the library with arguments as the public functions pass them, the same in each run."""
    torch.manual_seed(0)
    x, q, cell, system_of = system
    n_systems = cell.shape[0]
    pairs, ptr, shifts = neighbors.neighbor_list(x, 4.0, cell, batch_idx=system_of, return_neighbor_list=True)
    alpha = torch.full((n_systems,), 0.6, dtype=torch.float64)
    first = torch.cat([system_of.new_zeros(1), torch.bincount(system_of, minlength=n_systems).cumsum(0).int()])
    targets = torch.arange(min(2, x.shape[0]), dtype=torch.int32)
    query = (x, 4.0, cell, torch.tensor([True, True, False]), system_of, first, targets, False, 0, 5, 0.01, True)
    memory = [targets.new_empty((len(targets), *rest)) for rest in ((90,), (), (90, 3))]
    flags = torch.ones(n_systems, dtype=torch.bool)
    found = rows.rows_of(rows.GivenNeighbors(pairs, ptr, shifts), x, periodic=True)
    directions = [torch.randn(2, *t.shape, dtype=t.dtype) for t in (x, cell, q.unsqueeze(1), alpha.unsqueeze(1), q)]
    values = (x, cell, q.unsqueeze(1), alpha.unsqueeze(1), torch.randn_like(q))
    given = (system_of, n_systems, *found, None, 0)
    none, distances = (None,) * 3, (4.0, 0.0)
    radii = (torch.arange(x.shape[0], dtype=torch.int32) % 2, torch.full((2, 2), 3.0, dtype=torch.float64))
    coefficients = torch.rand(x.shape[0], 3, dtype=torch.float64)
    triples = (x, cell, coefficients, *radii, system_of, n_systems, *found[:5], 2, 4.0, 3.0)
    places = torch.tensor([[0, 1], [2, 2]], dtype=torch.int32)
    reference_states = (radii[0], torch.rand(2, 2, dtype=torch.float64), places, torch.rand(3, 4, dtype=torch.float64))
    waves = k_vectors.WaveVectors(*k_vectors.points_within(cell, torch.full((n_systems,), 2.0, dtype=torch.float64)))
    atoms = reciprocal.sorted_atoms(system_of, n_systems, x.shape[0], x.device)
    plan = (*atoms, waves.points, waves.point_begin)
    moments = torch.randn(x.shape[0], 2, 4, dtype=torch.float64)
    structure = fourier.fourier_spread(moments, x, *plan, 1)
    sizes = (system_of, n_systems)
    columns = mesh.mesh_columns(x, *sizes, (6, 5, 7), 5)
    lattice, factors = (
        lattice_of(cell, None, 0),
        [torch.rand(shape, dtype=torch.float64) for shape in ((6, 5, 1), (1, 1, 4))],
    )
    influence = (lattice.metric, lattice.volume, alpha, *factors, (6, 5, 7), (0, 0), 1)
    stencils = (*sizes, *columns, (6, 5, 7), 5)
    seeds = (torch.arange(n_systems), 3 * torch.arange(n_systems), torch.tensor(7))
    return {
        search.neighbor_pairs: query,
        search.neighbor_matrix: (*query, -1, 90),
        search.fill_neighbor_matrix: (*query, flags, -1, *memory),
        rows._inspect: (
            x,
            cell,
            system_of,
            found.pointers,
            found.neighbors,
            found.shifts,
            0,
            found.padding,
            found.first,
        ),
        geometry.measure_pairs: (x, cell, system_of, None, pairs[0], pairs[1], shifts, None, 0, rows.NO_PADDING),
        pair_sum: (DSF.text, "wrcpg", "rcpgw|rcpgw", *values, *directions, *given, *none, *distances),
        pair_moments: (
            *(EWALD_MOMENTS.text, "", "mc", 0, moments[:, :1].contiguous(), moments[:, :1, :1].contiguous(), x, cell),
            *(None, None, alpha.unsqueeze(1), None, *given[:-2], *none, *distances),
        ),
        shortest_vectors: (cell,),
        usable_cells: (cell, True),
        lattice_geometry: (cell,),
        transform_vectors: (x, cell[system_of.long()], True),
        mesh_influence: (*influence, True, True),
        multiply_by_influence: (torch.randn(n_systems, 2, 6, 5, 4, 2, dtype=torch.float64), *influence, True),
        d3_coefficients: (x[:, 0].contiguous(), *reference_states, -4.0, 0),
        three_body_energies: triples,
        three_body_derivatives: (*triples, torch.randn_like(q)),
        chains.move_chains: (
            *torch.randn(2, n_systems, 3, dtype=torch.float64),
            *torch.rand(3, n_systems).double(),
            0.5 + torch.rand(n_systems, 3).double(),
            # in steps that are as long as a period, velocities of a chain may grow until they are NaN
            0.2 * torch.rand(n_systems).double(),
            1,
        ),
        noise.normal_noise: (*seeds, system_of, system_of, 3, x.shape[0], 3),
        noise.chi_square_noise: (*seeds, torch.full((n_systems,), 5.5, dtype=torch.float64), 3),
        segments.system_sums: (x, system_of, n_systems),
        segments.spread_systems: (cell, system_of, x.shape[0]),
        fourier.fourier_spread: (moments, x, *plan, 1),
        fourier.fourier_gather: (structure, x, *plan, 1),
        mesh.mesh_columns: (x, *sizes, (6, 5, 7), 5),
        mesh.mesh_spread: (moments, x, *stencils, 1),
        mesh.mesh_gather: (mesh.mesh_spread(moments, x, *stencils, 1), x, *stencils, 1),
        mesh_transform.mesh_spectrum: (torch.randn(n_systems, 1, 6, 5, 7, dtype=torch.float64),),
        mesh_transform.mesh_values: (torch.randn(n_systems, 1, 6, 5, 4, 2, dtype=torch.float64), 7),
        k_vectors.points_within: (cell, torch.full((n_systems,), 2.0, dtype=torch.float64)),
        k_vectors.chosen_points: (cell, torch.full((n_systems,), 2.0, dtype=torch.float64)),
        k_vectors.points_of_indices: (cell, torch.tensor([[1, -2, 0], [0, 0, 3]])),
    }


TWO = batch(triclinic(5, charged=True), crystal("rocksalt", 5.6, 1, 0.1))
OPS = list(op_calls(TWO))


COLLECTIVES = {
    *("rows_from_partners", "sum_on_all_ranks", "sum_of_shares", "replicated"),
    *("window_spectrum", "window_values"),
}
"""Ops that need a group of ranks: `tests.distributed.division` has their checks."""

WHOLE_CALLS = {"call"}
"""The op of compiled graphs: `tests.routes.test_ewald_compiled` has its checks."""

EVERY_OP = {op.op.name for op in OPS} | {f"nvalchemiops::{name}" for name in COLLECTIVES | WHOLE_CALLS}


def test_no_op_is_forgotten():
    import nvalchemiops.cli
    from nvalchemiops.torch.autograd import naming

    list(nvalchemiops.cli.import_all(nvalchemiops))
    registered = {name for name in naming._definitions if name.startswith("nvalchemiops::")}
    assert registered == EVERY_OP


def test_one_import_registers_all_ops():
    code = "import json, nvalchemiops.torch.ops; from nvalchemiops.torch.autograd import naming; "
    code += "print(json.dumps([n for n in naming._definitions if n.startswith('nvalchemiops::')]))"
    assert set(python_says(code)) == EVERY_OP


def test_that_import_names_each_module_with_ops():
    """Others may import a module in passing, and stop to."""
    folder = Path(nvalchemiops.torch.ops.__file__).parent
    named = set()
    for node in ast.walk(ast.parse((folder / "ops.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    with_ops = [
        path for path in folder.rglob("*.py") if re.search(r"^(@warp_custom_op\(|one_op = )", path.read_text(), re.M)
    ]
    assert {".".join(path.relative_to(folder.parents[1]).with_suffix("").parts) for path in with_ops} == named


def test_rows_have_the_same_names_in_all_ops():
    """Programs that are saved name arguments."""
    named = [names for op in OPS if "neighbors" in (names := list(inspect.signature(op).parameters))]
    assert named
    for names in named:
        begin = names.index("neighbors") - 1
        assert names[begin : begin + 5] == ["row_begin", "neighbors", "shifts", "width", "padding"]


ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.op.name)
@pytest.mark.parametrize(
    ("system", "checks"),
    [
        pytest.param(TWO, ALL_CHECKS, id="two systems"),
        pytest.param(SYSTEMS["no atoms"](), ALL_CHECKS[:-1], id="no atoms"),
        # the graph that is traced for two systems, with sizes of zero
        pytest.param(SYSTEMS["no atoms"](), ALL_CHECKS[-1:], marks=pytest.mark.later, id="no atoms, traced"),
    ],
)
def test_opcheck(op, system, checks):
    arguments = op_calls(system)[op]
    # leaves, as a training loop passes them; the last of a chain refuses to be differentiated
    leaves = bool(op.op.diff_outputs) and op is not three_body_derivatives
    arguments = tuple(
        a.clone().requires_grad_(leaves) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in arguments
    )
    torch.library.opcheck(op.op.overload, arguments, test_utils=checks)


@pytest.mark.parametrize("system", [TWO, SYSTEMS["no atoms"]()], ids=["two systems", "no atoms"])
def test_opcheck_of_a_matrix_as_wide_as_needed(system):
    *arguments, _ = op_calls(system)[search.neighbor_matrix]
    torch.library.opcheck(search.neighbor_matrix.op.overload, (*arguments, None))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.op.name)
def test_outputs_have_memory_of_their_own(op):
    arguments = op_calls(TWO)[op]
    outputs = op(*arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    owners = [
        t.untyped_storage().data_ptr() for t in (*arguments, *outputs) if isinstance(t, torch.Tensor) and t.numel()
    ]
    mine = owners[-sum(o.numel() > 0 for o in outputs) :]
    assert len(set(mine)) == len(mine) and not set(mine) & set(owners[: -len(mine)])


def test_nothing_is_left_of_dropped_results():
    x, q, cell, _ = triclinic(5)
    x.requires_grad_()
    start = live_recordings()
    for _ in range(300):
        ewald_summation(x, q, cell, alpha=0.6, cutoff=4.0)
    assert live_recordings() == start


def test_values_stay_what_they_were():
    """Between releases numbers move only with an entry in the changelog: then run this file as a script."""
    stored = json.loads(STORED.read_text())
    computed = compute_values()
    assert computed.keys() == stored.keys()
    for name, values in computed.items():
        np.testing.assert_allclose(values, stored[name], rtol=1e-9, atol=1e-9, err_msg=name)


def compute_values():
    values = {}
    for name in SYSTEMS:
        system = SYSTEMS[name]()
        energies, forces, slopes, virial = ewald_summation(
            system.positions, system.charges, system.cell, accuracy=1e-12, **ALL
        )
        values[name] = [energies.sum().item(), *forces.reshape(-1)[:6].tolist(), *slopes[:3].tolist()]
        values[name] += virial.reshape(-1).tolist()
        _, counts, shifts = neighbors.neighbor_list(system.positions, 4.5, system.cell)
        values[name + ", neighbors"] = [int(counts.sum()), *shifts.abs().sum((0, 1)).tolist()]
    return values


if __name__ == "__main__":
    STORED.write_text(json.dumps(compute_values(), indent=1) + "\n")
