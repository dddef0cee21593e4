"""Charge equilibration: charges that minimise an energy, with exact gradients through the minimum.

Rappé and Goddard (J. Phys. Chem. 95, 3358 (1991), doi:10.1021/j100161a070) let charges flow until the energy

    E(q) = sum_i chi_i q_i + 1/2 sum_i J_i q_i^2 + E_Coulomb(q)

is lowest, with the total charge fixed. Here charges are Gaussians of width w_i, as in S. A. Ghasemi et al., Phys. Rev.
B 92, 045131 (2015), doi:10.1103/PhysRevB.92.045131. Their Coulomb energy is that of points, by particle-mesh Ewald, and
a pair potential for what the smearing changes, and q_i^2 / (2 sqrt(pi) w_i) of each Gaussian with itself. Together this
is the energy of a field, and never negative. So with J_i > 0 the sum is convex and has one minimum, wherever the atoms
are.

*The minimum.* The gradient of E is linear in q, chi + A q, so conjugate gradients find the minimum with products A q
alone. These are charge gradients from the library, at a cost of N log N; A itself is never built. Everything is
projected on charges that sum to zero in each crystal.

*Gradients through it* are implicit. When positions, cell, chi or J change, the projected gradient has to stay zero,
hence A dq = -d(chi + A q) at fixed q. So the backward of a loss solves A w = dloss/dq by the same conjugate gradients,
and goes on with -w through chi + A q at fixed q, which the library differentiates. The energy needs none of this,
because it does not change with q to first order, but losses on charges do, and losses on forces.

What to look at: agreement with a dense solver, twelve derivatives against finite differences, and the parameters that
training finds from charges of three crystals of SiO2. Parameters are made up, and the training data follow from them.
Units: eV, angstrom, e. Takes a quarter of a minute; nothing is downloaded.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from ase import Atoms
from ase.spacegroup import crystal
from torch import Tensor
from tqdm import tqdm

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from nvalchemiops.torch.interactions.electrostatics import EwaldSummation, ParticleMeshEwald
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors import neighbor_list

SPECIES = {"Si": 0, "O": 1}
WIDTH = torch.tensor([1.11, 0.66], dtype=torch.float64)  # angstrom, of Si and O: covalent radii
REACH = 10.0  # angstrom, where smeared charges are as good as points
SMEARING = PairPotential(
    "-q1*q2*erfc(r/sqrt(2*(width1^2 + width2^2)))/r", per_atom=("q", "width"), cutoff=REACH, r_switch=REACH - 1.5
)

# spacegroup, cell (angstrom, degrees), and where Si and O are; from diffraction, rounded
STRUCTURES = {
    "quartz": (154, (4.916, 4.916, 5.405, 90, 90, 120), [(0.4697, 0, 2 / 3), (0.4135, 0.2669, 0.7858)]),
    "cristobalite": (92, (4.971, 4.971, 6.928, 90, 90, 90), [(0.3003, 0.3003, 0), (0.2392, 0.1044, 0.1787)]),
    "stishovite": (136, (4.180, 4.180, 2.667, 90, 90, 90), [(0, 0, 0), (0.3062, 0.3062, 0)]),
}


class Parameters(NamedTuple):
    """Electronegativity and hardness of Si and O."""

    chi: Tensor  # (2,), eV/e
    J: Tensor  # (2,), eV/e^2, positive


TRUE = Parameters(torch.tensor([4.2, 8.7], dtype=torch.float64), torch.tensor([2.0, 4.0], dtype=torch.float64))


# -- structures -----------------------------------------------------------------------------------


class Crystals(NamedTuple):
    """Several crystals as one set of atoms, and what stays the same while positions, cell and parameters vary."""

    positions: Tensor  # (n_atoms, 3)
    cell: Tensor  # (n_systems, 3, 3)
    species: Tensor  # (n_atoms,)
    batch_idx: Tensor  # (n_atoms,)
    near: dict[str, Tensor]  # neighbors
    ewald: Callable[..., Any]  # the sum for point charges, by either method

    @classmethod
    def of(cls, structures: list[Atoms], method: Any = ParticleMeshEwald, **options: Any) -> "Crystals":
        positions = torch.tensor(np.concatenate([a.positions for a in structures]))
        cell = torch.tensor(np.stack([a.cell.array for a in structures]))
        species = torch.tensor([SPECIES[s] for a in structures for s in a.symbols])
        sizes = torch.tensor([len(a) for a in structures])
        batch_idx = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), sizes)
        pairs, ptr, shifts = neighbor_list(positions, REACH, cell, batch_idx=batch_idx, return_neighbor_list=True)
        near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts, "batch_idx": batch_idx}
        return cls(positions, cell, species, batch_idx, near, method.estimate(positions, cell, batch_idx, **options))

    def neutral(self, charges: Tensor) -> Tensor:
        """The projection: take the mean charge off each crystal."""
        system = self.batch_idx.long()
        totals = charges.new_zeros(len(self.cell)).index_add(0, system, charges)
        return charges - (totals / torch.bincount(system))[system]


def silica(repeats: int, rng: np.random.Generator) -> list[Atoms]:
    """The three crystals, with atoms displaced by 0.1 angstrom."""
    structures = []
    for group, cell, basis in STRUCTURES.values():
        atoms = crystal(list(SPECIES), basis, spacegroup=group, cellpar=cell).repeat(repeats)
        atoms.positions += rng.normal(scale=0.1, size=atoms.positions.shape)
        structures.append(atoms)
    return structures


# -- the energy -----------------------------------------------------------------------------------


def self_repulsion(crystals: Crystals, parameters: Parameters) -> Tensor:
    """J_i and the Coulomb energy of a Gaussian with itself: the factor of q_i^2 / 2."""
    return (parameters.J + COULOMB_EV_ANGSTROM / (math.sqrt(math.pi) * WIDTH))[crystals.species]


def hardness_times(crystals: Crystals, parameters: Parameters, charges: Tensor) -> Tensor:
    """A q: gradients of the quadratic part of the energy by the charges."""
    place, smeared = (crystals.positions, crystals.cell), {"q": charges, "width": WIDTH[crystals.species]}
    _, points = crystals.ewald(place[0], charges, place[1], **crystals.near, compute_charge_gradients=True)
    _, smearing = SMEARING(*place, **smeared, **crystals.near, compute_gradients=["q"])
    return COULOMB_EV_ANGSTROM * (points + smearing) + self_repulsion(crystals, parameters) * charges


def energy_and_forces(crystals: Crystals, parameters: Parameters, charges: Tensor) -> tuple[Tensor, Tensor]:
    """Energy of all crystals, and -dE/dR for charges that stay: at the minimum that is the whole force."""
    place, smeared = (crystals.positions, crystals.cell), {"q": charges, "width": WIDTH[crystals.species]}
    points, point_forces = crystals.ewald(place[0], charges, place[1], **crystals.near, compute_forces=True)
    smearing, smearing_forces = SMEARING(*place, **smeared, **crystals.near, compute_forces=True)
    atoms = parameters.chi[crystals.species] * charges + 0.5 * self_repulsion(crystals, parameters) * charges**2
    energy = (COULOMB_EV_ANGSTROM * (points + smearing) + atoms).sum()
    return energy, COULOMB_EV_ANGSTROM * (point_forces + smearing_forces)


# -- the minimum, and gradients through it --------------------------------------------------------


def conjugate_gradients(
    crystals: Crystals, product: Callable[[Tensor], Tensor], right: Tensor, tolerance: float = 1e-13
) -> tuple[Tensor, list[float]]:
    """Solve A w = right for neutral w, given products with A; w, and relative residuals on the way."""
    residual = crystals.neutral(right)
    w, direction, square = torch.zeros_like(right), residual, residual.square().sum()
    scale, residuals = right.norm(), []
    while square.sqrt() > tolerance * scale:
        if len(residuals) > len(right) + 100:
            raise RuntimeError(f"no solution after {len(residuals)} steps: A is not positive definite")
        along = crystals.neutral(product(direction))
        step = square / (direction * along).sum()
        w, residual = w + step * direction, residual - step * along
        previous, square = square, residual.square().sum()
        direction = residual + square / previous * direction
        residuals.append((square.sqrt() / scale).item())
    return w, residuals


class AtMinimum(torch.autograd.Function):
    """The charges at which the gradient of the energy is zero, as a function of that gradient at fixed charges.

    Where the gradient changes, the charges move by -A^-1 of that. A changes as well, but acts on a gradient of zero.
    This holds for one derivative, so a graph for a second is an error.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, charges: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.solve = solve
        return charges.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("no second derivatives (create_graph=True); forces need none, see `energy_and_forces`")
        return -ctx.solve(gradient), None, None


