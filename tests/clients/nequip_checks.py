"""nequip: its lists of single systems and of a batch."""

import pytest
import torch

data = pytest.importorskip("nequip.data.AtomicDataDict")
from nequip.data._nl import alchemiops_batch_cell_list

from tests.clients.common import as_set, pairs, structures

SYSTEMS = structures()


def frame(atoms, dtype, with_cell=True):
    made = {data.POSITIONS_KEY: torch.tensor(atoms.positions, dtype=dtype)}
    if with_cell:
        made[data.CELL_KEY] = torch.tensor(atoms.cell.array, dtype=dtype)[None]
        made[data.PBC_KEY] = torch.tensor(atoms.pbc)[None]
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SYSTEMS)
def test_one_system(name, dtype):
    atoms = SYSTEMS[name]
    for with_cell in (True, False) if not atoms.pbc.any() else (True,):
        found = alchemiops_batch_cell_list(frame(atoms, dtype, with_cell), 5.0)
        i, j = found[data.EDGE_INDEX_KEY]
        shifts = found.get(data.EDGE_CELL_SHIFT_KEY, torch.zeros(len(i), 3))
        assert as_set(i, j, shifts) == pairs(atoms, 5.0)


@pytest.mark.parametrize("max_neighbors", [None, 3, 500])
def test_batch(max_neighbors):
    frames = [
        {**frame(atoms, torch.float64), data.ATOM_TYPE_KEY: torch.zeros(len(atoms), dtype=torch.long)}
        for atoms in SYSTEMS.values()
    ]
    found = alchemiops_batch_cell_list(data.batched_from_list(frames), 5.0, max_neighbors)
    i, j = found[data.EDGE_INDEX_KEY]
    first = 0
    for atoms in SYSTEMS.values():
        own = (i >= first) & (i < first + len(atoms))
        shifts = found[data.EDGE_CELL_SHIFT_KEY][own]
        assert as_set(i[own] - first, j[own] - first, shifts) == pairs(atoms, 5.0)
        first += len(atoms)
