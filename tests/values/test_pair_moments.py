"""Sums over pairs of moments, against derivatives of the radial function that torch takes pair by pair."""

import functools

import mpmath
import numpy as np
import pytest
import torch

from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.potentials import moment_excluded, moment_interaction, moment_short_range
from nvalchemiops.kernels.moments import components, count
from nvalchemiops.torch.interactions.electrostatics import coulomb_energy, coulomb_energy_forces, coulomb_forces
from nvalchemiops.torch.interactions.pair.exclusions import exclusion_rows
from nvalchemiops.torch.interactions.pair.moments import pair_moments, sum_moments
from nvalchemiops.torch.interactions.pair.system import PairSystem
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, row_indices, rows_of
from tests.reference import multipoles as ref
from tests.support.systems import batch, triclinic

CUTOFF = 3.2
TWO = batch(triclinic(5, charged=True), triclinic(4, charged=True, seed=3))
ALPHA = torch.tensor([[0.55], [0.7]], dtype=torch.float64)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WIDTHS = torch.tensor([0.0, 0.7, 0.4, 1.1, 0.0, 0.5, 0.9, 0.0, 0.3], dtype=torch.float64)


@functools.cache
def rows(form="list", half=False):
    x, _, cell, batch_idx = TWO
    if form == "list":
        pairs, ptr, shifts = neighbor_list(x, CUTOFF, cell, batch_idx=batch_idx, return_neighbor_list=True)
        given = GivenNeighbors(pairs, ptr, shifts)
    else:
        matrix, _, shifts = neighbor_list(x, CUTOFF, cell, batch_idx=batch_idx, fill_value=len(x))
        given = GivenNeighbors(neighbor_matrix=matrix, matrix_shifts=shifts, fill_value=len(x))
    return rows_of(given, x, periodic=True)


def displacements(x, cell):
    found = rows()
    first, second = row_indices(found, len(x)), found.neighbors.long()
    shifts = found.shifts.to(x.dtype).unsqueeze(1)
    return first, second, x[second] - x[first] + (shifts @ cell[TWO.batch_idx[first].long()]).squeeze(1)


def derivative(function, d, component):
    """``∂^component`` of a function of displacements, with a graph."""
    value = function(d)
    for axis, times in enumerate(component):
        for _ in range(times):
            value = torch.autograd.grad(value.sum(), d, create_graph=True)[0][:, axis]
    return value


def short_range(d, alpha, own=None, other=None):
    r = d.norm(dim=1)
    value = torch.erfc(alpha * r) / r
    if own is None:
        return value
    width = (2.0 * (own**2 + other**2)).sqrt()
    apart = torch.where(width > 0.0, r / width.clamp(min=1e-3), 1e3)
    return value - torch.erfc(apart) / r


def dense(moments, derivatives, x, cell, alpha, widths=None, row_widths=None):
    """The sums, pair by pair."""
    first, second, d = displacements(x, cell)
    if not d.requires_grad:
        d.requires_grad_()
    of_pair = alpha[TWO.batch_idx[first].long(), 0]
    row_widths = widths if row_widths is None else row_widths
    widths = (None, None) if widths is None else (row_widths[first], widths[second])
    cached = functools.cache(lambda c: derivative(lambda d: short_range(d, of_pair, *widths), d, c))
    columns = []
    for a in components(derivatives):
        parts = 0.0
        for b, component in enumerate(components(next(n for n in range(9) if count(n) == moments.shape[-1]))):
            both = tuple(p + q for p, q in zip(a, component))
            parts = parts + cached(both).unsqueeze(1) * moments[second, :, b]
        zero = torch.zeros(len(x), moments.shape[1], dtype=x.dtype)
        columns.append((-1) ** sum(a) * zero.index_add(0, first, parts))
    return torch.stack(columns, -1)


