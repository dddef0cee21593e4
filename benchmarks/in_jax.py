"""JAX functions beside the torch functions that they call, and beside jax-pme 0.1.0, in one run.

Rock salt (neighbors at 2.82, displaced by normal deviates of a tenth of that, charges 1 and -1), float64, 2 threads,
everything jitted; lists of neighbors are made beforehand, but in a step of dynamics. Contenders take turns; figures are
medians.

- *tiny*: ``2 x + 1`` of 8 numbers. What a call of torch from JAX costs.
- *energies by system*, *energies by atom*: ``jax.value_and_grad`` of an Ewald energy, beside torch's energy and
  ``torch.autograd.grad``.
- *step*: neighbor matrix, Ewald energy and forces, and Verlet's step, in ``jax.lax.scan`` and in a loop in torch.
- *jax-pme*: energy and forces by its Ewald and P3M calculators, and by our Ewald and PME. Each is the fastest of some
  cutoffs at a measured RMS error of the forces below 1e-4 of their RMS; what was found for 512 ions is tried for other
  numbers. The reference is our Ewald sum at 1e-12. Its Ewald sum is left out for 4,096 ions, where it needs tens of
  gigabytes; all of it where it is missing: ``pip install jax-pme``.

The file is not called jax.py, which Python would import for JAX.

Run: ``python benchmarks/in_jax.py [--quick] [--csv FILE]``.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import torch
from charges import THREADS, atoms, error_of, tensors

from nvalchemiops.jax.bridge import from_torch
from nvalchemiops.jax.interactions import electrostatics as in_jax
from nvalchemiops.jax.neighbors import check_neighbor_list_state, neighbor_list, prepare_neighbor_list
from nvalchemiops.torch.interactions import electrostatics as in_torch
from nvalchemiops.torch.neighbors import neighbor_list as torch_neighbor_list

ROUNDS = 7
ERROR, DIGITS = 1e-4, 3.2
CUTOFFS = (5.5, 7.5, 10.0)
NAMES = ("neighbor_list", "neighbor_ptr", "neighbor_shifts")
ASKED = {
    "tiny": "torch + 150 µs",
    "energies by system 64": 1.5,
    "energies by system": 1.3,
    "energies by atom": 2.2,
    "step": "torch + 100 µs",
    "jax-pme ewald": "5 times",
    "jax-pme p3m": "5 times",
}

Row = dict[str, Any]


def times(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median seconds of each, in turns."""
    for call in calls.values():
        call()
    return common.in_turns({name: partial(common.seconds, call) for name, call in calls.items()}, ROUNDS)


def ready(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """A call of a JAX function that waits for its results."""
    return lambda: jax.block_until_ready(function(*arguments))


def arrays(values: dict[str, torch.Tensor]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value.numpy()) for name, value in values.items()}


def tiny() -> dict[str, float]:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2.0 * x + 1.0

    x = torch.arange(8.0, dtype=torch.float64)
    return times({"torch": lambda: twice(x), "jax": ready(jax.jit(from_torch(twice)), jnp.arange(8.0))})


# -- derivatives ----------------------------------------------------------------------------------


def near(system: str, cutoff: float) -> dict[str, torch.Tensor]:
    given = tensors(system)
    found = torch_neighbor_list(given["positions"], cutoff, given["cell"], return_neighbor_list=True)
    return dict(zip(NAMES, found))


def parameters(system: str, accuracy: float) -> tuple[float, float, float]:
    """Alpha, and the cutoffs for pairs and k-vectors."""
    given = tensors(system)
    found = in_torch.estimate_ewald_parameters(given["positions"], given["cell"], accuracy=accuracy)
    return tuple(float(x) for x in (found.alpha, found.real_space_cutoff, found.reciprocal_space_cutoff))


def value_and_gradient(system: str) -> dict[str, float]:
    alpha, cutoff, k_cutoff = parameters(system, 1e-5)
    given, pairs = tensors(system), near(system, cutoff)

    def in_torch_only(reduction: str) -> Callable[[], Any]:
        def call() -> Any:
            x = given["positions"].requires_grad_()
            options = {**pairs, "k_cutoff": k_cutoff, "energy_reduction": reduction}
            energy = in_torch.ewald_summation(x, given["charges"], given["cell"], alpha, **options).sum()
            return energy, torch.autograd.grad(energy, x)

        return call

    @jax.jit
    def by_system(x: jax.Array, q: jax.Array, cell: jax.Array, pairs: dict[str, jax.Array]) -> Any:
        def energy(x: jax.Array) -> jax.Array:
            options = {**pairs, "k_cutoff": k_cutoff, "energy_reduction": "system"}
            return in_jax.ewald_summation(x, q, cell, alpha, **options)[0]

        return jax.value_and_grad(energy)(x)

    @jax.jit
    def by_atom(x: jax.Array, q: jax.Array, cell: jax.Array, pairs: dict[str, jax.Array]) -> Any:
        return jax.value_and_grad(
            lambda x: jnp.sum(in_jax.ewald_summation(x, q, cell, alpha, k_cutoff=k_cutoff, **pairs))
        )(x)

    arguments = (*(arrays(tensors(system))[name] for name in ("positions", "charges", "cell")), arrays(pairs))
    return times(
        {
            "torch": in_torch_only("system"),
            "energies by system": ready(by_system, *arguments),
            "energies by atom": ready(by_atom, *arguments),
        }
    )


