"""The op for sums over pairs of moments (`nvalchemiops.interactions.pair.moments`).

The op is closed under differentiation, like spreading and gathering (`nvalchemiops.torch.operators.moments`): the
derivative with respect to the moments exchanges the moments of the two atoms, and the derivative with respect to the
positions raises the order of the moments, or of the derivatives, by one. So the op can be differentiated to any order;
the kernel for each order is generated and compiled when it is first needed.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nvalchemiops.interactions.pair import moments as core
from nvalchemiops.interactions.pair.derivatives import CELL, VIRIAL
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.moments import GATHERED
from nvalchemiops.kernels.moments import count, raised
from nvalchemiops.layout import layout
from nvalchemiops.torch.autograd import warp_custom_op
from nvalchemiops.torch.autograd.declaration import with_fields
from nvalchemiops.torch.autograd.functorch import given_by_name
from nvalchemiops.torch.autograd.specs import precision_of
from nvalchemiops.torch.interactions.pair.exclusions import ExclusionRows
from nvalchemiops.torch.interactions.pair.op import RowKernel, fold_systems, product, row_output
from nvalchemiops.torch.interactions.pair.shares import NO_GHOSTS, Ghosts, ghosts_of, with_ghosts
from nvalchemiops.torch.interactions.pair.system import NO_CUTOFF, PairSystem
from nvalchemiops.torch.operators.segments import spread_systems, system_sums
from nvalchemiops.torch.runtime.context import is_eager

MOST_CHANNELS = 4
"""Largest number of channels that one kernel sums at once: more would take long to compile."""


HIGHEST = 12
"""Highest order of moments, and of derivatives, that kernels support."""

_ORDERS = {count(order): order for order in range(HIGHEST + 1)}
_RAISED = [list(zip(*raised(order))) for order in range(HIGHEST)]
"""For each order and axis, the indices of the moments of `nvalchemiops.kernels.moments` with one more derivative."""


def order_of(n_moments: int) -> int:
    """The highest order of ``n_moments`` moments."""
    # compared one by one: inside torch.compile the number may be a symbol, which is not a key of a dict
    for number, order in _ORDERS.items():
        if number == n_moments:
            return order
    raise ValueError(f"`moments` must have 1, 4, 10, 20, ... components up to order {HIGHEST}, got {n_moments}")


# -- the derivative -------------------------------------------------------------------------------


class _Form(NamedTuple):
    """A sum ``Σ_i row_i out_i[source]``, differentiated along ``directions`` of the cell.

    Its gradients are sums of the same form.
    """

    row: torch.Tensor
    source: torch.Tensor
    directions: list[torch.Tensor]


Receivers = dict[str, Callable[[torch.Tensor], None]]
"""Functions that receive the gradients of a sum with respect to its "row", its "source" and its "last" direction."""


def _pullback(
    inputs: dict[str, Any], gradients: dict[str, torch.Tensor | None], wanted: frozenset[str]
) -> dict[str, torch.Tensor]:
    moments, row_moments, positions, cell = (inputs[n] for n in ("moments", "row_moments", "positions", "cell"))
    stacked = inputs["direction_cell"]
    old = [] if stacked is None else list(stacked.unbind(0))
    gathered, by_cell, by_strain = (gradients[n] for n in ("gathered", "cell_gradients", "virial"))
    found: dict[str, torch.Tensor] = {}

    def add(name: str, gradient: torch.Tensor) -> None:
        found[name] = found[name] + gradient if name in found else gradient

    def differentiate(form: _Form, receivers: Receivers) -> None:
        for name, gradient in _derivatives(inputs, form, len(old), wanted, receivers).items():
            add(name, gradient)

    to_both: Receivers = {}
    if "row_moments" in wanted:
        to_both["row"] = functools.partial(add, "row_moments")
    if "moments" in wanted:
        to_both["source"] = functools.partial(add, "moments")
    if GATHERED in inputs["outputs"] and gathered is not None:
        differentiate(_Form(gathered, moments, old), {k: v for k, v in to_both.items() if k == "source"})
    if CELL in inputs["outputs"] and by_cell is not None:
        differentiate(_Form(row_moments, moments, [*old, by_cell]), to_both)
    if VIRIAL in inputs["outputs"] and by_strain is not None:
        # The virial of the sum B is -Σ x_i^T dB/dx_i - h^T dB/dh; a derivative along positions raises the moments.
        change = spread_systems(-by_strain, inputs["batch_idx"], positions.shape[0])
        moved = product(positions.unsqueeze(-2), change).squeeze(-2)

        def lowered(name: str, gradient: torch.Tensor) -> None:
            by_moments, by_moved = _lower(gradient, inputs[name], moved)
            if name in wanted:
                add(name, by_moments)
            if "positions" in wanted:
                add("positions", product(by_moved.unsqueeze(-2), change.mT).squeeze(-2))

        lowers = "positions" in wanted
        to_row, to_source = dict(to_both), dict(to_both)
        if lowers or "row" in to_both:
            to_row["row"] = functools.partial(lowered, "row_moments")
        if lowers or "source" in to_both:
            to_source["source"] = functools.partial(lowered, "moments")
        differentiate(_Form(_raise(row_moments, moved), moments, old), to_row)
        differentiate(_Form(row_moments, _raise(moments, moved), old), to_source)
        if cell is not None:
            if "cell" in wanted:
                to_both["last"] = lambda gradient: add("cell", product(gradient, -by_strain.mT))
            differentiate(_Form(row_moments, moments, [*old, product(cell, -by_strain)]), to_both)
    if "direction_cell" in wanted:
        found["direction_cell"] = torch.stack([found.pop(f"direction {k}") for k in range(len(old))])
    return found


def _derivatives(
    inputs: dict[str, Any], form: _Form, n_old: int, wanted: frozenset[str], receivers: Receivers
) -> dict[str, torch.Tensor]:
    """Gradients of a sum with respect to the wanted inputs other than moments.

    Gradients with respect to the op's own directions are named "direction <k>". ``receivers`` are called with the
    gradients with respect to the moments, and to a last direction that is not an input of the op.
    """
    row, source, directions = form
    found: dict[str, torch.Tensor] = {}
    by, apart = inputs["by"], inputs["row_parameters"] is not None
    d_row, d_source = order_of(row.shape[-1]), order_of(source.shape[-1])
    moves, needs_row, needs_source = "positions" in wanted, "row" in receivers, "source" in receivers

    def gather(of: torch.Tensor, derivatives: int, names: str, exchanged: bool) -> torch.Tensor:
        changed = _arguments(inputs, directions, names, exchanged)
        return pair_moments(outputs=GATHERED, derivatives=derivatives, moments=of, row_moments=None, **changed)[0]

    def by_cell(along: list[torch.Tensor]) -> torch.Tensor:
        changed = _arguments(inputs, along, by, False)
        return pair_moments(outputs=CELL, derivatives=0, moments=source, row_moments=row, **changed)[1]

    of_source = of_row = None
    if (moves or (needs_row and needs_source)) and d_row == d_source and not apart and by == _exchanged(by):
        # evaluate the radial function once for both
        both = gather(torch.cat([source, row], 1), d_row + moves, by, False)
        of_source, of_row = both.split(row.shape[1], 1)
    else:
        if moves or needs_row:
            of_source = gather(source, d_row + moves, by, False)
        if moves or needs_source:
            of_row = gather(row, d_source + moves, by, True)
    if needs_row:
        assert of_source is not None
        receivers["row"](of_source.narrow(-1, 0, row.shape[-1]))
    if needs_source:
        assert of_row is not None
        receivers["source"](of_row.narrow(-1, 0, source.shape[-1]))
    if moves:
        assert of_source is not None and of_row is not None
        found["positions"] = _by_position(row, of_source) + _by_position(source, of_row)
    if "cell" in wanted:
        found["cell"] = by_cell(directions)
    if "direction_cell" in wanted:
        for k in range(n_old):
            found[f"direction {k}"] = by_cell([*directions[:k], *directions[k + 1 :]])
    if "last" in receivers:
        receivers["last"](by_cell(directions[:-1]))
    for name in ("parameters", "row_parameters"):
        if name not in wanted:
            continue
        columns = []
        for m in range(inputs[name].shape[1]):
            parts = []
            if name == "parameters":
                # parameters of an atom as a neighbor: exchange the two atoms, so that it becomes the atom of the row
                parts.append(source * gather(row, d_source, _with(by, f"other{m}"), True))
            if name == "row_parameters" or not apart:
                parts.append(row * gather(source, d_row, _with(by, f"own{m}"), False))
            columns.append(torch.stack([part.sum((1, 2)) for part in parts]).sum(0))
        found[name] = torch.stack(columns, -1)
    if "global_parameters" in wanted:
        count_of = inputs["global_parameters"].shape[1]
        columns = [(row * gather(source, d_row, _with(by, f"shared{m}"), False)).sum((1, 2)) for m in range(count_of)]
        sums = system_sums(torch.stack(columns, -1), inputs["batch_idx"], inputs["n_systems"])
        found["global_parameters"] = sums.to(row.dtype)
    return found


def _arguments(inputs: dict[str, Any], directions: list[torch.Tensor], by: str, exchanged: bool) -> dict[str, Any]:
    """Arguments of the op other than moments, with these directions; ``exchanged`` swaps atom and neighbor."""
    names = ("outputs", "derivatives", "moments", "row_moments")
    changed = {name: value for name, value in inputs.items() if name not in names}
    changed["direction_cell"] = torch.stack(directions) if directions else None
    changed["by"] = by
    if exchanged:
        changed["by"] = _exchanged(by)
        if inputs["row_parameters"] is not None:
            changed["parameters"], changed["row_parameters"] = inputs["row_parameters"], inputs["parameters"]
    return changed


def _with(by: str, name: str) -> str:
    """The parameters of ``by`` and one more, sorted."""
    return ",".join(sorted([*filter(None, by.split(",")), name]))


def _exchanged(by: str) -> str:
    """The same parameters, named from the neighbor's side: "own" and "other" exchanged."""
    swapped = {"own": "other", "oth": "own"}
    names = []
    for name in filter(None, by.split(",")):
        number = name.lstrip("abcdefghijklmnopqrstuvwxyz")
        names.append(swapped[name[:3]] + number if name[:3] in swapped else name)
    return ",".join(sorted(names))


