"""Steps of FIRE on Warp arrays, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded

_NAMES = ["fire_step", "fire_update"]
__all__ = list(_NAMES)
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.optimizers", _NAMES)
