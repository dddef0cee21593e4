"""Reference data of DFT-D3: coordination numbers and C6 of reference molecules, and radii of elements."""

import importlib
import operator
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.interactions.dispersion.coefficients import MOST_REFERENCES
from nvalchemiops.torch.neighbors import checks

_TABLE_BOHR = 0.5291772109044924
"""Bohr in angstrom, h/(2 pi m_e c alpha) of CODATA 2018, as s-dftd3 converts radii; the eleventh digit can be seen."""


class ReferenceStates(NamedTuple):
    """What the kernels need of some elements, in float64 and atomic units.

    Attributes
    ----------
    row_of_number : (n_numbers,) int64 tensor
        Row of each atomic number in the tensors below. The last but one row is NaN, for elements that are not here, and
        the last one zero, for the number 0: no atom, but padding.
    radii, z : (n_elements + 2,) tensor
        Radii in the coordination number, and roots of r4r2.
    coordination : (n_elements + 2, n_references) tensor
        Coordination numbers of the reference molecules.
    places : (n_elements + 2, n_references) int32 tensor
        Rows of the reference molecules among the vectors; the last one for entries that hold none.
    vectors : (n_states + 1, n_coefficients) tensor
        ``C6(a, b) = Σ_q ± v_aq v_bq``, see `nvalchemiops.interactions.dispersion.formulas`; the last row is zero.
    pair_radii : (n_elements + 2, n_elements + 2) tensor or None
        Radii of pairs of elements, for damping to zero.
    n_positive : int
        Coefficients that count positively; they come first.
    elements : tuple of int
        Atomic numbers.
    serial : str
        Another for other values, in any process.
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
    serial: str

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """The row of each atom, int64.

        Raises
        ------
        ValueError
            An element is not here, if the values can be looked at; otherwise its energies become NaN.
        """
        last = self.row_of_number.shape[0] - 1
        known = torch.where(numbers < 0, last, numbers.clamp(max=last))
        row = self.row_of_number.index_select(0, known.to(torch.int64))
        if not checks.unread(numbers):
            unknown = checks.plain(row) == len(self.elements)
            if bool(unknown.any()):
                absent = checks.plain(numbers)[unknown].unique().tolist()
                there = ", ".join(map(str, self.elements))
                raise ValueError(f"`numbers` holds the elements {absent}; the parameters are for {there}")
        return row

    def to(self, device: torch.device | str) -> "ReferenceStates":
        """The same on another device."""
        moved: Any = [v.to(device) if isinstance(v, torch.Tensor) else v for v in self]
        return ReferenceStates(*moved)


class D3Parameters:
    """Reference data of DFT-D3 for many elements, in atomic units (bohr, hartree).

    Parameters
    ----------
    rcov : (n_numbers,) tensor, bohr
        Covalent radii times 4/3, by atomic number; entry 0 is not used.
    r4r2 : (n_numbers,) tensor
        Roots of the ratio of the expectation values of r^4 and r^2, as tabulated for D3: C8 = 3 C6 r4r2_i r4r2_j.
    c6ab : (n_numbers, n_numbers, n_references, n_references) tensor, hartree bohr^6
        C6 of pairs of reference molecules; 0 where there is none.
    cn_ref : (n_numbers, n_numbers, n_references, n_references) or (n_numbers, n_references) tensor
        Coordination number of the reference molecule of the first element.
    interp_mesh : int, optional
        ``n_references``; checked.
    r0ab : (n_numbers, n_numbers) tensor, bohr, optional
        Radii of pairs of elements, which damping to zero needs.

    Raises
    ------
    ValueError, TypeError
        Shapes do not fit; `c6ab` is not symmetric; `cn_ref` of an element depends on its partner.
    """

    def __init__(
        self,
        rcov: torch.Tensor,
        r4r2: torch.Tensor,
        c6ab: torch.Tensor,
        cn_ref: torch.Tensor,
        interp_mesh: int = 5,
        *,
        r0ab: torch.Tensor | None = None,
    ) -> None:
        given = {"rcov": rcov, "r4r2": r4r2, "c6ab": c6ab, "cn_ref": cn_ref}
        given |= {} if r0ab is None else {"r0ab": r0ab}
        for name, value in given.items():
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                raise TypeError(f"`{name}` must be a tensor of floats, got {getattr(value, 'dtype', type(value))}")
        n, mesh = rcov.shape[0] if rcov.ndim else 0, interp_mesh
        tables: tuple[tuple[int, ...], ...] = ((n, n, mesh, mesh), (n, mesh))
        shapes = {"rcov": ((n,),), "r4r2": ((n,),), "c6ab": tables[:1], "cn_ref": tables, "r0ab": ((n, n),)}
        for name, value in given.items():
            if tuple(value.shape) not in shapes[name]:
                expected = " or ".join(map(str, shapes[name]))
                raise ValueError(
                    f"`{name}` must have shape {expected} for n_numbers = {n} as in `rcov` and `interp_mesh` = {mesh}, "
                    f"got {tuple(value.shape)}"
                )
        with torch.no_grad():
            # copies, which the caller's tensors may change without
            kept = {name: value.detach().to("cpu", torch.float64, copy=True) for name, value in given.items()}
        self.rcov, self.r4r2, self.c6ab = kept["rcov"], kept["r4r2"], kept["c6ab"]
        self.r0ab = kept.get("r0ab")
        if not torch.allclose(self.c6ab, self.c6ab.permute(1, 0, 3, 2), rtol=1e-5, atol=0.0):
            raise ValueError("`c6ab` must be symmetric: c6ab[i, j, a, b] = c6ab[j, i, b, a]")
        self.has_reference = self.c6ab.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1) > 0.0
        self.cn_ref = _by_element(kept["cn_ref"], self.c6ab, self.has_reference)
        self._states: dict[tuple[tuple[int, ...], torch.device], ReferenceStates] = {}
        self.token = object()

    def __getstate__(self) -> dict[str, Any]:
        # a copy may be changed: it finds states of its own
        return {name: value for name, value in self.__dict__.items() if name not in ("_states", "token")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._states, self.token = {}, object()

    @classmethod
    def load(cls, path: str | Path | None = None) -> "D3Parameters":
        """The published data: from a file, or from the package ``tad-dftd3`` (extra ``dispersion``).

        Parameters
        ----------
        path : str or Path, optional
            A ``.npz`` or ``.pt`` file with the entries ``rcov``, ``r4r2`` (or ``r2r4``) and ``c6ab``, and ``cn_ref``
            unless ``c6ab`` has a last dimension of three: C6 and both coordination numbers, as many programs keep it;
            perhaps ``r0ab``. In the units of this class.

        Raises
        ------
        ImportError
            Without a path, if the package is missing.
        ValueError
            The file lacks an entry, or has another ending.
        """
        with torch.device("cpu"):  # whatever the default is
            return cls(**(_from_package() if path is None else _from_file(Path(path))))

    @property
    def elements(self) -> tuple[int, ...]:
        """Atomic numbers for which there are reference molecules."""
        return tuple(self.has_reference.any(1).nonzero().squeeze(1).tolist())

    def states(self, elements: Sequence[int], device: torch.device | str = "cpu") -> ReferenceStates:
        """What is needed of some elements. Prepared once, it can be given in the place of these parameters.

        Inside ``torch.compile`` it must be, and on a GPU it should be: otherwise atomic numbers are read back.

        Parameters
        ----------
        elements : sequence of int
            Atomic numbers.
        device : torch.device or str, optional

        Raises
        ------
        ValueError
            There are no reference molecules for an element, or no elements.
        TypeError
            `elements` are no integers.
        """
        try:
            named = sorted({operator.index(number) for number in elements})
        except TypeError:
            raise TypeError(f"`elements` must be atomic numbers, got {elements!r}") from None
        key = tuple(named), torch.device(device)
        if key not in self._states:
            if not key[0]:
                raise ValueError("`elements` is empty; name those that may occur")
            missing = sorted(set(key[0]) - set(self.elements))
            if missing:
                raise ValueError(f"`numbers`: there are no D3 parameters for the elements {missing}")
            with torch.inference_mode(False), torch.no_grad():
                self._states[key] = self._find_states(key[0]).to(device)
        return self._states[key]

    def _find_states(self, elements: tuple[int, ...]) -> ReferenceStates:
        numbers = torch.tensor(elements, dtype=torch.int64, device="cpu")
        n_elements = len(elements)
        has_reference = self.has_reference[numbers]
        filled = has_reference.any(0).nonzero()
        mesh = int(filled[-1]) + 1 if len(filled) else 0
        if mesh > MOST_REFERENCES:
            raise ValueError(f"`c6ab` has {mesh} reference molecules for an element; {MOST_REFERENCES} are possible")
        has_reference = has_reference[:, :mesh]
        there = has_reference.flatten().nonzero().squeeze(1)
        table = self.c6ab[numbers][:, numbers, :mesh, :mesh].permute(0, 2, 1, 3).reshape(2 * (n_elements * mesh,))
        table = table[there][:, there]
        # scaled to ones on the diagonal, so that small coefficients are as precise as large ones
        scale = table.diagonal().sqrt()
        values, vectors = torch.linalg.eigh(table / (scale.unsqueeze(1) * scale))
        order = torch.argsort(values, descending=True)
        values, vectors = values[order], vectors[:, order] * scale.unsqueeze(1)
        places = torch.full(((n_elements + 2) * mesh,), len(there), dtype=torch.int32, device="cpu")
        places[there] = torch.arange(len(there), dtype=torch.int32, device="cpu")
        rows = torch.full((self.rcov.shape[0] + 1,), n_elements, device="cpu")
        rows[numbers] = torch.arange(n_elements, device="cpu")
        rows[0] = n_elements + 1
        pair_radii = None
        if self.r0ab is not None:
            pair_radii = torch.nn.functional.pad(self.r0ab[numbers][:, numbers], (0, 2, 0, 2), value=1.0)
        return ReferenceStates(
            rows,
            _padded(self.rcov[numbers]),
            _padded(self.r4r2[numbers].sqrt()),
            _padded(self.cn_ref[numbers, :mesh]),
            places.view(-1, mesh),
            torch.nn.functional.pad(vectors * values.abs().sqrt(), (0, 0, 0, 1)),
            pair_radii,
            int((values > 0.0).sum()),
            elements,
            uuid.uuid4().hex,
        )


def _padded(of_element: torch.Tensor) -> torch.Tensor:
    """With a row of NaN and one of zeros."""
    last = of_element.new_zeros(2, *of_element.shape[1:])
    last[0] = torch.nan
    return torch.cat([of_element, last])


def _by_element(cn_ref: torch.Tensor, c6ab: torch.Tensor, has_reference: torch.Tensor) -> torch.Tensor:
    """Coordination numbers (n_numbers, n_references), 0 where there is no reference molecule."""
    if cn_ref.ndim == 4:
        of_element = cn_ref.diagonal(dim1=0, dim2=1).diagonal(dim1=0, dim2=1)
        apart = (cn_ref - of_element[:, None, :, None]).abs().where(c6ab > 0.0, 0.0)
        if bool((apart > 1e-4).any()):
            first, second, *_ = (apart > 1e-4).nonzero()[0].tolist()
            raise ValueError(f"`cn_ref` of element {first} differs between partners, as with element {second}")
        cn_ref = of_element
    return cn_ref.where(has_reference, 0.0)


def given_or_published(parameters: Any) -> D3Parameters:
    """The parameters; without any those of `D3Parameters.load`."""
    if parameters is None:
        return D3Parameters.load()
    if not isinstance(parameters, D3Parameters):
        raise TypeError(f"`parameters` must be D3Parameters, got {type(parameters).__name__}")
    return parameters


def _from_package() -> dict[str, Any]:
    try:
        reference, r4r2, radii = (
            importlib.import_module(name) for name in ("tad_dftd3.reference", "tad_dftd3.data", "tad_mctc.data.radii")
        )
    except ImportError as error:
        raise ImportError(
            "the D3 data come with the package tad-dftd3, which is missing: pip install 'nvalchemiops[dispersion]' (in "
            "a checkout '.[dispersion]'), or give a file to D3Parameters.load"
        ) from error
    data = reference.Reference(dtype=torch.float64)
    # published with four and two digits in angstrom, but kept there in another bohr, or as float32
    r0ab = (radii.VDW_PAIRWISE(dtype=torch.float64) * _TABLE_BOHR).round(decimals=4) / _TABLE_BOHR
    covalent = (0.75 * radii.COV_D3(dtype=torch.float64) * _TABLE_BOHR).round(decimals=2) / _TABLE_BOHR
    n = data.cn.shape[0]
    return {
        "rcov": covalent[:n] * (4.0 / 3.0),
        "r4r2": r4r2.R4R2(dtype=torch.float64)[:n],
        "c6ab": data.c6.where((data.cn >= 0)[:, None, :, None] & (data.cn >= 0)[None, :, None, :], 0.0),
        "cn_ref": data.cn,
        "interp_mesh": data.cn.shape[1],
        "r0ab": r0ab[:n, :n],
    }


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
