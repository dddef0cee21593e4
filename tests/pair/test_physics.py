"""Pair potentials: energies, forces, virials and parameter gradients are those of the physics."""

import itertools
import math

import ase.build
import ase.cluster
import numpy as np
import pytest
import torch
from ase.calculators.lj import LennardJones
from ase.calculators.morse import MorsePotential

from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.lj import lj_energy, lj_energy_forces, lj_energy_forces_virial, lj_forces
from nvalchemiops.torch.interactions.pair import PairPotential, lennard_jones, morse
from tests.pair.cases import (
    BY_NAME,
    CASES,
    ROUNDING,
    SYSTEMS,
    as_list,
    as_matrix,
    close,
    find_pairs,
    from_pairs,
    pair_of_systems,
)
from tests.reference import pair as ref
from tests.systems import System, batch, triclinic

CUTOFF = 4.5
ALL_OUTPUTS = {"compute_forces": True, "compute_virial": True}
# a parameter of the atoms, of the system with a self energy, of species, and a switch
KINDS = pytest.mark.parametrize(
    "case",
    [BY_NAME[n] for n in ("lj waldman-hagler switched", "damped shifted force", "morse tables")],
    ids=lambda case: case.name,
)


def all_of(case, system, parameters, cutoff=CUTOFF, **options):
    """Energies, forces, gradients by all parameters, virial."""
    names = tuple(parameters.values)
    return case.evaluate(
        system.positions,
        system.cell,
        parameters,
        cutoff,
        system.batch_idx,
        compute_gradients=names,
        **ALL_OUTPUTS,
        **options,
    )


def reference_of(case, system, parameters, pairs, cutoff=CUTOFF):
    def function(positions, cell, values):
        return case.reference(positions, cell, parameters.updated(values), pairs, cutoff)

    found = ref.everything(function, system.positions, system.cell, parameters.values, system.batch_idx)
    return found[0].detach(), found[1], *found[2].values(), found[3]


def wrapped(system):
    """The same crystal, all atoms within their cells."""
    cells = system.cell[system.batch_idx.long()]
    inside = torch.linalg.solve(cells.mT, system.positions[:, :, None]) % 1.0
    return system._replace(positions=(cells.mT @ inside)[:, :, 0])


# -- against the textbook -------------------------------------------------------------------------


@CASES
@pytest.mark.parametrize("name", SYSTEMS)
def test_energies_forces_gradients_and_virial(case, name, device):
    system = SYSTEMS[name]()
    parameters = case.parameters(system)
    expected = reference_of(case, system, parameters, find_pairs(system, CUTOFF))
    close(all_of(case, system.to(device), parameters), expected)


@KINDS
def test_float32(case, device):
    """On a CPU only inputs and results are rounded; a GPU evaluates pairs in float32."""
    system = pair_of_systems().to(torch.float32)
    parameters = case.parameters(system)
    parameters = parameters.updated({k: v.float() for k, v in parameters.values.items()})
    found = all_of(case, system.to(device), parameters)
    assert all(t.dtype is torch.float32 for t in found)
    exact = parameters.updated({k: v.double() for k, v in parameters.values.items()})
    expected = all_of(case, system.to(torch.float64), exact)
    close(found, expected, tolerance=2e-7 if device.type == "cpu" else 2e-5)


@pytest.mark.parametrize("pbc", [(True, False, True), (False, False, False)])
@KINDS
def test_partly_periodic(case, pbc):
    system = wrapped(triclinic(6, charged=True))
    parameters = case.parameters(system)
    expected = reference_of(case, system, parameters, find_pairs(system, CUTOFF, pbc=pbc))
    close(all_of(case, system, parameters, pbc=torch.tensor(pbc)), expected)


@KINDS
def test_molecules_without_a_cell(case):
    """Two molecules of one batch that lie on top of each other do not see each other."""
    system = wrapped(pair_of_systems())
    parameters = case.parameters(system)
    pairs = ref.find_pairs(system.positions, None, system.batch_idx, CUTOFF + 0.2)
    found = case.evaluate(
        system.positions, None, parameters, CUTOFF, system.batch_idx, compute_forces=True, compute_virial=True
    )

    def function(positions, cell, values):
        return case.reference(positions, cell, parameters.updated(values), pairs, CUTOFF)

    energies, forces, _, virial = ref.everything(function, system.positions, None, parameters.values, system.batch_idx)
    close(found, (energies.detach(), forces, virial))