def _by_position(moments: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
    """Gradient (n_atoms, 3) of ``Σ moments * gathered`` with respect to positions; ``gathered`` has one more order."""
    if moments.shape[-1] == 1:
        return (moments * gathered[..., 1:4]).sum(1)
    higher = _by_axis(gathered, moments)
    return (moments.unsqueeze(-2) * higher).sum((1, 3))


def _by_axis(higher: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """The entries (..., 3, n_moments) of ``higher`` that have one more derivative with respect to x, y and z."""
    order, device = order_of(moments.shape[-1]), moments.device
    if is_eager(moments):
        found = higher.index_select(-1, _kept_places(order, device))
    elif layout(device.type).reads:
        found = higher.index_select(-1, _places(order, device))
    else:  # a compiled graph would copy the indices to the GPU in each call
        columns = higher.unbind(-1)
        found = torch.stack([columns[place] for axis in _RAISED[order] for place in axis], -1)
    # batched backward passes, `is_grads_batched`, have no rule for `unflatten`
    return found.view(*higher.shape[:-1], 3, moments.shape[-1])


def _places(order: int, device: torch.device) -> torch.Tensor:
    """Indices (3 n_moments,) of the moments with one more derivative with respect to x, y and z."""
    return torch.tensor(_RAISED[order], device=device).flatten()


@functools.cache
def _kept_places(order: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return _places(order, device)


def _raise(moments: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Moments, one order higher, of the derivative of the given moments along ``moved`` (n_atoms, 3)."""
    order = order_of(moments.shape[-1])
    columns: list[Any] = [None] * count(order + 1)
    for b, targets in enumerate(zip(*_RAISED[order])):
        for axis, target in enumerate(targets):
            part = moments[..., b] * moved[:, None, axis]
            columns[target] = part if columns[target] is None else columns[target] + part
    zero = torch.zeros_like(moments[..., 0])
    return torch.stack([zero if column is None else column for column in columns], -1)


def _lower(gradient: torch.Tensor, moments: torch.Tensor, moved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients with respect to the two arguments of `_raise`."""
    parts = _by_axis(gradient, moments)
    return (parts * moved[:, None, :, None]).sum(-2), (parts * moments.unsqueeze(-2)).sum((1, 3))


def _fold(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """The rule for ``vmap``: if only the moments are mapped, slices become channels; otherwise systems of one call."""
    given, mapped = given_by_name(pair_moments, in_dims, args)
    if given["outputs"] == GATHERED and given["sent"] is None and mapped.keys() == {"moments"}:
        moments = given["moments"].movedim(mapped["moments"], 1)
        found, *empty = pair_moments(**{**given, "moments": moments.flatten(1, 2).contiguous()})
        none = [result.new_empty(info.batch_size, 0) for result in empty]
        return (found.unflatten(1, moments.shape[1:3]), *none), (1, 0, 0)
    return fold_systems(lambda: pair_moments, OUTPUTS, info, in_dims, *args)


def _in_blocks(
    moments: torch.Tensor, row_moments: torch.Tensor | None, outputs: str, **others: Any
) -> tuple[torch.Tensor, ...]:
    """The op for many channels, a few at a time."""
    blocks = moments.split(MOST_CHANNELS, 1)
    rows = [None] * len(blocks) if row_moments is None else row_moments.split(MOST_CHANNELS, 1)
    found = []
    for block, row in zip(blocks, rows):
        row = None if row is None else row.contiguous()
        found.append(pair_moments(moments=block.contiguous(), row_moments=row, outputs=outputs, **others))
    gathered, *sums = zip(*found)
    if GATHERED in outputs:
        gathered = (torch.cat(gathered, 1),)
    return (gathered[0], *(torch.stack(parts).sum(0) for parts in sums))


# -- the op ---------------------------------------------------------------------------------------


@functools.cache
def _kernel(formula: str, by: str, outputs: str, source: int, derivatives: int, row: int, *others: Any) -> RowKernel:
    names = tuple(by.split(",")) if by else ()
    variant = core.Variant(Formula.read(formula), names, source, derivatives, row, outputs, *others)
    widths = core.width_of_sums(outputs)
    return RowKernel(core.moment_kernel(variant), core.inputs_of(variant), core.outputs_of(variant), widths)


def _of_atoms(*inputs: Any) -> Any:
    return (inputs[4].shape[0], inputs[4].shape[1], count(inputs[3]))


def _of_systems(*inputs: Any) -> Any:
    return (inputs[13], 3, 3)


_output = functools.partial(row_output, requested=2, real=4)
_SPECS = {
    GATHERED: _output("gathered", GATHERED, _of_atoms),
    CELL: _output("cell_gradients", CELL, _of_systems),
    VIRIAL: _output("virial", VIRIAL, _of_systems),
}
OUTPUTS = {letter: spec.name for letter, spec in _SPECS.items()}
"""Outputs of the op, in order, by letter."""


@warp_custom_op(
    "nvalchemiops::pair_moments",
    outputs=list(_SPECS.values()),
    grad_arrays=[
        *OUTPUTS.values(),
        *("moments", "row_moments", "positions", "cell", "parameters", "row_parameters", "global_parameters"),
        "direction_cell",
    ],
    backward=_pullback,
    vmap=_fold,
    trusted=True,
)
@with_fields
def pair_moments(
    formula: str,
    by: str,
    outputs: str,
    derivatives: int,
    moments: torch.Tensor,
    row_moments: torch.Tensor | None,
    positions: torch.Tensor,
    cell: torch.Tensor | None,
    parameters: torch.Tensor | None,
    row_parameters: torch.Tensor | None,
    global_parameters: torch.Tensor | None,
    direction_cell: torch.Tensor | None,
    batch_idx: torch.Tensor | None,
    n_systems: int,
    row_begin: torch.Tensor | None,
    neighbors: torch.Tensor,
    shifts: torch.Tensor | None,
    width: int,
    padding: int,
    first: torch.Tensor | None,
    excluded_begin: torch.Tensor | None,
    excluded: torch.Tensor | None,
    excluded_factors: torch.Tensor | None,
    cutoff: float,
    r_switch: float,
    ghosts: Ghosts = NO_GHOSTS,
) -> tuple[torch.Tensor, ...]:
    """Sums over neighbors of the derivatives of a radial function, contracted with moments.

    ``gathered[i, c, a] = Σ_j Σ_b moments[j, c, b] ∂_i^a ∂_j^b u``. For the sum ``B = Σ row_moments * gathered``, also
    its gradient with respect to the cell, and its virial ``W_ab = -Σ d_a ∂B/∂d_b`` at fixed moments, in which each pair
    counts in both directions. Results that are not requested are empty.

    Parameters
    ----------
    formula : str
        `Formula.text` of the radial function u: an expression without charges.
    by : str
        Parameters with respect to which u is differentiated first, sorted and separated by commas; see
        `nvalchemiops.interactions.pair.moments.Variant`.
    outputs : str
        Letters of the results: ``gathered`` (m), ``cell_gradients`` (c), ``virial`` (v, only without directions).
    derivatives : int
        Highest order of the derivatives with respect to the position of i.
    moments : (n_atoms, n_channels, n_moments) tensor
        Numbered by `nvalchemiops.kernels.moments.components`.
    row_moments : (n_atoms, n_channels, n_row_moments) tensor, optional
    positions : (n_atoms, 3) tensor
    cell : (n_systems, 3, 3) tensor, optional
        Lattice vectors in rows; given if ``shifts`` are given.
    parameters : (n_atoms, n_parameters) tensor, optional
        Parameters of each atom as a neighbor.
    row_parameters : (n_atoms, n_parameters) tensor, optional
        Parameters of each atom as the atom of a row, if they differ from ``parameters``.
    global_parameters : (n_systems, n_global) tensor, optional
    direction_cell : (n_directions, n_systems, 3, 3) tensor, optional
        Changes of the cell along which u is differentiated.
    batch_idx : (n_atoms,) int32 tensor, optional
    n_systems : int
    row_begin, neighbors, shifts, width, padding, first
        See `nvalchemiops.torch.neighbors.rows.Rows`.
    excluded_begin, excluded, excluded_factors
        Rows of the pairs whose nearest image is scaled by a factor: (n_atoms + 1,) int32, (n,) int32, (n,) float64.
    cutoff, r_switch : float
        Cutoff, and distance at which switching begins.
    system_of_all, sent, partners, send, receive, group : optional
        Given if ranks share the sum, as for `nvalchemiops.torch.interactions.pair.op.pair_sum`.
    """
    given = dict(locals())  # a copy, because a debugger may add entries to locals()
    n_atoms, n_channels, n_moments = moments.shape
    given |= given.pop("ghosts")._asdict()
    if n_channels > MOST_CHANNELS:
        return _in_blocks(**given)
    if ghosts.sent is not None:
        given = with_ghosts(given, ("positions", "moments", "parameters"))
    orders = (order_of(n_moments), derivatives, -1 if row_moments is None else order_of(row_moments.shape[-1]))
    n_directions = 0 if direction_cell is None else direction_cell.shape[0]
    flags = (shifts is not None, excluded is not None, row_parameters is not None)
    kernel = _kernel(formula, by, outputs, *orders, n_directions, n_channels, precision_of(positions), *flags)
    return kernel.results(given, OUTPUTS, {"gathered": (n_atoms, n_channels, count(derivatives))}, batch_idx)


def gather_moments(
    formula: Formula,
    system: PairSystem,
    moments: torch.Tensor,
    derivatives: int,
    parameters: torch.Tensor | None = None,
    row_parameters: torch.Tensor | None = None,
    global_parameters: torch.Tensor | None = None,
    *,
    virial: bool = False,
    cutoff: float | None = None,
    exclusions: ExclusionRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Derivatives (n_atoms, n_channels, count) of the potential of moments and, if requested, twice the virial.

    ``row_parameters`` are the parameters of the atoms at which the potential is taken, if they differ from
    ``parameters``. The other arguments are as for `sum_moments`.
    """
    positions, cell, batch_idx, n_systems, rows, domain = system
    cell = None if rows.shifts is None else cell  # nothing depends on it
    excluded = (None, None, None) if exclusions is None else exclusions[:3]
    of_atoms = (moments, moments if virial else None, positions, cell, parameters, row_parameters)
    distances = (NO_CUTOFF if cutoff is None else cutoff, 0.0)  # nothing is switched
    others = (global_parameters, None, batch_idx, n_systems, *rows, *excluded, *distances)
    outputs = GATHERED + VIRIAL * virial
    ghosts = ghosts_of(domain, batch_idx)
    found, _, by_strain = pair_moments(formula.text, "", outputs, derivatives, *of_atoms, *others, *ghosts)
    return found, by_strain


class MomentSums(NamedTuple):
    """Results of `sum_moments`; results that were not requested are None."""

    energies: torch.Tensor
    forces: torch.Tensor | None
    gradients: torch.Tensor | None
    virial: torch.Tensor | None


def sum_moments(
    formula: Formula,
    system: PairSystem,
    moments: torch.Tensor,
    parameters: torch.Tensor | None = None,
    global_parameters: torch.Tensor | None = None,
    *,
    forces: bool = False,
    gradients: bool = False,
    virial: bool = False,
    cutoff: float | None = None,
    exclusions: ExclusionRows | None = None,
) -> MomentSums:
    """Energies of moments, ``1/2 Σ_j Σ_ab m_i^a m_j^b ∂_i^a ∂_j^b u``, and first derivatives from the same launch.

    ``formula`` is the radial function u, without charges. Moments (n_atoms, n_channels, n_moments) are numbered by
    `nvalchemiops.kernels.moments.components`; channels do not interact. ``parameters`` (n_atoms, n) are those of atoms,
    such as widths, ``global_parameters`` are (n_systems, n).

    Energies are (n_atoms, n_channels), forces (n_atoms, 3), gradients are those with respect to the moments, and the
    virial (n_systems, 3, 3) is taken at fixed Cartesian moments. With a domain, results per system are only this rank's
    share. All are differentiable to any order in all tensors.
    """
    given = (moments, order_of(moments.shape[-1]) + forces, parameters, None, global_parameters)
    found, by_strain = gather_moments(formula, system, *given, virial=virial, cutoff=cutoff, exclusions=exclusions)
    potential = found[..., : moments.shape[-1]]
    return MomentSums(
        0.5 * (moments * potential).sum(-1),
        -_by_position(moments, found) if forces else None,
        potential if gradients else None,
        0.5 * by_strain if virial else None,
    )
