"""Names of search methods in nvalchemi-toolkit-ops: variants of the two methods that this library has."""

import re
from typing import Any

_METHODS = {"naive": "naive", "cell_list": "cell_list", "cluster_tile": "cell_list"}
"""The method by the beginning of a name, after ``batch_``."""

_NAME = re.compile(rf"(?:batch_)?({'|'.join(_METHODS)})(?:_\w+)?")


def search_method(method: Any) -> str:
    """``"naive"`` or ``"cell_list"``; `neighbor_list` says what names are taken."""
    known = _NAME.fullmatch(method) if isinstance(method, str) else None
    if known is None:
        raise ValueError(
            "`method` must be None, for the automatic choice, or begin with 'naive', 'cell_list' or 'cluster_tile', "
            f"perhaps after 'batch_'; got {method!r}"
        )
    return _METHODS[known[1]]


def neighbor_list_strategy_run_args(method: str) -> tuple[str, str, str, str]:
    """The search method of a name, and names of its variants, which are always ``"auto"`` here.

    Raises
    ------
    ValueError
        Not the name of a method.
    """
    batch = "batch_" if isinstance(method, str) and method.startswith("batch_") else ""
    return batch + search_method(method), "auto", "auto", "auto"
