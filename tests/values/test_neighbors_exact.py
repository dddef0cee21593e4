"""Pair by pair: every method, both formats, half and full, against searches that share no code with the library.

In float32 the expected pairs are those of the float32 numbers in float64 arithmetic; only pairs within 1e-5 of the
cutoff may differ. The order within a row is deterministic but unspecified, so rows are compared sorted.
"""

import itertools
from typing import NamedTuple

import ase.build
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nvalchemiops.torch.neighbors import neighbor_list
from tests.reference.neighbors import assert_pairs, every_image, half_of, in_order, lattice, tree

SINGLE = ("naive", "cell_list", None)
BATCHED = ("batch_naive", "batch_cell_list", None)
OPEN, FULLY = (False, False, False), (True, True, True)
SLACK = {torch.float64: 1e-12, torch.float32: 1e-5}
FORMATS = [(as_list, half) for as_list in (True, False) for half in (False, True)]
MAX_IMAGES = 800_000  # that the reference tries for one system; more takes too long


class Case(NamedTuple):
    positions: np.ndarray
    cell: np.ndarray
    pbc: tuple[bool, bool, bool]
    cutoff: float

    def tensors(self, dtype):
        """Positions, cell and pbc as the library takes them."""
        return torch.as_tensor(self.positions).to(dtype), torch.as_tensor(self.cell).to(dtype), torch.tensor(self.pbc)

    def expected(self, dtype, search=every_image):
        positions, cell, _ = self.tensors(dtype)
        return search(positions.double().numpy(), self.cutoff, cell.double().numpy(), self.pbc, SLACK[dtype])


def rows_of(results, as_list):
    """Rows (i, j, S_0, S_1, S_2) of either format, after looking at the format itself."""
    first, second = results[:2]
    assert first.dtype == second.dtype == torch.int32
    if as_list:
        n_pairs = first.shape[1]
        assert first.shape == (2, n_pairs) and int(second[0]) == 0 and int(second[-1]) == n_pairs
        i = torch.repeat_interleave(torch.arange(len(second) - 1), second.diff())
        assert torch.equal(first[0].long(), i)
        j, shifts = first[1], results[2] if len(results) > 2 else torch.zeros(n_pairs, 3, dtype=torch.int32)
        assert shifts.shape == (n_pairs, 3)
    else:
        n_atoms, width = first.shape
        filled = torch.arange(width)[None] < second[:, None]
        assert second.shape == (n_atoms,) and width >= int(second.max() if n_atoms else 0)
        assert (first[~filled] == n_atoms).all()
        shifts = results[2] if len(results) > 2 else torch.zeros(n_atoms, width, 3, dtype=torch.int32)
        assert shifts.shape == (n_atoms, width, 3) and not shifts[~filled].any()
        i, j, shifts = filled.nonzero()[:, 0], first[filled], shifts[filled]
    assert shifts.dtype == torch.int32
    return np.c_[i.numpy(), j.numpy(), shifts.numpy()].astype(np.int64)


def check(case, dtypes=tuple(SLACK), methods=SINGLE, formats=FORMATS, search=every_image):
    """All methods and formats find the expected pairs; the half list is exactly half of the full one."""
    for dtype in dtypes:
        expected = case.expected(dtype, search)
        positions, cell, pbc = case.tensors(dtype)
        for method in methods:
            full = None
            for as_list, half in formats:
                results = neighbor_list(
                    positions,
                    case.cutoff,
                    cell,
                    pbc,
                    half_fill=half,
                    return_neighbor_list=as_list,
                    method=method,
                )
                found = in_order(rows_of(results, as_list))
                if half:
                    assert np.array_equal(found, half_of(full))
                elif full is None:
                    assert_pairs(found, expected)
                    full = found
                else:
                    assert np.array_equal(found, full)


