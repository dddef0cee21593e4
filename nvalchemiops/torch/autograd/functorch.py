"""Ops under torch's function transforms (``torch.func``, ``vmap``) in eager mode.

Transforms do not use the derivative that is registered with an op. They need an ``autograd.Function`` with
``setup_context``, ``vmap`` and ``jvp``. This module wraps an op in such a function, for eager transforms only.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from nvalchemiops.launch import NotDifferentiableError
from nvalchemiops.torch.autograd.saved import restore, save
from nvalchemiops.torch.runtime import _torch_internals as internals
from nvalchemiops.torch.runtime._torch_internals import derivative_asked
from nvalchemiops.torch.runtime.context import all_values_of, may_read

if TYPE_CHECKING:
    from nvalchemiops.torch.autograd.op import WarpOp


_OF_NO_SLICE = "is_called_for_no_slice"


def also_of_no_slice(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a rule for ``vmap`` that is called for no slice, too. Other ops have empty results there."""
    setattr(rule, _OF_NO_SLICE, True)
    return rule


def is_differentiated(tensor: torch.Tensor, by_own_graph: bool = True) -> bool:
    """Whether this tensor takes part in a derivative, in reverse mode, forward mode or a transform.

    Without ``by_own_graph``, a graph that no transform has made does not count.
    """
    while True:
        tracked = tensor.requires_grad and torch.is_grad_enabled()
        if (tracked and by_own_graph) or forward_ad.unpack_dual(tensor).tangent is not None:
            return True
        if not may_read() or not internals.is_wrapped(tensor):
            return False
        if tracked:
            return True
        tensor = internals.unwrapped(tensor)


def keeps_graph(*tensors: torch.Tensor | None) -> bool:
    """Whether results are expected to have a graph: one of these tensors does, or a reverse-mode transform is on."""
    if not torch.is_grad_enabled():
        return False
    if any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return True
    if not may_read() or not internals.transforms_active():
        return False
    # what `vmap` wraps does not tell by itself
    return internals.reverse_mode_asked() or any(t is not None and all_values_of(t).requires_grad for t in tensors)


