"""DFT-D3 against the program s-dftd3, the package tad-dftd3 and the papers."""

import itertools

import numpy as np
import pytest
import tad_dftd3
import torch
from dftd3 import interface

from nvalchemiops.torch.interactions.dispersion import RationalDamping, ZeroDamping, d3_dispersion, damping_parameters
from tests.reference import dispersion as slow
from tests.support.comparing import within
from tests.support.molecules import (
    DAMPING,
    F64,
    PBE,
    PROGRAM,
    SOLIDS,
    Atoms,
    Found,
    batch,
    complexes,
    data,
    displaced,
    evaluate,
    find_pairs,
    molecule,
    molecules,
    parameters,
    program,
    program_batch,
    solid,
    with_numbers,
)

# cutoffs in bohr: of pairs, and of coordination numbers
FAR = (60.0, 40.0)
# a counted pair never falls below 1e-7 and a pair energy never to zero: both programs must end at the same place
EQUAL = (45.0, 45.0)


# -- the program ----------------------------------------------------------------------------------


def pairs_of_elements():
    """Each of the 4465 pairs once, from 0.5 to 20 angstrom, and a tenth of them at each of eight more distances."""
    every = np.array(list(itertools.combinations_with_replacement(range(1, 95), 2)))
    rng = np.random.default_rng(1)
    numbers = np.concatenate([every, *(every[rng.random(len(every)) < 0.1] for _ in range(8))])
    first = np.exp(rng.uniform(np.log(1.0), np.log(37.0), len(every)))
    more = np.repeat([1.0, 2.0, 3.5, 5.0, 7.0, 12.0, 24.0, 37.0], 2 * len(every))
    distances = np.concatenate([first, more])[: len(numbers)]
    directions = rng.normal(size=(len(numbers), 3))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return [
        Atoms(torch.tensor(np.stack([np.zeros(3), r * u])), torch.tensor(z, dtype=torch.int32))
        for z, r, u in zip(numbers, distances, directions)
    ]


@pytest.mark.parametrize(("functional", "kind"), [("pbe", "bj"), ("pbe", "zero")])
def test_all_pairs_of_elements(functional, kind):
    """Finite, and what the program has, for all pairs up to plutonium."""
    systems = pairs_of_elements()
    found = evaluate(batch(*systems), damping_parameters(functional, kind), *EQUAL)
    assert all(bool(part.isfinite().all()) for part in found)
    expected = program_batch(systems, PROGRAM[kind](method=functional), *EQUAL)
    within(found, expected)
    torch.testing.assert_close(found.energy, expected.energy, rtol=1e-11, atol=0.0)  # from 1e-13 to 1e-2 hartree


def clusters_of_all_elements(n_clusters=40, n_atoms=24):
    """Dense and thin clusters, so that all reference molecules of all elements are mixed."""
    rng = np.random.default_rng(2)
    found = []
    for n in range(n_clusters):
        numbers = rng.integers(1, 95, n_atoms)
        grid = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3)[:n_atoms]
        spacing = 3.5 + 4.0 * n / n_clusters
        positions = spacing * (grid + rng.uniform(-0.2, 0.2, grid.shape))
        found.append(Atoms(torch.tensor(positions), torch.tensor(numbers, dtype=torch.int32)))
    return found


def test_clusters_of_all_elements():
    systems = clusters_of_all_elements()
    together = batch(*systems)
    within(evaluate(together, PBE, *EQUAL), program_batch(systems, PROGRAM["bj"](method="pbe"), *EQUAL))
    # they do reach the reference molecules with many neighbors
    *_, coordination = d3_dispersion(*together[:2], PBE, parameters(), batch_idx=together.batch_idx, cutoff=45.0)
    assert float(coordination.min()) < 0.5 and float(coordination.max()) > 8.0


@pytest.mark.parametrize(("functional", "kind"), DAMPING)
def test_complexes(functional, kind):
    """The 22 complexes of Jurecka et al., as one ragged batch, with the program's parameters and with ours."""
    systems, damping = complexes(), damping_parameters(functional, kind)
    found = evaluate(batch(*systems), damping, *EQUAL)
    within(found, program_batch(systems, PROGRAM[kind](method=functional), *EQUAL))
    within(found, program_batch(systems, with_numbers(damping), *EQUAL))


