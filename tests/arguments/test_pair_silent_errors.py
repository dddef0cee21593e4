"""What a review found: inputs that gave plausible wrong numbers, or errors that helped nobody."""

import itertools

import pytest
import torch

from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors import neighbor_list

X = torch.tensor([[0.0, 0.0, 0.0], [1.5, 0.0, 0.0], [0.0, 1.7, 0.3]], dtype=torch.float64)
Q = torch.tensor([1.0, -2.0, -0.5], dtype=torch.float64)
PAIRS = torch.tensor([[0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1]])
COULOMB = PairPotential("q1*q2/r", ("q",))


def test_no_unsorted_list_passes():
    right = COULOMB(X, neighbor_list=PAIRS, q=Q)
    for order in itertools.permutations(range(6)):
        pairs = PAIRS[:, list(order)]
        if bool((pairs[0].diff() >= 0).all()):
            torch.testing.assert_close(COULOMB(X, neighbor_list=pairs, q=Q), right)
            continue
        for ptr in (None, torch.tensor([0, 2, 4, 6])):
            with pytest.raises(ValueError, match=r"sorted.*order = neighbor_list\[0\].argsort"):
                COULOMB(X, neighbor_list=pairs, neighbor_ptr=ptr, q=Q)


@pytest.mark.parametrize("number", [2**32, -(2**32), 2**31, -(2**31), -(2**31) - 1])
def test_numbers_beyond_32_bits_are_no_atoms(number):
    pairs = PAIRS.clone()
    pairs[1, 0] = number + (pairs[1, 0] if abs(number) > 2**31 else 0)
    with pytest.raises(ValueError, match="does not exist"):
        COULOMB(X, neighbor_list=pairs, q=Q)
    with pytest.raises(ValueError, match="does not exist"):
        COULOMB(X, neighbor_matrix=pairs[1].reshape(3, 2), q=Q)
    if number == -(2**31):
        with pytest.raises(ValueError, match="does not exist"):
            COULOMB(X, neighbor_list=pairs.int(), q=Q)
        with pytest.raises(ValueError, match="fill_value"):
            COULOMB(X, neighbor_list=pairs, fill_value=number, q=Q)
    batch_idx = torch.zeros(3, dtype=torch.int64)
    batch_idx[1] += number
    with pytest.raises(ValueError, match="batch_idx"):
        COULOMB(X, neighbor_list=PAIRS, q=Q, batch_idx=batch_idx, num_systems=1)


@pytest.mark.parametrize("unsorted_first", [True, False])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_of_two_mistakes_the_same_is_reported(unsorted_first, n_threads, threads, always_split):
    """Whichever row has it, and whichever thread is first."""
    threads(n_threads)
    pairs, ptr = PAIRS.clone(), torch.tensor([0, 2, 4, 6])
    for _ in range(3):  # the first launch is not split
        pairs[:] = PAIRS
        COULOMB(X, neighbor_list=pairs, neighbor_ptr=ptr, q=Q)
        pairs[0, 0 if unsorted_first else 5] = 1
        pairs[1, 5 if unsorted_first else 0] = 7
        with pytest.raises(ValueError, match=r"sorted.*order = neighbor_list\[0\].argsort"):
            COULOMB(X, neighbor_list=pairs, neighbor_ptr=ptr, q=Q)


def test_a_wrong_number_is_no_atom_of_another_slice():
    matrix, _ = neighbor_list(X, 5.0)
    matrix[1, 0] = 4  # would be an atom of the next slice
    slices = torch.stack([X, X + 1.0, X * 1.1])
    with pytest.raises(ValueError, match="does not exist"):
        torch.func.vmap(lambda x: COULOMB(x, neighbor_matrix=matrix, q=Q))(slices)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("sqrt((q1 - q2)^2)/r", lambda a, b, r: (a - b).abs() / r),
        ("sqrt(q1^2*q2^2)/r", lambda a, b, r: (a * b).abs() / r),
        ("(q1^2)^(1/3)*(q2^2)^(1/3)/r", lambda a, b, r: (a * b).abs() ** (2 / 3) / r),
        ("sqrt(max(q1, q2)^2)*r", lambda a, b, r: torch.maximum(a, b).abs() * r),
    ],
)
def test_roots_of_squares(text, plain):
    q, x = Q.clone().requires_grad_(), X.clone().requires_grad_()
    energies, forces, slopes = PairPotential(text, ("q",))(
        x, neighbor_list=PAIRS, q=q, compute_forces=True, compute_gradients=["q"]
    )
    i, j = PAIRS
    expected = 0.5 * plain(q[i], q[j], (x[i] - x[j]).norm(dim=1)).sum()
    gradients = torch.autograd.grad(expected, (x, q), create_graph=True)
    torch.testing.assert_close(energies.sum(), expected)
    torch.testing.assert_close((-forces, slopes), gradients)
    curvature = torch.autograd.grad(forces.square().sum() + slopes.square().sum(), (x, q))
    squares = sum(g.square().sum() for g in gradients)
    torch.testing.assert_close(curvature, torch.autograd.grad(squares, (x, q)))


def test_powers_of_zero_and_what_a_selection_does_not_take():
    """As at the cutoff, where the energy is shifted by them: powers have the derivative zero, sympy has none."""
    text = "(1 - r/cutoff)^n*r + 0^n + select(step(cutoff - n), 0, 1/(cutoff - r))"
    x, n = X.clone().requires_grad_(), torch.tensor(2.5, dtype=X.dtype, requires_grad=True)
    energy = PairPotential(text, (), ("n",), cutoff=9.0, shifted=True)(x, neighbor_list=PAIRS, n=n).sum()
    r = (x[PAIRS[0]] - x[PAIRS[1]]).norm(dim=1)
    expected = 0.5 * ((1.0 - r / 9.0) ** n * r).sum()
    for _ in range(3):  # energies, gradients, second derivatives
        torch.testing.assert_close(energy, expected)
        slopes = [torch.autograd.grad(e, (x, n), create_graph=True) for e in (energy, expected)]
        energy, expected = (sum(slope.square().sum() for slope in of_both) for of_both in slopes)


def test_micro_signs_are_one_name():
    potential = PairPotential("\u00b5*q1*q2/r; \u00b5 = 2", ("q",))
    expected = 2 * COULOMB(X, neighbor_list=PAIRS, q=Q)
    torch.testing.assert_close(potential(X, neighbor_list=PAIRS, q=Q), expected)


def test_tables_without_species():
    table = PairPotential("c/r", (), (), ("c",))
    with pytest.raises(ValueError, match="`c`"):
        table(X, neighbor_list=PAIRS, c=torch.zeros(0, 0).double(), species=torch.zeros(3, dtype=torch.int32))
