"""Graphs for networks: the k nearest neighbors within a cutoff, ours beside fairchem's path over 0.5.0, in one run.

10,000 random atoms in a periodic cube at 0.1 atoms per cubic angstrom, cutoff 6 angstrom, 30 nearest with those tied
with the last one, float32 and float64, from positions to pairs, images, distances and vectors.

- *ours*: `neighbor_list(nearest=...)`; *ours, full*: the list without a selection, which is the floor of the search.
- *path*: what fairchem does around a list: a matrix of `estimate_max_neighbors(cutoff, safety_factor=2.0)` columns,
  which becomes a list; squared distances; a table of them, sorted row by row; a mask. Written here in plain torch, over
  the list of 0.5.0 (in its own interpreter, ``--peer``), or over ours where there is none.
- *floor*: the time to write the bytes of the result to fresh memory.

Times are processor times, minima of calls in turn: other processes do not matter. Memory is the largest size of the
process (Linux's VmHWM, which is set back) less the size before and the result, in
pages of 4 KiB. Both sides must select the same pairs.

Run: ``python benchmarks/graphs.py [--quick] [--csv FILE] [--peer PYTHON]``.
"""

import ctypes
import hashlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Peer, benchmark, described, in_turns, parser_for, peak_of, processor_seconds, start, write_csv

CUTOFF, NEAREST, DENSITY, TOLERANCE = 6.0, 30, 0.1, 0.01
ASKED_TIMES, ASKED_MEMORY = 5.0, 0.1
DISABLE_HUGE_PAGES = 41  # PR_SET_THP_DISABLE of Linux's prctl
Graph = tuple[torch.Tensor, ...]


