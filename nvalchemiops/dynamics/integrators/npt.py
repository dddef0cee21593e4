"""Steps at constant pressure, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded
from nvalchemiops.compat.vectors import vec9d, vec9f

_STEPS = [
    "compute_barostat_mass",
    "compute_kinetic_tensor",
    "compute_pressure_tensor",
    "compute_scalar_pressure",
    "nph_barostat_half_step",
    "nph_velocity_half_step",
    "npt_barostat_half_step",
    "npt_cell_update",
    "npt_position_update",
    "npt_thermostat_half_step",
    "npt_velocity_half_step",
]
__all__ = [*_STEPS, "vec9d", "vec9f"]
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.dynamics", _STEPS)
