"""Transformations that keep signatures for type checkers, and guards against transformations."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar, TypeVarTuple, cast, overload

import jax
import jax.numpy as jnp

T = TypeVar("T")
R = TypeVar("R")
Aux = TypeVar("Aux")
Function = TypeVar("Function", bound=Callable[..., Any])
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")


@overload
def jit(function: Function, /, **options: Any) -> Function: ...


@overload
def jit(**options: Any) -> Callable[[Function], Function]: ...


def jit(function: Any = None, /, **options: Any) -> Any:
    """`jax.jit`, as a function or as a decorator with options. Functions keep their signature and name.

    Parameters
    ----------
    function : callable
        The function to compile.
    **options
        Options of `jax.jit`.

    Returns
    -------
    callable
        The result of `jax.jit`, with ``lower`` and its other methods; or a decorator, if only options are given.
    """
    if function is None:
        return functools.partial(jit, **options)
    return jax.jit(function, **options)


@overload
def vectorize(function: Function, /, *, excluded: Any = ..., signature: str | None = ...) -> Function: ...


@overload
def vectorize(*, excluded: Any = ..., signature: str | None = ...) -> Callable[[Function], Function]: ...


def vectorize(function: Any = None, /, *, excluded: Any = frozenset(), signature: str | None = None) -> Any:
    """`jax.numpy.vectorize`, as a function or as a decorator with options. Functions keep their signature and name.

    Parameters
    ----------
    function : callable
        A function of single items.
    excluded : set of int or str
        Arguments that are not mapped.
    signature : str, optional
        Shapes of an item and its result, such as ``"(n),(n)->()"``.

    Returns
    -------
    callable
        A function of arrays that broadcast against each other.
    """
    if function is None:
        return functools.partial(vectorize, excluded=excluded, signature=signature)
    return functools.update_wrapper(jnp.vectorize(function, excluded=excluded, signature=signature), function)


@overload
def linearize(function: Callable[[*Ts], R], /, *primals: *Ts) -> tuple[R, Callable[[*Ts], R]]: ...


@overload
def linearize(
    function: Callable[[*Ts], tuple[R, Aux]], /, *primals: *Ts, has_aux: Literal[True]
) -> tuple[R, Callable[[*Ts], R], Aux]: ...


def linearize(function: Callable[[*Ts], Any], /, *primals: *Ts, has_aux: bool = False) -> Any:
    """`jax.linearize`: a function's value, and its derivative as a function of tangents.

    Parameters
    ----------
    function : callable
        A function of positional arguments.
    *primals
        The point at which it is evaluated.
    has_aux : bool
        Whether the function returns a pair of its value and auxiliary data, which are passed through.

    Returns
    -------
    value
        The value of the function.
    derivative : callable
        Takes tangents with the structure of ``primals``, returns a tangent with the structure of ``value``. It may be
        called many times without evaluating the function again.
    aux
        The auxiliary data, if ``has_aux`` is set.
    """
    of_jax: Callable[..., Any] = jax.linearize
    return of_jax(function, *primals, has_aux=has_aux)


@overload
def shard_map(function: Function, /, **options: Any) -> Function: ...


@overload
def shard_map(**options: Any) -> Callable[[Function], Function]: ...


def shard_map(function: Any = None, /, **options: Any) -> Any:
    """`jax.shard_map`, as a function or as a decorator with options. Functions keep their signature and name.

    Parameters
    ----------
    function : callable
        The function that each device runs on its part.
    **options
        Options of `jax.shard_map`: ``out_specs``, ``in_specs``, ``mesh``, ``axis_names``, ``check_vma``.

    Returns
    -------
    callable
        The function of whole arrays; or a decorator, if only options are given.
    """
    if function is None:
        return functools.partial(shard_map, **options)
    return functools.update_wrapper(jax.shard_map(function, **options), function)


class NotJaxCompatibleError(TypeError):
    """A function that needs values was called with tracers, inside a transformation of JAX."""


def is_traced(x: Any) -> bool:
    """Whether a value, or a leaf of a pytree, is a tracer, which has a shape and a dtype but no value."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def no_jax_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that needs concrete values: with traced arguments it raises an error that names them.

    If no argument is traced, the function computes with concrete values, also in a program that jit is tracing. Arrays
    that are made inside such a program are traced.

    Raises
    ------
    NotJaxCompatibleError
        In calls under jit, vmap, grad and so on, if a leaf of an argument is traced.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_traced((args, kwargs)):
            name = getattr(function, "__qualname__", repr(function))
            raise NotJaxCompatibleError(
                f"`{name}` needs values and cannot run inside a transformation of JAX (jit, vmap, grad, ...): "
                f"{', '.join(_names_of_traced(function, args, kwargs))} traced. Call it outside, and pass its result in"
            )
        with jax.ensure_compile_time_eval():
            return function(*args, **kwargs)

    return checked


def _names_of_traced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    try:
        arguments: dict[str, Any] = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call is invalid, or the function has no signature
        arguments = {f"argument {i}": value for i, value in enumerate(args)} | kwargs
    names = [f"`{name}`" for name, value in arguments.items() if is_traced(value)]
    return [*names[:-1], f"{names[-1]} {'is' if len(names) == 1 else 'are'}"]


@jax.custom_jvp
def _not_differentiable(x: Any) -> Any:
    return x


@_not_differentiable.defjvp
def _raise_when_differentiated(primals: tuple[Any], tangents: tuple[Any]) -> Any:
    shapes = ", ".join(f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in jax.tree.leaves(primals))
    raise NotImplementedError(
        f"`non_differentiable`: a value ({shapes}) that is not differentiable was differentiated. If its derivative is "
        "meant to be zero, apply `jax.lax.stop_gradient` to the inputs of its computation"
    )


def non_differentiable(x: T) -> T:
    """Return arrays unchanged, and raise if a derivative is taken through them.

    Parameters
    ----------
    x : pytree of arrays
        Values without a derivative, such as the result of a search. `jax.lax.stop_gradient` would silently make the
        derivative zero.

    Returns
    -------
    pytree of arrays
        ``x``.

    Raises
    ------
    NotImplementedError
        In forward or reverse mode, while JAX traces the derivative, if ``x`` depends on a differentiated value.
    """
    return cast(T, _not_differentiable(x))
