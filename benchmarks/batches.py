"""Batches of molecules: the time for an atom in 64 molecules beside that in one liquid of as many atoms, in one run.

64 chains of 11 to 29 atoms (alkanes with nitrogen and oxygen in places of carbon), open or in boxes that leave 6
angstrom around them, and liquid ethanol with as many atoms;
then 64 molecules of 8, 20 and 29 atoms each; one thread, float64. All operators with energies and forces:

- the list within 6 angstrom, all neighbors or the 12 nearest, with and without boxes; Lennard-Jones of that list;
- Coulomb energies: of all pairs of open molecules, beside the damped sum of the liquid within 10 angstrom, and
  Ewald and PME of boxes, beside those of the liquid, at an accuracy of 1e-4, with the same boxes in each call and with
  others, as in training, for which nothing is kept from call to call;
- D3 with Becke and Johnson's damping within 25 bohr, for lists given and not; and for 256 molecules, of all sizes and
  of each, and 1,024 of 8 atoms, beside ``dftd3`` of nvalchemi-toolkit-ops 0.5.0, in its own interpreter (``--peer``),
  lists given to both.

*floor*: the bytes of positions, results and the list that an operator reads or makes, written to fresh memory once.
*kernels*: the launches of a call alone, without the Python and torch around them.
Times are processor times, minima of calls in turn. Prints the ratio for each operator, and whether it is at most 1.5.

Run: ``python benchmarks/batches.py [--quick] [--csv FILE] [--peer PYTHON]``.
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from common import Peer, benchmark, described, in_turns, parser_for, processor_seconds, start, write_csv
from dispersion import BOHR, PBE, dftd3_of, liquid, tables_for_peer
from dispersion import CUTOFF as D3_LIST_CUTOFF

MOLECULES, CUTOFF, NEAREST, DAMPED_CUTOFF, D3_CUTOFF, ACCURACY = 64, 6.0, 12, 10.0, 25.0, 1e-4
ASKED, ASKED_OF_PEER, PEER_MOLECULES = 1.5, 2.5, 256
CARBONS = (2, 6, 9)  # of molecules of 8, 20 and 29 atoms
Call = Callable[[], Any]


def alkane(n_carbons: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions, angstrom, and atomic numbers of a chain with all bonds anti."""
    bond, hydrogen, half = 1.53, 1.09, np.deg2rad(111.0) / 2
    step, rise = bond * np.sin(half), bond * np.cos(half)
    signs = np.array([(-1.0) ** k for k in range(n_carbons)])
    carbons = np.stack([step * np.arange(n_carbons), 0.5 * rise * signs, np.zeros(n_carbons)], 1)
    side = np.stack([0 * signs, 0.577 * signs, 0.816 + 0 * signs], 1)
    sides = [carbons + hydrogen * side * [1, 1, s] for s in (1.0, -1.0)]
    ends = [carbons[0] - [0.89, 0.63 * signs[0], 0.0], carbons[-1] + [0.89, -0.63 * signs[-1], 0.0]]
    return np.concatenate([carbons, *sides, ends]), np.array([6] * n_carbons + [1] * (2 * n_carbons + 2))


class Atoms(NamedTuple):
    """A batch or a liquid, in angstrom."""

    positions: torch.Tensor
    numbers: torch.Tensor
    charges: torch.Tensor
    cell: torch.Tensor | None
    batch_idx: torch.Tensor | None
    n_systems: int

    @property
    def of(self) -> dict[str, Any]:
        """Arguments of operators."""
        of = {} if self.cell is None else {"cell": self.cell}
        return of if self.batch_idx is None else of | {"batch_idx": self.batch_idx}


