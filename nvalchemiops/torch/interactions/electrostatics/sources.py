"""Sources of an electrostatic potential besides charges: dipoles, quadrupoles and Gaussian widths.

An atom has the charge density ``ρ = (q - μ·∇ + ½ Q:∇∇) δ``, where a Gaussian of standard deviation s may replace δ. Its
energy in a potential is ``q φ + μ·∇φ + ½ Q:∇∇φ``. Q are second moments ``∫ ρ x x^T``. Only their symmetric traceless
part is used, since the trace does not act on other atoms. Buckingham's traceless quadrupole is Θ = 3/2 Q.

Inside the sums sources are *moments* m (`nvalchemiops.kernels.moments`) in Cartesian coordinates,
``(q, μ_x, μ_y, μ_z, Q_xx/2, Q_xy, Q_xz, Q_yy/2, Q_yz, Q_zz/2)``, up to the highest order in the system. The energy of
an atom is ``Σ_a m_a ∂_a φ``.

Source: A. J. Stone, The Theory of Intermolecular Forces, 2nd ed., Oxford 2013, chapters 2 and 3.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvalchemiops.layout import layout
from nvalchemiops.notices import AccuracyWarning, notify
from nvalchemiops.torch import checks
from nvalchemiops.torch.runtime.context import eager, is_eager, may_read, on_host
from nvalchemiops.torch.runtime.recorder import current_recorder, read_fault, read_number

NEGLIGIBLE = 1e-5
"""Traces and antisymmetric parts of quadrupoles up to this size, relative to the largest element, count as rounding."""


def check_sources(
    charges: torch.Tensor, dipoles: Any, quadrupoles: Any, widths: Any, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Moments (n_atoms, n_channels, 1, 4 or 10) and widths (n_atoms,); raise unless all fit the checked charges.

    Warns of quadrupoles with a trace or an antisymmetric part, if values can be read on a CPU.
    """
    # explicit sizes: torch cannot infer -1 if there are no atoms
    parts = [(charges if charges.ndim == 2 else charges.unsqueeze(1)).unsqueeze(2)]
    if dipoles is not None:
        _check_like("dipoles", dipoles, charges, positions, (3,))
        parts.append(dipoles.reshape(*parts[0].shape[:2], 3))
    if quadrupoles is not None:
        _check_like("quadrupoles", quadrupoles, charges, positions, (3, 3))
        if dipoles is None:
            parts.append(torch.zeros_like(parts[0]).expand(-1, -1, 3))
        if may_read(quadrupoles):
            _warn_of_trace(quadrupoles)
        parts.append(_of_rows(_second_order, quadrupoles.reshape(*parts[0].shape[:2], 9)))
    if widths is not None:
        widths = _check_widths(widths, positions)
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0], widths


def _check_like(
    name: str, values: Any, charges: torch.Tensor, positions: torch.Tensor, components: tuple[int, ...]
) -> None:
    checks.check_tensor(name, values)
    if values.shape != (*charges.shape, *components):
        expected = (*charges.shape, *components)
        raise ValueError(f"`{name}` must have shape {expected}, as `charges` have {tuple(charges.shape)}, got "
                         f"{tuple(values.shape)}")  # fmt: skip
    checks.check_real(name, values, positions)


def _check_widths(widths: Any, positions: torch.Tensor) -> torch.Tensor:
    if not isinstance(widths, torch.Tensor):
        number = checks.check_not_negative("widths", widths)
        return torch.full((positions.shape[0],), number, dtype=positions.dtype, device=positions.device)
    if tuple(widths.shape) not in ((), (positions.shape[0],)):
        raise ValueError(
            f"`widths` must be a number or have shape (n_atoms,) = ({positions.shape[0]},), got {tuple(widths.shape)}"
        )
    widths = checks.as_real("widths", widths, positions).expand(positions.shape[0])
    if not may_read(widths):
        return nan_unless_allowed(widths)
    values = on_host(widths)
    if not ((values >= 0.0) & (values < math.inf)).all():
        raise ValueError("`widths` must be finite and non-negative")
    return widths


