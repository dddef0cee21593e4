"""The three-body energy of D3: against s-dftd3, finite differences, and itself put together in other ways."""

import itertools

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from dftd3.interface import DispersionModel, RationalDampingParam, ZeroDampingParam

from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.torch.interactions.dispersion import D3Parameters, d3_dispersion, damping_parameters
from nvalchemiops.torch.interactions.dispersion.three_body import three_body_derivatives
from nvalchemiops.torch.neighbors import neighbor_list

BOHR = 0.529177210903
PARAMETERS = D3Parameters.load()
PBE = damping_parameters("pbe")


def tensors(atoms):
    cell = torch.tensor(atoms.cell.array / BOHR) if atoms.pbc.any() else None
    return torch.tensor(atoms.positions / BOHR), torch.tensor(atoms.numbers), cell


def crystal():
    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    atoms.rattle(0.1, seed=1)
    return atoms


@pytest.mark.parametrize("kind", ["bj", "zero"])
@pytest.mark.parametrize("name", ["C6H6", "CH3CH2OH", "SiH4", "PH3"])
def test_molecules_equal_s_dftd3(name, kind):
    atoms = molecule(name)
    x, numbers, _ = tensors(atoms)
    found = d3_dispersion(
        x, numbers, damping_parameters("pbe", kind), PARAMETERS, cutoff=99.0, s9=1.0, compute_forces=True
    )
    damping = {"bj": RationalDampingParam, "zero": ZeroDampingParam}[kind]
    model = DispersionModel(atoms.numbers, atoms.positions / BOHR)
    expected = model.get_dispersion(damping(method="pbe", atm=True), grad=True)
    without = model.get_dispersion(damping(method="pbe", atm=False), grad=True)
    assert abs(expected["energy"] - without["energy"]) > 1e-8  # there is something to compare
    assert abs(found[0].sum().item() - expected["energy"]) < 1e-12
    np.testing.assert_allclose(found[1].numpy(), -expected["gradient"], atol=1e-12)


@pytest.mark.parametrize("pbc", [(True, True, True), (True, True, False)])
def test_crystals_equal_s_dftd3(pbc):
    atoms = crystal()
    atoms.pbc = pbc
    if not all(pbc):
        atoms.center(vacuum=20.0, axis=2)
    x, numbers, cell = tensors(atoms)
    model = DispersionModel(atoms.numbers, atoms.positions / BOHR, atoms.cell.array / BOHR, np.array(pbc))
    model.set_realspace_cutoff(30.0, 14.0, 25.0)
    expected = model.get_dispersion(RationalDampingParam(method="pbe", atm=True), grad=True)
    energies, forces, _, virial = d3_dispersion(
        x,
        numbers,
        PBE,
        PARAMETERS,
        cell,
        pbc=torch.tensor(pbc),
        cutoff=30.0,
        coordination_cutoff=25.0,
        three_body_cutoff=14.0,
        s9=1.0,
        compute_forces=True,
        compute_virial=True,
    )
    assert abs(energies.sum().item() - expected["energy"]) < 1e-11
    np.testing.assert_allclose(forces.numpy(), -expected["gradient"], atol=1e-11)
    np.testing.assert_allclose(virial[0].numpy(), -expected["virial"], atol=1e-10)


def test_one_triangle_by_hand():
    """Eq. (11) to (14) of Grimme et al. 2010, for three argon atoms: E = C9 (3 cos cos cos + 1) / (r r r)^3 f."""
    x = torch.tensor([[0.0, 0.0, 0.0], [7.0, 0.0, 0.0], [2.0, 6.5, 1.0]], dtype=torch.float64)
    numbers = torch.full((3,), 18)
    whole, pairs = (d3_dispersion(x, numbers, PBE, PARAMETERS, cutoff=50.0, s9=s9)[0].sum() for s9 in (1.0, 0.0))
    c6 = PARAMETERS.c6ab[18, 18, 0, 0]
    sides = torch.pdist(x)[[0, 2, 1]]  # 01, 12, 02
    a, b, c = sides**2
    cosines = (a + b - c) / (2 * (a * b).sqrt()), (b + c - a) / (2 * (b * c).sqrt()), (a + c - b) / (2 * (a * c).sqrt())
    mean = sides.prod() ** (1 / 3) / (4 / 3 * PARAMETERS.r0ab[18, 18])
    expected = c6**1.5 * (3 * cosines[0] * cosines[1] * cosines[2] + 1) / sides.prod() ** 3 / (1 + 6 * mean**-16)
    torch.testing.assert_close(whole - pairs, expected, rtol=1e-9, atol=0.0)


