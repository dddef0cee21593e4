"""JAX functions made from the functions of `nvalchemiops.torch`."""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import torch

from nvalchemiops.arguments import as_bools
from nvalchemiops.jax.bridge import Bridge, Energies, Operand, types_without_data
from nvalchemiops.jax.dtypes import jax_dtype, torch_dtype
from nvalchemiops.jax.utils import is_traced
from nvalchemiops.torch.runtime.context import ValuesNeededError, may_read

Shape = jax.ShapeDtypeStruct

Made = TypeVar("Made")

_ARRAYS, _NUMBERS = "Tensor", "float"
"""Annotations of parameters that take arrays, and of numbers that may be arrays without axes. All others are static."""


def operator(
    function: Callable[..., Any],
    out_shapes: Callable[..., Any] | None = None,
    *,
    name: str = "",
    contract: Callable[..., Energies | None] | None = None,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    fold: Callable[[Callable[..., Any], dict[str, Any]], Any] | None = None,
    folds: Callable[..., bool] | None = None,
    extra: Mapping[str, str] | None = None,
    without: Sequence[str] = ("device", "domain"),
    constants: Sequence[str] = (),
) -> Callable[..., Any]:
    """Make a JAX function from a torch function, with the same parameters, ``without`` some that are left out.

    Annotations of the function distinguish arrays (``torch.Tensor``) and numbers (``float``) from static arguments.
    ``out_shapes`` and ``contract``, as for `Bridge`, are called with the arguments by keyword, without arguments that
    have their default; without ``out_shapes`` the function is traced with tensors without data. ``prepare(arguments)``
    returns changed arguments before the call. ``fold(function, arguments)`` returns the results for all slices of
    ``vmap`` along leading axes, computed as the systems of a batch, where ``folds``, which takes the arguments of one
    slice, says that results are the same. ``extra`` names further parameters that have no effect, each with the
    parameter that it follows; ``constants`` have no derivatives, like parameters that are numbers in torch.
    """
    name, kinds = name or function.__name__, _kinds(function)
    signature, ignored = _signature(function, extra or {}, without), frozenset(extra or {})
    parameters, numbers = signature.parameters, [key for key, kind in kinds.items() if kind == _NUMBERS]

    def call(**arguments: Any) -> Any:
        for key in numbers:
            if isinstance(value := arguments.get(key), torch.Tensor):
                arguments[key] = value.item()
        if fold is not None and arguments["positions"].ndim > 2:
            return fold(function, arguments)
        return function(**without_padding(arguments))

    bridge = Bridge(
        call,
        functools.partial(checked_shapes, call, out_shapes),
        name=name,
        contract=contract,
        only_reads=True,
        at_once=folds or False,
        constants=frozenset(constants).union(numbers),
    )

    def of_arrays(*args: Any, **kwargs: Any) -> Any:
        arguments: dict[str, Any] = {}
        for key, value in bound_arguments(name, signature, args, kwargs).arguments.items():
            if parameters[key].kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= {added: as_array(added, number) for added, number in value.items()}
            elif key not in ignored and value is not parameters[key].default:
                if kinds.get(key) == _ARRAYS:
                    value = as_array(key, value)
                elif kinds.get(key) != _NUMBERS:
                    value = as_static(f"{name}: `{key}`", value)
                elif not is_traced(value):
                    value = as_number(f"{name}: `{key}`", value)
                arguments[key] = value
        positions: Any = arguments.get("positions")
        if fold is not None and not hasattr(positions, "ndim"):
            raise TypeError(f"`positions` must be an array, got {type(positions).__name__}")
        if fold is not None and positions.ndim != 2:  # leading axes would be taken for those of vmap
            shape = tuple(positions.shape)
            raise ValueError(f"`positions` must have shape (n_atoms, 3), got {shape}: use jax.vmap, or a batch")
        return bridge(**(arguments if prepare is None else prepare(arguments)))

    return named(of_arrays, name, _for_jax(function, signature, ignored), signature)


