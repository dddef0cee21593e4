"""Pair potentials: energies, forces, virials and parameter gradients are those of the physics."""

import itertools
import math
from functools import partial

import ase.build
import ase.cluster
import pytest
import torch

from nvalchemiops.interactions.pair import potentials
from nvalchemiops.interactions.pair.loop_in_vectors import BLOCK
from nvalchemiops.layout import CPU, layout
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.lj import lj_energy, lj_energy_forces, lj_energy_forces_virial
from nvalchemiops.torch.interactions.pair import (
    PairPotential,
    born_mayer_huggins,
    buckingham,
    coulomb,
    lennard_jones,
    morse,
    reaction_field,
    soft_core_lennard_jones,
)
from nvalchemiops.torch.neighbors import neighbor_list
from tests.reference import pair as ref
from tests.support.potentials import (
    BY_NAME,
    CASES,
    SYSTEMS,
    as_list,
    as_matrix,
    close,
    find_pairs,
    pair_of_systems,
)
from tests.support.systems import System, triclinic

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
    """With the layout of a CPU only inputs and results are rounded; a GPU evaluates pairs in float32."""
    system = pair_of_systems().to(torch.float32)
    parameters = case.parameters(system)
    parameters = parameters.updated({k: v.float() for k, v in parameters.values.items()})
    found = all_of(case, system.to(device), parameters)
    assert all(t.dtype is torch.float32 for t in found)
    exact = parameters.updated({k: v.double() for k, v in parameters.values.items()})
    expected = all_of(case, system.to(torch.float64), exact)
    close(found, expected, tolerance=2e-7 if layout(device.type) is CPU else 2e-5)


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


@pytest.mark.parametrize("box", [{}, {"cell": 2.0 * torch.eye(3, dtype=torch.float64), "pbc": torch.tensor(False)}])
def test_without_a_cutoff_all_pairs_of_open_systems_count(box):
    """Of two molecules in one another, whose atoms are in no order; the second call is farther apart than its list."""
    x, q = pair_of_systems().positions[:9], torch.linspace(-1.0, 1.0, 9, dtype=torch.float64)
    of_atom = torch.arange(9, dtype=torch.int32) % 2
    i, j = torch.triu_indices(9, 9, 1)[:, of_atom[torch.triu_indices(9, 9, 1)].diff(dim=0)[0] == 0]
    for scale in (1.0, 7.0):
        expected = (q[i] * q[j] / (scale * (x[i] - x[j])).norm(dim=1)).sum()
        found = coulomb()(scale * x, q=q, batch_idx=of_atom, compute_virial=True, num_systems=2, **box)
        close((found[0].sum(), found[1].diagonal(dim1=1, dim2=2).sum()), (expected, expected))


def test_without_a_cutoff_compiled_code_has_all_pairs():
    """For any positions: it does not look how far apart atoms are, nor whether a cell has open axes alone."""
    q = torch.linspace(-1.0, 1.0, 9, dtype=torch.float64)
    compiled = torch.compile(lambda x, cell: coulomb()(x, cell, q=q), backend="eager", fullgraph=True)
    for scale in (1.0, 1e6):
        x = scale * pair_of_systems().positions[:9]
        close([scale * compiled(x, torch.zeros(3, 3, dtype=torch.float64))], [scale * coulomb()(x, q=q)])
    for call, reason in ((compiled, "is too large for `cell`"), (lambda *given: coulomb()(*given, q=q), "has no end")):
        with pytest.raises(ValueError, match=reason):
            call(x, torch.eye(3, dtype=torch.float64))


# -- rows of neighbors ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distant_pairs_and_padding_do_not_change_bits(dtype):
    """Of rows that are longer than a block of the kernel."""
    positions = (16.0 * torch.rand(400, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(dtype)
    potential = PairPotential("exp(-r/3)*cos(2*r)", cutoff=7.0)  # float32 on a CPU, too
    matrix, numbers = neighbor_list(positions, 9.0, return_neighbor_list=False)[:2]
    assert int(numbers.max()) > 2 * BLOCK
    padded = torch.cat([positions, positions.new_full((1, 3), 1e3)])
    is_near = (padded[matrix.long()] - positions[:, None]).norm(dim=2) < 7.0
    padding = torch.full_like(matrix, len(positions))
    found = [
        potential(positions, compute_forces=True, neighbor_matrix=given, fill_value=len(positions))
        for given in (matrix, torch.where(is_near, matrix, padding), torch.cat([padding, matrix, padding], 1))
    ]
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))


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


# -- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("potential", "rule"),
    [
        *itertools.product((lennard_jones, soft_core_lennard_jones), potentials.MIXING),
        (partial(lennard_jones, attractive=4), "waldman-hagler"),
    ],
)
def test_atoms_of_no_size(potential, rule):
    """Hydrogen of water has sigma = 0: two such atoms do not interact, and their forces are numbers."""
    x = torch.tensor([[0.0, 0.0, 0.0], [1.5, 0.0, 0.0], [0.0, 1.7, 0.0]], dtype=torch.float64, requires_grad=True)
    sigma = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    more = {"scale": 0.6, "softness": 0.5} if potential is soft_core_lennard_jones else {}
    potential = potential(3.0, mixing=rule)
    pair = potential(x[:2], sigma=sigma[:2], epsilon=1.0, **more)
    assert torch.equal(pair, torch.zeros(2, dtype=torch.float64))
    first = torch.autograd.grad(potential(x, sigma=sigma, epsilon=1.0, **more).sum(), (x, sigma), create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, sigma))
    assert all(g.isfinite().all() for g in (*first, *second))


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


