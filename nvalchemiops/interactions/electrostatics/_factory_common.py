"""Derivatives that kernels compute, under the path that clients import."""

from nvalchemiops.kernels.launched import _DerivState as _DerivState
