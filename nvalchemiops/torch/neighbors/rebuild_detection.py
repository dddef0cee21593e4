"""Test whether a neighbor list is still valid: whether atoms have moved farther than the skin of the list allows.

A list that was built with ``cutoff + skin`` holds all pairs closer than ``cutoff`` as long as no atom has moved farther
than ``skin / 2``. Pass ``skin / 2`` as ``skin_distance_threshold``, and rebuild the systems for which the result is
True. `VerletList` does this automatically.

**Displacements are computed from the coordinates as given.** The shifts S of a list belong to these coordinates: the
neighbor is at ``x_j + S @ cell``. If an atom leaves the cell on one side and is wrapped to the other, it has hardly
moved, but the shifts of its pairs are off by one, and the list is stale. A test of the smallest displacement over all
images would accept the list, and forces would be wrong from then on. Therefore ``cell``, ``cell_inv`` and ``pbc`` are
accepted, and their shapes are checked, but they have no effect on the test. To avoid rebuilds, do not wrap positions
between them: the lists and all operators of this library accept positions anywhere.

A change of the cell also makes a list stale, but does not show in positions: compare the cell yourself, or use
`VerletList`.

Nothing here waits for a GPU, except where stated.
"""

from typing import Any

import torch

from nvalchemiops.compat.ignored_arguments import ignore
from nvalchemiops.torch import checks
from nvalchemiops.torch.runtime.context import ValuesNeededError

__all__ = [
    "batch_cell_list_needs_rebuild",
    "batch_neighbor_list_needs_rebuild",
    "cell_list_needs_rebuild",
    "check_cell_list_rebuild_needed",
    "check_neighbor_list_rebuild_needed",
    "neighbor_list_needs_rebuild",
]


def neighbor_list_needs_rebuild(
    reference_positions: torch.Tensor,
    current_positions: torch.Tensor,
    skin_distance_threshold: float,
    update_reference_positions: bool = False,
    cell: torch.Tensor | None = None,
    cell_inv: torch.Tensor | None = None,
    pbc: torch.Tensor | None = None,
) -> torch.Tensor:
    """Whether some atom has moved farther than the threshold since the list was built.

    Parameters
    ----------
    reference_positions : (n_atoms, 3) tensor, float32 or float64, length
        Positions from which the list was built. This must be a copy: a tensor that the integrator updates in place
        shows no displacement. The result is True if the number of atoms differs.
    current_positions : (n_atoms, 3) tensor of the same dtype, length
        If atoms have been wrapped since then, the result is True (see above).
    skin_distance_threshold : float, length, non-negative
        Half of the skin. With zero every change counts.
    update_reference_positions : bool, optional
        If the result is True and the shapes agree, copy the current positions into ``reference_positions`` in place.
    cell, cell_inv : (3, 3) or (1, 3, 3) tensor, optional
        Checked, but without effect (see above).
    pbc : (3,) or (1, 3) bool tensor, optional
        Also checked, but without effect.

    Returns
    -------
    (1,) bool tensor
        True also if a position is NaN or infinite, so that the following build reports it. Not differentiable.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    positions = (reference_positions, current_positions)
    return stale_systems(*positions, skin_distance_threshold, update_reference_positions, (cell, cell_inv, pbc))


check_neighbor_list_rebuild_needed = neighbor_list_needs_rebuild
"""Another name for `neighbor_list_needs_rebuild`, which clients use."""


def batch_neighbor_list_needs_rebuild(
    reference_positions: torch.Tensor,
    current_positions: torch.Tensor,
    batch_idx: torch.Tensor,
    skin_distance_threshold: float,
    update_reference_positions: bool = False,
    cell: torch.Tensor | None = None,
    cell_inv: torch.Tensor | None = None,
    pbc: torch.Tensor | None = None,
    *,
    num_systems: int | None = None,
) -> torch.Tensor:
    """For each system, whether an atom has moved farther than the threshold since the list was built.

    Parameters
    ----------
    reference_positions, current_positions, skin_distance_threshold
        As for `neighbor_list_needs_rebuild`.
    batch_idx : (n_atoms,) int32 tensor
        System of each atom, in any order.
    update_reference_positions : bool, optional
        For systems with the result True, copy the current positions into ``reference_positions`` in place, if the
        shapes agree.
    cell, cell_inv : (3, 3) or (n_systems, 3, 3) tensor, optional
        Checked, but without effect (see above), except for the number of systems. A single cell holds for all systems.
    pbc : (3,) or (n_systems, 3) bool tensor, optional
        As for ``cell``.
    num_systems : int, optional
        Number of systems. By default it is taken from ``cell``, ``cell_inv`` or ``pbc``; without these it is the
        largest entry of ``batch_idx`` plus one, which waits for a GPU.

    Returns
    -------
    (n_systems,) bool tensor
        The result of `neighbor_list_needs_rebuild` for each system; False for systems without atoms. True for all if
        the reference has another number of atoms, since their systems are not known.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message; an entry of ``batch_idx`` out of range (on a GPU a device-side assertion);
        in compiled code, an unknown number of systems.
    """
    positions, batch = (reference_positions, current_positions), (batch_idx, num_systems)
    return stale_systems(*positions, skin_distance_threshold, update_reference_positions, (cell, cell_inv, pbc), batch)


def cell_list_needs_rebuild(
    current_positions: torch.Tensor, cell: torch.Tensor, pbc: torch.Tensor, **without_effect: Any
) -> torch.Tensor:
    """Whether the bins of an earlier cell list cannot be reused: always True.

    This library keeps no bins between calls, so an earlier cell list is never valid. The result makes clients build a
    new one.

    Parameters
    ----------
    current_positions : (n_atoms, 3) tensor, float32 or float64, length
    cell : (3, 3) or (1, 3, 3) tensor, length
    pbc : (3,) or (1, 3) bool tensor
    **without_effect
        The bins of an earlier list, as in `neighbor_list`.

    Returns
    -------
    (1,) bool tensor

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    ignore("cell_list_needs_rebuild", without_effect)
    checks.check_positions(current_positions, finite=False, name="current_positions")
    _check_lattice(cell, None, pbc, current_positions, 1, required=True)
    return torch.ones(1, dtype=torch.bool, device=current_positions.device)


