"""Relaxation: the steps of ASE's optimizers, batches that do what each system does alone, minima that are minima."""

import math
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
from scipy.linalg import expm, expm_frechet
from scipy.optimize import minimize_scalar

from nvalchemiops.ase import Calculator, Pair
from nvalchemiops.torch.dynamics import (
    FIRE,
    FIRE2,
    LBFGS,
    CellFilter,
    Chart,
    ConvergenceWarning,
    Evaluation,
    FromEnergies,
    SumOfTerms,
    npt,
    relax,
    simulate,
)
from nvalchemiops.torch.dynamics.chart import _exp_minus_one
from nvalchemiops.torch.interactions.electrostatics import EwaldSummation
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.systems import System
from tests.support.comparing import close

LJ = {"sigma": 3.4, "epsilon": 0.3}
SMOOTH = {"cutoff": 6.0, "r_switch": 4.5}  # without a kink at the cutoff, so that minima are smooth
IN_PLANE = [1, 1, 0, 0, 0, 1]

unconverged = pytest.mark.filterwarnings("ignore::nvalchemiops.torch.dynamics.ConvergenceWarning")


def lennard_jones_model() -> SumOfTerms:
    # without a skin, the order of pairs depends on nothing but the present positions
    return SumOfTerms(partial(lennard_jones(**SMOOTH), **LJ), skin=0.0)


def crystal(seed: int, n_vacancies: int = 0, repeat: tuple[int, int, int] = (1, 1, 1)) -> Atoms:
    """Sheared and perturbed argon, with strong bonds."""
    rng = np.random.default_rng(seed)
    atoms = bulk("Ar", "fcc", 5.2, cubic=True) * repeat
    del atoms[list(range(n_vacancies))]
    atoms.set_cell(atoms.cell @ (np.eye(3) + 0.05 * rng.standard_normal((3, 3))), scale_atoms=True)
    atoms.positions += 0.15 * rng.standard_normal(atoms.positions.shape)
    return atoms


def batch_of_crystals() -> list[Atoms]:
    sizes = [(0, (1, 1, 1)), (3, (1, 1, 1)), (2, (2, 1, 1)), (1, (1, 2, 1)), (0, (4, 4, 5))]
    return [crystal(k, *size) for k, size in enumerate(sizes)]


def equal(a: Any, b: Any) -> bool:
    """Whether all tensors in two trees of tuples have the same bits."""
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a is b or torch.equal(a, b)


# -- ASE ------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "fire": (FIRE(), AseFIRE),
    "fire2": (FIRE2(), AseFIRE2),
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
@pytest.mark.later_cases("abc-[hvmp]*", "fire2-[hvmp]*", "lbfgs-[hvmp]*")
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


# -- the chart ------------------------------------------------------------------------------------


def test_exponential_and_its_derivative() -> None:
    rng = np.random.default_rng(5)
    matrices, directions = rng.standard_normal((2, 4, 3, 3)) * np.array([1e-6, 0.1, 0.5, 1.0])[:, None, None]
    both = _exp_minus_one(torch.as_tensor(matrices), torch.as_tensor(directions)).numpy()
    values, slopes = both[:, :, :3], both[:, :, 3:]
    assert np.array_equal(values, _exp_minus_one(torch.as_tensor(matrices)).numpy())
    for a, e, value, slope in zip(matrices, directions, values, slopes):
        scale = np.abs(expm(a)).max()
        assert np.abs(value + np.eye(3) - expm(a)).max() < 2e-14 * scale
        assert np.abs(slope - expm_frechet(a, e, compute_expm=False)).max() < 1e-13 * scale * np.abs(e).max()
    # small deformations keep their digits
    assert np.abs(values[0] / (matrices[0] + matrices[0] @ matrices[0] / 2) - 1).max() < 1e-9


def moved(chart: Chart, scale: float = 0.1) -> torch.Tensor:
    """Coordinates at random, with deformations that the options allow."""
    generator = torch.Generator().manual_seed(3)
    change = scale * torch.randn(chart.start.shape, generator=generator, dtype=torch.float64)
    of_cells = change[chart.n_atoms :].reshape(-1, 3, 3)
    if chart.start.shape[0] > chart.n_atoms:
        masked = torch.where(chart._per_system["mask"], of_cells, 0.0)
        change[chart.n_atoms :] = chart._allowed(masked).reshape(-1, 3) * 3.0
    return chart.start + change