def bound_arguments(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> inspect.BoundArguments:
    """``signature.bind``, whose errors do not say which function was called."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None


def named(call: Callable[..., Any], name: str, doc: str, signature: inspect.Signature) -> Any:
    """``call`` with this name, documentation and signature."""
    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    call.__signature__ = signature  # type: ignore[attr-defined]  # `inspect` looks there
    return call


def maker(
    make: Callable[..., Any],
    kind: type[Made],
    into: Callable[[Any], Made],
    argument: Callable[[Any], Any] = lambda value: value,
) -> Callable[..., Made]:
    """A function of torch that makes an object, as one that makes an object of this ``kind``, by ``into`` of it."""

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Made:
        return into(make(*map(argument, args), **{name: argument(value) for name, value in kwargs.items()}))

    call.__signature__ = inspect.signature(make).replace(return_annotation=kind)  # type: ignore[attr-defined]  # `inspect` looks there
    return call


def without_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a torch function, without the padding at the end of a list of pairs.

    A list with a declared capacity ends with padding, which the torch functions do not take.
    """
    pairs, pointers = arguments.get("neighbor_list"), arguments.get("neighbor_ptr")
    if pairs is None or pairs.ndim != 2 or not may_read(pairs, wait=True):
        return arguments
    n_atoms = arguments["positions"].shape[0]
    if pointers is None:
        count = _pairs_before_padding(pairs[0], n_atoms)
    else:
        count = int(pointers[-1]) if pointers.numel() else 0
    if not 0 <= count < pairs.shape[1]:
        return arguments  # no padding, or invalid
    shifts = {name: arguments[name] for name in _SHIFTS if arguments.get(name) is not None}
    if 0 <= (padding := int(pairs[0, count])) < n_atoms:  # or pairs that the pointers leave out
        rest = [pairs[:, count:] != padding, *(x[count:] for x in shifts.values())]
        if any(bool(x.any()) for x in rest):
            return arguments
    return {**arguments, "neighbor_list": pairs[:, :count], **{name: x[:count] for name, x in shifts.items()}}


def _pairs_before_padding(rows: torch.Tensor, n_atoms: int) -> int:
    """The number of pairs before the padding; all of them if the last entry is a pair."""
    if not rows.numel() or 0 <= int(rows[-1]) < n_atoms:
        return rows.numel()
    is_atom = (rows >= 0) & (rows < n_atoms)
    count = int(is_atom.sum())
    return count if bool(is_atom[:count].all()) else rows.numel()


_SHIFTS = ("neighbor_shifts", "unit_shifts")


def checked_shapes(function: Callable[..., Any], rule: Callable[..., Any] | None, /, **arguments: Any) -> Any:
    """Shapes of the results of a torch function, from a call without values, which also checks the arguments.

    If the function needs values, ``rule`` returns the shapes.
    """
    try:
        with torch.no_grad(), in_terms_of_jax():
            return types_without_data(lambda given: function(**given), [arguments], torch.device("cpu"))
    except Exception as error:
        if isinstance(error, (TypeError, ValueError)) and not isinstance(error, ValuesNeededError):
            raise
        if rule is None:  # the function reads values, or sizes depend on them
            raise
    return rule(**arguments)


def as_array(name: str, value: Any) -> Any:
    """Convert lists and NumPy arrays to arrays, with JAX's precision; numbers and other objects stay unchanged.

    Integers 0 and 1 of ``pbc`` become bools, unless they are in an array of JAX already.
    """
    value = as_bools(value) if name == "pbc" else value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        value = jnp.asarray(value) if is_traced(value) else np.asarray(value)
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"`{name}` is a torch tensor: pass a JAX or NumPy array, or call the function of nvalchemiops.torch"
        )
    return jnp.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else value


def as_static(name: str, value: Any) -> Any:
    """``value`` as Python objects: numbers for arrays without axes, tuples for others. Raises a TypeError if traced."""
    if (type(value) in (list, tuple) or isinstance(value, jax.core.Tracer)) and is_traced(value):
        raise TypeError(
            f"{name} must be known when the function is traced, since shapes of results may depend on it: "
            "close over it, or name it in `static_argnames`"
        )
    return _plain(value)


def as_number(name: str, value: Any) -> Any:
    """``value`` as `as_static` returns it. An array with one entry is its number, as it is in torch."""
    is_single = isinstance(value, (jax.Array, np.ndarray)) and value.size == 1 and not is_traced(value)
    return np.asarray(value).item() if is_single else as_static(name, value)  # JAX's `reshape` would trace it


