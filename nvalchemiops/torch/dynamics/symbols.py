"""Symbols in place of tensors: what flows compute, written down (`nvalchemiops.torch.dynamics.programs`)."""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.kernels.programs import OPERATIONS
from nvalchemiops.torch.dynamics.state import OF_ATOMS, State
from nvalchemiops.torch.operators.chains import chain_steps

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
        """The number of a node. The sum of a product and a number is one operation."""
        if operation == "add":
            for product, other in (arguments, arguments[::-1]):
                if self.nodes[product].operation == "mul":
                    return self.add("multiply_add", level, *self.nodes[product].arguments, other)
        node = Node(operation, level, arguments)
        if node not in self.numbers:
            self.numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self.numbers[node]

    def sum(self, k: int) -> int:
        """The number of the sum over atoms of a node, from which factors that belong to the system are taken."""
        rest, factors = self._parted(k)
        if rest is None:
            rest, factors = k, []
        return functools.reduce(functools.partial(self.add, "mul", SYSTEM), factors, self.add("sum", SYSTEM, rest))

    def _parted(self, k: int) -> tuple[int | None, list[int]]:
        """A node of atoms as a product: its own factor, if there is one, and those of the system."""
        operation, _, arguments = self.nodes[k]
        if operation == "spread":
            return None, [*arguments]
        if operation != "mul":
            return k, []
        (a, of_a), (b, of_b) = map(self._parted, arguments)
        rest = a if b is None else b if a is None else self.add("mul", ATOM, a, b)
        return rest, of_a + of_b

    def input(self, fetch: Callable[[State], torch.Tensor], level: str, tail: tuple[int, ...]) -> "Symbol":
        """A tensor (rows, *tail) of the state."""
        self.inputs.append((fetch, level, tail))
        size = math.prod(tail)
        return Symbol(self, level, tail, [self.add("load", level, len(self.inputs) - 1, k, size) for k in range(size)])


def _binary(operation: str) -> Callable[["Symbol", Any], "Symbol"]:
    return lambda a, b: a._apply(operation, a, b)


def _reflected(operation: str) -> Callable[["Symbol", Any], "Symbol"]:
    return lambda a, b: a._apply(operation, b, a)


class Symbol:
    """A symbol for a float64 tensor (rows, *tail), a row for each system or each atom; `ids` are its nodes in a row."""

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
            return np.array(argument.ids).reshape(argument.tail)
        values = np.asarray(argument, dtype=np.float64)
        if values.ndim > 2:
            raise NoProgram("a constant of systems or atoms")
        ids = [self.trace.add("number", self.level, float(value)) for value in values.ravel()]
        return np.array(ids, dtype=np.int64).reshape(values.shape)

    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("sub"), _reflected("sub")
    __mul__, __rmul__ = _binary("mul"), _reflected("mul")
    __truediv__, __rtruediv__ = _binary("div"), _reflected("div")
    __lt__, __gt__ = _binary("less"), _reflected("less")

    def __neg__(self) -> "Symbol":
        return self._apply("neg", self)

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
        return [part.unsqueeze(axis) for part in self.unbind(axis)] if size == 1 else refuse("split")

    @property
    def mT(self) -> "Symbol":
        """Transposed matrices."""
        return self._of(self._grid(self).T)

    def diagonal(self, *, dim1: int, dim2: int) -> "Symbol":
        """Diagonals of matrices."""
        return self._of(self._grid(self).diagonal())

    def to(self, dtype: torch.dtype) -> "Symbol":
        """The same numbers."""
        return self if dtype is torch.float64 else refuse(f"{dtype}")

    def sum(self, axis: int, keepdim: bool = False) -> "Symbol":
        """Sum along an axis, from the first to the last."""
        total = functools.reduce(operator.add, self.unbind(axis))
        return total.unsqueeze(axis) if keepdim else total

    def __matmul__(self, other: "Symbol") -> "Symbol":
        products = self.unsqueeze(3) * other.unsqueeze(1)
        return products.sum(2)


def refuse(what: str) -> Any:
    """Raise NoProgram."""
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
        return Symbol(trace, SYSTEM, per_atom.tail, map(trace.sum, per_atom.ids))

    def normal(self, stream: int, by_system: bool = False) -> Any:
        """Normal numbers of this step."""
        level, size = (SYSTEM, 1) if by_system else (ATOM, 3)
        velocities: Any = self.velocities
        ids = [velocities.trace.add("normal", level, stream, k) for k in range(size)]
        return Symbol(velocities.trace, level, (size,), ids)

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


def _fetch(*path: str) -> Callable[[State], torch.Tensor]:
    if path[0] == "extra":
        return lambda state: state.extra[path[1]]
    return operator.attrgetter(".".join(path))


def symbolic(state: State, trace: Trace) -> SymbolicState:
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
        if getattr(value, "dtype", None) is torch.float64
    }
    return SymbolicState(
        system=state.system._replace(positions=positions, cell=cell),
        velocities=symbol(ATOM, "velocities"),
        masses=None,  # type: ignore[arg-type]  # flows read neither
        evaluation=state.evaluation._replace(forces=forces, stress=stress),
        step=None,  # type: ignore[arg-type]  # noise reads it in the kernel
        extra=extra,
    )
