"""Coulomb energies within a cutoff for JAX arrays; see `nvalchemiops.torch.interactions.electrostatics.coulomb`."""

import functools
from typing import Any

from nvalchemiops.jax.interactions.electrostatics._shapes import ENERGY_DTYPE, OF_CHARGES, of_sum
from nvalchemiops.jax.operators import Shape, number_of_systems, operator, system_energies
from nvalchemiops.torch.interactions.electrostatics import coulomb


def _of_dsf(positions: Any, compute_forces: bool = True, compute_virial: bool = False, **others: Any) -> Any:
    n_systems = number_of_systems("dsf_coulomb", **others)
    results = [Shape((n_systems,), ENERGY_DTYPE)]
    results += [Shape(positions.shape, positions.dtype)] * compute_forces
    return (*results, *[Shape((n_systems, 3, 3), positions.dtype)] * compute_virial)


_of_pairs = functools.partial(of_sum, energy_dtype=None)

coulomb_energy: Any = operator(coulomb.coulomb_energy, _of_pairs)
coulomb_forces: Any = operator(coulomb.coulomb_forces, lambda positions, **_: Shape(positions.shape, positions.dtype))
coulomb_energy_forces: Any = operator(coulomb.coulomb_energy_forces, functools.partial(_of_pairs, compute_forces=True))
dsf_coulomb: Any = operator(coulomb.dsf_coulomb, _of_dsf, contract=system_energies(OF_CHARGES, "system"))
