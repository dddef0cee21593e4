"""Undocumented names of JAX that the library uses, each in a function that describes its purpose."""

import traceback
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, partial_eval
from jax.sharding import NamedSharding, PartitionSpec

Tree = TypeVar("Tree")


def varying_axes(array: Any) -> frozenset[Any]:
    """Axes of a mesh over which ``array`` varies, inside `jax.shard_map`."""
    aval = jax.typeof(array)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", ()) if manual is None else manual.varying)


def whole(array: Any) -> Any:
    """``array``, of which each device gets all if its type says that it is sharded: along axes of an explicit mesh."""
    sharding = jax.typeof(array).sharding
    if all(axes is None for axes in sharding.spec):
        return array
    return jax.reshard(array, NamedSharding(sharding.mesh, PartitionSpec(*[None] * array.ndim)))


def _axes_of(arrays: Any) -> frozenset[Any]:
    return frozenset().union(*map(varying_axes, jax.tree.leaves(arrays)))


def _vary(arrays: Tree, axes: frozenset[Any]) -> Tree:
    def vary(array: Any) -> Any:
        missing = axes - varying_axes(array)
        return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array

    return jax.tree.map(vary, arrays) if axes else arrays


def vary_alike(arrays: Tree) -> Tree:
    """A pytree whose arrays all vary over each axis over which any of them varies. The transpose sums over these."""
    return _vary(arrays, _axes_of(arrays))


def vary_like_results(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """``arguments`` that vary over each axis over which a result of ``function`` varies, inside `jax.shard_map`.

    The derivative by an array that is the same on all devices is a sum over devices. By one that varies it is the
    derivative of each device's own result.
    """
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return arguments
    return _vary(arguments, _axes_of(jax.eval_shape(function, *arguments)))


def aval_like(avals: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """The abstract value of a result with ``shape`` and ``dtype`` that varies over the axes of the operands."""
    if not avals:
        return jax.core.ShapedArray(shape, dtype)
    meshes = [aval.sharding.mesh for aval in avals]  # that of a constant is empty
    mesh = next((mesh for mesh in meshes if not mesh.empty), meshes[0])
    sharding = NamedSharding(mesh, PartitionSpec(*[None] * len(shape)))
    return avals[0].update(shape=shape, dtype=jax.numpy.dtype(dtype), weak_type=False, sharding=sharding)


def as_primitive(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A call of a primitive, under the name of an error of ``jax_debug_nans`` or ``jax_debug_infs``.

    With them JAX calls a jitted function again, without `jit`, to find the primitive. Here there is nothing inside.
    """

    def call(*operands: Any) -> Any:
        return function(*operands)

    call.__name__ = call.__qualname__ = name
    call._apply_primitive = True  # type: ignore[attr-defined]  # JAX looks there
    return call


def is_for_export(context: Any) -> bool:
    """Whether a lowering rule is called by `jax.export`."""
    parameters = getattr(context.module_context, "lowering_parameters", None)
    return bool(getattr(parameters, "for_export", False))


def register_dropping(
    primitive: Primitive, drop_unused: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]
) -> None:
    """Register the rule that JAX calls to remove unused results of an equation of ``primitive``."""

    def rule(used: Sequence[bool], *others: Any) -> tuple[list[bool], Any]:
        # From JAX 0.12 the inputs that are read afterwards stand in between. That is about references alone.
        return drop_unused(used, others[-1])

    partial_eval.dce_rules[primitive] = rule


def zero_tangent(primal: Any) -> ad.Zero:
    """The zero tangent of a result that does not depend on the inputs."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def with_text_first(error: Exception, name: str) -> Exception:
    """Prepare an error of the torch function ``name`` for `jax.experimental.buffer_callback`, which turns it into text.

    JAX's text is a traceback, followed by the message. It lists the frame that raised the error and its callers. So the
    error is raised from the frame of a generator, which has no callers, and the torch traceback is put after the
    message.
    """
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{error}\n\nraised by `{name}`, called by JAX:\n" + "".join(traceback.format_list(frames)).rstrip()
    found = type(type(error).__name__, (Exception,), {})(text)
    frame = _torch_function().gi_frame  # type: ignore[attr-defined]  # generators have it
    return found.with_traceback(TracebackType(None, frame, frame.f_lasti, frame.f_lineno))


def _torch_function() -> Iterator[None]:
    yield
