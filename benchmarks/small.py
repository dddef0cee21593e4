"""Calls for few atoms, where Python takes most of the time: by plans, and the ordinary way, in one run.

Rock salt (neighbors at 2.82, displaced by normal deviates of a tenth of that, charges 1 and -1), float64, 2 threads, an
accuracy of 1e-5. Contenders take turns, call by call; figures are the shortest of many calls, which other work on the
machine changes least.

- *given*: Ewald and PME sums with parameters and neighbors given, and neighbor lists. The floor is the time of the
  launches and operations of the plan alone, without Python around them. What was asked for is a share of the time of
  the ordinary way, which is that of the state before plans or less.
- *dynamics*: a step of ASE's velocity Verlet beyond the same step with a calculator that returns zeros.
- *chosen*: sums that choose parameters and search for neighbors, for atoms that move in each call; and their parts.
- *compiled*: ``torch.compile`` beside eager mode, without plans and with them; also where the graph does not check in
  each call that functions and constants of modules are still the same. The floor is an op that does nothing.
- *pieces*: Ewald sums where launches are cut among threads from other lengths on (`nvalchemiops.launch.MINIMUM_CHUNK`).
- *expect*: what docs/performance.md says of 10, 100 and 1,000 atoms, for argon and for rock salt.

Run: ``python benchmarks/small.py [--quick] [--only SECTION ...] [--threads N] [--csv FILE]``.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import common
import numpy as np
import torch
from charges import SPACING, rock_salt, tensors

from nvalchemiops import launch
from nvalchemiops.constants import BOHR_IN_ANGSTROM
from nvalchemiops.torch.interactions import dispersion, electrostatics, pair
from nvalchemiops.torch.neighbors import VerletList, neighbor_list
from nvalchemiops.torch.runtime import engine, tables
from nvalchemiops.torch.systems import System

ACCURACY = 1e-5
NAMES = ("neighbor_list", "neighbor_ptr", "neighbor_shifts")
ASKED = {  # shares of the time of the state before plans, from issue 22
    "Ewald, forces": 0.5 / 1.21,
    "Ewald, energy and backward": 0.8 / 1.58,
    "PME, forces": 0.9 / 2.3,
}

Call = Callable[[int], Any]
"""A call; its argument counts calls."""

Row = dict[str, Any]


def ordinary(call: Call) -> Call:
    """The same without plans."""

    def other(n: int) -> Any:
        with engine.off():
            return call(n)

    return other


def shortest(calls: dict[str, Call], rounds: int, warm: int = 6) -> dict[str, float]:
    """Seconds of the shortest call of each; they take turns, twice each, and the second one counts."""
    for call in calls.values():
        for n in range(warm):
            call(n)
    found = dict.fromkeys(calls, np.inf)
    for n in range(rounds):
        for name, call in calls.items():
            call(n)
            start = time.perf_counter()
            result = call(n)
            found[name] = min(found[name], time.perf_counter() - start)
            del result
    return found


def line(section: str, name: str, size: str, seconds: dict[str, float], note: str = "") -> list[Row]:
    """Print the times of contenders, the first one the base of ratios."""
    base = next(iter(seconds.values()))
    shown = "  ".join(f"{who} {1e3 * value:8.3f} ms ({value / base:4.2f})" for who, value in seconds.items())
    print(f"{name:28s}{size:>6s}  {shown}   {note}", flush=True)
    return [{"section": section, "row": name, "atoms": size, "contender": w, "seconds": v} for w, v in seconds.items()]


# -- parameters and neighbors given ---------------------------------------------------------------------------


def parameters(system: str, method: str, accuracy: float = ACCURACY) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Parameters of a sum, and its list."""
    given = tensors(system)
    x, cell = given["positions"], given["cell"]
    if method == "ewald":
        found: Any = electrostatics.estimate_ewald_parameters(x, cell, accuracy=accuracy)
        chosen = {"alpha": float(found.alpha), "k_cutoff": float(found.reciprocal_space_cutoff)}
    else:
        found = electrostatics.estimate_pme_parameters(x, cell, accuracy=accuracy)
        chosen = {"alpha": float(found.alpha), "mesh_dimensions": found.mesh_dimensions}
    near = neighbor_list(x, float(found.real_space_cutoff), cell, return_neighbor_list=True)
    return chosen, dict(zip(NAMES, near))


def sums(system: str) -> dict[str, Call]:
    given, calls = tensors(system), {}
    for label, method, function in (
        ("Ewald", "ewald", electrostatics.ewald_summation),
        ("PME", "pme", electrostatics.particle_mesh_ewald),
    ):
        chosen, near = parameters(system, method)
        call = functools.partial(function, **given, **chosen, **near)

        def backward(_: int, call: Any = call) -> Any:
            x = given["positions"].clone().requires_grad_()
            return torch.autograd.grad(call(positions=x).sum(), x)

        calls[f"{label}, energy"] = lambda _, call=call: call()
        calls[f"{label}, forces"] = lambda _, call=call: call(compute_forces=True)
        calls[f"{label}, energy and backward"] = backward
    return calls


def floor_of(call: Call) -> Call:
    """The launches and operations of the plan of this call."""
    tables.everywhere.clear()
    for n in range(4):
        call(n)
    (plan,) = [entry.plan for entry in tables.everywhere.entries.values() if entry.plan is not None]

    def steps(_: int) -> None:
        # the lists of the last call are still where they were
        with torch.no_grad():
            for step in plan.steps:
                step()

    return steps


def given(size: str, rounds: int) -> list[Row]:
    rows = []
    for name, call in sums(size).items():
        contenders = {"ordinary": ordinary(call), "plan": call, "floor": floor_of(call)}
        note = f"asked: {ASKED[name]:.2f}" if name in ASKED and size == "64" else ""
        rows += line("given", name, size, shortest(contenders, rounds), note)
    x, cell = tensors(size)["positions"], tensors(size)["cell"]
    cutoff = float(electrostatics.estimate_ewald_parameters(x, cell, accuracy=ACCURACY).real_space_cutoff)
    width = neighbor_list(x, cutoff, cell)[0].shape[1]
    verlet = VerletList(cutoff, 0.5)
    lists: dict[str, Call] = {
        "ordinary Ewald, forces": ordinary(sums(size)["Ewald, forces"]),
        "list": lambda _: neighbor_list(x, cutoff, cell, return_neighbor_list=True),
        "matrix": lambda _: neighbor_list(x, cutoff, cell, max_neighbors=width),
        "VerletList, kept": lambda _: verlet(x, cell),
    }
    # lists have no other way now: relative to an Ewald sum, which they took 0.3 / 1.21 of
    note = f"asked: {0.3 / 1.21:.2f}" if size == "64" else ""
    return rows + line("given", "lists", size, shortest(lists, rounds), note)


# -- dynamics -------------------------------------------------------------------------------------------------