def molecules(count: int, boxes: bool, n_carbons: int | None = None) -> Atoms:
    rng = np.random.default_rng(1)
    found = [alkane(n_carbons or int(n)) for n in rng.integers(3, 10, count)]
    sizes = [len(numbers) for _, numbers in found]
    for _, numbers in found:  # some of the carbon is nitrogen or oxygen: more kinds of pairs for D3
        numbers[numbers == 6] = rng.choice([6, 7, 8], (numbers == 6).sum(), p=[0.7, 0.15, 0.15])
    turned = [positions @ np.linalg.qr(rng.normal(size=(3, 3)))[0] for positions, _ in found]
    cell = torch.tensor(np.stack([np.diag(np.ptp(x, 0) + 6.0) for x in turned])) if boxes else None
    numbers = np.concatenate([n for _, n in found])
    system = np.repeat(np.arange(count), sizes)
    charges = np.where(numbers == 1, 0.1, -0.1)
    charges -= (np.bincount(system, charges) / np.bincount(system))[system]
    idx = torch.tensor(system, dtype=torch.int32)
    return Atoms(torch.tensor(np.concatenate(turned)), torch.tensor(numbers), torch.tensor(charges), cell, idx, count)


def one_liquid(n_atoms: int) -> Atoms:
    given = liquid(n_atoms)
    numbers = torch.tensor(given["numbers"])
    charges = torch.where(numbers == 1, 0.1, -0.2).double()
    positions, cell = torch.tensor(given["positions"] * BOHR), torch.tensor(given["cell"] * BOHR)
    return Atoms(positions, numbers, charges - charges.mean(), cell, None, 1)


# -- operators ------------------------------------------------------------------------------------------------


def listed(atoms: Atoms, cutoff: float, **options: Any) -> tuple[torch.Tensor, ...]:
    from nvalchemiops.torch.neighbors import neighbor_list

    return neighbor_list(atoms.positions, cutoff, return_neighbor_list=True, **atoms.of, **options)


