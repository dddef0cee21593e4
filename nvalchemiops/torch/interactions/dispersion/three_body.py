"""The triple-dipole energy of D3 as torch ops (`nvalchemiops.interactions.dispersion.three_body`).

Two ops share one kernel: the energies, and their first derivatives, which are the backward pass of the first op and end
there: asking for more raises.

**Several ranks.** The kernel gathers: an atom has a third of each of its triples, and all of their derivatives by
itself. Its triples are those of its row, if the row has all atoms within the cutoff, on whichever rank they are. So
each rank computes energies, and gradients, of its own atoms; for gradients it needs the weights of its ghosts as well,
which is one more exchange. Nothing goes back to the owners of ghosts.
"""

from typing import TYPE_CHECKING, Any

import torch

from nvalchemiops.interactions.dispersion.three_body import MOST_COEFFICIENTS, N_SUMS, three_body
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.specs import precision_of, real_of
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.segments import add_systems
from nvalchemiops.torch.runtime.context import eager, is_eager

if TYPE_CHECKING:
    from nvalchemiops.torch.distributed.domain import Domain


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


@eager
def three_body_share(
    domain: "Domain",
    positions: torch.Tensor,
    cell: torch.Tensor | None,
    coefficients: torch.Tensor,
    species: torch.Tensor,
    pair_radii: torch.Tensor,
    batch_idx: torch.Tensor | None,
    *others: Any,
    derivatives: bool,
) -> tuple[torch.Tensor, ...]:
    """The same of the atoms that a rank owns; the gradient by the cell and the virial are its shares.

    Parameters
    ----------
    domain : Domain
    positions, cell, coefficients, species, pair_radii, batch_idx, *others
        As for `three_body_energies`, of owned atoms; the rows are those of owned atoms, then empty ones of ghosts.
    """
    systems = None if batch_idx is None else domain.batch_idx_with_ghosts
    constants = (domain._with_ghosts(species), pair_radii, systems, *others)
    energies = _EnergiesOfShare.apply(domain, constants, positions, cell, coefficients)
    if not derivatives:
        return (energies,)
    return (energies, *_derivatives_of_share(domain, constants, (positions, cell, coefficients))[1:])


Moving = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""Positions, cell and coefficients."""


def _derivatives_of_share(
    domain: "Domain", constants: tuple[Any, ...], moving: Moving, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """Results of `three_body_derivatives` for owned atoms."""
    positions, cell, coefficients = moving
    x, c, w = domain._all_with_ghosts(positions, coefficients, weights)
    assert x is not None and c is not None
    found = three_body_derivatives(x.contiguous(), cell, c.contiguous(), *constants, w)
    return (*(of_atoms[: domain.n_owned] for of_atoms in found[:3]), *found[3:])


class _EnergiesOfShare(torch.autograd.Function):
    """Energies of owned atoms. Gradients are complete where they are computed, on the ranks that own the atoms."""

    @staticmethod
    def forward(ctx: Any, domain: "Domain", constants: tuple[Any, ...], *moving: Any) -> torch.Tensor:
        ctx.domain, ctx.constants = domain, constants
        ctx.save_for_backward(*moving)
        return _derivatives_of_share(domain, constants, moving)[0].clone()

    @staticmethod
    def backward(ctx: Any, weights: torch.Tensor) -> Any:
        moving = ctx.saved_tensors
        _, by_positions, by_coefficients, by_cell, _ = _derivatives_of_share(ctx.domain, ctx.constants, moving, weights)
        return None, None, by_positions, None if moving[1] is None else by_cell, by_coefficients


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
