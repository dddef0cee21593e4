"""The Ewald sum: reciprocal space as a tape op, real space by the pair machinery, and the function that adds them."""

import functools
from typing import Any

import numpy as np
import torch
import warp as wp

from nvalchemiops.geometry import dual_vectors
from nvalchemiops.interactions.electrostatics import ewald as kernels
from nvalchemiops.interactions.electrostatics import parameters
from nvalchemiops.interactions.pair import potentials
from nvalchemiops.launch import launch
from nvalchemiops.torch.autograd import (
    OutputSpec,
    WarpAutogradContextManager,
    attach_for_backward,
    needs_grad,
    warp_custom_op,
    warp_from_torch,
)
from nvalchemiops.torch.interactions.electrostatics.coulomb import check_charges
from nvalchemiops.torch.interactions.electrostatics.parameters import system_sizes, systems_of
from nvalchemiops.torch.interactions.pair.potential import Wanted, evaluate
from nvalchemiops.torch.neighbors import checks
from nvalchemiops.torch.neighbors.eager import eager
from nvalchemiops.torch.neighbors.rows import GivenNeighbors, build_rows, inspect_rows, rows_of
from nvalchemiops.torch.segments import system_sums

MAX_WAVE_VECTORS = 1e8
"""More than this is a mistake in the arguments rather than a system; the sum would take hours."""

_OUTPUTS = [
    OutputSpec("energies", wp.float64, lambda positions, *_: (positions.shape[0],)),
    OutputSpec("forces", wp.vec3d, lambda positions, *_: (positions.shape[0], 3)),
    OutputSpec("charge_gradients", wp.float64, lambda positions, *_: (positions.shape[0],)),
    OutputSpec("virials", wp.mat33d, lambda *inputs: (inputs[0].shape[0] if inputs[-1] else 0, 3, 3)),
]
_DIFFERENTIABLE = [*(spec.name for spec in _OUTPUTS), "positions", "charges", "cell", "alpha"]


@warp_custom_op("nvalchemiops::ewald_reciprocal_space", outputs=_OUTPUTS, grad_arrays=_DIFFERENTIABLE)
def _reciprocal_space(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
    alpha: torch.Tensor,
    batch_idx: torch.Tensor,
    atoms: torch.Tensor,
    first_atom: torch.Tensor,
    miller: torch.Tensor,
    k_system: torch.Tensor,
    first_k: torch.Tensor,
    with_virial: bool,
) -> tuple[torch.Tensor, ...]:
    track = needs_grad(positions, charges, cell, alpha)
    inputs = _warp_inputs(positions, charges, cell, alpha)
    results, outputs = _new_outputs(positions, with_virial, track)
    n_k = miller.shape[0]
    k_vectors = warp_from_torch(positions.new_empty((n_k, 3), requires_grad=False), wp.vec3d, requires_grad=track)
    factors = warp_from_torch(positions.new_empty((n_k, 2), requires_grad=False), wp.vec2d, requires_grad=track)
    system, order, atom_ptr, k_systems, k_ptr = (
        warp_from_torch(t, wp.int32) for t in (batch_idx, atoms, first_atom, k_system, first_k)
    )
    millers = warp_from_torch(miller, wp.vec3i)
    with WarpAutogradContextManager(track) as tape:
        arguments: list[Any] = [*inputs.values(), order, atom_ptr, millers, k_systems]
        _launch(kernels.structure_factors, track, n_k, arguments, [k_vectors, factors])
        fixed: list[Any] = [inputs["positions"], inputs["charges"], inputs["alpha"], system, millers, k_ptr]
        arguments = [*fixed, k_vectors, factors, int(with_virial)]
        _launch(kernels.reciprocal_space, track, positions.shape[0], arguments, outputs.values())
    if track:
        attach_for_backward(results[0], tape, **inputs, **outputs)
    return results


def _warp_inputs(
    positions: torch.Tensor, charges: torch.Tensor, cell: torch.Tensor, alpha: torch.Tensor
) -> dict[str, wp.array]:
    return {
        "positions": warp_from_torch(positions, wp.vec3d),
        "charges": warp_from_torch(charges, wp.float64),
        "cell": warp_from_torch(cell, wp.mat33d),
        "alpha": warp_from_torch(alpha, wp.float64),
    }


