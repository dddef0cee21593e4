"""One system on several processes: each rank of torch.distributed owns a part of the atoms."""

from nvalchemiops.torch.distributed.communication import OtherRankError
from nvalchemiops.torch.distributed.domain import Domain
from nvalchemiops.torch.distributed.faults import fail_together

__all__ = ["Domain", "OtherRankError", "fail_together"]
