"""Constants of Ewald kernels, under the path that clients import."""

from nvalchemiops.kernels.launched import BATCH_BLOCK_SIZE, EIGHTPI

__all__ = ["BATCH_BLOCK_SIZE", "EIGHTPI"]
