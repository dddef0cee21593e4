"""All private names of Warp that the library uses, with public fallbacks for releases that lack them.

There are two shortcuts past ``wp.launch``: array descriptors as bytes, and launches that write all arguments at once.
Each is tested before its first use. A shortcut that does not work with this release of Warp is switched off, with one
line in the log, and ``wp.launch`` is called with Warp arrays. The other functions inspect kernels and types, for which
Warp has no public functions.
"""

import ctypes
import functools
import logging
import struct
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import warp as wp

_log = logging.getLogger("nvalchemiops")


@functools.cache
def _switched_off(shortcut: str, reason: str) -> None:
    """Log that a shortcut is off, once."""
    _log.warning("%s: not with Warp %s (%s); launches take longer", shortcut, wp.config.version, reason)


# -- kernels and types ----------------------------------------------------------------------------


class Parameter(NamedTuple):
    """A parameter of a kernel: its name and its Warp type."""

    label: str
    type: Any


def parameters(kernel: wp.Kernel) -> list[Parameter]:
    """The parameters of a kernel, in order."""
    return [Parameter(a.label, a.type) for a in kernel.adj.args]


def source_of(value: wp.Kernel | wp.Function) -> tuple[str, Any]:
    """The source of a Warp kernel or function, with its C++, and the Python function from which it was made."""
    texts = [getattr(getattr(value, "adj", None), "source", "")]
    texts += [getattr(value, name, None) for name in ("native_snippet", "adj_native_snippet", "replay_snippet")]
    return repr(texts), value.func


def overload_for(kernel: wp.Kernel, arguments: Sequence[Any]) -> wp.Kernel:
    """The kernel that a launch of a generic kernel with these arguments runs."""
    return kernel.add_overload(kernel.infer_argument_types(arguments))


def has_adjoint(kernel: wp.Kernel) -> bool:
    """Whether Warp derives an adjoint for ``kernel``."""
    enabled = kernel.options.get("enable_backward")
    return bool(kernel.module.options.get("enable_backward", True) if enabled is None else enabled)


def component_type(dtype: Any) -> Any:
    """The scalar type of the components of a Warp vector, matrix or quaternion type, None for any other type."""
    return getattr(dtype, "_wp_scalar_type_", None)


def component_shape(dtype: Any) -> tuple[int, ...]:
    """The shape of a Warp vector or matrix type, () for any other type."""
    return tuple(getattr(dtype, "_shape_", ()))


def struct_size(dtype: Any) -> int | None:
    """Bytes of a ``wp.struct``, None for any other type."""
    if hasattr(dtype, "instance_type") and hasattr(dtype, "ctype"):
        return ctypes.sizeof(dtype.ctype)
    return None


def struct_fields(struct: Any) -> dict[str, Any]:
    """The types of the fields of a ``wp.struct``."""
    return {name: field.type for name, field in struct.vars.items()}


# -- modules --------------------------------------------------------------------------------------


def load_module(kernel: wp.Kernel, device: wp.Device) -> None:
    """Compile and load the module of a kernel, unless it is loaded."""
    wp.load_module(kernel.module, device=device)


def find_kernel(kernel: wp.Kernel, device: wp.Device, block_dim: int) -> None:
    """Load the module of a kernel; raise unless the kernel is in it."""
    loaded = kernel.module.load(device, block_dim)
    if loaded is None or loaded.get_kernel_hooks(kernel).forward is None:
        raise RuntimeError(f"there is no kernel '{kernel.key}' in module '{kernel.module.name}' on {device}")


def is_loaded(kernel: wp.Kernel, device: wp.Device, block_dim: int) -> bool:
    """Whether the module of a kernel is loaded, with all the kernels that it has now."""
    module = kernel.module
    loaded = module.execs.get((device.context, block_dim))
    # a hash that is left out of names of files is not compared, as in Warp
    return loaded is not None and bool(
        module.options["strip_hash"] or loaded.module_hash == module.get_module_hash(block_dim)
    )


def loaded_code(kernel: wp.Kernel, device: wp.Device, block_dim: int) -> Any:
    """The code of a kernel that is loaded on a device. Warp unloads it once nothing holds it; None without any."""
    return kernel.module.execs.get((device.context, block_dim))


def unload_module(kernel: wp.Kernel) -> None:
    """Forget that the module of a kernel was loaded."""
    kernel.module.unload()


def compiled_folder(kernel: wp.Kernel, block_dim: int) -> Path:
    """The folder in which Warp keeps the compiled module of a kernel."""
    return Path(str(wp.config.kernel_cache_dir), kernel.module.get_module_identifier(block_dim))


