"""Plans where cells, lists of neighbors and images differ from call to call: one serves them all."""

import functools
import math

import pytest
import torch

from nvalchemiops.notices import AccuracyWarning
from nvalchemiops.torch import plans, record
from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping, d3_dispersion
from nvalchemiops.torch.interactions.electrostatics import (
    coulomb_energy,
    coulomb_energy_forces,
    dsf_coulomb,
    electrostatic_potential,
    ewald_summation,
    particle_mesh_ewald,
    prepare_wave_vectors,
)
from nvalchemiops.torch.interactions.pair import lennard_jones
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.comparing import close
from tests.support.plans import forget, ordinary, plans_of_calls, way_of
from tests.support.repeated import CELL, F64, NEAR, SYSTEM, Q, X, several
from tests.support.systems import batch, triclinic

lennard_jones_ = lennard_jones

ELEMENTS = torch.tensor([6, 8, 0] * 4)
POTENTIAL = lennard_jones(3.0)
CHANGING_CELLS = {
    "pair potential": lambda x, cell, **near: POTENTIAL(
        x, cell, sigma=1.0, epsilon=0.3, compute_forces=True, compute_virial=True, **near
    ),
    "D3": lambda x, cell, **near: d3_dispersion(
        x, ELEMENTS.clamp(1), RationalDamping(0.4, 4.4, 0.8), D3Parameters.load(), cell, compute_forces=True, **near
    ),
    "Coulomb sum": lambda x, cell, **near: dsf_coulomb(
        x, Q, 3.0, 0.2, cell, None, NEAR["neighbor_list"], NEAR["neighbor_ptr"], NEAR["neighbor_shifts"]
    ),
}


@pytest.mark.parametrize("name, pbc", [*((name, None) for name in CHANGING_CELLS), ("D3", torch.tensor([True] * 3))])
def test_one_plan_serves_all_cells(name, pbc):
    """With a given list; also gradients by cells. Singular cells are found as before."""
    near = NEAR if pbc is None else {**NEAR, "pbc": pbc}

    def call(cell, tracked=False):
        x, cell = X.clone().requires_grad_(tracked), cell.clone().requires_grad_(tracked)
        found = CHANGING_CELLS[name](x, cell, **near)
        return torch.autograd.grad(found[0].square().sum(), (x, cell)) if tracked else found

    for tracked in (False, True):
        several(functools.partial(call, CELL, tracked))
        for scale in (1.001, torch.tensor([[1.0], [1.01], [0.98]], dtype=F64)):
            found = call(scale * CELL, tracked)
            assert way_of(name) == "plan (replayed)"
            close(found, ordinary(functools.partial(call, scale * CELL, tracked)), 0.0)
    with pytest.raises(ValueError, match="`cell` is singular"):
        call(CELL[:, [0, 0, 2]])
    with pytest.raises(ValueError, match="`cell` has entries that are not finite"):
        call(math.nan * CELL)
    flat = CELL.clone()
    flat[:, 2] = 0.0
    with pytest.raises(ValueError, match="images along an axis that is open" if pbc is None else "`cell`"):
        call(flat)


@pytest.mark.parametrize("given_pbc", [False, True])
def test_recorded_pair_sums_take_other_cells(given_pbc):
    """The function is called for those that it would name, or that have an open axis."""
    potential, periodic = lennard_jones(4.0), torch.ones(3, dtype=torch.bool)

    def step(x, cell, pbc):
        return potential(x, cell, sigma=1.1, epsilon=0.2, pbc=pbc, compute_virial=True, **NEAR)

    again, pbc = record(step), periodic if given_pbc else None
    for n in range(4):
        x, cell = X + 0.01 * n, CELL * (1.0 + 0.01 * n)
        assert all(map(torch.equal, again(x, cell, pbc), step(x, cell, pbc)))
    assert "1 recorded, 2 replayed" in again.explain()
    with pytest.raises(ValueError, match="`cell` is singular"):
        again(X, CELL[..., [0, 0, 2]], pbc)
    with pytest.raises(ValueError, match="images along an axis that is open"):
        again(X, CELL * torch.tensor([[1.0], [0.0], [1.0]], dtype=F64), pbc if pbc is None else ~periodic)
    assert all(map(torch.equal, again(X, CELL, pbc), step(X, CELL, pbc)))