def transformable(op: "WarpOp", fold: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Wrap an op in a function that function transforms can follow, with derivatives from the op's pullback.

    ``fold(info, in_dims, *args) -> (outputs, out_dims)`` is the vmap rule. By default slices are evaluated one after
    the other and stacked.
    """
    name, call = op.name.replace("::", "_"), op.call_for_transforms

    def enter(*args: Any) -> Any:
        return Transformable.apply(*args) if derivative_asked() else call(*args)

    class Transformable(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return call(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            ctx.differentiable = op.mark_differentiable(ctx, outputs)
            save(ctx, (*inputs, *outputs), forward_mode=True)

        @staticmethod
        def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
            if all(c is None for c in cotangents):
                return (None,) * len(op.parameters)
            return op.pullback(restore(ctx), cotangents, ctx.needs_input_grad)

        @staticmethod
        def jvp(ctx: Any, *tangents: torch.Tensor | None) -> Any:
            forward_levels, reverse_levels = internals.count_transforms()  # this one included
            if forward_levels > 1:
                # torch silently drops the outer tangents of a custom function here
                raise NotDifferentiableError(
                    f"{name}: forward mode inside forward mode (jacfwd of jacfwd, jvp of jvp) is not supported by "
                    "torch for custom functions; use reverse mode for one of them: hessian, jacfwd(jacrev(f))"
                )
            # without their own tangents: otherwise the pullback would push them forward again, endlessly
            primals = [_primal(value) for value in restore(ctx)]
            outputs = primals[len(op.parameters) :]
            needed = [isinstance(t, torch.Tensor) for t in tangents]
            moved = [i for i, is_needed in enumerate(needed) if is_needed]
            result: list[torch.Tensor | None] = [None] * len(outputs)

            def pull(*cotangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
                given: list[torch.Tensor | None] = [None] * len(outputs)
                for i, c in zip(ctx.differentiable, cotangents, strict=True):
                    given[i] = c
                gradients = op.pullback(primals, given, needed)
                return tuple(torch.zeros_like(primals[i]) if gradients[i] is None else gradients[i] for i in moved)

            like = [outputs[i] for i in ctx.differentiable]
            # differentiating the pullback needs one more order than evaluating it column by column
            spare = op.orders >= 2 + reverse_levels
            pushed = transpose(pull, like, [tangents[i] for i in moved], differentiate=spare) if like else []
            for i, t in zip(ctx.differentiable, pushed, strict=True):
                result[i] = t
            return tuple(result) if len(result) > 1 else result[0]

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
            if not info.batch_size and not getattr(fold, _OF_NO_SLICE, False):
                return _no_results(op, in_dims, args)
            if fold is not None:
                return fold(info, in_dims, *args)
            return _one_by_one(name, enter, info.batch_size, in_dims, args)

    Transformable.__name__ = Transformable.__qualname__ = name
    return enter


def _primal(value: Any) -> Any:
    return forward_ad.unpack_dual(value).primal if isinstance(value, torch.Tensor) else value


def transpose(
    pull: Callable[..., tuple[torch.Tensor, ...]],
    like: Sequence[torch.Tensor],
    tangents: Sequence[Any],
    differentiate: bool = True,
) -> list[torch.Tensor]:
    """Apply the transpose of the linear map ``pull`` to ``tangents``: a Jacobian-vector product from a vjp.

    With ``differentiate``, ``pull`` is differentiated with respect to the cotangents, if it has a derivative. Otherwise
    the map is evaluated column by column, which is also exact, but takes one call per output element.
    """
    zeros = [torch.zeros_like(t) for t in like]
    if differentiate:
        with contextlib.suppress(NotDifferentiableError):
            push = torch.func.vjp(pull, *zeros)[1]
            return list(push(tuple(tangents)))
    sizes = [z.numel() for z in zeros]
    basis = torch.eye(sum(sizes), dtype=torch.float64, device=zeros[0].device).split(sizes, dim=1)

    def row(*flat: torch.Tensor) -> torch.Tensor:
        gradients = pull(*(f.to(z.dtype).reshape(z.shape) for f, z in zip(flat, zeros, strict=True)))
        return sum((g.double() * t.double()).sum() for g, t in zip(gradients, tangents, strict=True))

    products = torch.func.vmap(row)(*basis)
    return [p.to(z.dtype).reshape(z.shape) for p, z in zip(products.split(sizes), zeros, strict=True)]


def _no_results(op: "WarpOp", in_dims: Sequence[int | None], args: Sequence[Any]) -> Any:
    """Results of ``vmap`` over no slice, in their declared shapes: nothing is evaluated."""

    def one_slice(argument: Any, dimension: Any) -> Any:
        if not isinstance(dimension, int):
            return argument
        return argument.new_empty([n for k, n in enumerate(argument.shape) if k != dimension])

    slices = tuple([one_slice(a, d) for a, d in zip(args, in_dims, strict=True)])
    # their gradients are zeros, as those of torch, which cannot add scalars under another `vmap` over no slice
    anchors = [a.sum().reshape(1) for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    results = [t.new_empty((0, *t.shape)) for t in op.empty_outputs(slices, size=0)]
    results = [t + sum(a.to(t) for a in anchors) if t.is_floating_point() else t for t in results]
    return (results[0], 0) if len(results) == 1 else (tuple(results), (0,) * len(results))


def given_by_name(
    op: Callable[..., Any], in_dims: Sequence[Any], args: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """The arguments of an op under ``vmap`` by name, and the dimension of the slices in those that it maps over."""
    names = [p.name for p in op.op.parameters]  # type: ignore[attr-defined]  # `warp_custom_op` adds it
    return dict(zip(names, args)), {name: dim for name, dim in zip(names, in_dims) if isinstance(dim, int)}


def given_slices(size: int, in_dims: Sequence[Any], args: Sequence[Any]) -> Iterator[list[Any]]:
    """The arguments of an op for each slice of ``vmap``."""
    for b in range(size):
        # torch gives a sequence of numbers a sequence of dimensions, all None
        yield [a.select(dim, b) if isinstance(dim, int) else a for a, dim in zip(args, in_dims, strict=True)]


def _one_by_one(
    name: str, call: Callable[..., Any], size: int, in_dims: Sequence[int | None], args: Sequence[Any]
) -> Any:
    slices = [call(*given) for given in given_slices(size, in_dims, args)]

    def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if any(part.shape != parts[0].shape for part in parts):
            raise ValueError(
                f"{name} under vmap: outputs differ in size between slices. Give a size (`max_neighbors` of a neighbor "
                "list), or call it outside of vmap"
            )
        return torch.stack(tuple(parts))

    if not isinstance(slices[0], tuple):
        return stacked(slices), 0
    outputs = tuple(stacked(parts) for parts in zip(*slices, strict=True))
    return outputs, (0,) * len(outputs)
