"""B-splines on meshes for JAX arrays; see `nvalchemiops.torch.spline`."""

from typing import Any

from nvalchemiops.jax.operators import Operator, eager
from nvalchemiops.torch import spline

bspline_weight: Any = Operator(spline.bspline_weight)
spline_spread: Any = Operator(spline.spline_spread)
spline_gather: Any = Operator(spline.spline_gather)
spline_gather_vec3: Any = Operator(spline.spline_gather_vec3)
spline_gather_gradient: Any = Operator(spline.spline_gather_gradient)
spline_gather_with_force: Any = Operator(spline.spline_gather_with_force)
spline_spread_channels: Any = Operator(spline.spline_spread_channels)
spline_gather_channels: Any = Operator(spline.spline_gather_channels)
compute_bspline_deconvolution: Any = eager(spline.compute_bspline_deconvolution)
compute_bspline_deconvolution_1d: Any = eager(spline.compute_bspline_deconvolution_1d)

__all__ = list(spline.__all__)  # the same names