def gathered(moments, derivatives, x, cell, alpha, widths=None, row_widths=None, form="list", outputs="m", row=None):
    formula = moment_short_range(widths is not None)
    columns = [None if w is None else w.unsqueeze(1) for w in (widths, row_widths)]
    others = (*columns, alpha, None, TWO.batch_idx, 2, *rows(form), None, None, None, CUTOFF, 0.0)
    return pair_moments(formula.text, "", outputs, derivatives, moments, row, x, cell, *others)


@pytest.mark.parametrize(
    ("order", "derivatives", "n_channels", "form", "kind"),
    [
        (0, 1, 1, "matrix", "points"),
        (1, 2, 2, "list", "mixed"),
        (2, 3, 1, "matrix", "mixed"),
        (3, 2, 1, "list", "points"),
        (1, 1, 6, "list", "receivers"),
    ],
)
def test_sums_are_derivatives_of_the_radial_function(order, derivatives, n_channels, form, kind):
    x, _, cell, _ = TWO
    moments = random(len(x), n_channels, count(order))
    widths = None if kind == "points" else WIDTHS
    receivers = 0.3 + WIDTHS if kind == "receivers" else None
    expected = dense(moments, derivatives, x, cell, ALPHA, widths, receivers)
    found = gathered(moments, derivatives, x, cell, ALPHA, widths, receivers, form)[0]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-11, atol=1e-11 * float(expected.detach().abs().max()))
    if order < 3:
        narrow = [t if t is None else t.float() for t in (moments, x, cell, ALPHA, widths, receivers)]
        found = gathered(narrow[0], derivatives, *narrow[1:], form)[0]
        assert found.dtype == torch.float32
        assert float((found - expected).abs().max()) < 2e-5 * float(expected.abs().max())


def test_channels_that_are_summed_in_blocks_add_up_in_gradients_by_cells():
    x, _, cell, _ = TWO
    moments, row = random(9, 6, 1), random(9, 6, 1, seed=1)

    def by_cell(channels):
        given = (t[:, channels].contiguous() for t in (moments, row))
        return gathered(next(given), 0, x, cell, ALPHA, outputs="c", row=next(given))[1]

    parts = sum(by_cell(slice(n, n + 2)) for n in (0, 2, 4))
    torch.testing.assert_close(by_cell(slice(6)), parts, rtol=1e-12, atol=1e-13)


def leaves(*tensors):
    return tuple(t.clone().requires_grad_() for t in tensors)


def test_first_derivatives_by_all_inputs():
    """Sums for atoms, by cell and the virial, of Gaussians and receivers of other widths."""
    x, _, cell, _ = TWO
    inputs = leaves(random(9, 1, 4), random(9, 1, 4, seed=1), x, cell, ALPHA, 0.3 + WIDTHS, 0.4 + WIDTHS)

    def function(moments, row, x, cell, alpha, widths, receivers):
        return gathered(moments, 1, x, cell, alpha, widths, receivers, outputs="mcv", row=row)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def weighted(tensors):
    return sum((t * random(*t.shape, seed=k)).sum() for k, t in enumerate(tensors))


def test_slopes_of_virials_by_moments_alone():
    """Without those by positions, for which the moments are of a higher order."""
    x, _, cell, _ = TWO
    inputs = leaves(random(9, 1, 4), random(9, 1, 4, seed=1), x)

    def virial(moments, row, x):
        return weighted(gathered(moments, 1, x, cell, ALPHA, outputs="v", row=row)[2:])

    expected = torch.autograd.grad(virial(*inputs), inputs)
    for k in range(2):
        given = [t if n == k else t.detach() for n, t in enumerate(inputs)]
        torch.testing.assert_close(torch.autograd.grad(virial(*given), inputs[k])[0], expected[k])