def test_singular_cells_are_found_in_any_unit():
    """Also where the product of three lengths has few digits, or none."""
    generator = torch.Generator().manual_seed(0)
    for exponent in (-150, -108, -107, -106, 0, 102, 150):
        for _ in range(20):
            cell = torch.randn(3, 3, generator=generator, dtype=F64)
            cell[2] = cell[0] + cell[1]
            with pytest.raises(ValueError, match="`cell` is singular"):
                coulomb_energy(X, Q, 10.0**exponent * cell, 3.0, **NEAR)


@pytest.mark.parametrize("form", ["list", "int64", "matrix"])
@pytest.mark.parametrize("method", [ewald_summation, particle_mesh_ewald])
def test_a_sum_that_chooses_alpha_for_a_given_list_has_a_plan(method, form):
    """Also for another list, of any length."""
    calls = []
    for n in range(6):
        x = X + 0.02 * n * torch.sin(3.0 * X)
        options = (
            {"return_neighbor_list": False, "max_neighbors": 90} if form == "matrix" else {"return_neighbor_list": True}
        )
        first, second, third = neighbor_list(x, 3.0, CELL, **options)
        near = {"neighbor_list": first, "neighbor_ptr": second, "neighbor_shifts": third}
        if form == "matrix":
            near = {"neighbor_matrix": first, "neighbor_matrix_shifts": third}
        elif form == "int64":
            near["neighbor_list"] = first.long()
        calls.append(functools.partial(method, x, Q, CELL, cutoff=3.0, accuracy=1e-2, compute_forces=True, **near))
    for call in calls[:4]:
        call()
    for call in calls[4:]:
        found = call()
        assert way_of("sum") == "plan (replayed)"
        close(found, ordinary(call), 0.0)


def batch_of_two():
    system = batch(SYSTEM, triclinic(9, seed=5, charged=True))
    near = neighbor_list(system.positions, 3.0, system.cell, batch_idx=system.batch_idx, return_neighbor_list=True)
    return system, dict(zip(NEAR, near)) | {"batch_idx": system.batch_idx}


TWO, NEAR_TWO = batch_of_two()
VECTORS = prepare_wave_vectors(CELL, 4.0)
SLAB = {"pbc": torch.tensor([True, True, False]), "slab_correction": True}
EXCLUDED = {"exclusions": torch.tensor([[0, 2, 5], [1, 3, 4]])}
MESH = {"alpha": 0.8, "mesh_dimensions": (12, 10, 9)}
SUMS_OF_CELLS = {
    "prepared": (ewald_summation, {"alpha": 0.8, "miller_indices": VECTORS}),
    "length": (ewald_summation, {"alpha": 0.8, "k_cutoff": 4.0, **EXCLUDED}),
    "bounds": (ewald_summation, {"alpha": torch.tensor([0.8], dtype=F64), "miller_bounds": (4, 4, 4), **SLAB}),
    "chosen": (ewald_summation, {"accuracy": 1e-3, "cutoff": 3.0, **EXCLUDED}),
    "mesh": (particle_mesh_ewald, {**MESH, **EXCLUDED}),
    "mesh of dipoles": (particle_mesh_ewald, {**MESH, **SLAB, "dipoles": 0.3 * X.sin()}),
    "chosen mesh": (particle_mesh_ewald, {"accuracy": 1e-3, "cutoff": 3.0}),
    "batch, length": (ewald_summation, {"alpha": 0.8, "k_cutoff": torch.tensor([4.0, 3.7], dtype=F64)}),
    "batch, chosen": (ewald_summation, {"accuracy": 1e-3, "cutoff": 3.0}),
    "batch, mesh": (particle_mesh_ewald, {**MESH, "alpha": torch.tensor([0.8, 0.7], dtype=F64)}),
}


