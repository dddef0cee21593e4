"""Excluded pairs: the sum over everything, less the Coulomb energy of each pair at its nearest image."""

import itertools
import math

import numpy as np
import pytest
import torch

from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.pair.exclusions import exclusion_rows
from tests.reference.ewald import ewald
from tests.support.comparing import assert_gradient, assert_second_gradient, close
from tests.support.sums import METHODS, SUMS, summed
from tests.support.systems import ALL, System, batch, csr, triclinic, water

TOLERANCE = {"ewald": 1e-9, "pme": 1e-7}

PAIRS, FACTORS = ((0, 1), (4, 2), (3, 5)), (0.0, 0.5, 0.25)
EXCLUDED = {"exclusions": torch.tensor(PAIRS).T, "exclusion_factors": torch.tensor(FACTORS).double()}


def fixed(method, system, cutoff=5.0):
    """Parameters that do not change as the system does."""
    options = {"alpha": 0.7, **csr(system, cutoff)}
    if method == "ewald":
        return options | {"miller_indices": electrostatics.generate_ewald_miller_indices(system.cell, 4.5)}
    return options | {"mesh_dimensions": (18, 18, 18)}


# -- the reference --------------------------------------------------------------------------------

IMAGES = torch.tensor(list(itertools.product(range(-6, 7), repeat=3)), dtype=torch.float64)


def of_pairs(system, pairs, factors, power=1, images=IMAGES):
    """Energies, forces, dE/dq and virial that pairs lose: (1 - f) q1 q2 / r at the nearest image."""
    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    x, q = (t.clone().requires_grad_() for t in system[:2])
    deform = torch.eye(3, dtype=torch.float64) + strain
    energies = torch.zeros_like(q)
    for (i, j), factor in zip(pairs, factors, strict=True):
        apart = x[j] - x[i] + images @ system.cell[0]
        apart = apart[apart.square().sum(1).argmin()] @ deform
        energy = (1.0 - factor) * q[i] * q[j] / apart.norm() ** power
        energies = energies.index_add(0, torch.tensor([i, j]), 0.5 * energy.expand(2))
    slopes = torch.autograd.grad(energies.sum(), (x, q, strain))
    return energies.detach(), -slopes[0], slopes[1], -slopes[2][None]


def without(method, system, pairs=PAIRS, factors=FACTORS, **options):
    """The sum over everything, less what the pairs lose."""
    return [all_of - lost for all_of, lost in zip(summed(method, system, **options), of_pairs(system, pairs, factors))]


# -- values ---------------------------------------------------------------------------------------


@METHODS
def test_excluded_pairs_are_missing(method):
    """Energies of atoms, forces, dE/dq and virial are those of everything less the analytic pairs."""
    system = triclinic(6, charged=True)
    close(summed(method, system, **EXCLUDED, **ALL), without("ewald", system, **ALL), TOLERANCE[method])


@METHODS
def test_the_smooth_part_of_excluded_pairs_is_missing(method):
    """Of pairs so far apart that their erfc(alpha r) is nothing, this is everything."""
    length, alpha = 16.0, 1.0
    system = System.of([[0.0, 0.0, 0.0], [6.0, 0.3, -0.2], [0.2, -5.8, 0.4]], [1.0, -0.6, 0.9], np.eye(3) * length)
    assert math.erfc(alpha * 5.8) < 1e-14
    pairs = {"exclusions": torch.tensor([[0, 2], [1, 0]]), "exclusion_factors": torch.tensor([0.0, 0.25]).double()}
    exact = {"alpha": alpha, "cutoff": 5.8, "k_cutoff": 10.0, **ALL}
    options = exact if method == "ewald" else {"alpha": alpha, "cutoff": 5.8, "mesh_dimensions": (80, 80, 80), **ALL}
    expected = without("ewald", system, ((0, 1), (2, 0)), (0.0, 0.25), **exact)
    close(summed(method, system, **pairs, **options), expected, TOLERANCE[method])


@METHODS
def test_excluded_pairs_do_not_depend_on_alpha(method):
    system = triclinic(6)
    results = [summed(method, system, alpha=alpha, **EXCLUDED, **ALL) for alpha in (0.5, 1.0)]
    close(results[1], results[0], TOLERANCE[method])


