"""Velocities and temperatures, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded

_NAMES = ["compute_kinetic_energy", "compute_temperature", "initialize_velocities", "remove_com_motion"]
__all__ = list(_NAMES)
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.dynamics", _NAMES)
