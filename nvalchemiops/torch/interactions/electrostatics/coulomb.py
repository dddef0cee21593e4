"""Coulomb energies within a cutoff: bare or damped, damped shifted forces, and the short-range part of Ewald's sum."""

import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from nvalchemiops.interactions.pair import potentials
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.results import ENERGY_DTYPE
from nvalchemiops.torch.interactions.electrostatics.sources import by_source, check_sources, nan_unless_allowed
from nvalchemiops.torch.interactions.electrostatics.system import check_charges
from nvalchemiops.torch.interactions.pair import shares
from nvalchemiops.torch.interactions.pair.driver import PairRequest, check_pair_request, run, sum_pairs
from nvalchemiops.torch.interactions.pair.moments import sum_moments
from nvalchemiops.torch.interactions.pair.parameters import parameter_arrays
from nvalchemiops.torch.interactions.pair.system import NO_CUTOFF, PairSystem, pair_system
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.runtime._torch_internals import only_inlined
from nvalchemiops.torch.runtime.context import may_read
from nvalchemiops.torch.runtime.recorder import are_all
from nvalchemiops.torch.systems import System

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain


def coulomb_energy(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor | None,
    cutoff: float,
    alpha: float | torch.Tensor = 0.0,
    neighbor_list: torch.Tensor | None = None,
    neighbor_ptr: torch.Tensor | None = None,
    neighbor_shifts: torch.Tensor | None = None,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    fill_value: int | None = None,
    batch_idx: torch.Tensor | None = None,
    *,
    half_list: bool = False,
    domain: "Domain | None" = None,
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    widths: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Coulomb energy of each atom with its neighbors within the cutoff, ``1/2 Σ_j q_i q_j erfc(α r_ij) / r_ij``.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
    charges : (n_atoms,) or (n_atoms, n_channels) tensor, charge
        Channels do not interact with each other.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, or None
        None for systems that are not periodic.
    cutoff : float, length
        Pairs at this distance or farther are left out.
    alpha : float or (n_systems,) tensor, 1/length, optional
        Damping; 0, the default, for the bare interaction.
    neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value, half_list
        As for `nvalchemiops.torch.interactions.pair.PairPotential`. If no neighbors are given, a list is built.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    domain : Domain, optional
        The system is divided among ranks, as for `ewald_summation`.
    dipoles : (n_atoms, 3) or (n_atoms, n_channels, 3) tensor, charge length, optional
    quadrupoles : (n_atoms, 3, 3) or (n_atoms, n_channels, 3, 3) tensor, charge length², optional
    widths : float or (n_atoms,) tensor, length, optional
        Further sources, as for `ewald_summation`. Points interact by ``erfc(α r) / r``. Gaussians interact by
        ``erf(a r) / r`` with ``a = 1 / sqrt(2 (s_i² + s_j²))``; with damping, by the short-range part
        ``erf(a r) / r - erf(α r) / r``.

    Returns
    -------
    (n_atoms,) tensor, charge²/length
        With channels (n_atoms, n_channels). Differentiable to any order in positions, charges and other sources,
        widths, cell and alpha.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    near = neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value, half_list
    atoms = System(positions, charges, cell, batch_idx, None, None, domain, dipoles, quadrupoles, widths)
    return _coulomb(atoms, cutoff, alpha, GivenNeighbors(*near), PairRequest())[0]


def coulomb_forces(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor | None,
    cutoff: float,
    alpha: float | torch.Tensor = 0.0,
    neighbor_list: torch.Tensor | None = None,
    neighbor_ptr: torch.Tensor | None = None,
    neighbor_shifts: torch.Tensor | None = None,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    fill_value: int | None = None,
    batch_idx: torch.Tensor | None = None,
    *,
    half_list: bool = False,
    domain: "Domain | None" = None,
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    widths: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Forces (n_atoms, 3) of `coulomb_energy`, which has the same arguments."""
    near = neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value, half_list
    atoms = System(positions, charges, cell, batch_idx, None, None, domain, dipoles, quadrupoles, widths)
    return _coulomb(atoms, cutoff, alpha, GivenNeighbors(*near), PairRequest(forces=True))[1]


def coulomb_energy_forces(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor | None,
    cutoff: float,
    alpha: float | torch.Tensor = 0.0,
    neighbor_list: torch.Tensor | None = None,
    neighbor_ptr: torch.Tensor | None = None,
    neighbor_shifts: torch.Tensor | None = None,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    fill_value: int | None = None,
    batch_idx: torch.Tensor | None = None,
    *,
    half_list: bool = False,
    domain: "Domain | None" = None,
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    widths: float | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Energies (n_atoms,) and forces (n_atoms, 3) of `coulomb_energy`, which has the same arguments, in one pass."""
    near = neighbor_list, neighbor_ptr, neighbor_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value, half_list
    atoms = System(positions, charges, cell, batch_idx, None, None, domain, dipoles, quadrupoles, widths)
    energies, forces = _coulomb(atoms, cutoff, alpha, GivenNeighbors(*near), PairRequest(forces=True))
    return energies, forces


@functools.partial(only_inlined, with_calls=True)
def _coulomb(
    atoms: System, cutoff: float, alpha: float | torch.Tensor, given: GivenNeighbors, request: PairRequest
) -> tuple[torch.Tensor, ...]:
    if not isinstance(alpha, (int, float, torch.Tensor)):
        alpha = checks.as_float("alpha", alpha)  # a number of NumPy
    bare = not isinstance(alpha, torch.Tensor) and alpha == 0.0
    several = isinstance(atoms.charges, torch.Tensor) and atoms.charges.ndim == 2
    if several or atoms.dipoles is not None or atoms.quadrupoles is not None or atoms.widths is not None:
        return _moments(atoms, cutoff, None if bare else alpha, given, request)
    return _sum(potentials.COULOMB if bare else potentials.EWALD_REAL_SPACE, atoms, cutoff, alpha, given, request)


@functools.partial(only_inlined, with_calls=True)
def _sum(
    formula: Formula,
    atoms: System,
    cutoff: float,
    alpha: float | torch.Tensor,
    given: GivenNeighbors,
    request: PairRequest,
    num_systems: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Sum a formula of charges ``q`` and, optionally, damping ``alpha``; repeated calls use a plan."""
    domain = atoms.domain
    by_system = request.by_system or formula.global_parameters != ()

    def system_of(here: System, near: GivenNeighbors) -> PairSystem:
        checks.check_positions(here.positions, finite=False)
        check_charges(here.charges, here.positions)
        return pair_system(here, near, num_systems, cutoff=_reach(cutoff), by_system=by_system)

    def evaluate(near: GivenNeighbors, /, positions: Any, charges: Any, cell: Any, alpha: Any, **_: Any) -> Any:
        with shares.together(domain):
            system = system_of(atoms._replace(positions=positions, charges=charges, cell=cell), near)
            parameters = {"q": charges} | ({"alpha": _damping(alpha)} if formula.global_parameters else {})
            shares.must_be_same(domain, request=request)
            parameters = shares.parameters_of_share(formula, parameters, domain)
        results = sum_pairs(formula, system, parameters, request, cutoff=_reach(cutoff))
        return shares.complete(formula, results, request, domain)

    call = "Coulomb sum", evaluate, atoms, given, system_of
    return run(*call, {"charges": atoms.charges, "alpha": alpha}, {}, (formula, cutoff, request, num_systems))


def _moments(
    atoms: System, cutoff: float, alpha: float | torch.Tensor | None, given: GivenNeighbors, request: PairRequest
) -> tuple[torch.Tensor, ...]:
    """Energies of moments, Gaussians or charges with channels, and requested derivatives; undamped if alpha is None."""
    domain = atoms.domain

    def system_of(here: System, near: GivenNeighbors) -> PairSystem:
        checks.check_positions(here.positions, finite=False)
        return pair_system(here, near, cutoff=_reach(cutoff), by_system=alpha is not None)

    def evaluate(near: GivenNeighbors, /, alpha: Any, **values: Any) -> tuple[torch.Tensor, ...]:
        here: Any = atoms._replace(**values)
        positions = here.positions
        with shares.together(domain):
            system, alpha = system_of(here, near), None if alpha is None else _damping(alpha)
            charges = check_charges(here.charges, positions, channels=True)
            widths = shares.of_all_atoms(domain, here.widths)
            moments, widths = check_sources(charges, here.dipoles, here.quadrupoles, widths, positions)
            kind = potentials.moment_interaction if alpha is None else potentials.moment_short_range
            formula = kind(widths is not None)
            parameters: dict[str, Any] = {} if alpha is None else {"alpha": alpha}
            parameters |= {} if widths is None else {"s": widths}
            shares.must_be_same(domain, request=request)
            parameters = shares.parameters_of_share(formula, parameters, domain)
        of_atoms, of_systems, _, _ = parameter_arrays(formula, parameters, positions, None, system.n_systems)
        asked: Any = {"forces": request.forces, "gradients": bool(request.gradients), "virial": request.virial}
        found: Any = sum_moments(formula, system, moments, of_atoms, of_systems, **asked, cutoff=_reach(cutoff))

        def one_channel(values: torch.Tensor) -> torch.Tensor:
            return values if charges.ndim == 2 else values.squeeze(1)

        results = [one_channel(found.energies)] + [found.forces] * request.forces
        if request.gradients:
            there = [value is not None for value in (charges, here.dipoles, here.quadrupoles)]
            results += by_source(one_channel(found.gradients), there)
        return (*results, found.virial) if request.virial else tuple(results)

    moving = {name: getattr(atoms, name) for name in ("charges", "dipoles", "quadrupoles", "widths")}
    call = "Coulomb sum of moments", evaluate, atoms, given, system_of
    return run(*call, moving | {"alpha": alpha}, {}, (cutoff, request))


def coulomb_of_sources(
    atoms: System, given: GivenNeighbors, cutoff: float | None, *, compute_virial: bool = False
) -> tuple[torch.Tensor, ...]:
    """Bare Coulomb energies of sources, with all first derivatives; without a cutoff all given pairs are summed.

    Results are as from `ewald_summation`: gradients for the sources that the system has; the virial if requested.
    """
    request = PairRequest(True, ("charges", "dipoles", "quadrupoles"), compute_virial)
    return _moments(atoms, NO_CUTOFF if cutoff is None else cutoff, None, given, request)


_reach = functools.partial(checks.check_positive, "cutoff")


def _damping(alpha: Any) -> Any:
    """Alpha; raise unless it is finite and non-negative. In a tensor that cannot be read, bad values become NaN."""
    if not isinstance(alpha, torch.Tensor):
        allowed = 0.0 <= checks.as_float("alpha", alpha) < math.inf
    elif not checks.is_real(alpha):
        return alpha  # refused where parameters are
    elif not may_read(alpha):
        return nan_unless_allowed(alpha)
    else:
        allowed = are_all(lambda number: (number >= 0.0) & (number < math.inf), alpha)
    if not allowed:
        raise ValueError("`alpha` must be finite and non-negative")
    return alpha


def dsf_coulomb(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cutoff: float,
    alpha: float | torch.Tensor = 0.2,
    cell: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    neighbor_list: torch.Tensor | None = None,
    neighbor_ptr: torch.Tensor | None = None,
    unit_shifts: torch.Tensor | None = None,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    fill_value: int | None = None,
    compute_forces: bool = True,
    compute_virial: bool = False,
    num_systems: int | None = None,
    device: torch.device | str | None = None,
    *,
    half_list: bool = False,
    domain: "Domain | None" = None,
) -> tuple[torch.Tensor, ...]:
    """Coulomb energy of each system by damped shifted forces (Fennell and Gezelter 2006), with its self energy.

    Formula and source: `nvalchemiops.interactions.pair.potentials.DSF`.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
    charges : (n_atoms,) tensor, charge
    cutoff : float, length
        Distance at which energies and forces of pairs become zero.
    alpha : float or (n_systems,) tensor, 1/length, optional
        Damping; 0 gives shifted forces without damping.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    neighbor_list, neighbor_ptr, unit_shifts, neighbor_matrix, neighbor_matrix_shifts, fill_value, half_list
        As for `nvalchemiops.torch.interactions.pair.PairPotential`. If no neighbors are given, a list is built.
    compute_forces, compute_virial : bool, optional
    num_systems : int, optional
        By default the number of cells; without a cell it follows from the largest entry of ``batch_idx``, which is read
        on the host.
    device : torch.device or str, optional
        Must be the device of the tensors.
    domain : Domain, optional
        The system is divided among ranks, as for `ewald_summation`.

    Returns
    -------
    energies : (n_systems,) float64 tensor, charge²/length
    forces : (n_atoms, 3) tensor, if requested
    virial : (n_systems, 3, 3) tensor, ``-dE/dstrain``, if requested

    Always a tuple; forces and virial have the dtype of ``positions``. All are differentiable to any order in positions,
    charges, cell and alpha.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    checks.check_positions(positions, finite=False)
    checks.check_same_device(device, positions)
    of_list, of_matrix = (neighbor_list, neighbor_ptr, unit_shifts), (neighbor_matrix, neighbor_matrix_shifts)
    given = GivenNeighbors(*of_list, *of_matrix, fill_value, half_list, shifts_name="unit_shifts")
    request = check_pair_request(compute_forces, compute_virial, "system")._replace(energy_dtype=ENERGY_DTYPE)
    atoms = System(positions, charges, cell, batch_idx, domain=domain)
    return _sum(potentials.DSF, atoms, cutoff, alpha, given, request, num_systems)
