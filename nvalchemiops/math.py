"""Functions for Warp kernels, under the path that clients import."""

import warp as wp

__all__ = ["wpdivmod"]


@wp.func
def wpdivmod(a: int, b: int):  # type: ignore[no-untyped-def] # Warp infers what it returns
    """Quotient, rounded down, and remainder, of the sign of b: Python's ``divmod``, where C rounds towards zero."""
    remainder = a % b
    if remainder != 0 and (remainder < 0) != (b < 0):
        remainder += b
    return (a - remainder) // b, remainder
