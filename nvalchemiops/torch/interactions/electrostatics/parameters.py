"""Parameters of Ewald sums for torch tensors."""

from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.accuracy import choice
from nvalchemiops.torch.interactions.electrostatics.accuracy.nearby_forces import force_on_host, is_crowded
from nvalchemiops.torch.interactions.electrostatics.accuracy.sizes import Sizes, counted, sizes_of
from nvalchemiops.torch.interactions.electrostatics.k_vectors import (
    check_bounds,
    check_cells_alone,
    numbers_of_systems,
)
from nvalchemiops.torch.interactions.electrostatics.system import check_periodic_cells, check_system
from nvalchemiops.torch.neighbors.rows import build_rows
from nvalchemiops.torch.operators.lattice import check_cells, check_spline_order, mesh_and_order
from nvalchemiops.torch.runtime._torch_internals import named_in_files
from nvalchemiops.torch.runtime.context import IN_CAPTURE, on_host, refuse_in_capture
from nvalchemiops.torch.systems import System


def compute_bspline_moduli_1d(miller_indices: torch.Tensor, mesh_N: int, spline_order: int) -> torch.Tensor:
    """Fourier transform ``sinc(m/N)^p`` of the spline of order p, at Miller indices m of a mesh with N points.

    Parameters
    ----------
    miller_indices : tensor of any shape
    mesh_N : int
    spline_order : int
        1 to 10.

    Returns
    -------
    tensor like ``miller_indices``
        float64 for float64, otherwise float32.
    """
    checks.check_tensor("miller_indices", miller_indices)
    if miller_indices.is_complex():
        raise TypeError(f"`miller_indices` must be real numbers, got {miller_indices.dtype}")
    size = checks.check_int("mesh_N", mesh_N)
    if size < 1:
        raise ValueError(f"`mesh_N` must be positive, got {size}")
    order = check_spline_order(spline_order, 1)
    dtype = torch.float64 if miller_indices.dtype == torch.float64 else torch.float32
    return torch.sinc(miller_indices.to(dtype) / size) ** order


@named_in_files
class EwaldParameters(NamedTuple):
    """Parameters of an Ewald sum, one value for each system.

    Attributes
    ----------
    alpha : (n_systems,) tensor, 1/length
        Splitting parameter.
    real_space_cutoff : (n_systems,) tensor, length
    reciprocal_space_cutoff : (n_systems,) tensor, 1/length
        Largest length of a k-vector.
    """

    alpha: torch.Tensor
    real_space_cutoff: torch.Tensor
    reciprocal_space_cutoff: torch.Tensor


@named_in_files
class PMEParameters(NamedTuple):
    """Parameters of a particle-mesh Ewald sum.

    Attributes
    ----------
    alpha : (n_systems,) tensor, 1/length
        Splitting parameter.
    mesh_dimensions : (int, int, int)
        Points of the mesh, the same for all systems of a batch.
    mesh_spacing : (n_systems, 3) tensor, length
        Distances between mesh points along each lattice vector.
    real_space_cutoff : (n_systems,) tensor, length
    """

    alpha: torch.Tensor
    mesh_dimensions: tuple[int, int, int]
    mesh_spacing: torch.Tensor
    real_space_cutoff: torch.Tensor


def estimate_ewald_parameters(
    positions: torch.Tensor,
    cell: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    accuracy: float = 1e-6,
    *,
    real_space_cutoff: float | torch.Tensor | None = None,
    charges: torch.Tensor | None = None,
) -> EwaldParameters:
    """Splitting parameter and cutoffs that meet ``accuracy`` at about the least cost.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, length
        Without ``charges`` only the number of atoms in each system matters.
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom, in any order.
    accuracy : float, optional
        Target for the RMS error of the forces, relative to the RMS of the forces. With ``charges`` it is typically met
        within a factor of 3. Small systems get smaller force errors, so that their virial is as accurate.
    real_space_cutoff : float or (n_systems,) tensor, length, optional
        By default the cutoff that balances the work for pairs and long range.
    charges : (n_atoms,) or (n_atoms, n_channels) tensor, optional
        With charges, the magnitude of the forces is estimated from the positions, as the sums do; it sets the allowed
        errors. Without charges, forces are assumed to be as large as in thermal vibrations or between molecules. Leave
        charges out if bonds are excluded, or if parameters must not depend on positions.

    Returns
    -------
    EwaldParameters
        Tensors (n_systems,) of the dtype of ``positions``.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message.

    Notes
    -----
    Formulas and sources: `nvalchemiops.interactions.electrostatics.error_models`. Reads values on the host.
    """
    return ewald_parameters(System(positions, charges, cell, batch_idx), accuracy, real_space_cutoff)


