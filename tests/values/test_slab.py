"""Slabs: periodic along two axes, computed as if along three, and corrected; against a sum over two axes alone."""

import math
import re
import warnings

import numpy as np
import pytest
import torch

from nvalchemiops.notices import AccuracyWarning, NeighborListWarning
from nvalchemiops.torch import record
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.electrostatics import slab_warnings
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.comparing import close
from tests.support.sums import FINE, METHODS, SUMS
from tests.support.systems import ALL, System, batch, random_rotation, triclinic

AXES = pytest.mark.parametrize("axis", range(3))
# what is left of splines of the highest order, relative to forces and energies of the order of one
TOLERANCE = {"ewald": 1e-9, "pme": 1e-7}


def open_along(axis):
    return torch.tensor([a != axis for a in range(3)])


def corrected(method, system, pbc, **options):
    options = {"accuracy": FINE[method], "pbc": pbc, "slab_correction": True, **options}
    return SUMS[method](system.positions, system.charges, system.cell, batch_idx=system.batch_idx, **options)


# -- the reference --------------------------------------------------------------------------------


def in_two_directions(positions, charges, plane, alpha=0.9, reach=9, bound=14):
    """Energy of charges that repeat along two vectors in the plane of x and y, and nowhere else.

    D. M. Heyes, M. Barber and J. H. R. Clarke, J. Chem. Soc., Faraday Trans. 2 73, 1485 (1977); D. E. Parry, Surf. Sci.
    49, 433 (1975). There is no background: planes of charge Q have the energy -π Q1 Q2 |z| / A for each of the two.
    """
    apart = positions[:, None] - positions[None]
    z, product = apart[..., 2], charges[:, None] * charges[None]
    steps = torch.cartesian_prod(*[torch.arange(-reach, reach + 1)] * 2).double()
    images = torch.nn.functional.pad(steps @ plane, (0, 1))
    squared = (apart[:, :, None] + images).square().sum(-1)
    near = squared > 1e-20
    r = torch.where(near, squared, 1.0).sqrt()
    energy = 0.5 * (product * torch.where(near, torch.erfc(alpha * r) / r, 0.0).sum(-1)).sum()

    area = torch.linalg.det(plane).abs()
    miller = torch.cartesian_prod(*[torch.arange(-bound, bound + 1)] * 2).double()
    k = 2.0 * math.pi * miller[miller.abs().sum(1) > 0] @ torch.linalg.inv(plane).T
    length = k.norm(dim=1)
    k, length = k[length < 2.0 * alpha * 6.0], length[length < 2.0 * alpha * 6.0]
    z_k, half = z[..., None], length / (2.0 * alpha)
    decay = torch.exp(length * z_k) * torch.erfc(half + alpha * z_k)
    decay = decay + torch.exp(-length * z_k) * torch.erfc(half - alpha * z_k)
    waves = (torch.cos(apart[..., :2] @ k.T) * decay / length).sum(-1)
    energy = energy + math.pi / (2.0 * area) * (product * waves).sum()
    planes = z * torch.erf(alpha * z) + torch.exp(-((alpha * z) ** 2)) / (alpha * math.sqrt(math.pi))
    return energy - math.pi / area * (product * planes).sum() - alpha / math.sqrt(math.pi) * charges.square().sum()


def test_the_reference_does_not_depend_on_its_parameter():
    slab = layer()
    plane = slab.cell[0, :2, :2]
    results = [in_two_directions(slab.positions, slab.charges, plane, alpha).item() for alpha in (0.7, 0.9, 1.1)]
    assert results == pytest.approx([results[0]] * 3, rel=1e-11)


