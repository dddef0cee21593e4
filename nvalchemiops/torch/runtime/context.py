"""Functions that read values on the host, so that a compiler must not look into them."""

import functools
import sys
from collections.abc import Callable
from typing import Any


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run ``function`` eagerly inside ``torch.compile`` too: a graph break there, an error with ``fullgraph=True``.

    The same as ``torch.compiler.disable``, which however imports the whole compiler when it decorates.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if not disabled:
            import torch

            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **options)

    return call
