"""`warp_custom_op`: a torch op from a Python body that launches Warp kernels.

One registration serves eager mode, ``torch.compile``, ``torch.export`` and function transforms. An op is differentiated
by a tape that its body records, or by another op given as ``backward`` (docs/custom_ops.md).
"""

from collections.abc import Callable, Sequence
from typing import Any

from nvalchemiops.torch.autograd.declaration import Backward, declare
from nvalchemiops.torch.autograd.op import WarpOp
from nvalchemiops.torch.autograd.specs import OutputSpec
from nvalchemiops.torch.autograd.tape_op import TapeOp


def warp_custom_op(
    name: str,
    outputs: Sequence[OutputSpec],
    grad_arrays: Sequence[str] | None = None,
    mutates_args: Sequence[str] = (),
    *,
    backward: Backward = "tape",
    vmap: Callable[..., Any] | None = None,
    trusted: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn a function that launches Warp kernels into a torch custom op.

    The annotated signature of the function becomes the signature of the op. Parameters are tensors, optional tensors,
    int, float, bool, str and sequences of int, with or without defaults. The op works in eager mode, in
    ``torch.compile`` with ``fullgraph=True``, in ``torch.export``, and in eager mode under ``torch.func``. While the
    body runs, Warp's current stream is torch's current stream.

    Parameters
    ----------
    name : str
        ``"namespace::name"``.
    outputs : sequence of OutputSpec
        The outputs that the body returns, in order: one output as a tensor, several as a tuple, none as None.
    grad_arrays : sequence of str, optional
        Names of the differentiable outputs, then of the differentiable inputs. The default is all outputs and all
        tensor inputs, except inputs with index-like names (``neighbor_list``, ``batch_idx``, ...), mutated inputs and,
        at run time, integer and bool tensors. With an empty sequence the op is not differentiable, and its outputs have
        no graph. With names of outputs only, a request for a gradient raises an error, as with ``backward="none"``.
    mutates_args : sequence of str, optional
        Inputs that the body writes in place. They are never differentiable.
    backward : "tape", "none" or callable, optional
        How the op is differentiated.

        - ``"tape"`` (default): if ``needs_grad`` is True, the body records a ``wp.Tape`` and attaches it with
          `attach_for_backward`. This gives first derivatives only.
        - A callable: another op, or a function composed of ops and torch operations. Its parameters are bound by name:
          the name of any input or output; ``grad_<output>`` for an incoming gradient (if none arrives, zeros, or None
          if the parameter is annotated ``Tensor | None``); ``wanted`` for the names of the inputs whose gradients will
          be read (other gradients may be left out); ``inputs`` and ``gradients`` for dicts by name of all inputs and of
          all incoming gradients (or None). The outputs of an op must be called ``grad_<input>``. A function returns a
          tuple in the order of the differentiable inputs, or a dict by input name. An op with a callable keeps no
          state, and can be differentiated once more often than its backward.
        - ``"none"``: a request for a derivative raises an error. For the last op of a chain of derivatives.
    vmap : callable, optional
        Rule for ``torch.func.vmap`` of an op with explicit backward, ``vmap(info, in_dims, *args) -> (outputs,
        out_dims)`` as in ``torch.autograd.Function.vmap``, with all inputs given. By default slices run one by one.
    trusted : bool, optional
        Do not check in each call that the body's results match ``outputs``. Only for ops without a tape. Use it if
        tests check the op (``torch.library.opcheck``) and ten microseconds matter.

    Returns
    -------
    callable
        A decorator. The decorated function has an attribute ``op``, the `WarpOp`.

    Raises
    ------
    TypeError
        Unannotated or unsupported parameters, names of inputs that are not tensors.
    ValueError
        Unknown or duplicate names, an output with the name of an input, a name that is taken.

    Notes
    -----
    The body gets contiguous tensors (non-contiguous inputs are copied, unless they are mutated) on one device, with
    ``requires_grad`` set exactly where a gradient will be needed. Results are checked against ``outputs``. Changing a
    saved input in place before the backward pass is an error, as everywhere in torch.

    Examples
    --------
    >>> @warp_custom_op("demo::square", outputs=[OutputSpec("y", wp.float64, lambda x: x.shape)])
    ... def square(x: torch.Tensor) -> torch.Tensor:
    ...     y = torch.empty_like(x)
    ...     track = needs_grad(x)
    ...     x_array = warp_from_torch(x, wp.float64)
    ...     y_array = warp_from_torch(y, wp.float64, requires_grad=track)
    ...     with WarpAutogradContextManager(track) as tape:
    ...         wp.launch(square_kernel, dim=x.shape[0], inputs=[x_array], outputs=[y_array])
    ...     if track:
    ...         attach_for_backward(y, tape, x=x_array, y=y_array)
    ...     return y
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., Any]:
        declared = declare(body, name, outputs, grad_arrays, mutates_args, backward)
        op = TapeOp(declared, vmap) if declared.backward == "tape" else WarpOp(declared, vmap, trusted)
        return op.public

    return decorate