def step_of(calculator: Any, system: str) -> Call:
    import ase
    from ase.md.verlet import VelocityVerlet

    given = {name: value.numpy() for name, value in tensors(system).items()}
    crystal = ase.Atoms("NaCl" * (len(given["charges"]) // 2), given["positions"], cell=given["cell"][0], pbc=True)
    crystal.set_initial_charges(given["charges"])
    crystal.calc = calculator
    integrator = VelocityVerlet(crystal, timestep=0.01)
    return lambda _: integrator.run(1)


def dynamics(size: str, rounds: int) -> list[Row]:
    from ase.calculators.calculator import Calculator as Base
    from ase.calculators.calculator import all_changes

    from nvalchemiops.ase import Calculator, Electrostatics

    class Zeros(Base):
        implemented_properties = ["energy", "forces"]  # noqa: RUF012  # ASE's way

        def calculate(self, atoms: Any = None, properties: Any = None, system_changes: Any = all_changes) -> None:
            super().calculate(atoms, properties, system_changes)
            self.results = {"energy": 0.0, "forces": np.zeros((len(self.atoms), 3))}

    calls: dict[str, Call] = {"zeros": step_of(Zeros(), size)}
    for method in ("ewald", "pme"):
        step = step_of(Calculator(Electrostatics(method, accuracy=ACCURACY)), size)
        calls |= {f"{method} ordinary": ordinary(step), f"{method} plan": step}
    seconds = shortest(calls, rounds)
    ours = {name: value - seconds["zeros"] for name, value in seconds.items() if name != "zeros"}
    return line("dynamics", "step in ASE, beyond zeros", size, ours, f"zeros: {1e3 * seconds['zeros']:.3f} ms")


# -- parameters and neighbors chosen --------------------------------------------------------------------------


def of_moving(size: str, method: str, function: Any, rounds: int) -> list[Row]:
    x, q, cell = tensors(size).values()
    generator = torch.Generator().manual_seed(1)
    moved = [x + 0.01 * torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(16)]
    known, near = parameters(size, method)
    estimate = getattr(electrostatics, f"estimate_{method}_parameters")
    cutoff = float(estimate(x, cell, accuracy=ACCURACY).real_space_cutoff)

    def call(n: int) -> Any:
        return function(moved[n % 16], q, cell, accuracy=ACCURACY, compute_forces=True)

    seconds = shortest(
        {
            "ordinary": ordinary(call),
            "plans": call,
            "search": lambda n: neighbor_list(moved[n % 16], cutoff, cell, return_neighbor_list=True),
            "sum": lambda n: function(moved[n % 16], q, cell, **known, **near, compute_forces=True),
        },
        rounds,
    )
    seconds["choice"] = seconds["plans"] - seconds["search"] - seconds["sum"]
    note = f"{near['neighbor_list'].shape[1]} pairs"
    return line("chosen", f"{method}, nothing given", size, seconds, note)


def chosen(size: str, rounds: int) -> list[Row]:
    rows = of_moving(size, "ewald", electrostatics.ewald_summation, rounds)
    return rows + of_moving(size, "pme", electrostatics.particle_mesh_ewald, rounds)


# -- compiled -------------------------------------------------------------------------------------------------


@torch.library.custom_op("benchmarks::nothing", mutates_args=())
def nothing(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
    pairs: torch.Tensor,
    pointers: torch.Tensor,
    shifts: torch.Tensor,
    points: torch.Tensor,
    point_begin: torch.Tensor,
    point_system: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """An op with the tensors of a sum: what a compiled call takes beside its ops."""
    return torch.empty_like(charges), torch.empty_like(positions)


@nothing.register_fake
def _(positions: torch.Tensor, charges: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(charges), torch.empty_like(positions)


def compiled(size: str, rounds: int) -> list[Row]:
    x, q, cell = tensors(size).values()
    known, near = parameters(size, "ewald")
    indices = electrostatics.prepare_wave_vectors(cell, known.pop("k_cutoff"))

    def forces(x: torch.Tensor) -> Any:
        return electrostatics.ewald_summation(x, q, cell, **known, **near, miller_indices=indices, compute_forces=True)

    def trivial(x: torch.Tensor) -> Any:
        return nothing(x, q, cell, *near.values(), *indices[:4])

    def unguarded(x: torch.Tensor) -> Any:
        return forces(x)

    quick, floor = torch.compile(forces, fullgraph=True), torch.compile(trivial, fullgraph=True)
    options: Any = {"guard_filter_fn": torch.compiler.skip_guard_on_globals_unsafe}
    trusting = torch.compile(unguarded, fullgraph=True, options=options)
    calls: dict[str, Call] = {
        "plan": lambda _: forces(x),
        "ordinary": ordinary(lambda _: forces(x)),
        "compiled": lambda _: quick(x),
        "and no look at globals": lambda _: trusting(x),
        "compiled op that does nothing": lambda _: floor(x),
    }
    return line("compiled", "Ewald, forces", size, shortest(calls, rounds))


# -- pieces of launches ---------------------------------------------------------------------------------------


def pieces(size: str, rounds: int) -> list[Row]:
    rows, before = [], launch.MINIMUM_CHUNK

    def cut(call: Call, length: float) -> Call:
        def other(n: int) -> Any:
            launch.MINIMUM_CHUNK = length
            return call(n)

        return other

    for name in ("Ewald, forces", "PME, forces"):
        call = sums(size)[name]
        calls = {f"{1e6 * length:.0f}": cut(call, length) for length in (120e-6, 60e-6, 40e-6, 25e-6)}
        rows += line("pieces", f"{name}, from µs", size, shortest(calls, rounds))
    launch.MINIMUM_CHUNK = before
    return rows


# -- what to expect -------------------------------------------------------------------------------------------


def argon(n_atoms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and cell of a disordered crystal of n atoms, at the density of liquid argon."""
    rng, edge = np.random.default_rng(3), int(np.ceil(n_atoms ** (1 / 3)))
    spacing = 3.6
    sites = np.stack(np.meshgrid(*[np.arange(edge)] * 3, indexing="ij"), -1).reshape(-1, 3)[:n_atoms]
    length = spacing * max(n_atoms ** (1 / 3), 2.0)
    x = sites * (length / edge) + rng.normal(scale=0.2, size=(n_atoms, 3))
    return torch.as_tensor(x), torch.eye(3, dtype=torch.float64) * length


def salt(n_atoms: int) -> tuple[torch.Tensor, ...]:
    """Positions, charges and cell of rock salt with about n atoms."""
    shape = {10: (2, 2, 2), 100: (4, 4, 6), 1_000: (10, 10, 10)}[n_atoms]
    x, q, cell = rock_salt(shape, False, np.random.default_rng(5))
    return tuple(map(torch.as_tensor, (x, q, cell)))


def expected(n_atoms: int) -> dict[str, Call]:
    x, h = argon(n_atoms)
    y, q, cell = salt(n_atoms)
    near = dict(zip(NAMES, neighbor_list(x, 7.0, h, return_neighbor_list=True)))
    lennard_jones = pair.lennard_jones(cutoff=7.0)
    atoms = torch.ones(n_atoms, dtype=torch.float64)
    found: dict[str, Call] = {
        "neighbor list, cutoff 7": lambda _: neighbor_list(x, 7.0, h, return_neighbor_list=True),
        "Lennard-Jones, forces and virial, list given": lambda _: lennard_jones(
            x, h, **near, sigma=3.4 * atoms, epsilon=atoms, compute_forces=True, compute_virial=True
        ),
        "Ewald, forces, nothing given": lambda _: electrostatics.ewald_summation(
            y, q, cell, accuracy=ACCURACY, compute_forces=True
        ),
    }
    for name, function, estimate in (
        ("Ewald", electrostatics.ewald_summation, electrostatics.estimate_ewald_parameters),
        ("PME", electrostatics.particle_mesh_ewald, electrostatics.estimate_pme_parameters),
    ):
        p: Any = estimate(y, cell, accuracy=ACCURACY)
        known: dict[str, Any] = {"alpha": float(p.alpha)}
        if name == "Ewald":
            known["k_cutoff"] = float(p.reciprocal_space_cutoff)
        else:
            known["mesh_dimensions"] = p.mesh_dimensions
        listed = neighbor_list(y, float(p.real_space_cutoff), cell, return_neighbor_list=True)
        call = functools.partial(function, y, q, cell, **known, **dict(zip(NAMES, listed)))
        found[f"{name}, forces, all given"] = lambda _, call=call: call(compute_forces=True)
    d3 = dispersion.DFTD3("pbe", elements=[18], cutoff=40.0, coordination_cutoff=25.0)
    numbers = torch.full((n_atoms,), 18, dtype=torch.int32)
    solid = System(x / BOHR_IN_ANGSTROM, cell=h / BOHR_IN_ANGSTROM, numbers=numbers)
    within = solid.neighbors(40.0)
    found["D3, forces and virial, cutoff 40 bohr, list given"] = lambda _: d3(
        solid, within, compute_forces=True, compute_virial=True
    )
    return found


def expect(rounds: int) -> list[Row]:
    sizes, rows = (10, 100, 1_000), []
    times = {n: shortest(expected(n), max(rounds // 5, 10)) for n in sizes}
    print(f"\n| work, in milliseconds | {' | '.join(f'{n:,} atoms' for n in sizes)} |\n|---|{'---|' * len(sizes)}")
    for name in times[10]:
        values = [times[n].get(name, np.nan) for n in sizes]
        print(f"| {name} | {' | '.join(f'{1e3 * value:.2f}' for value in values)} |", flush=True)
        rows += [
            {"section": "expect", "row": name, "atoms": n, "contender": "ours", "seconds": value}
            for n, value in zip(sizes, values)
        ]
    print(f"\nSalt: 8, 96 and 1,000 ions {SPACING:g} Å apart.")
    return rows


SECTIONS = {
    "given": given,
    "dynamics": dynamics,
    "chosen": chosen,
    "compiled": compiled,
    "pieces": pieces,
}


def main() -> None:
    parser = common.parser_for(__doc__, "64 ions, few rounds")
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS, "expect"], default=[*SECTIONS, "expect"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    common.start(options.threads, "cpu", "plans and the ordinary way")
    sizes, rounds, rows = (["64"], 40, []) if options.quick else (["64", "512"], 300, [])
    for name in options.only:
        print(f"\n{name}")
        if name == "expect":
            rows += expect(rounds)
            continue
        more = ["4096"] if name == "compiled" and not options.quick else []
        for size in sizes + more:
            rows += SECTIONS[name](size, rounds)
    common.write_csv(options.csv, ("section", "row", "atoms", "contender", "seconds"), rows)


if __name__ == "__main__":
    main()
