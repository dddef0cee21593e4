"""Names of search methods in another implementation: variants of two ideas, of which the idea alone matters here."""

import re
from typing import Any

_IDEAS = {"naive": "naive", "cell_list": "cell_list", "cluster_tile": "cell_list"}
"""The idea by the beginning of a name, after ``batch_``."""

_NAME = re.compile(rf"(?:batch_)?({'|'.join(_IDEAS)})(?:_\w+)?")


def idea_of(method: Any) -> str:
    """``"naive"`` or ``"cell_list"``; `neighbor_list` says what names are taken."""
    known = _NAME.fullmatch(method) if isinstance(method, str) else None
    if known is None:
        raise ValueError(
            "`method` must be None, for the automatic choice, or begin with 'naive', 'cell_list' or 'cluster_tile', "
            f"perhaps after 'batch_'; got {method!r}"
        )
    return _IDEAS[known[1]]
