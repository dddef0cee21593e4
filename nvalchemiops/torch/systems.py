"""Objects for atoms, neighbors and results: interactions take them in place of many tensor arguments.

>>> from nvalchemiops.torch.interactions.electrostatics import ParticleMeshEwald
>>> system = System(positions, charges, cell)
>>> neighbors = system.neighbors(9.0)
>>> result = ParticleMeshEwald(accuracy=1e-6)(system, neighbors, compute_forces=True)
>>> result.forces.shape
torch.Size([8, 3])

An interaction object (`EwaldSummation`, `ParticleMeshEwald`, `DFTD3`, `PairPotential`) takes a `System` in place of its
first arguments. It takes `Neighbors` too, or builds them. Its results have named fields, and unpack in their order.
"""

import itertools
import reprlib
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from nvalchemiops.arguments import check_positive
from nvalchemiops.torch.batching import joined_neighbors, joined_systems
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.operators.lattice import volumes_of
from nvalchemiops.torch.runtime._torch_internals import named_in_files
from nvalchemiops.torch.runtime.context import may_read
from nvalchemiops.torch.runtime.recorder import read_number
from nvalchemiops.torch.runtime.releases import Class, replaceable
from nvalchemiops.torch.types import Pbc

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain


def printed_in_short(named_tuple: Class) -> Class:
    """Let a class of named tuples print on one line what is given: of tensors the dtype and shape, not the values."""
    named_tuple.__repr__ = _in_short  # type: ignore[assignment]  # mypy expects a method, with a self of this class
    return named_tuple


def _in_short(value: Any) -> str:
    """The text of a named tuple, with the device of its tensors at the end."""
    parts = [f"{name}={_told(part)}" for name, part in value._asdict().items() if part is not None]
    devices = [part.device for part in value if isinstance(part, torch.Tensor)]
    parts += [f"device={device}" for device in devices[:1]]
    return f"{type(value).__name__}({', '.join(parts)})"


def _told(part: Any) -> str:
    if hasattr(part, "dtype") and hasattr(part, "shape") and not isinstance(part, np.generic):  # an array of JAX, too
        return f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape)}"
    if isinstance(part, dict):
        return f"{{{', '.join(f'{key!r}: {_told(value)}' for key, value in part.items())}}}"
    return reprlib.repr(part) if isinstance(part, list) else repr(part)  # of many steps the first ones