def equilibrium(crystals: Crystals, parameters: Parameters) -> tuple[Tensor, list[float]]:
    """Charges (n_atoms,), differentiable by positions, cell and parameters; and residuals on the way to them."""
    constant = crystals._replace(positions=crystals.positions.detach(), cell=crystals.cell.detach())
    constant_parameters = Parameters(*(p.detach() for p in parameters))

    def product(charges: Tensor) -> Tensor:
        with torch.no_grad():
            return hardness_times(constant, constant_parameters, charges)

    def solve(right: Tensor) -> Tensor:
        return conjugate_gradients(crystals, product, right)[0]

    chi = parameters.chi[crystals.species]
    charges, residuals = conjugate_gradients(crystals, product, -chi.detach())
    gradient = chi + hardness_times(crystals, parameters, charges)
    return AtMinimum.apply(gradient, charges, solve), residuals


# -- checks ---------------------------------------------------------------------------------------


def dense_solution(structure: Atoms, parameters: Parameters) -> tuple[Tensor, Tensor]:
    """Charges of one crystal by a dense matrix from k-vectors, and eigenvalues of A for neutral charges."""
    crystals = Crystals.of([structure], EwaldSummation, accuracy=1e-12)
    unit = torch.eye(len(structure), dtype=torch.float64)
    A = torch.stack([hardness_times(crystals, parameters, column) for column in unit])
    # one more row and column, for the total charge and its Lagrange multiplier
    bordered = torch.nn.functional.pad(A, (0, 1, 0, 1), value=1.0)
    bordered[-1, -1] = 0.0
    right = torch.nn.functional.pad(-parameters.chi[crystals.species], (0, 1))
    projection = unit - 1 / len(structure)
    return torch.linalg.solve(bordered, right)[:-1], torch.linalg.eigvalsh(projection @ A @ projection)[1:]


