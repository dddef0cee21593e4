"""The ranks of a domain: the checks in which they agree, and sums over them."""

import contextlib
import math
import weakref
from collections.abc import Callable
from typing import Any, overload

import torch
import torch.distributed as dist

from nvalchemiops.layout import layout
from nvalchemiops.torch.distributed.agreement import Agreement, kind_of, of_atoms
from nvalchemiops.torch.distributed.collectives import number_of, replicated, sum_of_shares, sum_on_all_ranks
from nvalchemiops.torch.distributed.communication import check_backend, maximum, messages_of
from nvalchemiops.torch.distributed.exchange import carried, check_rows
from nvalchemiops.torch.distributed.faults import in_call
from nvalchemiops.torch.distributed.ledger import Entry, Found, Ledger
from nvalchemiops.torch.distributed.modules import with_replicated_parameters


class _Joined:
    """A part of a call in a barrier that another part has begun, and ends.

    It is no `contextlib.nullcontext`, since torch.compile cannot leave one that has a value where a graph breaks.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement

    def __enter__(self) -> Agreement:
        return self.agreement

    def __exit__(self, *error: object) -> None:
        pass


class Ranks:
    """A group of ranks that make the same calls: what `Domain` does that is not about places of atoms.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
    device : torch.device

    Attributes
    ----------
    rank, n_ranks : int
        The number of this rank in the group, and how many there are.
    number : int
        From `number_of`.
    skin : float
        Ranks raise if atoms have moved by more than half of it.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device, self.skin = group, device, math.inf
        self.rank, self.n_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.number = number_of(group)
        check_backend(group, device)
        self._ledger: Ledger | None = None
        self._agreement: weakref.ref[Agreement] | None = None

    # -- agreement --------------------------------------------------------------------------------

    def _together(self, now: bool = False) -> contextlib.AbstractContextManager[Agreement]:
        """An error barrier around a part of a collective call; see `Agreement`. ``now``: whatever ``check`` says.

        Nested barriers join the outer one and send no message. At the end all ranks raise if atoms on one of them have
        moved too far.
        """
        # a part that an interrupt ended is gone with its frame
        agreement = None if self._agreement is None else self._agreement()
        if agreement is not None and not agreement.is_over:
            return _Joined(agreement)
        agreement = Agreement(self.group, self.device, self.skin) if now else self._barrier()
        self._agreement = weakref.ref(agreement)
        return agreement

    def _barrier(self, counts: bool = True) -> Agreement:
        """A new error barrier; one that ranks pass later if ``check`` says so, and no rank has just failed."""
        if self._ledger is None or messages_of(self.group).left:
            return Agreement(self.group, self.device, self.skin if counts else math.inf)
        return Entry(self._ledger, self.skin, counts)

    @property
    def is_deferred(self) -> bool:
        """Whether ranks compare after a call has gone on, so that it reads no values; see ``check``."""
        return self._ledger is not None

    def settle(self, *, raises: bool = True) -> Found:
        """Read what calls have found since the last reading, if they do not compare at once. A collective call.

        Call it before you use results of the last calls, and after captured calls were replayed.

        Returns
        -------
        Found
            The number of ``calls`` since the last reading, how many were ``wrong``, which was the ``first`` wrong one,
            and the ``largest`` displacement.

        Raises
        ------
        ValueError
            Atoms had moved too far in a call, unless ``raises`` is False, or an argument was not the same on all ranks.
        """
        return Found(0, 0, 0, 0.0) if self._ledger is None else self._ledger.settle(raises)

    # -- values -----------------------------------------------------------------------------------

    def _carried(
        self, move: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, n_rows: int | None = None
    ) -> torch.Tensor:
        """Return ``move(values)``, a collective call; raise on all ranks if shapes or dtypes do not fit together.

        With ``n_rows`` the values belong to atoms, and must have this many rows. Without the check, a message with
        different sizes would end the process, or deliver rows of other atoms. In compiled code, and where the host
        would wait for a GPU, ranks do not compare: each checks its own rows.
        """
        with in_call(self.group):
            if torch.compiler.is_compiling() or (self._ledger is None and not layout(self.device.type).reads):
                check_rows(values, n_rows)
            else:
                with self._barrier(counts=False) as agreement:
                    check_rows(values, n_rows)
                    told = f"{kind_of(values)} of shape {tuple(values.shape)}" if n_rows is None else of_atoms(values)
                    agreement.same["`values`"] = told
            return carried(move, values)

    def sum(self, shares: torch.Tensor) -> torch.Tensor:
        """Sum shares of a result that all ranks have in common, such as the energy. A collective call.

        Parameters
        ----------
        shares : (...) tensor
            Of the same shape on all ranks.

        Returns
        -------
        (...) tensor
            The sum, the same on all ranks. Each rank computes the same loss from it, which counts once: the gradient of
            a share is the gradient of the sum.
        """
        return self._carried(self._sum, shares)

    def _sum(self, shares: torch.Tensor) -> torch.Tensor:
        return sum_of_shares(shares, self.number)

    def sum_for_shares(self, values: torch.Tensor) -> torch.Tensor:
        """Sum values from which each rank then computes its own share of a result. A collective call.

        Parameters
        ----------
        values : (...) tensor
            Of the same shape on all ranks.

        Returns
        -------
        (...) tensor
            The sum. Its gradients are summed over the ranks, too.
        """
        return self._carried(self._sum_for_shares, values)

    def _sum_for_shares(self, values: torch.Tensor) -> torch.Tensor:
        return sum_on_all_ranks(values, self.number)

    @overload
    def replicated(self, values: torch.Tensor) -> torch.Tensor: ...

    @overload
    def replicated(self, values: torch.nn.Module) -> Callable[..., Any]: ...

    def replicated(self, values: torch.Tensor | torch.nn.Module) -> Any:
        """Mark a tensor that is the same on all ranks before it is combined with values of owned atoms.

        Parameters
        ----------
        values : (...) tensor or torch.nn.Module
            The same on all ranks, such as a parameter of a model, or a module with all of its parameters. A
            `torch.utils.checkpoint` in the module needs ``use_reentrant=False``; otherwise the first call raises a
            ValueError.

        Returns
        -------
        (...) tensor or callable
            The same values, or the module as a function. Gradients of the tensor or the parameters are summed over the
            ranks, in a collective call of the backward pass.
        """
        if isinstance(values, torch.nn.Module):
            return with_replicated_parameters(values, self.replicated)
        return carried(lambda values: replicated(values, self.number), values)

    def _maximum(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of the values over all ranks, without gradients. A collective call."""
        return maximum(values.detach().clone(), self.group)

    def _is_same(self, values: torch.Tensor) -> bool:
        """Whether values, of the same shape on all ranks, are equal on all of them. A collective call."""
        ends = self._maximum(torch.stack([values, -values]))
        return not bool((ends[0] > -ends[1]).any())  # NaN is no difference
