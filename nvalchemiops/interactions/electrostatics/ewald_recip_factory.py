"""Kernels of reciprocal Ewald sums, under the path that clients import."""

from nvalchemiops.kernels.launched import alloc_ewald_recip_sentinels, get_ewald_recip_kernel

__all__ = ["alloc_ewald_recip_sentinels", "get_ewald_recip_kernel"]
