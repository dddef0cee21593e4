"""Torch functions as JAX functions: `from_torch`."""

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from nvalchemiops.jax.callback import Request, TorchFunction, plain_state
from nvalchemiops.jax.dtypes import jax_dtype, torch_dtype
from nvalchemiops.jax.primitive import bind
from nvalchemiops.torch.runtime._torch_internals import NEEDS_DATA, is_about_symbols, without_data
from nvalchemiops.torch.runtime.context import ValuesNeededError

Types = Any
"""A pytree of `jax.ShapeDtypeStruct`."""

Arrays = Mapping[int, jax.Array]
"""Arrays by the index of their input."""

Shapes = Sequence[jax.ShapeDtypeStruct]


def from_torch(
    function: Callable[..., Any],
    out_shapes: Types | Callable[..., Types] | None = None,
    *,
    scalar: bool = False,
    requires_grad: bool = False,
) -> Callable[..., Any]:
    """Make a JAX function that calls a torch function, with derivatives of every order.

    It works under ``jit``, ``grad``, ``jvp``, ``hessian`` and their compositions, ``vmap`` (slice by slice, in one
    callback), ``scan``, ``checkpoint`` and ``shard_map``, on a CPU and on an NVIDIA GPU. Derivatives are torch's. They
    are recomputed whenever JAX requests them, so the function must depend on nothing but its arguments. A derivative in
    forward mode needs one more order of derivatives in torch, unless it is that of a single number.

    Parameters
    ----------
    function : callable
        Takes tensors, and pytrees of them, by position or name; returns a tensor or a pytree of tensors. Arguments that
        are Python numbers, strings or None are passed unchanged, and are static. The function gets copies of arrays, so
        it may change and keep them.
    out_shapes : pytree of jax.ShapeDtypeStruct, or callable, optional
        Shapes and dtypes of the outputs; or a function that returns them, called with the arguments, with a
        `jax.ShapeDtypeStruct` for each array. By default ``function`` is traced with tensors without data.
    scalar : bool
        Whether the output is a single number with shape ``()``, such as an energy. Its gradient then comes from the
        same call as its value.
    requires_grad : bool
        Whether to record operations for torch's autograd in every call: for functions that call `torch.autograd.grad`
        themselves.

    Returns
    -------
    callable
        Takes JAX or NumPy arrays in place of tensors, and returns JAX arrays.

    Raises
    ------
    TypeError
        A dtype that torch does not have, an argument that is neither an array nor hashable, an output that is not a
        tensor, a derivative with respect to a complex array.
    ValueError
        ``scalar=True``, but the output is not a single real number.
    jax.errors.JaxRuntimeError, ValueError
        While the compiled program runs: an error of the function, or an output whose shape or dtype was not declared.
        JAX raises one of the two types, with the message of the cause in its third line.

    Notes
    -----
    Without ``jax_enable_x64`` JAX has no 64-bit arrays: outputs that torch computes in 64 bits are rounded to 32 bits.

    Make the function once and keep it: JAX traces the result of each call of `from_torch` anew.

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
"""Number of combinations of static arguments that are kept for a function."""


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _type_of(array: Any, name: str) -> jax.ShapeDtypeStruct:
    torch_dtype(array.dtype, name)
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


class _Outputs(NamedTuple):
    tree: Any
    types: tuple[jax.ShapeDtypeStruct, ...]


class Bridge:
    """A torch function that JAX can call; see `from_torch`.

    With ``at_once``, slices of ``vmap`` may go into one call, along leading axes: if True, they do if the outputs then
    have such axes, and the results of two slices agree with separate calls; a callable, called with the arguments of
    one slice with a `jax.ShapeDtypeStruct` for each array, decides. ``for_shapes`` is an equivalent function that is
    called with tensors without data, on the ``device()``. Further options are fields of `TorchFunction`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        out_shapes: Types | Callable[..., Types] | None,
        *,
        name: str = "",
        at_once: bool | Callable[..., bool] = False,
        for_shapes: Callable[..., Any] | None = None,
        device: Callable[[], torch.device] = lambda: torch.device("cpu"),
        **options: Any,
    ):
        self.out_shapes, self.at_once, self.device = out_shapes, at_once, device
        self.for_shapes = for_shapes or function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        options |= {"folds": callable(at_once), "batches_gradients": at_once is True}
        self.function = TorchFunction(function, self.name, **options)
        self._variants: dict[Hashable, _Variant] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the function for JAX arrays."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        static = tuple(None if _is_array(leaf) else _static(leaf) for leaf in leaves)
        is_x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        try:
            variant = self._variants.get((tree, static, is_x64))
        except TypeError:
            bad = next(leaf for leaf in leaves if not _is_array(leaf) and not isinstance(leaf, Hashable))
            kind = type(bad).__name__
            raise TypeError(f"`{self.name}`: an argument of type {kind} is neither an array nor hashable") from None
        if variant is None:
            if len(self._variants) >= KEPT_VARIANTS:
                self._variants.clear()
            variant = self._variants[tree, static, is_x64] = _Variant(self, tree, leaves, rounds=not is_x64)
        types = tuple(_type_of(x, self.name) for x in arrays)
        if not is_x64:  # arrays made while x64 was on are narrowed, as by other JAX functions
            arrays = [jax.numpy.asarray(x, t.dtype) for x, t in zip(arrays, types)]
        outputs = variant.outputs(types)
        n_inputs, n_outputs = len(arrays), len(outputs.types)
        request = Request(
            variant.function,
            outputs.types,
            n_inputs,
            values=tuple(range(n_outputs)),
            operand_flags=((),) * n_inputs,
            result_flags=((),) * n_outputs,
        )
        found = bind(request, [x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in arrays])
        return jax.tree.unflatten(outputs.tree, found)


def _static(leaf: Any) -> Hashable:
    """The cache key of a static argument. It distinguishes -0.0 from 0.0."""
    return (type(leaf), leaf.hex() if isinstance(leaf, float) else leaf)


class Operand(int):
    """The index of an array among the arrays of a call."""


class _Variant:
    """A bridge with its static arguments filled in, as a function of a flat list of tensors."""

    def __init__(self, bridge: Bridge, tree: Any, leaves: Sequence[Any], rounds: bool):
        self._tree = tree
        self._static = [None if _is_array(leaf) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]
        self._bridge = bridge
        self._known: dict[tuple[jax.ShapeDtypeStruct, ...], _Outputs] = {}
        function = bridge.function
        contract = function.contract
        if callable(contract):
            contract = self._call(contract, [Operand(i) for i in range(len(self._places))])
        self.function = replace(
            function,
            evaluate=self._flat(function.evaluate),
            contract=contract,
            rounds=rounds,
            first_order=self._flat(function.first_order) if function.first_order else None,
            around=self._around(function.around) if function.around else None,
            fill=self._filling(function.fill) if function.fill else None,
            takes_all=functools.cache(self._takes_all) if bridge.at_once else None,
            constants=self._constants(function.constants) if function.constants else {},
        )

    def _call(self, function: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        leaves = list(self._static)
        for place, array in zip(self._places, arrays):
            leaves[place] = array
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        return function(*args, **kwargs)

    def _flat(self, function: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
        return lambda *tensors: jax.tree.leaves(self._call(function, tensors))

    def _constants(self, constants: frozenset[str]) -> dict[int, str]:
        """Indices of the arrays in ``constants``, and their names in the caller's code, such as ``d3_params.rcov``."""
        operands = self._call(lambda **arguments: arguments, [Operand(i) for i in range(len(self._places))])
        paths, _ = jax.tree_util.tree_flatten_with_path(operands)
        found = [(i, path) for path, i in paths if isinstance(i, Operand) and path[0].key in constants]
        return {int(i): path[0].key + jax.tree_util.keystr(path[1:]) for i, path in found}

    def _around(self, around: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *tensors: self._call(around, tensors)

    def _filling(self, fill: Callable[..., bool]) -> Callable[..., bool]:
        return lambda results, *tensors: self._call(functools.partial(fill, results), tensors)

    def outputs(self, types: tuple[jax.ShapeDtypeStruct, ...]) -> _Outputs:
        """Shapes and dtypes of the outputs, for inputs with these shapes and dtypes."""
        found = self._known.get(types)
        if found is None:
            rule = self._bridge.out_shapes
            with plain_state():  # the state of a call
                if rule is None:
                    declared = self._traced(types)
                else:
                    declared = self._call(rule, types) if callable(rule) else rule
            found = self._declared(declared)
            if self.function.contract is SCALAR and not is_energy(found.types):
                raise ValueError(
                    f"`{self.function.name}`: scalar=True needs one real number as output, got {found.types}"
                )
            self._known[types] = found
        return found

    def _declared(self, declared: Types) -> _Outputs:
        """The declared outputs, which are checked, with the dtypes that they will have in JAX."""
        leaves, tree = jax.tree.flatten(declared)
        for number, leaf in enumerate(leaves):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                if self._bridge.out_shapes is not None:
                    raise TypeError(
                        f"`out_shapes` of `{self.function.name}` must have a jax.ShapeDtypeStruct for each output, got "
                        f"{type(leaf).__name__}"
                    )
                raise TypeError(
                    f"`{self.function.name}`: output {number} must be a torch.Tensor, got {type(leaf).__name__}; "
                    "register types of your own as pytrees (jax.tree_util.register_dataclass)"
                )
            torch_dtype(leaf.dtype, f"output {number} of {self.function.name}")
        shapes = (jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves)
        return _Outputs(tree, tuple(shapes))

    def _traced(self, types: Sequence[jax.ShapeDtypeStruct]) -> Types:
        """The outputs of the function for tensors without data."""
        function, bridge = self.function, self._bridge
        trace = functools.partial(
            types_without_data, lambda *x: self._call(bridge.for_shapes, x), types, bridge.device()
        )
        with torch.set_grad_enabled(function.with_gradients):
            try:
                return trace()
            except ValuesNeededError as error:
                raise self._undeclared(str(error)) from error
            except NEEDS_DATA as error:
                reason = str(error)
                try:  # only sizes inside of the function may depend on data
                    found = trace(symbols=True)
                    if all(map(_has_numbers, jax.tree.leaves(found))):
                        return found
                except Exception as other:
                    if not is_about_symbols(other):
                        reason += f"; {type(other).__name__}: {other}"
                raise self._undeclared(reason) from error
            except Exception as error:
                error.add_note(
                    f"`{function.name}` was called without data, to find the shapes of its outputs: "
                    "if it needs data, declare them as `out_shapes` of from_torch or from_module"
                )
                raise

    def _undeclared(self, reason: str) -> ValueError:
        return ValueError(
            f"`{self.function.name}`: the shapes of its outputs cannot be found without data ({reason}): declare them "
            "as `out_shapes` of from_torch or from_module"
        )

    def _takes_all(self, sizes: tuple[int, ...], types: tuple[jax.ShapeDtypeStruct, ...]) -> bool:
        """Whether the function returns outputs with leading axes when it gets slices along leading axes."""
        says = self._bridge.at_once
        if callable(says):
            return bool(self._call(says, types))

        def stacked(types: Sequence[jax.ShapeDtypeStruct]) -> tuple[jax.ShapeDtypeStruct, ...]:
            return tuple(jax.ShapeDtypeStruct((*sizes, *x.shape), x.dtype) for x in types)

        try:
            found = self._declared(self._traced(stacked(types)))
        except Exception:  # then it is called slice by slice
            return False
        outputs = self.outputs(types)
        return found == _Outputs(outputs.tree, stacked(outputs.types))


def _has_numbers(output: Any) -> bool:
    """Whether an output of a function is a type whose sizes are numbers, and no symbols."""
    return isinstance(output, jax.ShapeDtypeStruct) and all(type(size) is int for size in output.shape)


def types_without_data(
    function: Callable[..., Any], arguments: Sequence[Any], device: torch.device, symbols: bool = False
) -> Types:
    """Shapes and dtypes of the outputs of a torch function, from a call with tensors without data.

    With ``symbols`` sizes that depend on data are symbols, also in the outputs.
    """

    def tensor(x: Any) -> Any:
        is_type = isinstance(x, jax.ShapeDtypeStruct)
        return torch.empty(x.shape, dtype=torch_dtype(x.dtype), device=device) if is_type else x

    def type_of(output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        return jax.ShapeDtypeStruct(tuple(output.shape), jax_dtype(output.dtype))

    with without_data(symbols):
        outputs = function(*jax.tree.map(tensor, list(arguments)))
    return jax.tree.map(type_of, outputs)


def is_energy(outputs: Sequence[jax.ShapeDtypeStruct]) -> bool:
    """Whether the only output is a real number."""
    return len(outputs) == 1 and not outputs[0].shape and jax.numpy.issubdtype(outputs[0].dtype, np.floating)


ATOMS, SYSTEMS = "atoms", "systems"


@dataclass(frozen=True)
class Energies:
    """The rule that computes the tangents of energies from the gradients of their sum.

    There is either a single energy, or each row of a gradient belongs to one system: a row of an atom to the atom's
    system, a row of a system to this system.
    """

    roles: tuple[tuple[int, str], ...] = ()  # index of each array, `ATOMS` or `SYSTEMS`; empty for one energy
    batch_idx: int | None = None  # the index of the array with the system of each atom

    def covers(self, shapes: Mapping[int, tuple[int, ...]], outputs: Shapes) -> bool:
        """Whether the rule applies to derivatives with respect to inputs of these shapes.

        It applies if there is a single energy, or if the outputs are energies without channels and each input has rows
        of atoms or of systems.
        """
        if not self.roles:
            return is_energy(outputs)
        if len(outputs) != 1 or len(outputs[0].shape) != 1:
            return False
        (n_systems,) = outputs[0].shape
        roles = dict(self.roles)
        of_atoms = self.batch_idx is not None

        def has_rows(i: int, shape: tuple[int, ...]) -> bool:
            if roles.get(i) == ATOMS:
                return of_atoms and shape[:1] not in ((), (1,))  # a single number may hold for all atoms
            # a cell (3, 3) for all systems has no rows of systems, even if there are three systems
            return roles.get(i) == SYSTEMS and shape[:1] == (n_systems,) and len(shape) != 2

        return n_systems == 1 or all(has_rows(i, shape) for i, shape in shapes.items())

    def tangents(self, gradients: Arrays, tangents: Arrays, inputs: Arrays, outputs: Shapes) -> Sequence[jax.Array]:
        """The tangents of the energies."""
        n_systems = math.prod(outputs[0].shape)
        roles, total = dict(self.roles), jax.numpy.zeros(outputs[0].shape, outputs[0].dtype)
        for i, gradient in gradients.items():
            products = gradient * tangents[i]
            if n_systems == 1:
                total += jax.numpy.sum(products).astype(total.dtype)
                continue
            rows = jax.numpy.sum(products, axis=tuple(range(1, products.ndim)))
            if roles[i] == ATOMS:
                assert self.batch_idx is not None
                rows = jax.ops.segment_sum(rows, inputs[self.batch_idx], n_systems)
            total += rows.astype(total.dtype)
        return [total]


SCALAR, SCALAR_IF_ANY = Energies(), Energies()