LOSSES: dict[str, Callable[..., Tensor]] = {
    "energy": lambda energy, forces, charges, weights: energy,
    "charges": lambda energy, forces, charges, weights: (weights[:, 0] * charges**2).sum(),
    "forces": lambda energy, forces, charges, weights: (weights * forces**2).sum(),
}


def gradient_error(crystals: Crystals, loss: str, by: str, rng: np.random.Generator, step: float = 1e-3) -> float:
    """A derivative of a loss by positions, cell, chi or J: relative difference from a finite difference."""
    start = {**crystals._asdict(), **TRUE._asdict()}[by]
    direction = torch.tensor(rng.normal(size=start.shape))
    weights = torch.tensor(rng.normal(size=crystals.positions.shape))

    def value(distance: Tensor) -> Tensor:
        moved = {by: start + distance * direction}
        there, parameters = (
            (crystals, TRUE._replace(**moved)) if by in TRUE._fields else (crystals._replace(**moved), TRUE)
        )
        charges, _ = equilibrium(there, parameters)
        return LOSSES[loss](*energy_and_forces(there, parameters, charges), charges, weights)

    zero = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (derivative,) = torch.autograd.grad(value(zero), zero)
    f = {n: value(n * step + 0.0 * zero).item() for n in (-2, -1, 1, 2)}
    finite = (8 * (f[1] - f[-1]) - (f[2] - f[-2])) / (12 * step)
    return abs(derivative.item() / finite - 1)


# -- training -------------------------------------------------------------------------------------


