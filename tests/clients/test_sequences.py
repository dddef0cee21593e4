"""Neighbors as clients ask for them, call after call while the density grows by four (../shared/clients.md).

A gas condenses, a cell shrinks to 0.9 of its edges again and again: the room that sufficed for the first call is too
little for the next ones. Each step is compared with an independent search.
"""

import itertools
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from nvalchemiops import notices
from nvalchemiops.notices import NeighborListWarning
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.interactions.dispersion import dftd3
from nvalchemiops.torch.neighbors import neighbor_list
from tests.clients.test_signatures import AdaptiveList
from tests.reference.neighbors import assert_pairs, every_image
from tests.support.molecules import PBE, parameters
from tests.support.searches import rows_of, rows_of_matrix
from tests.support.systems import batch, crystal, triclinic

F64 = torch.float64
CUTOFF = 6.0


class Step(NamedTuple):
    """Atoms of two systems, in atomic units, at one time."""

    positions: torch.Tensor
    cell: torch.Tensor | None
    pbc: torch.Tensor | None
    batch_idx: torch.Tensor

    @property
    def where(self) -> dict[str, Any]:
        return self._asdict()


def condensing_gas() -> Iterator[Step]:
    """Two open systems; the second condenses."""
    rng = np.random.default_rng(5)
    x = torch.as_tensor(np.concatenate([rng.uniform(0, 18, (18, 3)), rng.uniform(0, 18, (40, 3))]))
    idx = (torch.arange(58) >= 18).int()
    for n in range(5):
        yield Step(torch.where(idx[:, None] == 1, 0.25 ** (n / 12) * x, x), None, None, idx)


def shrinking_cells() -> Iterator[Step]:
    """Periodic crystals; both shrink."""
    system = batch(crystal("rocksalt", 9.5, 2, 0.2), triclinic(6))
    pbc = torch.ones(2, 3, dtype=torch.bool)
    for n in range(5):
        yield Step(
            0.9**n * system.positions,
            0.9**n * system.cell * torch.tensor([1.0, 1.6])[:, None, None],
            pbc,
            system.batch_idx,
        )


SEQUENCES = {"gas": condensing_gas, "cells": shrinking_cells}
METHODS = ("batch_naive", "batch_cell_list")
of_sequences = pytest.mark.parametrize("steps", SEQUENCES.values(), ids=SEQUENCES)


def assert_exact(rows: np.ndarray, step: Step, cutoff: float = CUTOFF) -> None:
    """Rows (i, j, S) are the pairs of each system."""
    for number in range(2):
        atoms = np.flatnonzero(step.batch_idx == number)
        of_system = rows[np.isin(rows[:, 0], atoms)] - [atoms[0], atoms[0], 0, 0, 0]
        where = () if step.cell is None else (step.cell[number].numpy(), (True,) * 3)
        assert_pairs(of_system, every_image(step.positions[atoms].numpy(), cutoff, *where))


# -- clients --------------------------------------------------------------------------------------


class HandsBack:
    """fairchem's D3: gives back what the last call returned as memory, takes what is returned, reads no counts."""

    def __init__(self, method: str) -> None:
        self.method, self.memory = method, {}

    def __call__(self, step: Step, cutoff: float = CUTOFF) -> tuple[torch.Tensor, ...]:
        found = neighbor_list(**step.where, cutoff=cutoff, method=self.method, half_fill=False, **self.memory)
        names = ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts")
        self.memory = dict(zip(names, found))
        return found


class OwnMemory:
    """fairchem's graphs: memory of one width for each call, shifts also without a cell; takes what is returned."""

    def __init__(self, method: str, width: int = 12) -> None:
        self.method, self.width = method, width

    def __call__(self, step: Step) -> tuple[torch.Tensor, ...]:
        n = len(step.positions)
        memory = {
            "neighbor_matrix": torch.full((n, self.width), n, dtype=torch.int32),
            "neighbor_matrix_shifts": torch.zeros((n, self.width, 3), dtype=torch.int32),
            "num_neighbors": torch.zeros(n, dtype=torch.int32),
        }
        found = neighbor_list(**step.where, cutoff=CUTOFF, method=self.method, half_fill=False, **memory)
        assert len(found) == (2 if step.cell is None and self.method == "batch_naive" else 3)
        assert found[-1].shape in ((n,), (*found[0].shape, 3)) and found[1] is memory["num_neighbors"]
        assert torch.equal(memory["neighbor_matrix"], found[0][:, : self.width])
        return found


