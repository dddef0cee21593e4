"""`System` and `Neighbors` of JAX arrays: pytrees, with the fields of those of `nvalchemiops.torch.systems`."""

from collections.abc import Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch

from nvalchemiops.jax.dtypes import torch_dtype
from nvalchemiops.jax.neighbors import NeighborListState, neighbor_list
from nvalchemiops.jax.operators import as_number, from_torch_values, to_torch
from nvalchemiops.jax.utils import is_traced
from nvalchemiops.torch.systems import Neighbors as TorchNeighbors
from nvalchemiops.torch.systems import System as TorchSystem
from nvalchemiops.torch.systems import several

_System: Any = TorchSystem  # to a type checker its fields would be tensors
_Neighbors: Any = TorchNeighbors


class System(_System):
    """Atoms of one system or of a batch: a pytree of arrays, of which those that are None are no leaves.

    Fields are those of `nvalchemiops.torch.systems.System`. A function that `from_torch` wraps gets it with tensors.

    Examples
    --------
    >>> atom = System(jnp.zeros((1, 3)), cell=2.0 * jnp.eye(3))
    >>> float(jax.jit(lambda system: system.volume)(atom))
    8.0
    """

    __slots__ = ()

    @classmethod
    def from_ase(cls, atoms: Any, charges: Any = None, *, dtype: Any = float, **others: Any) -> "System":
        """The system of an ``ase.Atoms``, or a batch of several; see `nvalchemiops.torch.systems.System.from_ase`.

        ``dtype`` is by default the widest of JAX: float64 with ``jax_enable_x64``, else float32.
        """
        kind = torch_dtype(jax.dtypes.canonicalize_dtype(dtype))
        found: System = from_torch_values(super().from_ase(atoms, to_torch(charges), dtype=kind, **others))
        return found

    @classmethod
    def concatenate(cls, systems: Iterable[TorchSystem]) -> "System":
        """One batch of several systems, outside of ``jit``; see `nvalchemiops.torch.systems.System.concatenate`."""
        given = [TorchSystem(*fields) for fields in _on_host("systems", systems, TorchSystem)]
        return cls(*from_torch_values(tuple(super().concatenate(given))))

    @property
    def volume(self) -> Any:
        """Volume of the cell, or volumes (n_systems,) of the cells."""
        cell = self.cell
        if cell is None or isinstance(cell, torch.Tensor):
            return super().volume
        return jnp.abs(jnp.sum(cell[..., 0, :] * jnp.cross(cell[..., 1, :], cell[..., 2, :]), axis=-1))

    def neighbors(self, cutoff: float, *, as_matrix: bool = False, half: bool = False) -> "Neighbors":
        """All pairs of atoms closer than ``cutoff``, outside of ``jit``.

        Raises
        ------
        TypeError
            Under ``jit``, where `nvalchemiops.jax.neighbors.prepare_neighbor_list` declares sizes, and the state says
            whether all neighbors fit.
        """
        if is_traced((tuple(self), cutoff)):
            raise TypeError(
                "the number of neighbors is not known under jit: use prepare_neighbor_list, which sizes it, and "
                "Neighbors.from_state"
            )
        cutoff = as_number("`cutoff`", cutoff)  # static in the result
        given = (cutoff, self.cell, self.pbc, self.batch_idx)
        found = neighbor_list(self.positions, *given, half_fill=half, return_neighbor_list=not as_matrix)
        shifts = found[2] if len(found) > 2 else None
        if as_matrix:
            return Neighbors(matrix=found[0], shifts=shifts, cutoff=cutoff, half=half)
        return Neighbors(pairs=found[0], row_pointers=found[1], shifts=shifts, cutoff=cutoff, half=half)


class Neighbors(_Neighbors):
    """Neighbors of all atoms: a pytree, in which ``padding``, ``cutoff`` and ``half`` are static.

    Fields are those of `nvalchemiops.torch.systems.Neighbors`.
    """

    __slots__ = ()

    @classmethod
    def from_list(cls, pairs: Any, shifts: Any = None, *, cutoff: Any = None, **others: Any) -> "Neighbors":
        """Neighbors from a list of pairs; see `nvalchemiops.torch.systems.Neighbors.from_list`."""
        return cast(Neighbors, super().from_list(pairs, shifts, cutoff=as_number("`cutoff`", cutoff), **others))

    @classmethod
    def from_matrix(
        cls,
        matrix: Any,
        shifts: Any = None,
        *,
        padding: Any = None,
        counts: Any = None,
        cutoff: Any = None,
        **others: Any,
    ) -> "Neighbors":
        """Neighbors from a matrix; see `nvalchemiops.torch.systems.Neighbors.from_matrix`.

        Under ``jit``, where ``counts`` have no values yet, they are not compared with the columns.
        """
        given = {"padding": as_number("`padding`", padding), "cutoff": as_number("`cutoff`", cutoff), **others}
        if not is_traced(counts):
            # JAX would trace a list of numbers that becomes an array under jit
            given["counts"] = to_torch(np.asarray(counts) if isinstance(counts, (list, tuple)) else counts)
        return cast(Neighbors, super().from_matrix(matrix, shifts, **given))

    @classmethod
    def concatenate(cls, neighbors: Iterable[TorchNeighbors], systems: Iterable[TorchSystem]) -> "Neighbors":
        """The neighbors in one batch of several systems; see `nvalchemiops.torch.systems.Neighbors.concatenate`."""
        given = [TorchNeighbors(*fields) for fields in _on_host("neighbors", neighbors, TorchNeighbors)]
        beside = [TorchSystem(*fields) for fields in _on_host("systems", systems, TorchSystem)]
        return cls(*from_torch_values(tuple(super().concatenate(given, beside))))

    @classmethod
    def from_state(cls, state: NeighborListState) -> "Neighbors":
        """The neighbors of a state with one cutoff, which still says whether all of them fit."""
        if state.cutoff2 is not None:
            raise ValueError("`state` has two lists: make Neighbors of one of them")
        shifts = state.lists[0][2] if state.has_shifts else None
        given = {"shifts": shifts, "cutoff": state.cutoff, "half": state.half_fill}
        if state.return_neighbor_list:
            return cls(state.lists[0][0], state.lists[0][1], **given)
        return cls(matrix=state.lists[0][0], padding=state.fill_value, **given)


def _on_host(what: str, values: Iterable[Any], kind: type) -> list[tuple[Any, ...]]:
    """The fields of systems or neighbors as tensors."""
    given = [tuple(value) for value in several(what, values, kind)]
    if is_traced(given):
        raise TypeError(f"`{what}` are traced: make one batch outside of jit and grad")
    return [tuple(map(to_torch, value)) for value in given]


_STATIC = TorchNeighbors._fields.index("padding")
"""Index of the first field that is static."""


def _flattened(near: Neighbors) -> tuple[list[Any], tuple[Any, ...]]:
    names = (jax.tree_util.GetAttrKey(name) for name in near._fields)
    return list(zip(names, near[:_STATIC])), near[_STATIC:]


jax.tree_util.register_pytree_with_keys(
    Neighbors, _flattened, lambda static, arrays: Neighbors(*arrays, *static), lambda near: (near[:4], near[4:])
)