def _new_outputs(
    positions: torch.Tensor, with_virial: bool, track: bool
) -> tuple[tuple[torch.Tensor, ...], dict[str, wp.array]]:
    n_atoms = positions.shape[0]
    shapes = [(n_atoms,), (n_atoms, 3), (n_atoms,), (n_atoms if with_virial else 0, 3, 3)]
    results = tuple(positions.new_empty(shape, requires_grad=False) for shape in shapes)
    return results, {
        spec.name: warp_from_torch(result, spec.dtype, requires_grad=track) for spec, result in zip(_OUTPUTS, results)
    }


def _launch(factory: Any, track: bool, rows: int, inputs: Any, outputs: Any) -> None:
    # a kernel with an adjoint is launched whole, and its offset is ours to give
    offset = [0] if track else []
    arrays = [*offset, *inputs]
    device = next(a for a in arrays if isinstance(a, wp.array)).device
    launch(factory(track), rows, arrays, list(outputs), device=device)


@eager
def ewald_summation(
    positions: torch.Tensor,
    charges: torch.Tensor,
    cell: torch.Tensor,
    alpha: float | torch.Tensor | None = None,
    k_vectors: torch.Tensor | None = None,
    k_cutoff: float | torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    neighbor_list: torch.Tensor | None = None,
    neighbor_ptr: torch.Tensor | None = None,
    neighbor_shifts: torch.Tensor | None = None,
    neighbor_matrix: torch.Tensor | None = None,
    neighbor_matrix_shifts: torch.Tensor | None = None,
    mask_value: int | None = None,
    compute_forces: bool = False,
    compute_charge_gradients: bool = False,
    compute_virial: bool = False,
    accuracy: float = 1e-6,
    hybrid_forces: bool = False,
    pbc: torch.Tensor | None = None,
    slab_correction: bool = False,
    *,
    miller_bounds: Any = None,
    miller_indices: torch.Tensor | None = None,
    energy_reduction: str = "atom",
    cutoff: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Coulomb energy of point charges that repeat in three directions, by Ewald's sum.

    Atom i has the energy ``q_i φ_i / 2``, with its share of the self interaction and of the uniform background that
    neutralises a charged cell (energy ``-π Q² / (2 α² V)``, which makes the total independent of α). Formulas and
    sources: `nvalchemiops.interactions.electrostatics.ewald`.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, float32 or float64, length
        Inside the cell or not.
    charges : (n_atoms,) tensor, charge
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
        Rows are lattice vectors, in either handedness.
    alpha : float or (n_systems,) tensor, 1/length, optional
        Splitting parameter. By default chosen for ``accuracy`` (see Notes).
    k_cutoff : float or (n_systems,) tensor, 1/length, optional
        Largest length of a wave vector. By default what ``accuracy`` needs at this alpha.
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    neighbor_list, neighbor_ptr, neighbor_shifts : tensors, optional
        Full list of pairs (2, n_pairs) sorted by the first atom, where each atom's pairs begin (n_atoms + 1,),
        images (n_pairs, 3), as from `nvalchemiops.torch.neighbors.neighbor_list`. All pairs in it are summed.
        Without neighbors given they are built.
    neighbor_matrix, neighbor_matrix_shifts, mask_value : optional
        The same as matrix (n_atoms, width), (n_atoms, width, 3), and the value of padding (n_atoms by default).
    compute_forces, compute_charge_gradients, compute_virial : bool, optional
        Return forces ``-dE/dR`` at fixed charges, ``dE/dq``, and ``-dE/dstrain``.
    accuracy : float, optional
        Wanted RMS error of the forces, relative to the force between two average ions at the average distance.
    pbc : bool tensor, optional
        Must be True along all axes.
    energy_reduction : {"atom", "system"}, optional
        Energies per atom (n_atoms,), or summed over systems (n_systems,).
    cutoff : float, length, optional
        Reach of the given list (all pairs closer than this are in it), or to which the list is built.

    Returns
    -------
    energies : (n_atoms,) or (n_systems,) tensor, charge²/length
    forces : (n_atoms, 3) tensor, charge²/length², if asked for
    charge_gradients : (n_atoms,) tensor, charge/length, if asked for
    virial : (n_systems, 3, 3) tensor, charge²/length, if asked for

    The dtype follows ``positions``; the arithmetic is in float64. All are differentiable, once, in positions,
    charges, cell and alpha: a loss of forces or charge gradients needs one backward. Differentiating twice
    (``create_graph``) raises an error.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.
    NotImplementedError
        ``k_vectors``, ``miller_bounds``, ``miller_indices``, ``hybrid_forces``, ``slab_correction``, open axes in
        ``pbc`` and several charge channels are not available yet.

    Notes
    -----
    Without ``alpha``: a list whose reach (``cutoff``, else its largest distance) covers the ``real_space_cutoff`` of
    `estimate_ewald_parameters` gets that estimate's alpha; with a shorter one alpha grows until ``accuracy`` is met
    at that reach. The reach of a list is at least its largest distance, so say ``cutoff`` for small molecules in
    large cells: it saves wave vectors. With ``alpha`` given, the list's reach is the caller's business.

    Sizes depend on the cell and on the neighbors, so this function reads values on the host and waits for a GPU.
    """
    for name, value in (
        ("k_vectors", k_vectors),
        ("miller_bounds", miller_bounds),
        ("miller_indices", miller_indices),
    ):
        if value is not None:
            raise NotImplementedError(f"`{name}` is not available yet; give `k_cutoff` or `accuracy`")
    for name, flag in (("hybrid_forces", hybrid_forces), ("slab_correction", slab_correction)):
        if flag:
            raise NotImplementedError(f"`{name}` is not available yet")
    if energy_reduction not in ("atom", "system"):
        raise ValueError(f"`energy_reduction` must be 'atom' or 'system', got {energy_reduction!r}")
    checks.check_positions(positions)
    check_charges(charges, positions)
    accuracy = checks.check_positive("accuracy", accuracy)
    cutoff = None if cutoff is None else checks.check_positive("cutoff", cutoff)
    batch_idx, cell = systems_of(positions, cell, batch_idx)
    n_systems = cell.shape[0]
    if not checks.check_pbc(pbc, positions, n_systems).all():
        raise NotImplementedError("`pbc`: the Ewald sum is periodic along all axes; open axes are not available yet")
    lattice = checks.on_host(cell.detach().to(torch.float64))
    dual_vectors(lattice, np.ones((n_systems, 3), dtype=bool))  # raises for a singular cell

    given = GivenNeighbors(
        neighbor_list,
        neighbor_ptr,
        neighbor_shifts,
        neighbor_matrix,
        neighbor_matrix_shifts,
        mask_value,
        fill_name="mask_value",
    )
    sizes = system_sizes(cell, batch_idx)
    rows = rows_of(given, positions, periodic=True)
    reach: float | np.ndarray | None = cutoff
    if rows is not None:
        farthest = inspect_rows(rows, positions, cell, batch_idx)
        if cutoff is None and alpha is None:
            reach = _reach(farthest, batch_idx, n_systems)
    splitting, r_c = _splitting(alpha, reach, sizes, accuracy, positions)
    if rows is None:
        rows = build_rows(positions, float(r_c.max(initial=0.0)) if cutoff is None else cutoff, cell, batch_idx)
    if k_cutoff is None:
        k_c = parameters.reciprocal_cutoff(checks.on_host(splitting), sizes[2], accuracy)
    else:
        k_c = checks.on_host(_per_system("k_cutoff", k_cutoff, n_systems, positions.device))

    wide = (positions.double(), charges.double(), cell.double(), splitting)
    real = evaluate(
        potentials.EWALD_REAL_SPACE,
        wide[0],
        wide[2],
        {"q": wide[1], "alpha": splitting},
        rows,
        Wanted(compute_forces, ("q",) * compute_charge_gradients, compute_virial, energy_reduction),
        cutoff=None,
        batch_idx=batch_idx,
    )
    energies, forces, charge_gradients, virials = _reciprocal_space(
        *wide, batch_idx, *_sorted_atoms(batch_idx, n_systems), *_wave_vectors(lattice, k_c, batch_idx), compute_virial
    )
    reciprocal = [energies if energy_reduction == "atom" else system_sums(energies, batch_idx, n_systems)]
    reciprocal += [forces] if compute_forces else []
    reciprocal += [charge_gradients] if compute_charge_gradients else []
    reciprocal += [system_sums(virials, batch_idx, n_systems)] if compute_virial else []
    results = [a + b for a, b in zip(real if isinstance(real, tuple) else (real,), reciprocal)]
    narrow = tuple(r.to(positions.dtype) for r in results)
    return narrow if len(narrow) > 1 else narrow[0]


def _per_system(name: str, value: Any, n_systems: int, device: torch.device) -> torch.Tensor:
    """A positive number, or one for each system, as float64 tensor (n_systems,) that keeps its graph."""
    try:
        # through numpy, which keeps Python's float64
        tensor = (
            value.to(device) if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value), device=device)
        )
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"`{name}` must be a number or a tensor, got {type(value).__name__}") from None
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"`{name}` must be real numbers, got {tensor.dtype}")
    if tuple(tensor.shape) not in ((), (1,), (n_systems,)):
        raise ValueError(f"`{name}` must be a number or have shape ({n_systems},), got {tuple(tensor.shape)}")
    if not bool(((tensor > 0) & torch.isfinite(tensor)).all()):
        raise ValueError(f"`{name}` must be positive and finite")
    return tensor.double() * torch.ones(n_systems, dtype=torch.float64, device=device)


def _splitting(
    alpha: Any, reach: Any, sizes: tuple[np.ndarray, ...], accuracy: float, positions: torch.Tensor
) -> tuple[torch.Tensor, np.ndarray]:
    """Splitting parameter of each system, and the real-space cutoff that goes with it."""
    count, volume, spacing = sizes
    if alpha is not None:
        splitting = _per_system("alpha", alpha, count.shape[0], positions.device)
        return splitting, parameters.real_cutoff(checks.on_host(splitting), spacing, accuracy)
    best = parameters.optimal_alpha(count, volume)
    r_c = parameters.real_cutoff(best, spacing, accuracy)
    if reach is not None:
        short = reach < r_c
        needed = parameters.alpha_for_cutoff(np.where(short, reach, r_c), spacing, accuracy)
        best, r_c = np.where(short, needed, best), np.where(short, reach, r_c)
    return torch.as_tensor(best, device=positions.device), r_c


def _reach(farthest: torch.Tensor, batch_idx: torch.Tensor, n_systems: int) -> np.ndarray:
    """Largest distance in the list, for each system; infinite where no atom is."""
    reach = np.zeros(n_systems)
    system = checks.on_host(batch_idx)
    np.maximum.at(reach, system, checks.on_host(farthest))
    empty = np.bincount(system, minlength=n_systems) == 0
    if ((reach == 0.0) & ~empty).any():
        raise ValueError(
            "`cutoff` or `alpha` is needed: the neighbor list of a system holds no pair, so its reach is unknown"
        )
    return np.where(empty, np.inf, reach)


def _sorted_atoms(batch_idx: torch.Tensor, n_systems: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Atoms sorted by system, and where each system begins."""
    counts = torch.bincount(batch_idx, minlength=n_systems)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return torch.argsort(batch_idx, stable=True).to(torch.int32), first.to(torch.int32)


def _wave_vectors(
    lattice: np.ndarray, k_cutoff: np.ndarray, batch_idx: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Miller indices of all systems one after the other, the system of each, and where each system begins."""
    volume = np.abs(np.linalg.det(lattice))
    expected = float((volume * k_cutoff**3).sum() / (12.0 * np.pi**2))
    if expected > MAX_WAVE_VECTORS:
        raise ValueError(
            f"about {expected:.1e} wave vectors would be needed: give a longer neighbor list or its `cutoff`, a "
            "smaller `alpha` or `k_cutoff`, or a lower `accuracy`"
        )
    lists = [_miller_indices(c.tobytes(), float(k)) for c, k in zip(lattice, k_cutoff)]
    lengths = np.array([m.shape[0] for m in lists])
    system = np.repeat(np.arange(len(lists), dtype=np.int32), lengths)
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    miller = np.concatenate(lists)
    device = batch_idx.device
    return torch.tensor(miller, device=device), torch.tensor(system, device=device), torch.tensor(first, device=device)


@functools.lru_cache(maxsize=256)
def _miller_indices(cell: bytes, k_cutoff: float) -> np.ndarray:
    return parameters.miller_indices(np.frombuffer(cell).reshape(3, 3), k_cutoff)