@pytest.mark.parametrize("seed", range(4))
def test_random_skewed_cells(seed):
    system = triclinic(5, charged=True, seed=10 + seed)
    for name in ("lj", "damped shifted force"):
        case = BY_NAME[name]
        parameters = case.parameters(system, seed)
        expected = reference_of(case, system, parameters, find_pairs(system, 6.0), 6.0)
        close(all_of(case, system, parameters, 6.0), expected)


# -- neighbors in any form ------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("form", ["list", "half", "matrix", "wide", "negative padding", "pairs by hand", "far list"])
def test_the_form_of_neighbors_does_not_matter(case, form):
    system = batch(triclinic(6, charged=True, seed=1), triclinic(4, charged=True, seed=2))
    parameters = case.parameters(system)
    neighbors = {
        "list": lambda: as_list(system, CUTOFF),
        "half": lambda: as_list(system, CUTOFF, half=True),
        "matrix": lambda: as_matrix(system, CUTOFF),
        "wide": lambda: as_matrix(system, CUTOFF, max_neighbors=200),
        "negative padding": lambda: as_matrix(system, CUTOFF, fill_value=-7, max_neighbors=100),
        "pairs by hand": lambda: from_pairs(find_pairs(system, CUTOFF)),
        "far list": lambda: as_list(system, 1.5 * CUTOFF),
    }[form]()
    close(all_of(case, system, parameters, **neighbors), all_of(case, system, parameters))


def test_a_list_of_unsorted_systems():
    system, case = pair_of_systems(), BY_NAME["wolf"]
    assert (system.batch_idx.diff() < 0).any()
    parameters = case.parameters(system)
    neighbors = from_pairs(find_pairs(system, CUTOFF))
    close(all_of(case, system, parameters, **neighbors), all_of(case, system, parameters))


@pytest.mark.parametrize("lone", [0, 4, 10])
def test_padding_may_be_the_number_of_an_atom(lone):
    """An atom that is nobody's neighbor lends its number to the padding."""
    crowd = [triclinic(4, seed=2), triclinic(6, seed=1)]
    alone = System.of([[0.3, -0.2, 7.0]], [1.5], np.eye(3) * 20.0)
    place = [0, 4, 10].index(lone)
    system = batch(*crowd[:place], alone, *crowd[place:])
    case = BY_NAME["lj"]
    parameters = case.parameters(system)
    padded = as_matrix(system, CUTOFF, max_neighbors=60, fill_value=lone)
    assert (padded["neighbor_matrix"] == lone).any(1).all()
    found = all_of(case, system, parameters, **padded)
    expected = all_of(case, system, parameters)
    close(found, expected)
    assert found[0][lone] == 0 and not found[1][lone].any()


# -- against ASE ----------------------------------------------------------------------------------


def fcc_argon():
    atoms = ase.build.bulk("Ar", "fcc", a=5.2, cubic=True).repeat((2, 2, 2))
    deform = np.array([[1.02, 0.0, 0.0], [0.05, 0.97, 0.0], [-0.04, 0.06, 1.01]])
    atoms.set_cell(atoms.cell.array @ deform, scale_atoms=True)
    return atoms


def hcp_slab():
    return ase.build.hcp0001("Ar", (3, 3, 3), a=3.7, c=6.1, vacuum=6.0)


def primitive():
    """One atom, and a cutoff far longer than the cell."""
    return ase.build.bulk("Ar", "fcc", a=5.3)


def cluster():
    atoms = ase.cluster.Icosahedron("Ar", 3, latticeconstant=5.3)
    atoms.set_cell(None)
    return atoms


def molecule():
    atoms = ase.build.molecule("C6H6")
    atoms.positions *= 2.7
    return atoms


ATOMS = pytest.mark.parametrize("build", [fcc_argon, hcp_slab, primitive, cluster, molecule])


def compare_with_ase(build, calculator, potential, **parameters):
    atoms = build()
    atoms.rattle(0.1, seed=3)
    atoms.calc = calculator
    cell = torch.as_tensor(atoms.cell.array) if atoms.cell.rank == 3 else None
    pbc = None if cell is None else torch.as_tensor(atoms.pbc)
    energies, forces, virial = potential(
        torch.as_tensor(atoms.positions), cell, pbc=pbc, compute_forces=True, compute_virial=True, **parameters
    )
    close([energies], [torch.as_tensor(atoms.get_potential_energies())])
    if len(atoms) > 1:
        close([forces], [torch.as_tensor(atoms.get_forces())])
    if cell is not None:
        close([-virial[0] / atoms.get_volume()], [torch.as_tensor(atoms.get_stress(voigt=False))])


