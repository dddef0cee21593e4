"""The torch binding: custom ops on the framework-free kernels of `nvalchemiops`. Submodules are loaded when used."""

import importlib
from typing import Any

import torch

from nvalchemiops.launch import set_openmp, set_thread_count
from nvalchemiops.torch.runtime.openmp import adapt_threads as adapt_threads
from nvalchemiops.torch.runtime.openmp import openmp_of_torch

set_thread_count(torch.get_num_threads)
set_openmp(openmp_of_torch())

_SUBMODULES = frozenset({"autograd", "interactions", "kernel", "neighbors", "ops", "segment_ops", "spline", "types"})


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
