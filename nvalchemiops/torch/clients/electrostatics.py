"""Parts of Ewald sums that nvalchemi-toolkit puts together itself.

Energies here are those of `ewald_summation`: a charge q in a system of total charge Q, volume V and splitting parameter
alpha has the self energy ``-alpha q²/√π`` and, in the neutralising background, ``-π q Q / (2 alpha² V)``. All functions
are differentiable to any order.
"""

import math
from typing import Any

import torch

from nvalchemiops.torch.interactions.electrostatics.k_vectors import check_cells_alone, per_system

AT_ORIGIN = 1e-11
"""Values of k² up to this mean the origin, where `generate_k_vectors_pme` has 1e-12; 1/Å², of waves of 200 µm."""


def ensure_electrostatics_ops_registered() -> None:
    """Nothing is left to do: ops are registered when they are imported."""


register_pme_ops = ensure_electrostatics_ops_registered


class _InjectChargeGrad:
    """Energies that are known, with gradients with respect to charges that are known as well."""

    @staticmethod
    def apply(
        energies: torch.Tensor, charges: torch.Tensor, charge_gradients: torch.Tensor, batch_idx: Any = None
    ) -> torch.Tensor:
        """The energies (n_atoms,), whose sum over a system has these gradients (n_atoms,)."""
        return energies + (charge_gradients.detach() * (charges - charges.detach())).to(energies.dtype)


def ewald_energy_corrections(
    raw_energies: torch.Tensor,
    charges: torch.Tensor,
    volume: torch.Tensor,
    alpha: torch.Tensor,
    total_charge: torch.Tensor,
) -> torch.Tensor:
    """Energies (n_atoms,) of a reciprocal sum, with self energies and background.

    Parameters
    ----------
    raw_energies, charges : (n_atoms,) tensors
    volume, alpha, total_charge : (1,) tensors
        Of the system. The total charge may be that of atoms elsewhere, too.
    """
    return raw_energies - (_correction(charges, volume, alpha, total_charge) * charges).to(raw_energies.dtype)


def ewald_energy_corrections_batch(
    raw_energies: torch.Tensor,
    charges: torch.Tensor,
    batch_idx: torch.Tensor,
    volume: torch.Tensor,
    alpha: torch.Tensor,
    total_charge: torch.Tensor,
) -> torch.Tensor:
    """`ewald_energy_corrections` for several systems: ``volume``, ``alpha`` and ``total_charge`` are (n_systems,)."""
    of_atoms = (values.index_select(0, batch_idx) for values in (volume, alpha, total_charge))
    return ewald_energy_corrections(raw_energies, charges, *of_atoms)


def _pme_energy_corrections(potentials: torch.Tensor, charges: torch.Tensor, *of_system: torch.Tensor) -> torch.Tensor:
    """The energies of charges in half of the potential, as it comes from a mesh."""
    return ewald_energy_corrections(potentials * charges, charges, *of_system)


def _batch_pme_energy_corrections(
    potentials: torch.Tensor, charges: torch.Tensor, batch_idx: torch.Tensor, *of_systems: torch.Tensor
) -> torch.Tensor:
    return ewald_energy_corrections_batch(potentials * charges, charges, batch_idx, *of_systems)


