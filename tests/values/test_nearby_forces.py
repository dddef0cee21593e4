"""The estimate of forces by near neighbors, of a sample of the atoms of a large system."""

import functools

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.notices import AccuracyWarning
from nvalchemiops.torch.interactions.electrostatics import (
    Electrostatics,
    ParticleMeshEwald,
    estimate_errors,
    ewald_summation,
    particle_mesh_ewald,
)
from nvalchemiops.torch.interactions.electrostatics.accuracy import nearby_forces
from nvalchemiops.torch.interactions.electrostatics.accuracy.choice import mesh_for
from nvalchemiops.torch.interactions.electrostatics.accuracy.nearby_forces import force_of_neighbors, force_on_host
from nvalchemiops.torch.interactions.electrostatics.accuracy.sizes import sizes_of
from nvalchemiops.torch.interactions.electrostatics.accuracy.strengths import Strengths, strengths_of
from nvalchemiops.torch.interactions.electrostatics.system import check_system
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, build_rows, rows_of
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.systems import System
from tests.lanes.fibers import gpu_layout
from tests.support.comparing import close
from tests.support.systems import batch, crystal, csr, disordered

REACH = 7.0


def by_sample(system, rows, reach, spacing, on_mesh=False):
    return force_on_host(system, rows, reach, np.array(spacing.tolist()), sampled=True, on_mesh=on_mesh)


def on_gpu(*given, **options):
    with gpu_layout():
        return by_sample(*given, **options)


def estimate(system, rows=None, measure=by_sample):
    """The estimate, with `unrounded` before it is rounded."""
    checked = check_system(System(system.positions, system.charges, system.cell))
    if rows is None:
        rows = build_rows(system.positions, REACH, checked.cell, None)
    lengths = torch.tensor([[REACH], [2.8]], dtype=torch.float64)
    return float(measure(checked, rows, *lengths)[0])


@pytest.fixture
def unrounded(monkeypatch):
    monkeypatch.setattr(nearby_forces.core, "force_of", lambda nearby, *_: nearby)


@pytest.mark.parametrize("amplitude", [0.1, 0.4])
def test_a_sample_knows_the_force(amplitude, unrounded):
    """Within three standard errors of 5 % of that of all 432 atoms, whatever the form of the list."""
    system = crystal("rocksalt", 5.64, 6, amplitude, 7)
    sampled, expected = estimate(system), estimate(system, measure=force_of_neighbors)
    assert sampled != expected
    assert sampled == pytest.approx(expected, rel=0.15)
    matrix, _, matrix_shifts = neighbor_list(system.positions, REACH, system.cell)
    pairs, pointers, shifts = neighbor_list(system.positions, REACH, system.cell, return_neighbor_list=True)
    for given in (
        GivenNeighbors(pairs, pointers, shifts),
        GivenNeighbors(neighbor_matrix=matrix, matrix_shifts=matrix_shifts, fill_value=len(matrix)),
    ):
        rows = rows_of(given, system.positions, periodic=True)
        assert estimate(system, rows) == pytest.approx(sampled, rel=1e-12)


def test_few_large_forces_are_looked_for_among_all_atoms(unrounded):
    """Where one atom of the sample has most of the force, or one that is not in it."""
    system = crystal("rocksalt", 5.64, 6, 0.1, 7)
    (inside, *_), outside = nearby_forces._sample(432), 1
    for atom, is_seen in ((inside, True), (outside, False)):
        positions = system.positions.clone()
        positions[atom] = positions[atom + 5] + 0.3
        moved = system._replace(positions=positions)
        found, expected = estimate(moved), estimate(moved, measure=force_of_neighbors)
        if is_seen:
            assert found == pytest.approx(expected, rel=1e-12)
        else:
            assert found < 1.15 * expected  # a force that is taken for too small costs time, not accuracy