class AsksAgain:
    """deepmd-kit and orb-models: read the largest count, and search again with more room until it fits."""

    def __init__(self, method: str, width: int = 12) -> None:
        self.method, self.width, self.searches = method, width, 0

    def __call__(self, step: Step) -> tuple[torch.Tensor, ...]:
        start = torch.searchsorted(step.batch_idx, torch.arange(3, dtype=torch.int32)).int()
        knobs = {"max_atoms_per_system": 40} if self.method == "batch_naive" else {}
        while True:
            self.searches += 1
            with torch.device("cpu"):
                found = neighbor_list(
                    step.positions,
                    CUTOFF,
                    cell=step.cell,
                    pbc=step.pbc,
                    batch_idx=step.batch_idx,
                    batch_ptr=start,
                    method=self.method,
                    max_neighbors=self.width,
                    return_neighbor_list=False,
                    wrap_positions=False,
                    **knobs,
                )
            most = int(found[1].max())
            if most <= self.width:
                assert found[0].shape[1] == self.width
                return found
            self.width = max(most, -(-5 * self.width // 4))


class Adapts(AdaptiveList):
    """AIMNet, which leaves the method open for periodic systems."""

    def __init__(self, method: str) -> None:
        super().__init__(CUTOFF)

    def __call__(self, step: Step) -> tuple[torch.Tensor, ...]:
        return super().__call__(*step, fill_value=len(step.positions))


CLIENTS = {"fairchem D3": HandsBack, "fairchem graphs": OwnMemory, "deepmd and orb": AsksAgain, "AIMNet": Adapts}


@of_sequences
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.filterwarnings("ignore::nvalchemiops.NeighborListWarning")
def test_matrices_are_whole_in_every_step(name, method, steps):
    client = CLIENTS[name](method)
    most = []
    for step in steps():
        matrix, count, *shifts = client(step)
        assert_exact(rows_of_matrix(matrix, count, *shifts), step)
        most.append(int(count.max()))
    assert most[-1] > 2.5 * most[0] > 0  # or nothing is tested


@of_sequences
@pytest.mark.parametrize("search", [neighbors.batch_naive_neighbor_list, neighbors.batch_cell_list])
def test_torch_sim_in_every_step(search, steps):
    for step in steps():
        if step.cell is None:  # torch-sim gives a cell for everything
            step = step._replace(cell=torch.eye(3, dtype=F64).expand(2, 3, 3), pbc=torch.zeros(2, 3, dtype=torch.bool))
        found = search(**step.where, cutoff=CUTOFF, return_neighbor_list=True)
        rows = rows_of(found[0], found[2])
        assert_exact(rows, step if step.pbc.any() else step._replace(cell=None))


@of_sequences
@pytest.mark.parametrize("method", METHODS)
def test_energies_of_fairchem_dispersion_are_those_of_fresh_lists(method, steps, monkeypatch):
    """The memory of the first call is too narrow from some step on: one warning, no pair lost."""
    monkeypatch.setattr(notices, "_shown", set())  # once for a line, in each of these tests
    client, tables, cutoff, first = HandsBack(method), parameters(), 10.0, None
    damping = {"a1": PBE.a1, "a2": PBE.a2, "s8": PBE.s8, "d3_params": tables, "num_systems": 2}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for step in steps():
            n = len(step.positions)
            given = {"positions": step.positions, "numbers": 6 + 2 * (torch.arange(n) % 2).int()}
            given |= {"cell": step.cell, "batch_idx": step.batch_idx, **damping}
            matrix, _, *shifts = client(step, cutoff)
            near = {"neighbor_matrix": matrix, "fill_value": n}
            found = dftd3(**given, **near, **({"neighbor_matrix_shifts": shifts[0]} if shifts else {}))
            pairs, ptr, *shifts = neighbor_list(**step.where, cutoff=cutoff, return_neighbor_list=True)
            near = {"neighbor_list": pairs, "neighbor_ptr": ptr}
            expected = dftd3(**given, **near, **({"unit_shifts": shifts[0]} if shifts else {}))
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
            first = matrix.shape[1] if first is None else first
    assert matrix.shape[1] > first
    assert [warning.category for warning in said] == [NeighborListWarning]


@pytest.mark.parametrize(
    "search", [neighbors.batch_naive_neighbor_list_dual_cutoff, neighbor_list], ids=lambda f: f.__name__
)
@of_sequences
@pytest.mark.filterwarnings("ignore::nvalchemiops.NeighborListWarning")
def test_two_cutoffs_with_memory_handed_back(search, steps):
    names = ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts")
    cutoffs = {"cutoff1": 4.0, "cutoff2": CUTOFF} if search is not neighbor_list else {"cutoff": 4.0, "cutoff2": CUTOFF}
    memory: dict[str, torch.Tensor] = {}
    for step in steps():
        found = search(**step.where, **cutoffs, **memory)
        per_list = len(found) // 2
        for number, cutoff in enumerate((4.0, CUTOFF)):
            one = found[number * per_list : (number + 1) * per_list]
            assert_exact(rows_of_matrix(*one), step, cutoff)
            memory |= {f"{name}{number + 1}": tensor for name, tensor in zip(names, one)}


@of_sequences
def test_rows_of_flagged_systems_with_memory_handed_back(steps):
    """Rebuilt in turns; a system that is not flagged has the rows of the positions that it was searched with."""
    names = ("neighbor_matrix", "num_neighbors", "neighbor_matrix_shifts")
    first, *others = steps()
    cell = torch.eye(3, dtype=F64).expand(2, 3, 3) if first.cell is None else None
    open_axes = {} if cell is None else {"cell": cell, "pbc": torch.zeros(2, 3, dtype=torch.bool)}
    found = neighbor_list(**(first.where | open_axes), cutoff=CUTOFF)
    searched, narrow = [first, first], {name: tensor.clone() for name, tensor in zip(names, found)}
    for step, flags in zip(others, itertools.cycle(([False, True], [True, False]))):
        searched = [step if flag else old for flag, old in zip(flags, searched)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NeighborListWarning)
            memory = dict(zip(names, found))
            found = neighbor_list(
                **(step.where | open_axes), cutoff=CUTOFF, rebuild_flags=torch.tensor(flags), **memory
            )
        rows = rows_of_matrix(*found)
        for number, of_system in enumerate(searched):
            mine = rows[(of_system.batch_idx == number).numpy()[rows[:, 0]]]
            other = rows_of_matrix(*neighbor_list(**(of_system.where | open_axes), cutoff=CUTOFF))
            assert np.array_equal(mine, other[(of_system.batch_idx == number).numpy()[other[:, 0]]])
    assert found[0].shape[1] > narrow["neighbor_matrix"].shape[1]
