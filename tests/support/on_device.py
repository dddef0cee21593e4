"""Tensors that pretend to be on a GPU: the host's GPU paths run on any machine, and reading a value is an error.

A `DeviceTensor` has its values in the memory of the host, but its device is ``cuda:0``. Inside of `pretended_gpu` the
library takes it for a plain tensor there, so operators take the ways that they take for tensors on a GPU in eager
mode. Kernels are not launched: their results are zeros, which makes no difference to a host that reads nothing. What
waits for a GPU raises `HostReadError`: values that are read, sizes that depend on values, copies in either direction
(torch waits for those from pageable memory, too). All operations and launches are logged, with the shapes of their
results. A tensor that was made on a stream (`on_stream`) must not be used on another one: nobody waits for it there.
Inside of `capturing`, a kernel that was not launched before raises `LoadError`.
"""

import contextlib
import contextvars
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import warp as wp
from torch.utils._pytree import tree_flatten, tree_map_only

from nvalchemiops import launch as core
from nvalchemiops.interactions.pair import sum as pair_kernels
from nvalchemiops.torch import launch as tensors
from nvalchemiops.torch.autograd import arrays
from nvalchemiops.torch.autograd.op import WarpOp
from nvalchemiops.torch.interactions.pair import op as pair_op
from nvalchemiops.torch.runtime import _torch_internals as internals
from nvalchemiops.torch.runtime import context, graphs
from tests.support.loads import Loads

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")


class HostReadError(AssertionError):
    """The host would wait for the GPU. No error that code expects, which might go on in another way."""


class StreamError(AssertionError):
    """A tensor may not be there yet, or its memory is used again already."""


class WarpStream(NamedTuple):
    """In the place of Warp's object for a stream of a device."""

    ordinal: int
    cuda_stream: int

    @property
    def device(self) -> "WarpStream":
        return self


_stream: contextvars.ContextVar[int | None] = contextvars.ContextVar("stream", default=None)
_bound: contextvars.ContextVar[WarpStream | None] = contextvars.ContextVar("bound", default=None)
"""Warp's current stream, on which it launches where no stream is given."""


def _current_stream(device: torch.device) -> Any:
    """In the place of ``torch.cuda.current_stream``, which without a device is that of the current one."""
    assert device == GPU
    return types.SimpleNamespace(device=device, cuda_stream=_stream.get() or 0)


@contextlib.contextmanager
def _scoped_stream(stream: WarpStream, sync_enter: bool, sync_exit: bool) -> Iterator[None]:
    """In the place of ``wp.ScopedStream``."""
    assert not sync_enter and not sync_exit
    token = _bound.set(stream)
    try:
        yield
    finally:
        _bound.reset(token)


def check_launch_stream(stream: WarpStream | None) -> None:
    """Raise unless a launch is on torch's current stream."""
    current = WarpStream(0, _stream.get() or 0)
    for name, found in (("is", stream), ("by others is", _bound.get())):
        if found != current:
            raise StreamError(f"a launch {name} on {found}, where torch's current stream is {current}")


@contextlib.contextmanager
def on_stream(number: int) -> Iterator[None]:
    """Inside, this is torch's current stream. Tensors that were made outside are there on any stream."""
    token = _stream.set(number)
    try:
        yield
    finally:
        _stream.reset(token)


_loads: contextvars.ContextVar[Loads | None] = contextvars.ContextVar("loads", default=None)
"""Of the pretended GPU: kernels that were launched inside of `pretended_gpu`."""


def _pretended() -> Loads:
    loads = _loads.get()
    assert loads is not None, "outside of `pretended_gpu`"
    return loads


def _captures() -> bool:
    return (loads := _loads.get()) is not None and loads.captures


@contextlib.contextmanager
def capturing(number: int) -> Iterator[None]:
    """Inside of `pretended_gpu`, as while a CUDA graph is captured on this stream."""
    with on_stream(number), _pretended().capturing():
        yield


