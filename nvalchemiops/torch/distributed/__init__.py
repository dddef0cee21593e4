"""One system on several processes: each rank of torch.distributed owns a part of the atoms."""

import importlib
from typing import TYPE_CHECKING

from nvalchemiops.submodules import found_when_used
from nvalchemiops.torch.distributed.communication import OtherRankError
from nvalchemiops.torch.distributed.domain import Domain
from nvalchemiops.torch.distributed.faults import fail_together
from nvalchemiops.torch.distributed.pairs import OwnedPairs

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.division import divide as divide

__all__ = ["Domain", "OtherRankError", "OwnedPairs", "divide", "fail_together"]


# it knows states of dynamics, whose models import this package
__getattr__ = found_when_used(__name__, ["divide"], lambda name: importlib.import_module(f"{__name__}.division").divide)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
