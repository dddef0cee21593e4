"""Coordinates of relaxation: positions and cells of a batch as rows of numbers, and the forces on them.

A system has a row for each atom and, if its cell relaxes, three more. With the deformation gradient F from the initial
cell to the present one, rows of atoms are positions in the initial cell, ``y = F⁻¹ r``; the others are ``c log F``,
where the cell factor c makes steps of cells and of atoms alike. So an optimizer is a function of rows, which does not
know what they are. `nvalchemiops.torch.dynamics.relax` puts both together.

Source: the logarithm of F as coordinate, with exact forces, is the choice of JuLIP (C. Ortner) and of ASE's
``FrechetCellFilter``; E. B. Tadmor et al., Phys. Rev. B 59, 235 (1999), doi:10.1103/PhysRevB.59.235, for F itself.
"""

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.notices import NvalchemiopsWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.batching import count_systems
from nvalchemiops.torch.distributed.exchange import carried
from nvalchemiops.torch.dynamics.cell_flows import cell_arguments, check_open_axes, of_matrices
from nvalchemiops.torch.dynamics.model import Evaluation
from nvalchemiops.torch.dynamics.sums import Division
from nvalchemiops.torch.dynamics.velocities import of_each
from nvalchemiops.torch.operators.segments import system_sums
from nvalchemiops.torch.runtime.context import may_read
from nvalchemiops.torch.systems import System, of_each_atom

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain

VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))
"""Components of a symmetric matrix in Voigt's order."""


class CellFilter(NamedTuple):
    """Which deformations of cells are relaxed, and under which pressure.

    The names are those of ASE's ``FrechetCellFilter``. `CellFilter.of` has those of `npt`.

    Attributes
    ----------
    mask : (3,) or (6,) or (3, 3) or (n_systems, 3, 3) sequence or tensor of bool, optional
        Components of the deformation that may change: those of the axes x, y and z, as for `npt`; or xx, yy, zz, yz,
        xz, xy; or a matrix, as for the strain ε in ``cell @ (1 + ε)``. By default all.
    hydrostatic_strain : bool, optional
        Whether cells only scale, by the same factor along all axes of the mask.
    constant_volume : bool, optional
        Whether volumes stay as they are.
    scalar_pressure : float or (n_systems,) tensor, energy / length³, optional
        The enthalpy ``E + pressure * volume`` is relaxed.
    cell_factor : float or (n_systems,) tensor, optional
        Factor c of the rows of cells, by default the number of atoms.
    """

    mask: Any = None
    hydrostatic_strain: bool = False
    constant_volume: bool = False
    scalar_pressure: float | torch.Tensor = 0.0
    cell_factor: float | torch.Tensor | None = None

    @classmethod
    def of(cls, cell: str, mask: Sequence[bool] = (True, True, True), **options: Any) -> "CellFilter":
        """The filter for the changes that `npt` allows with the same arguments.

        Parameters
        ----------
        cell : {"isotropic", "axes", "full"}
            All axes change by the same factor; each Cartesian axis by its own; or all lengths and angles.
        mask : (bool, bool, bool), optional
            Which Cartesian axes may change.
        **options
            Other fields.
        """
        shape, axes = cell_arguments(cell, mask)
        found = (*axes, False, False, False) if shape == "axes" else axes
        return cls(found, hydrostatic_strain=shape == "isotropic", **options)


