"""Neighbor lists by any method, under the path of an older release."""

from nvalchemiops.compat.deprecation import moved

_HOMES = {"neighbor_list": "nvalchemiops.torch.neighbors"}

__all__ = list(_HOMES)
__getattr__ = moved(__name__, _HOMES)
