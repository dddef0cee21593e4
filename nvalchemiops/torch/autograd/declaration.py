"""The declaration of an op (parameters, outputs, derivatives), and checks of its calls against it."""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union

import torch

from nvalchemiops.torch.autograd.specs import OutputSpec, fill_sizes
from nvalchemiops.torch.runtime.storage import memory_range

MAX_ARGUMENTS = 64
"""Largest number of arguments of a torch schema. The derivative of an op takes inputs, outputs and their gradients."""

Backward = Callable[..., Any] | Literal["tape", "none"]

# fmt: off
INDEX_LIKE = frozenset([
    "neighbor_list", "neighbor_ptr", "neighbor_shifts", "neighbor_matrix", "neighbor_matrix_shifts", "num_neighbors",
    "batch_idx", "batch_ptr", "mask_value", "fill_value", "idx_i", "idx_j", "unit_shifts", "pbc", "numbers",
    "atomic_numbers", "exclusions", "target_indices", "rebuild_flags", "miller_indices", "mesh_dimensions",
])
# fmt: on
"""Names of inputs without gradients, even if they are floating-point tensors."""

_SCHEMA_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    Sequence[int]: "SymInt[]",
    list[int]: "SymInt[]",
    tuple[int, ...]: "SymInt[]",
    tuple[int, int, int]: "SymInt[]",
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One declared input of an op."""

    name: str
    schema_type: str
    default: Any = inspect.Parameter.empty

    @property
    def is_tensor(self) -> bool:
        """Whether it takes a tensor (or None)."""
        return self.schema_type in ("Tensor", "Tensor?")

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is inspect.Parameter.empty

    @property
    def has_literal(self) -> bool:
        """Whether it has a default that a torch schema can express. The public function fills in other defaults."""
        default = self.default
        if isinstance(default, str):
            return default.isprintable() and not set(default) & set('"\\')
        return not self.required and (not isinstance(default, float) or math.isfinite(default))

    def declaration(self, mutated: bool = False, alias: str = "a", with_default: bool = True) -> str:
        """The text of the parameter in a torch schema."""
        kind = self.schema_type.replace("Tensor", f"Tensor({alias}!)", 1) if mutated else self.schema_type
        if not (with_default and self.has_literal):
            return f"{kind} {self.name}"
        default = list(self.default) if isinstance(self.default, tuple) else self.default
        text = f'"{default}"' if isinstance(default, str) else repr(default)
        return f"{kind} {self.name}={text}"


@dataclasses.dataclass(frozen=True)
class Declaration:
    """Description of an op before it is registered."""

    name: str  # "namespace::name"
    body: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    outputs: tuple[OutputSpec, ...]
    mutated: tuple[int, ...]  # positions of the inputs that the body writes in place
    diff_outputs: tuple[int, ...]  # positions of the differentiable outputs. Without any, results have no graph
    diff_inputs: tuple[int, ...]
    backward: Backward  # "tape" only if the op has a differentiable output

    @functools.cached_property
    def tensors(self) -> tuple[int, ...]:
        """Positions of the inputs that are tensors or None."""
        return tuple(i for i, p in enumerate(self.parameters) if p.is_tensor)

    def schema(self, hidden: Sequence[str], n_outputs: int) -> str:
        """The torch schema without the name. ``hidden`` are names of integers after the parameters, 0 by default."""
        # in a schema, as in Python, a parameter without a default must not follow a parameter with a default
        required = max((i for i, p in enumerate(self.parameters) if not p.has_literal), default=-1)
        declared = [
            p.declaration(i in self.mutated, f"a{i}", with_default=i > required) for i, p in enumerate(self.parameters)
        ]
        returns = "Tensor" if n_outputs == 1 else f"({', '.join(['Tensor'] * n_outputs)})"
        return f"({', '.join([*declared, *(f'int {name}=0' for name in hidden)])}) -> {returns}"

    # -- checks of a call -------------------------------------------------------------------------

    def device_of(self, inputs: Sequence[Any]) -> torch.device:
        """The device of all tensors, the CPU without tensors; raises for several devices or a sparse layout."""
        first = None
        for i in self.tensors:
            tensor = inputs[i]
            if tensor is None:
                continue
            if tensor.layout is not torch.strided:
                raise TypeError(
                    f"{self.name}: `{self.parameters[i].name}` has layout {tensor.layout}; kernels need torch.strided: "
                    "call .to_dense() first"
                )
            device = tensor.device
            if first is None:
                first, at = device, i
            elif device != first:
                raise ValueError(
                    f"{self.name}: `{self.parameters[i].name}` is on {device}, but `{self.parameters[at].name}` is "
                    f"on {first}; move one of them"
                )
        return torch.device("cpu") if first is None else first

    def refuse_overlap(self, inputs: Sequence[Any]) -> None:
        """Raise if an input that the body writes overlaps another input: results would depend on thread order."""
        for i in self.mutated:
            if inputs[i] is None or not inputs[i].numel():
                continue
            low, high = memory_range(inputs[i])
            for k in self.tensors:
                other = inputs[k]
                if k == i or other is None or not other.numel():
                    continue
                other_low, other_high = memory_range(other)
                if low < other_high and other_low < high:
                    raise ValueError(
                        f"{self.name}: `{self.parameters[i].name}` is written in place and overlaps "
                        f"`{self.parameters[k].name}` in memory: pass a copy"
                    )

    def check_results(
        self, result: Any, inputs: Sequence[Any], prepared: Sequence[Any], device: torch.device
    ) -> list[torch.Tensor]:
        """The results of a body, contiguous and without a graph; raises unless they match the declaration.

        ``inputs`` and ``prepared`` are the arguments of the op, and those of the body.
        """
        specs = self.outputs
        if not specs:
            if result is not None:
                raise ValueError(f"{self.name}: the body returned {type(result).__name__}, but no output is declared")
            return []
        if isinstance(result, torch.Tensor):
            result = (result,)
        if not isinstance(result, (tuple, list)) or len(result) != len(specs):
            got = len(result) if isinstance(result, (tuple, list)) else repr(type(result).__name__)
            names = ", ".join(f"'{s.name}'" for s in specs)
            raise ValueError(f"{self.name}: the body returned {got} outputs, but {len(specs)} are declared: {names}")
        owners: dict[int, Any] = {}
        for i in self.tensors:
            for tensor in (inputs[i], prepared[i]):
                if tensor is not None and tensor.numel():
                    owners[tensor.untyped_storage().data_ptr()] = self.parameters[i]
        results = []
        sizes: dict[str, int] = {}
        for spec, output in zip(specs, result, strict=True):
            if not isinstance(output, torch.Tensor):
                raise TypeError(f"{self.name}: output '{spec.name}' is {type(output).__name__}, not a tensor")
            shape, dtype = spec.resolve(inputs)
            if output.shape != shape and len(shape) == output.ndim:
                shape = fill_sizes(shape, sizes, output.size)
            if output.shape != shape or output.dtype is not dtype or output.device != device:
                raise ValueError(
                    f"{self.name}: output '{spec.name}' has shape {tuple(output.shape)}, {output.dtype}, on "
                    f"{output.device}; its OutputSpec says {shape}, {dtype}, on {device}"
                )
            if output.numel():
                address = output.untyped_storage().data_ptr()
                if address in owners:
                    raise ValueError(
                        f"{self.name}: output '{spec.name}' shares memory with '{owners[address].name}': return a copy"
                    )
                owners[address] = spec
            if output.requires_grad or output.__dict__:  # attributes may keep a tape alive
                output = output.detach()
            results.append(output if output.is_contiguous() else output.contiguous())
        return results


def declare(
    body: Callable[..., Any],
    name: str,
    outputs: Sequence[OutputSpec],
    grad_arrays: Sequence[str] | None = None,
    mutates_args: Sequence[str] = (),
    backward: Backward = "tape",
) -> Declaration:
    """Make and check the declaration of an op. Arguments and errors are those of `warp_custom_op`."""
    namespace, separator, short = name.partition("::") if isinstance(name, str) else ("", "", "")
    if not (separator and namespace.isidentifier() and short.isidentifier()):
        raise ValueError(f"`name` must be 'namespace::name' with two identifiers, got {name!r}")
    parameters = read_parameters(body, name)
    _check_names(name, parameters, outputs, mutates_args)
    if len(parameters) + 2 * len(outputs) + 4 > MAX_ARGUMENTS:
        raise ValueError(
            f"{name}: {len(parameters)} parameters and {len(outputs)} outputs are more than a torch op and its "
            f"derivative can have ({MAX_ARGUMENTS} arguments); stack some of them"
        )
    diff_outputs, diff_inputs = split_grad_arrays(grad_arrays, parameters, outputs, mutates_args, name)
    if backward not in ("tape", "none") and not callable(backward):
        raise TypeError(f"{name}: `backward` must be 'tape', 'none' or a callable, got {backward!r}")
    if diff_outputs and not diff_inputs:
        if callable(backward):
            raise ValueError(f"{name}: `backward` has nothing to give: `grad_arrays` names outputs only")
        # an op without gradients: a request for a gradient raises
        backward = "none"
        diff_inputs = split_grad_arrays(None, parameters, outputs, mutates_args, name)[1]
        diff_outputs = diff_outputs if diff_inputs else ()
    if backward == "tape" and not diff_outputs:
        backward = "none"
    mutated = tuple(i for i, p in enumerate(parameters) if p.name in mutates_args)
    return Declaration(name, body, parameters, tuple(outputs), mutated, diff_outputs, diff_inputs, backward)


def _check_names(
    op_name: str, parameters: Sequence[Parameter], outputs: Sequence[OutputSpec], mutates_args: Sequence[str]
) -> None:
    names = [p.name for p in parameters]
    seen: set[str] = set()
    for spec in outputs:
        if not isinstance(spec, OutputSpec):
            raise TypeError(f"{op_name}: `outputs` must hold OutputSpec, got {spec!r}")
        if spec.name in names:
            raise ValueError(f"{op_name}: output '{spec.name}' has the name of an input")
        if spec.name in seen:
            raise ValueError(f"{op_name}: two outputs are called '{spec.name}'")
        seen.add(spec.name)
    if isinstance(mutates_args, str):
        raise TypeError(f"{op_name}: `mutates_args` must be a sequence of names, got a string")
    for name in mutates_args:
        if name not in names:
            raise ValueError(f"{op_name}: `mutates_args` names '{name}', which is not an input")
        if not parameters[names.index(name)].is_tensor:
            raise TypeError(f"{op_name}: `mutates_args` names '{name}', which is not a tensor")


def with_fields(body: Callable[..., Any]) -> Callable[..., Any]:
    """The body of an op, with the fields of its named tuples as parameters in their place: ops take no named tuples.

    Another name, type or place of a field is another schema.
    """
    parameters: list[inspect.Parameter] = []
    tuples: list[tuple[slice, Callable[..., Any]]] = []
    for parameter in inspect.signature(body).parameters.values():
        kind, default = parameter.annotation, parameter.default
        fields = typing.get_type_hints(kind) if hasattr(kind, "_fields") else {}
        if fields:
            tuples.insert(0, (slice(len(parameters), len(parameters) + len(fields)), kind))
        defaults = default if isinstance(default, tuple) else [default] * len(fields)
        parameters += [
            parameter.replace(name=name, annotation=hint, default=value)
            for (name, hint), value in zip(fields.items(), defaults)
        ] or [parameter]

    @functools.wraps(body)
    def call(*given: Any) -> Any:
        arguments = list(given)
        for part, kind in tuples:  # the last one first, so that the places of the others stay
            arguments[part] = [kind(*given[part])]
        return body(*arguments)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # `inspect` looks there
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def schema_type(annotation: Any) -> str | None:
    """The torch schema type for a Python annotation, or None if the annotation is not supported."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        options = typing.get_args(annotation)
        inner = [schema_type(o) for o in options if o is not type(None)]
        return f"{inner[0]}?" if len(inner) == 1 and len(options) == 2 and inner[0] else None
    try:
        return _SCHEMA_TYPES.get(annotation)
    except TypeError:  # unhashable: no supported annotation
        return None