def test_the_reference_of_a_sparse_layer_is_a_pair():
    """Two charges a distance r apart in a large cell, with the planes of their images at distance z."""
    plane = torch.eye(2, dtype=torch.float64) * 200.0
    positions = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]], dtype=torch.float64)
    charges = torch.tensor([1.0, -1.0], dtype=torch.float64)
    energy = in_two_directions(positions, charges, plane, alpha=0.05, reach=2, bound=40)
    # images of dipoles side by side: p²/2 times 9.0336 / L³, a sum over a square lattice
    assert energy.item() == pytest.approx(-0.5 + 9.0336 * 4.0 / 2.0 / 200.0**3, abs=1e-9)


# -- slabs ----------------------------------------------------------------------------------------

PLANES = {"rectangle": [[4.0, 0.0], [0.0, 4.6]], "oblique": [[4.0, 0.0], [1.7, 4.1]]}


def layer(shape="oblique", height=18.0, total=0.0, tilt=(0.0, 0.0)):
    """Six charges, 3 thick, with a dipole, between vacuum; the open vector, the third one, is tilted."""
    rng = np.random.default_rng(4)
    plane = np.array(PLANES[shape])
    fractional = np.arange(6)[:, None] * [0.37, 0.61] % 1.0
    positions = np.concatenate([fractional @ plane, np.linspace(-1.5, 1.5, 6)[:, None]], axis=1)
    charges = rng.normal(size=6) + np.linspace(0.6, -0.6, 6)
    charges += (total - charges.sum()) / 6.0
    cell = np.zeros((3, 3))
    cell[:2, :2], cell[2, 2] = plane, height
    cell[2, :2] = np.array(tilt) @ plane
    return System.of(positions, charges, cell)


def turned(slab, axis, seed=0):
    """The same with another vector open, in another orientation, and the rotation."""
    rotation = torch.tensor(random_rotation(np.random.default_rng(seed)))
    cell = (slab.cell[0] @ rotation).roll(axis - 2, 0)  # cyclic, so that the third one comes to `axis`
    return slab._replace(positions=slab.positions @ rotation, cell=cell[None]), rotation


def expected_of(slab):
    """Energy, forces and dE/dq of the sum over two directions."""
    x, q = (t.clone().requires_grad_() for t in slab[:2])
    energy = in_two_directions(x, q, slab.cell[0, :2, :2])
    slopes = torch.autograd.grad(energy, (x, q))
    return energy.detach(), -slopes[0], slopes[1]


@METHODS
@AXES
@pytest.mark.parametrize("shape", PLANES)
def test_a_polar_slab_equals_the_sum_over_two_directions(shape, axis, method):
    slab = layer(shape)
    assert (slab.charges @ slab.positions[:, 2]).abs() > 1.0
    expected = expected_of(slab)
    system, rotation = turned(slab, axis)
    energies, forces, slopes = corrected(method, system, open_along(axis), **{**ALL, "compute_virial": False})
    # of higher order are exp(-2π (height - thickness) / width) = 1e-10
    close((energies.sum(), forces @ rotation.T, slopes), expected, TOLERANCE[method])


@METHODS
@pytest.mark.parametrize("total", [1.0, -3.0])
def test_a_charged_slab_equals_the_sum_over_two_directions(total, method):
    slab = layer(total=total)
    system, rotation = turned(slab, 1)
    energies, forces, slopes = corrected(method, system, open_along(1), **{**ALL, "compute_virial": False})
    close((energies.sum(), forces @ rotation.T, slopes), expected_of(slab), TOLERANCE[method])


@METHODS
@AXES
def test_the_corrected_energy_converges_with_vacuum(axis, method):
    """Without the correction it converges as one over the height, or does not, with a net charge."""
    expected = expected_of(layer())[0]
    bare = []
    for height in (10.0, 14.0, 30.0, 60.0):
        system, _ = turned(layer(height=height), axis)
        energy = corrected(method, system, open_along(axis)).sum()
        torch.testing.assert_close(energy, expected, rtol=1e-4, atol=0.0)
        bare.append(SUMS[method](*system[:3], accuracy=FINE[method]).sum() - expected)
    assert bare[-1].abs() > 1e-2 and bare[1] / bare[2] == pytest.approx(30.0 / 14.0, rel=1e-3)


