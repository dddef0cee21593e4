"""Steps of dynamics as nvalchemi-toolkit calls them, one function for each part of a step.

Arguments that are said to change are changed in place. Quantities of systems are (n_systems,): ``dt`` is always the
time step of the integrator, of which half-steps take half, and ``temperature`` is kT in units of energy. Systems have
3 n_atoms degrees of freedom where none are given. Without ``batch_idx`` (n_atoms,) int32 there is one system.

Cells have lattice vectors in rows, as everywhere in this library, except where columns are stated. What clients call
``cell_velocity`` is the strain rate ε of Martyna, Tobias and Klein (J. Chem. Phys. 101, 4177 (1994),
doi:10.1063/1.467468): ``dr/dt = v + ε r`` and ``dh/dt = h ε^T``. These equations are solved by exponentials, exactly
for the time of each part.

`nvalchemiops.torch.dynamics` has whole integrators, with units, constraints and conserved quantities. Steps of
relaxation are in `optimizers` beside this module.
"""

from typing import Any

import torch
import warp as wp
from torch import Tensor

from nvalchemiops.torch.clients.arrays import on_arrays
from nvalchemiops.torch.dynamics.cell_flows import of_matrices
from nvalchemiops.torch.dynamics.velocities import kinetic_tensor, maxwell_boltzmann
from nvalchemiops.torch.operators.chains import Chains, move_chains
from nvalchemiops.torch.operators.noise import normal_noise, places_in_systems
from nvalchemiops.torch.operators.segments import system_sums

Maybe = Tensor | None

LANGEVIN = 0
"""Stream of the random numbers of Langevin dynamics."""


def of_atoms(values: Tensor, batch_idx: Maybe) -> Tensor:
    """For each atom the value of its system; one row, which broadcasts, without ``batch_idx``."""
    return values if batch_idx is None else values.index_select(0, batch_idx)


def kick(velocities: Tensor, forces: Tensor, masses: Tensor, h: Any, batch_idx: Maybe) -> None:
    """Add the change of ``velocities`` by ``forces`` in a time ``h``."""
    velocities += (of_atoms(h, batch_idx) / masses).unsqueeze(1) * forces


def _drift(positions: Tensor, velocities: Tensor, h: Tensor, batch_idx: Maybe) -> None:
    positions += of_atoms(h, batch_idx).unsqueeze(1) * velocities