def unit_vectors(rng, kind):
    """Three directions with angles between 20 and 160 degrees, or one angle down to 10 (or 170)."""
    if kind == "square":
        return np.eye(3)
    while True:
        if kind == "any angle":
            angles = np.radians(rng.uniform(20.0, 160.0, size=3))
        else:
            sharp, other = np.radians(rng.uniform(10.0, 12.0)), np.radians(rng.uniform(40.0, 140.0))
            angles = np.array([other, other + rng.uniform(-0.9, 0.9) * sharp, sharp])
            if rng.random() < 0.5:
                angles[[1, 2]] = np.pi - angles[[1, 2]]
            angles = angles[rng.permutation(3)]
        alpha, beta, gamma = np.cos(angles)
        sine = np.sin(angles[2])
        c1 = (alpha - beta * gamma) / sine
        squared = 1.0 - beta**2 - c1**2
        if squared > 1e-3:
            return np.array([[1.0, 0.0, 0.0], [gamma, sine, 0.0], [beta, c1, np.sqrt(squared)]])


def rotation(rng):
    q, r = np.linalg.qr(rng.normal(size=(3, 3)))
    return q * np.sign(np.diag(r)) * np.sign(np.linalg.det(q * np.sign(np.diag(r))))


def cells(rng, kind, thin):
    """A cell, turned, right- or left-handed, thinner by a factor of up to 10 in some directions."""
    lengths = rng.uniform(2.0, 8.0, size=3)
    lengths[:thin] *= rng.uniform(0.1, 0.5)
    cell = unit_vectors(rng, kind) * rng.permutation(lengths)[:, None]
    if kind != "square":
        cell = cell @ rotation(rng)
    if rng.random() < 0.5:
        cell = cell[[1, 0, 2]]
    return cell