@replaceable
@printed_in_short
@named_in_files
class System(NamedTuple):
    """Atoms of one system or of a batch of systems.

    Attributes
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
        Atoms may lie outside the cell.
    charges : (n_atoms,) or (n_atoms, n_channels) tensor, charge, optional
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
        Rows are lattice vectors. Without a cell there is no periodicity.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom. By default there is one system.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        Whether the system is periodic along each lattice vector. By default along all. Bools, or 0 and 1, may also be
        given as a sequence, or as one for all.
    numbers : (n_atoms,) int tensor, optional
        Atomic numbers.
    domain : Domain, optional
        The division among ranks. The atoms are then those that this rank owns (`nvalchemiops.torch.distributed`).
    dipoles : (n_atoms, 3) or (n_atoms, n_channels, 3) tensor, charge length, optional
    quadrupoles : (n_atoms, 3, 3) or (n_atoms, n_channels, 3, 3) tensor, charge length², optional
    widths : float or (n_atoms,) tensor, length, optional
        Dipoles, quadrupoles and widths are as for `nvalchemiops.torch.interactions.electrostatics.ewald_summation`.

    Notes
    -----
    `nvalchemiops.torch.dynamics.save_state` and ``load_state`` write and read it. ``torch.save`` writes an object of
    this class, which ``torch.load`` reads where this library has been imported; ``torch.save(system._asdict(), ...)``
    needs no import.
    """

    positions: torch.Tensor
    charges: torch.Tensor | None = None
    cell: torch.Tensor | None = None
    batch_idx: torch.Tensor | None = None
    pbc: Pbc | None = None
    numbers: torch.Tensor | None = None
    domain: "Domain | None" = None
    dipoles: torch.Tensor | None = None
    quadrupoles: torch.Tensor | None = None
    widths: float | torch.Tensor | None = None

    @classmethod
    def from_ase(
        cls,
        atoms: Any,
        charges: Any = None,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
    ) -> "System":
        """The system of an ``ase.Atoms``, or the batch of a sequence of them, also of one.

        Parameters
        ----------
        atoms : ase.Atoms or sequence of ase.Atoms
        charges : mapping from element to float, sequence of float, or tensor (n_atoms,), optional
            By element, as ``{"Na": 1.0, "Cl": -1.0}``, or of all atoms, structure by structure, in one sequence or in
            one for each structure. By default the initial charges of the atoms, unless all are zero and a structure has
            none. Those of a file may all be zero, as in data of LAMMPS whose input sets charges.
        dtype : torch.dtype, optional
        device : torch.device or str, optional

        Returns
        -------
        System
            Lengths are in angstrom. ``cell`` and ``pbc`` are None if no system is periodic; a ``pbc`` remains if the
            last of several systems has no atoms. Constraints and velocities of the atoms are left out: they are
            arguments of relaxations and runs.
        """
        is_batch = not hasattr(atoms, "positions")
        systems = list(atoms) if is_batch else [atoms]
        if not systems:
            raise ValueError("`atoms` holds no system")
        for one in systems:
            if not hasattr(one, "get_initial_charges"):
                raise TypeError(f"`atoms` must be ase.Atoms, or a sequence of them, got {type(one).__name__}")

        if not isinstance(dtype, torch.dtype | None) and dtype is not float:  # to torch, float is float64
            raise TypeError(f"`dtype` must be a torch.dtype, such as torch.float32, got {dtype!r}")

        # made on a CPU, whatever the default device is
        place = torch.get_default_device() if device is None else torch.device(device)

        def joined(arrays: Sequence[Any], kind: torch.dtype, on: Any = place) -> torch.Tensor:
            return torch.cat([torch.as_tensor(array, dtype=kind, device="cpu") for array in arrays]).to(on)

        if charges is None:
            initial = joined([a.get_initial_charges() for a in systems], dtype, "cpu")
            told = ["initial_charges" in getattr(a, "arrays", ()) for a in systems if len(a)]
            found = initial.to(place) if bool(initial.any()) or (any(told) and all(told)) else None
        elif isinstance(charges, Mapping):
            from nvalchemiops.ase.elements import atom_values  # imports ASE

            found = joined(list(map(atom_values("charges", charges), systems)), dtype)
        else:
            n_atoms, sizes = sum(map(len, systems)), list(map(len, systems))
            by_structure = isinstance(charges, list | tuple) and len(charges) == len(systems)
            by_structure = by_structure and all(hasattr(one, "__len__") and np.ndim(one) for one in charges)
            if by_structure and (n_atoms != len(systems) or len(set(sizes)) > 1):  # else those of atoms, in channels
                rows = [torch.as_tensor(one, dtype=dtype, device=device) for one in charges]
                if (found_sizes := list(map(len, rows))) != sizes:
                    raise ValueError(f"`charges` must be those of structures of {sizes} atoms, got {found_sizes}")
                found = torch.cat(rows)
            else:
                found = torch.as_tensor(charges, dtype=dtype, device=device)
            if found.shape[:1] != (n_atoms,):
                raise ValueError(f"`charges` must have shape (n_atoms,) = ({n_atoms},), got {tuple(found.shape)}")
        cell = pbc = batch_idx = None
        if any(a.pbc.any() for a in systems):
            cell = joined([a.cell.array[None] for a in systems], dtype)
            pbc = joined([a.pbc[None] for a in systems], torch.bool)
        elif is_batch and not len(systems[-1]):  # `batch_idx` does not tell how many systems there are
            pbc = torch.zeros((len(systems), 3), dtype=torch.bool, device=place)
        if is_batch:
            batch_idx = joined([np.full(len(a), number) for number, a in enumerate(systems)], torch.int32)
        elif cell is not None and pbc is not None:
            cell, pbc = cell[0], pbc[0]
        numbers = joined([a.numbers for a in systems], torch.int32)
        return cls(joined([a.positions for a in systems], dtype), found, cell, batch_idx, pbc, numbers)

    @classmethod
    def concatenate(cls, systems: Iterable["System"]) -> "System":
        """One batch of several systems, for example in the ``collate_fn`` of a ``DataLoader``.

        Parameters
        ----------
        systems : iterable of System
            Systems or batches, of any sizes; crystals, slabs and molecules.

        Returns
        -------
        System
            With ``batch_idx``, and all values with gradients. If some systems have a cell, those without get one of
            zeros with ``pbc`` False, which means no periodicity; ``pbc`` is there if a system needs it.

        Raises
        ------
        ValueError, TypeError
            There is no system, or something else; charges, numbers or other values of atoms are given for some systems
            only, or have other shapes; ``batch_idx`` holds a system that does not exist; a system has a ``domain``.

        Examples
        --------
        >>> batch = System.concatenate([System(positions, cell=cell), System(positions[:2])])
        >>> batch.batch_idx.tolist(), batch.pbc[:, 0].tolist()
        ([0, 0, 0, 0, 0, 0, 0, 0, 1, 1], [True, False])
        """
        return cls(**joined_systems(several("systems", systems, System)))

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> "System":
        """The system on another device, or with real numbers of another dtype; gradients flow through it.

        Parameters
        ----------
        device : torch.device or str, optional
            Or the dtype, as for tensors.
        dtype : torch.dtype, optional
            float32 or float64.

        Raises
        ------
        ValueError, TypeError
            The system has a ``domain``, which stays where its ranks are; the values are no tensors; or the dtype is not
            that of real numbers.
        """
        if self.domain is not None:
            raise ValueError("`to` of a system with a `domain`: move the whole system, then divide it")
        return _moved(self, device, dtype)

    @property
    def n_atoms(self) -> int:
        """The number of atoms, those that this rank owns. ``len(system)`` is the number of fields, as of any tuple."""
        return self.positions.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the positions, and of charges and cells beside them."""
        return self.positions.dtype

    @property
    def device(self) -> torch.device:
        """The device of the positions, and of charges and cells beside them."""
        return self.positions.device

    @property
    def volume(self) -> torch.Tensor:
        """Volume of the cell, or volumes (n_systems,) of the cells. The stress is ``-virial / volume``."""
        if self.cell is None:
            raise ValueError("a system without `cell` has no volume")
        return volumes_of(self.cell)

    def neighbors(self, cutoff: float, *, as_matrix: bool = False, half: bool = False) -> "Neighbors":
        """All pairs of atoms closer than ``cutoff``; see `nvalchemiops.torch.neighbors.neighbor_list`.

        Lattice sums of slabs need images along the open axis, too, if the vacuum is narrower than the cutoff: for them
        search with three periodic axes.

        Parameters
        ----------
        cutoff : float, length
        as_matrix : bool, optional
            Whether to return a matrix instead of a list of pairs.
        half : bool, optional
            Whether to list each pair only once.

        Raises
        ------
        ValueError
            The system has a ``domain``: interactions find its neighbors themselves, networks by a `Graph`.
        """
        if self.domain is not None:
            raise ValueError(
                "`neighbors` of a system with a `domain` are also atoms of other ranks: interactions find them without "
                "a list; for a network of your own make a nvalchemiops.torch.Graph"
            )
        found = neighbor_list(
            self.positions,
            cutoff,
            self.cell,
            self.pbc,
            self.batch_idx,
            half_fill=half,
            return_neighbor_list=not as_matrix,
        )
        shifts = found[2] if len(found) > 2 else None
        if as_matrix:
            return Neighbors.from_matrix(found[0], shifts, counts=found[1], cutoff=cutoff, half=half)
        return Neighbors.from_list(found[0], shifts, row_pointers=found[1], cutoff=cutoff, half=half)


def several(name: str, values: Iterable[Any], kind: type) -> list[Any]:
    """The values of an iterable, at least one; raise unless all are of this kind."""
    found = list(values)
    if not found:
        raise ValueError(f"`{name}` holds no {kind.__name__}")
    for value in found:
        if not isinstance(value, kind):
            hint = ": give a list of several" if isinstance(values, kind) else ""
            raise TypeError(f"`{name}` must hold {kind.__name__} objects, got {type(value).__name__}{hint}")
    return found


def _moved(value: Any, device: Any, dtype: torch.dtype | None) -> Any:
    """A `System` or `Neighbors` whose tensors are elsewhere; see `System.to`."""
    device, dtype = (None, device) if isinstance(device, torch.dtype) else (device, dtype)
    if dtype not in (None, torch.float32, torch.float64):
        raise TypeError(f"`dtype` must be float32 or float64, got {dtype}")
    moved: dict[str, Any] = {}
    for name, entry in zip(value._fields, value):
        if isinstance(entry, torch.Tensor):
            moved[name] = entry.to(device=device, dtype=dtype if entry.is_floating_point() else None)
        elif hasattr(entry, "shape") and name != "pbc":  # which may be a host array
            raise TypeError(f"`{name}` is no torch tensor, but a {type(entry).__name__}: use jax.device_put for JAX")
    return value._replace(**moved)


PER_ATOM = ("positions", "charges", "numbers", "dipoles", "quadrupoles", "widths")
"""Values of a `System` that have a row for each atom, except for widths that are the same for all."""


def of_each_atom(system: System, function: Callable[[torch.Tensor], torch.Tensor]) -> System:
    """The system with the results of ``function`` for all values that have a row for each atom."""
    given = {name: getattr(system, name) for name in PER_ATOM}
    changed: Any = {name: function(value) for name, value in given.items() if has_rows(value)}
    return system._replace(**changed)


def has_rows(value: Any) -> bool:
    """Whether a value of a system has a row for each atom."""
    return isinstance(value, torch.Tensor) and value.ndim > 0


@replaceable
@printed_in_short
@named_in_files
class Neighbors(NamedTuple):
    """Neighbors of all atoms, as pairs or as a matrix: from `System.neighbors`, `from_list` or `from_matrix`.

    Attributes
    ----------
    pairs : (2, n_pairs) int tensor, or None
        Sorted by the first atom.
    row_pointers : (n_atoms + 1,) int32 tensor, or None
        Index of the first pair of each atom, then n_pairs.
    matrix : (n_atoms, width) int tensor, or None
    shifts : (n_pairs, 3) or (n_atoms, width, 3) int tensor, or None
        Images of the second atoms, in lattice vectors: ``r_ij = r_j - r_i + shift @ cell``. `System.neighbors` gives
        None if the system has no ``cell``, alone and in a batch.
    padding : int or None
        The value of matrix entries without a neighbor. By default n_atoms.
    cutoff : float or None, length
        The neighbors contain all pairs closer than this.
    half : bool
        Whether each pair is listed only once.
    """

    pairs: torch.Tensor | None = None
    row_pointers: torch.Tensor | None = None
    matrix: torch.Tensor | None = None
    shifts: torch.Tensor | None = None
    padding: int | None = None
    cutoff: float | None = None
    half: bool = False

    @classmethod
    def from_list(
        cls,
        pairs: torch.Tensor,
        shifts: torch.Tensor | None = None,
        *,
        row_pointers: torch.Tensor | None = None,
        cutoff: float | None = None,
        half: bool = False,
    ) -> "Neighbors":
        """Neighbors from a list of pairs. Shapes are as for the attributes."""
        return cls(pairs, row_pointers, None, shifts, None, cutoff, half)

    @classmethod
    def from_matrix(
        cls,
        matrix: torch.Tensor,
        shifts: torch.Tensor | None = None,
        *,
        padding: int | None = None,
        counts: torch.Tensor | None = None,
        cutoff: float | None = None,
        half: bool = False,
    ) -> "Neighbors":
        """Neighbors from a matrix. Shapes are as for the attributes.

        ``counts`` (n_atoms,) are the true numbers of neighbors: a matrix with fewer columns raises an error.
        """
        if counts is not None and may_read(counts) and counts.numel():
            most = read_number(counts.max())
            if most > matrix.shape[1]:
                raise ValueError(f"`matrix` has {matrix.shape[1]} columns, but an atom has {most} neighbors")
        return cls(None, None, matrix, shifts, padding, cutoff, half)

    @classmethod
    def concatenate(cls, neighbors: Iterable["Neighbors"], systems: Iterable[System]) -> "Neighbors":
        """The neighbors in one batch of several systems, from those of each system.

        Parameters
        ----------
        neighbors : iterable of Neighbors
            All of them pairs or all matrices, which may differ in width and padding.
        systems : iterable of System
            The system of each, as for `System.concatenate`.

        Returns
        -------
        Neighbors
            The cutoff is the smallest one, or None if one is None.

        Raises
        ------
        ValueError, TypeError
            There are no neighbors, or something else; their number is not that of the systems; they have different
            formats, or are half lists in part; they do not fit the atoms of their system, or lack shifts.

        Examples
        --------
        >>> systems = [System(positions, cell=cell), System(positions[:2])]
        >>> near = Neighbors.concatenate([system.neighbors(3.0) for system in systems], systems)
        >>> torch.equal(near.pairs, System.concatenate(systems).neighbors(3.0).pairs)
        True
        """
        return cls(**joined_neighbors(several("neighbors", neighbors, Neighbors), several("systems", systems, System)))

    def to(self, device: torch.device | str | None = None) -> "Neighbors":
        """The neighbors on another device."""
        return _moved(self, device, None)

    def given(self) -> GivenNeighbors:
        """The neighbors as arguments of a function that takes tensors one by one."""
        shifts = (self.shifts, None) if self.matrix is None else (None, self.shifts)
        return GivenNeighbors(self.pairs, self.row_pointers, shifts[0], self.matrix, shifts[1], self.padding, self.half)


# -- calls ----------------------------------------------------------------------------------------


_OF_SYSTEM = ("batch_idx", "pbc")
_OF_NEIGHBORS = ("neighbor_list", "neighbor_ptr", "neighbor_shifts", "neighbor_matrix", "neighbor_matrix_shifts")


BESIDE_TENSORS = "`neighbors` go with a System; with tensors give `neighbor_list` or `neighbor_matrix`"
"""Message of the error if `Neighbors` are given in a call with tensors."""


def names_beside(padding: str) -> tuple[str, ...]:
    """Names of the arguments that a system and its neighbors replace, in the order of `GivenNeighbors`.

    ``padding`` is the function's name for the padding of a matrix.
    """
    return (*_OF_SYSTEM, *_OF_NEIGHBORS, padding, "half_list")


def neighbors_beside(given: Sequence[Any], tensors: Mapping[str, Any], cutoff: float | None = None) -> Neighbors:
    """The neighbors that a caller gave with a `System`, by position or by name; empty neighbors if none were given.

    ``tensors`` are arguments of calls with tensors, which must be None or False. Raises for neighbors that have another
    type, are given twice, are empty, or do not reach to the ``cutoff``.
    """
    for name, value in tensors.items():
        if value is not None and value is not False:
            raise TypeError(f"`{name}` goes with tensors; with a System it is part of the system or its neighbors")
    found = [value for value in given if value is not None]
    if not found:
        return Neighbors()
    for value in found:
        if not isinstance(value, Neighbors):
            raise TypeError(f"with a System an interaction takes Neighbors, got {type(value).__name__}")
    if len(found) > 1:
        raise TypeError("`neighbors` are given twice")
    (near,) = found
    if (near.pairs is None) == (near.matrix is None):
        raise ValueError("`neighbors` must have either pairs or a matrix")
    if cutoff is not None and near.cutoff is not None and check_positive("cutoff", near.cutoff) < cutoff:
        raise ValueError(f"`neighbors` reach to {near.cutoff}, but the cutoff of this interaction is {cutoff}")
    return near


def long_arguments(
    system: System,
    neighbors: Sequence[Any],
    options: Mapping[str, Any],
    *,
    needed: Sequence[str],
    padding: str,
    reach: str = "",
    cutoff: float | None = None,
) -> dict[str, Any]:
    """Arguments of a function that takes tensors one by one, from a system, its neighbors and ``options``.

    Neighbors and cutoff are as for `neighbors_beside`, which raises the same errors, and ``padding`` as for
    `names_beside`. The system must have the attributes that are ``needed``; ``reach`` is the function's name for the
    reach of the neighbors, if it has such an argument.
    """
    if "compute_stress" in options:
        raise TypeError("`compute_stress`: the stress is -virial / system.volume, give compute_virial=True")
    names = names_beside(padding)
    near = neighbors_beside(neighbors, {name: options.get(name) for name in names}, cutoff)
    for name in needed:
        if getattr(system, name) is None:
            raise ValueError(f"`{name}` of the system is needed for this interaction")
    found: dict[str, Any] = dict(zip(names, (system.batch_idx, system.pbc, *near.given())))
    if reach and near.cutoff is not None:
        found[reach] = near.cutoff
    if system.domain is not None:
        found["domain"] = system.domain
    return found | {name: value for name, value in options.items() if name not in names}


# -- results --------------------------------------------------------------------------------------


class Results(Protocol):
    """Results with named fields. Only requested results are present; they unpack as a tuple in this order.

    Attributes
    ----------
    energies : (n_atoms,) or (n_systems,) tensor
        With charge channels (n_atoms, n_channels) or (n_systems, n_channels).
    forces : (n_atoms, 3) tensor
    charge_gradients, dipole_gradients, quadrupole_gradients : tensors like the charges, dipoles and quadrupoles
    coordination_numbers : (n_atoms,) tensor
        From D3.
    gradients : dict from names of parameters to tensors
        From pair potentials.
    virial : (n_systems, 3, 3) tensor
        ``-dE/dstrain``; the stress is ``-virial / volume``.
    """

    energies: torch.Tensor
    forces: torch.Tensor
    charge_gradients: torch.Tensor
    dipole_gradients: torch.Tensor
    quadrupole_gradients: torch.Tensor
    coordination_numbers: torch.Tensor
    gradients: dict[str, torch.Tensor]
    virial: torch.Tensor

    def __iter__(self) -> Iterator[Any]: ...


_OPTIONAL = (
    ("forces", "charge_gradients", "coordination_numbers", "gradients", "virial"),
    ("forces", "charge_gradients", "dipole_gradients", "quadrupole_gradients", "virial"),
)


def _missing(results: Any, name: str) -> Any:
    """The error for a result that was not requested, or that there is not."""
    reason = f"the results are {', '.join(results._fields)}"
    if name in Results.__annotations__ and name != "coordination_numbers":
        reason += f"; pass `compute_{name}`"
    raise AttributeError(f"no `{name}`: {reason}", name=name, obj=results)


# all types are created here, since compiled code cannot create a type
_TYPES: dict[tuple[str, ...], Any] = {
    names: namedtuple("_".join(["Results", *names]), names, module=__name__)
    for optional in _OPTIONAL
    for count in range(len(optional) + 1)
    for names in (("energies", *chosen) for chosen in itertools.combinations(optional, count))
}
for _type in _TYPES.values():
    named_in_files(_type).__getattr__ = _missing
globals().update({kind.__name__: kind for kind in _TYPES.values()})  # pickle looks for them here


def named(names: Sequence[str], values: Any) -> Results:
    """The return value of a function, a tensor or a tuple, with named fields."""
    return _TYPES[tuple(names)](*(values if isinstance(values, tuple) else (values,)))
