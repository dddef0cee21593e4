"""Derivatives and ``vmap`` of spreading and gathering (`nvalchemiops.kernels.moments`), for meshes and k-vectors.

A *spread* op takes ``moments`` (n_atoms, n_channels, n_moments), ``coordinates`` (n_atoms, 3), arguments of the
geometry, and the number ``derivatives`` last; it returns ``field``. A *gather* op takes ``field`` instead of
``moments``, and returns moments. They are each other's derivatives, so one set of formulas serves all pairs of ops.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvalchemiops.kernels.moments import count, raised
from nvalchemiops.layout import layout
from nvalchemiops.torch.autograd.functorch import given_by_name
from nvalchemiops.torch.runtime.context import eager, is_eager

Op = Callable[..., torch.Tensor]
Arguments = dict[str, Any]


_RAISED = {count(n): [places[a] for a in range(3) for places in raised(n)] for n in range(12)}
"""Numbers of moments with one more derivative, along x, then y, then z, by the number of moments."""


def derivative_by_coordinates(moments: torch.Tensor, gathered: torch.Tensor, may_batch: bool = True) -> torch.Tensor:
    """Derivative (n_atoms, 3) of ``Σ moments * gathered`` along coordinates; ``gathered`` has one more order.

    ``may_batch``: it may run in a batched backward pass of torch (``is_grads_batched``), which has few operations.
    """
    n_atoms, n_channels = moments.shape[:2]
    n_moments = int(moments.shape[2])  # a tensor in torch.jit.trace, and so is the number of channels
    if n_moments == 1:
        of_charges = moments * gathered[..., 1:4]
        return of_charges.sum(1) if n_channels > 1 else of_charges.squeeze(1)
    width = n_channels * n_moments
    has_graph = torch.is_grad_enabled() and (moments.requires_grad or gathered.requires_grad)
    # in float64 alone, since autocast rounds the factors of other products
    is_plain = not may_batch and gathered.dtype is torch.float64 and is_eager(moments, gathered) and not has_graph
    if is_plain and layout(gathered.device.type).reads:
        places = _places(n_moments, int(n_channels), int(gathered.shape[-1]), gathered.device)
        higher = torch.gather(gathered.flatten(1), 1, places.expand(n_atoms, -1)).view(n_atoms, 3, width)
        return torch.matmul(higher, moments.reshape(n_atoms, width, 1)).squeeze(-1)
    columns = gathered.unbind(-1)
    # a stack, since lists as indices would be copied to a GPU
    higher = torch.stack([columns[place] for place in _RAISED[n_moments]], -1).view(*gathered.shape[:-1], 3, n_moments)
    return (higher * moments.unsqueeze(-2)).sum(-1).sum(1)


@functools.cache
@eager
def _places(n_moments: int, n_channels: int, n_gathered: int, device: torch.device) -> torch.Tensor:
    """Indices, in a row of gathered values, of the values with one more derivative, by axis, channel and moment."""
    raised_by_axis = torch.tensor(_RAISED[n_moments], device=device).view(3, 1, n_moments)
    return (raised_by_axis + n_gathered * torch.arange(n_channels, device=device).unsqueeze(1)).flatten()


def spread_pullback(gather: Callable[[], Op]) -> Callable[..., Arguments]:
    """The derivative of a spread op, given a function that returns the gather op."""

    def pullback(inputs: Arguments, gradients: Mapping[str, torch.Tensor], wanted: frozenset[str]) -> Arguments:
        moments, derivatives = inputs["moments"], inputs["derivatives"]
        found = _call(gather(), inputs, gradients["field"], derivatives + ("coordinates" in wanted))
        results = {}
        if "moments" in wanted:
            results["moments"] = found.narrow(-1, 0, moments.shape[-1])
        if "coordinates" in wanted:
            results["coordinates"] = derivative_by_coordinates(moments, found).to(torch.float64)
        return results

    return pullback


def gather_pullback(spread: Callable[[], Op], gather: Callable[[], Op]) -> Callable[..., Arguments]:
    """The derivative of a gather op, given functions that return the two ops."""

    def pullback(inputs: Arguments, gradients: Mapping[str, torch.Tensor], wanted: frozenset[str]) -> Arguments:
        moments, field, derivatives = gradients["moments"], inputs["field"], inputs["derivatives"]
        results = {}
        if "field" in wanted:
            results["field"] = _call(spread(), inputs, moments, derivatives)
        if "coordinates" in wanted:
            found = _call(gather(), inputs, field, derivatives + 1)
            results["coordinates"] = derivative_by_coordinates(moments, found).to(torch.float64)
        return results

    return pullback


def _call(op: Op, inputs: Arguments, first: torch.Tensor, derivatives: int) -> torch.Tensor:
    geometry = [value for name, value in inputs.items() if name not in ("moments", "field", "derivatives")]
    return op(first, *geometry, derivatives)


def fold(
    op: Callable[[], Op],
    channel: tuple[int, int],
    repeat: Callable[[Arguments, int], Arguments],
    derived: tuple[str, ...] = (),
) -> Callable[..., tuple[torch.Tensor, int]]:
    """The rule for ``vmap``: slices of values become channels, slices of coordinates systems.

    Parameters
    ----------
    op : callable
        Returns the op.
    channel : (int, int)
        Dimension of the channels, 0 or 1, in the first argument and in the result. The other of the two dimensions
        holds atoms, points or systems.
    repeat : callable
        Maps the arguments by name, and a number of slices, to the arguments for this many copies of all systems.
        Coordinates and the first argument are already repeated.
    derived : tuple of str, optional
        Arguments that may differ between slices, too: ``repeat`` gets them with slices in front, or computes them anew.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[torch.Tensor, int]:
        public = op()
        given, mapped = given_by_name(public, in_dims, args)
        first, size = next(iter(given)), info.batch_size
        for name, dim in mapped.items():
            if name not in (first, "coordinates", *derived):
                raise NotImplementedError(f"vmap over `{name}`: map coordinates and values over one set of systems")
            given[name] = given[name].movedim(dim, 0)
        is_first_alone = mapped.keys() == {first}
        if is_first_alone:
            axis, result_axis = channel
        else:
            axis, result_axis = 1 - channel[0], 1 - channel[1]
            for name in ("coordinates", first):
                if name not in mapped:
                    given[name] = given[name].unsqueeze(0).expand(size, *given[name].shape)
            given["coordinates"] = given["coordinates"].flatten(0, 1)
        given[first] = given[first].movedim(0, axis).flatten(axis, axis + 1)
        result = public(**(given if is_first_alone else repeat(given, size)))
        return result.unflatten(result_axis, (size, -1)), result_axis

    return rule
