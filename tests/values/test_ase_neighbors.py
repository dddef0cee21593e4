"""The neighbor list with ASE's arguments has ASE's pairs."""

import ase
import ase.neighborlist
import matscipy.neighbours
import numpy as np
import pytest
from ase.build import bulk, graphene, molecule
from hypothesis import assume, given
from hypothesis import strategies as st

from nvalchemiops.ase import neighbor_list

EDGE = 1e-9
"""Pairs this close to a cutoff may be in one list and not in the other."""


def rows(i, j, d, vectors, shifts):
    """Pairs in an order of their own, integers beside floats."""
    order = np.lexsort((*shifts.T, j, i))
    return np.column_stack([i, j, shifts])[order], np.column_stack([d, vectors])[order]


def assert_same_pairs(atoms, cutoff, reference=ase.neighborlist.neighbor_list, **options):
    found = neighbor_list("ijdDS", atoms, cutoff, **options)
    expected = reference("ijdDS", atoms, cutoff, **options)
    for one, other in zip(found, expected):
        assert one.dtype.kind == other.dtype.kind and one.dtype.itemsize == 8
        assert one.shape == other.shape
    assert (np.diff(found[0]) >= 0).all()
    for one, other in zip(rows(*found), rows(*expected)):
        np.testing.assert_allclose(one, other, atol=1e-10)
    return found


