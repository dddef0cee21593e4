"""All private names of torch that the library uses, each with a fallback.

The names are looked up in groups, one for each shortcut. If a release of torch lacks a name of a group, or a name no
longer works as assumed, the whole group is switched off, with one line in the log, and a slower public API is used.
If torch has no public API for it, a call that needs the group raises a RuntimeError with this reason.
tests/package/test_torch_internals.py checks each assumption and each fallback.
"""

import functools
import logging
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

_log = logging.getLogger("nvalchemiops")

Function = TypeVar("Function", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Torch's own tensor types. Subclasses are excluded: they may override operations."""


def _find(shortcut: str, *names: str, works: Callable[..., Any] = lambda *found: True) -> tuple[Any, ...] | None:
    """Look up objects of torch by name. If one is missing or ``works(*found)`` fails, log a line and return None."""
    try:
        found = tuple(pkgutil.resolve_name(f"torch:{name}") for name in names)
        if works(*found) is not False:
            return found
        reason = "one of its private names has another meaning"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    _log.warning("torch %s: %s is off (%s)", torch.__version__, shortcut, reason)
    return None


def _impossible(what: str) -> RuntimeError:
    return RuntimeError(f"{what} needs private parts of torch that torch {torch.__version__} does not have")


# -- streams --------------------------------------------------------------------------------------

# torch.cuda.current_stream makes an object, which takes 8 us; builds without CUDA lack the other way
_raw_stream = _find("reading streams without objects", "_C._cuda_getCurrentRawStream") if torch.version.cuda else None


def stream_handle(device: torch.device) -> int:
    """The address of torch's current stream on a GPU."""
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device).cuda_stream
    handle: int = _raw_stream[0](device.index)
    return handle


_MANAGERS = "tree_manager_containers"


