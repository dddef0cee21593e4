"""Shapes of the results of sums over charges."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import torch

from nvalchemiops.jax.bridge import ATOMS, SYSTEMS
from nvalchemiops.jax.operators import Shape, operator, system_energies

ENERGY_DTYPE = "float64"
"""Dtype of energies of Ewald sums, as in torch; JAX without x64 rounds them to float32."""


def of_sum(
    positions: Any,
    charges: Any,
    cell: Any = None,
    energy_reduction: str = "atom",
    compute_forces: bool = False,
    compute_charge_gradients: bool = False,
    compute_virial: bool = False,
    compute_dipole_gradients: bool = False,
    compute_quadrupole_gradients: bool = False,
    energy_dtype: Any = ENERGY_DTYPE,
    **others: Any,
) -> Any:
    """Shapes of energies, and of requested forces, gradients by sources and virial."""
    n_systems = cell.shape[0] if cell is not None and len(cell.shape) == 3 else 1
    if cell is None and (energy_reduction == "system" or compute_virial):  # molecules, with pbc=False
        pbc: Any = others.get("pbc")
        if len(getattr(pbc, "shape", ())) == 2:
            n_systems = pbc.shape[0]
        elif others.get("batch_idx") is not None:
            raise ValueError(
                "several molecules without a `cell` need `pbc` (n_systems, 3), whose shape says how many there are"
            )
    rows = positions.shape[:1] if energy_reduction == "atom" else (n_systems,)
    results = [Shape(rows + charges.shape[1:], energy_dtype or positions.dtype)]
    results += [Shape(positions.shape, positions.dtype)] * compute_forces
    results += [Shape(charges.shape, positions.dtype)] * compute_charge_gradients
    results += [Shape((*charges.shape, 3), positions.dtype)] * compute_dipole_gradients
    results += [Shape((*charges.shape, 3, 3), positions.dtype)] * compute_quadrupole_gradients
    results += [Shape((n_systems, 3, 3), positions.dtype)] * compute_virial
    return results[0] if len(results) == 1 else tuple(results)


OF_CHARGES = {"positions": ATOMS, "charges": ATOMS, "cell": SYSTEMS, "alpha": SYSTEMS}
"""Arrays with rows for atoms or systems."""


_OF_ATOMS = ("positions", "charges", "neighbor_matrix", "neighbor_matrix_shifts")
_OF_SYSTEMS = {"cell": (3, 3), "pbc": (3,), "alpha": ()}
"""Arrays that may differ between slices, with the shape for one system."""


def _is_foldable(cell: Any = None, **others: Any) -> bool:
    """Whether all parameters are given: parameters chosen for a batch would differ from those for one system."""
    if cell is None or (len(cell.shape) == 3 and cell.shape[0] != 1):
        return False
    arrays = {name for name, value in others.items() if isinstance(value, Shape)}
    given = others.keys()
    in_space = "neighbor_matrix" in given or "cutoff" in given
    in_waves = not given.isdisjoint({"miller_bounds", "k_cutoff", "mesh_dimensions"})
    needed = {"real": in_space, "waves": in_waves, "both": in_space and in_waves}
    return "alpha" in given and arrays <= {*_OF_ATOMS, *_OF_SYSTEMS} and needed[others.get("part", "both")]


def _folded(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Results for arguments with leading axes, whose slices become the systems of a batch."""
    positions = arguments["positions"]
    lead, n = positions.shape[:-2], positions.shape[-2]
    count = math.prod(lead)
    systems = torch.arange(count, dtype=torch.int32, device=positions.device).repeat_interleave(n)
    given = {**arguments, "batch_idx": systems}
    given |= {name: arguments[name].flatten(0, len(lead)) for name in _OF_ATOMS if name in arguments}
    for name, shape in _OF_SYSTEMS.items():
        if isinstance(given.get(name), torch.Tensor):
            given[name] = given[name].reshape(count, *shape)
    if "neighbor_matrix" in given:
        matrix = given["neighbor_matrix"]
        is_padding, is_atom = matrix == given.pop("mask_value", n), (matrix >= 0) & (matrix < n)
        of_batch = matrix + n * systems.to(matrix.dtype).unsqueeze(1)
        of_batch = of_batch.where(is_atom, -1)  # an index out of range must not become an atom of another slice
        given["neighbor_matrix"] = of_batch.where(~is_padding, count * n)
    return jax.tree.map(lambda t: t.reshape(*lead, t.shape[0] // count, *t.shape[1:]), function(**given))


def sum_operator(function: Callable[..., Any], part: str = "both", **options: Any) -> Callable[..., Any]:
    """Make a JAX function of a torch function that sums over all distances, or over a ``part``: real space or waves."""
    return operator(
        function,
        of_sum,
        contract=system_energies(OF_CHARGES),
        fold=_folded,
        folds=functools.partial(_is_foldable, part=part),
        **options,
    )
