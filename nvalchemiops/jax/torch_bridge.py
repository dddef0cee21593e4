"""Torch modules as JAX functions: `TorchModuleWrapper`, and `from_module` for derivatives by parameters."""

import copy
import functools
import inspect
import itertools
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax
import numpy as np
import torch

from nvalchemiops.jax.bridge import SCALAR_IF_ANY, Bridge
from nvalchemiops.jax.operators import from_torch_values
from nvalchemiops.locks import fork_safe
from nvalchemiops.torch.runtime.modules import with_parameters

VmapMethod = Literal["broadcast_all", "sequential"]

COMPILED_DEVICES = frozenset({"cuda"})
"""Devices on which modules are compiled. On a CPU, compiling an atomistic network took half a minute and saved a tenth
of its time."""


@dataclass(frozen=True)
class TorchDtypeSpec:
    """An array argument, cast to a dtype before it is passed to the module.

    Parameters
    ----------
    shape : tuple of int
        -1 means any size.
    dtype : torch.dtype
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))


@dataclass(frozen=True)
class ScalarSpec:
    """An argument that is a Python number, passed to the module unchanged.

    Parameters
    ----------
    python_type : type
        ``int``, ``float`` or ``bool``.
    """

    python_type: type


InputSpec = TorchDtypeSpec | ScalarSpec | None


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class TorchModuleWrapper:
    """A torch module as a function of JAX arrays.

    It takes JAX arrays, pytrees of them and Python numbers, by position or name, and returns the module's outputs with
    JAX arrays in place of tensors. It works under ``jit``, ``vmap`` and ``scan``, and with ``enable_vjp`` under
    derivatives of every order in both modes. Wrappers with the same module and options are equal, so a jitted function
    that takes a wrapper as an argument is not traced again for an equal one.

    Parameters
    ----------
    module : torch.nn.Module
        It must depend on nothing but its arguments and its parameters: switch dropout and running averages off by
        ``module.eval()``. Shapes of outputs are found with a call without data, so they must not depend on data.
    input_spec : sequence of TorchDtypeSpec, ScalarSpec or None, optional
        One entry for each leaf of the arguments: a dtype to cast to, a Python number, or None for an unchanged array.
    vmap_method : {"broadcast_all", "sequential"}
        How ``vmap`` calls the module. "broadcast_all": once, with all slices along leading axes, for modules that treat
        leading axes as a batch. "sequential": slice by slice. The first call with each number of slices tests whether
        the module treats leading axes as a batch. If its outputs have no leading axes, it is called slice by slice. If
        the results of the first or last slice differ from a separate call, it is also called slice by slice, with a
        warning. The rows of Jacobians and Hessians share one set of inputs, with which the module is called once. Torch
        then differentiates for all rows at once, or with "sequential" row by row.
    requires_grad : bool
        Whether torch records operations in the module: for modules that compute derivatives themselves.
    enable_vjp : bool
        Whether JAX may differentiate through the module. Its parameters are constants, and their ``grad`` is not
        changed.
    _compile : bool
        Whether to compile the module by `torch.compile` on a GPU, for values and first derivatives. If that fails, the
        module runs uncompiled, with a warning.

    Raises
    ------
    TypeError
        An argument that is neither an array nor a Python number, or does not have the type in ``input_spec``; an output
        that is not a tensor.
    ValueError
        A number of arguments, or a shape, that differs from ``input_spec``; a derivative without ``enable_vjp``.

    Warns
    -----
    UserWarning
        A derivative is zero because in torch's autograd graph the outputs do not depend on the inputs; or the module
        does not treat leading axes as a batch, although its outputs have them.

    Examples
    --------
    >>> model = TorchModuleWrapper(torch.nn.Linear(3, 1), enable_vjp=True)
    >>> jax.jit(jax.grad(lambda x: model(x).sum()))(jax.numpy.ones(3)).shape
    (3,)
    """

    module: torch.nn.Module
    input_spec: Sequence[InputSpec] | None = None
    vmap_method: VmapMethod = "broadcast_all"
    requires_grad: bool = False
    enable_vjp: bool = False
    _compile: bool = True

    def __post_init__(self) -> None:
        if self.vmap_method not in ("broadcast_all", "sequential"):
            raise ValueError(f'`vmap_method` must be "broadcast_all" or "sequential", got {self.vmap_method!r}')
        for number, spec in enumerate(self.input_spec or ()):
            if not isinstance(spec, InputSpec):
                raise TypeError(
                    f"`input_spec[{number}]` must be TorchDtypeSpec, ScalarSpec or None, got {type(spec).__name__}"
                )

    def _key(self) -> tuple[Hashable, ...]:
        spec = None if self.input_spec is None else tuple(self.input_spec)
        return (id(self.module), spec, *(getattr(self, field.name) for field in fields(self)[2:]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TorchModuleWrapper) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> Any:
        return TorchModuleWrapper, tuple(getattr(self, field.name) for field in fields(self))

    def get_for_device(self, device: torch.device | str) -> torch.nn.Module:
        """The module on ``device``: the module itself, or a copy that is made once and lives as long as the module.

        A copy has the parameters that the module had when the copy was made.
        """
        device = torch.device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        return module_on(self.module, device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the module."""
        paths, _ = jax.tree_util.tree_flatten_with_path((args, kwargs))
        _check_arguments(self.module, paths, self.input_spec)
        return self._function.bridge(*args, **kwargs)

    @functools.cached_property
    def _function(self) -> "_Function":
        """The function of this wrapper, shared by all equal wrappers."""
        key = self._key()
        found = _functions.get(key)
        if found is None:
            found = _functions[key] = _Function(self)
        return found


