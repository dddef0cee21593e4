"""The ``nvalchemiops`` command: ``info``, ``warmup``, ``tune``, ``energy``, ``md``, ``relax`` and ``stand-in``."""

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import json
import math
import os
import pkgutil
import platform
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import nvalchemiops
from nvalchemiops.compat.stand_in import RELEASE, write_stand_in

OPTIONAL_PACKAGES = ("torch", "jax", "ase")
"""Packages that some subpackages need, but that may not be installed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 for success, 1 if some results are missing, 2 for misuse.

    If what reads its output has gone, it ends without a word, as programs do that the signal ends.
    """
    # without standard error, notes and bars would go to standard output
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(sys.stderr or nowhere):
        options = _parser().parse_args(_joined(sys.argv[1:] if arguments is None else arguments))
        with warnings.catch_warnings():
            warnings.showwarning = _show_note
            try:
                status = options.run(options)
                if sys.stdout is not None:
                    sys.stdout.flush()
                return status
            except BrokenPipeError:
                _forget_output()
                return 128 + signal.SIGPIPE


def _joined(words: Sequence[str]) -> list[str]:
    """The words with all values of an option in one: ``--pressure -1 0 a.xyz`` as ``--pressure=-1,0 a.xyz``.

    Without this, argparse takes a file behind values for another one, and ``-1,0`` for an option.
    """
    left, found = list(words), []
    while left:
        found.append(left.pop(0))
        if found[-1] == "--":
            break
        # argparse takes the beginning of a name, too
        checks = [check for name, check in _SEVERAL.items() if len(found[-1]) > 2 and name.startswith(found[-1])]
        count = next((n for n, word in enumerate(left) if not any(check(word) for check in checks)), len(left))
        # what comes next is an option, a file, or a mistake, which is reported as a value
        if count and (count == len(left) or left[count].startswith("-") or _is_file(left[count])):
            found[-1] += "=" + ",".join(left[:count])
            left = left[count:]
    return found + left


def _are_numbers(word: str) -> bool:
    try:
        return bool([float(part) for part in word.split(",")])
    except ValueError:
        return False


def _is_entry(word: str) -> bool:
    is_file = os.path.isfile(word) and _has_suffix(word)  # as T=300.xyz
    return "=" in word and not word.startswith("-") and not is_file


def _is_file(word: str) -> bool:
    return os.path.exists(word) or _has_suffix(word)


def _has_suffix(word: str) -> bool:
    return re.search(r"\.[a-zA-Z]\w*$", word) is not None


_SEVERAL: dict[str, Callable[[str], bool]] = {
    "--temperature": _are_numbers,
    "--pressure": _are_numbers,
    "--parameters": _is_entry,
    "--electrostatics-parameters": _is_entry,
    "--charges": _is_entry,
}
"""Options with several values, in words or with commas between them, and whether a word is one or more of these."""


