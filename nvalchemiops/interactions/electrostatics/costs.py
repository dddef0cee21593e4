"""Costs (times) of the parts of an Ewald sum, from which alpha, cutoffs and mesh sizes are chosen if not given.

Costs affect how long a sum takes, but not its accuracy: any choice of parameters meets the requested accuracy.

The built-in costs were measured on two cores of a CPU, and on an H100. Only their ratios matter. Kernel launches (2 to
4 µs each) are not included: where they dominate, in small systems, any choice takes about the same time.

``nvalchemiops tune`` measures the costs on the machine in use and stores them in a file that later processes read:
``$NVALCHEMIOPS_COSTS``, by default ``nvalchemiops/costs.json`` in the user's configuration folder. If that variable is
set but empty, no file is used.
"""

import json
import math
import os
import warnings
from pathlib import Path
from typing import NamedTuple


class Costs(NamedTuple):
    """Times in nanoseconds, for energies and forces in float64."""

    pair: float  # for an atom and a neighbor, including a share of the neighbor search
    k_vectors: float  # for an atom and eight k-vectors (±n_x, ±n_y, ±n_z)
    mesh: float  # for a point of the mesh


# -- the file of costs ----------------------------------------------------------------------------

VARIABLE = "NVALCHEMIOPS_COSTS"


def file() -> Path | None:
    """The file of costs, or None."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    try:
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "nvalchemiops" / "costs.json"
    except RuntimeError:  # the user has no home folder
        return None


def read() -> dict[str, Costs]:
    """The stored costs, by type of device. A file that cannot be read is ignored with a warning."""
    path = file()
    if path is None:
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        found = {kind: Costs(*(float(costs[name]) for name in Costs._fields)) for kind, costs in kept.items()}
        for kind, costs in found.items():
            if kind not in BUILT_IN or not all(0.0 < number < math.inf for number in costs):
                raise ValueError(f"costs of '{kind}': {tuple(costs)}")
        return found
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(
            f"{path}: invalid costs are ignored ({error!r}); `nvalchemiops tune` measures new ones, "
            "`nvalchemiops tune --reset` removes the file",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}


def write(costs: dict[str, Costs]) -> Path:
    """Store these costs, in addition to those of other types of device, and return the path of the file.

    Raises
    ------
    OSError
        No file is used, or it cannot be written.
    """
    path = file()
    if path is None:
        raise OSError(f"there is no file to store the costs in: {VARIABLE} is empty")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        kept = read() | costs
    path.parent.mkdir(parents=True, exist_ok=True)
    # replaced in one step, so that other processes never read an incomplete file
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({kind: c._asdict() for kind, c in kept.items()}, indent=2) + "\n", encoding="utf-8")
    aside.replace(path)
    return path


BUILT_IN = {"cpu": Costs(7.0, 1.3, 15.0), "cuda": Costs(0.23, 0.05, 0.41)}
"""Default costs by type of device, measured by `nvalchemiops tune` on two cores of a CPU, and on an H100.

But the cost of a pair on a CPU is that with which sums with kept lists are fastest, for 1,000 to 32,768 ions: `tune`
includes the whole search."""

COSTS = BUILT_IN | read()
"""The costs that this process uses."""
