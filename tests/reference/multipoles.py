"""Gaussian charges, dipoles and quadrupoles straight from the definitions, in torch, float64: slow, differentiable.

Source j acts by ``D_j = q_j + μ_j·∂_j + Q_j:∂_j∂_j / 2`` on what a unit charge at its place does: Q are second moments
of the charge density, and ∂_j the derivative by its position. Its density is a Gaussian of standard deviation ``σ_j``,
or a point. So two of them have the energy ``D_i D_j erf(a r)/r`` with ``a = 1/sqrt(2 (σ_i² + σ_j²))``; see A. J. Stone,
The Theory of Intermolecular Forces (2nd ed., Oxford, 2013), ch. 3, for the Cartesian tensors. Results at atom i are the
potential φ and its first and second derivatives, as a Gaussian receiver sees them; the energy of an atom is
``(q φ + μ·∇φ + Q:∇∇φ / 2) / 2``.

There are three ways that share little: Ewald's sum of multipoles (`ewald_field`), a sum over k-vectors alone, for
Gaussians (`wave_field`), and charges alone in the place of multipoles (`by_charges`). In periodic systems the mean
potential is zero, whatever the charge.
"""

import itertools
import math
from typing import NamedTuple

import torch

SQRT_PI = math.sqrt(math.pi)


class Sources(NamedTuple):
    """Sources with channels; `sources` fills in zeros."""

    charges: torch.Tensor  # (n_atoms, n_channels)
    dipoles: torch.Tensor  # (n_atoms, n_channels, 3)
    quadrupoles: torch.Tensor  # (n_atoms, n_channels, 3, 3)
    widths: torch.Tensor  # (n_atoms,)


class Field(NamedTuple):
    """Potential and derivatives at atoms, for each channel of the sources."""

    potential: torch.Tensor  # (n_atoms, n_channels)
    gradient: torch.Tensor  # (n_atoms, n_channels, 3)
    hessian: torch.Tensor  # (n_atoms, n_channels, 3, 3)


def sources(positions, charges=None, dipoles=None, quadrupoles=None, widths=None):
    """Sources with a channel, those that are not given being zero."""
    n = len(positions)

    def filled(values, *shape):
        if values is None:
            return positions.new_zeros(n, 1, *shape)
        return values if values.ndim == 2 + len(shape) else values.unsqueeze(1)

    charges, dipoles, quadrupoles = filled(charges), filled(dipoles, 3), filled(quadrupoles, 3, 3)
    channels = max(part.shape[1] for part in (charges, dipoles, quadrupoles))
    charges, dipoles, quadrupoles = (
        part.expand(n, channels, *part.shape[2:]) for part in (charges, dipoles, quadrupoles)
    )
    widths = torch.as_tensor(0.0 if widths is None else widths, dtype=positions.dtype).expand(n)
    return Sources(charges, dipoles, quadrupoles, widths)


def random_sources(n, channels=None, seed=0, width=None, neutral=True):
    """Charges, traceless quadrupoles and dipoles of molecular size, as arguments of `sources`."""
    rng = torch.Generator().manual_seed(seed)
    shape = (n,) if channels is None else (n, channels)
    charges = torch.randn(*shape, generator=rng, dtype=torch.float64)
    if neutral:
        charges = charges - charges.mean(0)
    dipoles = 0.6 * torch.randn(*shape, 3, generator=rng, dtype=torch.float64)
    quadrupoles = 0.8 * torch.randn(*shape, 3, 3, generator=rng, dtype=torch.float64)
    found = {"charges": charges, "dipoles": dipoles, "quadrupoles": traceless(quadrupoles)}
    if width is not None:
        found["widths"] = width * (0.7 + 0.6 * torch.rand(n, generator=rng, dtype=torch.float64))
    return found


def traceless(quadrupoles):
    """The symmetric traceless part."""
    symmetric = 0.5 * (quadrupoles + quadrupoles.mT)
    mean = symmetric.diagonal(dim1=-2, dim2=-1).mean(-1)
    return symmetric - mean[..., None, None] * torch.eye(3, dtype=quadrupoles.dtype)


# -- the interaction of two sources ----------------------------------------------------------------


def screening(widths, others):
    """``a`` of pairs of Gaussians; infinite for points."""
    return 1.0 / torch.sqrt(2.0 * (widths**2 + others**2))


