"""Files from which dynamics and relaxations go on, on any number of ranks: `save_state` and `load_state`."""

import os
import zipfile
from collections.abc import Iterable
from os import PathLike
from typing import Any

import torch

from nvalchemiops.torch.dynamics.model import Evaluation
from nvalchemiops.torch.dynamics.relaxation_state import Record, RelaxationState
from nvalchemiops.torch.dynamics.state import State
from nvalchemiops.torch.interactions.pair.shares import must_be_same, together
from nvalchemiops.torch.runtime.memory import is_out_of_memory
from nvalchemiops.torch.systems import System

FORMAT = "nvalchemiops 1"

SIGN_OF_OLDER = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
"""The number with which files of torch's older format, which are no archives, begin."""


def save_state(
    path: str | PathLike[str], state: State | RelaxationState | System, *, per_atom: Iterable[str] = ()
) -> None:
    """Write a state of dynamics or of a relaxation, or a system, to a file for `load_state`.

    With a ``domain`` this is a collective call, and the first rank writes the state of all atoms. A file that exists is
    replaced when the new one is complete, so that an interrupt leaves one of the two.

    Parameters
    ----------
    path : path
    state : State, RelaxationState or System
        Values only, no gradients.
    per_atom : iterable of str, optional
        Names in ``state.extra`` of values that your flows keep for each atom (`Flow.per_atom`); with a
        ``domain`` they are errors otherwise.

    Raises
    ------
    TypeError
        Something else than a state or a system, such as all that `simulate` returns.
    ValueError
        Values in ``extra`` that are neither the same on all ranks nor named in ``per_atom``.
    OSError
        The file cannot be written; on other ranks `OtherRankError`.

    Examples
    --------
    >>> def every_thousand_steps(state):  # a hook of `simulate`
    ...     if int(state.step) % 1000 == 0:
    ...         save_state("run.pt", state)
    """
    if not isinstance(state, State | RelaxationState | System):
        raise TypeError(f"`state` must be a State, a RelaxationState or a System, got {type(state).__name__}")
    system = state if isinstance(state, System) else state.system
    domain = system.domain
    if isinstance(state, State):
        names = tuple(per_atom)
        rows = state.rows(names)
        with together(domain):
            must_be_same(domain, **{f"extra[{name!r}]": v for name, v in state.extra.items() if name not in rows})
        state = state.collected(names)
    elif isinstance(state, RelaxationState):
        state = state.collected()
    elif domain is not None:
        state = domain.collect(state)
    with together(domain):  # what fails on the first rank ends the others
        if domain is None or domain.rank == 0:
            _write(path, {"format": FORMAT, "state": _plain(state)})


def load_state(path: str | PathLike[str], *, device: torch.device | str | None = None) -> Any:
    """Read a state of dynamics or of a relaxation, or a system, that `save_state` wrote on any number of ranks.

    `simulate` and `relax` go on from a state as if there had been no interruption, also with noise. On ranks
    divide it first (`nvalchemiops.torch.distributed.divide`); their number may differ from that of the run before.

    Parameters
    ----------
    path : path
    device : torch.device or str, optional
        By default the device from which values were saved.

    Returns
    -------
    State, RelaxationState or System
        Of all atoms, on each rank that reads the file.

    Raises
    ------
    ValueError
        The file has another format, is not complete, or is damaged.
    """
    unfit = ValueError(f"`path`: {os.fspath(path)} has another format than {FORMAT!r}, or is not complete, or damaged")
    try:
        found = _loaded(path, device)
    except OSError:
        raise
    except Exception as error:  # torch raises errors of many types for damaged files
        if is_out_of_memory(error) or _is_whole(path):
            raise  # of the device
        raise unfit from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise unfit
    try:
        return _made(found["state"])
    except (AttributeError, KeyError, TypeError) as error:
        raise unfit from error


def _made(values: dict[str, Any]) -> State | RelaxationState | System:
    """The state or system with these values."""
    if "optimizer" in values:
        return RelaxationState(**values | {"system": System(**values["system"]), "record": Record(**values["record"])})
    if "velocities" not in values:
        return System(**values)
    return State(**values | {"system": System(**values["system"]), "evaluation": Evaluation(**values["evaluation"])})


def _plain(value: Any) -> Any:
    """Nested dictionaries of tensors without gradients, which torch loads without running code of a file."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()  # a view would be saved with all the memory that it views
    found = value._asdict() if hasattr(value, "_asdict") else value
    return {name: _plain(v) for name, v in found.items()} if isinstance(found, dict) else value


def _loaded(path: str | PathLike[str], device: torch.device | str | None) -> Any:
    """What is in the file; None if torch did not write it, or there is something else than tensors in it."""
    with open(path, "rb") as file:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                is_known = any(name.endswith("data.pkl") for name in archive.namelist())
        else:
            file.seek(0)
            is_known = SIGN_OF_OLDER in file.read(64)
    return torch.load(path, map_location=device, weights_only=True) if is_known else None


def _is_whole(path: str | PathLike[str]) -> bool:
    """Whether the file can be read to the CPU, so that an error was that of the device."""
    try:
        _loaded(path, "cpu")
    except Exception:
        return False
    return True


def _write(path: str | PathLike[str], content: Any) -> None:
    unfinished = f"{os.fspath(path)}.part"
    torch.save(content, unfinished)
    os.replace(unfinished, path)
