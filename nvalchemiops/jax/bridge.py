"""Torch functions as functions of JAX: `from_torch`."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from nvalchemiops.jax.callback import Contraction, Request, TorchFunction
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
    bridge = Bridge(function, out_shapes, contract=SCALAR if scalar else None, with_gradients=requires_grad)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return bridge(*args, **kwargs)

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


class Bridge:
    """A torch function as JAX calls it; see `from_torch`.

    Parameters
    ----------
    function : callable
    out_shapes : pytree, callable or None
    name : str, optional
        For messages.
    contract : Contraction, or callable, optional
        For energies; or a function of the arguments, with an `Operand` for each array, that returns it or None.
    with_gradients : bool
    writes : frozenset of int, optional
        Numbers of the arrays that the function changes in place, if that is known.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        out_shapes: Types | Callable[..., Types] | None,
        *,
        name: str = "",
        contract: Contraction | Callable[..., Contraction | None] | None = None,
        with_gradients: bool = False,
        writes: frozenset[int] | None = None,
    ):
        self.function, self.out_shapes = function, out_shapes
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.contract, self.with_gradients, self.writes = contract, with_gradients, writes
        self._variants: dict[Hashable, _Variant] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the function for JAX arrays."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        static = tuple(None if _is_array(leaf) else (type(leaf), leaf) for leaf in leaves)
        try:
            variant = self._variants.get((tree, static))
        except TypeError:
            bad = next(leaf for leaf in leaves if not _is_array(leaf) and not isinstance(leaf, Hashable))
            kind = type(bad).__name__
            raise TypeError(f"`{self.name}`: an argument of type {kind} is neither an array nor hashable") from None
        if variant is None:
            if len(self._variants) >= KEPT_VARIANTS:
                self._variants.clear()
            variant = self._variants[tree, static] = _Variant(self, tree, leaves)
        types = tuple(_type_of(x, self.name) for x in arrays)
        outputs = variant.outputs(types)
        return jax.tree.unflatten(outputs.tree, call_flat(variant.function, arrays, outputs.types))


class Operand(int):
    """The number of an array among the arrays of a call."""


class _Variant:
    """A bridge with its static arguments filled in, of a flat list of tensors."""

    def __init__(self, bridge: Bridge, tree: Any, leaves: Sequence[Any]):
        self._tree = tree
        self._static = [None if _is_array(leaf) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        self._bridge = bridge
        self._known: dict[tuple[jax.ShapeDtypeStruct, ...], _Outputs] = {}
        contract: Any = bridge.contract
        if callable(contract) and not isinstance(contract, Contraction):
            contract = self._call(contract, [Operand(i) for i in range(len(self._places))])
        self.function = TorchFunction(
            self._evaluate, bridge.name, contract, with_gradients=bridge.with_gradients, writes=bridge.writes
        )

    def _call(self, function: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        leaves = list(self._static)
        for place, array in zip(self._places, arrays):
            leaves[place] = array
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        return function(*args, **kwargs)

    def _evaluate(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return jax.tree.leaves(self._call(self._bridge.function, tensors))

    def outputs(self, types: tuple[jax.ShapeDtypeStruct, ...]) -> _Outputs:
        """Shapes and dtypes of the outputs for those of the inputs."""
        found = self._known.get(types)
        if found is None:
            rule = self._bridge.out_shapes
            if rule is None:
                declared = self._traced(types)
            else:
                declared = self._call(rule, types) if callable(rule) else rule
            leaves, tree = jax.tree.flatten(declared)
            for number, leaf in enumerate(leaves):
                if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                    raise TypeError(f"`{self.function.name}`: output {number} is no tensor but {type(leaf).__name__}")
                torch_dtype(leaf.dtype, f"output {number} of {self.function.name}")
            shapes = tuple(jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves)
            is_energy = len(shapes) == 1 and not shapes[0].shape and np.issubdtype(shapes[0].dtype, np.floating)
            if self.function.contract is SCALAR and not is_energy:
                raise ValueError(f"`{self.function.name}`: scalar=True needs one real number as output, got {shapes}")
            found = self._known[types] = _Outputs(tree, shapes)
        return found

    def _traced(self, types: tuple[jax.ShapeDtypeStruct, ...]) -> Types:
        """Outputs of the function for tensors without data; what it changes in place is learned, too."""
        function = self.function
        with without_data(), torch.set_grad_enabled(function.with_gradients):
            tensors = [torch.empty(x.shape, dtype=torch_dtype(x.dtype)) for x in types]
            versions = [version_of(x) for x in tensors]
            outputs = self._call(self._bridge.function, tensors)
            written = {i for i, (x, version) in enumerate(zip(tensors, versions)) if version_of(x) != version}
        function.writes = frozenset(written | (function.writes or frozenset()))

        def type_of(output: Any) -> Any:
            if not isinstance(output, torch.Tensor):
                return output
            return jax.ShapeDtypeStruct(tuple(output.shape), jax_dtype(output.dtype))

        return jax.tree.map(type_of, outputs)


class _Scalar(Contraction):
    """One energy: its tangent is the sum of the products of gradients and tangents."""

    def __call__(
        self,
        gradients: Mapping[int, jax.Array],
        tangents: Mapping[int, jax.Array],
        inputs: Mapping[int, jax.Array],
        outputs: Sequence[jax.ShapeDtypeStruct],
    ) -> Sequence[jax.Array]:
        """The tangent of the energy."""
        total = sum(jax.numpy.sum(gradients[i] * tangents[i]) for i in gradients)
        return [jax.numpy.reshape(total, outputs[0].shape).astype(outputs[0].dtype)]


SCALAR = _Scalar()
