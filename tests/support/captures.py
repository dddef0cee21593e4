"""Calls that repeat on a device, each with other positions, and their lists."""

import torch

from nvalchemiops.torch import plans
from nvalchemiops.torch.interactions.pair import lennard_jones
from tests.support.cases import ONE
from tests.support.comparing import random_like
from tests.support.systems import in_form, neighbors_of

CUTOFF = 3.0


def on(device, values):
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in values.items()}


class Calls:
    """Lennard-Jones energies of a system at other positions each time."""

    def __init__(self, device, system=ONE):
        self.device, self.potential = device, lennard_jones(CUTOFF)
        self.system, self.count = system, 0
        self.fixed = on(device, {"cell": system.cell, "sigma": 0.9, "epsilon": 0.7})
        if len(system.cell) > 1:
            self.fixed["batch_idx"] = system.batch_idx.to(device, copy=True)

    def positions(self):
        self.count += 1
        return (self.system.positions + 0.02 * random_like([self.system.positions], self.count)[0]).to(self.device)

    def check(self, near, n=1):
        """Calls with this list have the energies of ordinary ones, now and after further calls."""
        found = []
        for _ in range(n):
            x = self.positions()
            energies = self.potential(x, **self.fixed, **near)
            with plans.off():
                found.append((energies, self.potential(x, **self.fixed, **near)))
        for a, b in found:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
        return found[-1][1]


def pointers(device, system=ONE, n_fewer=0, cutoff=CUTOFF):
    """A list with pointers, without so many of its last pairs."""
    near = neighbors_of(system, cutoff)
    n_pairs = near["neighbor_list"].shape[1] - n_fewer
    some = {"neighbor_list": near["neighbor_list"][:, :n_pairs], "neighbor_shifts": near["neighbor_shifts"][:n_pairs]}
    return on(device, in_form(some, len(system.charges), "pointers"))
