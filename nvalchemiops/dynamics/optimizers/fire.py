"""Steps of FIRE on Warp arrays, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded

__all__ = ["fire_step", "fire_update"]
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.dynamics", __all__)
