"""Models: sums of interactions and models, and derivatives of energies."""

from functools import partial

import pytest
import torch
from ase.calculators.calculator import Calculator
from torch.autograd import forward_ad

from nvalchemiops.constants import BOHR_IN_ANGSTROM, COULOMB_EV_ANGSTROM, HARTREE_IN_EV
from nvalchemiops.notices import NvalchemiopsWarning
from nvalchemiops.torch.dynamics import Evaluation, FromEnergies, SumOfTerms, nve, relax, simulate
from nvalchemiops.torch.interactions.dispersion import DFTD3
from nvalchemiops.torch.interactions.electrostatics import (
    Electrostatics,
    EwaldSummation,
    ParticleMeshEwald,
    ewald_summation,
    power_law,
)
from nvalchemiops.torch.interactions.pair import PairPotential, born_mayer_huggins, coulomb, lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.systems import System
from tests.support.mistakes import assert_named

from .systems import argon, crystal, few_atoms, float64, joined, wells


def ions():
    """Two sheared crystals of Na and Cl."""
    structures = []
    for seed, repeat in ((1, (2, 1, 1)), (2, (1, 1, 1))):
        atoms = crystal(repeat, a=5.6, rattle=0.1, seed=seed)
        atoms.numbers[:] = [11, 17] * (len(atoms) // 2)
        atoms.set_initial_charges([1.0, -1.0] * (len(atoms) // 2))
        structures.append(atoms)
    return System.from_ase(structures)


def test_a_sum_of_terms_has_their_energies_forces_and_stress_in_its_units():
    system = ions()
    pairs, charges = lennard_jones(5.0), ParticleMeshEwald(accuracy=1e-6, cutoff=6.0)
    dispersion = DFTD3("pbe", [11, 17], cutoff=14.0, coordination_cutoff=10.0)
    found = SumOfTerms(partial(pairs, sigma=2.4, epsilon=0.02), charges, dispersion, wells(), skin=0.7)(system)

    def sum_of(system):
        atomic = system._replace(positions=system.positions / BOHR_IN_ANGSTROM, cell=system.cell / BOHR_IN_ANGSTROM)
        reduced = {"energy_reduction": "system"}
        return (
            pairs(system, sigma=2.4, epsilon=0.02, **reduced).energies
            + COULOMB_EV_ANGSTROM * charges(system, **reduced).energies
            + HARTREE_IN_EV * dispersion(atomic, **reduced).energies
            + wells().function(system)
        )

    assert (found.energies - sum_of(system)).abs().max() < 1e-6  # PME chooses alpha for the list that it has
    expected = FromEnergies(sum_of)(system)
    assert (found.forces - expected.forces).abs().max() < 1e-5
    assert (found.stress - expected.stress).abs().max() < 1e-6
    assert torch.equal(found.stress, found.stress.mT)


@pytest.mark.parametrize("exponent", (1, 6))
def test_lattice_sums_take_sources_bound_to_them_and_coulomb_sums_alone_are_in_coulomb_units(exponent):
    """Of a batch with charges of its own, which another sum takes."""
    system = ions()
    n = len(system.positions)
    roots, dipoles = torch.linspace(0.5, 2.0, n, dtype=float64), torch.linspace(-0.2, 0.2, 3 * n, dtype=float64)
    sources = {"charges": roots} | ({"dipoles": dipoles.reshape(n, 3)} if exponent == 1 else {})
    powers = EwaldSummation(0.7, 7.0, 6.0, potential=power_law(exponent))
    charges = ParticleMeshEwald(accuracy=1e-5, cutoff=6.0)
    found = SumOfTerms(partial(powers, **sources), charges, skin=0.0)(system)
    options = {"compute_forces": True, "compute_virial": True, "energy_reduction": "system"}
    expected = powers(system._replace(**sources), system.neighbors(6.0), **options)
    unit, coulomb_ = COULOMB_EV_ANGSTROM if exponent == 1 else 1.0, SumOfTerms(charges, skin=0.0)(system)
    torch.testing.assert_close(found.energies, unit * expected.energies + coulomb_.energies)
    torch.testing.assert_close(found.forces, unit * expected.forces + coulomb_.forces)
    virial = 0.5 * (expected.virial + expected.virial.mT)  # dipoles do not turn with a strain
    stress = -unit * virial / system.volume[:, None, None] + coulomb_.stress
    torch.testing.assert_close(found.stress, stress, rtol=1e-6, atol=1e-9)
    bound = partial(EwaldSummation(0.7, 7.0, 6.0), potential=power_law(exponent), **sources)
    assert torch.equal(SumOfTerms(bound, charges, skin=0.0)(system).energies, found.energies)


def test_a_term_without_a_cutoff_sums_all_pairs_beside_a_list():
    """Of a molecule that grows: neither the list of another term nor a plan limits its pairs."""
    near, far, system = PairPotential("exp(-r)", cutoff=2.0), partial(coulomb(), q=1.0), few_atoms()[0]
    model = SumOfTerms(near, far)
    for scale in (1.0, 1.0, 1.0, 1.5, 4.0):
        x = scale * system.positions
        r = (x[:, None] - x)[*torch.triu_indices(len(x), len(x), 1)].norm(dim=1)
        expected = (1.0 / r + torch.where(r < 2.0, (-r).exp(), 0.0)).sum()
        assert abs(model(System(x)).energies - expected) < 1e-12 * expected


def test_stress_is_the_derivative_by_strain_and_forces_by_positions():
    """Finite differences of energies, for a sum and for `FromEnergies`."""
    system = System.from_ase(crystal((2, 2, 2)))
    for model, step in ((argon(), 1e-5), (wells(), 1e-5)):
        found = model(system)
        strain = 0.3 * torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=float64)
        strain = strain + strain.mT
        moves = torch.randn(32, 3, generator=torch.Generator().manual_seed(1), dtype=float64)
        for change, slope in (
            ((0.0 * moves, strain), system.volume * (found.stress[0] * strain).sum()),
            ((moves, 0.0 * strain), -(found.forces * moves).sum()),
        ):
            energies = []
            for sign in (1.0, -1.0):
                factor = torch.eye(3, dtype=float64) + sign * step * change[1]
                moved = system._replace(
                    positions=system.positions @ factor + sign * step * change[0], cell=system.cell @ factor
                )
                energies.append(model(moved).energies)
            assert abs((energies[0] - energies[1]).item() / (2.0 * step) - slope.item()) < 1e-7 * max(1.0, abs(slope))


def test_one_list_serves_all_terms_and_is_kept_while_atoms_move_little():
    model = SumOfTerms(*(partial(lennard_jones(r), sigma=3.4, epsilon=0.01) for r in (4.0, 6.0)), skin=0.5)
    system = System.from_ase(crystal((2, 2, 2)))
    for n in range(4):
        model(system._replace(positions=system.positions + 0.04 * n))
    assert model.neighbors.cutoff == 6.0 and (model.neighbors.num_calls, model.neighbors.num_builds) == (4, 1)


def test_lattice_sums_of_slabs_see_images_across_the_vacuum():
    """Pairs of other terms are those of the slab alone, and molecules have no images."""
    system = ions()
    pbc = torch.tensor([[True, True, False], [False, False, False]])
    cell = system.cell.clone()
    cell[0, 2] *= 1.5  # less vacuum than the cutoff
    system = system._replace(cell=cell, pbc=pbc)
    pairs, charges = partial(lennard_jones(7.0), sigma=2.4, epsilon=0.02), Electrostatics(accuracy=1e-8, cutoff=7.0)
    expected = [f(system, energy_reduction="system", compute_forces=True) for f in (pairs, charges)]
    for axes in (pbc, pbc.tolist()):
        found = SumOfTerms(pairs, charges, skin=0.5, hartree=1.0, bohr=1.0)(system._replace(pbc=axes))
        torch.testing.assert_close(found.energies, sum(e.energies for e in expected), rtol=1e-7, atol=0.0)
        torch.testing.assert_close(found.forces, sum(e.forces for e in expected), rtol=1e-6, atol=1e-7)


def test_the_list_reaches_as_far_as_triples():
    """Whose cutoff may be the largest one; without them it does not count."""
    system = ions()
    dispersion = DFTD3(
        "pbe", [11, 17], cutoff=7.0, coordination_cutoff=7.0, s9=1.0, three_body_cutoff=11.0, smoothing=1.0
    )
    bohr = system._replace(positions=system.positions / BOHR_IN_ANGSTROM, cell=system.cell / BOHR_IN_ANGSTROM)
    expected = dispersion(bohr, energy_reduction="system", compute_forces=True)
    found = SumOfTerms(dispersion, skin=0.0)(system)
    torch.testing.assert_close(found.energies, expected.energies * HARTREE_IN_EV, rtol=1e-12, atol=0.0)
    with pytest.raises(ValueError, match=r"`neighbors` reach to 8.0, but the cutoff of this interaction is 11.0"):
        dispersion(bohr, bohr.neighbors(8.0))
    dispersion.s9 = 0.0
    dispersion(bohr, bohr.neighbors(8.0))


def test_dispersion_of_molecules_is_in_the_units_of_the_system():
    positions = 4.0 * torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=float64)
    molecules = System(positions, numbers=torch.tensor([11, 17, 17] * 3))
    dispersion = DFTD3("pbe", [11, 17], cutoff=30.0, coordination_cutoff=20.0)
    found = SumOfTerms(dispersion)(molecules)
    x = (positions / BOHR_IN_ANGSTROM).requires_grad_()
    expected = HARTREE_IN_EV * dispersion(molecules._replace(positions=x), energy_reduction="system").energies
    torch.testing.assert_close(found.energies, expected.detach(), rtol=1e-12, atol=0.0)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(found.forces, -slope / BOHR_IN_ANGSTROM, rtol=1e-9, atol=1e-14)
    assert found.stress is None


def test_lattice_sums_that_choose_their_cutoff_keep_a_list_of_their_own():
    """It suits the number of atoms, and is not the longer one of other terms."""
    system, charges = ions(), Electrostatics(accuracy=1e-7)
    model = SumOfTerms(charges, partial(lennard_jones(12.0), sigma=3.4, epsilon=0.0), skin=0.5)
    for n in range(4):
        moved = system._replace(positions=system.positions + 0.04 * n)
        found, exact = model(moved), charges(moved, compute_forces=True)
        assert (found.forces / (HARTREE_IN_EV * BOHR_IN_ANGSTROM) - exact.forces).norm() < 1e-6 * exact.forces.norm()
    verlet = model.neighbors_of_sums
    assert (verlet.num_calls, verlet.num_builds) == (4, 1) and verlet.cutoff < 12.0
    one = System.from_ase(crystal((4, 4, 4), a=5.6), charges=[1.0, -1.0] * 128)
    assert torch.isfinite(model(one).forces).all() and model.neighbors_of_sums.cutoff != verlet.cutoff
    # sums of slabs have this list, too, whatever their cutoff is: nothing reads the other one
    model = SumOfTerms(Electrostatics(accuracy=1e-5, cutoff=6.0))
    model(system._replace(pbc=torch.tensor([True, True, False])))
    assert model.neighbors_of_sums.num_calls == 1 and model.neighbors.num_calls == 0
    assert model(system).energies.isfinite().all() and model.neighbors.num_calls == 1


@pytest.mark.parametrize("pbc", [None, torch.tensor([True, True, False])])
def test_a_cutoff_bound_to_a_lattice_sum_is_that_of_the_sum(pbc):
    """Also where it is longer than the one that the sum chooses, and beside the same sum with another one."""
    system, charges = ions()._replace(pbc=pbc), Electrostatics(accuracy=1e-7)
    chosen = SumOfTerms(charges)
    once = chosen(system).forces
    longer = 1.2 * chosen.neighbors_of_sums.cutoff
    model = SumOfTerms(partial(charges, cutoff=longer), charges)
    assert (model(system).forces - 2.0 * once).norm() < 1e-6 * once.norm()
    assert model.neighbors.cutoff == longer
    with pytest.raises(ValueError, match="`cutoff` must be positive"):
        SumOfTerms(partial(charges, cutoff=-1.0))
    split = SumOfTerms(partial(charges, alpha=0.4))
    assert (split(system).forces - once).norm() < 1e-6 * once.norm() and split.neighbors_of_sums is None


@pytest.mark.parametrize("cutoff", [None, 7.0])
def test_lattice_sums_of_slabs_have_images_across_the_vacuum(cutoff):
    """Here it is thinner than the cutoff. Molecules beside it have no images."""
    slab = crystal((2, 2, 1))
    slab.cell[2] *= 1.2
    slab.pbc[2] = False
    molecule = crystal(1, seed=2)
    molecule.pbc, molecule.cell = False, None
    charges = [1.0, -1.0] * ((len(slab) + len(molecule)) // 2)
    system = System.from_ase([slab, molecule], charges=charges)
    exact = Electrostatics(accuracy=1e-10)(system, compute_forces=True).forces * (HARTREE_IN_EV * BOHR_IN_ANGSTROM)
    model = SumOfTerms(Electrostatics(accuracy=1e-7, cutoff=cutoff))
    assert (model(system).forces - exact).norm() < 1e-6 * exact.norm()


@pytest.mark.parametrize("cell_moves", [True, False])
def test_pair_terms_are_one_call_whose_plan_follows_positions_cells_and_parameters(cell_moves):
    """At each step the results are those of the terms alone, without a list: also where parameters change in place."""
    generator = torch.Generator().manual_seed(0)
    atoms = crystal((2, 2, 2))
    system, sigma = System.from_ase(atoms), torch.full((len(atoms),), 3.4, dtype=float64)
    potential, depth = lennard_jones(5.0), torch.tensor(0.01, dtype=float64)
    model = SumOfTerms(
        partial(potential, sigma=sigma, epsilon=depth), partial(lennard_jones(4.0), sigma=3.0, epsilon=0.02), skin=1.0
    )
    for step in range(8):
        system = system._replace(
            positions=system.positions + 0.01 * torch.randn(len(atoms), 3, generator=generator, dtype=float64),
            cell=system.cell * (1.0 + 0.002 * cell_moves),
        )
        if step == 5:
            sigma[3] = 3.5
            depth.mul_(1.5)
        found = model(system)
        options = {"compute_forces": True, "compute_virial": True, "energy_reduction": "system"}
        parts = [potential(system, sigma=sigma, epsilon=depth, **options)]
        parts += [lennard_jones(4.0)(system, sigma=3.0, epsilon=0.02, **options)]
        assert torch.allclose(found.energies, sum(p.energies for p in parts), rtol=1e-12)
        assert torch.allclose(found.forces, sum(p.forces for p in parts), rtol=1e-9, atol=1e-12)
        assert torch.allclose(found.stress, -sum(p.virial for p in parts) / system.volume, rtol=1e-9, atol=1e-12)
    assert "sum of pair potentials: plan (replayed)" in engine.explain(model)
    with pytest.raises(ValueError, match="cell"):
        model(system._replace(cell=system.cell * torch.tensor([1.0, 1.0, 0.0], dtype=float64).unsqueeze(1)))


def test_a_pair_potential_of_ones_own_is_called_as_it_is():
    class Doubled(PairPotential):
        def __call__(self, *arguments, **options):
            found = super().__call__(*arguments, **options)
            return found._replace(energies=2.0 * found.energies, forces=2.0 * found.forces)

    own = Doubled("epsilon*(sigma/r)**6", global_parameters=("sigma", "epsilon"), cutoff=5.0)
    system = System.from_ase(crystal((2, 2, 2)))
    model = SumOfTerms(partial(own, sigma=3.4, epsilon=0.01), stress=False)
    for _ in range(3):
        once = PairPotential.__call__(own, system, sigma=3.4, epsilon=0.01, energy_reduction="system").energies
        assert torch.allclose(model(system).energies, 2.0 * once, rtol=1e-12)


def test_systems_without_cells_have_no_stress():
    generator = torch.Generator().manual_seed(0)
    positions = 4.0 * torch.randn(9, 3, generator=generator, dtype=float64)
    batch_idx = torch.tensor([0] * 4 + [1] * 5, dtype=torch.int32)
    found = argon()(System(positions, batch_idx=batch_idx))
    assert found.stress is None and found.energies.shape == (2,)
    alone = argon()(System(positions[:4]))
    assert torch.equal(found.energies[:1], alone.energies) and torch.equal(found.forces[:4], alone.forces)


def test_a_model_of_energies_takes_one_for_each_system():
    """Also in results of this library. Of energies of atoms, or of their sum, forces and stress are right; it warns."""
    system = System.from_ase([crystal((2, 1, 1)), crystal((1, 1, 1))])
    potential = partial(lennard_jones(5.0), sigma=3.4, epsilon=0.01)
    of_systems = partial(potential, energy_reduction="system")
    expected = FromEnergies(of_systems)(system)
    assert torch.equal(expected.energies, of_systems(system).energies)
    for function, shape in ((potential, len(system.positions)), (lambda s: of_systems(s).energies.sum(), 1)):
        with pytest.warns(NvalchemiopsWarning, match=rf"energies of shape \({shape},\), which is \(2,\) for"):
            found = FromEnergies(function)(system)
        torch.testing.assert_close(found[1:3], expected[1:3], rtol=1e-12, atol=1e-14)
    with pytest.warns(NvalchemiopsWarning, match=r"energies of shape \(4,\), which is \(1,\) for"):
        FromEnergies(lambda molecule: molecule.positions.sum(1))(System(torch.zeros(4, 3)))


def test_a_model_of_energies_keeps_its_graph_where_it_is_needed():
    system = System.from_ase(crystal((2, 1, 1)))
    weight = torch.tensor(0.3, dtype=float64, requires_grad=True)
    parametric = lambda system: (weight * torch.sin(system.positions)).sum().reshape(1)  # noqa: E731
    assert not FromEnergies(parametric)(system).forces.requires_grad
    kept = FromEnergies(parametric, create_graph=True)(system)
    (slope,) = torch.autograd.grad(kept.forces.sum(), weight)
    assert abs(slope + torch.cos(system.positions).sum()) < 1e-12
    moving = system._replace(positions=system.positions.clone().requires_grad_())
    (second,) = torch.autograd.grad(FromEnergies(parametric)(moving).forces.sum(), moving.positions)
    assert (second - 0.3 * torch.sin(system.positions)).abs().max() < 1e-12
    constant = FromEnergies(lambda system: torch.zeros(1, dtype=float64))
    with pytest.warns(NvalchemiopsWarning, match="no graph to positions"):
        nothing = constant(system)
    assert not nothing.forces.any() and not nothing.stress.any()
    with pytest.warns(NvalchemiopsWarning, match="no graph to positions"):
        torch.func.vmap(lambda x: constant(system._replace(positions=x)).forces)(system.positions[None])


@pytest.mark.parametrize("create_graph", [None, True])
def test_a_model_of_energies_in_forward_mode_and_under_vmap(create_graph):
    """Tangents of results, which were lost or an error of torch, against finite differences; and slices."""
    systems = [few_atoms(n, seed)[0] for seed, n in enumerate((3, 2))]
    system, model = joined(systems), FromEnergies(wells().function, create_graph=create_graph)
    way = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=float64)
    tilt = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(1), dtype=float64)

    def results(positions, cell):
        return tuple(model(system._replace(positions=positions, cell=cell)))

    h, given = 1e-5, (system.positions, system.cell)
    ends = [results(system.positions + sign * h * way, system.cell + sign * h * tilt) for sign in (1, -1)]
    values, tangents = torch.func.jvp(results, given, (way, tilt))
    with forward_ad.dual_level():
        duals = [forward_ad.unpack_dual(d) for d in results(*map(forward_ad.make_dual, given, (way, tilt)))]
    several = [torch.stack([x, x + y]) for x, y in zip(given, (way, tilt))]
    slices = torch.func.vmap(results)(*several)
    for n, (value, tangent, dual, both) in enumerate(zip(values, tangents, duals, slices)):
        assert torch.equal(value, model(system)[n])
        assert ((ends[0][n] - ends[1][n]) / (2 * h) - tangent).abs().max() < 1e-8
        assert (dual.tangent - tangent).abs().max() < 1e-14
        for k in range(2):
            assert (both[k] - results(*(x[k] for x in several))[n]).abs().max() < 1e-14
    (hessian,) = torch.func.jacfwd(lambda x: results(x, system.cell)[1])(system.positions).reshape(1, 15, 15)
    assert (hessian - hessian.mT).abs().max() < 1e-14


