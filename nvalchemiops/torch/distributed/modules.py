"""Modules whose parameters are the same on all ranks, and are combined with values of the atoms that a rank owns."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nvalchemiops.torch.runtime.history import nodes_behind
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
            results = module(*arguments, **options)
        if module not in _checked:
            _refuse_reentrant_checkpoints(results, (arguments, options))
            _checked.add(module)
        return results

    return call


_checked: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Modules without reentrant checkpoints."""


def _refuse_reentrant_checkpoints(results: Any, arguments: Any) -> None:
    """Raise if there is a checkpoint between arguments and results that adds to gradients of this rank alone."""
    given = {tensor.grad_fn for tensor in _tensors_in(arguments)}
    for node in nodes_behind(_tensors_in(results), given.__contains__):
        if node.name() == "CheckpointFunctionBackward":
            raise ValueError(
                "`replicated`: the module calls torch.utils.checkpoint with use_reentrant=True, which computes again "
                "with parameters that are not summed over ranks: use use_reentrant=False"
            )


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors_in(list(values.values()))
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors_in(value)
