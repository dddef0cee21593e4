"""Signatures that existing clients know (../shared/clients.md), and their calls of damped shifted forces.

What they get from other calls is compared with other codes in test_numbers.py, which takes its systems from here.
"""

import inspect

import pytest
import torch

from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.torch import neighbors, spline
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.neighbors import neighbor_list
from tests.reference import pair as pair_reference
from tests.support.systems import SYSTEMS, crystal, triclinic

SIGNATURES = {
    "neighbor_list": "positions, cutoff=None, cell=None, pbc=None, batch_idx=None, batch_ptr=None, cutoff2=None, "
    "half_fill=False, fill_value=None, return_neighbor_list=False, method=None, wrap_positions=True",
    "cell_list": "positions, cutoff, cell, pbc, max_neighbors=None, half_fill=False, fill_value=None, "
    "return_neighbor_list=False, neighbor_matrix=None, neighbor_matrix_shifts=None, num_neighbors=None, "
    "rebuild_flags=None, target_indices=None, return_vectors=False, return_distances=False, neighbor_vectors=None, "
    "neighbor_distances=None",
    "naive_neighbor_list": "positions, cutoff, cell=None, pbc=None, max_neighbors=None, half_fill=False, "
    "fill_value=None, return_neighbor_list=False, neighbor_matrix=None, neighbor_matrix_shifts=None, "
    "num_neighbors=None, rebuild_flags=None, wrap_positions=True, *, return_distances=False, return_vectors=False, "
    "neighbor_vectors=None, neighbor_distances=None, target_indices=None",
    "naive_neighbor_list_dual_cutoff": "positions, cutoff1, cutoff2, pbc=None, cell=None, max_neighbors1=None, "
    "max_neighbors2=None, half_fill=False, fill_value=None, return_neighbor_list=False, neighbor_matrix1=None, "
    "neighbor_matrix2=None, neighbor_matrix_shifts1=None, neighbor_matrix_shifts2=None, num_neighbors1=None, "
    "num_neighbors2=None, rebuild_flags=None, wrap_positions=True",
    "batch_cell_list": "positions, cutoff, cell, pbc, batch_idx, max_neighbors=None, half_fill=False, "
    "fill_value=None, return_neighbor_list=False, neighbor_matrix=None, neighbor_matrix_shifts=None, "
    "num_neighbors=None, rebuild_flags=None, target_indices=None, return_vectors=False, return_distances=False, "
    "neighbor_vectors=None, neighbor_distances=None, batch_ptr=None",
    "batch_naive_neighbor_list": "positions, cutoff, batch_idx=None, batch_ptr=None, pbc=None, cell=None, "
    "max_neighbors=None, half_fill=False, fill_value=None, return_neighbor_list=False, neighbor_matrix=None, "
    "neighbor_matrix_shifts=None, num_neighbors=None, rebuild_flags=None, wrap_positions=True, *, "
    "return_distances=False, return_vectors=False, neighbor_vectors=None, neighbor_distances=None, "
    "target_indices=None",
    "batch_naive_neighbor_list_dual_cutoff": "positions, cutoff1, cutoff2, batch_idx=None, batch_ptr=None, pbc=None, "
    "cell=None, max_neighbors1=None, max_neighbors2=None, half_fill=False, fill_value=None, "
    "return_neighbor_list=False, neighbor_matrix1=None, neighbor_matrix2=None, neighbor_matrix_shifts1=None, "
    "neighbor_matrix_shifts2=None, num_neighbors1=None, num_neighbors2=None, rebuild_flags=None, wrap_positions=True",
    "estimate_cell_list_sizes": "cell, pbc, cutoff, max_nbins=524288, min_cells_per_dimension=4",
    "estimate_batch_cell_list_sizes": "cell, pbc, cutoff, max_nbins=8192, min_cells_per_dimension=4",
    "suggest_neighbor_list_method": "",
    "neighbor_utils.estimate_max_neighbors": "cutoff, atomic_density=0.2, safety_factor=None, "
    "max_neighbors_lower_bound=16",
    "neighbor_utils.get_neighbor_list_from_neighbor_matrix": "neighbor_matrix, num_neighbors, "
    "neighbor_shift_matrix=None, fill_value=-1",
    "rebuild_detection.batch_cell_list_needs_rebuild": "current_positions, batch_idx, cell, pbc",
    "rebuild_detection.batch_neighbor_list_needs_rebuild": "reference_positions, current_positions, batch_idx, "
    "skin_distance_threshold, update_reference_positions=False, cell=None, cell_inv=None, pbc=None, *, "
    "num_systems=None",
    "rebuild_detection.cell_list_needs_rebuild": "current_positions, cell, pbc",
    "rebuild_detection.check_cell_list_rebuild_needed": "current_positions, cell, pbc",
    "rebuild_detection.check_neighbor_list_rebuild_needed": "reference_positions, current_positions, "
    "skin_distance_threshold, update_reference_positions=False, cell=None, cell_inv=None, pbc=None",
    "rebuild_detection.neighbor_list_needs_rebuild": "reference_positions, current_positions, "
    "skin_distance_threshold, update_reference_positions=False, cell=None, cell_inv=None, pbc=None",
}


