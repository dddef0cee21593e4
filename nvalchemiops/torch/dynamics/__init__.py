"""Molecular dynamics of batches of systems: models, states, flows and integrators."""

from nvalchemiops.torch.dynamics.model import Evaluation, FromEnergies, Model, SumOfTerms

__all__ = ["Evaluation", "FromEnergies", "Model", "SumOfTerms"]
