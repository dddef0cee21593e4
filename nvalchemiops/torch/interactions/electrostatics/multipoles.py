"""Functions of packed multipole moments with the names and conventions of nvalchemi-toolkit-ops 0.5.0.

The moments of an atom are a row of real spherical components: the charge, the dipole in the order (y, z, x), and the
quadrupole as

    (2 Q_xz, 2 Q_xy, √3 Q_yy, 2 Q_yz, Q_zz - Q_xx) / √15

with the traceless second moments Q of `ewald_summation`. All atoms have the same Gaussian width, ``sigma``. Lengths are
in angstrom, charges in e and energies in eV; results are in float64 for inputs of any dtype. ``alpha`` is the splitting
parameter of Gaussians that are broadened by 1/2α; it corresponds to ``1/√(4 σ² + 1/α²)`` in `ewald_summation`.

These functions call `ewald_summation`, `particle_mesh_ewald`, `ewald_reciprocal_space` and `electrostatic_potential`,
which also support a width for each atom, channels, exclusions, and results beyond energies.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from nvalchemiops.constants import COULOMB_EV_ANGSTROM
from nvalchemiops.notices import AccuracyWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.interactions.electrostatics.ewald import ewald_reciprocal_space, ewald_summation
from nvalchemiops.torch.interactions.electrostatics.features import reciprocal_potential
from nvalchemiops.torch.interactions.electrostatics.multipole_parameters import (
    estimate_multipole_ewald_parameters,
    estimate_multipole_pme_parameters,
    warn_of_short_list,
)
from nvalchemiops.torch.interactions.electrostatics.pme import particle_mesh_ewald
from nvalchemiops.torch.runtime import compiled
from nvalchemiops.torch.runtime.acts import unrecorded
from nvalchemiops.torch.runtime.context import may_read

# -- packed moments --------------------------------------------------------------------------------


def pack_multipole_moments(
    charges: torch.Tensor,
    dipoles: torch.Tensor | None = None,
    quadrupoles: torch.Tensor | None = None,
    *,
    trace_atol: float = 1e-8,
) -> torch.Tensor:
    """Moments (n_atoms, 1, 4 or 9) in spherical components from Cartesian ones.

    Parameters
    ----------
    charges : (n_atoms,) tensor, charge
    dipoles : (n_atoms, 3) tensor, charge length, optional
    quadrupoles : (n_atoms, 3, 3) tensor, charge length², optional
        Second moments. The symmetric traceless part is packed. Needs ``dipoles``.
    trace_atol : float, optional
        Warn if a trace is larger than this, and than rounding of the quadrupole.

    Returns
    -------
    (n_atoms, n_components) tensor
        Differentiable.

    Raises
    ------
    ValueError, TypeError
        Quadrupoles without dipoles, or inconsistent shapes.

    Warns
    -----
    AccuracyWarning
        A trace is dropped.
    """
    checks.check_tensor("charges", charges)
    if charges.ndim != 1:
        raise ValueError(f"`charges` must have shape (n_atoms,), got {tuple(charges.shape)}")
    parts = [charges.unsqueeze(1)]
    for name, values, shape in (("dipoles", dipoles, (3,)), ("quadrupoles", quadrupoles, (3, 3))):
        if values is None:
            continue
        checks.check_tensor(name, values)
        if tuple(values.shape) != (charges.shape[0], *shape):
            raise ValueError(f"`{name}` must have shape {(charges.shape[0], *shape)}, got {tuple(values.shape)}")
    if quadrupoles is not None and dipoles is None:
        raise ValueError("`quadrupoles` need `dipoles`: their components come first")
    if dipoles is not None:
        parts.append(dipoles[:, [1, 2, 0]])
    if quadrupoles is not None:
        q = 1.0 * quadrupoles.detach()
        trace, rounding = q.diagonal(dim1=1, dim2=2).sum(1).abs(), 4.0 * torch.finfo(q.dtype).eps * q.abs().amax((1, 2))
        if may_read(trace) and bool((trace > trace_atol + rounding).any()):
            notify("`quadrupoles` have a trace: it is dropped", AccuracyWarning, "trace")
        xx, xy, xz, yx, yy, yz, zx, zy, zz = quadrupoles.flatten(1).unbind(1)
        axial = (2.0 * yy - xx - zz) / math.sqrt(3.0)
        parts.append(torch.stack([xz + zx, xy + yx, axial, yz + zy, zz - xx], 1) / math.sqrt(15.0))
    return torch.cat(parts, 1)


def infer_l_max(multipole_moments: torch.Tensor) -> int:
    """The highest order of packed moments: 0, 1 or 2 for 1, 4 or 9 components.

    Parameters
    ----------
    multipole_moments : (..., n_components) tensor

    Raises
    ------
    ValueError
        Another number of components.
    """
    orders = {1: 0, 4: 1, 9: 2}
    n_components = multipole_moments.shape[-1] if multipole_moments.ndim else 0
    if n_components not in orders:
        raise ValueError(
            f"`multipole_moments` must have 1, 4 or 9 components in the last dimension, got "
            f"{tuple(multipole_moments.shape)}"
        )
    return orders[n_components]


def unpack_multipole_moments(
    multipole_moments: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Cartesian moments from spherical components: the inverse of `pack_multipole_moments`.

    Parameters
    ----------
    multipole_moments : (n_atoms, 1), (n_atoms, 4) or (n_atoms, 9) tensor

    Returns
    -------
    charges : (n_atoms,) tensor, charge
    dipoles : (n_atoms, 3) tensor, charge length, or None
    quadrupoles : (n_atoms, 3, 3) tensor, charge length², or None
        Symmetric and traceless second moments.

    Raises
    ------
    ValueError, TypeError
        Not a tensor of this shape.
    """
    checks.check_tensor("multipole_moments", multipole_moments)
    l_max = infer_l_max(multipole_moments)
    if multipole_moments.ndim != 2:
        raise ValueError(
            f"`multipole_moments` must have shape (n_atoms, n_components), got {tuple(multipole_moments.shape)}"
        )
    charges, dipoles, quadrupoles = multipole_moments[:, 0], None, None
    if l_max > 0:
        dipoles = multipole_moments[:, [3, 1, 2]]
    if l_max > 1:
        xz, xy, axial, yz, planar = (math.sqrt(15.0) * multipole_moments[:, 4:]).unbind(1)
        yy = axial / math.sqrt(3.0)
        xx, zz = 0.5 * (-yy - planar), 0.5 * (-yy + planar)
        columns = (xx, 0.5 * xy, 0.5 * xz, 0.5 * xy, yy, 0.5 * yz, 0.5 * xz, 0.5 * yz, zz)
        quadrupoles = torch.stack(columns, 1).unflatten(1, (3, 3))
    return charges, dipoles, quadrupoles


