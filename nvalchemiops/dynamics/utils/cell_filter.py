"""Forces on cells, under the path that clients import."""

from nvalchemiops.compat.paths import forwarded

__all__ = ["align_cell", "stress_to_cell_force"]
__getattr__ = forwarded(__name__, "nvalchemiops.torch.clients.dynamics", __all__)