def test_molecules():
    systems = molecules()
    damping = damping_parameters("r2scan")
    expected = program_batch(systems, PROGRAM["bj"](method="r2scan"), *EQUAL)
    within(evaluate(batch(*systems), damping, *EQUAL), expected)


@pytest.mark.parametrize("kind", PROGRAM)
@pytest.mark.parametrize("name", SOLIDS)
def test_solids(name, kind):
    """Crystals and slabs, periodic along what axes they are."""
    atoms = solid(name)
    found = evaluate(atoms, damping_parameters("pbe", kind), *FAR)
    within(found, program(atoms, PROGRAM[kind](method="pbe"), *FAR))


def test_programs_default_cutoffs_are_ours():
    """The module's cutoffs are those of the program if nobody sets any."""
    atoms = solid("dry ice")
    model = interface.DispersionModel(
        atoms.numbers.numpy(), atoms.positions.numpy(), atoms.cell[0].numpy(), atoms.pbc[0].numpy()
    )
    expected = model.get_dispersion(PROGRAM["bj"](method="pbe", atm=False), grad=False)["energy"]
    assert abs(float(evaluate(atoms, PBE, *FAR).energy) - float(expected)) < 1e-10


# -- the papers -----------------------------------------------------------------------------------


def slowly(atoms, damping, cutoffs, pairs):
    """Energies of atoms, forces, coordination numbers and virial from `tests.reference.dispersion` by autograd."""
    n_systems = int(atoms.systems.max()) + 1
    strain = torch.zeros(n_systems, 3, 3, dtype=F64, requires_grad=True)
    deform = torch.eye(3, dtype=F64) + strain
    x = atoms.positions.clone().requires_grad_()
    strained = torch.einsum("ia,iab->ib", x, deform[atoms.systems.long()])
    cell = None if atoms.cell is None else atoms.cell @ deform
    found = slow.dispersion(strained, cell, atoms.numbers, data(), damping, pairs, cutoffs)
    slopes = torch.autograd.grad(found.energies.sum(), (x, strain))
    return found.energies.detach(), -slopes[0], found.coordination.detach(), -slopes[1]


def assert_equals_slow_reference(atoms, damping, cutoffs, **options):
    options |= {"cutoff": cutoffs.pairs, "coordination_cutoff": cutoffs.counted}
    options |= {"compute_forces": True, "compute_virial": True}
    found = d3_dispersion(**atoms.arguments(), damping=damping, parameters=parameters(), **options)
    within(found, slowly(atoms, damping, cutoffs, find_pairs(atoms, slow.reach(cutoffs))), 1e-13)


def test_slow_reference_is_the_program():
    """The yardstick of the other tests is right by itself."""
    atoms = solid("dry ice")
    cutoffs = slow.Cutoffs(20.0, 15.0)
    pairs = find_pairs(atoms, slow.reach(cutoffs))
    for kind, program_of in PROGRAM.items():
        energies, forces, _, virial = slowly(atoms, damping_parameters("pbe", kind), cutoffs, pairs)
        expected = program(atoms, program_of(method="pbe"), *cutoffs[:2])
        within(Found(energies.sum().reshape(1), forces, virial), expected)


@pytest.mark.parametrize(("functional", "kind"), DAMPING)
@pytest.mark.parametrize("cutoffs", [slow.Cutoffs(12.0, 9.0), slow.Cutoffs(9.0, 12.0, 4.0)], ids=["sharp", "smooth"])
def test_slow_reference(functional, kind, cutoffs):
    """Energies of atoms, forces, coordination numbers and virials of two crystals in a batch."""
    atoms = batch(solid("dry ice", 0.1), solid("dry ice", 0.2))
    atoms = atoms._replace(cell=atoms.cell * torch.tensor([[[1.0]], [[1.03]]], dtype=F64))
    damping = damping_parameters(functional, kind)
    assert_equals_slow_reference(atoms, damping, cutoffs, smoothing=cutoffs.smoothing)