def _unpack(moments: Any, positions: torch.Tensor) -> dict[str, Any]:
    """Cartesian sources in float64, as arguments of the sums."""
    checks.check_tensor("multipole_moments", moments)
    found = zip(("charges", "dipoles", "quadrupoles"), unpack_multipole_moments(moments.to(torch.float64)))
    if moments.shape[0] != positions.shape[0]:
        raise ValueError(
            f"`multipole_moments` must have shape ({positions.shape[0]}, n_components), got {tuple(moments.shape)}"
        )
    return {name: values for name, values in found if values is not None}


def _in_float64(positions: Any, cell: Any, batch_idx: Any) -> dict[str, Any]:
    checks.check_positions(positions, finite=False)
    cell = checks.check_lattice(cell, positions)
    return {"positions": positions.to(torch.float64), "cell": cell.to(torch.float64), "batch_idx": batch_idx}


def _either(given: Any, estimated: Any) -> Any:
    return estimated if given is None else given


def _splitting(alpha: Any, sigma: Any) -> Any:
    """Alpha of `ewald_summation`."""
    if isinstance(alpha, torch.Tensor):
        return 1.0 / torch.sqrt(4.0 * sigma**2 + 1.0 / alpha.to(torch.float64) ** 2)
    return 1.0 / math.sqrt(4.0 * sigma**2 + 1.0 / checks.check_positive("alpha", alpha) ** 2)


def _refuse(cache: Any) -> None:
    if cache is not None:
        raise NotImplementedError("`cache` is not supported: leave it out, nothing needs to be prepared")


