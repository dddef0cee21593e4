"""Reference data of DFT-D3: coordination numbers and C6 of reference molecules, and radii of elements."""

import dataclasses
import operator
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.interactions.dispersion.coefficients import MOST_REFERENCES
from nvalchemiops.layout import layout
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.dispersion.published import from_package
from nvalchemiops.torch.runtime._torch_internals import named_in_files, outside_of_transforms
from nvalchemiops.torch.runtime.cache import KeptTensors, stream_of
from nvalchemiops.torch.runtime.context import eager, may_read, on_host

_CLOSE_CN = 1e-4
"""Largest difference of coordination numbers of one reference molecule between entries for different partners."""

_LARGEST_RATIO = 1e3
"""Largest ratio of a C6 to the geometric mean of the C6 of the two equal pairs, which is its physical bound.

If the ratio is far larger than one, the eigenvectors lose digits.
"""


@named_in_files
class ReferenceStates(NamedTuple):
    """Reference data of some elements as the kernels read them, in float64 and atomic units.

    Attributes
    ----------
    row_of_number : (n_numbers,) int64 tensor
        Row of each atomic number in the tensors below. They have two more rows than elements: row n_elements is NaN,
        for elements that are not included, and the last row is zero, for the number 0, which is padding.
    radii, z : (n_elements + 2,) tensor
        Radii for the coordination number, and square roots of r4r2.
    coordination : (n_elements + 2, n_references) tensor
        Coordination numbers of the reference molecules.
    places : (n_elements + 2, n_references) int32 tensor
        Rows of the reference molecules in ``vectors``; the last row for entries without a molecule.
    vectors : (n_states + 1, n_coefficients) tensor
        ``C6(a, b) = Σ_q ± v_aq v_bq``, see `nvalchemiops.interactions.dispersion.formulas`; the last row is zero.
        For tables that do not factorise in this way, there are no columns, and ``pair_c6`` and ``pair_coordination``
        are given instead.
    pair_radii : (n_elements + 2, n_elements + 2) tensor or None
        Radii of pairs of elements, for zero damping and three-body energies.
    n_positive : int
        Number of coefficients with a plus; they come first.
    elements : tuple of int
        Atomic numbers.
    pair_c6, pair_coordination : (n_elements + 2, n_elements + 2, n_references, n_references) tensor or None
        ``c6ab`` and ``cn_ref`` of these elements, if they do not factorise.
    """

    row_of_number: torch.Tensor
    radii: torch.Tensor
    z: torch.Tensor
    coordination: torch.Tensor
    places: torch.Tensor
    vectors: torch.Tensor
    pair_radii: torch.Tensor | None
    n_positive: int
    elements: tuple[int, ...]
    pair_c6: torch.Tensor | None = None
    pair_coordination: torch.Tensor | None = None

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """The row of each atom, int64.

        Raises
        ------
        ValueError
            An element is not included. If values cannot be read, its energies become NaN instead.
        """
        last = self.row_of_number.shape[0] - 1
        known = torch.where(numbers < 0, last, numbers.clamp(max=last))
        row = self.row_of_number.index_select(0, known.to(torch.int64))
        if may_read(numbers):
            unknown = on_host(row) == len(self.elements)
            if unknown.any():
                absent = np.unique(on_host(numbers)[unknown]).tolist()
                there = ", ".join(map(str, self.elements))
                raise ValueError(f"`numbers` holds the elements {absent}; the parameters are for {there}")
        return row

    def to(self, device: torch.device | str) -> "ReferenceStates":
        """The same states on another device."""
        moved: Any = [v.to(device) if isinstance(v, torch.Tensor) else v for v in self]
        return ReferenceStates(*moved)


MOST_STATES = 32
"""Number of prepared `ReferenceStates` that are kept: for many elements, preparing them takes a second."""

_prepared: KeptTensors[ReferenceStates] = KeptTensors(MOST_STATES)
"""Prepared states. The key contains the values of the tables, because callers may change the tables in place."""


