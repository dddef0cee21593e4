"""Relaxations that go wrong: systems, models and values that fail, systems that do not converge, and bad arguments."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from ase.build import bulk

from nvalchemiops import NvalchemiopsWarning
from nvalchemiops.torch.dynamics import (
    LBFGS,
    CellFilter,
    ConvergenceWarning,
    Evaluation,
    SumOfTerms,
    relax,
    to_ase,
)
from nvalchemiops.torch.dynamics.chart import Chart
from nvalchemiops.torch.interactions.electrostatics import EwaldSummation
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.systems import System
from tests.dynamics.relaxation import SMOOTH, crystal, equal, lennard_jones_model, springs
from tests.support.comparing import close

THREE = System(
    0.1 * torch.arange(1.0, 19.0, dtype=torch.float64).reshape(6, 3),
    batch_idx=torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32),
    numbers=torch.tensor([1, 1, 7, 7, 2, 2]),
)


@pytest.mark.parametrize("before", [3, 150], ids=["early", "when others are done"])
@pytest.mark.parametrize(
    ("optimizer", "of"), [("fire", "energies"), ("fire2", "error"), ("fire2", "forces"), ("lbfgs", "forces")]
)
def test_a_system_that_fails_stops_and_others_go_on(optimizer: str, of: str, before: int) -> None:
    path: list[torch.Tensor] = []

    def model(now: System) -> Evaluation:
        found = springs(now)
        falls = now.numbers == 7  # the second system: a force that never ends
        found.forces[falls] = 0.1
        if not falls.any():
            return found
        if len(path) < before:
            path.append(now.positions[falls])
        elif bool((now.positions[falls] > path[-1]).all()):
            if of == "error":
                raise ValueError("no such place")
            values = getattr(found, of)
            values[falls if of == "forces" else now.batch_idx[falls].long()] = math.nan
        return found

    with pytest.warns(ConvergenceWarning, match="for the systems 1, which stay at the last"):
        result = relax(THREE, model, optimizer, fmax=1e-3)
    assert result.failed.tolist() == [False, True, False] and result.converged.tolist() == [True, False, True]
    assert equal(result.system.positions[2:4], path[-1])
    assert len(path) <= int(result.evaluations[1]) <= len(path) + 1  # the one in which it failed, if it has results
    assert [atoms.info["failed"] for atoms in to_ase(result)] == [False, True, False]
    assert result.evaluation.energies.isfinite().all() and abs(float(result.fmax[1]) - 0.1 * 3**0.5) < 1e-12
    others = THREE._replace(positions=THREE.positions[[0, 1, 4, 5]], numbers=THREE.numbers[[0, 1, 4, 5]])
    others = others._replace(batch_idx=torch.tensor([0, 0, 1, 1], dtype=torch.int32))
    alone = relax(others, springs, optimizer, fmax=1e-3)
    assert equal(result.system.positions[[0, 1, 4, 5]], alone.system.positions)
    assert equal(result.evaluations[[0, 2]], alone.evaluations)


@pytest.mark.parametrize("optimizer", ["fire", "fire2", "lbfgs"])
def test_a_model_may_reuse_its_memory(optimizer: str) -> None:
    system, inner = System.from_ase(crystal(1)), lennard_jones_model()
    memory = inner(system)

    def model(system: System) -> Evaluation:
        for mine, found in zip(memory, inner(system)):
            mine.copy_(found)
        return memory

    expected = relax(system, inner, optimizer, cell=True)
    found = relax(system, model, optimizer, cell=True)
    positions = relax(system, model, optimizer).system.positions
    assert torch.equal(found.system.positions, expected.system.positions) and found.steps == expected.steps
    assert torch.equal(positions, relax(system, inner, optimizer).system.positions)


def test_failures_of_all_systems_are_errors() -> None:
    with pytest.raises(FloatingPointError, match="not finite, for the systems 0, 1, 2"):
        relax(THREE, lambda s: springs(s._replace(numbers=s.numbers * math.nan)))

    # a model that ceases to work, also where all systems are where it has evaluated them; and one that refuses all
    for ceases, compact_every, after in ((True, 10, 4), (True, None, 4), (False, 10, 9)):
        calls: list[torch.Tensor] = []

        def refuses(system: System, ceases: bool = ceases, calls: list[torch.Tensor] = calls) -> Evaluation:
            calls.append(system.positions)
            if len(calls) > 2 and (ceases or not torch.equal(calls[-1], calls[1])):
                raise ValueError("no such place")
            return springs(system)

        with pytest.raises(ValueError, match="no such place"):
            relax(THREE, refuses, compact_every=compact_every)
        assert len(calls) == after


def test_a_stress_that_is_not_finite_ends_at_once() -> None:
    calls = []

    def model(system: System) -> Evaluation:
        calls.append(1)
        found = lennard_jones_model()(system)
        return found._replace(stress=found.stress * math.nan)

    with pytest.raises(FloatingPointError, match="not finite, for the systems 0"):
        relax(System.from_ase(crystal(1)), model, cell=True, smax=1e-3)
    assert len(calls) == 1


def test_warns_of_systems_that_did_not_converge() -> None:
    system = System.from_ase([crystal(1), crystal(2)])
    with pytest.warns(ConvergenceWarning, match="2 of 2 systems did not converge in 3 steps"):
        result = relax(system, lennard_jones_model(), max_steps=3, fmax=1e-3)
    assert not result.converged.any() and result.steps.tolist() == [3, 3]
    assert (result.fmax > 1e-3).all()
    with pytest.warns(ConvergenceWarning):
        still = relax(system, lennard_jones_model(), max_steps=0)
    assert torch.equal(still.system.positions, system.positions) and still.evaluations.tolist() == [1, 1]


def test_models_that_hold_values_of_atoms_say_so() -> None:
    strengths = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)[:, None]
    system = System(
        torch.tensor([[2.0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.float64),
        batch_idx=torch.tensor([0, 1, 2], dtype=torch.int32),
    )

    def model(now: System) -> Evaluation:
        return Evaluation((strengths * now.positions.square()).sum(1), -2.0 * strengths * now.positions)

    with pytest.raises(RuntimeError) as caught:
        relax(system, model, compact_every=1)
    assert any("compact_every=None" in note for note in caught.value.__notes__)
    assert relax(system, model, compact_every=None).converged.all()


@pytest.mark.parametrize("nested", [False, True])
def test_sums_that_were_estimated_for_a_batch_keep_all_systems(nested: bool) -> None:
    """Their alpha has a value for each system, so they fit no part of the batch."""
    salts = [bulk("NaCl", "rocksalt", length) for length in (5.6, 6.4)]
    salts[1].rattle(0.05, seed=1)  # the other one is at a minimum
    batch = System.from_ase(salts, charges={"Na": 1.0, "Cl": -1.0})
    coulomb = EwaldSummation.estimate(batch, accuracy=1e-4)
    assert coulomb.alpha is not None and coulomb.alpha.shape == (2,)
    model = SumOfTerms(coulomb, partial(lennard_jones(**SMOOTH), sigma=2.5, epsilon=0.1))
    result = relax(batch, SumOfTerms(model) if nested else model, compact_every=1)
    assert result.converged.all() and result.steps[0] == 0 < result.steps[1]


@pytest.mark.parametrize("bound", ["exclusions", "parameters"])
def test_values_of_atoms_in_a_sum_of_terms_keep_all_systems(bound: str) -> None:
    """Pairs and parameters go by the numbers of atoms, so no system is taken out: each relaxes as alone."""
    generator = torch.Generator().manual_seed(3)
    positions = [2.4 * torch.rand((4, 3), generator=generator, dtype=torch.float64) + 3.0 for _ in range(3)]
    positions[0] = torch.tensor([[0.0, 0, 0], [30, 0, 0], [0, 30, 0], [0, 0, 30]], dtype=torch.float64)  # far apart
    parts = [System(x, batch_idx=torch.zeros(4, dtype=torch.int32)) for x in positions]
    batch = System(torch.cat(positions), batch_idx=torch.arange(3, dtype=torch.int32).repeat_interleave(4))
    pairs = torch.tensor([[0, 5, 6], [1, 4, 7]])
    sigmas = torch.linspace(1.5, 2.5, 12, dtype=torch.float64)

    def model(first: int, last: int) -> SumOfTerms:
        here = (pairs[0] >= first) & (pairs[0] < last)
        given = {"exclusions": pairs[:, here] - first} if bound == "exclusions" else {"sigma": sigmas[first:last]}
        return SumOfTerms(partial(lennard_jones(8.0), **{"sigma": 2.0, "epsilon": 0.1, **given}), stress=False)

    options: dict[str, Any] = {"fmax": 0.02, "compact_every": 1, "max_steps": 500}
    together = relax(batch, model(0, 12), **options)
    assert together.converged.all() and together.steps[0] == 0 < together.steps[1:].min()
    for k, part in enumerate(parts):
        alone = relax(part, model(4 * k, 4 * k + 4), **options)
        assert torch.equal(alone.steps, together.steps[k : k + 1])
        close(together.system.positions[4 * k : 4 * k + 4], alone.system.positions, 1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "newton"}, "`optimizer` must be one of 'fire', 'fire2', 'lbfgs'"),
        ({"optimizer": dict}, "`optimizer` must be a name or an Optimizer"),
        ({"cell": "cubic"}, "`cell` must be one of 'isotropic', 'axes', 'full'"),
        ({"cell": 1.0}, "`cell` must be True, False, a name or a CellFilter, got float"),
        ({"cell": CellFilter(mask=[1, 1])}, r"`mask` must have shape \(3,\), \(6,\)"),
        ({"cell": CellFilter(mask=[1, 1, 1, 1, 1, 0], constant_volume=True)}, "`constant_volume` needs a `mask`"),
        ({"cell": CellFilter(scalar_pressure=torch.zeros(3))}, "`scalar_pressure` must be a number or have shape"),
        ({"cell": CellFilter(scalar_pressure=torch.nan)}, "`scalar_pressure` must be finite"),
        ({"cell": CellFilter(scalar_pressure="1")}, "`scalar_pressure` must be a number"),
        ({"cell": CellFilter(cell_factor=torch.tensor([1.0, 0.0]))}, "`cell_factor` must be finite and not zero"),
        ({"fixed": torch.zeros(3, dtype=torch.bool)}, "`fixed` must be bool of shape"),
        ({"max_steps": -1}, "`max_steps` must not be negative"),
        ({"compact_every": 0}, "`compact_every` must be positive"),
        ({"fmax": -1.0}, "`fmax`"),
        ({"smax": 0.1}, "`smax` is for cells"),
        ({"model": springs, "cell": True}, "`model` gives no stress"),
        ({"model": lambda s: Evaluation(torch.zeros(3), s.positions)}, "`model`: energies must have shape"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        relax(System.from_ase([crystal(1), crystal(2)]), **({"model": lennard_jones_model()} | options))


@pytest.mark.parametrize("open_vector", (0.0, torch.nan))
def test_slabs_without_a_volume(open_vector: float) -> None:
    system = System.from_ase([crystal(1), crystal(2)])
    system.cell[1, 2], system.pbc[1, 2] = open_vector, False
    with pytest.raises(ValueError, match="`cell` of system 1 has no volume"):
        relax(system, lennard_jones_model(), cell=True)


def test_pressure_along_open_axes() -> None:
    """It would shrink the vacuum of a slab to nothing, where its force on the cell counts as converged."""
    molecule, slab = crystal(2), crystal(3)
    molecule.pbc, slab.pbc, slab.cell[2] = False, (True, True, False), (0.0, 0.0, 15.0)
    slab.cell[:2, 2] = 0.0
    system, pressure = System.from_ase([crystal(1), molecule, slab]), torch.tensor([0.01, 0.01, 0.01])
    for cell in ("axes", "full"):
        with pytest.raises(ValueError, match=r"system 2 is not periodic: choose mask=\(True, True, False\)"):
            Chart(system, cell=CellFilter.of(cell, scalar_pressure=pressure))
        Chart(system, cell=CellFilter.of(cell, (True, True, False), scalar_pressure=pressure))
        Chart(system, cell=CellFilter.of(cell, scalar_pressure=pressure * torch.tensor([1.0, 1.0, 0.0])))
    Chart(system, cell=CellFilter(constant_volume=True, scalar_pressure=pressure))
    Chart(system, cell=CellFilter.of("isotropic", scalar_pressure=pressure))  # the slab withstands it along its plane


def test_systems_without_a_cell() -> None:
    """A batch of molecules alone relaxes as the same molecules beside a crystal do, whose cells change."""
    molecules = [crystal(1)[[0, 1, 2]], crystal(2)[[0, 1]]]
    for molecule in molecules:
        molecule.pbc = False
    beside = relax(System.from_ase([crystal(1), *molecules]), lennard_jones_model(), "lbfgs", cell=True)
    for alone in (System.from_ase(molecules), System.from_ase(molecules[0])):
        with pytest.warns(NvalchemiopsWarning, match="no system has one"):
            found = relax(alone, lennard_jones_model(), "lbfgs", cell=CellFilter(scalar_pressure=0.1), smax=1.0)
        n = len(alone.positions)
        close(found.system.positions, beside.system.positions[-5:][:n])
        assert found.system.cell is None
    with pytest.raises(ValueError, match="`memory` must be at least 1"):
        LBFGS(memory=0)
