"""Lattice sums of other interactions than Coulomb's: powers, against sums over images, and one made by a user."""

import functools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.torch.interactions.electrostatics import (
    LongRangePotential,
    ewald_reciprocal_space,
    generate_ewald_miller_indices,
    pme_reciprocal_space,
    power_law,
)
from nvalchemiops.torch.runtime.context import hidden_values
from tests.support.comparing import close
from tests.support.sums import METHODS, SUMS
from tests.support.systems import ALL, System, csr, triclinic

POWERS = pytest.mark.parametrize("power", [4, 6, 8, 12])
CONVERGED = {
    "ewald": {"alpha": 1.0, "cutoff": 6.5, "k_cutoff": 13.0},
    "pme": {"alpha": 1.0, "cutoff": 6.5, "mesh_dimensions": (48, 48, 48)},
}
TOLERANCE = {"ewald": 1e-10, "pme": 1e-7}


def summed(method, system, **options):
    options = {**CONVERGED[method], **options}
    return SUMS[method](system.positions, system.charges, system.cell, batch_idx=system.batch_idx, **options)


def fixed(method, system):
    """Parameters that do not change as the system does."""
    options = {"alpha": 0.8, **csr(system, 5.0)}
    if method == "ewald":
        return options | {"miller_indices": generate_ewald_miller_indices(system.cell, 4.5)}
    return options | {"mesh_dimensions": (18, 18, 18)}


# -- the reference --------------------------------------------------------------------------------


def over_images(system, function, middle=30.0, width=5.0):
    """Energies, forces, dE/dq and virial as a sum over images, which a window ends without an edge.

    Of the smooth remainder beyond, the integral over a uniform density is all there is: Fourier coefficients of the
    window at reciprocal lattice vectors k fall as exp(-(k width / 2)²), which is 1e-5 of what is small already.
    """

    def window(r):
        return torch.special.erfc((r - middle) / width) / 2.0

    def integrand(r):
        r = torch.tensor(r, dtype=torch.float64)
        return (4.0 * math.pi * r**2 * function(r) * (1.0 - window(r))).item()

    edges = [0.1, middle, middle + 6.0 * width, math.inf]
    rest = sum(quad(integrand, a, b, epsabs=1e-13, epsrel=1e-12)[0] for a, b in zip(edges, edges[1:]))
    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    deform = torch.eye(3, dtype=torch.float64) + strain
    x, q = (t.clone().requires_grad_() for t in system[:2])
    cell = system.cell[0]
    reach = middle + 6.0 * width
    bounds = (reach * torch.linalg.inv(cell).norm(dim=0)).ceil().int() + 3
    images = torch.cartesian_prod(*[torch.arange(-b, b + 1) for b in bounds.tolist()]).double() @ cell
    images = images[images.norm(dim=1) < reach + 15.0]
    potential = []
    for i in range(len(q)):
        apart = (x - x[i])[:, None] + images
        distance = apart.detach().norm(dim=2)
        j, image = torch.nonzero((distance < reach) & (distance > 1e-10), as_tuple=True)
        r = (apart[j, image] @ deform).norm(dim=1)
        potential.append((q[j] * function(r) * window(r)).sum())
    volume = torch.linalg.det(cell @ deform).abs()
    # the window stays a sphere as the cell is strained, and so does its integral
    potential = torch.stack(potential) + q.sum() * rest / volume
    energies = 0.5 * q * potential
    slopes = torch.autograd.grad(energies.sum(), (x, q, strain))
    return energies.detach(), -slopes[0], slopes[1], -slopes[2][None]


@functools.cache
def small():
    cell = np.array([[4.0, 0.0, 0.0], [1.3, 4.2, 0.0], [-0.9, 1.1, 3.8]])
    rng = np.random.default_rng(6)
    fractional = np.arange(3)[:, None] * [0.37, 0.61, 0.83] % 1.0 + rng.integers(-1, 2, (3, 3))
    return System.of(fractional @ cell, [1.0, 0.7, -0.4], cell)


# -- values ---------------------------------------------------------------------------------------

# Sums of 1/r^p over a simple cubic lattice: J. E. Lennard-Jones and A. E. Ingham, Proc. R. Soc. A 107, 636 (1925),
# with the digits of I. J. Zucker, J. Phys. A 8, 1734 (1975)
SIMPLE_CUBIC = {4: 16.532315959762, 6: 8.401923974828, 8: 6.945807927226, 12: 6.202149045048}


@METHODS
@pytest.mark.parametrize("power", SIMPLE_CUBIC)
@pytest.mark.parametrize("alpha", [1.6, 2.2])
def test_sums_over_a_simple_cubic_lattice(alpha, power, method):
    system = System.of([[0.2, 0.3, 0.4]], [1.0], np.eye(3))
    options = {"alpha": alpha, "cutoff": 4.0, "potential": power_law(power)}
    options |= {"k_cutoff": 27.0} if method == "ewald" else {"mesh_dimensions": (24, 24, 24)}
    energy = SUMS[method](*system[:3], **options).item()
    assert energy == pytest.approx(0.5 * SIMPLE_CUBIC[power], rel={"ewald": 1e-10, "pme": 1e-7}[method])


