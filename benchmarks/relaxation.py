"""Relaxing 200 perturbed crystals of 2 to 20 atoms with their cells, to 0.01 eV/angstrom: evaluations and time.

Copper-like Morse crystals (fcc, bcc, hcp, cells multiplied, one atom in some missing), strained and displaced at
random; float64, one thread. The model is the same for all: the sum of `nvalchemiops` over one batch, or in ASE its
calculator for one crystal. Contenders:

- *ours*: ``relax``, a batch in which converged systems are taken out,
- *ASE*: the same optimizer with ``FrechetCellFilter``, one crystal after the other,
- *torch-sim* 0.6: its FIRE, which follows ASE, with its Frechet filter, where it can be imported. It asks for
  convergence each fifth step.

An evaluation is one of one system. Asked: at most 1.1 times ASE's. Times are those of one run of each.

Run: ``python benchmarks/relaxation.py [--quick] [--crystals N] [--optimizers NAME ...] [--csv FILE]``.
"""

import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import common
import numpy as np
import torch
from ase import Atoms
from ase.build import bulk
from ase.filters import FrechetCellFilter
from ase.optimize import FIRE, LBFGS
from ase.optimize.fire2 import FIRE2

from nvalchemiops.ase import Calculator, Pair
from nvalchemiops.torch.dynamics import SumOfTerms, relax
from nvalchemiops.torch.interactions.pair import morse
from nvalchemiops.torch.systems import System

FMAX, MAX_STEPS = 0.01, 500
BONDS = {"depth": 0.3429, "steepness": 1.3588, "r0": 2.866}  # Girifalco and Weizer, Phys. Rev. 114, 687 (1959)
RANGE = {"cutoff": 6.0, "r_switch": 4.5}
ASE_OPTIMIZERS = {"fire": FIRE, "fire2": FIRE2, "lbfgs": LBFGS}

Row = dict[str, Any]