@pytest.mark.parametrize("outputs", ["m", pytest.param("cv", marks=pytest.mark.slow)])
def test_second_derivatives_mix_all_inputs(outputs):
    x, _, cell, _ = TWO
    row = random(9, 1, 1, seed=1)
    inputs = leaves(random(9, 1, 4), x, cell, ALPHA, 0.3 + WIDTHS)

    def function(moments, x, cell, alpha, widths):
        found = gathered(moments, 0, x, cell, alpha, widths, outputs=outputs, row=row if "c" in outputs else None)
        return torch.autograd.grad(weighted(found), (moments, x, cell, alpha, widths), create_graph=True)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_the_third_derivative_by_positions():
    x, _, cell, _ = TWO
    moments, v = random(9, 1, 1), random(9, 3, seed=4)

    def function(t, sums):
        return (sums(moments, 0, x + t * v, cell, ALPHA) * random(9, 1, 1, seed=5)).sum()

    found, expected = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    values = function(found, lambda *a: gathered(*a)[0]), function(expected, dense)
    for order in range(3):
        values = tuple(torch.autograd.grad(v, t, create_graph=True)[0] for v, t in zip(values, (found, expected)))
        torch.testing.assert_close(*values, rtol=1e-9, atol=1e-9, msg=f"order {order + 1}")


def energy(moments, x, cell, alpha, widths=None, exclusions=None, **options):
    system = PairSystem(x, cell, TWO.batch_idx, 2, rows())
    widths = None if widths is None else widths.unsqueeze(1)
    formula = moment_short_range(widths is not None)
    return sum_moments(formula, system, moments, widths, alpha, cutoff=CUTOFF, exclusions=exclusions, **options)


def test_a_cell_without_images_has_no_part_in_the_sum():
    x, _, cell, _ = TWO
    moments, inputs = random(9, 1, 1), leaves(x, cell)

    def slopes(cell):
        system = PairSystem(inputs[0], cell, TWO.batch_idx, 2, rows()._replace(shifts=None))
        energies = sum_moments(moment_short_range(False), system, moments, None, ALPHA, cutoff=CUTOFF).energies
        return torch.autograd.grad(energies.sum(), inputs, allow_unused=True)

    of_cell = slopes(inputs[1])
    assert torch.equal(of_cell[0], slopes(None)[0]) and of_cell[1] is None


@pytest.mark.parametrize("order", [1, 2])
def test_energies_and_first_derivatives_come_from_one_launch(order):
    x, _, cell, _ = TWO
    moments, x, strain = leaves(random(9, 2, count(order)), x, torch.zeros(2, 3, 3, dtype=torch.float64))
    deformed = torch.eye(3, dtype=torch.float64) + strain
    moved = (x.unsqueeze(1) @ deformed[TWO.batch_idx.long()]).squeeze(1)
    expected = 0.5 * (moments * dense(moments, order, moved, cell @ deformed, ALPHA, WIDTHS)).sum(-1)
    slopes = torch.autograd.grad(expected.sum(), (moments, x, strain))
    found = energy(moments, x, cell, ALPHA, WIDTHS, forces=True, gradients=True, virial=True)
    close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    close(found.energies, expected)
    close(found.gradients, slopes[0])
    close(found.forces, -slopes[1])
    close(found.virial, -slopes[2])
    for result in torch.autograd.grad(found.energies.sum(), (moments, x)), slopes[:2]:
        close(result, slopes[:2])


def test_dipoles_are_pairs_of_charges():
    """Two charges at a distance h have the energy of a dipole but for an error of order h²."""
    formula, h = moment_interaction(False), 1e-3
    x = torch.tensor([[0.0, 0.0, 0.0], [1.1, -0.7, 0.9]], dtype=torch.float64)
    dipole = torch.tensor([0.3, 0.5, -0.2], dtype=torch.float64)
    pairs = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    moments = torch.zeros(2, 1, 4, dtype=torch.float64)
    moments[0, 0, 1:], moments[1, 0, 0] = dipole, 1.5
    system = PairSystem(x, None, None, 1, rows_of(GivenNeighbors(pairs), x, periodic=False))
    found = sum_moments(formula, system, moments).energies.sum()
    ends = [1.5 / (x[1] - x[0] - sign * 0.5 * h * dipole).norm() / h for sign in (1.0, -1.0)]
    assert abs(float(found - (ends[0] - ends[1]))) < 1e-7


