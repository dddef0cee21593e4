"""Coordinates of systems that relax: deformations, forces along them, and which changes of cells options allow."""

from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from scipy.linalg import expm, expm_frechet

from nvalchemiops.torch.dynamics import CellFilter, Chart, Evaluation, npt, relax, simulate
from nvalchemiops.torch.dynamics.chart import _derivative_of_exp
from nvalchemiops.torch.systems import System
from tests.dynamics.relaxation import IN_PLANE, batch_of_crystals, crystal, equal, lennard_jones_model, unconverged


def test_derivative_of_the_exponential() -> None:
    rng = np.random.default_rng(5)
    matrices, directions = rng.standard_normal((2, 5, 3, 3)) * np.array([1e-6, 0.1, 0.5, 1.0, 1.0])[:, None, None]
    directions[3:] *= np.array([1e-30, 1e30])[:, None, None]  # forces in any units
    slopes = _derivative_of_exp(torch.as_tensor(matrices), torch.as_tensor(directions)).numpy()
    for a, e, slope in zip(matrices, directions, slopes):
        expected = expm_frechet(a, e, compute_expm=False)
        assert np.abs(slope - expected).max() < 1e-13 * np.abs(expected).max()


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
        {"mask": torch.tensor(IN_PLANE), "constant_volume": True},
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


def test_a_chart_of_positions_alone() -> None:
    system = System(torch.randn((4, 3), dtype=torch.float64))
    chart, found = Chart(system), Evaluation(torch.ones(1), -system.positions)
    assert torch.equal(chart.forces(chart.start, found), found.forces) and chart.fixed is None
    assert chart.enthalpy(chart.start, found) == 1.0 and chart.largest_stress(chart.start, found) == 0.0
    same, atoms, rows = chart.select(torch.tensor([0]))
    assert same is chart and torch.equal(atoms, torch.arange(4)) and torch.equal(rows, atoms)
    with pytest.raises(TypeError, match="`system` must be a System, got Tensor"):
        Chart(system.positions)  # type: ignore[arg-type]


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


def test_systems_without_atoms_have_any_cell_factor_and_pressure() -> None:
    """Numbers of atoms, the factors of ASE, are zero then."""
    atoms = System.from_ase([crystal(1), Atoms(cell=[3.0, 4.0, 5.0], pbc=True), crystal(2)])
    counts = torch.bincount(atoms.batch_idx, minlength=3)
    chart = Chart(atoms, cell=CellFilter(cell_factor=counts, scalar_pressure=torch.tensor([0.1, torch.nan, 0.1])))
    assert torch.equal(chart.at(chart.start).cell, atoms.cell)


def test_fixed_atoms_may_be_an_array_or_a_list() -> None:
    """As masses and velocities may; what holds no bools is an error with the name of the argument."""
    system = System.from_ase([crystal(1), crystal(2)])
    n = len(system.positions)
    fixed = torch.zeros((n, 3), dtype=torch.bool)
    fixed[1], fixed[2, 0] = True, True
    for given, same in ((fixed, fixed), (fixed[:, 0], fixed[:, 0])):
        for form in (given.numpy(), given.tolist(), tuple(given.tolist())):
            assert torch.equal(Chart(system, fixed=form).fixed, same)
    with torch.device("meta"):  # a default device is not that of the system
        chart = Chart(system, fixed=np.broadcast_to(True, (n,)))  # read-only
    assert chart.fixed.all()
    empty = System.from_ase(crystal(1)[:0])
    assert Chart(empty, fixed=[]).fixed.shape == (0,)
    of_others = ({1, 2}, np.zeros(n), [[1, 2]], np.zeros(0, dtype=bool), np.array([None] * n), ["Ar"] * n)
    for wrong in (*of_others, [[True], [True, False]]):
        with pytest.raises((TypeError, ValueError), match=r"`fixed` must be .*indices"):
            Chart(system, fixed=wrong)


def test_fixed_atoms_may_be_indices() -> None:
    """As in ASE's FixAtoms. A mask of 0 and 1 holds an index twice, unless there are one or two atoms."""
    system = System.from_ase([crystal(1), crystal(2)])
    n = len(system.positions)
    expected = torch.arange(n) % (n - 1) == 0
    index = np.array([n - 1, 0])
    tensors = torch.as_tensor(index), torch.as_tensor(index, dtype=torch.int32)
    for form in (index, *tensors, [0, -1], [-n, -1], range(0, n, n - 1)):
        assert torch.equal(Chart(system, fixed=form).fixed, expected)
    assert Chart(System.from_ase(crystal(1)[:1]), fixed=[-1]).fixed.all()
    for nothing in ([], np.array([]), index[:0]):
        assert not Chart(system, fixed=nothing).fixed.any()
    for wrong, text in (([0, n], f"index {n}, but"), ([1, 1 - n], "1 twice.*mask must be bool"), ([1, 0] * 3, "twice")):
        with pytest.raises(ValueError, match=text):
            Chart(system, fixed=wrong)
    with pytest.raises(ValueError, match="index 0, but there are 0 atoms"):
        Chart(System.from_ase(crystal(1)[:0]), fixed=[0])
