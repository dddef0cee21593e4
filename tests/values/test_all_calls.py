"""Results do not depend on what is no physics: threads, memory, precision of the caller, order, origin, orientation."""

import numpy as np
import pytest
import torch

from tests.support.cases import CUTOFF, D3, EACH, EACH_WHOLE, MIXED, ONE, PAIRS, SUMS, Inputs, each, member, shuffled
from tests.support.comparing import close, close_to_largest, same_bits, weighted
from tests.support.systems import FORMS, System, batch, in_form, neighbors_of, random_rotation


def all_bits(case, inputs, near):
    """Results, and first gradients of all inputs."""
    leaves = inputs.leaves()
    results = case.results(*leaves, near)
    return [*(r.detach() for r in results), *leaves.grad(weighted([r.sin() for r in results]))]


def rounded(case, system, dtype):
    return Inputs(*(t.to(dtype) for t in case.inputs(system)))


# -- the same bits --------------------------------------------------------------------------------


@EACH
def test_runs_and_threads_do_not_change_a_bit(case, threads, always_split, dtype):
    inputs, near = rounded(case, MIXED, dtype), case.near(MIXED)
    expected = all_bits(case, inputs, near)
    for number in (1, 2, 3, 2):
        threads(number)
        same_bits(all_bits(case, inputs, near), expected)


