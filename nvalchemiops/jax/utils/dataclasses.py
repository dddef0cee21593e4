"""Dataclasses that are pytrees."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import (
    Any,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    dataclass_transform,
    overload,
)

import jax

T = TypeVar("T")
P = ParamSpec("P")


_post_init_is_off = contextvars.ContextVar("nvalchemiops.jax.utils: __post_init__ is off", default=False)


@contextlib.contextmanager
def no_post_init() -> Iterator[None]:
    """Objects that are made inside run no ``__post_init__`` that `skip_post_init_if_disabled` decorates.

    For objects that hold something else than arrays for a moment: names of data sets, shardings, placeholders. It holds
    for the current thread (and the current task of asyncio), and may be nested.
    """
    token = _post_init_is_off.set(True)
    try:
        yield
    finally:
        _post_init_is_off.reset(token)


def skip_post_init_if_disabled(post_init: Callable[P, None]) -> Callable[P, None]:
    """Decorate a ``__post_init__`` (or any method without a result) that must not run inside `no_post_init`.

    JAX takes pytrees apart and builds them again, sometimes with placeholders for leaves. A `dataclass` is built again
    inside `no_post_init`, so a decorated check of shapes sees what programs make, and no placeholders.
    """

    @functools.wraps(post_init)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if not _post_init_is_off.get():
            post_init(*args, **kwargs)

    return run


class _Options(TypedDict, total=False):
    init: bool
    repr: bool
    hash: bool | None
    compare: bool
    metadata: Mapping[Any, Any] | None
    kw_only: bool
    static: bool


class _AllOptions(_Options, total=False):
    default: Any
    default_factory: Any


@overload
def field(*, default: T, **options: Unpack[_Options]) -> T: ...


@overload
def field(*, default_factory: Callable[[], T], **options: Unpack[_Options]) -> T: ...


@overload
def field(**options: Unpack[_Options]) -> Any: ...


def field(
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    init: bool = True,
    repr: bool = True,
    hash: bool | None = None,
    compare: bool = True,
    metadata: Mapping[Any, Any] | None = None,
    kw_only: Any = dataclasses.MISSING,
    static: bool = False,
) -> Any:
    """Describe a field of a `dataclass`, as `dataclasses.field` does.

    Parameters
    ----------
    default, default_factory, init, repr, hash, compare, metadata, kw_only
        Those of `dataclasses.field`.
    static : bool
        The field belongs to the structure of the pytree: it is no leaf, transformations do not see it, and another
        value means another compilation. It must be hashable and comparable by ``==``, so not an array.

    Returns
    -------
    dataclasses.Field
        It has the type of whatever the field is annotated with, as far as a type checker is concerned.
    """
    options = {
        "default": default,
        "default_factory": default_factory,
        "kw_only": kw_only,
        "init": init,
        "repr": repr,
        "hash": hash,
        "compare": compare,
        "metadata": {**(metadata or {}), "static": static},
    }
    return dataclasses.field(**options)


def lens_field(**options: Unpack[_AllOptions]) -> Any:
    """Describe a field of a `dataclass` whose type is a lens, or another generic protocol of functions.

    The same as `field`, but that a type checker takes any default: the parameters of a generic lens cannot be inferred
    from it. A lens that holds arrays, such as indices, is a pytree and stays a leaf; for one that is a plain function
    say ``static=True``.
    """
    of_anything: Callable[..., Any] = field
    return of_anything(**options)


lens_field.__signature__ = inspect.signature(field)  # type: ignore[attr-defined]  # `inspect` looks there


def _rebuild(cls: type[T], names: tuple[str, ...], values: Iterable[Any]) -> T:
    token = _post_init_is_off.set(True)
    try:
        return cls(**dict(zip(names, values)))
    finally:
        _post_init_is_off.reset(token)


def _register(cls: type[T]) -> type[T]:
    """Register a dataclass as a pytree whose children are its fields, in order, without those that are static."""
    parameters = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]
    data = tuple(f.name for f in parameters if not f.metadata.get("static", False))
    static = tuple(f.name for f in parameters if f.metadata.get("static", False))
    required = [
        name
        for name, p in inspect.signature(cls).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in data + static
    ]
    if required:
        raise TypeError(
            f"`{cls.__name__}` cannot be rebuilt from its fields alone: its constructor needs "
            f"{', '.join(f'`{name}`' for name in required)}. Give them defaults, or make them fields"
        )
    if not hasattr(cls, "__post_init__"):
        return jax.tree_util.register_dataclass(cls, data, static)
    keys = [jax.tree_util.GetAttrKey(name) for name in data]
    jax.tree_util.register_pytree_with_keys(
        cls,
        lambda x: (tuple((key, getattr(x, key.name)) for key in keys), tuple(getattr(x, name) for name in static)),
        lambda values, children: _rebuild(cls, static + data, (*values, *children)),
        lambda x: (tuple(getattr(x, name) for name in data), tuple(getattr(x, name) for name in static)),
    )
    return cls


@overload
def dataclass(cls: type[T], /) -> type[T]: ...


@overload
def dataclass(
    *,
    init: bool = True,
    repr: bool = True,
    eq: bool = True,
    order: bool = False,
    unsafe_hash: bool = False,
    frozen: bool = True,
    match_args: bool = True,
    kw_only: bool = False,
    slots: bool = False,
    weakref_slot: bool = False,
) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field, lens_field, dataclasses.field))
def dataclass(cls: type[T] | None = None, /, *, frozen: bool = True, **options: bool) -> Any:
    """Make a frozen dataclass that is a pytree: jit, grad, vmap and scan take it and return it.

    Parameters
    ----------
    cls : type
        A class with annotated fields. Those of `field(static=True)` belong to the structure, the others are children.
    frozen : bool
        Whether attributes cannot be assigned; `dataclasses.replace` makes a changed copy.
    **options : bool
        Those of `dataclasses.dataclass`: ``init``, ``repr``, ``eq``, ``order``, ``unsafe_hash``, ``match_args``,
        ``kw_only``, ``slots``, ``weakref_slot``. What they generate compares and hashes fields, so ``==`` and ``hash``
        work as far as they do for the values: for numbers and strings, not for arrays.

    Returns
    -------
    type
        The class, or a decorator if options are given alone. A subclass is decorated for itself. A class that was
        decorated before is returned as it is: its own attribute ``_jax_dataclass`` is True.

    Raises
    ------
    TypeError
        The constructor needs something that is no field, such as an `dataclasses.InitVar` without a default.

    Notes
    -----
    JAX takes objects apart and builds them again by their constructor, `__post_init__` included: sometimes with
    placeholders for leaves. Decorate a ``__post_init__`` that checks values by `skip_post_init_if_disabled`: it then
    runs for objects that a program makes, and not for those that JAX builds. A field with ``init=False`` is no leaf: an
    undecorated ``__post_init__`` computes it from the others.

    Examples
    --------
    >>> import jax
    >>> from nvalchemiops.jax.utils import dataclass, field
    >>> @dataclass
    ... class Oscillator:
    ...     stiffness: jax.Array
    ...     name: str = field(default="harmonic", static=True)
    >>> jax.grad(lambda o: o.stiffness**2)(Oscillator(3.0))
    Oscillator(stiffness=Array(6., dtype=float..., weak_type=True), name='harmonic')
    """

    def decorate(plain: type[T]) -> type[T]:
        if "_jax_dataclass" in vars(plain):
            return plain
        made = _register(dataclasses.dataclass(frozen=frozen, **options)(plain))
        made._jax_dataclass = True  # type: ignore[attr-defined]  # a mark that other libraries look for
        return made

    return decorate if cls is None else decorate(cls)