def _plain(value: Any) -> Any:
    """``value`` with tuples in place of lists and arrays, and numbers in place of arrays without axes."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        value = np.asarray(value).tolist()
    return tuple(map(_plain, value)) if type(value) in (list, tuple) else value


def _kinds(function: Callable[..., Any]) -> dict[str, str]:
    texts = {name: str(parameter.annotation) for name, parameter in inspect.signature(function).parameters.items()}
    texts = {name: text.replace("Pbc", _ARRAYS) for name, text in texts.items()}  # an alias, which hides the tensor
    return {name: next((kind for kind in (_ARRAYS, _NUMBERS) if kind in text), "") for name, text in texts.items()}


def _signature(function: Callable[..., Any], extra: Mapping[str, str], without: Sequence[str]) -> inspect.Signature:
    signature = inspect.signature(function)
    found = []
    for name, parameter in signature.parameters.items():
        if name in without or name in extra:
            continue
        found.append(parameter.replace(annotation=_annotation(parameter.annotation)))
        for added, place in extra.items():
            if place == name:
                found.append(inspect.Parameter(added, parameter.kind, default=None, annotation=int | None))
    return signature.replace(parameters=found, return_annotation=inspect.Signature.empty)


def _annotation(annotation: Any) -> Any:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.replace(" | OwnedPairs", "")  # there are no ranks in JAX
    return text.replace("torch.Tensor", "jax.Array") if "torch.Tensor" in text else annotation


@contextlib.contextmanager
def in_terms_of_jax() -> Iterator[None]:
    """Rewrite messages of torch functions about arguments for JAX arrays."""
    try:
        yield
    except (TypeError, ValueError) as error:
        text = re.sub(r"\btorch\.(?=(float|int|uint|bfloat|complex|bool)\d*\b)", "", str(error))
        text = text.replace("torch.Tensor", "jax.Array").replace(".to(", ".astype(")
        if type(error) not in (TypeError, ValueError) or text == str(error):
            raise
        raise type(error)(text) from None


def _for_jax(function: Callable[..., Any], signature: inspect.Signature, ignored: Iterable[str] = ()) -> str:
    """Rewrite the docstring of a torch function for JAX, where its parameters are those of ``signature``."""
    text = inspect.getdoc(function) or ""
    if absent := inspect.signature(function).parameters.keys() - signature.parameters:
        some = "|".join(sorted(absent))
        text = re.sub(rf"^(?:{some}) :.*\n(?: .*\n)*", "", text, flags=re.MULTILINE)
        text = re.sub(rf"^((?:\w+, )+)(?:{some})(?= :|$)", lambda m: m[1][:-2], text, flags=re.MULTILINE)
    if ignored:
        text += f"\n\nWithout effect: {', '.join(f'``{name}``' for name in sorted(ignored))}."
    # inside of jit the torch functions run with values, so requirements of torch.compile do not apply
    text = re.sub(r"\s*Inside ``torch\.compile``[^.]*\.", "", text)
    text = re.sub(r"``torch\.compile``", "``jax.jit``", text)
    return re.sub(r"\btensor(s?)\b", r"array\1", text).replace("nvalchemiops.torch.", "nvalchemiops.jax.")


# -- energies of systems --------------------------------------------------------------------------


def system_energies(roles: Mapping[str, str], reduction: str = "atom") -> Callable[..., Energies | None]:
    """The contraction of an operator, for calls whose results are energies of systems.

    ``roles`` says for each array, by name, whether its rows belong to atoms or to systems. ``reduction`` is the default
    of ``energy_reduction``.
    """

    def contract(energy_reduction: str = reduction, **arguments: Any) -> Energies | None:
        if energy_reduction != "system":
            return None
        numbers = {name: int(value) for name, value in arguments.items() if isinstance(value, Operand)}
        return Energies(tuple((numbers[n], roles[n]) for n in roles if n in numbers), numbers.get("batch_idx"))

    return contract


def number_of_systems(
    name: str, cell: Any = None, batch_idx: Any = None, num_systems: int | None = None, **others: Any
) -> int:
    """The number of systems, from arguments that are known when a function is traced; raises if these do not tell.

    Cells (1, 3, 3) are those of one system. If the values of ``batch_idx`` tell of more, the call raises an error.
    """
    if num_systems is not None:
        return num_systems
    if cell is not None and len(cell.shape) == 3:
        return int(cell.shape[0])
    if batch_idx is None:
        return 1
    raise ValueError(f"{name}: `num_systems` is needed with `batch_idx`, unless each system has a cell")


# -- functions that need values -------------------------------------------------------------------


def eager(
    function: Callable[..., Any], *, into: Callable[..., Any] | None = None, without: Sequence[str] = ("device",)
) -> Callable[..., Any]:
    """Make a function of JAX arrays, for calls outside of ``jit``, from a torch function that needs values.

    A result that is a dataclass is converted to the class ``into``.
    """
    signature, kinds = _signature(function, {}, without), _kinds(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = bound_arguments(function.__name__, signature, args, kwargs)
        for name, value in bound.arguments.items():
            if kinds.get(name) == _ARRAYS:
                bound.arguments[name] = as_array(name, value)
        if is_traced(bound.arguments):
            raise TypeError(f"{function.__name__} needs values: call it outside of jit, and pass its results")
        given = dict(zip(signature.parameters, bound.args)) | bound.kwargs  # by name: some of torch may be left out
        with in_terms_of_jax():
            result = function(**{name: to_torch(value) for name, value in given.items()})
        if dataclasses.is_dataclass(result) or hasattr(result, "_asdict"):
            fields = result._asdict() if hasattr(result, "_asdict") else vars(result)
            result = {name: value for name, value in fields.items() if not name.startswith("_")}
            return (into or type(result))(**from_torch_values(result))
        return from_torch_values(result)

    return named(call, function.__name__, _for_jax(function, signature), signature)


def to_torch(value: Any) -> Any:
    """A tensor with the values of an array, which may be sharded over devices. Other values are returned unchanged."""
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return value
    with jax.ensure_compile_time_eval():  # also in a function that JAX is tracing
        array = jnp.asarray(value)
    torch_dtype(array.dtype)  # keys of `jax.random` and the like raise here; DLPack has no words for them
    if len(array.sharding.device_set) > 1:
        array = jax.device_put(array, array.addressable_shards[0].device)
    tensor = torch.from_dlpack(array).clone()
    if tensor.is_cuda:  # JAX may use the memory of an array again, without regard to torch's streams
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def from_torch_values(results: Any) -> Any:
    """``results`` with tensors replaced by JAX arrays of the same values."""

    def convert(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return jnp.asarray(x.detach().numpy(force=True), dtype=jax_dtype(x.dtype))

    return jax.tree.map(convert, results)