def test_wrong_numbers_of_systems_are_named_when_a_call_is_recorded_and_replayed():
    (x, _, cell, good), near = TWO, {name: NEAR_TWO[name] for name in NEAR}

    def energies(batch_idx):
        return POTENTIAL(x, cell, sigma=1.0, epsilon=0.3, batch_idx=batch_idx, num_systems=2, **near)

    recorded, expected, wrong = record(energies), energies(good), good.clone()
    wrong[-1] = 2
    for _ in range(2):
        with pytest.raises(ValueError, match=r"`batch_idx` must hold numbers in 0 \.\. 1"):
            recorded(wrong)
        close(recorded(good), expected, 0.0)


@pytest.mark.later_cases("bounds", "mesh of dipoles", "batch, chosen")
@pytest.mark.parametrize("name", SUMS_OF_CELLS)
def test_sums_share_a_plan_where_cells_change(name):
    """Also derivatives by cells, and with k-vectors that come and go. A cell that stays has its own plan."""
    function, options = SUMS_OF_CELLS[name]
    (x, q, h, _), near = (TWO, NEAR_TWO) if name.startswith("batch") else (SYSTEM, NEAR)
    x, q, h = (t.to(F64) for t in (x, q, h))
    compute = {"compute_forces": True, "compute_charge_gradients": True, "compute_virial": True}

    def results(x, cell):
        return function(x, q, cell, **options, **near, **compute)

    def gradients(x, cell):
        x, cell = x.clone().requires_grad_(), cell.clone().requires_grad_()
        energies = function(x, q, cell, **options, **near)
        first = torch.autograd.grad(energies.square().sum(), (x, cell), create_graph=True)
        return [t.detach() for t in (*first, *torch.autograd.grad(first[1].square().sum(), (x, cell)))]

    def scaled(n):
        strain = torch.eye(3, dtype=F64) + 0.004 * n * torch.tensor(
            [[1.0, 0.3, 0.0], [0.0, -0.5, 0.0], [0.2, 0.0, 0.4]]
        )
        return x @ strain + 0.01 * n * x.cos(), h @ strain

    for call, tolerance in ((results, 0.0), (gradients, 1e-11)):
        forget()
        ways = []
        for n in range(12):
            given = scaled(n)
            found = call(*given)
            ways.append(way_of("sum"))
            if name in ("chosen mesh", "batch, chosen") and n > 1:
                assert way_of("forces nearby") == "plan (replayed)", "one for all cells and reaches"
            close(found, ordinary(functools.partial(call, *given)), tolerance)
        # a second derivative passes the first ones twice, so that plans of single cells are tried until they do not pay
        assert "plan (replayed, for any cell)" in ways[4 if call is results else 0 :], ways
        assert "not recorded" not in plans.explain()  # derivatives of any order
        with pytest.raises(ValueError, match="`cell` is singular"):
            call(given[0], given[1][..., [0, 0, 2]])
        with pytest.raises(ValueError, match="`cell` has entries that are not finite"):
            call(given[0], math.nan * given[1])
        with pytest.raises(ValueError, match="`cell` has a zero lattice vector"):
            call(given[0], given[1] * torch.tensor([[1.0], [0.0], [1.0]], dtype=F64))
    if name == "prepared":
        with pytest.warns(AccuracyWarning, match="prepared for another cell"):
            results(x, 1.2 * h)
    forget()
    for _ in range(4 if name.endswith("chosen") else 3):  # chosen k-vectors are kept when the cell returns
        results(*scaled(3))
    assert way_of("sum") == "plan (replayed)"


