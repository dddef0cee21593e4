"""Moments of atoms, and the numbering of derivatives: what spreading and gathering share.

An atom at ``u`` contributes ``Σ_abc m_abc ∂x^a ∂y^b ∂z^c w(u)`` to a field, where w is the contribution of a unit
charge: the weights of a spline on a mesh, or phases. *Spreading* adds this up over atoms; *gathering*, its
transpose, gives for a field F the numbers ``<F, ∂x^a ∂y^b ∂z^c w(u)>``. The derivative of either by F or m is the
other one, by u the same with derivatives one order higher. So the two are closed under differentiation.
"""

import functools

Component = tuple[int, int, int]


@functools.cache
def components(derivatives: int) -> tuple[Component, ...]:
    """How often each moment differentiates by x, y and z, up to ``derivatives`` in all; lower orders come first."""
    return tuple(
        (a, b, order - a - b)
        for order in range(derivatives + 1)
        for a in range(order, -1, -1)
        for b in range(order - a, -1, -1)
    )


def count(derivatives: int) -> int:
    """Number of moments."""
    return (derivatives + 1) * (derivatives + 2) * (derivatives + 3) // 6


@functools.cache
def raised(derivatives: int) -> tuple[tuple[int, int, int], ...]:
    """For each moment the numbers of those with one more derivative by x, y and z."""
    places = {component: n for n, component in enumerate(components(derivatives + 1))}
    found = []
    for a, b, c in components(derivatives):
        found.append((places[a + 1, b, c], places[a, b + 1, c], places[a, b, c + 1]))
    return tuple(found)
