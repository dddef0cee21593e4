"""Sizes of neighbor lists: an estimate before a search, and the error if memory is too small."""

import math

from nvalchemiops.arguments import as_int, check_not_negative, check_positive

ROW_MULTIPLE = 16
"""Rows are a multiple of this many slots, so that each begins at a 64-byte boundary of int32."""

HIGH_DENSITY = 0.2
"""A density in atoms per cubic angstrom above that of all but the densest solids; diamond has 0.18, water 0.1."""

LEAST_SPARE = 4
"""Least number of spare slots beyond the longest row of a matrix, unless `estimate_max_neighbors` is less."""

GROWTH = 1.2
"""New width for a row that did not fit, relative to its length: density fluctuates, and each growth costs a search."""


class NeighborOverflowError(RuntimeError):
    """An atom has more neighbors than the given size, and a larger result is not possible.

    A wider matrix exceeds the memory or the range of int32, or a given matrix lacks neighbors.

    Parameters
    ----------
    max_neighbors : int
        The size that was given.
    num_neighbors : int
        The size that is needed.
    system_index : int, optional
        The system of the atom with most neighbors.
    """

    def __init__(self, max_neighbors: int, num_neighbors: int, system_index: int | None = None) -> None:
        self.max_neighbors = int(max_neighbors)
        self.num_neighbors = int(num_neighbors)
        self.system_index = None if system_index is None else int(system_index)
        where = "" if system_index is None else f" in system {self.system_index}"
        super().__init__(
            f"`max_neighbors` = {self.max_neighbors} is too small: an atom{where} has {self.num_neighbors} neighbors"
        )

    def __reduce__(self) -> tuple[type, tuple[int, int, int | None]]:
        return type(self), (self.max_neighbors, self.num_neighbors, self.system_index)


def estimate_max_neighbors(
    cutoff: float,
    atomic_density: float = HIGH_DENSITY,
    safety_factor: float | None = None,
    max_neighbors_lower_bound: int = 16,
) -> int:
    """Width of a neighbor matrix at a given density: the number of atoms in a sphere of radius ``cutoff``.

    A guess for callers that must fix shapes before the atoms are known. `neighbor_list` does not need it: without
    ``max_neighbors`` it counts neighbors, and if ``max_neighbors`` is too small, it searches again and returns a wider
    matrix. Increase ``safety_factor`` for clustered atoms and for cutoffs with few neighbors, where numbers of
    neighbors exceed the mean.

    Parameters
    ----------
    cutoff : float, length, non-negative
    atomic_density : float, atoms per length³, positive, optional
        In Å⁻³ water has 0.1 and diamond 0.18; the default 0.2 exceeds all but the densest solids.
    safety_factor : float, positive, optional
        Multiplies the number of neighbors; 1 by default.
    max_neighbors_lower_bound : int, optional
        Lower bound of the result, before rounding.

    Returns
    -------
    int
        4/3 π ``cutoff``³ ``atomic_density`` ``safety_factor``, rounded up to a multiple of 16.

    Raises
    ------
    ValueError, TypeError
        An argument that is not a number, not finite, or not positive (``cutoff``: negative), named in the message.

    Examples
    --------
    >>> estimate_max_neighbors(5.0)
    112
    """
    radius = check_not_negative("cutoff", cutoff)
    density = check_positive("atomic_density", atomic_density)
    safety = 1.0 if safety_factor is None else check_positive("safety_factor", safety_factor)
    least = as_int("max_neighbors_lower_bound", max_neighbors_lower_bound)
    if least < 0:
        raise ValueError(f"`max_neighbors_lower_bound` must not be negative, got {least}")
    expected = _in_sphere(radius) * density * safety
    if not math.isfinite(expected):
        raise ValueError(f"`cutoff` = {radius} is too large for any list of neighbors")
    return ROW_MULTIPLE * math.ceil(max(expected, least) / ROW_MULTIPLE)


def matrix_width(cutoff: float, most: int) -> int:
    """Width of a matrix whose longest row has ``most`` neighbors, with spare slots for atoms that move a little.

    A quarter more than the longest row, and at least `LEAST_SPARE` slots more, but no more than
    `estimate_max_neighbors` of the cutoff unless the longest row itself is longer.
    """
    spare = most + max(LEAST_SPARE, -(-most // 4))
    if _in_sphere(cutoff) * HIGH_DENSITY < spare:  # otherwise the estimate is not less, and may be infinite
        spare = min(spare, estimate_max_neighbors(cutoff))
    return max(most, spare)


def grown_width(most: int) -> int:
    """Width of a matrix whose longest row, of ``most`` neighbors, did not fit into a narrower one."""
    return ROW_MULTIPLE * math.ceil(GROWTH * most / ROW_MULTIPLE)


def _in_sphere(radius: float) -> float:
    """The volume of a sphere; infinite if it is not finite."""
    return 4.0 / 3.0 * math.pi * radius * radius * radius  # `**` would raise OverflowError
