"""The base class of the library's modules, and calls of modules with other parameters."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from nvalchemiops.torch.runtime.context import may_read

_ENTRY = "_extra_state"
"""Torch's name for the additional entry of a module in a state dict."""

_BLOCK = 256
"""The entry is padded to a multiple of this many bytes, so that similar modules have entries of the same size."""


@contextmanager
def with_parameters(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A context in which a module has other tensors in place of parameters, wherever it shares them.

    ``tensors`` have the names of `torch.nn.Module.named_parameters`. `torch.func.functional_call` replaces parameters
    only while it calls the module, so that `torch.utils.checkpoint` would compute again with the module's own in the
    backward pass.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    own = []
    for prefix, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            name = name if name in tensors else names[id(parameter)]  # of what it shares
            if name in tensors:
                own.append((owner._parameters, key, parameter, tensors[name]))
    try:
        for parameters, key, _, tensor in own:
            parameters[key] = tensor  # torch's own way, too
        yield
    finally:
        for parameters, key, parameter, _ in own:
            parameters[key] = parameter


def brief(value: Any) -> str:
    """The text of a parameter for ``repr``; of several systems the smallest and the largest."""
    if not isinstance(value, torch.Tensor):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    if value.is_meta:
        return "?"
    first, last = (f"{float(end):.6g}" for end in value.detach().aminmax())
    return first if first == last else f"{first} to {last}"


class ExactModule(torch.nn.Module):
    """A module that carries the parameters of a method, which are consistent only together.

    Its tensors are attributes, neither parameters nor buffers:

    - ``.to(device)`` moves them. ``.float()``, ``.half()`` and ``.to(dtype)`` leave them as they are, so that they are
      not rounded with the weights of a network. Derivatives follow the dtype of the positions.
    - ``.to("meta")`` leaves them, and ``.to_empty(...)`` moves them: `torch.func.functional_call` gives weights and
      buffers to a module without memory, but nothing would give it these.
    - ``DistributedDataParallel`` and similar wrappers do not touch them. These wrappers make the buffers of all
      processes equal, but the parameters of a method belong to the systems of one process.
    - A state dict has all of them in one entry, ``_extra_state``, a tensor with the bytes of a JSON text. Loading
      restores all of them or raises.

    A trained parameter (``module.alpha = torch.nn.Parameter(...)``) is an ordinary module parameter.
    """

    _trainable: tuple[str, ...] = ()
    """Names of tensors that may be parameters of the module, with their own entries in a state dict. In earlier
    versions they were buffers, with entries of the same form."""

    def _with(self, options: dict[str, Any], **own: Any) -> dict[str, Any]:
        """The options of a call with arguments that the module gives; raise for those that are in both."""
        for name in own:
            if name in options:
                kind, prepares = type(self).__name__, ", or by `prepare`" * hasattr(self, "prepare")
                raise TypeError(f"`{name}` is set when a {kind} is made{prepares}: leave it out of its calls")
        return own | options

    def _settings(self) -> dict[str, Any]:
        """All settings that a state dict restores: tensors, and values that JSON can hold."""
        raise NotImplementedError

    def _restored(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Attributes for these settings, all on the CPU; raises if the module cannot take them."""
        raise NotImplementedError

    # -- devices and dtypes -----------------------------------------------------------------------

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "ExactModule":
        super()._apply(fn, recurse)

        def exactly(before: torch.Tensor) -> torch.Tensor:
            now = fn(before)
            if now.is_meta:
                return before
            if before.is_meta:  # `to_empty`: NaN until a state is loaded
                return torch.full_like(before, torch.nan if before.is_floating_point() else 0, device=now.device)
            return before.to(now.device)

        self._map(exactly)
        return self

    def _move_to(self, positions: Any) -> None:
        """Move the tensors to the device of the positions. FSDP moves only parameters and buffers."""
        if not may_read() or not isinstance(positions, torch.Tensor):
            return
        device = positions.device
        if device.type == "meta":  # an error soon, after which the module must have its values
            return
        # all tensors are on one device, so one is enough: this runs in each call
        one = next((value for value in self.__dict__.values() if isinstance(value, torch.Tensor)), None)
        if one is None:  # all tensors are in tuples, or are trained parameters
            tuples = (value[0] for value in self.__dict__.values() if isinstance(value, tuple) and value)
            one = next((value for value in tuples if isinstance(value, torch.Tensor)), None)
        if one is not None and one.device != device:
            self._map(lambda tensor: tensor.to(device))

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each tensor, also inside tuples, by ``fn`` of it."""
        for name, value in list(self.__dict__.items()):
            now = _mapped(value, fn)
            if now is not value:
                self.__dict__[name] = now

    # -- state dicts ------------------------------------------------------------------------------

    def get_extra_state(self) -> torch.Tensor:
        """The entry of a state dict that holds all settings except trained parameters."""
        settings = {name: value for name, value in self._settings().items() if name not in self._parameters}
        device = next((value.device for value in settings.values() if isinstance(value, torch.Tensor)), None)
        if device is not None and device.type == "meta":
            return torch.empty(_BLOCK, dtype=torch.uint8, device=device)
        text = json.dumps({"module": _name_of(self), **{name: _plain(value) for name, value in settings.items()}})
        line = f"{zlib.crc32(text.encode()):08x} {text}"
        line += " " * (-len(line) % _BLOCK)
        return torch.tensor(list(line.encode()), dtype=torch.uint8, device="cpu").to(device or "cpu")

    def set_extra_state(self, state: Any) -> None:
        """Restore the result of `get_extra_state`."""
        attributes = state if isinstance(state, dict) else self._restored(self._trained() | self._read(state))
        places = [value.device for value in self.__dict__.values() if isinstance(value, torch.Tensor)]
        device = next((place for place in places if place.type != "meta"), torch.device("cpu"))
        for name, value in attributes.items():
            if name not in self._parameters:
                self.__dict__[name] = _mapped(value, lambda tensor: tensor.to(device))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        try:
            self._gather(state_dict, prefix)
        except (TypeError, ValueError) as error:
            # torch raises it together with the errors of other modules, whether `strict` or not
            arguments[-1].append(f"{prefix}{_ENTRY}: {error}")
        else:
            super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _gather(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Replace this module's entry of the state dict by restored attributes; raise unless the entry is complete."""
        key = prefix + _ENTRY
        loose = {name: state_dict[prefix + name] for name in self._trainable if prefix + name in state_dict}
        if key not in state_dict and not loose:
            return  # torch names what is missing
        own = self._settings()
        settings = self._read(state_dict[key]) if key in state_dict else dict(own)
        exact = {name: _exact(name, value) for name, value in loose.items()}
        others = [name for name, value in exact.items() if name in settings and not _same(value, settings[name])]
        if others:
            rest = ", ".join(name for name in own if name not in loose)
            raise ValueError(
                f"the state dict has other values for {_listed(others)}, but not the matching {rest}: an earlier "
                "version wrote it. Estimate the parameters again, or set all of them by hand"
            )
        settings |= exact
        missing = [name for name in own if name not in settings]
        if missing:
            unknown = [name for name in settings if name not in own]
            raise ValueError(f"{_listed(missing)} not in the state dict" + f", but {_listed(unknown)}" * bool(unknown))
        for name in self._trainable:
            parameter = self._parameters.get(name)
            if parameter is None:
                state_dict.pop(prefix + name, None)
                continue
            if parameter.shape != settings[name].shape:
                shapes = f"{tuple(parameter.shape)}, but {tuple(settings[name].shape)} in the state dict"
                raise ValueError(f"`{name}` has shape {shapes}")
            state_dict.setdefault(prefix + name, settings[name])
        state_dict[key] = self._restored(settings)

    def _trained(self) -> dict[str, torch.Tensor]:
        return {name: _exact(name, value) for name, value in self._parameters.items() if value is not None}

    def _read(self, state: Any) -> dict[str, Any]:
        """The settings in an entry of a state dict."""
        if not isinstance(state, torch.Tensor) or state.dtype is not torch.uint8 or state.is_meta:
            raise TypeError(f"`{_ENTRY}` must be the tensor of bytes that was saved, got {_kind(state)}")
        check, _, text = bytes(state.tolist()).decode(errors="replace").rstrip(" ").partition(" ")
        if check != f"{zlib.crc32(text.encode()):08x}":
            raise ValueError(f"`{_ENTRY}` is damaged: its checksum is wrong")
        settings = {
            name: _tensor(value) if isinstance(value, dict) else value for name, value in json.loads(text).items()
        }
        kind = settings.pop("module")
        if kind != _name_of(self):
            raise ValueError(f"the state dict is that of a module {kind}")
        return settings


def _mapped(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with ``fn`` applied to it, or to the tensors in it; the same object if nothing changes."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if not isinstance(value, tuple):
        return value
    items = [_mapped(item, fn) for item in value]
    if all(now is before for now, before in zip(items, value)):
        return value
    return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)


def _name_of(module: ExactModule) -> str:
    """The name of the module's class, or of its base class in this library."""
    return next(kind.__name__ for kind in type(module).__mro__ if "_settings" in vars(kind))


def _kind(value: Any) -> str:
    return f"{value.dtype} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__


def _plain(value: Any) -> Any:
    """The value in a form that JSON can hold. JSON keeps every digit of a float."""
    if not isinstance(value, torch.Tensor):
        return value
    return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.detach().tolist()}


def _tensor(value: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]), device="cpu")


def _exact(name: str, value: Any) -> torch.Tensor:
    """The value of an entry of a state dict, in the precision in which the module computes."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise TypeError(f"`{name}` must be a tensor with values, got {_kind(value)}")
    return value.detach().to("cpu", torch.float64)


def _same(saved: torch.Tensor, own: torch.Tensor) -> bool:
    if own.is_meta or saved.shape != own.shape:
        return False
    return torch.allclose(saved, own.detach().to(saved), rtol=1e-9, atol=0.0)


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
