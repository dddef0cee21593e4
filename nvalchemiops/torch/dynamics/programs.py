"""Flows in one launch: sequences of flows become programs of `nvalchemiops.kernels.programs`.

The flows are called once with a state of `Symbol` in place of tensors, which writes down what they compute. So the
physics is written once, in torch, whose derivatives are those of a step. A program runs where no other code depends on
single operations: in eager mode in float64 on a CPU, without gradients, unless plans are off. Elsewhere the flows are
called.
"""

import functools
import itertools
import operator
from array import array
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from nvalchemiops.kernels.programs import (
    ATOM_REGISTERS,
    CODES,
    FIRST_ARRAY,
    MOST_ATOMS,
    MOST_TOGETHER,
    SAME,
    SYSTEM_REGISTERS,
    program_kernel,
)
from nvalchemiops.launch import prepared
from nvalchemiops.layout import layout
from nvalchemiops.torch.autograd.arrays import warp_device
from nvalchemiops.torch.dynamics.cell_flows import CellChain, CellNoise, Press, StretchedDrift, StretchedKick
from nvalchemiops.torch.dynamics.flows import Chain, Drift, Flow, Kick, Noise, NoisyDrift, Rescale
from nvalchemiops.torch.dynamics.state import State
from nvalchemiops.torch.dynamics.symbols import ATOM, SYSTEM, NoProgram, Symbol, Trace, refuse, symbolic
from nvalchemiops.torch.operators.segments import sorted_by_system
from nvalchemiops.torch.runtime import tables
from nvalchemiops.torch.runtime.context import is_eager
from nvalchemiops.torch.runtime.recorder import current_recorder

_CPU = torch.device("cpu")

PROGRAMMED = frozenset(
    {Kick, Drift, Noise, NoisyDrift, Rescale, Chain, Press, StretchedKick, StretchedDrift, CellChain, CellNoise}
)
"""Flows that become parts of programs: they compute the same from the same state."""


CHEAP = 6
"""Number of operations for an atom that take less time than to store and to load the result."""

_OPERANDS = {"load": 0, "load again": 0, "number": 0, "normal": 0, "chi_square": 1, "atoms": 0}
"""How many of the arguments are numbers that were computed before, if not all."""


def _operands(operation: str, level: str, arguments: tuple[Any, ...]) -> tuple[int, ...]:
    return arguments[: _OPERANDS.get(operation)]


_form = operator.attrgetter("__class__", "shape", "dtype", "is_cpu")
_requires_grad = operator.attrgetter("requires_grad")


class Instruction(NamedTuple):
    """What a program does for the node, with these arguments: in section 0 for systems, in others for atoms."""

    operation: str
    section: int
    node: int | None
    arguments: tuple[Any, ...]

    @property
    def reads(self) -> list[tuple[int, int]]:
        """Nodes and sections of the numbers that it reads."""
        nodes = self.arguments[1:2] if self.operation == "store" else _operands(self.operation, "", self.arguments)
        return [(k, 0 if self.operation == "spread" else self.section) for k in nodes]

    @property
    def writes(self) -> tuple[int, int]:
        """Node and section of the number that it writes."""
        assert self.node is not None
        return self.node, 0 if self.operation == "sum" else self.section


