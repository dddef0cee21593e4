"""Charges, dipoles and quadrupoles in Ewald sums at a measured error, latent Ewald sums beside the dense formula, and
multipoles beside nvalchemi-toolkit-ops 0.5.0.

Three tables:

- energies and forces of charges alone, with dipoles, with quadrupoles (the traceless part of second moments), by
  Ewald's sum and on a mesh. Each has the largest ``accuracy`` of a few whose measured RMS error of the forces is below
  1e-5, with lists built before; times are given relative to charges alone;
- the energy and its gradients by positions and sources of a latent Ewald sum (sigma = 1, dl = 2, four channels) beside
  the formula in plain torch, dense sines and cosines of atoms and k-vectors, differentiated by torch. *Floor* is the
  time of the multiply-adds that these sums need (`multiply_adds`), at the rate of one thread of this machine with all
  numbers in registers, measured in the same run;
- with ``--peer PYTHON``: energy and gradients by positions and moments of Gaussians (sigma 0.5), beside
  ``multipole_ewald_summation`` and ``multipole_particle_mesh_ewald`` of 0.5.0, in processor time. Each library has the
  parameters that it chooses, at the largest ``accuracy`` of a few whose measured error of the forces is below 1e-5, or
  at the smallest. The mesh of 0.5.0 with quadrupoles is compiled for minutes at its first call:
  ``--peer-methods ewald`` leaves meshes out.

Contenders run in turns in one process. Times are the least of a few, in processor time with ``--processor``, which
other programs on the machine disturb less.
"""

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from common import BURST, Peer, benchmark, described, in_turns, parser_for, processor_seconds, start, write_csv

from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.neighbors import neighbor_list

ERROR = 1e-5
ACCURACIES = (8e-5, 4e-5, 2e-5, 1e-5, 5e-6, 2.5e-6, 1e-6)
DENSITY = 0.1  # atoms in a cubic angstrom, about that of water
ASKED_OF_LATENT = {512: 15, 4096: 50}
SPLINE_ORDERS = {"charges": 5, "dipoles": 6, "quadrupoles": 7}

Sources = dict[str, torch.Tensor]


def system(n_atoms: int, n_channels: int | None = None) -> tuple[torch.Tensor, torch.Tensor, Sources]:
    """Atoms on a distorted lattice, with sources of molecular size."""
    generator = torch.Generator().manual_seed(n_atoms)
    edge = (n_atoms / DENSITY) ** (1.0 / 3.0)
    per_side = round(n_atoms ** (1.0 / 3.0))
    axis = torch.arange(per_side, dtype=torch.float64) / per_side
    positions = torch.cartesian_prod(axis, axis, axis) * edge
    positions = positions + 0.2 * torch.randn(positions.shape, generator=generator, dtype=torch.float64)
    shape = (len(positions),) if n_channels is None else (len(positions), n_channels)

    def random(scale: float, *components: int) -> torch.Tensor:
        return scale * torch.randn(*shape, *components, generator=generator, dtype=torch.float64)

    charges, quadrupoles = random(0.5), random(0.15, 3, 3)
    quadrupoles = quadrupoles + quadrupoles.mT
    trace = quadrupoles.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    quadrupoles = quadrupoles - trace * torch.eye(3, dtype=torch.float64)
    sources = {"charges": charges - charges.mean(0), "dipoles": random(0.2, 3), "quadrupoles": quadrupoles}
    return positions, torch.eye(3, dtype=torch.float64) * edge, sources


def least(calls: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """The least time of each call in milliseconds, of short bursts: a call alone finds the caches of the others."""

    def burst(call: Callable[[], Any]) -> float:
        call()
        begin, count = clock(), 0
        while count == 0 or clock() - begin < BURST:
            call()
            count += 1
        return 1e3 * (clock() - begin) / count

    return in_turns({name: functools.partial(burst, call) for name, call in calls.items()}, repeats, min)


def chosen(
    method: str, x: torch.Tensor, cell: torch.Tensor, sources: dict[str, Any], accuracy: float, order: int
) -> tuple[Callable[..., Any], str]:
    """A sum with the parameters that the library chooses, and a list built before; and what was chosen."""
    # not at the top: the peer's interpreter runs this file, too
    from nvalchemiops.torch.interactions.electrostatics.accuracy.choice import choose_splitting
    from nvalchemiops.torch.interactions.electrostatics.system import check_system, given_alpha
    from nvalchemiops.torch.interactions.electrostatics.terms.mesh import MeshSum
    from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import KVectorSum
    from nvalchemiops.torch.systems import System

    atoms = check_system(System(x, cell=cell, **sources))
    empty: Any = KVectorSum() if method == "ewald" else MeshSum(order, None)
    splitting = choose_splitting(atoms, empty, None, None, None, accuracy)
    alpha = given_alpha(splitting.alpha, atoms)
    found = empty.chosen(atoms, splitting)
    assert splitting.cutoff is not None
    pairs, pointers, shifts = neighbor_list(x, splitting.cutoff, cell, return_neighbor_list=True)
    options: dict[str, Any] = {
        "cell": cell,
        "alpha": alpha,
        "neighbor_list": pairs,
        "neighbor_ptr": pointers,
        "neighbor_shifts": shifts,
    }
    if method == "ewald":
        options["miller_indices"] = found.k_vectors
        function: Any = ewald_summation
    else:
        options |= {"mesh_dimensions": found.mesh, "spline_order": order}
        function = particle_mesh_ewald
    parameters = f"alpha {float(alpha):.3f}, cutoff {splitting.cutoff:.2f}"
    parameters += f", {len(found.k_vectors.points)} points" if method == "ewald" else f", mesh {found.mesh[0]}"
    return functools.partial(function, **options), parameters


def moments(sizes: tuple[int, ...], repeats: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Sums with more and more sources."""
    rows = []
    for n_atoms in sizes:
        x, cell, values = system(n_atoms)
        names = list(values)
        for method in ("ewald", "pme"):
            calls: dict[str, Any] = {}
            notes: dict[str, str] = {}
            for n, name in enumerate(names):
                sources = {key: values[key] for key in names[: n + 1]}
                exact = ewald_summation(x, cell=cell, **sources, accuracy=1e-11, compute_forces=True)[1]
                order = SPLINE_ORDERS[name]
                for accuracy in ACCURACIES:
                    function, parameters = chosen(method, x, cell, sources, accuracy, order)
                    call = functools.partial(function, x, **sources, compute_forces=True)
                    error = float((call()[1] - exact).norm() / exact.norm())
                    if error <= ERROR:
                        break
                calls[name] = call
                notes[name] = f"error {error:.1e}, {parameters}"
            times = least(calls, repeats, clock)
            for name, value in times.items():
                ratio = value / times["charges"]
                print(
                    f"{n_atoms:6d} {method:6s} {name:12s} {value:9.2f} ms  x {ratio:5.2f}   {notes[name]}", flush=True
                )
                rows.append({"atoms": n_atoms, "what": f"{method}, {name}", "ms": value, "ratio": ratio})
    return rows


def dense(x: torch.Tensor, cell: torch.Tensor, sources: Sources, sigma: float, dl: float) -> torch.Tensor:
    """The latent Ewald sum in plain torch: structure factors by dense sines and cosines, all k-vectors up to 2π/dl."""
    k_cutoff = 2.0 * math.pi / dl
    bounds = (k_cutoff * cell.norm(dim=1) / (2.0 * math.pi)).floor().int().tolist()
    axes = [torch.arange(0, bounds[0] + 1), *(torch.arange(-b, b + 1) for b in bounds[1:])]
    n = torch.cartesian_prod(*axes).to(x.dtype)
    k = 2.0 * math.pi * n @ torch.linalg.inv(cell).mT
    k2 = k.square().sum(1)
    used = (k2 <= k_cutoff**2) & (k2 > 0.0)
    k, k2 = k[used], k2[used]
    twice = torch.where(n[used, 0] == 0.0, 1.0, 2.0)
    phase = x @ k.mT
    cosine, sine = torch.cos(phase), torch.sin(phase)
    real, imaginary = sources["charges"].mT @ cosine, sources["charges"].mT @ sine
    for name, sign, first, factors in (
        ("dipoles", -1.0, sine, k.mT),
        ("quadrupoles", -0.5, cosine, (k.unsqueeze(2) * k.unsqueeze(1)).flatten(1).mT),
    ):
        if name in sources:
            second = cosine if first is sine else sine
            values = sources[name].flatten(1).mT  # no tensor of atoms, channels and k-vectors
            along = ((values @ wave).unflatten(0, (-1, len(factors))) * factors for wave in (first, second))
            of_first, of_second = (part.sum(1) for part in along)
            real = real + sign * of_first
            imaginary = imaginary + (of_second if name == "dipoles" else sign * of_second)
    weight = twice * torch.exp(-0.5 * sigma**2 * k2) / k2
    return 2.0 * math.pi / torch.linalg.det(cell).abs() * (weight * (real.square() + imaginary.square())).sum()


def projected(gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Gradients by quadrupoles without their trace, which the library leaves out."""
    identity = torch.eye(3, dtype=torch.float64)

    def traceless(t: torch.Tensor) -> torch.Tensor:
        return t - t.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None] * identity

    return [traceless(t) if t.ndim == 4 else t for t in gradients]


def latent(sizes: tuple[int, ...], repeats: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Latent Ewald sums, energy and backward."""
    from nvalchemiops.torch.interactions.electrostatics import ewald_reciprocal_space

    rows, sigma, dl = [], 1.0, 2.0
    rate = rate_of_multiply_adds(clock)
    for n_atoms in sizes:
        x, cell, values = system(n_atoms, 4)
        names = list(values)
        for n, name in enumerate(names):
            sources = {key: values[key].clone().requires_grad_() for key in names[: n + 1]}
            leaves = (x.clone().requires_grad_(), *sources.values())

            def ours(leaves: Any = leaves, sources: Sources = sources, cell: torch.Tensor = cell) -> Any:
                energies = ewald_reciprocal_space(
                    leaves[0],
                    cell=cell,
                    **sources,
                    k_vectors=None,
                    alpha=1.0 / (math.sqrt(2.0) * sigma),
                    k_cutoff=2.0 * math.pi / dl,
                    energy_reduction="system",
                    self_interaction=True,
                )
                return torch.autograd.grad(energies.sum(), leaves)

            def plain(leaves: Any = leaves, sources: Sources = sources, cell: torch.Tensor = cell) -> Any:
                return torch.autograd.grad(dense(leaves[0], cell, sources, sigma, dl), leaves)

            worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours(), projected(plain())))
            few = max(2, repeats * 512 // n_atoms)
            times = least({"ours": ours, "dense": plain}, few, clock)
            ratio = times["dense"] / times["ours"]
            floor = 1e3 * 4 * n_atoms * multiply_adds(cell, 2.0 * math.pi / dl, n) / rate
            print(
                f"{n_atoms:6d} latent {name:12s} {times['ours']:9.2f} ms, dense {times['dense']:9.2f} ms: "
                f"{ratio:5.1f} times (asked {ASKED_OF_LATENT[n_atoms]:g})   floor {floor:.2f} ms   "
                f"differences {worst:.0e}",
                flush=True,
            )
            rows.append(
                {"atoms": n_atoms, "what": f"latent, {name}", "ms": times["ours"], "ratio": ratio, "floor": floor}
            )
    return rows


def multiply_adds(cell: torch.Tensor, k_cutoff: float, highest: int) -> int:
    """Multiply-adds for an atom and a channel, with moments up to this order, their gradients and forces.

    With k-vectors (n_x, ±n_y, ±n_z) taken together, each power of n_z takes eight: a cosine and a sine along z times
    four products along x and y, fewer where sines are zero. Spreading moments of order l needs the powers up to l, in
    two sums, of even and of odd ones; gathering for their gradients and forces those up to l + 1. What is done once
    for each column of k-vectors is left out.
    """
    reciprocal = 2.0 * math.pi * torch.linalg.inv(cell).mT
    reach = (k_cutoff / reciprocal.norm(dim=1)).floor().int().tolist()
    n = torch.cartesian_prod(*(torch.arange(r + 1) for r in reach))
    signs = torch.tensor([[1, 1, 1], [1, 1, -1], [1, -1, 1], [1, -1, -1]])
    inside = ((n.unsqueeze(1) * signs).double() @ reciprocal).norm(dim=-1) <= k_cutoff
    x, y, z = (n[inside.any(1)] > 0).int().unbind(1)
    products = (1 + x) * (1 + y)
    powers = (min(highest, 1) + 1) * 2 + (highest == 2) + 2 * (highest + 2)
    return int((products * torch.where(z > 0, powers, 2)).sum())


@functools.cache
def rate_of_multiply_adds(clock: Callable[[], float]) -> float:
    """Multiply-adds in a second of one thread, in vectors that stay in registers."""
    import warp as wp

    from nvalchemiops.kernels.native import native_kernel
    from nvalchemiops.kernels.simd import LANES
    from nvalchemiops.torch.launch import launch

    text = f"""
        typedef double lanes __attribute__((ext_vector_type({LANES}), aligned(8)));
        lanes sums[16], factor = *reinterpret_cast<lanes *>(values.data);
        for (int a = 0; a < 16; ++a) sums[a] = factor;
        for (int i = 0; i < n; ++i)
            for (int a = 0; a < 16; ++a) sums[a] = __builtin_elementwise_fma(sums[a], factor, factor);
        lanes total = 0.0;
        for (int a = 0; a < 16; ++a) total += sums[a];
        *reinterpret_cast<lanes *>(values.data) = factor + 0.0 * total;
    """

    # `wp.array(...)` makes a type when it runs, which a type checker cannot know
    @native_kernel("benchmark_multiply_adds", text)
    def kernel(row: wp.int32, n: wp.int32, values: wp.array(dtype=wp.float64)):  # type: ignore[valid-type]
        """Independent chains, as many as the latency of a multiply-add needs."""

    values, n = torch.full((LANES,), 0.5, dtype=torch.float64), 20000
    return 16 * LANES * n / (1e-3 * least({"": lambda: launch(kernel, 1, [n], [values])}, 20, clock)[""])


# -- beside 0.5.0 ---------------------------------------------------------------------------------------------

SIGMA = 0.5
EV = 14.399645478425668  # e²/(4 π ε_0 angstrom) in eV, in which 0.5.0 has its energies
PEER_SIZES = (64, 512)
PEER_ACCURACIES = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)


class Server:
    """Energies of Gaussian multipoles and their gradients, as each library computes them."""

    def ask(self, what: str, method: str, n_atoms: int, l_max: int, accuracy: float) -> Any:
        """Of a call: the seconds of processor time, or energy and forces."""
        call = self.call(method, n_atoms, l_max, accuracy)
        if what == "values":
            energy, by_positions, *_ = call()
            return energy.item(), by_positions.tolist()
        return processor_seconds(call, 5)

    @functools.cache  # noqa: B019  (there is one server)
    def call(self, method: str, n_atoms: int, l_max: int, accuracy: float) -> Callable[[], Any]:
        import nvalchemiops

        positions, cell, values = system(n_atoms)
        if nvalchemiops.__version__ != "0.5.0":
            sources = dict(list(values.items())[: l_max + 1])
            gaussians = {**sources, "widths": SIGMA}
            order = list(SPLINE_ORDERS.values())[l_max]
            function, _ = chosen(method, positions, cell, gaussians, accuracy, order)

            def ours() -> Any:
                x, leaves = (
                    positions.clone().requires_grad_(),
                    {n: t.clone().requires_grad_() for n, t in sources.items()},
                )
                energy = function(x, **leaves, widths=SIGMA).sum()
                return (EV * energy.detach(), *torch.autograd.grad(energy, (x, *leaves.values())))

            return ours
        from nvalchemiops.torch.interactions import electrostatics

        packed = electrostatics.pack_multipole_moments(*list(values.values())[: l_max + 1])
        kind = "ewald" if method == "ewald" else "pme"
        estimate = getattr(electrostatics, f"estimate_multipole_{kind}_parameters")
        found = estimate(positions, cell, SIGMA, accuracy=accuracy)
        options: dict[str, Any] = {"sigma": SIGMA, "alpha": float(found.alpha)}
        if method == "ewald":
            options["k_cutoff"] = float(found.reciprocal_space_cutoff)
            function = electrostatics.multipole_ewald_summation
        else:
            options["mesh_dimensions"] = tuple(int(n) for n in found.mesh_dimensions)
            function = electrostatics.multipole_particle_mesh_ewald
        pbc = torch.ones(3, dtype=torch.bool)
        cutoff = float(found.real_space_cutoff)
        pairs, pointers, shifts = neighbor_list(positions, cutoff, cell, pbc, return_neighbor_list=True)
        listed = (pairs[1].contiguous(), pointers, shifts)

        def call() -> Any:
            x, m = positions.clone().requires_grad_(), packed.clone().requires_grad_()
            energy = function(x, m, cell, *listed, **options).sum()
            by_positions, by_moments = torch.autograd.grad(energy, (x, m))
            return energy.detach(), by_positions / EV, by_moments

        return call


def beside(
    peer: Peer, methods: tuple[str, ...], orders: tuple[int, ...], sizes: tuple[int, ...], rounds: int
) -> list[dict[str, Any]]:
    """Times faster than 0.5.0, at equal measured error."""
    sides: dict[str, Any] = {"ours": Server(), "0.5.0": peer}
    rows = []
    for n_atoms in sizes:
        for l_max in orders:
            name = ("charges", "dipoles", "quadrupoles")[l_max]
            exact, by_positions = sides["ours"].ask("values", "ewald", n_atoms, l_max, 1e-12)
            reference = torch.tensor(by_positions, dtype=torch.float64)
            for method in methods:
                chosen: dict[str, tuple[float, float, float]] = {}
                for side, server in sides.items():
                    for accuracy in PEER_ACCURACIES:
                        energy, by_positions = server.ask("values", method, n_atoms, l_max, accuracy)
                        found = torch.tensor(by_positions, dtype=torch.float64)
                        error = float((found - reference).norm() / reference.norm())
                        chosen[side] = accuracy, error, abs(energy / exact - 1.0)
                        if error <= ERROR:
                            break
                timed = {
                    side: functools.partial(server.ask, "time", method, n_atoms, l_max, chosen[side][0])
                    for side, server in sides.items()
                }
                best = {side: 1e3 * seconds for side, seconds in in_turns(timed, rounds, min).items()}
                ratio = best["0.5.0"] / best["ours"]
                notes = ", ".join(
                    f"{side} {best[side]:.2f} ms, errors {of_forces:.0e}, {of_energy:.0e}"
                    for side, (_, of_forces, of_energy) in chosen.items()
                )
                print(f"{n_atoms:6d} {method:6s} {name:12s} {ratio:5.1f} times (asked 10)   {notes}", flush=True)
                rows.append(
                    {"atoms": n_atoms, "what": f"{method} of 0.5.0, {name}", "ms": best["ours"], "ratio": ratio}
                )
    return rows


def main() -> None:
    parser = parser_for(__doc__, "512 atoms only")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--processor", action="store_true", help="processor time in the place of wall time")
    parser.add_argument("--only", choices=("moments", "latent", "peer"))
    parser.add_argument("--peer-methods", nargs="+", choices=("ewald", "pme"), default=("ewald", "pme"))
    parser.add_argument("--peer-orders", nargs="+", type=int, choices=(0, 1, 2), default=(1, 2))
    options = parser.parse_args()
    peer = Peer(options.peer, __file__, "cpu") if options.peer and options.only in (None, "peer") else None
    start(options.threads, "cpu", f"plain torch, {described(peer)}")
    clock = time.process_time if options.processor else time.perf_counter
    sizes = (512,) if options.quick else (512, 4096)
    rows = []
    if options.only in (None, "moments"):
        rows += moments(sizes, options.repeats, clock)
    if options.only in (None, "latent"):
        rows += latent(sizes, options.repeats, clock)
    if peer:
        peer_sizes = PEER_SIZES[:1] if options.quick else PEER_SIZES
        rows += beside(peer, tuple(options.peer_methods), tuple(options.peer_orders), peer_sizes, 3)
    write_csv(options.csv, ("atoms", "what", "ms", "ratio", "floor"), rows)


if __name__ == "__main__":
    benchmark(main, lambda _: Server(), 1)
