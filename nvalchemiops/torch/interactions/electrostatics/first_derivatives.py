"""First derivatives that are computed with the energies, for the backward pass.

Energies and their first derivatives share most of their work. Where energies will be differentiated, forces, charge
gradients and virial are computed at the same time, and the backward pass of a plain sum of energies is a product. For
any other backward pass (weights that differ within a system, derivatives of derivatives, gradients of forces) the sum
is evaluated again, as a graph of differentiable ops, and differentiated.

Used in eager mode on a CPU, where weights can be read at no cost; elsewhere the graph is always differentiated.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvalchemiops.layout import layout
from nvalchemiops.torch.interactions.electrostatics import results as sums
from nvalchemiops.torch.interactions.electrostatics.results import Contribution, Derivatives, Tensors
from nvalchemiops.torch.interactions.electrostatics.sources import quadrupole_gradients
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.operators.lattice import lattice_of
from nvalchemiops.torch.operators.segments import totals
from nvalchemiops.torch.runtime.context import is_eager, is_mapped
from nvalchemiops.torch.runtime.openmp import fairly
from nvalchemiops.torch.runtime.recorder import current_recorder


def evaluate(
    terms: Sequence[sums.Term],
    system: ChargedSystem,
    request: sums.SumRequest,
    is_constant: bool,
    as_graph: bool = False,
) -> Tensors:
    """The results of a sum: energies, then the derivatives that were requested.

    Parameters
    ----------
    terms : sequence of Term
        Their tensors must not change until the backward pass.
    system : ChargedSystem
    request : SumRequest
    is_constant : bool
        Whether the terms are known to depend on no tensors but their own and those of the system.
    as_graph : bool
        Results are a graph of ops in any case.
    """
    inputs = (system.positions, system.sources, system.cell)
    derivatives = request.derivatives

    def graph(
        positions: torch.Tensor, sources: torch.Tensor, cell: torch.Tensor, derivatives: Any, with_dyads: bool = False
    ) -> Any:
        here = system.of(positions, sources, cell)
        contributions = [term.evaluate(here, derivatives) for term in terms]
        results = sums.total(contributions, here, request.energy_reduction)
        return (*results, _dyads(contributions, here)) if with_dyads else results

    # in hybrid form first derivatives by charges are there, unless they are among the results and so in the graph
    one_order = not any(derivatives) or (request.hybrid and not derivatives.charge_gradients)
    others: list[torch.Tensor] | None = None
    if one_order and is_constant and not as_graph and torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        others = _tensors_in((*terms, system.widths)) if _on_cpu(inputs) else None
    if others is not None and not any(t.requires_grad for t in others):
        found = differentiable(graph, request, system.batch_idx, inputs, others, system.domain)
        results: Tensors = found if len(found) > 1 else found[0]
    else:
        results = fairly(functools.partial(graph, derivatives=derivatives), *inputs)
    if system.moments is not None:
        return _of_sources(results, system, request)
    if system.has_channels:
        return results
    single = results if isinstance(results, tuple) else (results,)
    names = ["energies", *_requested(derivatives)]
    columns = [r.squeeze(1) if name in ("energies", "charge_gradients") else r for name, r in zip(names, single)]
    return tuple(columns) if isinstance(results, tuple) else columns[0]


def differentiable(
    graph: Callable[..., Any],
    request: sums.SumRequest,
    batch_idx: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
    others: Sequence[torch.Tensor],
    domain: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Results with channels, whose first derivatives are computed at once.

    Parameters
    ----------
    graph : callable
        ``graph(positions, charges, cell, *sources, derivatives=, with_dyads=)``: energies and these derivatives, by
        all sources one after the other; with gradients enabled as a graph of ops.
    request : SumRequest
    batch_idx : (n_atoms,) int32 tensor, optional
    inputs : tuple
        Positions, charges with channels, cells, and further sources, if these are given apart.
    others : sequence of torch.Tensor
        On which ``graph`` depends, too: they must not change until the backward pass.
    domain : Domain, optional
    """
    fixed = (graph, request.derivatives, request.energy_reduction, domain, len(inputs) - 3, batch_idx)
    results = _WithDerivatives.apply(*fixed, *inputs, *others)
    return results if isinstance(results, tuple) else (results,)


