"""Two ranks, of which the second ends in the middle of its work: ``python -m tests.distributed.gone RANK 2 FOLDER``."""

import os
import sys
import weakref

import ase.build
import torch.distributed as dist

from nvalchemiops.ase import Electrostatics, on_ranks
from nvalchemiops.torch.distributed import Domain, OtherRankError
from nvalchemiops.torch.interactions.electrostatics import dsf_coulomb
from tests.distributed.common import Atoms
from tests.distributed.ranks import start

if __name__ == "__main__":
    rank = int(sys.argv[1])
    start(rank, 2, sys.argv[3], seconds=30)
    atoms = Atoms(n=4)
    mine = atoms.mine(dist.group.WORLD)
    # a group that is destroyed gives its threads back, although a domain was made for it
    other = dist.new_group(range(2))
    Domain(atoms.positions[mine], atoms.cell, cutoff=3.0, group=other)
    found = weakref.ref(other)
    dist.destroy_process_group(other)
    del other
    assert found() is None
    domain = Domain(atoms.positions[mine], atoms.cell, cutoff=3.0)
    if rank == 1:
        os._exit(1)
    try:
        dsf_coulomb(domain.distribute(atoms.positions[mine]), atoms.charges[mine], 3.0, 0.2, atoms.cell, domain=domain)
    except OtherRankError as error:
        print(error)
    else:
        os._exit(2)

    def main(calculator):
        crystal = ase.build.bulk("NaCl", "rocksalt", a=5.6)
        crystal.calc = calculator
        return crystal.get_potential_energy()

    try:
        on_ranks(main, Electrostatics("dsf", {"Na": 1.0, "Cl": -1.0}, cutoff=3.0, alpha=0.2))
    except OtherRankError as error:
        print(error)
        os._exit(0)
    os._exit(2)
