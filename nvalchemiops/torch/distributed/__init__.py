"""One system on several processes: each rank of torch.distributed owns a part of the atoms."""

import importlib
from typing import TYPE_CHECKING, Any

from nvalchemiops.torch.distributed.communication import OtherRankError
from nvalchemiops.torch.distributed.domain import Domain
from nvalchemiops.torch.distributed.faults import fail_together
from nvalchemiops.torch.distributed.pairs import OwnedPairs

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.division import divide as divide

__all__ = ["Domain", "OtherRankError", "OwnedPairs", "divide", "fail_together"]


def __getattr__(name: str) -> Any:
    if name == "divide":  # it knows states of dynamics, whose models import this package
        return importlib.import_module(f"{__name__}.division").divide
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