def near(found: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    return dict(zip(("neighbor_list", "neighbor_ptr", "neighbor_shifts"), found))


def lennard_jones(atoms: Atoms) -> Call:
    from nvalchemiops.torch.interactions.pair import lennard_jones

    potential, given = lennard_jones(CUTOFF), near(listed(atoms, CUTOFF))
    options = {"sigma": 3.0, "epsilon": 0.01, "compute_forces": True, "num_systems": atoms.n_systems}
    return lambda: potential(atoms.positions, **atoms.of, **given, **options)


def coulomb(atoms: Atoms) -> Call:
    from nvalchemiops.torch.interactions.electrostatics import coulomb_energy_forces

    cutoff, alpha = (1e3, 0.0) if atoms.cell is None else (DAMPED_CUTOFF, 0.2)
    given = near(listed(atoms, cutoff))
    x, q, idx = atoms.positions, atoms.charges, atoms.batch_idx
    return lambda: coulomb_energy_forces(x, q, atoms.cell, cutoff, alpha, batch_idx=idx, **given)


def ewald(atoms: Atoms, name: str, same_boxes: bool = True) -> Call:
    from nvalchemiops.torch.interactions import electrostatics

    call, given = getattr(electrostatics, name), (atoms.positions, atoms.charges)
    if same_boxes:
        return lambda: call(*given, **atoms.of, accuracy=ACCURACY, compute_forces=True)
    scales = itertools.count(1.0, 1e-9)

    def in_other_boxes() -> Any:
        of = atoms.of | {"cell": atoms.of["cell"] * next(scales)}
        return call(*given, **of, accuracy=ACCURACY, compute_forces=True)

    return in_other_boxes


def d3(atoms: Atoms, with_list: bool) -> Call:
    from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping, d3_dispersion

    scaled = atoms._replace(positions=atoms.positions / BOHR, cell=None if atoms.cell is None else atoms.cell / BOHR)
    states = D3Parameters.load().states(sorted(set(atoms.numbers.tolist())))
    damping = RationalDamping(**PBE)
    options: dict[str, Any] = {"cutoff": D3_CUTOFF, "compute_forces": True, "num_systems": atoms.n_systems}
    if with_list:
        options |= near(listed(scaled, D3_CUTOFF))
    numbers = atoms.numbers.int()
    return lambda: d3_dispersion(scaled.positions, numbers, damping, states, **scaled.of, **options)


OPERATORS: dict[str, tuple[bool, Callable[[Atoms], Call]]] = {
    # whether molecules are in boxes, and the call
    "list": (False, lambda atoms: lambda: listed(atoms, CUTOFF)),
    "list, in boxes": (True, lambda atoms: lambda: listed(atoms, CUTOFF)),
    "nearest": (False, lambda atoms: lambda: listed(atoms, CUTOFF, nearest=NEAREST)),
    "nearest, in boxes": (True, lambda atoms: lambda: listed(atoms, CUTOFF, nearest=NEAREST)),
    "Lennard-Jones": (False, lennard_jones),
    "Coulomb, all pairs": (False, coulomb),
    "Coulomb, damped, in boxes": (True, coulomb),
    "Ewald, in boxes": (True, lambda atoms: ewald(atoms, "ewald_summation")),
    "PME, in boxes": (True, lambda atoms: ewald(atoms, "particle_mesh_ewald")),
    "Ewald, other boxes": (True, lambda atoms: ewald(atoms, "ewald_summation", same_boxes=False)),
    "PME, other boxes": (True, lambda atoms: ewald(atoms, "particle_mesh_ewald", same_boxes=False)),
    "D3, list given": (False, lambda atoms: d3(atoms, True)),
    "D3": (False, lambda atoms: d3(atoms, False)),
}


# -- beside 0.5.0 ---------------------------------------------------------------------------------------------


class Server:
    """D3 of a batch that is in a file, by the call that both libraries have."""

    def ask(self, what: str, file: str) -> Any:
        given = {name: torch.as_tensor(array) for name, array in np.load(file).items()}
        call = self.dftd3(given)
        return processor_seconds(call, 10) if what == "time" else call()[0].double().sum().item()

    def dftd3(self, given: dict[str, torch.Tensor]) -> Call:
        import nvalchemiops

        return dftd3_of(given, given, nvalchemiops.__version__ != "0.5.0")


def beside(peer: Peer, rounds: int, count: int = PEER_MOLECULES, n_carbons: int | None = None) -> float:
    """Times faster than 0.5.0, for D3 of a batch."""
    atoms = molecules(count, False, n_carbons)
    atoms = atoms._replace(positions=atoms.positions / BOHR)
    pairs, ptr = listed(atoms, D3_LIST_CUTOFF)
    arrays = tables_for_peer(55) | {
        "positions": atoms.positions,
        "numbers": atoms.numbers,
        "batch_idx": atoms.batch_idx,
    }
    arrays |= {"pairs": pairs, "ptr": ptr}
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/batch.npz"
        np.savez(file, **{name: tensor.numpy() for name, tensor in arrays.items() if tensor is not None})
        sides: dict[str, Any] = {"ours": Server(), "0.5.0": peer}
        energies = {name: side.ask("energy", file) for name, side in sides.items()}
        best = in_turns({name: partial(side.ask, "time", file) for name, side in sides.items()}, rounds, min)
        kernels = kernel_seconds(sides["ours"].dftd3({n: torch.as_tensor(a) for n, a in np.load(file).items()}))
    ratio = best["0.5.0"] / best["ours"]
    times = f"ours {1e3 * best['ours']:.2f} ms (kernels {1e3 * kernels:.2f}), 0.5.0 {1e3 * best['0.5.0']:.2f} ms"
    print(f"\nD3 of {count} molecules, {len(atoms.positions)} atoms, {pairs.shape[1]} pairs: {times}, "
          f"{ratio:.1f} times (asked {ASKED_OF_PEER:g}); energies {energies['ours']:.6f}, "
          f"{energies['0.5.0']:.6f}")  # fmt: skip
    return ratio


# -- measuring ------------------------------------------------------------------------------------------------


def kernel_seconds(call: Call, calls: int = 10) -> float:
    """Time of the launches of a call alone; the shortest one of each counts."""
    from nvalchemiops._warp_internals import Command

    original, seconds = Command.launch, []

    def launch(*arguments: Any) -> None:
        begin = time.process_time()
        original(*arguments)
        seconds.append(time.process_time() - begin)

    call()
    # for the time of this measurement all launches pass through here, which a type checker takes for a mistake
    Command.launch = launch  # type: ignore[method-assign]
    try:
        for _ in range(calls):
            call()
    finally:
        Command.launch = original  # type: ignore[method-assign]
    return float(np.array(seconds).reshape(calls, -1).min(0).sum())


def floor_of(atoms: Atoms, result: Any) -> float:
    """Seconds to write the positions and the result to fresh memory."""
    tensors = [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, torch.Tensor)]
    size = sum(t.numel() * t.element_size() for t in [atoms.positions, *tensors])
    return processor_seconds(lambda: torch.empty(size // 8, dtype=torch.float64).fill_(1.0), 30)


def compared(rounds: int, n_carbons: int | None) -> list[tuple[Any, ...]]:
    """All operators for molecules, of all sizes or with so many carbon atoms, and for a liquid; rows of the table."""
    n_atoms = len(molecules(MOLECULES, False, n_carbons).positions)
    whole = one_liquid(n_atoms)
    print(f"\n{MOLECULES} molecules, {n_atoms} atoms; liquid, {len(whole.positions)} atoms")
    print(f"{'':28}{'molecules':>12}{'liquid':>12}{'floor':>10}  us for an atom{'ratio':>8}")
    rows = []
    for name, (boxes, operator) in OPERATORS.items():
        sides = {"molecules": molecules(MOLECULES, boxes, n_carbons), "liquid": whole}
        calls = {side: operator(atoms) for side, atoms in sides.items()}
        best = in_turns({side: partial(processor_seconds, call, 10) for side, call in calls.items()}, rounds, min)
        per_atom = {side: 1e6 * best[side] / len(atoms.positions) for side, atoms in sides.items()}
        floor = 1e6 * floor_of(sides["molecules"], calls["molecules"]()) / n_atoms
        ratio = per_atom["molecules"] / per_atom["liquid"]
        verdict = "" if ratio <= ASKED else f"  (asked {ASKED:g})"
        print(
            f"{name:28}{per_atom['molecules']:12.2f}{per_atom['liquid']:12.2f}{floor:10.3f}{'':16}{ratio:8.2f}{verdict}"
        )
        rows.append((name, n_carbons, per_atom["molecules"], per_atom["liquid"], floor, ratio))
    return rows


def main() -> None:
    arguments = parser_for(__doc__, "fewer rounds").parse_args()
    peer = Peer(arguments.peer, __file__, "cpu") if arguments.peer else None
    start(1, "cpu", described(peer))
    rounds = 2 if arguments.quick else 5
    table = []
    for n_carbons in (None, *CARBONS):
        table += compared(rounds, n_carbons)
    whole = one_liquid(len(molecules(MOLECULES, False).positions))
    volumes = [atoms.cell.det().abs().sum() for atoms in (molecules(MOLECULES, True), whole) if atoms.cell is not None]
    print(
        f"Boxes have {volumes[0] / volumes[1]:.1f} times the volume of the liquid, and as many times its mesh points."
    )
    for count, n_carbons in [(PEER_MOLECULES, n) for n in (None, *CARBONS)] + [(4 * PEER_MOLECULES, CARBONS[0])]:
        if peer:
            table.append((f"D3 beside 0.5.0, {count}", n_carbons, "", "", "", beside(peer, rounds, count, n_carbons)))
    write_csv(arguments.csv, ("operator", "carbons", "molecules", "liquid", "floor", "ratio"), table)


if __name__ == "__main__":
    benchmark(main, lambda _: Server(), 1)