def complementary(r, a):
    """``(-d/dr / r)^n erfc(a r)/r`` for n = 0 ... 4, zero where a is infinite.

    W. Smith, CCP5 Newsletter 46, 18 (1998), the recursion of his B_n.
    """
    a = torch.as_tensor(a, dtype=r.dtype)
    finite = torch.isfinite(a)
    a = torch.where(finite, a, 1.0)
    decay = torch.exp(-((a * r) ** 2)) / (a * SQRT_PI)
    found = [torch.erfc(a * r) / r]
    for n in range(1, 5):
        found.append(((2 * n - 1) * found[-1] + (2.0 * a**2) ** n * decay) / r**2)
    return [torch.where(finite, b, 0.0) for b in found]


def bare(r):
    """The same of 1/r."""
    found = [1.0 / r]
    for n in range(1, 5):
        found.append((2 * n - 1) * found[-1] / r**2)
    return found


def at_contact(a):
    """``(-d/dr / r)^n erf(a r)/r`` for n = 0 ... 4, where r is zero."""
    a = torch.as_tensor(a, dtype=torch.float64)
    return [2.0 * a / SQRT_PI * (2.0 * a**2) ** n / (2 * n + 1) for n in range(5)]


def tensors(r, b):
    """Derivatives by r, up to the fourth, of a function of the distance; ``b`` as from `bare`."""
    delta = torch.eye(3, dtype=r.dtype)

    def outer(text, *factors):
        return torch.einsum(f"{text}->...{''.join(sorted(text.replace('...', '').replace(',', '')))}", *factors)

    b = [b[0]] + [(-1) ** n * b[n].reshape(b[n].shape + (1,) * n) for n in range(1, 5)]
    first = b[1] * r
    second = b[2] * outer("...a,...b", r, r) + b[1][..., None] * delta
    mixed = outer("...a,bc", r, delta) + outer("...b,ac", r, delta) + outer("...c,ab", r, delta)
    third = b[3] * outer("...a,...b,...c", r, r, r) + b[2][..., None] * mixed
    mixed = sum(
        outer(text, r, r, delta)
        for text in ("...a,...b,cd", "...a,...c,bd", "...a,...d,bc", "...b,...c,ad", "...b,...d,ac", "...c,...d,ab")
    )
    flat = sum(outer(text, delta, delta) for text in ("ab,cd", "ac,bd", "ad,bc"))
    fourth = b[4] * outer("...a,...b,...c,...d", r, r, r, r) + b[3][..., None] * mixed + b[2][..., None, None] * flat
    return b[0], first, second, third, fourth


def field_of_pairs(r, b, near, given: Sources):
    """The field at i of sources j; ``r`` (..., i, j, 3) are vectors from j to i, and those count that are ``near``."""
    n_atoms = len(given.charges)
    parts = []
    for n, tensor in enumerate(tensors(r, b)):
        tensor = torch.where(near.reshape(near.shape + (1,) * n), tensor, 0.0)
        parts.append(tensor.reshape(-1, n_atoms, n_atoms, *(3,) * n).sum(0))
    q, mu, half = given.charges, given.dipoles, 0.5 * given.quadrupoles
    found = []
    for n, indices in enumerate(("", "x", "xy")):
        value = torch.einsum(f"ij{indices},jc->ic{indices}", parts[n], q)
        value = value - torch.einsum(f"ij{indices}a,jca->ic{indices}", parts[n + 1], mu)
        found.append(value + torch.einsum(f"ij{indices}ab,jcab->ic{indices}", parts[n + 2], half))
    return Field(*found)


def added(*fields):
    return Field(*(sum(values) for values in zip(*fields)))


def scaled(factor, field):
    return Field(*(factor * value for value in field))


# -- sums ------------------------------------------------------------------------------------------


def open_field(positions, given: Sources, receivers=None, own=False, exclusions=(), cutoff=None):
    """The field of sources that do not repeat. ``receivers`` are widths (n_atoms,), by default those of the sources.

    ``own`` says whether an atom sees its own source, ``exclusions`` has pairs (i, j, factor).
    """
    receivers = given.widths if receivers is None else receivers
    a = screening(receivers[:, None], given.widths[None, :])
    r = positions[:, None] - positions[None, :]
    squared = r.square().sum(-1)
    near = ~torch.eye(len(positions), dtype=torch.bool)
    if cutoff is not None:
        near = near & (squared < cutoff**2)
    distance = torch.where(near, squared, 1.0).sqrt()
    whole = [u - v for u, v in zip(bare(distance), complementary(distance, a))]
    factors = torch.ones(len(positions), len(positions), dtype=positions.dtype)
    for i, j, factor in exclusions:
        factors[i, j] = factors[j, i] = factor
    found = field_of_pairs(r, [b * factors for b in whole], near, given)
    return added(found, _own_field(a, given)) if own else found


