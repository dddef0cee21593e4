"""Sums of terms as calls of the engine: energies, with first derivatives if requested or needed."""

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from nvalchemiops.layout import layout
from nvalchemiops.torch.interactions.electrostatics.results import (
    Contribution,
    Derivatives,
    SumRequest,
    Term,
    complete,
    total,
)
from nvalchemiops.torch.interactions.electrostatics.sources import by_source, check_sources
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.interactions.electrostatics.terms.pairs import PairTerm
from nvalchemiops.torch.neighbors.rows import Rows
from nvalchemiops.torch.operators.lattice import lattice_of, nan_if_singular
from nvalchemiops.torch.operators.segments import totals
from nvalchemiops.torch.runtime import engine
from nvalchemiops.torch.runtime.streams import beside
from nvalchemiops.torch.systems import System
from nvalchemiops.torch.types import Tensors


def evaluate(
    terms: Sequence[Term],
    system: ChargedSystem,
    request: SumRequest,
    is_constant: bool,
    near: Rows | None = None,
    options: tuple[Any, ...] | str = engine.UNKNOWN,
    chosen: Sequence[torch.Tensor] = (),
    choice: Hashable = None,
) -> tuple[torch.Tensor, ...]:
    """The results of a sum: energies, then the derivatives that were requested.

    Tensors of ``terms`` must not change until the backward pass. ``is_constant``: the terms are known to depend on no
    other tensors than their fields and those of the system.

    The others are for a plan. ``near`` is the list that the terms hold; its ``neighbors`` may be both rows (2, n_slots)
    of a list of pairs. ``options`` are as for `engine.Call`. ``chosen`` are tensors among those of ``terms`` and
    ``options`` that follow from cells, positions and charges; a plan for any values of them is for these cells alone,
    unless ``choice``, as of `KVectorSum`, is None.
    """
    given: Any = () if near is None else near
    fixed = tuple(terms)

    def prepare(inputs: Sequence[torch.Tensor], near: Any, *others: torch.Tensor) -> engine.Body:
        # nothing is chosen again in a traced graph, and torch 2.11 cannot trace the id of a tensor
        changed: dict[int, Any] = dict(zip(map(id, chosen), others)) if others else {}
        if near is not given:  # it is in the memory of a graph
            both = near.neighbors.ndim > 1
            rows = near._replace(first=near.neighbors[0], neighbors=near.neighbors[1]) if both else near
            changed |= {id(term.rows): rows for term in fixed if isinstance(term, PairTerm)}
        return body_of(_with(fixed, changed), system, request)

    def in_general(call: engine.Call) -> engine.Call:
        others = _with(options, dict.fromkeys(map(id, (*chosen, choice))))
        return call._replace(options=others, prepared=tuple(chosen), n_moving=3 if choice is None else call.n_moving)

    inputs = (system.positions, system.moments, system.cell)
    own = (*terms, system.widths)
    call = engine.Call(
        "sum",
        prepare,
        inputs,
        2,
        given,
        (system.batch_idx, system.widths, system.slab_axes, system.has_channels),
        options if system.domain is None else "ranks share it",
        along=is_constant and request.has_first_derivatives,
        in_general=in_general,
        others=own,
        batch_idx=system.batch_idx,
        n_systems=system.n_systems,
        by_system=request.energy_reduction == "system",
        domain=system.domain,
    )
    has_key = near is not None and system.domain is None and not torch.compiler.is_compiling()
    if has_key and not layout(system.positions.device.type).reads:
        call = in_general(call)._replace(in_general=None)  # values of a GPU are no part of a key
    return complete(engine.run(call), system, request)


def _with(value: Any, others: dict[int, Any]) -> Any:
    """``value`` with ``others``, by the id of the tensors and tuples whose places they take in nested tuples."""
    if not others:  # torch 2.11 cannot trace the id of a tuple
        return value
    if id(value) in others:
        return others[id(value)]
    if not isinstance(value, tuple):
        return value
    parts = [_with(part, others) for part in value]
    if all(map(operator.is_, parts, value)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def one_or_several(results: tuple[torch.Tensor, ...]) -> Tensors:
    """The results as public functions return them: a tensor for a single result, otherwise a tuple."""
    return results if len(results) > 1 else results[0]


def body_of(
    terms: Sequence[Term], system: ChargedSystem, request: SumRequest, given: System | None = None
) -> engine.Body:
    """The sum as a function of its inputs.

    The inputs are positions, moments and cell of ``system``. If the atoms are ``given`` as passed by the caller, they
    are positions, charges, further sources, and the cell.
    """

    def body(inputs: Sequence[torch.Tensor] | None, needed: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        here = system
        if inputs is not None:
            if given is not None:
                inputs = _of_given(given, inputs)
            positions, moments, cell = inputs
            here = system._replace(positions=positions, moments=moments, cell=cell)
        by_positions, *by_sources, by_cell = needed or (False, False, False)
        asked = request.derivatives
        computed = Derivatives(
            asked.forces or by_positions or by_cell,
            asked.charge_gradients or any(by_sources),
            asked.virial or by_cell,
        )
        contributions = _contributions(terms, here, computed)
        found: Any = total(contributions, here, request.energy_reduction)

        def one_channel(values: torch.Tensor) -> torch.Tensor:
            return values if here.has_channels else values.squeeze(1)

        results = [one_channel(found.energies)]
        if asked.forces:
            results.append(found.forces)
        if asked.charge_gradients:
            results += by_source(one_channel(found.charge_gradients), request.of_sources)
        if asked.virial:
            results.append(found.virial)
        if by_positions:
            results.append(-found.forces)
        if any(by_sources):
            gradients = found.charge_gradients
            # in separate memory, since callers may change results
            gradients = gradients.clone() if asked.charge_gradients else gradients
            if given is None:
                results.append(gradients)
            else:
                there = (True, given.dipoles is not None, given.quadrupoles is not None)
                each = by_source(one_channel(gradients), there)
                results += [gradient for gradient, is_needed in zip(each, by_sources) if is_needed]
        if by_cell:
            results.append(_by_cell(contributions, here, found))
        return tuple(results)

    return body


def _contributions(terms: Sequence[Term], system: ChargedSystem, derivatives: Derivatives) -> Sequence[Contribution]:
    """The contributions of terms. On several ranks with GPUs messages of the last term travel while pairs are summed.

    The last term is the one with long messages, of a mesh or of structure factors.
    """
    if system.domain is None or len(terms) == 1:
        return [term.evaluate(system, derivatives) for term in terms]
    *others, last = terms
    found, of_last = beside(
        lambda: [term.evaluate(system, derivatives) for term in others],
        lambda: last.evaluate(system, derivatives),
        system.positions.device,
        (system, last),
    )
    return [*found, of_last]


def _of_given(given: System, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Positions, moments and cells (n_systems, 3, 3) from positions, charges, further sources and cell."""
    positions, charges, *others, cell = inputs
    waiting = iter(others)
    dipoles = None if given.dipoles is None else next(waiting)
    quadrupoles = None if given.quadrupoles is None else next(waiting)
    moments, _ = check_sources(charges, dipoles, quadrupoles, None, positions)
    return positions, moments, nan_if_singular(cell.reshape(-1, 3, 3))


def _by_cell(contributions: Sequence[Contribution], system: ChargedSystem, found: Any) -> torch.Tensor:
    """The gradient dE/dh for cells h (n_systems, 3, 3) in float64: the virial is ``Σ x_i F_i^T - h^T dE/dh``."""
    positions = system.positions
    if positions.dtype is torch.float32:
        dyads = _dyads(contributions, system)
    else:
        dyads = totals(positions.unsqueeze(-1) * found.forces.unsqueeze(-2), system.batch_idx, system.n_systems)
    return lattice_of(system.cell.detach(), None, 0).inverse.mT @ (dyads - found.virial)


def _dyads(contributions: Sequence[Contribution], system: ChargedSystem) -> torch.Tensor:
    """``Σ x F^T`` (n_systems, 3, 3) for positions in float32, which may be far from the origin.

    Terms over pairs have forces in float32, whose rounding errors would be multiplied by large positions. Such forces
    add up to zero, so the origin does not matter: positions are taken relative to the middle of the system. The
    long-range term has forces in float64, which need no such care. On a mesh they add up to zero only to its accuracy,
    so their origin must be the corner (0, 0, 0) of the cell.
    """
    x, batch_idx, n_systems = system.positions.to(torch.float64), system.batch_idx, system.n_systems
    middle = system.totals(torch.cat([x, torch.ones_like(x[:, :1])], 1))
    middle = middle[:, :3] / middle[:, 3:]  # NaN without atoms, which then take none of it
    near = x - (middle if batch_idx is None else middle.index_select(0, batch_idx))
    dyads = [
        (near if forces.dtype is torch.float32 else x).unsqueeze(-1) * forces.to(torch.float64).unsqueeze(-2)
        for forces in (contribution.forces for contribution in contributions)
        if forces is not None
    ]
    return totals(torch.stack(dyads).sum(0), batch_idx, n_systems)
