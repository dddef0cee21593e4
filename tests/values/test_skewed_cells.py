"""A sum depends on the lattice, not on the vectors that describe it; nor does its mesh, or the bins of a search."""

import functools

import ase
import ase.build
import numpy as np
import pytest
import torch

from nvalchemiops import ase as ase_terms
from nvalchemiops.interactions.electrostatics import k_vectors
from nvalchemiops.neighbors import grid
from nvalchemiops.torch import System, plans, record
from nvalchemiops.torch.interactions.electrostatics import (
    Electrostatics,
    electrostatic_potential,
    estimate_errors,
    ewald_summation,
    particle_mesh_ewald,
    pme_reciprocal_space,
)
from nvalchemiops.torch.interactions.electrostatics.accuracy.sizes import Sizes
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors import search as search_ops
from tests.support.comparing import close, close_to_largest, same_bits
from tests.support.sums import relative_error
from tests.support.systems import ALL, batch, csr, disordered, scattered, triclinic
from tests.support.systems import System as Atoms

BASES = {
    "one vector": [[1, 0, 0], [1, 1, 0], [0, 0, 1]],
    "three vectors": [[1, 0, 0], [0, 1, 0], [0, 3, 1]],
    "ten vectors": [[1, 10, 0], [0, 1, 0], [0, 0, 1]],
    "in two steps": [[1, 0, 0], [3, 1, 0], [6, 3, 1]],
    "left-handed": [[3, 1, 0], [1, 0, 0], [0, -2, 1]],
    "hundreds": [[1, 0, 0], [100, 1, 0], [0, 100, 1]],
}
EACH = pytest.mark.parametrize("basis", BASES.values(), ids=BASES)
LONG = np.array([[9.0, 0.0, 0.0], [0.4, 9.5, 0.0], [-0.3, 0.2, 10.0]])


