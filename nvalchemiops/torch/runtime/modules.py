"""Base class of the modules of this library."""

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvalchemiops.torch.runtime.context import may_read

_ENTRY = "_extra_state"
"""Torch's name for the additional entry of a module in a state dict."""

_BLOCK = 256
"""The entry is padded to a multiple of this many bytes, so that similar modules have entries of one size."""


class ExactModule(torch.nn.Module):
    """A module that carries the parameters of a method. They are consistent only together.

    Its tensors are attributes, neither parameters nor buffers:

    - ``.to(device)`` moves them. ``.float()``, ``.half()`` and ``.to(dtype)`` leave them as they are, so that they are
      not rounded with the weights of a network. Results follow the dtype of the positions.
    - ``DistributedDataParallel`` and its like do not touch them. They make the buffers of all processes equal, but
      parameters of a method belong to the systems of a process.
    - A state dict has all of them in one entry, ``_extra_state``, a tensor of bytes that are JSON. Loading takes all or
      raises.

    A parameter that is trained (``module.alpha = torch.nn.Parameter(...)``) is one like those of other modules.
    """

    _trainable: tuple[str, ...] = ()
    """Tensors that may be parameters of the module, and then have entries in a state dict. They were buffers once,
    whose entries looked the same."""

    def _settings(self) -> dict[str, Any]:
        """All that a state dict restores: tensors, and what JSON can hold."""
        raise NotImplementedError

    def _restored(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Values of attributes for these settings, all on the CPU; raise if the module cannot have them."""
        raise NotImplementedError

    # -- devices and dtypes -----------------------------------------------------------------------

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "ExactModule":
        super()._apply(fn, recurse)

        def exactly(before: torch.Tensor) -> torch.Tensor:
            now = fn(before)
            if before.is_meta and not now.is_meta:  # `to_empty`: NaN until a state is loaded
                return torch.full_like(before, torch.nan if before.is_floating_point() else 0, device=now.device)
            return now if now.dtype is before.dtype else before.to(now.device)

        self._map(exactly)
        return self

    def _move_to(self, positions: Any) -> None:
        """To where the positions are. FSDP moves parameters and buffers alone."""
        if not may_read() or not isinstance(positions, torch.Tensor):
            return
        device = positions.device
        # all are on one device; checked in each call
        one = next((value for value in self.__dict__.values() if isinstance(value, torch.Tensor)), None)
        if one is None:  # they are all in tuples, or trained
            tuples = (value[0] for value in self.__dict__.values() if isinstance(value, tuple) and value)
            one = next((value for value in tuples if isinstance(value, torch.Tensor)), None)
        if one is not None and one.device != device:
            self._map(lambda tensor: tensor.to(device))

    def _map(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put results of ``fn`` in the place of all tensors, in tuples as well."""
        for name, value in list(self.__dict__.items()):
            now = _mapped(value, fn)
            if now is not value:
                self.__dict__[name] = now

    # -- state dicts ------------------------------------------------------------------------------

    def get_extra_state(self) -> torch.Tensor:
        """The entry of a state dict for all but parameters that are trained."""
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
            # torch raises it with those of other modules, whether `strict` or not
            arguments[-1].append(f"{prefix}{_ENTRY}: {error}")
        else:
            super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _gather(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Put attributes in the place of what the state dict has for this module; raise unless all of it is there."""
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
                f"the state dict has other values for {_listed(others)}, but not what belongs to them ({rest}): it is "
                "that of an earlier version. Estimate parameters again, or set by hand all that belong together"
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
            raise ValueError(f"`{_ENTRY}` is damaged: its check sum is wrong")
        settings = {
            name: _tensor(value) if isinstance(value, dict) else value for name, value in json.loads(text).items()
        }
        kind = settings.pop("module")
        if kind != _name_of(self):
            raise ValueError(f"the state dict is that of a module {kind}")
        return settings


def _mapped(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The result of ``fn`` for a tensor, or for those in a tuple; the same object if nothing in it changes."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if not isinstance(value, tuple):
        return value
    items = [_mapped(item, fn) for item in value]
    if all(now is before for now, before in zip(items, value)):
        return value
    return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)


def _name_of(module: ExactModule) -> str:
    """The class of this library that a module is of."""
    return next(kind.__name__ for kind in type(module).__mro__ if "_settings" in vars(kind))


def _kind(value: Any) -> str:
    return f"{value.dtype} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__


def _plain(value: Any) -> Any:
    """For JSON, which keeps every digit of a float."""
    if not isinstance(value, torch.Tensor):
        return value
    return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.detach().tolist()}


def _tensor(value: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(value["values"], dtype=getattr(torch, value["dtype"]), device="cpu")


def _exact(name: str, value: Any) -> torch.Tensor:
    """The value of an entry in a state dict, as the module computes with it."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise TypeError(f"`{name}` must be a tensor with values, got {_kind(value)}")
    return value.detach().to("cpu", torch.float64)


def _same(saved: torch.Tensor, own: torch.Tensor) -> bool:
    if own.is_meta or saved.shape != own.shape:
        return False
    return torch.allclose(saved, own.detach().to(saved), rtol=1e-9, atol=0.0)


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
