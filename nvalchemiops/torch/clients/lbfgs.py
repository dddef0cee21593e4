"""Steps of L-BFGS as nvalchemi-toolkit calls them: on tensors, in place, with a state that is made beforehand.

Each system has a history of its own. All that a step keeps is in tensors whose first axis is that of systems, or of
rows, so that callers can select, append and restore systems.

`nvalchemiops.torch.dynamics.relax` runs whole relaxations.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvalchemiops.torch import checks
from nvalchemiops.torch.clients.dynamics import of_atoms, times
from nvalchemiops.torch.dynamics.chart import Rows
from nvalchemiops.torch.runtime.context import on_host

CURVATURE = 70.0
"""Before it is known, as in ASE: energy / length², for electronvolts and ångströms."""


@dataclass
class LBFGSState:
    """What steps keep of rows (n_rows, ...) and of systems (n_systems, ...): see `lbfgs_prepare_state`.

    Attributes
    ----------
    x_base, force_base : (n_rows, 3) tensor
        Coordinates and forces of the latest step.
    direction : (n_rows, 3) tensor
        The step before its length is limited.
    s_history, y_history : (n_rows, history_size, 3) tensor
        Steps, and changes of the gradient.
    ys, yy, ss : (n_systems, history_size) tensor
        Scalar products of the changes y and the steps s in the history.
    alpha_hist, beta_hist : (n_systems, history_size) tensor
        Coefficients of the first and of the second loop.
    gg, d0, dmax, dquad, alpha_step : (n_systems,) tensor
        ``Σ F·F``; the inverse curvature with which the loops start; the longest row of ``direction``; ``Σ F·d`` of it;
        and the factor of the step.
    iteration, end, n_loop, history_count : (n_systems,) int32 tensor
        Steps so far; the place of the next entry of the history; the entries that the latest step used; all entries.
    """

    x_base: Any
    force_base: Any
    direction: Any
    s_history: Any
    y_history: Any
    ys: Any
    yy: Any
    alpha_hist: Any
    beta_hist: Any
    ss: Any
    gg: Any
    d0: Any
    dmax: Any
    dquad: Any
    alpha_step: Any
    iteration: Any
    end: Any
    n_loop: Any
    history_count: Any


@dataclass
class LBFGSCellState:
    """Coordinates of cells that relax with their atoms: see `lbfgs_prepare_cell_state`.

    Attributes
    ----------
    ref_cell, ref_cell_inv : (n_systems, 3, 3) tensor
        The cell at the start, and its inverse.
    kappa : (n_systems,) tensor
        Factor of the rows of cells.
    ext_batch_idx : (n_atoms + 2 n_systems,) int32 tensor
        The system of each row: those of its atoms, then two of its cell.
    ext_atom_ptr : (n_systems + 1,) int32 tensor
        The first row of each system.
    phi, phi_inv, d_phi : (n_systems, 3, 3) tensor
        The deformation of the cell at the start, its inverse, and minus the derivative of the energy.
    cell_dof_a, cell_dof_b, cell_force_a, cell_force_b : (n_systems, 3) tensor
        The rows of cells: the first column of the deformation, the rest of its lower triangle; and the forces on them.
    ext_positions, ext_forces : (n_atoms + 2 n_systems, 3) tensor
        All rows, and the forces on them.
    """

    ref_cell: Any
    ref_cell_inv: Any
    kappa: Any
    ext_batch_idx: Any
    ext_atom_ptr: Any
    phi: Any
    phi_inv: Any
    d_phi: Any
    cell_dof_a: Any
    cell_dof_b: Any
    cell_force_a: Any
    cell_force_b: Any
    ext_positions: Any
    ext_forces: Any


def lbfgs_prepare_state(
    num_dofs: int, num_systems: int, *, dtype: torch.dtype = torch.float64, device: Any = None, history_size: int = 6
) -> LBFGSState:
    """The state of systems that have taken no step.

    Parameters
    ----------
    num_dofs : int
        Number of rows of three numbers: of atoms, and two for each cell that relaxes.
    num_systems : int
    dtype, device : optional
        Those of positions.
    history_size : int, optional
        Number of steps from which curvatures are estimated.
    """
    rows = checks.check_count("num_dofs", num_dofs, 0)
    systems = checks.check_count("num_systems", num_systems, 0)
    size = checks.check_count("history_size", history_size, 1)

    def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=kind, device=device)

    found: dict[str, Tensor] = {}
    found |= {name: zeros(rows, 3) for name in ("x_base", "force_base", "direction")}
    found |= {name: zeros(rows, size, 3) for name in ("s_history", "y_history")}
    found |= {name: zeros(systems, size) for name in ("ys", "yy", "ss", "alpha_hist", "beta_hist")}
    found |= {name: zeros(systems) for name in ("gg", "d0", "dmax", "dquad", "alpha_step")}
    counts = ("iteration", "end", "n_loop", "history_count")
    return LBFGSState(**found, **{name: zeros(systems, kind=torch.int32) for name in counts})


def lbfgs_prepare_cell_state(
    atom_ptr: Tensor,
    cell: Tensor,
    *,
    cell_force_scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    device: Any = None,
    alignment_atol: float | None = None,
) -> LBFGSCellState:
    """The coordinates of cells at the start of a relaxation.

    Parameters
    ----------
    atom_ptr : (n_systems + 1,) int32 tensor
        First atom of each system, then n_atoms; read on the host.
    cell : (n_systems, 3, 3) tensor, length
        As in `lbfgs_step_coord_cell`.
    cell_force_scale : float, optional
        The larger, the less cells move: the rows of a cell are those of the deformation, times the number of atoms,
        times this number.
    dtype, device : optional
        Those of positions; the device is that of ``cell`` by default.
    alignment_atol : float, length, optional
        Largest element above the diagonal. By default there is no limit: steps need none.

    Raises
    ------
    ValueError
        An element above the diagonal is larger than ``alignment_atol``; or a cell has no volume.
    """
    checks.check_tensor("cell", cell)
    scale = checks.check_positive("cell_force_scale", cell_force_scale)
    device = cell.device if device is None else torch.device(device)
    n = atom_ptr.shape[0] - 1
    if cell.shape != (n, 3, 3):
        raise ValueError(f"`cell` must have shape (n_systems, 3, 3) = ({n}, 3, 3), got {tuple(cell.shape)}")
    lattice = on_host(cell)
    upper = abs(lattice[:, [0, 0, 1], [1, 2, 2]])
    if alignment_atol is not None and upper.size and not upper.max() <= alignment_atol:
        raise ValueError(f"`cell` must be lower triangular to {alignment_atol}, got {upper.max():.3g} above")
    cell = cell.detach().to(device, dtype)
    volumes = torch.linalg.det(cell.double())
    if not bool(((volumes != 0.0) & volumes.isfinite()).all()):
        raise ValueError("`cell` must have a volume in each system")
    first = atom_ptr.to(device, torch.int32)
    sizes = first[1:] - first[:-1]
    systems = torch.arange(n, dtype=torch.int32, device=device)
    ext_batch_idx = systems.repeat_interleave(sizes + 2)
    still = torch.eye(3, dtype=dtype, device=device).expand(n, 3, 3)
    kappa = scale * sizes.clamp(min=1).to(dtype)
    return LBFGSCellState(
        ref_cell=cell.clone(),
        ref_cell_inv=torch.linalg.inv(cell.double()).to(dtype),
        kappa=kappa,
        ext_batch_idx=ext_batch_idx,
        ext_atom_ptr=first + 2 * torch.arange(n + 1, dtype=torch.int32, device=device),
        **{name: still.clone() for name in ("phi", "phi_inv")},
        d_phi=torch.zeros_like(cell),
        **{name: cell.new_zeros(n, 3) for name in ("cell_dof_a", "cell_dof_b", "cell_force_a", "cell_force_b")},
        **{name: cell.new_zeros(len(ext_batch_idx), 3) for name in ("ext_positions", "ext_forces")},
    )


def lbfgs_step_coord(
    positions: Tensor,
    forces: Tensor,
    state: LBFGSState,
    batch_idx: Tensor,
    *,
    maxstep: float = 0.2,
    curvature_eps: float | None = None,
    compute_reductions: bool = True,
) -> None:
    """A step of limited-memory BFGS without line search, which changes ``positions`` and ``state``.

    Parameters
    ----------
    positions, forces : (n_rows, 3) tensor
        Positions must be where the step before has put them: atoms that are wrapped in between look like a long step.
    state : LBFGSState
        Of `lbfgs_prepare_state`.
    batch_idx : (n_rows,) int32 tensor
        The system of each row.
    maxstep : float, length, optional
        No row of a system moves farther: its step is scaled. Without limit if it is not positive.
    curvature_eps : float, optional
        A step s with the change y of the gradient enters the history if ``s·y > curvature_eps |s| |y|``; by default
        the root of the precision. So systems move downhill where the curvature is negative, too.
    compute_reductions : bool, optional
        Must be True.

    The first step is that of ASE, ``F / 70``. Later ones start from the curvature along the latest step. Sources:
    J. Nocedal, Math. Comput. 35, 773 (1980), doi:10.1090/S0025-5718-1980-0572855-7, for the two loops; D. C. Liu and
    J. Nocedal, Math. Program. 45, 503 (1989), doi:10.1007/BF01589116, for where they start.
    """
    if not compute_reductions:
        raise NotImplementedError("`compute_reductions=False` is not offered: a step computes its scalar products")
    n_systems, size = state.ys.shape
    rows = Rows(n_systems, batch_idx)
    floor = torch.finfo(state.ys.dtype).eps ** 0.5 if curvature_eps is None else curvature_eps
    with torch.no_grad():
        s, y = positions - state.x_base, state.force_base - forces
        old = state.iteration > 0
        sy, ss, yy = (v.to(state.ys.dtype) for v in rows.dots((s, y), (s, s), (y, y)))
        enters = old & (sy > floor * ss.sqrt() * yy.sqrt())
        _write(state.s_history, of_atoms(enters, batch_idx), of_atoms(state.end, batch_idx), s)
        _write(state.y_history, of_atoms(enters, batch_idx), of_atoms(state.end, batch_idx), y)
        for products, values in ((state.ys, sy), (state.ss, ss), (state.yy, yy)):
            _write(products, enters, state.end, values)
        state.end.copy_(torch.where(enters, (state.end + 1) % size, state.end))
        state.history_count.copy_((state.history_count + enters).clamp(max=size))
        # the curvature along the latest step, by its absolute value; a system that stayed tells nothing
        known = old & (sy != 0.0) & (yy > 0.0)
        start = torch.where(old, state.d0, 1.0 / CURVATURE)
        state.d0.copy_(torch.where(known, sy.abs() / torch.where(known, yy, 1.0), start))
        state.n_loop.copy_(state.history_count)
        _direct(state, rows, forces, batch_idx)
        state.gg.copy_(rows.dots((forces, forces))[0])
        state.dquad.copy_(rows.dots((forces, state.direction))[0])
        longest = rows.largest(state.direction)
        state.dmax.copy_(longest)
        limit = (longest > maxstep) if maxstep > 0.0 else torch.zeros_like(longest, dtype=torch.bool)
        state.alpha_step.copy_(torch.where(limit, maxstep / torch.where(limit, longest, 1.0), 1.0))
        state.x_base.copy_(positions)
        state.force_base.copy_(forces)
        positions += of_atoms(state.alpha_step, batch_idx).unsqueeze(1) * state.direction
        state.iteration += 1


def lbfgs_step_coord_cell(
    positions: Tensor,
    cell: Tensor,
    forces: Tensor,
    stress: Tensor,
    state: LBFGSState,
    cell_state: LBFGSCellState,
    batch_idx: Tensor,
    *,
    maxstep: float = 0.2,
    curvature_eps: float | None = None,
) -> None:
    """`lbfgs_step_coord` of atoms and cells together, which changes ``cell`` as well.

    Parameters
    ----------
    positions, forces : (n_atoms, 3) tensor
    cell : (n_systems, 3, 3) tensor, length
        Lattice vectors in *columns*, ``r = cell f``, unlike everywhere else in this library: this is how
        nvalchemi-toolkit calls this step, with the axes x and z exchanged. The deformation of the cell at the start is
        lower triangular, so that nothing rotates, and a lower triangular cell remains so.
    stress : (n_systems, 3, 3) tensor, energy / length³
        Positive under tension.
    state, cell_state
        Of `lbfgs_prepare_state`, for n_atoms + 2 n_systems rows, and `lbfgs_prepare_cell_state`.
    batch_idx : (n_atoms,) int32 tensor
        In ascending order.
    maxstep, curvature_eps
        As in `lbfgs_step_coord`.
    """
    c = cell_state
    with torch.no_grad():
        c.phi.copy_(cell @ c.ref_cell_inv)
        c.phi_inv.copy_(torch.linalg.inv(c.phi))
        volumes = torch.linalg.det(cell).abs()
        c.d_phi.copy_(-volumes[:, None, None] * stress @ c.phi_inv.mT)
        of_atom = batch_idx.to(torch.int64)
        atoms = torch.arange(len(of_atom), device=of_atom.device) + 2 * of_atom
        last = c.ext_atom_ptr[1:].to(torch.int64)
        _pack(c.phi, c.kappa, c.cell_dof_a, c.cell_dof_b)
        _pack(c.d_phi, 1.0 / c.kappa, c.cell_force_a, c.cell_force_b)
        for of_all, of_atoms_, a, b in (
            (c.ext_positions, times(c.phi_inv.index_select(0, of_atom), positions), c.cell_dof_a, c.cell_dof_b),
            (c.ext_forces, times(c.phi.mT.index_select(0, of_atom), forces), c.cell_force_a, c.cell_force_b),
        ):
            of_all[atoms], of_all[last - 2], of_all[last - 1] = of_atoms_, a, b
        lbfgs_step_coord(
            c.ext_positions, c.ext_forces, state, c.ext_batch_idx, maxstep=maxstep, curvature_eps=curvature_eps
        )
        c.cell_dof_a.copy_(c.ext_positions[last - 2])
        c.cell_dof_b.copy_(c.ext_positions[last - 1])
        # the lower triangle changes, and what a caller has above it stays
        c.phi[:, :, 0] = c.cell_dof_a / c.kappa[:, None]
        c.phi[:, [1, 2, 2], [1, 1, 2]] = c.cell_dof_b / c.kappa[:, None]
        c.phi_inv.copy_(torch.linalg.inv(c.phi))
        positions.copy_(times(c.phi.index_select(0, of_atom), c.ext_positions[atoms]))
        cell.copy_(c.phi @ c.ref_cell)


def _pack(matrices: Tensor, factors: Tensor, a: Tensor, b: Tensor) -> None:
    """The lower triangles of matrices (n_systems, 3, 3), times factors, as two rows for each system."""
    a.copy_(matrices[:, :, 0] * factors[:, None])
    b.copy_(matrices[:, [1, 2, 2], [1, 1, 2]] * factors[:, None])


def _write(history: Tensor, enters: Tensor, places: Tensor, values: Tensor) -> None:
    """Put ``values`` (n, ...) at the place of each row in its history (n, size, ...), for the rows that enter."""
    at = torch.arange(history.shape[1], device=history.device) == places[:, None]
    at = (at & enters[:, None]).reshape(*at.shape, *[1] * (history.ndim - 2))
    history.copy_(torch.where(at, values.unsqueeze(1), history))


def _taken(history: Tensor, places: Tensor) -> Tensor:
    """The entry (n, ...) of each history (n, size, ...) at its place."""
    return history[torch.arange(len(places), device=places.device), places.to(torch.int64)]


def _direct(state: LBFGSState, rows: Rows, forces: Tensor, batch_idx: Tensor) -> None:
    """The two loops: the product of the forces and the inverse of the approximate Hessian."""
    size, q = state.ys.shape[1], forces.clone()
    coefficients: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
    for k in range(1, size + 1):
        place = (state.end - k) % size
        used = state.history_count >= k
        inverse = torch.where(used, 1.0 / torch.where(used, _taken(state.ys, place), 1.0), 0.0)
        s, y = (_taken(history, of_atoms(place, batch_idx)) for history in (state.s_history, state.y_history))
        alpha = inverse * rows.dots((s, q))[0].to(inverse.dtype)
        q -= of_atoms(alpha, batch_idx).unsqueeze(1) * y
        coefficients.append((place, inverse, alpha, s, y))
        _write(state.alpha_hist, used, place, alpha)
    q *= of_atoms(state.d0, batch_idx).unsqueeze(1)
    for place, inverse, alpha, s, y in reversed(coefficients):
        beta = inverse * rows.dots((y, q))[0].to(inverse.dtype)
        q += of_atoms(alpha - beta, batch_idx).unsqueeze(1) * s
        _write(state.beta_hist, inverse != 0.0, place, beta)
    state.direction.copy_(q)