def ewald_parameters(
    atoms: System, accuracy: float, real_space_cutoff: Any, long_range: choice.LongRange | None = None
) -> EwaldParameters:
    """`estimate_ewald_parameters` for a system, whose dipoles, quadrupoles and widths count with ``long_range``."""
    positions, sizes = atoms.positions, _sizes_of(atoms)
    accuracy = choice.check_accuracy(accuracy, positions)
    r_c = _given_cutoffs(real_space_cutoff, sizes, positions)
    if long_range is not None and not of_charges_alone(atoms):
        alpha, r_c, target, _ = _as_in_calls(atoms, accuracy, long_range, r_c)
    else:
        if r_c is None:
            typical = core.Target(accuracy)
            alpha = core.ewald_alpha(sizes.n_atoms, sizes.volume, typical, core.COSTS[positions.device.type])
            r_c = core.real_cutoff(alpha, sizes.spacing, typical)
        target = _target(accuracy, atoms, sizes, r_c)
        alpha = core.alpha_for_cutoff(r_c, sizes.spacing, target)
    k_c = core.reciprocal_cutoff(alpha, sizes.spacing, target)
    return EwaldParameters(*(_tensor(v, positions) for v in (alpha, r_c, k_c)))


def estimate_pme_parameters(
    positions: torch.Tensor,
    cell: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    accuracy: float = 1e-6,
    real_space_cutoff: float | torch.Tensor | None = None,
    mesh_safety_factor: float = 1.0,
    *,
    spline_order: int = 5,
    fft_padding_fraction: float = 0.25,
    charges: torch.Tensor | None = None,
) -> PMEParameters:
    """Splitting parameter, cutoff and mesh that meet ``accuracy`` at about the least cost.

    Parameters
    ----------
    positions, cell, batch_idx, accuracy, real_space_cutoff, charges
        As for `estimate_ewald_parameters`.
    mesh_safety_factor : float, optional
        Divides the mesh spacing.
    spline_order : int, optional
        2 to 10. Higher orders need far coarser meshes: on a CPU 8 is fastest at 1e-5, and 10 from 1e-6 on.
    fft_padding_fraction : float, optional
        Fraction by which an axis of the mesh may grow to reach a size with a faster Fourier transform.

    Returns
    -------
    PMEParameters
        Tensors (n_systems,) or (n_systems, 3) of the dtype of ``positions``.

    Warns
    -----
    AccuracyWarning
        Splines of this order cannot reach the accuracy; the message states the expected error.

    Notes
    -----
    Errors, formulas and sources: see `estimate_ewald_parameters`. Reads values on the host.
    """
    atoms = System(positions, charges, cell, batch_idx)
    return pme_parameters(atoms, accuracy, real_space_cutoff, spline_order, mesh_safety_factor, fft_padding_fraction)


def pme_parameters(
    atoms: System,
    accuracy: float,
    real_space_cutoff: Any,
    spline_order: int,
    safety: float = 1.0,
    padding: float = 0.25,
    long_range: choice.LongRange | None = None,
) -> PMEParameters:
    """`estimate_pme_parameters` for a system, whose dipoles, quadrupoles and widths count with ``long_range``."""
    positions, sizes = atoms.positions, _sizes_of(atoms)
    accuracy = choice.check_accuracy(accuracy, positions)
    order = check_spline_order(spline_order)
    r_c, strengths = _given_cutoffs(real_space_cutoff, sizes, positions), None
    if long_range is not None and not of_charges_alone(atoms):
        alpha, r_c, target, strengths = _as_in_calls(atoms, accuracy, long_range, r_c)
    else:
        if r_c is None:
            r_c = _mesh_cutoff(sizes, core.Target(accuracy), order, core.COSTS[positions.device.type])
        target = _target(accuracy, atoms, sizes, r_c, on_mesh=True)
        alpha = core.alpha_for_cutoff(r_c, sizes.spacing, target)
    mesh = choice.mesh_for(sizes, alpha, target, order, safety, padding, strengths)
    spacing = sizes.lengths / np.array(mesh)
    return PMEParameters(_tensor(alpha, positions), mesh, _tensor(spacing, positions), _tensor(r_c, positions))


@named_in_files
class ErrorEstimate(NamedTuple):
    """Expected RMS errors of forces, relative to the RMS of the forces, of each system.

    Attributes
    ----------
    real_space : (n_systems,) tensor
        Error from pairs beyond the cutoff.
    reciprocal_space : (n_systems,) tensor
        Error from k-vectors that are left out, or from the mesh.
    total : (n_systems,) tensor
        Root of the sum of the squares of both errors.
    """

    real_space: torch.Tensor
    reciprocal_space: torch.Tensor
    total: torch.Tensor


def estimate_errors(
    positions: torch.Tensor,
    cell: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    *,
    alpha: float | torch.Tensor,
    real_space_cutoff: float | torch.Tensor,
    reciprocal_space_cutoff: float | torch.Tensor | None = None,
    miller_bounds: Any = None,
    mesh_dimensions: Any = None,
    mesh_spacing: float | torch.Tensor | None = None,
    spline_order: int = 5,
    charges: torch.Tensor | None = None,
) -> ErrorEstimate:
    """Expected errors of `ewald_summation` or `particle_mesh_ewald` with given parameters.

    Parameters
    ----------
    positions, cell, batch_idx, charges
        As for `estimate_ewald_parameters`.
    alpha : float or (n_systems,) tensor, 1/length
    real_space_cutoff : float or (n_systems,) tensor, length
        Reach of the neighbor list.
    reciprocal_space_cutoff : float or (n_systems,) tensor, 1/length, optional
        Largest length of a k-vector, ``k_cutoff`` of a sum. Exactly one of this, ``miller_bounds`` and a mesh is
        required.
    miller_bounds : (int, int, int), optional
        All k-vectors up to these Miller indices.
    mesh_dimensions : (int, int, int), optional
        Number of mesh points. If given, ``mesh_spacing`` is ignored, so that both may come from `PMEParameters`.
    mesh_spacing : float, or tensor (n_systems,) or (n_systems, 3), length, optional
        As for `particle_mesh_ewald`.
    spline_order : int, optional

    Returns
    -------
    ErrorEstimate
        Tensors (n_systems,) in float64. Measured errors agree with estimates below about 0.1 within a factor of 3. They
        may be smaller for splines of order 2 and 3, few atoms, and cells with much vacuum; and ten times as large if
        forces on a few charges among neutral atoms nearly cancel, since errors are relative to forces.

    Notes
    -----
    Errors, formulas and sources: see `estimate_ewald_parameters`. Reads values on the host.

    Examples
    --------
    >>> parameters = estimate_pme_parameters(positions, cell, accuracy=1e-5)
    >>> estimate_errors(positions, cell, **parameters._asdict()).total < 1.1e-5
    tensor([True])
    """
    atoms = System(positions, charges, cell, batch_idx)
    sizes = _sizes_of(atoms)
    n_systems, device = len(sizes.cell), positions.device

    def numbers(name: str, value: Any) -> np.ndarray:
        return numbers_of_systems(name, value, n_systems, device)

    splitting, cutoff = numbers("alpha", alpha), numbers("real_space_cutoff", real_space_cutoff)
    model: core.Reciprocal
    if mesh_dimensions is None and mesh_spacing is not None:
        sizes, _ = sizes.along_spacing(mesh_spacing)
        mesh_dimensions = mesh_spacing_to_dimensions(
            torch.as_tensor(sizes.cell, device="cpu"), mesh_spacing, spline_order=spline_order
        )
    given = [v is not None for v in (reciprocal_space_cutoff, miller_bounds, mesh_dimensions)]
    if sum(given) != 1:
        raise ValueError(
            "exactly one of `reciprocal_space_cutoff`, `miller_bounds` and a mesh is needed: it determines the "
            "k-vectors of the sum"
        )
    if reciprocal_space_cutoff is not None:
        model = core.Sphere(numbers("reciprocal_space_cutoff", reciprocal_space_cutoff))
    elif miller_bounds is not None:
        model = core.Box(core.faces(np.array(check_bounds(miller_bounds)) + 0.5, sizes.lengths))
    else:
        model = sizes.mesh_model(*mesh_and_order(mesh_dimensions, check_spline_order(spline_order)))
    target = _target(1.0, atoms, sizes, cutoff)
    of_pairs, of_reciprocal = core.expected_errors(splitting, cutoff, sizes.spacing, model, target)
    if mesh_dimensions is not None:
        of_reciprocal *= target.force / _target(1.0, atoms, sizes, cutoff, on_mesh=True).force
    errors = of_pairs, of_reciprocal
    tensors = (torch.as_tensor(e, dtype=torch.float64, device=device) for e in (*errors, np.hypot(*errors)))
    return ErrorEstimate(*tensors)


