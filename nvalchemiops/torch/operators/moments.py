"""Derivatives and ``vmap`` of spreading and gathering (`nvalchemiops.kernels.moments`), for meshes and k-vectors.

A *spread* op takes ``moments`` (n_atoms, n_channels, n_moments), ``coordinates`` (n_atoms, 3), arguments of the
geometry, and the number ``derivatives`` last; it returns ``field``. A *gather* op takes ``field`` instead of
``moments``, and returns moments. They are each other's derivatives, so one set of formulas serves all pairs of ops.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvalchemiops.kernels.moments import count, raised
from nvalchemiops.torch.autograd.functorch import given_by_name

Op = Callable[..., torch.Tensor]
Arguments = dict[str, Any]


def derivative_by_coordinates(moments: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
    """Derivative (n_atoms, 3) of ``Σ moments * gathered`` along coordinates; ``gathered`` has one more order."""
    n_moments = moments.shape[-1]
    if n_moments == 1:
        return (moments * gathered[..., 1:4]).sum(1).to(torch.float64)
    derivatives = next(d for d in range(n_moments) if count(d) == n_moments)
    columns = []
    for axis in range(3):
        higher = [gathered[..., places[axis]] for places in raised(derivatives)]
        columns.append((moments * torch.stack(higher, -1)).sum((1, 2)))
    return torch.stack(columns, -1).to(torch.float64)


def spread_pullback(gather: Callable[[], Op]) -> Callable[..., Arguments]:
    """The derivative of a spread op, given a function that returns the gather op."""

    def pullback(inputs: Arguments, gradients: Mapping[str, torch.Tensor], wanted: frozenset[str]) -> Arguments:
        moments, derivatives = inputs["moments"], inputs["derivatives"]
        found = _call(gather(), inputs, gradients["field"], derivatives + ("coordinates" in wanted))
        results = {}
        if "moments" in wanted:
            results["moments"] = found.narrow(-1, 0, moments.shape[-1])
        if "coordinates" in wanted:
            results["coordinates"] = derivative_by_coordinates(moments, found)
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
            results["coordinates"] = derivative_by_coordinates(moments, _call(gather(), inputs, field, derivatives + 1))
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
