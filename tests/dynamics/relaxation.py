"""Systems, models and comparisons that the tests of relaxation share."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk

from nvalchemiops.torch.dynamics import Evaluation, SumOfTerms
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.systems import System

LJ = {"sigma": 3.4, "epsilon": 0.3}
SMOOTH = {"cutoff": 6.0, "r_switch": 4.5}  # without a kink at the cutoff, so that minima are smooth
IN_PLANE = [1, 1, 0, 0, 0, 1]

unconverged = pytest.mark.filterwarnings("ignore::nvalchemiops.torch.dynamics.ConvergenceWarning")


def lennard_jones_model() -> SumOfTerms:
    # without a skin, the order of pairs depends on nothing but the present positions
    return SumOfTerms(partial(lennard_jones(**SMOOTH), **LJ), skin=0.0)


def crystal(seed: int, n_vacancies: int = 0, repeat: tuple[int, int, int] = (1, 1, 1)) -> Atoms:
    """Sheared and perturbed argon, with strong bonds."""
    rng = np.random.default_rng(seed)
    atoms = bulk("Ar", "fcc", 5.2, cubic=True) * repeat
    del atoms[list(range(n_vacancies))]
    atoms.set_cell(atoms.cell @ (np.eye(3) + 0.05 * rng.standard_normal((3, 3))), scale_atoms=True)
    atoms.positions += 0.15 * rng.standard_normal(atoms.positions.shape)
    return atoms


def batch_of_crystals() -> list[Atoms]:
    sizes = [(0, (1, 1, 1)), (3, (1, 1, 1)), (2, (2, 1, 1)), (1, (1, 2, 1)), (0, (4, 4, 5))]
    return [crystal(k, *size) for k, size in enumerate(sizes)]


def equal(a: Any, b: Any) -> bool:
    """Whether all tensors in two trees of tuples have the same bits."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a is b or torch.equal(a, b)


def springs(system: System) -> Evaluation:
    """Atoms of any system at springs of different strength, by operations that treat each atom alone."""
    strength = system.numbers.to(system.positions.dtype)
    energies = torch.zeros(1 if system.batch_idx is None else int(system.batch_idx.max()) + 1, dtype=torch.float64)
    squares = system.positions.square().sum(1) * strength * 0.5
    places = torch.zeros(len(squares), dtype=torch.int64) if system.batch_idx is None else system.batch_idx
    return Evaluation(energies.index_add(0, places, squares), -strength[:, None] * system.positions)
