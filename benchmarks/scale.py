"""One system on several ranks of torch.distributed, one thread each, beside one rank, in one run.

Rock salt (neighbors at 2.82, displaced by normal deviates of a tenth of that, charges 1 and -1), float64, gloo. The
groups of 1, 2, ... ranks take turns; while a smaller group works the other ranks wait. Figures are medians, of the
slowest rank. Each call is that of a step: positions where their owners have them, lists found already but for
*division* (a new `Domain`) and *neighbors* (its list).

- *neighbors*: those of owned atoms. *both sides*: and the rows of ghosts, which derivatives of moments need.
- *dsf*: damped shifted forces, energies and forces, cutoff 9.
- *ewald*: energy and forces of an Ewald sum with few k-vectors, whose error is not that of the others.
- *pme*: energy and forces, error of the forces about 1e-4.
- *matching*: loss of forces of the same by autograd, and its gradient by the charges.

Beside them two bounds, for a machine whose cores share memory and caches: *apart*, how many times as fast the ranks
would be if nothing were divided, when each has a periodic system with its share of the atoms and no communication, all
at once; and *alone*, the same for one rank, while the others wait. What *apart* is below *alone* is the machine's; what
a call is below *apart* is ghosts, communication and waiting. *transport* is the time of the messages of the call alone:
of the same kinds and sizes in the same order, with nothing between. From these the *ceiling*: one rank over the time
apart, times what ghosts and Python add to its work, and transport; what a call is below it is waiting.

Then what a rank sends in a call, in bytes for each of its atoms and in messages; the share of its time in
communication, transport and waiting for others alike; the work: processor time of all ranks together, over that of one
rank, which other programs on the machine change little, and the same of the systems apart; and the largest memory of a
rank beyond that at its start. Then for each number of ranks what rank 0 owns and sees, and the bytes of it: atoms,
list, its part of the mesh.

Run: ``python benchmarks/scale.py [--quick] [--ranks N] [--csv FILE]``.
"""

import argparse
import inspect
import math
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from charges import atoms

from nvalchemiops._warp import quiet_warp
from nvalchemiops.torch.distributed import Domain, communication
from nvalchemiops.torch.distributed.mesh import MeshDivision
from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb, ewald_summation, particle_mesh_ewald

ROUNDS = 5
CUTOFF, ALPHA, K_CUTOFF, SPACING, ORDER = 9.0, 0.36, 0.6, 1.25, 5
ASKED = {"matching": 1.6}
PLANES = {20_000: 20, 46**3: 46}  # of sites along the first axis, by the number of atoms
Row = dict[str, Any]


