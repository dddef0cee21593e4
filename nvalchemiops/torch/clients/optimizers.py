"""Steps of FIRE as nvalchemi-toolkit calls them; arguments are as in `nvalchemiops.torch.clients.dynamics`."""

from typing import Any

import torch
from torch import Tensor

from nvalchemiops.torch.clients.arrays import on_arrays
from nvalchemiops.torch.clients.dynamics import Maybe, kick, of_atoms, times
from nvalchemiops.torch.dynamics.chart import Rows
from nvalchemiops.torch.dynamics.optimizers import Pace, adapted

OF_ALL_ROWS = {"atom_ptr", "ext_atom_ptr", "ext_positions", "ext_velocities", "ext_forces", "ext_batch_idx"}
"""Scratch memory, and pointers, of atoms and cells."""


def _store(scratch: Maybe, values: Tensor) -> None:
    if scratch is not None:
        scratch.copy_(values)


def _powers(
    velocities: Tensor, forces: Tensor, given: tuple[Maybe, ...], rows: Rows, known: bool = False
) -> list[Tensor]:
    """``Σ F·v``, ``Σ v·v`` and ``Σ F·F`` of systems: computed, and kept in ``given``, unless these are ``known``."""
    if known:
        if any(values is None for values in given):
            raise ValueError("`compute_reductions=False` needs `Σ F·v`, `Σ v·v` and `Σ F·F`, which are not all given")
        return [values for values in given if values is not None]
    pairs = (forces, velocities), (velocities, velocities), (forces, forces)
    found = [values.to(forces.dtype) for values in rows.dots(*pairs)]
    for scratch, values in zip(given, found):
        _store(scratch, values)
    return found


def _combine(velocities: Tensor, forces: Tensor, of_v: Tensor, of_f: Tensor, rows: Rows) -> None:
    """Replace velocities by a combination of velocities and forces, with the weights of each system."""
    of_v, of_f = rows.of_rows(of_v, of_f)
    velocities.copy_(of_v * velocities + of_f * forces)


def _ratio(vv: Tensor, ff: Tensor) -> Tensor:
    return (vv / torch.where(ff > 0.0, ff, 1.0)).sqrt()


def _limit(moves: Tensor, maxstep: Any, rows: Rows) -> tuple[Tensor, Tensor]:
    """Moves of rows (n_rows, 3), shortened for each system so that none is longer than ``maxstep``; and the longest."""
    longest = rows.largest(moves)
    (scale,) = rows.of_rows(torch.where(longest > maxstep, maxstep / longest, 1.0))
    return moves * scale, longest


@on_arrays()
def fire_update(
    velocities: Tensor,
    forces: Tensor,
    alpha: Tensor,
    dt: Tensor,
    alpha_start: Tensor,
    f_alpha: Tensor,
    dt_min: Tensor,
    dt_max: Tensor,
    n_steps_positive: Tensor,
    n_min: Tensor,
    f_dec: Tensor,
    f_inc: Tensor,
    vf: Maybe = None,
    vv: Maybe = None,
    ff: Maybe = None,
    batch_idx: Maybe = None,
    compute_reductions: bool = True,
) -> None:
    """Change ``velocities``, ``alpha``, ``dt`` and ``n_steps_positive`` by the rules of FIRE, without moving atoms.

    A system at rest keeps everything, as in ASE, where the first step does. With ``compute_reductions=False`` the
    products ``vf``, ``vv`` and ``ff`` are given, otherwise they are written. Source: E. Bitzek et al., Phys. Rev. Lett.
    97, 170201 (2006), doi:10.1103/PhysRevLett.97.170201.
    """
    rows = Rows(len(alpha), batch_idx)
    power, speed, force = _powers(velocities, forces, (vf, vv, ff), rows, not compute_reductions)
    old, limits = Pace(dt, alpha, n_steps_positive), {"dtmin": dt_min, "dtmax": dt_max}
    # here the steps before this one are counted
    rule = limits | {"Nmin": n_min + 1, "finc": f_inc, "fdec": f_dec, "astart": alpha_start, "fa": f_alpha}
    pace, downhill, goes = adapted(old, power, speed == 0.0, **rule)
    turn = torch.where(downhill, alpha, 0.0)
    _combine(velocities, forces, torch.where(goes, 1.0 - turn, 0.0), turn * _ratio(speed, force), rows)
    for now, then in zip(old, pace):
        now.copy_(then)


