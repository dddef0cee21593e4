"""Velocities at a temperature, kinetic energies, and the number of degrees of freedom.

Atoms with infinite mass are frozen: their velocity is zero, and they count nowhere.

All functions take ``batch_idx`` (n_atoms,) int32, the system of each atom, and ``num_systems``, which is read from
``batch_idx`` if it is not given. Without ``batch_idx`` there is one system. With a ``domain`` in place of these two,
atoms are those that this rank owns, results of systems are those of all atoms, and the calls are collective.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from nvalchemiops.torch import checks
from nvalchemiops.torch.dynamics.sums import Division
from nvalchemiops.torch.interactions.pair.shares import together, whole_call
from nvalchemiops.torch.operators.noise import normal_noise
from nvalchemiops.torch.runtime.context import may_read, values_of
from nvalchemiops.torch.runtime.recorder import read_number

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain

VELOCITIES = 255
"""Stream of the random numbers for velocities."""


def of_each(name: str, value: float | torch.Tensor, n_systems: int, device: torch.device) -> torch.Tensor:
    """A number, or one for each system, as a column (n_systems, 1) in float64. Keeps gradients."""
    if value is None or isinstance(value, str):
        raise TypeError(f"`{name}` must be a number or have shape (n_systems,), got {type(value).__name__}")
    column = torch.as_tensor(value, dtype=torch.float64, device=device)
    if column.ndim == 0 or column.shape == (1,):
        return column.reshape(1, 1).expand(n_systems, 1).contiguous()
    if column.shape != (n_systems,):
        raise ValueError(
            f"`{name}` must be a number or have shape (n_systems,) = ({n_systems},), got {tuple(column.shape)}"
        )
    return column.unsqueeze(1)


def inertia_of(masses: torch.Tensor) -> torch.Tensor:
    """Masses (n_atoms, 1), zero for frozen atoms."""
    return torch.where(masses.isinf(), 0.0, masses).unsqueeze(1)


def mean_by_mass(division: Division, inertia: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Mean (n_systems, 3) of values (n_atoms, 3), weighted with inertia (n_atoms, 1); zero without any."""
    sums = division.sums(torch.cat([inertia * values, inertia], 1))
    return sums[:, :3] / torch.where(sums[:, 3:] > 0.0, sums[:, 3:], 1.0)