def read_parameters(body: Callable[..., Any], op_name: str) -> tuple[Parameter, ...]:
    """The parameters of an op's body, from its annotated signature; raises for one of an unsupported type or kind."""
    try:
        hints = typing.get_type_hints(body)
    except NameError as error:
        raise TypeError(f"{op_name}: an annotation cannot be resolved: {error}") from error
    parameters = []
    for name, parameter in inspect.signature(body).parameters.items():
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise TypeError(f"{op_name}: parameter `{name}` must be an ordinary one, not {parameter.kind.description}")
        if parameter.annotation is inspect.Parameter.empty:
            raise TypeError(f"{op_name}: parameter `{name}` needs a type annotation")
        kind = schema_type(hints[name])
        if kind is None:
            raise TypeError(
                f"{op_name}: parameter `{name}` has the unsupported type {hints[name]!r}; supported are Tensor, int, "
                "float, bool, str, each also optional, and sequences of int"
            )
        default = parameter.default
        if kind == "Tensor" and default is not inspect.Parameter.empty:
            raise TypeError(f"{op_name}: parameter `{name}` has a default, so annotate it `Tensor | None`")
        if kind.startswith("float") and isinstance(default, int):
            default = float(default)
        parameters.append(Parameter(name, kind, default))
    return tuple(parameters)


