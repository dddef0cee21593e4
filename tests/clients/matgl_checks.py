"""matgl: its neighbor lists from ASE and pymatgen, which import the paths of an older release; its Warp kernels."""

import numpy as np
import pytest
import torch

pytest.importorskip("matgl")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

from tests.clients.common import as_set, pairs, structures

SYSTEMS = structures()


def test_import_of_the_old_paths():
    from matgl.ext import _alchmtk

    from nvalchemiops.torch.neighbors import neighbor_list

    assert _alchmtk.neighbor_list is neighbor_list


@pytest.mark.parametrize("guess", [0.3, 0.01, 16])
@pytest.mark.parametrize("name", SYSTEMS)
def test_neighbors_of_atoms(name, guess):
    from matgl.ext._alchmtk import neighbor_list_from_ase

    i, j, distances, shifts, _, _ = neighbor_list_from_ase(SYSTEMS[name], 5.0, density_guess=guess, device="cpu")
    assert as_set(i, j, shifts) == pairs(SYSTEMS[name], 5.0)
    assert (distances < 5.0 + 1e-5).all()


@pytest.mark.parametrize("name", SYSTEMS)
def test_neighbors_of_pymatgen(name):
    from matgl.ext._alchmtk import neighbor_list_from_molecule, neighbor_list_from_structure
    from pymatgen.io.ase import AseAtomsAdaptor

    atoms = SYSTEMS[name]
    if atoms.pbc.any():
        everywhere = atoms.copy()
        everywhere.pbc = True
        i, j, _, shifts, x = neighbor_list_from_structure(AseAtomsAdaptor.get_structure(everywhere), 5.0, device="cpu")
        everywhere.positions = x.numpy()
        assert as_set(i, j, shifts) == pairs(everywhere, 5.0)
    else:
        i, j, _, _ = neighbor_list_from_molecule(AseAtomsAdaptor.get_molecule(atoms), 5.0, device="cpu")
        assert as_set(i, j, np.zeros((len(i), 3))) == pairs(atoms, 5.0)


def test_tensornet_with_warp_kernels():
    """Its message passing on kernels of its own, which it turns on where this package can be imported."""
    from matgl.models import TensorNet

    assert TensorNet(element_types=("Na", "Cl"), is_intensive=False)._use_warp
    assert torch.isfinite(next(TensorNet(element_types=("Na", "Cl"), is_intensive=False).parameters())).all()
