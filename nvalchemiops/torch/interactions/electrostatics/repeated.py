"""Ewald sums that are called again and again with the same shapes, cells and parameters, as in dynamics.

One of the first calls is recorded as a plan (`nvalchemiops.torch.runtime.plans`), which further calls run. Only in
plain eager mode on a CPU, for neighbors that are given, and without gradients by cells and parameters. First
derivatives are taken along as in `nvalchemiops.torch.interactions.electrostatics.first_derivatives`; for all else the
ordinary way is taken.
"""

from collections.abc import Callable, Hashable, Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch

from nvalchemiops.layout import layout
from nvalchemiops.locks import Kept
from nvalchemiops.torch.interactions.electrostatics import first_derivatives
from nvalchemiops.torch.interactions.electrostatics.potentials import COULOMB, LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.results import Derivatives, SumRequest
from nvalchemiops.torch.interactions.electrostatics.sizes import MOST_SYSTEMS
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, Rows
from nvalchemiops.torch.runtime import plans
from nvalchemiops.torch.runtime._torch_internals import (
    PLAIN_TYPES,
    has_function_modes,
    has_saved_tensor_hooks,
    is_unobserved,
    version_of,
)
from nvalchemiops.torch.runtime.context import eager
from nvalchemiops.torch.runtime.openmp import fairly
from nvalchemiops.torch.systems import System

MOST_ATOMS = 2048
"""Atoms up to which sums become plans; larger ones take far longer than the Python around them."""

MOST_CALLS = 8
"""Kinds of calls that are remembered, each with its plan if it has one."""

enabled = True
"""False: all calls take the ordinary way, for comparisons."""

RECORDED = 2
"""The call of its kind that is recorded, when a call with the same shapes was there before. A later one, after plans
that were given up too soon, as where each cell is used for a few calls."""

PAID = 16
"""Calls after which a plan has saved the time that its recording took, which is that of several calls."""

RECENT = 64
"""Shapes of calls that are remembered, for batches with their cells and compositions."""

SMALL = 64
"""Elements up to which the values of tensors are part of a key. Larger ones, of prepared data, are recognized by
themselves and then compared with the values that they had: NumPy and ``.data`` change them without a new version.
Cells and systems of atoms are always compared by value, since callers make them anew."""

Sum = Callable[[System, SumRequest, bool], torch.Tensor | tuple[torch.Tensor, ...]]
"""Of atoms, what is requested, and whether results are a graph of ops."""


class _Call:
    """Calls of one kind: how many there were, and their plan."""

    def __init__(self, prepared: Sequence[torch.Tensor]) -> None:
        self.count = 0
        self.is_tried = False
        self.plan: plans.Plan | None = None
        self.prepared = prepared  # so that no other tensor gets their identity
        self.values: list[torch.Tensor] = []  # of these, when the plan was made

    def is_as_recorded(self) -> bool:
        """Whether prepared data have the values that they had when the plan was made."""
        return all(map(torch.equal, self.prepared, self.values))


_recent: dict[Hashable, None] = {}
_calls: Kept[_Call] = Kept(MOST_CALLS)
_patience = RECORDED


