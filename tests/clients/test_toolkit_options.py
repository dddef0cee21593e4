"""What nvalchemi-toolkit may leave out of its steps of dynamics, or give in another form: the results are the same."""

import numpy as np
import pytest
import torch
import warp as wp

from tests.clients.test_toolkit_names import (
    FLOAT,
    IDX,
    Systems,
    arrays,
    chains,
    close,
    fire_step,
    scalars,
    steps,
    utils,
)


@pytest.mark.parametrize("dtype", [wp.float32, wp.float64])
def test_masses_of_chains_from_python_numbers(dtype):
    """In memory that is made, with all digits of the numbers."""
    found = steps.nhc_compute_masses(27, 0.1, 0.3, 3, num_systems=2, dtype=dtype)
    assert found.dtype is dtype and found.shape == (2, 3)
    np.testing.assert_allclose(found.numpy(), [[0.243, 0.009, 0.009]] * 2, rtol=1e-15 if dtype is wp.float64 else 1e-7)
    kt = torch.tensor([0.1, 0.2], dtype=FLOAT)
    found = steps.nhc_compute_masses(27, arrays(kt)[0], 0.3, 3, num_systems=2)
    np.testing.assert_allclose(found.numpy()[:, 1], 0.09 * kt, rtol=1e-15)


def test_a_chain_takes_the_kinetic_energy_that_is_known():
    found = []
    for computes in (True, False):
        s = Systems(0.08)
        links = chains(s, 3)
        ke2, scale = 2.0 * s.kinetic(), torch.zeros(2, dtype=FLOAT)
        if computes:
            ke2.zero_()
        steps.nhc_thermostat_chain_update(
            *arrays(s.v, s.m), *map(scalars, links), *arrays(s.kt, s.dt, 3.0 * s.counts.to(FLOAT), ke2, scale),
            batch_idx=arrays(IDX)[0], compute_ke=computes,
        )  # fmt: skip
        found.append((s.v, *links, ke2, scale))
    for known, computed in zip(*found, strict=True):
        close(known, computed)


def test_drawn_velocities_have_no_momentum():
    s = Systems()
    scratch = torch.zeros(2, 3, dtype=FLOAT), torch.zeros(2, dtype=FLOAT), torch.zeros(2, 3, dtype=FLOAT)
    drawn = torch.zeros_like(s.v)
    for velocities, options in ((drawn, {"remove_com": False}), (s.v, {})):
        given = arrays(velocities, s.m, s.kt, *scratch)
        utils.initialize_velocities(*given, random_seed=3, batch_idx=arrays(IDX)[0], **options)
    of_systems = torch.zeros(2, 3, dtype=FLOAT)
    assert of_systems.index_add(0, IDX, s.m[:, None] * s.v).abs().max() < 1e-12 < scratch[2].abs().min()
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
