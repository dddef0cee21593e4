"""The op for the energies of all pair potentials and all their derivatives.

The op evaluates the family ``T_n`` of `nvalchemiops.interactions.pair.derivatives`, and its derivative is the same op,
one order higher. So it can be differentiated to any order; the kernel for each order is generated and compiled when it
is first needed.
"""

import functools
import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch

from nvalchemiops.arguments import ValuesError
from nvalchemiops.interactions.pair import sum as core
from nvalchemiops.interactions.pair.derivatives import CELL, GLOBALS, PARAMETERS, POSITIONS, VIRIAL, WEIGHTS, Request
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.loop import FAULTS, NO_ATOM, Array
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.layout import layout
from nvalchemiops.locks import Lent
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.declaration import with_fields
from nvalchemiops.torch.autograd.functorch import given_by_name
from nvalchemiops.torch.autograd.specs import precision_of, real_of
from nvalchemiops.torch.distributed.collectives import refuse_slices
from nvalchemiops.torch.interactions.pair.shares import NO_GHOSTS, Ghosts, with_ghosts
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.neighbors.rows import NO_PADDING, unused_slots
from nvalchemiops.torch.operators.segments import add_systems, spread_systems
from nvalchemiops.torch.runtime.recorder import current_recorder, read_fault

INPUTS = {
    POSITIONS: "positions",
    CELL: "cell",
    PARAMETERS: "parameters",
    GLOBALS: "global_parameters",
    WEIGHTS: "weights",
}
"""Names of the variables of the energy, by their letters in `nvalchemiops.interactions.pair.derivatives`."""

NO_DIRECTIONS = (None,) * len(INPUTS)
"""The arguments ``direction_*`` of the op for the energy itself and its gradient."""

Direction = dict[str, torch.Tensor]
"""A direction of differentiation: the change of each input, by letter. Inputs that are left out do not change."""

# -- kernels over rows ----------------------------------------------------------------------------


def row_output(name: str, letter: str, shape: Callable[..., Any], *, requested: int, real: int) -> OutputSpec:
    """An output with the dtype of argument number ``real``; empty unless argument ``requested`` contains ``letter``."""
    return OutputSpec(
        name,
        lambda *arguments: real_of(arguments[real]),
        lambda *arguments: shape(*arguments) if letter in arguments[requested] else (0,),
    )


def _no_fault() -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32, device="cpu")


_fault = Lent(_no_fault)
"""A tensor that holds zero, into which kernels on the CPU write the number of a fault."""


class RowKernel:
    """A kernel over rows of pairs, with the names of the arguments and results with which ops launch it.

    ``inputs`` and ``outputs`` are the arrays that the kernel reads and writes, ``widths`` the number of columns of each
    result among the sums over systems, by letter.
    """

    def __init__(self, kernel: Any, inputs: list[Array], outputs: list[Array], widths: dict[str, int]) -> None:
        self.kernel, self.widths = kernel, widths
        self.pick = operator.itemgetter(*(a.name for a in inputs), "width", "padding", "cutoff", "r_switch")
        self.written = [a.name for a in outputs]

    def results(
        self, given: dict[str, Any], names: Mapping[str, str], shapes: dict[str, tuple[int, ...]], batch_idx: Any
    ) -> tuple[torch.Tensor, ...]:
        """All outputs of an op; outputs that the kernel does not write are empty.

        Invalid indices that the kernel finds, and lists that are not sorted, raise an error on a CPU. On a GPU they
        give NaN, since reading the fault would synchronize with the device.

        ``given`` are the arguments of the op, with values of ghosts included, ``names`` those of its outputs, in order,
        by letter, and ``shapes`` those of outputs that have a row for each atom, by name.
        """
        positions, n_systems, n_rows = given["positions"], given["n_systems"], next(iter(shapes.values()))[0]
        memory = {name: positions.new_empty(shapes[name]) for name in self.written if name in shapes}
        if self.widths:
            size = (n_rows, sum(self.widths.values()))
            memory["sums"] = torch.empty(size, dtype=torch.float64, device=positions.device)
        fault, is_lent = None, current_recorder() is None
        if layout(positions.device.type).reads:
            fault = _fault.take() if is_lent else _no_fault()  # a plan keeps a separate one
        outputs = [fault if name == "fault" else memory[name] for name in self.written]
        launch(self.kernel, n_rows, self.pick(given), outputs, lanes=WARP)
        if fault is not None:
            if number := read_fault(fault):
                raise ValuesError(FAULTS[number])
            if is_lent:
                _fault.give(fault)
        if self.widths:
            parts = add_systems(memory["sums"], batch_idx, n_systems).split(list(self.widths.values()), dim=1)
            for letter, part in zip(self.widths, parts):
                # outputs must not share memory
                part = part.to(positions.dtype, copy=len(self.widths) > 1)
                memory[names[letter]] = part if letter == GLOBALS else part.reshape(n_systems, 3, 3)
        return tuple(memory[name] if name in memory else positions.new_empty(0) for name in names.values())


