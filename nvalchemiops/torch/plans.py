"""Plans of repeated calls: see whether calls used them, limit their memory, or switch them off.

Calls for up to 65,536 atoms are recorded when they repeat, and later calls replay the recorded steps for other values
(`nvalchemiops.torch.runtime.engine`). On a GPU they are captured as CUDA graphs. Results have the same bits as without
plans.

>>> from nvalchemiops.torch import plans
>>> from nvalchemiops.torch.interactions.pair import lennard_jones
>>> potential, positions = lennard_jones(), torch.tensor([[0.0, 0.0, 0.0], [1.5, 0.0, 0.0]])
>>> pairs = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
>>> with plans.off():
...     energies = potential(positions, sigma=1.0, epsilon=1.0, neighbor_list=pairs)
>>> [line for line in plans.explain(potential).splitlines() if line.startswith("pair")]
['pair potential: once (plans are switched off)']

The environment variable ``NVALCHEMIOPS_PLANS=0`` switches plans off in all threads.
"""

from nvalchemiops.torch.checks import check_int
from nvalchemiops.torch.runtime import tables
from nvalchemiops.torch.runtime.engine import explain as explain
from nvalchemiops.torch.runtime.engine import off as off


def clear() -> None:
    """Forget all plans of functions and free their memory."""
    tables.everywhere.clear()


def limit(n_bytes: int, device: str = "cpu") -> None:
    """Limit the memory of plans of functions.

    The default is 256 MiB on a CPU; on GPUs 2 GiB, or a sixteenth of the memory of a GPU if that is more.

    The least recently used plans are forgotten first. The last plan is always kept, even if it is larger.

    Parameters
    ----------
    n_bytes : int
    device : {"cpu", "cuda"}, optional
        Whether to limit the plans for the CPU, or the plans for all GPUs together.
    """
    if check_int("n_bytes", n_bytes, 64) < 0:
        raise ValueError(f"`n_bytes` must be non-negative, got {n_bytes}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"`device` must be 'cpu' or 'cuda', got {device!r}")
    setattr(tables.everywhere, "most_bytes" if device == "cpu" else "most_bytes_on_gpu", n_bytes)
    tables.everywhere.fit()
