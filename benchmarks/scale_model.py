"""A model, on paper, of a PME step (energies and forces) on many devices: strong and weak scaling, what breaks first.

No measurement: operations and bytes by the counts below, on devices and a network with the figures below. The counts of
bytes and messages are those that ``benchmarks/scale.py`` measures at 2 ranks, where the model gives its values, too
(``--check``). With ``--simulate`` they are counted for more ranks: one rank of many transforms its part of the mesh by
the library's code, with bricks that the library cuts, and a stand-in for the messages of the others.

- *Liquid*: molten salt, a cutoff of 9 angstrom, a mesh spacing of 1.25 angstrom, splines of order 5, a skin of 1.
- *Device*: the roofline of an H100 in float64; kernels that reach a half of it. Host time of a call in eager mode:
  measured, 1.2 ms.
- *Network*: 50 GB/s in and out of each device at once, 5 µs for a collective call to start, 1 µs for each other rank
  with which it exchanges values.
- *Pairs*: rows of owned atoms; bricks by recursive bisection, with ghosts around them as far as cutoff and skin.
- *Mesh*: windows to pencils and back, and one exchange in the rows and one in the columns of the grid of ranks, each
  way (`nvalchemiops.torch.distributed.pencils`).
- *In turn*: messages and kernels wait for each other. *Beside*: the messages of the mesh travel while pairs are summed.
- *Eager*: Python of a call, during which the device waits if it has less to do. Without it a step is a recorded one,
  whose Python takes 0.03 ms: less than the device in all rows.
- *Kernels*: a recorded step in which each kernel takes some time in addition to that of its bytes and operations.

Run: ``python benchmarks/scale_model.py [--check] [--simulate]``.
"""

import argparse
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.torch.distributed import transform
from nvalchemiops.torch.distributed.bricks import LAST_AXIS, LATER_AXIS, Frames, make_bricks, shape_of
from nvalchemiops.torch.distributed.mesh import MeshDivision
from nvalchemiops.torch.distributed.pencils import BANDWIDTH, PARTNER, START, Load, grid_for, kept_on, load_of

DENSITY, CUTOFF, SKIN, SPACING, ORDER = 1.0 / 22.4, 9.0, 1.0, 1.25, 5
EFFICIENCY = 0.5  # of the roofline
HOST = 1.2e-3  # s a call
KERNELS, EACH = 80, 2e-6  # of a recorded call on several ranks, copies and bookkeeping included; s
SUMS = 2  # over all ranks in a call, with a partner for each doubling of their number
LIST = 16  # bytes of a pair: its number and its image


# -- costs ----------------------------------------------------------------------------------------
#
# Each piece of work takes as long as its bytes take through the memory, or its operations through the units for
# float64, whichever is longer (S. Williams, A. Waterman and D. Patterson, Commun. ACM 52, 65 (2009),
# doi:10.1145/1498765.1498785). It is a floor, in float64. Measured, in float32 for pairs and meshes
# (`electrostatics/costs.py`), are 3 times its time of a pair, the same for k-vectors, and 3 times that of a point of
# the mesh with its splines, at 40 points for an atom.


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


class Costs(NamedTuple):
    """Times in nanoseconds: of a pair with its search, of an atom and eight k-vectors, of a point of the mesh."""

    pair: float
    k_vectors: float
    mesh: float


def modelled(card: Card) -> Costs:
    """Costs by the model."""
    return Costs(*(sum(work.nanoseconds(card) for work in part) for part in (PAIR, K_VECTORS, MESH)))


# -- a step ---------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A PME step on one of the devices: seconds, and bytes."""

    pairs: float
    mesh: float
    of_mesh: float  # its messages
    of_ghosts: float  # messages of ghosts
    sums: float  # messages of sums over all ranks
    ghosts: float  # for each owned atom
    sent: float  # bytes for each owned atom
    memory: float
    grid: tuple[int, int]

    @property
    def in_turn(self) -> float:
        """If messages and kernels wait for each other."""
        return self.pairs + self.mesh + self.of_mesh + self.of_ghosts + self.sums

    @property
    def seconds(self) -> float:
        """If the messages of the mesh travel while pairs are summed."""
        return max(self.pairs, self.of_mesh) + self.mesh + self.of_ghosts + self.sums


