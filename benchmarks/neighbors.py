"""Neighbor lists: ours beside vesin, matscipy, ASE and nvalchemi-toolkit-ops 0.5.0, in one run, and beside a floor.

Random atoms in a periodic cube at 0.1 atoms per cubic angstrom, cutoff 5 angstrom, float64, full lists with shifts;
and a batch of 512 open molecules of 20 to 60 atoms, over which vesin loops. All get the same atoms and 2
threads, and takes turns; figures are medians. Numbers of pairs must agree, up to 20,000 atoms the pairs themselves.

- *list*, *matrix*: our two formats, sizes unknown to the caller; *in place*: a matrix in memory given by the caller.
- *vesin*: a new object in each call, results copied; *vesin kept*: one object, results as views into its memory.
- *0.5.0*: the peer of the same import name, matrix and list, in its own interpreter (``--peer`` or
  ``NVALCHEMIOPS_PEER_PYTHON``), driven over a pipe; left out where there is none.
- *floor*: the time to write the bytes of our list to fresh memory, and to memory in use, by `torch.Tensor.fill_`.

Run: ``python benchmarks/neighbors.py [--quick] [--csv FILE] [--plot FILE] [--device cuda]``. On a GPU only the two
libraries that run there are compared. Peak memory is read from Linux's /proc.
"""

import hashlib
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import (
    SEPARATE_PAGES,
    Peer,
    benchmark,
    described,
    in_new_process,
    in_turns,
    parser_for,
    plot_times,
    seconds,
    start,
    write_csv,
)

CUTOFF, DENSITY, THREADS, MOLECULES = 5.0, 0.1, 2, 512
BATCH = f"{MOLECULES} molecules"
ROUNDS = {100: 30, 1_000: 30, 10_000: 25, 100_000: 7, 1_000_000: 3, BATCH: 15}
COMPARED = 20_000  # atoms up to which pairs are compared, not only their number
PATIENCE = {"ASE": 5.0}  # seconds for one call, beyond which larger sizes are left out
# how many times faster than whom the issue asks for: our list than vesin, each format than the peer's
ASKED = {100: (4, 4), 1_000: (2.5, 4), 10_000: (2.5, 4), 100_000: (2.5, 5), 1_000_000: (2.5, 5), BATCH: (5, "-")}

Contenders = dict[str, tuple[Callable[[], Any], Callable[[Any], tuple[int, str]]]]


