"""Public function for the slab correction: systems that are periodic along two axes."""

import torch

from nvalchemiops.torch.interactions.electrostatics.results import check_gradients, check_request
from nvalchemiops.torch.interactions.electrostatics.sums import evaluate, one_or_several
from nvalchemiops.torch.interactions.electrostatics.system import check_system
from nvalchemiops.torch.interactions.electrostatics.terms.slab import SlabTerm
from nvalchemiops.torch.systems import System
from nvalchemiops.torch.types import Pbc, Tensors


def compute_slab_correction(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
    pbc: Pbc,
    batch_idx: torch.Tensor | None = None,
    compute_forces: bool = False,
    compute_charge_gradients: bool = False,
    compute_virial: bool = False,
    *,
    energy_reduction: str = "atom",
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    widths: float | torch.Tensor | None = None,
    compute_dipole_gradients: bool = False,
    compute_quadrupole_gradients: bool = False,
) -> Tensors:
    """Correction of an Ewald sum for systems that are periodic along two axes only (Yeh and Berkowitz 1999).

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
        The boundary of the cell along the open axis must not cut the slab: do not wrap its atoms along this axis.
    charges : (n_atoms,) or (n_atoms, n_channels) tensor, charge
        The system may have a net charge.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
        Needs enough vacuum along the open axis: the neglected corrections of higher order decrease exponentially with
        it. The open lattice vector may be tilted.
    pbc : (3,) or (n_systems, 3) bool tensor
        Any one axis may be open. The correction is zero for a system without an open axis.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    compute_forces, compute_charge_gradients, compute_virial : bool, optional
    energy_reduction : {"atom", "system"}, optional
    dipoles, quadrupoles, widths, compute_dipole_gradients, compute_quadrupole_gradients
        As for `ewald_summation`.

    Returns
    -------
    energies, forces, charge_gradients, dipole_gradients, quadrupole_gradients, virial
        As from `ewald_summation`; differentiable to any order.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; more than one open axis. On a GPU values are not read, and the results of
        a system with several open axes are NaN.

    Notes
    -----
    Formula and sources: `nvalchemiops.torch.interactions.electrostatics.terms.slab`.
    """
    wanted = compute_forces, compute_charge_gradients, compute_virial, energy_reduction, False
    request = check_request(*wanted, compute_dipole_gradients, compute_quadrupole_gradients)
    atoms = System(positions, charges, cell, batch_idx, pbc, None, None, dipoles, quadrupoles, widths)
    check_gradients(request, atoms)
    system = check_system(atoms, slab_correction=True)
    return one_or_several(evaluate([SlabTerm()], system, request, is_constant=False))