def belongs_to_compiled_graph(device: torch.device) -> bool:
    """Whether compiled code warms up or captures a CUDA graph on torch's current stream, as with "reduce-overhead".

    All memory then comes from a pool. The compiler raises if more of it is held afterwards than its results, or gives
    it to others.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        managers = getattr(trees.local, _MANAGERS, None)
        if managers is None and torch._C._is_key_in_tls(_MANAGERS):  # in threads of backward passes
            managers = torch._C._get_obj_in_tls(_MANAGERS)
        if not managers or device.index not in managers:
            return False
        manager = managers[device.index].tree_manager
        return manager is not None and manager.stream.cuda_stream == stream_handle(device)
    except AttributeError:  # not known: in all calls after those of such code
        return True


_pools = (
    _find("ending captures that failed", "_C._cuda_endAllocateToPool", "_C._cuda_releasePool")
    if torch.version.cuda
    else None
)


def leave_pool(device: torch.device, pool: Any) -> None:
    """After a capture that the driver has ended: torch goes on as if it were under way, and frees no other memory."""
    if _pools is None:
        return
    end, release = _pools
    try:
        end(device.index, pool)
    except RuntimeError:  # torch has ended it, too
        return
    release(device.index, pool)


# -- which derivatives are taken ------------------------------------------------------------------

_derivatives = _find(
    "knowing whether a torch.func transform or forward mode is on",
    "_C._are_functorch_transforms_active",
    "autograd.forward_ad._current_level",
    works=lambda active, level: active() in (True, False) and isinstance(level, int),
)

DERIVATIVES_KNOWN = _derivatives is not None
"""Whether the next two functions can answer. If not, they always return True."""

transforms_active: Callable[[], bool] = _derivatives[0] if _derivatives else lambda: True
"""Whether a transform of ``torch.func`` is on; True if that is not known."""


def derivative_asked() -> bool:
    """Whether a transform of ``torch.func`` or forward-mode differentiation is on; True if that is not known."""
    return transforms_active() or forward_ad._current_level >= 0


# -- tensors under function transforms ------------------------------------------------------------

_wrappers = _find(
    "reading tensors under torch.func transforms",
    "_C._functorch.is_functorch_wrapped_tensor",
    "_C._functorch.is_gradtrackingtensor",
    "_C._functorch.is_batchedtensor",
    "_C._functorch.is_legacy_batchedtensor",
    "_C._functorch.get_unwrapped",
    "_C._DisableFuncTorch",
    works=lambda *found: not any(is_kind(torch.empty(0, device="cpu")) for is_kind in found[:4]),
)


def _refuse_wrappers() -> None:
    if DERIVATIVES_KNOWN and transforms_active():
        raise _impossible("reading values under torch.func transforms")


if _wrappers is not None:
    is_wrapped: Callable[[torch.Tensor], bool] = _wrappers[0]
    is_wrapped_for_gradients: Callable[[torch.Tensor], bool] = _wrappers[1]
    unwrapped: Callable[[torch.Tensor], torch.Tensor] = _wrappers[4]
    without_transforms: Callable[[], AbstractContextManager[Any]] = _wrappers[5]
    _is_batched, _is_batched_by_autograd = _wrappers[2:4]

    def is_batched(tensor: torch.Tensor) -> bool:
        """Whether the outermost wrapper comes from ``vmap``, or ``torch.autograd.grad(is_grads_batched=True)``."""
        return _is_batched(tensor) or _is_batched_by_autograd(tensor)

else:

    def is_wrapped(tensor: torch.Tensor) -> bool:
        """Whether a transform wraps the tensor; raises under a transform if that is not known."""
        _refuse_wrappers()
        return False

    is_wrapped_for_gradients = is_batched = is_wrapped

    def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
        """The tensor without its outermost wrapper."""
        raise _impossible("reading values under torch.func transforms")

    def without_transforms() -> AbstractContextManager[Any]:
        """A context in which wrapped tensors are read as plain ones."""
        _refuse_wrappers()
        return nullcontext()


_stack = _find(
    "leaving torch.func transforms, and forward mode under them",
    "_functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "_functorch.pyfunctorch.retrieve_all_functorch_interpreters",
    "_C._functorch.TransformType.Jvp",
    "_C._functorch.TransformType.Grad",
    works=lambda clear, interpreters, jvp, grad: interpreters() == [],
)


def count_transforms() -> tuple[int, int]:
    """The numbers of active forward-mode and reverse-mode transforms, as seen in ``torch.autograd.Function.jvp``."""
    if _stack is None:
        raise _impossible("forward mode through an operator")
    _, interpreters, jvp, grad = _stack
    kinds = [interpreter.key() for interpreter in interpreters()]
    return kinds.count(jvp), kinds.count(grad)


def reverse_mode_asked() -> bool:
    """Whether a reverse-mode transform of ``torch.func`` is on; if kinds are not known, whether any is known to be."""
    if _stack is None:
        return DERIVATIVES_KNOWN and transforms_active()
    return count_transforms()[1] > 0


@contextmanager
def outside_of_transforms() -> Iterator[None]:
    """Suspend ``torch.func`` transforms and forward mode, under which ops that write in place raise an error."""
    if _stack is None or _derivatives is None:
        if DERIVATIVES_KNOWN and derivative_asked():
            raise _impossible("writing in place under torch.func transforms")
        yield
        return
    level = forward_ad._current_level
    forward_ad._current_level = -1
    try:
        with _stack[0]():
            yield
    finally:
        forward_ad._current_level = level


# -- around the dispatcher ------------------------------------------------------------------------


def _eager_works(n_modes: Any, autocast: Any, profiling: Any, tracing: Any, keys: Any, below: Any) -> bool:
    with below():
        return n_modes() >= 0 and not tracing() and isinstance(keys(torch.empty(0, device="cpu")).raw_repr(), int)


_eager = _find(
    "calling operators around the dispatcher",
    "_C._len_torch_dispatch_stack",
    "_C._is_any_autocast_enabled",
    "_C._autograd._profiler_enabled",
    "_C._get_tracing_state",
    "_C._dispatch_keys",
    "_C._AutoDispatchBelowAutograd",
    works=_eager_works,
)

EAGER_SHORTCUT = _eager is not None
"""Whether the next five names are available. If not, calls go through the dispatcher, and modes are assumed active."""

count_dispatch_modes: Callable[[], int] = _eager[0] if _eager else lambda: 1
"""The number of active ``TorchDispatchMode``s."""

_checks = _eager[1:] if _eager else (None, None, torch.jit.is_tracing, None, None)  # searches ask it, too
autocast_enabled, profiling, tracing_state, dispatch_keys, autograd_excluded = _checks

plain_keys: set[int] = set()
"""Dispatch keys of plain tensors on each device; `learn_plain_keys` fills the set at first use."""

keys_with_inference: set[int] = set()
"""`plain_keys`, and the dispatch keys of tensors made in inference mode."""


def learn_plain_keys() -> None:
    """Record the dispatch keys of an ordinary tensor on each kind of device in use."""
    if EAGER_SHORTCUT and (not plain_keys or (torch.cuda.is_initialized() and len(plain_keys) == 1)):
        devices = ["cpu"] + ["cuda"] * torch.cuda.is_initialized()
        with torch.inference_mode(False):  # tensors made in inference mode are not plain
            plain_keys.update(dispatch_keys(torch.empty(0, device=device)).raw_repr() for device in devices)
        with torch.inference_mode():
            keys_with_inference.update(dispatch_keys(torch.empty(0, device=device)).raw_repr() for device in devices)
        keys_with_inference.update(plain_keys)


def is_unobserved(*tensors: torch.Tensor | None, of_inference: bool = False) -> bool:
    """Whether an operation may bypass the dispatcher: its tensors are plain and no mode, tracer or profiler is active.

    A plain tensor is strided, on a CPU or CUDA device, of torch's own types, not negated, conjugated or zero by a flag,
    and not wrapped by a transform. Tensors made in inference mode count as plain only with ``of_inference``.
    """
    if not EAGER_SHORTCUT or count_dispatch_modes() or autocast_enabled() or profiling() or tracing_state():
        return False
    learn_plain_keys()
    known = keys_with_inference if of_inference else plain_keys
    for t in tensors:  # a plain loop: this runs in each call
        if t is not None and (type(t) not in PLAIN_TYPES or dispatch_keys(t).raw_repr() not in known):
            return False
    return True


_modes = _find(
    "plans of repeated calls",
    "_C._len_torch_function_stack",
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._push_on_torch_dispatch_stack",
    "_C._pop_torch_dispatch_stack",
    works=lambda count, hooks, *_: count() >= 0 and isinstance(hooks(True), (tuple, type(None))),
)


class _OfThread(threading.local):
    """The number of `followed_by` modes that are active in this thread."""

    n_followers = 0


_thread = _OfThread()


@contextmanager
def followed_by(mode: Any) -> Iterator[None]:
    """Pass the operations below autograd to ``mode``, which `has_other_modes` does not count.

    This avoids ``TorchDispatchMode``, which imports the compiler and keeps flags that all threads share.
    """
    if _modes is None:
        raise _impossible("a plan")
    push, pop = _modes[2:]
    before = _thread.n_followers
    _thread.n_followers = before + 1
    push(mode)
    try:
        yield
    finally:
        pop(None)
        _thread.n_followers = before


def has_other_modes() -> bool:
    """Whether a dispatch mode other than those of `followed_by` is active."""
    count = count_dispatch_modes()
    return bool(count) and count > _thread.n_followers


@functools.cache
def places_written(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operation writes into."""
    arguments = enumerate(func._schema.arguments)
    return tuple((k, a.name) for k, a in arguments if a.alias_info is not None and a.alias_info.is_write)


