"""Argon under pressure on two processes, by the calls of one:

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 examples/20_argon_on_ranks.py

`simulate` gets a system that a `Domain` divides among the ranks. Atoms go to their new owners by themselves, the cell
changes its lengths and angles, and the trajectory is that of one process. What to look at: the conserved quantity
stays, and after 20 steps positions differ from those of one process by rounding. Takes some seconds.
"""

from functools import partial

import ase.build
import torch.distributed as dist

from nvalchemiops._warp import quiet_warp
from nvalchemiops.constants import FEMTOSECOND, GIGAPASCAL, KELVIN
from nvalchemiops.torch import System
from nvalchemiops.torch.distributed import Domain
from nvalchemiops.torch.dynamics import SumOfTerms, npt, simulate
from nvalchemiops.torch.interactions.pair import lennard_jones

quiet_warp()
dist.init_process_group("gloo")
crystal = ase.build.bulk("Ar", "fcc", a=5.6, cubic=True) * 4
crystal.rattle(0.2, seed=1)
whole = System.from_ase(crystal)
first, end = (len(crystal) * (dist.get_rank() + k) // dist.get_world_size() for k in (0, 1))
held = whole._replace(positions=whole.positions[first:end], numbers=whole.numbers[first:end])

model = SumOfTerms(partial(lennard_jones(8.5, r_switch=7.5), sigma=3.4, epsilon=0.0104))
barostat = npt(4.0 * FEMTOSECOND, 120.0 * KELVIN, 0.02 * GIGAPASCAL, cell="full", barostat_time=400.0 * FEMTOSECOND)
domain = Domain(held.positions, held.cell, cutoff=8.5, skin=0.5)
run = simulate(domain.distribute(held), model, barostat, steps=20, seed=1)
alone = simulate(whole, model, barostat, steps=20, seed=1)

here = run.state.system.domain.gather(run.state.system.positions)
error = float((here - alone.state.system.positions[first:end]).abs().max())
if dist.get_rank() == 0:
    conserved = run.records["conserved"][:, 0] / len(crystal)
    print(f"rank 0 owned {domain.n_owned} atoms, and owns {run.state.system.domain.n_owned}")
    print(f"positions differ from those of one process by {error:.1e} A")
    print(f"the conserved quantity has changed by {1e3 * float((conserved - conserved[0]).abs().max()):.4f} meV/atom")
dist.destroy_process_group()
