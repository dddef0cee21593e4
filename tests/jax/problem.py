"""A system of charged atoms with its neighbors, and tables of D3, for tests of operators in JAX."""

import jax
import jax.numpy as jnp
import torch

from nvalchemiops.jax.interactions import dispersion
from nvalchemiops.torch.interactions import dispersion as torch_dispersion
from tests.support.systems import csr, triclinic

SYSTEM = triclinic(6, charged=True)
NEAR = csr(SYSTEM, 3.5)
TABLES = torch_dispersion.D3Parameters.load()
NUMBERS = torch.tensor([6, 8, 6, 8, 8, 6], dtype=torch.int32)


def to_jax(values):
    return jax.tree.map(lambda t: jnp.asarray(t.numpy()) if isinstance(t, torch.Tensor) else t, values)


D3_TABLES = ("rcov", "r4r2", "c6ab", "cn_ref")

with jax.enable_x64(True):
    JAX_TABLES = dispersion.D3Parameters(*(to_jax(getattr(TABLES, name)) for name in D3_TABLES), TABLES.interp_mesh)
