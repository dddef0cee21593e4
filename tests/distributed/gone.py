"""Two ranks, of which the second ends in the middle of its work: ``python -m tests.distributed.gone RANK 2 FOLDER``."""

import os
import sys

import torch.distributed as dist

from nvalchemiops.torch.distributed import Domain, OtherRankError
from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb
from tests.distributed.common import Atoms
from tests.distributed.ranks import start

if __name__ == "__main__":
    rank = int(sys.argv[1])
    start(rank, 2, sys.argv[3], seconds=30)
    atoms = Atoms(n=4)
    mine = atoms.mine(dist.group.WORLD)
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0)
    if rank == 1:
        os._exit(1)
    try:
        dsf_coulomb(domain.distribute(atoms.positions[mine]), atoms.charges[mine], 3.0, 0.2, atoms.cell, domain=domain)
    except OtherRankError as error:
        print(error)
        os._exit(0)
    os._exit(2)