def bonds_of(system):
    """All pairs within molecules of three atoms."""
    first = range(0, len(system.charges), 3)
    return [(n + i, n + j) for n in first for i, j in ((0, 1), (0, 2), (1, 2))]


@METHODS
def test_water_without_its_bonds(method):
    """At the distance of a bond the energy of a pair is a hundred times that of the liquid for a molecule."""
    system = water(2)
    pairs = bonds_of(system)
    found = summed(method, system, exclusions=torch.tensor(pairs).T, **ALL)
    close(found, without("ewald", system, pairs, [0.0] * len(pairs), **ALL), TOLERANCE[method])


@METHODS
@pytest.mark.parametrize("image", [(0, 0, 0), (1, -2, 0)])
def test_an_excluded_pair_at_the_same_spot(image, method):
    """Such as a Drude particle on its core: all that it loses is finite, q1 q2 2 alpha / sqrt(pi)."""
    system = triclinic(5, charged=True)
    positions = system.positions.clone()
    positions[3] = positions[1] + torch.tensor(image).double() @ system.cell[0]
    system = system._replace(positions=positions)
    options = {"alpha": 0.8, "exclusions": torch.tensor([[1], [3]])}
    energies, forces, slopes, virial = summed(method, system, **options, **ALL)
    # the reference leaves pairs at zero distance out, and here the smooth part goes as well
    x, q = (t.clone().requires_grad_() for t in system[:2])
    potential = ewald(x, q, system.cell[0], 0.8, 8.0, 9.0)
    lost = 2.0 * 0.8 / math.sqrt(math.pi) * torch.zeros_like(q).index_copy(0, torch.tensor([1, 3]), q[[3, 1]])
    expected = 0.5 * q * (potential - lost)
    gradients = torch.autograd.grad(expected.sum(), (x, q))
    close((energies, forces, slopes), (expected.detach(), -gradients[0], gradients[1]), TOLERANCE[method])
    assert virial.isfinite().all()


@METHODS
def test_excluded_partners_may_be_stored_in_any_cell(method):
    system = triclinic(6, charged=True)
    options = {"alpha": 0.8, "cutoff": 5.0, **EXCLUDED, **ALL}
    expected = summed(method, system, **options)
    for atom, image in ((1, [1.0, -2.0, 0.0]), (4, [0.0, 0.0, 3.0]), (3, [-4.0, 5.0, 1.0])):
        moved = system.positions.clone()
        moved[atom] += torch.tensor(image).double() @ system.cell[0]
        # positions that are cells apart lose digits
        close(summed(method, system._replace(positions=moved), **options), expected, 1e-10)


@METHODS
def test_the_nearest_image_is_found_in_very_skewed_cells(method):
    """The nearest one is not that of rounded fractional coordinates."""
    cell = np.array([[4.0, 0.0, 0.0], [1.9, 3.0, 0.0], [-1.9, 1.4, 3.0]])
    rng = np.random.default_rng(0)
    system = System.of(rng.random((8, 3)) @ cell, rng.normal(size=8), cell)
    pairs = [(i, j) for i, j in itertools.combinations(range(8), 2)]
    # a large alpha leaves erfc of nothing but the nearest images to pairs; here all of erf counts
    options = {"alpha": 0.9, "cutoff": 7.0, "k_cutoff": 9.0} if method == "ewald" else {"alpha": 0.9, "cutoff": 7.0}
    full = summed(method, system, **options)
    for i, j in pairs:
        energies = summed(method, system, exclusions=torch.tensor([[i], [j]]), **options)
        r = (system.positions[j] - system.positions[i] + IMAGES @ system.cell[0]).norm(dim=1).min().item()
        qq = (system.charges[i] * system.charges[j]).item()
        # between the smooth part and all of the interaction of the nearest image, by its distance
        lost = (full - energies).sum().item() / qq
        assert math.erf(0.9 * r) / r - 1e-9 <= lost <= 1.0 / r + 1e-9


