"""Relaxation: the steps of ASE's optimizers, batches that do what each system does alone, minima that are minima."""

import inspect
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.constraints import FixAtoms
from ase.filters import FrechetCellFilter
from ase.optimize import FIRE as AseFIRE
from ase.optimize import LBFGS as AseLBFGS
from ase.optimize.fire2 import FIRE2 as AseFIRE2
from scipy.optimize import minimize_scalar

from nvalchemiops.ase import Calculator, Pair
from nvalchemiops.notices import NvalchemiopsWarning
from nvalchemiops.torch.dynamics import FIRE, FIRE2, LBFGS, CellFilter, Evaluation, FromEnergies, relax
from nvalchemiops.torch.systems import System
from tests.dynamics.relaxation import (
    IN_PLANE,
    LJ,
    SMOOTH,
    batch_of_crystals,
    crystal,
    equal,
    lennard_jones_model,
    springs,
    unconverged,
)

# -- ASE ------------------------------------------------------------------------------------------

# limits of the time step that 50 steps reach
OPTIMIZERS = {
    "fire": (FIRE(dtmax=0.15), partial(AseFIRE, dtmax=0.15)),
    "fire2": (FIRE2(dtmax=0.07, dtmin=0.06), partial(AseFIRE2, dtmax=0.07, dtmin=0.06)),
    "abc": (FIRE2(use_abc=True), partial(AseFIRE2, use_abc=True)),
    "lbfgs": (
        LBFGS(memory=12, damping=0.9, maxstep=0.03),
        partial(AseLBFGS, memory=12, damping=0.9, maxstep=0.03),
    ),
}
MODES: dict[str, dict[str, Any] | None] = {
    "positions": None,
    "cell": {},
    "hydrostatic": {"hydrostatic_strain": True},
    "volume": {"constant_volume": True},
    "mask": {"mask": IN_PLANE},
    "pressure": {"scalar_pressure": 0.05},
}


@unconverged
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
# what cells do in other modes, `tests/dynamics/test_charts.py` compares with derivatives and with what is promised
@pytest.mark.everyday_cases("fire-positions", "fire-mask", "*-cell")
def test_steps_equal_those_of_ase(name: str, mode: str) -> None:
    ours, theirs = OPTIMIZERS[name]
    options = MODES[mode]
    atoms = crystal(1, repeat=(1, 1, 2))
    atoms.set_constraint(FixAtoms([2]))
    fixed = torch.arange(len(atoms)) == 2
    path: list[tuple[torch.Tensor, torch.Tensor, float]] = []

    def follow(seen: Any) -> None:
        if len(path) == int(seen.steps[0]):  # not half a step back
            path.append((seen.system.positions, seen.system.cell, float(seen.fmax[0])))

    cell = False if options is None else CellFilter(**options)
    system = System.from_ase(atoms)
    relax(system, lennard_jones_model(), ours, fmax=0.0, cell=cell, fixed=fixed, max_steps=50, hooks=[follow])
    atoms.calc = Calculator(Pair("lennard_jones", **SMOOTH, **LJ))
    filtered = atoms if options is None else FrechetCellFilter(atoms, **options)
    count = 0
    for (positions, lattice, fmax), _ in zip(
        path, theirs(filtered, logfile=None).irun(fmax=0.0, steps=50), strict=True
    ):
        assert np.abs(positions.numpy() - atoms.positions).max() < 1e-10
        assert np.abs(lattice.numpy() - atoms.cell.array).max() < 1e-10
        assert abs(fmax - np.linalg.norm(filtered.get_forces(), axis=1).max()) < 1e-9
        count += 1
    assert count == 51


@pytest.mark.parametrize(("ours", "theirs"), [(FIRE, AseFIRE), (FIRE2, AseFIRE2), (LBFGS, AseLBFGS)])
def test_defaults_are_those_of_ase(ours: Any, theirs: Any) -> None:
    known = inspect.signature(theirs).parameters
    differ = {f.name: (f.default, known[f.name].default) for f in fields(ours) if f.default != known[f.name].default}
    assert differ in ({}, {"maxstep": (0.2, None)})  # None is 0.2


def test_converges_when_ase_does() -> None:
    atoms = crystal(2)
    result = relax(System.from_ase(atoms), lennard_jones_model(), "lbfgs", fmax=0.01, cell=True)
    atoms.calc = Calculator(Pair("lennard_jones", **SMOOTH, **LJ))
    filtered = FrechetCellFilter(atoms)
    optimizer = AseLBFGS(filtered, logfile=None)
    optimizer.run(fmax=0.01)
    assert result.converged.all() and int(result.steps) == optimizer.nsteps
    assert abs(float(result.evaluation.energies) - atoms.get_potential_energy()) < 1e-9
    # it is the cell on which this depends: atoms alone are at rest earlier
    assert int(relax(System.from_ase(crystal(2)), lennard_jones_model(), "lbfgs", fmax=0.01).steps) != optimizer.nsteps