class Program:
    """Flows as a program, for states of one form."""

    def __init__(self, flow: Callable[[State], State], state: State) -> None:
        self.trace = trace = Trace()
        before = symbolic(state, trace)
        after = flow(before)
        changed: dict[str, Any] = {
            "positions": (before.system.positions, after.system.positions),
            "cell": (before.system.cell, after.system.cell),
            "velocities": (before.velocities, after.velocities),
        }
        changed |= {name: (before.extra.get(name), value) for name, value in after.extra.items()}
        results = {name: new for name, (old, new) in changed.items() if new is not old}
        # what it changes: "positions", "velocities", "cell" or the name of an extra; its level, and the shape of a row
        self.outputs = [(name, new.level, new.tail) for name, new in results.items()]
        self._encode(self._ordered(list(results.values())))
        self.forms: dict[tuple[int, int], Any] = {}
        self.sorted: Any = None  # the last number of systems, system of each atom, and what `sorted_by_system` found

    def _ordered(self, results: Sequence[Symbol]) -> list[Instruction]:
        """Instructions for the numbers that results need: first what is known of systems, then sums over atoms, ..."""
        nodes = self.trace.nodes
        needed = self._ancestors([k for result in results for k in result.ids])
        used = sorted({nodes[k].arguments[0] for k in needed if nodes[k].operation == "load"})
        self.inputs = [self.trace.inputs[k] for k in used]  # of a state: how to fetch it, its level, shape of a row
        self.fetches = [fetch for fetch, *_ in self.inputs]
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
        loads: dict[int, tuple[int, int, int]] = {}  # array, column and width of numbers that were stored
        until: dict[int, int] = {}  # the stage in which the result takes their place
        for at in range(1 + max(stage.values(), default=0)):
            loads = {k: where for k, where in loads.items() if at <= until[k]}
            now = [k for k in needed if stage[k] == at and nodes[k].level == SYSTEM and nodes[k].operation != "sum"]
            code += [Instruction(nodes[k].operation, 0, k, nodes[k].arguments) for k in now]
            code += [store for k, store in stores if stage[k] == at and nodes[k].level == SYSTEM]
            sums = [k for k in needed if stage[k] == at + 1 and nodes[k].operation == "sum"]
            code += [Instruction("number", 0, k, (0.0,)) for k in sums]
            # registers of atoms hold one block, so what a later stage needs again is computed again or was stored
            ends = [(nodes[k].arguments[0], Instruction("sum", at + 1, k, nodes[k].arguments)) for k in sums]
            ends += [
                (k, store._replace(section=at + 1)) for k, store in stores if stage[k] == at and nodes[k].level == ATOM
            ]
            inner = self._ancestors([k for k, _ in ends], loads, ATOM)
            new: dict[int, tuple[int, int, int]] = {}
            for k, (_, _, _, (place, _, column, width)) in stores:
                # the memory of a result is free until then
                free = stage[k] > at and nodes[k].level == ATOM and (place, column, width) not in loads.values()
                kept = self._costly(k, inner) if free else None
                if kept is not None and kept not in loads and kept not in new:
                    ends.append((kept, Instruction("store", at + 1, None, (place, kept, column, width))))
                    new[kept], until[kept] = (place, column, width), stage[k]
            body: list[Instruction] = []
            for k in inner:
                operation, arguments = (
                    ("load again", loads[k]) if k in loads else (nodes[k].operation, nodes[k].arguments)
                )
                body.append(Instruction(operation, at + 1, k, arguments))
                body += [end for j, end in ends if j == k]
            loads |= new
            if body:
                body.sort(key=lambda instruction: instruction.operation not in SAME)  # keeps the order of others
                same = sum(instruction.operation in SAME for instruction in body)
                code += [Instruction("atoms", 0, None, (len(body), same)), *body]
        return code

    def _ancestors(self, waiting: list[int], known: Container[int] = (), level: str | None = None) -> list[int]:
        """These nodes and their operands, in order, without the operands of known nodes; on request of one level."""
        nodes, found = self.trace.nodes, set()
        while waiting:
            k = waiting.pop()
            if k not in found and level in (None, nodes[k].level):
                found.add(k)
                waiting.extend(() if k in known else _operands(*nodes[k]))
        return sorted(found)

    def _costly(self, k: int, computed: Sequence[int]) -> int | None:
        """Of the numbers of this atom that the node needs and that are computed, the costliest; None if it is cheap."""
        costs = {j: len(self._ancestors([j], (), ATOM)) for j in self._ancestors([k], (), ATOM) if j in computed}
        kept = max(costs, key=lambda j: (costs[j], j), default=None)
        return None if kept is None or costs[kept] < CHEAP else kept

    def _encode(self, code: Sequence[Instruction]) -> None:
        """Give the numbers registers, and write the instructions as integers."""
        last = {key: n for n, instruction in enumerate(code) for key in instruction.reads}
        # the same for all blocks of a system, so until the end of the section
        end = {instruction.section: n for n, instruction in enumerate(code)}
        same = [i for i in code if i.section > 0 and i.operation in SAME]
        last |= {instruction.writes: end[instruction.section] for instruction in same}
        over: dict[int, list[tuple[int, int]]] = {}
        for key, n in last.items():
            over.setdefault(n, []).append(key)
        free = list(range(SYSTEM_REGISTERS))[::-1], list(range(ATOM_REGISTERS))[::-1]
        register: dict[tuple[int, int], int] = {}
        constants: dict[float, int] = {}
        rows = []
        for n, instruction in enumerate(code):
            operation, _, _, arguments = instruction
            given = [register[key] for key in instruction.reads]
            for key in over.get(n, ()):
                free[key[1] > 0].append(register[key])
            if operation in ("store", "atoms"):
                target = arguments[0]
            else:
                key = instruction.writes
                if key not in register:
                    register[key] = free[key[1] > 0].pop() if free[key[1] > 0] else refuse("too many numbers")
                target = register[key]
            if operation == "load":
                given = [self.places[arguments[0]], *arguments[1:]]
            elif operation == "load again":
                operation, given = "load", list(arguments)
            elif operation == "number":
                given = [constants.setdefault(arguments[0], len(constants))]
            elif operation == "store":
                given += arguments[2:]
            else:
                given += arguments[len(given) + (operation == "atoms") :]
            rows.append([CODES[operation], target, *given, *[0] * (3 - len(given))])
        self.code = np.array(rows, dtype=np.int32).reshape(-1, 5)
        self.constants = np.array(list(constants) or [0.0], dtype=np.float64)
        self.where = self.code.ctypes.data, len(rows), self.constants.ctypes.data

    def _counters(self, state: State, n_atoms: int, n_systems: int) -> tuple[torch.Tensor | None, ...]:
        """Seeds, keys, the step and the places of atoms in their systems, of which noise is a function."""
        if not self.is_random:
            return None, None, None, None
        seeds, keys, step, places = state.extra["seed"], state.extra["key"], state.step, state.extra.get("place")
        for tensor, shape in ((seeds, (n_systems,)), (keys, (n_systems,)), (step, ())):
            if tensor.dtype is not torch.int64 or not tensor.is_cpu or tensor.shape != shape:
                raise NoProgram("another form of seeds")
        if places is not None:
            if places.dtype is not torch.int32 or not places.is_cpu or places.shape != (n_atoms,):
                raise NoProgram("another form of places")
            places = places.contiguous()
        return seeds.contiguous(), keys.contiguous(), step, places

    def __call__(self, state: State) -> State:
        """The state after the flows; raises NoProgram if the program is not for this state."""
        n_atoms, n_systems = state.velocities.shape[0], state.extra["dt"].shape[0]
        form = self.forms.get((n_atoms, n_systems))
        if form is None:
            rows = {SYSTEM: n_systems, ATOM: n_atoms}
            inputs, outputs = ([(rows[e[1]], *e[2]) for e in which] for which in (self.inputs, self.outputs))
            # an empty tensor like another one costs half
            likes = [(shape, inputs.index(shape) if shape in inputs else -1) for shape in outputs]
            each = n_atoms // max(n_systems, 1)
            share = max(1, min(MOST_TOGETHER, MOST_ATOMS // max(each, 1), n_systems))
            forms = [(torch.Tensor, shape, torch.float64, True) for shape in inputs]
            device, kind, n_rows = warp_device(_CPU), (len(self.code), share * each), -(-n_systems // share)
            run = prepared(program_kernel(), n_rows, device=device, lanes=0, kind=kind)
            form = forms, likes, run, share
            self.forms = {(n_atoms, n_systems): form}
        forms, likes, run, share = form
        order = begin = None
        if n_systems > 1:
            batch_idx, known = state.system.batch_idx, self.sorted
            assert batch_idx is not None
            # by value, since versions do not count all changes
            if known is None or known[0] != n_systems or not torch.equal(known[1], batch_idx):
                known = self.sorted = n_systems, batch_idx.clone(), *sorted_by_system(batch_idx, n_systems)
            order, begin = known[2:]
        numbered = order, begin, *self._counters(state, n_atoms, n_systems)
        # without loops in Python as far as possible: they are most of the time
        given = [fetch(state) for fetch in self.fetches]
        try:
            found_forms = list(map(_form, given))
        except AttributeError:
            raise NoProgram("no tensor") from None
        if found_forms != forms or any(map(torch.Tensor.is_neg, given)):
            raise NoProgram("another form of tensor")
        if torch.is_grad_enabled() and any(map(_requires_grad, given)):
            raise NoProgram("gradients")
        if not all(map(torch.Tensor.is_contiguous, given)):
            given = [tensor.contiguous() for tensor in given]
        found = [
            torch.empty(shape, dtype=torch.float64, device="cpu") if like < 0 else torch.empty_like(given[like])
            for shape, like in likes
        ]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in numbered]
        addresses += map(torch.Tensor.data_ptr, [*given, *found])
        if 0 in addresses[FIRST_ARRAY:] and any(t.numel() and not t.data_ptr() for t in given):
            raise NoProgram("a tensor without memory")
        table = array("q", addresses)
        run([*self.where, table.buffer_info()[0], n_atoms, n_systems, share])
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
        if fits and current_recorder() is None and not tables.are_off() and not layout("cpu").warps:
            try:
                self.program = self.program or Program(self._run, state)
                return self.program(state)
            except (KeyError, NoProgram):  # flows read a value of `extra` that is no float64 tensor
                after = self._run(state)  # or that is missing, which is an error, and other states have a program
                self.programmed = self.program is not None
                return after
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