def atoms(case: int | str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    if case == BATCH:
        sizes = rng.integers(20, 61, MOLECULES)
        edges = np.repeat((sizes / DENSITY) ** (1 / 3), sizes)[:, None]
        system = np.repeat(np.arange(MOLECULES, dtype=np.int32), sizes)
        return {"positions": rng.uniform(0, 1, (len(edges), 3)) * edges, "batch_idx": system}
    edge = (int(case) / DENSITY) ** (1 / 3)
    x = rng.uniform(0, edge, (int(case), 3))
    return {"positions": x, "cell": edge * np.eye(3)[None], "pbc": np.ones((1, 3), dtype=bool)}


def found(n_atoms: int, i: Any, j: Any, shifts: Any = None) -> tuple[int, str]:
    """Number of pairs, and a fingerprint of them in any order."""
    if n_atoms > COMPARED:
        return len(i), ""
    key = np.asarray(i, np.int64) * n_atoms + np.asarray(j, np.int64)
    for component in () if shifts is None else np.asarray(shifts).T:
        key = key * 16 + component + 8
    return len(i), hashlib.sha256(np.sort(key).tobytes()).hexdigest()


# -- contenders: a call, and what its result says -----------------------------------------------------------


def ours(case: int | str, device: str) -> Contenders:
    """Our calls. In the peer's interpreter the same names are the peer."""
    from nvalchemiops.torch.neighbors import neighbor_list

    system = {name: torch.as_tensor(value, device=device) for name, value in atoms(case).items()}
    n_atoms = len(system["positions"])

    def of_list(result: tuple[torch.Tensor, ...]) -> tuple[int, str]:
        return found(n_atoms, *result[0].cpu().numpy(), *(t.cpu().numpy() for t in result[2:]))

    def of_matrix(result: tuple[torch.Tensor, ...]) -> tuple[int, str]:
        matrix, count, *shifts = (t.cpu() for t in result)
        i, slot = (torch.arange(matrix.shape[1]) < count[:, None]).nonzero().T
        return found(n_atoms, i.numpy(), matrix[i, slot].numpy(), *(s[i, slot].numpy() for s in shifts))

    return {
        "list": (lambda: neighbor_list(cutoff=CUTOFF, return_neighbor_list=True, **system), of_list),
        "matrix": (lambda: neighbor_list(cutoff=CUTOFF, **system), of_matrix),
    }


def ours_in_place(case: int | str, device: str) -> Contenders:
    from nvalchemiops.torch.neighbors import neighbor_list

    system = {name: torch.as_tensor(value, device=device) for name, value in atoms(case).items()}
    first = neighbor_list(cutoff=CUTOFF, **system)
    memory = dict(zip(("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts"), first))
    return {"in place": (lambda: neighbor_list(cutoff=CUTOFF, **system, **memory), ours(case, device)["matrix"][1])}


def others(case: int | str) -> Contenders:
    import ase.neighborlist
    import matscipy.neighbours
    import vesin

    system = atoms(case)
    x, n_atoms = system["positions"], len(system["positions"])
    box, pbc = system.get("cell", np.zeros((1, 3, 3)))[0], system.get("pbc", np.zeros((1, 3), dtype=bool))[0]
    first = np.unique(system.get("batch_idx", np.zeros(n_atoms)), return_index=True)[1]
    parts = np.split(x, first[1:])
    kept = vesin.NeighborList(cutoff=CUTOFF, full_list=True)

    def of_vesin(result: list[tuple[np.ndarray, np.ndarray]]) -> tuple[int, str]:
        pairs = np.concatenate([p.astype(np.int64) + n for (p, _), n in zip(result, first)])
        return found(n_atoms, *pairs.T, *([] if case == BATCH else [result[0][1]]))

    calls: Contenders = {
        "vesin": (
            lambda: [vesin.NeighborList(cutoff=CUTOFF, full_list=True).compute(p, box, pbc, "PS") for p in parts],
            of_vesin,
        ),
        # views would not outlive the next molecule
        "vesin kept": (lambda: [kept.compute(p, box, pbc, "PS", copy=len(parts) > 1) for p in parts], of_vesin),
    }
    if case != BATCH:
        given = {"positions": x, "cell": box, "pbc": pbc, "cutoff": CUTOFF, "numbers": np.ones(n_atoms, np.int32)}
        calls["matscipy"] = (lambda: matscipy.neighbours.neighbour_list("ijS", **given), lambda r: found(n_atoms, *r))
        given_ase = (pbc, box, x, CUTOFF)
        calls["ASE"] = (
            lambda: ase.neighborlist.primitive_neighbor_list("ijS", *given_ase),
            lambda r: found(n_atoms, *r),
        )
    return calls


class Server:
    """The peer's side of the pipe."""

    def __init__(self, device: str) -> None:
        self.device, self.calls = device, Contenders()

    def ask(self, *question: Any) -> Any:
        match question:
            case ["prepare", case]:
                self.calls = ours(case, self.device)
                return {name: describe(call()) for name, (call, describe) in self.calls.items()}
            case ["time", name]:
                return seconds(self.calls[name][0], self.device)


# -- measuring ----------------------------------------------------------------------------------------------


def measure(case: int | str, peer: Peer | None, device: str, rounds: int, skip: set[str]) -> dict[str, float]:
    """Median seconds of every contender, and the number of pairs, which all of them must find."""
    contenders = {**ours(case, device), **ours_in_place(case, device), **(others(case) if device == "cpu" else {})}
    timed: dict[str, Callable[[], float]] = {}
    results: dict[str, Any] = {}
    for name, (call, describe) in contenders.items():
        if name not in skip:
            start = time.perf_counter()
            results[name] = describe(call())
            timed[name] = lambda call=call: seconds(call, device)
            if 10 * (time.perf_counter() - start) > PATIENCE.get(name, np.inf):
                skip.add(name)  # from the next size on
    if peer is not None:
        for name, result in peer.ask("prepare", case).items():
            results[f"0.5.0 {name}"] = tuple(result)
            timed[f"0.5.0 {name}"] = lambda name=name: peer.ask("time", name)
    for name, result in results.items():
        assert result == results["list"], f"{name} disagrees: {result[0]} pairs, our list {results['list'][0]}"
    return {"pairs": results["list"][0]} | in_turns(timed, rounds)


def write_rates(device: str, size: int = 2**28) -> dict[str, float]:
    """Bytes per second that `fill_` writes to fresh memory, and to memory in use."""

    def fresh() -> torch.Tensor:
        if device != "cpu":
            torch.cuda.empty_cache()
        return torch.empty(size // 4, dtype=torch.int32, device=device).fill_(1)

    used = fresh()
    return {
        "fresh": size / min(seconds(fresh, device) for _ in range(7)),
        "used": size / min(seconds(lambda: used.fill_(1), device) for _ in range(7)),
    }


MEMORY = """
import sys, torch
sys.path.insert(0, {folder!r})
import common, neighbors
from nvalchemiops.torch.neighbors import neighbor_list
torch.set_num_threads(neighbors.THREADS)
for n_atoms in (1000, {n_atoms}):
    system = {{name: torch.as_tensor(value) for name, value in neighbors.atoms(n_atoms).items()}}
    extra, results = common.peak_of(
        lambda: neighbor_list(cutoff=neighbors.CUTOFF, return_neighbor_list={as_list}, **system))
print(extra / sum(t.numel() * t.element_size() for t in results))
"""


def peak_memory(n_atoms: int, as_list: bool) -> float:
    """Resident memory of one call at its peak, beyond what was there, over the size of its results; a new process."""
    code = MEMORY.format(folder=os.path.dirname(os.path.abspath(__file__)), n_atoms=n_atoms, as_list=as_list)
    return in_new_process(code, **SEPARATE_PAGES)[-1]


def plain_torch(x: torch.Tensor, edge: float) -> int:
    """The number of pairs in a cube by vectorised torch: atoms in padded bins, against the 27 bins around."""
    n = int(edge / CUTOFF)
    bins = (x / edge * n).long().clamp(0, n - 1) @ torch.tensor([n * n, n, 1])
    order, count = bins.argsort(), torch.bincount(bins, minlength=n**3)
    slot = torch.arange(len(x)) - (count.cumsum(0) - count)[bins[order]]
    members = x.new_full((n**3, int(count.max()), 3), torch.nan)
    members[bins[order], slot] = x[order]
    total = -len(x)
    for offset in np.ndindex(3, 3, 3):
        other = members.view(n, n, n, -1, 3).roll([o - 1 for o in offset], (0, 1, 2)).view_as(members)
        d = members[:, :, None] - other[:, None]
        d -= edge * torch.round(d / edge)
        total += len((d.square().sum(-1) < CUTOFF**2).nonzero())
    return total


def compare_with_plain_torch(n_atoms: int = 10_000) -> None:
    """One thread beside plain torch, and two threads beside one."""
    system = atoms(n_atoms)
    x, edge = torch.as_tensor(system["positions"]), float(system["cell"][0, 0, 0])
    call, describe = ours(n_atoms, "cpu")["list"]
    assert plain_torch(x, edge) == describe(call())[0]
    times: list[list[float]] = []
    for _ in range(7):
        torch.set_num_threads(1)
        row = [seconds(call), seconds(lambda: plain_torch(x, edge))]
        torch.set_num_threads(2)
        times.append([*row, seconds(call)])
    torch.set_num_threads(THREADS)
    one, plain, two = (1e3 * statistics.median(column) for column in zip(*times))
    print(f"\n{n_atoms:,} atoms: {one:.2f} ms on one thread, {two:.2f} ms on two ({one / two:.2f} times faster)")
    print(f"vectorised plain torch on one thread: {plain:.1f} ms, {plain / one:.1f} times ours (asked: at least 0.67)")


# -- reporting ----------------------------------------------------------------------------------------------


def report(rows: dict[int | str, dict[str, float]]) -> None:
    names = [name for name in dict.fromkeys(n for row in rows.values() for n in row) if name != "pairs"]
    print("\nmilliseconds\n" + " " * 13 + "".join(f"{name:>13s}" for name in names))
    for case, row in rows.items():
        print(f"{case:>13}" + "".join(f"{1e3 * row[n]:13.3f}" if n in row else f"{'-':>13s}" for n in names))
    print("\nhow many times faster: our list than vesin, each of our formats than the peer's; times over the floor")
    for case, row in rows.items():
        vesin, peer = ASKED[case]
        line = f"{case:>13}"
        for name in ("vesin", "vesin kept"):
            line += f"{row[name] / row['list']:7.2f} x {name} (asked {vesin})" if name in row else ""
        for name in ("list", "matrix"):
            if f"0.5.0 {name}" in row:
                line += f"{row[f'0.5.0 {name}'] / row[name]:7.2f} x 0.5.0 {name} (asked {peer})"
        print(line + f"{row['list'] / row['fresh']:7.1f} x floor, fresh{row['list'] / row['used']:7.1f}, used")
    sizes = [case for case in rows if isinstance(case, int) and case >= 10_000]
    if len(sizes) > 1:
        print(f"\nexponent of time against atoms, {sizes[0]:,} to {sizes[-1]:,}")
        for name in names:
            both = [n for n in sizes if name in rows[n]]
            if len(both) > 1 and name not in ("fresh", "used"):
                exponent = np.polyfit(np.log(both), np.log([rows[n][name] for n in both]), 1)[0]
                print(f"{name:>13s}{exponent:7.3f}")


def plot(rows: dict[int | str, dict[str, float]], path: str) -> None:
    curves = []
    for name, label, style in (
        ("list", "this library, list", "o-"),
        ("in place", "this library, matrix in place", "o--"),
        ("vesin", "vesin", "s-"),
        ("matscipy", "matscipy", "^-"),
        ("0.5.0 list", "nvalchemi-toolkit-ops 0.5.0, list", "D-"),
        ("fresh", "floor: writing the list to fresh memory", "k:"),
    ):
        points = [(case, row[name]) for case, row in rows.items() if case != BATCH and name in row]
        curves.append((label, style, points))
    plot_times(path, curves, "seconds", f"cutoff {CUTOFF:g} Å, {DENSITY:g} atoms/Å³, {THREADS} threads")


def main() -> None:
    parser = parser_for(__doc__, "up to 10,000 atoms and few rounds: under a minute")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    device = options.device
    peer = Peer(options.peer, __file__, device) if os.access(options.peer, os.X_OK) else None
    start(THREADS, device, described(peer))
    rates = write_rates(device)
    print(f"writing: {rates['fresh'] / 1e9:.1f} GB/s to fresh memory, {rates['used'] / 1e9:.1f} to memory in use")
    rows: dict[int | str, dict[str, float]] = {}
    skip: set[str] = set()
    for case, rounds in ROUNDS.items():
        if not options.quick or case == BATCH or int(case) <= 10_000:
            row = measure(case, peer, device, max(3, rounds // 5) if options.quick else rounds, skip)
            n_bytes = row["pairs"] * (8 if case == BATCH else 20)  # i and j, in a cell also S
            rows[case] = row | {kind: n_bytes / rate for kind, rate in rates.items()}
            print(f"  {case}: {row['pairs']:,} pairs", flush=True)
    report(rows)
    if device == "cpu":
        compare_with_plain_torch()
        for n_atoms in (100_000,) if options.quick else (100_000, 1_000_000):
            both = [peak_memory(n_atoms, as_list) for as_list in (True, False)]
            print(f"{n_atoms:,} atoms, peak memory over size of results: {both[0]:.2f} list, {both[1]:.2f} matrix")
    table = [(case, name, value) for case, row in rows.items() for name, value in row.items()]
    write_csv(options.csv, ("atoms", "what", "seconds, or number of pairs"), table)
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    benchmark(main, Server, THREADS)
