"""`torch.func.linearize` gives forward mode: torch traces operations with values, and computes constants once."""

import warnings

import torch

from nvalchemiops.torch import System
from nvalchemiops.torch.dynamics import Constraints, Evaluation, langevin, nph, simulate
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.dispersion import DFTD3
from nvalchemiops.torch.neighbors import VerletList, neighbor_list
from tests.support.cases import CUTOFF, D3, LENNARD_JONES, MIXED, SMALL, SUMS
from tests.support.comparing import close, random_like


def linearized_is_forward_mode(function, x):
    (direction,) = random_like([x], 1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Attempted to insert a get_attr Node", UserWarning)
        _, linear = torch.func.linearize(function, x)
    close([linear(direction)], [torch.func.jvp(function, (x,), (direction,))[1]], 1e-12)


def test_the_virial_of_a_mesh_is_linearized():
    """Torch loses what is written in place into a constant."""
    inputs, near = SUMS[1].inputs(SMALL), SUMS[1].near(SMALL)
    linearized_is_forward_mode(lambda x: SUMS[1].call(x, *inputs[1:], near, compute_virial=True)[-1], inputs.x)


def test_prepared_sums_are_linearized():
    """Whose alpha or cell is compared with that of the prepared data, as given k-vectors are with the cell."""
    x, charges, cell, _ = SUMS[0].inputs(SMALL)
    ewald = electrostatics.EwaldSummation(0.8, 3.0, CUTOFF).prepare(cell)
    linearized_is_forward_mode(lambda x: ewald(x, charges, cell), x)
    pme = electrostatics.ParticleMeshEwald(0.8, (6, 7, 8), cutoff=CUTOFF).prepare(cell)
    linearized_is_forward_mode(lambda x: pme(x, charges, cell), x)
    given = {"alpha": 0.8, "k_vectors": electrostatics.generate_k_vectors_ewald_summation(cell, 3.0), "cutoff": CUTOFF}
    linearized_is_forward_mode(lambda x: electrostatics.ewald_summation(x, charges, cell, **given), x)


def test_dispersion_of_a_batch_is_linearized():
    """Whose elements and systems are read."""
    inputs, near = D3.inputs(MIXED), D3.near(MIXED)
    linearized_is_forward_mode(lambda x: D3.energies(x, *inputs[1:], near, energy_reduction="system"), inputs.x)


def test_published_data_of_dispersion_are_read_inside():
    """From files, which the tracer of torch cannot read."""
    x = SMALL.positions
    linearized_is_forward_mode(lambda x: DFTD3("pbe", [6, 8])(System(x, numbers=torch.tensor([6, 8, 6]))).energies, x)


def test_a_molecule_of_gaussians_is_linearized():
    """Whose widths, exclusions and extent are read."""
    x, charges = SUMS[0].inputs(SMALL)[:2]
    sources = {"widths": torch.tensor([0.3, 0.4, 0.5]), "exclusions": torch.tensor([[0], [1]])}
    linearized_is_forward_mode(lambda x: electrostatics.ewald_summation(x, charges, None, pbc=False, **sources), x)


def test_a_batch_of_crystals_and_a_molecule_is_linearized():
    """It is split, and so are its k-vectors: which systems and neighbors belong to a part is read."""
    pbc = torch.tensor([[True] * 3, [False] * 3, [True] * 3])
    (x, charges, cell, _), near = SUMS[0].inputs(MIXED), SUMS[0].near(MIXED)
    ewald = electrostatics.EwaldSummation(0.8, 1.5, CUTOFF).prepare(cell)
    linearized_is_forward_mode(lambda x: ewald(x, charges, cell, pbc=pbc, **near), x)


def test_molecules_are_linearized():
    """How many there are, and their order, is read."""
    options = {"pbc": torch.zeros(3, 3, dtype=torch.bool), "batch_idx": MIXED.batch_idx, "energy_reduction": "system"}
    linearized_is_forward_mode(
        lambda x: electrostatics.ewald_summation(x, MIXED.charges, None, **options), MIXED.positions
    )


def test_quadrupoles_and_given_alphas_of_gaussians_are_linearized():
    """Whether quadrupoles have a trace is read, and whether alpha fits widths."""
    inputs, near = SUMS[0].inputs(SMALL), SUMS[0].near(SMALL)
    quadrupoles = torch.diag(torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64)).expand(3, 3, 3)
    sources = {"quadrupoles": quadrupoles, "widths": torch.tensor([0.3, 0.4, 0.5])}
    linearized_is_forward_mode(lambda x: SUMS[0].energies(x, *inputs[1:], near, **sources), inputs.x)