def split_grad_arrays(
    grad_arrays: Sequence[str] | None,
    parameters: Sequence[Parameter],
    outputs: Sequence[OutputSpec],
    mutated: Sequence[str],
    op_name: str,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the differentiable outputs and of the differentiable inputs. Either may be empty."""
    of_outputs, of_inputs = {o.name: o for o in outputs}, {p.name: p for p in parameters}
    if grad_arrays is None:
        inputs = [p.name for p in parameters if p.is_tensor and p.name not in INDEX_LIKE and p.name not in mutated]
        floats = [o.name for o in outputs if o.may_be_float]
        grad_arrays = [*floats, *inputs] if floats and inputs else []
    if isinstance(grad_arrays, str):
        raise TypeError(f"{op_name}: `grad_arrays` must be a sequence of names, got the string {grad_arrays!r}")
    seen: set[str] = set()
    first_input = None
    for name in grad_arrays:
        if name in seen:
            raise ValueError(f"{op_name}: `grad_arrays` names '{name}' twice")
        seen.add(name)
        if name in of_outputs:
            if not of_outputs[name].may_be_float:
                raise TypeError(f"{op_name}: `grad_arrays` names '{name}', which holds no floating-point numbers")
            if first_input is not None:
                raise ValueError(
                    f"{op_name}: `grad_arrays` lists outputs first, but '{name}' comes after the input '{first_input}'"
                )
        elif name in of_inputs:
            first_input = first_input or name
            if not of_inputs[name].is_tensor:
                raise TypeError(f"{op_name}: `grad_arrays` names '{name}', which is not a tensor")
            if name in mutated:
                raise ValueError(f"{op_name}: '{name}' is mutated, so it cannot be differentiable")
        else:
            raise ValueError(
                f"{op_name}: `grad_arrays` names '{name}', which is neither an output {list(of_outputs)} "
                f"nor an input {list(of_inputs)}"
            )
    differentiable_outputs = tuple(i for i, o in enumerate(outputs) if o.name in seen)
    differentiable_inputs = tuple(i for i, p in enumerate(parameters) if p.name in seen)
    if differentiable_inputs and not differentiable_outputs:
        raise ValueError(f"{op_name}: `grad_arrays` names inputs {list(seen)}, but no output")
    return differentiable_outputs, differentiable_inputs