def _valid_k_vectors(k_vectors: Any, counts: Any) -> torch.Tensor | None:
    """K-vectors in float64; those beyond the counts are set to zero."""
    if counts is not None:
        is_padded = isinstance(k_vectors, torch.Tensor) and k_vectors.ndim == 3
        if not is_padded or tuple(counts.shape) != (k_vectors.shape[0],):
            raise ValueError(
                "`valid_k_counts` needs `k_vectors` of shape (n_systems, n_k, 3), and a number for each system"
            )
        place = torch.arange(k_vectors.shape[1], device=k_vectors.device)
        k_vectors = torch.where((place < counts.unsqueeze(1)).unsqueeze(2), k_vectors, 0.0)
    return None if k_vectors is None else k_vectors.to(torch.float64)


# -- energies --------------------------------------------------------------------------------------


def _energies(function: Callable[..., Any], system: dict[str, Any], **options: Any) -> torch.Tensor:
    """Energies in eV, from a function that takes Cartesian sources."""
    return COULOMB_EV_ANGSTROM * function(**system, **options)


def multipole_electrostatic_energy(
    positions: torch.Tensor,
    multipole_moments: torch.Tensor,
    cell: torch.Tensor,
    *,
    batch_idx: torch.Tensor | None = None,
    sigma: float,
    k_cutoff: float | None = None,
    k_vectors: torch.Tensor | None = None,
    valid_k_counts: torch.Tensor | None = None,
    source_overlap_constants: torch.Tensor | None = None,
    normalize: Any = 0,
    include_self_interaction: bool = False,
) -> torch.Tensor:
    """Energies of Gaussian moments as a sum over k-vectors alone.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor, angstrom
    multipole_moments : (n_atoms, 1, 4 or 9) tensor
        As from `pack_multipole_moments`.
    cell : (3, 3) or (n_systems, 3, 3) tensor, angstrom
    batch_idx : (n_atoms,) int32 tensor, optional
        System of each atom.
    sigma : float, angstrom
        Standard deviation of all Gaussians.
    k_cutoff : float, 1/angstrom, optional
        Length of the longest k-vectors.
    k_vectors : (n_k, 3) or (n_systems, n_k, 3) tensor, optional
        K-vectors of the cell, instead of ``k_cutoff``. Their values are recomputed from the cell.
    valid_k_counts : (n_systems,) int32 tensor, optional
        For each system, how many of its ``k_vectors`` (n_systems, n_k, 3) are used.
    source_overlap_constants : optional
        Accepted without effect: self energies are computed by a formula.
    normalize : optional
        Must be 0 or ``"multipoles"``: moments are those of the charge density.
    include_self_interaction : bool, optional
        Include the energy of each Gaussian with itself.

    Returns
    -------
    (n_atoms,) tensor, eV
        In float64, differentiable to any order in positions, moments and cell.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        A bad argument, named in the message.
    """
    place = _in_float64(positions, cell, batch_idx)
    if _mode("normalize", normalize) != 0:
        raise NotImplementedError("`normalize` must be 0, for moments of the charge density")
    width = checks.check_positive("sigma", sigma)
    return _energies(
        ewald_reciprocal_space,
        place | _unpack(multipole_moments, positions),
        k_vectors=_valid_k_vectors(k_vectors, valid_k_counts),
        k_cutoff=k_cutoff if k_vectors is None else None,
        alpha=0.5 / width,
        widths=width,
        self_interaction=include_self_interaction,
    )


