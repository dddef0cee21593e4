"""Times of the parts of an Ewald sum, by which alpha, cutoffs and meshes are chosen that are not given.

They change how long a sum takes, never how accurate it is: the parameters of any choice meet the accuracy asked for.

For a CPU they were measured on two cores, for a GPU on an H100. Only ratios matter, so what all parts lose alike has no
effect, and neither have launches (2 to 4 µs each): where they take most of the time, in small systems, any choice takes
about as long.

``nvalchemiops tune`` measures them on the machine at hand and keeps them in a file, which later processes read:
``$NVALCHEMIOPS_COSTS``, by default ``nvalchemiops/costs.json`` in the user's folder for configurations. If that
variable is empty, there is none.
"""

import json
import math
import os
import warnings
from pathlib import Path
from typing import NamedTuple


class Costs(NamedTuple):
    """Times in nanoseconds, for energies and forces in float64."""

    pair: float  # of an atom and a neighbor, with a share of the search for neighbors
    k_vectors: float  # of an atom and eight k-vectors (±n_x, ±n_y, ±n_z)
    mesh: float  # of a point of the mesh
    spline: float = 0.35  # of an atom and one of the order³ points of its splines


# -- what is kept for the user --------------------------------------------------------------------

VARIABLE = "NVALCHEMIOPS_COSTS"


def file() -> Path | None:
    """Where costs are kept, or None."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    try:
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "nvalchemiops" / "costs.json"
    except RuntimeError:  # a user without a folder
        return None


def read() -> dict[str, Costs]:
    """The costs that are kept, by type of device. A file that cannot be used gives none, and one warning."""
    path = file()
    if path is None:
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = {kind: _costs_in(costs) for kind, costs in kept.items()}
        for kind, costs in found.items():
            if kind not in BUILT_IN or not all(0.0 < number < math.inf for number in costs):
                raise ValueError(f"costs of '{kind}': {tuple(costs)}")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(
            f"{path}: costs that are no costs are ignored ({error!r}); `nvalchemiops tune` makes new ones, "
            "`nvalchemiops tune --reset` removes the file",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


def _costs_in(kept: dict[str, float]) -> Costs:
    """The costs of a device; files of earlier releases have none of splines."""
    return Costs(**{name: float(kept[name]) for name in Costs._fields if name != "spline" or name in kept})


def write(costs: dict[str, Costs]) -> Path:
    """Keep these costs beside those of other devices; the file.

    Raises
    ------
    OSError
        There is no file, or it cannot be written.
    """
    path = file()
    if path is None:
        raise OSError(f"there is no file to keep them in: {VARIABLE} is empty")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        kept = read() | costs
    path.parent.mkdir(parents=True, exist_ok=True)
    # whole or not at all, also for a process that reads at this moment
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({kind: c._asdict() for kind, c in kept.items()}, indent=2) + "\n", encoding="utf-8")
    aside.replace(path)
    return path


BUILT_IN = {"cpu": Costs(8.0, 1.3, 15.0), "cuda": Costs(0.23, 0.05, 0.41)}
"""By type of device: measured on two cores of a CPU, and on an H100 by `nvalchemiops tune`."""

COSTS = BUILT_IN | read()
"""Those in use in this process."""
