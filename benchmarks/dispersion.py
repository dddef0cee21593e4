"""DFT-D3: ours beside nvalchemi-toolkit-ops 0.5.0 and torch-dftd, in one run.

Energy, forces and virial with Becke and Johnson's damping for PBE, 2 threads, float64, the neighbor list given and the
same for all: liquid ethanol with a cutoff of 50 bohr, some 6,000 neighbors for each atom; and a batch of 200 molecules
of the G2 set (no virial). Contenders take turns; figures are medians. Errors are relative to ours in energy, and to
the RMS of the forces.

- *0.5.0*: its ``dftd3``, which returns float32, in its own interpreter (``--peer`` or ``NVALCHEMIOPS_PEER_PYTHON``).
- *torch-dftd*: its module, by autograd, in its own interpreter (``--torch-dftd`` or
  ``NVALCHEMIOPS_TORCH_DFTD_PYTHON``); coordination numbers end where the list does. It takes some kilobytes for each
  pair, so the large system is left out.
- *list of 60*: ours with a list that reaches 60 bohr, of which it leaves out what is beyond 50.
- *floor*: the list and the positions read three times at the speed of a copy. No floor is known for the arithmetic.

Run: ``python benchmarks/dispersion.py [--quick] [--csv FILE]``.
"""

import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from common import Peer, benchmark, contenders, in_turns, parser_for, seconds, start, versions, write_csv

THREADS, CUTOFF, BOHR = 2, 50.0, 0.529177210903
VOLUME = 97.0  # of a molecule of liquid ethanol, in cubic angstrom
PBE = {"a1": 0.4289, "a2": 4.4407, "s8": 0.7875}
ASKED = {"0.5.0": 3, "torch-dftd": 5}
HARTREE = 27.211386245981
NAMES = ("positions", "numbers", "cell", "batch_idx", "pairs", "ptr", "shifts")
Arrays = dict[str, Any]


# -- what is computed -----------------------------------------------------------------------------------------


def liquid(n_atoms: int) -> Arrays:
    """Ethanol on a cubic lattice, each molecule turned at random; in bohr."""
    from ase.build import molecule
    from scipy.spatial.transform import Rotation

    ethanol = molecule("CH3CH2OH")
    count, rng = n_atoms // len(ethanol), np.random.default_rng(3)
    edge, n = (count * VOLUME) ** (1 / 3), int(np.ceil(count ** (1 / 3)))
    places = np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), -1).reshape(-1, 3)
    places = places[np.sort(rng.permutation(n**3)[:count])] * (edge / n)
    centred = ethanol.positions - ethanol.positions.mean(0)
    turned = [r.apply(centred) for r in Rotation.random(count, random_state=rng)]
    positions = (places[:, None] + np.stack(turned)).reshape(-1, 3) / BOHR
    return {"positions": positions, "numbers": np.tile(ethanol.numbers, count), "cell": np.eye(3)[None] * edge / BOHR}


def molecules(count: int) -> Arrays:
    """Molecules of the G2 set with six atoms and more, over and over."""
    from ase.build import molecule
    from ase.collections import g2

    found = [m for m in (molecule(name) for name in g2.names) if len(m) >= 6]
    found = [found[k % len(found)] for k in range(count)]
    return {
        "positions": np.concatenate([m.positions for m in found]) / BOHR,
        "numbers": np.concatenate([m.numbers for m in found]),
        "batch_idx": np.repeat(np.arange(count), [len(m) for m in found]),
    }


def with_neighbors(given: Arrays, cutoff: float) -> Arrays:
    from nvalchemiops.torch.neighbors import neighbor_list

    tensors = {name: torch.as_tensor(given[name]) for name in ("positions", "cell", "batch_idx") if name in given}
    if "batch_idx" in tensors:
        tensors["batch_idx"] = tensors["batch_idx"].int()
    pairs, ptr, *shifts = neighbor_list(cutoff=cutoff, return_neighbor_list=True, **tensors)
    found = {"pairs": pairs.numpy(), "ptr": ptr.numpy()}
    return given | found | ({"shifts": shifts[0].numpy()} if shifts else {})


