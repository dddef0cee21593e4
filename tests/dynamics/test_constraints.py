"""Constraints of distances: lengths, energies, rotors, ASE's RATTLE, derivatives, errors."""

import math

import ase
import numpy as np
import pytest
import torch
from ase.calculators.calculator import Calculator
from ase.constraints import FixBondLengths
from ase.md.verlet import VelocityVerlet

from nvalchemiops.torch.dynamics import (
    FORCES,
    Constraints,
    Evaluation,
    FromEnergies,
    Integrator,
    langevin,
    nve,
    stochastic_cell,
)
from nvalchemiops.torch.dynamics.flows import Drift, Flow, Kick
from nvalchemiops.torch.dynamics.integrators import COUNTED
from nvalchemiops.torch.systems import System
from tests.support.comparing import assert_gradient

from .molecules import (
    KT,
    PRESSURE,
    WATER,
    deterministic,
    errors,
    every,
    molecules,
    started,
    tensor,
)
from .systems import float64, ideal_gas, joined, run, wells

# -- lengths, energies, time reversal -------------------------------------------------------------


@pytest.mark.everyday_cases("nve-frozen1", "langevin-frozen1", "npt full-frozen1", "stochastic_cell-frozen0")
@pytest.mark.parametrize("frozen", ((), (1, 3, 6, 7)))
@pytest.mark.parametrize("name", every(0.1))
def test_lengths_stay_and_velocities_are_orthogonal_to_bonds(name, frozen):
    """Over 150 steps, in clusters of 1 to 4 constraints; frozen atoms stay, or keep their place in the cell.

    Of the frozen atoms one is in a pair, one in a water and one in a star.
    """
    integrator, state = started(every(0.1)[name], frozen=frozen, seed=1)
    degrees = state.extra["degrees_of_freedom"].item(), state.extra["constraint centre degrees of freedom"].item()
    # 14 constraints, of which one is between frozen atoms; 6 centres, of which 3 move on their own
    assert degrees == ((29.0, 9.0) if frozen else (40.0, 18.0))
    first, frames = state.system.positions, torch.linalg.inv(state.system.cell[0])
    worst = np.zeros(2)
    for _ in range(150):
        state = integrator.step(state, wells())
        worst = np.maximum(worst, errors(integrator, state))
    assert worst[0] < 1e-13 and worst[1] < 1e-14
    assert (state.system.positions - first).abs().median() > 0.1
    moved = state.system.positions @ torch.linalg.inv(state.system.cell[0]) - first @ frames
    # 6 and 7 are of one cluster: there the centre of the frozen atoms keeps its place
    assert not frozen or moved[[1, 3]].abs().max() < 1e-13 > moved[[6, 7]].mean(0).abs().max()
    assert not state.velocities[list(frozen)].any()


@pytest.mark.parametrize("name", ("nve", "npt full", "stochastic_cell"))
def test_infinite_forces_on_frozen_atoms_do_not_matter(name):
    """Those of atoms at the same place are. What constraints add to the stress does not see them.

    In a cell that changes, the frozen atom of a cluster is its centre.
    """
    frozen = (1, 3, 6, 7) if name == "nve" else (1, 3)

    def model(system):
        found = wells()(system)
        found.forces[3] = torch.inf
        return found

    integrator, expected = started(every(0.1)[name], frozen=frozen, seed=1)
    _, state = started(every(0.1)[name], frozen=frozen, model=model, seed=1)
    for _ in range(3):
        state, expected = integrator.step(state, model), integrator.step(expected, wells())
    assert torch.equal(state.system.positions, expected.system.positions)
    assert torch.equal(state.extra["constraint stress"], expected.extra["constraint stress"])


@pytest.mark.everyday_cases("nve", "npt full")
@pytest.mark.parametrize("name", deterministic(0.1))
def test_conserved_quantities_are_of_second_order(name):
    found, frozen = [], (1, 3, 6, 7)
    for dt in (0.04, 0.02):
        integrator, state = started(deterministic(dt)[name], frozen=frozen)
        first, values = integrator.conserved(state), []
        for _ in range(round(2.0 / dt)):
            state = integrator.step(state, wells())
            values.append(integrator.conserved(state) - first)
        found.append(torch.stack(values).square().mean().sqrt().item())
    assert found[0] > 1e-7
    assert 3.8 < found[0] / found[1] < 4.2


