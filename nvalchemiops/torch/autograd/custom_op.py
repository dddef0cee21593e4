"""`warp_custom_op`: a torch op from a Python body that launches Warp kernels.

One registration serves eager mode, ``torch.compile``, ``torch.export`` and function transforms. Two ways to
differentiate (docs/custom_ops.md): a tape that the body records, or another op given as ``backward``.
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

    The function's annotated signature becomes the op's: tensors, optional tensors, int, float, bool, str and
    sequences of int, with defaults. The result has that signature and works eagerly, in ``torch.compile`` with
    ``fullgraph=True``, in ``torch.export`` and, eagerly, under ``torch.func``. Warp's current stream is torch's
    current one while the body runs.

    Parameters
    ----------
    name : str
        ``"namespace::name"``.
    outputs : sequence of OutputSpec
        What the body returns, in order. One output is returned as a tensor, several as a tuple, none as None.
    grad_arrays : sequence of str, optional
        Names of the differentiable outputs, then of the differentiable inputs. By default all outputs and all
        tensor inputs except index-like names (``neighbor_list``, ``batch_idx``, ...), mutated ones and, at run
        time, integer and bool tensors. With an empty sequence the op is not differentiable, and outputs have no
        graph. With outputs only, it is an op without gradients, as by ``backward="none"``.
    mutates_args : sequence of str, optional
        Inputs that the body writes in place. They are never differentiable.
    backward : "tape", "none" or callable, optional
        How to differentiate. ``"tape"`` (default): the body records a ``wp.Tape`` when ``needs_grad`` says so and
        hands it over with `attach_for_backward`; one order. A callable: another op, or a function composed of ops
        and torch operations. Its parameters are bound by name: any input's name, any output's name,
        ``grad_<output>`` for incoming gradients (zeros when none arrives, or None if annotated ``Tensor | None``),
        ``wanted`` for the names of the inputs whose gradients will be read (those of others may be left out), and
        ``inputs`` and ``gradients`` for all inputs and all incoming gradients (or None) by name.
        An op's outputs must be called ``grad_<input>``; a function returns a tuple in the order of the
        differentiable inputs, or a dict by input name. Such ops keep no state and differentiate as often as the
        backward does. ``"none"``: asking for a derivative raises; for the last op of such a chain.
    vmap : callable, optional
        Rule for ``torch.func.vmap`` of an op with explicit backward, ``vmap(info, in_dims, *args) -> (outputs,
        out_dims)`` as in ``torch.autograd.Function.vmap``, all inputs given. By default slices run one by one.
    trusted : bool, optional
        Do not compare what the body of an op without a tape returns with ``outputs`` in each call. For an op whose
        tests do so (``torch.library.opcheck``) and for which ten microseconds matter.

    Returns
    -------
    callable
        A decorator. The decorated function has an attribute ``op``, the `WarpOp`.

    Raises
    ------
    TypeError
        Unannotated or unsupported parameters, names of inputs that are no tensors.
    ValueError
        Unknown or duplicate names, an output called like an input, a name that is taken.

    Notes
    -----
    Tensor inputs reach the body contiguous (a copy is made of others, except of mutated ones), on one device,
    with ``requires_grad`` set exactly where a gradient will be needed. Outputs are checked against ``outputs``.
    Changing a saved input in place before the backward pass is an error, as everywhere in torch.

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