class Rows(NamedTuple):
    """To which system rows of numbers belong, and sums over the rows of a system.

    Sums have the same bits for a system alone and in a batch.

    Attributes
    ----------
    n_systems : int
    system_of : (n_rows,) int32 tensor, or None for one system
    domain : Domain or None
        Rows of atoms are those of the atoms that this rank owns. Other rows, which follow, are the same on all ranks.
    """

    n_systems: int
    system_of: torch.Tensor | None
    domain: "Domain | None" = None

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums (n_systems, k) of values (n_rows, k). On ranks a collective call."""
        if self.domain is None:
            return system_sums(values, self.system_of, self.n_systems)
        n = self.domain.n_owned
        total = Division(self.domain.batch_idx, self.n_systems, self.domain).sums(values[:n])
        if len(values) > n:
            total = total + _added(values[n:].reshape(self.n_systems, 3, -1).unbind(1))
        return total

    def dots(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The scalar product (n_systems,) of each pair of tensors (n_rows, 3)."""
        # sums over three columns are spelled out: torch chooses their order by the shape
        sums = self.sums(torch.cat([a * b for a, b in pairs], 1)).unbind(1)
        return tuple(sums[k] + sums[k + 1] + sums[k + 2] for k in range(0, len(sums), 3))

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """For each row the values (k, n_rows) of its system, from (k, n_systems)."""
        return values if self.system_of is None else values.index_select(1, self.system_of)

    def of_rows(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """For each row the values (n_rows, 1) of its system, from tensors (n_systems,)."""
        return self.spread(torch.stack(values))[:, :, None].unbind(0)

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """The largest norm (n_systems,) of a row (3,): zero without rows, not finite if a row is not."""
        squares = (x * x).unbind(1)
        norms = (squares[0] + squares[1] + squares[2]).sqrt()
        places = torch.zeros_like(norms) if self.system_of is None else self.system_of
        found = norms.new_zeros(self.n_systems).scatter_reduce(0, places.to(torch.int64), norms, "amax")
        if self.domain is None:
            return found
        return self.domain._maximum(found.nan_to_num(nan=torch.inf, posinf=torch.inf))  # a message may lose NaN


class Chart:
    """Positions and cells of a batch as coordinates x (n_rows, 3), float64: see the text of this module.

    Parameters
    ----------
    system : System
        The systems at the start. One that has no atoms or no periodic axis keeps its cell.
    cell : bool, str or CellFilter, optional
        Whether, or how, cells relax: a name is that of `CellFilter.of`. By default only positions do.
    fixed : (n_atoms,) or (n_atoms, 3) bool, or (n_fixed,) int tensor, array or sequence, optional
        Atoms, or components, that stay; integers are indices of atoms. In a cell that relaxes they keep their
        fractional coordinates.

    Attributes
    ----------
    start : (n_rows, 3) tensor
        Coordinates of ``system``.
    rows : Rows
        Atoms come first, then three rows for each system.
    n_systems, n_atoms : int

    Raises
    ------
    ValueError, TypeError
        A cell is to relax, but there is none, or it has no volume; an argument of a wrong shape; a mask that cannot
        keep the volume; a pressure or a cell factor that is not finite, or a factor that is zero; a pressure where an
        axis may change along which the system is not periodic.
    """

    def __init__(
        self,
        system: System,
        *,
        cell: bool | str | CellFilter = False,
        fixed: torch.Tensor | np.ndarray | Sequence[Any] | None = None,
    ) -> None:
        if not isinstance(system, System):
            raise TypeError(f"`system` must be a System, got {checks.kind_of('system', system)}")
        positions, domain = system.positions, system.domain
        checks.check_positions(positions, finite=False)
        if domain is None:
            lattice, pbc, shaped = checks.check_systems(positions, system.cell, system.pbc, system.batch_idx, None)
            n_systems = shaped if len(positions) else count_systems(system)
            batch_idx, found = checks.check_batch(system.batch_idx, positions, n_systems, wait=True)
            assert found is not None
            if batch_idx is not None and lattice is None and not bool((batch_idx == found - 1).any()):
                pbc = system.positions.new_zeros((found, 3), dtype=torch.bool)  # it alone tells how many systems
            if batch_idx is not None:  # a cell of its own for each system
                system = system._replace(
                    cell=None if lattice is None else lattice.reshape(-1, 3, 3).expand(found, 3, 3),
                    pbc=None if pbc is None else pbc.reshape(-1, 3).expand(found, 3),
                )
            self.system = system._replace(positions=positions.detach(), batch_idx=batch_idx)
        else:
            lattice, pbc, batch_idx, found = system.cell, domain.pbc, domain.batch_idx, domain.n_systems
            self.system = system._replace(positions=positions.detach())
        self.n_systems, self.n_atoms = found, positions.shape[0]
        self.start = positions.detach().to(torch.float64)
        self.rows = self.rows_of_atoms = Rows(self.n_systems, batch_idx, domain)
        self._free = None if fixed is None else _free(fixed, positions)
        self._lattice: torch.Tensor | None = None
        self._per_system: dict[str, torch.Tensor] = {}
        self._latest: tuple[torch.Tensor, torch.Tensor] | None = None
        cell = CellFilter.of(cell) if isinstance(cell, str) else cell
        self._options = cell if isinstance(cell, CellFilter) else CellFilter()
        if not isinstance(cell, bool | np.bool_ | CellFilter):
            raise TypeError(f"`cell` must be True, False, a name or a CellFilter, got {type(cell).__name__}")
        if not isinstance(cell, CellFilter) and not cell:
            return
        if lattice is None:
            # a batch may be one of molecules alone, as those beside crystals keep their cells, too
            notify("`cell` is to relax, but no system has one: positions relax alone", NvalchemiopsWarning)
            return
        n, device = self.n_systems, positions.device
        self._lattice = lattice.detach().to(torch.float64).reshape(-1, 3, 3).expand(n, 3, 3)
        self.rows = self._with_cells(self.rows_of_atoms)
        if domain is None:
            counts = system_sums(torch.ones_like(self.start[:, 0]), batch_idx, n)
        else:
            counts = domain.atoms_in_systems
        self.start = torch.cat([self.start, self.start.new_zeros((3 * n, 3))])

        factor = counts.clamp(min=1.0) if self._options.cell_factor is None else self._options.cell_factor
        axes = torch.ones_like(counts, dtype=torch.bool) if pbc is None else pbc.reshape(-1, 3).any(1)
        relaxes = (counts > 0) & axes
        factor = of_each("cell_factor", factor, n, device).detach().squeeze(1)
        self._per_system = {
            "mask": _mask(self._options, n, device),
            "factor": torch.where(relaxes, factor, 1.0),  # numbers of atoms, as in ASE, may be zero
            "pressure": of_each("scalar_pressure", self._options.scalar_pressure, n, device).detach().squeeze(1),
            "relaxes": relaxes,
            "volume": _cofactors(self._lattice)[1].abs(),
        }
        for name, key, least in (("cell_factor", "factor", 0.0), ("scalar_pressure", "pressure", -1.0)):
            value = self._per_system[key]
            if may_read(value) and not bool((value.isfinite() & (value.abs() > least) | ~relaxes).all()):
                raise ValueError(f"`{name}` must be finite{' and not zero' if least == 0.0 else ''}")
        flat = relaxes & ~(self._per_system["volume"] > 0.0)
        if may_read(flat) and bool(flat.any()):
            raise ValueError(
                f"`cell` of system {int(flat.nonzero()[0])} has no volume, so it has no stress to relax: give three "
                "lattice vectors, also along open axes"
            )
        if not (self._options.constant_volume or self._options.hydrostatic_strain):
            mask = self._per_system["mask"]
            pressed = relaxes & (self._per_system["pressure"] != 0.0)
            moves = (mask | mask.mT).any(1) & pressed.unsqueeze(1)
            check_open_axes(moves, self._lattice, pbc, "`scalar_pressure=0.0`")

    @property
    def fixed(self) -> torch.Tensor | None:
        """The argument of this name, for the atoms of this chart."""
        return None if self._free is None else (~self._free).squeeze(1)

    # -- coordinates ------------------------------------------------------------------------------

    def at(self, x: torch.Tensor) -> System:
        """The systems at coordinates x, in the precision of the initial positions."""
        system, dtype = self.system, self.system.positions.dtype
        if self._lattice is None:
            return system._replace(positions=x.to(dtype))
        transposed = self._deformation(x).mT
        positions = _times(x[: self.n_atoms], self._of_atoms(transposed))
        cell = torch.bmm(self._lattice, transposed).to(dtype)
        given = system.cell
        return system._replace(positions=positions.to(dtype), cell=cell if given is None else cell.reshape(given.shape))

    def forces(self, x: torch.Tensor, evaluation: Evaluation) -> torch.Tensor:
        """Minus the gradient (n_rows, 3) of the enthalpy, within the deformations that are allowed."""
        forces = evaluation.forces.to(torch.float64)
        if self._lattice is None:
            return forces if self._free is None else torch.where(self._free, forces, 0.0)
        deformation = self._deformation(x)
        forces = _times(forces, self._of_atoms(deformation))
        if self._free is not None:
            forces = torch.where(self._free, forces, 0.0)
        cofactors, determinant = _cofactors(deformation)
        # -dE/dF = virial F^-T, then the adjoint of the derivative of the exponential
        of_deformation = torch.bmm(self._virial(determinant, evaluation), cofactors / determinant[:, None, None])
        of_deformation = torch.where(self._per_system["mask"], of_deformation, 0.0)
        of_logarithm = self._allowed(_derivative_of_exp(self._logarithm(x).mT, of_deformation))
        of_logarithm = of_logarithm / self._per_system["factor"][:, None, None]
        of_cell = torch.where(self._per_system["relaxes"][:, None, None], of_logarithm, 0.0)
        return torch.cat([forces, of_cell.reshape(-1, 3)])

    def largest_stress(self, x: torch.Tensor, evaluation: Evaluation) -> torch.Tensor:
        """The largest component (n_systems,) of the stress that is to vanish, the pressure included."""
        if self._lattice is None:
            return self.start.new_zeros(self.n_systems)
        determinant = _cofactors(self._deformation(x))[1]
        virial = self._allowed(torch.where(self._per_system["mask"].mT, self._virial(determinant, evaluation), 0.0))
        largest = virial.abs().flatten(1).amax(1) / (self._per_system["volume"] * determinant)
        return torch.where(self._per_system["relaxes"], largest, 0.0)

    def enthalpy(self, x: torch.Tensor, evaluation: Evaluation) -> torch.Tensor:
        """Energies plus pressure times volume (n_systems,)."""
        if self._lattice is None:
            return evaluation.energies
        volume = self._per_system["volume"] * _cofactors(self._deformation(x))[1]
        return evaluation.energies + self._per_system["pressure"] * volume

    def select(self, systems: torch.Tensor) -> tuple["Chart", torch.Tensor, torch.Tensor]:
        """The chart of some systems, and the numbers of their atoms and rows.

        Parameters
        ----------
        systems : (k,) int64 tensor
            Numbers of systems in ascending order.
        """
        k, device = systems.shape[0], systems.device
        if self.system.batch_idx is None:
            assert k == 1, "the only system"
            return self, torch.arange(self.n_atoms, device=device), torch.arange(self.start.shape[0], device=device)
        renumbered = torch.full((self.n_systems,), -1, dtype=torch.int32, device=device)
        renumbered[systems] = torch.arange(k, dtype=torch.int32, device=device)
        assert self.rows.system_of is not None
        of_rows = renumbered[self.rows.system_of]
        rows = torch.nonzero(of_rows >= 0).squeeze(1)
        atoms = rows[rows < self.n_atoms]
        found = object.__new__(Chart)
        found.n_systems, found.n_atoms, found._options = k, atoms.shape[0], self._options
        of_systems: Any = {
            name: value[systems] if isinstance(value, torch.Tensor) and value.ndim == ndim else value
            for name, value, ndim in (("cell", self.system.cell, 3), ("pbc", self.system.pbc, 2))
        }
        found.system = of_each_atom(self.system, lambda v: v[atoms])._replace(batch_idx=of_rows[atoms], **of_systems)
        found.start = self.start[rows]
        found.rows, found.rows_of_atoms = Rows(k, of_rows[rows]), Rows(k, of_rows[atoms])
        found._free = None if self._free is None else self._free[atoms]
        found._lattice = None if self._lattice is None else self._lattice[systems]
        found._per_system = {name: value[systems] for name, value in self._per_system.items()}
        found._latest = None
        return found, atoms, rows

    def followed(self, x: torch.Tensor) -> tuple["Chart", Callable[[torch.Tensor], torch.Tensor] | None]:
        """The chart whose domain is valid at coordinates x, and how rows go to their owners there.

        The same chart and None where nothing moves. The function takes rows of atoms, alone or with those of cells
        after them. On ranks a collective call.
        """
        domain = self.system.domain
        if domain is None:
            return self, None
        now = self.at(x)
        new, move = domain._followed(now.positions, (), now.cell)
        if new is domain:
            return self, None
        return self._moved(move, domain=new)

    def at_holders(self) -> tuple["Chart", Callable[[torch.Tensor], torch.Tensor]]:
        """The chart of the atoms that this rank holds, to `select` systems of it, and how rows go there.

        Its rows have no domain, so its sums are not those of all ranks. A collective call.
        """
        system, domain = self.system, self.system.domain
        assert domain is not None
        numbers = {"batch_idx": domain._batch_idx_held(), "pbc": domain._pbc_of(system)}
        return self._moved(lambda values: carried(domain._to_holders, values), domain=None, **numbers)

    def at_owners(self, like: "Domain", x: torch.Tensor) -> tuple["Chart", Callable[[torch.Tensor], torch.Tensor]]:
        """The chart in a new domain of the atoms that this rank holds, for coordinates x, and how rows go there.

        The domain is made ``like`` another one. A collective call.
        """
        domain, move = like._of_atoms(self.at(x), self.n_systems)
        return self._moved(move, domain=domain, batch_idx=None, pbc=None)

    # -- parts ------------------------------------------------------------------------------------

    def _moved(
        self, move: Callable[[torch.Tensor], torch.Tensor], **changes: Any
    ) -> tuple["Chart", Callable[[torch.Tensor], torch.Tensor]]:
        """The chart after atoms have moved, with changes of its system, and how rows move, those of cells with them."""
        n = self.n_atoms

        def moved(rows: torch.Tensor) -> torch.Tensor:
            return torch.cat([move(rows[:n]), rows[n:]])

        found = copy.copy(self)
        found.system = of_each_atom(self.system, move)._replace(**changes)
        found.n_atoms, found.start = found.system.positions.shape[0], moved(self.start)
        found._free = None if self._free is None else move(self._free)
        domain = found.system.domain
        batch_idx = found.system.batch_idx if domain is None else domain.batch_idx
        found.rows = found.rows_of_atoms = Rows(self.n_systems, batch_idx, domain)
        if self._lattice is not None:
            found.rows = self._with_cells(found.rows_of_atoms)
        found._latest = None
        return found, moved

    def _with_cells(self, rows: Rows) -> Rows:
        """Rows of atoms, then three for each system."""
        if rows.system_of is None:
            return rows
        systems = torch.arange(self.n_systems, dtype=torch.int32, device=rows.system_of.device)
        return rows._replace(system_of=torch.cat([rows.system_of, systems.repeat_interleave(3)]))

    def _of_atoms(self, matrices: torch.Tensor) -> torch.Tensor:
        idx = self.rows_of_atoms.system_of
        return matrices if idx is None else matrices.index_select(0, idx)

    def _logarithm(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.n_atoms :].reshape(-1, 3, 3) / self._per_system["factor"][:, None, None]

    def _deformation(self, x: torch.Tensor) -> torch.Tensor:
        """F (n_systems, 3, 3), in which components outside of the mask are those of the identity."""
        if self._latest is None or self._latest[0] is not x:  # coordinates are not changed in place
            stretched, _ = of_matrices(self._logarithm(x))
            self._latest = x, torch.where(self._per_system["mask"], stretched, _identity(stretched))
        return self._latest[1]

    def _virial(self, determinant: torch.Tensor, evaluation: Evaluation) -> torch.Tensor:
        """Minus the derivative (n_systems, 3, 3) of the enthalpy with respect to a strain."""
        if evaluation.stress is None:
            raise ValueError("`model` gives no stress, which a cell needs to relax")
        stress = evaluation.stress.to(torch.float64)
        stress = 0.5 * (stress + stress.mT)
        stress = stress + self._per_system["pressure"][:, None, None] * _identity(stress)
        return -(self._per_system["volume"] * determinant)[:, None, None] * stress

    def _allowed(self, matrices: torch.Tensor) -> torch.Tensor:
        """Projection of matrices (n_systems, 3, 3) on the deformations that the options allow."""
        options = self._options
        if not (options.hydrostatic_strain or options.constant_volume):
            return matrices
        diagonal = torch.where(self._per_system["mask"], _identity(matrices), 0.0)
        on, parts = diagonal.flatten(1).unbind(1), (matrices * diagonal).flatten(1).unbind(1)
        mean = (parts[0] + parts[4] + parts[8]) / (on[0] + on[4] + on[8]).clamp(min=1.0)
        isotropic = mean[:, None, None] * diagonal
        kept = isotropic if options.hydrostatic_strain else matrices
        return kept - isotropic if options.constant_volume else kept


def _free(fixed: Any, positions: torch.Tensor) -> torch.Tensor:
    """Which components may move, (n_atoms, 1) or (n_atoms, 3)."""
    n = positions.shape[0]
    if isinstance(fixed, (np.ndarray, Sequence)):
        as_mask = n == 0 or (isinstance(fixed, np.ndarray) and fixed.dtype == np.bool_)
        empty = np.bool_ if as_mask else np.int64  # NumPy makes floats of an empty list
        try:
            # a copy, since an array may be read-only; and whatever the default device is
            fixed = torch.as_tensor(np.array(fixed, dtype=None if len(fixed) else empty), device="cpu")
        except (TypeError, ValueError) as error:  # rows of several lengths, or objects
            raise TypeError(f"`fixed` must be an array of bools, or of indices: {error}") from None
    if not isinstance(fixed, torch.Tensor):
        kind = type(fixed).__name__
        raise TypeError(f"`fixed` must be a mask or indices of atoms in a tensor, array or sequence, got {kind}")
    checks.check_tensor("fixed", fixed)
    if fixed.dtype in (torch.int32, torch.int64) and fixed.ndim == 1:
        fixed = _mask_of(fixed.to(positions.device, torch.int64), n)
    if fixed.dtype != torch.bool or fixed.shape not in ((n,), (n, 3)):
        raise ValueError(
            f"`fixed` must be bool of shape (n_atoms,) = ({n},) or (n_atoms, 3), or indices of atoms as integers of "
            f"shape (n_fixed,), got {fixed.dtype} of {tuple(fixed.shape)}"
        )
    return ~fixed.to(positions.device).reshape(n, -1) if n else ~fixed.reshape(0, 1)


def _mask_of(index: torch.Tensor, n_atoms: int) -> torch.Tensor:
    """Whether each atom (n_atoms,) is among those of an index, whose entries count from the end if negative."""
    if may_read(index, wait=True):
        out = index[(index < -n_atoms) | (index >= n_atoms)]
        if len(out):
            raise checks.ValuesError(f"`fixed` has the index {int(out[0])}, but there are {n_atoms} atoms")
        found, counts = torch.unique(index % max(n_atoms, 1), return_counts=True)
        if len(found) < len(index):
            raise checks.ValuesError(
                f"`fixed` has the index {int(found[counts.argmax()])} twice: integers are indices of atoms, and a mask "
                "must be bool"
            )
    mask = torch.zeros(n_atoms, dtype=torch.bool, device=index.device)
    return mask.index_fill(0, index % max(n_atoms, 1), True)


def _mask(options: CellFilter, n_systems: int, device: torch.device) -> torch.Tensor:
    """Components of F that may change (n_systems, 3, 3)."""
    mask = options.mask
    if not isinstance(mask, torch.Tensor):  # whatever the default device is
        mask = torch.as_tensor(np.ones((3, 3)) if mask is None else mask, device="cpu")
    mask = mask != 0
    if mask.shape == (3,):
        mask = mask & mask.unsqueeze(1)
    if mask.shape == (6,):
        full = mask.new_zeros((3, 3))
        for (i, j), value in zip(VOIGT, mask.tolist()):
            full[i, j] = full[j, i] = value
        mask = full
    if mask.shape not in ((3, 3), (n_systems, 3, 3)):
        raise ValueError(f"`mask` must have shape (3,), (6,), (3, 3) or (n_systems, 3, 3), got {tuple(mask.shape)}")
    if options.constant_volume:
        # the determinant of F is the exponential of the trace only if the mask removes nothing from the exponential
        of_products = (mask.double() @ mask.double()) > 0
        if bool((of_products & ~mask).any()):
            raise ValueError(
                "`constant_volume` needs a `mask` that has yy and zz if it has yz, and so on, and xz if it has xy and "
                "yz"
            )
    # the strain acts on row vectors, F on column vectors
    return mask.to(device).mT.expand(n_systems, 3, 3)


# -- small matrices, by operations whose bits do not depend on the size of the batch ---------------------------------


def _identity(like: torch.Tensor) -> torch.Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)


def _added(terms: tuple[torch.Tensor, ...]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _times(vectors: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Row vectors (n, 3) times matrices (n, 3, 3) or (1, 3, 3)."""
    return _added((vectors.unsqueeze(-1) * matrices).unbind(-2))


def _cofactors(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cofactors (n, 3, 3), which are the transposed inverse times the determinant, and determinants (n,)."""
    rows = [torch.linalg.cross(matrices[:, (i + 1) % 3], matrices[:, (i + 2) % 3]) for i in range(3)]
    return torch.stack(rows, 1), _added((matrices[:, 0] * rows[0]).unbind(-1))


def _derivative_of_exp(matrices: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """The derivative (n, 3, 3) of ``exp(A + t G)`` at t = 0: for a tiny imaginary t, the imaginary part divided by it.

    Source: A. H. Al-Mohy and N. J. Higham, Numer. Algorithms 53, 133 (2010), doi:10.1007/s11075-009-9323-y.
    """
    step = 2.0**-200  # its square is nothing beside A
    return of_matrices(torch.complex(matrices, step * directions))[0].imag / step