_COULOMB = (
    "positions, charges, cell, cutoff, alpha=0.0, neighbor_list=None, neighbor_ptr=None, neighbor_shifts=None, "
    "neighbor_matrix=None, neighbor_matrix_shifts=None, fill_value=None, batch_idx=None"
)
ELECTROSTATICS = {
    "coulomb_energy": _COULOMB,
    "coulomb_forces": _COULOMB,
    "coulomb_energy_forces": _COULOMB,
    "dsf_coulomb": "positions, charges, cutoff, alpha=0.2, cell=None, batch_idx=None, neighbor_list=None, "
    "neighbor_ptr=None, unit_shifts=None, neighbor_matrix=None, neighbor_matrix_shifts=None, fill_value=None, "
    "compute_forces=True, compute_virial=False, num_systems=None, device=None",
    "ewald_real_space": "positions, charges, cell, alpha, neighbor_list=None, neighbor_ptr=None, "
    "neighbor_shifts=None, neighbor_matrix=None, neighbor_matrix_shifts=None, mask_value=None, batch_idx=None, "
    "compute_forces=False, compute_charge_gradients=False, compute_virial=False, hybrid_forces=False, *, "
    "energy_reduction='atom'",
    "ewald_reciprocal_space": "positions, charges, cell, k_vectors, alpha, batch_idx=None, compute_forces=False, "
    "compute_charge_gradients=False, compute_virial=False, hybrid_forces=False, *, "
    "max_atoms_per_system=None, energy_reduction='atom'",
    "ewald_summation": "positions, charges, cell, alpha=None, k_vectors=None, k_cutoff=None, batch_idx=None, "
    "neighbor_list=None, neighbor_ptr=None, neighbor_shifts=None, neighbor_matrix=None, "
    "neighbor_matrix_shifts=None, mask_value=None, compute_forces=False, compute_charge_gradients=False, "
    "compute_virial=False, accuracy=1e-06, hybrid_forces=False, pbc=None, slab_correction=False, *, "
    "miller_bounds=None, miller_indices=None, max_atoms_per_system=None, energy_reduction='atom'",
    "particle_mesh_ewald": "positions, charges, cell, alpha=None, mesh_spacing=None, mesh_dimensions=None, "
    "spline_order=None, "  # 5 there; here, too, with a mesh: without one it is chosen
    "batch_idx=None, k_vectors=None, k_squared=None, neighbor_list=None, neighbor_ptr=None, "
    "neighbor_shifts=None, neighbor_matrix=None, neighbor_matrix_shifts=None, mask_value=None, "
    "compute_forces=False, compute_charge_gradients=False, compute_virial=False, accuracy=1e-06, "
    "hybrid_forces=False, pbc=None, slab_correction=False, *, cell_inv_t=None, volume=None, "
    "moduli_x=None, moduli_y=None, moduli_z=None, energy_reduction='atom'",
    "pme_reciprocal_space": "positions, charges, cell, alpha, mesh_dimensions=None, mesh_spacing=None, spline_order=5, "
    "batch_idx=None, k_vectors=None, k_squared=None, compute_forces=False, "
    "compute_charge_gradients=False, compute_virial=False, hybrid_forces=False, *, cell_inv_t=None, "
    "volume=None, moduli_x=None, moduli_y=None, moduli_z=None, energy_reduction='atom'",
    "compute_slab_correction": "positions, charges, cell, pbc, batch_idx=None, compute_forces=False, "
    "compute_charge_gradients=False, "
    "compute_virial=False, *, energy_reduction='atom'",
    "estimate_ewald_parameters": "positions, cell, batch_idx=None, accuracy=1e-06",
    "estimate_pme_parameters": "positions, cell, batch_idx=None, accuracy=1e-06, real_space_cutoff=None, "
    "mesh_safety_factor=1.0, *, "
    "spline_order=5, fft_padding_fraction=0.25",
    "estimate_pme_mesh_dimensions": "cell, alpha, accuracy=1e-06, mesh_safety_factor=1.0, *, spline_order=5, "
    "fft_padding_fraction=0.25",
    "mesh_spacing_to_dimensions": "cell, mesh_spacing, *, spline_order=5, fft_padding_fraction=0.25",
    "generate_k_vectors_ewald_summation": "cell, k_cutoff, miller_bounds=None",
    "generate_ewald_miller_indices": "cell, k_cutoff, miller_bounds=None",
    "k_vectors_from_miller_indices": "cell, miller_indices",
    "generate_k_vectors_pme": "cell, mesh_dimensions, reciprocal_cell=None",
    "generate_k_squared_pme": "cell, mesh_dimensions, reciprocal_cell=None",
    "compute_bspline_moduli_1d": "miller_indices, mesh_N, spline_order",
    "pack_multipole_moments": "charges, dipoles=None, quadrupoles=None, *, trace_atol=1e-08",
    "infer_l_max": "multipole_moments",
    "multipole_electrostatic_energy": "positions, multipole_moments, cell, *, batch_idx=None, sigma, k_cutoff=None, "
    "k_vectors=None, valid_k_counts=None, source_overlap_constants=None, normalize=0, include_self_interaction=False",
    "multipole_ewald_summation": "positions, multipole_moments, cell, idx_j, neighbor_ptr, unit_shifts, *, sigma, "
    "alpha=None, k_cutoff=None, batch_idx=None, accuracy=1e-06, cost_ratio=1.0, half_neighbor_list=False, cache=None",
    "multipole_particle_mesh_ewald": "positions, multipole_moments, cell, idx_j, neighbor_ptr, unit_shifts, *, sigma, "
    "alpha=None, mesh_dimensions=None, spline_order=5, cell_inv_t=None, batch_idx=None, accuracy=1e-06, "
    "cost_ratio=1.0, volume=None, moduli=None, k_squared=None",
    "multipole_electrostatic_features": "positions, multipole_moments, cell, *, batch_idx=None, sigma, "
    "receiver_sigmas, k_cutoff=None, k_vectors=None, feature_max_l=1, density_normalize=0, feature_normalize=1, "
    "include_self_interaction=False, cache=None",
    "estimate_multipole_ewald_parameters": "positions, cell, sigma, batch_idx=None, accuracy=1e-06, cost_ratio=1.0",
    "estimate_multipole_pme_parameters": "positions, cell, sigma, batch_idx=None, accuracy=1e-06, cost_ratio=1.0, *, "
    "spline_order=5, fft_padding_fraction=0.25",
}
SPLINE = {
    "bspline_weight": "u, order",
    "spline_spread": "positions, values, cell, mesh_dims, spline_order=4, batch_idx=None, cell_inv_t=None",
    "spline_gather": "positions, mesh, cell, spline_order=4, batch_idx=None, cell_inv_t=None",
    "spline_gather_vec3": "positions, charges, mesh, cell, spline_order=4, batch_idx=None, cell_inv_t=None",
    "spline_gather_gradient": "positions, charges, mesh, cell, spline_order=4, batch_idx=None, cell_inv_t=None",
    "spline_gather_with_force": "positions, charges, mesh, cell, spline_order=4, batch_idx=None, cell_inv_t=None",
    "spline_spread_channels": "positions, values, cell, mesh_dims, spline_order=4, batch_idx=None",
    "spline_gather_channels": "positions, mesh, cell, spline_order=4, batch_idx=None",
    "compute_bspline_deconvolution": "mesh_dims, spline_order=4, device=None",
    "compute_bspline_deconvolution_1d": "n, spline_order=4, device=None",
}