def check_cell_list_rebuild_needed(
    current_positions: torch.Tensor, cell: torch.Tensor, pbc: torch.Tensor, **without_effect: Any
) -> bool:
    """`cell_list_needs_rebuild` as a Python bool: always True, after the same checks."""
    ignore("check_cell_list_rebuild_needed", without_effect)
    cell_list_needs_rebuild(current_positions, cell, pbc)
    return True


def batch_cell_list_needs_rebuild(
    current_positions: torch.Tensor,
    batch_idx: torch.Tensor,
    cell: torch.Tensor,
    pbc: torch.Tensor,
    **without_effect: Any,
) -> torch.Tensor:
    """For each system, whether the bins of an earlier cell list cannot be reused: always True.

    See `cell_list_needs_rebuild`.

    Parameters
    ----------
    current_positions : (n_atoms, 3) tensor, float32 or float64, length
    batch_idx : (n_atoms,) int32 tensor
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    pbc : (3,) or (n_systems, 3) bool tensor
    **without_effect
        The bins of an earlier list, as in `neighbor_list`.

    Returns
    -------
    (n_systems,) bool tensor
        If ``cell`` and ``pbc`` do not give the number of systems, it is the largest entry of ``batch_idx`` plus one,
        which waits for a GPU.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    """
    ignore("batch_cell_list_needs_rebuild", without_effect)
    checks.check_positions(current_positions, finite=False, name="current_positions")
    _, n_systems = _check_batch(batch_idx, current_positions, cell, None, pbc, None)
    _check_lattice(cell, None, pbc, current_positions, n_systems, required=True)
    return torch.ones(n_systems, dtype=torch.bool, device=current_positions.device)