def train(crystals: Crystals, wanted: Tensor, evaluations: int) -> list[dict[str, float]]:
    """Find chi and J that give the charges asked for; what was tried on the way.

    Only differences of electronegativities matter when the total charge is fixed, so that of silicon is kept.
    Hardnesses are trained through their logarithms, which keeps them positive.
    """
    free = torch.tensor([1.5, math.log(5.0), math.log(1.5)], dtype=torch.float64, requires_grad=True)
    limits = {"max_iter": evaluations, "max_eval": evaluations, "tolerance_grad": 0.0, "tolerance_change": 0.0}
    optimizer = torch.optim.LBFGS([free], **limits, line_search_fn="strong_wolfe")
    tried = []

    def loss() -> Tensor:
        optimizer.zero_grad()
        parameters = Parameters(TRUE.chi[0] + torch.stack([0.0 * free[0], free[0]]), free[1:].exp())
        charges, _ = equilibrium(crystals, parameters)
        value = (charges - wanted).square().mean()
        value.backward()
        found = [free[0].item(), *parameters.J.tolist(), value.sqrt().item()]
        tried.append(dict(zip(("χ(O) - χ(Si)", "J(Si)", "J(O)", "charges"), found)))
        progress.update()
        return value

    with tqdm(total=evaluations, desc="training", unit="solution") as progress:
        optimizer.step(loss)
    return tried


# -- report ---------------------------------------------------------------------------------------


def draw(path: Path, residuals: list[float], tried: list[dict[str, float]], true: dict[str, float]) -> None:
    figure, (solver, training) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    solver.semilogy(range(1, len(residuals) + 1), residuals, "o-", ms=3, color="#1f6fb4")
    solver.set(xlabel="products with A", ylabel="relative residual", title="Conjugate gradients")
    for name, value in true.items():
        training.semilogy([abs(t[name] / value - 1) for t in tried], label=f"{name}, relative")
    training.semilogy([t["charges"] for t in tried], color="black", label="charges, RMS (e)")
    training.set(xlabel="solutions and their gradients", ylabel="error", title="Training to charges")
    training.legend(frameon=False)
    for axes in (solver, training):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("equilibration.png"), help="picture (equilibration.png)")
    options = parser.parse_args()
    quiet_warp()
    rng = np.random.default_rng(0)
    mesh = {"accuracy": 1e-8, "real_space_cutoff": REACH, "spline_order": 8}

    structures = silica(2, rng)
    large = Crystals.of(structures, **mesh)
    charges, residuals = equilibrium(large, TRUE)
    print(f"{len(charges)} atoms, {len(residuals)} products with A\ncharge (e)              Si                O")
    for system, name in enumerate(STRUCTURES):
        of = [charges[(large.batch_idx == system) & (large.species == species)] for species in (0, 1)]
        print(f"{name:14s}" + "".join(f"{q.mean():9.4f} ± {q.std():6.4f}" for q in of))
    dense, eigenvalues = dense_solution(structures[0], TRUE)
    print(f"difference from a dense solver  {(dense - charges[: len(dense)]).abs().max():.1e} e")
    print(f"eigenvalues of A                {eigenvalues[0]:.2f} to {eigenvalues[-1]:.2f} eV/e², J is 2 or 4 eV/e²")

    small = Crystals.of([*silica(1, rng), *silica(1, rng)], **mesh)
    kinds = ("positions", "cell", "chi", "J")
    print("\nrelative difference from finite differences\nloss on   " + "".join(f"{'by ' + by:>14s}" for by in kinds))
    for loss in LOSSES:
        print(f"{loss:10s}" + "".join(f"{gradient_error(small, loss, by, rng):14.1e}" for by in kinds))

    tried = train(small, equilibrium(small, TRUE)[0], 60)
    true = {"χ(O) - χ(Si)": 4.5, "J(Si)": 2.0, "J(O)": 4.0}
    print("\ntraining                     start         found          true")
    for name in tried[0]:
        print(f"{name:20s}{tried[0][name]:14.6f}{tried[-1][name]:14.6f}{true.get(name, 0.0):14.6f}")
    draw(options.output, residuals, tried, true)
    print(f"\npicture: {options.output}")


if __name__ == "__main__":
    main()