def test_the_work_of_a_stochastic_cell_is_that_on_the_centres_of_clusters():
    """Counted, to the first order in the step that such cells have; that on atoms is off by sqrt(dt)."""
    found = []
    for dt in (0.1, 0.025):
        system, masses, velocities, pairs = molecules("two", "water", "atom")
        pairs = (pairs + len(masses) * torch.arange(24).reshape(-1, 1, 1)).reshape(-1, 2)
        cells = stochastic_cell(dt, KT, PRESSURE, 20.0, thermostat_time=0.9, barostat_time=2.0)
        integrator = cells.constrained(Constraints(pairs))
        options = {"masses": masses.repeat(24), "velocities": velocities.repeat(24, 1), "removed": 0}
        state = integrator.start(joined([system] * 24), wells(), **options)
        first, values = integrator.conserved(state), []
        for _ in range(round(1.0 / dt)):
            state = integrator.step(state, wells())
            values.append(integrator.conserved(state) - first)
        found.append(torch.stack(values).square().mean().sqrt().item())
    assert found[0] > 1e-6
    assert 3.2 < found[0] / found[1] < 6.0


@pytest.mark.everyday_cases("nve", "npt full")
@pytest.mark.parametrize("name", deterministic(0.1))
def test_steps_back_lead_to_the_start(name):
    integrator, state = started(deterministic(0.1)[name], frozen=(1,))
    far = run(integrator, state, wells(), 40)
    back = integrator.reversed(run(integrator, integrator.reversed(far), wells(), 40))
    assert (far.system.positions - state.system.positions).abs().max() > 0.1
    for a, b in ((back.system.positions, state.system.positions), (back.velocities, state.velocities)):
        assert (a - b).abs().max() < 1e-11
    assert (back.system.cell - state.system.cell).abs().max() < 1e-12


def test_heat_of_constrained_noise_is_counted():
    """With kT and forces that are zero but for noise, the conserved quantity of a gas stays: to second order."""
    integrator, state = started(langevin(0.05, KT, friction=0.5), model=ideal_gas)
    first = integrator.conserved(state)
    state = run(integrator, state, ideal_gas, 200)
    assert (state.kinetic_energies - first).abs() > 0.01
    assert (integrator.conserved(state) - first).abs() < 2e-4


# -- rotors, ASE ----------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", (False, True))
def test_a_rigid_rotor_turns_by_the_same_angle_in_each_step(frozen):
    """By ``arcsin(h ω)``: SHAKE brings ``r + h v`` back to the circle along r. The pressure of a rotor is zero."""
    h, omega, length = 0.3, 0.8, 1.3
    masses = tensor([torch.inf if frozen else 2.0, 3.0])
    shares = tensor([0.0, 1.0]) if frozen else tensor([-0.6, 0.4])

    def at(angle):
        ray = tensor([math.cos(angle), math.sin(angle), 0.0])
        return shares.unsqueeze(1) * length * ray, shares.unsqueeze(1) * length * omega * ray[[1, 0, 2]] * tensor(
            [-1, 1, 0]
        )

    positions, velocities = at(0.4)
    integrator = nve(h).constrained(Constraints(torch.tensor([[0, 1]]), length))
    state = integrator.start(
        System(positions, cell=4.0 * torch.eye(3, dtype=float64)), ideal_gas, masses=masses, velocities=velocities
    )
    assert state.extra["degrees_of_freedom"].item() == 2.0
    state = run(integrator, state, ideal_gas, 100)
    positions, velocities = at(0.4 + 100 * math.asin(h * omega))
    assert (state.system.positions - positions).abs().max() < 1e-12
    assert (state.velocities - velocities).abs().max() < 1e-12
    if not frozen:
        assert state.pressures.abs() < 1e-13 < 0.01 < (state.kinetic_energies / state.volumes).item()
        # half the second derivative of Σ m r rᵀ, by the volume
        ray, along = (positions[1] / positions[1].norm(), velocities[1] / velocities[1].norm())
        expected = 1.2 * (length * omega) ** 2 * (along.outer(along) - ray.outer(ray)) / 64.0
        assert (state.pressure_tensors[0] - expected).abs().max() < 1e-13


@pytest.mark.parametrize(("angle", "needed"), [(0.02, 2), (0.3, 3)])
def test_iterations_square_the_error_of_lengths(angle, needed):
    """It is about the square of the angle by which a bond turns. Fewer than it takes give NaN, not a wrong length."""
    positions = tensor([[0.0, 0.0, 0.0], [1.3, 0.0, 0.0]])
    velocities = tensor([[0.0, 0.0, 0.0], [0.0, 1.3 * math.sin(angle), 0.0]])
    for iterations in (2, 3, 4, 5):
        integrator = nve(1.0).constrained(Constraints(torch.tensor([[0, 1]]), iterations=iterations))
        system = System(positions, cell=9.0 * torch.eye(3, dtype=float64))
        state = integrator.start(system, ideal_gas, velocities=velocities, masses=tensor([torch.inf, 1.0]))
        bond = run(integrator, state, ideal_gas, 1).system.positions.diff(dim=0)
        if iterations < needed:
            assert bond.isnan().all()
        else:
            assert (bond[0] - 1.3 * tensor([math.cos(angle), math.sin(angle), 0.0])).abs().max() < 1e-11