@pytest.mark.parametrize("pbc", [(True, True, False), (False, True, False), (False, False, False)])
@pytest.mark.parametrize("name", SOLIDS)
def test_slow_reference_of_slabs_and_chains(name, pbc):
    """In skewed cells the program itself leaves out pairs along axes that are not periodic."""
    atoms = solid(name)._replace(pbc=torch.tensor([pbc]))
    assert_equals_slow_reference(atoms, PBE, slow.Cutoffs(18.0, 12.0), pbc=atoms.pbc)


@pytest.mark.parametrize("n_atoms", [0, 1, 2, 7])
def test_slow_reference_of_few_atoms(n_atoms):
    atoms = Atoms(*(part[:n_atoms] for part in molecule("C2H6")[:2]))
    cutoffs = slow.Cutoffs(30.0, 30.0)
    pairs = find_pairs(atoms, 30.0) if n_atoms else None
    found = d3_dispersion(
        *atoms[:2], PBE, parameters(), cutoff=30.0, compute_forces=True, compute_virial=True, num_systems=1
    )
    if n_atoms:
        within(found, slowly(atoms, PBE, cutoffs, pairs), 1e-14)
    else:
        assert [tuple(part.shape) for part in found] == [(0,), (0, 3), (0,), (1, 3, 3)] and not found[3].any()


# -- tad-dftd3, which differentiates twice -----------------------------------------------------------


def tad_energy(positions, numbers, damping):
    values = {name: torch.as_tensor(value, dtype=F64) for name, value in damping._asdict().items()}
    far = tad_dftd3.Cutoff(disp2=torch.tensor(60.0, dtype=F64), cn=torch.tensor(60.0, dtype=F64))
    return tad_dftd3.dftd3(numbers.long(), positions, values | {"s9": torch.tensor(0.0, dtype=F64)}, cutoff=far).sum()


def our_energy(positions, numbers, damping):
    energies, _ = d3_dispersion(positions, numbers, damping, parameters(), cutoff=60.0)
    return energies.sum()


@pytest.mark.parametrize("name", ["H2O", "CH3OH"])
def test_hessian_and_mixed_derivative_of_tad_dftd3(name):
    """Curvature, and how forces depend on a1, a2, s8 and s6."""
    x, numbers = molecule(name)[:2]
    values = torch.tensor(PBE, dtype=F64)

    def second_derivatives(energy):
        y, v = x.clone().requires_grad_(), values.clone().requires_grad_()
        (slope,) = torch.autograd.grad(energy(y, numbers, RationalDamping(*v.unbind())), y, create_graph=True)
        rows = [torch.autograd.grad(s, (y, v), retain_graph=True) for s in slope.flatten()]
        return [torch.stack([part.flatten() for part in parts]) for parts in zip(*rows)]

    hessian, mixed = second_derivatives(our_energy)
    assert float(hessian.abs().max()) > 1e-5 and bool((mixed.abs().max(0).values > 1e-7).all())
    within((hessian, mixed), second_derivatives(tad_energy), 1e-11)


def test_zero_damping_with_other_parameters():
    """All five of its numbers, none of them what any functional has."""
    systems = complexes()[:6]
    damping = ZeroDamping(rs6=1.21, s8=0.9, s6=0.83, rs8=0.93, beta=0.021)
    within(evaluate(batch(*systems), damping, *EQUAL), program_batch(systems, with_numbers(damping), *EQUAL))


def test_displacement_breaks_symmetry():
    """So that no force compared above is zero by symmetry."""
    atoms = Atoms.of(displaced(SOLIDS["fcc copper"](), 0.0))
    assert not evaluate(atoms, PBE, 20.0, 20.0).forces.abs().max() > 1e-12
    two = Atoms.of(displaced(SOLIDS["dry ice"](), 0.03))
    assert float(evaluate(two, PBE, 20.0, 20.0).forces.norm(dim=1).min()) > 1e-7
