"""Names of modules that are found when they are first used, and what to install for optional ones."""

import importlib
from collections.abc import Callable, Iterable
from typing import Any


def found_when_used(module: str, names: Iterable[str], find: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module, which finds the objects of these names by a function."""
    known = frozenset(names)

    def __getattr__(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        return find(name)

    return __getattr__


def loaded_when_used(package: str, names: Iterable[str]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a package, which imports the submodules of these names."""
    return found_when_used(package, names, lambda name: importlib.import_module(f"{package}.{name}"))


def installed_by(extra: str) -> str:
    """How to install the packages of an extra, for errors that say what is missing."""
    return f"pip install 'nvalchemiops[{extra}]' (in a checkout '.[{extra}]')"