@dataclasses.dataclass(eq=False, repr=False)
class D3Parameters:
    """Reference data of DFT-D3 for many elements, in atomic units (bohr, hartree).

    Any tables are accepted. If ``c6ab`` is symmetric and the reference molecules of an element are independent of its
    partner, as in the published data, C6 factorises, which makes energies fast (`docs/dispersion.md`). Other tables are
    interpolated for each pair of atoms, which is about a hundred times slower. They have the same derivatives, but no
    three-body energy.

    Parameters
    ----------
    rcov : (n_numbers,) tensor, bohr
        Covalent radii times 4/3, by atomic number; entry 0 is not used.
    r4r2 : (n_numbers,) tensor
        Square roots of the ratio of the expectation values of r^4 and r^2, scaled as for D3: C8 = 3 C6 r4r2_i r4r2_j.
    c6ab : (n_numbers, n_numbers, n_references, n_references) tensor, hartree bohr^6
        ``c6ab[Z_i, Z_j, a, b]`` is the C6 of reference molecule a of the first element and reference molecule b of the
        second; 0 or less if there is none. If the table is not symmetric, the energy of two atoms is the mean of both
        orders.
    cn_ref : (n_numbers, n_numbers, n_references, n_references) or (n_numbers, n_references) tensor
        Coordination number ``cn_ref[Z_i, Z_j, a, b]`` of reference molecule a of the first element; that of b is
        ``cn_ref[Z_j, Z_i, b, a]``.
    interp_mesh : int, optional
        ``n_references``, against which the shapes are checked.
    r0ab : (n_numbers, n_numbers) tensor, bohr, optional
        Radii of pairs of elements, which zero damping and three-body energies need.

        The tables are copied with their dtype and device. States are prepared from them in float64.

    Raises
    ------
    ValueError, TypeError
        A table has a wrong shape, or is not a tensor of floats.
    """

    rcov: torch.Tensor
    r4r2: torch.Tensor
    c6ab: torch.Tensor
    cn_ref: torch.Tensor
    interp_mesh: int = 5
    r0ab: torch.Tensor | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._check()
        with torch.inference_mode(False):
            for name, value in self._given().items():
                setattr(self, name, value.detach().clone())  # the caller may change the given tensors

    @classmethod
    def _of(cls, tables: Mapping[str, Any], interp_mesh: int) -> "D3Parameters":
        """Parameters with these tables, which are not copied; for a single call."""
        found = cls.__new__(cls)
        found.__dict__.update(tables, interp_mesh=interp_mesh)
        found._check()
        return found

    def _check(self) -> None:
        given = self._given()
        for name, value in given.items():
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                raise TypeError(f"`{name}` must be a tensor of floats, got {getattr(value, 'dtype', type(value))}")
        n, mesh = self.rcov.shape[0] if self.rcov.ndim else 0, self.interp_mesh
        tables: tuple[tuple[int, ...], ...] = ((n, n, mesh, mesh), (n, mesh))
        shapes = {"rcov": ((n,),), "r4r2": ((n,),), "c6ab": tables[:1], "cn_ref": tables, "r0ab": ((n, n),)}
        for name, value in given.items():
            if tuple(value.shape) not in shapes[name]:
                expected = " or ".join(map(str, shapes[name]))
                raise ValueError(
                    f"`{name}` must have shape {expected} for n_numbers = {n} as in `rcov` and `interp_mesh` = {mesh}, "
                    f"got {tuple(value.shape)}"
                )

    def _given(self) -> dict[str, Any]:
        names = ("rcov", "r4r2", "c6ab", "cn_ref", "r0ab")
        return {name: getattr(self, name) for name in names if name != "r0ab" or self.r0ab is not None}

    def to(
        self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None, **options: Any
    ) -> "D3Parameters":
        """The same tables on another device or, rounded, with another dtype.

        Parameters
        ----------
        device : torch.device or str, optional
            Or the dtype, as in `torch.Tensor.to`.
        dtype : torch.dtype, optional
        **options
            Other options of `torch.Tensor.to`.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        moved = {name: value.to(device=device, dtype=dtype, **options) for name, value in self._given().items()}
        return D3Parameters(**moved, interp_mesh=self.interp_mesh)

    @property
    def device(self) -> torch.device:
        """Device of the tables. Atoms may be on another device; the states of their elements are copied to it once."""
        return self.c6ab.device

    @property
    def max_z(self) -> int:
        """The largest atomic number in the tables."""
        return self.rcov.shape[0] - 1

    @classmethod
    def load(cls, path: str | Path | None = None) -> "D3Parameters":
        """The published data, from the package ``tad-dftd3`` (extra ``dispersion``) or from a file.

        Parameters
        ----------
        path : str or Path, optional
            A ``.npz`` or ``.pt`` file with the entries ``rcov``, ``r4r2`` (or ``r2r4``), ``c6ab``, ``cn_ref`` and,
            optionally, ``r0ab``, in the units of this class. ``cn_ref`` may be left out if ``c6ab`` has a last axis of
            length three, with C6 and both coordination numbers, as in many programs.

        Raises
        ------
        ImportError
            No path is given, and the package is not installed.
        ValueError
            The file lacks an entry, or its name has another ending.
        """
        read = from_package if path is None else partial(_from_file, Path(path))
        with torch.device("cpu"):  # independent of the default device
            try:
                found = read()
            except NotImplementedError:  # of tracers, which cannot read files: another thread has no modes of torch
                with ThreadPoolExecutor(1) as thread:
                    found = thread.submit(read).result()
            return cls(**found)

    @property
    def has_reference(self) -> torch.Tensor:
        """Which reference molecules exist (n_numbers, n_references), bool: those with a C6 with themselves."""
        return self.c6ab.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1) > 0.0

    @property
    def elements(self) -> tuple[int, ...]:
        """Atomic numbers of the elements that have reference molecules."""
        there = (self.c6ab[1:, 1:] > 0.0).flatten(2).any(2)
        return tuple(((there.any(0) | there.any(1)).nonzero().squeeze(1) + 1).tolist())

    def states(self, elements: Sequence[int], device: torch.device | str = "cpu") -> ReferenceStates:
        """Prepare the reference data of some elements; the result can be given in place of these parameters.

        Inside ``torch.compile`` prepared states are required, and on a GPU they are faster: otherwise the atomic
        numbers are copied to the host in order to find the elements.

        Parameters
        ----------
        elements : sequence of int
            Atomic numbers.
        device : torch.device or str, optional

        Raises
        ------
        ValueError
            An element has no reference molecules, or ``elements`` is empty.
        TypeError
            ``elements`` are not integers.
        """
        try:
            named = sorted({operator.index(number) for number in elements})
        except TypeError:
            raise TypeError(f"`elements` must be atomic numbers, got {elements!r}") from None
        place = torch.device(device)
        if place.type == "cuda" and place.index is None:  # the current one, which may be another one later
            place = torch.device("cuda", torch.cuda.current_device())
        found = self._states(tuple(named), place)
        with torch.inference_mode(False):  # a copy, which the caller may change
            copied: Any = [part.clone() if isinstance(part, torch.Tensor) else part for part in found]
            return ReferenceStates(*copied)

    @eager
    def _states(self, elements: tuple[int, ...], device: torch.device) -> ReferenceStates:
        """The same as `states`, but shared between calls: callers must not change the result.

        Elements must be sorted.
        """
        key: Any = None
        if elements and elements[0] > 0 and elements[-1] <= self.max_z:
            key = (elements, self.max_z, self.interp_mesh, device, stream_of(device), *self._contents(elements))
            if (kept := _prepared.find(key)) is not None:
                return kept
        if not elements:
            raise ValueError("`elements` is empty: give the atomic numbers that may occur")
        missing = sorted(set(elements) - set(self.elements))
        if missing:
            raise ValueError(f"`numbers`: there are no D3 parameters for the elements {missing}")
        # kept for any later call, so not made of tensors that belong to a transform or to inference mode
        with outside_of_transforms(), torch.inference_mode(False), torch.no_grad():
            found = self._find_states(elements).to(device)
        # an element without C6 with any of these is known only from the rest of the table, which is not in the key
        if (_entries(self.c6ab, np.array(elements), True) > 0.0).any((1, 2, 3)).all():
            _prepared.keep(key, found)
        return found

    def _contents(self, elements: tuple[int, ...]) -> tuple[Hashable, ...]:
        """All values of the tables for these elements, copied to the host."""
        index = np.array(elements)
        tables = (self.rcov, self.r4r2, self.c6ab, self.cn_ref, self.r0ab)
        of_pairs = (False, False, True, self.cn_ref.ndim == 4, True)
        return tuple([t if t is None else (t.dtype, _entries(t, index, p).tobytes()) for t, p in zip(tables, of_pairs)])

    def _find_states(self, elements: tuple[int, ...]) -> ReferenceStates:
        numbers = torch.tensor(elements, dtype=torch.int64, device="cpu")
        n_elements = len(elements)
        known = {name: value.to("cpu")[numbers].to(torch.float64) for name, value in self._given().items()}
        c6, counts = known["c6ab"][:, numbers], known["cn_ref"]
        counts = counts[:, None, :, None].expand_as(c6) if counts.ndim == 2 else counts[:, numbers]
        there = c6 > 0.0
        counts = counts.where(there | there.permute(1, 0, 3, 2), 0.0)
        for name, value in (("c6ab", c6), ("cn_ref", counts)):
            if not bool(value.isfinite().all()):
                raise ValueError(
                    f"`{name}` has entries that are NaN or infinite among those of the elements {elements}"
                )
        filled = there.sum((0, 1))
        filled = (filled.sum(0) + filled.sum(1)).nonzero()
        mesh = int(filled[-1]) + 1 if len(filled) else 1
        c6, counts = c6[..., :mesh, :mesh], counts[..., :mesh, :mesh]
        rows = torch.full((self.rcov.shape[0] + 1,), n_elements, device="cpu")
        rows[numbers] = torch.arange(n_elements, device="cpu")
        rows[0] = n_elements + 1
        pair_radii = None
        if "r0ab" in known:
            pair_radii = torch.nn.functional.pad(known["r0ab"][:, numbers], (0, 2, 0, 2), value=1.0)
        factors = _factors(c6, counts)
        by_pair: tuple[torch.Tensor, ...] = ()
        if factors is None:
            factors = c6.new_zeros(n_elements, 0), c6.new_zeros(0, dtype=torch.bool), c6.new_zeros(0, 0), 0
            by_pair = tuple(torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 2, 0, 2)) for t in (c6, counts))
        coordination, is_there, vectors, n_positive = factors
        molecules = is_there.nonzero().squeeze(1)
        n_places = (n_elements + 2) * coordination.shape[1]
        places = torch.full((n_places,), len(molecules), dtype=torch.int32, device="cpu")
        places[molecules] = torch.arange(len(molecules), dtype=torch.int32, device="cpu")
        return ReferenceStates(
            rows,
            _padded(known["rcov"]),
            _padded(known["r4r2"].sqrt()),
            _padded(coordination),
            places.view(n_elements + 2, -1),
            torch.nn.functional.pad(vectors, (0, 0, 0, 1)),
            pair_radii,
            n_positive,
            elements,
            *by_pair,
        )


def _entries(table: torch.Tensor, index: np.ndarray, of_pairs: bool) -> np.ndarray:
    """Entries of a table for these elements, or for their pairs, copied to the host."""
    if table.dtype in checks.FLOATS and layout(table.device.type).reads:
        values = on_host(table)
        return values[index[:, None], index] if of_pairs else values[index]
    rows = torch.as_tensor(index, device=table.device)
    entries = table.detach()[rows[:, None], rows] if of_pairs else table.detach()[rows]
    return on_host(entries.to("cpu", torch.float64))


def _factors(c6: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int] | None:
    """Vectors with ``C6(a, b) = Σ_q ± v_aq v_bq``, or None if C6 does not factorise in this way.

    The arguments are C6 and coordination numbers, each (n_elements, n_elements, n_references, n_references). Returned
    are coordination numbers (n_elements, n_references) of the reference molecules, 0 where there is none; which of them
    exist (n_elements * n_references,); the vectors (n_states, n_coefficients) of these; and the number of coefficients
    with a plus, which come first.
    """
    n_elements, mesh = c6.shape[0], c6.shape[2]
    own, of_element = (t.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1) for t in (c6, counts))
    has_reference = own > 0.0
    there = c6 > 0.0
    is_product = torch.equal(there, has_reference[:, None, :, None] & has_reference[None, :, None, :])
    apart = (counts - of_element[:, None, :, None]).abs().where(there, 0.0)
    if not is_product or not bool(has_reference.any(1).all()) or bool((apart > _CLOSE_CN).any()):
        return None
    if mesh > MOST_REFERENCES or not torch.allclose(c6, c6.permute(1, 0, 3, 2), rtol=1e-5, atol=0.0):
        return None
    is_there = has_reference.flatten()
    table = c6.permute(0, 2, 1, 3).reshape(2 * (n_elements * mesh,))[is_there][:, is_there]
    # scaled to ones on the diagonal, so that small coefficients are as precise as large ones
    scale = table.diagonal().sqrt()
    scaled = table / (scale.unsqueeze(1) * scale)
    if not bool((scaled < _LARGEST_RATIO).all()):
        return None
    values, vectors = torch.linalg.eigh(scaled)
    order = torch.argsort(values, descending=True)
    values, vectors = values[order], vectors[:, order] * scale.unsqueeze(1)
    coordination = of_element.where(has_reference, 0.0)
    return coordination, is_there, vectors * values.abs().sqrt(), int((values > 0.0).sum())


def _padded(of_element: torch.Tensor) -> torch.Tensor:
    """The table with a row of NaN and a row of zeros appended."""
    last = of_element.new_zeros(2, *of_element.shape[1:])
    last[0] = torch.nan
    return torch.cat([of_element, last])


def tables_of(given: Any) -> dict[str, Any]:
    """The tables of another package's parameters, from a dict or from attributes."""
    names = ("rcov", "r4r2", "c6ab", "cn_ref")
    found = dict(given) if isinstance(given, Mapping) else {n: getattr(given, n) for n in names if hasattr(given, n)}
    missing = [name for name in names if name not in found]
    if missing:
        raise TypeError(
            "`d3_params` must be D3Parameters, ReferenceStates, or an object with the entries or attributes rcov, "
            f"r4r2, c6ab and cn_ref; got {type(given).__name__} without {', '.join(missing)}"
        )
    return {name: found[name] for name in names}