def times(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Product of each matrix (..., 3, 3) with its vector (..., 3)."""
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)


# -- constant energy, and noise -------------------------------------------------------------------


@on_arrays()
def velocity_verlet_position_update(
    positions: Tensor, velocities: Tensor, forces: Tensor, masses: Tensor, dt: Tensor, batch_idx: Maybe = None
) -> None:
    """Half a kick of ``velocities``, then ``positions`` for the whole step."""
    kick(velocities, forces, masses, 0.5 * dt, batch_idx)
    _drift(positions, velocities, dt, batch_idx)


@on_arrays()
def velocity_verlet_velocity_finalize(
    velocities: Tensor, forces_new: Tensor, masses: Tensor, dt: Tensor, batch_idx: Maybe = None
) -> None:
    """Half a kick of ``velocities`` by the new forces."""
    kick(velocities, forces_new, masses, 0.5 * dt, batch_idx)


langevin_baoab_finalize = velocity_verlet_velocity_finalize


@on_arrays()
def nhc_velocity_half_step(
    velocities: Tensor, forces: Tensor, masses: Tensor, dt: Tensor, batch_idx: Maybe = None
) -> None:
    """Half a kick of ``velocities``."""
    kick(velocities, forces, masses, 0.5 * dt, batch_idx)


@on_arrays()
def nhc_position_update(positions: Tensor, velocities: Tensor, dt: Tensor, batch_idx: Maybe = None) -> None:
    """Move ``positions`` for the whole step."""
    _drift(positions, velocities, dt, batch_idx)


@on_arrays()
def langevin_baoab_half_step(
    positions: Tensor,
    velocities: Tensor,
    forces: Tensor,
    masses: Tensor,
    dt: Tensor,
    temperature: Tensor,
    friction: Tensor,
    random_seed: int,
    batch_idx: Maybe = None,
) -> None:
    """Half a kick, half a drift, friction and noise for the whole step, half a drift.

    ``v' = c v + sqrt((1 - c²) kT / m) ξ`` with ``c = exp(-friction dt)``. The noise of an atom depends on the seed,
    which clients change from step to step, on the number of its system, and on its place in the system.
    """
    kick(velocities, forces, masses, 0.5 * dt, batch_idx)
    _drift(positions, velocities, 0.5 * dt, batch_idx)
    exponent = of_atoms(friction * dt, batch_idx).unsqueeze(1)
    kt = of_atoms(temperature, batch_idx).unsqueeze(1)
    spread = (-torch.expm1(-2.0 * exponent) * kt / masses.unsqueeze(1)).sqrt()
    keys = torch.arange(dt.shape[0], device=dt.device)
    seeds, step = torch.full_like(keys, int(random_seed)), keys.new_zeros(())
    places = None if batch_idx is None else places_in_systems(batch_idx, dt.shape[0])
    systems = None if batch_idx is None else batch_idx.to(torch.int32)
    noise = normal_noise(seeds, keys, step, systems, places, LANGEVIN, velocities.shape[0], 3)
    velocities.mul_(torch.exp(-exponent)).add_(spread * noise.to(velocities.dtype))
    _drift(positions, velocities, 0.5 * dt, batch_idx)


# -- Nosé-Hoover chains ---------------------------------------------------------------------------


@on_arrays("masses")
def _fill_masses(masses: Tensor, ndof: Tensor, target_temp: Tensor, tau: Tensor) -> None:
    of_one = target_temp * tau * tau
    masses.copy_(of_one.reshape(-1, 1).expand_as(masses))
    masses[:, 0] = ndof * of_one


def nhc_compute_masses(
    ndof: Any,
    target_temp: Any,
    tau: Any,
    chain_length: int,
    masses: Any = None,
    num_systems: int = 1,
    device: Any = None,
    dtype: Any = wp.float64,
) -> Any:
    """Masses (n_systems, chain_length) of chains: ``kT tau²``, and for the first link that times ``ndof``."""
    if masses is None:
        masses = wp.zeros((num_systems, chain_length), dtype=dtype, device=device)
    values = (
        v if isinstance(v, wp.array | Tensor) else torch.tensor(v, dtype=torch.float64)
        for v in (ndof, target_temp, tau)
    )
    return _fill_masses(masses, *values)


def _step_chain(chains: Chains, loops: int = 1) -> Tensor:
    """Move chains in place by `move_chains`, and return the factors of the velocities."""
    eta, eta_dot = chains.positions, chains.velocities
    shapes = Chains(eta, eta, eta[:, 0], eta[:, 0], eta[:, 0], eta, eta[:, 0])
    given = (values.expand_as(like).to(torch.float64) for values, like in zip(chains, shapes))
    moved, pushed, log_scales = move_chains(*given, loops)
    eta.copy_(moved)
    eta_dot.copy_(pushed)
    return torch.exp(log_scales).to(eta.dtype)


@on_arrays()
def nhc_thermostat_chain_update(
    velocities: Tensor,
    masses: Tensor,
    eta: Tensor,
    eta_dot: Tensor,
    eta_mass: Tensor,
    target_temp: Tensor,
    dt: Tensor,
    ndof: Tensor,
    ke2: Tensor,
    total_scale: Tensor,
    step_scale: Maybe = None,
    dt_chain: Maybe = None,
    nloops: int = 1,
    batch_idx: Maybe = None,
    num_systems: int | None = None,
    compute_ke: bool = True,
) -> None:
    """Move chains (n_systems, n_links) for half a step, in ``nloops`` equal parts, and scale ``velocities``.

    ``ke2`` becomes ``Σ m v²`` after scaling, and ``total_scale`` the factor. With ``compute_ke=False``, ``ke2`` is
    given: the sum before scaling, over atoms elsewhere as well. ``step_scale`` and ``dt_chain`` are not used.
    """
    if compute_ke:
        ke2.copy_(_twice_kinetic(velocities, masses, batch_idx, ke2.shape[0]))
    chains = Chains(eta, eta_dot, ke2, ndof * target_temp, target_temp, eta_mass, 0.5 * dt)
    scale = _step_chain(chains, nloops)
    velocities *= of_atoms(scale, batch_idx).unsqueeze(1)
    ke2 *= scale * scale
    total_scale.copy_(scale)


@on_arrays()
def npt_thermostat_half_step(
    eta: Tensor,
    eta_dot: Tensor,
    kinetic_energy: Tensor,
    target_temperature: Tensor,
    thermostat_masses: Tensor,
    num_atoms_per_system: Tensor,
    chain_length: int,
    dt: Tensor,
) -> None:
    """Move chains for half a step at this energy; the caller scales velocities by ``exp(-eta_dot[:, 0] dt / 2)``."""
    # the energy stays what it is: without one that follows the chain, all of it is in the target
    missing = 3 * num_atoms_per_system * target_temperature - 2.0 * kinetic_energy
    nothing = torch.zeros_like(missing)
    _step_chain(Chains(eta, eta_dot, nothing, missing, target_temperature, thermostat_masses, 0.5 * dt))


# -- constant pressure ----------------------------------------------------------------------------


@on_arrays("masses_out")
def compute_barostat_mass(target_temperature: Tensor, tau_p: Tensor, num_atoms: Tensor, masses_out: Tensor) -> None:
    """Write ``(3 n_atoms + 3) kT tau_p²``. For each component of ε the mass is a third of it."""
    masses_out.copy_((3 * num_atoms + 3) * target_temperature * tau_p * tau_p)


@on_arrays("kinetic_tensors")
def compute_kinetic_tensor(
    velocities: Tensor, masses: Tensor, kinetic_tensors: Tensor, batch_idx: Maybe = None
) -> None:
    """Write ``Σ m v v^T`` (n_systems, 9)."""
    found = kinetic_tensor(velocities, masses, batch_idx, kinetic_tensors.shape[0])
    kinetic_tensors.copy_(2.0 * found.flatten(1))


@on_arrays("pressure_tensors")
def compute_pressure_tensor(
    velocities: Tensor,
    masses: Tensor,
    virial_tensors: Tensor,
    cells: Tensor,
    kinetic_tensors: Tensor,
    pressure_tensors: Tensor,
    volumes: Tensor,
    batch_idx: Maybe = None,
    compute_kinetic: bool = True,
) -> None:
    """Write pressures ``(Σ m v v^T + virial) / volume`` (n_systems, 9), kinetic tensors and volumes.

    Virials are minus the derivative of the energy with respect to a strain. With ``compute_kinetic=False`` the
    kinetic tensors are given.
    """
    if compute_kinetic:
        compute_kinetic_tensor(velocities, masses, kinetic_tensors, batch_idx)
    volumes.copy_(torch.linalg.det(cells).abs())
    pressure_tensors.copy_((kinetic_tensors + virial_tensors) / volumes.unsqueeze(1))


@on_arrays("scalar_pressures")
def compute_scalar_pressure(pressure_tensors: Tensor, scalar_pressures: Tensor) -> None:
    """Write a third of the trace."""
    scalar_pressures.copy_(pressure_tensors[:, ::4].sum(1) / 3.0)


@on_arrays()
def nph_barostat_half_step(
    cell_velocities: Tensor,
    pressure_tensors: Tensor,
    target_pressures: Tensor,
    volumes: Tensor,
    cell_masses: Tensor,
    kinetic_energy: Tensor,
    num_atoms_per_system: Tensor,
    dt: Tensor,
) -> None:
    """Half a step of the strain rate: ``W dε/dt = V (P - P_target) + 2 K / (3 n_atoms)``.

    Targets (n_systems,) couple the mean of the pressures along the axes to all three, (n_systems, 3) each axis to its
    own, and (n_systems, 9) all components of a matrix.
    """
    pressure = pressure_tensors.reshape(-1, 3, 3)
    identity = torch.eye(3, dtype=pressure.dtype, device=pressure.device)
    if target_pressures.ndim == 1:
        excess = (pressure.diagonal(dim1=1, dim2=2).mean(1) - target_pressures)[:, None, None] * identity
    elif target_pressures.shape[1] == 3:
        excess = torch.diag_embed(pressure.diagonal(dim1=1, dim2=2) - target_pressures)
    else:
        excess = pressure - target_pressures.reshape(-1, 3, 3)
    kinetic = (2.0 * kinetic_energy / (3 * num_atoms_per_system))[:, None, None] * identity
    cell_velocities += (0.5 * dt / cell_masses)[:, None, None] * (volumes[:, None, None] * excess + kinetic)


npt_barostat_half_step = nph_barostat_half_step


def _pressed_kick(
    velocities: Tensor, masses: Tensor, forces: Tensor, rate: Tensor, h: Tensor, batch_idx: Maybe
) -> None:
    """``dv/dt = F / m - rate v`` for the time h, with matrices (n_systems, 3, 3)."""
    decay, mean = of_matrices(-h[:, None, None] * rate)
    pushes = (of_atoms(h, batch_idx) / masses).unsqueeze(1) * forces
    velocities.copy_(times(of_atoms(decay, batch_idx), velocities) + times(of_atoms(mean, batch_idx), pushes))


@on_arrays()
def nph_velocity_half_step(
    velocities: Tensor,
    masses: Tensor,
    forces: Tensor,
    cell_velocities: Tensor,
    volumes: Tensor,
    num_atoms: int,
    dt: Tensor,
    batch_idx: Maybe = None,
    num_atoms_per_system: Maybe = None,
    cells_inv: Maybe = None,
    mode: str = "isotropic",
    eta_dots: Maybe = None,
) -> None:
    """Half a step of ``dv/dt = F / m - (ε + Tr ε / (3 n_atoms)) v``; with ``eta_dots`` also ``- eta_dots[:, 0] v``.

    ``mode`` says which components of ε may differ from zero: for "isotropic" their mean along the axes, for
    "anisotropic" the diagonal, for "triclinic" all. ``volumes`` and ``cells_inv`` are not used.
    """
    diagonal = cell_velocities.diagonal(dim1=1, dim2=2)
    if mode not in ("isotropic", "anisotropic", "triclinic"):
        raise ValueError(f"`mode` must be 'isotropic', 'anisotropic' or 'triclinic', got {mode!r}")
    mean = diagonal.mean(1, keepdim=True)
    rate = cell_velocities
    if mode != "triclinic":
        rate = torch.diag_embed(diagonal if mode == "anisotropic" else mean.expand(-1, 3))
    count = num_atoms if num_atoms_per_system is None else num_atoms_per_system.unsqueeze(1)
    friction = mean / count  # the trace, divided by the degrees of freedom
    if eta_dots is not None:
        friction = friction + eta_dots[:, :1]
    rate = rate + torch.diag_embed(friction.expand(-1, 3))
    _pressed_kick(velocities, masses, forces, rate, 0.5 * dt, batch_idx)


@on_arrays()
def npt_velocity_half_step(
    velocities: Tensor,
    masses: Tensor,
    forces: Tensor,
    cell_velocities: Tensor,
    volumes: Tensor,
    eta_dots: Tensor,
    num_atoms: int,
    dt: Tensor,
    batch_idx: Maybe = None,
    num_atoms_per_system: Maybe = None,
    cells_inv: Maybe = None,
    mode: str = "isotropic",
) -> None:
    """`nph_velocity_half_step` with the friction of a chain."""
    of_systems = batch_idx, num_atoms_per_system, cells_inv, mode, eta_dots
    nph_velocity_half_step(velocities, masses, forces, cell_velocities, volumes, num_atoms, dt, *of_systems)


@on_arrays()
def npt_position_update(
    positions: Tensor,
    velocities: Tensor,
    cells: Tensor,
    cell_velocities: Tensor,
    dt: Tensor,
    cells_inv: Maybe = None,
    batch_idx: Maybe = None,
) -> None:
    """Move ``positions`` for the whole step of ``dr/dt = v + ε r``. Cells are not used."""
    stretch, mean = of_matrices(dt[:, None, None] * cell_velocities)
    moves = of_atoms(dt, batch_idx).unsqueeze(1) * velocities
    positions.copy_(times(of_atoms(stretch, batch_idx), positions) + times(of_atoms(mean, batch_idx), moves))


@on_arrays()
def npt_cell_update(cells: Tensor, cell_velocities: Tensor, dt: Tensor) -> None:
    """Deform ``cells`` for the whole step, with the atoms of `npt_position_update`."""
    cells.copy_(cells @ of_matrices(dt[:, None, None] * cell_velocities)[0].mT)


# -- velocities -----------------------------------------------------------------------------------


def _twice_kinetic(velocities: Tensor, masses: Tensor, batch_idx: Maybe, n: int) -> Tensor:
    return system_sums(masses * velocities.square().sum(1), batch_idx, n)


@on_arrays("kinetic_energy")
def compute_kinetic_energy(
    velocities: Tensor, masses: Tensor, kinetic_energy: Tensor, batch_idx: Maybe = None, num_systems: int | None = None
) -> None:
    """Write ``Σ m v² / 2``."""
    kinetic_energy.copy_(0.5 * _twice_kinetic(velocities, masses, batch_idx, kinetic_energy.shape[0]))


@on_arrays("temperature")
def compute_temperature(kinetic_energy: Tensor, temperature: Tensor, num_atoms_per_system: Tensor) -> None:
    """Write kT of systems whose centre of mass rests: ``2 K / (3 n_atoms - 3)``, for a single atom ``2 K / 3``."""
    ndof = torch.where(num_atoms_per_system > 1, 3 * num_atoms_per_system - 3, 3)
    temperature.copy_(2.0 * kinetic_energy / ndof)


@on_arrays()
def velocity_rescale(velocities: Tensor, scale_factor: Tensor, batch_idx: Maybe = None) -> None:
    """Multiply ``velocities`` by the factors of their systems."""
    velocities *= of_atoms(scale_factor, batch_idx).unsqueeze(1)


@on_arrays()
def remove_com_motion(
    velocities: Tensor,
    masses: Tensor,
    total_momentum: Tensor,
    total_mass: Tensor,
    com_velocities: Tensor,
    batch_idx: Maybe = None,
    num_systems: int | None = None,
) -> None:
    """Take the velocity of the centre of mass from ``velocities``; write it, total momenta and masses."""
    total_momentum.copy_(system_sums(masses.unsqueeze(1) * velocities, batch_idx, total_mass.shape[0]))
    total_mass.copy_(system_sums(masses, batch_idx, total_mass.shape[0]))
    com_velocities.copy_(total_momentum / torch.where(total_mass > 0.0, total_mass, 1.0).unsqueeze(1))
    velocities -= of_atoms(com_velocities, batch_idx)


@on_arrays()
def initialize_velocities(
    velocities: Tensor,
    masses: Tensor,
    temperature: Tensor,
    total_momentum: Tensor,
    total_mass: Tensor,
    com_velocities: Tensor,
    random_seed: int = 42,
    remove_com: bool = True,
    batch_idx: Maybe = None,
    num_systems: int | None = None,
) -> None:
    """Draw ``velocities`` from the Maxwell-Boltzmann distribution, and take that of the centre of mass from them."""
    velocities.copy_(maxwell_boltzmann(masses, temperature, batch_idx, temperature.shape[0], seed=random_seed))
    if remove_com:
        remove_com_motion(velocities, masses, total_momentum, total_mass, com_velocities, batch_idx)


# -- cells ----------------------------------------------------------------------------------------


@on_arrays("cells_inv")
def compute_cell_inverse(cells: Tensor, cells_inv: Tensor) -> None:
    """Write the inverse of each cell."""
    cells_inv.copy_(torch.linalg.inv_ex(cells)[0])


@on_arrays()
def wrap_positions_to_cell(positions: Tensor, cells: Tensor, cells_inv: Tensor, batch_idx: Maybe = None) -> None:
    """Move ``positions`` into their cells, whose lattice vectors are in **columns** here, as clients pass them."""
    images = times(of_atoms(cells_inv, batch_idx), positions).floor()
    positions -= times(of_atoms(cells, batch_idx), images)


@on_arrays()
def align_cell(positions: Tensor, cell: Tensor, transform: Tensor, batch_idx: Maybe = None) -> None:
    """Rotate systems so that the first lattice vector is along x, and the second in the plane of x and y.

    ``transform`` becomes the rotation R, ``r' = R r``. It is never a reflection, so that molecules stay what they are:
    in left-handed cells the third lattice vector points down.
    """
    axes, _ = torch.linalg.qr(cell.mT)
    signs = (cell @ axes).diagonal(dim1=1, dim2=2).sign()
    axes = axes * torch.where(signs == 0.0, 1.0, signs).unsqueeze(1)
    handed = torch.linalg.det(axes).sign().unsqueeze(1)
    axes = torch.cat([axes[..., :2], axes[..., 2:] * handed.unsqueeze(2)], 2)
    transform.copy_(axes.mT)
    cell.copy_((cell @ axes).tril())
    positions.copy_(times(of_atoms(transform, batch_idx), positions))


@on_arrays("cell_force")
def stress_to_cell_force(
    stress: Tensor, cell: Tensor, volume: Tensor, cell_force: Tensor, keep_aligned: bool = True
) -> None:
    """Write minus the derivative of the energy with respect to the cell, at fixed fractional coordinates.

    With ``keep_aligned`` only its lower triangle, so that cells that `align_cell` has rotated stay so.
    """
    force = -volume[:, None, None] * torch.linalg.solve(cell.mT, stress)
    cell_force.copy_(force.tril() if keep_aligned else force)
