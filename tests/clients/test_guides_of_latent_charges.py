"""The code of docs/coming_from_les.md and docs/coming_from_mace_polar.md, against the formulas of these packages.

The references here are dense sums in torch, written from the equations: of LES (B. Cheng, npj Comput. Mater. 11, 80
(2025), and its `ewald.py` and `bec.py`), and of graph_longrange (its `gto_utils.py`, `features.py`, `energy.py` and
`slabs.py`). None of their code is needed.
"""

import functools
import math
import re
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import torch

from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from nvalchemiops.notices import AccuracyWarning
from nvalchemiops.torch.interactions.electrostatics import (
    electrostatic_potential,
    ewald_reciprocal_space,
    ewald_summation,
    multipole_electrostatic_features,
    pack_multipole_moments,
)
from tests.support.comparing import close, close_to_largest

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PI, EYE = math.pi, torch.eye(3, dtype=torch.float64)


@functools.cache
def page(name):
    """What the code of a page defines, after it ran without a warning."""
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile("\n".join(BLOCK.findall((DOCS / name).read_text())), name, "exec"), names)
    return types.SimpleNamespace(**names)


@pytest.fixture
def les():
    return page("coming_from_les.md")


@pytest.fixture
def polar():
    return page("coming_from_mace_polar.md")


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def k_vectors(cell, cutoff, most=24):
    """All k-vectors up to a length, without zero, and their squares."""
    numbers = torch.arange(-most, most + 1, dtype=torch.float64)
    k = 2.0 * PI * torch.cartesian_prod(numbers, numbers, numbers) @ torch.linalg.inv(cell).T
    squares = k.square().sum(1)
    kept = (squares > 0.0) & (squares <= cutoff**2)
    assert kept.any()
    return k[kept], squares[kept]


def slope(energy, x):
    return torch.autograd.grad(energy.sum(), x, retain_graph=True)[0].detach()


# -- LES -------------------------------------------------------------------------------------------


def energy_of_les(x, cell, q, u=None, second=None, sigma=1.0, dl=2.0, keeps_self=False, factor=90.4756):
    """``1/(2 ε0 V) Σ exp(-σ²k²/2)/k² |S|²`` of sources (n_atoms, n_q, ...), less the self energies."""
    k, squares = k_vectors(cell, 2.0 * PI / dl, most=9)
    form = q.unsqueeze(2).to(torch.complex128)
    own = q.square().sum() / sigma
    if u is not None:
        form = form + 1j * (u @ k.T)
        own = own + u.square().sum() / (3.0 * sigma**3)
    if second is not None:
        form = form - 0.5 * torch.einsum("ka,ncab,kb->nck", k, second, k)
        own = own + second.square().sum() / (10.0 * sigma**5)
    structure = (form * torch.exp(1j * (x @ k.T)).unsqueeze(1)).sum(0)
    found = (torch.exp(-0.5 * sigma**2 * squares) / squares * structure.abs().square()).sum() / torch.det(cell).abs()
    return factor * (found if keeps_self else found - own / (2.0 * PI) ** 1.5)


def energy_of_les_in_open_space(x, q, sigma=1.0, keeps_self=False, factor=90.4756):
    r = torch.cdist(x, x) + torch.eye(len(x), dtype=x.dtype)
    kernel = torch.erf(r / (math.sqrt(2.0) * sigma)) / r * (1.0 - torch.eye(len(x), dtype=x.dtype))
    found = torch.einsum("ic,jc,ij->", q, q, kernel) / (4.0 * PI)
    return factor * (found + q.square().sum() / (sigma * (2.0 * PI) ** 1.5) if keeps_self else found)


@pytest.mark.parametrize("sigma, dl", [(1.0, 2.0), (1.3, 1.4)])
@pytest.mark.parametrize("keeps_self", [False, True])
def test_energies_and_forces_of_les(les, sigma, dl, keeps_self):
    given = {"sigma": sigma, "dl": dl}
    x = les.positions.detach().requires_grad_()
    expected = energy_of_les(x, les.cell, les.charges, **given, keeps_self=keeps_self)
    found = les.latent_energies(x, les.charges, les.cell, **given, self_interaction=keeps_self)
    close([found, slope(found, x)], [expected.view(1), slope(expected, x)], 1e-10)
    options = les.gaussians(**given) | {"self_interaction": keeps_self, "compute_forces": True}
    _, explicit = ewald_reciprocal_space(x, les.charges, les.cell, None, **options)
    close([les.COULOMB * explicit], [-slope(expected, x)], 1e-10)


def test_results_that_the_page_of_les_shows(les):
    x = les.positions
    expected = energy_of_les(x, les.cell, les.charges)
    with_self = energy_of_les(x, les.cell, les.charges, keeps_self=True)
    close([les.with_self], [with_self.view(1)], 1e-10)
    in_open = energy_of_les_in_open_space(les.molecule, les.all_charges[9:])
    found = les.latent_energies_of_all(les.all_positions, les.all_charges, les.cells, les.batch_idx)
    close([found], [torch.stack([expected.detach(), in_open])], 1e-10)


@pytest.mark.parametrize("keeps_self", [False, True])
def test_crystals_and_molecules_of_les(les, keeps_self):
    """In one batch, in any order, and molecules alone."""
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1))
    x = les.all_positions[order].requires_grad_()
    q, idx = les.all_charges[order], les.batch_idx[order]
    found = les.latent_energies_of_all(x, q, les.cells, idx, self_interaction=keeps_self)
    crystal = energy_of_les(x[idx == 0], les.cell, q[idx == 0], keeps_self=keeps_self)
    molecule = energy_of_les_in_open_space(x[idx == 1], q[idx == 1], keeps_self=keeps_self)
    expected = torch.stack([crystal, molecule])
    close([found, slope(found, x)], [expected, slope(expected, x)], 1e-10)
    alone = ewald_summation(
        x[idx == 1], q[idx == 1], None, pbc=False, widths=math.sqrt(0.5), self_interaction=keeps_self
    )
    close([les.COULOMB * alone.sum()], [molecule], 1e-10)


@pytest.mark.parametrize("keeps_self", [False, True])
def test_dipoles_and_quadrupoles_of_les(les, keeps_self):
    x = les.positions.detach().requires_grad_()
    for second in (None, les.quadrupoles):
        expected = energy_of_les(x, les.cell, les.charges, les.dipoles, second, keeps_self=keeps_self)
        sources = {"dipoles": les.dipoles, "quadrupoles": second}
        found = les.latent_energies(x, les.charges, les.cell, **sources, self_interaction=keeps_self)
        close([found, slope(found, x)], [expected.view(1), slope(expected, x)], 1e-10)


def test_traces_of_les_are_dropped(les):
    """And act by a Gaussian of the distance, as the page says."""
    x, trace = les.positions.detach(), randn(9, 2, 1, 1)
    with_trace = les.quadrupoles + trace * EYE / 3.0
    with pytest.warns(AccuracyWarning, match="trace"):
        found = les.latent_energies(x, les.charges, les.cell, dipoles=les.dipoles, quadrupoles=with_trace)
    expected = energy_of_les(x, les.cell, les.charges, les.dipoles, les.traceless(with_trace))
    close([found], [expected.view(1)], 1e-10)
    assert abs(found - energy_of_les(x, les.cell, les.charges, les.dipoles, with_trace)) > 0.1

    a, q, t = math.sqrt(0.5), 0.7, 0.4  # of a charge and a trace in open space, σ = 1
    d = torch.tensor([1.1, -0.4, 0.8], dtype=torch.float64)
    second = torch.func.hessian(lambda d: torch.erf(a * d.norm()) / d.norm())(d)
    exact = 0.5 * q * (t / 3.0 * second.diagonal()).sum()
    stated = -q * t / 6.0 * 4.0 * a**3 / math.sqrt(PI) * torch.exp(-(a**2) * d.square().sum())
    close([stated], [exact], 1e-12)