@pytest.mark.parametrize("name", ELECTROSTATICS)
def test_signatures_of_electrostatics(name):
    check_signature(getattr(electrostatics, name), ELECTROSTATICS[name])


@pytest.mark.parametrize("name", SPLINE)
def test_signatures_of_splines(name):
    check_signature(getattr(spline, name), SPLINE[name])


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_begin_as_clients_know_them(name):
    """Names, order and defaults; ours follow, by keyword only."""
    import nvalchemiops.torch.neighbors.neighbor_utils
    import nvalchemiops.torch.neighbors.rebuild_detection  # noqa: F401

    function = neighbors
    for part in name.split("."):
        function = getattr(function, part)
    if SIGNATURES[name]:
        check_signature(function, SIGNATURES[name])
    else:
        assert callable(function)


def check_signature(function, known_as):
    ours = inspect.signature(function).parameters
    theirs = inspect.signature(eval(f"lambda {known_as}: None")).parameters
    for place, (known, parameter) in enumerate(theirs.items()):
        if parameter.default is not parameter.empty:  # what they must give may be optional here
            assert ours[known].default == parameter.default
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            assert list(ours)[place] == known and ours[known].kind is parameter.kind
    assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for key, p in ours.items() if key not in theirs)


# -- torch-sim ----------------------------------------------------------------------------------------------