# -- batches --------------------------------------------------------------------------------------


@unconverged
@pytest.mark.parametrize("cell", [False, True], ids=["positions", "cell"])
@pytest.mark.parametrize("optimizer", [FIRE(), FIRE2(), LBFGS(memory=7)], ids=["fire", "fire2", "lbfgs"])
def test_a_system_in_a_batch_does_what_it_does_alone(optimizer: Any, cell: bool) -> None:
    atoms, model = batch_of_crystals(), lennard_jones_model()
    max_steps = 18 if isinstance(optimizer, LBFGS) else 45  # some systems converge, some do not
    run = partial(relax, model=model, optimizer=optimizer, fmax=0.08, cell=cell, max_steps=max_steps)
    together = run(System.from_ase(atoms))
    assert 1 < len(set(together.steps.tolist())) and 0 < int(together.converged.sum()) < len(atoms)
    first = 0
    for k, one in enumerate(atoms):
        alone, last = run(System.from_ase(one)), first + len(one)
        assert torch.equal(alone.system.positions, together.system.positions[first:last])
        assert torch.equal(alone.system.cell, together.system.cell[k])
        assert torch.equal(alone.evaluation.forces, together.evaluation.forces[first:last])
        assert equal(tuple(value[0] for value in alone[2:]), tuple(value[k] for value in together[2:]))
        assert torch.equal(alone.evaluation.energies[0], together.evaluation.energies[k])
        assert torch.equal(alone.evaluation.stress[0], together.evaluation.stress[k])
        first = last
    # taking systems out, at once or never, changes nothing
    for every in (1, None):
        assert equal(run(System.from_ase(atoms), compact_every=every), together)
    # what comes back is what the model says at these positions
    again = model(together.system)
    assert equal(tuple(again), tuple(together.evaluation))


def test_systems_that_converged_are_not_evaluated_any_more() -> None:
    """And what has a minimum at the start stays there, to the last bit."""
    at_rest = torch.zeros((3, 3), dtype=torch.float64)
    far = torch.tensor([[3.0, 0.0, 0.0], [0.0, 2.0, 0.0]], dtype=torch.float64)
    near = torch.full((2, 3), 1e-3, dtype=torch.float64)
    batch_idx = torch.tensor([0, 0, 0, 1, 1, 2, 2], dtype=torch.int32)
    system = System(torch.cat([at_rest, far, near]), batch_idx=batch_idx, numbers=torch.ones(7, dtype=torch.int32))
    sizes: list[int] = []
    seen: list[list[int]] = []

    def model(now: System) -> Evaluation:
        sizes.append(now.positions.shape[0])
        return springs(now)

    result = relax(
        system, model, fmax=0.01, compact_every=4, hooks=[lambda progress: seen.append(progress.systems.tolist())]
    )
    assert sizes[:4] == [7] * 4 and set(sizes[4:]) == {2} and len(sizes) == int(result.evaluations.max())
    assert seen[0] == [0, 1, 2] and seen[-1] == [1] and len(seen) == len(sizes)
    assert result.steps.tolist()[::2] == [0, 0] and result.evaluations.tolist()[::2] == [1, 1]
    assert torch.equal(result.evaluations, result.steps + 1)
    assert torch.equal(result.system.positions[:3], at_rest) and torch.equal(result.system.positions[5:], near)
    assert result.converged.all()


@unconverged
def test_forces_without_curvature_leave_no_history() -> None:
    """A slope, down which L-BFGS takes the step of its first guess again and again."""
    force = torch.tensor([[1.0, 0.5, 0.0]], dtype=torch.float64)
    model = FromEnergies(lambda s: -(s.positions * force).sum().reshape(1))
    result = relax(System(torch.zeros((1, 3), dtype=torch.float64)), model, LBFGS, max_steps=5)  # the class, as in ASE
    assert torch.allclose(result.system.positions, 5 * force / LBFGS().alpha, rtol=1e-12)


def test_a_bar_counts_systems(capsys: pytest.CaptureFixture[str]) -> None:
    system = System(torch.ones((2, 3), dtype=torch.float64), batch_idx=torch.tensor([0, 1], dtype=torch.int32))
    for shows in (False, True):
        relax(system._replace(numbers=torch.ones(2)), springs, progress=shows)
        assert ("2/2" in capsys.readouterr().err) == shows