@eager
def repeated_sum(
    ordinary: Sum,
    atoms: System,
    neighbors: GivenNeighbors | Rows | None,
    request: SumRequest,
    others: tuple[Any, ...],
    with_gradients: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, ...] | None:
    """The results of ``ordinary(atoms, request, False)`` by a plan, or None if there is none for these arguments.

    Parameters
    ----------
    ordinary : callable
    atoms, neighbors, request
        As of `driver.ewald_sum`, in plain eager mode. Without neighbors: of a sum that needs none.
    others : tuple
        All other arguments on which results depend.
    with_gradients : bool
        Whether `first_derivatives.evaluate` takes first derivatives along, so that a plan may as well.
    """
    positions, charges, cell, batch_idx, pbc, _, domain, dipoles, quadrupoles, widths = atoms
    if not enabled or pbc is not None or domain is not None or request.hybrid:
        return None
    # what is wrong is left to the ordinary way
    if type(charges) is not torch.Tensor or type(positions) is not torch.Tensor or type(cell) is not torch.Tensor:
        return None
    if positions.ndim != 2 or charges.ndim not in (1, 2) or cell.ndim not in (2, 3) or cell.shape[-2:] != (3, 3):
        return None
    if not 9 <= cell.numel() <= 9 * (1 if batch_idx is None else MOST_SYSTEMS):
        return None
    if not (0 < positions.shape[0] <= MOST_ATOMS and positions.is_contiguous() and charges.is_contiguous()):
        return None
    sources = [charges]
    for values, components in ((dipoles, (3,)), (quadrupoles, (3, 3))):
        if values is not None:
            if type(values) is not torch.Tensor or values.shape != (*charges.shape, *components):
                return None
            sources.append(values)
    if any(t.dtype is not positions.dtype for t in sources[1:]):
        return None
    near = () if neighbors is None else neighbors
    length = _length(near, positions.shape[0])
    forms = (_form(positions), *map(_form, (charges, dipoles, quadrupoles)), *(_form(value, length) for value in near))
    if None in forms:
        return None
    small: list[torch.Tensor] = []
    large: list[torch.Tensor] = []
    try:
        of_systems = _fixed((cell, batch_idx), small, large, 9 * MOST_SYSTEMS)
        # lists of a length that changes, and batches of other molecules in each call, cost no more than this
        recent = forms if batch_idx is None else (forms, hash(of_systems))
        if recent not in _recent:
            if len(_recent) >= RECENT:
                _recent.clear()
            _recent[recent] = None
            return None
        fixed = _fixed((widths, others), small, large)
    except (TypeError, RuntimeError):  # a tensor that NumPy cannot have
        return None
    used, constants = [value for value in near if isinstance(value, torch.Tensor)], (*small, *large)
    moving = (positions, *sources)
    tensors = (*moving, *used, *constants)
    if of_systems is None or fixed is None or not (used or neighbors is None):
        return None
    if has_function_modes() or not is_unobserved(*tensors):
        return None
    if not all([layout(t.device.type).reads for t in tensors]):
        return None
    asked, computed, tracked = request.derivatives, request.derivatives, False
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        if not with_gradients:
            return None
        by_positions, by_charges = positions.requires_grad, any(t.requires_grad for t in sources)
        if any(asked) or any(t.requires_grad for t in (*used, *constants)):
            return None
        if has_saved_tensor_hooks():  # checkpoints count what is saved, which is not the same with a plan
            return None
        computed, tracked = Derivatives(by_positions, by_charges), True
    of_sources = None if tracked else request.of_sources
    key = (of_systems, fixed, forms, request.energy_reduction, computed, of_sources, layout("cpu"))
    call, is_due = _noted(key, large)
    if call.plan is None:
        if not is_due or plans.share_memory(used, constants):
            return None
        call.values = [t.detach().clone() for t in large]
    elif not call.is_as_recorded():
        return None

    if not tracked and call.plan is not None:
        plan = call.plan
        planned = fairly(lambda *moving: plan(moving, used, length) or (), *moving)
        if planned:
            return planned if len(planned) > 1 else planned[0]
    names = _given_sources(atoms)

    def evaluate(
        positions: torch.Tensor, sources: Sequence[torch.Tensor], cell: torch.Tensor, derivatives: Derivatives
    ) -> tuple[torch.Tensor, ...]:
        as_graph, found = tracked and torch.is_grad_enabled(), None
        values: dict[str, Any] = dict(zip(names, sources))
        here, wanted = (
            System(positions, cell=cell, batch_idx=batch_idx, widths=widths)._replace(**values),
            request._replace(derivatives=derivatives),
        )
        if tracked and derivatives.charge_gradients:
            wanted = wanted._replace(of_sources=(True, dipoles is not None, quadrupoles is not None))
        if not as_graph:
            found = _planned(call, ordinary, here, wanted, used, small, length)
        if found is None:
            results = ordinary(here, wanted, as_graph)
            found = results if isinstance(results, tuple) else (results,)
        return found

    cells = cell.reshape(-1, 3, 3)
    if not tracked:
        results = fairly(lambda x, h, *values: evaluate(x, values, h, asked), positions, cells, *sources)
        return results if len(results) > 1 else results[0]
    has_channels = charges.ndim == 2

    def columns(
        positions: torch.Tensor,
        charges: torch.Tensor,
        cell: torch.Tensor,
        *others: torch.Tensor,
        derivatives: Any,
        with_dyads: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        energies, *found = evaluate(
            positions, [charges if has_channels else charges.squeeze(1), *others], cell, derivatives
        )
        if not has_channels:
            energies = energies.unsqueeze(1)
            if derivatives.charge_gradients:
                found[derivatives.forces] = found[derivatives.forces].unsqueeze(1)
        return (energies, *found)

    inputs = (positions, charges if has_channels else charges.unsqueeze(1), cells, *sources[1:])
    (energies,) = first_derivatives.differentiable(columns, request, batch_idx, inputs, (*used, *constants))
    return energies if has_channels else energies.squeeze(1)


def _given_sources(atoms: System) -> list[str]:
    return [name for name in ("charges", "dipoles", "quadrupoles") if getattr(atoms, name) is not None]


def _planned(
    call: _Call,
    ordinary: Sum,
    atoms: System,
    request: SumRequest,
    used: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor],
    length: int,
) -> tuple[torch.Tensor, ...] | None:
    """Results by the plan of a call, which is recorded if there is none; None if that is not possible."""
    names = ("positions", *_given_sources(atoms))
    moving = [getattr(atoms, name).detach() for name in names]
    if call.plan is not None:
        return call.plan(moving, used, length)

    def function(memory: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        values: dict[str, Any] = dict(zip(names, memory))
        if atoms.batch_idx is not None:  # a copy, which torch's operations may use, too
            values["batch_idx"] = atoms.batch_idx.clone()
        results = ordinary(atoms._replace(**values), request, False)
        return results if isinstance(results, tuple) else (results,)

    call.plan, results = plans.record(function, moving, used, constants, length)
    return results


def _noted(key: Hashable, prepared: Sequence[torch.Tensor]) -> tuple[_Call, bool]:
    """The calls of this kind, one more than before, and whether this one is to be recorded."""
    global _patience
    call = _calls.find(key)
    if call is None:
        call = _Call(prepared)
        for oldest in _calls.keep(key, call):
            if oldest.plan is not None:
                _patience = RECORDED if oldest.count >= PAID else min(2 * _patience, PAID)
    call.count += 1
    is_due = not call.is_tried and call.count >= _patience
    call.is_tried |= is_due
    return call, is_due


def _length(near: Sequence[Any], n_atoms: int) -> int:
    """Pairs of a list with pointers, of which a plan may have any number; 0 for a matrix, or where shapes are fixed."""
    pairs: Any = None
    pointers: Any = None
    if isinstance(near, GivenNeighbors):
        pairs, pointers = near.neighbor_list, near.neighbor_ptr
    elif isinstance(near, Rows):
        pairs, pointers = near.neighbors, near.pointers
    if not isinstance(pairs, torch.Tensor) or not isinstance(pointers, torch.Tensor) or pairs.ndim not in (1, 2):
        return 0
    tensors = [value for value in near if isinstance(value, torch.Tensor)]
    # an axis of another meaning is never so long
    is_known = pairs.shape[-1] > n_atoms + 1 and all(t.is_contiguous() and t.dtype is torch.int32 for t in tensors)
    return pairs.shape[-1] if is_known else 0


def _form(value: Any, length: int = 0) -> Hashable:
    """What tells two calls apart whose results differ by the values of this tensor alone; None if that is not known.

    Axes with ``length`` may have any.
    """
    kind = type(value)
    if kind in _IMMUTABLE:
        return kind, value
    if isinstance(value, torch.Tensor):
        if length and length in value.shape:
            return tuple([-1 if size == length else size for size in value.shape])
        return None if value.layout is not torch.strided else (value.shape, value.dtype, value.stride())
    return None


def _fixed(
    values: tuple[Any, ...], small: list[torch.Tensor], large: list[torch.Tensor], most: int = SMALL
) -> tuple[Any, ...] | None:
    """What tells ``values`` apart; None if that is not known.

    Tensors among them are added to ``small`` if their values are part of it, which have up to so many elements, and to
    ``large`` if they are recognized by themselves.
    """
    found: list[Any] = []
    for value in values:
        kind, key = type(value), value
        if kind in _IMMUTABLE:
            pass
        elif isinstance(value, torch.Tensor):
            if kind not in PLAIN_TYPES or not layout(value.device.type).reads:
                return None
            is_small = value.numel() <= most
            (small if is_small else large).append(value)
            if is_small:
                key = (value.dtype, value.shape, value.detach().resolve_neg().numpy().tobytes())
            else:
                key = (id(value), version_of(value), value.data_ptr(), value.dtype, value.shape, value.stride())
        elif isinstance(value, tuple):
            key = _fixed(value, small, large, most)
            if key is None:
                return None
        elif not isinstance(value, np.generic):
            return None
        found.append(kind)
        found.append(key)
    return tuple(found)


_WITHOUT_TENSORS = {LongRangePotential, type(COULOMB)}

_IMMUTABLE = {type(None), bool, int, float, str, MethodType, *_WITHOUT_TENSORS}
"""Types whose objects do not change. Others may convert to another number in each call."""