def _own_field(a, given: Sources):
    """What each atom sees of itself: no other pair is near."""
    n = len(a)
    return field_of_pairs(a.new_zeros(n, n, 3), at_contact(a), torch.eye(n, dtype=torch.bool), given)


def miller_indices(bounds):
    return torch.tensor(list(itertools.product(*(range(-b, b + 1) for b in bounds))), dtype=torch.float64)


def waves(cell, k_cutoff):
    """All k-vectors but zero up to a length."""
    bounds = (k_cutoff * cell.detach().norm(dim=1) / (2.0 * math.pi)).ceil().int().tolist()
    k = 2.0 * math.pi * miller_indices(bounds) @ torch.linalg.inv(cell).mT
    length = k.detach().norm(dim=1)
    return k[(length > 1e-12) & (length <= k_cutoff)]


def wave_field(positions, given: Sources, cell, k_cutoff, alpha=None, receivers=None):
    """The sum over k-vectors of Gaussians with their widths. An atom sees itself.

    With ``alpha`` they are points whose interaction is erf(alpha r)/r.
    """
    receivers = given.widths if receivers is None else receivers
    k = waves(cell, k_cutoff)
    k2 = k.square().sum(1)
    weight = 4.0 * math.pi / torch.linalg.det(cell).abs() / k2
    if alpha is not None:
        weight = weight * torch.exp(-k2 / (4.0 * alpha**2))
    phase = torch.exp(1j * (positions @ k.mT))  # (n_atoms, n_k)
    emitted = phase if alpha is not None else phase * torch.exp(-0.5 * k2 * given.widths[:, None] ** 2)
    received = phase.conj() if alpha is not None else phase.conj() * torch.exp(-0.5 * k2 * receivers[:, None] ** 2)
    moments = given.charges[..., None] + 1j * torch.einsum("jca,ka->jck", given.dipoles, k)
    moments = moments - 0.5 * torch.einsum("jcab,ka,kb->jck", given.quadrupoles, k, k)
    structure = weight * torch.einsum("jk,jck->ck", emitted, moments)
    seen = torch.einsum("ik,ck->ick", received, structure)
    gradient = torch.einsum("ick,ka->ica", -1j * seen, k.to(seen.dtype))
    hessian = torch.einsum("ick,ka,kb->icab", -seen, k.to(seen.dtype), k.to(seen.dtype))
    return Field(seen.sum(-1).real, gradient.real, hessian.real)


def ewald_field(
    positions, given: Sources, cell, alpha, real_cutoff, k_cutoff, receivers=None, own=False, exclusions=()
):
    """The field of sources that repeat, by Ewald's sum; arguments of `open_field`, exclusions of nearest images."""
    receivers = given.widths if receivers is None else receivers
    a = screening(receivers[:, None], given.widths[None, :])
    inverse = torch.linalg.inv(cell.detach())
    displacement = positions[:, None] - positions[None, :]
    spread = (displacement.detach() @ inverse).abs().amax(dim=(0, 1))
    bounds = (real_cutoff * inverse.norm(dim=0) + spread).ceil().int().tolist()
    r = displacement + (miller_indices(bounds) @ cell)[:, None, None, :]
    squared = r.square().sum(-1)
    same = torch.eye(len(positions), dtype=torch.bool) & (squared.detach() < 1e-20)
    near = (squared < real_cutoff**2) & ~same
    distance = torch.where(near, squared, 1.0).sqrt()
    pairs = [u - v for u, v in zip(complementary(distance, alpha), complementary(distance, a))]
    parts = [field_of_pairs(r, pairs, near, given), wave_field(positions, given, cell, k_cutoff, alpha)]
    alphas = torch.as_tensor(alpha, dtype=cell.dtype).expand_as(a)
    parts.append(scaled(-1.0, _own_field(alphas, given)))
    if own:
        parts.append(_own_field(a, given))

    # k = 0 is left out of the sum over all distances, but is in that of the pairs: their integral
    volume = torch.linalg.det(cell).abs()
    integrals = math.pi / alpha**2 - 2.0 * math.pi * (receivers[:, None] ** 2 + given.widths[None, :] ** 2)
    parts.append(Field(-(integrals @ given.charges) / volume, 0.0, 0.0))

    for i, j, factor in exclusions:
        nearest = torch.argmin(squared[:, i, j])
        here = torch.zeros_like(near)
        here[nearest, i, j] = True
        here[torch.argmin(squared[:, j, i]), j, i] = True
        distance = torch.where(here, squared, 1.0).sqrt()
        whole = [u - v for u, v in zip(bare(distance), complementary(distance, a))]
        parts.append(scaled(factor - 1.0, field_of_pairs(r, whole, here, given)))
    return added(*parts)


