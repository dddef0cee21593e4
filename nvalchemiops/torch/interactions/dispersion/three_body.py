"""The triple-dipole energy of D3 as torch ops (`nvalchemiops.interactions.dispersion.three_body`).

Two ops share one kernel. The first computes energies. The second computes their first derivatives, and is the backward
pass of the first; it has no derivatives itself, so second derivatives raise.

**Several ranks.** The kernel is in gather form: it gives each atom a third of the energy of its triples, and the
complete derivatives of this energy with respect to the atom's own values. All triples of an atom are found in its row
if the row holds all atoms within the cutoff, including ghosts. So each rank computes energies and gradients of its own
atoms, from values and weights of its ghosts, which the ops fetch. Nothing is sent back to the owners of ghosts.
"""

from typing import Any, NamedTuple

import torch

from nvalchemiops.interactions.dispersion.three_body import MOST_COEFFICIENTS, N_SUMS, three_body
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.declaration import with_fields
from nvalchemiops.torch.autograd.specs import precision_of, real_of
from nvalchemiops.torch.interactions.pair.shares import NO_GHOSTS, Ghosts, with_ghosts
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.segments import add_systems
from nvalchemiops.torch.runtime.context import is_eager


class Triples(NamedTuple):
    """The atoms of a sum over triples, and their rows of neighbors."""

    positions: torch.Tensor  # (n_atoms, 3)
    cell: torch.Tensor | None  # (n_systems, 3, 3), given if ``shifts`` are given
    # (n_atoms, n_coefficients): ``C6_ij = Σ_q ± c_iq c_jq``, with a plus for the first `n_positive` coefficients
    coefficients: torch.Tensor
    species: torch.Tensor  # (n_atoms,) int32, row of each atom in `pair_radii`
    pair_radii: torch.Tensor  # (n_species, n_species)
    batch_idx: torch.Tensor | None  # (n_atoms,) int32
    n_systems: int
    row_begin: torch.Tensor | None  # as all up to `padding` in `nvalchemiops.torch.neighbors.rows.Rows`; full rows
    neighbors: torch.Tensor
    shifts: torch.Tensor | None
    width: int
    padding: int
    n_positive: int
    cutoff: float  # triples count all of whose sides are shorter
    r_switch: float  # if it is below the cutoff, a factor for each side goes to zero between the two


def _of_systems(*inputs: Any) -> tuple[Any, ...]:
    return inputs[6], 3, 3


_OUTPUTS = {
    "energies": lambda x, *_: (x.shape[0],),
    "position_gradients": lambda x, *_: tuple(x.shape),
    "coefficient_gradients": lambda x, h, c, *_: tuple(c.shape),
    "cell_gradient": _of_systems,
    "virial": _of_systems,
}


@warp_custom_op(
    "nvalchemiops::three_body_derivatives",
    outputs=[OutputSpec(name, real_of, shape) for name, shape in _OUTPUTS.items()],
    # declared so that second derivatives raise instead of being zero
    grad_arrays=[*_OUTPUTS, "positions", "cell", "coefficients", "weights"],
    backward="none",
    trusted=True,
)
@with_fields
def three_body_derivatives(
    triples: Triples, weights: torch.Tensor | None = None, ghosts: Ghosts = NO_GHOSTS
) -> tuple[torch.Tensor, ...]:
    """Energies (n_atoms,) of triples, a third for each atom, and first derivatives of their sum with ``weights``.

    The derivatives are the gradients with respect to positions, coefficients and cell, and the virial. The weights
    (n_atoms,) are one by default.
    """
    positions, _, coefficients, *_ = triples
    given = {**triples._asdict(), **ghosts._asdict(), "weights": weights}
    if coefficients.shape[1] > MOST_COEFFICIENTS:
        raise ValueError(f"`s9`: the three-body energy allows at most {MOST_COEFFICIENTS} reference states in total")
    if ghosts.sent is not None:
        given = with_ghosts(given, ("positions", "coefficients", "weights"))
    n_atoms, device, dtype = positions.shape[0], positions.device, positions.dtype
    sums = torch.empty((n_atoms, N_SUMS), dtype=torch.float64, device=device)
    results = [positions.new_empty(n_atoms), torch.empty_like(positions), torch.empty_like(coefficients)]
    launch(three_body(precision_of(positions)), n_atoms, [given[n] for n in _READ], [*results, sums], lanes=WARP)
    of_system = add_systems(sums, triples.batch_idx, triples.n_systems).view(-1, 2, 3, 3).to(dtype)
    return *results, of_system[:, 0].clone(), of_system[:, 1].clone()


_READ = (
    *("positions", "cell", "coefficients", "species", "pair_radii", "weights", "batch_idx", "row_begin", "neighbors"),
    *("shifts", "width", "padding", "n_positive", "cutoff", "r_switch"),
)
"""Arguments of the kernel, in its order."""


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
    outputs=[OutputSpec("energies", real_of, _OUTPUTS["energies"])],
    grad_arrays=["energies", "positions", "cell", "coefficients"],
    backward=_pullback,
    trusted=True,
)
@with_fields
def three_body_energies(triples: Triples, ghosts: Ghosts = NO_GHOSTS) -> torch.Tensor:
    """Energies (n_atoms,) of triples, a third for each atom."""
    return three_body_derivatives(*triples, None, *ghosts)[0]


def three_body_sum(given: tuple[Any, ...], ghosts: tuple[Any, ...], derivatives: bool) -> tuple[torch.Tensor, ...]:
    """Energies of triples; with ``derivatives``, also gradients (positions, coefficients, cell) and the virial.

    ``given`` and ``ghosts`` are the arguments of `three_body_energies`.
    """
    if not derivatives:
        return (three_body_energies(*given, *ghosts),)
    found = three_body_derivatives(*given, None, *ghosts)
    in_graph = not is_eager()
    if in_graph or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given[:3])):
        return (three_body_energies(*given, *ghosts), *found[1:])
    return found
