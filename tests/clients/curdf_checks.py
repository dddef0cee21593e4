"""curdf: its lists, half and full, by both methods."""

import pytest
import torch

build_neighbor_list = pytest.importorskip("curdf.neighbor").build_neighbor_list
from tests.clients.common import as_set, pairs, structures

SYSTEMS = structures()


@pytest.mark.parametrize("max_neighbors", [None, 4, 2048])
@pytest.mark.parametrize("method", ["cell_list", "naive"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_lists(name, method, max_neighbors):
    atoms = SYSTEMS[name]
    cell, pbc = torch.tensor(atoms.cell.array)[None], torch.tensor(atoms.pbc)[None]
    for half in (True, False):
        (i, j), shifts = build_neighbor_list(torch.tensor(atoms.positions), 5.0, cell, pbc, half, max_neighbors, method)
        found = as_set(i, j, shifts)
        if half:
            others = {(b, a, -x, -y, -z) for a, b, x, y, z in found}
            assert not found & others
            found |= others
        assert found == pairs(atoms, 5.0)