def test_numbers_on_the_page_of_les(les):
    assert 90.4756 / (2.0 * PI) == pytest.approx(14.39964, abs=5e-6)
    assert 90.0474 / (2.0 * PI) == pytest.approx(14.3315, abs=5e-5)
    assert 90.4756 / (2.0 * PI) / COULOMB_EV_ANGSTROM - 1.0 == pytest.approx(-5e-7, abs=5e-8)
    assert 90.0474 / (2.0 * PI) / COULOMB_EV_ANGSTROM - 1.0 == pytest.approx(-4.7e-3, abs=5e-5)
    assert math.exp(-(PI**2) / 2.0) == pytest.approx(7e-3, abs=5e-4)
    found, converged = (les.latent_energies(les.positions.detach(), les.charges, les.cell, dl=dl) for dl in (2.0, 0.7))
    assert 1e-5 < abs(found / converged - 1.0) < 1e-2
    swapped = les.cell[[1, 0, 2]]
    assert torch.det(swapped) < 0.0
    close([les.latent_energies(les.positions.detach(), les.charges, swapped)], [found], 1e-12)


def of_all_sources(les, x):
    """Energy of LES without self energies, as a function of charges and dipoles (n_atoms,), (n_atoms, 3)."""
    return lambda q, u: energy_of_les(x, les.cell, q.unsqueeze(1), u.unsqueeze(1))


def test_sources_that_les_induces_once(les):
    """Potential and field are derivatives of the energy of the permanent sources."""
    x = les.positions.detach().requires_grad_()
    q, mu = les.q.clone().requires_grad_(), les.mu.clone().requires_grad_()
    by_q, by_mu = torch.autograd.grad(of_all_sources(les, x)(q, mu), (q, mu), create_graph=True)
    induced, dipoles = -les.kappas * by_q, -les.alphas[:, None] * by_mu
    energy = -0.5 * (les.kappas * by_q.square()).sum() - 0.5 * (les.alphas[:, None] * by_mu.square()).sum()
    found = les.induced_once(x, les.q, les.mu, les.cell, les.kappas, les.alphas)
    close(found, [induced, dipoles, energy], 1e-10)
    close([slope(found[2], x)], [slope(energy, x)], 1e-10)


def test_induced_moments_for_readers_of_les(les):
    """The minimum, by the dense second derivatives of the formula."""
    x = les.positions.detach().requires_grad_()
    n, energy = 9, of_all_sources(les, x)

    def total(v):
        charges, dipoles = v[:n], v[n:].view(n, 3)
        own = (charges.square() / les.kappas).sum() + (dipoles.square() / les.alphas[:, None]).sum()
        return energy(les.q + charges, les.mu + dipoles) + 0.5 * own

    zero = torch.zeros(4 * n, dtype=torch.float64)
    first, second = torch.func.grad(total)(zero), torch.func.hessian(total)(zero)
    constraint = torch.cat([torch.ones(n), torch.zeros(3 * n)]).double()
    matrix = torch.cat([torch.cat([second, constraint[:, None]], 1), torch.cat([constraint, zero[:1]])[None]])
    v = torch.linalg.solve(matrix, torch.cat([-first, zero[:1]]))[:-1].detach()
    minimum = total(v)
    close([les.response.charges, les.response.dipoles], [v[:n], v[n:].view(n, 3)], 1e-8)
    close([les.response.energies.sum(), les.forces], [minimum, -slope(minimum, x)], 1e-8)
    once = les.once[0].detach()
    assert abs(once.sum()) > 1e-3 and abs(les.response.charges.sum()) < 1e-9  # as the table says


def charges_of(x):
    return 0.3 + 0.1 * torch.sin(x).sum(1) + 0.05 * torch.cos(x @ x.T).sum(1)


def born_charges_of_les(x, cell):
    """Its complex polarization: of the lowest harmonics, without their phase, along each axis."""
    fractional = x @ torch.linalg.inv(cell)
    derivative = torch.zeros(len(x), 3, 3, dtype=torch.complex128)
    for axis in range(3):
        for part, unit in ((torch.cos, 1.0), (torch.sin, 1j)):
            harmonics = (charges_of(x)[:, None] * part(2.0 * PI * fractional)).sum(0)
            polarization = (cell * harmonics).sum(1)[axis]
            derivative[:, :, axis] += unit * torch.autograd.grad(polarization, x, retain_graph=True)[0] / (2j * PI)
    return (derivative * torch.exp(-2j * PI * fractional.detach())[:, None]).real


