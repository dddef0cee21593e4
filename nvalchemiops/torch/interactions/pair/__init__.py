"""Pair potentials for torch tensors, each written as one line of mathematics and differentiable to any order."""

from nvalchemiops.torch.interactions.pair.library import (
    born_mayer_huggins,
    buckingham,
    coulomb,
    damped_shifted_force,
    ewald_real_space,
    lennard_jones,
    morse,
    reaction_field,
    soft_core_lennard_jones,
    wolf,
    yukawa,
    ziegler_biersack_littmark,
)
from nvalchemiops.torch.interactions.pair.potential import PairPotential

__all__ = [
    "PairPotential",
    "born_mayer_huggins",
    "buckingham",
    "coulomb",
    "damped_shifted_force",
    "ewald_real_space",
    "lennard_jones",
    "morse",
    "reaction_field",
    "soft_core_lennard_jones",
    "wolf",
    "yukawa",
    "ziegler_biersack_littmark",
]
