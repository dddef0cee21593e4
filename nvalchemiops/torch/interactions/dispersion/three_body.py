"""The triple-dipole energy of D3 as torch ops (`nvalchemiops.interactions.dispersion.three_body`).

Two ops share one kernel. The first computes energies. The second computes their first derivatives, and is the backward
pass of the first; it has no derivatives itself, so second derivatives raise.

**Several ranks.** The kernel is in gather form: it gives each atom a third of the energy of its triples, and the
complete derivatives of this energy with respect to the atom's own values. All triples of an atom are found in its row
if the row holds all atoms within the cutoff, including ghosts. So each rank computes energies and gradients of its own
atoms, from values and weights of its ghosts, which the ops fetch. Nothing is sent back to the owners of ghosts.
"""

from collections.abc import Sequence
from typing import Any

import torch

from nvalchemiops.interactions.dispersion.three_body import MOST_COEFFICIENTS, N_SUMS, three_body
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.specs import precision_of, real_of
from nvalchemiops.torch.interactions.pair.shares import with_ghosts
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.operators.segments import add_systems
from nvalchemiops.torch.runtime.context import is_eager


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
    weights: torch.Tensor | None = None,
    system_of_all: torch.Tensor | None = None,
    sent: torch.Tensor | None = None,
    partners: Sequence[int] = (),
    send: Sequence[int] = (),
    receive: Sequence[int] = (),
    group: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Energies (n_atoms,) of triples, a third for each atom, and first derivatives of their sum with ``weights``.

    The derivatives are the gradients with respect to positions, coefficients and cell, and the virial.

    Parameters
    ----------
    weights : (n_atoms,) tensor, optional
        Weights of the energies in the sum that is differentiated; one by default.
    **others
        As for `three_body_energies`.
    """
    given = dict(locals())  # a copy, because a debugger may add entries to locals()
    if coefficients.shape[1] > MOST_COEFFICIENTS:
        raise ValueError(f"`s9`: the three-body energy allows at most {MOST_COEFFICIENTS} reference states in total")
    if sent is not None:
        given = with_ghosts(given, ("positions", "coefficients", "weights"))
    n_atoms, device, dtype = positions.shape[0], positions.device, positions.dtype
    sums = torch.empty((n_atoms, N_SUMS), dtype=torch.float64, device=device)
    results = [positions.new_empty(n_atoms), torch.empty_like(positions), torch.empty_like(coefficients)]
    launch(three_body(precision_of(positions)), n_atoms, [given[n] for n in _READ], [*results, sums], lanes=WARP)
    of_system = add_systems(sums, batch_idx, n_systems).view(-1, 2, 3, 3).to(dtype)
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
    system_of_all: torch.Tensor | None = None,
    sent: torch.Tensor | None = None,
    partners: Sequence[int] = (),
    send: Sequence[int] = (),
    receive: Sequence[int] = (),
    group: int = 0,
) -> torch.Tensor:
    """Energies (n_atoms,) of triples, a third for each atom.

    Parameters
    ----------
    positions : (n_atoms, 3) tensor
    cell : (n_systems, 3, 3) tensor, optional
        Lattice vectors in rows; given if ``shifts`` are given.
    coefficients : (n_atoms, n_coefficients) tensor
        ``C6_ij = Σ_q ± c_iq c_jq``, with a plus for the first ``n_positive`` coefficients.
    species : (n_atoms,) int32 tensor
        Row of each atom in ``pair_radii``.
    pair_radii : (n_species, n_species) tensor
    batch_idx : (n_atoms,) int32 tensor, optional
    n_systems : int
    row_begin, neighbors, shifts, width, padding
        See `nvalchemiops.torch.neighbors.rows.Rows`; full rows.
    n_positive : int
    cutoff, r_switch : float
        A triple counts if all of its sides are shorter than the cutoff. If ``r_switch`` is below the cutoff, a factor
        for each side goes to zero between the two.
    system_of_all, sent, partners, send, receive, group : optional
        Given if ranks share the sum, as for `nvalchemiops.torch.interactions.pair.op.pair_sum`.
    """
    return three_body_derivatives(**locals())[0]


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