class _Function:
    """The JAX function of equal wrappers. It keeps the module alive, so that no other object gets its ``id``."""

    def __init__(self, wrapper: TorchModuleWrapper):
        self._module, self._spec = wrapper.module, tuple(wrapper.input_spec or ())
        self._compiled: dict[torch.device, _Compiled] = {}
        self.bridge = Bridge(
            self._calling(lambda device: module_on(self._module, device)),
            None,
            name=type(wrapper.module).__name__,
            contract=SCALAR_IF_ANY,
            with_gradients=wrapper.requires_grad,
            differentiable=wrapper.enable_vjp,
            at_once=wrapper.vmap_method == "broadcast_all",
            first_order=self._calling(self._compiled_on) if wrapper._compile else None,
            for_shapes=self._calling(lambda _: _scratch(self._module)),
            device=lambda: device_of(self._module) or torch.device("cpu"),
        )

    def _calling(self, module_for: Callable[[torch.device | None], Callable[..., Any]]) -> Callable[..., Any]:
        """A function that calls the module returned for the device of its arguments."""

        def run(*args: Any, **kwargs: Any) -> Any:
            args, kwargs, device = self._prepared(args, kwargs)
            return module_for(device)(*args, **kwargs)

        return run

    def _compiled_on(self, device: torch.device | None) -> Callable[..., Any]:
        module = module_on(self._module, device)
        if device is None or device.type not in COMPILED_DEVICES:
            return module
        compiled = self._compiled.get(device)
        if compiled is None or compiled.module is not module:
            compiled = self._compiled[device] = _Compiled(module)
        return compiled

    def _prepared(self, args: Any, kwargs: Any) -> tuple[Any, Any, torch.device | None]:
        """The arguments, cast as specified, and their device."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), None)
        if any(isinstance(spec, TorchDtypeSpec) for spec in self._spec):
            cast = [x.to(spec.dtype) if isinstance(spec, TorchDtypeSpec) else x for x, spec in zip(leaves, self._spec)]
            args, kwargs = jax.tree.unflatten(tree, cast)
        return args, kwargs, device


_functions: weakref.WeakValueDictionary[tuple[Hashable, ...], _Function] = weakref.WeakValueDictionary()


class _Compiled:
    """A module compiled by torch, or the module itself if compiling fails."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self._compiled: Callable[..., Any] | None = torch.compile(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compiled is not None:
            try:
                return self._compiled(*args, **kwargs)
            except Exception as error:
                outputs = self.module(*args, **kwargs)  # raises errors of the module itself
                self._compiled = None
                name = type(self.module).__name__
                warnings.warn(f"`{name}` runs without torch.compile, which failed: {error}", UserWarning, stacklevel=2)
                return outputs
        return self.module(*args, **kwargs)


def from_module(
    module: torch.nn.Module, out_shapes: Any = None, *, requires_grad: bool = False
) -> tuple[Callable[..., Any], dict[str, jax.Array]]:
    """A torch module as a JAX function of its parameters and arguments, to train it or differentiate by its parameters.

    Parameters
    ----------
    module : torch.nn.Module
        It must depend on nothing but its arguments, parameters and buffers. Buffers are constants. A
        `torch.utils.checkpoint` in it needs ``use_reentrant=False``: torch has no derivatives by parameters otherwise.
        Calls on several threads wait for each other, so it must not wait for calls of JAX on other threads.
    out_shapes, requires_grad
        As for `nvalchemiops.jax.bridge.from_torch`.

    Returns
    -------
    apply : callable
        ``apply(parameters, ...)`` returns the outputs of the module, with derivatives of every order by parameters and
        arguments. Parameters that are left out have the values that they have in the module.
    parameters : dict from str to array
        Copies of the parameters, with the names that they have in the state dict.

    Raises
    ------
    ValueError
        ``apply`` gets a parameter that the module does not have, or of another shape.

    Examples
    --------
    >>> apply, parameters = from_module(torch.nn.Linear(3, 1))
    >>> slopes = jax.jit(jax.grad(lambda parameters, x: apply(parameters, x).sum()))(parameters, jax.numpy.ones(3))
    >>> slopes["weight"]
    Array([[1., 1., 1.]], dtype=float32)
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    name = type(module).__name__

    def own(*values: Any) -> torch.nn.Module:
        leaves = jax.tree.leaves(values)
        return module_on(module, next((x.device for x in leaves if isinstance(x, torch.Tensor)), None))

    def call(parameters: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return own(parameters, args, kwargs)(*args, **kwargs)

    @contextmanager
    def around(parameters: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Iterator[None]:
        with _one_call, with_parameters(own(parameters, args, kwargs), parameters):
            yield

    def for_shapes(parameters: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        scratch = _scratch(module)
        with with_parameters(scratch, parameters):
            return scratch(*args, **kwargs)

    bridge = Bridge(
        call,
        out_shapes,
        name=name,
        contract=SCALAR_IF_ANY,
        with_gradients=requires_grad,
        around=around,
        for_shapes=for_shapes,
        device=lambda: device_of(module) or torch.device("cpu"),
    )

    def apply(parameters: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The outputs of the module."""
        for key, value in parameters.items():
            if key not in shapes:
                raise ValueError(f"`{name}` has no parameter '{key}'")
            if jax.numpy.shape(value) != shapes[key]:
                raise ValueError(f"`{key}` must have shape {shapes[key]}, got {jax.numpy.shape(value)}")
        return bridge(parameters, *args, **kwargs)

    # clones: JAX may share the memory of a tensor, which an optimiser of torch would change
    copies = {key: parameter.detach().clone() for key, parameter in module.named_parameters()}
    return apply, from_torch_values(copies)