@METHODS
@AXES
@pytest.mark.parametrize("total", [0.0, 1.0])
def test_tilting_the_open_vector_by_a_lattice_vector_changes_nothing(total, axis, method):
    """It is the same lattice, with as little vacuum as there may be."""
    expected = None
    for tilt in ((0.0, 0.0), (1.0, 0.0), (-1.0, 2.0)):
        system, _ = turned(layer(height=7.0, total=total, tilt=tilt), axis)
        found = corrected(method, system, open_along(axis), **ALL)
        expected = expected or found
        # another mesh has other errors
        close(found, expected, {"ewald": 1e-9, "pme": 2e-7}[method])


@METHODS
@AXES
@pytest.mark.parametrize("tilt", [(0.5, 0.0), (0.5, -0.5), (0.31, 0.22)])
def test_any_tilt_of_the_open_vector_changes_nothing_with_enough_vacuum(tilt, axis, method):
    for total in (0.0, -3.0):
        system, rotation = turned(layer(total=total, tilt=tilt), axis)
        energies, forces, slopes = corrected(method, system, open_along(axis), **{**ALL, "compute_virial": False})
        expected = expected_of(layer(total=total))
        close((energies.sum(), forces @ rotation.T, slopes), expected, TOLERANCE[method])


@METHODS
@pytest.mark.parametrize("total", [0.0, 2.0])
def test_the_height_of_the_origin_does_not_matter(total, method):
    system, _ = turned(layer(total=total), 2)
    moved = system._replace(positions=system.positions + torch.tensor([3.0, -40.0, 11.0]))
    expected = corrected(method, system, open_along(2), **ALL)
    close(corrected(method, moved, open_along(2), **ALL), expected, {"ewald": 1e-9, "pme": 1e-7}[method])


def test_wrapping_along_periodic_axes_does_not_matter():
    system = layer(total=1.0)
    images = torch.randint(-3, 4, (6, 3), generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 1, 0])
    moved = system._replace(positions=system.positions + images.double() @ system.cell[0])
    close(corrected("ewald", moved, open_along(2), **ALL), corrected("ewald", system, open_along(2), **ALL), 1e-10)


def test_a_capacitor():
    """Two planes of opposite charge: without the correction the field is that of the periodic stack."""
    area, height, gap = 9.0, 50.0, 4.0
    positions = [[0.0, 0.0, 0.0], [0.0, 0.0, gap]]
    system = System.of(positions, [1.0, -1.0], np.diag([3.0, 3.0, height]))
    energies, forces = electrostatics.compute_slab_correction(*system[:3], [True, True, False], compute_forces=True)
    # the field -4π P of the polarisation P = -gap / V that the stack has on average is undone
    assert energies.sum().item() == pytest.approx(2.0 * math.pi * gap**2 / (area * height), rel=1e-12)
    assert forces[:, 2].tolist() == pytest.approx([4.0 * math.pi * gap / (area * height) * s for s in (1.0, -1.0)])
    force = corrected("ewald", system, open_along(2), compute_forces=True)[1][0, 2]
    # far from points the field of planes is 2π/A on either side; ripples fall as exp(-2π gap / 3)
    assert force.item() == pytest.approx(2.0 * math.pi / area, rel=2e-3)


# -- batches --------------------------------------------------------------------------------------