def _forget_output() -> None:
    """Let what is still to be written go nowhere: Python would tell of it when the process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, AttributeError):  # standard output that is not a file, or none
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _parser() -> argparse.ArgumentParser:
    description = (nvalchemiops.__doc__ or "").partition("\n")[0]  # python -OO removes docstrings
    parser = argparse.ArgumentParser(prog="nvalchemiops", description=description)
    parser.add_argument("--version", action="version", version=f"nvalchemiops {nvalchemiops.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    info = commands.add_parser("info", help="print versions, devices, threads and the kernel cache")
    info.add_argument("--json", action="store_true", help="print one JSON object")
    info.set_defaults(run=_info)

    warmup = commands.add_parser(
        "warmup", help="compile common kernels ahead of their first use", epilog=_WARMUP_LEAVES
    )
    warmup.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="compile for the CPU or for every CUDA device; by default for all devices",
    )
    warmup.add_argument(
        "--compute-capability",
        action="append",
        type=_capability,
        metavar="X.Y",
        help="compile for GPUs of this kind, as 9.0, which need not be here; may be given several times",
    )
    warmup.add_argument("name", nargs="*", help="only kernels whose name contains one of these, as in: neighbor spline")
    warmup.set_defaults(run=_warmup)

    tune = commands.add_parser(
        "tune",
        help="measure on this machine what the parts of an Ewald sum cost (half a minute)",
        epilog=_TUNE_EFFECT,
    )
    tune.add_argument("--device", default="cpu", help="what to measure: cpu (the default), cuda or cuda:1")
    tune.add_argument("--show", action="store_true", help="print the costs in use, and where they come from")
    tune.add_argument("--reset", action="store_true", help="forget what was measured")
    tune.set_defaults(run=_tune)

    energy = commands.add_parser(
        "energy", help="energies and forces of the structures in files", epilog=_ENERGY_EXAMPLE
    )
    _add_structures_and_terms(energy, several=True)
    energy.add_argument("--forces", action="store_true", help="print the force on each atom, too")
    energy.set_defaults(run=functools.partial(_of_ase, "command", "energy"))

    md = commands.add_parser("md", help="molecular dynamics of the structures in a file", epilog=_MD_EXAMPLE)
    _add_structures_and_terms(md)
    ensembles = ["nve", "langevin", "nvt", "csvr", "nph", "npt", "stochastic_cell"]
    md.add_argument("--ensemble", type=str.lower, choices=ensembles, default="nve", help="(nve)")
    md.add_argument(
        "--temperature",
        action=_Numbers,
        nargs="+",
        metavar="K",
        help="one, or one for each system; one frame and several temperatures or pressures are as many systems. "
        "Velocities are drawn for it if the file has none, and with nve always",
    )
    md.add_argument("--dt", type=float, default=1.0, metavar="FS", help="time step in fs (1)")
    md.add_argument("--steps", type=int, default=1000, help="number of steps (1000)")
    md.add_argument("--pressure", action=_Numbers, nargs="+", metavar="GPA", help="of ensembles with a pressure (0)")
    md.add_argument(
        "--compressibility", type=float, metavar="1/GPA", help="for stochastic_cell, about that of the system"
    )
    md.add_argument(
        "--cell",
        choices=["isotropic", "axes", "full"],
        help="for nph and npt: which changes of the cell are allowed (isotropic)",
    )
    md.add_argument("--mask", metavar="AXES", help="Cartesian axes along which the cell may change, as xy (xyz)")
    md.add_argument("--thermostat-time", type=float, metavar="FS", help="of the coupling to the temperature (100 dt)")
    md.add_argument("--barostat-time", type=float, metavar="FS", help="of the coupling to the pressure (1000 dt)")
    md.add_argument("--seed", type=int, default=0, help="of velocities and noise (0)")
    md.add_argument("--every", type=int, help="steps between two rows of the table, and two frames (a tenth of all)")
    md.add_argument(
        "--trajectory",
        metavar="FILE",
        help="where to write frames, as .xyz or .traj; for several systems out-0.xyz ...",
    )
    md.set_defaults(run=functools.partial(_of_ase, "motion", "md"))

    relax = commands.add_parser("relax", help="relax the structures in a file", epilog=_RELAX_EXAMPLE)
    _add_structures_and_terms(relax)
    relax.add_argument(
        "--fmax",
        type=float,
        default=0.01,
        metavar="EV/A",
        help="largest force at the end (0.01 eV/Å); with --cell also that on the cell: rows of the virial, with the "
        "pressure added, over the number of atoms",
    )
    relax.add_argument(
        "--optimizer",
        type=lambda name: name.lower().replace("-", ""),  # `as_choice` imports NumPy, which takes time before --help
        choices=["fire", "fire2", "lbfgs"],
        default="fire",
        help="(fire)",
    )
    relax.add_argument("--max-steps", type=int, default=1000, help="of the optimizer (1000)")
    relax.add_argument(
        "--cell",
        choices=["isotropic", "axes", "full"],
        help="relax cells, too: their size; the length of each Cartesian axis; or lengths and angles",
    )
    relax.add_argument("--mask", metavar="AXES", help="Cartesian axes along which cells may change, as xy (xyz)")
    relax.add_argument(
        "--pressure",
        action=_Numbers,
        nargs="+",
        metavar="GPA",
        help="for cells that relax (0): one, or one for each frame; one frame and several are as many systems",
    )
    relax.add_argument("--forces", action="store_true", help="print the force on each atom, too")
    relax.add_argument("--output", metavar="FILE", help="where to write the relaxed structures, in a format of ASE")
    relax.set_defaults(run=functools.partial(_of_ase, "motion", "relax"))

    stand_in = commands.add_parser(
        "stand-in",
        help="write a wheel without files that satisfies requirements of nvalchemi-toolkit-ops",
        epilog="Install it with pip install --no-deps; docs/coming_from.md says more.",
    )
    stand_in.add_argument(
        "--release", default=RELEASE, help=f"the release that it claims to be ({RELEASE}), such as 0.3.1 for orb-models"
    )
    stand_in.add_argument("--folder", type=Path, default=Path("dist"), help="where to write it (dist)")
    stand_in.set_defaults(run=_stand_in)
    return parser


class _Numbers(argparse.Action):
    """Numbers with commas between them, in one word or several."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        try:
            numbers = [float(part) for text in values for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentError(self, f"not a number: {error}") from None
        setattr(namespace, self.dest, numbers)


def _add_structures_and_terms(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """The arguments of commands that compute something of the structures in a file, or in several."""
    text = f"any file{'s' * several} with atoms that ASE reads, or - for standard input with --format"
    parser.add_argument("file", nargs="+" if several else None, help=text)
    parser.add_argument("--format", metavar="NAME", help="of the file, as ASE calls it: extxyz, vasp, cif ...")
    parser.add_argument("--index", default=":", help="which frames, as 0, -1, 10:20 or, with =, -5:; by default all")
    parser.add_argument("--pbc", metavar="AXES", help="periodic axes, as xyz, xy or none; by default those in the file")
    parser.add_argument("--potential", metavar="NAME", help="pair potential, such as lennard_jones or buckingham")
    parser.add_argument(
        "--parameters",
        nargs="+",
        action="extend",
        metavar="KEY=VALUE",
        help="its cutoff, parameters and options; KEY:Mg=VALUE and KEY:Mg-O=VALUE by element or pair of elements, "
        "KEY:*=VALUE for all others",
    )
    parser.add_argument("--electrostatics", metavar="METHOD", help="auto, or ewald, pme, coulomb, dsf ...")
    parser.add_argument("--charges", metavar="Na=1,Cl=-1", help="by element; by default those in the file")
    parser.add_argument("--accuracy", type=float, help="relative error of forces for auto, ewald and pme (1e-6)")
    parser.add_argument(
        "--electrostatics-parameters", nargs="+", action="extend", metavar="KEY=VALUE", help="cutoff, alpha ..."
    )
    parser.add_argument("--slab-correction", action="store_true", help="not needed: atoms with one open axis get it")
    parser.add_argument("--dispersion", metavar="FUNCTIONAL", help="DFT-D3 for a density functional, such as pbe")
    parser.add_argument("--damping", metavar="KIND", help="of the dispersion: bj (the default), zero, bjm or zerom")
    parser.add_argument("--s9", type=float, help="factor of the three-body energy of the dispersion, as 1 (0)")
    parser.add_argument("--device", default="cpu", help="where to compute (cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


_TUNE_EFFECT = (
    "The costs are kept in a file of the user. Later processes use them to choose alpha, cutoffs, k-vectors and meshes "
    "that are not given. They change how long sums take and the last digits of results, not the accuracy. Run it while "
    "the machine is idle."
)

_WARMUP_LEAVES = (
    "It compiles the neighbor search, Ewald sums and particle meshes with splines of order 4, 5, 8 and 10 with "
    "their first derivatives, and the most common pair potentials in float64. Kernels that depend on a formula or the "
    "elements are compiled at their first use, half a second each: expressions of your own, shifted, switched and "
    "tabulated potentials, the pairs of DFT-D3, excluded pairs, several charges for an atom, second derivatives."
)

_ENERGY_EXAMPLE = (
    "For example: nvalchemiops energy MgO.cif --potential buckingham "
    "--parameters cutoff=9 A:Mg-O=1280 'A:*=0' rho=0.3 C=0 --electrostatics auto --charges Mg=2,O=-2"
)


_MD_EXAMPLE = (
    "For example: nvalchemiops md argon.xyz --potential lennard_jones --parameters cutoff=8.5 sigma=3.4 epsilon=0.0104 "
    "--ensemble npt --temperature 60 80 100 --dt 4 --steps 5000 --trajectory out.xyz. Atoms that the file fixes stay."
)

_RELAX_EXAMPLE = (
    "For example: nvalchemiops relax argon.xyz --potential lennard_jones --parameters cutoff=8.5 sigma=3.4 "
    "epsilon=0.0104 --cell full --optimizer lbfgs --output relaxed.xyz. The exit status is 1 if a structure did not "
    "converge. Atoms that the file fixes stay."
)


def _show_note(message: Warning | str, *details: Any, **more: Any) -> None:
    print(f"note: {message}", file=sys.stderr)


def fail(command: str, error: object, status: int = 2) -> int:
    """Print why a command failed, and return its exit status."""
    print(f"nvalchemiops {command}: {error}", file=sys.stderr)
    return status


# -- info -----------------------------------------------------------------------------------------


def describe() -> dict[str, Any]:
    """Versions, devices, threads and kernel cache of this installation, as plain data.

    It turns Warp's messages off for the process, so it is for commands, not for library code.
    """
    from nvalchemiops._warp import quiet_warp

    quiet_warp()
    import warp as wp

    torch = _import_if_installed("torch")
    threads = torch.get_num_threads() if torch else os.cpu_count()
    processor = platform.processor() or platform.machine()
    devices: list[dict[str, Any]] = [{"name": "cpu", "processor": processor, "threads": threads}]
    for index in range(torch.cuda.device_count() if torch and torch.cuda.is_available() else 0):
        card = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": f"cuda:{index}",
                "processor": card.name,
                "compute_capability": f"{card.major}.{card.minor}",
                "memory_gib": round(card.total_memory / 2**30, 1),
                "usable_by_warp": index < wp.get_cuda_device_count(),
            }
        )
    cache = Path(str(wp.config.kernel_cache_dir))  # set, once Warp has started
    versions: dict[str, str | None] = {"nvalchemiops": nvalchemiops.__version__, "python": platform.python_version()}
    versions |= {"torch": torch.__version__ if torch else None, "warp": wp.config.version}
    versions |= {package: _version(package) for package in ("numpy", "sympy")}
    compiled = sum(1 for entry in cache.glob("wp_*") if entry.is_dir())
    kept = {"path": str(cache), "compiled_modules": compiled}
    return {"versions": versions, "devices": devices, "kernel_cache": kept}


def _import_if_installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _info(options: argparse.Namespace) -> int:
    facts = describe()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    for package, version in facts["versions"].items():
        print(f"{package:14s}{version or 'not installed'}")
    for device in facts["devices"]:
        print(f"{device['name']:14s}{_device_line(device)}")
    cache = facts["kernel_cache"]
    print(f"{'kernel cache':14s}{cache['path']} ({cache['compiled_modules']} compiled modules)")
    return 0


def _device_line(device: dict[str, Any]) -> str:
    if "threads" in device:
        return f"{device['processor']}, {device['threads']} thread{'s' * (device['threads'] != 1)}"
    capability = f"compute capability {device['compute_capability']}"
    note = "" if device["usable_by_warp"] else ", not usable by Warp (driver too old?)"
    return f"{device['processor']}, {device['memory_gib']} GiB, {capability}{note}"


# -- warmup ---------------------------------------------------------------------------------------


def _capability(text: str) -> int:
    """A compute capability times ten."""
    if not re.fullmatch(r"\d+\.\d", text):
        raise argparse.ArgumentTypeError(f"a compute capability is a number such as 9.0, got {text!r}")
    return int(text.replace(".", ""))


def _job(name: str, target: str | int) -> str:
    return f"{name} [{target if isinstance(target, str) else f'sm_{target}'}]"


def _warmup(options: argparse.Namespace) -> int:
    from nvalchemiops._warp import quiet_warp

    quiet_warp()
    import warp as wp

    from nvalchemiops.loading import compile_for, is_cpu_only, load

    if options.device and options.compute_capability:
        return fail("warmup", "give --device or --compute-capability, not both")
    cards = [str(device) for device in wp.get_cuda_devices()]
    if options.device == "cuda" and not cards:
        return fail("warmup", "there is no CUDA device that Warp can use")
    devices = {"cpu": ["cpu"], "cuda": cards, None: ["cpu", *cards]}[options.device]
    targets: Sequence[str | int] = options.compute_capability or devices
    known = all_kernels()
    unknown = [part for part in options.name if not any(part in name for name, _ in known)]
    if unknown:
        names = ", ".join(dict.fromkeys(name.partition("(")[0] for name, _ in known))
        return fail("warmup", f"no kernel is called {' or '.join(unknown)}; there are {names}")
    kernels = [(n, build) for n, build in known if not options.name or any(part in n for part in options.name)]
    jobs = [(name, build, target) for target in targets for name, build in kernels]
    failures, n_ready = [], 0
    for name, build, target in _with_progress(jobs, [_job(name, target) for name, _, target in jobs]):
        try:
            kernel = build()
            if target != "cpu" and is_cpu_only(kernel):
                continue
            if isinstance(target, int):
                compile_for(kernel, target)
            else:
                load(kernel, wp.get_device(target))
            n_ready += 1
        except Exception as error:  # one broken kernel must not hide the others
            failures.append(f"{_job(name, target)}: {error}")
    for failure in failures:
        fail("warmup", failure)
    print(f"{n_ready} of {n_ready + len(failures)} kernels ready in {wp.config.kernel_cache_dir}")
    return 1 if failures else 0


# -- tune -----------------------------------------------------------------------------------------


def _tune(options: argparse.Namespace) -> int:
    from nvalchemiops.interactions.electrostatics import costs

    path = costs.file()
    if options.reset:
        try:
            if path is not None:
                path.unlink(missing_ok=True)
        except OSError as error:
            return fail("tune", error, 1)
        print(f"nothing is kept in {path}" if path else "there is no file")
        return 0
    if options.show:
        kept = costs.read()
        for kind, built_in in costs.BUILT_IN.items():
            found = kept.get(kind, built_in)
            print(f"{kind:5s}{_costs_line(found)}  {f'from {path}' if kind in kept else 'built in'}")
        return 0
    from nvalchemiops._warp import quiet_warp

    quiet_warp()
    torch = _import_if_installed("torch")
    if torch is None:
        return fail("tune", "torch is not installed")
    from nvalchemiops.torch.interactions.electrostatics.accuracy.tuning import measure

    try:
        device = torch.device(options.device)
        if device.type not in costs.BUILT_IN or (device.type == "cuda" and not torch.cuda.is_available()):
            raise ValueError(f"there is no device '{options.device}' here")
    except (RuntimeError, ValueError) as error:
        return fail("tune", error)
    found = measure(device)
    print(f"{device.type:5s}{_costs_line(found)}")
    try:
        print(f"kept in {costs.write({device.type: found})}")
    except OSError as error:
        return fail("tune", error, 1)
    return 0


def _costs_line(costs: Any) -> str:
    parts = {
        "pair": costs.pair,
        "its search": costs.search,
        "eight k-vectors": costs.k_vectors,
        "mesh point": costs.mesh,
        "column of a spline": costs.column,
        "of one above order 8": costs.wide_column,
        "call with k-vectors": costs.call_of_k_vectors,
        "with a mesh": costs.call_of_mesh,
    }
    # the built-in costs of a GPU have none for orders above 8, which are not chosen there
    return ", ".join(f"{name} {cost:.3g} ns" for name, cost in parts.items() if cost < math.inf)


def _with_progress(jobs: list[Any], labels: list[str]) -> Iterator[Any]:
    """The jobs, with a progress bar if tqdm is installed, otherwise with a line for each."""
    if importlib.util.find_spec("tqdm") is None:
        for number, (job, label) in enumerate(zip(jobs, labels), 1):
            print(f"[{number}/{len(jobs)}] {label}", file=sys.stderr)
            yield job
        return
    from tqdm import tqdm

    bar = tqdm(zip(jobs, labels), total=len(jobs), unit="kernel", file=sys.stderr)
    for job, label in bar:
        bar.set_description(label)
        yield job


def all_kernels() -> list[tuple[str, Callable[[], Any]]]:
    """Every registered kernel as ``(name, build)``, after importing each module that may define some."""
    for _ in import_all(nvalchemiops):
        pass
    from nvalchemiops.launch import registered_kernels

    return sorted(registered_kernels(), key=lambda entry: entry[0])


def _stand_in(options: argparse.Namespace) -> int:
    try:
        print(write_stand_in(options.folder, options.release))
    except (ValueError, OSError) as error:
        return fail("stand-in", error)
    return 0


def import_all(package: ModuleType) -> Iterator[ModuleType]:
    """Import and yield every module below ``package``, except where an optional package is missing."""
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if found.name.endswith(".__main__"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # from import paths of older releases
                module = importlib.import_module(found.name)
        except ImportError as error:
            if error.name in OPTIONAL_PACKAGES:
                continue
            raise
        yield module
        if found.ispkg:
            yield from import_all(module)


# -- structures in files --------------------------------------------------------------------------


def _of_ase(module: str, command: str, options: argparse.Namespace) -> int:
    """Run the function of `nvalchemiops.ase` with the name of the command."""
    try:
        found = importlib.import_module(f"nvalchemiops.ase.{module}")
        return int(getattr(found, command)(options))
    except BrokenPipeError:
        raise
    except (ImportError, ValueError, TypeError, FloatingPointError, OSError) as error:
        return fail(command, error)
