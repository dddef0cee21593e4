"""The JAX primitive that calls torch, with derivatives of every order, batching and lowering.

With a torch function f of inputs x and weights u of its outputs, let

    L(x; u, t_1 .. t_k) = D_{t_1} .. D_{t_k} Σ u·f(x)

be the k-fold directional derivative of the weighted outputs. It is linear in u and in each direction t_i, and symmetric
in the directions. The primitive evaluates two derivatives of L: with respect to u (*values*: f itself for k = 0,
otherwise its directional derivative), and with respect to x (*gradient*). These are closed under differentiation:

- The tangent for a tangent of x is the same expression with one more direction. For a tangent of u or t_i it is the
  same expression with the tangent in place of u or t_i.
- Transpose in t_i: for a cotangent c of the gradient, it is the gradient with c in place of t_i, since L is symmetric.
  For a cotangent c of the values, it is the gradient with weights c and without t_i.
- Transpose in u: for a cotangent c of the gradient, it is the values with c as one more direction.

So torch's reverse mode gives every order in both of JAX's modes, and nothing is kept between callbacks.

A function with a *contraction* returns energies. One callback gives their values and gradients, and JAX computes
their tangent as the product of gradients and tangents of the inputs.

``vmap`` adds a level. For each level, an operand or a result either has an axis or not. L is then the sum over all
slices: a gradient without the axis is a sum over slices, and the rules above still hold. All slices are evaluated in
one callback.
"""

import functools
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.dtypes import float0
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from nvalchemiops.jax._jax_internals import (
    as_primitive,
    aval_like,
    is_for_export,
    register_dropping,
    vary_alike,
    whole,
    with_text_first,
    zero_tangent,
)
from nvalchemiops.jax.callback import Flags, Request, evaluate

torch_call_p = Primitive("torch_call")
torch_call_p.multiple_results = True


class Part(NamedTuple):
    """An operand, and for each level whether the operand has an axis for it."""

    array: Any
    flags: Flags


class Form(NamedTuple):
    """The arguments of L: arrays or tracers, and a request with the same function, outputs, inputs and sizes."""

    request: Request
    inputs: Sequence[Part]
    weights: Mapping[int, Part]
    directions: tuple[Mapping[int, Part], ...]

    @classmethod
    def of(cls, request: Request, operands: Sequence[Any]) -> "Form":
        """The arguments of L for a request and its operands."""
        parts = iter([Part(array, flags) for array, flags in zip(operands, request.operand_flags)])
        return cls(
            request,
            tuple(next(parts) for _ in range(request.inputs)),
            {j: next(parts) for j in request.weights},
            tuple({i: next(parts) for i in direction} for direction in request.directions),
        )

    def along(self, *directions: Mapping[int, Part]) -> "Form":
        """The derivative of L along more directions."""
        return self._replace(directions=(*self.directions, *directions))

    def without(self, number: int) -> "Form":
        """L without one of its directions."""
        return self._replace(directions=self.directions[:number] + self.directions[number + 1 :])

    def bind(self, values: Mapping[int, Flags], gradient: Mapping[int, Flags]) -> list[Any]:
        """Derivatives of L with respect to the weights of ``values``, and to the inputs in ``gradient``."""
        parts = [*self.inputs, *self.weights.values(), *(p for d in self.directions for p in d.values())]
        request = replace(
            self.request,
            values=tuple(values),
            gradient=tuple(gradient),
            weights=tuple(self.weights),
            directions=tuple(tuple(direction) for direction in self.directions),
            operand_flags=tuple(part.flags for part in parts),
            result_flags=(*values.values(), *gradient.values()),
        )
        return bind(request, [part.array for part in parts])


def bind(request: Request, operands: Sequence[Any]) -> list[Any]:
    """Evaluate or trace the primitive."""
    return torch_call_p.bind(*vary_alike(list(map(whole, operands))), request=request)


@torch_call_p.def_impl
def _evaluate(*operands: Any, request: Request) -> list[Any]:
    jitted = request.function.jitted.get(request) or _compiled(request)
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # flags have no types; this would call itself
        with jax.disable_jit(False):
            return jitted(*operands)
    return jitted(*operands)


KEPT_REQUESTS = 256
"""Number of compiled calls outside of ``jit`` that are kept, for all functions. Each takes more than a megabyte."""

_kept: "deque[weakref.ref[Request]]" = deque()
"""The requests of these compiled calls, oldest first."""