def given_or_published(parameters: Any) -> D3Parameters:
    """The given parameters, or those of `D3Parameters.load` if None."""
    if parameters is None:
        return D3Parameters.load()
    if not isinstance(parameters, D3Parameters):
        raise TypeError(f"`parameters` must be D3Parameters, got {type(parameters).__name__}")
    return parameters


def _from_file(path: Path) -> dict[str, Any]:
    if path.suffix == ".npz":
        with np.load(path) as file:
            found = {name: torch.from_numpy(file[name]) for name in file.files}
    elif path.suffix == ".pt":
        found = torch.load(path, weights_only=True, map_location="cpu")
    else:
        raise ValueError(f"`path` must end in .npz or .pt, got '{path.name}'")
    if "r2r4" in found:
        found.setdefault("r4r2", found["r2r4"])
    table = found.get("c6ab")
    if table is not None and table.ndim == 5 and table.shape[-1] == 3:
        found |= {"c6ab": table[..., 0], "cn_ref": table[..., 1]}
    missing = [name for name in ("rcov", "r4r2", "c6ab", "cn_ref") if name not in found]
    if missing:
        raise ValueError(f"`path`: '{path.name}' lacks {', '.join(missing)}; it holds {', '.join(found) or 'nothing'}")
    kept = {name: found[name] for name in ("rcov", "r4r2", "c6ab", "cn_ref", "r0ab") if name in found}
    return kept | {"interp_mesh": kept["c6ab"].shape[-1]}