@ATOMS
def test_lennard_jones_of_ase(build):
    """ASE shifts by the value at rc, as ``shifted`` does."""
    calculator = LennardJones(sigma=3.4, epsilon=0.0104, rc=8.5)
    compare_with_ase(build, calculator, lennard_jones(8.5, shifted=True), sigma=3.4, epsilon=0.0104)


@ATOMS
def test_smooth_lennard_jones_of_ase(build):
    """ASE's own cutoff function, a cubic in r², as an expression."""
    calculator = LennardJones(sigma=3.4, epsilon=0.0104, rc=8.5, ro=6.0, smooth=True)
    potential = PairPotential(
        "4*epsilon*((sigma/r)^12 - (sigma/r)^6)*select(step(s - so), (sc - s)^2*(sc + 2*s - 3*so)/(sc - so)^3, 1);"
        "s = r^2; sc = cutoff^2; so = ro^2",
        global_parameters=("sigma", "epsilon", "ro"),
        cutoff=8.5,
    )
    compare_with_ase(build, calculator, potential, sigma=3.4, epsilon=0.0104, ro=6.0)


@ATOMS
def test_morse_of_ase(build):
    """ASE's Morse potential is switched by the same quintic."""
    calculator = MorsePotential(epsilon=0.9, rho0=5.0, r0=3.6, rcut1=1.5, rcut2=2.4)
    potential = morse(2.4 * 3.6, r_switch=1.5 * 3.6)
    compare_with_ase(build, calculator, potential, depth=0.9, steepness=5.0 / 3.6, r0=3.6)


# -- virial and stress ----------------------------------------------------------------------------


def test_compressed_crystal_pushes_outwards():
    """Stress is -virial / volume: negative under compression, positive under tension."""
    for scale, sign in ((0.9, -1.0), (1.1, 1.0)):
        atoms = ase.build.bulk("Ar", "fcc", a=5.26 * scale, cubic=True)
        cell = torch.as_tensor(atoms.cell.array)
        virial = lj_energy_forces_virial(torch.as_tensor(atoms.positions), 3.4, 0.0104, 8.5, cell)[2]
        stress = -virial[0] / atoms.get_volume()
        assert (sign * stress.diagonal() > 1e-4).all()
        slope = []
        for h in (-1e-5, 1e-5):
            x = torch.as_tensor(atoms.positions) * (1 + h)
            slope.append(lj_energy(x, 3.4, 0.0104, 8.5, cell * (1 + h)).sum())
        # central differences: h² third derivatives, and rounding of the energy over h
        expected = (slope[1] - slope[0]) / 2e-5 / atoms.get_volume()
        assert stress.trace().item() == pytest.approx(expected.item(), rel=1e-6)


@KINDS
def test_virial_by_finite_strain(case):
    """In a cell without symmetry, for each of the nine strains."""
    system, h = triclinic(6, charged=True), 1e-5
    parameters = case.parameters(system)
    virial = all_of(case, system, parameters)[-1][0]
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for a, b in itertools.product(range(3), repeat=2):
        for sign in (-1.0, 1.0):
            deform = torch.eye(3, dtype=torch.float64)
            deform[a, b] += sign * h
            energies = case.evaluate(system.positions @ deform, system.cell @ deform, parameters, CUTOFF)
            expected[a, b] -= sign * energies.sum() / (2.0 * h)
    assert torch.equal(virial, virial.T)
    # central differences: h² third derivatives (about 1e3), and rounding of the energy over h
    close([virial], [expected], tolerance=1e-6)


# -- cutoff and switch ----------------------------------------------------------------------------


def dimers(r):
    """One molecule of two atoms for each distance, in some direction."""
    direction = torch.tensor([0.36, -0.48, 0.8], dtype=torch.float64)
    start = torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64).expand(len(r), 3)
    positions = torch.stack([start, start + r[:, None] * direction], dim=1).reshape(-1, 3)
    return positions, torch.arange(len(r), dtype=torch.int32).repeat_interleave(2)


def curve(potential, r, **parameters):
    """Energy of a dimer and two derivatives by the distance."""
    r = torch.as_tensor(r, dtype=torch.float64).requires_grad_()
    positions, systems = dimers(r)
    energy = potential(positions, batch_idx=systems, num_systems=len(r), energy_reduction="system", **parameters)
    first = torch.autograd.grad(energy.sum(), r, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), r)[0]
    return torch.stack([energy.detach(), first.detach(), second])


