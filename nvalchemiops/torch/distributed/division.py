"""`divide`: systems, and states of dynamics and relaxations, which all ranks have, divided among them."""

import os
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from nvalchemiops.torch.batching import count_systems
from nvalchemiops.torch.distributed.agreement import Agreement, kind_of
from nvalchemiops.torch.distributed.bricks import check_weights
from nvalchemiops.torch.distributed.communication import check_backend
from nvalchemiops.torch.distributed.domain import Domain
from nvalchemiops.torch.distributed.faults import as_call
from nvalchemiops.torch.dynamics.relaxation_state import RelaxationState
from nvalchemiops.torch.dynamics.state import State
from nvalchemiops.torch.systems import System, of_each_atom

Atoms = TypeVar("Atoms", System, State, RelaxationState)


def divide(
    atoms: Atoms,
    *,
    cutoff: float,
    skin: float = 0.0,
    group: Any = None,
    grid: tuple[int, int, int] | None = None,
    weights: torch.Tensor | None = None,
    check: Literal["each", "later", "never"] | int = "each",
    per_atom: Iterable[str] = (),
) -> Atoms:
    """Divide a system, or a state of dynamics or of a relaxation, that is the same on all ranks. A collective call.

    For systems that each rank can hold once; for larger ones make a `Domain` of what each rank holds.

    One script runs with and without ranks: if ``torchrun`` has started the process, or ``WORLD_SIZE`` says that there
    are others, and there is no process group yet, it is initialized here, with NCCL for atoms on a GPU, otherwise with
    gloo. In a process without ranks the atoms are returned as they are.

    Parameters
    ----------
    atoms : System, State or RelaxationState
        All atoms, the same on all ranks; a state may come from a run on any number of ranks (`load_state`).
    cutoff, skin, group, grid, check
        As for `Domain`.
    weights : (n,) tensor, optional
        The work that each atom makes, as for `Domain`, but of all atoms, and the same on all ranks.
    per_atom : iterable of str, optional
        Names in ``extra`` of a state of values that your flows keep for each atom (`Flow.per_atom`).

    Returns
    -------
    System, State or RelaxationState
        The atoms that this rank owns, with a ``domain`` in which atoms have their numbers in ``atoms``. It *holds* an
        equal share of them, in their order: this is what ``domain.gather`` returns. ``domain.collect`` returns values
        of all atoms, on the first rank. Gradients with respect to ``atoms`` are complete on all ranks.

    Raises
    ------
    ValueError, TypeError
        A bad argument; atoms that are divided already, or that differ between ranks.

    Examples
    --------
    >>> from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald
    >>> own = divide(System(positions, charges, cell), cutoff=5.0)
    >>> forces = ParticleMeshEwald(accuracy=1e-4, cutoff=5.0)(own, compute_forces=True).forces
    """
    system: Any = getattr(atoms, "system", atoms)
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched() and os.environ.get("WORLD_SIZE", "") in ("", "1"):
            _check_kind(atoms)
            return atoms
        dist.init_process_group("nccl" if getattr(system, "positions", torch.empty(0)).is_cuda else "gloo")
    options = {"cutoff": cutoff, "skin": skin, "group": dist.group.WORLD if group is None else group, "grid": grid}
    return _divided(atoms, system, weights, per_atom, **options, check=check)


def _check_kind(atoms: Any) -> None:
    if not isinstance(atoms, System) and not hasattr(atoms, "system"):
        raise TypeError(f"`atoms` must be a System, a State or a RelaxationState, got {type(atoms).__name__}")


@as_call
def _divided(
    atoms: Any, system: Any, weights: torch.Tensor | None, per_atom: Iterable[str], *, group: Any, **options: Any
) -> Any:
    """See `divide`, among the ranks of a group."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    device = getattr(system, "positions", torch.empty(0)).device
    check_backend(group, device)
    with Agreement(group, device) as agreement:
        _check_kind(atoms)
        if system.domain is not None:
            raise ValueError("`atoms` have a `domain` already")
        for name, value in (system._asdict() | {"weights": weights}).items():
            is_tensor = isinstance(value, torch.Tensor)
            agreement.must_be_same(**{name: (kind_of(value), value.detach().cpu()) if is_tensor else value})
        if isinstance(atoms, State):
            agreement.must_be_same(step=atoms.step.cpu(), velocities=atoms.velocities.detach().cpu())
        elif isinstance(atoms, RelaxationState):
            agreement.must_be_same(evaluations=atoms.evaluations, x=atoms.record.x.cpu())
        if weights is not None:
            check_weights(weights, system.positions)
        n_systems, n_atoms = count_systems(system), len(system.positions)
    held = slice(n_atoms * rank // size, n_atoms * (rank + 1) // size)
    batch_idx = None if system.batch_idx is None else system.batch_idx[held]
    share = of_each_atom(system, lambda value: value[held])
    domain = Domain(
        *(share.positions, system.cell, system.pbc, batch_idx),
        num_systems=None if batch_idx is None else n_systems,
        group=group,
        weights=None if weights is None else weights[held],
        **options,
    )

    def bring(value: torch.Tensor) -> torch.Tensor:
        """The rows of owned atoms; each rank uses a part of a value that all have."""
        return domain.distribute((domain.replicated(value) if value.requires_grad else value)[held])

    if isinstance(atoms, State):
        return atoms.divided(domain, bring, per_atom)
    if isinstance(atoms, RelaxationState):
        return atoms.divided(domain, bring)
    return of_each_atom(system, bring)._replace(batch_idx=None, pbc=None, domain=domain)
