"""Derivatives that kernels compute, under the path that clients import."""

from nvalchemiops.compat.launched_kernels import _DerivState as _DerivState