def _of_sources(results: Tensors, system: ChargedSystem, request: sums.SumRequest) -> Tensors:
    """Results with gradients by each source in the place of those by moments, without channels if there are none."""
    single = results if isinstance(results, tuple) else (results,)
    found = []
    for name, result in zip(["energies", *_requested(request.derivatives)], single):
        if name in ("energies", "charge_gradients") and not system.has_channels:
            result = result.squeeze(1)
        if name != "charge_gradients":
            found.append(result)
            continue
        by_charges, by_dipoles, by_quadrupoles = request.of_sources
        found += [result[..., 0]] * by_charges
        found += [result[..., 1:4]] * by_dipoles
        if by_quadrupoles:
            found.append(quadrupole_gradients(result[..., 4:]))
    return tuple(found) if len(found) > 1 else found[0]


def _names_of(n_sources: int) -> list[str]:
    """Names of gradients by sources that are given beside the charges."""
    return [f"gradients {number}" for number in range(n_sources)]


def _requested(derivatives: Derivatives) -> list[str]:
    return [name for name, requested in zip(Derivatives._fields, derivatives) if requested]


def _tensors_in(values: Sequence[Any]) -> list[torch.Tensor]:
    """All tensors in nested tuples."""
    waiting, found = list(values), []
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            waiting.extend(value)
    return found


def _on_cpu(inputs: Sequence[torch.Tensor]) -> bool:
    return is_eager(*inputs, under_modes=True) and all(layout(t.device.type).reads for t in inputs)


class _WithDerivatives(torch.autograd.Function):
    """Energies with their first derivatives, for eager mode; never seen by a compiler or a function transform."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: Callable[..., Any],
        derivatives: Derivatives,
        energy_reduction: str,
        domain: Any,
        n_sources: int,
        batch_idx: torch.Tensor | None,
        positions: torch.Tensor,
        charges: torch.Tensor,
        cell: torch.Tensor,
        *others: torch.Tensor,
    ) -> Any:
        by_positions, by_charges, by_cell, *by_sources = ctx.needs_input_grad[6 : 9 + n_sources]
        computed = Derivatives(
            derivatives.forces or by_positions or by_cell,
            derivatives.charge_gradients or by_charges or any(by_sources),
            derivatives.virial or by_cell,
        )
        with_dyads = by_cell and positions.dtype is torch.float32
        call = functools.partial(graph, derivatives=computed, with_dyads=with_dyads)
        results = fairly(call, positions, charges, cell, *others[:n_sources])
        energies, *values = results if isinstance(results, tuple) else (results,)
        names = _requested(computed)
        if n_sources and computed.charge_gradients:
            after = names.index("charge_gradients") + 1
            names[after:after] = _names_of(n_sources)
        found = dict(zip(names + ["dyads"] * with_dyads, values))
        returned = [found[name] for name in _requested(derivatives)]
        ctx.graph, ctx.requested, ctx.energy_reduction = graph, derivatives, energy_reduction
        ctx.n_others, ctx.domain, ctx.n_sources = len(others) - n_sources, domain, n_sources
        ctx.save_for_backward(positions, charges, cell, batch_idx, *others)
        # for the backward pass; in separate memory, since callers may change results
        ctx.first = {name: v.clone() if getattr(derivatives, name, False) else v for name, v in found.items()}
        ctx.set_materialize_grads(False)
        return (energies, *returned) if returned else energies

    @staticmethod
    def backward(ctx: Any, grad_energies: torch.Tensor | None, *grad_derivatives: torch.Tensor | None) -> Any:
        positions, charges, cell, batch_idx, *others = ctx.saved_tensors
        sources = others[: ctx.n_sources]
        no_others = (None,) * ctx.n_others
        if grad_energies is None and all(g is None for g in grad_derivatives):
            return (None,) * (9 + ctx.n_sources) + no_others
        needed = ctx.needs_input_grad[6 : 9 + ctx.n_sources]
        if not torch.is_grad_enabled() and all(g is None for g in grad_derivatives):
            of_systems = weights_of_systems(grad_energies, ctx.energy_reduction, batch_idx, cell.shape[0])
            if ctx.domain is not None:
                of_systems = ctx.domain._agreed(of_systems, batch_idx)
            if of_systems is not None:
                return (None,) * 6 + _products(ctx.first, of_systems, positions, cell, batch_idx, needed) + no_others
        higher = torch.is_grad_enabled()
        with torch.enable_grad():
            # views of the inputs, so that the derivative by charges does not go on to positions they depend on
            inputs = [t.view_as(t) if higher else t.detach() for t in (positions, charges, cell, *sources)]
            for t, is_needed in zip(inputs, needed):
                if is_needed and not t.requires_grad:
                    t.requires_grad_()
            results = ctx.graph(*inputs, derivatives=ctx.requested)
            results = results if isinstance(results, tuple) else (results,)
            both = zip(results, (grad_energies, *grad_derivatives))
            outputs, weights = zip(*((r, g) for r, g in both if g is not None and r.requires_grad))
            asked = [t for t, is_needed in zip(inputs, needed) if is_needed]
            found = iter(torch.autograd.grad(outputs, asked, weights, create_graph=higher, allow_unused=True))
        return (None,) * 6 + tuple(next(found) if is_needed else None for is_needed in needed) + no_others


def _dyads(contributions: Sequence[Contribution], system: ChargedSystem) -> torch.Tensor:
    """``Σ x F^T`` (n_systems, 3, 3) for positions in float32, which may be far from the origin.

    Terms over pairs have forces in float32, whose rounding errors would be multiplied by large positions. Such forces
    add up to zero, so the origin does not matter: positions are taken relative to the middle of the system. The
    long-range term has forces in float64, which need no such care; on a mesh they add up to zero only to its accuracy,
    so their origin must be that of the cell, corner 0, 0, 0.
    """
    x, batch_idx, n_systems = system.positions.to(torch.float64), system.batch_idx, system.n_systems
    middle = totals(torch.cat([x, torch.ones_like(x[:, :1])], 1), batch_idx, n_systems)
    if system.domain is not None:
        middle = system.domain._sum_for_shares(middle)
    middle = middle[:, :3] / middle[:, 3:].clamp(min=1.0)
    near = x - (middle if batch_idx is None else middle.index_select(0, batch_idx))
    sums = [
        (near if forces.dtype is torch.float32 else x).unsqueeze(-1) * forces.to(torch.float64).unsqueeze(-2)
        for forces in (contribution.forces for contribution in contributions)
        if forces is not None
    ]
    return totals(torch.stack(sums).sum(0), batch_idx, n_systems)


def weights_of_systems(
    gradient: torch.Tensor | None, energy_reduction: str, batch_idx: torch.Tensor | None, n_systems: int
) -> torch.Tensor | None:
    """The weight (n_systems,) of each system, if all its atoms and channels have the same; otherwise None."""
    if gradient is None or gradient.numel() == 0 or is_mapped(gradient):
        return None
    first = gradient.reshape(-1)[0]
    if all(step == 0 or size == 1 for step, size in zip(gradient.stride(), gradient.shape)):
        return first.to(torch.float64).expand(n_systems)
    if (recorder := current_recorder()) is not None and recorder.varies(gradient):
        return None
    one_channel = gradient[:, 0]
    if not bool((gradient == one_channel.unsqueeze(1)).all()):
        return None
    if energy_reduction == "system":
        return one_channel.to(torch.float64)
    if batch_idx is None:
        return first.to(torch.float64).expand(n_systems) if bool((one_channel == first).all()) else None
    of_system = one_channel.new_zeros(n_systems).scatter(0, batch_idx.long(), one_channel)
    same = bool((of_system.index_select(0, batch_idx) == one_channel).all())
    return of_system.to(torch.float64) if same else None


def _products(
    first: dict[str, torch.Tensor],
    weights: torch.Tensor,
    positions: torch.Tensor,
    cell: torch.Tensor,
    batch_idx: torch.Tensor | None,
    needed: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by positions, charges, cell and further sources, from first derivatives and the weights of systems."""
    by_positions, by_charges, by_cell, *by_others = needed
    weights_here = weights.to(positions.dtype)
    of_atom = weights_here if batch_idx is None else weights_here.index_select(0, batch_idx).unsqueeze(1)
    results: list[torch.Tensor | None] = [None] * len(needed)
    if by_positions:
        results[0] = first["forces"] * -of_atom
    if by_charges:
        by_sources = first["charge_gradients"]
        results[1] = by_sources * (of_atom if by_sources.ndim == 2 else of_atom.unsqueeze(-1))
    if by_cell:
        # the virial is Σ x_i F_i^T - h^T dE/dh
        sums = first.get("dyads")
        if sums is None:
            sums = totals(positions.unsqueeze(-1) * first["forces"].unsqueeze(-2), batch_idx, cell.shape[0])
        inverse = lattice_of(cell.detach(), None, 0).inverse
        results[2] = (inverse.mT @ (sums - first["virial"]) * weights[:, None, None]).to(cell.dtype)
    for place, (name, is_needed) in enumerate(zip(_names_of(len(by_others)), by_others), 3):
        if is_needed:
            gradient = first[name]
            results[place] = gradient * of_atom.reshape(*of_atom.shape, *(1,) * (gradient.ndim - 2))
    return tuple(results)