def test_exclusions_take_pairs_out_and_their_long_range_part_is_smooth():
    x, _, cell, _ = TWO
    moments, first = random(9, 1, 10), row_indices(rows(), 9)
    found = rows()
    pair = (first[0], found.neighbors[0])
    exclusions = exclusion_rows(torch.tensor([[int(pair[0])], [int(pair[1])]]), torch.tensor([0.25]), x)
    whole, part = (energy(moments, x, cell, ALPHA, exclusions=e).energies.sum() for e in (None, exclusions))
    first, second, d = displacements(x, cell)
    places = ((first == pair[0]) & (second == pair[1])).nonzero().squeeze(1)
    nearest = places[d[places].norm(dim=1).argmin()]
    system = PairSystem(
        torch.stack([torch.zeros(3, dtype=x.dtype), d[nearest]]),
        None,
        None,
        1,
        rows_of(GivenNeighbors(torch.tensor([[0, 1], [1, 0]])), x[:2], periodic=False),
    )
    two = moments[list(map(int, pair))]
    alone = sum_moments(moment_short_range(False), system, two, None, ALPHA[:1], cutoff=CUTOFF).energies.sum()
    assert abs(float(whole - part - 0.75 * alone)) < 1e-9 * abs(float(whole))

    at_zero = system._replace(positions=torch.zeros(2, 3, dtype=x.dtype))
    near = system._replace(positions=torch.tensor([[0.0, 0.0, 0.0], [1e-5, 0.0, 0.0]], dtype=x.dtype))
    smooth = [
        sum_moments(moment_excluded(), s, two, None, ALPHA[:1], forces=True).energies.sum() for s in (at_zero, near)
    ]
    assert torch.isfinite(smooth[0]) and abs(float(smooth[0] - smooth[1])) < 1e-3


@pytest.mark.parametrize("unit", [1.0, 2.0**-30])
@pytest.mark.parametrize("distance", [0.0, 1e-3, 0.4, 1.2, 2.0, 4.0])
def test_gaussians_that_overlap_lose_no_digits(distance, unit):
    """The fifth derivative of ``erf(a r)/r - erf(alpha r)/r`` from 50 digits, at any distance; at zero it is zero."""
    x = torch.tensor([[0.0, 0.0, 0.0], [distance * unit, 0.0, 0.0]], dtype=torch.float64)
    widths = unit * torch.tensor([[0.9], [0.5]], dtype=torch.float64)
    moments = torch.zeros(2, 1, 10, dtype=torch.float64)
    moments[1, 0, components(2).index((2, 0, 0))] = 1.0
    system = PairSystem(x, None, None, 1, rows_of(GivenNeighbors(torch.tensor([[0, 1], [1, 0]])), x, periodic=False))
    formula, cutoff = moment_short_range(True), 9.0 * unit
    alpha = torch.tensor([[0.45]], dtype=torch.float64) / unit
    others = (system.positions, None, widths, None, alpha, None, None, 1, *system.rows, None, None, None, cutoff, 0.0)
    found = pair_moments(formula.text, "", "m", 3, moments, None, *others)[0][0, 0, components(3).index((3, 0, 0))]
    with mpmath.workdps(50):
        a = 1 / mpmath.sqrt(2 * (mpmath.mpf(0.9) ** 2 + mpmath.mpf(0.5) ** 2))

        def u(r):
            return (mpmath.erf(a * r) - mpmath.erf(mpmath.mpf(0.45) * r)) / r

        expected = -float(mpmath.diff(u, mpmath.mpf(distance), 5)) if distance else 0.0
    assert abs(float(found) * unit**6 - expected) <= 1e-14 * abs(expected) + 1e-15


