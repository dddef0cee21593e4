"""A model, on paper, of a PME step (energies and forces) on many devices: strong and weak scaling, what breaks first.

No measurement: operations and bytes by the counts below, on devices and a network with the figures below. The counts of
bytes and messages are those that ``benchmarks/scale.py`` measures at 2 ranks, where the model gives its values, too
(``--check``).

- *Liquid*: molten salt, a cutoff of 9 angstrom, a mesh spacing of 1.25 angstrom, splines of order 5, a skin of 1.
- *Device*: the roofline of an H100 in float64; kernels that reach a half of it. Host time of a call in eager mode:
  measured, 1.2 ms.
- *Network*: 50 GB/s in and out of each device at once, 5 µs for a collective call to start, 1 µs for each other rank
  in an all-to-all, which sends to all of them.
- *Pairs*: rows of owned atoms; bricks by recursive bisection, with ghosts around them as far as cutoff and skin.
- *Mesh*: windows to slabs and back, and one exchange of slabs each way; at most as many slabs as planes.

Run: ``python benchmarks/scale_model.py [--check]``.
"""

import argparse
import math
from typing import NamedTuple

from nvalchemiops.interactions.electrostatics.costs import Costs

DENSITY, CUTOFF, SKIN, SPACING, ORDER = 1.0 / 22.4, 9.0, 1.0, 1.25, 5
EFFICIENCY = 0.5  # of the roofline
HOST = 1.2e-3  # s a call
BANDWIDTH, START, PARTNER = 50e9, 5e-6, 1e-6
COLLECTIVES = 7  # in a call, five of them all-to-all
LIST = 16  # bytes of a pair: its number and its image


# -- costs ----------------------------------------------------------------------------------------
#
# Each piece of work takes as long as its bytes take through the memory, or its operations through the units for
# float64, whichever is longer (S. Williams, A. Waterman and D. Patterson, Commun. ACM 52, 65 (2009),
# doi:10.1145/1498765.1498785). It is a floor: measured are 7 times its time of a pair, twice that of k-vectors, 10
# times that of a point of the mesh.


class Card(NamedTuple):
    """What a GPU is said to reach: bytes from memory, and operations in float64, in a second."""

    bandwidth: float
    operations: float


H100 = Card(3.35e12, 34e12)
"""SXM5, from NVIDIA's data sheet (without tensor cores)."""

NOT_FUSED = 0.5
"""Of these operations, what remains where additions and multiplications are not fused, as in half of the code here."""


class Work(NamedTuple):
    """Bytes through the memory and operations, of one kernel."""

    bytes: float
    operations: float

    def nanoseconds(self, card: Card) -> float:
        """The time on a card, by its roofline."""
        return 1e9 * max(self.bytes / card.bandwidth, self.operations / (NOT_FUSED * card.operations))


PAIR = (
    # the list (16 bytes), position and charge of the neighbor in two sectors of 32 bytes; erfc, exp, a root, a division
    Work(80.0, 160.0),
    # the search: a pair is written (16 bytes) for 6.4 that are looked at (27 bins by 4/3 π), 28 operations each
    Work(16.0, 6.4 * 28.0),
)
K_VECTORS = (
    # from atoms to k-vectors: three times sine and cosine (60 each), products of three phases, eight sums
    Work(0.0, 3 * 60.0 + 40.0),
    # back to atoms, with derivatives along three axes
    Work(0.0, 3 * 60.0 + 80.0),
)
MESH = (
    # two transforms of 8 bytes for each point, along three axes, each read and written
    Work(2 * 3 * 16.0, 2 * 2.5 * 20.0),
    # the product with the influence function, of half as many complex numbers
    Work(20.0, 3.0),
    # written by the spread, read by the gather; 125 points of a stencil twice, at 40 points for an atom
    Work(16.0, 2 * 125.0 * 10.0 / 40.0),
)


def modelled(card: Card) -> Costs:
    """Costs by the model."""
    return Costs(*(sum(work.nanoseconds(card) for work in part) for part in (PAIR, K_VECTORS, MESH)))


# -- a step ---------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A PME step on one of the devices: seconds, and bytes."""

    pairs: float
    mesh: float
    network: float
    partners: float
    host: float
    ghosts: float  # for each owned atom
    sent: float  # bytes for each owned atom
    memory: float

    @property
    def seconds(self) -> float:
        """Kernels and network wait for each other; the host runs ahead of them, and is seen where it takes longer."""
        return max(self.pairs + self.mesh + self.network + self.partners, self.host)


