"""Arguments of nvalchemi-toolkit-ops that change no result: they are accepted and not read."""

from typing import Any

# fmt: off
WITHOUT_EFFECT = frozenset([
    # which variant of a kernel runs, and its launch grid
    "strategy", "atom_centric_path", "grid_policy", "max_nbins", "max_tiles_per_group",
    # sizes that a caller has counted before
    "max_atoms_per_system", "max_shifts_per_system", "num_shifts_per_system", "shift_range_per_dimension",
    "shift_offset", "total_shifts",
    # scratch memory
    "cells_per_dimension", "neighbor_search_radius", "cell_offsets", "atom_periodic_shifts", "atom_to_cell_mapping",
    "atoms_per_cell_count", "cell_atom_start_indices", "cell_atom_list", "sorted_positions", "sorted_shifts",
    "positions_wrapped_buffer", "per_atom_cell_offsets_buffer", "inv_cell_buffer",
])
# fmt: on

OPTIONAL_ELSEWHERE = frozenset({"pair_fn", "pair_params", "pair_energies", "pair_forces", "state"})
"""Arguments without an equivalent here: only None, their default there, is accepted."""


def ignore(function: str, given: dict[str, Any]) -> None:
    """Raise a TypeError for the first argument of ``function`` in ``given`` that is not in `WITHOUT_EFFECT`."""
    for name, value in given.items():
        if name not in WITHOUT_EFFECT and (value is not None or name not in OPTIONAL_ELSEWHERE):
            raise TypeError(f"{function}() got an unexpected keyword argument '{name}'")
