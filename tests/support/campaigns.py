"""Campaigns of hypothesis: how long they take, what errors are in order, and a system that both have.

The fixture `no_hanging` is in `tests/conftest.py`.
"""

from hypothesis import HealthCheck, settings

from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.torch.autograd import NotDifferentiableError
from tests.support.systems import triclinic

NAMED = (ValueError, TypeError, NeighborOverflowError, NotDifferentiableError)
PATIENCE = 120.0
"""Seconds after which an example counts as hanging: then all stacks are printed and the process ends."""

LONG = settings.get_current_profile_name() == "long"


def examples(number: int, long: int) -> settings:
    return settings(max_examples=long if LONG else number, suppress_health_check=list(HealthCheck))


ONE = triclinic(5)
X, Q, CELL = ONE[:3]