def nan_unless_allowed(values: torch.Tensor) -> torch.Tensor:
    """Values that are not read and so cannot raise: NaN where they are negative or infinite."""
    return torch.where((values >= 0.0) & (values * 0.0 == 0.0), values, torch.nan)  # infinity times zero is NaN


def _warn_of_trace(quadrupoles: torch.Tensor) -> None:
    """Warn of parts that are dropped."""
    q = quadrupoles.detach()
    if not q.numel():
        return
    recorder = current_recorder()
    fault = _has_dropped_parts(q) if recorder is None else recorder.compute(lambda: _has_dropped_parts(q), q)
    if not read_fault(fault):
        return
    least = NEGLIGIBLE * read_number(q.abs().max())
    if read_number(q.diagonal(dim1=-2, dim2=-1).sum(-1).abs().max()) > least:
        notify("`quadrupoles` have a trace, which does not act on other atoms: it is dropped", AccuracyWarning, "trace")
    if read_number((q - q.mT).abs().max()) > least:
        notify("`quadrupoles` are not symmetric: the symmetric part is used", AccuracyWarning, "antisymmetric")


def _has_dropped_parts(quadrupoles: torch.Tensor) -> torch.Tensor:
    """Whether quadrupoles (..., 3, 3) have a trace or an antisymmetric part."""
    xx, xy, xz, yx, yy, yz, zx, zy, zz = quadrupoles.flatten(-2).unbind(-1)
    dropped, kept = torch.stack([xx + yy + zz, xy - yx, xz - zx, yz - zy]).aminmax(), quadrupoles.aminmax()
    return torch.maximum(dropped.max, -dropped.min) > NEGLIGIBLE * torch.maximum(kept.max, -kept.min)


def _second_order(quadrupoles: torch.Tensor) -> torch.Tensor:
    """Moments (..., 6) of the symmetric traceless part of quadrupoles (..., 9)."""
    xx, xy, xz, yx, yy, yz, zx, zy, zz = quadrupoles.unbind(-1)
    third = (xx + yy + zz) / 3.0
    columns = (xx - third, xy + yx, xz + zx, yy - third, yz + zy, zz - third)
    return 0.5 * torch.stack(columns, -1)


def quadrupole_gradients(gradients: torch.Tensor) -> torch.Tensor:
    """Gradients (..., 3, 3) for quadrupoles, symmetric and traceless, from gradients for second moments (..., 6)."""
    found = _of_rows(_of_second_moments, gradients)
    return found.view(*found.shape[:-1], 3, 3)


def by_source(gradients: torch.Tensor, of_sources: Sequence[bool]) -> list[torch.Tensor]:
    """The requested gradients for charges, dipoles and quadrupoles, from gradients for moments.

    They are contiguous, as results of plans and compiled graphs are.
    """
    by_charges, by_dipoles, by_quadrupoles = of_sources
    found = [gradients[..., 0]] * by_charges + [gradients[..., 1:4]] * by_dipoles
    found = [gradient.contiguous() for gradient in found]
    return [*found, quadrupole_gradients(gradients[..., 4:])] if by_quadrupoles else found


def _of_second_moments(gradients: torch.Tensor) -> torch.Tensor:
    xx, xy, xz, yy, yz, zz = (0.5 * gradients).unbind(-1)
    third = (xx + yy + zz) / 3.0
    columns = (xx - third, xy, xz, xy, yy - third, yz, xz, yz, zz - third)
    return torch.stack(columns, -1)


def _of_rows(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """A linear function of rows of numbers. In eager mode one product is faster than the operations of the function."""
    if not is_eager(rows) or not layout(rows.device.type).reads:
        return function(rows)
    # in float64, since autocast rounds the factors of other products
    return (rows.to(torch.float64) @ _matrix(function, rows.shape[-1], rows.device)).to(rows.dtype)


@functools.cache
@eager
def _matrix(function: Callable[[torch.Tensor], torch.Tensor], size: int, device: torch.device) -> torch.Tensor:
    """The matrix of a linear function of rows of numbers."""
    with torch.inference_mode(False), torch.no_grad():
        return function(torch.eye(size, dtype=torch.float64, device=device))