def test_born_charges_of_les(les):
    x = les.positions.detach().requires_grad_()
    by_x = torch.autograd.functional.jacobian(charges_of, x.detach())  # (j, i, a)
    for cell in (les.cell, torch.diag(les.cell.diagonal())):
        fractional = (x @ torch.linalg.inv(cell)).detach()
        shift = torch.sin(2.0 * PI * (fractional[None] - fractional[:, None])) @ cell / (2.0 * PI)  # (i, j, b)
        expected = torch.einsum("jia,ijb->iab", by_x, shift) + charges_of(x)[:, None, None] * EYE
        found = les.born_charges(charges_of(x), x, cell)
        close([found], [expected], 1e-10)
        constant = les.q + 0.0 * x.sum(1)
        close([les.born_charges(constant, x, cell)], [les.q[:, None, None] * EYE], 1e-10)
    close([born_charges_of_les(x, cell)], [found], 1e-10)  # in the rectangular cell
    assert (born_charges_of_les(x, les.cell) - les.born_charges(charges_of(x), x, les.cell)).abs().max() > 1e-3

    total = torch.autograd.functional.jacobian(lambda x: (charges_of(x)[:, None] * x).sum(0), x.detach())
    close([les.born_charges(charges_of(x), x)], [total.permute(1, 2, 0)], 1e-10)


# -- graph_longrange -------------------------------------------------------------------------------

FIELD_CONSTANT = 1.0 / 5.526349406e-3
UNITS = COULOMB_EV_ANGSTROM / (FIELD_CONSTANT / (4.0 * PI))


def harmonics(v):
    """Real spherical harmonics of orders 0, 1, 2 of (y, z, x) times r^l, as e3nn has them: ∫ Y² = 1."""
    a, b, c = v[:, [1, 2, 0]].unbind(1)
    zero, root = torch.ones_like(a) * math.sqrt(0.25 / PI), math.sqrt(15.0 / (4.0 * PI))
    one = [math.sqrt(0.75 / PI) * part for part in (a, b, c)]
    two = [a * c, a * b, (b**2 - 0.5 * (a**2 + c**2)) / math.sqrt(3.0), b * c, 0.5 * (c**2 - a**2)]
    return torch.stack([zero, *one, *(root * part for part in two)], 1)


ORDERS = [0, 1, 1, 1, 2, 2, 2, 2, 2]


def constant(order, s, normalization):
    """`get_Cl_sigma`."""
    if normalization == "multipoles":
        whole = 2.0 ** (order + 0.5) * scipy.special.gamma(order + 1.5) * s ** (2 * order + 3)
        return 1.0 / (math.sqrt(4.0 * PI / (2 * order + 1)) * whole)
    return 1.0 / (2.0 ** (0.5 * (order + 1)) * scipy.special.gamma(0.5 * (order + 3)) * s ** (order + 3))


def orbitals(k, squares, s, normalization):
    """Fourier transforms (n_k, 9) of ``C r^l Y_lm exp(-r²/2s²)``."""
    factors = [
        4.0 * PI * math.sqrt(0.5 * PI) * s ** (2 * order + 3) * (-1j) ** order * constant(order, s, normalization)
        for order in ORDERS
    ]
    return torch.exp(-0.5 * s**2 * squares)[:, None] * harmonics(k) * torch.tensor(factors, dtype=torch.complex128)


def self_constants(s, receiver):
    """Integral of the potential of an orbital with the receiver of the same atom, for orders 0, 1, 2.

    That potential is radial with a harmonic, so both are done on a grid, as graph_longrange does.
    """
    grid = np.linspace(1e-4, 10.0 * max(s, receiver), 10000)
    found = []
    for order in range(3):
        half = order + 1.5
        inner = scipy.special.gammainc(half, 0.5 * (grid / receiver) ** 2) * scipy.special.gamma(half)
        inner *= 2.0 ** (order + 0.5) * receiver ** (2 * order + 3) * grid ** -(order + 1.0)
        outer = receiver**2 * grid**order * np.exp(-0.5 * (grid / receiver) ** 2)
        value = np.trapezoid(grid ** (order + 2) * np.exp(-0.5 * (grid / s) ** 2) * (inner + outer), x=grid)
        constants = constant(order, s, "multipoles") * constant(order, receiver, "receiver")
        found.append(FIELD_CONSTANT / (2 * order + 1) * value * constants)
    return found


