"""With sizes prepared once, a step of dynamics reads nothing on the host: list, potentials and backward pass.

The tests of each op on a GPU give it a list; here the list is part of the step, and so is the question whether it is
stale. On a CPU, where reading costs nothing, the steps are compared with those that choose everything themselves.
"""

import contextlib

import pytest
import torch

from nvalchemiops.torch.interactions.electrostatics import EwaldSummation, ParticleMeshEwald, dsf_coulomb
from nvalchemiops.torch.interactions.lj import lj_energy_forces
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.rebuild_detection import batch_neighbor_list_needs_rebuild
from tests.support.gpu import waiting_is_an_error
from tests.support.systems import System, batch, crystal

STEPS, CUTOFF, SKIN, WIDTH = 10, 4.0, 0.6, 160


def systems(device: torch.device) -> System:
    return batch(crystal("rocksalt", 5.6, 2, 0.1), crystal("rocksalt", 5.8, 3, 0.15, seed=1)).to(device)


def energy_of(x, system, near, long_range):
    """Energies of both systems: repulsion, damped charges and, as asked, charges over all distances."""
    idx, n_systems = system.batch_idx, len(system.cell)
    options = {**near, "batch_idx": idx}
    repulsion = lj_energy_forces(x, 2.2, 0.05, CUTOFF, system.cell, **options, num_systems=n_systems)[0]
    shifts = {"unit_shifts" if name == "neighbor_shifts" else name: value for name, value in options.items()}
    damped = dsf_coulomb(x, system.charges, CUTOFF, 0.3, system.cell, **shifts, num_systems=n_systems)[0]
    smooth = long_range(x, system.charges, system.cell, **options)
    return repulsion.sum() + damped.sum() + smooth.sum()


def dynamics(system, long_range, prepared):
    """Positions after some steps of steepest descent, the list kept while no atom moved further than half the skin."""
    x, idx = system.positions.clone(), system.batch_idx
    on = {"device": x.device, "dtype": torch.int32}
    rows = torch.empty(len(x), WIDTH, **on), torch.empty(len(x), **on), torch.empty(len(x), WIDTH, 3, **on)
    memory = dict(zip(("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts"), rows))
    flags = torch.ones(2, dtype=torch.bool, device=x.device)
    reference = torch.empty_like(x).fill_(torch.inf)
    told = {"batch_idx": idx, "cell": system.cell}
    for _ in range(STEPS):
        if prepared:
            flags = batch_neighbor_list_needs_rebuild(
                reference, x, skin_distance_threshold=0.5 * SKIN, update_reference_positions=True, **told
            )
            neighbor_list(x, CUTOFF + SKIN, **told, **memory, rebuild_flags=flags, check=False)
            near = {"neighbor_matrix": rows[0], "neighbor_matrix_shifts": rows[2]}
        else:
            pairs, ptr, shifts = neighbor_list(x, CUTOFF, **told, return_neighbor_list=True)
            near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts}
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(energy_of(leaf, system, near, long_range), leaf)
        x = x - (0.05 * slope).clamp(-0.1, 0.1)
    return x, rows[1]


@pytest.mark.later_cases("lanes-Ewald")
@pytest.mark.parametrize("method", ["Ewald", "PME"])
def test_ten_steps_read_nothing_and_are_right(method, device):
    system = systems(device)
    # alpha is so large that pairs between the cutoff and the list's reach, which count here only, do not matter
    if method == "Ewald":
        free, kept = EwaldSummation(1.1, 6.0, CUTOFF), EwaldSummation(1.1, 6.0, CUTOFF).prepare(system.cell)
    else:
        free = kept = ParticleMeshEwald(1.1, (24, 24, 24), 6, CUTOFF)
    kept, free = kept.to(device), free.to(device)
    dynamics(system, kept, prepared=True)  # everything is compiled
    with waiting_is_an_error() if device.type == "cuda" else contextlib.nullcontext():  # on a GPU alone
        found, count = dynamics(system, kept, prepared=True)
    assert int(count.max()) <= WIDTH
    expected, _ = dynamics(system, free, prepared=False)
    assert (expected - system.positions).abs().max() > 0.05
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
