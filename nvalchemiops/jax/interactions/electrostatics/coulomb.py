"""Coulomb energies within a cutoff for JAX arrays; see `nvalchemiops.torch.interactions.electrostatics.coulomb`."""

from typing import Any

from nvalchemiops.jax.interactions.electrostatics._shapes import OF_CHARGES
from nvalchemiops.jax.operators import Shape, number_of_systems, operator, system_energies
from nvalchemiops.torch.interactions.electrostatics import coulomb


def _energies(positions: Any, charges: Any, **others: Any) -> Any:
    return Shape(charges.shape, positions.dtype)  # with channels, if there are any


def _forces(positions: Any, **others: Any) -> Any:
    return Shape(positions.shape, positions.dtype)


def _both(positions: Any, charges: Any, **others: Any) -> Any:
    return _energies(positions, charges), _forces(positions)


def _of_dsf(positions: Any, compute_forces: bool = True, compute_virial: bool = False, **others: Any) -> Any:
    n_systems = number_of_systems("dsf_coulomb", **others)
    results = [Shape((n_systems,), positions.dtype)]
    results += [Shape(positions.shape, positions.dtype)] * compute_forces
    return (*results, *[Shape((n_systems, 3, 3), positions.dtype)] * compute_virial)


def _energies_alone(compute_forces: bool = True, compute_virial: bool = False, **others: Any) -> bool:
    return not (compute_forces or compute_virial)


coulomb_energy: Any = operator(coulomb.coulomb_energy, _energies)
coulomb_forces: Any = operator(coulomb.coulomb_forces, _forces)
coulomb_energy_forces: Any = operator(coulomb.coulomb_energy_forces, _both)
dsf_coulomb: Any = operator(
    coulomb.dsf_coulomb,
    _of_dsf,
    contract=system_energies(_energies_alone, OF_CHARGES),
)