CHARGES = tensor([-0.8, 0.4, 0.4]).repeat(4)


def water_energies(system):
    """Soft charges in a weak trap."""
    x = system.positions
    distances = ((x.unsqueeze(0) - x.unsqueeze(1)).square().sum(-1) + 0.5).sqrt()
    charges = CHARGES[: len(x)]
    return (2.0 * (charges.unsqueeze(0) * charges.unsqueeze(1) / distances).sum() + 0.05 * x.square().sum()).reshape(1)


class OfModel(Calculator):
    """ASE's interface of a model."""

    implemented_properties = ("energy", "forces")

    def calculate(self, atoms, properties, changes):
        super().calculate(atoms, properties, changes)
        found = FromEnergies(water_energies)(System(torch.tensor(atoms.positions)))
        self.results = {"energy": found.energies.item(), "forces": found.forces.numpy()}


def test_steps_of_water_are_those_of_ase():
    """Velocity Verlet with `FixBondLengths` (RATTLE by iteration), from velocities that ASE projects."""
    _, masses, velocities, pairs = molecules(*["water"] * 4)
    positions = torch.cat([WATER + tensor([[2.6 * (n % 2), 2.6 * (n // 2), 0.3 * n]]) for n in range(4)])
    atoms = ase.Atoms("OHH" * 4, positions.numpy(), calculator=OfModel())
    atoms.set_masses(masses.numpy())
    atoms.set_constraint(FixBondLengths(pairs.numpy(), tolerance=1e-14))
    atoms.set_momenta((masses.unsqueeze(1) * velocities).numpy())
    integrator, model = nve(0.05).constrained(Constraints(pairs)), FromEnergies(water_energies)
    state = integrator.start(System(positions), model, masses=masses, velocities=velocities)
    assert np.abs(state.velocities.numpy() - atoms.get_velocities()).max() < 1e-11
    VelocityVerlet(atoms, 0.05).run(30)
    state = run(integrator, state, model, 30)
    assert (state.system.positions - positions).abs().max() > 0.2
    assert np.abs(state.system.positions.numpy() - atoms.positions).max() < 1e-9
    assert np.abs(state.velocities.numpy() - atoms.get_velocities()).max() < 1e-9


# -- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("nve", "langevin", "npt full"))
def test_gradients_through_three_steps(name):
    """With respect to positions, velocities, lengths and the cell, against finite differences."""
    system, masses, velocities, pairs = molecules("water", "two")
    masses[4] = torch.inf

    def after(positions, velocities, lengths, cell):
        integrator = every(0.2)[name].constrained(Constraints(pairs, lengths))
        options = {"masses": masses, "velocities": velocities, "removed": 0}
        state = integrator.start(System(positions, cell=cell), wells(), **options)
        state = run(integrator, state, wells(), 3)
        return state.system.positions, state.velocities, integrator.conserved(state), state.pressures

    lengths = tensor([0.97, 0.95, 1.5, 0.98])
    assert_gradient(after, (system.positions, velocities, lengths, system.cell))


def test_second_and_third_derivatives_of_projections():
    _, masses, velocities, pairs = molecules("water")
    constraints = Constraints(pairs, tensor([0.97, 0.95, 1.5]))
    integrator = nve(0.3).constrained(constraints)

    def after(positions, velocities):
        free = lambda system: Evaluation(positions.new_zeros(1), torch.zeros_like(system.positions))  # noqa: E731
        state = integrator.start(System(positions), free, masses=masses, velocities=velocities, removed=0)
        state = integrator.step(state, free)
        return state.system.positions, state.velocities

    inputs = [value.clone().requires_grad_() for value in (WATER, velocities)]
    assert torch.autograd.gradgradcheck(after, inputs, atol=1e-6, fast_mode=True)

    def second(positions):
        outputs = after(positions, velocities)
        (first,) = torch.autograd.grad(outputs[0].square().sum() + outputs[1].sum(), positions, create_graph=True)
        return torch.autograd.grad(first.square().sum(), positions, create_graph=True)[0]

    assert torch.autograd.gradcheck(second, inputs[0], atol=1e-5, fast_mode=True)


# -- what cannot be solved ------------------------------------------------------------------------


def test_a_cluster_that_cannot_be_solved_is_not_a_number_and_others_go_on():
    """A step that would turn a bond by more than a right angle."""
    positions = tensor([[0, 0, 0], [1, 0, 0], [0, 0, 9], [1, 0, 9]])
    velocities = tensor([[0, 0, 0], [0, 3.0, 0], [0, 0, 0], [0, 0.3, 0]])
    system = System(positions, batch_idx=torch.tensor([0, 0, 1, 1], dtype=torch.int32))
    integrator = nve(1.0).constrained(Constraints(torch.tensor([[0, 1], [2, 3]])))
    free = lambda system: Evaluation(torch.zeros(2, dtype=float64), torch.zeros_like(system.positions))  # noqa: E731
    state = integrator.start(system, free, masses=torch.ones(4, dtype=float64), velocities=velocities)
    state = integrator.step(state, free)
    assert state.system.positions[:2].isnan().all() and state.system.positions[2:].isfinite().all()
    assert integrator.conserved(state).isfinite().tolist() == [False, True]


def test_pairs_in_any_form():
    """Arrays of indices and lists of tuples, as ASE's constraints take them."""
    for given in (np.array([[0, 1], [0, 2]]), [(0, 1), (0, 2)], torch.tensor([[0, 1], [0, 2]])):
        constraints = Constraints(given, [0.9, 1.1])
        assert constraints.pairs.dtype == torch.int64 and constraints.pairs.tolist() == [[0, 1], [0, 2]]
        assert constraints.lengths.tolist() == [0.9, 1.1] and constraints.groups == [(1, 2)]


def test_errors_have_names():
    system, masses, _, pairs = molecules("water", "atom")
    options = {"masses": masses}
    with pytest.raises(ValueError, match=r"lengths of atoms \[0, 1, 2\] cannot be reached"):
        nve(0.1).constrained(Constraints(pairs, tensor([1.0, 1.0, 9.0]))).start(system, ideal_gas, **options)
    straight = System(tensor([[0, 0, 0], [1, 0, 0], [-1, 0, 0], [3, 3, 3]]))
    with pytest.raises(ValueError, match=r"atoms \[0, 1, 2\] are not independent"):
        nve(0.1).constrained(Constraints(pairs)).start(straight, ideal_gas, **options)
    with pytest.raises(ValueError, match="name atom 7 of 4"):
        nve(0.1).constrained(Constraints(torch.tensor([[0, 7]]))).start(system, ideal_gas, **options)
    batch = System(system.positions, batch_idx=torch.tensor([0, 1, 1, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match="different systems"):
        nve(0.1).constrained(Constraints(pairs)).start(batch, ideal_gas, **options)
    for bad in ([[0, 0]], [[0, 1], [1, 0]], [[-1, 0]]):
        with pytest.raises(ValueError, match="`pairs` must be pairs of two atoms"):
            Constraints(torch.tensor(bad))
    with pytest.raises(ValueError, match=r"`pairs` must have shape \(n_pairs, 2\), got \(3,\)"):
        Constraints(torch.arange(3))
    with pytest.raises(TypeError, match="`pairs` must be integers"):
        Constraints(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="`lengths` must be positive"):
        Constraints(pairs, -1.0)
    with pytest.raises(ValueError, match=r"`lengths` must have shape \(n_pairs,\) = \(3,\)"):
        Constraints(pairs, torch.ones(2))
    with pytest.raises(ValueError, match="has some already"):
        nve(0.1).constrained(Constraints(pairs)).constrained(Constraints(pairs))
    with pytest.raises(TypeError, match="must be Constraints"):
        nve(0.1).constrained(pairs)

    class Mine(Flow):
        def __call__(self, state, h):
            return state

    with pytest.raises(TypeError, match="Mine is not made for constraints"):
        Integrator([(Mine(), 1.0), (Drift(), 1.0), FORCES, (Kick(), 1.0)], {"dt": 0.1}).constrained(Constraints(pairs))


def test_degrees_of_freedom_are_not_negative():
    """Of a batch in which six are removed from each system, a rigid pair among them."""
    state = started(every(0.1)["npt full"], kinds=("two",), removed=6)[1]
    assert [state.extra[name].item() for name in COUNTED] == [0.0, 0.0]
    state = started(every(0.1)["npt full"], kinds=("water", "atom"), removed=6)[1]
    assert [state.extra[name].item() for name in COUNTED] == [3.0, 0.0]


def test_no_constraints_and_those_of_frozen_atoms_change_nothing():
    states = []
    for pairs in (None, [], [(2, 3)]):
        system, masses, velocities, _ = molecules("two", "two")
        masses[2:] = torch.inf
        integrator = nve(0.1)
        if pairs is not None:
            integrator = integrator.constrained(Constraints(torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)))
        state = integrator.start(system, wells(), masses=masses, velocities=velocities)
        states.append(run(integrator, state, wells(), 10))
    for state in states[1:]:
        assert torch.equal(state.system.positions, states[0].system.positions)
        assert torch.equal(state.extra["degrees_of_freedom"], states[0].extra["degrees_of_freedom"])
        assert torch.equal(state.pressures, states[0].pressures)
