"""Derivatives inside of recorded steps: of arguments, of what is no argument, of cells, and in both modes."""

import pytest
import torch

from nvalchemiops.torch import RecordingError, record
from nvalchemiops.torch.interactions.electrostatics import ewald_summation, particle_mesh_ewald
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.systems import triclinic

F64 = torch.float64


def test_results_that_are_made_only_for_gradients():
    """The workspace of an LSTM."""
    model = torch.nn.LSTM(3, 2)

    def slope(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x)[0].sum(), x)[0]

    again = record(slope)
    for seed in range(3):
        x = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(again(x), slope(x))
    assert "1 replayed" in again.explain()


def test_gradients_that_are_required_later():
    """Of what is no argument, inside of ``no_grad``."""
    weights = torch.randn(3, 3)

    def step(x):
        with torch.no_grad():
            return x @ weights

    recorded = record(step)
    for count in range(6):
        x = torch.randn(5, 3)
        assert torch.equal(recorded(x), step(x))
        weights.requires_grad_(count > 2)
    assert "replayed" in recorded.explain()
    frozen = torch.ones(3)
    again = record(lambda x: x * frozen)
    for factor in range(3):
        again(factor * frozen)
    frozen.requires_grad_()
    with pytest.raises(RecordingError, match="with a graph"):
        again(torch.ones(3))


@pytest.mark.parametrize("argument", [lambda w: w, lambda w: 2.0 * w], ids=["itself", "computed from it"])
@pytest.mark.parametrize("changing", [True, False])
def test_arguments_and_other_tensors_with_one_gradient(argument, changing):
    """Gradients by a tensor outside of the function also come by way of an argument: at once, or in a later call."""
    weight = torch.arange(1.0, 4.0).requires_grad_()

    def slope(x):
        return torch.autograd.grad((x * x * weight).sum(), weight)[0]

    for others in (0, 3):
        again = record(slope, changing=[weight] if changing else [])
        for seed in range(others):
            x = torch.rand(3, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            assert torch.equal(again(x), slope(x))
        assert torch.equal(again(argument(weight)), slope(argument(weight)))
        assert "gradients by the same tensors" in again.explain()
        assert f"{others // 3} replayed" in again.explain()


def test_matrices_that_are_inverted():
    """Each replay looks at the error codes of the matrices, which the function raises for."""

    def step(cell, x):
        cell = cell.detach().requires_grad_()
        fractional = x @ torch.linalg.inv(cell)
        (slope,) = torch.autograd.grad(fractional.sin().sum(), cell)
        return fractional.detach(), slope, torch.linalg.solve(cell, slope).detach()

    again, x = record(step), torch.rand(4, 3, dtype=F64)
    for scale in (1.0, 1.1, 1.2, 0.0, 1.3):
        cell = scale * torch.tensor([[5.0, 0.0, 0.3], [0.1, 4.0, 0.0], [0.0, 0.2, 3.0]], dtype=F64)
        if not scale:
            with pytest.raises(torch.linalg.LinAlgError, match="singular"):
                again(cell, x)
            continue
        assert all(map(torch.equal, again(cell, x), step(cell, x)))
        assert scale == 1.0 or scale == 1.1 or "last call: replayed" in again.explain()


def test_a_derivative_that_is_zero_everywhere():
    """Torch then returns zeros without memory."""

    def step(x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((x - 1.0).abs().sum(), x, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), x)
        return curvature, slope.detach()

    again = record(step)
    for seed in range(3):
        x = torch.randn(3, generator=torch.Generator().manual_seed(seed))
        assert all(map(torch.equal, again(x), step(x)))
    assert "replayed" in again.explain()


def test_derivatives_in_forward_mode():
    def step(x):
        return torch.func.jvp(lambda y: torch.linalg.inv(y) @ x, (x,), (torch.ones_like(x),))[1]

    again = record(step)
    for seed in range(3):
        x = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(again(x), step(x))


def test_a_tensor_in_several_places_has_one_gradient():
    """Positions that are also dipoles, for instance, or arguments that are functions of others."""

    def step(x, values):
        (gradient,) = torch.autograd.grad((x**2 * values[0]).sum(), x)
        return gradient

    for beside in (lambda x: x, lambda x: 2.0 * x):
        recorded = record(step)
        for seed in range(3):
            x = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=F64, requires_grad=True)
            torch.testing.assert_close(recorded(x, [beside(x)]), step(x, [beside(x)]))


@pytest.mark.parametrize("given", [{"mesh_dimensions": (12, 10, 9)}, {"miller_bounds": (4, 4, 4)}, {"k_cutoff": 4.0}])
def test_lattice_sums_in_a_cell_that_is_an_argument(given):
    """It is checked in each replay, as is alpha. K-vectors up to a length follow from values, which are not read."""
    found = triclinic(12, charged=True)
    x, q, cell = found.positions, found.charges, found.cell
    names = ("neighbor_list", "neighbor_ptr", "neighbor_shifts")
    near = dict(zip(names, neighbor_list(x, 3.0, cell, return_neighbor_list=True)))
    function = particle_mesh_ewald if "mesh_dimensions" in given else ewald_summation

    def step(x, cell, alpha):
        return function(x, q, cell, alpha, compute_forces=True, compute_virial=True, **given, **near)

    again = record(step)
    if "k_cutoff" in given:
        with pytest.raises(RecordingError, match="gives values of a tensor"):
            again(x, cell, 0.8)
        return
    for scale in (1.0, 1.01, 1.02, 1.03):
        arguments = (scale * x, scale * cell, torch.tensor(0.8 / scale))
        assert all(map(torch.equal, again(*arguments), step(*arguments)))
    assert "replayed" in again.explain()
    with pytest.raises(ValueError, match="`cell` is singular"):
        again(x, cell[..., [0, 0, 2]], torch.tensor(0.8))
    with pytest.raises(ValueError, match="`alpha` must be positive"):
        again(x, cell, torch.tensor(-0.8))