def _pme_energy_corrections_with_charge_grad(
    potentials: torch.Tensor, charges: torch.Tensor, *of_system: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Energies, and the gradient of their sum over the system with respect to charges."""
    gradients = 2.0 * (potentials - _correction(charges, *of_system).to(potentials.dtype))
    return _pme_energy_corrections(potentials, charges, *of_system), gradients


def _batch_pme_energy_corrections_with_charge_grad(
    potentials: torch.Tensor, charges: torch.Tensor, batch_idx: torch.Tensor, *of_systems: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    of_atoms = [values.index_select(0, batch_idx) for values in of_systems]
    return _pme_energy_corrections_with_charge_grad(potentials, charges, *of_atoms)


def _correction(
    charges: torch.Tensor, volume: torch.Tensor, alpha: torch.Tensor, total_charge: torch.Tensor
) -> torch.Tensor:
    """Self energy and background of each charge, divided by it: half of their gradient."""
    return alpha / math.sqrt(math.pi) * charges + math.pi / 2.0 * total_charge / (alpha * alpha * volume)


def _prepare_cell(cell: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Cells (n_systems, 3, 3), and their number."""
    cells = check_cells_alone(cell)
    return cells, cells.shape[0]


def _prepare_alpha(alpha: Any, num_systems: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The splitting parameter of each system (n_systems,)."""
    return per_system("alpha", alpha, num_systems, device).to(dtype)


def pme_fused_convolve(
    mesh_fft: torch.Tensor,
    k_squared: torch.Tensor,
    moduli_x: torch.Tensor,
    moduli_y: torch.Tensor,
    moduli_z: torch.Tensor,
    alpha: torch.Tensor,
    volume: torch.Tensor,
    is_batch: bool,
    is_compiled: bool = False,
) -> torch.Tensor:
    """Half of the potential, in Fourier space, of charges that were spread to a mesh by splines.

    Parameters
    ----------
    mesh_fft : ([n_systems,] n_x, n_y, n_z // 2 + 1) complex tensor
        From ``torch.fft.rfftn``.
    k_squared : tensor of the same shape, or without systems
        From `generate_k_vectors_pme`.
    moduli_x, moduli_y, moduli_z : (n_x,), (n_y,) and (n_z // 2 + 1,) tensors
        From `compute_bspline_moduli_1d`. The spline's own transform is divided out twice, for spreading and gathering.
    alpha, volume : (n_systems,) tensors
    is_batch : bool
        Whether ``mesh_fft`` has an axis of systems.
    is_compiled : bool, optional
        Ignored.
    """
    shape = (-1, 1, 1, 1) if is_batch else (1, 1, 1)
    alpha, volume = alpha.reshape(shape), volume.reshape(shape)
    moduli = moduli_x[:, None, None] * moduli_y[:, None] * moduli_z
    origin = k_squared <= AT_ORIGIN
    k_squared = torch.where(origin, 1.0, k_squared)
    green = 2.0 * math.pi / volume * torch.exp(-0.25 * k_squared / (alpha * alpha)) / (k_squared * moduli * moduli)
    return mesh_fft * torch.where(origin, 0.0, green).to(mesh_fft.real.dtype)


def _compute_pme_reciprocal_virial(
    mesh_fft_raw: torch.Tensor,
    convolved_mesh: torch.Tensor,
    k_vectors: torch.Tensor,
    k_squared: torch.Tensor,
    alpha: torch.Tensor,
    mesh_dimensions: Any,
    is_batch: bool,
    device: Any = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Minus the derivative (n_systems, 3, 3) of the energy on the mesh with respect to a strain.

    A wave of energy E has the virial ``E (1 - 2 (1/k² + 1/4α²) k k^T)``: charges keep their places on the mesh.
    """
    n = mesh_dimensions[2]
    waves = torch.arange(n // 2 + 1, device=mesh_fft_raw.device)
    # of a real mesh only half of the waves are there; the planes that are their own mirror images count once
    doubled = torch.where((waves == 0) | (2 * waves == n), 1.0, 2.0)
    energy = (mesh_fft_raw.conj() * convolved_mesh).real.to(torch.float64) * doubled
    origin = k_squared <= AT_ORIGIN
    inverse = 1.0 / torch.where(origin, 1.0, k_squared).to(torch.float64)
    slope = 2.0 * energy * (inverse + 0.25 / alpha.to(torch.float64).reshape(-1, 1, 1, 1).square())
    slope, energy = (values.reshape(-1, *values.shape[-3:]).flatten(1) for values in (slope, energy))
    waves = k_vectors.to(torch.float64).reshape(-1, slope.shape[1], 3)
    dyads = (waves * slope.unsqueeze(2)).mT @ waves
    identity = torch.eye(3, dtype=torch.float64, device=energy.device)
    return (energy.sum(1)[:, None, None] * identity - dyads).to(dtype)


# The client calls it as an op. It is one that consists of others, so it has their derivatives, and is not exported.
_library = torch.library.Library("nvalchemiops", "FRAGMENT")
_library.define(
    "pme_fused_convolve(Tensor mesh_fft, Tensor k_squared, Tensor moduli_x, Tensor moduli_y, Tensor moduli_z, "
    "Tensor alpha, Tensor volume, bool is_batch, bool is_compiled=False) -> Tensor"
)
_library.impl("pme_fused_convolve", pme_fused_convolve, "CompositeImplicitAutograd")
