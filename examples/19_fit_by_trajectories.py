"""A parameter fitted to how far atoms move: gradients through trajectories.

The depth of a Lennard-Jones potential is to be found from mean squared displacements, which no energy or force is given
for. Crystals of argon start from their lattice sites with random velocities, and move for 1.2 ps by velocity Verlet.
`simulate` keeps the graph of these steps, so the derivative of the curve's error by the depth comes from one backward
pass, and torch's L-BFGS fits the depth. States are kept after every tenth step alone; the steps between them are
computed again in the backward pass.

The data are made with a known depth, from other random velocities. What to look at: the derivative agrees with a finite
difference, and the depth is found within its error, which is that of averages over a few crystals. Takes half a minute;
nothing is downloaded.
"""

import argparse
from functools import partial
from pathlib import Path

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
from nvalchemiops.torch.dynamics import State, SumOfTerms, maxwell_boltzmann, nve, remove_momentum, simulate
from nvalchemiops.torch.interactions.pair import PairPotential

TRUE, START = 10.4, 6.0  # depths in meV
SIGMA = 3.4  # angstrom
STEP = 20.0  # fs
LENNARD_JONES = PairPotential(
    "4e-3*depth*((sigma/r)^12 - (sigma/r)^6)", global_parameters=("sigma", "depth"), cutoff=6.5, r_switch=5.5
)


class Displacements:
    """Mean squared displacements (n_records, copies) of a set of crystals, as a function of the depth."""

    def __init__(self, copies: int, steps: int, seed: int) -> None:
        crystal = bulk("Ar", "fcc", a=5.3, cubic=True).repeat((3, 3, 2))
        self.steps, self.size, self.system = steps, len(crystal), System.from_ase([crystal] * copies)
        masses = torch.tensor(crystal.get_masses()).repeat(copies)
        velocities = maxwell_boltzmann(
            masses, 2.0 * 40.0 * KELVIN, self.system.batch_idx, copies, seed=seed
        )  # half of the energy becomes potential
        self.velocities = remove_momentum(velocities, masses, self.system.batch_idx, copies)
        # every set with the same kinetic energy: one source of noise less
        kinetic = 0.5 * (masses[:, None] * self.velocities.square()).sum() / len(masses)
        self.velocities *= (1.5 * 2.0 * 40.0 * KELVIN / kinetic).sqrt()

    def __call__(self, depth: Tensor, checkpoint_every: int | None = None) -> Tensor:
        model = SumOfTerms(partial(LENNARD_JONES, sigma=SIGMA, depth=depth), skin=1.0)

        def displacement(state: State) -> Tensor:
            squares = (state.system.positions - self.system.positions).square().sum(1, keepdim=True)
            return state.of_systems(squares).squeeze(1) / self.size

        run = simulate(
            self.system,
            model,
            nve(STEP * FEMTOSECOND),
            self.steps,
            velocities=self.velocities,
            record={"displacement": displacement},
            checkpoint_every=checkpoint_every,
        )
        return run.records["displacement"]


def fit(simulated: Displacements, data: Tensor, start: float) -> tuple[float, list[tuple[float, float]]]:
    """The depth that fits best, and (depth, loss) of each evaluation."""
    scale, data = data.mean(), data.mean(1)
    depth = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([depth], lr=1.0, max_iter=8, line_search_fn="strong_wolfe")
    history: list[tuple[float, float]] = []
    with tqdm(desc="fitting", unit="trajectory") as bar:

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = 1e3 * ((simulated(depth, checkpoint_every=10).mean(1) - data) / scale).square().mean()
            loss.backward()
            history.append((depth.item(), loss.item()))
            bar.update()
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]  # torch has no types there
    return depth.item(), history


def error_of(found: float, simulated: Displacements, data: Tensor) -> float:
    """Standard error of the depth, from the differences between crystals, of which each is a measurement."""
    with torch.no_grad():
        low, here, high = (simulated(torch.tensor(found * f, dtype=torch.float64)) for f in (0.99, 1.0, 1.01))
    slope = (high - low).mean(1) / (0.02 * found)
    shifts = [(slope[:, None] * curves).sum(0) / slope.square().sum() for curves in (here, data)]
    return float(sum(shift.var() / len(shift) for shift in shifts)) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("fit_by_trajectories.png"), help="picture")
    parser.add_argument("--quick", action="store_true", help="fewer crystals and steps, for tests")
    options = parser.parse_args()
    quiet_warp()

    copies, steps = (4, 40) if options.quick else (12, 60)
    data = Displacements(copies, steps, seed=100)(torch.tensor(TRUE, dtype=torch.float64))
    simulated = Displacements(copies, steps, seed=0)

    depth = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(simulated(depth, checkpoint_every=10)[-1].mean(), depth)
    with torch.no_grad():
        high, low = (
            simulated(torch.tensor(START + sign * 1e-3, dtype=torch.float64))[-1].mean() for sign in (1.0, -1.0)
        )
    print(f"atoms and steps                    {len(simulated.velocities):8d}{steps:8d}")
    print(f"d(displacement)/d(depth), Å²/meV   {slope.item():14.8f}")
    print(f"by a finite difference             {((high - low) / 2e-3).item():14.8f}\n")

    found, history = fit(simulated, data, START)
    print("trajectory   depth (meV)         loss")
    for number, (value, loss) in enumerate(history):
        print(f"{number:10d}{value:14.4f}{loss:13.6f}")
    error = error_of(found, simulated, data)
    print(f"\ndepth: start, found, error, true   {START:8.3f}{found:8.3f}{error:8.3f}{TRUE:8.3f}")

    with torch.no_grad():
        curves = [simulated(torch.tensor(value, dtype=torch.float64)).mean(1) for value in (START, found)]
    draw(options.output, data.mean(1), curves, history)
    print(f"\npicture: {options.output}")


def draw(path: Path, data: Tensor, curves: list[Tensor], history: list[tuple[float, float]]) -> None:
    figure, (moved, steps) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    time = 1e-3 * STEP * torch.arange(len(data))
    moved.plot(time, data, "o", ms=3, color="black", label="data")
    for curve, label, color in zip(curves, ("start", "fitted"), ("#b0b0b0", "#1f6fb4")):
        moved.plot(time, curve, color=color, label=label)
    moved.set(xlabel="time (ps)", ylabel="mean squared displacement (Å²)", title="Crystals with velocities at time 0")
    moved.legend(frameon=False)
    steps.plot([depth for depth, _ in history], "o-", color="#1f6fb4")
    steps.axhline(TRUE, color="#c1440e", lw=1.0, label="depth of the data")
    steps.set(xlabel="trajectory", ylabel="depth (meV)", title="By derivatives through trajectories")
    steps.legend(frameon=False)
    for axes in (moved, steps):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