def test_a_minimum_has_converged_whatever_the_tolerance() -> None:
    system = System(torch.zeros((2, 3), dtype=torch.float64), numbers=torch.tensor([1, 2]))
    result = relax(system, springs, fmax=0.0)
    assert result.converged.all() and int(result.steps) == 0


def test_empty_systems_and_molecules_among_crystals() -> None:
    model = lennard_jones_model()
    molecule = Atoms("Ar2", [[0.0, 0.0, 0.0], [0.3, 0.2, 3.9]])
    molecule.cell[:] = np.diag([20.0, 20.0, 20.0])
    system = System.from_ase([crystal(1), Atoms(cell=[4.0, 4.0, 4.0], pbc=True), molecule])
    result = relax(system, model, "lbfgs", fmax=1e-4, cell=CellFilter(scalar_pressure=0.02))
    assert result.converged.all() and result.steps[1] == 0
    assert torch.equal(result.system.cell[1:], system.cell[1:])
    length = (result.system.positions[-1] - result.system.positions[-2]).norm()
    assert abs(float(length) - 2 ** (1 / 6) * LJ["sigma"]) < 1e-4
    alone = relax(System.from_ase(crystal(1)), model, "lbfgs", fmax=1e-4, cell=CellFilter(scalar_pressure=0.02))
    assert torch.equal(alone.system.cell, result.system.cell[0])
    nothing = relax(System(torch.zeros((0, 3), dtype=torch.float64)), lambda s: Evaluation(torch.zeros(1), s.positions))
    assert nothing.converged.all() and nothing.system.positions.shape == (0, 3)


@pytest.mark.parametrize("shape", [(3, 3), (1, 3, 3)])
def test_systems_that_share_a_cell_relax_it_each(shape: tuple[int, ...]) -> None:
    model, one = lennard_jones_model(), System.from_ase(crystal(1))
    assert one.cell is not None
    two = one._replace(
        positions=torch.cat([one.positions, one.positions.flip(0) + 0.1]),
        cell=one.cell.reshape(shape),
        batch_idx=torch.tensor([0] * 4 + [1] * 4),
    )
    for cell in (False, True):
        result = relax(two, model, fmax=1e-3, cell=cell, compact_every=2)
        alone = relax(one, model, fmax=1e-3, cell=cell)
        assert result.converged.all() and result.system.cell is not None and alone.system.cell is not None
        assert torch.equal(result.system.cell[0], alone.system.cell)
        assert torch.equal(result.system.positions[:4], alone.system.positions)


# -- minima ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pressure", [-0.02, 0.0, 0.3])
def test_volume_under_pressure(pressure: float) -> None:
    """Against a scan of the energy of the perfect crystal, whose only free coordinate is its volume."""
    model, atoms = lennard_jones_model(), bulk("Ar", "fcc", 5.3, cubic=True)

    def enthalpy(length: float) -> float:
        scaled = atoms.copy()
        scaled.set_cell(np.eye(3) * length, scale_atoms=True)
        return float(model(System.from_ase(scaled)).energies) + pressure * length**3

    best = minimize_scalar(enthalpy, bounds=(4.8, 5.7), method="bounded", options={"xatol": 1e-9}).x
    start = crystal(4)
    result = relax(System.from_ase(start), model, "lbfgs", fmax=1e-6, cell=CellFilter(scalar_pressure=pressure))
    assert result.converged.all()
    assert abs(float(result.system.volume) / best**3 - 1) < 1e-6
    assert torch.allclose(result.evaluation.stress[0], -pressure * torch.eye(3, dtype=torch.float64), atol=1e-6)


def test_stress_as_criterion() -> None:
    system, model, pressure = System.from_ase(crystal(3)), lennard_jones_model(), 0.05
    options = CellFilter(mask=IN_PLANE, scalar_pressure=pressure)
    loose, tight = (relax(system, model, "lbfgs", fmax=0.1, smax=s, cell=options) for s in (1e-2, 1e-6))
    for result, smax in ((loose, 1e-2), (tight, 1e-6)):
        stress = result.evaluation.stress[0, :2, :2] + pressure * torch.eye(2)
        assert result.converged.all() and stress.abs().max() < smax
        assert result.evaluation.forces.norm(dim=1).max() < 0.1 * 1.2  # forces of the chart are those times F
    assert tight.steps > loose.steps