def test_sums_over_half_lists_are_linearized():
    """Which atoms exist is read, and for an alpha that is not given how far the lists reach."""
    x, charges, cell, _ = SUMS[0].inputs(SMALL)
    pairs, ptr, shifts = neighbor_list(x, CUTOFF, cell=cell, half_fill=True, return_neighbor_list=True)
    near = {"neighbor_list": pairs, "neighbor_ptr": ptr, "neighbor_shifts": shifts, "half_list": True}
    linearized_is_forward_mode(lambda x: electrostatics.ewald_summation(x, charges, cell, accuracy=1e-3, **near), x)


def test_steps_with_a_masked_barostat_are_linearized():
    """What is written into a part of a constant is lost; masses and parameters are read."""
    system = System(SMALL.positions, cell=5.0 * torch.eye(3, dtype=torch.float64))
    integrator = nph(0.01, 0.05, cell="axes", mask=(True, False, True))
    pressure = torch.diag(torch.tensor([0.3, 0.2, 0.1], dtype=torch.float64)).unsqueeze(0)

    def model(system):
        return Evaluation(0.5 * system.positions.square().sum().reshape(1), -system.positions, pressure)

    def after_a_step(x):
        masses, velocities = torch.ones_like(x[:, 0]), 0.1 * system.positions
        state = integrator.start(system._replace(positions=x), model, masses=masses, velocities=velocities)
        found = integrator.step(state, model)
        return torch.cat([found.system.positions, found.velocities])

    linearized_is_forward_mode(after_a_step, system.positions)


def test_exclusions_in_a_batch_are_linearized():
    """Whether both atoms of a pair are in one system is read."""
    case, systems = SUMS[0], MIXED.batch_idx
    inputs, near = case.inputs(MIXED), case.near(MIXED)
    excluded = (systems == systems[0]).nonzero()[:2]
    linearized_is_forward_mode(lambda x: case.energies(x, *inputs[1:], near, exclusions=excluded), inputs.x)


def test_a_list_along_open_axes_is_linearized():
    """Whether it has images along them is read."""
    pbc = torch.tensor([True, True, False])
    names, near = ("neighbor_list", "neighbor_ptr", "neighbor_shifts"), {"pbc": pbc, "sigma": 1.0, "epsilon": 1.0}
    near |= dict(zip(names, neighbor_list(SMALL.positions, CUTOFF, SMALL.cell, pbc, return_neighbor_list=True)))
    linearized_is_forward_mode(lambda x: LENNARD_JONES(x, SMALL.cell, **near), SMALL.positions)


def test_a_matrix_of_a_given_width_is_linearized():
    """Whose largest count is read."""
    linearized_is_forward_mode(
        lambda x: neighbor_list(x, CUTOFF, SMALL.cell, max_neighbors=40, return_distances=True)[-1], SMALL.positions
    )


def test_a_list_that_is_stale_for_one_system_is_linearized():
    """Of which rows of others are kept: torch loses what is written into a copy of them."""
    start = torch.tensor([[0.0], [4.0], [0.0], [2.0]], dtype=torch.float64) * torch.eye(3, dtype=torch.float64)[0]
    batch_idx = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    closer = torch.where(start == 4.0, 2.0, start)

    def energies(x):
        near = VerletList(CUTOFF, 0.5)
        near(start, batch_idx=batch_idx)
        return LENNARD_JONES(
            x, sigma=1.0, epsilon=1.0, batch_idx=batch_idx, neighbor_matrix=near(x, None, None, batch_idx)[0]
        )

    linearized_is_forward_mode(energies, closer)


def test_the_start_of_a_run_is_linearized():
    """Temperatures, rigid bonds and failures are read."""
    system = System(SMALL.positions)
    rigid = langevin(0.01, 0.1).constrained(Constraints([[0, 1]]))

    def model(system):
        return Evaluation(0.5 * system.positions.square().sum().reshape(1), -system.positions)

    def velocities(x):
        masses = torch.ones_like(x[:, 0])
        return simulate(system._replace(positions=x), model, rigid, steps=0, seed=1, masses=masses).state.velocities

    linearized_is_forward_mode(velocities, system.positions)


def test_splittings_of_multipoles_are_linearized():
    """The volume of the cell, and the reach of the list, are read."""
    pairs, pointers, shifts = neighbor_list(SMALL.positions, CUTOFF, SMALL.cell, return_neighbor_list=True)
    charges, cell = SMALL.charges.unsqueeze(1), SMALL.cell
    given = (charges, cell, pairs[1], pointers, shifts)
    linearized_is_forward_mode(
        lambda x: electrostatics.multipole_ewald_summation(x, *given, sigma=0.3, accuracy=0.5), SMALL.positions
    )
