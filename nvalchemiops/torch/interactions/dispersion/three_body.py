"""The triple-dipole energy of D3 as torch ops (`nvalchemiops.interactions.dispersion.three_body`).

Two ops share one kernel: the energies, and their first derivatives, which are the backward pass of the first op and end
there: asking for more raises.
"""

from typing import Any

import torch

from nvalchemiops.interactions.dispersion.three_body import MOST_COEFFICIENTS, N_SUMS, three_body
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.specs import precision_of, real_of
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.segments import add_systems
from nvalchemiops.torch.runtime.context import is_eager


def three_body_sum(
    positions: torch.Tensor, cell: torch.Tensor | None, coefficients: torch.Tensor, *others: Any, derivatives: bool
) -> tuple[torch.Tensor, ...]:
    """Energies of triples; with ``derivatives`` also gradients by positions, coefficients and cell, and the virial.

    Parameters
    ----------
    positions, cell, coefficients, *others
        As for `three_body_energies`.
    """
    given = (positions, cell, coefficients)
    if not derivatives:
        return (three_body_energies(*given, *others),)
    found = three_body_derivatives(*given, *others, None)
    in_graph = not is_eager()
    if in_graph or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)):
        return (three_body_energies(*given, *others), *found[1:])
    return found


def _real(name: str, shape: Any) -> OutputSpec:
    return OutputSpec(name, real_of, shape)


@warp_custom_op(
    "nvalchemiops::three_body_derivatives",
    outputs=[
        _real("energies", lambda x, *_: (x.shape[0],)),
        _real("position_gradients", lambda x, *_: tuple(x.shape)),
        _real("coefficient_gradients", lambda x, h, c, *_: tuple(c.shape)),
        _real("cell_gradient", lambda x, h, c, s, r, b, n_systems, *_: (n_systems, 3, 3)),
        _real("virial", lambda x, h, c, s, r, b, n_systems, *_: (n_systems, 3, 3)),
    ],
    grad_arrays=[  # so that asking for derivatives raises, and never gives zero
        *("energies", "position_gradients", "coefficient_gradients", "cell_gradient", "virial"),
        *("positions", "cell", "coefficients", "weights"),
    ],
    backward="none",
    trusted=True,
)
def three_body_derivatives(
    positions: torch.Tensor,
    cell: torch.Tensor | None,
    coefficients: torch.Tensor,
    species: torch.Tensor,
    pair_radii: torch.Tensor,
    batch_idx: torch.Tensor | None,
    n_systems: int,
    row_begin: torch.Tensor | None,
    neighbors: torch.Tensor,
    shifts: torch.Tensor | None,
    width: int,
    padding: int,
    n_positive: int,
    cutoff: float,
    r_switch: float,
    weights: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Energies of triples, and the derivatives of their sum with ``weights`` (n_atoms,), by default one.

    Other parameters as for `three_body_energies`.
    """
    n_atoms, device, dtype = positions.shape[0], positions.device, positions.dtype
    if coefficients.shape[1] > MOST_COEFFICIENTS:
        raise ValueError(f"`s9`: the three-body term is for elements with {MOST_COEFFICIENTS} reference states at most")
    energies, position_gradients = positions.new_empty(n_atoms), torch.empty_like(positions)
    coefficient_gradients = torch.empty_like(coefficients)
    sums = torch.empty((n_atoms, N_SUMS), dtype=torch.float64, device=device) if cell is not None else None
    arrays = [positions, cell, coefficients, species, pair_radii, weights, batch_idx, row_begin, neighbors, shifts]
    numbers = [width, padding, n_positive, cutoff, r_switch]
    results = [energies, position_gradients, coefficient_gradients, sums]
    launch(three_body(precision_of(positions)), n_atoms, [*arrays, *numbers], results, lanes=WARP)
    if sums is None:
        of_system = positions.new_zeros(n_systems, 2, 3, 3)
    else:
        of_system = add_systems(sums, batch_idx, n_systems).view(-1, 2, 3, 3).to(dtype)
    return energies, position_gradients, coefficient_gradients, of_system[:, 0].clone(), of_system[:, 1].clone()


def _pullback(
    inputs: dict[str, Any], gradients: dict[str, torch.Tensor | None], wanted: frozenset[str]
) -> dict[str, torch.Tensor]:
    weights = gradients["energies"]
    assert weights is not None
    _, *found, _ = three_body_derivatives(**inputs, weights=weights.contiguous())
    results = dict(zip(("positions", "coefficients", "cell"), found))
    return {name: results[name] for name in wanted}


@warp_custom_op(
    "nvalchemiops::three_body_energies",
    outputs=[_real("energies", lambda x, *_: (x.shape[0],))],
    grad_arrays=["energies", "positions", "cell", "coefficients"],
    backward=_pullback,
    trusted=True,
)
def three_body_energies(
    positions: torch.Tensor,
    cell: torch.Tensor | None,
    coefficients: torch.Tensor,
    species: torch.Tensor,
    pair_radii: torch.Tensor,
    batch_idx: torch.Tensor | None,
    n_systems: int,
    row_begin: torch.Tensor | None,
    neighbors: torch.Tensor,
    shifts: torch.Tensor | None,
    width: int,
    padding: int,
    n_positive: int,
    cutoff: float,
    r_switch: float,
) -> torch.Tensor:
    """Energies (n_atoms,) of triples, a third for each atom.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor
    cell : (n_systems, 3, 3) tensor, optional
        Goes with ``shifts``.
    coefficients : (n_atoms, n_coefficients) tensor
        ``C6_ij = Σ_q ± c_iq c_jq``, the first ``n_positive`` of them with a plus.
    species : (n_atoms,) int32 tensor
        Rows of the radii.
    pair_radii : (n_species, n_species) tensor
    batch_idx : (n_atoms,) int32 tensor, optional
    n_systems : int
    row_begin, neighbors, shifts, width, padding
        See `nvalchemiops.torch.neighbors.rows.Rows`; full rows.
    n_positive : int
    cutoff, r_switch : float
        A triple counts if all of its sides are shorter than the cutoff; each goes to zero from ``r_switch`` on, if that
        is less.
    """
    return three_body_derivatives(**locals(), weights=None)[0]