@pytest.mark.parametrize("cell", [False, True], ids=["positions", "cell"])
def test_fixed_atoms_stay(cell: bool) -> None:
    atoms = [crystal(1), crystal(2, 1)]
    system, model = System.from_ase(atoms), lennard_jones_model()
    fixed = torch.zeros((7, 3), dtype=torch.bool)
    fixed[:2], fixed[5, 2] = True, True
    result = relax(system, model, "L-BFGS", fmax=0.01, cell=cell, fixed=fixed)
    assert result.converged.all()
    if cell:
        of_atoms = torch.linalg.inv(result.system.cell) @ system.cell
        back = (result.system.positions[:, None] @ of_atoms[system.batch_idx])[:, 0]
        assert torch.allclose(back[fixed], system.positions[fixed], rtol=0, atol=1e-12)
    else:
        back = result.system.positions
        assert torch.equal(back[fixed], system.positions[fixed])
        assert (result.evaluation.forces[fixed]).abs().max() > 0.02  # the model's forces, not those of the constraint
    assert (back - system.positions)[~fixed].abs().min() > 1e-4


def test_float32() -> None:
    system, model = System.from_ase(batch_of_crystals()[:3], dtype=torch.float32), lennard_jones_model()
    result = relax(system, model, "lbfgs", fmax=0.01, cell=True)
    precise = relax(System.from_ase(batch_of_crystals()[:3]), model, "lbfgs", fmax=0.01, cell=True)
    assert result.system.positions.dtype == result.evaluation.forces.dtype == torch.float32 and result.converged.all()
    assert torch.allclose(result.evaluation.energies.double(), precise.evaluation.energies, atol=1e-3)


@unconverged
@pytest.mark.parametrize("optimizer", ["fire", "fire2", "lbfgs"])
def test_forces_in_float32_are_not_rounded_again(optimizer: str) -> None:
    """Coordinates and sums over atoms are in float64, whatever the model gives."""
    system, inner, found = System.from_ase(crystal(1, repeat=(2, 1, 1))), lennard_jones_model(), []
    for widened in (False, True):

        def model(now: System, widened: bool = widened) -> Evaluation:
            narrow = [value.to(torch.float32) for value in inner(now)]
            return Evaluation(*(value.to(torch.float64) for value in narrow) if widened else narrow)

        found.append([relax(system, model, optimizer, max_steps=8, cell=cell).system for cell in (False, True)])
    assert equal(*(tuple((one.positions, one.cell) for one in systems) for systems in found))


def test_torch_models_whose_forces_come_from_autograd() -> None:
    """The model runs in the caller's mode, results have no graph."""
    target = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    model = FromEnergies(lambda s: (s.positions - target).square().sum().reshape(1), create_graph=True)
    start = torch.zeros((2, 3), dtype=torch.float64, requires_grad=True)
    result = relax(System(start), model, "lbfgs", fmax=1e-6)
    assert not any(t.requires_grad for t in (result.system.positions, *result.evaluation[:2]))
    assert (result.system.positions - target).abs().max() < 1e-6

    def last(x):
        return relax(System(x), model, "lbfgs", fmax=1e-6).system.positions.sum()

    for transform in (lambda: torch.func.grad(last)(start), lambda: torch.func.jvp(last, (start,), (start,))):
        with pytest.raises(ValueError, match="`positions` of the system is differentiated"):
            transform()
    assert torch.func.grad(lambda x: last(x.detach()) * x.sum())(start).shape == start.shape


def test_relaxed_energies_in_transforms_have_derivatives_by_what_stays() -> None:
    """Forces are zero, so energies of the relaxed system change as at constant positions."""
    places = 0.2 * torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    cell = torch.eye(3, dtype=torch.float64) + 0.1
    model = FromEnergies(lambda s: ((s.positions - places @ s.cell.reshape(3, 3)) ** 2).sum() + (s.cell**2).sum())

    def relaxed(box, **options):
        return model.function(relax(System(places, cell=box), model, "lbfgs", fmax=1e-8, **options).system)

    with pytest.warns(NvalchemiopsWarning, match="its `system.cell` alone"):
        slope = torch.func.grad(relaxed)(cell)
    assert (slope - 2.0 * cell).abs().max() < 1e-7
    with pytest.raises(ValueError, match="`cell` of the system is differentiated"):
        torch.func.grad(lambda box: relaxed(box, cell=True))(cell)

    def along_charges(charges):
        model = FromEnergies(lambda s: (s.positions - s.charges.unsqueeze(1)).square().sum() + s.charges.square().sum())
        return model.function(relax(System(places, charges), model, "lbfgs", fmax=1e-8).system)

    with pytest.warns(NvalchemiopsWarning, match="its `system.charges` alone"):
        slope = torch.func.grad(along_charges)(places[:, 0])
    assert (slope - 2.0 * places[:, 0]).abs().max() < 1e-7