def test_no_grad_ends_reverse_mode_alone():
    """Also that of a transform around it, in which some operations would else be followed, and others not."""
    system, _, velocities = few_atoms(3)
    model, inside = FromEnergies(wells().function, create_graph=True), wells()

    def without(positions):
        with torch.no_grad():
            return inside(system._replace(positions=positions)).forces

    def forces(positions):
        return model(system._replace(positions=positions)).forces

    expected = torch.func.jvp(forces, (system.positions,), (velocities,))[1]
    assert torch.equal(torch.func.jvp(without, (system.positions,), (velocities,))[1], expected)
    assert not torch.func.grad(lambda x: without(x).sum())(system.positions).any()
    weight = torch.ones((), dtype=float64, requires_grad=True)
    for keep in (True, False):
        model = FromEnergies(lambda system: weight * inside.function(system), create_graph=keep)
        assert torch.func.vmap(forces)(system.positions[None]).requires_grad == keep
    model = FromEnergies(inside.function, create_graph=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(system.positions.clone().requires_grad_(), velocities)
        kept = model(system._replace(positions=dual)).without_graph()
        assert torch.equal(forward_ad.unpack_dual(kept.forces).tangent, expected)
        assert not any(value.requires_grad for value in kept)


def test_forces_in_inference_mode():
    """Torch keeps no graph in it, also for tensors that were made in it."""
    system = System.from_ase(crystal((2, 1, 1)))
    expected = wells()(system)
    with torch.inference_mode():
        made = system._replace(positions=system.positions.clone(), cell=system.cell.clone())
        inside = wells()(system), wells()(made)
    for results in (*inside, wells()(made)):
        for found, right in zip(results, expected):
            assert right.any() and torch.equal(found, right)


def test_a_batch_and_its_systems():
    systems = [System.from_ase(crystal((2, 1, 1), seed=n)) for n in range(3)]
    together = wells()(joined(systems))
    for n, system in enumerate(systems):
        alone = wells()(system)
        assert (together.energies[n] - alone.energies[0]).abs() < 1e-13
        assert (together.stress[n] - alone.stress[0]).abs().max() < 1e-13


@pytest.mark.parametrize("model", [wells(), argon()])
def test_systems_of_a_batch_may_share_a_cell(model):
    one, other = (System.from_ase(crystal(seed=n)) for n in range(2))
    both = joined([one, other])
    apart = model(both._replace(cell=torch.stack([one.cell, one.cell])))
    shared = model(both._replace(cell=one.cell, pbc=None))
    for found, expected in zip(shared, apart):
        assert found.shape == expected.shape and (found - expected).abs().max() < 1e-13


def test_atoms_of_ase_are_told_how_to_become_a_system():
    atoms, lj = crystal(1), lennard_jones(5.0)
    calls = {
        "run": lambda: simulate(atoms, argon(), nve(1.0), 1),
        "start": lambda: nve(1.0).start(atoms, argon()),
        "relaxation": lambda: relax(atoms, argon()),
        "sum of terms": lambda: argon()(atoms),
        "energies": lambda: FromEnergies(lambda system: system.positions.sum())(atoms),
        "charges": lambda: Electrostatics()(atoms),
        "pairs": lambda: lj(atoms, sigma=3.4, epsilon=0.0104),
        "neighbors": lambda: neighbor_list(atoms, 5.0),
    }
    assert_named((name, call, TypeError, "got Atoms: use System.from_ase") for name, call in calls.items())
    batch = [atoms, atoms]
    calls = {
        "run": lambda: simulate(batch, argon(), nve(1.0), 1),
        "relaxation": lambda: relax(batch, argon()),
        "charges": lambda: Electrostatics()(batch),
        "pairs": lambda: lj(batch, sigma=3.4, epsilon=0.0104),
    }
    assert_named((name, call, TypeError, "got list: use System.from_ase") for name, call in calls.items())
    system = System.from_ase(atoms)._replace(numbers=atoms.numbers)
    with pytest.raises(TypeError, match=r"`numbers` must be a .*Tensor, got ndarray"):
        nve(1.0).start(system, argon())


def test_results_and_systems_in_the_place_of_their_parts_are_told_which():
    """They are tuples, of which no tensor can be made."""
    system, model = System.from_ase(crystal(1)), argon()
    run, relaxed = simulate(system, model, nve(1.0), 0), relax(system, model, fmax=10.0)
    calls = {
        "Simulation: give its `state`": lambda: simulate(run, model, nve(1.0), 1),
        "Relaxation: give its `system`": lambda: simulate(relaxed, model, nve(1.0), 1),
        "State: give its `system`": lambda: relax(run.state, model),
        "System: give its `positions`": lambda: ewald_summation(system, None, system.cell),
        "System: give its `charges`": lambda: ewald_summation(system.positions, system, system.cell),
        "System$": lambda: lennard_jones(5.0)(system, sigma=system, epsilon=1.0),  # which has none
    }
    for message, call in calls.items():
        assert_named([(message, call, TypeError, f"got {message}")])


def test_what_is_no_model_is_told_how_to_become_one():
    system, bound = System.from_ase(crystal(1)), partial(lennard_jones(5.0), sigma=3.4, epsilon=0.0104)
    for model, advice in ((Calculator(), "use nvalchemiops.ase.FromASE"), (bound, "interactions .* to SumOfTerms")):
        with pytest.raises(TypeError, match=f"`model` must .*{advice}"):
            relax(system, model)
        with pytest.raises(TypeError, match=f"`model` must .*{advice}"):
            simulate(system, model, nve(1.0), 1)


def test_bad_arguments_are_named():
    for terms, options, word in (
        ((), {}, "terms"),
        ((3.0,), {}, "terms"),
        ((born_mayer_huggins,), {"skin": -1.0}, "skin"),
        ((wells(),), {"bohr": 0.0}, "bohr"),
    ):
        with pytest.raises((ValueError, TypeError), match=word):
            SumOfTerms(*terms, **options)
    with pytest.raises(ValueError, match="no stress"):
        SumOfTerms(wells(), lambda system: Evaluation(torch.zeros(1), system.positions))(System.from_ase(crystal(1)))


def test_terms_with_other_shapes_are_not_broadcast():
    """A scalar is the energy of one system; beside a batch it would be added to each of its systems."""
    springs = FromEnergies(lambda system: 0.5 * system.positions.square().sum())
    one = System(torch.ones(2, 3, dtype=torch.float64))
    assert springs(one).energies.tolist() == [3.0]
    two = one._replace(batch_idx=torch.tensor([0, 1], dtype=torch.int32))
    each = FromEnergies(lambda system: system.positions.square().sum(1))
    with pytest.raises(ValueError, match=r"shapes \(2,\) and \(1,\): each must return energies"):
        SumOfTerms(each, springs)(two)
