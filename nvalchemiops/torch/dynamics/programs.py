"""Flows in one launch: sequences of flows become programs of `nvalchemiops.kernels.programs`.

The flows are called once with a state of `Symbol` in place of tensors, which writes down what they compute. So the
physics is written once, in torch, whose derivatives are those of a step. A program runs where nobody watches single
operations: eager mode in float64 on a CPU, without gradients. Elsewhere the flows are called.
"""

import functools
import itertools
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.kernels.programs import (
    ATOM_REGISTERS,
    CODES,
    FIRST_ARRAY,
    OPERATIONS,
    SYSTEM_REGISTERS,
    program_kernel,
)
from nvalchemiops.launch import prepared
from nvalchemiops.layout import layout
from nvalchemiops.torch.autograd.arrays import warp_device
from nvalchemiops.torch.dynamics.flows import PROGRAMMED, Flow
from nvalchemiops.torch.dynamics.state import OF_ATOMS, State
from nvalchemiops.torch.operators.chains import chain_steps
from nvalchemiops.torch.operators.segments import sorted_by_system
from nvalchemiops.torch.runtime.context import is_eager
from nvalchemiops.torch.runtime.recorder import current_recorder

SYSTEM, ATOM = "system", "atom"

_CPU = torch.device("cpu")


class NoProgram(Exception):
    """The reason why flows cannot be a program."""


class Node(NamedTuple):
    """A number that a program computes for each system or each atom: an operation, and what it is applied to."""

    operation: str
    level: str
    arguments: tuple[Any, ...]


