"""Cases for several ranks: the division of atoms and meshes. See `ranks.py`."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nvalchemiops.interactions.pair.potentials import DSF
from nvalchemiops.torch.distributed import Domain, collectives
from nvalchemiops.torch.distributed.bricks import ONE, Frames, make_bricks, shape_of
from nvalchemiops.torch.distributed.domain import OF_ATOM
from nvalchemiops.torch.distributed.pencils import division_of, numbers_for
from nvalchemiops.torch.distributed.transform import window_spectrum, window_values
from nvalchemiops.torch.interactions.electrostatics import (
    ewald_reciprocal_space,
    ewald_summation,
    pme_reciprocal_space,
)
from nvalchemiops.torch.interactions.pair.op import pair_sum
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.rows import build_rows
from tests.distributed.common import CUTOFF, F64, PAIRS_OF_CHARGES, Atoms, assert_equal, case, rows_of_owned


@case(1, 4)
def exchanges_are_transposes(group: Any) -> None:
    atoms = Atoms(n=4)
    mine = atoms.mine(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=CUTOFF, group=group)
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    maps = [
        (domain.distribute, domain.gather, mine.stop - mine.start),
        (domain.with_ghosts, domain.add_ghosts, domain.n_owned),
        (domain.sum_for_shares, domain.sum_for_shares, 5),
    ]
    for there, back, n in maps:
        x = torch.randn(n, 3, generator=generator, dtype=F64, requires_grad=True)
        y = there(x)
        z = torch.randn(y.shape, generator=generator, dtype=F64, requires_grad=True)
        assert_equal(domain.sum((y * z).sum()), domain.sum((x * back(z)).sum()), there)
        (gradient,) = torch.autograd.grad(y, x, z, create_graph=True)
        assert_equal(gradient, back(z), "gradient")
        w = torch.randn(n, 3, generator=generator, dtype=F64)
        (second,) = torch.autograd.grad(gradient, z, w)
        assert_equal(second, there(w), "second derivative")
    with pytest.raises(NotImplementedError, match="cannot map over a call with a `domain`"):
        torch.func.vmap(domain.sum)(torch.empty(0, 3))  # as on a rank without atoms, where it was no error
    held = atoms.positions[mine]
    owned = domain.distribute(held)
    assert torch.equal(owned, atoms.positions[domain.global_index])
    assert torch.equal(domain.gather(owned), held)
    # a result that all have, and a parameter that all have
    scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
    total = domain.sum((domain.replicated(scale) ** 3 * owned).sum())
    (slope,) = torch.autograd.grad(total, scale, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, scale)
    assert_equal(slope, 12.0 * atoms.positions.sum(), "slope")
    assert_equal(curvature, 12.0 * atoms.positions.sum(), "curvature")


@case(1, 4)
def neighbors_are_those_of_one_process(group: Any) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    cell = torch.tensor([[9.0, 0, 0], [2.0, 8.0, 0], [-1.0, 3.0, 10.0]], dtype=F64)
    for seed, (pbc, cutoff) in enumerate(itertools.product(itertools.product((True, False), repeat=3), (2.5, 6.0))):
        generator = torch.Generator().manual_seed(seed)
        n = (160, 40, 3)[seed % 3]
        x = torch.rand(n, 3, generator=generator, dtype=F64) * 14.0 - 5.0
        if seed % 4 == 3:
            x = x * 0.1  # all atoms in a corner
        periodic = torch.tensor(pbc)
        batch_idx = (torch.arange(n) * 3 // n).int() if seed % 2 else None
        if seed % 4 == 1:
            batch_idx = batch_idx.flip(0)
        cells = cell if batch_idx is None else torch.stack([cell, 1.1 * cell, 1.3 * cell])
        order = torch.arange(n) if batch_idx is None else torch.argsort(batch_idx, stable=True)
        told = {} if batch_idx is None else {"batch_idx": batch_idx[order]}
        pairs, _, shifts = neighbor_list(x[order], cutoff, cells, periodic, return_neighbor_list=True, **told)
        mine = slice(n * rank // size, n * (rank + 1) // size)
        held = None if batch_idx is None else batch_idx[mine]
        grid = None if size != 4 or seed % 3 else (2, 1, 2)
        domain = Domain(x[mine], cells, periodic, held, cutoff=cutoff, group=group, grid=grid)
        found = rows_of_owned(domain, domain.distribute(x[mine]), cutoff)
        pairs = order[pairs.long()]
        keep = torch.isin(pairs[0], domain.global_index)
        expected = torch.cat([pairs.T[keep], shifts[keep]], 1)
        assert found == sorted(map(tuple, expected.tolist())), (pbc, cutoff, domain.bricks)
        total = torch.tensor([domain.n_owned])
        dist.all_reduce(total, group=group)
        assert int(total) == n
    # no cell at all
    pairs, _ = neighbor_list(x, 3.0, return_neighbor_list=True)
    domain = Domain(x[mine], cutoff=3.0, group=group)
    keep = torch.isin(pairs[0].long(), domain.global_index)
    assert rows_of_owned(domain, domain.distribute(x[mine]), 3.0) == sorted(map(tuple, pairs.T[keep].tolist()))


@case(2, 4)
def a_rank_sees_a_part(group: Any) -> None:
    """Atoms, lists and meshes fall with the number of ranks."""
    atoms = Atoms(n=14)
    size = dist.get_world_size(group)
    domain = Domain(atoms.positions[atoms.mine(group)], atoms.cell, cutoff=2.5, group=group)
    rows = domain.neighbors(domain.distribute(atoms.positions[atoms.mine(group)]), 2.5)
    whole = neighbor_list(atoms.positions, 2.5, atoms.cell, return_neighbor_list=True)[0].shape[1]
    assert domain.n_owned < 1.2 * atoms.count / size
    assert domain.n_owned + domain.n_ghosts < atoms.count * (1.2 / size + 0.35)
    assert rows.neighbors.shape[0] < whole * (1.2 / size + 0.15)


@case(2)
def sums_over_pairs_need_no_rows_of_ghosts(group: Any) -> None:
    """Nor do their derivatives, and those of sums of moments."""
    atoms = Atoms(n=6)
    mine = atoms.mine(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=CUTOFF, group=group)
    x, q = domain.distribute(atoms.positions[mine]), domain.distribute(atoms.charges[mine])
    options = {"cutoff": CUTOFF, "k_cutoff": 1.0, "compute_forces": True, "compute_virial": True, "domain": domain}
    without = ewald_summation(x, q, atoms.cell, 0.4, **options)
    found = domain._owned_rows(x, CUTOFF, None)
    assert domain.n_ghosts and found.alone.pointers is not None
    assert found.alone.pointers.diff()[domain.n_owned :].count_nonzero() == 0
    assert found._of_both is None
    y = x.clone().requires_grad_()
    by_autograd = ewald_summation(y, q, atoms.cell, 0.4, **options)
    for name, a, b in zip(("energies", "forces", "virial"), without, by_autograd):
        assert_equal(a, b.detach(), name)
    (slope,) = torch.autograd.grad(domain.sum(by_autograd[0].sum()), y, create_graph=True)
    assert_equal(-slope.detach(), without[1], "forces by autograd")
    torch.autograd.grad(domain.sum(slope.square().sum()), y)
    dipoles = torch.ones_like(x)
    without = ewald_summation(x, q, atoms.cell, 0.4, dipoles=dipoles, **options)
    by_autograd = ewald_summation(y, q, atoms.cell, 0.4, dipoles=dipoles, **options)
    (slope,) = torch.autograd.grad(domain.sum(by_autograd[0].sum()), y)
    assert_equal(-slope, without[1], "forces of dipoles by autograd")
    assert found._of_both is None
    assert domain.neighbors(x, CUTOFF) is found._of_both


@case(3)
def atoms_that_move(group: Any) -> None:
    atoms, mine = Atoms(n=5), Atoms(n=5).mine(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, skin=0.6, group=group)
    moved = atoms.positions + 0.17 * atoms.vectors / atoms.vectors.norm(dim=1).max()
    energies = PAIRS_OF_CHARGES(domain.distribute(moved[mine]), atoms.cell, q=1.0, domain=domain)
    expected = PAIRS_OF_CHARGES(moved, atoms.cell, q=1.0)
    assert_equal(domain.gather(energies), expected[mine], "moved")
    far = atoms.positions.clone()
    far[0, 0] += 0.4  # one atom, on one rank
    x, q = domain.distribute(far[mine]), domain.distribute(atoms.charges[mine])
    for call in (
        lambda: PAIRS_OF_CHARGES(x, atoms.cell, q=1.0, domain=domain),
        lambda: pme_reciprocal_space(x, q, atoms.cell, 0.7, mesh_dimensions=(16, 16, 16), domain=domain),
    ):
        try:
            call()
        except ValueError as error:
            assert "make a new domain" in str(error)
        else:
            raise AssertionError("atoms that have moved too far are an error on all ranks")
    # structure factors know no places
    found = ewald_reciprocal_space(x, q, atoms.cell, None, 0.7, k_cutoff=2.0, domain=domain)
    expected = ewald_reciprocal_space(far, atoms.charges, atoms.cell, None, 0.7, k_cutoff=2.0)
    assert_equal(domain.gather(found), expected[mine], "structure factors")


@case(1, 3)
def ranks_follow_atoms_together(group: Any) -> None:
    """One atom that moves far, on one rank, makes all ranks divide anew; numbers and holders stay."""
    atoms = Atoms(n=5)
    mine = atoms.mine(group)
    exclusions = torch.stack([torch.arange(0, 100, 7), torch.arange(0, 100, 7) + 2])
    first = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, skin=0.6, group=group)
    domain, x, q = first, first.distribute(atoms.positions[mine]), first.distribute(atoms.charges[mine])
    reference, made = atoms.positions.clone(), 0
    for step in range(5):
        moves = 0.14 * atoms.vectors / atoms.vectors.norm(dim=1).max()
        moves[17] *= 1.0 + 40.0 * (step % 2)
        reference = reference + moves
        x = x + moves[domain.global_index]
        before = domain
        domain, x, q = domain.follow(x, q)
        told = torch.tensor([int(domain is not before)])
        dist.all_reduce(told, group=group)
        assert int(told) in (0, dist.get_world_size(group))
        made += int(told) > 0
        assert torch.equal(x, reference[domain.global_index])
        assert torch.equal(domain.gather(x), reference[mine])
        assert torch.equal(domain.distribute(atoms.charges[mine]), q)
        more: dict[str, Any] = {"cutoff": 3.0, "k_cutoff": 2.0, "exclusions": exclusions}
        found = ewald_summation(x, q, atoms.cell, 0.7, domain=domain, **more)
        expected = ewald_summation(reference, atoms.charges, atoms.cell, 0.7, **more)
        assert_equal(domain.gather(found), expected[mine], step)
    assert made in (2, 3), made


@case(1, 3)
def the_division_does_not_depend_on_who_holds_the_atoms(group: Any) -> None:
    """Nor do cuts differ from those of one process; work of each atom goes to its owner."""
    atoms, rank, size = Atoms(batch=True, n=5), dist.get_rank(group), dist.get_world_size(group)
    weights = torch.arange(1, atoms.count + 1).to(F64).sqrt()
    frames = Frames.of(atoms.cells.numpy(), np.ones((2, 3), dtype=bool))
    work = (weights * (ONE / weights.max())).round()
    coordinates = frames.coordinates(atoms.positions, atoms.batch_idx)
    shape = shape_of(size, None)
    alone = make_bricks(frames, coordinates, atoms.batch_idx, work, 3.0, shape, lambda x: x, lambda x: x)
    for mine in (atoms.mine(group), slice(0, atoms.count * (rank == size - 1))):
        held = atoms.positions[mine], weights[mine], atoms.batch_idx[mine]
        domain = Domain(
            held[0], atoms.cells, batch_idx=held[2], cutoff=3.0, weights=held[1], num_systems=2, group=group
        )
        assert np.array_equal(domain.bricks.cut, alone.cut) and np.array_equal(domain.bricks.axis, alone.axis)
        assert domain.bricks.largest == alone.largest < 1.05
        assert torch.equal((domain.weights * ONE).round(), work[domain.global_index])
        assert torch.equal(domain.distribute(held[2]), domain.batch_idx)


@case(2, 3)
def cuts_are_kept_while_work_is_balanced(group: Any) -> None:
    """So atoms near a cut change sides, but the cut stays; atoms that gather in a corner are divided again."""
    atoms, mine = Atoms(n=6), Atoms(n=6).mine(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=2.0, skin=0.2, group=group)
    x, first = domain.distribute(atoms.positions[mine]), domain.bricks
    moves, changed = atoms.vectors / atoms.vectors.norm(dim=1).max(), 0
    for step in (0.6, -0.6, 0.6):
        before = domain
        domain, x = domain.follow(x + step * moves[domain.global_index])
        assert domain is not before
        assert np.array_equal(domain.bricks.cut, first.cut)
        changed += sorted(domain.global_index.tolist()) != sorted(before.global_index.tolist())
    assert changed, "some atoms are on the other side now"
    inverse = torch.linalg.inv(atoms.cell)
    places = (x @ inverse) % 1.0
    domain, x = domain.follow((places**3) @ atoms.cell)
    assert not np.array_equal(domain.bricks.cut, first.cut)
    largest = torch.tensor([domain.n_owned])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    assert int(largest) < 1.1 * atoms.count / dist.get_world_size(group)
    new = Domain(x, atoms.cell, cutoff=2.0, cuts=first, group=group)
    assert not np.array_equal(new.bricks.cut, first.cut), "not kept by any means"
    new = Domain(2.0 * atoms.positions[mine], 2.0 * atoms.cell, cutoff=2.0, cuts=first, group=group)
    assert np.array_equal(new.bricks.cut, first.cut)
    assert np.array_equal(new.bricks.frames.vectors, 2.0 * first.frames.vectors), "but for the cell of now"


@case(2, 4)
def work_is_counted_by_neighbors(group: Any) -> None:
    """Where atoms have many, a rank gets fewer of them when they are divided again; unless weights were given."""
    generator, size = torch.Generator().manual_seed(4), dist.get_world_size(group)
    places = torch.rand(800, 3, generator=generator, dtype=F64)
    places[:400, 0] *= 0.15  # a half of the atoms is dense
    x = 14.0 * places
    mine = slice(0, 800 * (dist.get_rank(group) == 0))
    for weights in (None, torch.ones(800, dtype=F64)[mine]):
        options: dict[str, Any] = {"cutoff": 3.0, "skin": 0.2, "weights": weights, "grid": (size, 1, 1)}
        domain = Domain(x[mine], 14.0 * torch.eye(3, dtype=F64), group=group, **options)
        own = domain.distribute(x[mine])
        told = torch.empty(3, dtype=F64)
        for told_now in told:
            counts = domain.neighbors(own, 3.0).pointers.diff()[: domain.n_owned]
            work = torch.stack([counts.sum() + OF_ATOM * domain.n_owned]).double()
            most = work.clone()
            dist.all_reduce(work, group=group)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
            told_now.copy_(size * most[0] / work[0])
            domain, own, counts = domain.follow(own + 7.0, counts)  # so that all atoms are divided again
            if weights is None:
                expected = (counts + OF_ATOM).double()
                assert_equal(domain.weights * expected.max(), expected * domain.weights.max(), "work", 1e-5)
        if weights is None:
            assert told[0] > 1.15 > 1.1 > told[1:].max(), told
        else:
            assert told[::2].min() > 1.15, told


@case(2)
def exclusions_that_change_in_place(group: Any) -> None:
    """What a rank found of them is kept, but not when they have changed, by NumPy, too; factors belong to each call."""
    atoms = Atoms(n=10)  # so large that a rank does not see all atoms
    mine = atoms.mine(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, group=group)
    x, q = domain.distribute(atoms.positions[mine]), domain.distribute(atoms.charges[mine])
    assert domain.n_owned + domain.n_ghosts < atoms.count
    pairs = torch.stack([torch.arange(0, 900, 3), torch.arange(0, 900, 3) + 2])
    for change in range(3):
        for factors in (None, torch.linspace(0.0, 1.0, pairs.shape[1], dtype=F64)):
            told: dict[str, Any] = {"exclusions": pairs, "exclusion_factors": factors}
            found = PAIRS_OF_CHARGES(x, atoms.cell, q=q, domain=domain, **told)
            expected = PAIRS_OF_CHARGES(atoms.positions, atoms.cell, q=atoms.charges, **told)
            assert_equal(domain.gather(found), expected[mine], (change, factors is None))
        pairs.numpy()[1] += 1 + change
    try:
        PAIRS_OF_CHARGES(x, atoms.cell, q=q, domain=domain, exclusions=pairs, exclusion_factors=torch.ones(3))
        PAIRS_OF_CHARGES(x, atoms.cell, q=q, domain=domain, exclusions=pairs, exclusion_factors=torch.ones(3))
    except ValueError as error:
        assert "`exclusion_factors`" in str(error)
    else:
        raise AssertionError("factors of other pairs")


@case(1)
def ops_are_as_they_say(group: Any) -> None:
    number = collectives.number_of(group)
    for n in (5, 0):
        values = torch.randn(n, 3, dtype=F64, requires_grad=True)
        for op in (collectives.sum_on_all_ranks, collectives.sum_of_shares, collectives.replicated):
            torch.library.opcheck(op.op.overload, (values, number))
        # sizes of other groups would not fit
        if dist.get_world_size(group) == 1:
            arguments = (values, [0], [n], [n], number)
            torch.library.opcheck(collectives.rows_from_partners.op.overload, arguments)
            directions = [torch.randn(1, *shape, dtype=F64) for shape in ((n, 3), (3, 3), (n, 1), (1, 1), (n,))]
            given = [direction[0].clone() for direction in directions]
            directions[1], given[1] = directions[1].unsqueeze(1), 9.0 * torch.eye(3, dtype=F64)[None]
            rows = build_rows(given[0], 4.0, given[1], None)
            others = (None, 1, *rows, None, 0, None, None, None, 4.0, 0.0, None, torch.arange(0), [0], [0], [0], number)
            arguments = (DSF.text, "wrcpg", "rcpgw", *given, *directions, *others)
            torch.library.opcheck(pair_sum.op.overload, arguments)
            mesh, window = (6, 5, 4), (5, 5, 4)
            told = numbers_for(0, mesh, np.array([[-1, 0, 0]]), np.array([window]))
            values = torch.randn(2, 1, *window, dtype=F64, requires_grad=True)
            torch.library.opcheck(window_spectrum.op.overload, (values, mesh, told, 1, number))
            spectrum = torch.randn(2, 1, 6, 5, 3, 2, dtype=F64, requires_grad=True)
            torch.library.opcheck(window_values.op.overload, (spectrum, mesh, told, 1, number))


@case(1, 2, 4)
def windows_are_transformed_as_one_mesh(group: Any) -> None:
    """Windows that overlap, wrap around and leave planes out, of several meshes at once; and the transpose.

    By slabs along either axis, by pencils with one rank left out, and by the grid that is chosen; the last meshes have
    fewer planes along an axis than there are ranks. More grids and meshes are in `test_pencils`, in one process.
    """
    rank, size, number = dist.get_rank(group), dist.get_world_size(group), collectives.number_of(group)
    generator = torch.Generator().manual_seed(3)
    few = max(size - 1, 1)
    meshes = (((7, 6, 5), (2, 1)), ((4, 9, 8), (1, 3)), ((few, 5, 4), (1, 2)), ((8, few, 4), (1, 1)))
    grids = ((size, 1), (1, size), (max(size // 2, 1), min(size, 2)), (few, 1), None)
    for (mesh, n_meshes), grid in itertools.product(meshes, grids):
        starts = [(r * mesh[0] // size - 2, -1 - r, 3 * r) for r in range(size)]
        sizes = [(min(mesh[0] // size + 3, mesh[0]), max(mesh[1] - (r == 1), 1), mesh[2] - 1) for r in range(size)]
        windows = [torch.randn(*n_meshes, *shape, generator=generator, dtype=F64) for shape in sizes]
        whole = torch.zeros(*n_meshes, *mesh, dtype=F64)
        places = [
            torch.meshgrid(*(torch.arange(a, a + n) % m for a, n, m in zip(s, c, mesh)), indexing="ij")
            for s, c in zip(starts, sizes)
        ]
        for values, place in zip(windows, places):
            whole[(slice(None), slice(None), *place)] += values
        told = numbers_for(rank, mesh, np.array(starts), np.array(sizes), grid)
        of_y, of_z = (slice(*ends) for ends in division_of(mesh, told, size).planes)
        here = windows[rank].requires_grad_()
        spectrum = window_spectrum(here, mesh, told, size, number)
        expected = torch.view_as_real(torch.fft.rfftn(whole, dim=(-3, -2, -1)))
        assert_equal(spectrum.detach(), expected[:, :, :, of_y, of_z].detach(), (mesh, grid, "spectrum"))
        factor = torch.randn(expected.shape, generator=generator, dtype=F64)
        complex_values = torch.view_as_complex(expected * factor)
        back = torch.fft.irfftn(complex_values, s=mesh, dim=(-3, -2, -1), norm="forward")
        values = window_values(spectrum * factor[:, :, :, of_y, of_z], mesh, told, size, number)
        assert_equal(values.detach(), back[(slice(None), slice(None), *places[rank])], (mesh, grid, "values"))
        # the derivative of both is the transpose of both, and so is that of the transpose
        other = torch.randn(values.shape, dtype=F64, requires_grad=True)
        (slope,) = torch.autograd.grad(values, here, other, create_graph=True)
        (second,) = torch.autograd.grad(slope, other, here.detach())
        assert_equal(second, values.detach(), (mesh, grid, "transpose"))
        products = torch.stack([(other * values).sum(), (slope * here).sum()]).detach()
        dist.all_reduce(products, group=group)
        assert_equal(products[:1], products[1:], (mesh, grid, "inner product"))


@case(2)
def values_of_all_dtypes_move(group: Any) -> None:
    """Those that messages do not have as well: to the owners and back, to ghosts, and their sums, with gradients."""
    atoms = Atoms(n=3)
    mine = atoms.mine(group)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, group=group)
    numbers = torch.arange(1, atoms.count + 1).reshape(-1, 1) * torch.tensor([1, 3])
    unsigned = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    floats = (torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.float8_e5m2)
    for dtype in (torch.bool, torch.int8, torch.int16, torch.int32, *unsigned, *floats):
        values = (numbers % 3).to(dtype)
        for held in (values[mine], values[mine, 0]):
            own = domain.distribute(held)
            assert own.dtype is dtype
            assert torch.equal(domain.gather(own).to(torch.complex128), held.to(torch.complex128))
            everywhere = domain.with_ghosts(domain.global_index)
            whole = values if held.ndim == 2 else values[:, 0]
            expected = whole.to(torch.complex128)[everywhere]
            assert torch.equal(domain.with_ghosts(own).to(torch.complex128), expected)
        if dtype is not torch.bool:
            total = domain.sum(torch.ones(3).to(dtype))
            assert total.dtype is dtype and total.to(torch.complex128).real.tolist() == [dist.get_world_size(group)] * 3
    z = torch.complex(atoms.charges, atoms.weights)[mine].requires_grad_()
    share = (domain.distribute(z) * domain.distribute(z.detach()).conj()).sum().real
    (gradient,) = torch.autograd.grad(domain.sum(share), z)
    assert_equal(torch.view_as_real(gradient), torch.view_as_real(z), "gradient")
    half = atoms.charges[mine].to(torch.bfloat16).requires_grad_()
    (gradient,) = torch.autograd.grad(domain.sum((2.0 * domain.distribute(half)).sum()), half)
    assert torch.equal(gradient, torch.full_like(half, 2.0))
