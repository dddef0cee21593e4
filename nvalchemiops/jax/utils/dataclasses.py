"""Dataclasses that are pytrees, and their fields."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, dataclass_transform, overload

import jax

T = TypeVar("T")
P = ParamSpec("P")


_post_init_is_off = contextvars.ContextVar("nvalchemiops.jax.utils: __post_init__ is off", default=False)


@contextlib.contextmanager
def no_post_init() -> Iterator[None]:
    """A context in which no ``__post_init__`` runs that is decorated by `skip_post_init_if_disabled`.

    For objects that temporarily hold something other than arrays: names of data sets, shardings, placeholders. It
    affects the current thread (and the current asyncio task), and may be nested.
    """
    token = _post_init_is_off.set(True)
    try:
        yield
    finally:
        _post_init_is_off.reset(token)


def skip_post_init_if_disabled(post_init: Callable[P, None]) -> Callable[P, None]:
    """Decorate a ``__post_init__`` (or any method without a result) that must not run inside `no_post_init`.

    JAX flattens pytrees and rebuilds them, sometimes with placeholders for leaves. A `dataclass` is rebuilt inside
    `no_post_init`, so a decorated check of shapes sees only objects that programs make, and never placeholders.
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
        As in `dataclasses.field`.
    static : bool
        Whether the field belongs to the structure of the pytree instead of being a leaf. Transformations do not see a
        static field, and each value has its own compilation. The value must be hashable and comparable by ``==``, so
        it cannot be an array.

    Returns
    -------
    dataclasses.Field
        For a type checker it has the annotated type of the field.
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

    The same as `field`, but a type checker accepts any default, since it cannot infer the parameters of a generic lens
    from one. A lens that holds arrays, such as indices, is a pytree and remains a leaf. For a lens that is a plain
    function set ``static=True``.
    """
    of_anything: Callable[..., Any] = field
    return of_anything(**options)


lens_field.__signature__ = inspect.signature(field)  # type: ignore[attr-defined]  # `inspect` reads it


def _rebuild(cls: type[T], names: tuple[str, ...], values: Iterable[Any]) -> T:
    with no_post_init():
        return cls(**dict(zip(names, values)))


def _register(cls: type[T]) -> type[T]:
    """Register a dataclass as a pytree whose children are its non-static fields, in order."""
    parameters = [f for f in dataclasses.fields(cls) if f.init]  # type: ignore[arg-type]  # it is a dataclass by now
    data = tuple(f.name for f in parameters if not f.metadata.get("static", False))
    static = tuple(f.name for f in parameters if f.metadata.get("static", False))
    required = [
        name
        for name, p in inspect.signature(cls).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and name not in data + static
    ]
    if required:
        raise TypeError(
            f"`{cls.__name__}` cannot be rebuilt from its fields alone: its constructor also needs "
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
        A class with annotated fields. Fields with `field(static=True)` belong to the structure, all others are
        children.
    frozen : bool
        Whether attributes cannot be assigned. Use `dataclasses.replace` to make a changed copy.
    **options : bool
        Options of `dataclasses.dataclass`: ``init``, ``repr``, ``eq``, ``order``, ``unsafe_hash``, ``match_args``,
        ``kw_only``, ``slots``, ``weakref_slot``. The generated methods compare and hash fields, so ``==`` and ``hash``
        work for fields that are numbers and strings, but not for arrays.

    Returns
    -------
    type
        The class; or a decorator, if only options are given. A subclass must be decorated itself. A class that is
        decorated already, whose own attribute ``_jax_dataclass`` is True, is returned unchanged.

    Raises
    ------
    TypeError
        The constructor needs an argument that is not a field, such as a `dataclasses.InitVar` without a default.

    Notes
    -----
    JAX flattens objects and rebuilds them by their constructor, including `__post_init__`, sometimes with placeholders
    for leaves. Decorate a ``__post_init__`` that checks values with `skip_post_init_if_disabled`: it then runs for
    objects that a program makes, and not for those that JAX rebuilds. A field with ``init=False`` is not a leaf: an
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
