"""Coulomb energies within a cutoff for JAX arrays; see `nvalchemiops.torch.interactions.electrostatics.coulomb`."""

import functools
from typing import Any

from nvalchemiops.jax.interactions.electrostatics._shapes import OF_CHARGES, of_sum
from nvalchemiops.jax.operators import Shape, number_of_systems, operator, system_energies
from nvalchemiops.torch.interactions.electrostatics import coulomb


def _of_dsf(positions: Any, compute_forces: bool = True, compute_virial: bool = False, **others: Any) -> Any:
    n_systems = number_of_systems("dsf_coulomb", **others)
    results = [Shape((n_systems,), positions.dtype)]
    results += [Shape(positions.shape, positions.dtype)] * compute_forces
    return (*results, *[Shape((n_systems, 3, 3), positions.dtype)] * compute_virial)


coulomb_energy: Any = operator(coulomb.coulomb_energy, of_sum)
coulomb_forces: Any = operator(coulomb.coulomb_forces, lambda positions, **_: Shape(positions.shape, positions.dtype))
coulomb_energy_forces: Any = operator(coulomb.coulomb_energy_forces, functools.partial(of_sum, compute_forces=True))
dsf_coulomb: Any = operator(coulomb.dsf_coulomb, _of_dsf, contract=system_energies(OF_CHARGES, "system"))