@pytest.mark.parametrize("shifted", [False, True])
def test_switching_has_two_continuous_derivatives(shifted):
    r_switch, cutoff, h = 1.3, 2.0, 1e-7
    values = {"sigma": 1.0, "epsilon": 1.0}
    switched = lennard_jones(cutoff, shifted=shifted, r_switch=r_switch)
    plain = curve(lennard_jones(cutoff, shifted=shifted), [r_switch - h, r_switch, r_switch + h], **values)
    # what is left is h times the next derivative, of which the third jumps by 60 u / (cutoff - r_switch)³
    found = curve(switched, [r_switch - h, r_switch, r_switch + h], **values)
    torch.testing.assert_close(found, plain, rtol=0, atol=1e3 * h)
    torch.testing.assert_close(found[:, 0], plain[:, 0], rtol=0, atol=1e-12)
    end = curve(switched, [cutoff - h, cutoff, cutoff + h], **values)
    torch.testing.assert_close(end, torch.zeros_like(end), rtol=0, atol=1e3 * h)
    assert end[2, 0] != 0 and not end[:, 1:].any()


def test_the_switched_curve():
    r = torch.linspace(1.0, 2.1, 45, dtype=torch.float64)
    found = curve(lennard_jones(2.0, r_switch=1.3), r, sigma=1.0, epsilon=1.0)
    x = r.clone().requires_grad_()
    u = torch.where(x < 2.0, ref.lennard_jones(x, 1.0, 1.0) * ref.smoothstep(x, 1.3, 2.0), 0.0)
    first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
    close([found], [torch.stack([u, first, torch.autograd.grad(first.sum(), x)[0]]).detach()])


@CASES
def test_nothing_beyond_the_cutoff(case):
    """Two atoms at the cutoff or farther have the energy of two atoms alone; just inside they do not."""
    cutoff = 2.5  # and a sixteenth more or less: exact in binary
    cell = 40.0 * torch.eye(3, dtype=torch.float64)[None]
    for distance, interacts in ((cutoff, False), (2.5625, False), (2.4375, True)):
        positions = torch.tensor([[0.0, 0.0, 0.0], [0.0, distance, 0.0]], dtype=torch.float64)
        pair = System(positions, torch.tensor([1.0, 2.0], dtype=torch.float64), cell, torch.zeros(2, dtype=torch.int32))
        parameters = case.parameters(pair)
        neighbors = as_list(pair, 3.0)
        assert neighbors["neighbor_list"].shape[1] == 2
        energies, forces, *_, virial = all_of(case, pair, parameters, cutoff, **neighbors)
        apart = pair._replace(positions=4.0 * positions)
        alone = all_of(case, apart, parameters, cutoff)[0]
        assert torch.equal(energies, alone) != interacts
        assert bool(forces.any()) == bool(virial.any()) == interacts


# -- symmetries -----------------------------------------------------------------------------------


@CASES
def test_supercells(case):
    """A crystal of eight cells has the energies and forces of one, and eight times the virial."""
    system = triclinic(6, charged=True)
    parameters = case.parameters(system)
    images = torch.tensor(list(itertools.product(range(2), repeat=3)), dtype=torch.float64) @ system.cell[0]
    large = System(
        (system.positions + images[:, None]).reshape(-1, 3),
        system.charges.repeat(8),
        2.0 * system.cell,
        system.batch_idx.repeat(8),
    )
    species = None if parameters.species is None else parameters.species.repeat(8)
    atoms = {name: value.repeat(8) for name, value in parameters.atom.items()}
    repeated = parameters._replace(atom=atoms, species=species)
    energies, forces, *gradients, virial = all_of(case, system, parameters)
    found = all_of(case, large, repeated)
    close((found[0], found[1], found[-1]), (energies.repeat(8), forces.repeat(8, 1), 8.0 * virial))
    for name, a, b in zip(parameters.values, found[2:-1], gradients):
        close([a], [b.repeat(8) if name in parameters.atom else 8.0 * b])


