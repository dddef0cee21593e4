"""Steps per second of molecular dynamics, beside ASE, torch-sim and 0.5.0, in one run, and how much is not forces.

Argon (Lennard-Jones, truncated at 8.5 angstrom) in float64 on one thread at 60 K, 2 fs: crystals of 64 and of 4,096
atoms, displaced, and a batch of 256 clusters of 13 atoms. Energies are conserved in NVE (velocity Verlet); NPT is
isotropic with Nosé-Hoover chains at zero pressure, where each cluster has a periodic cell of 60 angstrom. Contenders:

- *ours*: ``Integrator.step`` with `SumOfTerms` and a skin of 1.5 angstrom. The share of other things than forces is the
  time of the steps less that of the calls of the model in them.
- *ASE*: its integrators with our calculator and the same skin, so that forces are the same; one cluster after the
  other.
- *torch-sim*: its integrators with its Lennard-Jones model and neighbor lists, which are built in each step. The lists
  are those of the ``nvalchemiops`` in its environment: of 0.5.0, or of this library if its stand-in is installed there.
- *0.5.0*: the kernels of that release for velocity Verlet, Lennard-Jones sums and the look at the list, on memory that
  is used again, with the same skin. NVE alone: with the virial of its Lennard-Jones sums, of either sign, its step of
  NPT (``run_npt_step``) did not keep the volume of the 64 atoms.

Asked: at most 10 % for other things than forces at 4,096 atoms and 35 % at 64; five times torch-sim's rate for small
systems. The others live in separate environments (``--torch-sim`` and ``--peer``, or
``NVALCHEMIOPS_TORCH_SIM_PYTHON`` and ``NVALCHEMIOPS_PEER_PYTHON``), which may be one, with ASE.

Run: ``python benchmarks/dynamics.py [--quick] [--torch-sim PYTHON] [--peer PYTHON] [--csv FILE]``.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.build import bulk
from common import Peer, benchmark, parser_for, start, write_csv

SIGMA, EPSILON, CUTOFF, SKIN = 3.4, 0.0104, 8.5, 1.5
TEMPERATURE, TIMESTEP, MASS = 60.0, 2.0, 39.948  # K, fs, u
SYSTEMS = ("64 atoms", "4,096 atoms", "256 clusters")
ENSEMBLES = ("NVE", "NPT")
ROUNDS = 5
BOX = 60.0  # angstrom, of clusters that have a cell
PATIENCE = 0.5  # seconds of one time


def structures(name: str, ensemble: str) -> list[Atoms]:
    """Crystals or clusters with velocities; those whose pressure is kept have cells."""
    rng = np.random.default_rng(1)
    if name == "256 clusters":
        from ase.cluster import Icosahedron

        found = [Icosahedron("Ar", 2, 5.4) for _ in range(256)]
        for atoms in found:
            atoms.pbc = ensemble == "NPT"
            atoms.cell = BOX * np.eye(3) if ensemble == "NPT" else None
    else:
        # 64 atoms need a cell of more than one cutoff
        copies = {"64 atoms": (4, 4, 4), "4,096 atoms": (16, 16, 16)}[name]
        found = [bulk("Ar", "fcc", a=5.35).repeat(copies)]
    for atoms in found:
        atoms.positions += 0.05 * rng.standard_normal(atoms.positions.shape)
        spread = np.sqrt(TEMPERATURE * units.kB / MASS)
        velocities = spread * rng.standard_normal(atoms.positions.shape)
        atoms.set_masses([MASS] * len(atoms))
        atoms.set_velocities(velocities - velocities.mean(0))
    return found


def ours(name: str, ensemble: str) -> tuple[Callable[[int], None], list[float]]:
    """What makes steps, and the seconds of each call of the model in them."""
    from nvalchemiops.torch import System
    from nvalchemiops.torch.dynamics import Evaluation, SumOfTerms, npt, nve
    from nvalchemiops.torch.interactions.pair import lennard_jones

    atoms = structures(name, ensemble)
    system = System.from_ase(atoms)
    terms = partial(lennard_jones(CUTOFF), sigma=SIGMA, epsilon=EPSILON)
    model = SumOfTerms(terms, skin=SKIN, stress=ensemble == "NPT")
    dt = TIMESTEP * units.fs
    integrator = nve(dt) if ensemble == "NVE" else npt(dt, TEMPERATURE * units.kB, 0.0)
    velocities = torch.tensor(np.concatenate([a.get_velocities() for a in atoms]))
    state = integrator.start(system, model, velocities=velocities, masses=torch.full((len(velocities),), MASS))
    inside: list[float] = []

    def timed(system: System) -> Evaluation:
        start = time.perf_counter()
        found = model(system)
        inside.append(time.perf_counter() - start)
        return found

    def steps(n: int) -> None:
        nonlocal state
        for _ in range(n):
            state = integrator.step(state, timed)

    return steps, inside


def in_ase(name: str, ensemble: str) -> Callable[[int], None]:
    """The same steps in ASE."""
    from ase.md.nose_hoover_chain import IsotropicMTKNPT
    from ase.md.verlet import VelocityVerlet

    from nvalchemiops.ase import Calculator, Pair

    runs = []
    for atoms in structures(name, ensemble)[:8]:
        atoms.calc = Calculator(Pair("lennard_jones", cutoff=CUTOFF, sigma=SIGMA, epsilon=EPSILON), skin=SKIN)
        dt = TIMESTEP * units.fs
        if ensemble == "NVE":
            runs.append(VelocityVerlet(atoms, dt))
        else:
            runs.append(IsotropicMTKNPT(atoms, dt, TEMPERATURE, 0.0, tdamp=100 * dt, pdamp=1000 * dt))
    share = len(structures(name, ensemble)) / len(runs)

    def steps(n: int) -> None:
        for run in runs:
            run.run(max(1, round(n * share)))

    return steps


def in_torch_sim(name: str, ensemble: str) -> Callable[[int], None]:
    """The same steps in torch-sim."""
    import torch_sim as ts
    from torch_sim.models.lennard_jones import LennardJonesModel

    atoms = structures(name, ensemble)
    for one in atoms:  # it wants cells
        if not one.pbc.any():
            one.cell = BOX * np.eye(3)
    kT, dt = TEMPERATURE * units.kB, TIMESTEP * units.fs
    model = LennardJonesModel(
        sigma=SIGMA, epsilon=EPSILON, cutoff=CUTOFF, dtype=torch.float64, compute_stress=ensemble == "NPT"
    )
    given = ts.initialize_state(atoms, dtype=torch.float64)
    if ensemble == "NVE":
        state = ts.nve_init(given, model, kT=kT)
        step = partial(ts.nve_step, model=model, dt=torch.tensor(dt))
    else:
        state = ts.npt_nose_hoover_isotropic_init(given, model, kT=torch.tensor(kT), dt=torch.tensor(dt))
        step = partial(
            ts.npt_nose_hoover_isotropic_step,
            model=model,
            dt=torch.tensor(dt),
            kT=torch.tensor(kT),
            external_pressure=torch.tensor(0.0),
        )

    def steps(n: int) -> None:
        nonlocal state
        for _ in range(n):
            state = step(state)

    return steps


def in_release(name: str, ensemble: str) -> Callable[[int], None]:
    """The same steps of velocity Verlet with the kernels of 0.5.0."""
    import warp as wp

    from nvalchemiops.dynamics.integrators import velocity_verlet_position_update, velocity_verlet_velocity_finalize
    from nvalchemiops.interactions.lj import lj_energy_forces
    from nvalchemiops.torch.neighbors import neighbor_list
    from nvalchemiops.torch.neighbors.rebuild_detection import (
        batch_neighbor_list_needs_rebuild,
        neighbor_list_needs_rebuild,
    )

    atoms = structures(name, ensemble)
    sizes = torch.tensor([len(one) for one in atoms])
    positions, velocities = (
        torch.tensor(np.concatenate([getattr(one, f"get_{what}")() for one in atoms]))
        for what in ("positions", "velocities")
    )
    # it wants cells
    cell = torch.tensor(np.array([one.cell.array if one.pbc.any() else BOX * np.eye(3) for one in atoms]))
    pbc = torch.tensor(np.array([one.pbc for one in atoms]))
    batch_idx = torch.arange(len(atoms), dtype=torch.int32).repeat_interleave(sizes) if len(atoms) > 1 else None
    options = {} if batch_idx is None else {"batch_idx": wp.from_torch(batch_idx)}
    arrays = {what: wp.from_torch(t, dtype=wp.vec3d) for what, t in (("r", positions), ("v", velocities))}
    masses, energies = (wp.full(len(positions), value, dtype=wp.float64) for value in (MASS, 0.0))
    forces = wp.zeros(len(positions), dtype=wp.vec3d)
    dt = wp.full(len(atoms), TIMESTEP * units.fs, dtype=wp.float64)
    cells, reference, listed = wp.from_torch(cell, dtype=wp.mat33d), positions.clone(), {}

    def evaluate() -> None:
        stale = True
        if listed and batch_idx is None:
            stale = bool(neighbor_list_needs_rebuild(reference, positions, SKIN / 2.0))
        elif listed:
            stale = bool(batch_neighbor_list_needs_rebuild(reference, positions, batch_idx, SKIN / 2.0).any())
        if stale:
            given = {} if batch_idx is None else {"batch_idx": batch_idx}
            found = neighbor_list(positions, CUTOFF + SKIN, cell=cell, pbc=pbc, fill_value=len(positions), **given)
            for what, kind, t in zip(("matrix", "counts", "shifts"), (wp.int32, wp.int32, wp.vec3i), found):
                listed[what] = wp.from_torch(t, dtype=kind)
            reference.copy_(positions)
        lj_energy_forces(
            arrays["r"],
            cells,
            EPSILON,
            SIGMA,
            CUTOFF,
            neighbor_matrix=listed["matrix"],
            neighbor_matrix_shifts=listed["shifts"],
            num_neighbors=listed["counts"],
            fill_value=len(positions),
            half_neighbor_list=False,
            energies_out=energies,
            forces_out=forces,
            **options,
        )

    def steps(n: int) -> None:
        for _ in range(n):
            velocity_verlet_position_update(arrays["r"], arrays["v"], forces, masses, dt, **options)
            evaluate()
            velocity_verlet_velocity_finalize(arrays["v"], forces, masses, dt, **options)

    evaluate()
    return steps


ELSEWHERE = {"torch-sim": in_torch_sim, "0.5.0": in_release}


def rate(run: Callable[[int], None], quick: bool) -> float:
    """Seconds of a step."""
    run(1)
    start = time.perf_counter()
    run(1)
    n = max(1, min(400, int((0.2 if quick else 1.0) * PATIENCE / (time.perf_counter() - start))))
    start = time.perf_counter()
    run(n)
    return (time.perf_counter() - start) / n


class Ours:
    """This library, and ASE on it."""

    def __init__(self, quick: bool) -> None:
        self.quick, self.kept = quick, {}

    def ask(self, contender: str, name: str, ensemble: str) -> list[float]:
        """Seconds of a step, and for ours those of the model in it."""
        key = contender, name, ensemble
        if key not in self.kept:
            self.kept[key] = ours(name, ensemble) if contender == "ours" else (in_ase(name, ensemble), None)
            self.kept[key][0](50 if contender == "ours" else 2)
        run, inside = self.kept[key]
        if inside is None:
            return [rate(run, self.quick)]
        inside.clear()
        return [rate(run, self.quick), statistics.fmean(inside[2:])]  # without the two steps before those that count


class Server:
    """Torch-sim or 0.5.0, in its environment."""

    def __init__(self, _: str) -> None:
        self.kept: dict[Any, Any] = {}

    def ask(self, contender: str, name: str, ensemble: str, quick: bool) -> list[float]:
        """Seconds of a step."""
        if (name, ensemble) not in self.kept:
            self.kept[name, ensemble] = ELSEWHERE[contender](name, ensemble)
        return [rate(self.kept[name, ensemble], quick)]


def main() -> None:
    parser = parser_for(__doc__, "shorter times", "torch-sim")
    arguments = parser.parse_args()
    pythons = {"torch-sim": arguments.torch_sim, "0.5.0": arguments.peer}
    peers = {name: Peer(python, __file__, "cpu") for name, python in pythons.items() if python}
    start(1, "cpu", f"beside {', '.join(['ASE', *peers])}")
    side, rows = Ours(arguments.quick), []
    for name in SYSTEMS:
        for ensemble in ENSEMBLES:
            contenders = ["ours", "ASE", *[peer for peer in peers if ensemble == "NVE" or peer != "0.5.0"]]
            times: dict[str, list[list[float]]] = {c: [] for c in contenders}
            for _ in range(2 if arguments.quick else ROUNDS):
                for contender in contenders:
                    if contender in peers:
                        times[contender].append(peers[contender].ask(contender, name, ensemble, arguments.quick))
                    else:
                        times[contender].append(side.ask(contender, name, ensemble))
            mine, forces = (statistics.median(column) for column in zip(*times["ours"]))
            other = 1.0 - forces / mine
            text = f"{name:>14s} {ensemble}: {1e3 * mine:8.3f} ms a step, {100 * other:4.0f} % not forces"
            for contender in contenders[1:]:
                its = statistics.median(t[0] for t in times[contender])
                rows.append([name, ensemble, contender, its, its / mine])
                text += f"; {contender} {its / mine:.1f} times as long"
            rows.append([name, ensemble, "ours", mine, 1.0])
            rows.append([name, ensemble, "ours, not forces", mine - forces, other])
            print(text, flush=True)
    write_csv(arguments.csv, ["system", "ensemble", "contender", "seconds", "ratio"], rows)


if __name__ == "__main__":
    benchmark(main, Server, 1)
