"""What both kinds of Ewald sum have beside the smooth part: pairs, the slab correction, and excluded pairs."""

from typing import Any

import torch

from nvalchemiops.torch.interactions.electrostatics.potentials import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.real_space import exclusion_part, pair_part
from nvalchemiops.torch.interactions.electrostatics.results import Parts, WantedParts
from nvalchemiops.torch.interactions.electrostatics.slab import slab_part
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.neighbors.rows import Rows


def all_but_smooth_part(
    potential: LongRangePotential,
    system: ChargedSystem,
    alpha: torch.Tensor,
    rows: Rows,
    axes: torch.Tensor | None,
    exclusions: Any,
    exclusion_factors: Any,
    wanted: WantedParts,
) -> list[Parts]:
    """The short-ranged part; parts for open ``axes`` and for pairs that do not interact, as far as there are any.

    Excluded pairs lose their short-ranged part among the pairs, and their smooth part in a part of its own.
    """
    excluded = {"exclusions": exclusions, "exclusion_factors": exclusion_factors}
    parts = [pair_part(potential.short_range, system, alpha, rows, wanted, **excluded)]
    if axes is not None:
        parts.append(slab_part(system, axes, wanted))
    if exclusions is not None:
        parts.append(exclusion_part(potential.excluded, system, alpha, exclusions, exclusion_factors, wanted))
    return parts
