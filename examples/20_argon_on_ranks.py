"""Argon under pressure on two processes, by the calls of one:

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 examples/20_argon_on_ranks.py

`simulate` gets a system that `divide` has divided among the ranks. Atoms go to their new owners by themselves, the cell
changes its lengths and angles, and the trajectory is that of one process. What to look at: the conserved quantity
stays, and after 20 steps positions differ from those of one process by rounding. Takes some seconds.
"""

from functools import partial

import ase.build
import torch.distributed as dist

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import FEMTOSECOND, GIGAPASCAL, KELVIN
from nvalchemiops.torch import System
from nvalchemiops.torch.distributed import divide
from nvalchemiops.torch.dynamics import SumOfTerms, npt, simulate
from nvalchemiops.torch.interactions.pair import lennard_jones

quiet_warp()
crystal = ase.build.bulk("Ar", "fcc", a=5.6, cubic=True) * 4
crystal.rattle(0.2, seed=1)
whole = System.from_ase(crystal)

model = SumOfTerms(partial(lennard_jones(8.5, r_switch=7.5), sigma=3.4, epsilon=0.0104))
barostat = npt(4.0 * FEMTOSECOND, 120.0 * KELVIN, 0.02 * GIGAPASCAL, cell="full", barostat_time=400.0 * FEMTOSECOND)
own = divide(whole, cutoff=8.5, skin=0.5)
run = simulate(own, model, barostat, steps=20, seed=1)
last = run.state.collected()  # all atoms, on the first rank
alone = simulate(whole, model, barostat, steps=20, seed=1)

if dist.get_rank() == 0:
    error = float((last.system.positions - alone.state.system.positions).abs().max())
    conserved = run.records["conserved"][:, 0] / len(crystal)
    print(f"rank 0 owned {own.domain.n_owned} atoms, and owns {run.state.system.domain.n_owned}")
    print(f"positions differ from those of one process by {error:.1e} A")
    print(f"the conserved quantity has changed by {1e3 * float((conserved - conserved[0]).abs().max()):.4f} meV/atom")
dist.destroy_process_group()