def system(n_atoms: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    real = getattr(torch, dtype)
    edge = (n_atoms / DENSITY) ** (1 / 3)
    x = edge * torch.rand(n_atoms, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return x.to(real), (edge * torch.eye(3, dtype=torch.float64)).to(real), torch.ones(1, 3, dtype=torch.bool)


def ours(n_atoms: int, dtype: str, nearest: int | None = NEAREST) -> Callable[[], Graph]:
    from nvalchemiops.torch.neighbors import neighbor_list

    x, cell, pbc = system(n_atoms, dtype)
    options: dict[str, Any] = {"return_neighbor_list": True, "return_distances": True, "return_vectors": True}
    if nearest is not None:
        options["nearest"] = nearest

    def call() -> Graph:
        pairs, _, shifts, distances, vectors = neighbor_list(x, CUTOFF, cell, pbc[0], **options)
        return pairs, shifts, distances, vectors

    return call


def path(n_atoms: int, dtype: str) -> Callable[[], Graph]:
    """A full list, then the nearest of it, as networks do that come with no search for them."""
    from nvalchemiops.torch.neighbors import neighbor_list
    from nvalchemiops.torch.neighbors.neighbor_utils import estimate_max_neighbors

    x, cell, pbc = system(n_atoms, dtype)
    batch_idx = torch.zeros(n_atoms, dtype=torch.int32)
    width = estimate_max_neighbors(CUTOFF, safety_factor=2.0)

    def call() -> Graph:
        memory = {
            "neighbor_matrix": torch.full((n_atoms, width), n_atoms, dtype=torch.int32),
            "neighbor_matrix_shifts": torch.zeros((n_atoms, width, 3), dtype=torch.int32),
            "num_neighbors": torch.zeros(n_atoms, dtype=torch.int32),
        }
        neighbor_list(x, CUTOFF, cell[None], pbc, batch_idx, method="batch_cell_list", **memory)
        matrix, shift_matrix, count = memory.values()
        filled = torch.arange(width) < count[:, None]
        i = torch.arange(n_atoms)[:, None].expand(-1, width)[filled]
        j, shifts = matrix[filled], shift_matrix[filled]
        vectors = x[j.long()] - x[i] + (shifts.to(x.dtype)[:, None] @ cell).squeeze(1)
        squared = (vectors**2).sum(-1)

        # rows of distances, sorted; the place of each in the list
        most = int(count.max())
        begin = count.cumsum(0) - count
        place = i * most + torch.arange(len(i)) - begin.repeat_interleave(count)
        table = torch.full((n_atoms * most,), torch.inf, dtype=x.dtype)
        table.index_copy_(0, place, squared)
        ascending, order = table.view(n_atoms, most).sort(1)
        kept = (ascending <= ascending[:, NEAREST - 1, None] + TOLERANCE) & ascending.isfinite()
        mask = torch.zeros(len(i), dtype=torch.bool)
        mask[(order + begin[:, None])[kept]] = True
        pairs, shifts, vectors = torch.stack([i[mask].int(), j[mask]]), shifts[mask], vectors[mask]
        return pairs, shifts, vectors.norm(dim=1), vectors

    return call


CONTENDERS: dict[str, Callable[..., Callable[[], Graph]]] = {
    "ours": ours,
    "ours, full": lambda n_atoms, dtype: ours(n_atoms, dtype, None),
    "path": path,
}


def size_of(graph: Graph) -> int:
    return sum(t.numel() * t.element_size() for t in graph)


def fingerprint(graph: Graph, n_atoms: int) -> str:
    (i, j), shifts = graph[0].long(), graph[1].long()
    key = i * n_atoms + j
    for component in shifts.unbind(1):
        key = key * 16 + component + 8
    return hashlib.sha256(key.sort()[0].numpy().tobytes()).hexdigest()[:16]


def peak_beyond(call: Callable[[], Graph]) -> tuple[int, int]:
    """Largest memory during a call beyond its result, and the size of the result, in bytes.

    Huge pages round sizes up to 2 MiB, or not, by what was in the memory before; without them a page has 4 KiB.
    """
    library = ctypes.CDLL(None)
    call()
    library.malloc_trim(0)  # what the C library keeps for later would hide what a call takes
    library.prctl(DISABLE_HUGE_PAGES, 1, 0, 0, 0)
    peak, graph = peak_of(call)
    library.prctl(DISABLE_HUGE_PAGES, 0, 0, 0, 0)
    return max(0, peak - size_of(graph)), size_of(graph)


def written(size: int) -> float:
    """Seconds to write so many bytes to fresh memory."""
    return processor_seconds(lambda: torch.empty(size // 8, dtype=torch.float64).fill_(1.0), 3)


class Here:
    """A library in this interpreter: as ``here`` this one, which may have another checkout installed."""

    def __init__(self, name: str = "") -> None:
        if name == "here":
            sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

    def ask(self, what: str, name: str, n_atoms: int, dtype: str) -> Any:
        call = CONTENDERS[name](n_atoms, dtype)
        match what:
            case "pairs":
                graph = call()
                return [graph[0].shape[1], fingerprint(graph, n_atoms)]
            case "memory":
                return list(peak_beyond(call))
            case _:
                return processor_seconds(call, 3)


def main() -> None:
    arguments = parser_for(__doc__, "fewer atoms").parse_args()
    peer = Peer(arguments.peer, __file__, "cpu") if arguments.peer else None
    start(1, "cpu", described(peer))
    elsewhere: Any = peer or Here()
    # a process without what others have left in its memory
    here: Any = Peer(sys.executable, __file__, "here")
    n_atoms = 2_000 if arguments.quick else 10_000
    table = []
    for dtype in ("float32", "float64"):
        case = (n_atoms, dtype)
        sides = {"ours": here, "ours, full": here, "path": elsewhere}
        pairs = {name: side.ask("pairs", name, *case) for name, side in sides.items()}
        same = pairs["ours"] == pairs["path"]
        timed = {name: partial(side.ask, "time", name, *case) for name, side in sides.items()}
        seconds = in_turns(timed, 2 if arguments.quick else 5, min)
        memory = {name: side.ask("memory", name, *case) for name, side in sides.items()}
        size = memory["ours"][1]
        print(f"\n{n_atoms} atoms, {dtype}: {pairs['ours'][0]} pairs, {'the same' if same else 'NOT THE SAME'}")
        print(f"{'':12}{'ms':>10}{'pairs':>10}{'MB beyond result':>18}{'of the result':>15}")
        for name in sides:
            beyond, result = memory[name]
            share = beyond / result
            print(f"{name:12}{1e3 * seconds[name]:10.1f}{pairs[name][0]:10}{beyond / 1e6:18.2f}{share:15.2f}")
            table.append((dtype, name, n_atoms, 1e3 * seconds[name], pairs[name][0], beyond, result))
        print(f"{'floor':12}{1e3 * written(size):10.1f}")
        times, share = seconds["path"] / seconds["ours"], memory["ours"][0] / size
        print(f"path / ours: {times:.1f} (asked {ASKED_TIMES:g}); memory beyond the result {share:.2f} of it "
              f"(asked {ASKED_MEMORY:g}), of the path {memory['path'][0] / size:.1f} of our result")  # fmt: skip
    write_csv(arguments.csv, ("dtype", "contender", "atoms", "ms", "pairs", "beyond", "result"), table)


if __name__ == "__main__":
    benchmark(main, Here, 1)