@METHODS
@POWERS
def test_powers_are_sums_over_images(power, method):
    """All of energies, forces, dE/dq and virial."""
    expected = over_images(small(), lambda r: r**-power)
    close(summed(method, small(), potential=power_law(power), **ALL), expected, TOLERANCE[method])


@METHODS
@POWERS
@pytest.mark.parametrize("alpha", [0.8, 1.2])
def test_nothing_depends_on_alpha(alpha, power, method):
    options = {"potential": power_law(power), **ALL}
    expected = summed("ewald", triclinic(6, charged=True), **options)
    reach = {"alpha": alpha, "cutoff": 7.5}
    close(summed(method, triclinic(6, charged=True), **options, **reach), expected, TOLERANCE[method])


@METHODS
def test_the_first_power_is_coulomb(method):
    system = triclinic(6, charged=True)
    assert power_law(1) is power_law(1)
    close(summed(method, system, potential=power_law(1), **ALL), summed(method, system, **ALL), 0.0)


@METHODS
@POWERS
def test_the_virial_of_a_power_is_its_energy(power, method):
    """1/r^p is homogeneous: tr W = p E."""
    energies, virial = summed(method, small(), potential=power_law(power), compute_virial=True)
    tolerance = {"ewald": 1e-9, "pme": 1e-6}[method]
    torch.testing.assert_close(virial[0].trace(), power * energies.sum(), rtol=tolerance, atol=0.0)


@POWERS
def test_a_mesh_equals_exact_wave_vectors(power):
    system = triclinic(6, charged=True)
    options = {"potential": power_law(power), **ALL}
    exact = ewald_reciprocal_space(*system[:3], None, 0.9, k_cutoff=11.0, **options)
    mesh = pme_reciprocal_space(*system[:3], 0.9, (48, 48, 48), spline_order=8, **options)
    close(mesh, exact, 1e-7)


# -- derivatives ----------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize("power", [6, 12])
def test_gradcheck_of_forces_and_virial(power, method):
    system = triclinic(3, charged=True)
    options = {**fixed(method, system), "potential": power_law(power), "compute_forces": True, "compute_virial": True}
    del options["alpha"]

    def function(positions, charges, cell, alpha):
        return SUMS[method](positions, charges, cell, alpha, **options)

    inputs = [t.clone().requires_grad_() for t in (*system[:3], torch.tensor([0.8], dtype=torch.float64))]
    assert torch.autograd.gradcheck(function, inputs, eps=1e-5, atol=1e-6, rtol=1e-5, fast_mode=True)


# -- what holds for all ---------------------------------------------------------------------------


@METHODS
def test_channels_are_a_loop(method):
    """As for C6 coefficients that are sums of products."""
    system = small()
    charges = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    options = {"potential": power_law(6), "alpha": 0.9, "cutoff": 5.0, **ALL}
    energies, forces, slopes, virial = summed(method, system._replace(charges=charges), **options)
    loop = [summed(method, system._replace(charges=q), **options) for q in charges.T.contiguous()]
    of_channel = list(zip(*loop))
    close((energies, slopes), [torch.stack(of_channel[n], 1) for n in (0, 2)], 1e-12)
    close((forces, virial), [sum(of_channel[n]) for n in (1, 3)], 1e-12)


def test_small_and_large_arguments_lose_no_digits():
    """From long waves to short ones, against an integral over distances."""
    for power in (4, 6, 8, 12):
        for x in (1e-6, 1e-3, 0.5, 5.0, 40.0):
            k2, alpha = (torch.tensor([v], dtype=torch.float64) for v in (4.0 * x, 1.0))
            value, slope = (f(k2, alpha) for f in (power_law(power).reciprocal, power_law(power).slope))
            # 1/r^p = 2/Γ(p/2) ∫ t^(p-1) exp(-r² t²) dt, of which the smooth part is t < alpha, in Fourier space
            scale = 2.0 * math.pi**1.5 / math.gamma(power / 2)

            def integral(power, x=x):
                edges = [0.0, min(math.sqrt(x), 1.0) / 2.0, 1.0]  # it rises steeply about sqrt(x)
                parts = [
                    quad(lambda t: t ** (power - 4) * math.exp(-x / t**2), a, b, epsabs=0.0, epsrel=1e-11, limit=200)[0]
                    for a, b in zip(edges, edges[1:])
                ]
                return sum(parts)

            expected, by_k2 = scale * integral(power), -0.25 * scale * integral(power - 2)
            # the recurrence cancels at large x, where all is tiny: relative to values at x = 1 is what counts
            assert value.item() == pytest.approx(expected, rel=1e-10, abs=1e-15), (power, x)
            assert slope.item() == pytest.approx(by_k2, rel=1e-10, abs=1e-15), (power, x)
        at_zero = power_law(power).at_zero(torch.tensor([1.3], dtype=torch.float64)).item()
        assert at_zero == pytest.approx(2.0 * math.pi**1.5 / math.gamma(power / 2) / (power - 3) * 1.3 ** (power - 3))


