"""Molecular dynamics and relaxation of batches of systems: models, states, flows, integrators and optimizers."""

from nvalchemiops.torch.dynamics.chart import CellFilter, Chart
from nvalchemiops.torch.dynamics.model import Evaluation, FromEnergies, Model, SumOfTerms
from nvalchemiops.torch.dynamics.optimizers import FIRE, FIRE2, LBFGS, Move, Optimizer, Rows
from nvalchemiops.torch.dynamics.relaxation import ConvergenceWarning, Relaxation, RelaxationProgress, relax

__all__ = [
    "FIRE",
    "FIRE2",
    "LBFGS",
    "CellFilter",
    "Chart",
    "ConvergenceWarning",
    "Evaluation",
    "FromEnergies",
    "Model",
    "Move",
    "Optimizer",
    "Relaxation",
    "RelaxationProgress",
    "Rows",
    "SumOfTerms",
    "relax",
]
