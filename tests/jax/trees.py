"""Pytrees for tests, and whether two are the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from nvalchemiops.jax.utils import dataclass, field


@dataclass
class Molecule:
    """Two fields of arrays, and a static one."""

    positions: Array
    charge: Any = 0.0
    name: str = field(default="molecule", static=True)


def molecules(n: int = 2) -> list[Molecule]:
    return [Molecule(jnp.arange(6.0).reshape(2, 3) + i, jnp.float32(i)) for i in range(n)]


def same(a, b) -> bool:
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) and jnp.result_type(x) == jnp.result_type(y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )
