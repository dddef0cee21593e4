"""Molecular dynamics and relaxation of batches of systems (docs/dynamics.md, docs/relaxation.md)."""

from nvalchemiops.torch.dynamics.chart import CellFilter, Chart
from nvalchemiops.torch.dynamics.constraints import Constraints
from nvalchemiops.torch.dynamics.ensembles import csvr, langevin, nose_hoover, nph, npt, nve, stochastic_cell
from nvalchemiops.torch.dynamics.failures import ConvergenceWarning
from nvalchemiops.torch.dynamics.integrators import FORCES, Integrator
from nvalchemiops.torch.dynamics.model import Evaluation, FromEnergies, Model, SumOfTerms
from nvalchemiops.torch.dynamics.optimizers import FIRE, FIRE2, LBFGS, Move, Optimizer, Rows
from nvalchemiops.torch.dynamics.relaxation import Relaxation, RelaxationProgress, relax
from nvalchemiops.torch.dynamics.relaxation_state import RelaxationState
from nvalchemiops.torch.dynamics.restart import load_state, save_state
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
    "FIRE",
    "FIRE2",
    "FORCES",
    "LBFGS",
    "CellFilter",
    "Chart",
    "Constraints",
    "ConvergenceWarning",
    "Evaluation",
    "FromEnergies",
    "Integrator",
    "Model",
    "Move",
    "Optimizer",
    "Relaxation",
    "RelaxationProgress",
    "RelaxationState",
    "Rows",
    "Simulation",
    "State",
    "SumOfTerms",
    "csvr",
    "degrees_of_freedom",
    "kinetic_energy",
    "kinetic_tensor",
    "langevin",
    "load_state",
    "maxwell_boltzmann",
    "nose_hoover",
    "nph",
    "npt",
    "nve",
    "relax",
    "remove_momentum",
    "remove_rotation",
    "save_state",
    "simulate",
    "stochastic_cell",
    "temperature",
    "to_ase",
]