@KINDS
@pytest.mark.parametrize("change", ["left-handed", "skewed basis", "wrapping", "rotation", "inversion"])
def test_only_the_crystal_matters(case, change):
    system = triclinic(6, charged=True)
    parameters = case.parameters(system)
    energies, forces, *_, virial = all_of(case, system, parameters)
    x, cell = system.positions, system.cell
    turn = torch.eye(3, dtype=torch.float64)
    if change == "left-handed":
        cell = cell[:, [1, 0, 2]]
        assert torch.linalg.det(cell[0]) * torch.linalg.det(system.cell[0]) < 0
    elif change == "skewed basis":
        cell = torch.tensor([[1.0, 0, 0], [2, 1, 0], [-1, 1, 1]], dtype=torch.float64) @ cell
    elif change == "wrapping":
        x = x + torch.randint(-4, 5, x.shape, generator=torch.Generator().manual_seed(0)).double() @ cell[0]
    elif change == "rotation":
        turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(1)).double())[0]
    else:
        turn = -turn
    moved = system._replace(positions=x @ turn, cell=cell @ turn)
    found = all_of(case, moved, parameters)
    # positions that are cells apart lose digits
    close((found[0], found[1], found[-1]), (energies, forces @ turn, turn.T @ virial @ turn), tolerance=1e-11)
    # the sum of forces vanishes to rounding of the largest
    assert found[1].sum(0).abs().max() < ROUNDING * forces.abs().max()


# -- tables ---------------------------------------------------------------------------------------


def test_tables_are_loops_over_pairs():
    system = pair_of_systems()
    species = torch.tensor([2, 0, 1, 1, 0, 2, 0, 0, 1, 2])
    sigma = torch.tensor([[1.4, 1.5, 1.7], [1.5, 1.6, 1.3], [1.7, 1.3, 1.2]], dtype=torch.float64)
    epsilon = torch.tensor([[1.0, 0.5, 0.7], [0.5, 2.0, 0.3], [0.7, 0.3, 1.1]], dtype=torch.float64)
    expected = torch.zeros(10, dtype=torch.float64)
    pairs = find_pairs(system, CUTOFF)
    for i, j, r in zip(pairs.i.tolist(), pairs.j.tolist(), ref.distances_of(system.positions, system.cell, pairs)):
        if r < CUTOFF:
            a, b = species[i], species[j]
            expected[i] += 0.5 * ref.lennard_jones(r, sigma[a, b], epsilon[a, b])
    found = lj_energy(
        system.positions,
        sigma,
        epsilon,
        CUTOFF,
        system.cell,
        mixing=None,
        species=species.to(torch.int32),
        batch_idx=system.batch_idx,
    )
    close([found], [expected])


@pytest.mark.parametrize("rule", ["lorentz-berthelot", "geometric", "waldman-hagler"])
def test_a_rule_is_a_table(rule):
    """Mixing by atoms, and a table of what the rule gives for each pair of species."""
    system, species = triclinic(6), torch.tensor([2, 0, 1, 1, 0, 2])
    sigma, epsilon = torch.tensor([1.3, 1.5, 1.8]).double(), torch.tensor([0.5, 1.0, 2.0]).double()
    mix = {"lorentz-berthelot": ref.lorentz_berthelot, "geometric": ref.geometric}.get(rule, ref.waldman_hagler)
    tables = mix(sigma[:, None], sigma[None], epsilon[:, None], epsilon[None])
    found = lj_energy_forces(system.positions, *tables, CUTOFF, system.cell, mixing=None, species=species)
    close(
        found,
        lj_energy_forces(system.positions, sigma[species], epsilon[species], CUTOFF, system.cell, mixing=rule),
    )


# -- exclusions -----------------------------------------------------------------------------------

EXCLUDED, FACTORS = ((0, 1), (4, 2), (3, 5)), (0.0, 0.5, 0.25)
EXCLUSIONS = {"exclusions": torch.tensor(EXCLUDED).T, "exclusion_factors": torch.tensor(FACTORS)}


def nearest(system, i, j):
    """Distance of the nearest image, among far more than are needed."""
    images = torch.tensor(list(itertools.product(range(-6, 7), repeat=3)), dtype=torch.float64) @ system.cell[0]
    return (system.positions[j] - system.positions[i] + images).norm(dim=1).min()