def compile_module(kernel: wp.Kernel, block_dim: int, capability: int, folder: Path) -> Path:
    """Compile the module of a kernel, for blocks of this size and GPUs of this capability; return the file."""
    before = wp.get_module_options(kernel.module)["block_dim"]
    wp.set_module_options({"block_dim": block_dim}, kernel.module)
    try:
        (compiled,) = wp.compile_aot_module(kernel.module, arch=capability, module_dir=folder)
    finally:
        wp.set_module_options({"block_dim": before}, kernel.module)
    return Path(compiled)


def header_folder() -> Path | None:
    """The folder in which Warp looks for its precompiled header when this thread compiles a kernel for a CPU.

    None if it does not precompile it, or does not tell.
    """
    runtime: Any = wp._src.context.runtime
    try:
        folder = runtime.get_clang_pch_dir() if wp.config.use_precompiled_headers else None
    except (AttributeError, TypeError):
        return None
    return None if folder is None else Path(folder)


@functools.cache
def header_identity() -> str | None:
    """What the precompiled header depends on, besides flags, which are in its name: files, compiler and processor.

    None if Warp does not tell.
    """
    native = Path(wp.__file__).parent / "native"
    try:
        target = wp._src.context._get_cpu_target_hash("-march=native")
        files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(native.glob("*.h"))]
    except (AttributeError, TypeError, OSError):
        return None
    return repr((str(native), files, target))


def failed_to_build(kernel: wp.Kernel) -> bool:
    """Whether the source of the module did not compile."""
    return bool(kernel.module.failed_builds)


# -- tapes ----------------------------------------------------------------------------------------


