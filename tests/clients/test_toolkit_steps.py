"""Steps of dynamics as nvalchemi-toolkit calls them: flows that are known exactly, and what calls may leave out."""

import numpy as np
import pytest
import torch
import warp as wp
from scipy.linalg import expm

from nvalchemiops.dynamics import integrators as steps
from nvalchemiops.dynamics import utils
from nvalchemiops.dynamics.optimizers.fire import fire_step
from nvalchemiops.torch.fire2 import fire2_step_coord
from tests.clients.test_toolkit_names import (
    FLOAT,
    IDX,
    Systems,
    arrays,
    chains,
    close,
    warp_is_ready,  # noqa: F401  # a fixture
)


def flow(matrix, push, start, time):
    """The solution of ``dy/dt = matrix y + push``."""
    homogeneous = np.zeros((4, 4))
    homogeneous[:3, :3], homogeneous[:3, 3] = matrix, push
    return (expm(float(time) * homogeneous) @ [*start, 1.0])[:3]


@pytest.mark.parametrize("mode", ["isotropic", "anisotropic", "triclinic"])
def test_atoms_in_a_cell_that_moves(mode):
    """Their places for a step, and their velocities under forces for half a step."""
    s, volume = Systems(0.5), torch.ones(2, dtype=FLOAT)
    s.rate[:, 0, 1] += 0.4  # it need not be symmetric
    start = [t.numpy().copy() for t in (s.x, s.v)]
    steps.npt_position_update(*arrays(s.x, s.v, s.cells, s.rate, s.dt), batch_idx=arrays(IDX)[0])
    given = *arrays(s.v, s.m, s.f, s.rate, volume), 7, arrays(s.dt)[0]
    steps.nph_velocity_half_step(*given, *arrays(IDX, s.counts), mode=mode)
    for i, k in enumerate(IDX):
        np.testing.assert_allclose(s.x[i], flow(s.rate[k], start[1][i], start[0][i], s.dt[k]), rtol=1e-12)
        rate = s.rate[k].numpy()
        trace = np.trace(rate)
        known = {"isotropic": trace / 3 * np.eye(3), "anisotropic": np.diag(np.diag(rate)), "triclinic": rate}[mode]
        friction = known + trace / (3 * int(s.counts[k])) * np.eye(3)
        np.testing.assert_allclose(s.v[i], flow(-friction, s.f[i] / s.m[i], start[1][i], s.dt[k] / 2), rtol=1e-11)
    v, *others = (t[:3].contiguous() for t in (torch.as_tensor(start[1]), s.m, s.f))
    given = *arrays(v, *others, s.rate[:1], volume[:1]), 3, arrays(s.dt[:1])[0]
    steps.nph_velocity_half_step(*given, mode=mode)  # one system needs neither a batch nor counts
    close(v, s.v[:3])


def test_noise_of_a_system_does_not_depend_on_the_others():
    """It is that of places in systems; without a batch, in the first one."""

    def moved(atoms, idx):
        s, numbers = Systems(0.3), ((0.3, 0.2), (0.8, 1.2), (2.0, 3.0))
        given = [t[atoms].contiguous() for t in (s.x, s.v, s.f, s.m)]
        more = [torch.tensor(values[: 1 if idx is None else 2], dtype=FLOAT) for values in numbers]
        batch = {} if idx is None else {"batch_idx": arrays(idx)[0]}
        steps.langevin_baoab_half_step(*arrays(*given, *more), 5, **batch)
        return torch.cat(given[:2], 1)

    both = moved(slice(7), IDX)
    close(moved(slice(3), None), both[:3])
    close(moved(slice(3, 7), IDX[3:].contiguous()), both[3:])
    assert (both[:, 3:] - Systems().v).abs().min() > 1e-4


@pytest.mark.parametrize("dtype", [wp.float32, wp.float64])
def test_masses_of_chains_from_python_numbers(dtype):
    """In memory that is made, with all digits of the numbers."""
    found = steps.nhc_compute_masses(27, 0.1, 0.3, 3, num_systems=2, dtype=dtype)
    assert found.dtype is dtype and found.shape == (2, 3)
    np.testing.assert_allclose(found.numpy(), [[0.243, 0.009, 0.009]] * 2, rtol=1e-15 if dtype is wp.float64 else 1e-7)
    kt = torch.tensor([0.1, 0.2], dtype=FLOAT)
    found = steps.nhc_compute_masses(27, arrays(kt)[0], 0.3, 3, num_systems=2)
    np.testing.assert_allclose(found.numpy()[:, 1], 0.09 * kt, rtol=1e-15)


