"""The op for the coefficients of D3: weights of reference states, and their derivatives of every order."""

import functools

import pytest
import torch

from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping, coefficients, d3_dispersion
from nvalchemiops.torch.interactions.dispersion.coefficients import d3_coefficients

F64, K3 = torch.float64, -4.0
N_STATES, N_COEFFICIENTS = 7, 11


@pytest.fixture
def tables():
    """Two elements with four and three states, one that is unknown, and padding."""
    torch.manual_seed(0)
    references = torch.rand(4, 4, dtype=F64) * 3.0
    references[1, 3] = 0.0
    references[2], references[3] = torch.nan, 0.0
    places = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7], [7, 7, 7, 7], [7, 7, 7, 7]], dtype=torch.int32)
    vectors = torch.randn(N_STATES + 1, N_COEFFICIENTS, dtype=F64)
    vectors[-1] = 0.0
    return references, places, vectors


def expected(coordination, row, references, places, vectors):
    """The same by a softmax over the states that are there."""
    there = places[row.long()] < N_STATES
    exponents = K3 * (coordination.unsqueeze(1) - references[row.long()]) ** 2
    weights = torch.softmax(exponents.masked_fill(~there, -torch.inf), 1)
    return (weights.unsqueeze(2) * vectors[places[row.long()].long()]).sum(1)


def atoms(n=9):
    coordination = torch.linspace(-0.5, 5.0, n, dtype=F64).requires_grad_()
    return coordination, (torch.arange(n) % 2).to(torch.int32)


def slope_of(function):
    """By each coordination number, on which a row of results depends alone."""
    return lambda coordination: torch.func.jvp(function, (coordination,), (torch.ones_like(coordination),))[1]


@pytest.mark.parametrize("derivative", range(5))
def test_every_order_is_the_derivative_of_the_one_before(tables, derivative):
    coordination, row = (t.detach() for t in atoms())
    function = functools.partial(expected, row=row, references=tables[0], places=tables[1], vectors=tables[2])
    for _ in range(derivative):
        function = slope_of(function)
    found = d3_coefficients(coordination, row, *tables, K3, derivative)
    for a, b in zip(found, (function(coordination), slope_of(function)(coordination))):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-12 * float(b.abs().max()) * 4**derivative)


def test_gradients(tables):
    coordination, row = atoms(5)

    def both(coordination):
        return d3_coefficients(coordination, row, *tables, K3, 0)

    assert torch.autograd.gradcheck(both, coordination)
    assert torch.autograd.gradgradcheck(both, coordination)


def test_where_all_exponentials_vanish(tables):
    """The weight of the closest state is one, not zero over zero."""
    row = torch.zeros(2, dtype=torch.int32)
    found, slopes = d3_coefficients(torch.tensor([60.0, -60.0], dtype=F64), row, *tables, K3, 0)
    references, places, vectors = tables
    torch.testing.assert_close(found[0], vectors[places[0, references[0].argmax()].long()])
    torch.testing.assert_close(found[1], vectors[places[0, references[0].argmin()].long()])
    assert float(slopes.abs().max()) < 1e-12


def test_unknown_elements_padding_and_bad_numbers(tables):
    coordination = torch.tensor([1.0, 1.0, torch.nan, 1.0], dtype=F64)
    found = d3_coefficients(coordination, torch.tensor([2, 3, 0, 0], dtype=torch.int32), *tables, K3, 0)
    for values in found:
        assert values[0].isnan().all() and values[2].isnan().all()
        assert not values[1].any() and values[3].isfinite().all()


def test_under_vmap(tables):
    coordination, row = torch.rand(3, 4, dtype=F64) * 4.0, torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    for rows, dim in ((row, None), (torch.stack([row, 1 - row, row], 1), 1)):
        found = torch.vmap(lambda c, r: d3_coefficients(c, r, *tables, K3, 0), (0, dim))(coordination, rows)
        for k in range(3):
            one = d3_coefficients(coordination[k], rows if dim is None else rows[:, k], *tables, K3, 0)
            assert all(torch.equal(a[k], b) for a, b in zip(found, one))
    with pytest.raises(NotImplementedError, match="reference states"):
        torch.vmap(lambda v: d3_coefficients(coordination[0], row, *tables[:2], v, K3, 0))(tables[2].expand(2, -1, -1))


def test_there_is_room_for_so_many_reference_molecules():
    """More of them are taken pair by pair."""
    x, numbers = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 4.0]], dtype=F64), torch.tensor([1, 2])
    found = []
    for n in (coefficients.kernels.MOST_REFERENCES, coefficients.kernels.MOST_REFERENCES + 1):
        tables = {"rcov": torch.ones(3), "r4r2": torch.ones(3), "c6ab": torch.ones(3, 3, n, n)}
        made = D3Parameters(**tables, cn_ref=torch.ones(3, n), interp_mesh=n)
        assert (made.states([1]).pair_c6 is None) == (n == coefficients.kernels.MOST_REFERENCES)
        found.append(d3_dispersion(x, numbers, RationalDamping(0.4, 4.0, 0.8), made, cutoff=20.0)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-13, atol=0.0)