class Event(NamedTuple):
    """An operation with the shapes of its results, or a launch with its grid and its arguments, without addresses."""

    name: str
    details: tuple[Any, ...]


_watched: contextvars.ContextVar[list[Event] | None] = contextvars.ContextVar("watched", default=None)

READS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "histc",
    "is_nonzero",
    "item",
    "_linalg_check_errors",
    "_linalg_eigh",
    "_linalg_eigvals",
    "_linalg_svd",
    "linalg_cholesky",
    "linalg_eig",
    "linalg_lstsq",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
}
"""Operations of torch that read values of a GPU on the host, by their names: also ``bincount``, for its size, and what
checks the success of a solver."""


def _refuse(what: str) -> None:
    if _watched.get() is not None:
        raise HostReadError(f"{what} waits for the GPU")


_UNKNOWN_TO_PYTHON = 5
"""References to a tensor that only C++ knows, counted in `_check`."""


def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for an operation that waits."""
    name = func._schema.name.partition("::")[2]
    if name.rstrip("_") in READS or name in READS:
        _refuse(name)
    if name == "repeat_interleave" and isinstance(args[-1], torch.Tensor) and kwargs.get("output_size") is None:
        _refuse("repeat_interleave without output_size")
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if masks and not (name.startswith("index_put") and args[2].numel() == 1):  # that is a masked_fill
            _refuse(f"{name} by a mask")
    given, _ = tree_flatten((args, kwargs))
    _check_streams(name, given)
    for tensor in given:
        # A number as a tensor of the host is an argument of a CUDA kernel. A tensor that torch made inside of an
        # operation, on the device that it believes in, has no references beside those of this call.
        on_the_host = isinstance(tensor, torch.Tensor) and not isinstance(tensor, DeviceTensor) and tensor.ndim
        if on_the_host and (sys.getrefcount(tensor) > _UNKNOWN_TO_PYTHON or name.startswith("index")):
            _refuse(f"{name} with a tensor on the host")


def _check_streams(name: str, given: Sequence[Any]) -> None:
    """Raise if one of these was made on another stream; but a graph is replayed after what was made before."""
    if _captures():
        return
    for value in given:
        if isinstance(value, DeviceTensor) and value.stream not in (None, _stream.get()):
            raise StreamError(f"{name} on stream {_stream.get()} with a tensor of stream {value.stream}")


class DeviceTensor(torch.Tensor):
    """A tensor of the host that says it is on a GPU."""

    stream: int | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "DeviceTensor":
        found = torch.Tensor._make_subclass(cls, values.detach(), values.requires_grad)
        found.stream = _stream.get()
        return found

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor of shape {tuple(self.shape)}, {self.dtype}"

    def get_device(self) -> int:
        return 0

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, (int, float)):
            value = self.new_full((), value)
        super().__setitem__(index, value)

    def new_tensor(self, data: Any, **options: Any) -> torch.Tensor:
        _refuse("new_tensor")
        return torch.as_tensor(data, **options)

    def tolist(self) -> Any:
        _refuse("tolist")
        return on_host(self).tolist()

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def __array__(self, *args: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "nvalchemiops":
            return _ops()[func]._implementation(*args)
        _check(func, args, kwargs)
        with torch._C._DisableTorchDispatch():
            found = func(*args, **kwargs)
            if "empty" in func._schema.name:
                found.zero_()
        result = tree_map_only(torch.Tensor, _placed, found)
        _note(str(func), result)
        return result


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    """A result: on the GPU, unless it is one of those without data by which torch finds out shapes."""
    return DeviceTensor(tensor) if type(tensor) is torch.Tensor and tensor.device == HOST else tensor


def _log(name: str, *details: Any) -> None:
    log = _watched.get()
    if log is not None:
        log.append(Event(name, details))


def _note(name: str, result: Any) -> None:
    _log(name, *((tuple(t.shape), t.dtype) for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)))


def _ops() -> dict[Any, WarpOp]:
    """Ops of the library by their overloads."""
    if not _by_overload:
        import gc

        gc.unfreeze()  # what conftest.py has put aside is not among the objects
        _by_overload.update({found.overload: found for found in gc.get_objects() if issubclass(type(found), WarpOp)})
        gc.freeze()
    return _by_overload


_by_overload: dict[Any, WarpOp] = {}


FACTORIES = (
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn"),
    *("randperm", "scalar_tensor", "tril_indices", "triu_indices", "zeros"),
)
LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randn_like", "zeros_like")
NEW = ("new_empty", "new_full", "new_ones", "new_zeros")
FROM_DATA = ("as_tensor", "asarray", "tensor")


def _factory(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which knows the pretended GPU; torch without CUDA would refuse it."""

    @functools.wraps(function)
    def make(*args: Any, device: Any = None, **options: Any) -> Any:
        if device is None:
            return function(*args, **options)
        found = function(*args, device=HOST, **options)
        if torch.device(device).type == "cpu":
            return on_host(found)
        if isinstance(found, DeviceTensor):
            return found
        if "empty" in function.__name__:
            found.zero_()
        found = DeviceTensor(found).requires_grad_(found.requires_grad)
        _note(f"torch.{function.__name__}", found)
        return found

    return make


