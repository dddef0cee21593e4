"""Names of search methods, under the path that clients import."""

from nvalchemiops.compat.method_names import neighbor_list_strategy_run_args

__all__ = ["neighbor_list_strategy_run_args"]