def lattices():
    """Systems of every kind in one batch: skewed, left-handed, thin, open, partly open, with a dummy cell."""
    made = [
        (SYSTEMS["rocksalt"](), (True, True, True)),
        (SYSTEMS["triclinic"](), (True, True, True)),
        (crystal("zincblende", 3.6, (3, 1, 1), 0.1), (True, True, True)),
        (SYSTEMS["triclinic"]()._replace(cell=SYSTEMS["triclinic"]().cell[:, [1, 0, 2]]), (True, True, False)),
        (SYSTEMS["cesiumchloride"](), (False, False, False)),
        (SYSTEMS["one atom"](), (True, True, True)),
        (triclinic(9)._replace(cell=torch.eye(3, dtype=torch.float64)[None]), (False, False, False)),
        (triclinic(7)._replace(cell=torch.zeros(1, 3, 3, dtype=torch.float64)), (False, False, False)),
    ]
    return [system for system, _ in made], torch.tensor([pbc for _, pbc in made])


def dsf_reference(x, q, cell, cutoff, alpha):
    """Energy of one system, over all images within reach."""
    reach = 0 if cell is None else 7  # atoms stand up to two cells outside
    cells = torch.cartesian_prod(*[torch.arange(-reach, reach + 1)] * 3).reshape(-1, 3).double()
    images = cells @ (torch.zeros(3, 3, dtype=x.dtype) if cell is None else cell)
    d = x[None, :, None] - x[:, None, None] + images
    other = (d.detach() != 0).any(-1)
    r = torch.where(other[..., None], d, 9.0 * cutoff).norm(dim=-1)  # an atom itself is far away
    u = pair_reference.damped_shifted_force(r, q[:, None, None], q[None, :, None], alpha, torch.tensor(cutoff).double())
    pairs = torch.where(r < cutoff, u, 0.0)
    return 0.5 * pairs.sum() + pair_reference.wolf_self(q, alpha, torch.tensor(cutoff).double()).sum()


