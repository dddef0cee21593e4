"""`neighbor_list`, the public function that builds neighbor lists; `lists_by_method` has one function per method."""

from typing import Any

import torch

from nvalchemiops.compat.ignored_arguments import ignore
from nvalchemiops.torch import checks
from nvalchemiops.torch.neighbors.driver import Form, Room, Systems, Tensors, build, build_two, method_number
from nvalchemiops.torch.types import Pbc


def neighbor_list(
    positions: torch.Tensor,
    cutoff: float | None = None,
    cell: torch.Tensor | None = None,
    pbc: Pbc | None = None,
    batch_idx: torch.Tensor | None = None,
    batch_ptr: torch.Tensor | None = None,
    cutoff2: float | None = None,
    half_fill: bool = False,
    fill_value: int | None = None,
    return_neighbor_list: bool = False,
    method: str | None = None,
    wrap_positions: bool = True,
    *,
    max_neighbors: int | None = None,
    max_neighbors1: int | None = None,
    max_neighbors2: int | None = None,
    return_vectors: bool = False,
    return_distances: bool = False,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    num_neighbors: torch.Tensor | None = None,
    neighbor_matrix1: torch.Tensor | None = None,
    neighbor_matrix_shifts1: torch.Tensor | None = None,
    num_neighbors1: torch.Tensor | None = None,
    neighbor_matrix2: torch.Tensor | None = None,
    neighbor_matrix_shifts2: torch.Tensor | None = None,
    num_neighbors2: torch.Tensor | None = None,
    neighbor_vectors: torch.Tensor | None = None,
    neighbor_distances: torch.Tensor | None = None,
    rebuild_flags: torch.Tensor | None = None,
    target_indices: torch.Tensor | None = None,
    nearest: int | None = None,
    ties: str = "keep",
    tie_tolerance: float | None = None,
    symmetric: bool = False,
    check: bool = True,
    **without_effect: Any,
) -> Tensors:
    """Find all pairs of atoms closer than ``cutoff``, each with the periodic image of the neighbor.

    Neighbor j of atom i in image S is at ``r_ij = x_j - x_i + S @ cell``. A pair belongs to the list if
    ``|r_ij| < cutoff``, computed in float64. The list is exact for cells of any shape and handedness and for positions
    anywhere. In cells thinner than the cutoff a pair may appear in several images, and an atom may be a neighbor of its
    own images. The order of neighbors within a row is reproducible and depends only on the system of the atom.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
        Atoms may lie outside the cell.
    cutoff : float, length, non-negative
        A cutoff of zero gives no pairs.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
        Rows are lattice vectors, in the dtype of the positions. A single cell holds for all systems. Without a cell
        systems are not periodic, and no shifts are returned (for an exception see ``neighbor_matrix_shifts``).
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        Periodicity along each lattice vector. Vectors along open axes are ignored. With a cell the default is True
        along all axes.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order. The search is fastest if the atoms of a system are contiguous. Atoms of
        different systems are never neighbors.
    batch_ptr : (n_systems + 1,) int32 tensor, optional
        First atom of each system, then n_atoms. ``batch_idx``, ``batch_ptr`` or both may be given.
    cutoff2 : float, length, optional
        Build a second list, for this cutoff, in the same call.
    half_fill : bool, optional
        List each pair once: the direction with i < j, or i = j and the first non-zero entry of S positive.
    fill_value : int, optional
        Padding value of the matrix; n_atoms by default.
    return_neighbor_list : bool, optional
        Return a list of pairs instead of a matrix.
    method : str, optional
        ``"naive"`` tests all pairs of a system; ``"cell_list"`` sorts atoms into bins first. Both find the same pairs.
        By default the faster one is chosen for each system. For compatibility, a name may begin with ``"batch_"`` and
        continue after ``"naive"``, ``"cell_list"`` or ``"cluster_tile"`` (here also a cell list) with ``"_"`` and any
        text, as in ``"naive_scalar"`` and ``"batch_cell_list_atom_centric"``. These parts have no effect, but names
        that end with ``"_dual_cutoff"`` need ``cutoff2``.
    wrap_positions : bool, optional
        Without effect: positions may be anywhere.
    max_neighbors : int, optional
        Width of the matrix. By default the matrix has spare columns, so that it still fits when it is given as memory
        in the next step of a simulation: its width exceeds the longest row by a quarter, and by at least 4 slots, but
        is no more than `estimate_max_neighbors` of the cutoff unless the longest row needs that. It is exactly the
        longest row if int32 could not address more, and 0 without atoms. With ``ties="index"`` the width is
        ``nearest``, unless the list is ``symmetric``; then only checks wait for a GPU. If an atom has more neighbors
        than the given width, the returned matrix is wider and complete, and a `NeighborListWarning` is issued, once for
        each calling line.
    max_neighbors1, max_neighbors2 : int, optional
        Widths for each of two lists; ``max_neighbors`` is another name for the first. Without the second, and memory
        for it, the second matrix has at least as many columns as are asked for here for the first, where values are
        read.
    return_vectors, return_distances : bool, optional
        Also return the displacement vectors r_ij and their lengths, differentiable to any order in positions and cell.
        Padding is zero, with zero gradients.
    neighbor_matrix, neighbor_matrix_shifts, num_neighbors, neighbor_vectors, neighbor_distances : tensors, optional
        Contiguous memory for the results, of the shapes given below. It is filled in place and returned. The width of
        the matrices has precedence over ``max_neighbors``. If an atom has more neighbors, the memory gets the first
        columns (an order independent of distances), ``num_neighbors`` counts all neighbors, *a wider matrix is
        returned* in new memory, and a `NeighborListWarning` is issued: continue with the returned matrix. Shifts given
        without a cell are filled with zeros; only the functions for cell lists then return them.
    neighbor_matrix1, neighbor_matrix_shifts1, num_neighbors1 : tensors, optional
    neighbor_matrix2, neighbor_matrix_shifts2, num_neighbors2 : tensors, optional
        Memory for each of two lists.
    rebuild_flags : (n_systems,) or (1,) bool tensor, optional
        Search only the systems with True. Rows of other systems stay unchanged in the memory, which must be given for
        all results; if a wider matrix is returned, they are copied to it. A system with a row that was cut in an
        earlier call is always searched.
    target_indices : (n_rows,) int32 tensor, optional
        Return rows only for these atoms, in this order, with neighbors among all atoms.
    nearest : int, optional
        List only the ``nearest`` neighbors of each atom within the cutoff, or all if there are fewer. They are selected
        during the search, so that farther neighbors take no memory. The list is not symmetric: i may be among the
        nearest neighbors of j while j is not among the nearest neighbors of i. Cannot be combined with ``cutoff2``, nor
        with ``half_fill`` unless the list is ``symmetric``.
    ties : str, optional
        Neighbors to keep if several have the distance of the last one. ``"keep"``: all whose squared distance exceeds
        the last one by no more than ``tie_tolerance``, so that a row may be longer than ``nearest``.
        ``"index"``: exactly ``nearest``, smallest (j, S) first; here distances count as equal if their squares fall
        into the same of 2^30 steps up to the squared cutoff.
    tie_tolerance : float, squared length, optional
        For ``ties="keep"``; 0.01 by default, which in angstrom² is the value of fairchem's graphs (not strict).
        fairchem measures it from the first neighbor too many: its ``max_neighbors=k`` is ``nearest=k + 1`` here.
    symmetric : bool, optional
        List (i, j, S) and (j, i, -S) if j is among the nearest neighbors of i, or i among the nearest neighbors of j.
    check : bool, optional
        If False, and ``max_neighbors`` or memory is given, values are not read on the host, and nothing waits for a
        GPU. Rows are then cut at the given width, and ``num_neighbors`` still counts all neighbors of an atom. An atom
        whose position is not finite, whose cell is unusable, or whose system does not exist, has a count of 2**31 - 1.
        With a periodic axis its row holds only the atom itself in image 2**31 - 1 along each axis, for which distances
        and sums over pairs are NaN; else it is empty. Other bad values are not detected. The same holds inside
        ``torch.compile``.
    **without_effect
        Names of `nvalchemiops.compat.ignored_arguments.WITHOUT_EFFECT`: scratch memory and choices of another
        implementation, such as ``strategy`` and ``atom_to_cell_mapping``. They are ignored.

    Returns
    -------
    neighbor_matrix : (n_atoms, width) int32 tensor
        Neighbors of each atom, then padding. With ``return_neighbor_list`` it is replaced by ``neighbor_list``
        (2, n_pairs): i and j of each pair, sorted by i.
    num_neighbors : (n_atoms,) int32 tensor
        Number of neighbors of each atom. With ``return_neighbor_list`` it is replaced by ``neighbor_ptr``
        (n_atoms + 1,): the first pair of each atom, then n_pairs.
    shifts : (n_atoms, width, 3) or (n_pairs, 3) int32 tensor
        S of each neighbor. Returned only with a cell.
    distances : (n_atoms, width) or (n_pairs,) tensor
        If requested, in the dtype of the positions.
    vectors : (n_atoms, width, 3) or (n_pairs, 3) tensor
        If requested, in the dtype of the positions.

    With ``cutoff2`` all results of the first list are followed by those of the second. With ``target_indices`` there
    are n_rows rows instead of n_atoms, and row r of the matrix belongs to atom ``target_indices[r]``. In a list of
    pairs i is the number of the atom, and the pairs are sorted by row.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message: shapes, dtypes, devices, a negative cutoff, positions that are not
        finite, a singular cell along a periodic axis, ``pbc`` without a cell, a ``batch_idx`` out of range, an unknown
        argument.
    NeighborOverflowError
        An atom has more neighbors than columns, and a matrix that is wide enough exceeds the memory or the range of
        int32.

    Notes
    -----
    Without ``max_neighbors`` the sizes of the results depend on the positions, so the search waits for a GPU once;
    under ``torch.compile`` they are unbacked sizes. With ``max_neighbors`` and ``check=False`` there is no wait.
    """
    ignore("neighbor_list", without_effect)
    systems = Systems(positions, cell, pbc, batch_idx, batch_ptr, target_indices, rebuild_flags)
    selection = (nearest, ties, tie_tolerance, symmetric)
    form = Form(half_fill, fill_value, return_neighbor_list, return_vectors, return_distances, check, *selection)
    out = Room(
        max_neighbors, neighbor_matrix, neighbor_matrix_shifts, num_neighbors, neighbor_vectors, neighbor_distances
    )
    out1 = Room(max_neighbors1, neighbor_matrix1, neighbor_matrix_shifts1, num_neighbors1)
    out2 = Room(max_neighbors2, neighbor_matrix2, neighbor_matrix_shifts2, num_neighbors2)
    number = method_number(method)
    if cutoff is None:
        raise ValueError("`cutoff` is required")
    if cutoff2 is None:
        if method is not None and method.endswith("_dual_cutoff"):
            raise ValueError(f"`cutoff2` is required by the method '{method}'")
        for suffix, numbered in (("1", out1), ("2", out2)):
            for name, value in zip(Room._fields, numbered):
                if value is not None:
                    raise ValueError(f"`{name}{suffix}` is for one of two lists: give `cutoff2`")
        return build(systems, cutoff, form, out, number)
    if nearest is not None:
        raise ValueError("`nearest` is for one list: leave out `cutoff2`, and ask for the other list in another call")
    for name, value in zip(Room._fields, out):
        if value is not None and name != "max_neighbors":
            raise ValueError(
                f"`{name}` is for one list: with cutoff2 there are `neighbor_matrix1`, `neighbor_matrix2` ..."
            )
    if max_neighbors is not None:
        if max_neighbors1 is not None:
            raise ValueError("`max_neighbors` and `max_neighbors1` are two names of one number: give one of them")
        out1 = out1._replace(max_neighbors=checks.check_count("max_neighbors", max_neighbors))
    return build_two(systems, {"cutoff": cutoff, "cutoff2": cutoff2}, form, out1, out2, number)