class Trace:
    """The numbers that are computed, each of them once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.numbers: dict[Node, int] = {}
        self.inputs: list[tuple[Callable[[State], torch.Tensor], str, tuple[int, ...]]] = []

    def add(self, operation: str, level: str, *arguments: Any) -> int:
        """The number of a node."""
        node = Node(operation, level, arguments)
        if node not in self.numbers:
            self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[node]

    def input(self, fetch: Callable[[State], torch.Tensor], level: str, tail: tuple[int, ...]) -> "Symbol":
        """A tensor (rows, *tail) of the state."""
        self.inputs.append((fetch, level, tail))
        size = math.prod(tail)
        return Symbol(self, level, tail, [self.add("load", level, len(self.inputs) - 1, k, size) for k in range(size)])


class Symbol:
    """Stands for a float64 tensor (rows, *tail), a row for each system or each atom; `ids` are its nodes in a row."""

    dtype, device = torch.float64, _CPU

    def __init__(self, trace: Trace, level: str, tail: Sequence[int], ids: Iterable[int]) -> None:
        self.trace, self.level, self.tail, self.ids = trace, level, tuple(tail), list(ids)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Functions of torch, and operators whose first argument is a tensor."""
        name = function.__name__.strip("_")
        first = next((a for a in arguments if isinstance(a, Symbol)), None)
        if name in _STRUCTURAL:
            return _STRUCTURAL[name](*arguments, **(options or {}))
        if first is None or name not in OPERATIONS:
            raise NoProgram(f"{function.__name__} of torch")
        return first._apply(name, *arguments)

    # -- element by element ------------------------------------------------------------------------

    def _apply(self, operation: str, *arguments: Any) -> "Symbol":
        levels = {argument.level for argument in arguments if isinstance(argument, Symbol)}
        if len(levels) != 1:
            raise NoProgram("numbers of systems and of atoms in one operation")
        grids = np.broadcast_arrays(*map(self._grid, arguments))
        ids = [self.trace.add(operation, self.level, *elements) for elements in zip(*(g.ravel() for g in grids))]
        return Symbol(self.trace, self.level, grids[0].shape, map(int, ids))

    def _grid(self, argument: Any) -> np.ndarray:
        """Nodes of an argument, without the axis of rows."""
        if isinstance(argument, Symbol):
            if argument.trace is not self.trace:
                raise NoProgram("numbers of another program")
            return np.array(argument.ids).reshape(argument.tail)
        values = np.asarray(argument, dtype=np.float64)
        if values.ndim > 2:
            raise NoProgram("a constant of systems or atoms")
        ids = [self.trace.add("number", self.level, float(value)) for value in values.ravel()]
        return np.array(ids, dtype=np.int64).reshape(values.shape)

    def __add__(self, other: Any) -> "Symbol":
        return self._apply("add", self, other)

    def __radd__(self, other: Any) -> "Symbol":
        return self._apply("add", other, self)

    def __sub__(self, other: Any) -> "Symbol":
        return self._apply("sub", self, other)

    def __rsub__(self, other: Any) -> "Symbol":
        return self._apply("sub", other, self)

    def __mul__(self, other: Any) -> "Symbol":
        return self._apply("mul", self, other)

    def __rmul__(self, other: Any) -> "Symbol":
        return self._apply("mul", other, self)

    def __truediv__(self, other: Any) -> "Symbol":
        return self._apply("div", self, other)

    def __rtruediv__(self, other: Any) -> "Symbol":
        return self._apply("div", other, self)

    def __neg__(self) -> "Symbol":
        return self._apply("neg", self)

    def __gt__(self, other: Any) -> "Symbol":
        return self._apply("less", other, self)

    def __lt__(self, other: Any) -> "Symbol":
        return self._apply("less", self, other)

    def __pow__(self, power: int) -> "Symbol":
        if power not in (2, -2):
            raise NoProgram(f"the power {power}")
        square = self * self
        return square if power > 0 else 1.0 / square

    def __bool__(self) -> bool:
        raise NoProgram("a decision that depends on values")

    def sqrt(self) -> "Symbol":
        """Square roots."""
        return self._apply("sqrt", self)

    def abs(self) -> "Symbol":
        """Absolute values."""
        return self._apply("abs", self)

    def clamp(self, *, min: float) -> "Symbol":
        """Not less than ``min``; NaN stays."""
        return self._apply("maximum", self, min)

    # -- shapes, whose first axis is that of rows --------------------------------------------------

    @property
    def ndim(self) -> int:
        """Number of axes, with that of rows."""
        return 1 + len(self.tail)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, with -1 for the number of rows."""
        return (-1, *self.tail)

    def _of(self, grid: np.ndarray) -> "Symbol":
        return Symbol(self.trace, self.level, grid.shape, map(int, grid.ravel()))

    def __getitem__(self, index: Any) -> "Symbol":
        if not isinstance(index, tuple) or index[0] != slice(None):
            raise NoProgram("single systems or atoms")
        return self._of(self._grid(self)[index[1:]])

    def _axis(self, axis: int, ndim: int) -> int:
        axis = axis + ndim if axis < 0 else axis
        if axis < 1:
            raise NoProgram("the axis of systems or atoms")
        return axis - 1

    def unsqueeze(self, axis: int) -> "Symbol":
        """As in torch."""
        return self._of(np.expand_dims(self._grid(self), self._axis(axis, self.ndim + 1)))

    def squeeze(self, axis: int) -> "Symbol":
        """As in torch."""
        return self._of(self._grid(self).squeeze(self._axis(axis, self.ndim)))

    def expand(self, *shape: int) -> "Symbol":
        """As in torch."""
        return self._of(np.broadcast_to(self._grid(self), shape[1:]))

    def reshape(self, *shape: int) -> "Symbol":
        """As in torch."""
        return self._of(self._grid(self).reshape(shape[1:]))

    def unbind(self, axis: int) -> list["Symbol"]:
        """As in torch."""
        return [self._of(part) for part in np.moveaxis(self._grid(self), self._axis(axis, self.ndim), 0)]

    def split(self, size: int, axis: int) -> list["Symbol"]:
        """As in torch, into parts of size 1."""
        return [part.unsqueeze(axis) for part in self.unbind(axis)] if size == 1 else _refuse("split")

    @property
    def mT(self) -> "Symbol":
        """Transposed matrices."""
        return self._of(self._grid(self).T)

    def diagonal(self, *, dim1: int, dim2: int) -> "Symbol":
        """Diagonals of matrices."""
        return self._of(self._grid(self).diagonal())

    def to(self, dtype: torch.dtype) -> "Symbol":
        """The same numbers."""
        return self if dtype is torch.float64 else _refuse(f"{dtype}")

    def sum(self, axis: int, keepdim: bool = False) -> "Symbol":
        """Sum along an axis, from the first to the last."""
        total = functools.reduce(operator.add, self.unbind(axis))
        return total.unsqueeze(axis) if keepdim else total

    def __matmul__(self, other: "Symbol") -> "Symbol":
        products = self.unsqueeze(3) * other.unsqueeze(1)
        return products.sum(2)


def _refuse(what: str) -> Any:
    raise NoProgram(what)


def _stack(parts: Sequence[Symbol], axis: int) -> Symbol:
    return parts[0]._of(np.stack([part._grid(part) for part in parts], axis - 1))


def _full_like(one: Symbol, value: float) -> Symbol:
    return one._of(np.broadcast_to(one._grid(value), one.tail))


_STRUCTURAL: dict[str, Callable[..., Symbol]] = {
    "stack": _stack,
    "full_like": _full_like,
    "zeros_like": lambda one: _full_like(one, 0.0),
    "bmm": operator.matmul,
}


class SymbolicState(State):
    """A state whose tensors are `Symbol`."""

    __slots__ = ()

    def of_atoms(self, per_system: Any) -> Any:
        """Numbers of the system, for each atom."""
        trace = per_system.trace
        return Symbol(trace, ATOM, per_system.tail, [trace.add("spread", ATOM, k) for k in per_system.ids])

    def of_systems(self, per_atom: Any) -> Any:
        """Sums over atoms."""
        trace = per_atom.trace
        return Symbol(trace, SYSTEM, per_atom.tail, [trace.add("sum", SYSTEM, k) for k in per_atom.ids])

    def normal(self, stream: int, by_system: bool = False) -> Any:
        """Normal numbers of this step."""
        level, size = (SYSTEM, 1) if by_system else (ATOM, 3)
        trace = _trace_of(self)
        return Symbol(trace, level, (size,), [trace.add("normal", level, stream, k) for k in range(size)])

    def chi_square(self, stream: int) -> Any:
        """Sums of squares of f - 1 normal numbers."""
        count: Any = self.extra["degrees_of_freedom"] - 1.0
        return Symbol(count.trace, SYSTEM, (1,), [count.trace.add("chi_square", SYSTEM, *count.ids, stream)])

    def chains(self, *arguments: Any) -> Any:
        """The steps of chains, one by one."""
        return chain_steps(*arguments)

    @property
    def volumes(self) -> Any:
        """Volumes: absolute values of the triple product."""
        cell: Any = self.system.cell
        (ax, ay, az), (bx, by, bz), (cx, cy, cz) = (row.unbind(1) for row in cell.unbind(1))
        return (ax * (by * cz - bz * cy) + ay * (bz * cx - bx * cz) + az * (bx * cy - by * cx)).abs()


def _trace_of(state: Any) -> Trace:
    return state.velocities.trace


def _fetch(*path: str) -> Callable[[State], torch.Tensor]:
    if path[0] == "extra":
        return lambda state: state.extra[path[1]]
    return operator.attrgetter(".".join(path))


def _symbolic(state: State, trace: Trace) -> SymbolicState:
    """The state with symbols for all float64 tensors that flows may read."""

    def symbol(level: str, *path: str) -> Any:
        fetch = _fetch(*path)
        found = fetch(state)
        return None if found is None else trace.input(fetch, level, tuple(found.shape[1:]))

    positions, cell = symbol(ATOM, "system", "positions"), symbol(SYSTEM, "system", "cell")
    forces, stress = symbol(ATOM, "evaluation", "forces"), symbol(SYSTEM, "evaluation", "stress")
    extra = {
        name: symbol(ATOM if name in OF_ATOMS else SYSTEM, "extra", name)
        for name, value in state.extra.items()
        if value.dtype is torch.float64
    }
    return SymbolicState(
        system=state.system._replace(positions=positions, cell=cell),
        velocities=symbol(ATOM, "velocities"),
        masses=None,  # type: ignore[arg-type]  # flows read neither
        evaluation=state.evaluation._replace(forces=forces, stress=stress),
        step=None,  # type: ignore[arg-type]  # noise reads it in the kernel
        extra=extra,
    )


_OPERANDS = {"load": 0, "number": 0, "normal": 0, "chi_square": 1}
"""How many of the arguments are numbers that were computed before, if not all."""


def _operands(operation: str, level: str, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    return arguments[: _OPERANDS.get(operation)]


class Instruction(NamedTuple):
    """What a program does for the node, with these arguments: in section 0 for systems, in others for atoms."""

    operation: str
    section: int
    node: int | None
    arguments: tuple[Any, ...]

    @property
    def reads(self) -> list[tuple[int, int]]:
        """Nodes and sections of the numbers that it reads."""
        if self.operation in ("store", "atoms"):
            nodes = self.arguments[1:2]
        else:
            nodes = _operands(self.operation, "", self.arguments)
        return [(k, 0 if self.operation == "spread" else self.section) for k in nodes]

    @property
    def writes(self) -> tuple[int, int]:
        """Node and section of the number that it writes."""
        assert self.node is not None
        return self.node, 0 if self.operation == "sum" else self.section


class Program:
    """Flows as a program, for states of one form.

    Attributes
    ----------
    inputs : list
        Those tensors of a state that it reads: how they are fetched, their level and the shape of a row.
    outputs : list
        What it changes: "positions", "velocities", "cell" or the name of an extra, level and the shape of a row.
    """

    def __init__(self, flow: Callable[[State], State], state: State) -> None:
        self.trace = trace = Trace()
        before = _symbolic(state, trace)
        after = flow(before)
        changed: dict[str, Any] = {
            "positions": (before.system.positions, after.system.positions),
            "cell": (before.system.cell, after.system.cell),
            "velocities": (before.velocities, after.velocities),
        }
        changed |= {name: (before.extra.get(name), value) for name, value in after.extra.items()}
        results = {name: new for name, (old, new) in changed.items() if new is not old}
        self.outputs = [(name, new.level, new.tail) for name, new in results.items()]
        self._encode(self._ordered(list(results.values())))
        self.forms: dict[tuple[int, int], Any] = {}

    def _ordered(self, results: Sequence[Symbol]) -> list[Instruction]:
        """Instructions for the numbers that results need: first what is known of systems, then sums over atoms, ..."""
        nodes = self.trace.nodes
        needed = self._ancestors([k for result in results for k in result.ids])
        used = sorted({nodes[k].arguments[0] for k in needed if nodes[k].operation == "load"})
        self.inputs = [self.trace.inputs[k] for k in used]
        self.places = {k: n for n, k in enumerate(used, FIRST_ARRAY)}
        self.is_random = any(nodes[k].operation in ("normal", "chi_square") for k in needed)
        # the stage in which a number can be known: that of a sum is the one after its terms
        stage: dict[int, int] = {}
        for k in needed:  # operands have lower numbers
            last = max((stage[j] for j in _operands(*nodes[k])), default=0)
            stage[k] = last + 1 if nodes[k].operation == "sum" else last
        stores = [
            (k, Instruction("store", 0, None, (FIRST_ARRAY + len(used) + n, k, column, len(result.ids))))
            for n, result in enumerate(results)
            for column, k in enumerate(result.ids)
        ]
        code: list[Instruction] = []
        for at in range(1 + max(stage.values(), default=0)):
            now = [k for k in needed if stage[k] == at and nodes[k].level == SYSTEM and nodes[k].operation != "sum"]
            code += [Instruction(nodes[k].operation, 0, k, nodes[k].arguments) for k in now]
            code += [store for k, store in stores if stage[k] == at and nodes[k].level == SYSTEM]
            sums = [k for k in needed if stage[k] == at + 1 and nodes[k].operation == "sum"]
            code += [Instruction("number", 0, k, (0.0,)) for k in sums]
            # registers of atoms hold one block, so what a later stage needs again is computed again
            ends = [(nodes[k].arguments[0], Instruction("sum", at + 1, k, nodes[k].arguments)) for k in sums]
            ends += [
                (k, store._replace(section=at + 1)) for k, store in stores if stage[k] == at and nodes[k].level == ATOM
            ]
            body: list[Instruction] = []
            for k in self._ancestors([k for k, _ in ends]):
                if nodes[k].level == ATOM:
                    body.append(Instruction(nodes[k].operation, at + 1, k, nodes[k].arguments))
                    body += [end for j, end in ends if j == k]
            if body:
                code += [Instruction("atoms", 0, None, (len(body),)), *body]
        return code

    def _ancestors(self, waiting: list[int]) -> list[int]:
        """These nodes and all that they need, in order."""
        found = set()
        while waiting:
            k = waiting.pop()
            if k not in found:
                found.add(k)
                waiting.extend(_operands(*self.trace.nodes[k]))
        return sorted(found)

    def _encode(self, code: Sequence[Instruction]) -> None:
        """Give the numbers registers, and write the instructions as integers."""
        last = {key: n for n, instruction in enumerate(code) for key in instruction.reads}
        free = list(range(SYSTEM_REGISTERS))[::-1], list(range(ATOM_REGISTERS))[::-1]
        register: dict[tuple[int, int], int] = {}
        constants: dict[float, int] = {}
        rows = []
        for n, instruction in enumerate(code):
            operation, _, _, arguments = instruction
            given = [register[key] for key in instruction.reads]
            for key in set(instruction.reads):
                if last[key] == n:
                    free[key[1] > 0].append(register[key])
            if operation in ("store", "atoms"):
                target = arguments[0]
            else:
                key = instruction.writes
                if key not in register:
                    register[key] = free[key[1] > 0].pop() if free[key[1] > 0] else _refuse("too many numbers")
                target = register[key]
            if operation == "load":
                given = [self.places[arguments[0]], *arguments[1:]]
            elif operation == "number":
                given = [constants.setdefault(arguments[0], len(constants))]
            elif operation == "store":
                given += arguments[2:]
            elif operation != "atoms":
                given += arguments[len(given) :]
            rows.append([CODES[operation], target, *given, *[0] * (3 - len(given))])
        self.code = np.array(rows, dtype=np.int32).reshape(-1, 5)
        self.constants = np.array(list(constants) or [0.0], dtype=np.float64)
        self.where = self.code.ctypes.data, len(rows), self.constants.ctypes.data

    def _seeds(self, state: State, n_systems: int) -> tuple[torch.Tensor | None, ...]:
        """Seeds, keys and the step, of which noise is a function."""
        if not self.is_random:
            return None, None, None
        seeds, keys, step = state.extra["seed"], state.extra["key"], state.step
        for tensor, shape in ((seeds, (n_systems,)), (keys, (n_systems,)), (step, ())):
            if tensor.dtype is not torch.int64 or not tensor.is_cpu or tensor.shape != shape:
                raise NoProgram("another form of seeds")
        return seeds.contiguous(), keys.contiguous(), step

    def __call__(self, state: State) -> State:
        """The state after the flows; raises NoProgram if the program is not for this state."""
        n_atoms, n_systems = state.velocities.shape[0], state.extra["dt"].shape[0]
        form = self.forms.get((n_atoms, n_systems))
        if form is None:
            rows = {SYSTEM: n_systems, ATOM: n_atoms}
            inputs, outputs = ([(rows[e[1]], *e[2]) for e in which] for which in (self.inputs, self.outputs))
            # an empty tensor like another one costs half
            likes = [(shape, inputs.index(shape) if shape in inputs else -1) for shape in outputs]
            device, kind = warp_device(_CPU), (len(self.code), n_atoms // max(n_systems, 1))
            run = prepared(program_kernel(), n_systems, device=device, lanes=0, kind=kind)
            form = inputs, likes, run
            self.forms = {(n_atoms, n_systems): form}
        inputs, likes, run = form
        order = begin = None
        if n_systems > 1:
            if state.system.batch_idx is None:
                raise NoProgram("no systems of atoms")
            order, begin = sorted_by_system(state.system.batch_idx, n_systems)
        numbered = order, begin, *self._seeds(state, n_systems)
        given = []
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in numbered]
        tracked = torch.is_grad_enabled()
        # inlined as far as possible: these loops are most of the time
        for (fetch, *_), shape in zip(self.inputs, inputs):
            tensor = fetch(state)
            if type(tensor) is not torch.Tensor or tensor.dtype is not torch.float64 or not tensor.is_cpu:
                raise NoProgram("another type of tensor")
            if tensor.shape != shape or tensor.is_neg() or (tracked and tensor.requires_grad):
                raise NoProgram("another form of tensor")
            tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
            address = tensor.data_ptr()
            if address == 0 and tensor.numel():
                raise NoProgram("a tensor without memory")
            given.append(tensor)
            addresses.append(address)
        found = []
        for shape, like in likes:
            tensor = torch.empty(shape, dtype=torch.float64) if like < 0 else torch.empty_like(given[like])
            found.append(tensor)
            addresses.append(tensor.data_ptr())
        table = array("q", addresses)
        run([*self.where, table.buffer_info()[0], n_atoms])
        results = {name: tensor for (name, *_), tensor in zip(self.outputs, found)}
        system, velocities = state.system, results.pop("velocities", state.velocities)
        moved: Any = {name: results.pop(name) for name in ("positions", "cell") if name in results}
        if moved:
            system = system._replace(**moved)
        extra = {**state.extra, **results} if results else state.extra
        return State(system, velocities, state.masses, state.evaluation, state.step, extra)


class InSequence:
    """Flows one after the other, as a program where that is possible."""

    def __init__(self, flows: Sequence[tuple[Flow, float]], programmed: bool) -> None:
        self.flows, self.programmed = flows, programmed
        self.program: Program | None = None

    def __reduce__(self) -> Any:
        return InSequence, (self.flows, self.programmed)

    def _run(self, state: State) -> State:
        dt = state.extra["dt"]
        times = {1.0: dt}
        for flow, fraction in self.flows:
            if fraction not in times:
                times[fraction] = fraction * dt
            state = flow(state, times[fraction])
        return state

    def __call__(self, state: State) -> State:
        """The state after the flows."""
        fits = self.programmed and state.velocities.dtype is torch.float64 and is_eager()
        fits = fits and state.system.domain is None  # sums over atoms are messages then
        if fits and current_recorder() is None and not layout("cpu").warps:
            if self.program is None:
                try:
                    self.program = Program(self._run, state)
                except NoProgram:
                    self.programmed = False
                    return self._run(state)
            try:
                return self.program(state)
            except NoProgram:
                pass
        return self._run(state)


def as_programs(flows: Sequence[tuple[Flow, float]]) -> Callable[[State], State]:
    """A function of a state that runs flows, those of `PROGRAMMED` that are neighbors as one program."""
    groups = itertools.groupby(flows, lambda entry: _is_programmed(entry[0]))
    parts = [InSequence(tuple(group), programmed) for programmed, group in groups]
    return functools.partial(_one_after_the_other, parts)


def _is_programmed(flow: Flow) -> bool:
    """Whether the flow becomes a part of a program.

    With constraints it does not, even for systems that have none: these then have the same bits in every batch.
    """
    return type(flow) in PROGRAMMED and getattr(flow, "constraints", None) is None


def _one_after_the_other(parts: Sequence[InSequence], state: State) -> State:
    for part in parts:
        state = part(state)
    return state
