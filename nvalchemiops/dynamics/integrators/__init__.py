"""Steps of integrators on Warp arrays, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded

_NAMES = [
    "compute_barostat_mass",
    "compute_kinetic_tensor",
    "compute_pressure_tensor",
    "compute_scalar_pressure",
    "langevin_baoab_finalize",
    "langevin_baoab_half_step",
    "nhc_compute_masses",
    "nhc_position_update",
    "nhc_thermostat_chain_update",
    "nhc_velocity_half_step",
    "nph_barostat_half_step",
    "nph_velocity_half_step",
    "npt_barostat_half_step",
    "npt_cell_update",
    "npt_position_update",
    "npt_thermostat_half_step",
    "npt_velocity_half_step",
    "velocity_rescale",
    "velocity_verlet_position_update",
    "velocity_verlet_velocity_finalize",
]
__all__ = list(_NAMES)
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.dynamics", _NAMES)
