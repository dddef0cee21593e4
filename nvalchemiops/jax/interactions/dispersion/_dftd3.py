"""DFT-D3 for JAX arrays; see `nvalchemiops.torch.interactions.dispersion`."""

import functools
import hashlib
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import numpy as np

from nvalchemiops.jax.operators import Shape, number_of_systems, operator, to_torch
from nvalchemiops.jax.utils import dataclass, field, is_traced
from nvalchemiops.locks import Kept
from nvalchemiops.torch.interactions import dispersion

_TABLES = ("rcov", "r4r2", "c6ab", "cn_ref")

_PARTS = ("covalent_radii", "r4r2", "c6_reference", "coord_num_ref")
"""The same as arguments."""


@dataclass(frozen=False)
class D3Parameters:
    """Reference data of DFT-D3 for many elements, in atomic units (bohr, hartree): a pytree.

    Energies have no derivatives by them: to ask for one is a NotImplementedError.

    Attributes
    ----------
    rcov : (n_numbers,) array, bohr
        Covalent radii times 4/3, by atomic number; entry 0 is not used.
    r4r2 : (n_numbers,) array
        ``C8 = 3 C6 r4r2_i r4r2_j``.
    c6ab : (n_numbers, n_numbers, n_references, n_references) array, hartree bohr^6
        C6 of pairs of reference molecules; 0 or less where there is none.
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

    @property
    def max_z(self) -> int:
        """The largest atomic number."""
        return self.rcov.shape[0] - 1


class _Tables:
    """Tables of torch as a static argument: compared by identity, since they are made once for the same arrays."""

    def __init__(self, parameters: dispersion.D3Parameters) -> None:
        self.parameters = parameters


KEPT_TABLES = 8
"""Sets of tables that are kept: to prepare them takes a second."""

_kept: Kept[tuple[Any, _Tables]] = Kept(KEPT_TABLES)


def _keep(key: Hashable, source: Any, make: Callable[[], dispersion.D3Parameters]) -> _Tables:
    found = _kept.get(key)
    if found is None:
        made = source, _Tables(make())
        found = _kept.setdefault(key, made)  # all threads get the same
        _kept.drop(len(_kept) - KEPT_TABLES)
    return found[1]


def _prepare(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with tables that are known as static ones."""
    given = arguments.get("d3_params")
    if isinstance(given, dict):
        given = arguments["d3_params"] = D3Parameters(**given)
    if isinstance(given, D3Parameters):
        leaves = jax.tree.leaves(given)
        if not is_traced(given):
            # JAX arrays are immutable, so they are as good a key as their values, as long as they exist
            of_jax = all(isinstance(leaf, jax.Array) for leaf in leaves)
            key = (*map(id, leaves),) if of_jax else _contents(map(np.asarray, leaves))
            arguments["d3_params"] = _keep(
                (*key, given.interp_mesh), leaves, lambda: _parameters(jax.tree.map(to_torch, given))
            )
    return arguments


def _contents(tables: Iterable[np.ndarray]) -> tuple[Hashable, ...]:
    """A key for the values of tables."""
    arrays = [np.ascontiguousarray(x) for x in tables]
    return (hashlib.sha256(b"".join(x.tobytes() for x in arrays)).digest(), *((x.shape, str(x.dtype)) for x in arrays))


def _parameters(tables: Any) -> dispersion.D3Parameters:
    names = (*_TABLES, "interp_mesh")
    return dispersion.D3Parameters(*(getattr(tables, name) for name in names), r0ab=tables.r0ab).to("cpu")


@functools.wraps(dispersion.dftd3)
def _dftd3(*, d3_params: Any = None, **arguments: Any) -> Any:
    if isinstance(d3_params, D3Parameters):
        d3_params = _parameters(d3_params)
    elif isinstance(d3_params, _Tables):
        d3_params = d3_params.parameters
    return dispersion.dftd3(d3_params=d3_params, **arguments)


def _shapes(positions: Any, compute_virial: bool = False, **others: Any) -> Any:
    n_systems, dtype = number_of_systems("dftd3", **others), positions.dtype
    results = [Shape((n_systems,), dtype), Shape(positions.shape, dtype), Shape(positions.shape[:1], dtype)]
    return (*results, *[Shape((n_systems, 3, 3), dtype)] * compute_virial)


dftd3: Any = operator(_dftd3, _shapes, prepare=_prepare, constants=("d3_params", *_PARTS))
