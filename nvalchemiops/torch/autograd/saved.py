"""Saving arguments and results for a backward pass on the context of an ``autograd.Function``."""

from collections.abc import Sequence
from typing import Any

import torch


def save(ctx: Any, values: Sequence[Any], forward_mode: bool = False) -> None:
    """Save tensors and other values. Torch notices changes of the tensors before they are restored."""
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    ctx.save_for_backward(*tensors)
    if forward_mode:
        ctx.save_for_forward(*tensors)
    ctx.plain = [None if isinstance(v, torch.Tensor) else (v,) for v in values]


def restore(ctx: Any) -> list[Any]:
    """The values that `save` has saved."""
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if plain is None else plain[0] for plain in ctx.plain]