# -- modules and devices --------------------------------------------------------------------------

_copies: dict[int, dict[torch.device, torch.nn.Module]] = {}
"""Copies of modules on other devices, by ``id`` of the module. They are dropped when the module is freed."""

_copies_lock = fork_safe(threading.RLock())

_one_call = fork_safe(threading.RLock())
"""Held while modules have other parameters: JAX calls on several threads, and two modules may share a part."""


def device_of(module: torch.nn.Module) -> torch.device | None:
    """The device of the first parameter or buffer; None if there are none."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return None if first is None else first.device


def module_on(module: torch.nn.Module, device: torch.device | None) -> torch.nn.Module:
    """``module``, or a copy on ``device``."""
    own = device_of(module)
    if own is None or device is None or own == device:
        return module
    with _copies_lock:
        if id(module) not in _copies:
            weakref.finalize(module, _copies.pop, id(module), None)
        copies = _copies.setdefault(id(module), {})
        if device not in copies:
            copies[device] = copy.deepcopy(module).to(device)
        return copies[device]


def _scratch(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with the same parameters and buffers, for a call without data, which may store tensors in the module."""
    shared = {id(x): x for x in itertools.chain(module.parameters(), module.buffers())}
    try:
        return copy.deepcopy(module, shared)
    except Exception:  # an attribute cannot be copied
        return module


# -- arguments ------------------------------------------------------------------------------------


def _check_arguments(module: torch.nn.Module, paths: Sequence[Any], spec: Sequence[InputSpec] | None) -> None:
    """Raise unless all arguments have types that the module and ``spec`` take."""
    if spec is not None and len(spec) != len(paths):
        named = [_argument_name(module, path) for path, _ in paths]
        raise ValueError(
            f"`{type(module).__name__}`: input_spec has {len(spec)} entries, got {len(paths)} arguments: {named}"
        )
    for number, (path, leaf) in enumerate(paths):
        is_number = type(leaf) in (bool, int, float)
        if not (is_number or isinstance(leaf, (jax.Array, np.ndarray, np.generic))):
            raise TypeError(
                f"`{_argument_name(module, path)}` must be array-like or a Python number, got {type(leaf).__name__}"
            )
        if spec is not None:
            _check_argument(functools.partial(_argument_name, module, path), leaf, spec[number])


def _check_argument(name: Callable[[], str], leaf: Any, spec: InputSpec) -> None:
    if isinstance(spec, ScalarSpec):
        if type(leaf) is not spec.python_type:
            raise TypeError(
                f"`{name()}`: expected {spec.python_type.__name__} by its ScalarSpec, got {type(leaf).__name__}; "
                "inside of jit numbers are arrays unless they are static arguments"
            )
    elif type(leaf) in (bool, int, float):
        raise TypeError(f"`{name()}`: expected an array by `input_spec`, got a number of type {type(leaf).__name__}")
    elif spec is not None:
        fits = len(spec.shape) == leaf.ndim and all(n in (-1, size) for n, size in zip(spec.shape, leaf.shape))
        if not fits:
            raise ValueError(f"`{name()}` must have shape {tuple(spec.shape)} by its TorchDtypeSpec, got {leaf.shape}")


def _argument_name(module: torch.nn.Module, path: tuple[Any, ...]) -> str:
    """The name of an argument in the caller's code, such as ``graph['cell']``, by its path in ``(args, kwargs)``."""
    kind, first, *rest = path
    if kind.idx == 1:
        name = first.key
    else:
        names = list(inspect.signature(module.forward).parameters)
        name = names[first.idx] if first.idx < len(names) else f"args[{first.idx}]"
    return name + jax.tree_util.keystr(tuple(rest))