def test_a_reaction_field_of_a_conductor():
    """An infinite dielectric constant is the limit of large ones."""
    x, q = (
        torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.3, 0.0]], dtype=torch.float64),
        torch.tensor([1.0, -1.0], dtype=torch.float64),
    )
    field, options = reaction_field(2.0), {"compute_forces": True, "compute_gradients": ("dielectric",)}
    infinite, large = (field(x, q=q, dielectric=eps, **options) for eps in (torch.inf, 1e14))
    for found, expected in zip(infinite, large):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    # the formula has a value at zero, too
    torch.testing.assert_close(field(x, q=q, dielectric=0.0), field(x, q=q, dielectric=1e-14), rtol=1e-13, atol=1e-13)


def test_a_number_among_tables_is_the_same_for_all_pairs():
    """Also as a tensor with a gradient, and for all parameters, where species do not matter."""
    system, species = triclinic(6), torch.tensor([1, 0, 1, 1, 0, 0])
    table = torch.tensor([[900.0, 1100.0], [1100.0, 1300.0]]).double()
    rho = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    potential = buckingham(CUTOFF, tables=True)
    options = {"species": species, "compute_gradients": ("rho", "C"), **ALL_OUTPUTS}
    found = potential(system.positions, system.cell, A=table, rho=rho, C=2.0, **options)
    full = {name: torch.full((2, 2), value, dtype=torch.float64) for name, value in (("rho", 0.3), ("C", 2.0))}
    expected = potential(system.positions, system.cell, A=table, **full, **options)
    close(found, expected)
    (slope,) = torch.autograd.grad(found[0].sum(), rho)
    close([slope], [expected[2].sum()])
    numbers = {"A": 1000.0, "rho": 0.3, "C": 2.0}
    found = potential(system.positions, system.cell, **numbers, species=species, **ALL_OUTPUTS)
    close(found, buckingham(CUTOFF)(system.positions, system.cell, **numbers, **ALL_OUTPUTS))
    with pytest.raises(ValueError, match=r"`A` must be a number .* got \(2, 2\); tables for pairs"):
        buckingham(CUTOFF)(system.positions, system.cell, **{**numbers, "A": table})


@pytest.mark.parametrize("potential", [buckingham, born_mayer_huggins])
def test_tables_in_which_the_range_of_a_pair_is_zero(potential):
    """Pairs without repulsion may have A = rho = 0: to all orders of derivatives they have what A = 0 leaves."""
    system, species = triclinic(6), torch.tensor([1, 0, 1, 1, 0, 0])
    more = {"sigma": 1.5, "D": 3.0} if potential is born_mayer_huggins else {}
    A = torch.tensor([[0.0, 900.0], [900.0, 0.0]]).double()
    x = system.positions.clone().requires_grad_()
    found = []
    for alone in (0.0, 0.3):
        rho = torch.tensor([[alone, 0.3], [0.3, alone]]).double()
        e = potential(CUTOFF, tables=True)(x, system.cell, A=A, rho=rho, C=2.0, species=species, **more)
        (slope,) = torch.autograd.grad(e.sum(), x, create_graph=True)
        found.append([e, slope, *torch.autograd.grad(slope.square().sum(), x)])
    close(*found)


# -- exclusions -----------------------------------------------------------------------------------

EXCLUDED, FACTORS = ((0, 1), (4, 2), (3, 5)), (0.0, 0.5, 0.25)
EXCLUSIONS = {"exclusions": torch.tensor(EXCLUDED).T, "exclusion_factors": torch.tensor(FACTORS)}


@KINDS
def test_everything_with_exclusions(case):
    system = triclinic(6, charged=True)
    parameters = case.parameters(system)
    pairs = find_pairs(system, CUTOFF, exclusions=EXCLUDED, factors=FACTORS)
    expected = reference_of(case, system, parameters, pairs)
    for neighbors in ({}, as_list(system, CUTOFF, half=True), as_matrix(system, 1.4 * CUTOFF)):
        close(all_of(case, system, parameters, **EXCLUSIONS, **neighbors), expected)


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


def test_functions_of_charges_return_parts_of_one_result():
    """The sums themselves: tests/values/test_random_calls.py."""
    system = pair_of_systems()
    given = {"positions": system.positions, "charges": system.charges, "cell": system.cell, "cutoff": CUTOFF}
    given |= {"alpha": torch.tensor([0.15, 0.3], dtype=torch.float64), "batch_idx": system.batch_idx}
    energies, forces = electrostatics.coulomb_energy_forces(**given)
    close((electrostatics.coulomb_energy(**given), electrostatics.coulomb_forces(**given)), (energies, forces))
    every = electrostatics.dsf_coulomb(**given, compute_virial=True)
    alone = electrostatics.dsf_coulomb(**given, compute_forces=False)
    assert len(every) == 3 and len(alone) == 1
    close(alone, every[:1])