def energies(field: Field, given: Sources):
    """Energies (n_atoms, n_channels) of sources in the field that they make."""
    found = given.charges * field.potential + (given.dipoles * field.gradient).sum(-1)
    return 0.5 * (found + 0.5 * (given.quadrupoles * field.hessian).sum((-1, -2)))


class Derivatives(NamedTuple):
    """Energies (n_atoms, n_channels), and derivatives of their sum."""

    energies: torch.Tensor
    forces: torch.Tensor
    charge_gradients: torch.Tensor
    dipole_gradients: torch.Tensor
    quadrupole_gradients: torch.Tensor
    virial: torch.Tensor | None = None


def everything(field_of, positions, given: Sources, cell=None):
    """Results of ``field_of(positions, sources, cell)`` or ``field_of(positions, sources)`` by autograd.

    Gradients by quadrupoles are those by nine numbers, symmetric: half the second derivatives of the potential. The
    virial is ``-dE/dstrain`` with dipoles and quadrupoles that stay as they are.
    """
    strain = positions.new_zeros(3, 3).requires_grad_()
    x, *parts = (part.detach().clone().requires_grad_() for part in (positions, *given[:3]))
    there = Sources(*parts, given.widths)
    deform = torch.eye(3, dtype=positions.dtype) + strain
    field = field_of(x @ deform, there) if cell is None else field_of(x @ deform, there, cell @ deform)
    found = energies(field, there)
    slopes = torch.autograd.grad(found.sum(), (x, *parts, strain), allow_unused=True)
    slopes = [torch.zeros_like(v) if s is None else s for s, v in zip(slopes, (x, *parts, strain))]
    return Derivatives(found.detach(), -slopes[0], *slopes[1:4], -slopes[4])


# -- charges in the place of multipoles ------------------------------------------------------------

# place and weight: a difference along an axis is a derivative, to second order
_FIRST = ((1, 0.5), (-1, -0.5))
_SECOND = ((1, 1.0), (0, -2.0), (-1, 1.0))


def _stencil(positions, given: Sources, step):
    """Charges (n_atoms, n_places) and their places (n_places, 3)."""
    charges = {(0, 0, 0): given.charges[:, 0]}

    def add(steps, values):
        place = tuple(steps.get(a, 0) for a in range(3))
        charges[place] = charges.get(place, 0.0) + values

    for a in range(3):
        for along, weight in _FIRST:
            add({a: along}, weight / step * given.dipoles[:, 0, a])
        for along, weight in _SECOND:
            add({a: along}, 0.5 * weight / step**2 * given.quadrupoles[:, 0, a, a])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        for (along, weight), (across, other) in itertools.product(_FIRST, _FIRST):
            add({a: along, b: across}, weight * other / step**2 * given.quadrupoles[:, 0, a, b])
    return torch.stack(list(charges.values()), 1), step * torch.tensor(list(charges), dtype=positions.dtype)


def by_charges(field_of, positions, given: Sources, own=False, step=0.1, levels=4):
    """The total energy (one channel) by charges near the atoms, extrapolated to distances of zero.

    ``field_of(positions, sources)`` is a field of charges; with ``own`` of Gaussians that see themselves. Without it,
    the interaction of charges near the same atom is taken off here.
    """
    found = []
    for level in range(levels):
        charges, places = _stencil(positions, given, step / 2**level)
        x = (positions[:, None] + places).reshape(-1, 3)
        widths = given.widths[:, None].expand_as(charges).reshape(-1)
        clusters = sources(x, charges.reshape(-1), widths=widths)
        energy = energies(field_of(x, clusters), clusters).sum()
        for i in range(0 if own else len(positions)):
            energy = energy - _own_energy(places, charges[i], given.widths[i])
        found.append(energy)
    # errors are even powers of the distance
    for order in range(1, levels):
        found = [(4**order * fine - coarse) / (4**order - 1) for coarse, fine in zip(found, found[1:])]
    return found[0]


def _own_energy(places, charges, width):
    """The energy of charges near one atom, each with itself included for Gaussians."""
    distance = (places[:, None] - places[None, :]).norm(dim=-1)
    apart = distance > 1e-12
    safe = torch.where(apart, distance, 1.0)
    if width == 0.0:
        u = torch.where(apart, 1.0 / safe, 0.0)
    else:
        a = 0.5 / width
        u = torch.where(apart, torch.erf(a * safe) / safe, 2.0 * a / SQRT_PI)
    return 0.5 * charges @ u @ charges