def test_chart_at_its_start_is_the_system() -> None:
    system = System.from_ase(batch_of_crystals())
    for precision in (torch.float64, torch.float32):
        given = system._replace(positions=system.positions.to(precision), cell=system.cell.to(precision))
        chart = Chart(given, cell=True)
        assert equal(chart.at(chart.start)[:3], given[:3])


def test_coordinates_are_logarithms_of_deformations() -> None:
    """x -> system -> x, the way back by the logarithm of the deformation gradient."""
    atoms = batch_of_crystals()[:3]
    system = System.from_ase(atoms)
    chart = Chart(system, cell=CellFilter(cell_factor=torch.tensor([2.0, 5.0, 1.0])))
    x = moved(chart)
    found = chart.at(x)
    gradient = torch.linalg.solve(system.cell, found.cell).mT
    for k, factor in enumerate([2.0, 5.0, 1.0]):
        logarithm = x[chart.n_atoms + 3 * k :][:3].numpy() / factor
        assert np.abs(expm(logarithm) - gradient[k].numpy()).max() < 1e-13
        here = system.batch_idx == k
        assert (found.positions[here] - x[: chart.n_atoms][here] @ gradient[k].mT).abs().max() < 1e-13


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hydrostatic_strain": True},
        {"constant_volume": True},
        {"mask": IN_PLANE, "constant_volume": True},
        {"mask": [1, 1, 0, 0, 0, 0], "hydrostatic_strain": True},
        {"mask": [1, 0, 1, 1, 0, 1]},
        {"mask": np.tril(np.ones((3, 3)))},
        {"scalar_pressure": torch.tensor([0.1, -0.05, 0.2])},
    ],
    ids=lambda options: "-".join(options) or "all",
)
def test_forces_are_minus_the_gradient_of_the_enthalpy(options: dict[str, Any]) -> None:
    model, chart = lennard_jones_model(), Chart(System.from_ase(batch_of_crystals()[:3]), cell=CellFilter(**options))
    x = moved(chart)
    forces = chart.forces(x, model(chart.at(x)))
    # along a direction in which the system may move, and along which each system has a force
    direction = moved(chart, 1.0) - chart.start

    def enthalpies(at: float) -> torch.Tensor:
        here = x + at * direction
        return chart.enthalpy(here, model(chart.at(here)))

    step = 1e-4
    slopes = (8.0 * (enthalpies(step) - enthalpies(-step)) - enthalpies(2 * step) + enthalpies(-2 * step)) / (12 * step)
    (expected,) = chart.rows.dots((forces, direction))
    assert torch.allclose(slopes, -expected, rtol=1e-6, atol=1e-7)
    assert (forces[chart.n_atoms :] * direction[chart.n_atoms :]).abs().max() > 0.1
    # forces lie in the space of allowed directions, unless the mask mixes components (see `Chart`)
    if options.get("hydrostatic_strain") or options.get("constant_volume"):
        of_cells = forces[chart.n_atoms :].reshape(-1, 3, 3)
        assert torch.allclose(chart._allowed(of_cells), of_cells, atol=1e-12)


def test_modes_keep_what_they_promise() -> None:
    atoms = batch_of_crystals()[:3]
    system, model = System.from_ase(atoms), lennard_jones_model()

    def relaxed(**options: Any) -> Any:
        found = relax(system, model, "lbfgs", fmax=0.1, cell=CellFilter(**options))
        assert found.converged.all()
        return found.system

    found = relaxed(constant_volume=True)
    assert torch.allclose(found.volume, system.volume, rtol=1e-12, atol=0)
    assert (found.cell - system.cell).abs().amax((1, 2)).min() > 1e-3
    scale = relaxed(hydrostatic_strain=True).cell / system.cell
    assert torch.allclose(scale, scale[:, :1, :1].expand(-1, 3, 3), rtol=1e-12, atol=0)
    strain = torch.linalg.solve(system.cell, relaxed(mask=IN_PLANE).cell) - torch.eye(3)
    assert strain[:, 2].abs().max() < 1e-14 and strain[:, :, 2].abs().max() < 1e-14
    assert strain[:, :2, :2].abs().min() > 1e-5
    strain = torch.linalg.solve(system.cell, relaxed(mask=np.tril(np.ones((3, 3)))).cell) - torch.eye(3)
    assert strain.triu(1).abs().max() < 1e-14 and strain.tril(-1).abs().max() > 1e-4


