"""DFT-D3 with the signature that existing clients call."""

from typing import Any

import torch

from nvalchemiops.interactions.dispersion.damping import RationalDamping
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.dispersion.driver import (
    K1,
    K3,
    Range,
    Ranges,
    Settings,
    dispersion_sum,
    ranges_of,
)
from nvalchemiops.torch.interactions.dispersion.reference_data import D3Parameters, ReferenceStates, tables_of
from nvalchemiops.torch.interactions.pair.driver import check_pair_request
from nvalchemiops.torch.neighbors.rows import GivenNeighbors
from nvalchemiops.torch.runtime.context import may_read
from nvalchemiops.torch.systems import System

NO_SMOOTHING = 1e10
"""No smoothing is applied if its end is at this distance (bohr) or beyond."""


def dftd3(
    positions: torch.Tensor,
    numbers: torch.Tensor,
    a1: float | torch.Tensor,
    a2: float | torch.Tensor,
    s8: float | torch.Tensor,
    k1: float = K1,
    k3: float = K3,
    s6: float | torch.Tensor = 1.0,
    s5_smoothing_on: float = NO_SMOOTHING,
    s5_smoothing_off: float = NO_SMOOTHING,
    fill_value: int | None = None,
    d3_params: D3Parameters | ReferenceStates | None = None,
    covalent_radii: torch.Tensor | None = None,
    r4r2: torch.Tensor | None = None,
    c6_reference: torch.Tensor | None = None,
    coord_num_ref: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    cell: torch.Tensor | None = None,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    neighbor_list: torch.Tensor | None = None,
    neighbor_ptr: torch.Tensor | None = None,
    unit_shifts: torch.Tensor | None = None,
    compute_virial: bool = False,
    num_systems: int | None = None,
    device: torch.device | str | None = None,
    *,
    half_list: bool = False,
    cutoff: float | None = None,
    coordination_cutoff: float | None = None,
    s9: float | torch.Tensor = 0.0,
    three_body_cutoff: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """DFT-D3 energies of systems with Becke-Johnson damping, forces and coordination numbers.

    For other damping functions, energies per atom, or energies without forces, see `d3_dispersion`.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, bohr
        Positions in angstrom would give a wrong energy without an error.
    numbers : (n_atoms,) int32 or int64 tensor
        Atomic numbers; 0 for padding atoms, which take part in no pair.
    a1, a2, s8, s6 : float or tensor
        Damping parameters of the functional (a2 in bohr); see `damping_parameters`. Tensors may require gradients.
    k1, k3 : float, optional
        Steepness of the coordination number, and of the weights of reference molecules.
    s5_smoothing_on, s5_smoothing_off : float, bohr, optional
        The pair energy is switched off between these distances, with two continuous derivatives. If they are equal,
        they are a sharp cutoff: pairs at this distance or beyond do not count. By default, and whenever
        ``s5_smoothing_off`` is 1e10 or more (or infinite), pair energies are not switched off. The coordination number
        is never switched off.
    fill_value : int, optional
        Padding of ``neighbor_matrix``, by default the number of atoms.
    d3_params : D3Parameters, ReferenceStates, dict or other object
        The reference data: those of this library, or an object with the entries or attributes ``rcov``, ``r4r2``,
        ``c6ab`` and ``cn_ref``. Alternatively, the next four arguments.
    covalent_radii, r4r2, c6_reference, coord_num_ref : tensors
        ``rcov``, ``r4r2``, ``c6ab`` and ``cn_ref`` of `D3Parameters`, in any floating dtype and on any device.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    cell : (3, 3) or (n_systems, 3, 3) tensor, bohr, optional
    neighbor_matrix, neighbor_matrix_shifts, neighbor_list, neighbor_ptr, unit_shifts
        Neighbors in either format, with shifts if there is a cell. Without a cell, shifts must be zero.
    compute_virial : bool, optional
        Return the virial, with or without a cell.
    num_systems : int, optional
        By default the number of cells, or one more than the largest entry of ``batch_idx``. The energy of a system
        without atoms is zero.
    device : torch.device or str, optional
        If given, must be the device of the positions.
    half_list : bool, optional
        Whether the neighbor list or matrix has each pair once.
    cutoff, coordination_cutoff, s9, three_body_cutoff : float, optional
        See `d3_dispersion`. By default all listed pairs count, and there is no three-body energy.

    Returns
    -------
    energy : (n_systems,) tensor, hartree
    forces : (n_atoms, 3) tensor, hartree/bohr
    coordination_numbers : (n_atoms,) tensor
    virial : (n_systems, 3, 3) tensor, hartree
        With ``compute_virial``: ``-dE/d(strain)``.

        All are differentiable to any order in positions, cell and damping parameters, except for the three-body energy.

    Raises
    ------
    ValueError, TypeError
        An invalid argument, named in the message; an element without parameters.
    """
    separate: dict[str, Any] = {"rcov": covalent_radii, "r4r2": r4r2, "c6ab": c6_reference, "cn_ref": coord_num_ref}
    if d3_params is None:
        names = ("covalent_radii", "r4r2", "c6_reference", "coord_num_ref")
        missing = [name for name, value in zip(names, separate.values()) if value is None]
        if missing:
            raise ValueError(f"`d3_params` is needed, or all of its parts; missing: {', '.join(missing)}")
        d3_params = _from_parts(separate)
    elif any(value is not None for value in separate.values()):
        raise ValueError("`d3_params` is given, and parts of it as well: give one or the other")
    elif not isinstance(d3_params, D3Parameters | ReferenceStates):
        d3_params = _from_parts(tables_of(d3_params))
    checks.check_positions(positions, finite=False)
    checks.check_same_device(device, positions)
    on, off = checks.as_float("s5_smoothing_on", s5_smoothing_on), checks.as_float("s5_smoothing_off", s5_smoothing_off)
    if not on >= 0.0:
        raise ValueError(f"`s5_smoothing_on` must not be negative, got {on}")
    if not off > 0.0:
        raise ValueError(f"`s5_smoothing_off` must be positive, got {off}")
    ranges = ranges_of(cutoff, coordination_cutoff, three_body_cutoff, None)
    if off < min(on, NO_SMOOTHING):
        raise ValueError(f"`s5_smoothing_off` = {off} must not be smaller than `s5_smoothing_on` = {on}")
    if off < NO_SMOOTHING:
        if cutoff is not None and cutoff < off:
            raise ValueError(f"`cutoff` = {cutoff} must not be smaller than `s5_smoothing_off` = {off}")
        ranges = Ranges(Range(off, on if on < off else None), *ranges[1:])
    of_list, of_matrix = (neighbor_list, neighbor_ptr, unit_shifts), (neighbor_matrix, neighbor_matrix_shifts)
    given = GivenNeighbors(*of_list, *of_matrix, fill_value, half_list, shifts_name="unit_shifts")
    request = check_pair_request(True, compute_virial, "system")
    settings = Settings(RationalDamping(a1, a2, s8, s6), ranges, k1, k3, s9, request, num_systems)
    atoms = System(positions, None, cell, batch_idx, None, numbers)
    return dispersion_sum(atoms, d3_params, settings, given)


def _from_parts(parts: dict[str, Any]) -> D3Parameters:
    """`D3Parameters` made of these tensors, which are copied only inside ``torch.compile``."""
    table = parts["c6ab"]
    mesh = table.shape[-1] if isinstance(table, torch.Tensor) and table.ndim else 0
    return D3Parameters._of(parts, mesh) if may_read() else D3Parameters(**parts, interp_mesh=mesh)