class TapeRouter(wp.Tape):
    """Passes Warp's recordings on to the tape of the calling thread.

    Parameters
    ----------
    active : callable
        Returns the tape of this thread, or None.
    refuse : callable
        Called with a kernel without an adjoint, and its arguments, before the launch is recorded. May raise.
    """

    def __init__(
        self, active: Callable[[], wp.Tape | None], refuse: Callable[[wp.Kernel, Sequence[Any]], None]
    ) -> None:
        super().__init__()
        self.active, self.refuse = active, refuse

    def is_on(self) -> bool:
        """Whether this is Warp's current tape."""
        runtime: Any = wp._src.context.runtime
        return runtime is not None and runtime.tape is self

    def record_launch(
        self, kernel: wp.Kernel, dim: Any, max_blocks: int, inputs: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> None:
        """As in Warp."""
        if (tape := self.active()) is not None:
            if not has_adjoint(kernel):
                self.refuse(kernel, [*inputs, *outputs])
            tape.record_launch(kernel, dim, max_blocks, inputs, outputs, *args, **kwargs)

    def record_func(self, *args: Any, **kwargs: Any) -> None:
        """As in Warp."""
        if (tape := self.active()) is not None:
            tape.record_func(*args, **kwargs)

    def record_scope_begin(self, *args: Any, **kwargs: Any) -> None:
        """As in Warp."""
        if (tape := self.active()) is not None:
            tape.record_scope_begin(*args, **kwargs)

    def record_scope_end(self, *args: Any, **kwargs: Any) -> None:
        """As in Warp."""
        if (tape := self.active()) is not None:
            tape.record_scope_end(*args, **kwargs)


# -- array descriptors ----------------------------------------------------------------------------


@functools.cache
def descriptor_type() -> Any:
    """Warp's array descriptor (address, address of the gradient, shape, strides), a ``ctypes`` structure.

    None if the structure is not as expected: kernels are then launched with Warp arrays.
    """
    try:
        array = wp.empty((2, 3), dtype=wp.float32, device="cpu")
        own = array.__ctype__()
        kind: Any = type(own)
        if bytes(kind(array.ptr, 0, 2, array.shape, array.strides)) != bytes(own):
            raise TypeError("another layout")
        if struct.unpack_from("QQ", bytes(own)) != (array.ptr, 0):
            raise TypeError("another order")
    except (AttributeError, TypeError, ValueError) as error:
        _switched_off("array descriptors as bytes", str(error))
        return None
    return kind


def descriptor(shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """A descriptor whose two addresses, at its start, are zero."""
    return bytes(descriptor_type()(0, 0, len(shape), shape, strides))


def unpacked(arguments: Sequence[Any]) -> list[Any]:
    """The arguments in the form that ``wp.launch`` takes, with descriptors in place of bytes."""
    return [descriptor_type().from_buffer_copy(a) if type(a) is bytes else a for a in arguments]


# -- launches -------------------------------------------------------------------------------------

_FORMATS: dict[Any, str] = {wp.int32: "i", wp.uint64: "Q", wp.float32: "f", wp.float64: "d"}


class Command:
    """A reusable launch of one kernel on one device, for one thread. Each launch has its own grid and arguments.

    All arguments are written at once into the structure that the compiled kernel reads (on a CPU), or from which CUDA
    copies them (on a GPU). For a small kernel this takes half of the time of ``wp.launch`` on a CPU, and a tenth on a
    GPU.

    A launch during another launch of the same command (from a signal handler) uses ``wp.launch``, which does not share
    memory with it. A command keeps only addresses and shapes, so it keeps no arrays alive between launches. The caller
    must load the kernel.
    """

    def __init__(
        self, kernel: wp.Kernel, grid: tuple[int, ...], arguments: list[Any], device: Any, block: int | None
    ) -> None:
        self.kernel, self.grid, self.device, self.block = kernel, grid, device, block
        self.parameters = parameters(kernel)
        self.on_gpu = not device.is_cpu
        self.in_use = False
        self.pack: Callable[..., None] | None = None
        self.recorded: Any = wp.launch(
            kernel, grid, unpacked(arguments), device=device, record_tape=False, record_cmd=True, block_dim=block
        )
        try:
            self.recorded.fwd_args = None  # otherwise it would keep the arrays of a launch alive until the next one
            self._prepare()
        except Exception as error:
            self.pack = None
            _switched_off("launches that write all arguments at once", repr(error))

    def _prepare(self) -> None:
        """Make the structure for all arguments, and find out how to pass it to the kernel."""
        # the first parameter that Warp passes to each kernel is the grid
        named = [Parameter("", None), *self.parameters] if self.on_gpu else self.parameters
        values = self.recorded.params if self.on_gpu else self.recorded.params[1:]
        fields = [(p.label, type(value)) for p, value in zip(named, values, strict=True)]
        self.structure = type("Arguments", (ctypes.Structure,), {"_fields_": fields})()
        pack = _packer(type(self.structure), [p.type for p in named])
        if pack is not None:
            pack(self.structure, 0, *map(_written, values))
            (self._find_call_on_gpu if self.on_gpu else self._find_call)()
            self.pack = pack

    def _find_call(self) -> None:
        """Find out how the compiled kernel is called, from a launch that calls a Python function in its place."""
        recorded = self.recorded
        seen: list[bytes] = []
        replaced = types.SimpleNamespace(forward=lambda *called: seen.extend(bytes(c._obj) for c in called))
        hooks, recorded.hooks = recorded.hooks, replaced
        try:
            recorded.launch()
        finally:
            recorded.hooks = hooks
        if seen != [bytes(recorded.params[0]), bytes(self.structure)]:
            raise TypeError(f"kernel '{self.kernel.key}' gets its arguments in another form")
        self.call = hooks.forward

    def _find_call_on_gpu(self) -> None:
        """Find out how Warp calls CUDA for this launch, from a launch whose call is intercepted."""
        recorded = self.recorded
        places = [getattr(type(self.structure), name) for name, _ in self.structure._fields_]
        start = ctypes.addressof(self.structure)
        addresses: Any = (ctypes.c_void_p * len(places))(*(start + place.offset for place in places))

        launch = type(recorded).launch
        self.runtime = launch.__globals__["runtime"]
        calls: list[tuple[Any, ...]] = []
        core = types.SimpleNamespace(wp_cuda_launch_kernel=lambda *given: calls.append(given))
        replaced = {**launch.__globals__, "runtime": types.SimpleNamespace(core=core, captures={})}
        stream = types.SimpleNamespace(cuda_stream=object())
        types.FunctionType(launch.__code__, replaced)(recorded, stream)
        (given,) = calls
        size, packed, handle, count = CUDA_CALL
        known = len(given) == count and given[packed] is recorded.params_addr
        known = known and given[handle] is stream.cuda_stream and given[size] == recorded.bounds.size
        theirs, ours = (
            [ctypes.string_at(where[k], place.size) for k, place in enumerate(places)]
            for where in (recorded.params_addr, addresses)
        )
        if not known or theirs != ours:
            raise TypeError(f"kernel '{self.kernel.key}' gets its arguments in another form")
        # constants are converted once, and the function is called without its argument types: this halves the time
        function = self.runtime.core.wp_cuda_launch_kernel
        constants = [kind(v) if isinstance(v, int) else v for kind, v in zip(function.argtypes, given)]
        self.before = constants[:size]
        self.between = (*constants[size + 1 : packed], ctypes.cast(addresses, ctypes.c_void_p))
        self.after = constants[handle + 1 :]
        self.addresses = addresses  # they must live as long as the command
        self.bounds = {self.grid: (bytes(recorded.params[0]), ctypes.c_size_t(given[size]))}
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        self.call = ctypes.CFUNCTYPE(function.restype)(address)
        self.memory = memoryview(self.structure)

    def launch(self, grid: tuple[int, ...], arguments: list[Any], stream: wp.Stream | None) -> None:
        """Launch over ``grid``. Arguments are arrays, descriptors as bytes, and numbers."""
        if len(arguments) != len(self.parameters):
            raise TypeError(f"kernel '{self.kernel.key}' takes {len(self.parameters)} arguments, got {len(arguments)}")
        is_free = not self.in_use
        self.in_use = True
        try:
            if not is_free or self.pack is None or not self._launch_packed(grid, arguments, stream):
                self._launch_by_warp(grid, arguments, stream, is_free)
        finally:
            if is_free:
                self.in_use = False

    def _launch_packed(self, grid: tuple[int, ...], arguments: list[Any], stream: wp.Stream | None) -> bool:
        """Write all arguments at once and launch. Return False, without a launch, if Warp must do it."""
        assert self.pack is not None
        try:
            if self.on_gpu:
                bounds, size = self.bounds.get(grid) or self._bounds_of(grid)
                self.pack(self.memory, 0, bounds, *arguments)
            else:
                self.pack(self.structure, 0, *arguments)
        except (struct.error, OverflowError):
            return False  # an argument that is neither a descriptor nor a number of the right kind
        if not self.on_gpu:
            self._set_grid(grid)
            self.call(ctypes.byref(self.recorded.params[0]), ctypes.byref(self.structure))
            return True
        # Warp itself must see launches into a graph that it captures, and report launches that fail
        if self.runtime.captures:
            return False
        handle = ctypes.c_void_p((self.device.stream if stream is None else stream).cuda_stream)
        return not self.call(*self.before, size, *self.between, handle, *self.after)

    def _launch_by_warp(
        self, grid: tuple[int, ...], arguments: list[Any], stream: wp.Stream | None, is_free: bool
    ) -> None:
        for parameter, value in zip(self.parameters, arguments):
            if type(value) is int and parameter.type is wp.int32 and not -(2**31) <= value < 2**31:
                raise ValueError(f"kernel '{self.kernel.key}': `{parameter.label}` = {value} does not fit into 32 bits")
        if self.on_gpu and is_free:
            self._set_grid(grid)
            for index, value in enumerate(unpacked(arguments)):
                self.recorded.set_param_at_index(index, value)
            self.recorded.launch(stream)
            return
        wp.launch(
            self.kernel,
            grid,
            unpacked(arguments),
            device=self.device,
            stream=stream,
            record_tape=False,
            block_dim=self.block,
        )

    def _set_grid(self, grid: tuple[int, ...]) -> None:
        if self.grid != grid:
            self.recorded.set_dim(grid)
            self.grid = grid

    def _bounds_of(self, grid: tuple[int, ...]) -> tuple[bytes, ctypes.c_size_t]:
        """The first parameter for a grid, and its number of threads."""
        self._set_grid(grid)
        if len(self.bounds) >= KEPT_GRIDS:
            self.bounds.clear()
        recorded = self.recorded
        found = self.bounds[grid] = bytes(recorded.params[0]), ctypes.c_size_t(recorded.bounds.size)
        return found


CUDA_CALL = (2, 8, 9, 11)
"""Positions of the number of threads, the parameters and the stream in the arguments of Warp's function for launches on
a GPU, and the number of its arguments."""

KEPT_GRIDS = 64
"""Number of grids that each command keeps on a GPU: batches differ in size."""


def _written(value: Any) -> Any:
    """A parameter that Warp has packed, in the form that `_packer` takes."""
    return value.value if hasattr(value, "value") else bytes(value)


def _packer(structure: Any, declared_types: Sequence[Any]) -> Callable[..., None] | None:
    """A function that writes all arguments into a structure at once; None if a parameter has an unsupported type.

    It takes numbers, and bytes for arrays, and raises ``struct.error`` for anything else. A declared type of None
    means any structure.
    """
    layout, at = "=", 0
    for (name, kind), declared in zip(structure._fields_, declared_types):
        field = getattr(structure, name)
        form = f"{field.size}s" if declared is None or kind is descriptor_type() else _FORMATS.get(declared)
        if form is None:
            return None
        layout, at = f"{layout}{field.offset - at}x{form}", field.offset + field.size
    return struct.Struct(layout).pack_into