# -- outputs --------------------------------------------------------------------------------------


def _of_systems(*inputs: Any) -> Any:
    return (inputs[14], 3, 3)


_output = functools.partial(row_output, requested=1, real=3)
_SPECS = {
    WEIGHTS: _output("energies", WEIGHTS, lambda *inputs: (inputs[3].shape[0],)),
    POSITIONS: _output("position_gradients", POSITIONS, lambda *inputs: inputs[3].shape),
    CELL: _output("cell_gradients", CELL, _of_systems),
    PARAMETERS: _output("parameter_gradients", PARAMETERS, lambda *inputs: inputs[5].shape),
    GLOBALS: _output("global_gradients", GLOBALS, lambda *inputs: inputs[6].shape),
    VIRIAL: _output("virial", VIRIAL, _of_systems),
}
OUTPUTS = {letter: spec.name for letter, spec in _SPECS.items()}
"""Names of the outputs of the op, in order, by letter."""


@functools.cache
def _kernel(
    formula: str, directions: str, outputs: str, precision: str, periodic: bool, n_species: int, *flags: bool
) -> RowKernel:
    parts = tuple(directions.split("|")) if directions else ()
    request = Request(Formula.read(formula), parts, outputs, *flags)
    variant = core.Variant(request, precision, periodic, n_species)
    widths = core.width_of_sums(outputs, len(request.formula.global_parameters))
    return RowKernel(core.pair_kernel(variant), core.inputs_of(variant), core.outputs_of(variant), widths)


# -- the derivative -------------------------------------------------------------------------------


def _pullback(
    inputs: dict[str, Any], gradients: dict[str, torch.Tensor | None], wanted: frozenset[str]
) -> dict[str, torch.Tensor]:
    outputs, directions = inputs["outputs"], inputs["directions"]
    positions, cell, batch_idx = inputs["positions"], inputs["cell"], inputs["batch_idx"]
    values = {letter: inputs[name] for letter, name in INPUTS.items()}
    stacked = {letter: inputs[f"direction_{name}"] for letter, name in INPUTS.items()}
    incoming = {letter: gradients[name] for letter, name in OUTPUTS.items() if letter in outputs}
    old = _unstack(directions, stacked)
    grad_virial = incoming.pop(VIRIAL, None)
    new = {letter: g for letter, g in incoming.items() if g is not None}
    found: dict[str, torch.Tensor] = {}

    def evaluate(along: Sequence[Direction], letters: str) -> dict[str, torch.Tensor]:
        return _evaluate(inputs, letters, values, along)

    def add(letter: str, gradient: torch.Tensor) -> None:
        name = INPUTS[letter]
        found[name] = found[name] + gradient if name in found else gradient

    if grad_virial is not None:
        # for its derivatives, the virial is a function of other outputs: -Σ x_i (dE/dx_i)^T - h^T dE/dh
        change = -0.5 * (grad_virial + grad_virial.mT)
        per_atom = spread_systems(change, batch_idx, positions.shape[0])
        moved = {POSITIONS: (positions.unsqueeze(-1) * per_atom).sum(-2)}
        if cell is not None:
            moved[CELL] = product(cell, change)
        direct = [letter for letter in moved if INPUTS[letter] in wanted]
        derivatives = evaluate(old, "".join(direct)) if direct else {}
        if POSITIONS in direct:
            add(POSITIONS, (per_atom * derivatives[POSITIONS].unsqueeze(-2)).sum(-1))
        if CELL in direct:
            add(CELL, product(derivatives[CELL], change))
        for letter, part in moved.items():
            new[letter] = new[letter] + part if letter in new else part
    if not new:
        return found

    letters = "".join(letter for letter, name in INPUTS.items() if name in wanted and values[letter] is not None)
    if letters:
        for letter, gradient in evaluate([*old, new], letters).items():
            add(letter, gradient)

    # derivative with respect to a direction: the incoming direction replaces it
    parts: dict[str, list[torch.Tensor]] = {}
    for k, direction in enumerate(old):
        letters = "".join(letter for letter in direction if f"direction_{INPUTS[letter]}" in wanted)
        if letters:
            derivatives = evaluate([*old[:k], *old[k + 1 :], new], letters)
            for letter in letters:
                vanishing = letter not in derivatives
                parts.setdefault(letter, []).append(
                    torch.zeros_like(direction[letter]) if vanishing else derivatives[letter]
                )
    for letter, slices in parts.items():
        found[f"direction_{INPUTS[letter]}"] = torch.stack(slices)
    return found


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Product of small matrices, written so that autocast does not change its dtype."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2)