def angular_momentum(
    division: Division, inertia: torch.Tensor, positions: torch.Tensor, velocities: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places (n_atoms, 3) relative to the centre of mass, and the angular momentum (n_systems, 3) about it: float64."""
    places = positions.to(torch.float64)
    arms = places - division.of_atoms(mean_by_mass(division, inertia, places), len(places))
    return arms, division.sums(inertia * torch.linalg.cross(arms, velocities.to(torch.float64)))


def square_root(values: torch.Tensor) -> torch.Tensor:
    """Square roots, whose derivative at zero is zero instead of infinite. NaN for negative numbers and NaN.

    For products that are zero because a factor is zero which is not differentiated; for one that is see `check_slopes`.
    """
    positive = values > 0.0
    others = torch.where(values < 0.0, torch.nan, 0.0) * values
    return torch.where(positive, torch.where(positive, values, 1.0).sqrt(), others)


def check_slopes(name: str, value: torch.Tensor) -> None:
    """Raise if derivatives with respect to this factor of the noise are asked for at zero, where they are infinite."""
    if value.requires_grad and may_read(value) and read_number((values_of(value) == 0.0).any()):
        raise ValueError(
            f"`{name}` requires gradients, so it must be positive: noise grows with its square root, which has no "
            "derivative at zero"
        )


def temperature_of(kinetic: torch.Tensor, degrees: torch.Tensor) -> torch.Tensor:
    """Temperature kT, from kinetic energies and degrees of freedom; zero without any."""
    return 2.0 * kinetic / degrees.clamp(min=1.0)


def seeds_of(name: str, value: Any, n_systems: int, device: torch.device) -> torch.Tensor:
    """Integers (n_systems,) int64: the same for all systems, or one for each; by default 0, 1, 2 ..."""
    if value is None:
        return torch.arange(n_systems, device=device)
    if isinstance(value, (np.ndarray, list, tuple)):
        value = torch.tensor(value, device="cpu")  # where values are read
    if not isinstance(value, torch.Tensor):
        if isinstance(value, int | np.integer) and 2**63 <= value < 2**64:
            value = int(value) - 2**64  # the same bits: seeds of torch may have no sign
        value = torch.full((n_systems,), checks.check_int(name, value, 64), dtype=torch.int64, device=device)
    if value.shape not in ((), (n_systems,)) or value.is_floating_point():
        raise ValueError(f"`{name}` must be an integer or integers of shape (n_systems,) = ({n_systems},)")
    value = value.to(torch.int64)
    if name == "keys" and may_read(value) and read_number(((value < 0) | (value >= 2**32)).any()):
        raise ValueError("`keys` must be numbers 0 .. 2³² - 1")
    found = value.to(device)
    return found.repeat(n_systems) if found.ndim == 0 else found


_Function = TypeVar("_Function", bound=Callable[..., torch.Tensor])


def _of_all_ranks(function: _Function) -> _Function:
    """A decorator for functions of a ``domain``: if one rank raises, those that wait for its message do, too."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> torch.Tensor:
        with whole_call(options.get("domain")):
            return function(*args, **options)

    return call  # type: ignore[return-value]  # it has the signature of the function


@_of_all_ranks
def degrees_of_freedom(
    masses: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    num_systems: int | None = None,
    *,
    removed: float | torch.Tensor = 0,
    domain: "Domain | None" = None,
) -> torch.Tensor:
    """Number (n_systems,) of degrees of freedom in float64: three for each atom that is not frozen, less ``removed``.

    Parameters
    ----------
    masses : (n_atoms,) tensor
        Infinite for frozen atoms.
    batch_idx, num_systems, domain
        See the module.
    removed : number or (n_systems,) tensor, optional
        Number of constraints: 3 for a fixed centre of mass, 3 more for a fixed orientation, one for each fixed bond.
    """
    division = Division.of(masses, batch_idx, num_systems, domain)
    found = 3.0 * division.sums(masses.isfinite().to(torch.float64)).unsqueeze(1)
    return (found - of_each("removed", removed, division.n_systems, masses.device)).clamp(min=0.0).squeeze(1)


def kinetic_energy(
    velocities: torch.Tensor,
    masses: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    num_systems: int | None = None,
    *,
    domain: "Domain | None" = None,
) -> torch.Tensor:
    """Kinetic energies (n_systems,) in float64, ``Σ m v² / 2``."""
    found = kinetic_tensor(velocities, masses, batch_idx, num_systems, domain=domain)
    return found[:, 0, 0] + found[:, 1, 1] + found[:, 2, 2]


@_of_all_ranks
def kinetic_tensor(
    velocities: torch.Tensor,
    masses: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    num_systems: int | None = None,
    *,
    domain: "Domain | None" = None,
) -> torch.Tensor:
    """Tensors (n_systems, 3, 3) ``Σ m v v^T / 2`` in float64, whose trace is the kinetic energy."""
    division = Division.of(masses, batch_idx, num_systems, domain)
    checks.check_tensor("velocities", velocities)
    momenta = (0.5 * inertia_of(masses) * velocities).to(torch.float64)
    return division.sums(momenta.unsqueeze(-1) * velocities.to(torch.float64).unsqueeze(-2))


def temperature(
    velocities: torch.Tensor,
    masses: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    num_systems: int | None = None,
    *,
    removed: float | torch.Tensor = 0,
    domain: "Domain | None" = None,
) -> torch.Tensor:
    """Temperatures kT (n_systems,) in units of energy; zero without degrees of freedom. See `degrees_of_freedom`."""
    degrees = degrees_of_freedom(masses, batch_idx, num_systems, removed=removed, domain=domain)
    return temperature_of(kinetic_energy(velocities, masses, batch_idx, num_systems, domain=domain), degrees)


@_of_all_ranks
def maxwell_boltzmann(
    masses: torch.Tensor,
    temperature: float | torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    num_systems: int | None = None,
    *,
    seed: int | torch.Tensor | np.ndarray | Sequence[int] = 0,
    keys: torch.Tensor | np.ndarray | Sequence[int] | None = None,
    domain: "Domain | None" = None,
) -> torch.Tensor:
    """Velocities (n_atoms, 3) from the Maxwell-Boltzmann distribution, with the dtype of the masses.

    Parameters
    ----------
    masses : (n_atoms,) tensor, float32 or float64
        Atoms with infinite mass get zero velocity.
    temperature : float or (n_systems,) tensor, energy
        kT: multiply kelvin by `nvalchemiops.constants.KELVIN`.
    batch_idx, num_systems, domain
        See the module.
    seed : int or (n_systems,) int tensor or array, optional
        Of up to 64 bits.
    keys : (n_systems,) int tensor or array, optional
        Number of each system, 0 .. 2³² - 1, by default its index. Velocities depend on the seed, on the key, and on the
        place of an atom in its system, not on other systems of the batch.

    Raises
    ------
    ValueError, TypeError
        A bad argument, named in the message: masses of another dtype or, where values can be read, masses that are
        not positive, a temperature that is negative or not finite.
    """
    with together(domain):
        checks.check_tensor("masses", masses)
        if not masses.is_floating_point():
            raise TypeError(f"`masses` must be float32 or float64, the dtype of the velocities, got {masses.dtype}")
        division, device = Division.of(masses, batch_idx, num_systems, domain), masses.device
        batch_idx, n_systems, _ = division
        kt = of_each("temperature", temperature, n_systems, device)
        if may_read(masses) and not read_number((values_of(masses) > 0.0).all()):
            raise ValueError("`masses` must be positive")
        if may_read(kt) and not read_number(((values_of(kt) >= 0.0) & values_of(kt).isfinite()).all()):
            raise ValueError("`temperature` must be finite and must not be negative")
        check_slopes("temperature", kt)
        seeds, system_keys = seeds_of("seed", seed, n_systems, device), seeds_of("keys", keys, n_systems, device)
    start = torch.zeros((), dtype=torch.int64, device=device)
    noise = normal_noise(seeds, system_keys, start, batch_idx, division.places(), VELOCITIES, masses.shape[0], 3)
    return (square_root(division.of_atoms(kt, len(masses)) / masses.unsqueeze(1)) * noise).to(masses.dtype)


@_of_all_ranks
def remove_momentum(
    velocities: torch.Tensor,
    masses: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    num_systems: int | None = None,
    *,
    domain: "Domain | None" = None,
) -> torch.Tensor:
    """Velocities without the motion of the centre of mass of the atoms that are not frozen."""
    division, inertia = Division.of(masses, batch_idx, num_systems, domain), inertia_of(masses).to(torch.float64)
    checks.check_tensor("velocities", velocities)
    drift = mean_by_mass(division, inertia, velocities)
    without = velocities - division.of_atoms(drift, len(masses)).to(velocities.dtype)
    # a single atom is at rest then: what rounding leaves of its velocity would count as motion, with a temperature
    is_alone = division.of_atoms(division.sums((inertia > 0.0).to(torch.float64)), len(masses)) == 1.0
    return torch.where(masses.isinf().unsqueeze(1) | is_alone, 0.0, without)


@_of_all_ranks
def remove_rotation(
    velocities: torch.Tensor,
    positions: torch.Tensor,
    masses: torch.Tensor,
    batch_idx: torch.Tensor | None = None,
    num_systems: int | None = None,
    *,
    domain: "Domain | None" = None,
) -> torch.Tensor:
    """Velocities without the angular momentum about the centre of mass, for molecules and clusters.

    Momenta of the centre of mass stay. ``L = I ω`` is solved for the rotation ω with the pseudo-inverse of the tensor
    of inertia, so linear molecules and single atoms are right, too. Systems with frozen atoms do not rotate: they stay
    as they are.
    """
    division, inertia = Division.of(masses, batch_idx, num_systems, domain), inertia_of(masses).to(torch.float64)
    checks.check_tensor("velocities", velocities)
    checks.check_tensor("positions", positions)
    arms, angular = angular_momentum(division, inertia, positions, velocities)
    products = inertia.unsqueeze(-1) * arms.unsqueeze(-1) * arms.unsqueeze(-2)
    second = division.sums(products)
    traces = second.diagonal(dim1=-2, dim2=-1).sum(-1)
    tensor = torch.eye(3, dtype=second.dtype, device=second.device) * traces[:, None, None] - second
    rotation = (torch.linalg.pinv(tensor, rtol=1e-10, hermitian=True) @ angular.unsqueeze(-1)).squeeze(-1)
    frozen = division.sums(masses.isinf().to(torch.float64))
    rotation = torch.where(frozen.unsqueeze(1) > 0.0, 0.0, rotation)
    turning = torch.linalg.cross(division.of_atoms(rotation, len(masses)).expand_as(arms), arms)
    return velocities - turning.to(velocities.dtype)