def multipole_ewald_summation(
    positions: torch.Tensor,
    multipole_moments: torch.Tensor,
    cell: torch.Tensor,
    idx_j: torch.Tensor,
    neighbor_ptr: torch.Tensor,
    unit_shifts: torch.Tensor,
    *,
    sigma: float,
    alpha: float | None = None,
    k_cutoff: float | None = None,
    batch_idx: torch.Tensor | None = None,
    accuracy: float = 1e-6,
    cost_ratio: float = 1.0,
    half_neighbor_list: bool = False,
    cache: Any = None,
) -> torch.Tensor:
    """Energies of Gaussian moments by Ewald's sum, without the energy of each Gaussian with itself.

    Parameters
    ----------
    positions, multipole_moments, cell, batch_idx, sigma
        As for `multipole_electrostatic_energy`.
    idx_j, neighbor_ptr, unit_shifts : tensors
        Neighbors (n_pairs,), the first pair of each atom (n_atoms + 1,), and images (n_pairs, 3).
    alpha : float, 1/angstrom, optional
        Splitting parameter of Gaussians, as defined by this module. By default from
        `estimate_multipole_ewald_parameters`; the list must then reach the cutoff of this estimate.
    k_cutoff : float, 1/angstrom, optional
        Length of the longest k-vectors, by default from the same estimate.
    accuracy, cost_ratio : float, optional
        Arguments of the estimate.
    half_neighbor_list : bool, optional
        The list holds each pair only once.
    cache : optional
        Must be None: a cache is not supported.

    Returns
    -------
    (n_atoms,) tensor, eV
        As from `multipole_electrostatic_energy`, with the same errors.

    Warns
    -----
    AccuracyWarning
        The list does not reach the cutoff of the estimate.
    """
    place = _in_float64(positions, cell, batch_idx)
    _refuse(cache)
    width = checks.check_positive("sigma", sigma)
    needed = None
    if alpha is None or k_cutoff is None:
        found = estimate_multipole_ewald_parameters(positions, cell, width, batch_idx, accuracy, cost_ratio)
        needed = found.real_space_cutoff if alpha is None else None
        alpha, k_cutoff = _either(alpha, found.alpha), _either(k_cutoff, found.reciprocal_space_cutoff)
    near = _neighbors(idx_j, neighbor_ptr, unit_shifts)
    energies = _energies(
        ewald_summation,
        place | _unpack(multipole_moments, positions) | near,
        alpha=_splitting(alpha, width),
        k_cutoff=k_cutoff,
        widths=width,
        half_list=half_neighbor_list,
    )
    with unrecorded():
        warn_of_short_list(place, near, needed, accuracy)
    return energies