def ions(cell=LONG, n_atoms=20, seed=3):
    x = scattered(n_atoms, cell, 1.6, np.random.default_rng(seed))
    return Atoms.of(x, np.tile([1.0, -1.0], n_atoms // 2) + 0.02, cell)


def along(basis, system):
    """The same atoms in other vectors of their lattices."""
    return system._replace(cell=torch.as_tensor(basis, dtype=torch.float64) @ system.cell)


def of(system, **options):
    return particle_mesh_ewald(*system[:3], batch_idx=system.batch_idx, **options)


@EACH
def test_results_are_those_of_the_lattice(basis):
    """The mesh is the same, so only rounding differs; and the sum over wave vectors tells what is right."""
    system, skewed = ions(), along(basis, ions())
    found = of(skewed, **ALL)
    close_to_largest(found, of(system, **ALL), 1e-9)
    exact = ewald_summation(*system[:3], accuracy=1e-11, **ALL)
    assert [relative_error(a, b) < 3e-6 for a, b in zip(found, exact)] == [True] * 4


@pytest.mark.parametrize("options", [{"mesh_spacing": 0.5}, {"mesh_spacing": torch.tensor([0.5])}, {"accuracy": 1e-4}])
@pytest.mark.parametrize("alpha", [0.6, None])
def test_any_way_to_choose_a_mesh(options, alpha):
    """Also where alpha follows from the mesh, which is too coarse for the alpha of least time."""
    cells = ions(), along(BASES["hundreds"], ions())
    expected, found = (of(system, alpha=alpha, **options, **ALL) for system in cells)
    close_to_largest(found, expected, 1e-8)
    if "accuracy" not in options and alpha is not None:
        expected, found = (pme_reciprocal_space(*system[:3], alpha, **options, **ALL) for system in cells)
        close_to_largest(found, expected, 1e-8)


def test_the_estimate_of_errors_is_that_of_the_mesh():
    system, skewed = ions(), along(BASES["hundreds"], ions())
    options = {"alpha": 0.6, "real_space_cutoff": 6.0, "mesh_spacing": 0.5, "charges": system.charges}
    expected, found = (estimate_errors(x, cell, **options) for x, _, cell, *_ in (system, skewed))
    close(found, expected)
    assert found.reciprocal_space > 10.0 * found.real_space


def test_spacings_along_the_vectors_of_the_cell_and_prepared_data_keep_these_vectors():
    skewed = along(BASES["hundreds"], ions())
    prepared = {"mesh_spacing": 0.1, "cell_inv_t": torch.linalg.inv(skewed.cell).mT}
    for options in ({"mesh_spacing": torch.full((1, 3), 0.1)}, prepared):
        with pytest.raises(ValueError, match="shorter ones of the same lattice"):
            of(skewed, alpha=0.6, **options)


def test_potentials_and_sources_of_higher_order():
    system = ions()
    generator = torch.Generator().manual_seed(0)
    dipoles = 0.1 * torch.randn(len(system.charges), 3, generator=generator, dtype=torch.float64)
    results = []
    for here in (system, along(BASES["in two steps"], system)):
        seen = electrostatic_potential(*here[:3], dipoles=dipoles, method="pme", accuracy=1e-5, derivatives=2)
        energies = of(here, dipoles=dipoles, compute_dipole_gradients=True, accuracy=1e-5, **ALL)
        results.append([*seen, *energies])
    close_to_largest(*results, 1e-8)


@pytest.mark.parametrize("others", [{}, {"widths": 0.3}], ids=["charges", "gaussians"])
def test_the_calculator(others):
    """Its mesh lies along the vectors of the cell."""
    system, found = ions(), []
    for method, basis in (("pme", "three vectors"), ("ewald", "in two steps")):
        atoms = ase.Atoms("Na20", system.positions.numpy(), cell=along(BASES[basis], system).cell[0].numpy(), pbc=True)
        atoms.calc = ase_terms.Calculator(
            ase_terms.Electrostatics(method, system.charges.numpy(), accuracy=1e-6, **others)
        )
        results = [atoms.get_potential_energy()], atoms.get_forces(), atoms.get_stress()
        found.append([torch.tensor(values) for values in results])
    close_to_largest(*found, 3e-5)


def slopes(system, basis):
    """Derivatives of first and second order by positions, charges and the cell that ``basis`` multiplies."""
    inputs = [t.clone().requires_grad_() for t in system[:3]]
    x, q, cell = inputs
    energies, forces, _, virial = particle_mesh_ewald(x, q, basis @ cell, accuracy=1e-5, spline_order=8, **ALL)
    first = torch.autograd.grad(energies.sum(), inputs, create_graph=True)
    loss = sum(t.square().sum() for t in (*first, forces, virial))
    return [t.detach() for t in (*first, *torch.autograd.grad(loss, inputs))]


@pytest.mark.parametrize("name", ["three vectors", "left-handed"])
def test_derivatives_are_those_of_the_lattice(name):
    system, basis = ions(n_atoms=8), torch.tensor(BASES[name], dtype=torch.float64)
    close_to_largest(slopes(system, basis), slopes(system, torch.eye(3, dtype=torch.float64)), 1e-8)


def test_derivatives_by_a_skewed_cell_are_those_of_the_energy():
    system = along(BASES["in two steps"], ions(n_atoms=4))
    x, q, cell = (t.clone().requires_grad_() for t in system[:3])
    options = {"accuracy": 1e-4, "alpha": 0.5, "cutoff": 6.0}
    assert torch.autograd.gradcheck(lambda *t: particle_mesh_ewald(*t, **options).sum(), (x, q, cell), fast_mode=True)
    forces = functools.partial(particle_mesh_ewald, **options, **ALL)
    assert torch.autograd.gradcheck(lambda *t: forces(*t)[1:], (x, q, cell), fast_mode=True)


def test_a_batch_of_cells_with_different_skews():
    """The common mesh is hardly larger than that of the same lattices in short vectors, which may be in other order."""
    systems = [ions(seed=n) for n in range(len(BASES))]
    skewed = [along(basis, system) for basis, system in zip(BASES.values(), systems)]
    together, mixed = batch(*systems), batch(*skewed[:-1], systems[-1])
    close_to_largest(of(mixed, **ALL)[:3], ewald_of(together, accuracy=1e-10, **ALL)[:3], 3e-6)
    found, short = (Sizes(s.cell.numpy(), np.full(6, 20.0), np.ones(6)).for_mesh()[0] for s in (mixed, together))
    assert found.lengths.max(0).prod() < 1.12 * short.lengths.max(0).prod()
    boxes = [ions(np.diag(np.roll([8.0, 9.0, 16.0], n))) for n in range(3)]  # in a batch their axes are sorted
    turned = [along(basis, box) for basis, box in zip(BASES.values(), boxes)]
    close_to_largest(of(batch(*turned), **ALL), of(batch(*boxes), **ALL), 1e-10)
    close_to_largest(of(batch(*boxes), **ALL)[:2], ewald_of(batch(*boxes), accuracy=1e-10, **ALL)[:2], 1e-5)


def ewald_of(system, **options):
    return ewald_summation(*system[:3], batch_idx=system.batch_idx, **options)


@pytest.mark.parametrize("basis", [[[1, 0, 0], [4, 1, 0], [0, 0, 1]], [[1, 0, 0], [4, 1, 0], [1, 0, 1]]])
def test_slabs(basis):
    """Vectors in the plane are mixed, and added to the third; the correction knows the plane only."""
    slab = ions(np.diag([8.0, 9.0, 40.0]))
    slab = slab._replace(positions=slab.positions * torch.tensor([1.0, 1.0, 0.25]))
    options = {"pbc": torch.tensor([True, True, False]), "slab_correction": True, **ALL}
    found = of(along(basis, slab), **options)
    close_to_largest(found, of(slab, **options), 1e-9)
    close_to_largest(found[:3], ewald_of(slab, accuracy=1e-10, **options)[:3], 1e-5)


@pytest.mark.parametrize("repeats", ["positions", "cell"])
def test_calls_that_repeat(repeats):
    """Plans for atoms that move in a skewed cell, and for a cell that changes as well."""
    system, basis = ions(), BASES["in two steps"]
    for step in range(6):
        strain = torch.eye(3, dtype=torch.float64)
        strain[0, 1] = 2e-4 * step * (repeats == "cell")
        moved = system._replace(positions=(system.positions + 1e-3 * step) @ strain, cell=system.cell @ strain)
        near = csr(along(basis, moved), 6.0)
        found = of(along(basis, moved), cutoff=6.0, **near, **ALL)
        with plans.off():
            close(found, of(along(basis, moved), cutoff=6.0, **near, **ALL), 1e-12)
        close_to_largest(found, of(moved, cutoff=6.0, **csr(moved, 6.0), **ALL), 1e-9)
    assert "0 replayed" not in next(line for line in plans.explain().splitlines() if line.startswith("sum"))


def test_a_recorded_step():
    system = along(BASES["in two steps"], ions())
    options = {"alpha": 0.5, "mesh_spacing": 0.6, "cutoff": 6.0, **csr(system, 6.5), **ALL}

    @record
    def recorded(positions):
        return particle_mesh_ewald(positions, *system[1:3], **options)

    for n in range(4):
        moved = system.positions + 0.01 * n
        same_bits(recorded(moved), particle_mesh_ewald(moved, *system[1:3], **options))
    assert recorded.explain().startswith("last call: replayed")


def test_a_cell_that_is_sheared_on_and_on():
    """Vectors change on the way: results stay within the accuracy, and are those of the beginning after one vector."""
    system, energies, accuracy = ions(), [], 1e-5
    for shear in np.linspace(0.0, 1.0, 11):
        strain = torch.eye(3, dtype=torch.float64)
        strain[1, 0] = shear * system.cell[0, 0, 0] / system.cell[0, 1, 1]
        here = system._replace(positions=system.positions @ strain, cell=system.cell @ strain)
        exact = ewald_of(here, accuracy=1e-10, compute_forces=True)
        found = of(here, accuracy=accuracy, compute_forces=True)
        assert relative_error(found[1], exact[1]) < 3.0 * accuracy
        assert abs(float(found[0].sum() / exact[0].sum()) - 1.0) < accuracy
        energies.append(float(exact[0].sum()))
    assert max(energies) - min(energies) > 0.1


def test_the_choice_of_a_method_and_its_explanation_do_not_depend_on_the_vectors():
    system = disordered("triclinic")
    skewed = along(BASES["ten vectors"], system)
    here, there = (Electrostatics(method="pme").explain(System(*s[:3])) for s in (system, skewed))
    assert here == there and "mesh" in here


SHORT = {
    "cubic": np.eye(3),
    "face-centred": ase.build.bulk("Cu").cell.array,
    "body-centred": ase.build.bulk("Fe").cell.array,
    "hexagonal": ase.build.bulk("Mg").cell.array,
    "left-handed": np.array([[0.0, 1.0, 0.0], [1.0, 0.2, 0.0], [0.1, 0.1, 3.0]]),
}


@pytest.mark.parametrize("name", SHORT)
def test_cells_with_short_vectors_keep_them_also_when_they_change_a_little(name):
    rng = np.random.default_rng(0)
    for _ in range(20):
        cell = SHORT[name] @ (np.eye(3) + 0.03 * rng.uniform(-1.0, 1.0, (3, 3)))
        sizes = Sizes(np.array([SHORT[name], cell]), np.ones(2), np.ones(2))
        assert sizes.with_shorter_vectors()[1] is None
        assert not grids(cell)["is_turned"].any()


# -- searches --------------------------------------------------------------------------------------


def grids(cell, cutoff=1.0, pbc=None):
    """The bins of a search, as `nvalchemiops.neighbors.grid` describes them."""
    search = search_ops.Search(torch.rand(90, 3, dtype=torch.float64), cutoff, torch.as_tensor(cell)[None], pbc)
    found = search_ops._CellList(search).binned[4]
    return found.numpy().view(grid.Grid.numpy_dtype())


@pytest.mark.parametrize(
    ("basis", "pbc"),
    [
        *[(basis, [True] * 3) for basis in BASES.values()],
        ([[1, 5, 0], [0, 1, 0], [0, 0, 1]], [True, True, False]),
        ([[1, 0, 0], [0, 1, 0], [0, -4, 1]], [False, True, True]),
        ([[1, 0, 0], [0, 1, 0], [3, 0, 1]], [True, False, True]),
    ],
)
def test_a_list_holds_the_pairs_of_the_lattice(basis, pbc):
    """Pairs in all images, converted from the vectors of one cell to those of the other."""
    system, axes, basis = ions(n_atoms=90), torch.tensor(pbc), torch.tensor(basis)
    skewed = along(basis, system)
    positions = system.positions + torch.tensor([3.0, -40.0, 7.0], dtype=torch.float64)
    options = {"pbc": axes, "return_neighbor_list": True}
    assert grids(skewed.cell[0], pbc=axes)["is_turned"].all()
    for more in ({}, {"nearest": 7}, {"target_indices": torch.tensor([4, 0, 80])}, {"method": "naive"}):
        found, _, shifts = neighbor_list(positions, 4.0, skewed.cell[0], **options, **more)
        expected, _, images = neighbor_list(positions, 4.0, system.cell[0], **options, **more)
        rows = [torch.cat([found.mT, (shifts.long() @ basis).int()], 1), torch.cat([expected.mT, images], 1)]
        assert len(rows[0]) == len(rows[1]) > 7
        same_bits(*[[torch.unique(each, dim=0)] for each in rows])


@EACH
def test_a_search_visits_no_more_bins_than_in_short_vectors(basis):
    (skewed,), (short,) = grids(np.array(basis) @ LONG, 3.0), grids(LONG, 3.0)
    assert skewed["is_turned"] and not short["is_turned"]
    np.testing.assert_allclose(np.sort(skewed["reach"]), np.sort(short["reach"]), rtol=1e-6)
    assert sorted(skewed["bins"].ravel().tolist()) == sorted(short["bins"].ravel().tolist())


def test_half_lists_keep_images_in_one_direction_of_the_cell():
    system = triclinic(30)
    skewed = along(BASES["left-handed"], system)
    pairs, _, shifts = neighbor_list(skewed.positions, 7.0, skewed.cell[0], half_fill=True, return_neighbor_list=True)
    own = shifts[pairs[0] == pairs[1]].tolist()
    assert own and all(next(n for n in image if n) > 0 for image in own)
    same_bits([torch.tensor(pairs.shape[1] * 2)], [neighbor_list(skewed.positions, 7.0, skewed.cell[0])[1].sum()])


def test_k_vectors_of_a_skewed_cell_are_not_searched_in_its_box(monkeypatch):
    """The box of these vectors has two million points; that of the lattice has as many vectors as its sphere."""

    def lengths(cell):
        """Of all vectors, each as often as it counts."""
        found = k_vectors.points_within(cell[None], np.array([4.0]))
        indices = found.points[:, None] * k_vectors._SIGNS
        squares = ((2.0 * np.pi * indices @ np.linalg.inv(cell).T) ** 2).sum(2)
        assert (np.lexsort(found.points.T[::-1]) == np.arange(len(found.points))).all()  # as in a box
        return np.sort(np.sqrt(squares[found.weights > 0.0])), found.weights.sum(), found.next_one[0]

    expected, count, _ = lengths(LONG)
    for basis in ("hundreds", "ten vectors", "in two steps"):
        with monkeypatch.context() as patch:
            patch.setattr(k_vectors, "MOST_AT_ONCE", 0)
            patch.setattr(k_vectors, "_points_in_boxes", None)
            found, weight, next_one = lengths(np.array(BASES[basis]) @ LONG)
        np.testing.assert_allclose(np.unique(found.round(9)), np.unique(expected.round(9)))
        assert weight == count and next_one > 4.0


@pytest.mark.parametrize("shear", [10.0, 100.0])
def test_k_vectors_of_one_length_are_all_there(shear):
    """Up to a sphere through thirty of them, counted from the origin: 515 vectors of a cube."""
    basis = np.array([[1.0, 0.0, 0.0], [shear, 1.0, 0.0], [0.0, -shear, 1.0]])
    found = k_vectors.points_within(9.7 * basis[None], np.array([5.0 * 2.0 * np.pi / 9.7]))
    assert found.weights.sum() == 515
