"""Recorded functions that use other tensors later, or modules in another mode."""

import numpy as np
import pytest
import torch

from nvalchemiops.torch import RecordingError, record


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
