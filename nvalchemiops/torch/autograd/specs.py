"""What an op declares: its parameters, read from the body's annotations, and its outputs."""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Union

import torch
import warp as wp

from nvalchemiops.types import inner_shape, is_warp_dtype, scalar_type

TORCH_DTYPES: dict[Any, torch.dtype] = {
    wp.bool: torch.bool,
    wp.int8: torch.int8,
    wp.uint8: torch.uint8,
    wp.int16: torch.int16,
    wp.int32: torch.int32,
    wp.int64: torch.int64,
    wp.float16: torch.float16,
    wp.float32: torch.float32,
    wp.float64: torch.float64,
    # torch computes little with wide unsigned integers: they travel as signed bits
    wp.uint16: torch.int16,
    wp.uint32: torch.int32,
    wp.uint64: torch.int64,
}

PRECISIONS = {torch.float32: wp.float32, torch.float64: wp.float64}
"""Those in which kernels exist, by the dtype of the tensors that they are for."""


def real_of(values: torch.Tensor, *_: Any) -> Any:
    """The Warp scalar of a tensor of floats: a ``dtype`` of an `OutputSpec` that follows the first input."""
    return PRECISIONS[values.dtype]


def precision_of(values: torch.Tensor) -> str:
    """Its name, by which kernels are asked for: "float32" or "float64"."""
    return PRECISIONS[values.dtype].__name__


INDEX_LIKE = frozenset(
    [
        "neighbor_list",
        "neighbor_ptr",
        "neighbor_shifts",
        "neighbor_matrix",
        "neighbor_matrix_shifts",
        "num_neighbors",
        "batch_idx",
        "batch_ptr",
        "mask_value",
        "fill_value",
        "idx_i",
        "idx_j",
        "unit_shifts",
        "pbc",
        "numbers",
        "atomic_numbers",
        "exclusions",
        "target_indices",
        "rebuild_flags",
        "miller_indices",
        "mesh_dimensions",
    ]
)
"""Names that never carry a gradient, whatever their dtype."""

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
class DynamicSize:
    """A size in a shape of an `OutputSpec` that only running the op tells; the same ``name`` is the same number.

    Under ``torch.compile`` it becomes an unbacked size. The op waits for its device to learn it.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """One output of an op: enough to know its shape and dtype without running anything.

    Parameters
    ----------
    name : str
        Name by which the body attaches the output's Warp array and ``grad_arrays`` refers to it.
    dtype : Warp type or callable
        Warp scalar, vector or matrix type (``wp.float64``, ``wp.vec3d``), or a callable of the op's inputs
        that returns one.
    shape : tuple or callable
        The torch shape, trailing vector dimensions included: ``(n, 3)`` for n ``wp.vec3d``. Or a callable of
        the op's inputs that returns one. It must work under symbolic shapes: use ``tensor.shape``. A size that
        depends on the data is a `DynamicSize`.
    torch_dtype : torch.dtype, optional
        Overrides the torch dtype that follows from ``dtype``.

    Notes
    -----
    Callables get all inputs that the op declares, positionally, with defaults filled in.
    """

    name: str
    dtype: Any
    shape: tuple[int, ...] | Callable[..., Any]
    torch_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"OutputSpec: `name` must be an identifier, got {self.name!r}")
        if not is_warp_dtype(self.dtype) and not callable(self.dtype):
            raise TypeError(f"OutputSpec '{self.name}': `dtype` must be a Warp type or a callable, got {self.dtype!r}")
        if not callable(self.shape):
            object.__setattr__(self, "shape", tuple(self.shape))
            inner = inner_shape(self.dtype) if is_warp_dtype(self.dtype) else ()
            if inner and self.shape[-len(inner) :] != inner:
                raise ValueError(
                    f"OutputSpec '{self.name}': `shape` {self.shape} must end in {inner}, the components of its dtype"
                )

    @property
    def may_be_float(self) -> bool:
        """False if the output is known to hold integers or bools, which have no gradient."""
        known = self._known_dtype
        return known is None or known.is_floating_point

    def resolve(self, inputs: Sequence[Any]) -> tuple[tuple[Any, ...], torch.dtype]:
        """Shape and torch dtype of this output for the given inputs (real, fake or symbolic)."""
        shape = tuple(self.shape(*inputs)) if callable(self.shape) else self.shape
        known = self._known_dtype
        if known is not None:
            return shape, known
        dtype = _torch_dtype(self.dtype(*inputs))
        if dtype is None:
            raise TypeError(
                f"OutputSpec '{self.name}': `dtype` returned {self.dtype(*inputs)!r}, which is no Warp type"
            )
        return shape, dtype

    @functools.cached_property
    def _known_dtype(self) -> torch.dtype | None:
        """The torch dtype, if no input has a say in it."""
        if self.torch_dtype is not None:
            return self.torch_dtype
        return TORCH_DTYPES[scalar_type(self.dtype)] if is_warp_dtype(self.dtype) else None


@functools.cache
def _torch_dtype(dtype: Any) -> torch.dtype | None:
    """The torch dtype for a Warp type, or None if it is none."""
    return TORCH_DTYPES[scalar_type(dtype)] if is_warp_dtype(dtype) else None


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
        """Whether it has a default that a torch schema can express; the public function fills in the others."""
        return not self.required and _has_literal(self.default)

    def declaration(self, mutated: bool = False, alias: str = "a", with_default: bool = True) -> str:
        """How the parameter reads in a torch schema."""
        kind = self.schema_type.replace("Tensor", f"Tensor({alias}!)", 1) if mutated else self.schema_type
        default = self.default
        if not (with_default and self.has_literal):
            return f"{kind} {self.name}"
        if isinstance(default, str):
            text = f'"{default}"'
        elif isinstance(default, (list, tuple)):
            text = "[" + ", ".join(map(str, default)) + "]"
        else:
            text = repr(default)
        return f"{kind} {self.name}={text}"


def fill_sizes(shape: tuple[Any, ...], sizes: dict[str, Any], new_size: Callable[[int], Any]) -> tuple[Any, ...]:
    """``shape`` with a number for each `DynamicSize`, from ``sizes`` or else ``new_size(dimension)``, kept by name."""
    filled = list(shape)
    for dimension, size in enumerate(shape):
        if isinstance(size, DynamicSize):
            if size.name not in sizes:
                sizes[size.name] = new_size(dimension)
            filled[dimension] = sizes[size.name]
    return tuple(filled)


def _has_literal(default: Any) -> bool:
    if isinstance(default, float):
        return math.isfinite(default)
    return not isinstance(default, str) or (default.isprintable() and not set(default) & set('"\\'))


def schema_type(annotation: Any) -> str | None:
    """The torch schema type for a Python annotation, or None if torch has none that ops here support."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        options = typing.get_args(annotation)
        inner = [o for o in options if o is not type(None)]
        if len(inner) == 1 and len(options) == 2:
            kind = schema_type(inner[0])
            return None if kind is None or kind.endswith("?") else kind + "?"
        return None
    try:
        return _SCHEMA_TYPES.get(annotation)
    except TypeError:  # unhashable: no annotation that we know
        return None


