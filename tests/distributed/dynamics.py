"""Cases for several ranks: dynamics of systems that are divided. See `ranks.py`."""

import ase.build
import torch
import torch.distributed as dist
from collections.abc import Callable
from functools import partial
from typing import Any

from nvalchemiops.torch.distributed import Domain
from nvalchemiops.torch.dynamics import (
    SumOfTerms,
    langevin,
    npt,
    nve,
    nph,
    csvr,
    nose_hoover,
    stochastic_cell,
    simulate,
)
from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.systems import System
from tests.distributed.common import F64, assert_equal, case
from tests.dynamics.systems import SOFT, argon, crystal
from nvalchemiops.constants import FEMTOSECOND, GIGAPASCAL, KELVIN

DT = 5.0 * FEMTOSECOND


def divided(system, group, skin=0.4, cutoff=5.5):
    n, size, rank = len(system.positions), dist.get_world_size(group), dist.get_rank(group)
    edges = [n * r * (r + 1) // (size * (size + 1)) for r in range(size + 1)]
    mine = slice(edges[rank], edges[rank + 1])
    held = system._replace(
        **{
            name: getattr(system, name)[mine]
            for name in ("positions", "numbers", "charges", "batch_idx")
            if getattr(system, name) is not None
        }
    )
    domain = Domain(held.positions, held.cell, held.pbc, held.batch_idx, cutoff=cutoff, skin=skin, group=group)
    return domain.distribute(held), mine


@case(2, 3)
def trajectories_are_those_of_one_process(group):
    system = System.from_ase(crystal())
    kt = 300.0 * KELVIN
    for integrator in (
        nve(DT),
        langevin(DT, kt),
        nose_hoover(DT, kt),
        csvr(DT, kt),
        nph(DT, 0.1 * GIGAPASCAL, temperature=kt) if 0 else csvr(DT, kt),
        npt(DT, kt, 0.1 * GIGAPASCAL, cell="full", barostat_time=100 * DT),
        npt(DT, kt, 0.1 * GIGAPASCAL, cell="axes"),
        stochastic_cell(DT, kt, 0.1 * GIGAPASCAL, compressibility=1.0 / GIGAPASCAL),
    ):
        own, mine = divided(system, group)
        g = torch.Generator().manual_seed(1)
        v = (
            0.02 * torch.randn(len(system.positions), 3, generator=g, dtype=F64)
            if "temperature" not in integrator.parameters
            else None
        )
        record = ["potential_energy", "kinetic_energy", "temperature", "conserved", "volume", "pressure"]
        expected = simulate(system, argon(), integrator, 30, seed=3, velocities=v, record=record)
        found = simulate(
            own,
            argon(),
            integrator,
            30,
            seed=3,
            velocities=None if v is None else own.domain.distribute(v[mine]),
            record=record,
        )
        domain = found.state.system.domain
        back = domain.gather(found.state.system)
        if dist.get_rank(group) == 0:
            print(
                [type(f[0]).__name__ for f in integrator.flows if f],
                domain is not own.domain,
                domain.n_owned,
                domain.n_ghosts,
                own.domain.n_owned,
            )
        assert_equal(back.positions, expected.state.system.positions[mine], "positions")
        assert_equal(domain.gather(found.state.velocities), expected.state.velocities[mine], "velocities")
        assert_equal(back.cell, expected.state.system.cell, "cell")
        for name in record:
            assert_equal(found.records[name], expected.records[name], name, 1e-9)
            assert domain._is_same(found.records[name])
