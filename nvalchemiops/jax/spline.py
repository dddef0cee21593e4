"""B-splines on meshes for JAX arrays; see `nvalchemiops.torch.spline`."""

from typing import Any

from nvalchemiops.jax.operators import eager, operator
from nvalchemiops.torch import spline

bspline_weight: Any = operator(spline.bspline_weight)
spline_spread: Any = operator(spline.spline_spread)
spline_gather: Any = operator(spline.spline_gather)
spline_gather_vec3: Any = operator(spline.spline_gather_vec3)
spline_gather_gradient: Any = operator(spline.spline_gather_gradient)
spline_gather_with_force: Any = operator(spline.spline_gather_with_force)
spline_spread_channels: Any = operator(spline.spline_spread_channels)
spline_gather_channels: Any = operator(spline.spline_gather_channels)
compute_bspline_deconvolution: Any = eager(spline.compute_bspline_deconvolution)
compute_bspline_deconvolution_1d: Any = eager(spline.compute_bspline_deconvolution_1d)

__all__ = list(spline.__all__)  # the same names
