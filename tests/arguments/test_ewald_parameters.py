"""Bad parameters of Ewald sums are told where they are given: to estimates, and to modules when they are made."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch

from nvalchemiops.interactions.electrostatics import error_models as core
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.runtime.context import ValuesNeededError
from nvalchemiops.torch.systems import System
from tests.support.systems import triclinic

SYSTEM = triclinic(6)
X, CELL = SYSTEM.positions, SYSTEM.cell

ESTIMATES = {
    "ewald": lambda cell, **options: electrostatics.estimate_ewald_parameters(X, cell, **options),
    "pme": lambda cell, **options: electrostatics.estimate_pme_parameters(X, cell, **options),
    "mesh": lambda cell, **options: electrostatics.estimate_pme_mesh_dimensions(cell, 0.6, **options),
}


@pytest.mark.parametrize(
    "estimate", [*ESTIMATES.values(), lambda cell: electrostatics.mesh_spacing_to_dimensions(cell, 0.5)]
)
@pytest.mark.parametrize(
    ("error", "cell"),
    [
        (ValueError, CELL * 0.0),
        (ValueError, torch.cat([CELL[:, :2], CELL[:, :1]], 1)),
        (ValueError, CELL * math.nan),
        (ValueError, CELL[:0]),
        (ValueError, CELL[0, :2]),
        (TypeError, CELL.int()),
        (TypeError, CELL.to(torch.complex128)),
        (TypeError, CELL.tolist()),
    ],
    ids=["zero", "singular", "nan", "empty", "flat", "int", "complex", "list"],
)
def test_cells(estimate, error, cell):
    with pytest.raises(error, match="`cell`"):
        estimate(cell)


@pytest.mark.parametrize("estimate", ESTIMATES.values(), ids=ESTIMATES)
@pytest.mark.parametrize("accuracy", [0.0, -1e-6, math.nan, math.inf, 1.0, 10.0, 1e-17, 1e-30])
def test_accuracies(estimate, accuracy):
    """Those that the sums refuse are refused by the estimates."""
    with pytest.raises(ValueError, match="`accuracy`"):
        estimate(CELL, accuracy=accuracy)


@pytest.mark.parametrize("function", [electrostatics.estimate_ewald_parameters, electrostatics.estimate_pme_parameters])
def test_float32_is_told_what_it_cannot_reach(function):
    with pytest.warns(UserWarning, match="`accuracy` = 1e-08 is out of reach of float32") as caught:
        function(X.float(), CELL.float(), accuracy=1e-8, **({"spline_order": 8} if "pme" in function.__name__ else {}))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(X.float(), CELL.float(), accuracy=1e-6)


# -- modules --------------------------------------------------------------------------------------

MADE = {
    "ewald": lambda **options: electrostatics.EwaldSummation(**{"alpha": 0.6, "k_cutoff": 4.0} | options),
    "pme": lambda **options: electrostatics.ParticleMeshEwald(
        **{"alpha": 0.6, "mesh_dimensions": (12, 12, 12)} | options
    ),
}


def of_a_number(name):
    yield from ((TypeError, name, value) for value in ("wide", True, 1j, [0.5, "wide"]))
    yield from ((ValueError, name, value) for value in (0.0, -1.0, math.nan, math.inf, [0.5, -0.5], [], [[0.5, 0.5]]))
    yield from ((ValueError, name, torch.tensor(value)) for value in (-1.0, [], [0.5, 0.0], [[0.5, 0.5]]))
    yield TypeError, name, torch.tensor(True)


def mistakes():
    for method in MADE:
        for case in of_a_number("alpha"):
            yield method, *case
        for error, value in ((TypeError, "far"), (ValueError, -1.0), (ValueError, 0.0), (ValueError, math.inf)):
            yield method, error, "cutoff", value
            yield method, error, "accuracy", value
        yield method, TypeError, "potential", "coulomb"
    for case in of_a_number("k_cutoff"):
        yield "ewald", *case
    for error, value in ((TypeError, "abc"), (TypeError, 8), (TypeError, (8.5, 8, 8)), (ValueError, (8, 8))):
        yield "pme", error, "mesh_dimensions", value
    yield "pme", ValueError, "mesh_dimensions", (1, 8, 8)
    for error, value in ((ValueError, 1), (ValueError, 11), (TypeError, 5.0), (TypeError, "5")):
        yield "pme", error, "spline_order", value


@pytest.mark.parametrize(("method", "error", "name", "value"), list(mistakes()))
def test_modules(method, error, name, value):
    with pytest.raises(error, match=f"`{name}`"):
        MADE[method](**{name: value})


@pytest.mark.parametrize("alpha", [0.6, torch.tensor(0.6), torch.tensor([0.5, 0.6, 0.7], dtype=torch.float64)])
def test_modules_hold_copies(alpha):
    for make in MADE.values():
        module = make(alpha=alpha)
        expected = torch.as_tensor(alpha).clone().reshape(-1).to(torch.float64)
        if isinstance(alpha, torch.Tensor):
            alpha.add_(1.0)
        torch.testing.assert_close(module.alpha, expected, rtol=1e-7, atol=0.0)
        if isinstance(alpha, torch.Tensor):
            alpha.sub_(1.0)
        assert module.alpha.dtype is torch.float64


def test_numbers_that_are_kept_are_those_of_one_system():
    """They are copies, and other atoms, cells, accuracies, costs and forces have others."""
    one, target = np.ones(1), core.Target(1e-5, np.full(1, 2.0))
    costs = core.COSTS["cpu"]
    calls = list(itertools.product((10.0, 20.0), (1e3, 2e3), (target, core.Target(1e-6)), (costs,)))
    calls += [(10.0, 1e3, core.Target(1e-5, np.full(1, 3.0)), costs), (10.0, 1e3, target, costs._replace(pair=99.0))]
    found = [core.ewald_alpha(n * one, v * one, t, c) for n, v, t, c in calls]
    assert len({float(alpha[0]) for alpha in found}) == len(calls)
    before = [alpha.copy() for alpha in found]
    for alpha in found:
        alpha *= 2.0
    for (n, v, t, c), expected in zip(calls, before, strict=True):
        assert np.array_equal(core.ewald_alpha(n * one, v * one, t, c), expected)
        two = core.ewald_alpha(np.array([n, 7.0]), np.array([v, 9.0]), t._replace(force=float(np.max(t.force))), c)
        assert two.shape == (2,) and two[0] == pytest.approx(expected[0], rel=1e-14)


@pytest.mark.parametrize("kind", [electrostatics.EwaldSummation, electrostatics.ParticleMeshEwald])
def test_modules_take_a_system_as_they_take_its_tensors(kind):
    charges = SYSTEM.charges if SYSTEM.charges.ndim == 1 else SYSTEM.charges[:, 0]
    atoms = System(X, charges, CELL, SYSTEM.batch_idx)
    apart = kind.estimate(X, CELL, SYSTEM.batch_idx, 1e-4, charges=charges).prepare(CELL)
    together = kind.estimate(atoms, accuracy=1e-4).prepare(atoms)
    names = ("alpha", "prepared_cell", "k_cutoff" if kind is electrostatics.EwaldSummation else "mesh_dimensions")
    for name in names:
        one, other = getattr(apart, name), getattr(together, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    with pytest.raises(TypeError, match="`cell` goes with tensors"):
        kind.estimate(atoms, CELL)


@pytest.mark.parametrize("kind", [electrostatics.EwaldSummation, electrostatics.ParticleMeshEwald])
@pytest.mark.parametrize("of_dipoles", [False, True])
def test_estimates_for_the_cutoff_of_a_list(kind, of_dipoles):
    """All else is chosen for it, so that the forces are those of another cutoff, also beside a molecule."""
    ions = triclinic(12)
    crystal = System(ions.positions, ions.charges, ions.cell)
    if of_dipoles:
        crystal = crystal._replace(dipoles=0.1 * crystal.positions)
    both = System.concatenate([crystal, crystal._replace(cell=None)])
    made = [kind.estimate(crystal, accuracy=1e-7), kind.estimate(both, real_space_cutoff=4.5, accuracy=1e-7)]
    forces = [module(s, compute_forces=True).forces for module, s in zip(made, (crystal, both))]
    assert made[1].cutoff == 4.5 != made[0].cutoff
    torch.testing.assert_close(forces[1][: len(forces[0])], forces[0], rtol=0.0, atol=2e-6 * forces[0].abs().max())


@pytest.mark.parametrize("function", [electrostatics.ewald_summation, electrostatics.particle_mesh_ewald])
def test_parameters_cannot_be_chosen_for_the_cells_of_all_slices(function):
    system = triclinic()
    cells = torch.stack([system.cell, 1.1 * system.cell])
    with pytest.raises(ValuesNeededError, match="slices of `vmap`"):
        torch.func.vmap(lambda cell: function(system.positions, system.charges, cell))(cells)


def test_lists_by_which_nothing_can_be_chosen_are_named():
    idx, cells = torch.arange(6).int() // 3, CELL.expand(2, 3, 3)
    pairs, ptr, shifts = neighbor_list(X, 4.0, cells, batch_idx=idx, return_neighbor_list=True)
    matrix, _, images = neighbor_list(X, 4.0, cells, batch_idx=idx)

    def of_list(first, second):
        given = pairs.clone()
        given[:, 0] = torch.tensor([first, second])
        return {"neighbor_list": given, "neighbor_ptr": ptr, "neighbor_shifts": shifts}

    def of_matrix(entry):
        given = matrix.clone()
        given[0, 0] = entry
        return {"neighbor_matrix": given, "neighbor_matrix_shifts": images}

    # read as they are, the second and the third are memory that is no list
    unfit = [of_list(*pairs[:, 0]) | {"neighbor_ptr": p} for p in (ptr + 1, ptr + 10**6, ptr - 10**6)]
    mistakes = (
        ("`neighbor_list` or `neighbor_matrix`: .* 0 .. 5", of_list(0, 6), of_list(0, -1), of_matrix(7), of_matrix(-1)),
        ("`batch_idx`: .* different systems", of_list(0, 5), of_matrix(5)),
        ("`neighbor_list` must be sorted by its first row, and `neighbor_ptr`.*argsort", of_list(1, 2), *unfit),
    )
    for function in (electrostatics.ewald_summation, electrostatics.particle_mesh_ewald):
        for message, *lists in mistakes:
            for given in lists:
                with pytest.raises(ValueError, match=message):
                    function(X, X[:, 0], cells, batch_idx=idx, **given)


def test_a_mesh_that_is_too_large_because_the_cell_is_skewed_needs_a_shorter_cell():
    shear = torch.tensor([[1.0, 0.0, 0.0], [3000.0, 1.0, 0.0], [0.0, 3000.0, 1.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match="shorter ones of the same lattice"):
        ESTIMATES["pme"](shear @ CELL, spline_order=8, accuracy=1e-4)
    assert math.prod(ESTIMATES["pme"](CELL, spline_order=8, accuracy=1e-4).mesh_dimensions) < 1e5


@pytest.mark.parametrize("kind", [electrostatics.EwaldSummation, electrostatics.ParticleMeshEwald])
def test_an_accuracy_in_the_place_of_the_cell(kind):
    """Where `Electrostatics.estimate` has it."""
    with pytest.raises(TypeError, match="got float: give `accuracy` by name"):
        kind.estimate(System(X, cell=CELL), 1e-6)


def test_there_is_nothing_to_choose_for_no_systems():
    none = torch.zeros(0, 3, 3, dtype=torch.float64)
    system = System(none[:, 0], none[:, 0, 0], none)
    for ask in (
        lambda: electrostatics.Electrostatics().explain(system),
        lambda: electrostatics.Electrostatics.estimate(system),
        lambda: electrostatics.EwaldSummation(0.4, 2.0).prepare(none),
        lambda: electrostatics.estimate_pme_mesh_dimensions(none, 0.4),
    ):
        with pytest.raises(ValueError, match="`cell` holds no system"):
            ask()
    with pytest.raises(ValueError, match=r"`batch_idx` is needed: .* 0 systems"):
        electrostatics.Electrostatics()(system)
