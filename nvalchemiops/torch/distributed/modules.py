"""Modules whose parameters are the same on all ranks, and are combined with values of the atoms that a rank owns."""

from collections.abc import Callable
from typing import Any

import torch

from nvalchemiops.torch.runtime.modules import with_parameters


def with_replicated_parameters(
    module: torch.nn.Module, replicated: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., Any]:
    """A function that calls the module with parameters marked by ``replicated``.

    Parameters of one dtype are marked as one tensor, so that their gradients are summed in one message.
    """

    def call(*arguments: Any, **options: Any) -> Any:
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained or not torch.is_grad_enabled():
            return module(*arguments, **options)
        marked: dict[str, torch.Tensor] = {}
        for dtype in dict.fromkeys(p.dtype for p in trained.values()):
            given = {name: p for name, p in trained.items() if p.dtype is dtype}
            flat = replicated(torch.cat([p.reshape(-1) for p in given.values()]))
            parts = flat.split([p.numel() for p in given.values()])
            marked |= {name: part.view_as(p) for (name, p), part in zip(given.items(), parts)}
        with with_parameters(module, marked):
            return module(*arguments, **options)

    return call
