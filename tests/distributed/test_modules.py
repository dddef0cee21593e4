"""In one process: modules with replicated parameters, where gradients are doubled instead of summed, and launchers."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nvalchemiops.torch import System
from nvalchemiops.torch.distributed import divide
from nvalchemiops.torch.distributed.modules import with_replicated_parameters
from nvalchemiops.torch.runtime.modules import with_parameters


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values.clone()

    @staticmethod
    def backward(ctx, gradients):
        return 2.0 * gradients


class Layers(torch.nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second, self.reentrant = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 1), reentrant

    def forward(self, x):
        if self.reentrant is None:
            return {"energies": self.second(self.first(x).tanh())}
        inner = checkpoint(lambda x: self.first(x).tanh(), x, use_reentrant=self.reentrant)
        return {"energies": self.second(inner)}


def gradients(reentrant, x):
    module = Layers(reentrant)
    module.load_state_dict(
        {name: torch.linspace(-1.0, 1.0, p.numel()).view_as(p) for name, p in module.state_dict().items()}
    )
    with_replicated_parameters(module, Doubled.apply)(x)["energies"].square().sum().backward()
    return [p.grad for p in module.parameters()]


def test_parameters_of_checkpoints_are_replicated():
    x = torch.linspace(-1.0, 1.0, 6).view(2, 3).requires_grad_()
    torch.testing.assert_close(gradients(False, x), gradients(None, x))
    with pytest.raises(ValueError, match="use_reentrant=False"):
        gradients(True, x)
    before = checkpoint(torch.sin, x, use_reentrant=True)  # it does not contain the parameters
    torch.testing.assert_close(gradients(False, before), gradients(None, before.detach()))


def test_parameters_that_share_a_tensor_for_a_while_are_not_shared():
    layer = torch.nn.Linear(1, 1)
    before = list(layer.parameters())
    same, values = torch.zeros(1, 1), {"weight": torch.ones(1, 1), "bias": torch.tensor([2.0])}
    with with_parameters(layer, {"weight": same, "bias": same}), with_parameters(layer, values):
        assert layer(torch.tensor([[3.0]])).item() == 5.0
    assert all(a is b for a, b in zip(layer.parameters(), before, strict=True))


def test_a_process_of_any_launcher_is_a_rank(monkeypatch):
    """Each rank of those that torchrun has not started computed all atoms."""
    system = System(torch.zeros(2, 3))
    assert divide(system, cutoff=1.0) is system
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK expected, but not set"):
        divide(system, cutoff=1.0)