def test_gradients_by_cells_with_longer_indices():
    """As many k-vectors, with indices beyond those of the plan: plans of derivatives notice it, too."""
    x, q, *_ = SYSTEM
    near = dict(zip(NEAR, neighbor_list(x, 1.5, 20.0 * CELL, return_neighbor_list=True)))

    def gradients(*lengths):
        cell = torch.diag(torch.tensor(lengths, dtype=F64)).requires_grad_()
        energies = ewald_summation(x, q, cell, alpha=0.8, k_cutoff=3.0, **near)
        first = torch.autograd.grad(energies.square().sum(), cell, create_graph=True)
        return [t.detach() for t in first]

    ways = []
    for lengths in (
        *((5.0, 5.0, 20.0 + 0.001 * n) for n in range(4)),
        *((20.0 + 0.001 * n, 5.0, 5.0) for n in range(4)),
    ):
        found = gradients(*lengths)
        ways.append(way_of("sum"))
        close(found, ordinary(functools.partial(gradients, *lengths)), 1e-11)
    assert ways[3] == ways[7] == "plan (replayed, for any cell)", "a plan that is too small is made again"


def test_a_batch_of_no_systems_is_empty_in_each_call():
    near = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in zip(NEAR, ((2, 0), (1,), (0, 3)))}
    given = X[:0], Q[:0], CELL.reshape(-1, 3, 3)[:0], 0.5
    for _ in range(3):
        found = ewald_summation(
            *given, k_cutoff=3.0, batch_idx=near["neighbor_ptr"][:0], energy_reduction="system", **near
        )
        assert found.shape == (0,)
        with pytest.raises(ValueError, match="`batch_idx` is needed"):
            ewald_summation(*given, k_cutoff=3.0, **near)


@pytest.mark.parametrize("form", ["list", "matrix", "searched"])
@pytest.mark.parametrize("method", [ewald_summation, particle_mesh_ewald, electrostatic_potential])
@pytest.mark.parametrize("given", [{"accuracy": 1e-3}, {"alpha": 0.8}], ids=["parameters chosen", "parameters given"])
def test_excluded_pairs_are_nearest_images_of_the_positions_of_each_call(method, form, given):
    """Atoms that move by lattice vectors: the results stay the same, the nearest images do not."""
    options = {"exclusions": torch.tensor([[0, 2, 5], [1, 3, 4]]), "cutoff": 3.0, **given}
    if "alpha" in given:
        options |= {"mesh_dimensions": (12, 10, 9)} if method is particle_mesh_ewald else {"k_cutoff": 4.0}
    found = []
    for n in range(7):
        x = X.clone()
        if n > 4:
            x[[1, 2]] += CELL.reshape(3, 3)[[0, 2]] * torch.tensor([[1.0], [-2.0]], dtype=F64)
        near = {}
        if form == "matrix":
            near["neighbor_matrix"], _, near["neighbor_matrix_shifts"] = neighbor_list(x, 3.0, CELL, max_neighbors=90)
        elif form == "list":
            near = dict(zip(NEAR, neighbor_list(x, 3.0, CELL, return_neighbor_list=True)))
        found.append(method(x, Q, CELL, **options, **near))
        close(found[-1:], found[:1], 1e-11)


@pytest.mark.parametrize("form", ["pointers", "part of a wide list", "matrix"])
@pytest.mark.parametrize("method", [ewald_summation, particle_mesh_ewald])
def test_a_plan_reads_the_pairs_of_each_call_in_short_lists(method, form):
    """Lists with fewer pairs than atoms: only lists of the same length share a plan."""
    listed, _, images = neighbor_list(X, 4.0, CELL, return_neighbor_list=True)
    ascending = (listed[0] < listed[1]).nonzero()[:8, 0].tolist()
    assert len(ascending) == 8
    for n, place in enumerate(ascending):
        pair, shifts = listed[:, place], torch.stack([images[place], -images[place]])
        if form == "matrix":
            matrix, far = torch.full((len(X), 1), len(X), dtype=torch.int32), torch.zeros(len(X), 1, 3).int()
            matrix[pair.long(), 0], far[pair.long(), 0] = pair.flip(0), shifts
            near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": far}
        else:
            wide = torch.zeros(2, 5, dtype=torch.int32)
            wide[:, :2] = torch.stack([pair, pair.flip(0)])
            near = {
                "neighbor_list": wide[:, :2] if form == "part of a wide list" else wide[:, :2].contiguous(),
                "neighbor_ptr": (torch.arange(len(X) + 1)[:, None] > pair).sum(1).int(),
                "neighbor_shifts": shifts,
            }
        call = functools.partial(method, X, Q, CELL, cutoff=3.0, accuracy=1e-2, compute_forces=True, **near)
        found = call()
        assert n < 3 or way_of("sum") == "plan (replayed)"
        close(found, ordinary(call), 0.0)