def test_any_radial_function():
    """Here one with parameters of atoms, from its derivatives by autograd."""
    formula = Formula("b1*b2*exp(-k*r)", ("b",), ("k",))
    x, _, cell, _ = TWO
    moments, b, k = random(9, 1, 4), random(9, 1, seed=2), torch.tensor([[0.5], [0.6]], dtype=torch.float64)
    first, second, d = displacements(x, cell)
    d.requires_grad_()
    near = d.detach().norm(dim=1) < CUTOFF

    def u(d):
        r = d.norm(dim=1)
        return near * b[first, 0] * b[second, 0] * torch.exp(-k[TWO.batch_idx[first].long(), 0] * r)

    expected = torch.zeros(9, dtype=torch.float64)
    for n, component in enumerate(components(1)):
        expected.index_add_(0, first, derivative(u, d, component).detach() * moments[second, 0, n])
    system = PairSystem(x, cell, TWO.batch_idx, 2, rows())
    found = sum_moments(formula, system, moments, b, k, gradients=True, cutoff=CUTOFF)
    torch.testing.assert_close(found.gradients[:, 0, 0], expected, rtol=1e-11, atol=1e-11)


def test_what_is_not_a_number_is_not_hidden():
    x, _, cell, _ = TWO
    moments = random(9, 1, 4)
    moments[2, 0, 1] = torch.nan
    found = energy(moments, x, cell, ALPHA, forces=True)
    assert found.energies[:5].isnan().all() and found.energies[5:].isfinite().all()
    x = x.clone()
    x[7] = torch.inf
    assert energy(random(9, 1, 4), x, cell, ALPHA, forces=True).forces[5:].isnan().any()


def test_slices_of_moments_are_channels(monkeypatch):
    """Of one sum over the same neighbors, which are not repeated for each slice."""
    x, _, cell, _ = TWO
    moments = random(2, 9, 1, 4)

    def function(moments):
        return gathered(moments, 2, x, cell, ALPHA, WIDTHS)[0]

    expected = torch.stack([function(m) for m in moments])
    monkeypatch.delattr("nvalchemiops.torch.interactions.pair.moments.fold_systems")
    for dim in (0, 2, -1):
        found = torch.func.vmap(function, dim, dim)(moments.movedim(0, dim))
        torch.testing.assert_close(found.movedim(dim, 0), expected, rtol=1e-14, atol=0.0)


def test_compiled_and_mapped(monkeypatch):
    x, _, cell, _ = TWO
    moments, listed = random(3, 9, 1, 4), rows()

    def function(moments, x):
        system = PairSystem(x, cell, TWO.batch_idx, 2, listed)
        return sum_moments(moment_short_range(False), system, moments, None, ALPHA, forces=True, cutoff=CUTOFF).forces

    expected = torch.stack([function(m, x) for m in moments])
    torch.testing.assert_close(torch.func.vmap(function, (0, None))(moments, x), expected)
    torch.testing.assert_close(torch.func.vmap(function)(moments, x.expand(3, 9, 3)), expected, rtol=1e-12, atol=1e-12)
    moved = torch.stack([x, x + 0.01, x * 1.01])
    of_cells = torch.func.vmap(lambda m, x, c: energy(m, x, c, ALPHA, WIDTHS, virial=True).virial)
    cells = torch.stack([cell, cell * 1.01, cell])
    virials = [energy(*each, ALPHA, WIDTHS, virial=True).virial for each in zip(moments, moved, cells)]
    torch.testing.assert_close(of_cells(moments, moved, cells), torch.stack(virials), rtol=1e-11, atol=1e-11)
    monkeypatch.setattr("nvalchemiops.torch.interactions.pair.op.FOLDED_SLOTS", 2 * len(listed.neighbors))
    in_parts = torch.func.vmap(function)(moments, x.expand(3, 9, 3))  # two slices and one
    torch.testing.assert_close(in_parts, expected, rtol=1e-12, atol=1e-12)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    given = leaves(moments[0], x)
    found = compiled(*given)
    torch.testing.assert_close(found, expected[0])
    slopes = torch.autograd.grad(found.square().sum(), given)
    torch.testing.assert_close(slopes, torch.autograd.grad(function(*given).square().sum(), given))


