"""The graphs of autograd behind tensors: their nodes, and the leaves where they begin."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch


def nodes_behind(tensors: Iterable[torch.Tensor], ends: Callable[[Any], bool] | None = None) -> Iterator[Any]:
    """The nodes of the graphs of tensors, each once.

    Nodes for which ``ends`` is True are left out, and so is what is reached through them alone.
    """
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen or (ends is not None and ends(node)):
            continue
        seen.add(node)
        yield node
        waiting += [before for before, _ in node.next_functions]


def is_of_leaf(node: Any) -> bool:
    """Whether the node is that of a leaf, its ``variable``."""
    return hasattr(node, "variable")


def leaves_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors without a history that require gradients, and on which these depend."""
    tensors = [tensor for tensor in tensors if tensor.requires_grad]
    leaves = [tensor for tensor in tensors if tensor.grad_fn is None]
    return leaves + [node.variable for node in nodes_behind(tensors) if is_of_leaf(node)]