def estimate_pme_mesh_dimensions(
    cell: torch.Tensor,
    alpha: float | torch.Tensor,
    accuracy: float = 1e-6,
    mesh_safety_factor: float = 1.0,
    *,
    spline_order: int = 5,
    fft_padding_fraction: float = 0.25,
) -> tuple[int, int, int]:
    """A mesh that meets ``accuracy`` at a given splitting parameter.

    Parameters
    ----------
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    alpha : float or (n_systems,) tensor, 1/length
    accuracy, mesh_safety_factor, spline_order, fft_padding_fraction
        As for `estimate_pme_parameters`.

    Returns
    -------
    (int, int, int)
        Fine enough for all systems.

    Notes
    -----
    The number of atoms is unknown here: the error is estimated for an average distance between atoms of
    ``0.8 / alpha``, as in a well balanced sum.
    """
    cell = check_cells_alone(cell)
    accuracy = choice.check_accuracy(accuracy)
    order = check_spline_order(spline_order)
    splitting = numbers_of_systems("alpha", alpha, cell.shape[0], cell.device)
    lattice = on_host(cell.detach()).astype(np.float64)
    sizes = Sizes(lattice, np.ones(len(lattice)), 0.8 / splitting)
    return choice.mesh_for(sizes, splitting, core.Target(accuracy), order, mesh_safety_factor, fft_padding_fraction)


def mesh_spacing_to_dimensions(
    cell: torch.Tensor, mesh_spacing: float | torch.Tensor, *, spline_order: int = 5, fft_padding_fraction: float = 0.25
) -> tuple[int, int, int]:
    """A mesh with points no farther apart than ``mesh_spacing`` along each lattice vector.

    Parameters
    ----------
    cell : (3, 3) or (n_systems, 3, 3) tensor, length
    mesh_spacing : float, or tensor (n_systems,) or (n_systems, 3), length
    spline_order : int, optional
        The mesh has at least this many points along each axis.
    fft_padding_fraction : float, optional
        As for `estimate_pme_parameters`.

    Returns
    -------
    (int, int, int)
        Fine enough for all systems.
    """
    cell = check_cells_alone(cell)
    order = check_spline_order(spline_order, 1)
    spacing: Any = mesh_spacing
    if isinstance(spacing, torch.Tensor):
        checks.check_tensor("mesh_spacing", spacing)
        checks.check_place("mesh_spacing", spacing)
    if isinstance(spacing, torch.Tensor) and spacing.ndim == 2:
        if spacing.shape != (cell.shape[0], 3):
            raise ValueError(f"`mesh_spacing` must have shape ({cell.shape[0]}, 3), got {tuple(spacing.shape)}")
        spacings = on_host(spacing.detach()).astype(np.float64)
        if not (np.isfinite(spacings) & (spacings > 0.0)).all():
            raise ValueError("`mesh_spacing` must be positive and finite")
    else:
        spacings = numbers_of_systems("mesh_spacing", spacing, cell.shape[0], cell.device)[:, None]
    lattice = on_host(cell.detach()).astype(np.float64)
    return choice.mesh_of(np.linalg.norm(lattice, axis=2) / spacings, order, fft_padding_fraction)