@METHODS
def test_a_batch_of_slabs_and_bulk(method):
    """Each system as by itself, bulk without any correction, for each choice of the open axis."""
    slabs = [turned(layer(height=8.0, total=total), axis)[0] for axis, total in ((0, 0.0), (1, 1.0), (2, -2.0))]
    systems = [slabs[0], triclinic(5, charged=True), slabs[1], slabs[2]]
    pbc = torch.stack([open_along(axis) for axis in (0, 3, 1, 2)])
    together = batch(*systems)
    options = {"alpha": 0.8, "cutoff": 5.0, **ALL}
    options |= {"k_cutoff": 5.0} if method == "ewald" else {"mesh_dimensions": (24, 24, 24)}
    found = corrected(method, together, pbc, **options)
    singles = [corrected(method, s, p, **options) for s, p in zip(systems, pbc)]
    close(found, [torch.cat(parts) for parts in zip(*singles)], 1e-12)
    bulk = SUMS[method](*systems[1][:3], **options)
    close([t[together.batch_idx == 1] if len(t) == 23 else t[1:2] for t in found], bulk, 1e-12)
    corrections = electrostatics.compute_slab_correction(*together[:3], pbc, together.batch_idx, **ALL)
    assert not corrections[0][together.batch_idx == 1].any() and not corrections[3][1].any()
    for n in (0, 2, 3):
        assert corrections[0][together.batch_idx == n].any()


@METHODS
def test_a_slab_is_no_sphere_in_a_medium(method):
    """The dielectric constant around a sphere of many cells is for the bulk of a batch alone."""
    slab, bulk, pbc = turned(layer(height=8.0), 0)[0], triclinic(5), torch.stack([open_along(0), open_along(3)])
    options = {"alpha": 0.8, "cutoff": 5.0, **ALL}
    options |= {"k_cutoff": 5.0} if method == "ewald" else {"mesh_dimensions": (24, 24, 24)}
    found = corrected(method, batch(slab, bulk), pbc, surface_dielectric=2.0, **options)
    parts = corrected(method, slab, pbc[0], **options), SUMS[method](*bulk[:3], surface_dielectric=2.0, **options)
    close(found, [torch.cat(both) for both in zip(*parts)], 1e-12)


def test_the_correction_is_what_is_added():
    """For each of two charges of an atom, too."""
    system, _ = turned(layer(total=1.0), 0)
    system, pbc = system._replace(charges=torch.stack([system.charges, system.charges.square()], 1)), open_along(0)
    for method in SUMS:
        without = SUMS[method](*system[:3], accuracy=1e-6, **ALL)
        alone = electrostatics.compute_slab_correction(*system[:3], pbc, **ALL)
        close(corrected(method, system, pbc, accuracy=1e-6, **ALL), [a + b for a, b in zip(without, alone)], 1e-13)
    per_system = electrostatics.compute_slab_correction(*system[:3], pbc, energy_reduction="system")
    torch.testing.assert_close(per_system, electrostatics.compute_slab_correction(*system[:3], pbc).sum(0)[None])


# -- bad input ------------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"slab_correction": True}),  # which axis?
        (ValueError, {"pbc": torch.tensor([True, True, False])}),  # the sum is periodic along all
        (ValueError, {"pbc": torch.tensor([True, False, False]), "slab_correction": True}),
        (ValueError, {"pbc": torch.tensor([True, False]), "slab_correction": True}),
        (ValueError, {"pbc": torch.ones(2, 3, dtype=torch.bool), "slab_correction": True}),
        (TypeError, {"pbc": torch.tensor([1.0, 1.0, 0.0]), "slab_correction": True}),
        (TypeError, {"pbc": torch.tensor([1, 1, 0]), "slab_correction": True}),
    ],
)
def test_bad_periodicity_is_an_error(error, options, method):
    system = layer(height=8.0)
    with pytest.raises(error, match="pbc"):
        SUMS[method](*system[:3], **options)


@METHODS
def test_a_slab_needs_a_vector_along_its_open_axis(method):
    system = layer()
    flat = system.cell * torch.tensor([[1.0], [1.0], [0.0]])
    with pytest.raises(ValueError, match="a slab needs one along its open axis, too"):
        SUMS[method](*system[:2], flat, pbc=[True, True, False], slab_correction=True)


def test_bad_periodicity_of_the_correction_is_an_error():
    system = layer()
    for pbc in ([True, False, False], [True, False], torch.ones(2, 3, dtype=torch.bool)):
        with pytest.raises(ValueError, match="pbc"):
            electrostatics.compute_slab_correction(*system[:3], pbc)
    with pytest.raises(ValueError, match="charges"):
        electrostatics.compute_slab_correction(system.positions, system.charges[:3], system.cell, [True, True, False])
    with pytest.raises(ValueError, match="pbc"):
        electrostatics.compute_slab_correction(*system[:3], None)


