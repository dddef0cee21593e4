"""Recorded functions that use other tensors later, or modules in another mode."""

import numpy as np
import pytest
import torch

from nvalchemiops.torch import RecordingError, record
from nvalchemiops.torch.interactions.electrostatics import ewald_summation
from tests.support.systems import triclinic


@pytest.mark.parametrize("if_changed", ["record", "raise"])
def test_tensors_that_others_take_the_place_of(if_changed):
    """As parameters and buffers of a module do; none is in the place of those that the function makes unseen."""
    model, numbers = torch.nn.BatchNorm1d(2).eval(), np.ones(2, dtype=np.float32)

    def step(x):
        y = x.detach().requires_grad_()
        return torch.autograd.grad((y**2 * model.weight).sum(), y)[0] * model.running_mean + torch.from_numpy(numbers)

    def change_weight():
        model.weight = torch.nn.Parameter(torch.full((2,), 3.0))

    def change_mean():
        model.running_mean = torch.ones(2)

    again = record(step, if_changed=if_changed)
    for change in (lambda: None, change_weight, change_mean):
        change()
        for k in range(3):
            assert torch.equal(again(x := torch.ones(2) + k), step(x))
    assert "Calls: 3 recorded, 3 replayed, 3 ordinary" in again.explain()


def test_tensors_that_the_function_makes_and_keeps():
    """Each of its calls makes another one, which is not in the place of one that it uses."""
    made = []

    def step(x):
        made[:] = [torch.from_numpy(np.ones(2, dtype=np.float32))]
        return x + made[0]

    again = record(step)
    for k in range(4):
        assert torch.equal(again(x := torch.ones(2) + k), x + 1.0)
    assert "Calls: 1 recorded, 2 replayed, 1 ordinary" in again.explain()


def test_tensors_of_a_module_that_are_no_buffers():
    """The recorded function has its attributes as they are, and keeps none."""

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x @ self.cell

    model = Scaled()
    again = record(model)
    for _ in range(2):
        model.cell = torch.rand(3, 3)
        for k in range(3):
            assert torch.equal(again(x := torch.ones(2, 3) + k), model(x))
        assert again.cell is model.cell and not hasattr(again, "other")
    assert "Calls: 2 recorded, 2 replayed, 2 ordinary" in again.explain()


def test_modules_in_training_and_not():
    """The module is the function, has it as a method, or is an argument of it."""
    model = torch.nn.Sequential(torch.nn.Dropout()).eval()
    x = torch.ones(2)
    for again, given in ((record(model), (x,)), (record(model.forward), (x,)), (record(lambda m, x: m(x)), (model, x))):
        for _ in range(2):
            assert torch.equal(again(*given), x)
        model.train()
        with pytest.raises(RecordingError, match="draws random numbers"):
            again(*given)
        model.eval()
        again(*given)
        assert "last call: replayed" in again.explain()


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_frozen_modules():
    """Of TorchScript, which have no mode."""
    model = torch.jit.freeze(torch.jit.script(torch.nn.Softplus().eval()))
    again, x = record(model), torch.rand(2)
    assert torch.equal(again(x), model(x))


def test_tensors_that_caches_drop():
    """As those of the lattice and its k-vectors, after sums in other cells: no others have taken their place."""
    x, charges, cell, *_ = triclinic(5, charged=True)
    none = {"neighbor_list": torch.zeros(2, 0, dtype=torch.int32), "neighbor_ptr": torch.zeros(6, dtype=torch.int32)}

    def energies(x, cell):
        return ewald_summation(x, charges, cell, 0.9, k_cutoff=2.0, neighbor_shifts=torch.zeros(0, 3).int(), **none)

    steps = [record(lambda x, cell=(1.0 + 0.1 * n) * cell: energies(x, cell)) for n in range(10)]
    for k in range(3):
        for step in steps:
            step(x + k)
    assert ["last call: replayed" in step.explain() for step in steps] == 10 * [True]