# -- common to all ------------------------------------------------------------------------------


def _sizes_of(atoms: System) -> Sizes:
    positions = atoms.positions
    checks.check_positions(positions, finite=False)
    cell = check_periodic_cells(atoms.cell, positions)
    if cell.shape[0] == 0:
        raise ValueError("`cell` holds no system: there is nothing to choose or prepare")
    refuse_in_capture(positions, IN_CAPTURE)
    check_cells(cell.detach().cpu())  # values are read in any case
    batch_idx, _ = checks.check_batch(atoms.batch_idx, positions, cell.shape[0], wait=True)
    return sizes_of(cell, counted(batch_idx, cell.shape[0], positions.shape[0]))


def _target(
    accuracy: float, atoms: System, sizes: Sizes, real_space_cutoff: np.ndarray, on_mesh: bool = False
) -> core.Target:
    typical = core.Target(accuracy)
    if atoms.charges is None:
        return typical
    system = check_system(atoms)
    if not bool(torch.isfinite(system.charges).all()):
        raise ValueError("`charges` has entries that are NaN or infinite")
    if system.n_atoms == 0 or is_crowded(system):
        return typical
    reach = np.minimum(real_space_cutoff, core.NEARBY * sizes.spacing)
    rows = build_rows(system.positions.detach(), float(reach.max()), system.cell.detach(), system.batch_idx)
    known = torch.as_tensor(reach, device=system.positions.device)
    return typical._replace(force=force_on_host(system, rows, known, sizes.spacing, on_mesh=on_mesh))


def _mesh_cutoff(sizes: Sizes, target: core.Target, order: int, costs: core.Costs) -> np.ndarray:
    """The cutoff (n_systems,) of least cost beside a mesh."""
    if len(sizes.volume) > 1:
        found = core.batch_mesh_cutoff(sizes.n_atoms, sizes.volume, sizes.lengths, target, order, costs)
        return np.full(len(sizes.volume), found.item())
    alpha = core.mesh_alpha(sizes.n_atoms, sizes.volume, target, order, costs)
    return core.real_cutoff(alpha, sizes.spacing, target)


def of_charges_alone(atoms: System) -> bool:
    """Whether the sources are points with charges; also without charges, where strengths are not known."""
    return atoms.charges is None or all(s is None for s in (atoms.dipoles, atoms.quadrupoles, atoms.widths))


def _given_cutoffs(real_space_cutoff: Any, sizes: Sizes, positions: torch.Tensor) -> np.ndarray | None:
    if real_space_cutoff is None:
        return None
    return numbers_of_systems("real_space_cutoff", real_space_cutoff, len(sizes.volume), positions.device)


def _as_in_calls(
    atoms: System, accuracy: float, long_range: choice.LongRange, r_c: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, core.Target, choice.Strengths | None]:
    """Alpha, cutoff, target and strengths of sources beyond charges, as a call with a list chooses them."""
    system, costs = check_system(atoms), core.COSTS[atoms.positions.device.type]
    if r_c is None:
        _, r_c, *_ = choice.optimal_splitting(system, long_range, accuracy, costs, *choice.sources_of(system))
    cutoff = float(r_c.max(initial=0.0))  # lists reach to the longest in all systems
    found = choice.choose_splitting(system, long_range, None, cutoff, None, accuracy)
    return on_host(found.alpha.detach()), np.full(r_c.shape, cutoff), found.target, found.strengths


def _tensor(values: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=like.dtype, device=like.device)
