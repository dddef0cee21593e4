"""L-BFGS on tensors, under the path that clients import."""

from nvalchemiops.torch.clients.lbfgs import (
    LBFGSCellState,
    LBFGSState,
    lbfgs_prepare_cell_state,
    lbfgs_prepare_state,
    lbfgs_step_coord,
    lbfgs_step_coord_cell,
)

__all__ = [
    "LBFGSCellState",
    "LBFGSState",
    "lbfgs_prepare_cell_state",
    "lbfgs_prepare_state",
    "lbfgs_step_coord",
    "lbfgs_step_coord_cell",
]
