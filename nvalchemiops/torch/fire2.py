"""FIRE 2.0 on tensors, under the path that clients import."""

from nvalchemiops.torch.clients.optimizers import fire2_step_coord, fire2_step_coord_cell

__all__ = ["fire2_step_coord", "fire2_step_coord_cell"]