def tables_for_peer(n_numbers: int = 95) -> dict[str, torch.Tensor]:
    """Reference data of so many elements, with five references of each, as 0.5.0 takes them."""
    from nvalchemiops.torch.interactions.dispersion import D3Parameters

    kept, n = D3Parameters.load(), n_numbers
    c6ab = kept.c6ab[:n, :n, :5, :5]
    cn_ref = kept.cn_ref[:n, None, :5, None].expand(*c6ab.shape)
    return {"rcov": kept.rcov[:n], "r4r2": kept.r4r2[:n], "c6ab": c6ab, "cn_ref": cn_ref}


def dftd3_of(given: Arrays, tables: Mapping[str, Any], ours: bool) -> Callable[[], Any]:
    """The call that this library and its peer share."""
    from nvalchemiops.torch.interactions.dispersion import D3Parameters, dftd3

    parameters = {name: torch.as_tensor(tables[name]) for name in ("rcov", "r4r2", "c6ab", "cn_ref")}
    options = {
        "d3_params": D3Parameters(**{k: v if ours else v.float() for k, v in parameters.items()}),
        "neighbor_list": given["pairs"],
        "neighbor_ptr": given["ptr"],
        "unit_shifts": given.get("shifts"),
        "cell": given.get("cell"),
        "compute_virial": "cell" in given,
    }
    if "batch_idx" in given:
        options |= {"batch_idx": given["batch_idx"].int(), "num_systems": int(given["batch_idx"].max()) + 1}
    if ours:
        options["cutoff"] = CUTOFF
    numbers, positions = given["numbers"].int(), given["positions"]
    return lambda: dftd3(positions, numbers, **PBE, **options)


# -- who computes it ------------------------------------------------------------------------------------------


