"""Submodules that are imported when they are first used, as attributes of their package."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any


def loaded_when_used(package: str, names: Iterable[str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package, which imports the submodules of these names."""
    known = frozenset(names)

    def __getattr__(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return importlib.import_module(f"{package}.{name}")

    return __getattr__