def energy_of_gtos(x, moments, cell, s, cutoff, keeps_self=False):
    k, squares = k_vectors(cell, cutoff)
    form = orbitals(k, squares, s, "multipoles")[:, : moments.shape[1]]
    density = ((moments.to(torch.complex128) @ form.T) * torch.exp(-1j * (x @ k.T))).sum(0)
    found = 0.5 * FIELD_CONSTANT / torch.det(cell) * (density.abs().square() / squares).sum()
    if not keeps_self:  # of order l: p² / ((2l + 1)!! 2^(l+1) √π s^(2l+1))
        for n, order in enumerate(ORDERS[: moments.shape[1]]):
            divisor = (1, 3, 15)[order] * 2 ** (order + 1) * math.sqrt(PI) * s ** (2 * order + 1)
            found = found - FIELD_CONSTANT / (4.0 * PI) * moments[:, n].square().sum() / divisor
    return found


def features_of_gtos(x, moments, cell, s, receivers, cutoff, max_l=1, keeps_self=False):
    k, squares = k_vectors(cell, cutoff)
    form, phases = orbitals(k, squares, s, "multipoles")[:, : moments.shape[1]], torch.exp(-1j * (x @ k.T))
    density = ((moments.to(torch.complex128) @ form.T) * phases).sum(0) / torch.det(cell)
    potential = FIELD_CONSTANT * density / squares
    columns = []
    for order in range(max_l + 1):
        of_order = slice(order**2, (order + 1) ** 2)
        for receiver in receivers:
            seen = orbitals(k, squares, receiver, "receiver")[:, of_order]
            found = torch.einsum("k,km,nk->nm", potential, seen.conj(), phases.conj()).real
            if not keeps_self and moments.shape[1] > order**2:
                found = found - self_constants(s, receiver)[order] * moments[:, of_order]
            columns.append(found)
    return torch.cat(columns, 1)


def with_second_order(polar):
    return torch.cat([polar.moments, 0.3 * randn(7, 5, seed=3)], 1)


def test_densities_are_those_of_orbitals(polar):
    """Point by point: moments of graph_longrange, and what `cartesian` makes of them, for each order."""
    points, s = randn(20, 3), 0.8
    components = randn(9)
    sources = polar.cartesian(components)

    def gaussian(v):
        return torch.exp(-0.5 * v.square().sum() / s**2) / ((2.0 * PI) ** 1.5 * s**3)

    value, gradient, second = (
        torch.func.vmap(f)(points) for f in (gaussian, torch.func.grad(gaussian), torch.func.hessian(gaussian))
    )
    expected = harmonics(points) * torch.exp(-0.5 * points.square().sum(1, keepdim=True) / s**2)
    expected = (
        expected
        * torch.tensor([constant(order, s, "multipoles") for order in ORDERS], dtype=torch.float64)
        * components
    )
    parts = [sources["charges"] * value, -gradient @ sources["dipoles"]]
    parts.append(0.5 * torch.einsum("ab,nab->n", sources["quadrupoles"], second))
    close(parts, [expected[:, :1].sum(1), expected[:, 1:4].sum(1), expected[:, 4:].sum(1)], 1e-12)
    assert sources["quadrupoles"].trace().abs() < 1e-12


def test_moments_of_point_charges_in_either_order_of_axes(polar):
    """Of √(4π/(2l+1)) r^l Y_lm, called with (y, z, x) as MACE-POLAR does, or with (x, y, z)."""
    points, charges = randn(6, 3), randn(6, seed=1)
    second = torch.einsum("n,na,nb->ab", charges, points, points)
    second = second - second.trace() / 3.0 * EYE
    scale = torch.tensor([math.sqrt(4.0 * PI / (2 * order + 1)) for order in ORDERS], dtype=torch.float64)
    moments = (charges[:, None] * harmonics(points) * scale).sum(0)
    found = polar.cartesian(moments)
    close([found["charges"], found["dipoles"], found["quadrupoles"]], [charges.sum(), charges @ points, second])
    stated = [second[0, 1], second[1, 2], second[2, 2] * math.sqrt(0.75), second[0, 2]]
    stated = math.sqrt(3.0) * torch.stack([*stated, 0.5 * (second[0, 0] - second[1, 1])])
    close([moments[4:]], [stated])

    unpermuted = (charges[:, None] * harmonics(points[:, [2, 0, 1]]) * scale).sum(0)  # (y, z, x) of this is (x, y, z)
    close([unpermuted[1:4]], [charges @ points])
    quadrupole = polar.cartesian(unpermuted)["quadrupoles"][..., [1, 2, 0], :][..., [1, 2, 0]]
    close([quadrupole], [second])
    x, y, z = points.unbind(1)
    named = torch.stack([x * z, x * y, (2 * y**2 - x**2 - z**2) / math.sqrt(12.0), y * z, 0.5 * (z**2 - x**2)])
    close([unpermuted[4:]], [math.sqrt(3.0) * named @ charges])


