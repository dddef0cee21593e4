"""Tapes: recording an op's launches, keeping the tape exactly as long as its graph, and replaying it."""

import dataclasses
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import warp as wp

from nvalchemiops.launch import NotDifferentiableError, record
from nvalchemiops.torch.autograd.arrays import gradient_tensor, warp_stream_from_torch
from nvalchemiops.torch.runtime._torch_internals import version_of

_TAPE = "_warp_tape"
_PREFIX = "_wp_"


# -- helpers for bodies, and for hand-written autograd functions ----------------------------------


def WarpAutogradContextManager(enable: bool) -> AbstractContextManager[wp.Tape | None]:
    """A context manager that records this thread's launches if ``enable``. It yields the ``wp.Tape``, or else None."""
    return record() if enable else nullcontext()


def attach_for_backward(output: torch.Tensor, tape: wp.Tape | None = None, **warp_arrays: wp.array) -> None:
    """Attach a tape and the arrays that it recorded to an output, for the backward pass.

    Parameters
    ----------
    output : torch.Tensor
        Gets the attributes ``_warp_tape`` and ``_wp_<name>``.
    tape : wp.Tape, optional
    **warp_arrays : wp.array
        The arrays of outputs and differentiable inputs, by the names of the op's signature and outputs.

    Raises
    ------
    ValueError
        If another tape was attached to ``output`` before.
    """
    attached = getattr(output, _TAPE, None)
    if tape is not None and attached is not None and attached is not tape:
        raise ValueError(
            "`output` already holds another tape, which would be lost: record all launches on one tape, or attach each "
            "tape to a separate output"
        )
    setattr(output, _TAPE, attached if tape is None else tape)
    for name, array in warp_arrays.items():
        setattr(output, _PREFIX + name, array)


def retrieve_for_backward(output: torch.Tensor, *array_names: str) -> tuple[wp.Tape | None, dict[str, wp.array]]:
    """The tape of ``output``, and the arrays with these names that were attached to it."""
    arrays = {name: getattr(output, _PREFIX + name) for name in array_names if hasattr(output, _PREFIX + name)}
    return getattr(output, _TAPE, None), arrays


def detach_all(outputs: Any) -> tuple[list[wp.Tape], dict[str, wp.array]]:
    """Remove the tapes and arrays that `attach_for_backward` has attached to the results of a body, and return them."""
    tapes: list[wp.Tape] = []
    arrays: dict[str, wp.array] = {}
    for output in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
        attributes = output.__dict__ if isinstance(output, torch.Tensor) else {}
        names = [name for name in attributes if name.startswith(_PREFIX)]
        arrays |= {name[len(_PREFIX) :]: attributes.pop(name) for name in names}
        tape = attributes.pop(_TAPE, None)
        if tape is not None and not any(tape is t for t in tapes):
            tapes.append(tape)
    return tapes, arrays