@functools.cache
def out_variant(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """The overload with the same arguments that writes into given tensors, and the names of these tensors."""

    def signature(arguments: Any) -> list[tuple[str, str, bool]]:
        return [(a.name, str(a.type), a.kwarg_only) for a in arguments]

    packet, wanted = func.overloadpacket, signature(func._schema.arguments)
    for name in packet.overloads():
        other = getattr(packet, name)
        out = tuple(a.name for a in other._schema.arguments if a.is_out)
        given = signature(a for a in other._schema.arguments if not a.is_out)
        if out and len(out) == len(func._schema.returns) and given == wanted:
            return getattr(other, "_op", other), out
    return None


_mode_at = _find("plans of repeated calls beside a default device", "_C._get_function_stack_at")


def has_function_modes(but_default_device: bool = False) -> bool:
    """Whether a ``TorchFunctionMode`` is active; True if that is not known.

    With ``but_default_device`` that of ``torch.set_default_device`` does not count, which says only where functions
    that make tensors make them.
    """
    if _modes is None:
        return True
    count = _modes[0]()
    if not count or not but_default_device or _mode_at is None:
        return bool(count)
    default = getattr(sys.modules.get("torch.utils._device"), "DeviceContext", None)
    return any(type(_mode_at[0](number)) is not default for number in range(count))


def has_saved_tensor_hooks() -> bool:
    """Whether hooks see the tensors saved for backward passes, as with checkpointing; True if that is not known."""
    return _modes is None or _modes[1](True) is not None


_redispatch = _find(
    "continuing a call below autograd",
    "_C._AutoDispatchBelowAutograd",
    "_C._after_autograd_keyset",
    "_C._AutoDispatchBelowADInplaceOrView",
    "_C._after_ADInplaceOrView_keyset",
    "_C.DispatchKey.CPU",
    "_C.DispatchKey.CUDA",
    "_ops.OpOverload.redispatch",
    works=lambda below, after, *others: isinstance((after & after).highestPriorityTypeId(), type(others[2])),
)

CAN_REDISPATCH = _redispatch is not None
"""Whether the autograd implementation of an operator can continue the dispatch below autograd.

If not, each operator gets a copy with the same schema and implementation, but without autograd."""

_second: dict[Any, Callable[..., Any]] = {}

if _redispatch is not None:
    _below_autograd, _after_autograd, _below_inplace, _after_inplace, *_backends = _redispatch[:6]


def define(
    library: torch.library.Library, name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> Any:
    """Define an operator with an implementation for all devices and one for fake tensors. Return its overload."""

    def add(short: str) -> Any:
        library.define(short + schema)
        library.impl(short, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{library.ns}::{short}", fake, lib=library)
        return getattr(getattr(torch.ops, library.ns), short).default

    overload = add(name)
    if not CAN_REDISPATCH:
        _second[overload] = add(f"{name}__below_autograd")
    return overload


def below_autograd(overload: Any, implementation: Callable[..., Any], keyset: Any, args: tuple[Any, ...]) -> Any:
    """Continue a dispatch below autograd. If no mode or tracer sees the call, call the implementation directly."""
    if not CAN_REDISPATCH:
        with torch.no_grad():
            return _second[overload](*args)
    with _below_autograd():
        if keyset is None:  # the call has bypassed the dispatcher
            return implementation(*args)
        keyset = keyset & _after_autograd
        if keyset.highestPriorityTypeId() in _backends:
            return implementation(*args)
        return overload.redispatch(keyset, *args)


def below_inplace(overload: Any, keyset: Any, args: tuple[Any, ...]) -> Any:
    """Continue a dispatch below the key at which torch counts the versions of tensors."""
    with _below_inplace():
        return overload.redispatch(keyset & _after_inplace, *args)


_views = _find("making views plain tensors", "Tensor._is_view", "_C._AutoDispatchBelowADInplaceOrView")


def no_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a non-view tensor: autograd forbids in-place changes of an output that is a view."""
    if _views is None or not tensor._is_view():
        return tensor
    with _views[1]():
        return tensor.detach()


_inside = _find(
    "autograd inside operators that record a tape",
    "_C._dispatch_tls_local_include_set",
    "_C._dispatch_tls_local_exclude_set",
    "_C._ForceDispatchKeyGuard",
    *(f"_C.DispatchKey.{key}" for key in ("AutocastCPU", "AutocastCUDA")),
    *(f"_C.DispatchKey.{key}" for key in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView")),
    # without these keys torch reads the memory of tensors that are zero by a flag, and these have no memory
    *(f"_C.DispatchKey.{key}" for key in ("ZeroTensor", "Negative", "Conjugate")),
    works=lambda include, exclude, guard, key, *_: isinstance(exclude().remove(key).add(key).raw_repr(), int),
)
_excluded_inside: dict[int, Any] = {}


def autograd_inside() -> AbstractContextManager[Any]:
    """Switch autograd on and autocast off inside the implementation of an operator.

    Torch then tracks the arguments of the body that require gradients, and everything computed from them.
    """
    if _inside is None:
        raise _impossible("a derivative by a recorded tape")
    include, exclude, guard, *keys = _inside
    excluded = exclude()
    bits = excluded.raw_repr()
    if bits not in _excluded_inside:
        for key in keys[:2]:
            excluded = excluded.add(key)
        for key in keys[2:]:
            excluded = excluded.remove(key)
        _excluded_inside[bits] = excluded
    return guard(include(), _excluded_inside[bits])


# -- tensors, backward passes, the compiler -------------------------------------------------------

_zero = _find("asking for tensors of zeros without memory by their flag", "Tensor._is_zerotensor")


def _has_no_memory(tensor: torch.Tensor) -> bool:
    return not tensor.is_meta and tensor.numel() > 0 and tensor.data_ptr() == 0


is_zero_tensor: Callable[[torch.Tensor], bool] = _zero[0] if _zero else _has_no_memory
"""Whether a tensor is zero by a flag and has no memory. Torch's derivatives of complex tensors make such tensors."""

CHECK_OF_LINALG = "_linalg_check_errors"
"""What functions of ``torch.linalg`` do with the error codes of their matrices: it reads them, and may raise."""

_copies = _find("copying several tensors at once", "_foreach_copy_")


def _copy_each(memory: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for into, value in zip(memory, values):
        into.copy_(value)


def copy_all(memory: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy values into memory, with one launch per dtype."""
    if memory:
        (_copy_each if _copies is None else _copies[0])(memory, values)


_COUNTS_VERSIONS = _find("telling whether a tensor has changed", "Tensor._version") is not None


def version_of(tensor: torch.Tensor) -> object:
    """The number of in-place changes of a tensor, or if torch does not count them, an object that equals no other."""
    return object() if not _COUNTS_VERSIONS or tensor.is_inference() else tensor._version


_fake = _find(
    "finding shapes of outputs without data",
    "_subclasses.fake_tensor.FakeTensorMode",
    "_subclasses.fake_tensor.FakeTensor",
    "_subclasses.fake_tensor.DataDependentOutputException",
    "_subclasses.fake_tensor.DynamicOutputShapeException",
    "_subclasses.functional_tensor.FunctionalTensor",
)

NEEDS_DATA: tuple[type[Exception], ...] = () if _fake is None else _fake[2:4]
"""Errors that operations on tensors without data raise if their results, or the shapes of these, depend on data."""

_SYMBOLS = "torch.fx.experimental.symbolic_shapes:ShapeEnv"


@contextmanager
def without_data(symbols: bool = False) -> Iterator[None]:
    """Make tensors without data: operations compute only the shapes and dtypes of their results.

    With ``symbols`` numbers and sizes that depend on data are symbols; without, they raise one of `NEEDS_DATA`.
    """
    if _fake is None:
        raise _impossible("finding the shapes of a function's outputs: declare them")
    options = {"shape_env": pkgutil.resolve_name(_SYMBOLS)()} if symbols else {}
    log = logging.getLogger(_fake[0].__module__)  # it logs errors that are raised anyway
    before, log.disabled = log.disabled, True
    try:
        with _fake[0](allow_non_fake_inputs=True, **options):
            yield
    finally:
        log.disabled = before


def is_about_symbols(error: Exception) -> bool:
    """Whether this is an error of tensors without data where a decision depends on the value of a symbol."""
    return type(error).__module__ == _SYMBOLS.partition(":")[0]


_infra = _find(
    "tensors with data while a graph is traced",
    "_C._get_dispatch_mode",
    "_C._TorchDispatchModeKey",
    works=lambda mode, keys: mode(keys.FAKE),  # it may be on
)


def results_have_no_data() -> bool:
    """Whether operations make tensors without data (see `without_data`), also of tensors with data."""
    return bool(count_dispatch_modes()) and _infra is not None and _infra[0](_infra[1].FAKE) is not None


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether this is a tensor without data (see `without_data`), or wraps one while a graph is traced."""
    if type(tensor) not in PLAIN_TYPES:
        return _fake is not None and isinstance(tensor, (_fake[1], _fake[4]))
    return results_have_no_data()


_passes = _find(
    "one thread in backward passes on busy machines",
    "_C._current_graph_task_id",
    "autograd.Variable._execution_engine.queue_callback",
    works=lambda task, queue: task() < 0,
)

BACKWARD_KNOWN = _passes is not None
"""Whether the next two functions work."""


def in_backward_pass() -> bool:
    """Whether a backward pass is running in this thread."""
    return _passes is not None and _passes[0]() >= 0


def after_backward_pass(function: Callable[[], None]) -> None:
    """Call ``function`` when the running backward pass ends, unless the pass raises."""
    if _passes is not None:
        _passes[1](function)


_exporting = _find(
    "telling compiled from exported graphs",
    "compiler._is_exporting_flag",
    works=lambda flag: isinstance(flag, bool),
)


def is_exporting() -> bool:
    """Whether a graph is being exported. Without the private flag, torch <= 2.11 also says True in compiled code."""
    return torch.compiler.is_exporting() if _exporting is None else torch.compiler._is_exporting_flag


def compiler_loaded() -> bool:
    """Whether torch's compiler has been imported, which takes a second."""
    return "torch._dynamo" in sys.modules


def compiled_as_eager() -> AbstractContextManager[Any]:
    """A context in which functions compiled by ``torch.compile`` run eagerly."""
    return torch.compiler.set_stance("force_eager") if compiler_loaded() else nullcontext()


def assume_constant(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same as ``torch.compiler.assume_constant_result``, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # mypy knows no attributes of functions
    return function


_tuples_in_files = _find("named tuples in files of exported programs", "utils._pytree._register_namedtuple")


def named_in_files(kind: Kind) -> Kind:
    """A decorator of named tuples that files hold, also those that are loaded with ``weights_only``.

    Exported programs that have them as arguments or results can be saved, and loaded.
    """
    torch.serialization.add_safe_globals([kind])  # they run no code
    if _tuples_in_files is not None:
        _tuples_in_files[0](kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    return kind


_frames = _find(
    "reading values behind graph breaks of torch.compile",
    "_C._dynamo.eval_frame.set_code_exec_strategy",
    "_C._dynamo.eval_frame._FrameExecStrategy",
    "_C._dynamo.eval_frame._FrameAction.SKIP",
    "_C._dynamo.eval_frame._FrameAction.DEFAULT",
    works=lambda set_strategy, strategy, skip, default: strategy(skip, default) is not None,
)


def only_inlined(function: Function, *, with_calls: bool = False) -> Function:
    """The same function, which ``torch.compile`` inlines into its callers, but never compiles separately.

    After a graph break, Python calls functions one by one, and the compiler tries to compile each of them. In a
    function that asks whether it is being compiled, the answer would become the constant True, although its caller is
    not compiled. With ``with_calls`` the functions that it calls are not compiled either: for host code that reads
    values.
    """
    if _frames is not None:
        set_strategy, strategy, skip, default = _frames
        set_strategy(function.__code__, strategy(skip, skip if with_calls else default))
    return function
