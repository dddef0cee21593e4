"""Fourier sums over atoms: what spreading and gathering compute, and how they differentiate."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvalchemiops.kernels.moments import components, count
from nvalchemiops.torch.interactions.electrostatics.terms.reciprocal import sorted_atoms
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators import fourier
from nvalchemiops.torch.operators.fourier import fourier_gather, fourier_spread
from tests.lanes.fibers import gpu_layout
from tests.support.comparing import close_to_largest

SIGNS = torch.tensor([[1, 1, 1], [1, 1, -1], [1, -1, 1], [1, -1, -1]], dtype=torch.float64)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Problem:
    """Atoms and points of several systems: coordinates, and the plan as the ops take it."""

    def __init__(self, n_atoms=(5,), n_points=(7,), channels=1, seed=0, shared_columns=True, shuffled=True):
        generator = torch.Generator().manual_seed(seed)
        n_systems = len(n_atoms)
        self.system = torch.arange(n_systems, dtype=torch.int32).repeat_interleave(torch.tensor(n_atoms))
        if shuffled:
            self.system = self.system[torch.randperm(len(self.system), generator=generator)]
        order, atom_begin = sorted_atoms(self.system if n_systems > 1 else None, n_systems, sum(n_atoms), "cpu")
        limit = torch.tensor([2, 2, 9] if shared_columns else [7, 7, 3])
        points = (torch.rand(sum(n_points), 3, generator=generator) * limit).int()
        begin = torch.tensor([0, *itertools.accumulate(n_points)], dtype=torch.int32)
        self.point_system = torch.arange(n_systems).repeat_interleave(torch.tensor(n_points))
        # points of a column stand together
        rank = points[:, 0] * 100 + points[:, 1] * 10 + 1000 * self.point_system
        self.points = points[torch.sort(rank, stable=True)[1]].contiguous() if shared_columns else points
        self.plan = (order, atom_begin, self.points, begin)
        self.coordinates = 3.0 * draw(sum(n_atoms), 3, seed=seed)
        self.channels = channels

    def moments(self, derivatives, seed=1):
        return draw(len(self.system), self.channels, count(derivatives), seed=seed)

    def field(self, seed=2):
        return draw(self.channels, len(self.points), 4, 2, seed=seed)

    def phases(self, coordinates, derivatives):
        """Factors (n_atoms, n_moments, n_points, 4) of all moments, zero between systems."""
        n = self.points.double().unsqueeze(1) * SIGNS  # (n_points, 4, 3)
        phase = 2.0 * torch.pi * torch.einsum("pwa,ia->ipw", n, coordinates)
        wave = torch.polar(torch.ones_like(phase), phase)
        turn = 2j * torch.pi * n
        factors = [turn[..., 0] ** a * turn[..., 1] ** b * turn[..., 2] ** c for a, b, c in components(derivatives)]
        here = (self.system.long()[:, None] == self.point_system).unsqueeze(-1)
        return torch.stack(factors) * (wave * here).unsqueeze(1)

    def spread(self, moments, coordinates, derivatives):
        return torch.view_as_real(
            torch.einsum("icm,impw->cpw", moments.to(torch.complex128), self.phases(coordinates, derivatives))
        )

    def gather(self, field, coordinates, derivatives):
        waves = self.phases(coordinates, derivatives)
        return torch.einsum("cpw,impw->icm", torch.view_as_complex(field.contiguous()).conj(), waves).real


close = functools.partial(close_to_largest, least=1.0)


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("derivatives", [0, 1, 2, 3])
@pytest.mark.parametrize("channels", [1, 2])
def test_spread_and_gather_equal_the_sums_that_define_them(derivatives, channels):
    """In a batch, with atoms in no order."""
    p = Problem((5, 11, 1), (9, 4, 20), channels)
    moments, field = p.moments(derivatives), p.field()
    found = [
        fourier_spread(moments, p.coordinates, *p.plan, derivatives),
        fourier_gather(field, p.coordinates, *p.plan, derivatives),
    ]
    close(found, [p.spread(moments, p.coordinates, derivatives), p.gather(field, p.coordinates, derivatives)])
    # transposes: <F, spread(m)> = <gather(F), m>
    close([(field * found[0]).sum()], [(moments * found[1]).sum()])


@pytest.mark.parametrize("n_atoms", [1, 7, 8, 9, 15, 16, 17, 33, 129, 130])
def test_any_number_of_atoms(n_atoms):
    """Vectors of 8 atoms, chunks of 16 of them."""
    p = Problem((n_atoms, n_atoms + 1), (5, 3))
    close([fourier_spread(p.moments(1), p.coordinates, *p.plan, 1)], [p.spread(p.moments(1), p.coordinates, 1)])
    close([fourier_gather(p.field(), p.coordinates, *p.plan, 0)], [p.gather(p.field(), p.coordinates, 0)])


def test_a_table_with_more_entries_than_a_gpu_can_number_is_left_out(monkeypatch):
    """That of 45 million atoms: a thread whose number is negative writes in front of the table."""
    p = Problem((70, 9), (11, 5))
    threads = 3 * 16 * 79
    expected, launched = p.spread(p.moments(1), p.coordinates, 1), []

    def counted(kernel, dim, *arguments, **options):
        launched.append(dim)
        launch(kernel, dim, *arguments, **options)

    monkeypatch.setattr(fourier, "launch", counted)
    for most, n_tables in ((threads, 1), (threads - 1, 0)):
        monkeypatch.setattr(fourier, "MOST_NUMBERED", most)
        launched.clear()
        with gpu_layout():
            close([fourier_spread(p.moments(1), p.coordinates, *p.plan, 1)], [expected])
        assert launched.count(threads) == n_tables


@pytest.mark.parametrize("n_points", [1, 2, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("shared", [True, False])
def test_any_number_of_points(n_points, shared):
    """Blocks of 16 points; those with equal first indices share work."""
    p = Problem((6, 3), (n_points, n_points + 2), shared_columns=shared)
    close([fourier_spread(p.moments(0), p.coordinates, *p.plan, 0)], [p.spread(p.moments(0), p.coordinates, 0)])
    close([fourier_gather(p.field(), p.coordinates, *p.plan, 1)], [p.gather(p.field(), p.coordinates, 1)])


@pytest.mark.parametrize("derivatives", [0, 1, 2, 3])
def test_more_atoms_and_points_than_a_block(derivatives):
    """Blocks of 32 points, and of 256 atoms; some k-vectors have zeros, and others none, along each axis."""
    p = Problem((300, 9), (70, 40))
    assert (p.points == 0).any(0).all()
    assert ((p.points > 0).all(1)).any()
    moments, field = p.moments(derivatives), p.field()
    close(
        [fourier_spread(moments, p.coordinates, *p.plan, derivatives)], [p.spread(moments, p.coordinates, derivatives)]
    )
    close([fourier_gather(field, p.coordinates, *p.plan, derivatives)], [p.gather(field, p.coordinates, derivatives)])


@given(
    n_atoms=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    n_points=st.integers(0, 20),
    derivatives=st.integers(0, 1),
    channels=st.integers(1, 3),
    seed=st.integers(0, 1000),
    shared=st.booleans(),
)
@settings(max_examples=25)
def test_any_problem(n_atoms, n_points, derivatives, channels, seed, shared):
    p = Problem(n_atoms, [max(0, n_points - 3 * k) for k in range(len(n_atoms))], channels, seed, shared)
    moments, field = p.moments(derivatives), p.field()
    close(
        [
            fourier_spread(moments, p.coordinates, *p.plan, derivatives),
            fourier_gather(field, p.coordinates, *p.plan, derivatives),
        ],
        [p.spread(moments, p.coordinates, derivatives), p.gather(field, p.coordinates, derivatives)],
    )


def test_the_order_of_atoms_is_theirs():
    """Sorted or not, with an order or without."""
    p = Problem((4, 6), shuffled=False, n_points=(5, 6))
    order, *rest = p.plan
    moments = p.moments(0)
    assert torch.equal(order, torch.arange(10, dtype=torch.int32))
    expected = fourier_spread(moments, p.coordinates, *p.plan, 0)
    assert torch.equal(fourier_spread(moments, p.coordinates, None, *rest, 0), expected)
    mixed = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    plan = sorted_atoms(p.system[mixed], 2, 10, "cpu")
    close([fourier_spread(moments[mixed], p.coordinates[mixed], *plan, *rest[1:], 0)], [expected], 1e-13)


def test_an_integer_number_of_turns_changes_nothing():
    """Large coordinates lose the digits that they do not have, and no more."""
    p = Problem((6,), (12,))
    inside = p.coordinates - p.coordinates.round()
    expected = [fourier_spread(p.moments(0), inside, *p.plan, 0), fourier_gather(p.field(), inside, *p.plan, 1)]
    for turns in (1.0, -7.0, 2.0**20):
        far = inside + turns
        found = [fourier_spread(p.moments(0), far, *p.plan, 0), fourier_gather(p.field(), far, *p.plan, 1)]
        # a coordinate of size 2^20 is rounded to 1e-10; the phase is that times 2π n
        close(found, expected, 1e-13 if turns < 10 else 1e-7)
    exact = p.coordinates.mul(2**10).round() / 2**10
    found = fourier_spread(p.moments(0), exact + 2.0**30, *p.plan, 0)
    close([found], [fourier_spread(p.moments(0), exact, *p.plan, 0)], 1e-13)


def test_high_multiples_keep_their_digits():
    """Multiples of a phase come from products of tables: errors grow with their logarithm."""
    p = Problem((9,), (1,))
    order, begin, _, point_begin = p.plan
    p.points = torch.tensor([[97, 255, 1000]], dtype=torch.int32)
    inside = p.coordinates - p.coordinates.round()
    plan = (order, begin, p.points, point_begin)
    close([fourier_spread(p.moments(0), inside, *plan, 0)], [p.spread(p.moments(0), inside, 0)], 1e-11)


def test_nan_stays_in_its_system():
    p = Problem((5, 9, 3), (6, 6, 6))
    coordinates = p.coordinates.clone()
    hurt = (p.system == 1).nonzero()[2]
    coordinates[hurt, 1] = torch.nan
    expected = fourier_spread(p.moments(0), p.coordinates, *p.plan, 0)
    found = fourier_spread(p.moments(0), coordinates, *p.plan, 0)
    others = p.point_system != 1
    assert torch.equal(found[:, others], expected[:, others])
    gathered = fourier_gather(p.field(), coordinates, *p.plan, 1)
    assert gathered[hurt].isnan().all()
    mine = torch.ones(17, dtype=torch.bool)
    mine[hurt] = False
    assert torch.equal(gathered[mine], fourier_gather(p.field(), p.coordinates, *p.plan, 1)[mine])
    # NaN in a charge, and in the field, likewise
    moments = p.moments(0)
    moments[hurt] = torch.nan
    assert torch.equal(fourier_spread(moments, p.coordinates, *p.plan, 0)[:, others], expected[:, others])
    field = p.field()
    field[:, p.point_system == 1] = torch.nan
    found = fourier_gather(field, p.coordinates, *p.plan, 0)
    assert found.isnan().flatten().equal(p.system == 1)


@pytest.mark.parametrize(("n_atoms", "n_points"), [((0,), (5,)), ((4,), (0,)), ((0, 3), (2, 2)), ((3, 3), (0, 4))])
def test_nothing_to_add_is_zero(n_atoms, n_points):
    p = Problem(n_atoms, n_points)
    spread = fourier_spread(p.moments(1), p.coordinates, *p.plan, 1)
    gathered = fourier_gather(p.field(), p.coordinates, *p.plan, 1)
    close([spread, gathered], [p.spread(p.moments(1), p.coordinates, 1), p.gather(p.field(), p.coordinates, 1)])


# -- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("derivatives", [0, 1])
@pytest.mark.parametrize("op", ["spread", "gather"])
def test_first_and_second_derivatives(op, derivatives):
    p = Problem((2, 3), (3, 2), 2)
    values = p.moments(derivatives) if op == "spread" else p.field()
    call = fourier_spread if op == "spread" else fourier_gather

    def function(values, coordinates):
        return call(values, coordinates, *p.plan, derivatives)

    inputs = (values.requires_grad_(), p.coordinates.requires_grad_())
    # derivatives multiply by 2π n, up to 50 here: relative to that
    assert torch.autograd.gradcheck(function, inputs, eps=1e-6, atol=1e-4, rtol=1e-5, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, eps=1e-6, atol=1e-2, rtol=1e-5, fast_mode=True)


@pytest.mark.parametrize("op", ["spread", "gather"])
def test_three_orders_equal_those_of_the_reference(op):
    p = Problem((4, 3), (6, 5), 2)
    values = p.moments(0) if op == "spread" else p.field()
    ours = fourier_spread if op == "spread" else fourier_gather
    theirs = p.spread if op == "spread" else p.gather
    results = []
    for function in (lambda v, u: ours(v, u, *p.plan, 0), lambda v, u: theirs(v, u, 0)):
        v, u = values.clone().requires_grad_(), (0.1 * p.coordinates).requires_grad_()
        value = function(v, u)
        found, scalar = [], (value * draw(*value.shape, seed=5)).sum()
        for order in range(3):
            slopes = torch.autograd.grad(scalar, (v, u), create_graph=True)
            found += [s.detach() for s in slopes]
            scalar = sum((s * draw(*s.shape, seed=6 + order)).sum() for s in slopes)
        results.append(found)
    close(*results)


# -- vmap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["spread", "gather"])
@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (0, 0), (1, 2)])
@pytest.mark.parametrize("n_atoms", [(5,), (3, 4)])
def test_vmap_equals_a_loop(op, in_dims, n_atoms):
    """Values mapped, coordinates mapped, both; along any dimension; one system, or several."""
    p = Problem(n_atoms, (6, 5)[: len(n_atoms)], 2)
    values = p.moments(1) if op == "spread" else p.field()
    call = fourier_spread if op == "spread" else fourier_gather

    def several(tensor, dim, seed):
        return (
            tensor if dim is None else torch.stack([tensor + k * draw(*tensor.shape, seed=seed) for k in range(3)], dim)
        )

    mapped = [several(t, d, seed) for t, d, seed in zip((values, p.coordinates), in_dims, (1, 2))]

    def function(values, coordinates):
        return call(values, coordinates, *p.plan, 1)

    def one(k):
        return function(*(t if d is None else t.select(d, k) for t, d in zip(mapped, in_dims)))

    close([torch.func.vmap(function, in_dims)(*mapped)], [torch.stack([one(k) for k in range(3)])], 1e-13)

    def slopes(values, coordinates):
        return torch.func.grad(lambda v, u: function(v, u).sin().sum(), argnums=(0, 1))(values, coordinates)

    found = torch.func.vmap(slopes, in_dims)(*mapped)
    singles = [slopes(*(t if d is None else t.select(d, k) for t, d in zip(mapped, in_dims))) for k in range(3)]
    # sines of large sums
    close(found, [torch.stack(parts) for parts in zip(*singles)], 1e-10)


def test_vmap_over_the_plan_says_what_can_be_mapped():
    p = Problem()
    (order, begin, points, point_begin), moments = p.plan, p.moments(0)
    with pytest.raises(NotImplementedError, match="`atom_begin`"):
        torch.func.vmap(lambda n: fourier_spread(moments, p.coordinates, order, n, points, point_begin, 0))(
            begin.expand(2, *begin.shape)
        )


# -- reproducible ---------------------------------------------------------------------------------


def test_threads_and_runs_do_not_change_a_bit(threads, always_split):
    p = Problem((40, 33, 90), (50, 20, 33), 2)
    found = []
    for number in (1, 2, 3, 2):
        threads(number)
        found.append(
            [
                fourier_spread(p.moments(1), p.coordinates, *p.plan, 1),
                fourier_gather(p.field(), p.coordinates, *p.plan, 1),
                fourier_gather(p.field(), p.coordinates, *p.plan, 0),
            ]
        )
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_system_alone_has_the_bits_of_a_member_of_a_batch():
    """Atoms of a system stand in vectors of their own."""
    p = Problem((5, 12, 8), (6, 9, 3))
    together = fourier_gather(p.field(), p.coordinates, *p.plan, 1)
    order, begin, points, point_begin = p.plan
    for number in range(3):
        atoms = order[begin[number] : begin[number + 1]].long()
        mine = slice(int(point_begin[number]), int(point_begin[number + 1]))
        plan = (
            *sorted_atoms(None, 1, len(atoms), "cpu"),
            points[mine],
            torch.tensor([0, mine.stop - mine.start]).int(),
        )
        alone = fourier_gather(p.field()[:, mine].contiguous(), p.coordinates[atoms], *plan, 1)
        assert torch.equal(alone, together[atoms])
