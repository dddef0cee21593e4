"""One op for the energies of all pair potentials and all their derivatives.

It evaluates the family ``T_n`` of `nvalchemiops.interactions.pair.derivatives`, and its derivative is itself, one
order higher. So it can be differentiated to any order; the kernel of each order is printed
and compiled when it is first needed.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvalchemiops.arguments import ValuesError
from nvalchemiops.interactions.pair import sum as core
from nvalchemiops.interactions.pair.derivatives import CELL, GLOBALS, PARAMETERS, POSITIONS, VIRIAL, WEIGHTS, Request
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.loop import FAULTS
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.layout import layout
from nvalchemiops.locks import Lent
from nvalchemiops.torch.autograd import OutputSpec, warp_custom_op
from nvalchemiops.torch.autograd.specs import precision_of, real_of
from nvalchemiops.torch.distributed.collectives import refuse_slices
from nvalchemiops.torch.interactions.pair.shares import with_ghosts
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.neighbors.rows import NO_PADDING
from nvalchemiops.torch.operators.segments import add_systems, spread_systems
from nvalchemiops.torch.runtime.recorder import current_recorder, read_fault

INPUTS = {
    POSITIONS: "positions",
    CELL: "cell",
    PARAMETERS: "parameters",
    GLOBALS: "global_parameters",
    WEIGHTS: "weights",
}
"""Arguments of the energy, by the letters of `nvalchemiops.interactions.pair.derivatives`."""

NO_DIRECTIONS = (None,) * len(INPUTS)
"""Arguments of the op for the energy itself and its gradient."""

Direction = dict[str, torch.Tensor]
"""A change of the inputs, by letter; inputs that are left out do not change."""

# -- outputs --------------------------------------------------------------------------------------


def _spec(name: str, letter: str, shape: Callable[..., tuple[Any, ...]]) -> OutputSpec:
    """An output of the dtype of the positions; without elements where it is not requested."""
    return OutputSpec(
        name,
        lambda *arguments: real_of(arguments[3]),
        lambda *arguments: shape(*arguments[3:]) if letter in arguments[1] else (0,),
    )


def _of_atoms(positions: Any, *_: Any) -> Any:
    return (positions.shape[0],)


def _of_systems(*inputs: Any) -> Any:
    return (inputs[11], 3, 3)


_SPECS = {
    WEIGHTS: _spec("energies", WEIGHTS, _of_atoms),
    POSITIONS: _spec("position_gradients", POSITIONS, lambda *inputs: inputs[0].shape),
    CELL: _spec("cell_gradients", CELL, _of_systems),
    PARAMETERS: _spec("parameter_gradients", PARAMETERS, lambda *inputs: inputs[2].shape),
    GLOBALS: _spec("global_gradients", GLOBALS, lambda *inputs: inputs[3].shape),
    VIRIAL: _spec("virial", VIRIAL, _of_systems),
}
OUTPUTS = {letter: spec.name for letter, spec in _SPECS.items()}
"""Outputs of the op, in order, by letter."""


@functools.cache
def _kernel(
    formula: str, directions: str, outputs: str, precision: str, periodic: bool, n_species: int, *flags: bool
) -> tuple[Any, Callable[[dict[str, Any]], tuple[Any, ...]], list[str], dict[str, int]]:
    """The kernel, a function that picks its inputs by name, names of its outputs, and columns of its sums."""
    parts = tuple(directions.split("|")) if directions else ()
    request = Request(Formula.read(formula), parts, outputs, *flags)
    variant = core.Variant(request, precision, periodic, n_species)
    pick = operator.itemgetter(*(a.name for a in core.inputs_of(variant)))
    widths = core.width_of_sums(outputs, len(request.formula.global_parameters))
    return core.pair_kernel(variant), pick, [a.name for a in core.outputs_of(variant)], widths


def _no_fault() -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int32, device="cpu")


_fault = Lent(_no_fault)
"""A zero, into which kernels on the CPU write the number of a fault."""


def launch_rows(
    kernel: Any,
    n_rows: int,
    inputs: Sequence[Any],
    written: Sequence[str],
    memory: dict[str, torch.Tensor],
    device: Any,
) -> None:
    """Launch a kernel over rows of pairs, and raise for what it finds wrong on a CPU.

    Elsewhere results are NaN then, since reading a fault would wait for a GPU.

    Parameters
    ----------
    written : sequence of str
        Names of the outputs: those of ``memory``, and the fault.
    """
    fault, is_lent = None, current_recorder() is None
    if layout(device.type).reads:
        fault = _fault.take() if is_lent else _no_fault()  # a plan has its own
    outputs = [fault if name == "fault" else memory[name] for name in written]
    launch(kernel, n_rows, inputs, outputs, lanes=WARP)
    if fault is None:
        return
    if number := read_fault(fault):
        raise ValuesError(FAULTS[number])
    if is_lent:
        _fault.give(fault)


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
        # the virial is -Σ x_i (dE/dx_i)^T - h^T dE/dh, a function of other outputs as far as derivatives go
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

    # derivatives by a direction: the incoming direction takes its place
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
    """Products of small matrices, which autocast leaves alone."""
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
    """The outputs with these letters for the derivative in ``directions``; one that vanishes is left out."""
    if inputs["shifts"] is None:  # then nothing depends on the cell
        directions = [{letter: v for letter, v in d.items() if letter != CELL} for d in directions]
        if not all(directions):
            return {}
    for k, direction in enumerate(directions):
        if set(direction) == {WEIGHTS}:
            # The energy is linear in the weights: this direction takes their place, and nothing depends on them, or
            # on how other directions change them, any more.
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


# -- many at once ---------------------------------------------------------------------------------

FOLDED_SLOTS = 2**22
"""Neighbors that a mapped call lists at once, at most: the lists are repeated for each slice."""

ABSENT = -2
"""Padding of the lists of mapped calls; a number out of range becomes -1."""

_OF_NEIGHBORS = [f"{kind}{name}" for kind in ("", "direction_") for name in ("positions", "parameters", "weights")]
_BY_ATOM = ("positions", "parameters", "weights", "batch_idx", "species")
_BY_SYSTEM = ("cell", "global_parameters")


def _fold(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """The rule for ``vmap``: slices become systems of one call."""
    names = [p.name for p in pair_sum.op.parameters]  # type: ignore[attr-defined]
    given = dict(zip(names, args))
    if given["sent"] is not None:
        refuse_slices()
    return fold_systems(info, given, dict(zip(names, in_dims)), _folded)


def fold_systems(
    info: Any,
    given: dict[str, Any],
    dims: dict[str, int | None],
    evaluate: Callable[[dict[str, Any], set[str], int], list[torch.Tensor]],
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """The same for arguments and mapped dimensions by name, and a function for some of the slices."""
    for name, dim in dims.items():
        if isinstance(dim, int):
            if name != "shifts" and not given[name].is_floating_point():
                raise NotImplementedError(f"vmap over `{name}`: map positions, cells and parameters over one list")
            given[name] = given[name].movedim(dim, 0)
    mapped = {name for name, dim in dims.items() if isinstance(dim, int)}
    chunk = max(1, FOLDED_SLOTS // max(given["neighbors"].shape[0], 1))
    parts = []
    for start in range(0, info.batch_size, chunk):
        count = min(chunk, info.batch_size - start)
        slices = {name: v[start : start + count] if name in mapped else v for name, v in given.items()}
        parts.append(evaluate(slices, mapped, count))
    results = tuple(torch.cat(tensors) if len(tensors) > 1 else tensors[0] for tensors in zip(*parts))
    return results, (0,) * len(results)


def _folded(given: dict[str, Any], mapped: set[str], count: int) -> list[torch.Tensor]:
    """Results with a leading dimension for ``count`` slices, of which ``mapped`` are given."""
    directions = [f"direction_{name}" for name in INPUTS.values()]
    found = pair_sum(**repeated_systems(given, mapped, count, (*_BY_ATOM, *_BY_SYSTEM), directions))
    return unfolded(found, [letter in given["outputs"] for letter in OUTPUTS], count)


def unfolded(found: Sequence[torch.Tensor], requested: Sequence[bool], count: int) -> list[torch.Tensor]:
    """Results of ``count`` slices in one, taken apart."""
    return [
        result.unflatten(0, (count, -1)) if there else result.new_empty(count, 0)
        for result, there in zip(found, requested)
    ]


def repeated_systems(
    given: dict[str, Any], mapped: set[str], count: int, names: Sequence[str], directions: Sequence[str]
) -> dict[str, Any]:
    """Arguments for ``count`` slices as systems of one call; ``names`` are of atoms or systems, as are directions."""
    n_atoms = given["positions"].shape["positions" in mapped]
    n_systems = given["n_systems"]

    def repeated(name: str, axis: int = 0) -> torch.Tensor | None:
        """All slices of an argument, one after the other along ``axis``."""
        value = given[name]
        if value is None:
            return None
        if name not in mapped:
            value = value.unsqueeze(0).expand(count, *value.shape)
        return value.movedim(0, axis).flatten(axis, axis + 1)

    def numbered(name: str, step: int) -> torch.Tensor | None:
        """The integers of an argument for all slices, other numbers for each slice."""
        value = given[name]
        if value is None:
            return None
        steps = step * torch.arange(count, dtype=value.dtype, device=value.device)
        return value.unsqueeze(0) + steps.unsqueeze(1)

    folded = dict(given)
    folded |= {name: repeated(name) for name in (*names, "neighbors", "shifts", "excluded_factors")}
    folded |= {name: repeated(name, 1) for name in directions}
    folded["n_systems"] = count * n_systems
    if given["batch_idx"] is None:
        atoms = torch.arange(count, dtype=torch.int32, device=given["neighbors"].device)
        folded["batch_idx"] = atoms.repeat_interleave(n_atoms)
    else:
        folded["batch_idx"] = numbered("batch_idx", n_systems).flatten()  # type: ignore[union-attr]
    neighbors = numbered("neighbors", n_atoms)
    assert neighbors is not None
    # an index that is no atom must not become one of another slice
    original = given["neighbors"]
    absent = (original == given["padding"]) & (given["padding"] > NO_PADDING)
    neighbors = torch.where((original < 0) | (original >= n_atoms), -1, neighbors)
    folded["neighbors"] = torch.where(absent, ABSENT, neighbors).flatten()
    folded["padding"] = ABSENT
    for name in ("first", "excluded"):
        numbers = numbered(name, n_atoms)
        folded[name] = None if numbers is None else numbers.flatten()
    for name, entries in (("row_begin", "neighbors"), ("excluded_begin", "excluded")):
        if given[name] is not None:
            pointers = numbered(name, given[entries].shape[0])
            assert pointers is not None
            folded[name] = torch.cat([pointers[:, :-1].flatten(), pointers[-1, -1:]])
    return folded


# -- the op ---------------------------------------------------------------------------------------


@warp_custom_op(
    "nvalchemiops::pair_sum",
    outputs=list(_SPECS.values()),
    grad_arrays=[*OUTPUTS.values(), *INPUTS.values(), *(f"direction_{name}" for name in INPUTS.values())],
    backward=_pullback,
    vmap=_fold,
    trusted=True,
)
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
    system_of_all: torch.Tensor | None = None,
    sent: torch.Tensor | None = None,
    send: Sequence[int] = (),
    receive: Sequence[int] = (),
    group: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Gradient of the n-fold directional derivative of the weighted energy; parts that are not requested are empty.

    Parameters
    ----------
    formula : str
        `Formula.text` of the potential.
    outputs : str
        Letters of the requested gradients: by positions (r), cell (c), parameters (p), global parameters (g) and
        weights (w, the energies), and the virial (v, without directions only).
    directions : str
        For each direction the letters of what it changes, separated by ``|``.
    positions : (n_atoms, 3) tensor
    cell : (n_systems, 3, 3) tensor, optional
        Goes with ``shifts``.
    parameters : (n_atoms, n_parameters) tensor, optional
        Columns are the parameters of the atom, then for each table its row for the species of the atom.
    global_parameters : (n_systems, n_global) tensor, optional
    weights : (n_atoms,) tensor, optional
        Of the energies in the sum; one by default.
    direction_* : tensor, optional
        Like the input, with a leading dimension for the directions that have its letter.
    batch_idx : (n_atoms,) int32 tensor, optional
    n_systems : int
    row_begin, neighbors, shifts, width, padding, first
        See `nvalchemiops.torch.neighbors.rows.Rows`.
    species : (n_atoms,) int32 tensor, optional
    n_species : int
    excluded_begin, excluded, excluded_factors
        Rows of pairs whose nearest image has a factor: (n_atoms + 1,) int32, (n,) int32, (n,) float64.
    cutoff, r_switch : float
        Distances.
    system_of_all, sent, send, receive, group : optional
        Where ranks share the sum, as of `nvalchemiops.torch.interactions.pair.shares.with_ghosts`. Then all that is
        given of atoms, and all results, are those of the atoms that this rank owns; but neighbors, excluded atoms and
        ``species`` are among owned atoms and ghosts. Rows after those of owned atoms are not read. Gradients by what
        is the same on all ranks, and results of systems, are shares.
    """
    given = dict(locals())  # a copy, to which debuggers add nothing
    if sent is not None:
        given = with_ghosts(given, _OF_NEIGHBORS)
    flags = (shifts is not None, n_species, weights is not None, excluded is not None)
    kernel, pick, written, columns = _kernel(formula, directions, outputs, precision_of(positions), *flags)
    n_rows, device = positions.shape[0], positions.device
    memory: dict[str, torch.Tensor] = {}
    if WEIGHTS in outputs:
        memory["energies"] = positions.new_empty(n_rows)
    if POSITIONS in outputs:
        memory["position_gradients"] = positions.new_empty((n_rows, 3))
    if PARAMETERS in outputs:
        assert parameters is not None
        memory["parameter_gradients"] = positions.new_empty((n_rows, parameters.shape[1]))
    if columns:
        memory["sums"] = torch.empty((n_rows, sum(columns.values())), dtype=torch.float64, device=device)
    launch_rows(kernel, n_rows, [*pick(given), width, padding, cutoff, r_switch], written, memory, device)
    if columns:
        parts = add_systems(memory["sums"], batch_idx, n_systems).split(list(columns.values()), dim=1)
        for letter, part in zip(columns, parts):
            # outputs must not share memory
            part = part.to(positions.dtype, copy=len(columns) > 1)
            memory[OUTPUTS[letter]] = part if letter == GLOBALS else part.reshape(n_systems, 3, 3)
    return tuple(memory[name] if name in memory else positions.new_empty(0) for name in OUTPUTS.values())
