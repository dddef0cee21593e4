"""Random numbers that are functions of a seed, a system, an atom and a step (`nvalchemiops.kernels.noise`)."""

import torch
import warp as wp

from nvalchemiops.kernels.noise import chi_square_numbers, normal_numbers
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.segments import row_pointers


@warp_custom_op(
    "nvalchemiops::normal_noise",
    outputs=[OutputSpec("values", wp.float64, lambda *inputs: (inputs[6], inputs[7]))],
    grad_arrays=(),
    backward="none",
    trusted=True,
)
def normal_noise(
    seeds: torch.Tensor,
    keys: torch.Tensor,
    step: torch.Tensor,
    systems: torch.Tensor | None,
    places: torch.Tensor | None,
    stream: int,
    n_rows: int,
    n_columns: int,
    by_system: bool = False,
) -> torch.Tensor:
    """Normal numbers (n_rows, n_columns) in float64, with mean 0 and variance 1; constants for derivatives.

    Parameters
    ----------
    seeds, keys : (n_systems,) int64 tensors
        The 32 lower bits of a key count.
    step : () int64 tensor
        48 bits count.
    systems, places : (n_rows,) int32 tensors, optional
        System of each row, and number of the row in it. Not needed for one system, and if rows are systems.
    stream : int
        0 .. 255: numbers of different streams are independent.
    n_rows, n_columns : int
    by_system : bool, optional
        Whether rows are systems.
    """
    values = torch.empty((n_rows, n_columns), dtype=torch.float64, device=seeds.device)
    inputs = [seeds, keys, step.reshape(1), systems, places, stream, int(by_system)]
    launch(normal_numbers(), n_rows, inputs, [values])
    return values


@warp_custom_op(
    "nvalchemiops::chi_square_noise",
    outputs=[OutputSpec("values", wp.float64, lambda seeds, *_: (seeds.shape[0],))],
    grad_arrays=(),
    backward="none",
    trusted=True,
)
def chi_square_noise(
    seeds: torch.Tensor, keys: torch.Tensor, step: torch.Tensor, degrees_of_freedom: torch.Tensor, stream: int
) -> torch.Tensor:
    """For each system a sum of squares of that many normal numbers (n_systems,); arguments as for `normal_noise`.

    ``degrees_of_freedom`` (n_systems,) are float64. They need not be integers; the sum of none or fewer is zero.
    """
    values = torch.empty(seeds.shape[0], dtype=torch.float64, device=seeds.device)
    inputs = [seeds, keys, step.reshape(1), degrees_of_freedom, stream]
    launch(chi_square_numbers(), values.shape[0], inputs, [values])
    return values


def places_in_systems(batch_idx: torch.Tensor, n_systems: int) -> torch.Tensor:
    """Number (n_atoms,) int32 of each atom among the atoms of its system, in their order. Reads no values."""
    systems, order = torch.sort(batch_idx, stable=True)
    first = row_pointers(systems, n_systems).to(torch.int64)
    places = torch.arange(batch_idx.shape[0], device=batch_idx.device) - first[systems.to(torch.int64)]
    return torch.empty_like(places).index_put_((order,), places).to(torch.int32)