def random_case(rng, max_atoms=64):
    """A system of any kind. Everything comes from one generator, so that each example is another system."""
    cell = cells(rng, rng.choice(["square", "any angle", "any angle", "ten degrees"]), rng.integers(0, 4))
    pbc = rng.random(3) < 0.7
    cutoff = rng.uniform(0.2, 3.0) * lattice(cell, FULLY)[2].min()
    tried = np.prod([2 * int(cutoff / h + 0.5) + 3 for h in lattice(cell, pbc)[2] if np.isfinite(h)], initial=1.0)
    most = int(np.sqrt(MAX_IMAGES / tried))
    n_atoms = min(rng.choice([0, 1, 2, *rng.integers(1, max_atoms + 1, size=9)]), max(1, most))
    if rng.random() < 0.3:  # on faces, edges and corners, and a hair beside them
        fractional = rng.choice([0.0, 0.25, 0.5, 1.0, -1e-17, 1.0 - 1e-16], size=(n_atoms, 3))
    else:
        fractional = rng.uniform(0.0, 1.0, size=(n_atoms, 3))
    if rng.random() < 0.7:
        fractional += rng.integers(-3, 4, size=(n_atoms, 3)) * (pbc | (rng.random() < 0.5))
    if rng.random() < 0.3:  # far beyond the cell along the open axes
        fractional += ~pbc * rng.uniform(-30.0, 30.0, size=(n_atoms, 3))
    if n_atoms > 1 and rng.random() < 0.3:  # on top of each other, or of each other's image
        chosen, onto = rng.integers(0, n_atoms, size=(2, max(1, n_atoms // 4)))
        fractional[chosen] = fractional[onto] + pbc * rng.integers(-1, 2, size=(len(onto), 3))
    return Case(fractional @ cell, cell, tuple(bool(p) for p in pbc), float(cutoff))


SEEDS = st.integers(0, 2**32 - 1)


def examples(times):
    """A multiple of what the profile asks for: one example is cheap, and a mistake may hide in a corner."""
    return settings(max_examples=times * settings().max_examples)


# -- the searches that judge --------------------------------------------------------------------------------


@examples(4)
@given(SEEDS)
def test_the_two_references_agree(seed):
    case = random_case(np.random.default_rng(seed), max_atoms=30)
    if len(case.positions):
        first, second = case.expected(torch.float64), case.expected(torch.float64, tree)
        assert np.array_equal(first.certain, second.certain) and np.array_equal(first.possible, second.possible)


# -- random systems -----------------------------------------------------------------------------------------


@examples(4)
@given(SEEDS)
def test_random_systems(seed):
    check(random_case(np.random.default_rng(seed)))


@examples(2)
@given(SEEDS, st.sampled_from(["batch_idx", "batch_ptr", "both"]))
def test_random_batches(seed, by):
    """Members of every kind and size, empty ones too, each with its own cell and pbc, one cutoff for all."""
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, max_atoms=24) for _ in range(rng.integers(1, 6))]
    cutoff = cases[0].cutoff
    # as large as the first one's in proportion to its cell, so that no member reaches thousands of images
    cases = [Case(c.positions * (cutoff / c.cutoff), c.cell * (cutoff / c.cutoff), c.pbc, cutoff) for c in cases]
    sizes = torch.tensor([len(case.positions) for case in cases])
    ptr = first_atoms(sizes)
    described = {"batch_idx": torch.repeat_interleave(torch.arange(len(sizes)), sizes).int(), "batch_ptr": ptr}
    described = {name: tensor for name, tensor in described.items() if by in (name, "both")}
    for dtype in SLACK:
        expected = [case.expected(dtype) for case in cases]
        for method, (as_list, half) in itertools.product(BATCHED, FORMATS):
            options = {"half_fill": half, "return_neighbor_list": as_list, "method": method, **described}
            positions, cell, pbc = together(cases, dtype)
            found = rows_of(neighbor_list(positions, cutoff, cell, pbc, **options), as_list)
            for low, high, one in zip(ptr[:-1].tolist(), ptr[1:].tolist(), expected, strict=True):
                mine = found[(found[:, 0] >= low) & (found[:, 0] < high)]
                assert_pairs(mine - [low, low, 0, 0, 0], one, half)


def first_atoms(sizes):
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()


def together(cases, dtype):
    """Positions, cell and pbc of a batch."""
    positions, cell, pbc = zip(*(case.tensors(dtype) for case in cases))
    return torch.cat(positions), torch.stack(cell), torch.stack(pbc)


@examples(2)
@given(SEEDS, st.booleans())
def test_two_cutoffs_at_once(seed, half):
    """Both lists as if each had been built alone, whichever cutoff is longer."""
    rng = np.random.default_rng(seed)
    case = random_case(rng, max_atoms=24)
    other = case._replace(cutoff=case.cutoff * rng.uniform(0.1, 1.5))
    n_atoms = len(case.positions)
    split = int(rng.integers(0, n_atoms + 1))  # a batch of two: the atoms before, and those after
    for dtype in SLACK:
        positions, cell, pbc = case.tensors(dtype)
        alone = [[one.expected(dtype)] for one in (case, other)]
        parts = [case.positions[:split], case.positions[split:]]
        apart = [[one._replace(positions=x).expected(dtype) for x in parts] for one in (case, other)]
        two = {
            "cell": cell.expand(2, 3, 3),
            "pbc": pbc.expand(2, 3),
            "batch_ptr": torch.tensor([0, split, n_atoms], dtype=torch.int32),
        }
        calls = [(method, {"cell": cell, "pbc": pbc}, alone) for method in ("naive_dual_cutoff", "cell_list", None)]
        calls += [(method, two, apart) for method in ("batch_naive_dual_cutoff", "batch_cell_list", None)]
        for (method, system, expected), as_list in itertools.product(calls, (True, False)):
            options = {"half_fill": half, "return_neighbor_list": as_list, "method": method, **system}
            results = neighbor_list(positions, case.cutoff, cutoff2=other.cutoff, **options)
            assert len(results) == 6
            for part, members in zip((results[:3], results[3:]), expected, strict=True):
                found = rows_of(part, as_list)
                second = found[:, 0] >= split if len(members) == 2 else np.zeros(len(found), dtype=bool)
                assert_pairs(found[~second], members[0], half)
                if len(members) == 2:
                    assert_pairs(found[second] - [split, split, 0, 0, 0], members[1], half)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 3), st.floats(1.0, 20.0))