@st.composite
def structures(draw):
    """Skewed cells, thin or wide, of either handedness, any periodicity, atoms anywhere."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = np.array([draw(st.sampled_from([1.2, 3.0, 6.0])) for _ in range(3)])
    cell = np.diag(lengths) + draw(st.sampled_from([0.0, 0.3])) * lengths * rng.normal(size=(3, 3))
    if draw(st.booleans()):
        cell = cell[::-1]
    assume(abs(np.linalg.det(cell)) > 0.2 * lengths.prod())
    n_atoms = draw(st.integers(1, 12))
    positions = rng.uniform(size=(n_atoms, 3)) @ cell
    pbc = [draw(st.booleans()) for _ in range(3)]
    positions += rng.integers(-2, 3, (n_atoms, 3)) @ cell
    symbols = rng.choice(["H", "C", "O"], n_atoms)
    return ase.Atoms(symbols, positions, cell=cell, pbc=pbc)


@given(structures(), st.floats(0.5, 4.0), st.booleans())
def test_random_structures(atoms, cutoff, self_interaction):
    distances = ase.neighborlist.neighbor_list("d", atoms, cutoff + 0.1)
    assume((abs(distances - cutoff) > EDGE).all())
    assert_same_pairs(atoms, cutoff, self_interaction=self_interaction)


@given(structures(), st.booleans())
def test_cutoffs_by_element(atoms, self_interaction):
    cutoff = {("H", "H"): 1.1, ("C", "H"): 1.9, (8, "C"): 2.3, (1, 8): 0.7}
    assert_same_pairs(atoms, cutoff, self_interaction=self_interaction)


@given(structures(), st.integers(0, 2**32 - 1), st.booleans())
def test_radii(atoms, seed, self_interaction):
    radii = np.random.default_rng(seed).uniform(0.1, 1.5, len(atoms))
    assert_same_pairs(atoms, list(radii), self_interaction=self_interaction)


@pytest.mark.parametrize("pbc", [True, (True, False, True), False])
def test_against_matscipy(pbc):
    """A second opinion, with atoms outside of the cell along open axes, too."""
    rng = np.random.default_rng(4)
    atoms = ase.Atoms("Ar200", rng.uniform(-8.0, 16.0, (200, 3)), cell=[[9, 0, 0], [2, 8, 0], [-1, 3, 10]], pbc=pbc)
    assert_same_pairs(atoms, 3.1, lambda q, a, c: matscipy.neighbours.neighbour_list(q, atoms=a, cutoff=c))


def test_usual_structures():
    sheet = graphene(size=(3, 3, 1), vacuum=5.0)
    sheet.pbc = (True, True, False)
    i, *_ = assert_same_pairs(sheet, 1.6)
    assert (np.bincount(i) == 3).all()
    flat = graphene(size=(2, 2, 1))
    assert not flat.cell[2].any()
    assert_same_pairs(flat, 1.6)
    water = molecule("H2O")
    assert_same_pairs(water, ase.neighborlist.natural_cutoffs(water))
    copper = bulk("Cu")
    i, _, d, *_ = assert_same_pairs(copper, 7.0)
    assert len(i) > 100 and d.min() == pytest.approx(3.61 / np.sqrt(2))


def test_quantities_in_any_order():
    atoms = bulk("NaCl", "rocksalt", a=5.64, cubic=True)
    everything = dict(zip("ijdDS", neighbor_list("ijdDS", atoms, 3.5)))
    for quantities in ("Sd", "jDi", "ii"):
        found = neighbor_list(quantities, atoms, 3.5)
        assert isinstance(found, tuple) and len(found) == len(quantities)
        for name, values in zip(quantities, found):
            np.testing.assert_array_equal(values, everything[name])
    alone = neighbor_list("d", atoms, 3.5)
    np.testing.assert_array_equal(alone, everything["d"])
    vectors = atoms.positions[everything["j"]] - atoms.positions[everything["i"]] + everything["S"] @ atoms.cell.array
    np.testing.assert_allclose(everything["D"], vectors, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), everything["d"], atol=1e-12)


@pytest.mark.parametrize(
    "atoms", [ase.Atoms(), ase.Atoms("H"), molecule("H2O"), ase.Atoms("H", cell=[3, 3, 3], pbc=True)], ids=str
)
@pytest.mark.parametrize("cutoff", [0.3, 0.0, {("C", "C"): 2.0}])
@pytest.mark.parametrize("self_interaction", [False, True])
def test_no_pairs(atoms, cutoff, self_interaction):
    i, *_ = assert_same_pairs(atoms, cutoff, self_interaction=self_interaction)
    assert len(i) == (len(atoms) if self_interaction and cutoff == 0.3 else 0)


def test_max_nbins_is_accepted():
    atoms = bulk("Cu").repeat(3)
    np.testing.assert_array_equal(neighbor_list("d", atoms, 3.0, max_nbins=2), neighbor_list("d", atoms, 3.0))


def test_mistakes():
    atoms = molecule("H2O")
    for cutoff, kind, message in (
        (np.nan, ValueError, "`cutoff` must be finite"),
        ("2.0", TypeError, "`cutoff` must be a number"),
        ([1.0, 1.0], ValueError, r"radii must have shape \(3,\), got \(2,\)"),
        ({("H", "Oxygen"): 1.0}, ValueError, "'Oxygen' is not a chemical symbol"),
        ({"H": 1.0}, ValueError, "'H' is not a pair of elements"),
    ):
        with pytest.raises(kind, match=message):
            neighbor_list("ij", atoms, cutoff)
    for quantities in (5, None, ["i", "j"]):
        with pytest.raises(TypeError, match="`quantities` must be a string"):
            neighbor_list(quantities, atoms, 1.0)
    for other in (1, None, atoms.positions):
        with pytest.raises(TypeError, match=r"`a` must be an ase\.Atoms, got"):
            neighbor_list("ij", other, 1.0)
    with pytest.raises(ValueError, match="`quantities` may contain 'ijdDS', got 'x'"):
        neighbor_list("ix", atoms, 1.0)
    atoms.pbc = True
    with pytest.raises(ValueError, match="cell"):
        neighbor_list("ij", atoms, 1.0)
    atoms = bulk("Cu")
    atoms.positions[0] = np.inf
    with pytest.raises(ValueError, match="positions"):
        neighbor_list("ij", atoms, 1.0)
