"""JAX with 64 bits, as most users of molecular simulation set it, and quick compilation. Test files import these.

It is no conftest.py: that would be imported before `tests.jax` can skip where JAX is missing.
"""

import jax
import pytest


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""For compilation; what runs is tiny."""
