"""One batch of several systems, and of their neighbors: the batch that one call makes, to the last bit."""

from functools import partial

import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule

from nvalchemiops.torch import Graph, Neighbors, System
from nvalchemiops.torch.dynamics import SumOfTerms, nve, relax, simulate, to_ase
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.rows import NO_PADDING
from nvalchemiops.torch.runtime.context import hidden_values
from tests.support.systems import batch, triclinic

CHARGES = {"Na": 1.0, "Cl": -1.0, "O": -0.8, "H": 0.4}
SALT, WATER = bulk("NaCl", "rocksalt", a=5.64, cubic=True), molecule("H2O")
SLAB = Atoms("H2", [[0, 0, 0], [0, 0, 0.7]], cell=[4, 4, 9], pbc=(True, True, False))
BATCHES = {
    "crystals, molecules, slabs": [SALT, WATER, SLAB, Atoms()],
    "crystals": [SALT, SALT[:5], SALT],
    "molecules": [WATER, WATER[:1], WATER],
    "the last one empty": [WATER, Atoms()],
    "one": [SALT],
}
PAIR = PairPotential("q1*q2/(1 + r)", per_atom=("q",), cutoff=3.0)


def same(found, expected):
    assert type(found) is type(expected)
    for name, value, other in zip(found._fields, found, expected, strict=True):
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and torch.equal(value, other), name
        else:
            assert value == other, name


def structures(name, dtype=torch.float64):
    return [System.from_ase(atoms, CHARGES, dtype=dtype) for atoms in BATCHES[name]]


@pytest.mark.parametrize("name", BATCHES)
def test_systems_and_their_neighbors(name):
    """As made from all structures at once, but for the form of a single one."""
    systems = structures(name)
    found = System.concatenate(iter(systems))
    if len(systems) > 1:
        crystals = name == "crystals"  # which need no `pbc`, if it is not given
        same(found, System.from_ase(BATCHES[name], CHARGES))
        without = System.concatenate([s._replace(pbc=None) for s in systems])
        assert (without.pbc is None) == (crystals or name == "molecules")
    for as_matrix in False, True:
        for half in False, True:
            options = {"as_matrix": as_matrix, "half": half}
            near = [system.neighbors(3.0, **options) for system in systems]
            joined, expected = Neighbors.concatenate(near, systems), found.neighbors(3.0, **options)
            if as_matrix:  # a search may round its width up
                width = joined.matrix.shape[1]
                assert width == max(n.matrix.shape[1] for n in near)
                expected = expected._replace(matrix=expected.matrix[:, :width])
                if expected.shifts is not None:
                    expected = expected._replace(shifts=expected.shifts[:, :width])
            same(joined, expected)


def test_batches_of_batches():
    """Cells that all systems share, and atoms in any order."""
    given = batch(triclinic(4), triclinic(3, seed=2))
    first = System(given.positions, given.charges, given.cell, given.batch_idx)
    order = torch.tensor([6, 1, 3, 0, 5, 2, 4])
    mixed = System(first.positions[order], first.charges[order], first.cell, first.batch_idx[order])
    periodic = torch.tensor([[True] * 3])
    shared = System(first.positions, first.charges, first.cell[:1], first.batch_idx.long(), periodic)
    found = System.concatenate([mixed, shared])
    assert found.batch_idx.tolist() == [*mixed.batch_idx.tolist(), *(first.batch_idx + 2).tolist()]
    assert found.batch_idx.dtype == torch.int32
    assert torch.equal(found.cell, first.cell[[0, 1, 0, 0]]) and found.pbc.shape == (4, 3)
    near = Neighbors.concatenate([s._replace(pbc=None).neighbors(3.0) for s in (mixed, shared)], [mixed, shared])
    energies = PAIR(found, near, q=found.charges, energy_reduction="system").energies
    alone = [PAIR(s, q=s.charges, energy_reduction="system").energies for s in (mixed, shared)]
    torch.testing.assert_close(energies, torch.cat(alone))


@pytest.mark.parametrize("cell", [None, SALT.cell.array], ids=["molecule", "crystal"])
def test_a_batch_of_one_system_without_atoms(cell):
    """It counts in further batches, in relaxations and in runs, as for interactions."""
    nothing = System(torch.zeros(0, 3, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    nothing = nothing._replace(cell=None if cell is None else torch.as_tensor(cell), numbers=torch.zeros(0).int())
    alone, model = System.concatenate([nothing]), SumOfTerms(partial(PAIR, q=nothing.charges))
    both = System.concatenate([alone, structures("one")[0]])
    assert both.cell.shape == (2, 3, 3) and both.batch_idx.tolist() == [1] * 8
    assert Graph(alone, 3.0).n_systems == 1
    assert relax(alone, model).evaluation.energies.tolist() == [0.0]
    assert simulate(alone, model, nve(1.0), 1).state.evaluation.energies.tolist() == [0.0]


def test_values_of_atoms():
    """Numbers that are the same for all stay numbers; others are written out; gradients arrive."""
    crystal, free = structures("crystals, molecules, slabs")[:2]
    x = free.positions.clone().requires_grad_()
    wide, narrow = crystal._replace(widths=0.5), free._replace(widths=0.3, positions=x)
    found = System.concatenate([wide, narrow, wide])
    assert found.widths.tolist() == pytest.approx([0.5] * 8 + [0.3] * 3 + [0.5] * 8) and found.widths.dtype == x.dtype
    (gradient,) = torch.autograd.grad(found.positions.square().sum(), x)
    assert torch.equal(gradient, 2.0 * x)
    assert System.concatenate([wide, wide]).widths == 0.5
    nothing = System(x[:0])  # no charges, and none missing
    assert torch.equal(System.concatenate([nothing, crystal]).charges, crystal.charges)
    channels = crystal._replace(charges=crystal.charges[:, None].expand(-1, 2))
    mixed = System.concatenate([nothing._replace(charges=crystal.charges[:0]), channels])
    assert torch.equal(mixed.charges, channels.charges)
    assert System.concatenate([crystal._replace(pbc=True), free]).pbc.tolist() == [[True] * 3, [False] * 3]
    assert list(map(len, to_ase(found))) == [8, 3, 8]
    rows = torch.full((8,), 0.2, dtype=x.dtype)
    assert torch.equal(
        System.concatenate([wide._replace(widths=rows), narrow]).widths[6:9], rows.new_tensor([0.2, 0.2, 0.3])
    )


def test_neighbors_from_elsewhere():
    """Other padding, room for more pairs, no pointers, empty lists of any number of atoms."""
    systems = structures("crystals")
    whole, cells = System.concatenate(systems), [(s.positions, 3.0, s.cell) for s in systems]
    expected = PAIR(whole, q=whole.charges).energies

    def energies(near):
        return PAIR(whole, Neighbors.concatenate(near, systems), q=whole.charges).energies

    padded = []
    for number, where in enumerate(cells):
        matrix, _, shifts = neighbor_list(*where, fill_value=-1 - number, max_neighbors=9 + number)
        padded.append(Neighbors.from_matrix(matrix, shifts, padding=-1 - number))
    torch.testing.assert_close(energies(padded), expected)
    lists = [system.neighbors(3.0) for system in systems]

    def longer(value):
        pad = torch.nn.functional.pad
        return [n._replace(pairs=pad(n.pairs, (0, 4), value=value), shifts=pad(n.shifts, (0, 0, 0, 4))) for n in lists]

    torch.testing.assert_close(energies(longer(NO_PADDING)), expected)
    with pytest.raises(ValueError, match="`neighbor_ptr` must fit it"):  # as that of each system
        energies(longer(0))
    bare = [lists[0], lists[1]._replace(row_pointers=None, cutoff=None), lists[2]]
    torch.testing.assert_close(energies(bare), expected)
    assert Neighbors.concatenate(bare, systems).cutoff is None
    farther = [near._replace(cutoff=3.0 + number) for number, near in enumerate(lists)]
    assert Neighbors.concatenate(farther, systems).cutoff == 3.0
    for padding in -1, 0:  # which may be an atom
        pairs = torch.stack([lists[0].pairs[0], torch.where(lists[0].pairs[1] == 4, padding, lists[0].pairs[1])])
        gaps = lists[0]._replace(pairs=pairs, padding=padding)
        found = Neighbors.concatenate([lists[1], gaps], systems[1::-1])
        assert found.padding == 13
        both, alone = System.concatenate(systems[1::-1]), PAIR(systems[0], gaps, q=systems[0].charges).energies
        torch.testing.assert_close(PAIR(both, found, q=both.charges).energies[5:], alone)
    nothing = [
        near._replace(pairs=near.pairs[:, :0], shifts=near.shifts[:0], row_pointers=near.row_pointers[:1])
        for near in lists
    ]
    assert not energies(nothing).any()
    assert not energies([Neighbors.from_matrix(p.matrix[:0], p.shifts[:0]) for p in padded]).any()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.later)])
def test_room_in_lists_that_are_not_read(compiled):
    """As on a GPU: it follows behind the pairs of all systems. The first of its entries marks it."""
    systems = structures("crystals, molecules, slabs")
    near = [system.neighbors(3.0) for system in systems]
    both = System.concatenate(systems)
    expected = Neighbors.concatenate(near, systems)
    roomy = [
        n._replace(
            pairs=torch.nn.functional.pad(n.pairs, (0, width), value=NO_PADDING),
            shifts=None if n.shifts is None else torch.nn.functional.pad(n.shifts, (0, 0, 0, width)),
        )
        for n, width in zip(near, (2, 0, 3, 1))
    ]
    roomy[2].pairs[:, -1] = 0
    join = partial(Neighbors.concatenate, systems=systems)
    if compiled:
        joined = torch.compile(join, backend="aot_eager", fullgraph=True)(roomy)
    else:
        with hidden_values():
            joined = join(roomy)
    n_pairs = expected.pairs.shape[1]
    assert joined.pairs.shape == (2, n_pairs + 6) and bool((joined.pairs[:, n_pairs] == NO_PADDING).all())
    same(joined._replace(pairs=joined.pairs[:, :n_pairs], shifts=joined.shifts[:n_pairs]), expected)
    found = PAIR(both, joined, q=both.charges)
    assert torch.equal(found.energies, PAIR(both, expected, q=both.charges).energies)


@pytest.mark.parametrize("atom", [-1, 8])
def test_atoms_that_a_system_does_not_have_are_not_those_of_the_next(atom):
    """Padding without its declaration, for one; the error is that of the system alone."""
    crystal, free = structures("crystals, molecules, slabs")[:2]
    both = System.concatenate([free, crystal, free])
    for as_matrix, name in ((False, "pairs"), (True, "matrix")):
        near, water = (s.neighbors(3.0, as_matrix=as_matrix) for s in (crystal, free))
        entries = getattr(near, name).clone()
        entries[-1, -1] = atom
        joined = Neighbors.concatenate([water, near._replace(**{name: entries}), water], [free, crystal, free])
        if as_matrix and atom == 8:  # the default padding
            assert joined.matrix[10].max() == 14 and PAIR(both, joined, q=both.charges).energies.isfinite().all()
            continue
        with pytest.raises(ValueError, match="holds an atom that does not exist"):
            PAIR(both, joined, q=both.charges)


def test_what_has_no_answer():
    crystal, free, slab, _ = systems = structures("crystals, molecules, slabs")
    three = torch.arange(8) % 3
    for wrong, message in (
        ([], "holds no System"),
        (crystal, "must hold System objects, got Tensor: give a list"),
        ([SALT], "must hold System objects, got Atoms"),
        # as many rows as atoms in the sum, so that nobody would notice later
        ([crystal._replace(charges=free.charges), free._replace(charges=crystal.charges)], "number 0 has 3 rows for 8"),
        ([crystal._replace(cell=crystal.cell.expand(2, 3, 3), batch_idx=three), free], "the entry 2, but there are 2"),
        ([crystal._replace(batch_idx=three[:3]), free], r"`batch_idx` must have shape \(8\), got \(3,\)"),
        ([crystal, free._replace(charges=None)], "`charges` of system number 1 is missing"),
        (
            [crystal, free._replace(charges=free.charges[:, None])],
            "`charges` of all systems must have rows of the same",
        ),
        ([crystal, free._replace(domain=object())], "number 1 has a `domain`"),
        ([crystal._replace(cell=crystal.cell.expand(2, 3, 3))], "`cell` is for 2 systems, but there are 1"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            System.concatenate(wrong)
    near = [system.neighbors(3.0) for system in systems]
    for neighbors, beside, message in (
        ([], [], "`neighbors` holds no Neighbors"),
        (near[0], [crystal], "`neighbors` must hold Neighbors objects, got Tensor: give a list"),
        (near[:2], System.concatenate([crystal, free]), "`systems` must hold System objects, got Tensor: give a list"),
        ([near[0], near[2]._replace(shifts=None)], [crystal, slab], "number 1 has no `shifts`, which its system needs"),
        (near, systems[:3], "of 4 systems, but there are 3"),
        (near[:2], [crystal, slab], "number 1 is for 3 atoms, but its system has 2"),
        ([near[0], free.neighbors(3.0, as_matrix=True)], [crystal, free], "one is a matrix, the other has pairs"),
        ([near[0], free.neighbors(3.0, half=True)], [crystal, free], "number 1 has another `half`"),
        ([Neighbors()], [crystal], "must have either pairs or a matrix"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            Neighbors.concatenate(neighbors, beside)