def _compiled(request: Request) -> Callable[..., list[Any]]:
    """Compile a call for ``request``, and keep it with its function."""
    call = functools.partial(torch_call_p.bind, request=request)
    new: Any = jax.jit(as_primitive(call, request.function.name))
    jitted = request.function.jitted.setdefault(request, new)  # all threads get the same one
    _kept.append(weakref.ref(request))
    while len(_kept) > KEPT_REQUESTS:
        oldest = _kept.popleft()()
        if oldest is not None and (dropped := oldest.function.jitted.pop(oldest, None)) is not None:
            dropped.clear_cache()  # otherwise JAX's cache would keep it alive
    return jitted


@torch_call_p.def_abstract_eval
def _types(*operands: Any, request: Request) -> list[Any]:
    return [aval_like(operands, shape, dtype) for shape, dtype in request.result_types(operands)]


def _lower(context: Any, *operands: Any, request: Request) -> Any:
    if is_for_export(context):
        raise NotImplementedError(
            f"`{request.function.name}` calls torch in this process, which jax.export cannot write to a file: export "
            "the JAX functions around it, or the torch module by torch.export"
        )
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in request.result_types(context.avals_in)]
    at_once = _takes_all(request, context.avals_in)

    def callback(context: Any, results: Any, *operands: Any) -> None:
        try:
            evaluate(request, context, results, operands, at_once)
        except Exception as error:
            raise with_text_first(error, request.function.name) from None

    return mlir.lower_fun(buffer_callback(callback, types), multiple_results=True)(context, *operands)


def _takes_all(request: Request, operands: Sequence[Any]) -> bool:
    """Whether one call of the function takes all slices that would otherwise need separate calls."""
    sizes = tuple(itertools.compress(request.sizes, request.of_calls))
    if not sizes or 0 in request.sizes or request.function.takes_all is None:
        return False
    inputs = zip(operands[: request.inputs], request.operand_flags)
    types = tuple(jax.ShapeDtypeStruct(x.shape[sum(flags) :], x.dtype) for x, flags in inputs)
    return request.function.takes_all(sizes, types)


mlir.register_lowering(torch_call_p, _lower)


def _drop_unused(used: Sequence[bool], equation: Any) -> tuple[list[bool], Any]:
    """The equation without unused results: the derivatives of each would cost as much as derivatives of the first."""
    if not any(used):
        return [False] * len(equation.invars), None
    outvars = list(itertools.compress(equation.outvars, used))
    request = equation.params["request"].only(used)
    return [True] * len(equation.invars), equation.replace(outvars=outvars, params={"request": request})


register_dropping(torch_call_p, _drop_unused)


# -- forward mode ---------------------------------------------------------------------------------


def _is_smooth(output: jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(output.dtype, jnp.inexact))


def _present(parts: Mapping[int, Part]) -> dict[int, Part]:
    return {index: p for index, p in parts.items() if not isinstance(p.array, ad.Zero) and p.array.dtype != float0}


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, request: Request) -> tuple[Sequence[Any], Sequence[Any]]:
    tangents = [jnp.asarray(t) if isinstance(t, float) else t for t in tangents]  # `jax.jvp` passes numbers on
    form, moving = Form.of(request, primals), Form.of(request, tangents)
    moved = _present(dict(enumerate(moving.inputs)))
    _check_differentiable(request, moved)
    values = dict(zip(request.values, request.result_flags))
    gradient = dict(zip(request.gradient, request.result_flags[len(values) :]))
    contract = request.function.contract
    shapes = {i: tuple(part.array.shape[sum(part.flags) :]) for i, part in moved.items()}
    if not values or not moved or form.directions or contract is None or not contract.covers(shapes, request.outputs):
        results = bind(request, primals)
        return results, _instantiated(results, _tangents(form, moving, moved, values, gradient))
    # an energy: the gradients of all inputs with tangents come from the same callback
    everywhere = (True,) * len(request.sizes)
    wanted = {**dict.fromkeys(moved, everywhere), **gradient}
    results = form.bind(values, wanted)
    gradients = dict(zip(wanted, results[len(values) :]))
    kept = [*results[: len(values)], *(gradients[i] for i in gradient)]
    out = _contract(form, {i: gradients[i] for i in moved}, moved)
    return kept, _instantiated(kept, [*out, *_tangents(form, moving, moved, {}, gradient)])


def _check_differentiable(request: Request, moved: Mapping[int, Part]) -> None:
    """Raise if torch, or the declaration of the function, has no derivative with respect to these inputs."""
    name = request.function.name
    if not request.function.differentiable:
        raise ValueError(f"`{name}` is not differentiable: enable_vjp=True allows derivatives")
    constants = [name for i, name in request.function.constants.items() if i in moved]
    if constants and (request.gradient or any(_is_smooth(request.outputs[j]) for j in request.values)):
        named = " and ".join(f"`{constant}`" for constant in constants)
        raise NotImplementedError(
            f"{name}: there is no derivative by {named}: if it is meant to be zero, apply jax.lax.stop_gradient"
        )
    kinds = [(f"by input {i}", part.array.dtype) for i, part in moved.items()]
    kinds += [(f"of output {j}", request.outputs[j].dtype) for j in request.values if moved]
    for what, dtype in kinds:
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError(
                f"`{name}`: there is no derivative {what}, which is complex: give and return real and imaginary parts"
            )


def _instantiated(results: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    return [zero_tangent(r) if t is None else t for r, t in zip(results, tangents)]


def _tangents(
    form: Form, moving: Form, moved: Mapping[int, Part], values: Mapping[int, Flags], gradient: Mapping[int, Flags]
) -> list[Any]:
    """Tangents of the results, None in place of zero."""
    smooth = {j: flags for j, flags in values.items() if _is_smooth(form.request.outputs[j])}
    if not smooth and not gradient:
        return [None] * len(values)
    terms = [form.along(moved)] if moved else []
    if weights := _present(moving.weights):
        terms.append(form._replace(weights=weights))
    for number, direction in enumerate(moving.directions):
        if present := _present(direction):
            terms.append(form.without(number).along(present))
    if not terms:
        return [None] * (len(values) + len(gradient))
    sums = [functools.reduce(jnp.add, term) for term in zip(*(term.bind(smooth, gradient) for term in terms))]
    by_value = dict(zip(smooth, sums))
    return [by_value.get(j) for j in values] + sums[len(smooth) :]


def _contract(form: Form, gradients: Mapping[int, Any], moved: Mapping[int, Part]) -> list[Any]:
    """Tangents of energies from their gradients, slice by slice."""
    inputs, request = dict(enumerate(form.inputs)), form.request
    contract: Callable[..., Any] = functools.partial(request.function.contract.tangents, outputs=request.outputs)
    for level in reversed(range(len(request.sizes))):
        of_moved, of_inputs = ({i: 0 if p.flags[level] else None for i, p in x.items()} for x in (moved, inputs))
        axes = (dict.fromkeys(gradients, 0), of_moved, of_inputs)
        contract = jax.vmap(contract, in_axes=axes, axis_size=request.sizes[level])
    return list(contract(gradients, *({i: p.array for i, p in x.items()} for x in (moved, inputs))))


ad.primitive_jvps[torch_call_p] = _jvp


# -- reverse mode ---------------------------------------------------------------------------------


def _transpose(cotangents: Sequence[Any], *operands: Any, request: Request) -> list[Any]:
    form = Form.of(request, operands)

    def unknown(parts: Mapping[int, Part]) -> dict[int, Flags]:
        return {index: part.flags for index, part in parts.items() if ad.is_undefined_primal(part.array)}

    if unknown(dict(enumerate(form.inputs))):
        raise NotImplementedError(f"`{request.function.name}` is not linear in its inputs, so it has no transpose")
    dtypes = [request.outputs[j].dtype for j in request.values] + [form.inputs[i].array.dtype for i in request.gradient]
    given = [
        Part(c if isinstance(c, ad.Zero) else jnp.asarray(c, dtype), flags)  # callers may give Python numbers
        for c, dtype, flags in zip(cotangents, dtypes, request.result_flags)
    ]
    by_value = _present(dict(zip(request.values, given)))
    by_input = _present(dict(zip(request.gradient, given[len(request.values) :])))
    terms: list[list[Any]] = []
    for number, direction in enumerate(form.directions):
        if gradient := unknown(direction):
            rest = form.without(number)
            terms += [rest._replace(weights=by_value).bind({}, gradient)] if by_value else []
            terms += [rest.along(by_input).bind({}, gradient)] if by_input else []
    if values := unknown(form.weights):
        terms += [form._replace(weights={}).along(by_input).bind(values, {})] if by_input else []
    sums = iter([functools.reduce(jnp.add, term) for term in zip(*terms)])
    return [None if not ad.is_undefined_primal(o) else next(sums) if terms else ad.Zero(o.aval) for o in operands]


ad.primitive_transposes[torch_call_p] = _transpose


# -- vmap -----------------------------------------------------------------------------------------


def _batch(operands: Sequence[Any], dims: Sequence[Any], *, request: Request) -> tuple[list[Any], list[int]]:
    mapped = [isinstance(dim, int) for dim in dims]
    arrays = [jnp.moveaxis(o, dim, 0) if is_mapped else o for o, dim, is_mapped in zip(operands, dims, mapped)]
    size = next(array.shape[0] for array, is_mapped in zip(arrays, mapped) if is_mapped)
    return bind(request.mapped(size, mapped), arrays), [0] * len(request.result_flags)


batching.primitive_batchers[torch_call_p] = _batch
