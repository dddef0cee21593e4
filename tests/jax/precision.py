"""JAX with 64 bits, as most users of molecular simulation set it. Test files import the fixture.

It is no conftest.py: that would be imported before `tests.jax` can skip where JAX is missing.
"""

import jax
import pytest


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield
