"""One of two processes that train with modules for different systems.

Run as ``python -m tests.distributed.two_processes RANK FILE``.

Energies must be those of each module alone, to the last bit, whatever makes the two processes equal.
"""

import copy
import sys
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nvalchemiops.torch.interactions.dispersion import DFTD3
from nvalchemiops.torch.interactions.electrostatics import EwaldSummation, ParticleMeshEwald
from tests.support.molecules import molecule, parameters
from tests.support.systems import triclinic


class Charged(torch.nn.Module):
    """Energies of some terms, with charges that are trained."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.layer = torch.nn.Linear(1, 2, dtype=torch.float64)
        x, self.charges, cell, _ = triclinic((6, 11)[rank])
        self.positions, self.cell = (1.0 + 0.3 * rank) * x, (1.0 + 0.3 * rank) * cell
        self.terms = torch.nn.ModuleDict()
        for kind in (EwaldSummation, ParticleMeshEwald):
            for prepared in (False, True):
                term = kind.estimate(self.positions, self.cell, accuracy=1e-4, charges=self.charges)
                self.terms[f"{kind.__name__} {prepared}"] = term.prepare(self.cell) if prepared else term
        self.atoms = molecule(("HCl", "H2O")[rank]).arguments()
        functional, elements, cutoff = (("pbe", [1, 17], 20.0), ("b3lyp", [1, 8], 30.0))[rank]
        self.dispersion = DFTD3(functional, elements, parameters(), cutoff=cutoff, coordination_cutoff=15.0)

    def forward(self) -> torch.Tensor:
        """Of terms with charges, then of dispersion."""
        charges = self.charges * (1.0 + 0.1 * self.layer(self.charges[:, None]).mean(1))
        energies = [term(self.positions, charges, self.cell).sum() for term in self.terms.values()]
        return torch.stack([*energies, self.dispersion(**self.atoms)[0].sum()])


def train(model: Charged, wrapped: Callable[[], torch.Tensor], weights: Callable[[], dict[str, torch.Tensor]]) -> None:
    """Some steps; before and after each the energies are those of terms that nothing has touched."""
    alone, optimizer = Charged(dist.get_rank()), torch.optim.SGD(model.parameters(), lr=1e-2)
    before = weights()
    for _ in range(3):
        alone.layer.load_state_dict(weights())
        energies = wrapped()
        torch.testing.assert_close(energies.detach(), alone().detach(), rtol=0.0, atol=0.0)
        energies.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(before["weight"], weights()["weight"])


def data_parallel(model: Charged) -> None:
    """DDP broadcasts parameters when it is made, and buffers in each step as well."""
    wrapped = DistributedDataParallel(model)
    train(model, wrapped, lambda: copy.deepcopy(model.layer.state_dict()))
    every = [torch.zeros_like(model.layer.weight) for _ in range(2)]
    dist.all_gather(every, model.layer.weight.detach())
    assert torch.equal(*every), "what is trained is the same in all processes"


def sharded(model: Charged) -> None:
    """FSDP, in its first form."""
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))

    def weights() -> dict[str, torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(wrapped):
            return copy.deepcopy(model.layer.state_dict())

    train(model, wrapped, weights)


def sharded_by_parameter(model: Charged) -> None:
    """FSDP, in its second form; then state dicts through its means for them."""
    wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (2,)))

    def weights() -> dict[str, torch.Tensor]:
        return {name: value.full_tensor().detach().clone() for name, value in model.layer.state_dict().items()}

    train(model, wrapped, weights)

    # what each had comes back to each
    before = wrapped().detach()
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, get_model_state_dict(model, options=options), options=options)
    torch.testing.assert_close(wrapped().detach(), before, rtol=0.0, atol=0.0)


def one_checkpoint_for_all(model: Charged) -> None:
    """What the first process has saved makes its modules of all: whole, so they say that this is another cell."""
    del model.dispersion  # of other elements, which is an error
    saved = get_model_state_dict(model) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, saved, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    here, first = model, Charged(0)
    first.layer.load_state_dict(here.layer.state_dict())
    for name, term in here.terms.items():
        energies = (module(first.positions, first.charges, first.cell) for module in (term, first.terms[name]))
        torch.testing.assert_close(*energies, rtol=0.0, atol=0.0)
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"another `cell`.*DistributedDataParallel.*state dict"):
            here.terms["ParticleMeshEwald True"](here.positions, here.charges, here.cell)
        with pytest.warns(UserWarning, match=r"prepared for another cell.*DistributedDataParallel.*state dict"):
            here.terms["EwaldSummation True"](here.positions, here.charges, here.cell)


def broadcast_by_hand(model: Charged) -> None:
    """In place, into the tensors of a state dict: parameters change, and nothing else."""
    for value in model.state_dict().values():
        if value.is_floating_point():
            dist.broadcast(value, 0)
    train(model, model, lambda: copy.deepcopy(model.layer.state_dict()))


WAYS = (data_parallel, sharded, sharded_by_parameter, one_checkpoint_for_all, broadcast_by_hand)

if __name__ == "__main__":
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    for way in WAYS:
        print(way.__name__, flush=True)
        way(Charged(rank))
    dist.barrier()
    dist.destroy_process_group()
    print("done", flush=True)
