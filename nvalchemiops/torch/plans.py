"""Plans of calls that repeat: which way the last calls went, and how to limit plans or do without them.

Calls for small systems are recorded when they come again, and further calls do again what was recorded, for other
values (`nvalchemiops.torch.runtime.engine`); on a GPU they are captured as CUDA graphs. Results have the bits of the
ordinary way.

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
from nvalchemiops.torch.runtime import tables
from nvalchemiops.torch.runtime.engine import explain as explain
from nvalchemiops.torch.runtime.engine import off as off


def clear() -> None:
    """Forget all plans of functions, and with them their memory."""
    tables.everywhere.clear()


def limit(n_bytes: int, device: str = "cpu") -> None:
    """Let plans of functions have this much memory, at most, beside the last one; 256 MiB by default, 2 GiB on GPUs.

    Those that ran longest ago are forgotten first.

    Parameters
    ----------
    n_bytes : int
    device : {"cpu", "cuda"}, optional
        Where the memory is: of plans for a CPU, or of those for all GPUs.
    """
    if check_int("n_bytes", n_bytes) < 0:
        raise ValueError(f"`n_bytes` must not be negative, got {n_bytes}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"`device` must be 'cpu' or 'cuda', got {device!r}")
    setattr(tables.everywhere, "most_bytes" if device == "cpu" else "most_bytes_on_gpu", n_bytes)
    tables.everywhere.fit()
