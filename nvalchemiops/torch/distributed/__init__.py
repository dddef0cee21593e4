"""One system on several processes: each rank of torch.distributed has a part of the atoms."""

from nvalchemiops.torch.distributed.domain import Domain
from nvalchemiops.torch.distributed.failures import OtherRankError

__all__ = ["Domain", "OtherRankError"]
