"""Parameters of the JAX functions of nvalchemi-toolkit-ops 0.5.0, as `inspect.signature` gives them."""

SIGNATURES = {
    "neighbors": {
        "neighbor_list": (
            "positions, cutoff=None, cell=None, pbc=None, batch_idx=None, batch_ptr=None, cutoff2=None, "
            "half_fill=False, fill_value=None, return_neighbor_list=False, method=None, wrap_positions=True, "
            "*, grid_policy='configured', state=None"
        ),
        "naive_neighbor_list": (
            "positions, cutoff, cell=None, pbc=None, max_neighbors=None, half_fill=False, fill_value=None, "
            "return_neighbor_list=False, neighbor_matrix=None, neighbor_matrix_shifts=None, "
            "num_neighbors=None, shift_range_per_dimension=None, num_shifts_per_system=None, "
            "max_shifts_per_system=None, rebuild_flags=None, wrap_positions=True, inv_cell_buffer=None, "
            "positions_wrapped_buffer=None, per_atom_cell_offsets_buffer=None, strategy='auto', *, "
            "coo_capacity=None, return_distances=False, return_vectors=False, neighbor_vectors=None, "
            "neighbor_distances=None, target_indices=None, pair_fn=None, pair_params=None, "
            "pair_energies=None, pair_forces=None, inv_cell=None, positions_wrapped=None, "
            "per_atom_cell_offsets=None, graph_mode='none'"
        ),
        "batch_naive_neighbor_list": (
            "positions, cutoff, batch_idx=None, batch_ptr=None, pbc=None, cell=None, max_neighbors=None, "
            "half_fill=False, fill_value=None, return_neighbor_list=False, neighbor_matrix=None, "
            "neighbor_matrix_shifts=None, num_neighbors=None, shift_range_per_dimension=None, "
            "num_shifts_per_system=None, max_shifts_per_system=None, max_atoms_per_system=None, "
            "rebuild_flags=None, wrap_positions=True, positions_wrapped_buffer=None, "
            "per_atom_cell_offsets_buffer=None, inv_cell_buffer=None, strategy='auto', *, coo_capacity=None, "
            "return_distances=False, return_vectors=False, neighbor_vectors=None, neighbor_distances=None, "
            "target_indices=None, pair_fn=None, pair_params=None, pair_energies=None, pair_forces=None"
        ),
        "naive_neighbor_list_dual_cutoff": (
            "positions, cutoff1, cutoff2, pbc=None, cell=None, max_neighbors1=None, max_neighbors2=None, "
            "half_fill=False, fill_value=None, return_neighbor_list=False, neighbor_matrix1=None, "
            "neighbor_matrix2=None, neighbor_matrix_shifts1=None, neighbor_matrix_shifts2=None, "
            "num_neighbors1=None, num_neighbors2=None, shift_range_per_dimension=None, "
            "num_shifts_per_system=None, max_shifts_per_system=None, rebuild_flags=None, wrap_positions=True, "
            "positions_wrapped_buffer=None, per_atom_cell_offsets_buffer=None, inv_cell_buffer=None, "
            "coo_capacity=None"
        ),
        "batch_naive_neighbor_list_dual_cutoff": (
            "positions, cutoff1, cutoff2, batch_idx=None, batch_ptr=None, pbc=None, cell=None, "
            "max_neighbors1=None, max_neighbors2=None, half_fill=False, fill_value=None, "
            "return_neighbor_list=False, neighbor_matrix1=None, neighbor_matrix2=None, "
            "neighbor_matrix_shifts1=None, neighbor_matrix_shifts2=None, num_neighbors1=None, "
            "num_neighbors2=None, shift_range_per_dimension=None, num_shifts_per_system=None, "
            "max_shifts_per_system=None, max_atoms_per_system=None, rebuild_flags=None, wrap_positions=True, "
            "positions_wrapped_buffer=None, per_atom_cell_offsets_buffer=None, inv_cell_buffer=None, "
            "coo_capacity=None"
        ),
        "cell_list": (
            "positions, cutoff, cell=None, pbc=None, max_neighbors=None, max_total_cells=None, "
            "return_neighbor_list=False, half_fill=False, fill_value=None, strategy='auto', "
            "atom_centric_path='auto', cells_per_dimension=None, neighbor_search_radius=None, "
            "atom_periodic_shifts=None, atom_to_cell_mapping=None, atoms_per_cell_count=None, "
            "cell_atom_start_indices=None, cell_atom_list=None, sorted_positions=None, "
            "sorted_atom_periodic_shifts=None, neighbor_matrix=None, neighbor_matrix_shifts=None, "
            "num_neighbors=None, graph_mode='none', target_indices=None, return_vectors=False, "
            "return_distances=False, pair_fn=None, pair_params=None, neighbor_vectors=None, "
            "neighbor_distances=None, pair_energies=None, pair_forces=None, coo_capacity=None, "
            "pair_centric_n_outer=None, *, grid_policy='configured'"
        ),
        "batch_cell_list": (
            "positions, cutoff, cell=None, pbc=None, batch_idx=None, batch_ptr=None, max_neighbors=None, "
            "max_total_cells=None, neighbor_matrix_shifts=None, return_neighbor_list=False, half_fill=False, "
            "fill_value=None, strategy='auto', atom_centric_path='auto', target_indices=None, "
            "return_vectors=False, return_distances=False, pair_fn=None, pair_params=None, "
            "neighbor_vectors=None, neighbor_distances=None, pair_energies=None, pair_forces=None, "
            "coo_capacity=None, pair_centric_total_cells=None, pair_centric_n_outer=None, "
            "pair_centric_r_max=None, *, grid_policy='configured'"
        ),
        "estimate_max_neighbors": ("cutoff, atomic_density=0.2, safety_factor=None, max_neighbors_lower_bound=16"),
        "estimate_cell_list_sizes": "positions, cell, cutoff, pbc=None, buffer_factor=1.5",
        "estimate_batch_cell_list_sizes": (
            "positions, batch_ptr=None, batch_idx=None, cell=None, cutoff=5.0, pbc=None, buffer_factor=1.5, "
            "*, capacity_strategy='volume'"
        ),
        "get_neighbor_list_from_neighbor_matrix": (
            "neighbor_matrix, num_neighbors, neighbor_shift_matrix=None, fill_value=-1"
        ),
        "neighbor_list_needs_rebuild": (
            "reference_positions, current_positions, skin_distance_threshold, cell=None, cell_inv=None, pbc=None"
        ),
        "check_neighbor_list_rebuild_needed": (
            "reference_positions, current_positions, skin_distance_threshold, cell=None, cell_inv=None, pbc=None"
        ),
        "prepare_neighbor_list": (
            "positions, cutoff, cell=None, pbc=None, batch_idx=None, batch_ptr=None, cutoff2=None, "
            "half_fill=False, fill_value=None, return_neighbor_list=False, method=None, format=None, "
            "wrap_positions=True, *, max_neighbors=None, max_neighbors1=None, max_neighbors2=None, "
            "atomic_density=None, coo_capacity=None, max_tiles_per_group=None, return_vectors=False, "
            "return_distances=False, selective=False, pair_fn=None, span_margin=0.0, target_indices=None, "
            "strategy='auto', atom_centric_path='auto', fixed_cell=False"
        ),
        "check_neighbor_list_state": "state",
    },
    "interactions.electrostatics": {
        "coulomb_energy": (
            "positions, charges, cell, cutoff, alpha=0.0, neighbor_list=None, neighbor_ptr=None, "
            "neighbor_shifts=None, neighbor_matrix=None, neighbor_matrix_shifts=None, fill_value=None, "
            "batch_idx=None"
        ),
        "coulomb_forces": (
            "positions, charges, cell, cutoff, alpha=0.0, neighbor_list=None, neighbor_ptr=None, "
            "neighbor_shifts=None, neighbor_matrix=None, neighbor_matrix_shifts=None, fill_value=None, "
            "batch_idx=None"
        ),
        "coulomb_energy_forces": (
            "positions, charges, cell, cutoff, alpha=0.0, neighbor_list=None, neighbor_ptr=None, "
            "neighbor_shifts=None, neighbor_matrix=None, neighbor_matrix_shifts=None, fill_value=None, "
            "batch_idx=None"
        ),
        "ewald_real_space": (
            "positions, charges, cell, alpha, neighbor_list=None, neighbor_ptr=None, neighbor_shifts=None, "
            "neighbor_matrix=None, neighbor_matrix_shifts=None, mask_value=None, batch_idx=None, "
            "compute_forces=False, compute_charge_gradients=False, compute_virial=False, *, "
            "energy_reduction='atom'"
        ),
        "ewald_reciprocal_space": (
            "positions, charges, cell, k_vectors, alpha, batch_idx=None, max_atoms_per_system=None, "
            "compute_forces=False, compute_charge_gradients=False, compute_virial=False, *, "
            "energy_reduction='atom'"
        ),
        "ewald_summation": (
            "positions, charges, cell, alpha=None, k_vectors=None, k_cutoff=None, batch_idx=None, "
            "max_atoms_per_system=None, neighbor_list=None, neighbor_ptr=None, neighbor_shifts=None, "
            "neighbor_matrix=None, neighbor_matrix_shifts=None, mask_value=None, compute_forces=False, "
            "compute_charge_gradients=False, compute_virial=False, accuracy=1e-06, hybrid_forces=False, "
            "pbc=None, slab_correction=False, *, miller_bounds=None, miller_indices=None, "
            "energy_reduction='atom'"
        ),
        "pme_reciprocal_space": (
            "positions, charges, cell, alpha, mesh_dimensions=None, mesh_spacing=None, spline_order=5, "
            "batch_idx=None, k_vectors=None, k_squared=None, compute_forces=False, "
            "compute_charge_gradients=False, compute_virial=False, hybrid_forces=False, *, "
            "energy_reduction='atom', cell_inv_t=None, volume=None, moduli_x=None, moduli_y=None, "
            "moduli_z=None"
        ),
        "particle_mesh_ewald": (
            "positions, charges, cell, alpha=None, mesh_spacing=None, mesh_dimensions=None, spline_order=None, "
            "batch_idx=None, k_vectors=None, k_squared=None, neighbor_list=None, neighbor_ptr=None, "
            "neighbor_shifts=None, neighbor_matrix=None, neighbor_matrix_shifts=None, mask_value=None, "
            "compute_forces=False, compute_charge_gradients=False, compute_virial=False, accuracy=1e-06, "
            "hybrid_forces=False, pbc=None, slab_correction=False, *, energy_reduction='atom', "
            "cell_inv_t=None, volume=None, moduli_x=None, moduli_y=None, moduli_z=None"
        ),
        "compute_slab_correction": (
            "positions, charges, cell, pbc, batch_idx=None, compute_forces=False, "
            "compute_charge_gradients=False, compute_virial=False, *, energy_reduction='atom'"
        ),
        "estimate_ewald_parameters": "positions, cell, batch_idx=None, accuracy=1e-06",
        "estimate_pme_parameters": (
            "positions, cell, batch_idx=None, accuracy=1e-06, real_space_cutoff=None, mesh_safety_factor=1.0, "
            "*, spline_order=5, fft_padding_fraction=0.25"
        ),
        "estimate_pme_mesh_dimensions": (
            "cell, alpha, accuracy=1e-06, mesh_safety_factor=1.0, *, spline_order=5, fft_padding_fraction=0.25"
        ),
        "mesh_spacing_to_dimensions": "cell, mesh_spacing, *, spline_order=5, fft_padding_fraction=0.25",
        "generate_ewald_miller_indices": "cell, k_cutoff, miller_bounds=None",
        "generate_k_squared_pme": "cell, mesh_dimensions, reciprocal_cell=None",
        "generate_k_vectors_ewald_summation": "cell, k_cutoff, miller_bounds=None",
        "generate_k_vectors_pme": "cell, mesh_dimensions, reciprocal_cell=None",
        "k_vectors_from_miller_indices": "cell, miller_indices",
        "compute_bspline_moduli_1d": "miller_indices, mesh_N, spline_order",
    },
    "interactions.dispersion": {
        "dftd3": (
            "positions, numbers, a1, a2, s8, k1=16.0, k3=-4.0, s6=1.0, s5_smoothing_on=10000000000.0, "
            "s5_smoothing_off=10000000000.0, fill_value=None, d3_params=None, covalent_radii=None, r4r2=None, "
            "c6_reference=None, coord_num_ref=None, batch_idx=None, cell=None, neighbor_matrix=None, "
            "neighbor_matrix_shifts=None, neighbor_list=None, neighbor_ptr=None, unit_shifts=None, "
            "compute_virial=False, num_systems=None"
        ),
    },
    "segment_ops": {
        "segmented_dot": "x, y, idx, num_segments",
        "segmented_matvec": "v, m, idx, num_segments",
        "segmented_mean": "x, idx, num_segments",
        "segmented_mul": "x, y, idx, num_segments",
        "segmented_rms_norm": "x, idx, num_segments",
        "segmented_sum": "x, idx, num_segments",
    },
    "spline": {
        "bspline_weight": "u, order",
        "spline_spread": ("positions, values, cell, mesh_dims, spline_order=4, batch_idx=None, cell_inv_t=None"),
        "spline_gather": "positions, mesh, cell, spline_order=4, batch_idx=None, cell_inv_t=None",
        "spline_gather_vec3": "positions, charges, mesh, cell, spline_order=4, batch_idx=None",
        "spline_gather_gradient": ("positions, charges, mesh, cell, spline_order=4, batch_idx=None, cell_inv_t=None"),
        "spline_spread_channels": "positions, values, cell, mesh_dims, spline_order=4, batch_idx=None",
        "spline_gather_channels": "positions, mesh, cell, spline_order=4, batch_idx=None",
        "compute_bspline_deconvolution": "mesh_dims, spline_order=4",
        "compute_bspline_deconvolution_1d": "n, spline_order=4",
    },
}
