"""Random systems on several ranks, as hypothesis draws them on rank 0; it shrinks what fails. See `ranks.py`."""

import itertools
import math
import traceback
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemiops.torch.distributed import Domain
from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors import neighbor_list
from tests.distributed.common import F64, TOLERANCE, case, chosen, on_grid, rows_of_owned

EXAMPLES = {"some": 6, "all": 60}


class Drawn(NamedTuple):
    """A random batch of systems, by the numbers that it follows from."""

    seed: int
    counts: tuple[int, ...]  # atoms of each system
    pbc: tuple[bool, bool, bool]
    place: str
    length: float
    cutoff: float
    with_grid: bool
    with_weights: bool


def drawn() -> st.SearchStrategy[Drawn]:
    return st.builds(
        Drawn,
        st.integers(0, 10**6),
        st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple).filter(lambda counts: sum(counts) > 0),
        st.one_of(st.just((True, True, True)), st.tuples(st.booleans(), st.booleans(), st.booleans())),
        st.sampled_from(["everywhere", "corner", "plane", "unwrapped"]),
        st.floats(3.0, 12.0),
        st.floats(1.5, 6.0),
        st.booleans(),
        st.booleans(),
    )


@case(4)
def random_systems(group: Any) -> None:
    """Cells, periodicities, densities and batches as hypothesis draws them on rank 0; it shrinks what fails."""
    rank, main = dist.get_rank(group), dist.get_global_rank(group, 0)

    def on_all(example: Drawn | None) -> bool:
        told = [example]
        dist.broadcast_object_list(told, src=main, group=group)
        if told[0] is None:
            return False
        every: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, _check_drawn(group, told[0]), group=group)
        found = [text for text in every if text]
        assert rank > 0 or not found, "\n".join(sorted(found, key=lambda text: "OtherRankError" in text))
        return True

    if rank > 0:
        while on_all(None):
            pass
        return

    @settings(max_examples=EXAMPLES[chosen["which"]], deadline=None, database=None, derandomize=True)
    @given(drawn())
    def check(example: Drawn) -> None:
        on_all(example)

    try:
        check()
    finally:
        on_all(None)


def _check_drawn(group: Any, example: Drawn) -> str:
    """What is wrong on this rank. An assertion in the middle would leave the others in a collective call."""
    wrong: list[str] = []
    try:
        _compare_drawn(group, example, wrong)
    except Exception:
        wrong.append(traceback.format_exc())
    return "\n".join(wrong)


def _compare_drawn(group: Any, example: Drawn, wrong: list[str]) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(example.seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=F64)

    n_systems, n = len(example.counts), sum(example.counts)
    cells = example.length * (torch.eye(3, dtype=F64) + 0.3 * (random(n_systems, 3, 3) - 0.5))
    batch_idx = torch.repeat_interleave(torch.arange(n_systems), torch.tensor(example.counts)).int()
    places = random(n, 3)
    if example.place == "corner":
        places = 0.2 * places
    elif example.place == "plane":
        places[:, int(example.seed) % 3] *= 0.05
    elif example.place == "unwrapped":
        places = 6.0 * places - 3.0
    x = (places.unsqueeze(1) @ cells[batch_idx.long()]).squeeze(1)
    q, dipoles = random(n) - 0.5, random(n, 3) - 0.5
    pbc, whole = torch.tensor(example.pbc), n_systems == 1
    cell, told = (cells[0], {}) if whole else (cells, {"batch_idx": batch_idx})
    ends = [n * k // size for k in range(size)] + [n]
    if example.seed % 2:
        ends = [0] * size + [n]  # the last rank holds all
    mine = slice(ends[rank], ends[rank + 1])
    grids = [g for g in itertools.product(range(1, size + 1), repeat=3) if math.prod(g) == size]
    grid = grids[example.seed % len(grids)] if example.with_grid else None
    cutoff = example.cutoff
    held = None if whole else batch_idx[mine]
    number = None if whole else n_systems
    weights = 10.0 ** random(n)[mine] if example.with_weights else None
    domain = Domain(
        x[mine], cell, pbc, held, cutoff=cutoff, grid=grid, weights=weights, num_systems=number, group=group
    )
    own, charges = domain.distribute(x[mine]), domain.distribute(q[mine])
    pairs, _, shifts = neighbor_list(x, cutoff, cell, pbc, return_neighbor_list=True, **told)
    keep = torch.isin(pairs[0].long(), domain.global_index)
    expected_rows = sorted(map(tuple, torch.cat([pairs.T[keep], shifts[keep]], 1).tolist()))
    if rows_of_owned(domain, own, cutoff) != expected_rows:
        wrong.append(f"neighbors: {example}, {domain.bricks}")
    near = {"neighbor_list": pairs, "neighbor_shifts": shifts}

    def compare_results(what: str, found: Any, expected: Any) -> None:
        *of_atoms, virial = found
        values = [(domain.gather(ours), expected[k][mine], expected[k]) for k, ours in enumerate(of_atoms)]
        for k, (ours, theirs, whole) in enumerate([*values, (virial, expected[-1], expected[-1])]):
            scale = float(whole.abs().max())  # of all ranks: the share of one may be zero
            error = float((ours - theirs).abs().max()) if ours.numel() else 0.0
            if not error <= TOLERANCE * max(scale, 1e-6):
                wrong.append(f"{what} {k}: {error} of {scale}, {example}, {domain.bricks}")

    asked = {"compute_forces": True, "compute_gradients": ("q",), "compute_virial": True}
    names = {} if whole else {"num_systems": n_systems, **told}
    screened = PairPotential("q1*q2/r*exp(-r)", per_atom=("q",), cutoff=cutoff)
    expected = screened(x, cell, q=q, **near, **names, **asked)
    compare_results("pairs", screened(own, cell, q=charges, domain=domain, **asked), expected)
    if not all(example.pbc):
        return
    asked = {"compute_forces": True, "compute_charge_gradients": True, "compute_virial": True}
    meshes = ((12, 10, 14), (9, 11, 7), (5, 6, 5))
    mesh = {"mesh_dimensions": meshes[example.seed % 3], "spline_order": 5}
    two = [(r, c) for r, c in itertools.product(range(1, size + 1), repeat=2) if r * c <= size]
    sums = ((ewald_summation, {"k_cutoff": 3.0}), (particle_mesh_ewald, mesh))
    for call, more in sums:
        expected = call(x, q, cell, 0.7, cutoff=cutoff, **told, **more, **asked)
        with on_grid(two[example.seed % len(two)]):
            found = call(own, charges, cell, 0.7, cutoff=cutoff, domain=domain, **more, **asked)
        compare_results(call.__name__, found, expected)
        asked_more = {"compute_dipole_gradients": True, "surface_dielectric": 2.0, **asked}
        expected = call(x, q, cell, 0.7, cutoff=cutoff, dipoles=dipoles, widths=0.4, **told, **more, **asked_more)
        sources = {"dipoles": domain.distribute(dipoles[mine]), "widths": 0.4}
        found = call(own, charges, cell, 0.7, cutoff=cutoff, domain=domain, **sources, **more, **asked_more)
        compare_results(f"dipoles, {call.__name__}", found, expected)