def test_a_mesh_is_finer_where_few_atoms_are_charged():
    """There the force of a charge on itself, an error of a mesh, does not vanish among those of the others."""
    worst = {"ewald": 0.0, "pme": 0.0}
    for seed in range(3):
        x = crystal("rocksalt", 5.6, 6, 0.2, seed).positions
        charges = torch.zeros(len(x), dtype=torch.float64)
        charges[0], charges[40] = 1.0, -1.0
        system = System(x, charges, 16.8 * torch.eye(3, dtype=torch.float64))
        exact = Electrostatics(1e-10, method="ewald")(system, compute_forces=True).forces
        calls = {method: Electrostatics(1e-5, method=method) for method in worst}
        for method, call in (*calls.items(), ("pme", ParticleMeshEwald.estimate(system, accuracy=1e-5))):
            error = (call(system, compute_forces=True).forces - exact).norm() / exact.norm()
            worst[method] = max(worst[method], float(error))
        mesh = {"mesh_dimensions": (24, 24, 24), "spline_order": 6}
        coarse = ParticleMeshEwald(0.5, **mesh, cutoff=10.0)(system, compute_forces=True).forces
        known = {"alpha": 0.5, "real_space_cutoff": 10.0, "charges": charges}
        expected = estimate_errors(x, system.cell, **known, **mesh).total
        assert 1 / 3 < float(expected / ((coarse - exact).norm() / exact.norm())) < 3.0
        on_mesh = functools.partial(by_sample, on_mesh=True)
        found = estimate(system, measure=on_mesh)
        assert found < 0.6 * estimate(system)
        for others in (force_of_neighbors, on_gpu):
            assert estimate(system, measure=functools.partial(others, on_mesh=True)) == found
    assert max(worst.values()) < 3e-5  # as documented


def two_moments(kind, distance):
    """Positions of 216 atoms, charges that are zero, the cell, and dipoles or quadrupoles of two of the atoms."""
    x, cell = crystal("rocksalt", 5.6, 6, 0.2, 1).positions.clone(), 16.8 * torch.eye(3, dtype=torch.float64)
    x[40] = x[0] + distance * torch.tensor([0.6, -0.48, 0.64], dtype=torch.float64)
    sources = torch.zeros((len(x), 3, 3)[: 2 if kind == "dipoles" else 3], dtype=torch.float64)
    tensor = torch.tensor([[1.0, 0.4, -0.3], [0.4, -0.7, 0.2], [-0.3, 0.2, -0.3]], dtype=torch.float64)
    sources[0], sources[40] = (tensor, -tensor.flip(0, 1)) if kind == "quadrupoles" else (tensor[0], tensor[1])
    return x, torch.zeros(len(x), dtype=torch.float64), cell, {kind: sources}


@pytest.mark.parametrize(("kind", "distance"), [("dipoles", 8.9), ("quadrupoles", 8.9), ("quadrupoles", 2.8)])
def test_forces_between_few_moments_depend_on_how_far_they_are(kind, distance):
    """Those of dipoles had up to 360 times the error, and those of quadrupoles up to 3000 times."""
    x, charges, cell, sources = two_moments(kind, distance)
    given = {"cutoff": 7.0, "accuracy": 1e-3, "compute_forces": True, **sources}
    exact = ewald_summation(x, charges, cell, **given | {"accuracy": 1e-12, "cutoff": None})[1]
    estimated = ParticleMeshEwald.estimate(System(x, charges, cell, **sources), accuracy=1e-3)
    assert estimated.spline_order == 10  # with the usual order the mesh would be out of reach
    for call in (ewald_summation, particle_mesh_ewald):
        forces = call(x, charges, cell, **given)[1]
        assert 1e-5 < (forces - exact).norm() / exact.norm() < 3e-3
    with gpu_layout():
        on_gpu = ewald_summation(x, charges, cell, **given)[1]
    close(on_gpu, ewald_summation(x, charges, cell, **given)[1], 1e-12)


