"""JAX with 64 bits, as most users of molecular simulation set it; tests of 32 bits switch it off themselves."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _double_precision():
    with jax.enable_x64(True):
        yield
