"""An entry that names the atom of its row, in no other image, is padding: 0.5.0 skips it, and clients fill rows so."""

import pytest
import torch

from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping, d3_dispersion
from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb, ewald_summation
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from tests.lanes.fibers import gpu_layout

CELL = 7.0 * torch.eye(3, dtype=torch.float64)
REACH = 8.5
DAMPING = RationalDamping(0.43, 4.4, 0.79, 0.9)


def coulomb(x, given, padding):
    q = torch.linspace(0.5, 1.5, len(x), dtype=x.dtype)
    return dsf_coulomb(x, q, 8.0, 0.2, **given, cell=CELL.to(x.dtype), fill_value=padding, compute_forces=True)


def multipoles(x, given, padding):
    q, mu = torch.linspace(0.5, 1.5, len(x), dtype=x.dtype), 0.1 * x
    sources = {"dipoles": mu, "alpha": 0.4, "k_cutoff": 3.0, "cutoff": 8.0}
    return ewald_summation(x, q, CELL.to(x.dtype), **sources, **given, mask_value=padding, compute_forces=True)


def pairs(x, given, padding):
    options = {"sigma": 1.9, "epsilon": 0.5, "fill_value": padding, "compute_forces": True}
    return lennard_jones(8.0)(x, CELL.to(x.dtype), **given, **options)


def dispersion(x, given, padding):
    numbers = 1 + torch.arange(len(x)) % 9
    cutoffs = {"cutoff": 8.0, "coordination_cutoff": 8.0, "three_body_cutoff": 6.0}
    options = {**cutoffs, "s9": 1.0, "fill_value": padding, "compute_forces": True}
    return d3_dispersion(x, numbers.int(), DAMPING, D3Parameters.load(), CELL.to(x.dtype), **given, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("call", [coulomb, multipoles, pairs, dispersion])
def test_an_atom_in_its_own_row_is_padding(call, dtype):
    """The same bits, wherever it stands between images of the atom, which are its neighbors."""
    x = 7.0 * torch.rand(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    index, _, shifts = neighbor_list(x, REACH, CELL.to(dtype), fill_value=-1)
    own, here = torch.arange(len(x), dtype=torch.int32).unsqueeze(1), torch.zeros(len(x), 1, 3, dtype=torch.int32)
    assert ((index == own) & (shifts != 0).any(2)).any()
    spare = torch.where(index < 0, own, index)
    padded = torch.cat([own, spare[:, :5], own, spare[:, 5:], own], 1)
    moved = torch.cat([here, shifts[:, :5], here, shifts[:, 5:], here], 1)
    given, filled = ({"neighbor_matrix": m, "neighbor_matrix_shifts": s} for m, s in ((index, shifts), (padded, moved)))
    assert all(map(torch.equal, call(x, filled, -5), call(x, given, -1)))
    with gpu_layout():  # lanes add up other entries
        for a, b in zip(call(x, filled, -5), call(x, given, -1), strict=True):
            assert (a - b).abs().max() <= 8.0 * torch.finfo(dtype).eps * b.abs().max()