def test_few_moments_in_a_compiled_graph_and_in_a_batch():
    x, charges, cell, sources = two_moments("dipoles", 8.9)
    given = {"cutoff": 8.0, "k_cutoff": 4.0, "accuracy": 1e-4, "compute_forces": True}
    near = csr(System(x, charges, cell[None]), 8.0)
    alone = ewald_summation(x, charges, cell, **given, **sources)
    compiled = torch.compile(ewald_summation, backend="aot_eager", fullgraph=True)
    close(compiled(x, charges, cell, **given, **sources, **near), alone, 1e-12)
    others = 0.1 * torch.cos(x)
    numbers = torch.arange(2, dtype=torch.int32).repeat_interleave(len(x))
    batched = {"dipoles": torch.cat([others, sources["dipoles"]]), "batch_idx": numbers}
    both = ewald_summation(torch.cat([x, x]), torch.cat([charges] * 2), cell.expand(2, 3, 3), **given, **batched)
    close([found[len(x) :] for found in both], alone, 1e-12)


def test_a_moment_alone_has_no_forces_that_could_be_small():
    """It has the mesh of a system where all atoms have one; that for two has many times the points."""
    x, charges, cell, sources = two_moments("quadrupoles", 8.9)
    points = []
    for n in (len(x), 41, 40):
        moments = sources["quadrupoles"].clone()
        moments[:] = moments[0] if n > 41 else moments
        moments[n:] = 0.0
        found = ParticleMeshEwald.estimate(
            System(x, charges, cell, quadrupoles=moments), accuracy=1e-4, spline_order=10
        )
        points.append(np.prod(found.mesh_dimensions))
    assert points[0] == points[2] < 0.1 * points[1]


def test_how_many_moments_there_are_does_not_matter_where_there_are_many():
    """Choices that are kept serve dipoles whose magnitudes become more or less even."""
    x, charges, cell, _ = two_moments("dipoles", 8.9)
    even = torch.nn.functional.normalize(torch.cos(x + x.roll(1, 1)), dim=1)
    for exponent, few in ((0, False), (2, False), (16, True)):
        dipoles = even * torch.linspace(0.0, 1.0, len(x), dtype=torch.float64)[:, None] ** exponent
        system = check_system(System(x, charges, cell[None], dipoles=dipoles))
        assert (strengths_of(system, np).per_source != 1.0) == few


def test_the_strength_of_quadrupoles_is_that_of_any_orientation():
    x, charges, cell, _ = two_moments("quadrupoles", 8.9)
    axes, diagonals = torch.tensor([[[1.0, 0.0], [0.0, -1.0]], [[0.0, 1.0], [1.0, 0.0]]], dtype=torch.float64)
    for quadrupole in (axes, diagonals):
        quadrupoles = torch.nn.functional.pad(quadrupole, (0, 1, 0, 1)).expand(len(x), 3, 3)
        system = check_system(System(x, charges, cell[None], quadrupoles=quadrupoles))
        np.testing.assert_allclose(strengths_of(system, np).squares, [[0.0, 0.0, 2.0]], rtol=1e-12)


def test_strengths_are_found_once_in_a_call(monkeypatch):
    """They are copied to the host, for the order of splines as for alpha."""
    x, charges, cell, sources = two_moments("dipoles", 8.9)
    names, run = [], engine.run_function
    monkeypatch.setattr(engine, "run_function", lambda name, *given: names.append(name) or run(name, *given))
    particle_mesh_ewald(x, charges, cell, accuracy=1e-3, **sources)
    assert names.count("strengths") == 1


