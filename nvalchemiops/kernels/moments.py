"""Moments of atoms, and the numbering of derivatives, which spreading and gathering share.

An atom at ``u`` contributes ``Σ_abc m_abc ∂x^a ∂y^b ∂z^c w(u)`` to a field, where w(u) is the field of a unit charge:
spline weights on a mesh, or phases at k-vectors. *Spreading* sums this over atoms. *Gathering*, its transpose, computes
``<F, ∂x^a ∂y^b ∂z^c w(u)>`` for a field F. The derivative of spreading with respect to m is gathering, that of
gathering with respect to F is spreading, and the derivative of either with respect to u needs the same sums with
derivatives one order higher. So the two are closed under differentiation.
"""

import functools

Component = tuple[int, int, int]


@functools.cache
def components(derivatives: int) -> tuple[Component, ...]:
    """For each moment, how often it differentiates with respect to x, y and z.

    The total order is at most ``derivatives``; lower orders come first.
    """
    return tuple(
        (a, b, order - a - b)
        for order in range(derivatives + 1)
        for a in range(order, -1, -1)
        for b in range(order - a, -1, -1)
    )


def count(derivatives: int) -> int:
    """Number of moments up to this order."""
    return (derivatives + 1) * (derivatives + 2) * (derivatives + 3) // 6


@functools.cache
def raised(derivatives: int) -> tuple[tuple[int, int, int], ...]:
    """For each moment, the indices of the moments with one more derivative with respect to x, y and z."""
    places = {component: n for n, component in enumerate(components(derivatives + 1))}
    found = []
    for a, b, c in components(derivatives):
        found.append((places[a + 1, b, c], places[a, b + 1, c], places[a, b, c + 1]))
    return tuple(found)