def _from_data(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def make(data: Any, *args: Any, device: Any = None, **options: Any) -> Any:
        is_on_gpu = isinstance(data, DeviceTensor)
        to_gpu = is_on_gpu if device is None else torch.device(device).type == "cuda"
        if to_gpu != is_on_gpu or (function.__name__ == "tensor" and is_on_gpu):
            _refuse(f"torch.{function.__name__} from another device")
        found = function(data, *args, **options)
        if to_gpu:
            return found if isinstance(found, DeviceTensor) else DeviceTensor(found)
        return on_host(found) if is_on_gpu else found

    return make


def _move(name: str) -> Callable[..., Any]:
    function = getattr(torch._C.TensorBase, name)

    def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        place: Any = {"cpu": HOST, "cuda": GPU}.get(name)
        for value in (*args, *kwargs.values()):
            if isinstance(value, (torch.device, str)):
                place = torch.device(value)
            elif isinstance(value, torch.Tensor):
                place = value.device
        if name != "to":
            found = tensor
        else:
            args = tuple(HOST if isinstance(a, (torch.device, str)) else a for a in args)
            kwargs = {k: HOST if isinstance(a, (torch.device, str)) else a for k, a in kwargs.items()}
            found = function(tensor, *args, **kwargs)
        if place is not None and place.type != tensor.device.type:
            _refuse(f"a copy from {tensor.device} to {place}")
            found = DeviceTensor(found) if place.type == "cuda" else on_host(found)
        return found

    return move


def on_gpu(value: Any) -> Any:
    """The same with all tensors on the pretended GPU."""
    return tree_map_only(torch.Tensor, DeviceTensor, value)


def on_host(value: Any) -> Any:
    """The same with plain tensors, which share memory with those given."""
    with torch._C._DisableTorchDispatch():  # or results would be on the pretended GPU again
        return tree_map_only(torch.Tensor, lambda t: torch.Tensor._make_subclass(torch.Tensor, t.detach()), value)


def _launch(
    kernel: wp.Kernel,
    dim: Any,
    inputs: Any,
    outputs: Any = (),
    *,
    device: Any,
    stream: Any = None,
    lanes: int = 0,
    record_tape: bool = True,
    kind: Any = None,
) -> None:
    """In the place of `nvalchemiops.launch.launch`."""
    assert device is GPU and not record_tape
    check_launch_stream(stream)
    _pretended().note(kernel)
    without_addresses = [a[16:] if isinstance(a, bytes) else a for a in (*inputs, *outputs)]
    _log(kernel.key, tuple(dim) if isinstance(dim, (list, tuple)) else dim, lanes, *without_addresses)


def _launch_adjoint(
    kernel: wp.Kernel, dim: Any, inputs: Any, adjoints: Any, *, device: Any, stream: Any = None
) -> None:
    """In the place of `nvalchemiops.launch.launch_adjoint`."""
    assert device is GPU
    check_launch_stream(stream)
    _pretended().note(kernel)
    _log(f"adjoint of {kernel.key}", dim)


_describe_arguments = tensors.describe


def _describe(kernel: wp.Kernel, arguments: Any, *others: Any) -> Any:
    _check_streams(kernel.key, arguments)
    return _describe_arguments(kernel, arguments, *others)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Inside, `DeviceTensor` counts as a plain tensor on a GPU, and ``device="cuda"`` makes one.

    No kernels are loaded there yet. Calls are not captured by the engine, so that each is seen.
    """
    token = _loads.set(Loads())
    try:
        with _patched():
            yield
    finally:
        _loads.reset(token)


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plain = (*internals.PLAIN_TYPES, DeviceTensor)
        patch.setattr(internals, "PLAIN_TYPES", plain)
        patch.setattr(context, "PLAIN_TYPES", plain)
        internals.learn_plain_keys()
        keys = internals.dispatch_keys(DeviceTensor(torch.zeros(1))).raw_repr()
        patch.setattr(internals, "plain_keys", internals.plain_keys | {keys})
        patch.setattr(graphs, "obstacle", lambda device: "it is a pretended one")
        patch.setattr(core, "launch", _launch)
        patch.setattr(core, "launch_adjoint", _launch_adjoint)
        patch.setattr(tensors, "warp_device", lambda device: GPU if device == GPU else _host_launch(device))
        patch.setattr(arrays, "warp_device", lambda device: GPU if device == GPU else _host_launch(device))
        patch.setattr(arrays, "_warp_stream", WarpStream)
        patch.setattr(wp, "ScopedStream", _scoped_stream)
        patch.setattr(pair_op, "_kernel", functools.cache(pair_op._kernel.__wrapped__))
        patch.setattr(pair_kernels, "pair_kernel", _without_body)
        patch.setattr(torch.cuda, "device", contextlib.nullcontext)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(multi_processor_count=132))
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", _captures)
        patch.setattr(torch.cuda, "current_stream", _current_stream)
        patch.setattr(internals, "_raw_stream", None)
        patch.setattr(tensors, "describe", _describe)
        for name in ("Stream", "synchronize"):
            patch.setattr(torch.cuda, name, lambda *_, **__: _refuse("a new stream, or waiting for one"))
        for name in (*FACTORIES, *LIKE):
            patch.setattr(torch, name, _factory(getattr(torch, name)))
        for name in FROM_DATA:
            patch.setattr(torch, name, _from_data(getattr(torch, name)))
        for name in NEW:
            patch.setattr(torch.Tensor, name, _factory(getattr(torch.Tensor, name)))
        for name in ("to", "cpu", "cuda"):
            patch.setattr(torch.Tensor, name, _move(name))
        yield


_make_pair_kernel = pair_kernels.pair_kernel.__wrapped__  # type: ignore[attr-defined]  # by `functools.wraps`


def _without_body(variant: pair_kernels.Variant) -> wp.Kernel:
    """A kernel with the parameters that a pair kernel has; its source, which takes seconds, is not needed here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_kernels, "source", lambda _: "")
        return _make_pair_kernel(variant)


def _host_launch(device: torch.device) -> Any:
    raise AssertionError(f"a launch on {device}, beside a GPU")


@contextlib.contextmanager
def watched() -> Iterator[list[Event]]:
    """Inside, what waits for the GPU raises `HostReadError`; the log of all operations and launches."""
    log: list[Event] = []
    token = _watched.set(log)
    try:
        yield log
    finally:
        _watched.reset(token)


def events(call: Callable[[], Any]) -> list[Event]:
    """What a call does on the GPU; `HostReadError` if it waits."""
    with watched() as log:
        call()
    return log