def stale_systems(
    reference: Any,
    current: Any,
    threshold: Any,
    update: Any = False,
    lattice: tuple[Any, Any, Any] = (None, None, None),
    batch: Any = None,
) -> torch.Tensor:
    """For each system (n_systems,), whether an atom is farther than the threshold from its reference position.

    ``lattice`` is cell, its inverse and pbc; ``batch`` is ``batch_idx`` and ``num_systems``, None for one system.
    """
    checks.check_flag("update_reference_positions", update)
    checks.check_positions(reference, finite=False, name="reference_positions")
    checks.check_positions(current, finite=False, name="current_positions")
    if reference.dtype != current.dtype:
        raise TypeError(f"`reference_positions` has dtype {reference.dtype}, but `current_positions` {current.dtype}")
    if reference.device != current.device:
        raise ValueError(f"`reference_positions` is on {reference.device}, but `current_positions` on {current.device}")
    threshold = checks.check_not_negative("skin_distance_threshold", threshold)
    system, n_systems = (None, 1) if batch is None else _check_batch(batch[0], current, *lattice, batch[1])
    _check_lattice(*lattice, current, n_systems)
    if reference.shape != current.shape:
        return torch.ones(n_systems, dtype=torch.bool, device=current.device)
    with torch.no_grad():
        if threshold == 0.0:
            # a squared tiny displacement would underflow to zero; an infinite position always counts as moved
            moved = ((current != reference) | ~torch.isfinite(current)).any(1)
        else:
            # in float64, so that squares of float32 numbers neither underflow nor overflow
            displacement = (current.to(torch.float64) - reference.to(torch.float64)).square().sum(1).sqrt()
            moved = ~(displacement <= threshold)  # not `>`: NaN counts as moved
        stale = any_in_systems(moved, system, n_systems)
        if update:
            of_atoms = stale if system is None else stale.index_select(0, system)
            reference.copy_(torch.where(of_atoms.unsqueeze(-1), current, reference))
    return stale


def any_in_systems(of_atoms: torch.Tensor, system: torch.Tensor | None, n_systems: int) -> torch.Tensor:
    """For each system (n_systems,), whether something (n_atoms,) is true of an atom; all are in one without numbers."""
    if system is None:
        return of_atoms.any().reshape(1)
    # a maximum of integers does not depend on the order in which threads arrive
    worst = torch.zeros(n_systems, dtype=torch.int32, device=system.device)
    return worst.scatter_reduce(0, system.to(torch.int64), of_atoms.to(torch.int32), "amax") > 0


# -- checks ---------------------------------------------------------------------------------------


def _check_batch(
    batch_idx: Any, positions: torch.Tensor, cell: Any, cell_inv: Any, pbc: Any, num_systems: int | None
) -> tuple[torch.Tensor, int]:
    """System of each atom, and the number of systems. Waits for a GPU only if that number is not known otherwise."""
    checks.check_tensor("batch_idx", batch_idx)
    if num_systems is None:
        told = checks.systems_in_shapes((cell, 3), (cell_inv, 3), (pbc, 2))
    else:
        told = checks.check_count("num_systems", num_systems)
    system, n_systems = checks.check_batch(batch_idx, positions, told, wait=told is None)
    assert system is not None
    if told is not None:
        return system, told
    one_for_all = any(getattr(t, "ndim", None) == n for t, n in ((cell, 3), (cell_inv, 3), (pbc, 2)))
    if n_systems is None and not one_for_all:
        raise ValuesNeededError("`num_systems` is needed where values cannot be read: it is the size of the result")
    return system, max(n_systems or 0, int(one_for_all))


def _check_lattice(
    cell: Any, cell_inv: Any, pbc: Any, positions: torch.Tensor, n_systems: int, required: bool = False
) -> None:
    for name, tensor, shape in (("cell", cell, (3, 3)), ("cell_inv", cell_inv, (3, 3)), ("pbc", pbc, (3,))):
        if tensor is None and not (required and name != "cell_inv"):
            continue
        checks.check_tensor(name, tensor)
        if name == "pbc" and tensor.dtype != torch.bool:
            raise TypeError(f"`pbc` must be bool, got {tensor.dtype}")
        if name != "pbc" and not tensor.is_floating_point():
            raise TypeError(f"`{name}` must be float32 or float64, got {tensor.dtype}")
        if not checks.has_shape(tensor, (n_systems, *shape), (1, *shape), shape):
            of_all = (n_systems, *shape)
            raise ValueError(f"`{name}` must have shape {shape} or {of_all}, got {tuple(tensor.shape)}")
        if name != "pbc" and tensor.device != positions.device:
            raise ValueError(f"`{name}` is on {tensor.device}, but the positions are on {positions.device}")
