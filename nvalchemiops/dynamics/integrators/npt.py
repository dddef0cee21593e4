"""Steps at constant pressure, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded
from nvalchemiops.compat.vectors import vec9d, vec9f
from nvalchemiops.dynamics import integrators

_STEPS = [name for name in integrators.__all__ if name.startswith(("compute_", "nph_", "npt_"))]
__all__ = [*_STEPS, "vec9d", "vec9f"]
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.dynamics", _STEPS)
