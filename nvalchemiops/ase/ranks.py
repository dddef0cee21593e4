"""`on_ranks`: a calculator whose atoms are divided among the ranks of torch.distributed; rank 0 has all atoms."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import ase
import numpy as np
import torch
import torch.distributed as dist

from nvalchemiops.ase.calculator import Calculator
from nvalchemiops.ase.system import Contribution, Periodicity, System, Term, periodicity
from nvalchemiops.torch.distributed import Domain, OtherRankError, fail_together
from nvalchemiops.torch.distributed.communication import messages_of, tell_from

Result = TypeVar("Result")

GOES_ON = (ValueError, TypeError, OtherRankError)
"""Errors that all ranks raise together; afterwards the calculator can be called again."""


def on_ranks(
    main: Callable[[Calculator], Result], *terms: Term, skin: float = 0.5, device: str = "cpu", group: Any = None
) -> Result | None:
    """Call ``main(calculator)`` on rank 0, with a calculator whose terms are computed by all ranks.

    A collective call. The other ranks compute until ``main`` returns; if it raises or is interrupted, they raise, too.
    They receive elements, charges and cell when these change, and positions at each call. Atoms are divided again when
    one has moved by half of the skin.

    Parameters
    ----------
    main : callable
        Dynamics, an optimizer or any other use of ASE, which only rank 0 runs.
    *terms, skin, device
        As for `Calculator`; all except the device must be the same on all ranks. Terms of this library are supported.
        Other terms need a method ``reach(atoms)``, which returns the distance up to which atoms interact, and must
        compute energies of the atoms in ``system.positions`` with ``system.neighbors(cutoff)["domain"]``.
    group : torch.distributed.ProcessGroup, optional
        The ranks to use; all by default.

    Returns
    -------
    result of ``main`` on rank 0, None on other ranks.

    Raises
    ------
    ValueError, TypeError
        As for `Calculator`; when atoms are evaluated, also for terms without a cutoff, and charges given by a function.
    RuntimeError
        torch.distributed has not been initialised.
    OtherRankError
        A rank has failed: rank 0 in ``main``, or another one in a calculation, or it has ended.

    Notes
    -----
    Each call sends all positions from rank 0, and energies and forces back to it, 56 bytes per atom. If this takes as
    long as the sums, write the dynamics with a `Domain` instead. Other ranks wait for rank 0 no longer than the timeout
    of ``init_process_group``.
    """
    if not dist.is_initialized():
        raise RuntimeError("`on_ranks` needs torch.distributed: start ranks by torchrun, and call init_process_group")
    group = dist.group.WORLD if group is None else group
    calculator = RankCalculator(*terms, skin=skin, device=device, group=group)
    with fail_together(group):
        return _run(main, calculator)


def _run(main: Callable[[Calculator], Result], calculator: "RankCalculator") -> Result | None:
    if dist.get_rank(calculator.group) != 0:
        calculator.serve()
        return None
    try:
        result = main(calculator)
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the error of `main` is more informative
            calculator.end(f"{type(error).__name__}: {error}")
            # if `main` ended in the middle of a call, other ranks wait in it
            messages_of(calculator.group).show(calculator.group)
        raise
    calculator.end(None)
    return result


class RankCalculator(Calculator):
    """A `Calculator` on a group of ranks; see `on_ranks`."""

    def __init__(self, *terms: Term, skin: float, device: str, group: Any) -> None:
        super().__init__(*terms, skin=skin, device=device)
        for term in terms:
            if not callable(getattr(term, "reach", None)):
                raise TypeError(f"`terms`: {term!r} has no method `reach`, which returns the range of its interaction")
        self.group = group
        self.skin = float(skin)
        self._first = dist.get_global_rank(group, 0)
        self._domain: Domain | None = None
        self._made_for: tuple[Any, ...] | None = None
        self._known: dict[str, Any] = {}
        self._atoms = ase.Atoms()
        self._has_ended = False

    def tell(self, what: dict[str, Any] | str | None) -> Any:
        """Send the message of rank 0 to all ranks: the changed data; at the end its error, or None."""
        return tell_from(self._first, what, self.group, self.device)

    def end(self, error: str | None) -> None:
        """Report the end of `on_ranks` from rank 0, with the error that has ended it."""
        self._has_ended = True
        self.tell(error)

    def serve(self) -> None:
        """Compute with rank 0 until it reports the end."""
        while (message := self.tell(None)) is not None:
            if isinstance(message, str):
                raise OtherRankError(f"rank {self._first} failed: {message}")
            try:
                with torch.no_grad():
                    self._share(message, None)
            except GOES_ON:
                continue

    def _evaluate(self, atoms: ase.Atoms, wants_virial: bool) -> list[Contribution]:
        if self._has_ended:
            raise RuntimeError(
                "the calculator belongs to `on_ranks`, which has returned: the other ranks no longer compute with it. "
                "Use it inside of `main`, or make a Calculator, which works without other ranks"
            )
        now = {"numbers": atoms.numbers, "cell": atoms.cell.array, "pbc": atoms.pbc}
        now["charges"] = atoms.get_initial_charges() if atoms.has("initial_charges") else None
        known = self._known
        changed = (name for name in now if name not in known or not np.array_equal(known[name], now[name]))
        message = {name: copy.copy(now[name]) for name in changed}
        message["wants_virial"] = wants_virial
        self.tell(message)
        return self._share(message, atoms.positions)

    def _share(self, message: dict[str, Any], positions: np.ndarray | None) -> list[Contribution]:
        """The contributions to all atoms on rank 0, and to no atoms on other ranks."""
        self._known |= message
        known = self._known
        if len(message) > 1:
            self._atoms = ase.Atoms(known["numbers"], cell=known["cell"], pbc=known["pbc"], charges=known["charges"])
        held = torch.as_tensor(np.empty((0, 3)) if positions is None else positions, device=self.device)
        cell = None
        if self._atoms.pbc.any():
            cell = torch.tensor(self._atoms.cell.array, dtype=torch.float64, device=self.device)
        domain, own = self._divided(held.to(self.device, torch.float64), cell)
        system = _Share(self._atoms, own, cell, message["wants_virial"], self._lists, domain)
        parts = [term.evaluate(system) for term in self.terms]
        if not all(np.ndim(part.energies) for part in parts):
            raise ValueError(
                "a term returned one energy: on several ranks it must return those of the atoms in `system.positions`"
            )
        gathered = []
        for part in parts:
            values = {name: value for name, value in part._asdict().items() if name != "virial" and value is not None}
            columns = [value if value.ndim == 2 else value.unsqueeze(1) for value in values.values()]
            found = domain.gather(torch.cat(columns, 1)).split([column.shape[1] for column in columns], 1)
            whole = {name: f.clone().squeeze(1) for name, f in zip(values, found)}
            gathered.append(part._replace(**whole))
        return gathered

    def _divided(self, held: torch.Tensor, cell: torch.Tensor | None) -> tuple[Domain, torch.Tensor]:
        """The domain of these positions, or an earlier one that is still valid; and positions of owned atoms."""
        atoms = self._atoms
        # a method that terms need only here; its existence has been checked
        reaches = [term.reach(atoms) for term in self.terms]  # type: ignore[attr-defined]
        if None in reaches:
            raise ValueError("`cutoff` is needed on several ranks: without it each atom is a neighbor of all others")
        made_for = (max(reaches), atoms.pbc.tobytes(), len(atoms))
        domain = self._domain
        if domain is not None and made_for == self._made_for:
            own = domain.distribute(held)
            if 2.0 * domain.displacement(own, cell) <= self.skin:
                return domain, own
        pbc = None if cell is None else torch.tensor(atoms.pbc, device=self.device)
        self._domain = domain = Domain(held, cell, pbc, cutoff=max(reaches), skin=self.skin, group=self.group)
        self._made_for = made_for
        self._lists.searches += 1  # which has none itself
        return domain, domain.distribute(held)


@dataclasses.dataclass(frozen=True)
class _Share(System):
    """The atoms that a rank owns; ``atoms`` holds all atoms, without positions."""

    domain: Domain

    def of_atoms(self, values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return super().of_atoms(values, dtype).index_select(0, self.domain.global_index)

    def neighbors(self, cutoff: float | None, pbc: Periodicity | None = None) -> dict[str, Any]:
        if cutoff is None:
            raise ValueError("`cutoff` is needed on several ranks")
        if pbc is None or pbc == periodicity(self.atoms.pbc):
            return {"domain": self.domain}
        lattice = self.domain._of_lattice()
        if not lattice._is_periodic or not all(pbc):
            raise ValueError(
                "`pbc`: on several ranks all terms have the periodicity of the atoms, or all axes of a slab, whose "
                "cell then needs a volume"
            )
        return {"domain": lattice}

    def pairs(self, cutoff: float | None) -> NoReturn:
        raise ValueError("`charges`: a function of the geometry is for one process")

    def with_gradients(self) -> NoReturn:
        raise ValueError("`charges`: a function of the geometry is for one process")
