"""Checks of numbers that callers give, without torch: each message names the argument."""

import math
import operator
from typing import Any

import numpy as np


class ValuesError(ValueError):
    """Values of tensors that cannot be used, or do not fit together; nothing else of an argument is wrong.

    Where they cannot be read, as in compiled graphs, results are NaN in place of this error.
    """


def as_float(name: str, value: Any) -> float:
    """The value as a float, infinite if none is that large; raise unless it is a number. Strings and bools are not."""
    refused = isinstance(value, (bool, str, bytes, bytearray))
    if not isinstance(value, (int, float)):  # whose attributes a compiler does not know
        refused = refused or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        return float("text" if refused else value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}") from None


def check_positive(name: str, value: Any) -> float:
    """The value as a float; raise unless it is a finite number above zero."""
    number = as_float(name, value)
    if not 0.0 < number < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, got {number}")
    return number


def check_not_negative(name: str, value: Any) -> float:
    """The value as a float; raise unless it is a finite number, zero or above."""
    number = as_float(name, value)
    if not 0.0 <= number < math.inf:
        raise ValueError(f"`{name}` must be finite and not negative, got {number}")
    return number


def as_int(name: str, value: Any) -> int:
    """The value as an int; raise unless it is a whole number that fits into 32 bits."""
    try:
        if type(value) is int:  # also the symbol of a compiler, of which `operator.index` would make a constant
            number = value
        else:
            whole: Any = "text" if isinstance(value, (bool, np.bool_)) else value
            number = operator.index(whole)
    except TypeError:
        raise TypeError(f"`{name}` must be an int, got {type(value).__name__}") from None
    if not -(2**31) <= number < 2**31:
        # written out only if short: Python refuses to write an int of thousands of digits
        shown = number if number.bit_length() <= 64 else f"a number of {number.bit_length()} bits"
        raise ValueError(f"`{name}` must fit into 32 bits, got {shown}")
    return number
