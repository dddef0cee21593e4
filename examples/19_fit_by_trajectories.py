"""A parameter fitted to the structure of a liquid: gradients through trajectories.

The diameter sigma of a Lennard-Jones potential is to be found from the radial distribution function g(r) of liquid
argon near its melting point, which is what diffraction measures; no energy or force is given. g(r) is a histogram, but
each pair of atoms is shared between two bins, so positions have a derivative.

A step of the fit goes on from the last state of the liquid. The liquid first follows the present sigma for 0.6 ps, by
Langevin dynamics without gradients, which gives the difference from the data. Then `simulate` keeps the graph of the
next 0.3 ps, and one backward pass gives the derivative of g(r), times this difference; states are kept after every
tenth step alone, and the steps between them are computed again. Difference and derivative come from different steps,
so that their noise is independent. The state at the start of the 0.3 ps counts as constant: the derivative is that of
what happens in this time, when neighbors move to their new distance, and not of slower changes of the liquid. That is
enough for torch's Adam.

The data are made with a known sigma, from another start. What to look at: the derivative agrees with a finite
difference, the sigma that is found is the true one within 0.02 angstrom, which is the noise of so few atoms, and the
two curves are one. Takes half a minute; nothing is downloaded.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from ase.build import bulk
from torch import Tensor
from tqdm import tqdm

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import FEMTOSECOND, KELVIN
from nvalchemiops.torch import System
from nvalchemiops.torch.dynamics import State, SumOfTerms, langevin, simulate
from nvalchemiops.torch.interactions.pair import PairPotential

TRUE, START = 3.40, 3.20  # angstrom
DEPTH = 0.0104  # eV
DENSITY = 0.0211  # atoms per cubic angstrom
TEMPERATURE = 90.0  # K
STEP, FRICTION = 10.0 * FEMTOSECOND, 2e-3 / FEMTOSECOND
WINDOW = 30  # steps that a derivative goes through
LENNARD_JONES = PairPotential(
    "4*depth*((sigma/r)^12 - (sigma/r)^6)", global_parameters=("sigma", "depth"), cutoff=8.0, r_switch=7.0
)
WIDTH, FIRST, LAST = 0.1, 2.5, 7.5  # bins, angstrom


class Liquid:
    """Argon atoms in a cube, whose state goes on from run to run."""

    def __init__(self, repeat: int, seed: int, melting: int) -> None:
        crystal = bulk("Ar", "fcc", a=(4.0 / DENSITY) ** (1 / 3), cubic=True).repeat(repeat)
        self.n, self.edge = len(crystal), float(crystal.cell[0, 0])
        self.pairs = torch.triu_indices(self.n, self.n, 1)
        self.centres = torch.arange(FIRST, LAST, WIDTH, dtype=torch.float64)
        system = System.from_ase(crystal)
        model, hot = self.model(TRUE), langevin(STEP, 3.0 * TEMPERATURE * KELVIN, friction=FRICTION)
        self.state = simulate(system, model, hot, melting, record=(), seed=seed).state
        self.follow(TRUE, melting)

    def model(self, sigma: Tensor | float) -> SumOfTerms:
        """The potential."""
        return SumOfTerms(partial(LENNARD_JONES, sigma=sigma, depth=DEPTH), skin=1.0, stress=False)

    def distribution(self, state: State) -> Tensor:
        """g(r) at the centres of bins."""
        first, second = self.pairs
        between = state.system.positions[first] - state.system.positions[second]
        distances = (between - self.edge * torch.round(between / self.edge)).norm(dim=1)
        near = distances[(distances > FIRST) & (distances < LAST - WIDTH)]
        place = (near - FIRST) / WIDTH
        below = place.detach().long()
        share = place - below  # of the upper one of two bins
        counts = torch.zeros_like(self.centres).index_add(0, below, 1.0 - share).index_add(0, below + 1, share)
        shells = 4.0 * torch.pi * WIDTH * (self.centres.square() + WIDTH**2 / 6.0)  # integrals of the shares
        return counts / (0.5 * self.n * DENSITY * shells)

    def run(self, sigma: Tensor | float, steps: int, **options: Any) -> tuple[State, Tensor]:
        """The state after these steps, and the mean of g(r) over their second half."""
        integrator = langevin(STEP, TEMPERATURE * KELVIN, friction=FRICTION)
        record = {"distribution": self.distribution}
        found = simulate(self.state, self.model(sigma), integrator, steps, record=record, every=5, **options)
        curves = found.records["distribution"]
        return found.state, curves[(len(curves) + 1) // 2 :].mean(0)

    def follow(self, sigma: float, steps: int) -> Tensor:
        """Go on with this sigma, without gradients."""
        self.state, curve = self.run(sigma, steps, gradients=False)
        return curve


def fit(liquid: Liquid, data: Tensor, iterations: int) -> list[tuple[float, float]]:
    """(sigma, mean squared difference from the data) of each step of the fit."""
    sigma = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([sigma], lr=0.03, betas=(0.7, 0.99))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, iterations // 2, gamma=0.25)
    history: list[tuple[float, float]] = []
    for _ in tqdm(range(iterations), desc="fitting", unit="step"):
        difference = liquid.follow(sigma.item(), 2 * WINDOW) - data
        optimizer.zero_grad()
        _, curve = liquid.run(sigma, WINDOW, checkpoint_every=10)
        (2.0 * difference * curve).mean().backward()
        history.append((sigma.item(), difference.square().mean().item()))
        optimizer.step()
        schedule.step()
    return history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("fit_by_trajectories.png"), help="picture")
    parser.add_argument("--quick", action="store_true", help="fewer atoms and steps, for tests")
    options = parser.parse_args()
    quiet_warp()

    repeat, melting, long, iterations = (3, 150, 1000, 16) if options.quick else (4, 400, 3000, 36)
    data = Liquid(repeat, 100, melting).follow(TRUE, long)
    liquid = Liquid(repeat, 0, melting)
    before = liquid.follow(START, long)

    sigma = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    error = (liquid.run(sigma, WINDOW, checkpoint_every=10)[1] - data).square().mean()
    (slope,) = torch.autograd.grad(error, sigma)
    with torch.no_grad():
        high, low = ((liquid.run(START + sign * 1e-5, WINDOW)[1] - data).square().mean().item() for sign in (1.0, -1.0))
    print(f"atoms, steps of the data           {liquid.n:8d}{long:8d}")
    print(f"d(error)/d(sigma), 1/Å             {slope.item():14.8f}")
    print(f"by a finite difference             {(high - low) / 2e-5:14.8f}\n")

    history = fit(liquid, data, iterations)
    print("step         sigma (Å)        error")
    for number in range(0, iterations, max(1, iterations // 20)):
        print(f"{number:4d}{history[number][0]:18.4f}{history[number][1]:13.6f}")
    last = [value for value, _ in history[-(iterations // 3) :]]
    found = sum(last) / len(last)
    print(f"\nsigma: start, found, true          {START:8.3f}{found:8.3f}{TRUE:8.3f}")
    after = liquid.follow(found, long)
    distances = [(curve - data).square().mean().sqrt().item() for curve in (before, after)]
    print(f"error of g(r): start, fitted       {distances[0]:8.3f}{distances[1]:8.3f}")
    draw(options.output, liquid.centres, data, (before, after), history)
    print(f"\npicture: {options.output}")


def draw(
    path: Path, centres: Tensor, data: Tensor, curves: tuple[Tensor, Tensor], history: list[tuple[float, float]]
) -> None:
    figure, (structure, steps) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    inner = slice(0, -2)  # the last bins miss a share
    structure.plot(centres[inner], data[inner], "o", ms=3, color="black", label="data")
    for curve, label, color in zip(curves, ("start", "fitted"), ("#b0b0b0", "#1f6fb4")):
        structure.plot(centres[inner], curve[inner], color=color, label=label)
    structure.set(xlabel="distance (Å)", ylabel="g(r)", title=f"Liquid argon at {TEMPERATURE:.0f} K")
    structure.legend(frameon=False)
    steps.plot([sigma for sigma, _ in history], color="#1f6fb4")
    steps.axhline(TRUE, color="#c1440e", lw=1.0, label="sigma of the data")
    steps.set(xlabel="step of the fit", ylabel="sigma (Å)", title="By derivatives through trajectories")
    steps.legend(frameon=False)
    for axes in (structure, steps):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