def energy(x, cell, numbers, s9=1.0, **options):
    options = {"cutoff": 13.0, "three_body_cutoff": 12.0, "smoothing": 5.0} | options
    return d3_dispersion(x, numbers, PBE, PARAMETERS, cell, s9=s9, **options)


def test_gradients_by_positions_cell_and_s9():
    """Of carbon and oxygen, whose coefficients depend on their neighbors there."""
    x, numbers, cell = tensors(crystal())
    x, cell, numbers = 0.8 * x, 0.8 * cell, torch.where(numbers == 11, 6, 8)
    weights = torch.linspace(0.5, 1.5, len(numbers), dtype=torch.float64)
    s9 = torch.tensor(1.0, dtype=torch.float64)
    inputs = [t.clone().requires_grad_() for t in (x, cell, s9)]

    def weighted(x, cell, s9):
        return 1e3 * (weights * energy(x, cell, numbers, s9)[0]).sum()

    assert torch.autograd.gradcheck(weighted, inputs, eps=1e-4, atol=1e-7, rtol=1e-5, fast_mode=True)


def test_explicit_forces_and_virial_are_those_of_autograd():
    x, numbers, cell = (t.requires_grad_() if t.is_floating_point() else t for t in tensors(crystal()))
    energies, forces, _, virial = energy(x, cell, numbers, compute_forces=True, compute_virial=True)
    by_x, by_cell = torch.autograd.grad(energies.sum(), (x, cell))
    torch.testing.assert_close(forces.detach(), -by_x, rtol=1e-10, atol=1e-15)
    torch.testing.assert_close(virial[0].detach(), -(x.mT @ by_x + cell.mT @ by_cell).detach(), rtol=1e-10, atol=1e-14)


def test_molecules_without_cells_have_a_virial():
    """``Σ r F^T`` of the three-body energy alone, whose part of the whole is small."""
    x, numbers, _ = tensors(molecule("C6H6"))
    both, batch_idx = torch.cat([x, 1.1 * x]), torch.arange(2, dtype=torch.int32).repeat_interleave(len(x))
    options = {"batch_idx": batch_idx, "compute_forces": True, "compute_virial": True, "smoothing": None}
    found, without = (energy(both, None, numbers.repeat(2), s9, **options) for s9 in (1.0, 0.0))
    dyads = both.unsqueeze(-1) * (found[1] - without[1]).unsqueeze(-2)
    expected = torch.zeros(2, 3, 3, dtype=torch.float64).index_add(0, batch_idx, dyads)
    torch.testing.assert_close(found[3] - without[3], expected, rtol=1e-9, atol=1e-15)
    assert expected.abs().amax() > 1e-5