def read_parameters(body: Callable[..., Any], op_name: str) -> tuple[Parameter, ...]:
    """The parameters of an op's body, from its annotated signature.

    Raises
    ------
    TypeError
        For a parameter without annotation, of an unsupported type, or of an unsupported kind
        (keyword-only, ``*args``, ``**kwargs``); the message names it.
    """
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
        if kind == "float" and isinstance(default, int):
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
    """Positions of the differentiable outputs and of the differentiable inputs, which may be none.

    Raises
    ------
    ValueError
        For unknown or duplicate names, an output listed after an input, a mutated input.
    TypeError
        For names of inputs that are not tensors.
    """
    output_names = [o.name for o in outputs]
    input_names = [p.name for p in parameters]
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
        if name in output_names:
            if not outputs[output_names.index(name)].may_be_float:
                raise TypeError(f"{op_name}: `grad_arrays` names '{name}', which holds no floating-point numbers")
            if first_input is not None:
                raise ValueError(
                    f"{op_name}: `grad_arrays` lists outputs first, but '{name}' comes after the input '{first_input}'"
                )
        elif name in input_names:
            first_input = first_input or name
            if not parameters[input_names.index(name)].is_tensor:
                raise TypeError(f"{op_name}: `grad_arrays` names '{name}', which is no tensor")
            if name in mutated:
                raise ValueError(f"{op_name}: '{name}' is mutated, so it cannot be differentiable")
        else:
            raise ValueError(
                f"{op_name}: `grad_arrays` names '{name}', which is neither an output {output_names} "
                f"nor an input {input_names}"
            )
    differentiable_outputs = tuple(i for i, name in enumerate(output_names) if name in seen)
    differentiable_inputs = tuple(i for i, name in enumerate(input_names) if name in seen)
    if differentiable_inputs and not differentiable_outputs:
        raise ValueError(f"{op_name}: `grad_arrays` names inputs {list(seen)}, but no output")
    return differentiable_outputs, differentiable_inputs