@settings(max_examples=15)
def test_up_to_twenty_images_each_way(seed, thin, n_atoms, images):
    """Cells thinner than the cutoff in one, two and three directions."""
    assume(thin < 3 or images < 12.0)
    rng = np.random.default_rng(seed)
    cell = unit_vectors(rng, "any angle") @ rotation(rng)
    height = lattice(cell, FULLY)[2]
    wanted = np.where(rng.permutation(3) < thin, rng.uniform(0.6, 1.0, size=3) / images, rng.uniform(1.0, 3.0, size=3))
    cell *= (4.0 * wanted / height)[:, None]
    fractional = rng.uniform(-1.0, 2.0, size=(n_atoms, 3))
    check(Case(fractional @ cell, cell, FULLY, 4.0), dtypes=[torch.float64], formats=[(True, False), (False, True)])


# -- systems with names -------------------------------------------------------------------------------------

FACES = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 1], [0.5, 0.5, 0], [1, 1, 1], [0.5, 0, 0.5], [0, 0, 0], [0, 0.5, 1.0]])
NAMED = {
    "one atom": Case(np.array([[0.3, -7.0, 2.0]]), np.diag([3.0, 2.0, 4.0]), FULLY, 5.0),
    "one atom, open": Case(np.zeros((1, 3)), np.eye(3), OPEN, 5.0),
    "no atom": Case(np.zeros((0, 3)), np.eye(3), FULLY, 5.0),
    "no atom, open, zero cell": Case(np.zeros((0, 3)), np.zeros((3, 3)), OPEN, 5.0),
    "faces, edges, corners": Case(FACES * 6.0, 6.0 * np.eye(3), FULLY, 4.9),
    "faces, half-integer multiples of the cutoff": Case(FACES * 6.0, 6.0 * np.eye(3), FULLY, 3.0),
    "all atoms in one place": Case(np.full((12, 3), 1.5), 6.0 * np.eye(3), FULLY, 2.0),
    "all atoms in one place, open": Case(np.full((12, 3), -1e3), 6.0 * np.eye(3), OPEN, 2.0),
    "zero cell": Case(np.random.default_rng(0).uniform(-9, 9, (40, 3)), np.zeros((3, 3)), OPEN, 4.0),
    "zero third vector": Case(
        np.random.default_rng(1).uniform(-9, 9, (30, 3)), np.diag([8.0, 9.0, 0.0]), (True, True, False), 6.0
    ),
    "zero first and second vector": Case(
        np.random.default_rng(2).uniform(-9, 9, (30, 3)), np.diag([0.0, 0.0, 5.0]), (False, False, True), 6.0
    ),
    "parallel open vectors": Case(
        np.random.default_rng(3).uniform(-9, 9, (30, 3)),
        np.array([[4.0, 1.0, 0.0], [4.0, 1.0, 0.0], [0.0, 1.0, 5.0]]),
        (False, False, True),
        6.0,
    ),
    "slab, atoms far above and below": Case(
        np.random.default_rng(4).uniform([-9, -9, -400], [9, 9, 400], (60, 3)),
        np.array([[5.0, 0, 0], [2, 6, 0], [1, 2, 3]]),
        (True, True, False),
        7.0,
    ),
    "hexagonal slab, pairs almost a cutoff above each other": Case(
        np.add(np.random.default_rng(6).uniform(-20, 20, (30, 3)), [[[0, 0, 0]], [[0, 0, 3.9]]]).reshape(60, 3),
        np.array([[8.0, 0, 0], [4.0, 48**0.5, 0], [0, 0, 1.0]]),
        (True, True, False),
        4.0,
    ),
    "thousand times longer than wide": Case(
        np.random.default_rng(5).uniform(0, [2, 2, 2000], (400, 3)), np.diag([2.0, 2.0, 2000.0]), FULLY, 5.0
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_named_systems(name):
    check(NAMED[name])


@pytest.mark.parametrize("extent", [1e4, 1e5, 1e6, 1e7])
@pytest.mark.parametrize("pbc", [OPEN, FULLY, (True, False, True)])
def test_huge_empty_cells(extent, pbc):
    """A cluster around a corner of the cell, so that bonds cross its faces, and one atom far away."""
    rng = np.random.default_rng(6)
    positions = np.r_[rng.uniform(-6.0, 6.0, (60, 3)), [[0.5 * extent, 0.25 * extent, 0.1 * extent]]]
    home = np.floor(positions / extent) * np.array(pbc) * extent
    check(Case(positions - home, extent * np.eye(3), pbc, 4.0), search=tree)
    check(Case(positions, extent * unit_vectors(rng, "any angle"), pbc, 4.0), search=tree)


# -- larger systems, where the cell list has many bins ------------------------------------------------------


@given(SEEDS)
def test_random_systems_with_many_bins(seed):
    """Skewed cells of any aspect divided into thousands of bins, atoms on their faces, clustered and far away."""
    rng = np.random.default_rng(seed)
    case = random_case(rng)
    height = lattice(case.cell, FULLY)[2]
    cutoff = rng.uniform(0.05, 0.4) * height.min()
    n_atoms = int(rng.integers(100, 600))
    kind = rng.integers(0, 3)
    if kind == 0:
        fractional = rng.uniform(0.0, 1.0, size=(n_atoms, 3))
    elif kind == 1:  # faces of bins as wide as the cutoff, if bins begin at the origin
        fractional = np.round(rng.uniform(0.0, 1.0, size=(n_atoms, 3)) * height / cutoff) * cutoff / height
    else:
        fractional = rng.uniform(0, 1, 3) + rng.normal(scale=0.1, size=(n_atoms, 3))
    fractional += rng.integers(-3, 4, size=(n_atoms, 3)) * (rng.random() < 0.5)
    many = Case(fractional @ case.cell, case.cell, case.pbc, float(cutoff))
    check(many, formats=[(True, False), (False, True)], search=tree)


@pytest.mark.parametrize("pbc", [OPEN, FULLY, (False, True, True)])
@pytest.mark.parametrize(("n_atoms", "density", "cutoff"), [(500, 0.1, 5.0), (3000, 0.1, 3.0), (2000, 0.005, 4.0)])
def test_larger_random_systems(n_atoms, density, cutoff, pbc):
    rng = np.random.default_rng(n_atoms)
    edge = (n_atoms / density) ** (1 / 3)
    methods = SINGLE if n_atoms < 3000 else SINGLE[1:]  # all pairs of so many take as long as the rest
    for cell in (edge * np.eye(3), edge * unit_vectors(rng, "any angle") @ rotation(rng), edge * np.diag([0.2, 1, 5])):
        positions = rng.uniform(-0.5, 1.5, (n_atoms, 3)) @ cell
        check(Case(positions, cell, pbc, cutoff), methods=methods, formats=[(True, False), (False, True)], search=tree)


@pytest.mark.later_cases("block4-pbc0", "block4-pbc2")
@pytest.mark.parametrize("pbc", [OPEN, FULLY, (True, False, False), (True, True, False)])
@pytest.mark.parametrize("block", [(3, 4, 4), (5, 5, 4), (4, 6, 6), (7, 6, 7), (9, 8, 9)])
def test_atoms_within_rounding_of_the_faces_of_bins(block, pbc):
    """Points of a lattice as wide as the cutoff, moved by hairs: a search may reach one bin more than it usually does.

    Then neither a bin nor an image may be missed, nor two bins be taken for one. Sizes of the block are such that hash
    tables, buckets or rings of several sizes are used.
    """
    rng = np.random.default_rng(block)
    n_atoms = int(np.prod(block))
    for cutoff in (1.0, 0.7, 6.513933163822014):
        for hairs in ([0.0, 1e-9, -1e-9, 1e-5, -1e-5], [0.0, 2e-16, -2e-16, 1e-12], [0.0, 0.5, 1e-9, -1e-5]):
            lattice_points = np.stack(np.meshgrid(*(np.arange(float(n)) for n in block), indexing="ij"), -1)
            x = lattice_points.reshape(-1, 3) - rng.integers(0, 2) * 2.0 + rng.choice(hairs, size=(n_atoms, 3))
            case = Case(x * cutoff, np.diag(block) * cutoff, pbc, cutoff)
            check(case, dtypes=[torch.float64], formats=[(True, False), (False, True)])


def test_pairs_a_rounding_error_below_the_cutoff_are_seen_from_both_sides():
    """Pairs along x on faces of bins, closer than the cutoff by an ulp or two: all methods agree, bit for bit."""
    rng = np.random.default_rng(16)
    for cutoff in (6.513933163822014, *rng.uniform(0.5, 7.0, size=60)):
        a = rng.integers(-2000, 2000, 100) * cutoff
        b = a - cutoff * (1.0 - rng.integers(0, 4, 100) * 2.0**-52)
        if cutoff == 6.513933163822014:  # a pair that one side of once did not see
            a[0], b[0] = 840.2973781330398, 833.7834449692178
        rows = 3.0 * cutoff * np.arange(100)  # each pair by itself
        x = torch.as_tensor(np.stack([np.r_[a, b], np.r_[rows, rows], np.zeros(200)], axis=1))
        options = {"return_neighbor_list": True}
        found = [{*zip(*neighbor_list(x, cutoff, method=m, **options)[0].tolist())} for m in SINGLE]
        assert found[0] == found[1] == found[2]
        assert found[0] == {(j, i) for i, j in found[0]}


CHAIN = np.arange(2000.0)
SHAPES = {
    "chain along x": CHAIN[:, None] * [1.0, 0, 0],
    "chain along y": CHAIN[:, None] * [0, 1.0, 0],
    "chain along z": CHAIN[:, None] * [0, 0, 1.0],
    "chain along the diagonal": CHAIN[:, None] * [0.6, 0.6, 0.6],
    "slab": np.random.default_rng(8).uniform(0, [80, 80, 4], (2000, 3)),
    "droplet": np.random.default_rng(9).normal(scale=6.0, size=(2000, 3)),
    "two droplets far apart": np.random.default_rng(10).normal(scale=4.0, size=(2000, 3))
    + 1500.0 * (np.arange(2000) % 2)[:, None],
    "sphere shell": np.random.default_rng(11).normal(size=(2000, 3)),
}
SHAPES["sphere shell"] *= 30.0 / np.linalg.norm(SHAPES["sphere shell"], axis=1, keepdims=True)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_are_no_cube(name):
    """In open space, and in a periodic box that is far larger (so the shape crosses its boundary) or just as long."""
    x = SHAPES[name] + np.random.default_rng(12).normal(scale=0.05, size=(2000, 3))
    some = {"formats": [(True, False)], "search": tree, "dtypes": [torch.float64]}
    check(Case(x, np.zeros((3, 3)), OPEN, 2.5), **some)
    check(Case(x - x.mean(0), 5000.0 * np.eye(3), FULLY, 2.5), **some)
    snug = np.diag(np.ptp(x, axis=0) + 1.0)
    check(Case(x + 7.0, snug, FULLY, 2.5), **some)
    check(Case(x + 7.0, snug, (True, False, True), 2.5), **some)


# -- perfect crystals ----------------------------------------------------------------------------------------

CRYSTALS = {
    # structure, options, coordination, cutoff midway between the first and second shell
    "fcc": (ase.build.bulk("Cu", "fcc", a=4.0, cubic=True).repeat(4), 12, 0.5 * (np.sqrt(0.5) + 1.0) * 4.0),
    "hcp": (ase.build.bulk("Mg", "hcp", a=3.0, c=3.0 * np.sqrt(8 / 3)).repeat((5, 5, 3)), 12, 0.5 * (1 + 2**0.5) * 3.0),
    "diamond": (ase.build.bulk("C", "diamond", a=3.6, cubic=True).repeat(3), 4, 0.5 * (0.75**0.5 / 2 + 0.5**0.5) * 3.6),
}


@pytest.mark.parametrize("method", SINGLE)
@pytest.mark.parametrize("name", CRYSTALS)
def test_coordination_of_perfect_crystals(name, method, dtype):
    """Atoms on bin and cell faces, with noise, with fractional coordinates 1 and -1e-17, and turned."""
    atoms, coordination, cutoff = CRYSTALS[name]
    rng = np.random.default_rng(13)
    cell = atoms.cell.array
    fractional = np.round(atoms.get_scaled_positions(wrap=False), 12)
    # bins of the width of the cutoff, and of this cell's own spacing, have faces through these atoms
    variants = [atoms.positions, np.round(atoms.positions, 10), fractional @ cell]
    variants += [atoms.positions + rng.normal(scale=s, size=atoms.positions.shape) for s in (1e-16, 1e-14, 1e-12)]
    for face in (1.0, -1e-17, 1.0 - 1e-16):
        variants.append(np.where(fractional == 0.0, face, fractional) @ cell)
    variants.append((fractional - 0.5) @ cell)
    turns = [np.eye(3), rotation(rng)]
    for n, x in enumerate(variants):
        for turn in turns if n in (0, 3, 6) else turns[:1]:
            turned = Case(x @ turn, cell @ turn, FULLY, cutoff)
            _, count, _ = neighbor_list(turned.tensors(dtype)[0], cutoff, *turned.tensors(dtype)[1:], method=method)
            assert (count == coordination).all(), (n, count.unique())


@pytest.mark.parametrize("name", CRYSTALS)
def test_bonds_of_perfect_crystals(name):
    atoms, _, cutoff = CRYSTALS[name]
    for factor in (1.0, 1.7):
        check(Case(atoms.positions, atoms.cell.array, FULLY, factor * cutoff), formats=[(True, False)], search=tree)


# -- the same answer every time ------------------------------------------------------------------------------


def members():
    """Systems that an automatic choice may treat differently, so that batches mix them."""
    rng = np.random.default_rng(14)
    made = []
    for n_atoms, pbc in [(3, FULLY), (0, FULLY), (1500, FULLY), (40, OPEN), (700, (True, True, False)), (1, FULLY)]:
        edge = (max(n_atoms, 1) / 0.1) ** (1 / 3)
        cell = edge * unit_vectors(rng, "any angle")
        made.append(Case(rng.uniform(-1, 2, (n_atoms, 3)) @ cell, cell, pbc, 4.0))
    made.append(Case(np.random.default_rng(15).normal(scale=3.0, size=(90, 3)), np.eye(3), OPEN, 4.0))
    return made


@pytest.mark.parametrize("method", BATCHED)
@pytest.mark.parametrize("half", [False, True])
def test_alone_equals_member_of_a_batch_bitwise(method, half, dtype):
    """Order of the neighbors included, in any position of any batch."""
    alone_method = None if method is None else method.removeprefix("batch_")
    systems = members()
    alone = [
        neighbor_list(*t[:1], 4.0, *t[1:], half_fill=half, return_neighbor_list=True, method=alone_method)
        for t in (case.tensors(dtype) for case in systems)
    ]
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [2, 3], [3], [1, 5]):
        chosen = [systems[n] for n in order]
        positions, cell, pbc = together(chosen, dtype)
        ptr = first_atoms(torch.tensor([len(case.positions) for case in chosen]))
        options = {"half_fill": half, "return_neighbor_list": True, "method": method}
        pairs, rows, shifts = neighbor_list(positions, 4.0, cell, pbc, batch_ptr=ptr, **options)
        expected = [alone[n] for n in order]
        assert torch.equal(pairs, torch.cat([e[0] + int(low) for e, low in zip(expected, ptr)], dim=1))
        assert torch.equal(shifts, torch.cat([e[2] for e in expected]))
        assert torch.equal(rows.diff(), torch.cat([e[1].diff() for e in expected]))


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("method", SINGLE)
def test_ten_repeats_are_bitwise_equal(method, as_list, threads, always_split):
    """At any number of threads."""
    x, cell, pbc = members()[2].tensors(torch.float64)
    results = []
    for repeat in range(10):
        threads(1 + repeat % 3)
        results.append(neighbor_list(x, 4.0, cell, pbc, method=method, return_neighbor_list=as_list))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_threads_share_a_batch(threads, always_split):
    """Batches are split over threads at other places than single systems."""
    systems = members()
    positions, cell, pbc = together(systems, torch.float64)
    idx = torch.repeat_interleave(torch.arange(len(systems)), torch.tensor([len(c.positions) for c in systems])).int()
    for method in BATCHED:
        results = []
        for count in (1, 2, 1, 2):
            threads(count)
            results.append(neighbor_list(positions, 4.0, cell, pbc, batch_idx=idx, method=method))
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