def _unstack(directions: str, stacked: dict[str, torch.Tensor | None]) -> list[Direction]:
    taken = dict.fromkeys(INPUTS, 0)
    found = []
    for letters in directions.split("|") if directions else ():
        direction = {}
        for letter in letters:
            source = stacked[letter]
            assert source is not None
            direction[letter] = source[taken[letter]]
            taken[letter] += 1
        found.append(direction)
    return found


def _evaluate(
    inputs: dict[str, Any],
    outputs: str,
    values: dict[str, torch.Tensor | None],
    directions: Sequence[Direction],
) -> dict[str, torch.Tensor]:
    """The outputs with these letters for the derivative in ``directions``; outputs that vanish are left out."""
    for k, direction in enumerate(directions):
        if set(direction) == {WEIGHTS}:
            # The energy is linear in the weights: this direction replaces them, and the result no longer depends on
            # the weights, nor on their change in other directions.
            values = values | {WEIGHTS: direction[WEIGHTS]}
            others = [*directions[:k], *directions[k + 1 :]]
            directions = [{letter: v for letter, v in d.items() if letter != WEIGHTS} for d in others]
            outputs = outputs.replace(WEIGHTS, "")
            break
    if not outputs:
        return {}
    changed = {INPUTS[letter]: value for letter, value in values.items()}
    for letter, name in INPUTS.items():
        parts = [d[letter] for d in directions if letter in d]
        changed[f"direction_{name}"] = torch.stack(parts) if parts else None
    text = "|".join("".join(letter for letter in INPUTS if letter in d) for d in directions)
    found = pair_sum(**{**inputs, **changed, "outputs": outputs, "directions": text})
    return {letter: result for letter, result in zip(OUTPUTS, found) if letter in outputs}


# -- vmap -----------------------------------------------------------------------------------------

FOLDED_SLOTS = 2**22
"""Largest number of neighbor entries in one call under ``vmap``: the list is repeated for each slice."""

ABSENT = -2
"""Padding of the repeated lists under ``vmap``; an index out of range becomes -1."""

_OF_NEIGHBORS = [f"{kind}{name}" for kind in ("", "direction_") for name in ("positions", "parameters", "weights")]
_NUMBERS = ("batch_idx", "row_begin", "neighbors", "first", "excluded_begin", "excluded")
"""Arguments that hold indices of atoms, systems or entries."""