def extract_gradients(
    ctx: Any, warp_arrays: Mapping[str, wp.array], input_names: Sequence[str]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the inputs after a tape's backward pass, in signature order.

    Parameters
    ----------
    ctx : object
        Holds each input under its name (``ctx.positions``), as saved in the forward pass.
    warp_arrays : mapping
        The attached arrays by name.
    input_names : sequence of str

    Returns
    -------
    tuple
        For each name: None if ``ctx.<name>`` is not a tensor or needs no gradient, zeros if its array is missing, and
        otherwise the gradient, in new memory.
    """
    gradients: list[torch.Tensor | None] = []
    for name in input_names:
        tensor = getattr(ctx, name)
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            gradients.append(None)
            continue
        gradients.append(_gradient_like(tensor, warp_arrays.get(name)))
    return tuple(gradients)


def standard_backward(
    ctx: Any,
    grad_outputs: torch.Tensor | Sequence[torch.Tensor | None],
    output_names: str | Sequence[str],
    array_names: Sequence[str],
    input_names: Sequence[str],
    output_dtypes: Any = None,
) -> tuple[torch.Tensor | None, ...]:
    """Backward pass of a hand-written ``autograd.Function`` whose forward called `attach_for_backward`.

    Parameters
    ----------
    ctx : object
        Holds each output and each input under its name.
    grad_outputs : torch.Tensor or sequence of torch.Tensor or None
        Gradients of the outputs; None counts as zero.
    output_names : str or sequence of str
        A string for one output, a sequence for several. The first output holds the tape.
    array_names, input_names : sequence of str
        Attached arrays to look up; inputs whose gradients are requested, in signature order.
    output_dtypes : Warp type or sequence, optional
        Warp dtype of each output; required for a sequence of outputs. The dtype of a single output is read from its
        attached array.

    Raises
    ------
    ValueError
        If counts do not match, if ``output_dtypes`` is missing for several outputs, or if their gradients are not a
        tuple.
    """
    is_one = isinstance(output_names, str)
    if not is_one and output_dtypes is None:
        raise ValueError("`output_dtypes` is required with a sequence of `output_names`, one Warp dtype for each")
    if not is_one and not isinstance(grad_outputs, (tuple, list)):
        raise ValueError(f"`grad_outputs` must be a tuple for a sequence of outputs, got {type(grad_outputs).__name__}")
    names = [output_names] if isinstance(output_names, str) else list(output_names)
    dtypes, grads = [] if output_dtypes is None else _as_list(output_dtypes), _as_list(grad_outputs)
    if len(grads) != len(names):
        raise ValueError(f"`grad_outputs` has {len(grads)} entries for {len(names)} `output_names`")
    if output_dtypes is not None and len(dtypes) != len(names):
        raise ValueError(f"`output_dtypes` has {len(dtypes)} entries for {len(names)} `output_names`")

    arrays: dict[str, wp.array] = {}
    for name in reversed(names):  # the first output takes precedence
        tape, found = retrieve_for_backward(getattr(ctx, name), *names, *array_names, *input_names)
        arrays |= found
    if tape is None:
        raise ValueError(f"output `{names[0]}` holds no tape: was attach_for_backward called with one?")
    for name, dtype in zip(names, dtypes):
        if name in arrays and arrays[name].dtype is not dtype:
            raise ValueError(
                f"output `{name}` was attached with dtype {arrays[name].dtype.__name__}, not {dtype.__name__}"
            )
    replay([tape], arrays, dict(zip(names, grads, strict=True)), "standard_backward")
    return extract_gradients(ctx, arrays, input_names)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _gradient_like(tensor: torch.Tensor, array: wp.array | None) -> torch.Tensor:
    if array is None or array.grad is None:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    # a copy: the array's own buffer is written again by the next backward through a retained graph
    gradient = gradient_tensor(array).clone()
    return gradient if gradient.shape == tensor.shape else gradient.reshape(tensor.shape)


def replay(
    tapes: Sequence[wp.Tape],
    arrays: Mapping[str, wp.array],
    cotangents: Mapping[str, torch.Tensor | None],
    op_name: str,
) -> None:
    """Run recorded launches in reverse, and leave the gradients of all arrays in their gradient buffers.

    A tape can be replayed any number of times: each pass starts from zero, and incoming gradients are copied.
    """
    given = [g for g in cotangents.values() if g is not None]
    bound = warp_stream_from_torch(*given) if any(g.is_cuda for g in given) else nullcontext()
    quiet = torch.no_grad() if torch.is_grad_enabled() else nullcontext()
    with quiet, bound:
        for tape in tapes:
            tape.zero()
        for name, cotangent in cotangents.items():
            if cotangent is None:
                continue
            array = arrays.get(name)
            if array is None or array.grad is None:
                raise NotDifferentiableError(
                    f"{op_name}: a gradient arrives for output '{name}', but its body attached no array with a "
                    f"gradient under that name: pass {name}=warp_from_torch({name}, dtype, requires_grad=True) to "
                    "attach_for_backward, or leave the name out of `grad_arrays`"
                )
            buffer = gradient_tensor(array)
            buffer.copy_(cotangent if cotangent.shape == buffer.shape else cotangent.reshape(buffer.shape))
        for tape in reversed(tapes):
            tape.backward()


# -- state of one execution of a tape op ----------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Recording:
    """The data of one recorded execution for its backward pass."""

    tapes: list[wp.Tape]  # that the body has attached
    arrays: dict[str, wp.array]
    # aliases of the op's tensor inputs. They keep the memory of the inputs from being reused
    inputs: Sequence[torch.Tensor | None]
    outputs: Sequence[torch.Tensor]  # the body's own. The op returns aliases of them
    owns_data: bool  # whether the tape refers to copies that no other code can change

    def __post_init__(self) -> None:
        self.versions = [version_of(t) for t in self.outputs]
        self.lock = threading.RLock()
        self.replaying: int | None = None  # the thread that replays it

    def is_usable(self, inputs: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor | None]) -> bool:
        """Whether this thread may replay the recording, and the memory that the tape reads is unchanged.

        The arguments are those of the backward pass. Outputs are None if checking their version is sufficient.

        The memory counts as changed if a compiled graph recomputed an input (its first copy may have been overwritten),
        if a hook moved a saved tensor, or if an output was changed in place.
        """
        if self.replaying == threading.get_ident():  # a replay of this thread is using the gradient buffers
            return False
        if any(version_of(t) != v for t, v in zip(self.outputs, self.versions)):
            return False
        read = [*zip(self.outputs, outputs), *(() if self.owns_data else zip(self.inputs, inputs))]
        there = [(old, new) for old, new in read if old is not None and new is not None]
        return all(a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() for a, b in there)

    def gradients(
        self, cotangents: Mapping[str, torch.Tensor | None], wanted: Sequence[tuple[str, torch.Tensor]], op_name: str
    ) -> list[torch.Tensor]:
        """Gradients of the ``wanted`` inputs, in new memory."""
        recorded = any(tape.launches for tape in self.tapes)
        if not recorded and any(tensor.numel() for _, tensor in wanted):
            raise NotDifferentiableError(
                f"{op_name}: a gradient was requested, but the body recorded no launch. Record the launches with "
                "WarpAutogradContextManager(needs_grad(...)) and hand the tape over with attach_for_backward, or give "
                "the op an explicit backward: warp_custom_op(..., backward=...)"
            )
        with self.lock:
            self.replaying = threading.get_ident()
            try:
                replay(self.tapes, self.arrays, cotangents, op_name)
                return [_gradient_like(tensor, self.arrays.get(name)) for name, tensor in wanted]
            finally:
                self.replaying = None


recordings: weakref.WeakKeyDictionary[torch.UntypedStorage, Recording] = weakref.WeakKeyDictionary()
"""Recordings by the storage of their tokens.

The Python object of a token is replaced as autograd saves and wraps it, and its content must be the same in each run,
since compilers assume that. Only its storage lives as long as the graph. A copy of a token has no recording.
"""


def live_recordings() -> int:
    """The number of recorded executions that are kept for a later backward pass."""
    return len(recordings)
