"""What the cases for several ranks share: systems, and the comparison with one process. See `ranks.py`."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from nvalchemiops.torch.distributed import Domain, OtherRankError, pencils
from nvalchemiops.torch.interactions.pair import PairPotential

F64 = torch.float64
CASES: dict[str, tuple[Callable[..., None], tuple[int, ...], int]] = {}
"""Cases by name, with sizes of groups on which they run and numbers of spare groups; the files of topics fill it."""

chosen = {"which": "some"}
"""Set by `ranks`: whether there is time for all."""

groups: dict[int, Any] = {}
"""The groups that all cases share, by size; each is made of the first ranks."""

spare: list[Any] = []
"""Other groups of the ranks of a case, which it may leave without order. All ranks make them, since some alone do not
give a group the same name, and only for cases that need them: a thread of each group wakes up every 10 ms."""

CUTOFF = 4.5
TOLERANCE = 1e-10
"""Relative to the largest entry, in float64."""

PAIRS_OF_CHARGES = PairPotential("q1*q2/r*exp(-r)", per_atom=("q",), cutoff=3.0)


def case(*sizes: int, n_spare: int = 0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """On groups of these sizes; on all where there is time."""

    def keep(function: Callable[..., None]) -> Callable[..., None]:
        CASES[function.__name__] = (function, sizes, n_spare)
        return function

    return keep


def assert_equal(found: torch.Tensor, expected: torch.Tensor, what: Any, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    if found.numel():
        found, expected = found.detach(), expected.detach()
        error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        assert error < tolerance, (what, error)


def computed_once(group: Any, function: Callable[[], Any]) -> Any:
    """What a function returns, which the first rank calls; the others wait for it, and leave it the cores."""
    found = [function() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(found, group=group, group_src=0)
    return found[0]


def raises(call: Callable[[], Any], text: str) -> None:
    """Raise unless all ranks raise, with this text: the one that is wrong, and those that learn of it."""
    try:
        call()
    except (ValueError, TypeError, OtherRankError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)


# -- systems --------------------------------------------------------------------------------------


class Atoms:
    """A displaced crystal in a skewed cell, as one system or as two that share a cell, with weights for losses."""

    def __init__(self, batch: bool = False, n: int = 6, dtype: torch.dtype = F64) -> None:
        generator = torch.Generator().manual_seed(n)
        axis = torch.arange(n, dtype=F64) * 1.6
        places = torch.cartesian_prod(axis, axis, axis)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=F64)

        self.count = len(places)
        self.positions = (places + 0.08 * random(self.count, 3)).to(dtype)
        self.cell = torch.tensor([[1.6 * n, 0, 0], [1.0, 1.6 * n, 0], [-1.0, 0.5, 1.6 * n]], dtype=dtype)
        self.charges, self.weights, self.vectors = random(self.count), random(self.count), random(self.count, 3)
        self.dyad = random(3, 3)
        self.numbers = torch.tensor([1, 6, 8])[torch.arange(self.count) % 3].int()
        self.batch_idx = (torch.arange(self.count) % 2).int() if batch else None
        self.cells = torch.stack([self.cell, self.cell]) if batch else self.cell

    def mine(self, group: Any) -> slice:
        """Atoms that this rank holds, unevenly divided: the last but one has none."""
        size = dist.get_world_size(group)
        edges = [self.count * r * (r + 1) // (size * (size + 1)) for r in range(size + 1)]
        if size > 2:
            edges[-2] = edges[-3]
        rank = dist.get_rank(group)
        return slice(edges[rank], edges[rank + 1])


def compare(
    group: Any,
    atoms: Atoms,
    energies_of: Callable[..., dict[str, torch.Tensor]],
    others: tuple[torch.Tensor, ...] = (),
    own: tuple[torch.Tensor, ...] = (),
) -> None:
    """Results, and first and second derivatives of a loss of them all, on a group and on one process.

    ``energies_of(positions, charges, cell, *own, *others, **where)`` returns results by name; those that begin with
    "atom" are own, others replicated. ``own`` are further values of the atoms.
    """
    mine, domain = atoms.mine(group), None
    is_own = [True, True, False, *(True for _ in own), *(False for _ in others)]

    def held(values: Any) -> list[torch.Tensor]:
        return [t[mine] if here else t for t, here in zip(values, is_own)]

    def loss(results: dict[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=F64)
        for name, value in results.items():
            if name.startswith("atom"):
                weights = atoms.weights if value.ndim == 1 else atoms.vectors
                weights = weights if value.ndim < 3 else weights.unsqueeze(2)
                here = weights if domain is None else domain.distribute(weights[mine])
                share = (value * here).sum()
                total = total + (share if domain is None else domain.sum(share))
            else:
                total = (
                    total
                    + (value * (atoms.dyad if value.ndim == 3 else 1.0)).sum()
                    + (1.0 + value.square().sum()).log()
                )
        return total

    def size(gradients: Any) -> torch.Tensor:
        """A function of all entries of all gradients."""
        sums = [g.square().sum() for g in gradients]
        if domain is not None:
            sums = [domain.sum(s) if here else s for s, here in zip(sums, is_own)]
        return sum((1.0 + s).log() for s in sums)

    given = (atoms.positions, atoms.charges, atoms.cell, *own, *others)
    cells = (lambda cell: cell) if atoms.batch_idx is None else (lambda cell: torch.stack([cell, cell]))

    def of_one_process() -> Any:
        whole = [t.clone().requires_grad_() for t in given]
        where = {} if atoms.batch_idx is None else {"batch_idx": atoms.batch_idx}
        results = energies_of(whole[0], whole[1], cells(whole[2]), *whole[3:], **where)
        first = torch.autograd.grad(loss(results), whole, create_graph=True, allow_unused=True, materialize_grads=True)
        second = torch.autograd.grad(size(first), whole, allow_unused=True, materialize_grads=True)
        return {name: t.detach() for name, t in results.items()}, [t.detach() for t in first], second

    expected, first, second = computed_once(group, of_one_process)

    leaves = [t.clone().requires_grad_() for t in held(given)]
    batch_idx = None if atoms.batch_idx is None else atoms.batch_idx[mine]
    domain = Domain(leaves[0], atoms.cells, batch_idx=batch_idx, cutoff=CUTOFF, group=group)
    x, q, cell, *rest = (domain.distribute(t) if here else t for t, here in zip(leaves, is_own))
    found = energies_of(x, q, cells(cell), *rest, domain=domain)
    for name, value in found.items():
        here = domain.gather(value) if name.startswith("atom") else value
        assert_equal(here, expected[name][mine] if name.startswith("atom") else expected[name], name)
    gradients = torch.autograd.grad(loss(found), leaves, create_graph=True, allow_unused=True, materialize_grads=True)
    higher = torch.autograd.grad(size(gradients), leaves, allow_unused=True, materialize_grads=True)
    for order, (ours, theirs) in enumerate(((gradients, first), (higher, second)), 1):
        for k, (a, b) in enumerate(zip(ours, held(theirs))):
            assert_equal(a, b, f"derivative {order} by argument {k}")


def on_grid(grid: tuple[int, int]) -> Any:
    """A context in which meshes are divided on this grid of ranks."""
    return mock.patch.object(pencils, "grid_for", lambda *_: grid)


def rows_of_owned(domain: Domain, positions: torch.Tensor, cutoff: float) -> list[tuple[int, ...]]:
    """Pairs of the owned atoms by their numbers, with shifts."""
    rows = domain.neighbors(positions, cutoff)
    numbers = domain.with_ghosts(domain.global_index)
    assert rows.pointers is not None
    first = torch.repeat_interleave(rows.pointers.diff())
    keep = first < domain.n_owned
    columns = [numbers[first[keep]].unsqueeze(1), numbers[rows.neighbors.long()[keep]].unsqueeze(1)]
    if rows.shifts is not None:
        columns.append(rows.shifts[keep])
    return sorted(map(tuple, torch.cat(columns, 1).tolist()))
