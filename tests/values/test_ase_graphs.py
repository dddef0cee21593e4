"""Graphs of many structures: the same pairs as each structure has alone, in one batch."""

import sys
import types

import ase
import ase.build
import numpy as np
import pytest
import torch

from nvalchemiops.ase import atoms_to_graph, graphs
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.formats import list_geometry
from tests.support.calculators import argon, salt


def structures():
    slab = ase.build.fcc111("Al", (2, 2, 3), vacuum=8.0)
    slab.rattle(0.1, seed=2)
    return [argon(), ase.build.molecule("CH3CH2OH"), ase.Atoms(), slab, ase.Atoms("H"), salt()]


OPTIONS = {
    "all": {},
    "nearest": {"nearest": 7},
    "symmetric": {"nearest": 7, "symmetric": True},
    "ties": {"nearest": 5, "ties": "index"},
    "tolerance": {"nearest": 5, "tie_tolerance": 0.5},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("at_once", [1, 40, 10**6])
def test_each_structure_has_the_pairs_that_it_has_alone(name, at_once, monkeypatch):
    monkeypatch.setattr(graphs, "ATOMS_PER_SEARCH", at_once)
    options = OPTIONS[name]
    graph = atoms_to_graph(iter(structures()), 5.0, dtype=torch.float64, **options)
    begins, first_pair = graph.batch_ptr.tolist(), graph.neighbor_ptr.tolist()
    assert begins[-1] == len(graph.positions) and first_pair[-1] == graph.neighbor_list.shape[1]
    for number, atoms in enumerate(structures()):
        part = slice(begins[number], begins[number + 1])
        assert np.array_equal(graph.positions[part], atoms.positions)
        assert np.array_equal(graph.atomic_numbers[part], atoms.numbers)
        assert (graph.batch_idx[part] == number).all()
        alone = neighbor_list(
            torch.tensor(atoms.positions),
            5.0,
            torch.tensor(atoms.cell.array),
            torch.tensor(atoms.pbc),
            return_neighbor_list=True,
            **options,
        )
        pairs = slice(first_pair[part.start], first_pair[part.stop])
        assert torch.equal(graph.neighbor_list[:, pairs] - part.start, alone[0])
        assert torch.equal(graph.shifts[pairs], alone[2])
    geometry = (graph.positions, graph.neighbor_list, graph.shifts, graph.cell, graph.batch_idx)
    distances, vectors = list_geometry(*geometry)
    assert torch.equal(graph.distances, distances) and torch.equal(graph.vectors, vectors)


def test_one_structure_no_structure_and_precision():
    water = ase.build.molecule("H2O")
    graph = atoms_to_graph(water, 1.2)
    assert graph.neighbor_list.T.tolist() == [[0, 1], [0, 2], [1, 0], [2, 0]]
    assert graph.positions.dtype == graph.vectors.dtype == graph.cell.dtype == torch.get_default_dtype()
    assert graph.batch_ptr.tolist() == [0, 3] and not graph.pbc.any()
    for empty in ([], [ase.Atoms()], [ase.Atoms(), ase.Atoms()]):
        graph = atoms_to_graph(empty, 3.0)
        assert graph.batch_ptr.tolist() == [0] * (len(empty) + 1) and graph.neighbor_list.shape == (2, 0)
        assert graph.shifts.shape == (0, 3) and graph.neighbor_ptr.tolist() == [0]
        assert graph.cell.shape == (len(empty), 3, 3)


TIES = {"none": {"tie_tolerance": 0.0}, "index": {"ties": "index"}, "some": {"tie_tolerance": 2.0}}


def test_options_of_nearest_neighbors_tell():
    """12 at one distance are ties in a perfect crystal; where atoms moved a little, only within a tolerance."""
    crystal, counts = ase.build.bulk("Ar", "fcc", a=5.4, cubic=True), {}
    given = {"cutoff": 5.0, "nearest": 5, "dtype": torch.float64}
    for rattled in (False, True):
        if rattled:
            crystal.rattle(0.01, seed=1)
        for name in TIES:
            counts[name, rattled] = atoms_to_graph(crystal, **given, **TIES[name]).neighbor_ptr.diff().tolist()
    assert counts["some", False] == counts["some", True] == [12] * 4
    assert counts["index", False] == counts["index", True] == counts["none", True] == [5] * 4

    def pairs(**options):
        graph = atoms_to_graph(crystal, **given, **TIES["none"], **options)
        return {(*ij, *s) for ij, s in zip(graph.neighbor_list.T.tolist(), graph.shifts.tolist())}

    reverse = {(j, i, -a, -b, -c) for i, j, a, b, c in pairs()}
    assert pairs() != reverse and pairs(symmetric=True) == pairs() | reverse


def test_a_device_that_is_given_is_used_beside_the_default():
    with torch.device("meta"):
        graph = atoms_to_graph(structures(), 4.0, device="cpu")
    assert {t.device.type for t in graph} == {"cpu"}
    assert torch.equal(graph.neighbor_list, atoms_to_graph(structures(), 4.0).neighbor_list)


def test_mistakes_are_named():
    with pytest.raises(TypeError, match="number 1 is str"):
        atoms_to_graph([ase.Atoms("H"), "H"], 3.0)
    with pytest.raises(ValueError, match="`ties`"):
        atoms_to_graph(ase.Atoms("H"), 3.0, 4, ties="some")
    with pytest.raises(ValueError, match="`cutoff`"):
        atoms_to_graph([], -1.0)
    with pytest.raises(ValueError, match=r"^`atoms`: number 0: .*positions"):
        atoms_to_graph(ase.Atoms("H", [[np.nan, 0.0, 0.0]]), 3.0)
    for options in ({"dtype": torch.float16}, {"dtype": "float32"}, {"device": "tpu"}, {"progress": "yes"}):
        with pytest.raises(TypeError, match=f"^`{next(iter(options))}` must be"):
            atoms_to_graph(ase.Atoms("H"), 3.0, **options)
    with pytest.raises(TypeError, match=r"`atoms`.*got NoneType"):
        atoms_to_graph(None, 3.0)


@pytest.mark.parametrize("at_once", [1, 10**6])
@pytest.mark.parametrize(
    "bad, message",
    [
        (ase.Atoms("H", [[0.0, np.inf, 0.0]]), "number 6: `positions`"),
        (ase.Atoms("H", cell=[1.0, 0.0, 1.0], pbc=True), "number 6: `cell`"),
    ],
)
def test_a_bad_structure_among_many_is_named(bad, message, at_once, monkeypatch):
    monkeypatch.setattr(graphs, "ATOMS_PER_SEARCH", at_once)
    with pytest.raises(ValueError, match=message):
        atoms_to_graph([*structures(), bad, *structures()], 5.0)
    with pytest.raises(ValueError, match=r"^`cutoff`"):
        atoms_to_graph([*structures(), bad], -1.0)


def test_progress_counts_structures(monkeypatch, capsys):
    atoms_to_graph(structures(), 4.0)
    assert not capsys.readouterr().err  # few structures
    atoms_to_graph(structures(), 4.0, progress=True)
    assert f"{len(structures())}/{len(structures())}" in capsys.readouterr().err
    with monkeypatch.context() as patch:  # many, but nobody sees it
        patch.setattr(graphs, "MANY", 1)
        atoms_to_graph(structures(), 4.0)
        for stderr in (None, types.SimpleNamespace(write=print)):  # of a process that has none, or what only writes
            patch.setattr(sys, "stderr", stderr)
            atoms_to_graph(structures(), 4.0)
        patch.setattr(sys, "stderr", None)
        atoms_to_graph(structures(), 4.0, progress=True)
        assert not capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="`progress` needs tqdm"):
        atoms_to_graph(structures(), 4.0, progress=True)


