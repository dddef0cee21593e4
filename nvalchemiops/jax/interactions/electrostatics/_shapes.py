"""Shapes of the results of sums over charges."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from nvalchemiops.jax.operators import ATOMS, SYSTEMS, Folding, Shape, only_of_systems, operator, system_energies


def of_sum(
    positions: Any,
    charges: Any,
    cell: Any,
    energy_reduction: str = "atom",
    compute_forces: bool = False,
    compute_charge_gradients: bool = False,
    compute_virial: bool = False,
    compute_dipole_gradients: bool = False,
    compute_quadrupole_gradients: bool = False,
    **others: Any,
) -> Any:
    """Energies, and forces, gradients by sources and virial, where requested."""
    n_systems = cell.shape[0] if len(cell.shape) == 3 else 1
    rows = positions.shape[:1] if energy_reduction == "atom" else (n_systems,)
    results = [Shape(rows + charges.shape[1:], positions.dtype)]
    results += [Shape(positions.shape, positions.dtype)] * compute_forces
    results += [Shape(charges.shape, positions.dtype)] * compute_charge_gradients
    results += [Shape((*charges.shape, 3), positions.dtype)] * compute_dipole_gradients
    results += [Shape((*charges.shape, 3, 3), positions.dtype)] * compute_quadrupole_gradients
    results += [Shape((n_systems, 3, 3), positions.dtype)] * compute_virial
    return results[0] if len(results) == 1 else tuple(results)


OF_CHARGES = {"positions": ATOMS, "charges": ATOMS, "cell": SYSTEMS, "alpha": SYSTEMS}
"""Arrays with rows for atoms or systems."""


_OF_ONE_SYSTEM = frozenset(
    {"positions", "charges", "cell", "alpha", "pbc", "neighbor_matrix", "neighbor_matrix_shifts"}
)
"""Arrays that may have slices."""


def _is_foldable(cell: Any, **others: Any) -> bool:
    """Whether nothing is chosen by values, since a choice for one system differs from one for a batch."""
    if len(cell.shape) == 3 and cell.shape[0] != 1:
        return False
    arrays = {name for name, value in others.items() if isinstance(value, Shape)}
    given = others.keys()
    in_space = "neighbor_matrix" in given or "cutoff" in given
    in_waves = not given.isdisjoint({"miller_bounds", "k_cutoff", "mesh_dimensions"})
    needed = {"real": in_space, "waves": in_waves, "both": in_space and in_waves}
    return "alpha" in given and arrays <= _OF_ONE_SYSTEM and needed[others.get("part", "both")]


def _folded(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Results for arguments with leading axes, each slice a system of one batch."""
    positions = arguments["positions"]
    lead, n = positions.shape[:-2], positions.shape[-2]
    count = math.prod(lead)
    given = dict(arguments)
    given["batch_idx"] = torch.arange(count, dtype=torch.int32, device=positions.device).repeat_interleave(n)
    for name, shape in (
        ("positions", (count * n, 3)),
        ("cell", (count, 3, 3)),
        ("pbc", (count, 3)),
        ("alpha", (count,)),
    ):
        if isinstance(given.get(name), torch.Tensor):
            given[name] = given[name].reshape(shape)
    given["charges"] = arguments["charges"].flatten(0, len(lead))
    if "neighbor_matrix" in given:
        width = given["neighbor_matrix"].shape[-1]
        matrix = given["neighbor_matrix"].reshape(count, n, width)
        first = n * torch.arange(count, dtype=matrix.dtype, device=matrix.device).reshape(-1, 1, 1)
        is_padding, is_atom = matrix == given.pop("mask_value", n), (matrix >= 0) & (matrix < n)
        of_batch = torch.where(is_atom, matrix + first, -1)  # an atom that does not exist is none of another slice
        given["neighbor_matrix"] = torch.where(is_padding, count * n, of_batch).reshape(count * n, width)
    if "neighbor_matrix_shifts" in given:
        given["neighbor_matrix_shifts"] = given["neighbor_matrix_shifts"].flatten(0, len(lead))
    found = function(**given)
    unfolded = [
        t.reshape(*lead, t.shape[0] // count, *t.shape[1:]) for t in (found if isinstance(found, tuple) else [found])
    ]
    return tuple(unfolded) if isinstance(found, tuple) else unfolded[0]


def _is_alone(**arguments: Any) -> bool:
    """Whether these arguments ask for the energies of systems alone, of charges of points."""
    return only_of_systems(**arguments) and arguments.keys().isdisjoint({"dipoles", "quadrupoles", "widths"})


def sum_operator(function: Callable[..., Any], part: str = "both", **options: Any) -> Callable[..., Any]:
    """The JAX function of a torch function that sums over all distances, or over a ``part``: real space or waves."""
    return operator(
        function,
        of_sum,
        contract=system_energies(_is_alone, OF_CHARGES),
        fold=Folding(functools.partial(_is_foldable, part=part), _folded),
        **options,
    )
