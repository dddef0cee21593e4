"""How much room a list of neighbors needs, guessed before there is one."""

import math

from nvalchemiops.neighbors.arguments import as_int, check_positive

ROW_MULTIPLE = 16
"""Rows are a multiple of this many slots, so that each begins at a 64-byte boundary of int32."""


def estimate_max_neighbors(
    cutoff: float,
    atomic_density: float = 0.2,
    safety_factor: float | None = None,
    max_neighbors_lower_bound: int = 16,
) -> int:
    """Width of a neighbor matrix for atoms of a given density: those in a sphere of radius ``cutoff``.

    A guess for whoever must fix shapes before the atoms are known. `neighbor_list` needs none: without
    ``max_neighbors`` it counts, and with one that is too small it raises `NeighborOverflowError`. Clustered atoms, or
    a cutoff of few neighbors, exceed the mean; that is what ``safety_factor`` is for.

    Parameters
    ----------
    cutoff : float, length, positive
    atomic_density : float, atoms per length³, positive, optional
        In Å⁻³ water has 0.1, and the default 0.2 exceeds all but the densest solids, such as diamond (0.18).
    safety_factor : float, positive, optional
        Multiplies the number of neighbors; 1 by default.
    max_neighbors_lower_bound : int, optional
        The least that is returned, up to rounding.

    Returns
    -------
    int
        4/3 π ``cutoff``³ ``atomic_density`` ``safety_factor``, rounded up to a multiple of 16.

    Raises
    ------
    ValueError, TypeError
        An argument that is no number, not finite or not positive, named in the message.

    Examples
    --------
    >>> estimate_max_neighbors(5.0)
    112
    """
    radius = check_positive("cutoff", cutoff)
    density = check_positive("atomic_density", atomic_density)
    safety = 1.0 if safety_factor is None else check_positive("safety_factor", safety_factor)
    least = as_int("max_neighbors_lower_bound", max_neighbors_lower_bound)
    if least < 0:
        raise ValueError(f"`max_neighbors_lower_bound` must not be negative, got {least}")
    expected = 4.0 / 3.0 * math.pi * radius * radius * radius * density * safety  # `**` would raise OverflowError
    if not math.isfinite(expected):
        raise ValueError(f"`cutoff` = {radius} is too large for any list of neighbors")
    return ROW_MULTIPLE * math.ceil(max(expected, least) / ROW_MULTIPLE)