@KINDS
def test_excluded_pairs_are_missing(case):
    """Full energy, less the excluded part of each pair, half of it from either atom."""
    system = triclinic(6, charged=True)
    parameters = case.parameters(system)
    energies = case.evaluate(system.positions, system.cell, parameters, CUTOFF)
    r_switch = 0.7 * CUTOFF if case.switched else None
    for (i, j), factor in zip(EXCLUDED, FACTORS):
        r = nearest(system, i, j)
        assert r < CUTOFF
        one = ref.Pairs(*(torch.tensor([v]) for v in (i, j)), torch.zeros(1, 3).double(), None, torch.zeros(6).long())
        cutoff = torch.tensor(CUTOFF, dtype=torch.float64)
        u = case.pair(r, ref.of_pairs(parameters, one), cutoff)
        if r_switch:
            u = u * ref.smoothstep(r, r_switch, CUTOFF)
        energies[[i, j]] -= 0.5 * (1.0 - factor) * u
    close([case.evaluate(system.positions, system.cell, parameters, CUTOFF, **EXCLUSIONS)], [energies])


@KINDS
def test_everything_with_exclusions(case):
    system = triclinic(6, charged=True)
    parameters = case.parameters(system)
    pairs = find_pairs(system, CUTOFF, exclusions=EXCLUDED, factors=FACTORS)
    expected = reference_of(case, system, parameters, pairs)
    for neighbors in ({}, as_list(system, CUTOFF, half=True), as_matrix(system, 1.4 * CUTOFF)):
        close(all_of(case, system, parameters, **EXCLUSIONS, **neighbors), expected)


def test_forces_with_exclusions_by_finite_differences():
    system, h = triclinic(6), 1e-5

    def total(positions):
        return lj_energy(positions, 1.6, 1.0, CUTOFF, system.cell, **EXCLUSIONS).sum()

    forces = lj_forces(system.positions, 1.6, 1.0, CUTOFF, system.cell, **EXCLUSIONS)
    expected = torch.zeros_like(forces)
    for i, a in itertools.product(range(6), range(3)):
        step = torch.zeros_like(forces)
        step[i, a] = h
        expected[i, a] = -(total(system.positions + step) - total(system.positions - step)) / (2.0 * h)
    # central differences: h² third derivatives (about 1e3), and rounding of the energy over h
    close([forces], [expected], tolerance=1e-6)


@KINDS
def test_excluded_partners_may_be_stored_in_any_cell(case):
    system = triclinic(6, charged=True)
    parameters = case.parameters(system)
    expected = all_of(case, system, parameters, **EXCLUSIONS)
    for atom, image in ((1, [1.0, -2.0, 0.0]), (4, [0.0, 0.0, 3.0])):
        moved = system.positions.clone()
        moved[atom] += torch.tensor(image).double() @ system.cell[0]
        # positions that are cells apart lose digits
        close(all_of(case, system._replace(positions=moved), parameters, **EXCLUSIONS), expected, tolerance=1e-11)


@pytest.mark.parametrize("axis", range(3))
def test_one_of_two_nearest_images_is_excluded(axis):
    """Half a lattice vector apart a pair has two nearest images: one of them is meant, for both atoms the same."""
    cell = torch.diag(torch.tensor([3.0, 6.0, 6.5]).roll(axis)).double()
    positions = torch.zeros(2, 3, dtype=torch.float64)
    positions[1, axis] = 1.5
    options = {"exclusions": torch.tensor([[0], [1]])}
    full = lj_energy(positions, 1.4, 1.0, 2.5, cell)
    energies, forces = lj_energy_forces(positions, 1.4, 1.0, 2.5, cell, **options)
    half = 0.5 * ref.lennard_jones(torch.tensor(1.5).double(), 1.4, 1.0)
    close([energies], [full - half])
    assert forces[0, axis] == -forces[1, axis] != 0


def test_excluded_atoms_on_one_spot():
    """As a nucleus and its shell: no 0/0 from the pair that does not count, in any derivative."""
    system = triclinic(6, charged=True)
    positions = system.positions.clone()
    positions[1] = positions[0]
    case = BY_NAME["damped shifted force"]
    parameters = case.parameters(system)
    positions.requires_grad_()
    options = {"exclusions": torch.tensor([[1], [0]]), **ALL_OUTPUTS}
    energies, forces, virial = case.evaluate(positions, system.cell, parameters, CUTOFF, **options)
    second = torch.autograd.grad(forces.square().sum(), positions)[0]
    assert all(t.isfinite().all() for t in (energies, forces, virial, second))
    # from the pair moved apart by almost nothing
    nudged = positions.detach().clone()
    nudged[1, 0] += 1e-9
    near = case.evaluate(nudged, system.cell, parameters, CUTOFF, **options)
    close([t.detach() for t in (energies, forces, virial)], near, tolerance=1e-7)
    assert not case.evaluate(positions, system.cell, parameters, CUTOFF).isfinite().all()