def moved_by_chains(real, computes=True):
    """Velocities, chains, twice the kinetic energies and factors after half a step, in this precision."""
    s = Systems(0.08)
    numbers = (*chains(s, 3), s.kt, s.dt, 3.0 * s.counts.to(FLOAT), 2.0 * s.kinetic() * (not computes), s.dt)
    v, m, *numbers = (t.to(wp.dtype_to_torch(real)) for t in (s.v, s.m, *numbers))
    given = wp.from_torch(v, dtype=wp.types.vector(3, real)), *(wp.from_torch(t, dtype=real) for t in (m, *numbers))
    steps.nhc_thermostat_chain_update(*given, batch_idx=arrays(IDX)[0], compute_ke=computes)
    return v, *numbers[:3], *numbers[-2:]


def test_chains_know_their_energy_or_compute_it_in_either_precision():
    v, *_, ke2, scale = found = moved_by_chains(wp.float64)
    close(v, scale[IDX, None] * Systems().v)
    close(ke2, torch.zeros(2, dtype=FLOAT).index_add(0, IDX, Systems().m * v.square().sum(1)))
    for known, computed in zip(moved_by_chains(wp.float64, False), found, strict=True):
        close(known, computed)
    for single, double in zip(moved_by_chains(wp.float32), found, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-6, atol=1e-6)


def test_drawn_velocities_have_no_momentum():
    """The last system has no atoms, and a centre of mass at rest."""
    s, kt = Systems(), torch.tensor([0.8, 1.2, 1.0], dtype=FLOAT)
    scratch = torch.zeros(3, 3, dtype=FLOAT), torch.zeros(3, dtype=FLOAT), torch.zeros(3, 3, dtype=FLOAT)
    drawn = torch.zeros_like(s.v)
    for velocities, options in ((drawn, {"remove_com": False}), (s.v, {})):
        given = arrays(velocities, s.m, kt, *scratch)
        utils.initialize_velocities(*given, random_seed=3, batch_idx=arrays(IDX)[0], **options)
    of_systems = torch.zeros(3, 3, dtype=FLOAT)
    assert of_systems.index_add(0, IDX, s.m[:, None] * s.v).abs().max() < 1e-12 < scratch[2][:2].abs().min()
    assert not scratch[2][2].any()
    close(drawn - s.v, scratch[2][IDX])
    close(of_systems.index_add(0, IDX, s.m[:, None] * drawn), scratch[0])


def test_a_fire_step_takes_nothing_back_without_a_flag():
    """All systems go uphill."""
    found = []
    for flag in (None, 0, 1):
        s = Systems(0.1)
        pace = [torch.full((2,), value, dtype=FLOAT) for value in (0.05, 0.4, 0.1, 0.99, 0.01, 1.0, 9.0)]
        counts = [torch.full((2,), value, dtype=torch.int32) for value in (3, 5)]
        changes = [torch.full((2,), value, dtype=FLOAT) for value in (0.5, 1.1)]
        flags = () if flag is None else (torch.full((2,), flag, dtype=torch.int32),)
        given = s.x, s.v, -s.v, s.m, *pace, *counts, *changes, *flags
        fire_step(*arrays(*given), batch_idx=arrays(IDX)[0])
        found.append(s.x)
    close(found[0], found[1])
    assert (found[2] - found[0]).abs().max() > 0.1


def test_uphill_steps_of_fire2_go_back_by_half():
    """With the shorter time step, then on from rest; a system that goes downhill beside it does not."""
    s, alpha = Systems(), torch.full((2,), 0.05, dtype=FLOAT)
    dt, count = torch.tensor([0.06, 0.07], dtype=FLOAT), torch.tensor([4, 4], dtype=torch.int32)
    sign = torch.tensor([-1.0, 1.0], dtype=FLOAT)
    forces = sign[IDX, None] * s.v
    start = s.x.clone(), s.v.clone()
    found = {name: torch.zeros(2, dtype=FLOAT) for name in ("vf", "v_sumsq", "f_sumsq", "max_norm")}
    fire2_step_coord(s.x, s.v, forces, IDX, alpha, dt, count, maxstep=9.0, alpha0=0.1, dtshrink=0.5, **found)
    np.testing.assert_allclose(dt, [0.03, 0.07])
    assert count.tolist() == [0, 5] and alpha.tolist() == [0.1, 0.05]
    up = IDX == 0
    close(s.v[up], 0.03 * forces[up])  # parallel, so that mixing changes nothing
    close(s.x[up], start[0][up] - 0.5 * 0.03 * start[1][up] + 0.03**2 * forces[up])
    close(s.x[~up], start[0][~up] + 0.07 * (start[1] + 0.07 * forces)[~up])
    squares = torch.zeros(2, dtype=FLOAT).index_add(0, IDX, start[1].square().sum(1))
    longest = dt * torch.stack([s.v[IDX == n].norm(dim=1).max() for n in range(2)])
    for name, expected in (("vf", sign * squares), ("v_sumsq", squares), ("f_sumsq", squares), ("max_norm", longest)):
        close(found[name], expected)