@unconverged
@pytest.mark.parametrize("mask", [(True, True, True), (True, False, True)])
@pytest.mark.parametrize("name", ["isotropic", "axes", "full"])
def test_names_allow_the_changes_that_npt_allows(name: str, mask: tuple[bool, bool, bool]) -> None:
    system, model = System.from_ase(crystal(1)), lennard_jones_model()
    cells = [
        relax(system, model, max_steps=3, cell=CellFilter.of(name, mask)).system.cell,
        simulate(system, model, npt(0.1, 0.01, 0.05, barostat_time=10.0, cell=name, mask=mask), 3).state.cell[0],
    ]
    if all(mask):
        assert torch.equal(relax(system, model, max_steps=3, cell=name).system.cell, cells[0])
    for cell in cells:
        assert cell is not None and system.cell is not None
        change = torch.linalg.solve(system.cell, cell) - torch.eye(3)
        axes = torch.tensor(mask)
        allowed = axes & axes[:, None] if name == "full" else torch.diag(axes)
        assert change[allowed].abs().min() > 1e-6 and (allowed.all() or change[~allowed].abs().max() < 1e-14)
        sizes = change.diagonal()[axes]
        assert (sizes - sizes[0]).abs().max() < 1e-14 if name == "isotropic" else (sizes[0] - sizes[-1]).abs() > 1e-8


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


def springs(system: System) -> Evaluation:
    """Atoms of any system at springs of different strength, by operations that treat each atom alone."""
    strength = system.numbers.to(system.positions.dtype)
    energies = torch.zeros(1 if system.batch_idx is None else int(system.batch_idx.max()) + 1, dtype=torch.float64)
    squares = system.positions.square().sum(1) * strength * 0.5
    places = torch.zeros(len(squares), dtype=torch.int64) if system.batch_idx is None else system.batch_idx
    return Evaluation(energies.index_add(0, places, squares), -strength[:, None] * system.positions)


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
    result = relax(System(torch.zeros((1, 3), dtype=torch.float64)), model, "lbfgs", max_steps=5)
    assert torch.allclose(result.system.positions, 5 * force / LBFGS().alpha, rtol=1e-12)


def test_a_bar_counts_systems(capsys: pytest.CaptureFixture[str]) -> None:
    system = System(torch.ones((2, 3), dtype=torch.float64), batch_idx=torch.tensor([0, 1], dtype=torch.int32))
    relax(system._replace(numbers=torch.ones(2)), springs, progress=True)
    assert "2/2" in capsys.readouterr().err


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
    result = relax(system, model, "lbfgs", fmax=0.01, cell=cell, fixed=fixed)
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


def test_torch_models_whose_forces_come_from_autograd() -> None:
    """The model runs in the caller's mode, results have no graph."""
    target = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
    model = FromEnergies(lambda s: (s.positions - target).square().sum().reshape(1), create_graph=True)
    start = torch.zeros((2, 3), dtype=torch.float64, requires_grad=True)
    result = relax(System(start), model, "lbfgs", fmax=1e-6)
    assert not any(t.requires_grad for t in (result.system.positions, *result.evaluation[:2]))
    assert (result.system.positions - target).abs().max() < 1e-6


# -- what goes wrong ------------------------------------------------------------------------------


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
        ({"optimizer": "newton"}, "`optimizer` must be 'fire' or 'fire2' or 'lbfgs'"),
        ({"optimizer": FIRE}, "`optimizer` must be a name or an Optimizer"),
        ({"cell": "cubic"}, "`cell` must be 'isotropic' or 'axes' or 'full'"),
        ({"cell": 1.0}, "`cell` must be True, False, a name or a CellFilter, got float"),
        ({"cell": CellFilter(mask=[1, 1])}, r"`mask` must have shape \(3,\), \(6,\)"),
        ({"cell": CellFilter(mask=[1, 1, 1, 1, 1, 0], constant_volume=True)}, "`constant_volume` needs a `mask`"),
        ({"cell": CellFilter(scalar_pressure=torch.zeros(3))}, "`scalar_pressure` must be a number or have shape"),
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


def test_systems_without_a_cell() -> None:
    with pytest.raises(ValueError, match="the system has none"):
        Chart(System(torch.zeros((2, 3))), cell=True)
    with pytest.raises(ValueError, match="`memory` must be at least 1"):
        LBFGS(memory=0)
