"""Forces on cells, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded

_NAMES = ["align_cell", "stress_to_cell_force"]
__all__ = list(_NAMES)
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.dynamics", _NAMES)
