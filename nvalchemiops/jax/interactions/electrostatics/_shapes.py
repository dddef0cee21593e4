"""Shapes of the results of sums over charges."""

import functools
from typing import Any

from nvalchemiops.jax.operators import ATOMS, SYSTEMS, Shape, only_of_systems, operator, system_energies


def of_sum(
    positions: Any,
    charges: Any,
    cell: Any,
    energy_reduction: str = "atom",
    compute_forces: bool = False,
    compute_charge_gradients: bool = False,
    compute_virial: bool = False,
    **others: Any,
) -> Any:
    """Energies, and forces, gradients by charges and virial, where requested."""
    n_systems = cell.shape[0] if len(cell.shape) == 3 else 1
    rows = positions.shape[:1] if energy_reduction == "atom" else (n_systems,)
    results = [Shape(rows + charges.shape[1:], positions.dtype)]
    results += [Shape(positions.shape, positions.dtype)] * compute_forces
    results += [Shape(charges.shape, positions.dtype)] * compute_charge_gradients
    results += [Shape((n_systems, 3, 3), positions.dtype)] * compute_virial
    return results[0] if len(results) == 1 else tuple(results)


OF_CHARGES = {"positions": ATOMS, "charges": ATOMS, "cell": SYSTEMS, "alpha": SYSTEMS}
"""Arrays with rows for atoms or systems."""


SumOperator = functools.partial(operator, out_shapes=of_sum, contract=system_energies(only_of_systems, OF_CHARGES))
"""The JAX function of a torch function that sums over all distances."""