def test_forward_mode():
    x, numbers, _ = tensors(molecule("H2O"))
    x.requires_grad_()
    (slope,) = torch.autograd.grad(energy(x, None, numbers)[0].sum(), x)
    along = torch.linspace(-1.0, 1.0, x.numel(), dtype=x.dtype).view_as(x)
    states = PARAMETERS.states(numbers.unique().tolist())
    options = {"cutoff": 13.0, "three_body_cutoff": 12.0, "smoothing": 5.0, "s9": 1.0}
    options |= dict(zip(("neighbor_list", "neighbor_ptr"), neighbor_list(x.detach(), 13.0, return_neighbor_list=True)))
    _, pushed = torch.func.jvp(
        lambda x: d3_dispersion(x, numbers, PBE, states, **options)[0].sum(), (x.detach(),), (along,)
    )
    torch.testing.assert_close(pushed, (slope * along).sum(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("explicit", [False, True])
def test_second_derivatives_are_refused(explicit):
    x, numbers, _ = tensors(molecule("H2O"))
    x.requires_grad_()
    energies, *rest = energy(x, None, numbers, compute_forces=explicit)
    forces = rest[0] if explicit else torch.autograd.grad(energies.sum(), x, create_graph=True)[0]
    with pytest.raises(NotDifferentiableError, match="three_body"):
        torch.autograd.grad(forces.square().sum(), x)


def test_both_formats_batches_and_threads_give_the_same():
    systems = [tensors(crystal()), tensors(bulk("Si", cubic=True)), tensors(bulk("Cu", cubic=True))]
    alone = [energy(x, cell, n, compute_forces=True, compute_virial=True) for x, n, cell in systems]
    x, numbers = (torch.cat([s[k] for s in systems]) for k in (0, 1))
    cell = torch.stack([s[2] for s in systems])
    batch_idx = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor([len(s[1]) for s in systems]))
    together = energy(x, cell, numbers, batch_idx=batch_idx, compute_forces=True, compute_virial=True)
    for found, *parts in zip(together, *alone, strict=True):
        # the table of C6 of all elements is another one, to rounding
        torch.testing.assert_close(found, torch.cat(parts), rtol=1e-9, atol=1e-14)

    matrix, _, shifts = neighbor_list(x, 13.0, cell, batch_idx=batch_idx)
    options = {"batch_idx": batch_idx, "neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(energy(x, cell, numbers, **options, compute_forces=True, compute_virial=True))
    finally:
        torch.set_num_threads(before)
    for found, once, twice in zip(together, *results, strict=True):
        torch.testing.assert_close(found, once, rtol=1e-12, atol=1e-16)
        assert torch.equal(once, twice)


def test_energies_stay_smooth_when_a_side_ends():
    """With smoothing, energy and two derivatives are continuous as a triangle opens through the cutoff."""
    numbers = torch.tensor([18, 54, 36])
    steps = torch.linspace(11.96, 12.04, 81, dtype=torch.float64)

    def three_body(smoothing):
        found = []
        for r in steps:
            x = torch.tensor([[0.0, 0.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
            x[2] = torch.stack([r, 0.0 * r, 0.0 * r])
            options = {"cutoff": 40.0, "three_body_cutoff": 12.0, "smoothing": smoothing}
            found.append(
                sum(
                    s * d3_dispersion(x, numbers, PBE, PARAMETERS, s9=t, **options)[0].sum()
                    for s, t in ((1.0, 1.0), (-1.0, 0.0))
                )
            )
        return torch.stack(found)

    sharp, smooth = three_body(None), three_body(4.0)
    assert (sharp[0] != 0.0) and (sharp[-1] == 0.0)
    jump = sharp.diff().abs().max()
    assert smooth.diff().abs().max() < 1e-3 * jump
    curvature = smooth.diff().diff() / (steps[1] - steps[0]) ** 2
    assert curvature.diff().abs().max() < 0.1 * jump  # a kink of the slope would show as a spike


def test_all_shapes_of_lists():
    """A list that reaches farther changes nothing; a list of half the pairs neither."""
    x, numbers, cell = tensors(crystal())
    expected = energy(x, cell, numbers, compute_forces=True)
    for half, reach in itertools.product((False, True), (13.0, 16.0)):
        pairs, ptr, shifts = neighbor_list(x, reach, cell, return_neighbor_list=True, half_fill=half)
        given = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts, "half_list": half}
        found = energy(x, cell, numbers, compute_forces=True, **given)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-16)


def test_coefficients_of_all_published_elements():
    """As in a model for the whole periodic table: coefficients of elements that do not occur are zero."""
    generator = torch.Generator().manual_seed(0)
    x, c = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (3, 8))
    pairs = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    pairs = pairs[pairs[:, 0] != pairs[:, 1]].int()
    species, radii = torch.zeros(5, dtype=torch.int32), torch.ones(1, 1, dtype=torch.float64)

    def triples(positive, negative):
        """What the op returns with this many coefficients of either sign, five and three of which are not zero."""
        pad = torch.nn.functional.pad
        wide = torch.cat([pad(c[:, :5], (0, positive - 5)), pad(c[:, 5:], (0, negative - 3))], 1)
        given = (species, radii, None, 1, torch.arange(0, 21, 4).int(), pairs[:, 1].contiguous(), None, 0, -1)
        energies, forces, by_c, *_ = three_body_derivatives(x, None, wide, *given, positive, 9.0, 9.0)
        return energies, forces, torch.cat([by_c[:, :5], by_c[:, positive : positive + 3]], 1)

    elements = PARAMETERS.states(range(1, 104))
    positive = elements.n_positive
    found = triples(positive, elements.vectors.shape[1] - positive)
    assert found[0].abs().min() > 0.0
    for a, b in zip(found, triples(5, 3), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    with pytest.raises(ValueError, match="s9"):
        triples(500, 13)