# -- dynamics -------------------------------------------------------------------------------------


def steps(system: str, count: int = 20) -> dict[str, float]:
    alpha, cutoff, k_cutoff = parameters(system, 1e-4)
    given, dt = tensors(system), 1e-3
    x, q, cell = given["positions"], given["charges"], given["cell"]
    width = int(1.5 * torch_neighbor_list(x, cutoff, cell)[1].max())
    options = {"k_cutoff": k_cutoff, "energy_reduction": "system"}

    def in_torch_only() -> torch.Tensor:
        y, v = x, torch.zeros_like(x)
        for _ in range(count):
            matrix, _, shifts = torch_neighbor_list(y, cutoff, cell, max_neighbors=width)
            y = y.requires_grad_()
            found = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
            energy = in_torch.ewald_summation(y, q, cell, alpha, **found, **options)
            (gradient,) = torch.autograd.grad(energy[0], y)
            v = v - dt * gradient
            y = y.detach() + dt * v
        return y

    arguments = arrays(tensors(system))
    state = prepare_neighbor_list(arguments["positions"], cutoff, arguments["cell"], max_neighbors=width)

    @jax.jit
    def scan(x: jax.Array, q: jax.Array, cell: jax.Array, state: Any) -> Any:
        def step(carry: Any, _: None) -> Any:
            x, v, state = carry
            (matrix, _, shifts), state = neighbor_list(x, state=state)
            found = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}

            def energy(x: jax.Array) -> jax.Array:
                return in_jax.ewald_summation(x, q, cell, alpha, **found, **options)[0]

            v = v - dt * jax.grad(energy)(x)
            return (x + dt * v, v, state), None

        return jax.lax.scan(step, (x, jnp.zeros_like(x), state), None, length=count)[0]

    given_to_jax = (*(arguments[name] for name in ("positions", "charges", "cell")), state)
    after = scan(*given_to_jax)
    check_neighbor_list_state(after[2])
    np.testing.assert_allclose(after[0], in_torch_only().numpy(), atol=1e-10)
    found = times({"torch": in_torch_only, "jax": ready(scan, *given_to_jax)})
    return {name: seconds / count for name, seconds in found.items()}


# -- jax-pme ----------------------------------------------------------------------------------------


Choice = tuple[str, float, float, float]
"""Method, cutoff, alpha, and the cutoff for k-vectors or the spacing of the mesh."""


def choices(method: str, cutoff: float) -> list[Choice]:
    """From the cheapest; errors of the pairs are alike, as alpha goes with the cutoff."""
    alpha = DIGITS / cutoff
    if method == "ewald":
        return [(method, cutoff, alpha, 2.0 * alpha * share * DIGITS) for share in (0.9, 1.0, 1.5, 2.0, 2.5)]
    return [(method, cutoff, alpha, h / alpha) for h in (0.8, 0.6, 0.45, 0.33, 0.25)]


def theirs(system: str, choice: Choice) -> Callable[[], Any]:
    """Energy and forces by jax-pme."""
    import ase
    import jaxpme

    method, cutoff, alpha, resolution = choice
    given, smearing = atoms(system), float(1.0 / (np.sqrt(2.0) * alpha))
    crystal = ase.Atoms(
        positions=given["positions"], cell=given["cell"][0], pbc=True, numbers=[1] * len(given["charges"])
    )
    if method == "ewald":
        calculator = jaxpme.Ewald()
        prepared = calculator.prepare(crystal, given["charges"], cutoff, 2.0 * np.pi / resolution, smearing)[:-1]
    else:
        calculator = jaxpme.P3M(interpolation_nodes=5)
        prepared = calculator.prepare(crystal, given["charges"], cutoff, resolution, smearing)
    return ready(jax.jit(calculator.energy_forces), *map(jnp.asarray, prepared))