@pytest.mark.parametrize("power", [0, 2, 3, 5, -6, 6.0, True, "6"])
def test_other_powers_are_an_error(power):
    with pytest.raises((TypeError, ValueError), match="exponent"):
        power_law(power)


@METHODS
def test_other_potentials_need_parameters(method):
    system = small()
    options = {"potential": power_law(6), "alpha": 0.9}
    with pytest.raises(ValueError, match="`alpha`"):
        SUMS[method](*system[:3], **{**CONVERGED[method], **options, "alpha": None})
    name = {"ewald": "k_cutoff", "pme": "mesh_dimensions"}[method]
    with pytest.raises(ValueError, match=f"`{name}`"):
        SUMS[method](*system[:3], cutoff=5.0, **options)


@METHODS
def test_the_correction_of_slabs_is_coulombs(method):
    """It is zero in systems that are periodic along all axes."""
    options = {"potential": power_law(6), **CONVERGED[method]}

    def call(*pbc, slab_correction=True):
        return SUMS[method](*small()[:3], **options, pbc=torch.tensor(pbc), slab_correction=slab_correction)

    known = SUMS[method](*small()[:3], **options)
    close(call(True, True, True), known, 0.0)
    for asked_for in (True, False):  # it is no advice either
        with pytest.raises(ValueError, match=r"`slab_correction` is for the Coulomb .* leave it and `pbc` out"):
            call(True, True, False, slab_correction=asked_for)
    with hidden_values():
        close(call(True, True, True), known, 0.0)
        assert call(True, True, False).isnan().all()


# -- made by a user -------------------------------------------------------------------------------


def yukawa(kappa):
    """exp(-κr)/r, split as Coulomb's: the smooth part has the transform 4π exp(-(k² + κ²)/4α²) / (k² + κ²).

    Source: G. Salin and J.-M. Caillol, J. Chem. Phys. 113, 10459 (2000), doi:10.1063/1.1326477.
    """
    half = f"{kappa}/(2*alpha)"
    short = f"(exp({kappa}*r)*erfc(alpha*r + {half}) + exp(-{kappa}*r)*erfc(alpha*r - {half}))/(2*r)"
    # the smooth part at r = 0 is 2α/√π exp(-κ²/4α²) - κ erfc(κ/2α)
    alone = f"-q^2*(alpha/sqrt(pi)*exp(-({half})^2) - {kappa}/2*erfc({half}))"

    def formula(expression, self_energy, n_charges):
        assert n_charges == 1
        return Formula(f"q1*q2*({expression})", ("q",), ("alpha",), self_energy=self_energy)

    def reciprocal(k2, alpha):
        shifted = k2 + kappa**2
        return 4.0 * math.pi * torch.exp(-0.25 / alpha.square() * shifted) / shifted

    return LongRangePotential(
        functools.partial(formula, short, alone),
        functools.partial(formula, f"{short} - exp(-{kappa}*r)/r", ""),
        reciprocal,
        lambda alpha: 4.0 * math.pi * torch.exp(-0.25 * (kappa / alpha) ** 2) / kappa**2,
    )


YUKAWA = yukawa(0.8)


@METHODS
@pytest.mark.parametrize("alpha", [0.9, 1.3])
def test_a_potential_of_a_user(alpha, method):
    expected = over_images(small(), lambda r: torch.exp(-0.8 * r) / r)
    options = {**CONVERGED[method], "alpha": alpha, "cutoff": 7.0, "potential": YUKAWA, **ALL}
    close(summed(method, small(), **{**options, "accuracy": 1e-6}), expected, TOLERANCE[method])


@METHODS
def test_second_derivatives_of_the_potential_of_a_user(method):
    system = triclinic(5, charged=True)
    options = {**fixed(method, system), "potential": YUKAWA}
    inputs = [t.clone().requires_grad_() for t in system[:3]]
    weights = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(positions, charges, cell):
        return (weights * SUMS[method](positions, charges, cell, compute_forces=True, **options)[1]).sum()

    assert torch.autograd.gradcheck(loss, inputs, eps=1e-5, atol=1e-6, rtol=1e-5, fast_mode=True)


def test_a_potential_of_a_user_without_screening_is_coulomb():
    """For small κ, but for -κ at r = 0 that an atom does not have of itself."""
    system, kappa = triclinic(6), 1e-4
    energies, *others = summed("ewald", system, potential=yukawa(kappa), **ALL)
    expected, forces, slopes, virial = summed("ewald", system, **ALL)
    q = system.charges
    # of the order of κ²
    expected = (expected + 0.5 * kappa * q**2, forces, slopes + kappa * q, virial)
    close((energies, *others), expected, 1e-6)
