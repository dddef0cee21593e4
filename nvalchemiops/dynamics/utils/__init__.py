"""Cells, velocities and temperatures on Warp arrays, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded

_NAMES = [
    "align_cell",
    "compute_cell_inverse",
    "compute_kinetic_energy",
    "compute_temperature",
    "initialize_velocities",
    "remove_com_motion",
    "stress_to_cell_force",
    "wrap_positions_to_cell",
]
__all__ = list(_NAMES)
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.dynamics", _NAMES)