def ours(system: str, choice: Choice) -> Callable[[], Any]:
    """Energy and forces by `jax.value_and_grad`."""
    method, cutoff, alpha, resolution = choice
    given, pairs = arrays(tensors(system)), arrays(near(system, cutoff))

    @jax.jit
    def energy_forces(x: jax.Array, q: jax.Array, cell: jax.Array, pairs: dict[str, jax.Array]) -> Any:
        def energy(x: jax.Array) -> jax.Array:
            options = {**pairs, "energy_reduction": "system"}
            if method == "ewald":
                return in_jax.ewald_summation(x, q, cell, alpha, k_cutoff=resolution, **options)[0]
            return in_jax.particle_mesh_ewald(x, q, cell, alpha, mesh_spacing=resolution, spline_order=6, **options)[0]

        value, gradient = jax.value_and_grad(energy)(x)
        return value, -gradient

    return ready(energy_forces, given["positions"], given["charges"], given["cell"], pairs)


def fastest(make: Callable[[str, Choice], Callable[[], Any]], method: str) -> list[Choice]:
    """For each cutoff the cheapest choice with the error, for 512 ions."""
    found = []
    for cutoff in CUTOFFS:
        reached = (c for c in choices(method, cutoff) if error_of(make("512", c)()[1], "512") < ERROR)
        if choice := next(reached, None):
            found.append(choice)
    return found


def best(system: str, make: Callable[[str, Choice], Callable[[], Any]], tried: list[Choice]) -> Any:
    """The fastest choice that has about the error in this system, its call and its error."""
    found = {}
    for choice in tried:
        call = make(system, choice)
        error = error_of(call()[1], system)
        if error < 2.0 * ERROR:
            found[str(choice)] = (choice, call, error)
    measured = times({name: call for name, (_, call, _) in found.items()})
    return found[min(measured, key=measured.__getitem__)]


def beside_jax_pme(systems: list[str]) -> list[Row]:
    sides: dict[str, tuple[Any, tuple[str, ...]]] = {
        "ours": (ours, ("ewald", "pme")),
        "jax-pme ewald": (theirs, ("ewald",)),
        "jax-pme p3m": (theirs, ("p3m",)),
    }
    tried = {name: [c for m in methods for c in fastest(make, m)] for name, (make, methods) in sides.items()}
    rows = []
    for system in systems:
        there = [name for name in sides if name != "jax-pme ewald" or int(system) <= 512]
        chosen = {name: best(system, sides[name][0], tried[name]) for name in there}
        measured = times({name: call for name, (_, call, _) in chosen.items()})
        for name, (choice, _, error) in chosen.items():
            print(f"  {system} ions, {name}: {choice[0]}, cutoff {choice[1]:g}, error {error:.1e}")
        rows += rows_of("energy and forces", system, measured, "ours", *there[1:])
    return rows


# -- report ---------------------------------------------------------------------------------------


def rows_of(row: str, system: str, measured: dict[str, float], base: str, *others: str) -> list[Row]:
    """Seconds of all; of ``others`` the ratio to ``base``, printed."""
    rows = []
    for name in (base, *others):
        ratio = measured[name] / measured[base]
        rows.append({"row": row, "atoms": system, "contender": name, "seconds": measured[name], "ratio": ratio})
    for name in others:
        label = row if name == "jax" else name
        asked = ASKED.get(f"{label} {system}", ASKED.get(label, ""))
        more = 1e6 * (measured[name] - measured[base])
        print(
            f"{label:20s} {system:>6s}  {base} {1e3 * measured[base]:9.3f} ms  {name} {1e3 * measured[name]:9.3f} ms  "
            f"ratio {measured[name] / measured[base]:6.2f}  more {more:8.0f} µs   asked: {asked}",
            flush=True,
        )
    return rows


def main() -> None:
    options: argparse.Namespace = common.parser_for(__doc__, "64 and 512 ions").parse_args()
    jax.config.update("jax_enable_x64", True)
    common.start(THREADS, "cpu", f"jax {jax.__version__}")
    systems = ["64", "512"] if options.quick else ["64", "512", "4096"]
    rows = rows_of("tiny", "", tiny(), "torch", "jax")
    for system in systems:
        found = value_and_gradient(system)
        rows += rows_of("value_and_grad", system, found, "torch", "energies by system", "energies by atom")
    for system in systems[:2]:
        rows += rows_of("step", system, steps(system), "torch", "jax")
    try:
        import jaxpme  # noqa: F401  # only whether it is there
    except ImportError:
        print("no jax-pme")
    else:
        rows += beside_jax_pme(systems)
    common.write_csv(options.csv, ("row", "atoms", "contender", "seconds", "ratio"), rows)


if __name__ == "__main__":
    main()