@pytest.mark.parametrize("kind", ["points", "Gaussians", "mixed"])
def test_coulomb_sums_of_open_systems_take_all_sources(kind):
    positions = TWO.positions[:5]
    given = ref.random_sources(5, width=None if kind == "points" else 0.6)
    if kind == "mixed":
        given["widths"][1::2] = 0.0
    expected = ref.everything(
        lambda x, sources: ref.open_field(x, sources, cutoff=5.0), positions, ref.sources(positions, **given)
    )
    charges = given.pop("charges")
    inputs = leaves(positions, charges, given["dipoles"], given["quadrupoles"])
    further = {**given, "dipoles": inputs[2], "quadrupoles": inputs[3]}
    energies, forces = coulomb_energy_forces(*inputs[:2], None, 5.0, **further)
    close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    close(energies, expected.energies[:, 0])
    close(forces, expected.forces)
    slopes = torch.autograd.grad(energies.sum(), inputs)
    close(-slopes[0], expected.forces)
    close(slopes[1], expected.charge_gradients.reshape(-1))
    close(slopes[2], expected.dipole_gradients.reshape(-1, 3))
    # of the traceless part
    close(slopes[3], ref.traceless(expected.quadrupole_gradients.reshape(-1, 3, 3)))
    close(coulomb_forces(positions, charges, None, 5.0, **given), forces)
    two = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    apart = torch.cat([coulomb_energy(positions[p], charges[p], None, 5.0, **{k: v[p] for k, v in given.items()})
                       for p in (slice(0, 3), slice(3, 5))])  # fmt: skip
    close(coulomb_energy(positions, charges, None, 5.0, batch_idx=two, **given), apart)


def test_damped_sums_and_bad_sources():
    x, q, cell, batch_idx = TWO
    dipoles = random(9, 3)
    damped = coulomb_energy(x, q, cell, CUTOFF, 0.55, batch_idx=batch_idx, dipoles=dipoles, widths=WIDTHS)
    moments = torch.cat([q[:, None, None], dipoles.unsqueeze(1)], -1)
    same = energy(moments, x, cell, torch.full_like(ALPHA, 0.55), WIDTHS).energies.squeeze(1)
    torch.testing.assert_close(damped, same)
    of_numpy = [
        coulomb_energy(x, q, cell, CUTOFF, alpha, batch_idx=batch_idx) for alpha in (np.float32(0.5), np.int64(0))
    ]
    plain = [coulomb_energy(x, q, cell, CUTOFF, alpha, batch_idx=batch_idx) for alpha in (0.5, 0.0)]
    torch.testing.assert_close(of_numpy, plain)
    for name, value in (("dipoles", random(9)), ("quadrupoles", random(9, 3)), ("widths", random(8)), ("widths", -1.0)):
        with pytest.raises(ValueError, match=f"`{name}`"):
            coulomb_energy(x, q, cell, CUTOFF, batch_idx=batch_idx, **{name: value})
    with pytest.raises(ValueError, match="`moments` must have 1, 4, 10"):
        energy(random(9, 1, 5), x, cell, ALPHA)
    with pytest.raises(TypeError, match="`dipoles`"):
        coulomb_energy(x, q, cell, CUTOFF, batch_idx=batch_idx, dipoles=dipoles.float())
    with pytest.raises(TypeError, match="`alpha` must be a number"):
        coulomb_energy(x, q, cell, CUTOFF, "0.5", batch_idx=batch_idx)