FINDING = {
    "pair potential": lambda x: lennard_jones(3.0)(x, CELL, sigma=1.0, epsilon=0.3, compute_forces=True),
    "pair potential, open": lambda x: lennard_jones(3.0)(x, sigma=1.0, epsilon=0.3, compute_virial=True),
    "D3": lambda x: d3_dispersion(
        x, ELEMENTS, RationalDamping(0.4, 4.4, 0.8), D3Parameters.load(), CELL, cutoff=3.0, compute_forces=True
    ),
    "Coulomb sum": lambda x: dsf_coulomb(x, Q, 3.0, 0.2, CELL, compute_virial=True),
    "Coulomb sum of moments": lambda x: coulomb_energy_forces(x, Q, CELL, 3.0, 0.4, dipoles=X),
    "batch": lambda x: dsf_coulomb(x, Q, 3.0, 0.2, batch_idx=torch.tensor([0, 1, 1, 2] * 3, dtype=torch.int32)),
}


def test_searches_along_all_axes_share_a_plan_whether_or_not_these_are_given():
    periodic, given = torch.ones(1, 3, dtype=torch.bool), {"sigma": 1.0, "epsilon": 0.3, "compute_virial": True}
    forget(potential := lennard_jones(3.0))
    expected = [potential(X, CELL, **given) for _ in range(3)][-1]
    for pbc in (periodic, periodic[0]):
        close(potential(X, CELL, pbc=pbc, **given), expected, 0.0)
        assert way_of("search") == "plan (replayed)"
    for pbc, advice in ((periodic, "`pbc` says that all axes are periodic"), (None, "a vector of zeros")):
        with pytest.raises(ValueError, match=f"`cell` is singular.*; .*{advice}"):
            potential(X, CELL[:, [0, 0, 2]], pbc=pbc, **given)
    near = {"neighbor_matrix": torch.zeros(len(X), 1).int(), "neighbor_matrix_shifts": torch.ones(len(X), 1, 3).int()}
    for listed in ({}, near):
        with pytest.raises(ValueError, match="`cell` has a zero lattice vector, but `pbc` says"):
            potential(X, CELL * torch.tensor([[1.0], [1.0], [0.0]]), pbc=periodic, **listed, **given)


@pytest.mark.parametrize("name", FINDING)
def test_sums_that_find_their_neighbors_have_plans(name, monkeypatch):
    """One for any number of pairs, with the bits of ordinary calls, and derivatives; errors as before."""
    potentials = {}  # one object, which owns its plans
    monkeypatch.setitem(
        globals(), "lennard_jones", lambda cutoff: potentials.setdefault(cutoff, lennard_jones_(cutoff))
    )
    call, weights = FINDING[name], torch.linspace(0.5, 1.5, 12, dtype=F64)

    def both(x):
        leaf = x.clone().requires_grad_()
        energies, forces, *_ = call(leaf)
        wanted = (energies.sin() * weights[: len(energies)]).sum() + forces.sin().sum()
        return (*call(x), torch.autograd.grad(wanted, leaf)[0])

    for step in range(7):  # from dense to dilute
        x = X * (1.0 + 0.06 * step)
        close(both(x), ordinary(lambda x=x: both(x)), 0.0)
    owner = potentials.get(3.0)
    assert plans_of_calls(owner) and plans_of_calls(owner, of_derivatives=True), plans.explain()
    broken = X.clone()
    broken[1] = torch.nan
    for wrong, message in ((broken, "NaN"), (X[:, :2], "shape"), (X.int(), "float")):
        with pytest.raises((ValueError, TypeError), match=message):
            call(wrong)
