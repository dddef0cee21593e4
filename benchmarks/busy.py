"""What other work on the same cores costs: operators and a training step, on one thread and on several.

Each row is timed in separate processes with one thread, with as many as there are cores, and with as many whose
OpenMP waits passively (``OMP_WAIT_POLICY=passive``); first on the machine as it is, then beside endless loops, two for
each core. "Busy / one thread" is what several threads cost where they have to share: 1.0 is the aim, and without the
loops less than 1. The row "training step" is that of ``make demo``.

Run: ``python benchmarks/busy.py [--seconds 1.5] [--rounds 3] [--loops N] [--csv FILE] [ROW ...]``, on a machine that is
otherwise idle.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOOP = "while True: pass"
PASSIVE = {"OMP_WAIT_POLICY": "passive"}


def salt(n: int) -> Any:
    """Positions, charges and cell of a melt of 8 n³ ions."""
    import torch

    grid = torch.cartesian_prod(*(torch.arange(2.0 * n, dtype=torch.float64),) * 3)
    generator = torch.Generator().manual_seed(0)
    positions = 2.82 * grid + 0.3 * torch.randn(grid.shape, generator=generator, dtype=torch.float64)
    return positions, 1.0 - 2.0 * (grid.sum(1) % 2), 5.64 * n * torch.eye(3, dtype=torch.float64)


def operators() -> dict[str, Callable[[], Callable[[], Any]]]:
    """For each row what prepares it and returns the call to be timed."""
    import torch

    from nvalchemiops.torch.interactions.dispersion import DFTD3
    from nvalchemiops.torch.interactions.electrostatics import EwaldSummation, ParticleMeshEwald
    from nvalchemiops.torch.interactions.lj import lj_energy
    from nvalchemiops.torch.neighbors import neighbor_list

    def backward(energy: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Callable[[], Any]:
        tensors = [leaf.clone().requires_grad_() for leaf in leaves]
        return lambda: torch.autograd.grad(energy(*tensors).sum(), tensors)

    def lists() -> Callable[[], Any]:
        x, _, cell = salt(8)
        return lambda: neighbor_list(x, 7.0, cell, return_neighbor_list=True)

    def pairs() -> Callable[[], Any]:
        x, _, cell = salt(8)
        pairs, ptr, shifts = neighbor_list(x, 8.0, cell, return_neighbor_list=True)
        near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts}
        return backward(lambda x: lj_energy(x, 2.3, 0.1, 8.0, cell, **near), x)

    def electrostatics(n: int, kind: Any, matching: bool = False) -> Callable[[], Any]:
        x, q, cell = salt(n)
        module = kind.estimate(x, cell, accuracy=1e-5, charges=q)
        pairs, ptr, shifts = neighbor_list(x, module.cutoff, cell, return_neighbor_list=True)
        near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts}
        if not matching:
            return backward(lambda x, q: module(x, q, cell, **near), x, q)
        charges = q.clone().requires_grad_()
        forces = -torch.ones_like(x)

        def step() -> Any:
            found = module(x, charges, cell, compute_forces=True, **near)[1]
            return torch.autograd.grad((found - forces).square().sum(), charges)

        return step

    def dispersion() -> Callable[[], Any]:
        x, q, cell = salt(4)
        numbers = torch.where(q > 0, 11, 17)
        module = DFTD3("pbe", [11, 17], cutoff=25.0)
        return backward(lambda x: module(x, numbers, cell / 0.529)[0], x / 0.529)

    def training() -> Callable[[], Any]:
        import numpy as np

        path = HERE.parent / "examples" / "01_train_charges.py"
        spec = importlib.util.spec_from_file_location("train_charges", path)
        assert spec is not None and spec.loader is not None
        demo: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(demo)
        torch.manual_seed(0)
        reference = demo.Potential(demo.ReferenceCharges(), demo.REPULSION)
        structures = [s for name in demo.LATTICE for s in demo.perturbed_crystals(name, 2, np.random.default_rng(0))]
        ((batch, energy, force, _),) = demo.labelled(structures, reference, len(structures))
        model = demo.Potential(demo.LearnedCharges(), demo.REPULSION)
        optimizer = demo.optimizer_of(model)
        return lambda: demo.training_step(model, optimizer, batch, energy, force)

    return {
        "neighbor list, 4,096": lists,
        "Lennard-Jones backward, 4,096": pairs,
        "Ewald backward, 512": lambda: electrostatics(4, EwaldSummation),
        "Ewald backward, 4,096": lambda: electrostatics(8, EwaldSummation),
        "PME backward, 512": lambda: electrostatics(4, ParticleMeshEwald),
        "PME backward, 4,096": lambda: electrostatics(8, ParticleMeshEwald),
        "PME matching, 4,096": lambda: electrostatics(8, ParticleMeshEwald, matching=True),
        "D3 backward, 512": dispersion,
        "training step": training,
    }


def measure(rows: list[str], threads: int, duration: float) -> dict[str, float]:
    """Mean seconds of a call of each row; in a separate process."""
    import torch

    from nvalchemiops._warp import quiet_warp

    quiet_warp()
    torch.set_num_threads(threads)
    found = {}
    for name, prepare in operators().items():
        if rows and name not in rows:
            continue
        call = prepare()
        for _ in range(3):
            call()
        calls, start = 0, time.perf_counter()
        while (spent := time.perf_counter() - start) < duration or calls < 3:
            call()
            calls += 1
        found[name] = spent / calls
    return found


def ask(threads: int, environment: dict[str, str], options: argparse.Namespace) -> dict[str, float]:
    """`measure` in a new process."""
    command = [sys.executable, __file__, "--measure", str(threads), "--seconds", str(options.seconds), *options.rows]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--seconds", type=float, default=1.5, help="for each row and process (1.5)")
    parser.add_argument("--rounds", type=int, default=3, help="processes for each kind, of which the median counts (3)")
    parser.add_argument("--loops", type=int, default=2 * (os.cpu_count() or 1), help="endless loops (two a core)")
    parser.add_argument("--csv", metavar="FILE")
    parser.add_argument("--measure", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.rows, options.measure, options.seconds)))
        return
    from common import write_csv

    cores = os.cpu_count() or 1
    kinds: dict[str, tuple[int, dict[str, str]]] = {"1": (1, {}), f"{cores}": (cores, {}), "passive": (cores, PASSIVE)}
    times: dict[tuple[str, str], dict[str, float]] = {}
    for load in ("quiet", "busy"):
        loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(options.loops if load == "busy" else 0)]
        try:
            rounds = [{kind: ask(*how, options) for kind, how in kinds.items()} for _ in range(options.rounds)]
        finally:
            for loop in loops:
                loop.kill()
        for kind in kinds:
            names = rounds[0][kind]
            times[load, kind] = {name: statistics.median(r[kind][name] for r in rounds) for name in names}
    heads = [f"{load} {kind}" for load in ("quiet", "busy") for kind in kinds]
    ratios = [f"{load} {kind} / 1" for load in ("quiet", "busy") for kind in list(kinds)[1:]]
    print(f"{cores} cores, {options.loops} loops; ms a call, by number of threads\n")
    print(f"{'':32s}" + "".join(f"{head:>15s}" for head in heads + ratios))
    table = []
    for name in times["quiet", "1"]:
        row = [1e3 * times[load, kind][name] for load in ("quiet", "busy") for kind in kinds]
        row += [times[load, k][name] / times[load, "1"][name] for load in ("quiet", "busy") for k in list(kinds)[1:]]
        print(f"{name:32s}" + "".join(f"{value:15.2f}" for value in row))
        table.append([name, *row])
    write_csv(options.csv, ["row", *heads, *ratios], table)


if __name__ == "__main__":
    main()