def fold_systems(
    op: Callable[[], Any], letters: Iterable[str], info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """The rule for ``vmap`` of an op whose outputs have these letters: slices become systems of one call."""
    given, mapped = given_by_name(op(), in_dims, args)
    if given.get("sent") is not None:
        refuse_slices()
    for name, dim in mapped.items():
        given[name] = given[name].movedim(dim, 0)
    chunk = max(1, FOLDED_SLOTS // max(given["neighbors"].shape[-1], 1))
    parts = []
    for start in range(0, info.batch_size, chunk):
        count = min(chunk, info.batch_size - start)
        slices = {name: v[start : start + count] if name in mapped else v for name, v in given.items()}
        found = op()(**_repeated_systems(slices, mapped, count))
        parts.append(
            [
                result.unflatten(0, (count, -1)) if letter in given["outputs"] else result.new_empty(count, 0)
                for letter, result in zip(letters, found)
            ]
        )
    results = tuple(torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in zip(*parts))
    return results, (0,) * len(results)


def _repeated_systems(given: dict[str, Any], mapped: Container[str], count: int) -> dict[str, Any]:
    """Arguments of one call with ``count`` slices as systems; the arguments in ``mapped`` differ between slices."""
    n_atoms = given["positions"].shape["positions" in mapped]
    n_systems = given["n_systems"]

    def repeated(name: str, value: torch.Tensor) -> torch.Tensor:
        """All slices of an argument, one after the other, behind the axis of directions if there is one."""
        axis = int(name.startswith("direction_"))
        if name not in mapped:
            value = value.unsqueeze(0).expand(count, *value.shape)
        return value.movedim(0, axis).flatten(axis, axis + 1)

    def numbered(name: str, step: int) -> torch.Tensor | None:
        """The indices of an argument for all slices, increased by ``step`` from each slice to the next."""
        value = given[name]
        if value is None:
            return None
        steps = step * torch.arange(count, dtype=value.dtype, device=value.device)
        return value + steps.unsqueeze(1)  # of one value for all slices, too

    others = {name: v for name, v in given.items() if isinstance(v, torch.Tensor) and name not in _NUMBERS}
    folded = {**given, **{name: repeated(name, value) for name, value in others.items()}}
    folded["n_systems"] = count * n_systems
    if given["batch_idx"] is None:
        atoms = torch.arange(count, dtype=torch.int32, device=given["neighbors"].device)
        folded["batch_idx"] = atoms.repeat_interleave(n_atoms)
    else:
        folded["batch_idx"] = numbered("batch_idx", n_systems).flatten()  # type: ignore[union-attr]
    neighbors = numbered("neighbors", n_atoms)
    assert neighbors is not None
    # an index out of range must not become a valid index in another slice
    original = given["neighbors"]
    absent = (original == given["padding"]) & (given["padding"] > NO_PADDING)
    unused = unused_slots(given["row_begin"], original if given["first"] is None else given["first"])
    absent = absent if unused is None else absent | unused  # they belong to the row of the last atom of their slice
    neighbors = torch.where((original < 0) | (original >= n_atoms), -1, neighbors)
    folded["neighbors"] = torch.where(absent, ABSENT, neighbors).flatten()
    folded["padding"] = ABSENT
    for name in ("first", "excluded"):
        numbers = numbered(name, n_atoms)
        if name == "first" and numbers is not None and unused is not None:
            ends = n_atoms * torch.arange(1, count + 1, dtype=numbers.dtype, device=numbers.device)
            numbers = torch.where(unused, ends.unsqueeze(1) - 1, numbers)
        elif name == "excluded" and numbers is not None:  # `NO_ATOM` stays
            numbers = torch.where(given[name] == NO_ATOM, given[name], numbers)
        folded[name] = None if numbers is None else numbers.flatten()
    for name, entries in (("row_begin", "neighbors"), ("excluded_begin", "excluded")):
        if given[name] is not None:
            n_entries = given[entries].shape[-1]
            pointers = numbered(name, n_entries)
            assert pointers is not None
            end = pointers[-1, -1:]
            if entries == "neighbors" and unused is not None:
                end = torch.where(unused[-1, -1:], count * n_entries, end)
            folded[name] = torch.cat([pointers[:, :-1].flatten(), end])
    return folded


# -- the op ---------------------------------------------------------------------------------------


@warp_custom_op(
    "nvalchemiops::pair_sum",
    outputs=list(_SPECS.values()),
    grad_arrays=[*OUTPUTS.values(), *INPUTS.values(), *(f"direction_{name}" for name in INPUTS.values())],
    backward=_pullback,
    vmap=functools.partial(fold_systems, lambda: pair_sum, OUTPUTS),
    trusted=True,
)
@with_fields
def pair_sum(
    formula: str,
    outputs: str,
    directions: str,
    positions: torch.Tensor,
    cell: torch.Tensor | None,
    parameters: torch.Tensor | None,
    global_parameters: torch.Tensor | None,
    weights: torch.Tensor | None,
    direction_positions: torch.Tensor | None,
    direction_cell: torch.Tensor | None,
    direction_parameters: torch.Tensor | None,
    direction_global_parameters: torch.Tensor | None,
    direction_weights: torch.Tensor | None,
    batch_idx: torch.Tensor | None,
    n_systems: int,
    row_begin: torch.Tensor | None,
    neighbors: torch.Tensor,
    shifts: torch.Tensor | None,
    width: int,
    padding: int,
    first: torch.Tensor | None,
    species: torch.Tensor | None,
    n_species: int,
    excluded_begin: torch.Tensor | None,
    excluded: torch.Tensor | None,
    excluded_factors: torch.Tensor | None,
    cutoff: float,
    r_switch: float,
    ghosts: Ghosts = NO_GHOSTS,
) -> tuple[torch.Tensor, ...]:
    """Gradient of the n-fold directional derivative of the weighted energy; results that are not requested are empty.

    Parameters
    ----------
    formula : str
        `Formula.text` of the potential.
    outputs : str
        Letters of the requested gradients: with respect to positions (r), cell (c), parameters (p), global parameters
        (g) and weights (w, the energies of atoms); and of the virial (v, only without directions).
    directions : str
        For each direction, the letters of the inputs that it changes; directions are separated by ``|``.
    positions : (n_atoms, 3) tensor
    cell : (n_systems, 3, 3) tensor, optional
        Lattice vectors in rows; given if ``shifts`` are given.
    parameters : (n_atoms, n_parameters) tensor, optional
        Columns are the parameters of the atom, then for each table its row for the species of the atom.
    global_parameters : (n_systems, n_global) tensor, optional
    weights : (n_atoms,) tensor, optional
        Weights of the energies in the sum; one by default.
    direction_* : tensor, optional
        Changes of the input of that name, with a leading axis over the directions that have its letter.
    batch_idx : (n_atoms,) int32 tensor, optional
    n_systems : int
    row_begin, neighbors, shifts, width, padding, first
        See `nvalchemiops.torch.neighbors.rows.Rows`.
    species : (n_atoms,) int32 tensor, optional
    n_species : int
    excluded_begin, excluded, excluded_factors
        Rows of the pairs whose nearest image is scaled by a factor: (n_atoms + 1,) int32, (n,) int32, (n,) float64.
    cutoff, r_switch : float
        Cutoff, and distance at which switching begins.
    system_of_all, sent, partners, send, receive, group : optional
        Given if ranks share the sum; see `nvalchemiops.torch.interactions.pair.shares.Ghosts`. Then arguments and
        results per atom are those of the atoms that this rank owns, except that neighbors and excluded atoms are
        indices among owned atoms and ghosts, and ``species`` has entries for both. Rows after those of owned atoms are
        not read. Results per system, and gradients with respect to inputs that are the same on all ranks, are only
        this rank's share.
    """
    given = dict(locals())  # a copy, because a debugger may add entries to locals()
    if ghosts.sent is not None:
        given = with_ghosts(given | ghosts._asdict(), _OF_NEIGHBORS)
    flags = (shifts is not None, n_species, weights is not None, excluded is not None)
    n_rows, n_parameters = positions.shape[0], 0 if parameters is None else parameters.shape[1]
    shapes = {"energies": (n_rows,), "position_gradients": (n_rows, 3), "parameter_gradients": (n_rows, n_parameters)}
    kernel = _kernel(formula, directions, outputs, precision_of(positions), *flags)
    return kernel.results(given, OUTPUTS, shapes, batch_idx)
