"""Torch functions as functions of JAX: `from_torch`."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from nvalchemiops.jax.callback import Request, TorchFunction
from nvalchemiops.jax.dtypes import jax_dtype, torch_dtype
from nvalchemiops.jax.primitive import bind
from nvalchemiops.torch.runtime._torch_internals import version_of, without_data

Types = Any
"""A pytree of `jax.ShapeDtypeStruct`."""


def from_torch(
    function: Callable[..., Any],
    out_shapes: Types | Callable[..., Types] | None = None,
    *,
    scalar: bool = False,
    requires_grad: bool = False,
) -> Callable[..., Any]:
    """A JAX function that calls a torch function on JAX's own memory, with derivatives of every order.

    It works under ``jit``, ``grad``, ``jvp``, ``hessian`` and their compositions, ``vmap`` (all slices in one call from
    JAX, one after the other), ``scan``, ``checkpoint`` and ``shard_map``, on a CPU and on an NVIDIA GPU. Derivatives
    are torch's, computed again where JAX asks for them. So the function must depend on nothing but its arguments, and
    a derivative in forward mode takes one order more of torch.

    Parameters
    ----------
    function : callable
        Takes tensors, and pytrees of them, by position or name; returns a tensor or a pytree of tensors. Arguments
        that are Python numbers, strings or None are passed as they are, and are static. An input that the function
        changes in place is copied first. The function must not keep a tensor that it was given: JAX uses the memory
        again.
    out_shapes : pytree of jax.ShapeDtypeStruct, or callable, optional
        Shapes and dtypes of the outputs; or a function of the arguments that returns them, which is given a
        `jax.ShapeDtypeStruct` for each array. By default ``function`` is traced with tensors without data.
    scalar : bool
        The output is one number with shape ``()``, such as an energy: its gradient then comes from the same call as its
        value.
    requires_grad : bool
        Record operations for torch's autograd in every call: for a function that calls `torch.autograd.grad` itself.

    Returns
    -------
    callable
        Takes JAX or numpy arrays in the place of tensors, and returns JAX arrays.

    Raises
    ------
    TypeError
        A dtype that torch does not have, an argument that is neither an array nor hashable, an output that is no
        tensor, a derivative by a complex array.
    ValueError
        ``scalar=True`` and another output than one real number.
    jax.errors.JaxRuntimeError
        When the compiled program runs: what the function raises, or an output with another shape or dtype than was
        declared.

    Notes
    -----
    Without ``jax_enable_x64`` JAX has no arrays with 64 bits: outputs that torch computes in 64 bits are rounded to 32.

    Make the function once and keep it: each call of `from_torch` gives a function that JAX traces anew.

    Examples
    --------
    >>> energy = from_torch(lambda x: (x**4).sum(), scalar=True)
    >>> jax.jit(jax.grad(energy))(jax.numpy.arange(3.0))
    Array([ 0.,  4., 32.], dtype=float32)
    """
    variants: dict[Hashable, _Variant] = {}
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        static = tuple(None if _is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
        try:
            variant = variants.get((tree, static))
        except TypeError:
            bad = next(leaf for leaf in leaves if not _is_array(leaf) and not isinstance(leaf, Hashable))
            raise TypeError(
                f"`{name}`: an argument of type {type(bad).__name__} is neither an array nor hashable"
            ) from None
        if variant is None:
            if len(variants) >= KEPT_VARIANTS:
                variants.clear()
            variant = variants[tree, static] = _Variant(function, name, tree, leaves, out_shapes, scalar, requires_grad)
        types = tuple(_type_of(x, name) for x in arrays)
        outputs = variant.outputs(types)
        return jax.tree.unflatten(outputs.tree, call_flat(variant.function, arrays, outputs.types))

    return call


KEPT_VARIANTS = 256
"""Combinations of static arguments that are kept for a function."""


def call_flat(function: TorchFunction, arrays: Sequence[Any], outputs: tuple[jax.ShapeDtypeStruct, ...]) -> list[Any]:
    """Outputs of ``function``, whose shapes and dtypes are known."""
    operands = [x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in arrays]
    request = Request(
        function=function,
        outputs=outputs,
        inputs=len(operands),
        values=tuple(range(len(outputs))),
        gradient=(),
        weights=(),
        directions=(),
        sizes=(),
        operand_flags=((),) * len(operands),
        result_flags=((),) * len(outputs),
    )
    return bind(request, operands)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _type_of(array: Any, name: str) -> jax.ShapeDtypeStruct:
    torch_dtype(array.dtype, name)
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


class _Outputs(NamedTuple):
    tree: Any
    types: tuple[jax.ShapeDtypeStruct, ...]


class _Variant:
    """A torch function with its static arguments filled in, of a flat list of tensors."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        tree: Any,
        leaves: Sequence[Any],
        out_shapes: Types | Callable[..., Types] | None,
        scalar: bool,
        requires_grad: bool,
    ):
        self._tree = tree
        self._static = [None if _is_array(leaf) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        self._plain, self._out_shapes, self._scalar = function, out_shapes, scalar
        self._known: dict[tuple[jax.ShapeDtypeStruct, ...], _Outputs] = {}
        self.function = TorchFunction(
            self._evaluate, name, sum_of_products if scalar else None, with_gradients=requires_grad
        )

    def _call(self, function: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        leaves = list(self._static)
        for place, array in zip(self._places, arrays):
            leaves[place] = array
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        return function(*args, **kwargs)

    def _evaluate(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return jax.tree.leaves(self._call(self._plain, tensors))

    def outputs(self, types: tuple[jax.ShapeDtypeStruct, ...]) -> _Outputs:
        """Shapes and dtypes of the outputs for those of the inputs."""
        found = self._known.get(types)
        if found is None:
            if callable(self._out_shapes):
                declared = self._call(self._out_shapes, types)
            elif self._out_shapes is None:
                declared = self._traced(types)
            else:
                declared = self._out_shapes
            leaves, tree = jax.tree.flatten(declared)
            for number, leaf in enumerate(leaves):
                if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                    raise TypeError(f"`{self.function.name}`: output {number} is no tensor but {type(leaf).__name__}")
                torch_dtype(leaf.dtype, f"output {number} of {self.function.name}")
            shapes = tuple(jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves)
            is_energy = len(shapes) == 1 and not shapes[0].shape and np.issubdtype(shapes[0].dtype, np.floating)
            if self._scalar and not is_energy:
                raise ValueError(f"`{self.function.name}`: scalar=True needs one real number as output, got {shapes}")
            found = self._known[types] = _Outputs(tree, shapes)
        return found

    def _traced(self, types: tuple[jax.ShapeDtypeStruct, ...]) -> Types:
        """Outputs of the function for tensors without data; what it changes in place is learned, too."""
        function = self.function
        with without_data(), torch.set_grad_enabled(function.with_gradients):
            tensors = [torch.empty(x.shape, dtype=torch_dtype(x.dtype)) for x in types]
            versions = [version_of(x) for x in tensors]
            outputs = self._call(self._plain, tensors)
            written = {i for i, (x, version) in enumerate(zip(tensors, versions)) if version_of(x) != version}
        function.writes = frozenset(written | (function.writes or frozenset()))

        def type_of(output: Any) -> Any:
            if not isinstance(output, torch.Tensor):
                return output
            return jax.ShapeDtypeStruct(tuple(output.shape), jax_dtype(output.dtype))

        return jax.tree.map(type_of, outputs)


def sum_of_products(
    gradients: dict[int, Any], tangents: dict[int, Any], others: dict[int, Any], outputs: Sequence[Any]
) -> list[Any]:
    """The tangent of one energy."""
    return [sum(jax.numpy.sum(gradients[i] * tangents[i]) for i in gradients)]
