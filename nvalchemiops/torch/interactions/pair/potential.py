"""`PairPotential`: a formula for the energy of a pair, and the call that sums it over neighbors."""

import functools
import inspect
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nvalchemiops.interactions.pair import sum as core
from nvalchemiops.interactions.pair.derivatives import POSITIONS, WEIGHTS, Request
from nvalchemiops.interactions.pair.expression import Formula, pair_energy
from nvalchemiops.interactions.pair.expression import self_energy as alone
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.pair.op import pair_sum
from nvalchemiops.torch.neighbors.rows import (
    GivenNeighbors,
    Rows,
    build_rows,
    cell_without_images,
    check_reach,
    rows_of,
)
from nvalchemiops.torch.operators.lattice import check_vectors, nan_if_singular
from nvalchemiops.torch.operators.segments import check_systems, row_pointers, spread_systems, system_sums
from nvalchemiops.torch.runtime.context import is_eager, may_read, values_of

EVERYWHERE = sys.float_info.max
"""Stands for no cutoff. Infinity itself would make packages of AOTInductor that cannot be loaded: JSON has none."""


class PairPotential:
    """A potential that is a sum over pairs of a function of the distance, written as one line of mathematics.

    ``E = Σ u(r_ij)`` over all pairs closer than the cutoff, each once; half of it belongs to either atom. Energies,
    forces, virials and gradients by all parameters are computed in one pass over the pairs, and each of them
    differentiates again, to any order. The expression is parsed, differentiated and printed as a kernel; the kernel
    for each precision and order compiles once, when it is first needed (about half a second), and stays on disk.

    Parameters
    ----------
    expression : str
        The energy of a pair as a function of the distance ``r``. Arithmetic as in Python (``^`` is ``**``) and the
        functions sqrt, exp, log, sin, cos, tan, asin, acos, atan, sinh, cosh, tanh, erf, erfc, abs, min, max,
        ``step(x)`` (1 for x >= 0, otherwise 0) and ``select(c, a, b)`` (a where c is not zero, otherwise b). After
        semicolons, definitions in any order: ``"...; sigma = (sigma1 + sigma2)/2"``. ``cutoff`` and ``pi`` are known.
        It must not change when the two atoms are exchanged.
    per_atom : sequence of str, optional
        Parameters of each atom; in the expression with 1 and 2 for the two atoms, as in ``q1*q2/r``.
    global_parameters : sequence of str, optional
        Parameters of the system.
    per_pair : sequence of str, optional
        Parameters of each pair of species, given as tables.
    cutoff : float, length, optional
        Pairs at this distance or farther are left out. Without it all pairs in the list count.
    shifted : bool, optional
        Subtract the value at the cutoff, so that the energy is continuous.
    r_switch : float, length, optional
        From here to the cutoff go to zero smoothly, with two continuous derivatives (see Notes).
    self_energy : str, optional
        Energy of an atom by itself, a function of its own and the global parameters, as in ``"-alpha/sqrt(pi)*q**2"``.

    Raises
    ------
    ValueError
        The expression cannot be read (the message shows where), uses an unknown name, does not use a declared one,
        or is not symmetric; or the distances do not fit: ``r_switch >= cutoff``, or either without a cutoff.
    TypeError
        The expression is no string.

    Notes
    -----
    The switching function is ``1 - 10 x³ + 15 x⁴ - 6 x⁵`` with ``x = (r - r_switch)/(cutoff - r_switch)``.

    The expression is simplified by the rules of algebra, which may widen its domain: ``exp(2*log(x))`` becomes ``x²``.

    At the kinks of ``abs``, ``min``, ``max``, ``step`` and ``select`` one of the two one-sided derivatives is taken.
    The names and the meaning of ``step`` and ``select`` are those of OpenMM's custom forces.

    Examples
    --------
    >>> potential = PairPotential(
    ...     "4*epsilon*((sigma/r)**12 - (sigma/r)**6); sigma = (sigma1 + sigma2)/2; epsilon = sqrt(epsilon1*epsilon2)",
    ...     per_atom=("sigma", "epsilon"),
    ...     cutoff=8.0,
    ... )
    >>> energies, forces = potential(positions, cell, sigma=3.4, epsilon=0.0104, compute_forces=True)
    """

    def __init__(
        self,
        expression: str,
        per_atom: Sequence[str] = (),
        global_parameters: Sequence[str] = (),
        per_pair: Sequence[str] = (),
        *,
        cutoff: float | None = None,
        shifted: bool = False,
        r_switch: float | None = None,
        self_energy: str = "",
    ) -> None:
        for label, text in (("expression", expression), ("self_energy", self_energy)):
            if not isinstance(text, str):
                raise TypeError(f"`{label}` must be a string, got {type(text).__name__}")
        self.formula = Formula(
            expression,
            _names("per_atom", per_atom),
            _names("global_parameters", global_parameters),
            _names("per_pair", per_pair),
            checks.check_flag("shifted", shifted),
            r_switch is not None,
            self_energy,
        )
        self.cutoff, self.r_switch = check_distances(self.formula, cutoff, r_switch)
        pair_energy(self.formula)  # raises for an expression that cannot be used
        alone(self.formula)

    def __call__(
        self,
        positions: torch.Tensor,
        cell: torch.Tensor | None = None,
        *,
        neighbor_list: torch.Tensor | None = None,
        neighbor_ptr: torch.Tensor | None = None,
        neighbor_shifts: torch.Tensor | None = None,
        neighbor_matrix: torch.Tensor | None = None,
        neighbor_matrix_shifts: torch.Tensor | None = None,
        fill_value: int | None = None,
        half_list: bool = False,
        neighbor_cutoff: float | None = None,
        batch_idx: torch.Tensor | None = None,
        num_systems: int | None = None,
        pbc: torch.Tensor | None = None,
        species: torch.Tensor | None = None,
        exclusions: torch.Tensor | None = None,
        exclusion_factors: torch.Tensor | None = None,
        compute_forces: bool = False,
        compute_gradients: Sequence[str] = (),
        compute_virial: bool = False,
        energy_reduction: str = "atom",
        check: bool = False,
        **parameters: float | torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Energies and, as asked, forces, gradients by parameters and virial.

        Parameters
        ----------
        positions : (n_atoms, 3) tensor, float32 or float64, length
            Inside the cell or not.
        cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
            Rows are lattice vectors. One of zeros stands for an open axis. Without it nothing is periodic.
        neighbor_list, neighbor_ptr, neighbor_shifts : tensors, optional
            Pairs (2, n_pairs) sorted by the first atom, where each atom's pairs begin (n_atoms + 1,), images
            (n_pairs, 3), as from `nvalchemiops.torch.neighbors.neighbor_list`; without a cell none, or zeros. Without
            neighbors given they are built.
        neighbor_matrix, neighbor_matrix_shifts : tensors, optional
            The same as matrix (n_atoms, width), (n_atoms, width, 3).
        fill_value : int, optional
            What stands for no neighbor, even if it is the number of an atom. For a matrix n_atoms by default.
        half_list : bool, optional
            The list has each pair once (i < j, or i = j and the first non-zero entry of the shift positive). It is
            expanded in each call, so a full list is faster.
        neighbor_cutoff : float, length, optional
            The reach of the list given; then one shorter than the potential's cutoff is an error.
        batch_idx : (n_atoms,) int32 tensor, optional
            System of each atom, in any order.
        num_systems : int, optional
            Taken from the cell by default, without a cell from the largest entry of ``batch_idx``, which is read.
            Inside ``torch.compile`` a cell (1, 3, 3) is that of one system; otherwise the number is needed there.
        pbc : bool tensor, optional
            Periodicity; True along all axes by default. Along an open axis the cell does not matter, and the list has
            no images.
        species : (n_atoms,) int tensor, optional
            Row of each atom in the tables; required with ``per_pair``.
        exclusions : (2, n) int tensor, optional
            Pairs that do not interact, or with a factor, as for bonded and 1-4 pairs. Of a pair's images in the list
            the nearest is meant, so it does not matter in which cell the atoms are stored.
        exclusion_factors : (n,) tensor, optional
            Factors of their energies; zero by default.
        compute_forces, compute_virial : bool, optional
            Return ``-dE/dR``, and ``-dE/dstrain``; stress is ``-virial / volume``.
        compute_gradients : sequence of str, optional
            Names of parameters whose gradients ``dE/dp`` to return.
        energy_reduction : {"atom", "system"}, optional
            Energies per atom, or summed over systems.
        check : bool, optional
            For debugging: raise unless the list is full, or half if ``half_list`` says so, and has every pair within
            the cutoff. Sorts all pairs and, not compiled, searches for them.
        **parameters
            Each declared parameter by its name: per atom a number or a tensor (n_atoms,); global a number or a
            tensor () or (n_systems,); per pair a tensor (n_species, n_species), of which [a, b] and [b, a] are
            averaged. Tensors may be trained.

        Returns
        -------
        energies : (n_atoms,) or (n_systems,) tensor
        forces : (n_atoms, 3) tensor, if asked for
        gradients : tensors in the order of ``compute_gradients``
            Of the sum of all energies; of the shape of the parameter, but (n_systems,) for a global one.
        virial : (n_systems, 3, 3) tensor, if asked for

        All have the dtype of the positions and are differentiable to any order in positions, cell and parameters.
        Sums are in float64 and do not depend on the number of threads, on padding, or on pairs beyond the cutoff.

        Raises
        ------
        ValueError, TypeError
            A bad argument, named in the message: a parameter that is missing, unknown, or of a wrong shape, dtype or
            device; neighbors out of range (looked for on the CPU always, on a GPU with ``check``; without it their
            atoms get NaN), or not sorted; distances.

        Notes
        -----
        Two atoms in one place have what the formula gives: an infinite or NaN energy and NaN forces for a potential
        that diverges; the others are not affected unless they interact with the two. A NaN in a position or parameter,
        and an infinite position, become NaN for that atom and those within its neighbor list.
        """
        given = GivenNeighbors(
            neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value
        )
        # gradients are returned in this order, which a set has not
        names = tuple(compute_gradients) if isinstance(compute_gradients, Sequence) else (None,)
        if isinstance(compute_gradients, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"`compute_gradients` must be a sequence of names, got {compute_gradients!r}")
        wanted = Wanted(compute_forces, names, compute_virial, energy_reduction)
        return evaluate(
            self.formula,
            positions,
            cell,
            parameters,
            given,
            wanted,
            cutoff=self.cutoff,
            r_switch=self.r_switch,
            half_list=half_list,
            neighbor_cutoff=neighbor_cutoff,
            batch_idx=batch_idx,
            num_systems=num_systems,
            pbc=pbc,
            species=species,
            exclusions=exclusions,
            exclusion_factors=exclusion_factors,
            check=check,
        )

    def source(self, *, compute_forces: bool = True, precision: str = "float64") -> str:
        """The C++ of the kernel that sums energies, and forces, of a periodic system: what the expression became."""
        outputs = WEIGHTS + POSITIONS * compute_forces
        n_species = 2 * bool(self.formula.per_pair)
        return core.source(core.Variant(Request(self.formula, (), outputs), precision, True, n_species))

    @classmethod
    def of(
        cls, formula: Formula, *, cutoff: float | None = None, shifted: bool = False, r_switch: float | None = None
    ) -> "PairPotential":
        """The potential for a formula that is known to be right."""
        potential = cls.__new__(cls)
        formula = formula._replace(shifted=checks.check_flag("shifted", shifted), switched=r_switch is not None)
        potential.formula = formula
        potential.cutoff, potential.r_switch = check_distances(formula, cutoff, r_switch)
        return potential

    def __repr__(self) -> str:
        formula = self.formula
        parts = [repr(formula.expression)]
        parts += [f"{name}={getattr(formula, name)}" for name in ("per_atom", "global_parameters", "per_pair")]
        parts += [f"cutoff={self.cutoff}"] * (self.cutoff is not None) + ["shifted=True"] * formula.shifted
        parts += [f"r_switch={self.r_switch}"] * formula.switched
        parts += [f"self_energy={formula.self_energy!r}"] * bool(formula.self_energy)
        return f"PairPotential({', '.join(parts)})"


def _names(kind: str, names: Any) -> tuple[str, ...]:
    """Names of parameters, spelled as Python spells them; raise if an argument of the call has the name."""
    if isinstance(names, str):
        raise TypeError(f"`{kind}` must be a sequence of names, got the string {names!r}")
    taken = inspect.signature(PairPotential.__call__).parameters
    found = []
    for name in names:
        if isinstance(name, str):
            name = unicodedata.normalize("NFKC", name)
            if name in taken:
                raise ValueError(f"`{kind}`: a parameter cannot be called '{name}', which is an argument of the call")
        found.append(name)
    return tuple(found)


class Wanted(NamedTuple):
    """What a call returns beside the energies."""

    forces: bool = False
    gradients: tuple[str | tuple[str, ...], ...] = ()
    virial: bool = False
    energy_reduction: str = "atom"


def check_distances(formula: Formula, cutoff: Any, r_switch: Any) -> tuple[float | None, float | None]:
    """The two as floats; raise unless the formula has what it needs."""
    if cutoff is not None:
        cutoff = checks.check_positive("cutoff", cutoff)
    elif formula.shifted or formula.switched:
        raise ValueError("`cutoff` is needed: " + ("`r_switch`" if formula.switched else "`shifted`") + " refers to it")
    if r_switch is not None:
        r_switch = checks.check_positive("r_switch", r_switch)
        if r_switch >= cutoff:
            raise ValueError(f"`r_switch` = {r_switch} must be smaller than `cutoff` = {cutoff}")
    for name, value in (("cutoff", cutoff), ("r_switch", r_switch)):
        if value is None and re.search(rf"\b{name}\b", formula.expression + ";" + formula.self_energy):
            raise ValueError(f"`{name}` is needed: the expression contains it")
    return cutoff, r_switch


class PairSystem(NamedTuple):
    """Atoms with their neighbors, checked.

    Attributes
    ----------
    positions : (n_atoms, 3) tensor
    cell : (n_systems, 3, 3) tensor or None
    batch_idx : (n_atoms,) int32 tensor or None
        None for one system.
    n_systems : int
    rows : Rows
    """

    positions: torch.Tensor
    cell: torch.Tensor | None
    batch_idx: torch.Tensor | None
    n_systems: int
    rows: Rows


def evaluate(
    formula: Formula,
    positions: torch.Tensor,
    cell: torch.Tensor | None,
    parameters: Mapping[str, Any],
    given: GivenNeighbors,
    wanted: Wanted,
    *,
    cutoff: float | None,
    r_switch: float | None = None,
    half_list: bool = False,
    neighbor_cutoff: float | None = None,
    batch_idx: torch.Tensor | None = None,
    num_systems: int | None = None,
    pbc: torch.Tensor | None = None,
    species: torch.Tensor | None = None,
    exclusions: torch.Tensor | None = None,
    exclusion_factors: torch.Tensor | None = None,
    check: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Sum ``formula`` over pairs; arguments as for `PairPotential.__call__`."""
    checks.check_positions(positions, finite=False)
    checks.check_choice("energy_reduction", wanted.energy_reduction, ("atom", "system"))
    for name, flag in (
        ("compute_forces", wanted.forces),
        ("compute_virial", wanted.virial),
        ("half_list", half_list),
        ("check", check),
    ):
        checks.check_flag(name, flag)
    has_list = given.neighbor_list is not None or given.neighbor_matrix is not None
    needs_number = not has_list or wanted.virial or wanted.energy_reduction != "atom" or formula.global_parameters != ()
    needs_number |= check and may_read()
    cell, batch_idx, n_systems = systems_of(positions, cell, batch_idx, num_systems, needs_number, pbc)
    rows = _rows(given, positions, cell, cutoff, half_list, neighbor_cutoff, batch_idx, pbc, check)
    cell = check_images(rows, cell, batch_idx, positions, n_systems)
    return sum_pairs(
        formula,
        PairSystem(positions, cell, batch_idx, n_systems, rows),
        parameters,
        wanted,
        cutoff=cutoff,
        r_switch=r_switch,
        species=species,
        exclusions=exclusion_rows(exclusions, exclusion_factors, positions),
    )


Parameters = Mapping[Any, Any]
"""Values by name. Several names that follow each other in a formula may share a matrix, with a column for each: their
tuple is its name."""


def sum_pairs(
    formula: Formula,
    system: PairSystem,
    parameters: Parameters,
    wanted: Wanted,
    *,
    cutoff: float | None,
    r_switch: float | None = None,
    species: torch.Tensor | None = None,
    exclusions: "ExclusionRows | None" = None,
    weights: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Sum ``formula`` over the pairs of a system; other arguments as for `PairPotential.__call__`.

    With ``weights`` (n_atoms,) all but the energies themselves are derivatives of their weighted sum.
    """
    positions, cell, batch_idx, n_systems, rows = system
    values, tables = _parameters(formula, parameters, positions, species, n_systems)
    excluded = (None, None, None) if exclusions is None else (exclusions.begin, exclusions.atoms, exclusions.factors)

    outputs = "w" + "r" * bool(wanted.forces)
    for name in wanted.gradients:
        if name not in parameters:
            raise ValueError(f"`compute_gradients` names '{name}', which is no parameter of this potential")
        letter = "g" if name in formula.global_parameters else "p"
        outputs += letter * (letter not in outputs)
    outputs += "v" * bool(wanted.virial)
    energies, position_gradients, _, parameter_gradients, global_gradients, virial = pair_sum(
        formula.text,
        outputs,
        "",
        positions,
        cell,
        values[0],
        values[1],
        weights,
        None,
        None,
        None,
        None,
        None,
        batch_idx,
        n_systems,
        rows.begin,
        rows.first,
        rows.neighbors,
        rows.shifts,
        tables[0],
        tables[1],
        *excluded,
        rows.width,
        rows.padding,
        EVERYWHERE if cutoff is None else cutoff,
        0.0 if r_switch is None else r_switch,
    )
    if wanted.energy_reduction == "system":
        energies = system_sums(energies, batch_idx, n_systems)
    results = [energies]
    if wanted.forces:
        results.append(-position_gradients)
    for name in wanted.gradients:
        if isinstance(name, tuple):
            at = formula.per_atom.index(name[0])
            results.append(parameter_gradients[:, at : at + len(name)])
        elif name in formula.per_atom:
            results.append(parameter_gradients[:, formula.per_atom.index(name)])
        elif name in formula.global_parameters:
            results.append(global_gradients[:, formula.global_parameters.index(name)])
        else:
            at = len(formula.per_atom) + tables[1] * formula.per_pair.index(name)
            rows_of_table = parameter_gradients[:, at : at + tables[1]]
            assert tables[0] is not None
            results.append(system_sums(rows_of_table, tables[0], tables[1]))
    if wanted.virial:
        results.append(virial)
    return results[0] if len(results) == 1 else tuple(results)


def systems_of(
    positions: torch.Tensor, cell: Any, batch_idx: Any, num_systems: int | None, needs_number: bool, pbc: Any = None
) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    """Cell (n_systems, 3, 3) or None, system of each atom as int32 or None, and the number of systems.

    Along open axes, as far as ``pbc`` tells them, the vectors of the cell are zero.
    """
    n_atoms = positions.shape[0]
    if num_systems is not None:
        num_systems = checks.check_int("num_systems", num_systems)
        # two questions: a compiler cannot compare a number with the answer to one of them
        if num_systems < 0 or (num_systems == 0 and n_atoms > 0):
            raise ValueError(f"`num_systems` must be positive, got {num_systems}")
    of_one = False
    if cell is not None:
        cell = checks.check_lattice(cell, positions)
        # a batch of one system, if nobody can look; unlike a cell without a number of systems
        of_one = cell.ndim == 3 and cell.shape[0] == 1
        cell = without_open_axes(cell.reshape(-1, 3, 3), pbc)
    if batch_idx is None:
        if num_systems not in (None, 1) or (cell is not None and cell.shape[0] != 1):
            raise ValueError("`batch_idx` is needed to tell several systems apart")
        return cell, None, 1
    checks.check_index("batch_idx", batch_idx, positions, (n_atoms,))
    batch_idx = checks.narrow(batch_idx)
    if num_systems is None:
        if cell is not None and cell.shape[0] != 1:
            num_systems = cell.shape[0]
        elif cell is None and not needs_number:
            return None, None, 1
        elif not may_read() and of_one:
            num_systems = 1
        elif not may_read():
            raise ValueError("`num_systems` is needed inside torch.compile, where `batch_idx` cannot be read")
        else:
            num_systems = int(batch_idx.max()) + 1 if n_atoms else 1
    if cell is not None and cell.shape[0] != num_systems:
        if cell.shape[0] != 1:
            raise ValueError(f"`cell` is for {cell.shape[0]} systems, but there are {num_systems}")
        cell = cell.expand(num_systems, 3, 3)
    if n_atoms and may_read(batch_idx):
        check_systems(values_of(batch_idx), num_systems)
    return cell, batch_idx, num_systems


def without_open_axes(cell: torch.Tensor, pbc: Any) -> torch.Tensor:
    """The cell with zeros along open axes, along which its vectors must not matter."""
    if pbc is None:
        return cell
    pbc = checks.pbc_tensor(pbc, cell.device)
    if pbc.device != cell.device:
        raise ValueError(f"`pbc` is on {pbc.device}, but `cell` is on {cell.device}")
    fits = pbc.ndim == 0 or pbc.shape in ((3,), (1, 3), (cell.shape[0], 3))
    if not fits and (cell.shape[0] != 1 or pbc.ndim != 2 or pbc.shape[1] != 3):
        raise ValueError(f"`pbc` must have shape (3,) or (n_systems, 3), got {tuple(pbc.shape)}")
    return torch.where(pbc.unsqueeze(-1), cell, 0.0)


def check_images(
    rows: Rows, cell: torch.Tensor | None, batch_idx: torch.Tensor | None, positions: torch.Tensor, n_systems: int
) -> torch.Tensor | None:
    """The cell that goes with the shifts of ``rows``.

    Raises for one that is singular, or is zero along an axis along which there are images, if values can be looked at.
    Elsewhere such a cell becomes NaN, and the kernels give NaN for such images.
    """
    if cell is None:
        return cell_without_images(rows, positions, n_systems)
    shifts = rows.shifts
    if not may_read(cell):
        return nan_if_singular(cell, may_be_open=True)
    has_open_axes = check_vectors(cell[:1] if cell.stride(0) == 0 else cell)  # one for all systems
    if not has_open_axes or shifts is None or not may_read(shifts):
        return cell
    is_open = (values_of(cell) == 0.0).all(-1)
    width = rows.width if rows.begin is None else rows.begin.diff()
    of_atom = is_open.expand(positions.shape[0], 3) if batch_idx is None else is_open[values_of(batch_idx).long()]
    beyond = (shifts != 0) & of_atom.repeat_interleave(width, 0, output_size=shifts.shape[0])
    if bool(beyond[rows.neighbors != rows.padding].any()):
        raise ValueError(
            "`cell`: the neighbor list joins what are no neighbors, images along an axis that is open (a zero lattice "
            "vector, or False in `pbc`)"
        )
    return cell


def _parameters(
    formula: Formula, parameters: Parameters, positions: torch.Tensor, species: Any, n_systems: int
) -> tuple[tuple[torch.Tensor | None, torch.Tensor | None], tuple[torch.Tensor | None, int]]:
    """Parameters of atoms and of systems as the op wants them; species and their number."""
    known = (*formula.per_atom, *formula.global_parameters, *formula.per_pair)
    given = {name: key for key in parameters for name in (key if isinstance(key, tuple) else (key,))}
    # first, as a misspelled name is a missing one as well
    for name in given:
        if name not in known:
            raise TypeError(
                f"`{name}` is no argument, and no parameter of this potential ({', '.join(known) or 'none'})"
            )
    for name in known:
        if name not in given:
            raise ValueError(f"`{name}` is missing: this potential needs {', '.join(known)}")
    n_atoms = positions.shape[0]
    columns = [
        _column(key, parameters[key], n_atoms, "n_atoms", positions)
        for key in dict.fromkeys(given[name] for name in formula.per_atom)
    ]
    of_systems = _of_systems({n: parameters[n] for n in formula.global_parameters}, n_systems, positions)
    n_species = 0
    if formula.per_pair:
        if species is None:
            raise ValueError("`species` is needed: it says which row of the tables belongs to an atom")
        checks.check_index("species", species, positions, (n_atoms,))
        species = checks.narrow(species)
        for name in formula.per_pair:
            table = parameters[name]
            checks.check_real(name, table, positions)
            n_species = n_species or max([1, *table.shape])
            if tuple(table.shape) != (n_species, n_species):
                raise ValueError(
                    f"`{name}` must have shape (n_species, n_species) = ({n_species}, {n_species}), got "
                    f"{tuple(table.shape)}"
                )
            # a species without a row is found by the kernel, which says so
            columns.append(spread_systems(table, species.clamp(0, n_species - 1), n_atoms))
    elif species is not None:
        raise ValueError("`species` is given, but the potential has no tables (per_pair)")
    return (_together(columns), of_systems), (species, n_species)


def _of_systems(values: dict[str, Any], n_systems: int, positions: torch.Tensor) -> torch.Tensor | None:
    """Global parameters (n_systems, n); plain numbers as a tensor that is kept for later calls."""
    numbers_alone = not any(isinstance(value, torch.Tensor) for value in values.values())
    # the number of systems last: a compiler would take a comparison for a promise
    may_keep = positions.device.type == "cpu" and is_eager(positions) and n_systems <= MOST_REPEATED
    if values and numbers_alone and may_keep:
        return _repeated(tuple(_number(name, v) for name, v in values.items()), n_systems, positions.dtype)
    return _together([_column(name, v, n_systems, "n_systems", positions) for name, v in values.items()])


MOST_REPEATED = 4096
"""Systems for which numbers that they share are kept as a tensor; for more, making it is a small part of a call."""


@functools.lru_cache(maxsize=64)
def _repeated(numbers: tuple[float, ...], n: int, dtype: torch.dtype) -> torch.Tensor:
    """The numbers (n, len(numbers)), the same for each system."""
    with torch.inference_mode(False):
        return torch.tensor([numbers], dtype=dtype, device="cpu").repeat(n, 1)


def _column(
    name: str | tuple[str, ...], value: Any, size: int, size_name: str, positions: torch.Tensor
) -> torch.Tensor:
    """A parameter as a tensor (size, 1), or several as (size, n)."""
    if isinstance(name, tuple):
        assert tuple(value.shape) == (size, len(name))
        return value
    if not isinstance(value, torch.Tensor):
        return torch.full((size, 1), _number(name, value), dtype=positions.dtype, device=positions.device)
    checks.check_real(name, value, positions)
    if value.ndim == 0 or (value.ndim == 1 and value.shape[0] == 1):
        return value.reshape(1, 1).expand(size, 1)
    if value.ndim != 1 or value.shape[0] != size:
        raise ValueError(
            f"`{name}` must be a number or have shape ({size_name},) = ({size},), got {tuple(value.shape)}"
        )
    return value.unsqueeze(1)


def _number(name: Any, value: Any) -> float:
    try:
        return checks.as_float(name, value)
    except TypeError:
        raise TypeError(f"`{name}` must be a number or a torch.Tensor, got {checks.kind_of(value)}") from None


def _together(columns: list[torch.Tensor]) -> torch.Tensor | None:
    if len(columns) > 1:
        return torch.cat(columns, dim=1)
    return columns[0] if columns else None


def _rows(
    given: GivenNeighbors,
    positions: torch.Tensor,
    cell: torch.Tensor | None,
    cutoff: float | None,
    half_list: bool,
    neighbor_cutoff: float | None,
    batch_idx: torch.Tensor | None,
    pbc: Any,
    check: bool,
) -> Rows:
    if neighbor_cutoff is not None:
        reach = checks.check_positive("neighbor_cutoff", neighbor_cutoff)
        if cutoff is not None and reach < cutoff:
            raise ValueError(f"`cutoff` = {cutoff} is beyond the list's reach, `neighbor_cutoff` = {reach}")
    rows = rows_of(given, positions, cell is not None, half_list, check)
    if rows is not None:
        if check and cutoff is not None and may_read(positions, wait=True):
            name = "neighbor_matrix" if given.neighbor_list is None else "neighbor_list"
            check_reach(name, rows, positions, cutoff, cell, batch_idx, pbc)
        return rows
    if half_list or neighbor_cutoff is not None:
        raise ValueError("`half_list` and `neighbor_cutoff` describe a list, but none is given")
    if cutoff is None:
        raise ValueError("`neighbor_list` or `neighbor_matrix` is needed: without a cutoff no list can be built")
    return build_rows(positions, cutoff, cell, batch_idx, pbc)


class ExclusionRows(NamedTuple):
    """Pairs with a factor as rows of atoms, each pair in both of its rows.

    Attributes
    ----------
    begin : (n_atoms + 1,) int32 tensor
        Where the row of each atom begins.
    atoms : (2 n_pairs,) int32 tensor
        The other atom.
    factors : (2 n_pairs,) float64 tensor
    first : (2 n_pairs,) int64 tensor
        The atom in whose row each entry is.
    order : (2 n_pairs,) int64 tensor
        The entries among all pairs followed by all pairs reversed.
    pairs : (2, n_pairs) int64 tensor
        As they were given.
    given_factors : (n_pairs,) tensor or None
    """

    begin: torch.Tensor
    atoms: torch.Tensor
    factors: torch.Tensor
    first: torch.Tensor
    order: torch.Tensor
    pairs: torch.Tensor
    given_factors: torch.Tensor | None

    def remainder(self) -> "ExclusionRows | None":
        """The same pairs with 1 minus the factors; None if all factors were zero by default."""
        if self.given_factors is None:
            return None
        return self._replace(factors=_of_both(1.0 - self.given_factors, self.order))


def _of_both(factors: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return torch.cat([factors, factors]).to(torch.float64).index_select(0, order)


def exclusion_rows(exclusions: Any, given_factors: Any, positions: torch.Tensor) -> ExclusionRows | None:
    """The rows of ``exclusions`` and ``exclusion_factors``, arguments as of `PairPotential.__call__`, or None."""
    if exclusions is None:
        if given_factors is not None:
            raise ValueError("`exclusion_factors` is given without `exclusions`")
        return None
    checks.check_index("exclusions", exclusions, positions, (2, None))
    n_pairs, n_atoms = exclusions.shape[1], positions.shape[0]
    factors = given_factors
    if factors is None:
        factors = torch.zeros(n_pairs, dtype=torch.float64, device=positions.device)
    checks.check_tensor("exclusion_factors", factors)
    if not factors.is_floating_point():
        raise TypeError("`exclusion_factors` must be a tensor of floats")
    if factors.requires_grad:
        raise ValueError("`exclusion_factors` cannot be trained: pass a detached tensor")
    if tuple(factors.shape) != (n_pairs,) or factors.device != positions.device:
        raise ValueError(
            f"`exclusion_factors` must have shape ({n_pairs},) on {positions.device}, got {tuple(factors.shape)} on "
            f"{factors.device}"
        )
    pairs = exclusions.to(torch.int64)
    first, second = pairs
    if n_pairs and may_read(exclusions):
        if int(exclusions.min()) < 0 or int(exclusions.max()) >= n_atoms:
            raise ValueError(f"`exclusions` must hold atoms in 0 .. {n_atoms - 1}")
        if bool((first == second).any()):
            raise ValueError("`exclusions` joins an atom with itself")
        keys = torch.minimum(first, second) * n_atoms + torch.maximum(first, second)
        if torch.unique(keys).shape[0] != n_pairs:
            raise ValueError("`exclusions` holds a pair twice")
    row, order = torch.sort(torch.cat([first, second]), stable=True)
    other = torch.cat([second, first]).index_select(0, order).to(torch.int32)
    begin = row_pointers(row, n_atoms)
    return ExclusionRows(begin, other, _of_both(factors, order), row, order, pairs, given_factors)
