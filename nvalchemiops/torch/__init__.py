"""The torch binding: custom ops for the framework-free kernels of `nvalchemiops`. Submodules are loaded when used."""

import importlib
from typing import TYPE_CHECKING, Any

import torch

from nvalchemiops.launch import set_openmp, set_thread_count
from nvalchemiops.submodules import loaded_when_used
from nvalchemiops.torch.runtime.openmp import adapt_threads as adapt_threads
from nvalchemiops.torch.runtime.openmp import openmp_of_torch

set_thread_count(torch.get_num_threads)
set_openmp(openmp_of_torch())

if TYPE_CHECKING:
    from nvalchemiops.torch.graph import Graph as Graph
    from nvalchemiops.torch.runtime.recorded import RecordingError as RecordingError
    from nvalchemiops.torch.runtime.recorded import record as record
    from nvalchemiops.torch.systems import Neighbors as Neighbors
    from nvalchemiops.torch.systems import System as System

_SUBMODULES = frozenset(
    {
        "autograd",
        "distributed",
        "dynamics",
        "fire2",
        "graph",
        "interactions",
        "kernel",
        "lbfgs",
        "neighbors",
        "ops",
        "plans",
        "segment_ops",
        "spline",
        "systems",
        "types",
    }
)
_NAMES = {
    "Graph": "graph",
    "Neighbors": "systems",
    "System": "systems",
    "record": "runtime.recorded",
    "RecordingError": "runtime.recorded",
    # the short paths of clients
    "LBFGSCellState": "lbfgs",
    "LBFGSState": "lbfgs",
    "fire2_step_coord": "fire2",
    "fire2_step_coord_cell": "fire2",
    "get_wp_dtype": "types",
    "get_wp_mat_dtype": "types",
    "get_wp_vec_dtype": "types",
    "lbfgs_prepare_cell_state": "lbfgs",
    "lbfgs_prepare_state": "lbfgs",
    "lbfgs_step_coord": "lbfgs",
    "lbfgs_step_coord_cell": "lbfgs",
    "segmented_dot": "segment_ops",
    "segmented_matvec": "segment_ops",
    "segmented_mean": "segment_ops",
    "segmented_mul": "segment_ops",
    "segmented_rms_norm": "segment_ops",
    "segmented_sum": "segment_ops",
}


_submodule = loaded_when_used(__name__, _SUBMODULES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    return _submodule(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *_NAMES})
