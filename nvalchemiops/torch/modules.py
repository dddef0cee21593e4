"""What modules of this library have in common."""

from collections.abc import Callable
from typing import Any

import torch


class ExactModule(torch.nn.Module):
    """A module whose buffers keep their dtype: parameters of a method are not rounded with the weights of a network.

    ``.to(device)`` moves them; ``.float()``, ``.half()`` and ``.to(dtype)`` leave them as they are. Results follow the
    dtype of the positions.
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "ExactModule":
        kept = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in kept.items():
            now = self._buffers[name]
            if before is not None and now is not None and now.dtype is not before.dtype:
                self._buffers[name] = before.to(now.device)
        return self
