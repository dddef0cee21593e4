"""deepmd-kit: its neighbor lists (`NvNeighborList`), its graphs (`build_neighbor_graph_nv`), and models on them.

Its compiled operators are for one release of torch (2.11.0 exactly), and are left out, as in a build without them: the
Python of the installed package is what runs. Where that release of torch is installed they are loaded.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

env = pytest.importorskip("deepmd.env")
if not torch.__version__.startswith(env.GLOBAL_CONFIG["pt_version"]):
    env.SHARED_LIB_DIR = Path("no compiled operators")
    env.GLOBAL_CONFIG["cibuildwheel"] = "0"  # which would load MPI for them

from ase.build import bulk, molecule
from deepmd.dpmodel.utils.default_neighbor_list import DefaultNeighborList
from deepmd.dpmodel.utils.neighbor_graph import build_neighbor_graph
from deepmd.pt.model.model import get_model
from deepmd.pt.utils.nv_nlist import NvNeighborList
from deepmd.pt_expt.utils.nv_graph_builder import build_neighbor_graph_nv, nv_search_matrix

from tests.clients.common import as_set, pairs, structures

SYSTEMS = {name: atoms for name, atoms in structures().items() if atoms.pbc.all() or not atoms.pbc.any()}
"""Its frames are periodic along all axes or along none."""


def frames_of(atoms, n=3):
    """The same atoms ``n`` times, moved, in cells that differ."""
    made = []
    for seed in range(n):
        one = atoms.copy()
        one.rattle(0.1, seed=seed)
        if one.pbc.any():
            one.set_cell(one.cell.array * (1.0 + 0.02 * seed), scale_atoms=True)
        made.append(one)
    return made


def inputs(frames, types=None):
    """Coordinates, types and boxes."""
    x = torch.tensor(np.stack([a.positions for a in frames]))
    types = np.stack([np.unique(a.numbers, return_inverse=True)[1] for a in frames]) if types is None else types
    box = torch.tensor(np.stack([a.cell.array for a in frames])) if frames[0].pbc.any() else None
    return x, torch.tensor(types), box


def expected(atoms, positions, cutoff):
    """Of a frame whose positions it has moved into the cell."""
    here = atoms.copy()
    here.positions = np.asarray(positions)
    return pairs(here, cutoff)


def found(frame, positions, i, j, vectors):
    """Pairs and shifts of what it gives as vectors."""
    shifts = np.asarray(vectors) - (positions[j] - positions[i])
    if frame.pbc.any():
        shifts = shifts @ np.linalg.inv(frame.cell.array)
    assert np.abs(shifts - shifts.round()).max(initial=0.0) < 1e-9
    return as_set(i, j, shifts.round())


BIG = {"copper of 144 atoms": SYSTEMS["copper"].repeat((3, 3, 4)), "salt of 64 atoms": SYSTEMS["salt"].repeat(2)}
"""From 128 atoms on it asks for `batch_cell_list`."""


@pytest.mark.parametrize("name", [*SYSTEMS, *BIG])
@pytest.mark.parametrize("sel", [4, 300])
def test_edges(name, sel):
    """All of them, whatever ``sel`` is: with room for 4 neighbors it searches again."""
    frames = frames_of((SYSTEMS | BIG)[name])
    x, types, box = inputs(frames)
    made = NvNeighborList().build(x, types, box, 5.0, [sel], return_mode="edges")
    kept = made.edge_mask
    (j, i), vectors = made.edge_index[:, kept].numpy(), made.edge_vec[kept].numpy()
    n = len(frames[0])
    for number, frame in enumerate(frames):
        here, places = i // n == number, made.coord[number].numpy()
        pairs_here = found(frame, places, i[here] % n, j[here] % n, vectors[here])
        assert pairs_here == expected(frame, places, 5.0)


@pytest.mark.parametrize("sel", [10, 200])
@pytest.mark.parametrize("name", ["salt", "magnesium", "benzene"])
def test_nearest_neighbors_of_extended_atoms(name, sel):
    """Its own builder of all pairs finds the same ones, and the same distances in their order."""
    x, types, box = inputs(frames_of(SYSTEMS[name]))
    x.requires_grad_()
    results = []
    for builder in (NvNeighborList(), DefaultNeighborList()):
        extended, kinds, rows, owners = builder.build(x, types, box, 5.0, [sel])
        n = x.shape[1]
        valid = rows[..., :sel] >= 0
        safe = rows[..., :sel].clamp(min=0)
        batch = torch.arange(len(x))[:, None, None]
        distances = (extended[batch, safe] - extended[:, :n, None]).norm(dim=-1)
        distances = torch.where(valid, distances, torch.inf).sort(-1).values
        assert ((kinds.gather(1, owners.clamp(min=0)) == kinds) | (kinds < 0)).all()
        close = distances.clamp(max=6.0)
        slope = torch.autograd.grad(close.square().sum(), x)[0]
        results.append((distances[..., : min(sel, distances.shape[-1])].detach(), slope))
    width = min(len(r[0][0, 0]) for r in results)
    np.testing.assert_allclose(results[0][0][..., :width], results[1][0][..., :width], rtol=1e-10)
    assert torch.isinf(results[0][0][..., width:]).all() and torch.isinf(results[1][0][..., width:]).all()
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-9, atol=1e-9)


def edges_of_graph(made, frames, places, n):
    kept = made.edge_mask
    (j, i), vectors = made.edge_index[:, kept].numpy(), made.edge_vec[kept].detach().numpy()
    return [
        found(frame, places[number], *(k[i // n == number] % n for k in (i, j)), vectors[i // n == number])
        for number, frame in enumerate(frames)
    ]


@pytest.mark.parametrize("name", [*SYSTEMS, *BIG])
def test_graph(name):
    frames = frames_of((SYSTEMS | BIG)[name])
    x, types, box = inputs(frames)
    made = build_neighbor_graph_nv(x, types, box, 5.0, with_csr=True, canonicalize=True)
    places = nv_search_matrix(x, box, 5.0, 400)[0].numpy()
    for frame, where, pairs_here in zip(frames, places, edges_of_graph(made, frames, places, x.shape[1]), strict=True):
        assert pairs_here == expected(frame, where, 5.0)


def test_graph_of_frames_with_different_numbers_of_atoms():
    """Shorter frames are filled with atoms of type -1, which have no neighbors; as by its builder of all pairs."""
    frames = frames_of(SYSTEMS["salt"])
    types = np.tile(np.arange(8) % 2, (3, 1))
    types[1, 5:], types[2, 2:] = -1, -1
    x, types, box = inputs(frames, types)
    made = build_neighbor_graph_nv(x, types, box, 6.0)
    other = build_neighbor_graph(nv_search_matrix(x, box, 6.0, 400)[0], types, box, 6.0)
    lengths = [torch.sort(graph.edge_vec[graph.edge_mask].norm(dim=1)).values for graph in (made, other)]
    np.testing.assert_allclose(*lengths, rtol=1e-10)
    i, j = made.edge_index[:, made.edge_mask]
    assert (types.flatten()[i] >= 0).all() and (types.flatten()[j] >= 0).all() and (i // 8 == j // 8).all()


@pytest.mark.parametrize("kind", ["gas", "cluster"])
def test_edges_while_the_density_grows_by_four(kind):
    """One builder, its room as given: it reads the counts and searches again."""
    if kind == "gas":
        atoms = bulk("Ar", "fcc", a=6.5, cubic=True).repeat(2)
        atoms.rattle(0.4, seed=3)
    else:
        atoms = molecule("C60")
        atoms.positions *= 1.6
    builder, most = NvNeighborList(), []
    for _ in range(6):
        x, types, box = inputs([atoms])
        made = builder.build(x, types, box, 6.0, [8], return_mode="edges")
        j, i = made.edge_index[:, made.edge_mask].numpy()
        places = made.coord[0].numpy()
        assert found(atoms, places, i, j, made.edge_vec[made.edge_mask].numpy()) == expected(atoms, places, 6.0)
        most.append(np.bincount(i).max())
        atoms.positions *= 0.25 ** (1 / 15)
        atoms.set_cell(atoms.cell.array * 0.25 ** (1 / 15))
    assert most[0] > 8 and most[-1] > 2 * most[0]


# -- models ---------------------------------------------------------------------------------------


def energy_model(kind):
    """A model with weights drawn at random, in float64."""
    descriptor = {
        "se_e2_a": {"sel": [60, 60], "rcut": 5.0, "rcut_smth": 3.0, "neuron": [4, 8], "axis_neuron": 4, "seed": 1},
        "SeZM": {"sel": 20, "rcut": 5.0, "channels": 4},
    }[kind]
    parameters = {
        "type_map": ["Cl", "Na"] if kind == "se_e2_a" else ["Na", "Cl"],
        "descriptor": {"type": kind, "precision": "float64"} | descriptor,
        "fitting_net": {"neuron": [8, 8], "seed": 1, "precision": "float64"},
    }
    torch.manual_seed(0)
    model = get_model(parameters | ({"type": kind} if kind == "SeZM" else {})).eval()
    with torch.no_grad():  # some weights begin at zero, and then nothing depends on positions
        for weights in model.parameters():
            weights += 0.1 * torch.randn_like(weights)
    return model


def test_energy_model_on_its_list():
    """Energy, forces and virial as on its own list of all pairs."""
    model = energy_model("se_e2_a")
    x, types, box = inputs(frames_of(SYSTEMS["salt"].repeat((2, 1, 1))))
    own = model(x, types, box=box.reshape(-1, 9))
    extended, kinds, rows, owners = NvNeighborList().build(x, types, box, model.get_rcut(), model.get_sel())
    lower = model.forward_lower(extended, kinds, rows, owners)
    np.testing.assert_allclose(lower["energy"].detach(), own["energy"].detach(), rtol=1e-10)
    forces = torch.zeros_like(x).scatter_add_(
        1, owners[..., None].expand(-1, -1, 3), lower["extended_force"].detach().to(x.dtype)
    )
    np.testing.assert_allclose(forces, own["force"].detach(), atol=1e-10)


def test_model_that_builds_its_list_in_each_call():
    """SeZM: a batch takes this package's list. Forces and virial by differences, of frames that are one batch."""
    model = energy_model("SeZM")
    frame, other, _ = frames_of(SYSTEMS["salt"])
    step, moved = 3e-5, []
    for axis in range(3):
        for sign in (1, -1):
            one = frame.copy()
            one.positions[0, axis] += sign * step
            moved.append(one)
    for a, b in ((0, 0), (1, 2)):
        for sign in (1, -1):
            strain = np.eye(3)
            strain[a, b] += sign * step
            one = frame.copy()
            one.set_cell(one.cell.array @ strain, scale_atoms=True)
            moved.append(one)
    x, types, box = inputs([frame, other, *moved])
    found = {name: value.detach().numpy() for name, value in model(x, types, box=box.reshape(-1, 9)).items()}
    up, down = found["energy"][2::2, 0], found["energy"][3::2, 0]
    slopes = (up - down) / (2 * step)
    np.testing.assert_allclose(found["force"][0, 0], -slopes[:3], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["virial"][0, [0, 5]], -slopes[3:], rtol=1e-5, atol=1e-6)
    assert np.abs(slopes).min() > 1e-6
    turned = model(x.flip(0), types.flip(0), box=box.flip(0).reshape(-1, 9))["energy"].detach()
    np.testing.assert_allclose(turned.flip(0), found["energy"], rtol=1e-10)