@on_arrays()
def fire_step(
    positions: Tensor,
    velocities: Tensor,
    forces: Tensor,
    masses: Tensor,
    alpha: Tensor,
    dt: Tensor,
    alpha_start: Tensor,
    f_alpha: Tensor,
    dt_min: Tensor,
    dt_max: Tensor,
    maxstep: Tensor,
    n_steps_positive: Tensor,
    n_min: Tensor,
    f_dec: Tensor,
    f_inc: Tensor,
    uphill_flag: Maybe = None,
    vf: Maybe = None,
    vv: Maybe = None,
    ff: Maybe = None,
    batch_idx: Maybe = None,
    compute_reductions: bool = True,
) -> None:
    """`fire_update`, then a step of Euler's method: ``v' = v + dt F / m``, ``r' = r + dt v'``.

    No atom moves farther than ``maxstep``. Where ``uphill_flag`` is set, a system that goes uphill first takes half of
    its last step back.
    """
    before, back = velocities.clone(), 0.5 * dt
    limits, products = (alpha_start, f_alpha, dt_min, dt_max), (vf, vv, ff)
    counts = n_steps_positive, n_min, f_dec, f_inc
    fire_update(velocities, forces, alpha, dt, *limits, *counts, *products, batch_idx, compute_reductions)
    if uphill_flag is not None:
        stopped = (n_steps_positive == 0) & (uphill_flag != 0)
        at_rest = of_atoms(torch.where(stopped, back, 0.0), batch_idx).unsqueeze(1)
        positions -= at_rest * before
    kick(velocities, forces, masses, dt, batch_idx)
    moves = of_atoms(dt, batch_idx).unsqueeze(1) * velocities
    positions += _limit(moves, maxstep, Rows(len(dt), batch_idx))[0]


def fire2_step_coord(
    positions: Tensor,
    velocities: Tensor,
    forces: Tensor,
    batch_idx: Tensor,
    alpha: Tensor,
    dt: Tensor,
    nsteps_inc: Tensor,
    *,
    vf: Maybe = None,
    v_sumsq: Maybe = None,
    f_sumsq: Maybe = None,
    max_norm: Maybe = None,
    delaystep: int = 60,
    dtgrow: float = 1.05,
    dtshrink: float = 0.75,
    alphashrink: float = 0.985,
    alpha0: float = 0.09,
    tmax: float = 0.08,
    tmin: float = 0.005,
    maxstep: float = 0.1,
    compute_reductions: bool = True,
) -> None:
    """A step of FIRE 2.0 with masses of one, of tensors.

    Changes ``positions``, ``velocities``, ``alpha``, ``dt`` and ``nsteps_inc``. A system at rest takes the step without
    changing its parameters, as the first step of ASE. No atom moves farther than ``maxstep``. Scratch tensors
    (n_systems,) receive ``Σ F·v``, ``Σ v·v``, ``Σ F·F`` before the step, and the longest move before it is
    limited; with ``compute_reductions=False`` the products are given. Source: J. Guénolé et al., Comput. Mater. Sci.
    175, 109584 (2020), doi:10.1016/j.commatsci.2020.109584.
    """
    with torch.no_grad():
        rows, old = Rows(len(alpha), batch_idx), Pace(dt, alpha, nsteps_inc)
        power, speed, force = _powers(velocities, forces, (vf, v_sumsq, f_sumsq), rows, not compute_reductions)
        rule = {"Nmin": delaystep, "finc": dtgrow, "dtmax": tmax, "fdec": dtshrink, "dtmin": tmin}
        pace, _, goes = adapted(old, power, speed == 0.0, **rule, astart=alpha0, fa=alphashrink)
        for now, then in zip(old, pace):
            now.copy_(then)
        back, step = rows.of_rows(torch.where(goes, 0.0, 0.5 * dt), dt)
        positions -= back * velocities
        _combine(velocities, forces, goes.to(dt.dtype), dt, rows)
        (speed,) = rows.dots((velocities, velocities))
        _combine(velocities, forces, 1.0 - alpha, alpha * _ratio(speed.to(dt.dtype), force), rows)
        moves, longest = _limit(step * velocities, maxstep, rows)
        positions += moves
        _store(max_norm, longest)


def fire2_step_coord_cell(
    positions: Tensor,
    velocities: Tensor,
    forces: Tensor,
    cell: Tensor,
    cell_velocities: Tensor,
    cell_force: Tensor,
    batch_idx: Tensor,
    alpha: Tensor,
    dt: Tensor,
    nsteps_inc: Tensor,
    *,
    cell_force_scale: float = 1.0,
    **options: Any,
) -> None:
    """`fire2_step_coord`, with its options, of atoms and cells (n_systems, 3, 3) together: a cell is three more atoms.

    ``cell_force`` is what `stress_to_cell_force` writes. Atoms make their own moves, then follow the cell. The rows of
    a cell are those of its lattice times ``cell_force_scale``: the larger, the less it moves. Scratch memory for all
    rows (``ext_positions``, ...) has no effect.
    """
    options = {name: value for name, value in options.items() if name not in OF_ALL_ROWS}
    with torch.no_grad():
        n_atoms = len(positions)
        systems = torch.arange(len(cell), dtype=batch_idx.dtype, device=batch_idx.device).repeat_interleave(3)
        rows, pulls = (
            torch.cat([a, b.reshape(-1, 3)])
            for a, b in ((velocities, cell_velocities * cell_force_scale), (forces, cell_force / cell_force_scale))
        )
        moves = torch.zeros_like(rows)
        fire2_step_coord(moves, rows, pulls, torch.cat([batch_idx, systems]), alpha, dt, nsteps_inc, **options)
        velocities.copy_(rows[:n_atoms])
        cell_velocities.copy_(rows[n_atoms:].reshape(-1, 3, 3) / cell_force_scale)
        new = cell + moves[n_atoms:].reshape(-1, 3, 3) / cell_force_scale
        stretch = torch.linalg.solve(cell, new).mT
        positions.copy_(times(of_atoms(stretch, batch_idx), positions + moves[:n_atoms]))
        cell.copy_(new)
