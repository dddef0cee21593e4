"""What one rank of many sends and does for its ghosts, its division and its exclusions; the others are played.

A bulk of 2,000 atoms for each rank, neighbors seen to 10, float64. One process is one of the ranks, in the middle of
their tree of bricks, with its own atoms only. A stand-in plays the others: they do what this rank does. So a rank gets
as many rows from a partner as it sends to it, and sums are as many times its share as there are ranks. Numbers of
messages, of ranks that get them, and bytes are exact for this rank; values that arrive mean nothing.

- *ghosts*: positions and charges of ghosts, in one message to each partner, as in each sum over neighbors.
- *owners and ghosts*: atoms are divided again, as `Domain.follow` does, with the same cuts.
- *exclusions, once*: a pair for each atom is brought to its owners (`Domain.distribute_pairs`).
- *exclusions, each call*: their rows are made.
- *PME*, *PME, recorded*: a call with forces, and the same as `record` replays it.
- *balance*: atoms of the rank with the most, relative to the mean, for 20,000 atoms at places of several kinds;
  the two clusters, the slab and the droplet are in vacuum.

*Network* is the time by the model of ``scale_model.py``: 5 µs for a message of all ranks or a batch of messages to
partners, 1 µs for each partner, 50 GB/s; a sum over ranks has log2(n) partners. *Processor* is the processor time of
this process.

Run: ``python benchmarks/one_rank.py [--ranks 8 64 512 4096]``.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from nvalchemiops.torch import record
from nvalchemiops.torch.distributed import Domain, communication, exchange
from nvalchemiops.torch.distributed.bricks import Bricks, Frames, make_bricks, shape_of
from nvalchemiops.torch.interactions.electrostatics import particle_mesh_ewald
from nvalchemiops.torch.interactions.pair import shares

ATOMS, REACH, DENSITY, SPACING = 2000, 10.0, 1.0 / 22.4, 1.25
SAMPLE = 50  # atoms for each rank, for the cuts
BALANCED, LEAST = 20_000, 30  # atoms of which the balance is shown, if so many are on each rank
ROUNDS = 15
BANDWIDTH, START, PARTNER = 50e9, 5e-6, 1e-6


class Traffic(NamedTuple):
    """Messages of one rank."""

    batches: int = 0
    partners: int = 0
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """By the model."""
        return self.batches * START + self.partners * PARTNER + self.bytes / BANDWIDTH

    def __add__(self, other: tuple[Any, ...]) -> "Traffic":
        return Traffic(*(a + b for a, b in zip(self, other)))


class Others:
    """The stand-in: messages of `communication` for one rank of ``n_ranks``, which are counted."""

    def __init__(self, rank: int, n_ranks: int) -> None:
        self.rank, self.n_ranks, self.sent = rank, n_ranks, Traffic()
        names = {"add": self.add, "maximum": self.maximum, "swap_rows": self.swap_rows, "_gathered": self.gathered}
        known = {name: getattr(communication, name) for name in names}
        for module in [m for n, m in sys.modules.items() if n.startswith("nvalchemiops.torch.")]:
            for name, function in names.items():
                if getattr(module, name, None) is known[name]:
                    setattr(module, name, function)
        counted = exchange.counts_for_this_rank

        def counts(counts: torch.Tensor, group: Any) -> torch.Tensor:
            counted(counts, group)
            return counts.clone()

        exchange.counts_for_this_rank = counts
        for name, number in (("get_rank", rank), ("get_world_size", n_ranks)):
            mock.patch.object(dist, name, lambda *_, number=number: number).start()

    def _count(self, partners: int, n_bytes: int) -> None:
        self.sent += Traffic(1, partners, n_bytes)

    def _sum(self, values: torch.Tensor) -> None:
        self._count(math.ceil(math.log2(self.n_ranks)), 2 * values.nbytes)

    def add(self, values: torch.Tensor, group: Any) -> torch.Tensor:
        self._sum(values)
        of_ranks = values[: self.n_ranks] if values.ndim == 1 else values[:0]
        if len(of_ranks) == self.n_ranks and int(of_ranks.count_nonzero()) <= 1:  # each rank has its own in its place
            own = of_ranks[self.rank].clone()
            values[self.n_ranks :] *= self.n_ranks
            of_ranks.fill_(own)
            return values
        return values.mul_(self.n_ranks)

    def maximum(self, values: torch.Tensor, group: Any) -> torch.Tensor:
        self._sum(values)
        return values

    def gathered(self, kind: str, values: torch.Tensor, group: Any) -> torch.Tensor:
        self._sum(values)
        return values.expand(2, -1)

    def swap_rows(self, values: torch.Tensor, send: Any, receive: Any, group: Any, partners: Any) -> torch.Tensor:
        others = [n for rank, n in zip(partners, send) if n and rank != self.rank]
        self._count(len(others), sum(others) * values[:1].nbytes)
        return values.clone() if sum(send) == sum(receive) else values[:1].expand(sum(receive), *values.shape[1:])


def bricks_of(length: float, places: torch.Tensor, n_ranks: int) -> Bricks:
    """The bricks of atoms at these places (n, 3), in units of the side of a cube."""

    def alone(values: torch.Tensor) -> torch.Tensor:
        return values

    frames = Frames.of(length * np.eye(3)[None], np.ones((1, 3), dtype=bool))
    return make_bricks(frames, places, None, None, REACH, shape_of(n_ranks, None), alone, alone)


def places_of(kind: str, n: int) -> torch.Tensor:
    """Places (n, 3) of atoms of this kind: in all of the cell, or with vacuum around them."""
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    normal = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    if kind == "two clusters":  # a third of the atoms, and two thirds
        return torch.where(torch.arange(n).unsqueeze(1) < n // 3, 0.25, 0.7) + 0.03 * normal
    if kind == "tilted slab":
        height = uniform[:, 0] + uniform[:, 1] + 0.1 * uniform[:, 2]
        return torch.stack([uniform[:, 0], uniform[:, 1], height % 1.0], 1)
    if kind == "droplet":
        return 0.5 + 0.25 * normal / normal.norm(dim=1, keepdim=True) * uniform[:, :1] ** (1 / 3)
    return uniform


def balance_of(n_ranks: int) -> str:
    """The balance of each kind."""
    length = side_of(BALANCED)
    kinds = ("bulk", "two clusters", "tilted slab", "droplet")
    return ", ".join(f"{kind} {bricks_of(length, places_of(kind, BALANCED), n_ranks).largest:.3f}" for kind in kinds)


def side_of(n_atoms: int) -> float:
    """The side of a cube with a bulk of these atoms."""
    return (n_atoms / DENSITY) ** (1 / 3)


def measured(others: Others, call: Callable[[], Any]) -> tuple[Traffic, float]:
    """The messages of a call, and its processor time in seconds."""
    seconds = []
    call()
    for _ in range(ROUNDS):
        others.sent, start = Traffic(), time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return others.sent, statistics.median(seconds)


def run(n_ranks: int, show: Callable[[str, Traffic, float, str], None]) -> None:
    """All figures for one number of ranks."""
    rank = n_ranks // 2
    length = side_of(ATOMS * n_ranks)
    bricks = bricks_of(length, places_of("bulk", SAMPLE * n_ranks), n_ranks)
    others = Others(rank, n_ranks)
    low, high = (torch.from_numpy(ends[rank]) for ends in bricks.bounds(0.0))
    generator = torch.Generator().manual_seed(2)
    places = low + (high - low) * torch.rand(ATOMS, 3, generator=generator, dtype=torch.float64)
    cell = length * torch.eye(3, dtype=torch.float64)
    domain = Domain(length * places, cell, cutoff=REACH, cuts=bricks)
    assert domain.n_owned == ATOMS
    values = torch.ones(ATOMS, 4, dtype=torch.float64)
    note = f"{domain.n_ghosts} ghosts of {len(domain._halo.partners)} ranks"
    show("ghosts", *measured(others, lambda: domain._with_ghosts(values)), note)
    show("owners and ghosts", *measured(others, lambda: Domain(length * places, cell, cutoff=REACH, cuts=bricks)), "")
    first = torch.arange(ATOMS, dtype=torch.int64) + rank * ATOMS
    pairs = torch.stack([first, first.roll(1)])
    own = domain.distribute_pairs(pairs)
    show("exclusions, once", *measured(others, lambda: domain.distribute_pairs(pairs)), "")
    x = domain.distribute(length * places)
    each = measured(others, lambda: shares.exclusions_of_share(domain, own, None, x))
    show("exclusions, each call", *each, f"{own.pairs.nbytes / 1e3:.0f} kB of pairs")
    later = Domain(length * places, cell, cutoff=REACH, cuts=bricks, check="never")
    charges = torch.ones(ATOMS, dtype=torch.float64)
    points = (2 * round(length / (2.0 * SPACING)),) * 3

    def pme(x: torch.Tensor) -> Any:
        options = {"mesh_dimensions": points, "cutoff": REACH, "compute_forces": True, "domain": later}
        return particle_mesh_ewald(x, charges, cell, 0.3, **options)

    replay = record(pme)
    ordinary = measured(others, lambda: pme(x))
    show("PME", *ordinary, "kernels of all atoms included")
    show("PME, recorded", ordinary[0], measured(others, lambda: replay(x))[1], "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"{'ranks':>6} {'':22} batches  partners        kB   network µs   processor µs")

    def show(n_ranks: int, what: str, sent: Traffic, seconds: float, note: str) -> None:
        print(
            f"{n_ranks:6} {what:22} {sent.batches:7} {sent.partners:9} {sent.bytes / 1e3:9.1f} "
            f"{1e6 * sent.seconds:12.0f} {1e6 * seconds:14.0f}   {note}"
        )

    for n_ranks in options.ranks:
        if n_ranks <= BALANCED / LEAST:
            print(f"{n_ranks:6} {'balance':22} {balance_of(n_ranks)}")
        run(n_ranks, lambda *told, n_ranks=n_ranks: show(n_ranks, *told))


if __name__ == "__main__":
    main()
