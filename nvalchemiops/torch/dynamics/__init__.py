"""Molecular dynamics of batches of systems: models, states, flows and integrators (docs/dynamics.md)."""

from nvalchemiops.torch.dynamics.constraints import Constraints
from nvalchemiops.torch.dynamics.integrators import (
    FORCES,
    Integrator,
    csvr,
    langevin,
    nose_hoover,
    nph,
    npt,
    nve,
    stochastic_cell,
)
from nvalchemiops.torch.dynamics.model import Evaluation, FromEnergies, Model, SumOfTerms
from nvalchemiops.torch.dynamics.simulate import Simulation, simulate, to_ase
from nvalchemiops.torch.dynamics.state import State
from nvalchemiops.torch.dynamics.velocities import (
    degrees_of_freedom,
    kinetic_energy,
    kinetic_tensor,
    maxwell_boltzmann,
    remove_momentum,
    remove_rotation,
    temperature,
)

__all__ = [
    "FORCES",
    "Constraints",
    "Evaluation",
    "FromEnergies",
    "Integrator",
    "Model",
    "Simulation",
    "State",
    "SumOfTerms",
    "csvr",
    "degrees_of_freedom",
    "kinetic_energy",
    "kinetic_tensor",
    "langevin",
    "maxwell_boltzmann",
    "nose_hoover",
    "nph",
    "npt",
    "nve",
    "remove_momentum",
    "remove_rotation",
    "simulate",
    "stochastic_cell",
    "temperature",
    "to_ase",
]