# -- vibrations -----------------------------------------------------------------------------------


def hessian(energy, positions):
    n = positions.numel()
    return torch.autograd.functional.hessian(energy, positions).reshape(n, n)


def test_vibrations_of_an_argon_crystal():
    """At Γ of the cubic cell of fcc: three acoustic zeros, and the modes of X, of which each has three partners."""
    atoms = ase.build.bulk("Ar", "fcc", a=5.26, cubic=True)
    x, cell, h = torch.as_tensor(atoms.positions), torch.as_tensor(atoms.cell.array), 1e-4

    def energy(positions):
        return lj_energy(positions, 3.4, 0.0104, 8.5, cell, r_switch=7.0).sum()

    found = hessian(energy, x)
    columns = []
    for i, a in itertools.product(range(4), range(3)):
        step = torch.zeros_like(x)
        step[i, a] = h
        plus, minus = (lj_forces(x + s * step, 3.4, 0.0104, 8.5, cell, r_switch=7.0).reshape(-1) for s in (1.0, -1.0))
        columns.append(-(plus - minus) / (2.0 * h))
    # central differences: h² fourth derivatives, 1e-8 times some hundred
    close([found], [torch.stack(columns, dim=1)], tolerance=1e-5)
    modes = torch.linalg.eigvalsh(found)
    # rounding of sums that vanish; modes by symmetry are equal as far as the crystal's coordinates are
    assert modes[:3].abs().max() < 1e-12 * modes[-1]
    assert modes[3] > 0.01 * modes[-1]
    torch.testing.assert_close(modes[3:9], modes[3].expand(6), rtol=1e-10, atol=0)
    torch.testing.assert_close(modes[9:], modes[9].expand(3), rtol=1e-10, atol=0)


def test_vibrations_of_springs_between_nearest_neighbors():
    """Fcc at X: transverse 4 k/m, longitudinal 8 k/m (Ashcroft and Mermin, ch. 22), with k = 2 D a² of a Morse bond."""
    depth, steepness, r0 = 0.7, 1.3, 2.0
    atoms = ase.build.bulk("Ar", "fcc", a=r0 * math.sqrt(2.0), cubic=True)
    cell = torch.as_tensor(atoms.cell.array)
    bonds = morse(1.2 * r0)

    def energy(positions):
        return bonds(positions, cell, depth=depth, steepness=steepness, r0=r0).sum()

    modes = torch.linalg.eigvalsh(hessian(energy, torch.as_tensor(atoms.positions)))
    k = 2.0 * depth * steepness**2
    expected = k * torch.tensor([0.0] * 3 + [4.0] * 6 + [8.0] * 3, dtype=torch.float64)
    torch.testing.assert_close(modes, expected, rtol=1e-12, atol=1e-12)


# -- charges --------------------------------------------------------------------------------------


def of_charges(system, pair, alpha, alone=None, cutoff=CUTOFF):
    """The reference as a function of positions, cell, and a dict of charges and damping."""
    pairs = find_pairs(system, cutoff)

    def function(positions, cell, values):
        by_atom, by_system = {"q": values["q"]}, {"alpha": values["alpha"]}
        return ref.energies(pair, positions, cell, ref.Parameters(by_atom, by_system), pairs, cutoff, alone=alone)

    n_systems = len(system.cell)
    values = {"q": system.charges, "alpha": torch.as_tensor(alpha, dtype=torch.float64).expand(n_systems).clone()}
    return function, values


def screened(r, p, rc):
    return ref.ewald_real_space(r, p.q1, p.q2, p.alpha)


@pytest.mark.parametrize("alpha", [0.0, 0.35, (0.3, 0.5)], ids=["bare", "damped", "by system"])
def test_coulomb(alpha):
    system = pair_of_systems()
    function, values = of_charges(system, screened, alpha)
    energies, forces, *_ = ref.everything(function, system.positions, system.cell, values, system.batch_idx)
    given = alpha if isinstance(alpha, float) else values["alpha"]
    arguments = (system.positions, system.charges, system.cell, CUTOFF, given)
    options = {"batch_idx": system.batch_idx}
    close([electrostatics.coulomb_energy(*arguments, **options)], [energies.detach()])
    close([electrostatics.coulomb_forces(*arguments, **options)], [forces])
    close(electrostatics.coulomb_energy_forces(*arguments, **options), [energies.detach(), forces])