def crystals(n: int) -> Iterator[Atoms]:
    """Crystals of 2 to 20 atoms."""
    rng = np.random.default_rng(1)
    kinds = [bulk("Cu", "hcp", a=2.6), bulk("Cu", "fcc", a=3.7, cubic=True), bulk("Cu", "bcc", a=2.95, cubic=True)]
    for k in range(n):
        atoms = kinds[k % 3]
        most = 20 // len(atoms)
        atoms = atoms * np.diag([1, 1, 1 + k // 3 % most]).diagonal()
        if len(atoms) > 6 and k % 2:
            del atoms[0]
        atoms.set_cell(atoms.cell @ (np.eye(3) + 0.03 * rng.standard_normal((3, 3))), scale_atoms=True)
        atoms.positions += 0.1 * rng.standard_normal(atoms.positions.shape)
        yield atoms


class Counted:
    """The model, with the number of evaluations of single systems."""

    def __init__(self) -> None:
        self.model, self.evaluations = SumOfTerms(partial(morse(**RANGE), **BONDS), skin=0.0), 0

    def __call__(self, system: System) -> Any:
        self.evaluations += system.cell.shape[0]
        return self.model(system)


def ours(structures: list[Atoms], optimizer: str, **options: Any) -> Row:
    model = Counted()
    start = time.perf_counter()
    result = relax(System.from_ase(structures), model, optimizer, fmax=FMAX, cell=True, max_steps=MAX_STEPS, **options)
    spent = time.perf_counter() - start
    return {
        "seconds": spent,
        "evaluated": model.evaluations,
        "needed": int(result.evaluations.sum()),
        "converged": int(result.converged.sum()),
        "energies": result.evaluation.energies.numpy(),
    }


class CountedCalculator(Calculator):
    """The calculator, with the number of its evaluations."""

    evaluations = 0

    def calculate(self, *args: Any, **kwargs: Any) -> None:
        self.evaluations += 1
        super().calculate(*args, **kwargs)


def in_ase(structures: list[Atoms], optimizer: str) -> Row:
    calculator = CountedCalculator(Pair("morse", **RANGE, **BONDS))
    energies, converged = [], 0
    start = time.perf_counter()
    for structure in structures:
        atoms = structure.copy()
        atoms.calc = calculator
        converged += ASE_OPTIMIZERS[optimizer](FrechetCellFilter(atoms), logfile=None).run(fmax=FMAX, steps=MAX_STEPS)
        energies.append(atoms.get_potential_energy())
    spent = time.perf_counter() - start
    return {
        "seconds": spent,
        "evaluated": calculator.evaluations,
        "needed": calculator.evaluations,
        "converged": converged,
        "energies": np.array(energies),
    }


def in_torch_sim(structures: list[Atoms]) -> Row | None:
    try:
        import torch_sim
        from torch_sim.models.interface import ModelInterface
    except ImportError:
        return None

    class Wrapped(ModelInterface):
        _device, _dtype = torch.device("cpu"), torch.float64
        _compute_stress = _compute_forces = True
        counted = Counted()

        def forward(self, state: Any, **_: Any) -> dict[str, torch.Tensor]:
            if isinstance(state, dict):
                state = torch_sim.SimState(**state, masses=torch.ones_like(state["positions"][:, 0]), pbc=True)
            n = state.row_vector_cell.shape[0]
            pbc = torch.ones((n, 3), dtype=torch.bool)
            found = self.counted(
                System(
                    state.positions,
                    cell=state.row_vector_cell.contiguous(),
                    batch_idx=state.system_idx.to(torch.int32),
                    pbc=pbc,
                )
            )
            return {"energy": found.energies, "forces": found.forces, "stress": found.stress}

    model = Wrapped()
    start = time.perf_counter()
    batcher = torch_sim.InFlightAutoBatcher(
        model, max_memory_scaler=1e9, memory_scales_with="n_atoms", max_iterations=MAX_STEPS
    )
    state = torch_sim.optimize(
        structures,
        model,
        optimizer=torch_sim.Optimizer.fire,
        init_kwargs={"cell_filter": torch_sim.CellFilter.frechet},
        convergence_fn=torch_sim.generate_force_convergence_fn(FMAX, include_cell_forces=True),
        autobatcher=batcher,
        max_steps=MAX_STEPS,
    )
    spent = time.perf_counter() - start
    return {
        "seconds": spent,
        "evaluated": model.counted.evaluations,
        "needed": model.counted.evaluations,
        "converged": len(structures),
        "energies": state.energy.numpy(),
    }


def main() -> None:
    parser = common.parser_for(__doc__, "20 crystals instead of 200")
    parser.add_argument("--crystals", type=int, metavar="N", help="how many; 200, or 20 with --quick, if left out")
    parser.add_argument("--optimizers", nargs="+", choices=ASE_OPTIMIZERS, default=list(ASE_OPTIMIZERS))
    options = parser.parse_args()
    common.start(1, "cpu", "beside ASE and torch-sim")
    warnings.simplefilter("ignore")
    structures = list(crystals(options.crystals or (20 if options.quick else 200)))
    n_atoms = [len(structure) for structure in structures]
    print(f"{len(structures)} crystals of {min(n_atoms)} to {max(n_atoms)} atoms, {sum(n_atoms)} in all")
    rows = []
    for optimizer in options.optimizers:
        ours(structures[:6], optimizer)  # kernels are compiled
        in_ase(structures[:1], optimizer)
        found: dict[str, Row | None] = {
            "ours": ours(structures, optimizer),
            "ours, all kept": ours(structures, optimizer, compact_every=None),
            "ASE": in_ase(structures, optimizer),
        }
        if optimizer == "fire":
            found["torch-sim"] = in_torch_sim(structures)
        base = found["ours"]
        assert base is not None
        for name, row in found.items():
            if row is None:
                continue
            n = len(structures)
            apart = np.abs(row["energies"] - base["energies"]).max()
            print(
                f"{optimizer:6s}{name:16s}{row['needed'] / n:8.1f} evaluations needed, {row['evaluated'] / n:8.1f} done"
                f"{row['seconds']:9.2f} s ({row['seconds'] / base['seconds']:6.1f}){row['converged']:5d} converged, "
                f"energies apart by {apart:.0e} eV"
            )
            rows.append([optimizer, name, row["needed"] / n, row["evaluated"] / n, row["seconds"], row["converged"]])
    common.write_csv(options.csv, ["optimizer", "contender", "needed", "evaluated", "seconds", "converged"], rows)


if __name__ == "__main__":
    main()