@pytest.mark.parametrize("keeps_self", [False, True])
@pytest.mark.parametrize("charge", [0.0, 1.5])
def test_energies_of_gtos(polar, keeps_self, charge):
    x = polar.positions.clone().requires_grad_()
    for moments in (polar.moments[:, :1], polar.moments, with_second_order(polar)):
        moments = torch.cat([moments[:, :1] + charge / 7.0, moments[:, 1:]], 1)
        expected = UNITS * energy_of_gtos(x, moments, polar.cell, 0.9, 5.0, keeps_self)
        options = {"width": 0.9, "k_cutoff": 5.0, "self_interaction": keeps_self}
        found = polar.polar_energies(x, moments, polar.cell, **options)
        close([found, slope(found, x)], [expected.view(1), slope(expected, x)], 1e-10)
    assert UNITS - 1.0 == pytest.approx(8e-9, abs=5e-10)


def in_open_space(x, moments, a):
    """Potential and gradient at the atoms of charges and dipoles at the others, through ``erf(a r)/r``."""
    q, mu = moments[:, 0], moments[:, [3, 1, 2]]
    alone = torch.eye(len(x), dtype=x.dtype)
    apart = x[:, None] - x + alone[:, :, None]
    r = apart.norm(dim=2)
    decay = 2.0 * a / math.sqrt(PI) * torch.exp(-((a * r) ** 2))
    first = decay / r**2 - torch.erf(a * r) / r**3  # derivatives: first d, and second d d + first 1
    second = 3.0 * torch.erf(a * r) / r**5 - decay * (3.0 / r**4 + 2.0 * a**2 / r**2)
    along = (apart * mu).sum(2)
    potential = q * torch.erf(a * r) / r - first * along
    gradient = (q * first - second * along)[..., None] * apart - first[..., None] * mu
    return (potential * (1.0 - alone)).sum(1), (gradient * (1.0 - alone)[..., None]).sum(1)


def energy_in_open_space(x, moments, s):
    potential, gradient = in_open_space(x, moments, 0.5 / s)
    return 0.5 * (moments[:, 0] * potential).sum() + 0.5 * (moments[:, [3, 1, 2]] * gradient).sum()


def test_energies_of_crystals_slabs_and_molecules(polar):
    x = polar.positions.repeat(3, 1).requires_grad_()
    place = (x, polar.moments.repeat(3, 1), polar.cells, polar.pbc, polar.batch_idx)
    found = polar.polar_energies_of_all(*place, width=0.9, k_cutoff=6.0)
    crystal, slab = (UNITS * energy_of_gtos(x[n : n + 7], polar.moments, polar.cell, 0.9, 6.0) for n in (0, 7))
    along = (polar.moments[:, 0] * x[7:14, 2]).sum() + polar.moments[:, 2].sum()
    slab = slab + COULOMB_EV_ANGSTROM * 2.0 * PI * along**2 / torch.det(polar.cell)
    molecule = COULOMB_EV_ANGSTROM * energy_in_open_space(x[14:], polar.moments, 0.9)
    expected = torch.stack([crystal, slab, molecule])
    close([found, slope(found, x)], [expected, slope(expected, x)], 1e-9)
    close([found.detach()], [polar.energies], 1e-12)


