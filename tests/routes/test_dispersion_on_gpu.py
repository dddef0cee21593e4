"""D3 on a GPU, or on a CPU with the layout of one."""

import pytest
import torch
from ase.build import bulk, molecule

from nvalchemiops.torch.interactions.dispersion import D3Parameters, d3_dispersion, damping_parameters
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.gpu import assert_equal, waiting_is_an_error

BOHR = 0.529177210903
PARAMETERS = D3Parameters.load()
RANGES = {"cutoff": 14.0, "coordination_cutoff": 12.0, "three_body_cutoff": 10.0, "smoothing": 3.0}


def batch():
    """A crystal and another one, shaken, in bohr."""
    crystals = [bulk("NaCl", "rocksalt", a=5.64, cubic=True), bulk("Si", cubic=True)]
    for k, atoms in enumerate(crystals):
        atoms.rattle(0.1, seed=k)
    x = torch.cat([torch.tensor(atoms.positions) for atoms in crystals]) / BOHR
    numbers = torch.cat([torch.tensor(atoms.numbers) for atoms in crystals])
    cell = torch.stack([torch.tensor(atoms.cell.array) for atoms in crystals]) / BOHR
    batch_idx = torch.tensor([0] * 8 + [1] * 8, dtype=torch.int32)
    return x, numbers, cell, batch_idx


def results(device, dtype=torch.float64, kinds=("bj", "zero"), s9=1.0):
    """Energies, forces, coordination numbers and virials, and derivatives of the energies, of both kinds of damping."""
    x, numbers, cell, batch_idx = (t.to(device) for t in batch())
    x, cell = (t.to(dtype).requires_grad_() for t in (x, cell))
    states = PARAMETERS.states([11, 14, 17], device)
    matrix, _, shifts = neighbor_list(x.detach(), 14.0, cell.detach(), batch_idx=batch_idx)
    near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts, "batch_idx": batch_idx, "num_systems": 2}
    options = {"compute_forces": True, "compute_virial": True, **near, **RANGES}
    found = []
    for kind in kinds:
        call = d3_dispersion(x, numbers, damping_parameters("pbe", kind), states, cell, s9=s9, **options)
        found += [*call, *torch.autograd.grad(call[0].square().sum(), (x, cell))]
    return [r.detach() for r in found]


def test_gpu_equals_cpu(dtype, gpu):
    expected = results(torch.device("cpu"))
    without = results(torch.device("cpu"), s9=0.0)
    assert (expected[0] - without[0]).abs().max() > 1e-6
    found = gpu(lambda device: results(device, dtype))
    assert_equal(found, expected, 1e-10 if dtype is torch.float64 else 1e-4, least=0.0)


@pytest.mark.gpu
def test_nothing_waits_with_prepared_states():
    results(torch.device("cuda"))
    x, numbers, _, _ = (t.to("cuda") for t in batch())
    x, numbers = x[:8].contiguous(), numbers[:8].contiguous()
    pairs, ptr = neighbor_list(x, 30.0, return_neighbor_list=True)
    states = PARAMETERS.states([11, 17], "cuda")
    with waiting_is_an_error():
        for _ in range(2):
            options = {"neighbor_list": pairs, "neighbor_ptr": ptr, "s9": 1.0, "compute_forces": True, **RANGES}
            d3_dispersion(x.clone().requires_grad_(), numbers, damping_parameters("pbe"), states, **options)


def test_elements_without_parameters_are_nan(gpu):
    def energies(device):
        states = PARAMETERS.states([1], device)
        atoms = molecule("H2O")
        x, numbers = torch.tensor(atoms.positions / BOHR, device=device), torch.tensor(atoms.numbers, device=device)
        pairs = neighbor_list(x, 20.0, return_neighbor_list=True)[0]
        return d3_dispersion(x, numbers, damping_parameters("pbe"), states, neighbor_list=pairs)[:1]

    assert gpu(energies)[0].isnan().all()


def test_states_for_a_gpu_without_a_number_are_those_of_the_current_one(monkeypatch):
    """Kept ones are found by their device, which must not be another one when the current one changes."""
    asked = []

    def states(parameters, elements, device):
        asked.append(device)
        return D3Parameters._states(parameters, elements, torch.device("cpu"))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    kind = type("Asked", (D3Parameters,), {"_states": states})
    kind(**vars(D3Parameters.load())).states([1], "cuda")
    assert asked == [torch.device("cuda", 1)]
