"""`neighbor_list`, the public function that builds neighbor lists; those by method are in `lists_by_method`."""

from typing import Any

import torch

from nvalchemiops.compat.ignored_arguments import ignore
from nvalchemiops.torch import checks
from nvalchemiops.torch.neighbors.driver import Form, Room, Systems, Tensors, build, build_two, method_number


def neighbor_list(
    positions: torch.Tensor,
    cutoff: float | None = None,
    cell: torch.Tensor | None = None,
    pbc: torch.Tensor | None = None,
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
    """Find all pairs of atoms closer than ``cutoff``, each with the image of the cell that the neighbor is in.

    Neighbor j of atom i in image S is at ``r_ij = x_j - x_i + S @ cell``; a pair belongs to the list if
    ``|r_ij| < cutoff``, computed in float64. The list is exact for cells of any shape and handedness, also thinner
    than the cutoff (then one pair appears in several images, and an atom may neighbor its own images), and for
    positions anywhere. The order of neighbors within a row depends on the atom's own system only, and is the
    same each time.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
        Inside the cell or not.
    cutoff : float, length, not negative
        With zero there are no pairs.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length, optional
        Rows are lattice vectors; dtype as the positions. A single one holds for all systems. Without it nothing is
        periodic, and no shifts are returned, with one exception below.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        Periodicity along each lattice vector; along a False axis the cell never matters. With a cell the default is
        True along all axes.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order; fastest where the atoms of a system follow each other. Atoms of different
        systems are never neighbors.
    batch_ptr : (n_systems + 1,) int32 tensor, optional
        First atom of each system, then n_atoms. Either or both of the two may be given.
    cutoff2 : float, length, optional
        Build a second list, for this cutoff, in the same call.
    half_fill : bool, optional
        List each pair once: the direction with i < j, or i = j and the first non-zero entry of S positive.
    fill_value : int, optional
        Padding of the matrix; n_atoms by default.
    return_neighbor_list : bool, optional
        Return a list of pairs instead of a matrix.
    method : str, optional
        ``"naive"`` tests all pairs of a system, ``"cell_list"`` sorts atoms into bins first; both find the same pairs.
        By default the faster one is chosen for each system. Other accepted names start with one of these or with
        ``"cluster_tile"``, which is a cell list here, and go on with ``"_"``; ``"batch_"`` may precede them:
        ``"naive_scalar"``, ``"batch_cell_list_atom_centric"``. The rest of the name has no effect, but names that end
        with ``"_dual_cutoff"`` need ``cutoff2``.
    wrap_positions : bool, optional
        Without effect: positions may be anywhere.
    max_neighbors : int, optional
        Width of the matrix, and the most neighbors an atom may have. By default the matrix has room to spare, so that
        it still fits when it is given as memory in the next step of a simulation: the width is a quarter more than the
        longest row, at least 4 slots more, but no more than `estimate_max_neighbors` of the cutoff unless the longest
        row needs that; exactly the longest row if int32 could not address more. Without atoms it is 0. With
        ``ties="index"`` it is ``nearest``, unless the list is ``symmetric``, and nothing waits for a GPU but checks.
        A width that is given holds as long as all neighbors fit. Where an atom has more, the matrix is wider, nothing
        is cut, and a `NeighborListWarning` says so, once for a line of the caller.
    max_neighbors1, max_neighbors2 : int, optional
        The same for each of two lists; ``max_neighbors`` is another name of the first.
    return_vectors, return_distances : bool, optional
        Also return the displacement vectors r_ij and their lengths, with gradients of any order to positions and
        cell. Padding is zero, with zero gradients.
    neighbor_matrix, neighbor_matrix_shifts, num_neighbors, neighbor_vectors, neighbor_distances : tensors, optional
        Memory for the results, of the shapes given below, contiguous, which is filled in place and returned. The width
        of the matrices has precedence over ``max_neighbors``. Where an atom has more neighbors, the memory gets the
        first columns (an order independent of distances), ``num_neighbors`` counts all, *what is returned is a wider
        matrix* in new memory, and a `NeighborListWarning` says so: go on with what is returned.
        Shifts given without a cell are filled with zeros; of the methods only the cell lists return them then.
    neighbor_matrix1, neighbor_matrix_shifts1, num_neighbors1, neighbor_matrix2, ... : tensors, optional
        The same for each of two lists.
    rebuild_flags : (n_systems,) or (1,) bool tensor, optional
        Search only the systems with True; rows of the others stay as they are in the memory given for all results, and
        are copied where a wider matrix is returned. A system with a row that was cut in an earlier call is searched
        in any case.
    target_indices : (n_rows,) int32 tensor, optional
        Rows for these atoms only, in this order, with neighbors among all atoms.
    nearest : int, optional
        Of the neighbors within the cutoff only the ``nearest`` of each atom, all if there are fewer, selected in the
        search: no more are ever in memory. The list is not symmetric: i may be near for j, and j not for i. (Not with
        ``cutoff2``.)
    ties : str, optional
        Neighbors at the same distance where ``nearest`` of them are full. ``"keep"``: all whose squared distance
        exceeds that of the last one by no more than ``tie_tolerance``, so a row may be longer. ``"index"``: exactly
        ``nearest``, those of smallest (j, S) first; distances are the same here if their squares fall into the same of
        2^30 steps up to the squared cutoff.
    tie_tolerance : float, squared length, optional
        For ``ties="keep"``; 0.01 by default, which for angstrom is that of fairchem's graphs (not strict). These
        measure it from the first neighbor too many: fairchem's ``max_neighbors=k`` is ``nearest=k + 1`` here.
    symmetric : bool, optional
        List (i, j, S) if j is among the nearest of i, or i among those of j, and so (j, i, -S) too.
    check : bool, optional
        False: with ``max_neighbors`` or given memory, do not read values on the host, without a wait for a
        GPU. Then rows are cut at that width, and ``num_neighbors`` still counts all neighbors of an atom. An atom whose
        position is not finite, whose cell is unusable, or whose system does not exist, has a count of 2**31 - 1 and,
        with a cell, only itself in its row, in image 2**31 - 1 along each axis, for which sums over pairs are NaN;
        other faulty values go unnoticed. The same holds inside ``torch.compile``.
    **without_effect
        Names of `nvalchemiops.compat.ignored_arguments.WITHOUT_EFFECT`: scratch memory and choices of another
        implementation, such as ``strategy`` and ``atom_to_cell_mapping``. They are ignored.

    Returns
    -------
    neighbor_matrix : (n_atoms, width) int32 tensor
        Neighbors of each atom, then padding. With ``return_neighbor_list`` instead ``neighbor_list`` (2, n_pairs):
        i and j of each pair, sorted by i.
    num_neighbors : (n_atoms,) int32 tensor
        Or ``neighbor_ptr`` (n_atoms + 1,): the first pair of each atom, then n_pairs.
    shifts : (n_atoms, width, 3) or (n_pairs, 3) int32 tensor
        S of each neighbor. Left out without a cell.
    distances : (n_atoms, width) or (n_pairs,) tensor
        If requested. Dtype as the positions.
    vectors : (n_atoms, width, 3) or (n_pairs, 3) tensor
        If requested.

    With ``cutoff2`` all of these for the first list, then for the second. With ``target_indices`` n_rows takes the
    place of n_atoms, and row r of the matrix belongs to atom ``target_indices[r]``; i of a pair is the atom, and the
    pairs are sorted by row.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message: shapes, dtypes, devices, a negative cutoff, positions that are not
        finite, a singular cell along a periodic axis, ``pbc`` without a cell, a ``batch_idx`` that names no
        system. An unknown argument.
    NeighborOverflowError
        An atom has more neighbors than there is room for, and no memory for a matrix that is wide enough, or more
        entries than int32 can address.

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