@pytest.mark.parametrize("keeps_self", [False, True])
@pytest.mark.parametrize("charge", [0.0, 1.5])
def test_features_of_gtos(polar, keeps_self, charge):
    """The rows of MACE-POLAR as they are; order 2 through `cartesian` and `pack_multipole_moments`."""
    x, receivers = polar.positions, polar.receivers
    moments = polar.moments + charge / 7.0 * torch.tensor([1.0, 0.0, 0.0, 0.0])
    options = {"sigma": 0.9, "receiver_sigmas": receivers, "k_cutoff": 6.0, "include_self_interaction": keeps_self}
    for order in (0, 1):
        found = multipole_electrostatic_features(x, moments, polar.cell, feature_max_l=order, **options)
        expected = UNITS * features_of_gtos(x, moments, polar.cell, 0.9, receivers, 6.0, order, keeps_self)
        close_to_largest([found], [expected], 2e-9)  # of the integral on a grid, for the self interaction
    both = torch.cat([moments, 0.3 * randn(7, 5, seed=3)], 1)
    packed = pack_multipole_moments(**polar.cartesian(both))
    found = multipole_electrostatic_features(x, packed, polar.cell, feature_max_l=2, **options)
    expected = UNITS * features_of_gtos(x, both, polar.cell, 0.9, receivers, 6.0, 2, keeps_self)
    close_to_largest([found], [expected], 2e-9)


def test_features_of_slabs(polar):
    """Those of graph_longrange but for a constant, which depends on the origin there."""
    x, q, volume = polar.positions, polar.moments[:, 0], torch.det(polar.cell)
    assert abs(q.sum()) < 1e-12
    crystal = UNITS * features_of_gtos(x, polar.moments, polar.cell, 0.9, polar.receivers, 9.0)
    along = (q * x[:, 2]).sum() + polar.moments[:, 2].sum()
    field = COULOMB_EV_ANGSTROM * 4.0 * PI * along / volume
    correction = torch.zeros_like(crystal)
    correction[:, :2] = math.sqrt(4.0 * PI) * field * x[:, 2:]
    for n, receiver in enumerate(polar.receivers):
        correction[:, 2 + 3 * n + 1] = math.sqrt(1.5) * PI * receiver * field
    options = {"width": 0.9, "receivers": polar.receivers, "accuracy": 1e-9}
    found = polar.polar_features(x, polar.moments, polar.cell, polar.slab, **options)
    square = (q * x[:, 2].square() + 2.0 * polar.moments[:, 2] * x[:, 2]).sum()
    constant_part = -math.sqrt(4.0 * PI) * COULOMB_EV_ANGSTROM * 2.0 * PI / volume * square
    expected = crystal + correction
    expected[:, :2] += constant_part
    close_to_largest([found], [expected], 2e-9)
    assert constant_part.abs() > 1e-4
    shifted = polar.polar_features(x + 0.7, polar.moments, polar.cell, polar.slab, **options)
    close_to_largest([shifted], [found], 1e-9)


def test_features_of_batches(polar):
    """A crystal, a slab and a molecule in one call, and two crystals by k-vectors alone."""
    place = (polar.positions.repeat(3, 1), polar.moments.repeat(3, 1))
    options = {"width": 0.9, "receivers": polar.receivers, "accuracy": 1e-9}
    found = polar.polar_features(*place, polar.cells, polar.pbc, polar.batch_idx, **options)
    crystal, slab, molecule = found.split(7)
    one = (polar.positions, polar.moments)
    expected = UNITS * features_of_gtos(*one, polar.cell, 0.9, polar.receivers, 9.0)
    close_to_largest([crystal], [expected], 2e-9)
    close_to_largest([slab], [polar.polar_features(*one, polar.cell, polar.slab, **options)], 1e-8)
    close_to_largest([molecule], [polar.alone], 1e-10)

    options = {"sigma": 0.9, "receiver_sigmas": polar.receivers, "k_cutoff": 6.0}
    cells = torch.stack([polar.cell, 1.1 * polar.cell])
    x, moments, idx = (t[:14] for t in (*place, polar.batch_idx))
    found = multipole_electrostatic_features(x, moments, cells, batch_idx=idx, **options)
    expected = [UNITS * features_of_gtos(*one, cell, 0.9, polar.receivers, 6.0) for cell in cells]
    close_to_largest(found.split(7), expected, 2e-9)