class Traffic:
    """Messages, bytes and seconds of this rank's communication, and what was sent."""

    def __init__(self) -> None:
        self.messages, self.bytes, self.seconds = 0, 0, 0.0
        self.sent: list[tuple[Callable[..., Any], Any, torch.dtype, tuple[Any, ...]]] = []
        for name in ("add", "maximum", "swap_rows"):
            setattr(communication, name, self._counted(getattr(communication, name), name))
        for module in [m for n, m in sys.modules.items() if n.startswith("nvalchemiops.torch.")]:
            for name in ("add", "maximum", "swap_rows"):
                if hasattr(module, name):
                    setattr(module, name, getattr(communication, name))

    def _counted(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(*given: Any, **named: Any) -> Any:
            tensor, *others = signature.bind(*given, **named).args
            start = time.perf_counter()
            found = function(tensor, *others)
            self.seconds += time.perf_counter() - start
            self.messages += 1
            self.sent.append((function, tensor.shape, tensor.dtype, tuple(others)))
            kept = 0
            if name == "swap_rows":
                send, _, group, *partners = others
                ranks = partners[0] if partners else range(len(send))
                kept = dict(zip(ranks, send)).get(dist.get_rank(group), 0) * tensor[:1].numel()
            self.bytes += (tensor.numel() - kept) * tensor.element_size()
            return found

        return call

    def again(self, call: Callable[[], Any]) -> Callable[[], None]:
        """A function that sends the messages of a call, and does nothing else."""
        self.sent.clear()
        call()
        messages = [(send, torch.zeros(shape, dtype=dtype), others) for send, shape, dtype, others in self.sent]

        def send_all() -> None:
            for send, values, others in messages:
                send(values, *others)

        return send_all


def calls(
    group: Any, given: dict[str, torch.Tensor], k_cutoff: float = K_CUTOFF
) -> tuple[dict[str, Callable[[], Any]], Callable[[], str]]:
    """What is timed, on a group; and a function that tells what this rank holds."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    n_atoms = len(given["positions"])
    mine = slice(n_atoms * rank // size, n_atoms * (rank + 1) // size)
    cell = given["cell"]

    def divide() -> Domain:
        return Domain(given["positions"][mine], cell, cutoff=CUTOFF, group=group)

    domain = divide()
    x, q = (domain.distribute(given[name][mine]) for name in ("positions", "charges"))
    mesh = tuple(2 * round(float(length) / (2.0 * SPACING)) for length in cell[0].norm(dim=1))
    options = {"domain": domain, "compute_forces": True, "cutoff": CUTOFF}

    def neighbors() -> None:
        domain._rows.clear()
        domain._owned_rows(x, CUTOFF, cell)

    def both_sides() -> None:
        domain._rows.clear()
        domain.neighbors(x, CUTOFF, cell)

    def matching() -> None:
        y, charges = x.clone().requires_grad_(), q.clone().requires_grad_()
        energies = particle_mesh_ewald(y, charges, cell, ALPHA, mesh_dimensions=mesh, spline_order=ORDER, domain=domain)
        (slope,) = torch.autograd.grad(domain.sum(energies.sum()), y, create_graph=True)
        torch.autograd.grad(domain.sum(slope.square().sum()), charges)

    def held() -> str:
        rows = domain._owned_rows(x, CUTOFF, cell).alone
        of_list = sum(t.nbytes for t in (rows.pointers, rows.neighbors, rows.shifts) if t is not None)
        of_atoms = (domain.n_owned + domain.n_ghosts) * (x[0].nbytes + q[0].nbytes)
        window = MeshDivision(domain, mesh, ORDER).window
        sizes = {"list": of_list, "window of the mesh": 8 * math.prod(window), "slab": 8 * math.prod(mesh) // size}
        seen = f"owns {domain.n_owned} atoms and sees {domain.n_ghosts} others"
        told = "; ".join(f"{name} {n_bytes / 2**20:.1f} MiB" for name, n_bytes in {"atoms": of_atoms, **sizes}.items())
        return f"{size} ranks: rank 0 {seen}; {told}"

    timed: dict[str, Callable[[], Any]] = {
        "division": divide,
        "neighbors": neighbors,
        "both sides": both_sides,
        "dsf": lambda: dsf_coulomb(x, q, CUTOFF, 0.2, cell, domain=domain),
        "ewald": lambda: ewald_summation(x, q, cell, ALPHA, k_cutoff=k_cutoff, **options),
        "pme": lambda: particle_mesh_ewald(x, q, cell, ALPHA, mesh_dimensions=mesh, spline_order=ORDER, **options),
        "matching": matching,
    }
    return timed, held


def spent(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a call, and processor time of this process."""
    start, busy = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - busy


def slowest(seconds: float, group: Any) -> float:
    """The largest of the seconds of all ranks."""
    return float(communication.maximum(torch.tensor([seconds], dtype=torch.float64), group))


def total(seconds: float, group: Any) -> float:
    """The sum of the seconds of all ranks."""
    return float(communication.add(torch.tensor([seconds], dtype=torch.float64), group))


def share(given: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """A periodic system of the first planes of sites: one for each of ``size`` ranks has as many atoms as all of it."""
    cell, n_atoms = given["cell"], len(given["positions"])
    n_planes = PLANES[n_atoms]
    taken = round(n_planes / size)
    n_taken = n_atoms * taken // n_planes
    shorter = torch.tensor([taken / n_planes, 1.0, 1.0], dtype=cell.dtype).unsqueeze(1)
    return {"positions": given["positions"][:n_taken], "charges": given["charges"][:n_taken], "cell": cell * shorter}


def run(rank: int, count: int, n_atoms: int, folder: str) -> None:
    quiet_warp()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", count), rank=rank, world_size=count)
    traffic, given = Traffic(), {name: torch.as_tensor(value) for name, value in atoms(str(n_atoms)).items()}
    groups = {size: dist.new_group(range(size)) for size in range(1, count + 1)}
    by_itself = [dist.new_group([other]) for other in range(count)][rank]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # of all rounds, by what runs, the name of the call and the number of ranks
    times: dict[tuple[str, str, int], list[float]] = defaultdict(list)  # seconds of the slowest rank
    work: dict[tuple[str, str, int], list[float]] = defaultdict(list)  # processor time of all ranks
    sent_by: dict[tuple[str, int], list[tuple[float, float, float]]] = defaultdict(list)
    memory, told = {}, []

    def measure(what: str, name: str, size: int, call: Callable[[], Any]) -> None:
        dist.barrier(group=groups[size])
        traffic.messages, traffic.bytes, traffic.seconds = 0, 0, 0.0
        seconds, busy = spent(call)
        if what == "whole":
            told_of_call = (traffic.bytes * size / n_atoms, traffic.messages, traffic.seconds / seconds)
            sent_by[name, size].append(told_of_call)
        traffic.sent.clear()
        work[what, name, size].append(total(busy, groups[size]))
        times[what, name, size].append(slowest(seconds, groups[size]))

    # the largest group first: the memory of a rank is that of its largest part so far
    made, shares, sent = {}, {}, {}
    for size in reversed(groups):
        if rank < size:
            made[size], held = calls(groups[size], given)
            for call in made[size].values():
                call()
            told.append(held())
            memory[size] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if rank < size and size > 1:
            # as many k-vectors as in the whole
            shares[size], _ = calls(by_itself, share(given, size), K_CUTOFF * size ** (1 / 3))
            for call in shares[size].values():
                call()
        dist.barrier()
    for size in made:  # after memory has been measured
        sent[size] = {name: traffic.again(call) for name, call in made[size].items()}
    for _ in range(ROUNDS):
        for size in groups:
            for name in made[size] if rank < size else ():
                measure("whole", name, size, made[size][name])
                if size == 1:
                    continue
                measure("transport", name, size, sent[size][name])
                measure("apart", name, size, shares[size][name])
                if rank == 0:
                    times["alone", name, size].append(spent(shares[size][name])[0])
            dist.barrier()
    if rank == 0:
        rows = []
        median = {key: statistics.median(measured) for key, measured in times.items()}
        least = {key: min(measured) for key, measured in work.items()}
        for (name, size), told_of_calls in sent_by.items():
            n_bytes, messages, waits = (statistics.median(column) for column in zip(*told_of_calls))
            one, seconds = median["whole", name, 1], median["whole", name, size]
            rows.append(
                {"call": name, "ranks": size, "seconds": seconds, "times as fast": one / seconds,
                 "bytes per atom": n_bytes, "messages": messages, "communication": waits, "memory": memory[size],
                 "work": least["whole", name, size] / least["whole", name, 1]}
            )  # fmt: skip
            bounds = {"apart": 1.0, "alone": 1.0, "work apart": 1.0, "transport": 0.0, "ceiling": 1.0}
            if size > 1:
                of_messages, by_itself_apart = median["transport", name, size], least["apart", name, size]
                added = (least["whole", name, size] - least["transport", name, size]) / by_itself_apart
                seconds_apart = median["apart", name, size]
                bounds = {
                    "apart": one / seconds_apart,
                    "alone": one / median["alone", name, size],
                    "work apart": by_itself_apart / least["whole", name, 1],
                    "transport": of_messages,
                    "ceiling": one / (seconds_apart * added + of_messages),
                }
            rows[-1] |= bounds
        torch.save((rows, told[::-1]), f"{folder}/rows")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 atoms instead of 97,336")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--csv")
    options = parser.parse_args()
    n_atoms = 20_000 if options.quick else 46**3
    print(f"torch {torch.__version__}, {n_atoms} atoms, one thread for each rank, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(options.ranks, n_atoms, folder), nprocs=options.ranks)
        rows, told = torch.load(f"{folder}/rows", weights_only=False)
    for row in rows:
        asked = ASKED.get(row["call"], 1.7)
        line = (
            f"{row['call']:12} {row['ranks']:3} ranks {1e3 * row['seconds']:9.1f} ms   times as fast "
            f"{row['times as fast']:5.2f} (asked {asked})   {row['bytes per atom']:7.0f} bytes an atom in "
            f"{row['messages']:3.0f} messages   communication {100 * row['communication']:3.0f} %   "
            f"work {row['work']:4.2f}   memory {row['memory'] / 2**20:6.0f} MiB"
        )
        if row["ranks"] > 1:
            line += f"   apart {row['apart']:5.2f} alone {row['alone']:5.2f} work apart {row['work apart']:4.2f}"
            line += f"   transport {1e3 * row['transport']:4.1f} ms ceiling {row['ceiling']:5.2f}"
        print(line)
    print(*told, sep="\n")
    common.write_csv(options.csv, tuple(rows[-1]), rows)


if __name__ == "__main__":
    main()