Place = tuple[float, float, float]


def bricks(
    n_ranks: int, length: float, low: Place = (0.0, 0.0, 0.0), sides: Place = (1.0, 1.0, 1.0)
) -> list[tuple[Place, Place]]:
    """Lower ends and sides of all bricks of a liquid, in a cell with these: each part is cut with the fewest ghosts."""
    if n_ranks == 1:
        return [(low, sides)]
    reach = 2.0 * (CUTOFF + SKIN) / length
    # the first cut along an axis makes two surfaces; the first axes are preferred, as in `bricks._axes`
    near = [
        (2.0 if side == 1.0 else 1.0) * reach / side * (1.0 + LATER_AXIS * axis) + LAST_AXIS * (axis == 2)
        for axis, side in enumerate(sides)
    ]
    cut, half = near.index(min(near)), n_ranks // 2
    found = []
    for first, n in ((0, half), (half, n_ranks - half)):
        start, size = list(low), list(sides)
        start[cut] += sides[cut] * first / n_ranks
        size[cut] *= n / n_ranks
        found += bricks(n, length, (start[0], start[1], start[2]), (size[0], size[1], size[2]))
    return found


def mesh_of(n_atoms: float) -> tuple[int, int, int]:
    """Points of the mesh."""
    return (int((n_atoms / DENSITY) ** (1 / 3) / SPACING),) * 3


def step(n_atoms: float, n_ranks: int) -> Step:
    """The model."""
    costs, own, length = modelled(H100), n_atoms / n_ranks, (n_atoms / DENSITY) ** (1 / 3)
    low, sides = np.array(bricks(n_ranks, length)).swapaxes(0, 1)
    neighbors = 4.0 / 3.0 * math.pi * CUTOFF**3 * DENSITY
    listed = neighbors * ((CUTOFF + SKIN) / CUTOFF) ** 3
    reach = (CUTOFF + SKIN) / length
    is_cut = sides < 1.0
    ghosts = float(np.minimum(sides + 2.0 * reach, 1.0).prod(1).mean()) * n_ranks - 1.0
    partners = (
        float(np.where(is_cut, np.minimum(1.0 + 2.0 * np.ceil(reach / sides), 1.0 / sides), 1.0).prod(1).mean()) - 1.0
    )
    pairs = own * neighbors * costs.pair * 1e-9 / EFFICIENCY

    mesh = mesh_of(n_atoms)
    margin = ORDER + SKIN / SPACING  # points of a window beyond those of its brick
    sizes = np.minimum(sides * mesh + margin * is_cut, mesh)
    starts = low * mesh - 0.5 * margin * is_cut
    grid, window = grid_for(mesh, starts, sizes), sizes.mean(0).tolist()
    kept = np.array([kept_on(grid, mesh, starts, sizes)])
    load = Load(*(float(value[0]) for value in load_of(mesh, window, n_ranks, *(np.array([n]) for n in grid), kept)))
    sent_to_ghosts = own * 32.0 * ghosts
    of_ghosts = of_messages = of_sums = 0.0
    if n_ranks > 1:
        of_messages = 2.0 * float(load.of_messages)
        of_sums = SUMS * (START + math.log2(n_ranks) * PARTNER)
        of_ghosts = sent_to_ghosts / BANDWIDTH + START + PARTNER * partners
    sent = sent_to_ghosts + 2.0 * load.sent
    memory = own * (listed * LIST + (1.0 + ghosts) * 100.0) + 8.0 * (math.prod(window) + 4.0 * load.points)
    # what is sent is read and written before, and where it arrives
    kernels = load.points * costs.mesh * 1e-9 + 4.0 * (sent if n_ranks > 1 else 0.0) / H100.bandwidth
    return Step(pairs, kernels / EFFICIENCY, of_messages, of_ghosts, of_sums, ghosts, sent / own, memory, grid)


# -- counts of one rank ---------------------------------------------------------------------------


class Counted(NamedTuple):
    """What one rank sends in a transform there and back, and the grid of ranks."""

    sent: float  # bytes
    messages: int
    partners: int
    grid: tuple[int, int]


