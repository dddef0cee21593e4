"""Tests of `nvalchemiops.jax`; all of them are skipped here where JAX is missing."""

import pytest

pytest.importorskip("jax", reason='no JAX: pip install "nvalchemiops[jax]"')