@EACH
def test_autocast_changes_nothing(case, dtype):
    """No half precision sneaks in."""
    inputs, near = rounded(case, MIXED, dtype), case.near(MIXED)
    expected = all_bits(case, inputs, near)
    assert [t.dtype for t in expected] == [*case.dtypes(dtype), *[dtype] * len(inputs)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same_bits(all_bits(case, inputs, near), expected)


@EACH
def test_strided_inputs_equal_contiguous_ones(case):
    inputs, near = case.inputs(ONE), case.near(ONE)
    strided = Inputs(*(torch.stack([t, t], -1)[..., 1] for t in inputs))
    strided = strided._replace(cell=inputs.cell.mT.contiguous().mT)
    apart = {key: value.repeat_interleave(2, -1)[..., ::2] for key, value in near.items()}
    assert not any(t.is_contiguous() for t in (strided.x, strided.cell, *apart.values()))
    same_bits(case.results(*strided, apart), case.results(*inputs, near))


@EACH
def test_inputs_are_left_alone(case):
    given = [*case.inputs(ONE), *case.near(ONE).values()]
    copies = [t.clone() for t in given]
    results = case.results(*copies[:4], dict(zip(case.near(ONE), copies[4:])))
    same_bits(copies, given)
    storages = [t.untyped_storage().data_ptr() for t in (*results, *copies)]
    assert len(set(storages)) == len(storages)


@EACH
def test_float32_follows_float64(case):
    near = case.near(MIXED)
    inputs = rounded(case, MIXED, torch.float32)
    found = case.results(*inputs, near)
    assert [t.dtype for t in found] == case.dtypes(torch.float32)
    exact = case.results(*(t.double() for t in inputs), near)
    close_to_largest([t.double() for t in found], exact, 3e-6)


# -- forms of neighbors ---------------------------------------------------------------------------

NEAR = neighbors_of(MIXED, CUTOFF)


def padding_name(case):
    return "mask_value" if case in SUMS else "fill_value"


@EACH_WHOLE
@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_neighbors_does_not_matter(case, form):
    """Results and gradients of a batch in no order; only half lists are summed in another order."""
    inputs, near = case.inputs(MIXED), case.near(MIXED, **in_form(NEAR, 11, form, padding_name(case)))
    found, expected = all_bits(case, inputs, near), all_bits(case, inputs, case.near(MIXED))
    close(found, expected, 1e-11 if "half" in form else 0.0)


@each(*PAIRS, D3)
@pytest.mark.parametrize("reach", [None, 1.4 * CUTOFF], ids=["built by the call", "longer than needed"])
def test_lists_may_be_built_by_the_call_or_longer_than_needed(case, reach):
    near = case.near(MIXED, **neighbors_of(MIXED, reach or CUTOFF))
    if reach is None:
        near = {name: value for name, value in near.items() if not name.startswith("neighbor")}
    else:
        assert near["neighbor_list"].shape[1] > NEAR["neighbor_list"].shape[1]
    inputs = case.inputs(MIXED)
    close(all_bits(case, inputs, near), all_bits(case, inputs, case.near(MIXED)), 1e-11)


@EACH_WHOLE
@pytest.mark.parametrize("where", ["origin", "on an atom"])
def test_a_padding_atom_changes_nothing(case, where):
    """Last, of the first system, without charge or element; its number, which is an atom's, fills the rows."""
    n, inputs = 11, case.inputs(MIXED)
    plain = case.near(MIXED, **in_form(NEAR, n, "matrix"))
    place = torch.zeros(1, 3, dtype=torch.float64) if where == "origin" else inputs.x[:1]
    wider = {name: torch.cat([t, 0 * t[:1]]) for name, t in inputs._asdict().items() if name in case.of_atoms}
    padded = {name: torch.cat([t, 0 * t[:1]]) for name, t in plain.items()} | {padding_name(case): n}
    padded["neighbor_matrix"][n] = n
    found = []
    for given, near in (inputs, plain), (inputs._replace(**wider | {"x": torch.cat([inputs.x, place])}), padded):
        leaves = given.leaves()
        results = case.results(*leaves, near)
        slopes = leaves.grad(weighted([r[:n].sin() for r in results]))
        found.append([[r[:n].detach() for r in results], [s[:n] for s in slopes]])
    close([t for parts in found[1] for t in parts], [t for parts in found[0] for t in parts], 1e-11)
    assert not results[0][n:].any() and not results[1][n:].any() and slopes[0][n:].abs().max() < 1e-12


# -- batches --------------------------------------------------------------------------------------


@EACH
def test_a_batch_is_its_systems_one_by_one(case):
    """With lists of their own, sums over pairs to the last bit; energies of systems are sums of those of atoms."""
    inputs = case.inputs(MIXED)
    together = case.results(*inputs, case.near(MIXED))
    totals = case.energies(*inputs, case.near(MIXED), energy_reduction="system")
    close([totals], [torch.zeros(3).double().index_add(0, MIXED.batch_idx, together[0])])
    for number in range(3):
        alone, its_inputs, mine = member(MIXED, inputs, case, number)
        parts = [t[mine] if len(t) == len(MIXED.charges) else t[number : number + 1] for t in together]
        close(case.results(*its_inputs, case.near(alone)), parts, 0.0 if case in (*PAIRS, D3) else 1e-12)


@EACH
def test_one_cell_has_any_of_two_shapes(case):
    inputs, near = case.inputs(ONE), case.near(ONE)
    expected = case.results(*inputs, near)
    same_bits(case.results(*inputs._replace(cell=inputs.cell[0]), near), expected)
    close(case.results(*inputs, near | {"batch_idx": torch.zeros(5, dtype=torch.int64)}), expected)


# -- symmetries -----------------------------------------------------------------------------------


def reordered(case, inputs, order):
    return Inputs(**{name: t[order] if name in case.of_atoms else t for name, t in inputs._asdict().items()})


@EACH_WHOLE
def test_atoms_come_in_any_order(case):
    order = torch.randperm(11, generator=torch.Generator().manual_seed(5))
    inputs, mixed = case.inputs(MIXED), shuffled(MIXED, 5)
    *of_atoms, virial = case.results(*inputs, case.near(MIXED))
    found = case.results(*reordered(case, inputs, order), case.near(mixed))
    close(found, (*(t[order] for t in of_atoms), virial), 1e-11)


@EACH_WHOLE
def test_atoms_may_lie_in_any_cell(case):
    """Each moved by a lattice vector of its own, and looked up again."""
    images = torch.randint(-4, 5, (11, 3), generator=torch.Generator().manual_seed(0)).double()
    shift = torch.einsum("ia,iab->ib", images, MIXED.cell[MIXED.batch_idx.long()])
    moved, inputs = MIXED._replace(positions=MIXED.positions + shift), case.inputs(MIXED)
    found = case.results(moved.positions, *inputs[1:], case.near(moved))
    # positions that are cells apart lose digits
    close(found, case.results(*inputs, case.near(MIXED)), 1e-9)


@EACH_WHOLE
@pytest.mark.parametrize("mirror", [1.0, -1.0], ids=["rotation", "and mirror"])
def test_orientation_and_origin_do_not_matter(case, mirror):
    """A mirror makes cells left-handed."""
    turn = torch.tensor(mirror * random_rotation(np.random.default_rng(3)))
    # points of a mesh are places in space
    shift = 0.0 if case.name == "PME" else 0.37
    turned = MIXED._replace(positions=MIXED.positions @ turn + shift, cell=MIXED.cell @ turn)
    inputs = case.inputs(MIXED)
    inputs_turned = inputs._replace(x=turned.positions, cell=turned.cell)
    energies, forces, *slopes, virial = case.results(*inputs, case.near(MIXED))
    found = case.results(*inputs_turned, case.near(turned))
    close(found, (energies, forces @ turn, *slopes, turn.T @ virial @ turn), 1e-10)


BASES = [[[1, 0, 0], [3, 1, 0], [-2, 2, 1]], [[0, 1, 0], [1, 0, 0], [0, 0, 1]], [[1, 0, 0], [0, -1, 0], [1, 2, -1]]]


@each(*PAIRS, D3)
@pytest.mark.parametrize("basis", BASES, ids=["skewed", "left-handed", "both"])
def test_the_basis_of_the_lattice_does_not_matter(case, basis):
    inputs, other = case.inputs(MIXED), MIXED._replace(cell=torch.tensor(basis, dtype=torch.float64) @ MIXED.cell)
    found = case.results(*inputs._replace(cell=other.cell), case.near(other))
    close(found, case.results(*inputs, case.near(MIXED)), 1e-10)


@each(*PAIRS, D3)
def test_a_larger_cell_has_as_much_more_of_everything(case):
    """Energies and forces of atoms repeat, and the virial adds up; forces sum to zero, and the virial is symmetric."""
    repeats = torch.tensor([2, 1, 3])
    images = torch.cartesian_prod(*(torch.arange(n) for n in repeats)).double() @ ONE.cell[0]
    inputs, n = case.inputs(ONE), len(images)
    of_atoms = {name: t.repeat(n, *[1] * (t.ndim - 1)) for name, t in inputs._asdict().items() if name in case.of_atoms}
    of_atoms["x"] = (images[:, None] + inputs.x).reshape(-1, 3)
    large = System(of_atoms["x"], ONE.charges.repeat(n), ONE.cell * repeats[:, None], ONE.batch_idx.repeat(n))
    energies, forces, virial = case.results(*inputs, case.near(ONE))
    found = case.results(*inputs._replace(**of_atoms, cell=large.cell), case.near(large))
    close(found, (energies.repeat(n), forces.repeat(n, 1), n * virial), 1e-10)
    assert forces.abs().max() > 1e-3 and forces.sum(0).abs().max() < 1e-11 * forces.abs().max()
    close([virial], [virial.mT], 1e-13)


@EACH
def test_nan_in_one_system_does_not_reach_the_others(case):
    """In a position, or in a parameter of an atom."""
    inputs, near = case.inputs(MIXED), case.near(MIXED)
    expected = case.results(*inputs, near)
    atom = int((MIXED.batch_idx == 1).nonzero()[0])
    for name in case.of_atoms:
        broken = getattr(inputs, name).clone()
        broken[atom] = torch.nan
        for ours, theirs in zip(case.results(*inputs._replace(**{name: broken}), near), expected, strict=True):
            there = MIXED.batch_idx == 1 if len(ours) == 11 else torch.tensor([False, True, False])
            same_bits([ours[~there]], [theirs[~there]])
            assert ours[there].isnan().any()


@EACH_WHOLE
def test_an_empty_system_in_a_batch_has_nothing_and_changes_nothing(case):
    inputs = case.inputs(MIXED)
    nobody = ONE._replace(positions=ONE.positions[:0], charges=ONE.charges[:0], batch_idx=ONE.batch_idx[:0])
    wider = batch(MIXED, nobody)._replace(batch_idx=MIXED.batch_idx)
    values = {name: torch.cat([t, t[:1]]) if name in case.of_systems else t for name, t in inputs._asdict().items()}
    *of_atoms, virial = case.results(*Inputs(**values), case.near(wider))
    *expected, others = case.results(*inputs, case.near(MIXED))
    close((*of_atoms, virial[:3]), (*expected, others))
    assert virial.shape == (4, 3, 3) and not virial[3].any()
