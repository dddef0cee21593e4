"""Utilities for JAX programs: dataclasses that are pytrees, functions of pytrees, and guards against transformations.

If JAX has such a function, the utility wraps it. With these types, decorated functions and classes keep their
signatures in a type checker.
"""

from nvalchemiops.jax.utils.arrays import isin, kahan_summation, key_chain, sequential_vmap_with_vjp
from nvalchemiops.jax.utils.dataclasses import dataclass, field, lens_field, no_post_init, skip_post_init_if_disabled
from nvalchemiops.jax.utils.transformations import (
    NotJaxCompatibleError,
    is_traced,
    jit,
    linearize,
    no_jax_tracing,
    non_differentiable,
    shard_map,
    vectorize,
)
from nvalchemiops.jax.utils.trees import (
    HasScatterArgs,
    PyTreeDef,
    ScatterArgs,
    SupportsTreeMatch,
    tree_concat,
    tree_map,
    tree_scatter_set,
    tree_stack,
    tree_structure,
    tree_where_broadcast_last,
    tree_zeros_like,
)

__all__ = [
    "HasScatterArgs",
    "NotJaxCompatibleError",
    "PyTreeDef",
    "ScatterArgs",
    "SupportsTreeMatch",
    "dataclass",
    "field",
    "is_traced",
    "isin",
    "jit",
    "kahan_summation",
    "key_chain",
    "lens_field",
    "linearize",
    "no_jax_tracing",
    "no_post_init",
    "non_differentiable",
    "sequential_vmap_with_vjp",
    "shard_map",
    "skip_post_init_if_disabled",
    "tree_concat",
    "tree_map",
    "tree_scatter_set",
    "tree_stack",
    "tree_structure",
    "tree_where_broadcast_last",
    "tree_zeros_like",
    "vectorize",
]
