"""What is added to either kind of Ewald sum: the slab correction, and excluded pairs."""

from typing import Any

import torch

from nvalchemiops.torch.interactions.electrostatics.long_range import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.parts import Parts, Wanted
from nvalchemiops.torch.interactions.electrostatics.real_space import exclusion_part
from nvalchemiops.torch.interactions.electrostatics.slab import slab_part
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem


def corrections(
    potential: LongRangePotential,
    system: ChargedSystem,
    alpha: torch.Tensor,
    axes: torch.Tensor | None,
    exclusions: Any,
    exclusion_factors: Any,
    wanted: Wanted,
) -> list[Parts]:
    """Parts for open ``axes`` and for pairs that do not interact, as far as there are any."""
    parts = []
    if axes is not None:
        parts.append(slab_part(system, axes, wanted))
    if exclusions is not None:
        parts.append(exclusion_part(potential.excluded, system, alpha, exclusions, exclusion_factors, wanted))
    return parts
