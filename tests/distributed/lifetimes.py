"""What a domain keeps, how long, and values that do not fit it. See `ranks.py`."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nvalchemiops.torch.distributed import Domain
from nvalchemiops.torch.distributed.bricks import shape_of
from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb, particle_mesh_ewald
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.systems import System
from tests.distributed.common import F64, Atoms, assert_equal, case, raises

MESH: dict[str, Any] = {"alpha": 0.7, "mesh_dimensions": (8, 9, 10), "cutoff": 3.0}


@case(2)
def domains_end_when_they_are_dropped(group: Any) -> None:
    """Without a search for garbage: lists are large."""
    atoms, mine = Atoms(n=3), Atoms(n=3).mine(group)

    def used() -> Any:
        domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, group=group)
        x = domain.distribute(atoms.positions[mine]).requires_grad_()
        q = domain.distribute(atoms.charges[mine])
        domain.sum(particle_mesh_ewald(x, q, atoms.cell, domain=domain, **MESH).sum()).backward()
        return weakref.ref(domain)

    used()  # what is made once
    # collections of other objects must not hide a cycle
    gc.collect()
    gc.disable()
    try:
        assert used()() is None
    finally:
        gc.enable()


@case(2)
def inference_comes_before_training(group: Any) -> None:
    """What is kept of a domain may have been made in inference mode, and the domain, too."""
    atoms, mine = Atoms(n=3), Atoms(n=3).mine(group)
    q, width = atoms.charges[mine], torch.tensor(1.2, dtype=F64, requires_grad=True)
    with torch.inference_mode():
        first = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, skin=0.2, group=group)
        domain, x = first.follow(first.distribute(atoms.positions[mine] + 0.3))
        assert domain is not first
        energies = particle_mesh_ewald(x, 1.2 * domain.distribute(q), atoms.cell, domain=domain, **MESH)
        expected = domain.sum(energies.sum())
        domain.collect(energies)
    held = (atoms.positions[mine] + 0.3).requires_grad_()
    charges = domain.replicated(width) * domain.distribute(q)
    energies = particle_mesh_ewald(domain.distribute(held), charges, atoms.cell, domain=domain, **MESH)
    found = domain.sum(domain.collect(energies).sum())
    assert_equal(found, expected.clone(), "energy")
    forces, slope = torch.autograd.grad(found, (held, width), create_graph=True)
    assert_equal(slope * width, 2.0 * found, "the energy is quadratic in charges")
    torch.autograd.grad(domain.sum(forces.square().sum()), held)


@case(2)
def systems_that_share_a_cell_but_not_the_open_axes(group: Any) -> None:
    """They keep their axes where they leave a domain."""
    atoms, mine = Atoms(batch=True, n=3), Atoms(n=3).mine(group)
    assert atoms.batch_idx is not None
    pbc, held = torch.tensor([[True, True, True], [True, False, True]]), atoms.batch_idx[mine]
    domain = Domain(atoms.positions[mine], atoms.cell, pbc, held, cutoff=3.0, group=group)
    system = System(atoms.positions[mine], cell=atoms.cell, batch_idx=held, pbc=pbc)
    for back in (domain.gather, domain.collect):
        found = back(domain.distribute(system)).pbc
        assert found is not None and torch.equal(found, pbc), found


@case(2)
def batches_without_atoms(group: Any) -> None:
    """They have as many systems as for one process."""
    x, none = torch.zeros(0, 3, dtype=F64), torch.zeros(0, dtype=torch.int32)
    cell, empty = torch.eye(3, dtype=F64), {"neighbor_list": torch.zeros(2, 0, dtype=torch.int32)}
    shifts = {"neighbor_shifts": torch.zeros(0, 3, dtype=torch.int32)}
    pairs = lennard_jones(1.0)
    for cells in (cell, cell.expand(3, 3, 3), cell.expand(0, 3, 3), None):
        near = empty if cells is None else empty | shifts
        options = {"sigma": 1.0, "epsilon": 1.0, "energy_reduction": "system"}
        expected = pairs(x, cells, batch_idx=none, **near, **options)
        domain = Domain(x, cells, batch_idx=none, cutoff=1.0, group=group)
        found = pairs(domain.distribute(x), cells, domain=domain, **options)
        assert found.shape == expected.shape, (cells, found, expected)


@case(2)
def values_that_do_not_fit(group: Any) -> None:
    """Rows, dtypes and shapes of one rank are an error on all, at once; and bad systems of a domain."""
    atoms, mine, here = Atoms(n=3), Atoms(n=3).mine(group), dist.get_rank(group) == 0
    x = atoms.positions[mine]
    domain = Domain(x, atoms.cell, cutoff=3.0, group=group)
    n, both = domain.n_owned, domain.n_owned + domain.n_ghosts

    methods = ((domain.distribute, len(x)), (domain.gather, n), (domain.with_ghosts, n), (domain.add_ghosts, both))
    for method, rows in methods:
        values = torch.zeros(rows, 3, dtype=F64)
        more, others = (torch.zeros(n_rows, 3, dtype=F64) for n_rows in (2 * rows + 1, abs(rows - 1)))
        for wrong in (more, others, values.float(), values[:, :2], values.numpy()):
            raises(lambda method=method, wrong=wrong, values=values: method(wrong if here else values), "`values`")
        raises(lambda method=method, rows=rows: method(torch.zeros(rows + 1)), f"({rows}, ...)")
    for method in (domain.sum, domain.sum_for_shares):
        for wrong in (torch.zeros(n + 1), torch.zeros(0), torch.zeros(n), torch.ones(2) > 0):
            values = torch.zeros(2, dtype=F64)
            raises(lambda method=method, wrong=wrong, values=values: method(wrong if here else values), "`values`")

    def made(cell: torch.Tensor = atoms.cell, **options: Any) -> Callable[[], Any]:
        return lambda: Domain(x, cell, cutoff=3.0, **{"group": group, **options})

    zeros, several = torch.zeros(len(x), dtype=torch.int32), atoms.cell.expand(2, 3, 3)
    raises(made(batch_idx=zeros if here else None), "`batch_idx` is needed")
    raises(made(batch_idx=zeros, num_systems=2 if here else None), "`num_systems` must be the same")
    raises(made(batch_idx=zeros, num_systems=3, cell=several), "`num_systems` = 3 does not fit")
    raises(made(num_systems=2), "`num_systems` = 2 does not fit")
    raises(made(batch_idx=zeros, num_systems=-1), "`num_systems` must not be negative")
    raises(made(batch_idx=zeros, num_systems=2.5), "`num_systems` must be an int")
    for grid in ((-2, -1, 1), 2, (2.0, 1, 1), (1, 1, 1)):
        raises(made(grid=grid), "`grid`")
    for weights in (torch.zeros(len(x)), torch.full((len(x),), float("nan")), torch.ones(len(x) + 1), 1.0):
        raises(made(weights=weights), "`weights`")
    raises(made(weights=torch.ones(len(x)) if here else None), "`weights` must be the same")
    raises(made(cuts=(2, 1, 1)), "`cuts`")
    more_ranks = dist.get_world_size(group) + 1
    others = domain.bricks._replace(shape=shape_of(more_ranks, None))
    raises(made(cuts=others), f"`cuts` are those of {more_ranks} ranks")
    raises(made(cuts=domain.bricks._replace(cut=domain.bricks.cut + here)), "`cuts` must be the same")
    raises(made(group=dist.GroupMember.NON_GROUP_MEMBER), "`group`: this rank is not in it")
    # and then normal work
    q = domain.distribute(atoms.charges[mine])
    found = dsf_coulomb(domain.distribute(x), q, 3.0, 0.2, atoms.cell, domain=domain)[0]
    assert_equal(found, dsf_coulomb(atoms.positions, atoms.charges, 3.0, 0.2, atoms.cell)[0], "afterwards")