def test_a_mesh_for_few_moments_has_a_bound():
    """For two quadrupoles among 8000 atoms 2e9 points were chosen, and for 27000 atoms the call was refused."""
    g = torch.Generator().manual_seed(3)
    x, cell = 42.0 * torch.rand(1000, 3, dtype=torch.float64, generator=g), 42.0 * torch.eye(3, dtype=torch.float64)
    quadrupoles = torch.zeros(1000, 3, 3, dtype=torch.float64)
    quadrupoles[:2] = two_moments("quadrupoles", 8.9)[3]["quadrupoles"][:1]
    x[:2] = torch.tensor([[0.0], [21.0]], dtype=torch.float64)
    system = System(x, torch.zeros_like(x[:, 0]), cell, quadrupoles=quadrupoles)
    with pytest.warns(AccuracyWarning, match=r"order 8 on a mesh of 1.7e\+07 points: expect .* goes further"):
        found = ParticleMeshEwald.estimate(system, accuracy=1e-4, spline_order=8)
    assert 0.9 * core.MOST_POINTS < np.prod(found.mesh_dimensions) < 1.3 * core.MOST_POINTS
    # a mesh for strengths that are assumed without a look at forces has no bound
    sizes, alpha = sizes_of(400.0 * torch.eye(3, dtype=torch.float64)[None], np.array([2.0])), np.array([0.5])
    strengths = Strengths(np.array([[0.0, 1.0, 0.0]]), sizes.spacing, np.array([0.8]), np.array([1.0]))
    target = strengths.target(1e-4, alpha)
    assert np.prod(mesh_for(sizes, alpha, target, 8, strengths=strengths)) > 20.0 * core.MOST_POINTS


class Calls(TorchFunctionMode):
    """Counts calls of torch."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_what_a_mesh_asks_for_takes_no_operation_of_torch():
    """Calls without alpha ask each time."""
    counts = []
    for on_mesh in (False, True, False, True):
        with Calls() as calls:
            estimate(disordered("water"), measure=functools.partial(by_sample, on_mesh=on_mesh))
        counts.append(calls.count)
    assert counts[2] == counts[3] > 0


def test_small_systems_have_no_sample(unrounded):
    system = disordered("water")
    assert len(system.charges) < nearby_forces.LEAST_SAMPLED
    assert estimate(system) == pytest.approx(estimate(system, measure=force_of_neighbors), rel=1e-12)


def test_wrong_pointers_are_left_to_the_kernel(unrounded):
    system = crystal("rocksalt", 5.64, 6, 0.1, 7)
    pairs, pointers, shifts = neighbor_list(system.positions, REACH, system.cell, return_neighbor_list=True)
    for wrong in (pointers + 1, pointers.flip(0).contiguous()):
        rows = rows_of(GivenNeighbors(pairs, wrong, shifts), system.positions, periodic=True)
        with pytest.raises(ValueError, match="neighbor_ptr"):
            estimate(system, rows)


def test_no_sample_where_others_have_none():
    """Sums with a cutoff are the same in a batch, which has no sample, as with it are those with gradients by cells."""
    system = crystal("rocksalt", 5.64, 6, 0.3, 0)
    x, q, cell = system[:3]
    assert estimate(system) != estimate(system, measure=force_of_neighbors)
    given = {"cutoff": 7.0, "k_cutoff": 3.0, "accuracy": 1e-3}
    both = batch(system, system)
    alone, together = ewald_summation(x, q, cell, **given), ewald_summation(*both[:3], batch_idx=both[3], **given)
    torch.testing.assert_close(together[: len(x)], alone, rtol=0.0, atol=1e-12)
    by_sizes, tracked = (ewald_summation(x, q, h, accuracy=1e-3) for h in (cell, cell.clone().requires_grad_()))
    torch.testing.assert_close(tracked.detach(), by_sizes, rtol=0.0, atol=1e-12)


def test_under_transforms_the_same_atoms_are_in_the_sample(unrounded):
    """Their rows are not picked out of the list there."""
    system = crystal("rocksalt", 5.64, 6, 0.1, 7)
    found = []

    def energy(x):
        found.append(estimate(system._replace(positions=x)))
        return x.sum()

    torch.func.grad(energy)(system.positions)
    assert found == [pytest.approx(estimate(system), rel=1e-12)]
