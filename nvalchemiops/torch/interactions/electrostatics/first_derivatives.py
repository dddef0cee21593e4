"""Gradients that come with the energies.

Energies and their first derivatives share most of their work. When energies are asked for that will be differentiated,
forces, charge gradients and virial are computed on the way, and the backward pass of their plain sum is a product. For
anything else (other weights than one number for each system, derivatives of derivatives, gradients of forces) the sum
is evaluated again, as a graph of differentiable ops, and differentiated.

In eager mode on a CPU, where looking at weights costs nothing; elsewhere the graph is all there is.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvalchemiops.torch.interactions.electrostatics.potentials import LongRangePotential
from nvalchemiops.torch.interactions.electrostatics.results import Parts, WantedParts, together
from nvalchemiops.torch.interactions.electrostatics.system import ChargedSystem
from nvalchemiops.torch.operators.lattice import lattice_of
from nvalchemiops.torch.operators.segments import totals
from nvalchemiops.torch.runtime.context import is_eager, is_mapped
from nvalchemiops.torch.runtime.openmp import fairly

Evaluate = Callable[[ChargedSystem, WantedParts], Sequence[Parts]]


def summed(
    evaluate: Evaluate,
    system: ChargedSystem,
    wanted: WantedParts,
    energy_reduction: str,
    hybrid: bool,
    alpha: torch.Tensor,
    others: Sequence[torch.Tensor | None],
    potential: LongRangePotential,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The results of all parts of a sum: energies, then what is wanted of forces, dE/dq and virial.

    Parameters
    ----------
    evaluate : callable
        Gives the parts.
    system, wanted
        Its arguments.
    energy_reduction : {"atom", "system"}
    hybrid : bool
        Only charges have gradients.
    alpha : (n_systems,) tensor
    others : sequence of tensor or None
        What else the parts are computed from: must not change until the backward pass.
    potential : LongRangePotential
        One that is not constant may have gradients of its own.
    """
    inputs = (system.positions, system.charges, system.cell)

    def graph(
        positions: torch.Tensor,
        charges: torch.Tensor,
        cell: torch.Tensor,
        wanted: WantedParts,
        with_dyads: bool = False,
    ) -> Any:
        at = system._replace(positions=positions, charges=charges, cell=cell)
        parts = evaluate(at, wanted)
        results = together(parts, positions, True, energy_reduction, system.batch_idx, system.n_systems)
        return (*results, _dyads(parts, at)) if with_dyads else results

    # in hybrid form first derivatives by charges are there, unless they are among the results and so in the graph
    one_order = not any(wanted) or (hybrid and not wanted.charge_gradients)
    simple = one_order and potential.is_constant and not alpha.requires_grad
    if simple and torch.is_grad_enabled() and any(t.requires_grad for t in inputs) and _on_cpu(inputs):
        results = _Sum.apply(graph, wanted, energy_reduction, system.batch_idx, *inputs, alpha, *others)
    else:
        results = fairly(functools.partial(graph, wanted=wanted), *inputs)
    if system.has_channels:
        return results
    single = results if isinstance(results, tuple) else (results,)
    names = ["energies", *(name for name, there in zip(WantedParts._fields, wanted) if there)]
    columns = [r.squeeze(1) if name in ("energies", "charge_gradients") else r for name, r in zip(names, single)]
    return tuple(columns) if isinstance(results, tuple) else columns[0]


def _on_cpu(inputs: Sequence[torch.Tensor]) -> bool:
    return is_eager(*inputs) and all(t.device.type == "cpu" for t in inputs)


