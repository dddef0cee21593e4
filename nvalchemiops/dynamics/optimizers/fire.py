"""Steps of FIRE on Warp arrays, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded
from nvalchemiops.dynamics.optimizers import __all__ as __all__

__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.optimizers", __all__)