def test_features_of_molecules(polar):
    """Exact ones, and by differences of 0.1 angstrom, as graph_longrange has them by default."""
    x, moments = 1.6 * randn(6, 3, seed=5), polar.moments[:6]
    found = electrostatic_potential(
        x, **polar.cartesian(moments), widths=0.9, receiver_widths=polar.receivers, derivatives=1
    )
    features = polar.polar_features(x, moments, None, width=0.9, receivers=polar.receivers)
    for n, receiver in enumerate(polar.receivers):
        a = 1.0 / math.sqrt(2.0 * (0.9**2 + receiver**2))
        potential, gradient = in_open_space(x, moments, a)
        close([found.potential[:, n], found.gradient[:, n]], [potential, gradient], 1e-10)
        factor = math.sqrt(1.5) * PI * receiver
        close([features[:, n]], [COULOMB_EV_ANGSTROM * math.sqrt(4.0 * PI) * potential], 1e-10)
        of_gradient = features[:, 2 + 3 * n : 5 + 3 * n]
        close([of_gradient], [COULOMB_EV_ANGSTROM * factor * gradient[:, [1, 2, 0]]], 1e-10)

        value, slopes = by_differences(x, moments, a, 0.1)
        for differences, derivative in ((value, potential), (slopes, gradient)):
            assert 0.015 < (differences - derivative).norm() / derivative.norm() < 0.033  # as the page says
    exact = energy_in_open_space(x, moments, 0.9)
    value, _ = by_differences(x, moments, 0.5 / 0.9, 0.02)
    dipoles = moments[:, [3, 1, 2]]
    displaced = torch.stack([by_differences(x, moments, 0.5 / 0.9, 0.02, 0.02 * axis)[0] for axis in EYE], 1)
    energy = 0.5 * (moments[:, 0] * value + (dipoles * (displaced - value[:, None]) / 0.02).sum(1)).sum()
    assert abs(energy / exact - 1.0) == pytest.approx(0.004, abs=0.0005)  # as the page says


def by_differences(x, moments, a, h, shift=0.0):
    """Potential and gradient if each dipole is three pairs of charges at a distance h."""
    of_pairs = moments[:, [3, 1, 2]] / h
    charges = torch.cat([(moments[:, 0] - of_pairs.sum(1))[:, None], of_pairs], 1)
    places = torch.cat([x[:, None], x[:, None] + h * EYE], 1)
    others = 1.0 - torch.eye(len(x), dtype=x.dtype)

    def at(points):
        r = (points[:, None, None] - places).norm(dim=-1) + 1e-6
        return torch.einsum("ijp,jp,ij->i", torch.erf(a * r) / r, charges, others)

    value = at(x + shift)
    return value, torch.stack([at(x + shift + h * axis) - value for axis in EYE], 1) / h


def test_external_features(polar):
    """By the factors of `DisplacedGTOExternalFieldBlock`: C_0 √(8π) Γ(3/2) s³, and C_1 √(3/2) 2π s⁵."""
    x, gradient = torch.cat([polar.positions, polar.positions[:4] + 1.0]), randn(2, 3, seed=2)
    idx = torch.tensor([0] * 7 + [1] * 4)
    expected = torch.zeros(11, 8, dtype=torch.float64)
    for system in (0, 1):
        mine = idx == system
        potential = (x[mine] - x[mine].mean(0)) @ gradient[system]
        for n, s in enumerate(polar.receivers):
            factor = constant(0, s, "receiver") * math.sqrt(8.0 * PI) * math.gamma(1.5) * s**3
            expected[mine, n] = factor * potential
            factor = constant(1, s, "receiver") * math.sqrt(1.5) * 2.0 * PI * s**5
            expected[mine, 2 + 3 * n : 5 + 3 * n] = factor * gradient[system, [1, 2, 0]]
    close([polar.external_features(x, gradient, idx, polar.receivers)], [expected])


def test_channels_are_separate_calls(polar):
    options = {"width": 0.9, "receivers": polar.receivers, "accuracy": 1e-9}
    for n, found in enumerate(polar.spins):
        expected = polar.polar_features(polar.positions, polar.densities[:, n], polar.cell, **options)
        close_to_largest([found], [expected], 1e-9)
    whole = UNITS * features_of_gtos(polar.positions, polar.moments, polar.cell, 0.9, polar.receivers, 9.0)
    close_to_largest([sum(polar.spins)], [whole], 2e-9)