@METHODS
@pytest.mark.parametrize("with_moments", [False, True])
def test_a_slab_has_no_images_along_its_open_axis(with_moments, method):
    """Excluded atoms may be farther apart along it than half of the cell. Beside another one, and a crystal."""
    systems, axes = [triclinic(6, seed=seed) for seed in (3, 4, 5)], (0, None, 2)
    for system, axis in zip(systems, axes):
        away = 0.8 * system.cell[0, axis or 0] + 2.1 * system.cell[0, 1]
        system.positions[1] = system.positions[0] + away + 0.1
    together, n = batch(*systems), torch.arange(3)
    pbc = torch.stack([n != (3 if axis is None else axis) for axis in axes])
    options = {"alpha": 0.9, "cutoff": 5.0, "slab_correction": True, "pbc": pbc, **ALL}
    options |= {"k_cutoff": 5.0} if method == "ewald" else {"mesh_dimensions": (24, 24, 24)}
    options |= {"dipoles": torch.zeros_like(together.positions)} if with_moments else {}
    pairs = torch.cat([EXCLUDED["exclusions"] + 6 * number for number in range(3)], 1)
    found = summed(method, together, exclusions=pairs, exclusion_factors=torch.tensor(3 * FACTORS).double(), **options)
    images = [IMAGES if axis is None else IMAGES[IMAGES[:, axis] == 0.0] for axis in axes]
    lost = [of_pairs(system, PAIRS, FACTORS, images=near) for system, near in zip(systems, images)]
    everything = summed(method, together, **options)
    close(found, [whole - torch.cat(less) for whole, less in zip(everything, zip(*lost))], TOLERANCE[method])


@METHODS
def test_the_order_of_pairs_and_atoms_does_not_matter(method):
    system = triclinic(6, charged=True)
    expected = summed(method, system, accuracy=1e-6, **EXCLUDED, **ALL)
    flipped = {"exclusions": torch.tensor([(2, 4), (5, 3), (1, 0)]).T}
    flipped["exclusion_factors"] = torch.tensor([0.5, 0.25, 0.0]).double()
    close(summed(method, system, accuracy=1e-6, **flipped, **ALL), expected, 1e-12)
    close(
        summed(method, system, accuracy=1e-6, **{**flipped, "exclusions": flipped["exclusions"].int()}, **ALL),
        expected,
        1e-10,
    )


@METHODS
def test_factors_say_how_much_pairs_interact(method):
    """Linear from nothing, which is the default, to one, which is no exclusion at all."""
    system = triclinic(6, charged=True)
    options = {"alpha": 0.8, "accuracy": 1e-6, **ALL}
    pairs = EXCLUDED["exclusions"]

    def scaled(factor):
        return summed(method, system, exclusions=pairs, exclusion_factors=torch.full((3,), factor).double(), **options)

    none, half, full = scaled(0.0), scaled(0.5), scaled(1.0)
    close(full, summed(method, system, **options), 1e-12)
    default = {"accuracy": 1e-6, **ALL}
    no_op = summed(method, system, exclusions=pairs, exclusion_factors=torch.ones(3).double(), **default)
    close(no_op, summed(method, system, **default), 1e-12)
    close(none, summed(method, system, exclusions=pairs, **options), 1e-14)
    close(half, [0.5 * (a + b) for a, b in zip(none, full)], 1e-12)
    close(summed(method, system, exclusions=pairs[:, :0], **options), full, 1e-12)


# -- batches, channels, other powers --------------------------------------------------------------


@METHODS
def test_exclusions_in_a_batch(method):
    systems = [triclinic(6, seed=3), triclinic(4, seed=5), triclinic(6, charged=True, seed=4)]
    together = batch(*systems)
    pairs = [torch.tensor([[0, 4], [1, 2]]), torch.zeros(2, 0, dtype=torch.int64), torch.tensor([[5], [3]])]
    factors = [torch.tensor([0.0, 0.5]).double(), torch.zeros(0).double(), torch.tensor([0.25]).double()]
    options = {"alpha": 0.9, "cutoff": 4.5, **ALL}
    options |= {"k_cutoff": 5.0} if method == "ewald" else {"mesh_dimensions": (16, 16, 18)}
    singles = [
        summed(method, s, exclusions=p, exclusion_factors=f, **options) for s, p, f in zip(systems, pairs, factors)
    ]
    expected = [torch.cat(parts) for parts in zip(*singles)]
    # pairs of systems in any order
    offset = torch.cat([pairs[2] + 10, pairs[0]], 1)
    mixed = {"exclusions": offset, "exclusion_factors": torch.cat([factors[2], factors[0]])}
    close(summed(method, together, **mixed, **options), expected, 1e-12)


