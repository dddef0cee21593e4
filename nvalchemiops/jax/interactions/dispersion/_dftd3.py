"""DFT-D3 for JAX arrays; see `nvalchemiops.torch.interactions.dispersion`."""

import functools
import hashlib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nvalchemiops.jax.operators import Shape, number_of_systems, operator, to_torch
from nvalchemiops.jax.utils import dataclass, field, is_traced
from nvalchemiops.locks import Kept
from nvalchemiops.torch.interactions import dispersion

_TABLES = ("rcov", "r4r2", "c6ab", "cn_ref", "r0ab")


@dataclass(frozen=False)
class D3Parameters:
    """Reference data of DFT-D3 for many elements, in atomic units (bohr, hartree): a pytree.

    Energies have no derivatives by these data: a request for one raises a NotImplementedError.

    Attributes
    ----------
    rcov : (n_numbers,) array, bohr
        Covalent radii times 4/3, by atomic number; entry 0 is not used.
    r4r2 : (n_numbers,) array
        ``C8 = 3 C6 r4r2_i r4r2_j``.
    c6ab : (n_numbers, n_numbers, n_references, n_references) array, hartree bohr^6
        C6 of pairs of reference molecules; 0 or less for missing pairs.
    cn_ref : (n_numbers, n_numbers, n_references, n_references) or (n_numbers, n_references) array
        Coordination number of the reference molecule of the first element.
    interp_mesh : int
        ``n_references``.
    r0ab : (n_numbers, n_numbers) array, bohr, optional
        Radii of pairs of elements, for damping to zero.
    """

    rcov: jax.Array
    r4r2: jax.Array
    c6ab: jax.Array
    cn_ref: jax.Array
    interp_mesh: int = field(default=5, static=True)
    r0ab: jax.Array | None = field(default=None, kw_only=True)

    @classmethod
    def load(cls, path: str | Path | None = None) -> "D3Parameters":
        """The published data or those of a file, as `load` of the class for torch, with the same errors."""
        tables = dispersion.D3Parameters.load(path)
        given = {name: getattr(tables, name) for name in _TABLES}
        return cls(**jax.tree.map(lambda table: jnp.asarray(table.numpy()), given), interp_mesh=tables.interp_mesh)

    @property
    def max_z(self) -> int:
        """The largest atomic number."""
        return self.rcov.shape[0] - 1


_kept: Kept[tuple[Any, dispersion.D3Parameters]] = Kept(8)
"""Tables of JAX arrays, and their torch equivalents, which are static and compared by identity: each is read once."""


def _prepare(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, with known tables replaced by static ones."""
    given = arguments.get("d3_params")
    if isinstance(given, dict):
        given = arguments["d3_params"] = D3Parameters(**given)
    if isinstance(given, D3Parameters) and not is_traced(given):
        leaves = jax.tree.leaves(given)
        key = (given.interp_mesh, *map(_key_of, leaves))
        made = _kept.get(key) or (leaves, _parameters(jax.tree.map(to_torch, given)))
        _, arguments["d3_params"] = _kept.setdefault(key, made)  # all threads get the same
        _kept.drop(len(_kept) - _kept.most)
    return arguments


def _key_of(table: Any) -> Hashable:
    """The key of tables. JAX arrays are immutable, so while they exist their identity serves in place of values."""
    if isinstance(table, jax.Array):
        return id(table)
    values = np.asarray(table)
    return values.shape, str(values.dtype), hashlib.sha256(values.tobytes()).digest()


def _parameters(tables: Any) -> dispersion.D3Parameters:
    """`D3Parameters` of these tensors, which are not copied."""
    given = {name: getattr(tables, name) for name in _TABLES}
    return dispersion.D3Parameters._of(jax.tree.map(lambda x: x.to("cpu"), given), tables.interp_mesh)


@functools.wraps(dispersion.dftd3)
def _dftd3(*, d3_params: Any = None, **arguments: Any) -> Any:
    if isinstance(d3_params, D3Parameters):
        d3_params = _parameters(d3_params)
    return dispersion.dftd3(d3_params=d3_params, **arguments)


def _shapes(positions: Any, compute_virial: bool = False, **others: Any) -> Any:
    n_systems, dtype = number_of_systems("dftd3", **others), positions.dtype
    results = [Shape((n_systems,), dtype), Shape(positions.shape, dtype), Shape(positions.shape[:1], dtype)]
    return (*results, *[Shape((n_systems, 3, 3), dtype)] * compute_virial)


_CONSTANTS = ("d3_params", "covalent_radii", "r4r2", "c6_reference", "coord_num_ref")

dftd3: Any = operator(_dftd3, _shapes, prepare=_prepare, constants=_CONSTANTS)