class _Sum(torch.autograd.Function):
    """Energies with their first derivatives, for eager mode; never seen by a compiler or a function transform."""

    @staticmethod
    def forward(
        ctx: Any,
        graph: Callable[..., Any],
        wanted: WantedParts,
        energy_reduction: str,
        batch_idx: torch.Tensor | None,
        positions: torch.Tensor,
        charges: torch.Tensor,
        cell: torch.Tensor,
        *others: torch.Tensor | None,
    ) -> Any:
        by_positions, by_charges, by_cell = ctx.needs_input_grad[4:7]
        computed = WantedParts(
            wanted.forces or by_positions or by_cell,
            wanted.charge_gradients or by_charges,
            wanted.virial or by_cell,
        )
        with_dyads = by_cell and positions.dtype is torch.float32
        call = functools.partial(graph, wanted=computed, with_dyads=with_dyads)
        results = fairly(call, positions, charges, cell)
        energies, *slopes = results if isinstance(results, tuple) else (results,)
        names = [name for name, there in zip(WantedParts._fields, computed) if there] + ["dyads"] * with_dyads
        found = dict(zip(names, slopes))
        ctx.graph, ctx.wanted, ctx.energy_reduction = graph, wanted, energy_reduction
        ctx.n_others = len(others)
        ctx.save_for_backward(positions, charges, cell, batch_idx, *others)
        # for the backward pass, with memory of their own: callers may change what they get
        ctx.slopes = {name: slope.clone() if getattr(wanted, name, False) else slope for name, slope in found.items()}
        ctx.set_materialize_grads(False)
        returned = [found[name] for name, there in zip(WantedParts._fields, wanted) if there]
        return (energies, *returned) if returned else energies

    @staticmethod
    def backward(ctx: Any, grad_energies: torch.Tensor | None, *grad_slopes: torch.Tensor | None) -> Any:
        positions, charges, cell, batch_idx, *_ = ctx.saved_tensors
        nothing = (None,) * ctx.n_others
        if grad_energies is None and all(g is None for g in grad_slopes):
            return (None,) * 7 + nothing
        needed = ctx.needs_input_grad[4:7]
        if not torch.is_grad_enabled() and all(g is None for g in grad_slopes) and not _is_mapped(grad_energies):
            weights = _weights(grad_energies, ctx.energy_reduction, batch_idx, cell.shape[0])
            if weights is not None:
                return (None,) * 4 + _products(ctx.slopes, weights, positions, cell, batch_idx, needed) + nothing
        higher = torch.is_grad_enabled()
        with torch.enable_grad():
            # other names for the inputs, so that a charge that depends on positions is differentiated by itself
            inputs = [t.view_as(t) if higher else t.detach() for t in (positions, charges, cell)]
            for t, wants in zip(inputs, needed):
                if wants and not t.requires_grad:
                    t.requires_grad_()
            results = ctx.graph(*inputs, ctx.wanted)
            results = results if isinstance(results, tuple) else (results,)
            pairs = [
                (r, g) for r, g in zip(results, (grad_energies, *grad_slopes)) if g is not None and r.requires_grad
            ]
            gradients = iter(
                torch.autograd.grad(
                    [r for r, _ in pairs],
                    [t for t, wants in zip(inputs, needed) if wants],
                    [g for _, g in pairs],
                    create_graph=higher,
                    allow_unused=True,
                )
            )
        return (None,) * 4 + tuple(next(gradients) if wants else None for wants in needed) + nothing


def _dyads(parts: Sequence[Parts], system: ChargedSystem) -> torch.Tensor:
    """``Σ x F^T`` (n_systems, 3, 3) for positions in float32, which may be far from the origin.

    Forces of pairs come rounded to float32, and would lose digits where positions are large. They add up to zero, so
    here their origin may be any: the middle of the system. Those of the smooth part come in float64. On a mesh they do
    not quite add up to zero, and their origin is the one that the cell has.
    """
    x, batch_idx, n_systems = system.positions.to(torch.float64), system.batch_idx, system.n_systems
    middle = totals(torch.cat([x, torch.ones_like(x[:, :1])], 1), batch_idx, n_systems)
    middle = middle[:, :3] / middle[:, 3:].clamp(min=1.0)
    near = x - (middle if batch_idx is None else middle.index_select(0, batch_idx))
    sums = [
        (near if part.forces.dtype is torch.float32 else x).unsqueeze(-1) * part.forces.to(torch.float64).unsqueeze(-2)
        for part in parts
        if part.forces is not None
    ]
    return totals(torch.stack(sums).sum(0), batch_idx, n_systems)


def _is_mapped(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and is_mapped(tensor)


def _weights(
    gradient: torch.Tensor | None, energy_reduction: str, batch_idx: torch.Tensor | None, n_systems: int
) -> torch.Tensor | None:
    """The weight (n_systems,) of each system, if all its atoms and channels have the same; otherwise None."""
    if gradient is None or gradient.numel() == 0:
        return None
    first = gradient.reshape(-1)[0]
    if all(step == 0 or size == 1 for step, size in zip(gradient.stride(), gradient.shape)):
        return first.to(torch.float64).expand(n_systems)
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
    slopes: dict[str, torch.Tensor],
    weights: torch.Tensor,
    positions: torch.Tensor,
    cell: torch.Tensor,
    batch_idx: torch.Tensor | None,
    needed: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients by positions, charges and cell."""
    by_positions, by_charges, by_cell = needed
    weights_here = weights.to(positions.dtype)
    of_atom = weights_here if batch_idx is None else weights_here.index_select(0, batch_idx).unsqueeze(1)
    results: list[torch.Tensor | None] = [None] * 3
    if by_positions:
        results[0] = slopes["forces"] * -of_atom
    if by_charges:
        results[1] = slopes["charge_gradients"] * of_atom
    if by_cell:
        # the virial is Σ x_i F_i^T - h^T dE/dh
        sums = slopes.get("dyads")
        if sums is None:
            sums = totals(positions.unsqueeze(-1) * slopes["forces"].unsqueeze(-2), batch_idx, cell.shape[0])
        inverse = lattice_of(cell.detach(), None, 0).inverse
        results[2] = (inverse.mT @ (sums - slopes["virial"]) * weights[:, None, None]).to(cell.dtype)
    return tuple(results)
