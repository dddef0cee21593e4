"""Molecules with bonds of fixed length, and the integrators under which they move."""

import torch

from nvalchemiops.torch.dynamics import (
    Constraints,
    csvr,
    langevin,
    nose_hoover,
    nph,
    npt,
    nve,
    stochastic_cell,
)
from nvalchemiops.torch.systems import System

from .systems import float64, wells

KT, PRESSURE = 0.05, 0.004


def tensor(values):
    return torch.tensor(values, dtype=float64)


WATER = tensor([[0.0, 0.0, 0.0], [0.76, 0.59, 0.0], [-0.76, 0.59, 0.0]])
STAR = 0.63 * tensor([[0, 0, 0], [1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]])
CHAIN = tensor([[0.0, 0.0, 0.0], [0.9, 0.1, 0.0], [1.5, 0.9, 0.2], [2.5, 0.8, -0.1]])
KINDS = {
    "water": (WATER, [16.0, 1.0, 1.0], [(0, 1), (2, 0), (1, 2)]),
    "two": (WATER[:2], [1.0, 3.0], [(1, 0)]),
    "star": (STAR, [12.0, 1.0, 1.0, 2.0, 3.0], [(0, 1), (0, 2), (0, 3), (0, 4)]),
    "chain": (CHAIN, [3.0, 2.0, 1.0, 4.0], [(0, 1), (1, 2), (2, 3)]),
    "atom": (WATER[:1], [2.0], []),
}


def molecules(*kinds, edge=5.0, seed=0):
    """Turned molecules of these kinds in a sheared cell; masses, velocities, and pairs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=float64)

    cell = edge * torch.eye(3, dtype=float64) + 0.1 * edge * normal(3, 3)
    places, masses, pairs = [], [], []
    for kind in kinds:
        shape, weights, bonds = KINDS[kind]
        turn = torch.linalg.qr(normal(3, 3))[0]
        pairs += [(i + len(masses), j + len(masses)) for i, j in bonds]
        places.append(shape @ turn + torch.rand(3, generator=generator, dtype=float64) @ cell)
        masses += weights
    positions = torch.cat(places)
    return (
        System(positions, cell=cell),
        tensor(masses),
        0.15 * normal(len(masses), 3),
        torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2),
    )


MIXED = "two", "water", "atom", "star", "chain", "water"


def deterministic(dt):
    times = {"thermostat_time": 0.9, "barostat_time": 2.0}
    return {
        "nve": nve(dt),
        "nose_hoover": nose_hoover(dt, KT, thermostat_time=0.9),
        "nph": nph(dt, PRESSURE, temperature=KT, barostat_time=2.0),
        "npt axes": npt(dt, KT, PRESSURE, cell="axes", mask=(True, True, False), **times),
        "npt full": npt(dt, KT, PRESSURE, cell="full", **times),
    }


def random(dt):
    return {
        "langevin": langevin(dt, KT, friction=0.3),
        "csvr": csvr(dt, KT, thermostat_time=0.9),
        "stochastic_cell": stochastic_cell(dt, KT, PRESSURE, 20.0, thermostat_time=0.9, barostat_time=2.0),
    }


def every(dt):
    return deterministic(dt) | random(dt)


def started(integrator, kinds=MIXED, model=None, frozen=(), lengths=None, **options):
    system, masses, velocities, pairs = molecules(*kinds)
    masses[list(frozen)] = torch.inf
    integrator = integrator.constrained(Constraints(pairs, lengths))
    options = {"velocities": velocities, "masses": masses, **options}
    return integrator, integrator.start(system, model or wells(), **options)


def errors(integrator, state):
    """The largest relative error of a length, and relative velocity along a bond, computed here."""
    first, second = integrator.constraints.pairs.unbind(1)
    start = state.extra["constraint lengths"]  # sorted by clusters, as `first` and `second` of the constraints are
    bonds = state.system.positions[integrator.constraints.second] - state.system.positions[integrator.constraints.first]
    lengths = (bonds.norm(dim=1) / start - 1.0).abs().max()
    relative = state.velocities[second] - state.velocities[first]
    along = (state.system.positions[second] - state.system.positions[first]) * relative
    return lengths.item(), along.sum(1).abs().max().item()
