"""Gradients with respect to charges, under the path that clients import."""

from nvalchemiops.torch.clients.electrostatics import _InjectChargeGrad as _InjectChargeGrad