def simulated(n_atoms: float, n_ranks: int, rank: int, sample: int = 2000) -> Counted:
    """Counts of one rank, with bricks that are cut for ``sample`` atoms for each rank at random places."""
    length = (n_atoms / DENSITY) ** (1 / 3)
    frames = Frames.of(length * np.eye(3)[None], np.ones((1, 3), dtype=bool))
    places = torch.rand(sample * n_ranks, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shape = shape_of(n_ranks, None)
    cut = make_bricks(frames, places, None, None, CUTOFF + SKIN, shape, lambda alone: alone, lambda alone: alone)
    domain: Any = SimpleNamespace(
        n_ranks=n_ranks, number=0, bricks=cut, rank=rank, skin=SKIN, cells_left=places[:1], device=places.device
    )
    sent: list[dict[int, int]] = []

    def swap_rows(values: torch.Tensor, send: Any, receive: Any, group: Any, ranks: Any) -> torch.Tensor:
        sent.append({other: 8 * values[:1].numel() * n for other, n in zip(ranks, send)})
        return values.new_zeros((sum(receive), *values.shape[1:]))

    transform.swap_rows, transform.group_of = swap_rows, lambda number: number
    division = MeshDivision(domain, mesh_of(n_atoms), ORDER)
    values = division.values(division.spectrum(torch.zeros(1, 1, *division.window, dtype=torch.float64)))
    assert values.shape[2:] == division.window
    others = [n for sizes in sent for other, n in sizes.items() if other != rank and n > 0]
    return Counted(sum(others), len(sent), len(others), division.grid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="the values at 2 ranks that scale.py measures")
    parser.add_argument("--simulate", action="store_true", help="counts of one rank of many beside the model")
    options = parser.parse_args()
    if options.check:
        found = step(46**3, 2)
        print(f"97,336 ions, 2 ranks: {found.ghosts:.2f} ghosts and {found.sent:.0f} bytes an owned ion")
        return
    kinds = (("strong scaling of 10^6 ions", lambda _: 1e6), ("weak scaling, 10^6 ions a device", lambda p: 1e6 * p))
    if options.simulate:
        for title, atoms in kinds:
            print(f"{title}, transforms\ndevices      grid   messages   partners and MB of one rank   by the model")
            for n_ranks in (2, 7, 8, 64, 512, 1000):
                n = atoms(n_ranks)
                found, model = simulated(n, n_ranks, n_ranks // 2), step(n, n_ranks)
                sent = (model.sent * n / n_ranks - 32.0 * model.ghosts * n / n_ranks) / 1e6
                print(
                    f"{n_ranks:7} {' x '.join(map(str, found.grid)):>9} {found.messages:10} {found.partners:10} "
                    f"{found.sent / 1e6:16.2f} {sent:14.2f}"
                )
        return
    head = (
        "devices      grid       ms  efficiency   in turn  efficiency   eager kernels   pairs    mesh  its messages"
        "   of ghosts   sums   ghosts  bytes an ion   GiB"
    )
    for title, atoms in kinds:
        print(f"{title}\n{head}")
        one = step(atoms(1), 1)
        for n_ranks in (1, 2, 4, 8, 16, 64, 256, 1000, 4096):
            found = step(atoms(n_ranks), n_ranks)
            best, in_turn, eager = found.seconds, found.in_turn, max(found.seconds, HOST)
            gain = atoms(n_ranks) / atoms(1) * one.seconds / n_ranks
            with_kernels = gain * (1.0 + KERNELS * EACH / one.seconds) / (best + KERNELS * EACH)
            print(
                f"{n_ranks:7} {' x '.join(map(str, found.grid)):>9} {1e3 * best:8.2f} {gain / best:11.2f} "
                f"{1e3 * in_turn:9.2f} {gain / in_turn:11.2f} {gain / eager:7.2f} {with_kernels:7.2f} "
                f"{1e3 * found.pairs:7.2f} {1e3 * found.mesh:7.2f} {1e3 * found.of_mesh:13.2f} "
                f"{1e3 * found.of_ghosts:11.3f} {1e3 * found.sums:6.3f} {found.ghosts:8.2f} {found.sent:13.0f} "
                f"{found.memory / 2**30:5.2f}"
            )


if __name__ == "__main__":
    main()
