"""Plans of calls that repeat: which way the last calls went, and how to limit plans or do without them.

On a CPU, calls for small systems are recorded when they come again, and further calls do again what was recorded, for
other values (`nvalchemiops.torch.runtime.engine`). Results have the bits of the ordinary way.

>>> from nvalchemiops.torch import plans
>>> from nvalchemiops.torch.interactions.pair import lennard_jones
>>> potential, positions = lennard_jones(), torch.tensor([[0.0, 0.0, 0.0], [1.5, 0.0, 0.0]])
>>> pairs = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
>>> with plans.off():
...     energies = potential(positions, sigma=1.0, epsilon=1.0, neighbor_list=pairs)
>>> [line for line in plans.explain(potential).splitlines() if "pair" in line]
['pair potential: once (plans are switched off)']

The environment variable ``NVALCHEMIOPS_PLANS=0`` switches them off in all threads.
"""

from nvalchemiops.torch.checks import check_int
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime.engine import explain as explain
from nvalchemiops.torch.runtime.engine import off as off


def clear() -> None:
    """Forget all plans of functions, and with them their memory."""
    engine.everywhere.clear()


def limit(n_bytes: int) -> None:
    """Let plans of functions have this much memory, at most, beside the last one; 256 MiB by default.

    Those that ran longest ago are forgotten first.
    """
    if check_int("n_bytes", n_bytes) < 0:
        raise ValueError(f"`n_bytes` must not be negative, got {n_bytes}")
    engine.everywhere.most_bytes = n_bytes
    engine.everywhere.fit()
