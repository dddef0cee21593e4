"""Costs (times) of the parts of an Ewald sum, from which alpha, cutoffs and mesh sizes are chosen if not given.

Costs affect how long a sum takes, but not its accuracy: any choice of parameters meets the requested accuracy. For the
choice of parameters only their ratios matter.

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
    """Times in nanoseconds, for energies and forces."""

    pair: float  # for an atom and a neighbor in its list
    search: float  # to find this neighbor
    k_vectors: float  # for an atom and eight k-vectors (±n_x, ±n_y, ±n_z)
    mesh: float  # for a point of the mesh: Fourier transforms, and the product between them
    column: float  # for an atom and one of the order² columns of mesh points around it: its spline, spread and gathered
    wide_column: float  # the same for orders above 8, for which a CPU reads 16 points of a column instead of 8
    call_of_k_vectors: float  # for a call, whatever the size of the system
    call_of_mesh: float

    def of_call(self, finds_neighbors: bool) -> "Costs":
        """The costs with which parameters are chosen: if the call searches for neighbors, that is a part of a pair."""
        return self._replace(pair=self.pair + self.search, search=0.0) if finds_neighbors else self

    def columns(self, order: int) -> float:
        """Cost of the columns of mesh points around an atom, for splines of this order."""
        return (self.column if order <= 8 else self.wide_column) * order**2


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
        raise OSError(f"there is no file to store the costs in: {VARIABLE} is empty, or there is no home folder")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        kept = read() | costs
    path.parent.mkdir(parents=True, exist_ok=True)
    # replaced in one step, so that other processes never read an incomplete file
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({kind: c._asdict() for kind, c in kept.items()}, indent=2) + "\n", encoding="utf-8")
    aside.replace(path)
    return path


BUILT_IN = {
    "cpu": Costs(5.8, 5.0, 1.1, 10.5, 5.9, 7.2, 1.3e5, 1.9e5),
    "cuda": Costs(0.013, 0.05, 0.03, 0.032, 0.033, math.inf, 3e5, 3e5),
}
"""Default costs by type of device.

Those of a CPU were measured by ``nvalchemiops tune`` on one thread, in float64. The search, which takes longer, counts
0.86 pairs: with this ratio calls that search (1,000 to 4,096 ions) were fastest. On two threads pairs, k-vectors, mesh
and columns take 0.55 to 0.8 of these times.

Those of a GPU come from the kernels of one card, an H100, in float32, for 262,144 ions with a cutoff of 8 Å and splines
of order 6 (docs/performance.md, *What limits the kernels of a GPU*); calls, and the k-vectors in between, for 4,096
ions. In float64 all of them take about 1.4 times as long, so that choices are the same. Orders above 8 were not
measured there, so they are not chosen.
"""

COSTS = BUILT_IN | read()
"""The costs that this process uses."""