class Server:
    """A library with a system; asked in this process, or through a pipe."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.call: Callable[[], Any] | None = None

    @property
    def version(self) -> str:
        import importlib.metadata

        names = {"torch-dftd": "torch-dftd", "0.5.0": "nvalchemi-toolkit-ops", "ours": "nvalchemiops"}
        return importlib.metadata.version(names[self.library])

    def ask(self, *question: Any) -> Any:
        match question:
            case ["prepare", folder]:
                files = {name: os.path.join(folder, f"{name}.npy") for name in NAMES}
                given = {name: torch.as_tensor(np.load(file)) for name, file in files.items() if os.path.exists(file)}
                if self.library == "torch-dftd":
                    self.call = self.dftd(given)
                else:
                    tables = np.load(os.path.join(folder, "parameters.npz"))
                    self.call = dftd3_of(given, tables, self.library == "ours")
                energy, forces = self.call()[:2]
                file = os.path.join(folder, f"{self.library}.npz")
                np.savez(file, energy=energy.double().numpy(), forces=forces.double().numpy())
                return file
            case ["time"]:
                assert self.call is not None
                return seconds(self.call)
            case ["forget"]:
                self.call = None

    def dftd(self, given: Arrays) -> Callable[[], Any]:
        from torch_dftd.nn.dftd3_module import DFTD3Module

        module = DFTD3Module(
            {"s6": 1.0, "rs6": PBE["a1"], "s18": PBE["s8"], "rs18": PBE["a2"], "alp": 14.0},
            cutoff=CUTOFF * BOHR,
            cnthr=CUTOFF * BOHR,
            dtype=torch.float64,
            bidirectional=True,
        ).double()
        n_atoms = len(given["numbers"])
        pairs = given["pairs"].long()
        batch = given.get("batch_idx", torch.zeros(n_atoms)).long()
        options = {"batch": batch, "batch_edge": batch[pairs[0]], "damping": "bj"}
        if "cell" in given:
            options["cell"] = given["cell"] * BOHR
            options["pbc"] = torch.ones(1, 3, dtype=torch.bool)
            options["shift_pos"] = given["shifts"].double() @ options["cell"][0]
        else:
            count = int(batch.max()) + 1
            options["cell"] = torch.zeros(count, 3, 3, dtype=torch.float64)
            options["pbc"] = torch.zeros(count, 3, dtype=torch.bool)
            options["shift_pos"] = torch.zeros(pairs.shape[1], 3, dtype=torch.float64)
        positions, numbers = given["positions"] * BOHR, given["numbers"].long()

        def call() -> Any:
            found = module.calc_energy_and_forces(numbers, positions, pairs, **options)
            forces = torch.as_tensor(np.concatenate([f["forces"] for f in found])) * (BOHR / HARTREE)
            return torch.tensor([f["energy"] for f in found]) / HARTREE, forces

        return call


# -- the run --------------------------------------------------------------------------------------------------


def measure(title: str, given: Arrays, sides: dict[str, Any], rounds: int, farther: bool) -> list[dict[str, Any]]:
    """All contenders with one system."""
    systems = {"": with_neighbors(given, CUTOFF)}
    if farther:
        systems[", list of 60"] = with_neighbors(given, 60.0)
    n_pairs = systems[""]["pairs"].shape[1]
    print(f"\n{title}: {len(given['numbers']):,} atoms, {n_pairs:,} pairs", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        asked: dict[str, Any] = {}
        for note, system in systems.items():
            place = os.path.join(folder, f"system{note.strip(', ')}")
            os.mkdir(place)
            np.savez(os.path.join(place, "parameters.npz"), **tables_for_peer())
            for name in NAMES:
                if name in system:
                    np.save(os.path.join(place, f"{name}.npy"), system[name])
            for name, side in sides.items():
                if note and name != "ours":
                    continue
                side = Server("ours") if name == "ours" else side
                asked[name + note] = side, np.load(side.ask("prepare", place))
        times = in_turns({name: partial(side.ask, "time") for name, (side, _) in asked.items()}, rounds)
        for side in sides.values():
            side.ask("forget")
    mine, reference, rows = times["ours"], asked["ours"][1], []
    for name, (_, answer) in asked.items():
        taken = times[name]
        errors = [
            np.abs(answer["energy"] / reference["energy"] - 1.0).max(),
            np.sqrt(np.square(answer["forces"] - reference["forces"]).mean() / np.square(reference["forces"]).mean()),
        ]
        wanted = f" (asked {ASKED[name]})" if name in ASKED else ""
        line = f"{name:>22s}{1e3 * taken:11.2f} ms{1e9 * taken / n_pairs:8.1f} ns/pair{taken / mine:8.2f} x{wanted}"
        print(f"{line}   apart from ours: energy {errors[0]:.0e}, forces {errors[1]:.0e}", flush=True)
        rows.append({"case": title, "contender": name, "seconds": taken, "pairs": n_pairs})
    big, other = np.zeros(2**25), np.ones(2**25)
    np.copyto(big, other)
    rate = 2 * big.nbytes / seconds(lambda: np.copyto(big, other))
    floor = 3.0 * n_pairs * (8 + 12 * ("cell" in given)) / rate
    print(f"{'floor':>22s}{1e3 * floor:11.2f} ms{'':16s}{mine / floor:8.2f} x in ours")
    rows.append({"case": title, "contender": "floor", "seconds": floor, "pairs": n_pairs})
    return rows


def main() -> None:
    options = parser_for(__doc__, "no large system, few rounds", "torch-dftd").parse_args()
    pythons = {"0.5.0": options.peer, "torch-dftd": options.torch_dftd}
    sides = contenders(Server("ours"), lambda python, library: Peer(python, __file__, library), pythons)
    start(THREADS, "cpu", versions(sides))
    rounds = 2 if options.quick else 5
    rows = measure("200 molecules", molecules(200), sides, 3 * rounds, False)
    few = {name: side for name, side in sides.items() if name != "torch-dftd"}
    rows += measure("liquid, 1,000", liquid(1_000), few if options.quick else sides, rounds, True)
    if not options.quick:
        rows += measure("liquid, 10,000", liquid(10_000), few, 3, False)
    write_csv(options.csv, ("case", "contender", "seconds", "pairs"), rows)


if __name__ == "__main__":
    benchmark(main, Server, THREADS)
