"""Neighbor lists by any method, under the path of an older release."""

from nvalchemiops.compat.deprecation import moved

__all__ = ["neighbor_list"]
__getattr__ = moved(__name__, {"neighbor_list": "nvalchemiops.torch.neighbors"})