def multipole_particle_mesh_ewald(
    positions: torch.Tensor,
    multipole_moments: torch.Tensor,
    cell: torch.Tensor,
    idx_j: torch.Tensor,
    neighbor_ptr: torch.Tensor,
    unit_shifts: torch.Tensor,
    *,
    sigma: float,
    alpha: float | None = None,
    mesh_dimensions: tuple[int, int, int] | None = None,
    spline_order: int = 5,
    cell_inv_t: torch.Tensor | None = None,
    batch_idx: torch.Tensor | None = None,
    accuracy: float = 1e-6,
    cost_ratio: float = 1.0,
    volume: torch.Tensor | None = None,
    moduli: Any = None,
    k_squared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Energies of Gaussian moments by particle-mesh Ewald, without the energy of each Gaussian with itself.

    Parameters
    ----------
    positions, multipole_moments, cell, idx_j, neighbor_ptr, unit_shifts, sigma, alpha, batch_idx, accuracy, cost_ratio
        As for `multipole_ewald_summation`; the estimate is `estimate_multipole_pme_parameters`.
    mesh_dimensions : (int, int, int), optional
        Number of mesh points along the lattice vectors, by default from the same estimate.
    spline_order : int, optional
        As for `particle_mesh_ewald`; at least 5 with quadrupoles.
    cell_inv_t, volume, moduli, k_squared : optional
        Accepted, but recomputed from the cell, so that gradients with respect to the cell are complete.

    Returns
    -------
    (n_atoms,) tensor, eV
        As from `multipole_electrostatic_energy`, with the same errors.

    Warns
    -----
    AccuracyWarning
        As from `multipole_ewald_summation`.
    """
    place = (positions, cell, batch_idx, multipole_moments, idx_j, neighbor_ptr, unit_shifts)
    return _on_mesh(*place, sigma, alpha, mesh_dimensions, spline_order, accuracy, cost_ratio)[0]


def _shapes_on_mesh(positions: Any, cell: Any, batch_idx: Any, moments: Any, *given: Any) -> Any:
    """Of energies; None for a call that can be traced, since no mesh is to be chosen from values of the cell."""
    *_, alpha, mesh_dimensions, _, _, _ = given
    if alpha is not None and mesh_dimensions is not None:
        return None
    _in_float64(positions, cell, batch_idx)
    _unpack(moments, positions)
    return [((positions.shape[0],), torch.float64)]


@compiled.whole(_shapes_on_mesh)
def _on_mesh(
    positions: torch.Tensor,
    cell: torch.Tensor,
    batch_idx: torch.Tensor | None,
    multipole_moments: torch.Tensor,
    idx_j: torch.Tensor,
    neighbor_ptr: torch.Tensor,
    unit_shifts: torch.Tensor,
    sigma: float,
    alpha: Any,
    mesh_dimensions: Any,
    spline_order: int,
    accuracy: float,
    cost_ratio: float,
) -> tuple[torch.Tensor]:
    """Energies, as `multipole_particle_mesh_ewald` describes them."""
    place = _in_float64(positions, cell, batch_idx)
    width = checks.check_positive("sigma", sigma)
    needed = None
    if alpha is None or mesh_dimensions is None:
        found = estimate_multipole_pme_parameters(
            positions, cell, width, batch_idx, accuracy, cost_ratio, spline_order=spline_order
        )
        needed = found.real_space_cutoff if alpha is None else None
        alpha = _either(alpha, found.alpha)
        mesh_dimensions = found.mesh_dimensions if mesh_dimensions is None else mesh_dimensions
    near = _neighbors(idx_j, neighbor_ptr, unit_shifts)
    energies = _energies(
        particle_mesh_ewald,
        place | _unpack(multipole_moments, positions) | near,
        alpha=_splitting(alpha, width),
        mesh_dimensions=mesh_dimensions,
        spline_order=spline_order,
        widths=width,
    )
    with unrecorded():
        warn_of_short_list(place, near, needed, accuracy)
    return (energies,)


def _neighbors(idx_j: torch.Tensor, neighbor_ptr: torch.Tensor, unit_shifts: torch.Tensor) -> dict[str, Any]:
    """The list as arguments of the sums."""
    for name, value in (("idx_j", idx_j), ("neighbor_ptr", neighbor_ptr), ("unit_shifts", unit_shifts)):
        checks.check_tensor(name, value)
    counts = neighbor_ptr.diff()
    atoms = torch.arange(counts.shape[0], dtype=idx_j.dtype, device=idx_j.device)
    first = torch.repeat_interleave(atoms, counts.long(), output_size=idx_j.shape[0])
    return {
        "neighbor_list": torch.stack([first, idx_j]),
        "neighbor_ptr": neighbor_ptr,
        "neighbor_shifts": unit_shifts,
    }


# -- features --------------------------------------------------------------------------------------

_MODES = ("multipoles", "receiver", "none")


def _mode(name: str, value: Any) -> int:
    """The number (0, 1 or 2) of a normalization that is given as a number or a name."""
    if isinstance(value, str):
        return _MODES.index(checks.as_choice(name, value, _MODES))
    if value not in (0, 1, 2):
        raise ValueError(f"`{name}` must be 0, 1 or 2, got {value!r}")
    return int(value)


def _norms(mode: int, width: float) -> tuple[float, float, float]:
    """Factors of the potential, its gradient, and its second derivative ``∂²/∂x∂y``, for receivers of this width."""
    if mode == 0:  # receivers are moments of order 0, 1, 2
        return 1.0, 1.0, 1.0 / math.sqrt(3.0)
    if mode == 1:
        zero, one, two = (math.sqrt(factor * math.pi) for factor in (4.0, 1.5 * math.pi, 20.0 / 3.0))
        return zero, one * width, two * width**2
    # Gaussian-type orbitals r^l Y_lm exp(-r²/2s²)
    volume = (2.0 * math.pi) ** 1.5 * width**3
    zero, one, two = (math.sqrt(factor / (4.0 * math.pi)) for factor in (1.0, 3.0, 15.0))
    return volume * zero, volume * one * width**2, volume * two * width**4


def multipole_electrostatic_features(
    positions: torch.Tensor,
    multipole_moments: torch.Tensor,
    cell: torch.Tensor,
    *,
    batch_idx: torch.Tensor | None = None,
    sigma: float,
    receiver_sigmas: Sequence[float] | torch.Tensor,
    k_cutoff: float | None = None,
    k_vectors: torch.Tensor | None = None,
    feature_max_l: int = 1,
    density_normalize: Any = 0,
    feature_normalize: Any = 1,
    include_self_interaction: bool = False,
    cache: Any = None,
) -> torch.Tensor:
    """Potentials at atoms, averaged over Gaussians of several widths, as a sum over k-vectors alone.

    Parameters
    ----------
    positions, multipole_moments, cell, batch_idx, sigma, k_cutoff, k_vectors
        As for `multipole_electrostatic_energy`.
    receiver_sigmas : sequence of float or (n_receivers,) tensor, angstrom
        Widths of the receivers.
    feature_max_l : {0, 1, 2}, optional
        0: the potential; 1: also its gradient; 2: also its second derivatives.
    density_normalize : optional
        Must be 0 or ``"multipoles"``.
    feature_normalize : {0, 1, 2}, optional
        Receivers are moments (0, ``"multipoles"``), orbitals with the normalization of 0.5.0's receivers (1,
        ``"receiver"``), or plain Gaussian-type orbitals ``r^l Y_lm exp(-r²/2s²)`` (2, ``"none"``).
    include_self_interaction : bool, optional
        Include the potential of the Gaussian of the atom itself.
    cache : optional
        Must be None: a cache is not supported.

    Returns
    -------
    (n_atoms, n_receivers * (feature_max_l + 1)²) tensor
        Columns are sorted by order, then by receiver: the potential, in V; its gradient along (y, z, x); its second
        derivatives (xy, yz, (2 zz - xx - yy) / 2√3, xz, (xx - yy) / 2). Each order has a factor, for receivers of
        width s: 1, 1 and 1/√3 for ``feature_normalize`` 0; √(4π), √(3/2) π s and √(20π/3) s² for 1; for 2
        (2π)^(3/2) s³ times √(1/4π), √(3/4π) s² and √(15/4π) s⁴. In float64, differentiable to any order.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        A bad argument, named in the message.
    """
    place = _in_float64(positions, cell, batch_idx)
    _refuse(cache)
    if _mode("density_normalize", density_normalize) != 0:
        raise NotImplementedError("`density_normalize` must be 0, for moments of the charge density")
    mode = _mode("feature_normalize", feature_normalize)
    if feature_max_l not in (0, 1, 2):
        raise ValueError(f"`feature_max_l` must be 0, 1 or 2, got {feature_max_l}")
    values = receiver_sigmas.tolist() if isinstance(receiver_sigmas, torch.Tensor) else receiver_sigmas
    if not isinstance(values, Iterable):
        raise TypeError(f"`receiver_sigmas` must be a sequence or a tensor, got {receiver_sigmas!r}")
    receivers = [checks.check_positive("receiver_sigmas", value) for value in values]
    if not receivers:
        raise ValueError("`receiver_sigmas` must not be empty")
    found = reciprocal_potential(
        **place,
        **_unpack(multipole_moments, positions),
        widths=checks.check_positive("sigma", sigma),
        receiver_widths=receivers,
        k_vectors=None if k_vectors is None else k_vectors.to(torch.float64),
        k_cutoff=k_cutoff if k_vectors is None else None,
        derivatives=feature_max_l,
        self_interaction=include_self_interaction,
    )
    norms = [_norms(mode, width) for width in receivers]
    columns = [norm[0] * found.potential[:, n, None] for n, norm in enumerate(norms)]
    if found.gradient is not None:
        columns += [norm[1] * found.gradient[:, n, [1, 2, 0]] for n, norm in enumerate(norms)]
    if found.second is not None:
        xx, xy, xz, _, yy, yz, _, _, zz = found.second.flatten(2).unbind(2)
        axial = (2.0 * zz - xx - yy) / (2.0 * math.sqrt(3.0))
        components = torch.stack([xy, yz, axial, xz, 0.5 * (xx - yy)], 2)
        columns += [norm[2] * components[:, n] for n, norm in enumerate(norms)]
    return COULOMB_EV_ANGSTROM * torch.cat(columns, 1)