def bricks(n_ranks: int, sides: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> list[tuple[float, float, float]]:
    """The sides of all bricks of a liquid, in a cell with these sides: each part is cut with the least surface."""
    if n_ranks == 1:
        return [sides]
    # the first cut along an axis makes two surfaces; axes that come first are preferred
    surface = [(2.0 if side == 1.0 else 1.0) * (1.0 + 0.06 * axis) / side for axis, side in enumerate(sides)]
    cut, half = surface.index(min(surface)), n_ranks // 2
    found = []
    for n in (half, n_ranks - half):
        x, y, z = (side * n / n_ranks if axis == cut else side for axis, side in enumerate(sides))
        found += bricks(n, (x, y, z))
    return found


def step(n_atoms: float, n_ranks: int) -> Step:
    """The model."""
    costs, own = modelled(H100), n_atoms / n_ranks
    sides, length = bricks(n_ranks), (n_atoms / DENSITY) ** (1 / 3)

    def mean_volume(margin: float) -> float:
        """The mean volume of bricks with a margin, as a share of the cell."""
        volumes = [math.prod(min(side + margin, 1.0) for side in brick) for brick in sides]
        return sum(volumes) / n_ranks

    neighbors = 4.0 / 3.0 * math.pi * CUTOFF**3 * DENSITY
    listed = neighbors * ((CUTOFF + SKIN) / CUTOFF) ** 3
    ghosts = mean_volume(2.0 * (CUTOFF + SKIN) / length) * n_ranks - 1.0
    pairs = own * neighbors * costs.pair * 1e-9 / EFFICIENCY

    n = length / SPACING
    slabs = min(n_ranks, int(n))
    uneven = math.ceil(int(n) / slabs) / (n / slabs)
    mesh = n**3 / slabs * uneven * costs.mesh * 1e-9 / EFFICIENCY
    margin = ORDER + SKIN / SPACING  # points of a window beyond those of its brick
    window = mean_volume(margin / n) * n**3
    # a rank keeps what belongs to its own slab
    thickness = min(n * sum(side for side, _, _ in sides) / n_ranks + margin, n)
    kept = window * min(n / slabs / thickness, 1.0)
    swapped = n**3 / slabs * (1.0 - 1.0 / slabs)
    sent = own * 32.0 * ghosts + 2.0 * 8.0 * ((window - kept) + swapped)
    partners = 0.0 if n_ranks == 1 else COLLECTIVES * START + 5 * (n_ranks - 1) * PARTNER
    memory = own * (listed * LIST + (1.0 + ghosts) * 100.0) + 8.0 * (window + 4.0 * n**3 / slabs)
    return Step(pairs, mesh, sent / BANDWIDTH, partners, HOST, ghosts, sent / own, memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="the values at 2 ranks that scale.py measures")
    options = parser.parse_args()
    if options.check:
        found = step(46**3, 2)
        print(f"97,336 ions, 2 ranks: {found.ghosts:.2f} ghosts and {found.sent:.0f} bytes an owned ion")
        return
    head = "devices       ms  speed-up  efficiency   pairs    mesh  network  partners   ghosts  bytes an ion   GiB"
    for title, atoms in (
        ("strong scaling of 10^6 ions", lambda _: 1e6),
        ("weak scaling, 10^6 ions a device", lambda p: 1e6 * p),
    ):
        print(f"{title}\n{head}")
        one = step(atoms(1), 1)
        for n_ranks in (1, 2, 4, 8, 16, 64, 256, 1000):
            found = step(atoms(n_ranks), n_ranks)
            gain = atoms(n_ranks) / atoms(1) * one.seconds / found.seconds
            parts = (found.pairs, found.mesh, found.network, found.partners)
            print(
                f"{n_ranks:7} {1e3 * found.seconds:8.2f} {gain:9.1f} {gain / n_ranks:11.2f}"
                + "".join(f"{1e3 * part:8.2f}" for part in parts)
                + f"   {found.ghosts:9.2f} {found.sent:11.0f} {found.memory / 2**30:9.2f}"
            )


if __name__ == "__main__":
    main()