@pytest.mark.parametrize("call", [*SUMS.values(), electrostatics.electrostatic_potential])
def test_a_narrow_vacuum_is_told(call):
    """With the part of the forces that copies of the slab across it have; also of a slab that the cell cuts in two."""
    x = torch.rand(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 4.0
    system = System(x, x[:, 0] - 2.0, torch.eye(3).double().expand(3, 3, 3), torch.arange(3).int().repeat_interleave(8))
    pbc = torch.tensor([[True, False, True], [True] * 3, [False] * 3])

    def cells(height):
        sides = torch.tensor([[4.0, height, 4.0], [4.0, 4.0, 4.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
        return torch.diag_embed(sides)

    exact = corrected("ewald", system._replace(cell=cells(30.0)), pbc, compute_forces=True)[1][:8]
    shares = []
    for height, shift in ((4.7, 0.0), (6.0, 0.0), (8.5, 0.0), (8.5, 6.5)):
        here = system._replace(cell=cells(height), positions=x + shift * torch.tensor([0.0, 1.0, 0.0]))
        here.positions[:8, 1] %= height
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            forces = corrected("ewald", here, pbc, compute_forces=True)[1][:8]
            told.clear()
            call(here.positions, here.charges, here.cell, batch_idx=here.batch_idx, pbc=pbc, slab_correction=True)
        shares.append((forces - exact).norm() / exact.norm())
        if shares[-1] < 1e-3:
            assert not told
        else:
            (warning,) = told
            assert warning.category is AccuracyWarning and warning.filename == __file__
            share = float(re.search(r"forces by (\S+) ", str(warning.message))[1])
            assert 0.1 * shares[-1] < share < 1.2 * shares[-1], "one digit; of forces between neighbors, too"
    assert shares[0] > shares[1] > 1e-3 > shares[2] and shares[3] > 1e-3


@pytest.mark.parametrize("of", ["dipoles", "quadrupoles", "small charges in float32"])
def test_a_narrow_vacuum_is_told_for_all_sources(of):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(8, 3, dtype=torch.float64, generator=generator) * 4.0
    charges, others = torch.zeros(8, dtype=torch.float64), {}
    if of == "dipoles":
        others = {of: x - 2.0}
    elif of == "quadrupoles":
        others = {of: torch.diag_embed(x - x.roll(1, 1))}
    else:  # the squares of their forces are zero in float32
        x, charges = x.float(), 1e-14 * (x[:, 0] - 2.0).float()
    cell = torch.diag(torch.tensor([4.0, 4.0, 4.2], dtype=x.dtype))
    with pytest.warns(AccuracyWarning, match="vacuum"):
        electrostatics.ewald_summation(x, charges, cell, pbc=(True, True, False), slab_correction=True, **others)


@pytest.mark.parametrize("call", [electrostatics.ewald_summation, electrostatics.electrostatic_potential])
def test_a_list_without_pairs_across_a_narrow_vacuum_is_told(call):
    """Of a slab beside a molecule; the sum itself is periodic along all axes."""
    x = torch.rand(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 4.0
    cell = torch.stack([torch.diag(torch.tensor([4.0, 4.0, 7.0])), torch.zeros(3, 3)]).double()
    of = torch.arange(2, dtype=torch.int32).repeat_interleave(12)
    pbc, everywhere = torch.tensor([[True, True, False], [False] * 3]), torch.tensor([[True] * 3, [False] * 3])
    given = {"alpha": 0.8, "k_cutoff": 4.0, "batch_idx": of, "pbc": pbc, "slab_correction": True}
    for searched, cutoff, count in ((pbc, 4.0, 1), (everywhere, 4.0, 0), (pbc, 2.9, 0)):
        for form in ({"return_neighbor_list": True}, {"half_fill": True}):
            found = neighbor_list(x, cutoff, cell, pbc=searched, batch_idx=of, **form)
            near = dict(zip(("neighbor_list", "neighbor_ptr", "neighbor_shifts"), found))
            if "half_fill" in form:
                near = {"neighbor_matrix": found[0], "neighbor_matrix_shifts": found[2], "half_list": True}
            with warnings.catch_warnings(record=True) as told, torch.device("meta"):  # the default of new tensors
                warnings.simplefilter("always")
                warnings.simplefilter("ignore", AccuracyWarning)
                call(x, x[:, 0], cell, **given, **near)
            assert [w.category for w in told] == [NeighborListWarning] * count


def test_lists_with_images_of_what_is_no_slab():
    """The correction is zero, also where one bool tells the axes, and for molecules without a cell."""
    system = layer(height=8.0)
    for pbc in (True, False):
        found = neighbor_list(system.positions, 3.0, system.cell, pbc=[pbc] * 3, return_neighbor_list=True)
        near = dict(zip(("neighbor_list", "neighbor_ptr", "neighbor_shifts"), found))
        given = {"pbc": pbc, **near, **({"alpha": 0.8, "k_cutoff": 4.0} if pbc else {})}
        values = system.positions, system.charges, system.cell if pbc else None
        corrected, plain = (electrostatics.ewald_summation(*values, slab_correction=s, **given) for s in (True, False))
        torch.testing.assert_close(corrected, plain, rtol=1e-12, atol=0.0)


def test_lists_of_slabs_are_looked_at_where_pairs_across_the_vacuum_count(monkeypatch):
    """A list for several models may reach far beyond what the sum needs; then these pairs may be missing."""
    x = 4.0 * torch.rand(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cell, cutoff = torch.diag(torch.tensor([4.0, 4.0, 8.5])).double(), 4.0
    lists, found = [], []
    for pbc in (open_along(2), torch.ones(3, dtype=torch.bool)):
        pairs, ptr, shifts = neighbor_list(x, 6.0, cell, pbc=pbc, return_neighbor_list=True)
        lists.append({"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts})
    options = {"pbc": open_along(2), "slab_correction": True, "compute_forces": True}
    monkeypatch.setattr(slab_warnings, "row_indices", None)  # nor are all pairs gone through
    with warnings.catch_warnings():
        warnings.simplefilter("error", NeighborListWarning)
        for splitting in ({"cutoff": cutoff, "accuracy": 1e-4}, {"alpha": 1.0, "k_cutoff": 9.0, "accuracy": 1e-4}):
            found = [
                electrostatics.ewald_summation(x, x[:, 0], cell, **options, **near, **splitting)[1] for near in lists
            ]
            assert 0.0 < (found[0] - found[1]).norm() < 1e-4 * found[1].norm()
        monkeypatch.setattr(slab_warnings, "_lacks_images", None)  # in inference mode that would be in each call
        with torch.inference_mode():
            of_inference = {name: t.clone() for name, t in lists[0].items()}
            electrostatics.ewald_summation(x, x[:, 0], cell, alpha=0.5, k_cutoff=3.0, **options, **of_inference)


def test_a_list_of_a_slab_that_lacks_pairs_is_no_end_of_plans():
    x = 4.0 * torch.rand(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    cell, pbc = torch.diag(torch.tensor([4.0, 4.0, 7.0])).double(), open_along(2)
    found = neighbor_list(x, 4.0, cell, pbc=pbc, return_neighbor_list=True)
    near = dict(zip(("neighbor_list", "neighbor_ptr", "neighbor_shifts"), found))
    options = {"k_cutoff": 3.0, "pbc": pbc, "slab_correction": True}
    again = record(lambda x: electrostatics.ewald_summation(x, x[:, 0], cell, 0.8, **options, **near))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            again(x)
    assert "1 recorded, 2 replayed" in again.explain()