@METHODS
@pytest.mark.parametrize("n_channels", [3, 20])
def test_exclusions_of_channels(n_channels, method):
    system = triclinic(6)
    charges = torch.randn(6, n_channels, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options = {"alpha": 0.9, "accuracy": 1e-5, **EXCLUDED, **ALL}
    energies, forces, slopes, virial = summed(method, system._replace(charges=charges), **options)
    loop = [summed(method, system._replace(charges=q), **options) for q in charges.T.contiguous()]
    of_channel = list(zip(*loop))
    close((energies, slopes), [torch.stack(of_channel[n], 1) for n in (0, 2)], 1e-11)
    close((forces, virial), [sum(of_channel[n]) for n in (1, 3)], 1e-11)


@METHODS
@pytest.mark.parametrize("power", [4, 6])
def test_exclusions_of_other_powers(power, method):
    system = triclinic(6, charged=True)
    options = {"alpha": 0.9, "cutoff": 7.0, "potential": electrostatics.power_law(power), **ALL}
    options |= {"k_cutoff": 9.0} if method == "ewald" else {"mesh_dimensions": (40, 40, 40)}
    expected = [a - b for a, b in zip(summed(method, system, **options), of_pairs(system, PAIRS, FACTORS, power))]
    close(summed(method, system, **EXCLUDED, **options), expected, TOLERANCE[method])


# -- derivatives ----------------------------------------------------------------------------------


@METHODS
def test_second_derivatives(method):
    system = triclinic(3, charged=True)
    options = {**fixed(method, system, 3.0), "exclusions": torch.tensor([[0, 1], [1, 2]])}

    def energy(positions, charges, cell):
        return SUMS[method](positions, charges, cell, **options, energy_reduction="system")

    assert_gradient(energy, system[:3])
    assert_second_gradient(energy, system[:3])


def test_exclusions_of_float32():
    system = triclinic(6, charged=True)
    energies, *others = summed("ewald", system, accuracy=1e-6, **EXCLUDED, **ALL)
    expected = [energies, *[t.float() for t in others]]
    excluded = {**EXCLUDED, "exclusion_factors": EXCLUDED["exclusion_factors"].float()}
    found = summed("ewald", system.to(torch.float32), accuracy=1e-6, **excluded, **ALL)
    close(found, expected, 2e-5)


# -- many at once ---------------------------------------------------------------------------------


@METHODS
def test_vmap_over_positions_equals_the_loop(method):
    """Energies and gradients; the nearest image of a pair is not the same in all slices."""
    system = triclinic(6)
    shifted = system.positions + 0.2 * torch.sin(torch.arange(54.0, dtype=torch.float64)).view(3, 6, 3)
    shifted[1, 0] += system.cell[0, 0]
    options = {"alpha": 0.8, **csr(system, 4.0), **EXCLUDED}
    options |= {"miller_bounds": (2, 2, 2)} if method == "ewald" else {"mesh_dimensions": (10, 10, 10)}

    def energy(x):
        return summed(method, system._replace(positions=x), **options).sum()

    value_and_slope = torch.func.grad_and_value(energy)
    found = torch.func.vmap(value_and_slope)(shifted)
    expected = [torch.stack(results) for results in zip(*(value_and_slope(x) for x in shifted), strict=True)]
    close(found, expected, 1e-10)
    with pytest.raises(AssertionError):
        # that is what images are for
        close([energy(shifted[0])], [energy(shifted[1])], 1e-10)


def test_wrong_atoms_of_exclusions_under_vmap_are_named():
    system, pairs = triclinic(6), torch.tensor([[[0], [1]], [[0], [6]]])
    options = {"alpha": 0.8, "k_cutoff": 2.0, **csr(system, 3.0)}
    with pytest.raises(ValueError, match="`exclusions` must hold pairs of two atoms"):
        torch.func.vmap(lambda pairs: summed("ewald", system, **options, exclusions=pairs))(pairs)


def test_numbers_of_atoms_leave_bits_for_the_open_axis():
    """`OPEN_AXIS` is in the same int32: larger slabs are refused."""
    rows = exclusion_rows(EXCLUDED["exclusions"], None, torch.zeros(1, 3).expand(24, 3))
    huge = rows._replace(pointers=rows.pointers[:1].expand(2**29 + 1))
    with pytest.raises(ValueError, match="`exclusions` of slabs are for less than 536870912 atoms"):
        huge.with_open_axes(torch.tensor([True, True, False]).expand(len(rows.atoms), 3))
