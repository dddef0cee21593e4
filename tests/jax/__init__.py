"""Tests of `nvalchemiops.jax`; all of them are skipped here where JAX is missing.

A conftest.py beside this file would be imported through it, where a skip is an error: fixtures belong in the files that
use them, or in `tests/conftest.py`.
"""

import pytest

pytest.importorskip("jax", reason='no JAX: pip install "nvalchemiops[jax]"')
