"""Transformations of JAX by which functions keep their signatures, and guards against them."""

import functools
import inspect
from collections.abc import Callable
from typing import (
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    TypeVarTuple,
    cast,
    overload,
)

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
    """`jax.jit`, as a function or a decorator with options, by which functions keep their signature and name.

    Parameters
    ----------
    function : callable
        What to compile.
    **options
        Those of `jax.jit`.

    Returns
    -------
    callable
        What `jax.jit` returns, so ``lower`` and the like are there; or a decorator if options are given alone.
    """
    if function is None:
        return functools.partial(jit, **options)
    return jax.jit(function, **options)


@overload
def vectorize(function: Function, /, *, excluded: Any = ..., signature: str | None = ...) -> Function: ...


@overload
def vectorize(*, excluded: Any = ..., signature: str | None = ...) -> Callable[[Function], Function]: ...


def vectorize(function: Any = None, /, *, excluded: Any = frozenset(), signature: str | None = None) -> Any:
    """`jax.numpy.vectorize`, as a function or a decorator with options, by which functions keep signature and name.

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
        The function of arrays that broadcast against each other.
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
        Where it is evaluated.
    has_aux : bool
        The function returns a pair, whose second is handed through.

    Returns
    -------
    value
        Its value.
    derivative : callable
        Takes tangents with the structure of ``primals``, returns that of ``value``. It may be called many times, and
        the function is not evaluated again.
    aux
        If ``has_aux`` is set.
    """
    of_jax: Callable[..., Any] = jax.linearize
    return of_jax(function, *primals, has_aux=has_aux)


@overload
def shard_map(function: Function, /, **options: Any) -> Function: ...


@overload
def shard_map(**options: Any) -> Callable[[Function], Function]: ...


def shard_map(function: Any = None, /, **options: Any) -> Any:
    """`jax.shard_map`, as a function or a decorator with options, by which functions keep their signature and name.

    Parameters
    ----------
    function : callable
        What each device does with its part.
    **options
        Those of `jax.shard_map`: ``out_specs``, ``in_specs``, ``mesh``, ``axis_names``, ``check_vma``.

    Returns
    -------
    callable
        The function of whole arrays, or a decorator if options are given alone.
    """
    if function is None:
        return functools.partial(shard_map, **options)
    return functools.update_wrapper(jax.shard_map(function, **options), function)


class NotJaxCompatibleError(TypeError):
    """A function that needs values was called with values that a transformation of JAX stands in for."""


def is_traced(x: Any) -> bool:
    """Whether a value, or a leaf of a pytree, is a tracer: it has a shape and a dtype, but no number yet."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x))


def no_jax_tracing(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that needs numbers: with traced arguments it raises, naming itself and them.

    Where all its arguments are numbers, it computes with numbers, also in a program that jit is tracing; arrays that
    are made inside such a program are traced.

    Raises
    ------
    NotJaxCompatibleError
        In calls under jit, vmap, grad and so on, where a leaf of an argument is traced.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_traced((args, kwargs)):
            name = getattr(function, "__qualname__", repr(function))
            raise NotJaxCompatibleError(
                f"`{name}` needs numbers and cannot run inside a transformation of JAX (jit, vmap, grad, ...): "
                f"{', '.join(_names_of_traced(function, args, kwargs))} traced. Call it outside, and hand in its result"
            )
        with jax.ensure_compile_time_eval():
            return function(*args, **kwargs)

    return checked


def _names_of_traced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    try:
        arguments: dict[str, Any] = dict(inspect.signature(function).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # the call is wrong, or there is no signature
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
        f"`non_differentiable`: a value ({shapes}) that is not differentiable was differentiated. Where its derivative "
        "is meant to be zero, take `jax.lax.stop_gradient` of what it is computed from"
    )


def non_differentiable(x: T) -> T:
    """Return arrays as they are, and raise where a derivative is taken through them.

    Parameters
    ----------
    x : pytree of arrays
        What has no derivative, such as the result of a search. `jax.lax.stop_gradient` would make it zero in silence.

    Returns
    -------
    pytree of arrays
        ``x``.

    Raises
    ------
    NotImplementedError
        In forward or reverse mode, while JAX traces the derivative, if ``x`` depends on what is differentiated.
    """
    return cast(T, _not_differentiable(x))
