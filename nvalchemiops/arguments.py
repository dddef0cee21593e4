"""Checks of numbers in arguments, without torch. Each message names the argument."""

import difflib
import math
import operator
import unicodedata
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np


class ValuesError(ValueError):
    """Values of tensors that are invalid or do not fit together, while types and shapes are right.

    Where values cannot be read, as in compiled graphs, results are NaN instead of this error.
    """


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name."""
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(sorted(known))}"


def plain(name: str) -> str:
    """The letters and digits of a name in lower case, by which names are compared: r²SCAN is r2scan, ωB97X is wb97x."""
    if not name.isascii():  # torch.compile cannot trace what follows
        name = unicodedata.normalize("NFKC", name).lower().replace("ω", "w").replace("τ", "tau")
    return "".join([letter for letter in name.lower() if letter.isalnum()])


def as_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """The one of these names that is meant, whatever its case, spaces and punctuation; raises if none is."""
    if isinstance(value, str):
        if value in choices:
            return value
        for choice in choices:
            if plain(choice) == plain(value):
                return choice
    raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}")


def as_float(name: str, value: Any) -> float:
    """The value as a float, infinite if it is too large for one; raises for anything but a number, and for bools."""
    refused = isinstance(value, (bool, str, bytes, bytearray))
    if not isinstance(value, (int, float)):  # a compiler cannot look up attributes of Python numbers
        refused = refused or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    try:
        return float("text" if refused else value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}") from None


def check_positive(name: str, value: Any) -> float:
    """The value as a float; raises unless it is finite and positive."""
    number = as_float(name, value)
    if not 0.0 < number < math.inf:
        raise ValueError(f"`{name}` must be positive and finite, got {number}")
    return number


def check_not_negative(name: str, value: Any) -> float:
    """The value as a float; raises unless it is finite and non-negative."""
    number = as_float(name, value)
    if not 0.0 <= number < math.inf:
        raise ValueError(f"`{name}` must be finite and non-negative, got {number}")
    return number


def as_bools(value: Any) -> Any:
    """The value with bools for integers that are 0 or 1, as ASE takes them; anything else, and tensors, as they are."""
    if isinstance(value, (list, tuple)):
        return [as_bools(one) for one in value]
    if type(value) is int and value in (0, 1):
        return (False, True)[value]  # not `bool`: in compiled code that of an input is no constant
    if isinstance(value, (np.ndarray, np.integer)) and value.dtype.kind in "iu" and np.all((value == 0) | (value == 1)):
        return value.astype(np.bool_)
    return value


def as_int(name: str, value: Any, bits: int = 32) -> int:
    """The value as an int; raises unless it is an integer that fits into so many bits."""
    try:
        if type(value) is int:  # also the symbol of a compiler, which `operator.index` would turn into a constant
            number = value
        else:
            whole: Any = "text" if isinstance(value, (bool, np.bool_)) else value
            number = operator.index(whole)
    except TypeError:
        raise TypeError(f"`{name}` must be an int, got {type(value).__name__}") from None
    if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
        # only short numbers are printed: Python refuses to print an int of thousands of digits
        shown = number if number.bit_length() <= 64 else f"a number of {number.bit_length()} bits"
        raise ValueError(f"`{name}` must fit into {bits} bits, got {shown}")
    return number