# -- AIMNet -------------------------------------------------------------------------------------------------


def test_aimnet_dsf_with_a_padding_atom():
    """The padding atom stands last and counts to system 0; slots equal to its number, a valid one, are padding."""
    generator = torch.Generator().manual_seed(4)
    molecules = [3.0 * torch.rand(n, 3, dtype=torch.float64, generator=generator) for n in (7, 4)]
    charges = [torch.randn(n, dtype=torch.float64, generator=generator) for n in (7, 4)]
    padding = sum(map(len, molecules))
    x = torch.cat([*molecules, torch.zeros(1, 3, dtype=torch.float64)]).requires_grad_()
    q = torch.cat([*charges, torch.zeros(1, dtype=torch.float64)]).requires_grad_()
    batch_idx = torch.tensor([0] * 7 + [1] * 4 + [0], dtype=torch.int32)
    matrix = torch.full((padding + 1, 6), padding, dtype=torch.int32)
    for first, n in ((0, 7), (7, 4)):
        for i in range(first, first + n):
            matrix[i, : n - 1] = torch.tensor([j for j in range(first, first + n) if j != i])
    energy, forces = electrostatics.dsf_coulomb(
        positions=x,
        charges=q,
        cutoff=4.0,
        alpha=0.2,
        batch_idx=batch_idx,
        neighbor_matrix=matrix,
        fill_value=padding,
        compute_forces=True,
        compute_virial=False,
        num_systems=2,
        device="cpu",
    )
    slope, potential = torch.autograd.grad(energy.sum(), (x, q), create_graph=True)
    torch.testing.assert_close(forces, -slope, rtol=1e-12, atol=1e-12)
    assert not forces[-1].any() and not potential[-1].any()
    for n, (molecule, charge) in enumerate(zip(molecules, charges, strict=True)):
        alone = dsf_reference(molecule.requires_grad_(), charge, None, 4.0, 0.2)
        torch.testing.assert_close(energy[n], alone, rtol=1e-12, atol=1e-12)
        (slope,) = torch.autograd.grad(alone, molecule)
        torch.testing.assert_close(forces[:-1][batch_idx[:-1] == n], -slope, rtol=1e-11, atol=1e-11)
    assert torch.autograd.grad(forces.square().sum(), x)[0][:-1].any()


class AdaptiveList:
    """What AIMNet does: guess a width, ask again after an error or by the counts, take the columns that are in use."""

    def __init__(self, cutoff, max_neighbors=8):
        self.cutoff, self.max_neighbors = cutoff, max_neighbors

    def __call__(self, positions, cell=None, pbc=None, batch_idx=None, fill_value=None):
        where = {"method": "batch_naive"} if cell is None else {"cell": cell, "pbc": pbc}
        while True:
            try:
                matrix, count, *shifts = neighbor_list(
                    positions=positions,
                    cutoff=self.cutoff,
                    batch_idx=batch_idx,
                    max_neighbors=self.max_neighbors,
                    half_fill=False,
                    fill_value=fill_value,
                    **where,
                )
            except NeighborOverflowError as error:
                assert error.num_neighbors > self.max_neighbors
                self.max_neighbors = (error.num_neighbors + 15) // 16 * 16
                continue
            most = int(count.max())
            if not 0.5 * self.max_neighbors <= most <= self.max_neighbors:
                self.max_neighbors = max(16, (int(most / 0.75) + 15) // 16 * 16)
                if most > self.max_neighbors:
                    continue
            return matrix[:, : max(1, most)], count, *(images[:, : max(1, most)] for images in shifts)