def check_data(data, graph):
    """Each structure has its atoms and pairs, numbered anew; messages go from j to i."""
    assert len(data) == len(graph.cell)
    for number, each in enumerate(data):
        j, i = each.edge_index
        moved = each.pos[j] - each.pos[i] + (each.shifts.to(each.pos).unsqueeze(1) @ each.cell).squeeze(1)
        assert torch.allclose(moved, each.edge_vec) and torch.allclose(moved.norm(dim=1), each.edge_weight)
        assert len(each.z) == len(each.pos) == int((graph.batch_idx == number).sum()) and each.pbc.shape == (1, 3)
    assert sum(each.edge_index.shape[1] for each in data) == graph.neighbor_list.shape[1]


def test_data_of_pytorch_geometric(monkeypatch):
    graph = atoms_to_graph(structures(), 5.0, 7, dtype=torch.float64)
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    with pytest.raises(ImportError, match="PyTorch Geometric"):
        graph.to_pyg()
    module = types.SimpleNamespace(Data=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "torch_geometric", types.SimpleNamespace(data=module))
    monkeypatch.setitem(sys.modules, "torch_geometric.data", module)
    check_data(graph.to_pyg(), graph)


def test_data_of_the_real_pytorch_geometric():
    pytest.importorskip("torch_geometric", reason="PyTorch Geometric is not installed")
    graph = atoms_to_graph(structures(), 5.0, 7, dtype=torch.float64)
    check_data(graph.to_pyg(), graph)
