"""nvalchemiops for JAX: torch functions inside JAX, and the operators of `nvalchemiops.torch` through them."""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError('nvalchemiops.jax needs JAX: pip install "nvalchemiops[jax]"', name=error.name) from error