def test_forms_of_neighbors_for_charges():
    system = batch(triclinic(6, charged=True, seed=1), triclinic(4, charged=True, seed=2))
    half, table = as_list(system, CUTOFF, half=True), as_matrix(system, CUTOFF, fill_value=-1, max_neighbors=90)
    arguments = (system.positions, system.charges, system.cell, CUTOFF, 0.3)
    options = {"batch_idx": system.batch_idx}
    expected = electrostatics.coulomb_energy_forces(*arguments, **options)
    for neighbors in (half, table):
        close(electrostatics.coulomb_energy_forces(*arguments, **options, **neighbors), expected)
    expected = electrostatics.dsf_coulomb(system.positions, system.charges, CUTOFF, 0.3, system.cell, **options)
    half["unit_shifts"] = half.pop("neighbor_shifts")
    for neighbors in (half, table):
        close(
            electrostatics.dsf_coulomb(
                system.positions, system.charges, CUTOFF, 0.3, system.cell, **options, **neighbors
            ),
            expected,
        )


@pytest.mark.parametrize("alpha", [0.0, 0.2, (0.15, 0.3)], ids=["undamped", "damped", "by system"])
def test_damped_shifted_force(alpha):
    """Energies of systems, with the self energy."""
    system = pair_of_systems()

    def pair(r, p, rc):
        return ref.damped_shifted_force(r, p.q1, p.q2, p.alpha, rc)

    function, values = of_charges(system, pair, alpha, lambda p, rc: ref.wolf_self(p.q, p.alpha, rc))
    energies, forces, _, virial = ref.everything(function, system.positions, system.cell, values, system.batch_idx)
    given = alpha if isinstance(alpha, float) else values["alpha"]
    found = electrostatics.dsf_coulomb(
        system.positions, system.charges, CUTOFF, given, system.cell, system.batch_idx, compute_virial=True
    )
    summed = torch.stack([energies[system.batch_idx == s].sum() for s in range(2)]).detach()
    close(found, (summed, forces, virial))
    options = {"compute_forces": False, "batch_idx": system.batch_idx}
    alone = electrostatics.dsf_coulomb(system.positions, system.charges, CUTOFF, given, system.cell, **options)
    assert len(alone) == 1
    close(alone, [summed])


def test_real_space_of_ewald():
    system, alpha = pair_of_systems(), torch.tensor([0.4, 0.6], dtype=torch.float64)
    function, values = of_charges(system, screened, alpha)
    energies, forces, slopes, virial = ref.everything(function, system.positions, system.cell, values, system.batch_idx)
    found = electrostatics.ewald_real_space(
        system.positions,
        system.charges,
        system.cell,
        alpha,
        batch_idx=system.batch_idx,
        cutoff=CUTOFF,
        compute_charge_gradients=True,
        **ALL_OUTPUTS,
    )
    close(found, (energies.detach(), forces, slopes["q"], virial))


def charges_in(positions, base):
    """Charges that follow the geometry."""
    wave = torch.tensor([0.7, -0.4, 0.9], dtype=positions.dtype)
    return base + 0.3 * torch.sin(positions @ wave)


@pytest.mark.parametrize("with_list", [False, True])
def test_hybrid_forces(with_list):
    """Explicit forces at fixed charges, and the gradient through the charges, are the total forces."""
    system, alpha = pair_of_systems(), torch.tensor([0.4, 0.6], dtype=torch.float64)
    function, values = of_charges(system, screened, alpha)
    x = system.positions.clone().requires_grad_()
    values["q"] = charges_in(x, system.charges)
    expected = -torch.autograd.grad(function(x, system.cell, values).sum(), x)[0]

    x = system.positions.clone().requires_grad_()
    cell, split = system.cell.clone().requires_grad_(), alpha.clone().requires_grad_()
    neighbors = from_pairs(find_pairs(system, CUTOFF)) if with_list else {}
    energies, forces = electrostatics.ewald_real_space(
        x,
        charges_in(x, system.charges),
        cell,
        split,
        batch_idx=system.batch_idx,
        cutoff=CUTOFF,
        compute_forces=True,
        hybrid_forces=True,
        **neighbors,
    )
    through_charges = torch.autograd.grad(energies.sum(), (x, cell, split), allow_unused=True)
    close([forces.detach() - through_charges[0]], [expected])
    assert through_charges[1:] == (None, None)
    # not a sum of which one part is nothing
    assert forces.abs().max() > 1e-2 and through_charges[0].abs().max() > 1e-2
