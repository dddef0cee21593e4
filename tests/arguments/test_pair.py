"""Bad arguments of every function on pairs raise an error that names them; NaN and atoms in one place stay local.

Nothing that an index points to is read before the index is known to be in range.
"""

import functools

import numpy as np
import pytest
import torch

from nvalchemiops.interactions.pair.expression import MAX_EXPONENT
from nvalchemiops.torch.interactions import electrostatics, lj
from nvalchemiops.torch.interactions.pair import (
    PairPotential,
    damped_shifted_force,
    lennard_jones,
    reaction_field,
    soft_core_lennard_jones,
    wolf,
    ziegler_biersack_littmark,
)
from nvalchemiops.torch.neighbors import neighbor_list
from tests.arguments.test_all_calls import (
    CALLS,
    CELL,
    CUTOFF,
    INDEX,
    MATRIX,
    MATRIX_SHIFTS,
    NEAR,
    ONES,
    OTHER,
    PAIRS,
    PTR,
    SHIFTS,
    TABLE,
    Q,
    X,
    general,
)  # fmt: skip
from tests.support.mistakes import assert_named

NAN, INF = float("nan"), float("inf")
HALF_PAIRS, HALF_PTR, HALF_SHIFTS = neighbor_list(X, CUTOFF, CELL, half_fill=True, return_neighbor_list=True)


LJ = {"positions": X, "sigma": 1.0, "epsilon": ONES, "cutoff": CUTOFF, "cell": CELL}
OF_LENNARD_JONES = ("lj_energy", "lj_forces", "lj_energy_forces", "lj_energy_forces_virial")
OF_CHARGES = ("coulomb_energy", "coulomb_forces", "coulomb_energy_forces", "dsf_coulomb", "ewald_real_space")


def bad_values(name):
    """(error, name of the argument, the bad value and whatever else must change with it)."""
    general_call, is_lj = name == "PairPotential", name.startswith("lj")
    if general_call or not is_lj:
        parameter = "scale" if general_call else "alpha"
        for value in (
            ONES,
            torch.ones(1, 1, dtype=torch.float64),
            torch.tensor(1.0, dtype=torch.float64, device=OTHER),
        ):
            yield ValueError, parameter, {parameter: value}
        for value in (torch.tensor(True), "wide"):
            yield TypeError, parameter, {parameter: value}
        yield (TypeError, ValueError), parameter, {parameter: None}  # no number, or missing
    if general_call:
        for value in ("all", TABLE.tolist(), TABLE + 0j, torch.tensor(True)):
            yield TypeError, "A", {"A": value}
        for value in (TABLE[:1], TABLE[0], TABLE[None], TABLE.to(OTHER)):
            yield ValueError, "A", {"A": value}
        yield ValueError, "species", {"species": None}
        for value in (INDEX[:3], INDEX[None], INDEX.to(OTHER), INDEX + 1, INDEX - 1, INDEX * 2**30):
            yield ValueError, "species", {"species": value}
        for value in (INDEX.double(), INDEX.tolist()):
            yield TypeError, "species", {"species": value}
        yield ValueError, "compute_gradients", {"compute_gradients": ("mass",)}
        yield ValueError, "compute_gradients", {"compute_gradients": "mass"}
        for value in ({"q", "scale"}, b"q", 3, (1,)):  # gradients in the order of a set would be in none
            yield TypeError, "compute_gradients", {"compute_gradients": value}
    if is_lj:
        yield ValueError, "species", {"species": INDEX}
        yield ValueError, "mixing", {"mixing": "halves"}
        yield ValueError, "r_switch", {"r_switch": CUTOFF}
        yield ValueError, "r_switch", {"r_switch": 1.1 * CUTOFF}
        for value in (0.0, -1.0, NAN):
            yield ValueError, "r_switch", {"r_switch": value}
        yield TypeError, "r_switch", {"r_switch": "near"}

    if name == "dsf_coulomb":
        yield ValueError, "device", {"device": "meta"}
    if not (general_call or is_lj):
        return
    yield ValueError, "neighbor_cutoff", {"neighbor_cutoff": 4.0}
    yield ValueError, "neighbor_cutoff", {**NEAR, "neighbor_cutoff": 0.9 * CUTOFF}
    yield ValueError, "neighbor_cutoff", {**NEAR, "neighbor_cutoff": -1.0}
    yield TypeError, "neighbor_cutoff", {**NEAR, "neighbor_cutoff": "far"}


@pytest.mark.parametrize("name", ["PairPotential", *OF_LENNARD_JONES, *OF_CHARGES])
def test_bad_input_is_an_error_that_names_the_argument(name):
    """Beside what tests/arguments/test_all_calls.py tells of all sums."""
    assert_named(
        (f"{argument}-{number}", functools.partial(CALLS[name], **options), error, argument)
        for number, (error, argument, options) in enumerate(bad_values(name))
    )


@pytest.mark.parametrize("missing", ["q", "scale", "A"])
def test_missing_parameters(missing):
    call = CALLS["PairPotential"]
    given = {name: value for name, value in call.given.items() if name != missing}
    with pytest.raises(ValueError, match=f"`{missing}` is missing"):
        call._replace(given=given)()


def test_a_misspelled_parameter_is_named():
    with pytest.raises(TypeError, match=r"`eps` is neither an argument.*sigma, epsilon"):
        lennard_jones(CUTOFF)(X, CELL, sigma=1.0, eps=1.0)


@pytest.mark.parametrize("value", [[1.0] * 4, np.ones(4)])
def test_parameters_that_are_no_tensors(value):
    with pytest.raises(TypeError, match=r"`epsilon` must be a number or a torch\.Tensor, got .*: use torch\.as_tensor"):
        lennard_jones(CUTOFF)(X, CELL, sigma=1.0, epsilon=value)


def test_messages_say_how_to_convert():
    potential = lennard_jones(CUTOFF)
    with pytest.raises(TypeError, match=r"`positions` must be a torch\.Tensor, got ndarray: use torch\.as_tensor"):
        potential(X.numpy(), CELL, sigma=1.0, epsilon=1.0)
    with pytest.raises(TypeError, match=r"use `epsilon\.to\(positions\.dtype\)`"):
        potential(X, CELL, sigma=1.0, epsilon=ONES.bool())


def test_damped_shifted_sums_take_one_charge_for_each_atom():
    with pytest.raises(ValueError, match="charges"):
        CALLS["dsf_coulomb"](charges=Q[:, None])


def test_flags_of_numpy_are_flags():
    call = CALLS["PairPotential"]
    expected = call(compute_forces=True, compute_virial=True)
    found = call(compute_forces=np.True_, compute_virial=np.True_, check=np.False_)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("index", ["species", "batch_idx"])
def test_a_wrong_number_is_blamed_on_its_own_argument_in_a_graph_too(index):
    """There only the kernel can see it."""
    potential, numbers = general(), INDEX * 0

    def energies(x, wrong):
        given = {"species": numbers, "batch_idx": numbers, index: wrong}
        return potential(x, neighbor_list=PAIRS, q=1.0, scale=1.0, A=TABLE, num_systems=1, **given)

    compiled = torch.compile(energies, backend="aot_eager", fullgraph=True)
    assert compiled(X, numbers).isfinite().all()
    with pytest.raises(ValueError, match=f"^`{index}`"):
        compiled(X, numbers + 2)


@pytest.mark.parametrize("make", [wolf, damped_shifted_force, reaction_field])
def test_sums_that_are_defined_by_their_cutoff_need_one(make):
    with pytest.raises(ValueError, match="`cutoff` is needed"):
        make(None)


@pytest.mark.parametrize(
    ("error", "argument", "make"),
    [
        (TypeError, "mixing", lambda: lennard_jones(3.0, mixing=["a"])),
        (TypeError, "mixing", lambda: soft_core_lennard_jones(3.0, mixing=["a"])),
        (ValueError, "mixing", lambda: soft_core_lennard_jones(3.0, mixing="a")),
        (ValueError, "repulsive", lambda: lennard_jones(3.0, repulsive=MAX_EXPONENT + 1)),
        (ValueError, "attractive", lambda: lennard_jones(3.0, attractive=0)),
        (TypeError, "coulomb_constant", lambda: ziegler_biersack_littmark(3.0, coulomb_constant="a")),
        (ValueError, "coulomb_constant", lambda: ziegler_biersack_littmark(3.0, coulomb_constant=NAN)),
        (TypeError, "bohr_radius", lambda: ziegler_biersack_littmark(3.0, bohr_radius=None)),
        (ValueError, "bohr_radius", lambda: ziegler_biersack_littmark(3.0, bohr_radius=0.0)),
    ],
)
def test_bad_settings_of_ready_made_potentials_are_named(error, argument, make):
    with pytest.raises(error, match=f"`{argument}`"):
        make()


def test_exponents_may_be_integers_of_numpy():
    assert lennard_jones(3.0, repulsive=np.int64(10)).formula == lennard_jones(3.0, repulsive=10).formula
    assert electrostatics.power_law(np.int32(14)).exponent == 14


def test_the_largest_exponent_works():
    energies = lennard_jones(3.0, repulsive=MAX_EXPONENT)(X, CELL, sigma=0.5, epsilon=1.0)
    assert energies.isfinite().all()


def test_a_list_without_a_cutoff_is_checked_for_both_directions_alone():
    pairs = torch.tensor([[0, 1], [1, 0]])
    given = {"neighbor_list": pairs, "sigma": 1.0, "epsilon": 1.0}
    assert torch.equal(lennard_jones()(X[:2], **given, check=True), lennard_jones()(X[:2], **given))
    with pytest.raises(ValueError, match="neighbor_list"):
        lennard_jones()(X[:2], **{**given, "neighbor_list": pairs[:, :1]}, check=True)


def test_without_a_cutoff_no_list_can_be_built():
    with pytest.raises(ValueError, match="neighbor_list"):
        PairPotential("1/r")(X, CELL)


@pytest.mark.parametrize("cutoff", [0.0, -1.0, NAN, INF])
def test_distances_of_a_potential(cutoff):
    with pytest.raises(ValueError, match="`cutoff`"):
        PairPotential("1/r", cutoff=cutoff)
    with pytest.raises(ValueError, match="`r_switch`"):
        PairPotential("1/r", cutoff=3.0, r_switch=cutoff)
    with pytest.raises(ValueError, match="`r_switch`"):
        lennard_jones(3.0, r_switch=3.0)


def test_the_sum_is_refused_inside_a_graph_as_well():
    """What only the kernel can see: it runs with the numbers."""
    compiled = torch.compile(
        lambda x, pairs: lj.lj_energy(x, 1.0, 1.0, 3.0, neighbor_list=pairs), backend="aot_eager", fullgraph=True
    )
    good = PAIRS[:, :0]
    assert not compiled(X, good).any()
    with pytest.raises(ValueError, match="neighbor_list"):
        compiled(X, torch.tensor([[0, 1], [1, 7]], dtype=torch.int32))


# -- half lists -----------------------------------------------------------------------------------


@pytest.mark.parametrize("matrix", [False, True])
def test_a_list_that_contradicts_the_flag_is_found_by_check(matrix):
    """A half list without the flag, a full list with it."""
    if matrix:
        half, _, shifts = neighbor_list(X, CUTOFF, CELL, half_fill=True)
        lists = {"half": (half, shifts), "full": (MATRIX, MATRIX_SHIFTS)}
        given = {k: {"neighbor_matrix": m, "neighbor_matrix_shifts": s} for k, (m, s) in lists.items()}
    else:
        lists = {"half": (HALF_PAIRS, HALF_PTR, HALF_SHIFTS), "full": (PAIRS, PTR, SHIFTS)}
        names = ("neighbor_list", "neighbor_ptr", "neighbor_shifts")
        given = {k: dict(zip(names, v)) for k, v in lists.items()}
    expected = lj.lj_energy(**LJ)
    for kind in given:
        found = lj.lj_energy(**LJ, **given[kind], half_list=kind == "half", check=True)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        with pytest.raises(ValueError, match=r"full|half"):
            lj.lj_energy(**LJ, **given[kind], half_list=kind != "half", check=True)


@pytest.mark.parametrize("what", ["a pair twice", "an atom with itself", "one direction"])
def test_check_finds_lists_that_are_not_full(what):
    twice = torch.cat([PAIRS[:, :1], PAIRS], dim=1), torch.cat([SHIFTS[:1], SHIFTS])
    itself = torch.cat([torch.zeros(2, 1, dtype=torch.int32), PAIRS], dim=1), torch.cat([0 * SHIFTS[:1], SHIFTS])
    bad = {"a pair twice": twice, "an atom with itself": itself, "one direction": (PAIRS[:, 1:], SHIFTS[1:])}[what]
    with pytest.raises(ValueError, match="list"):
        lj.lj_energy(**LJ, neighbor_list=bad[0], neighbor_shifts=bad[1], check=True)


@pytest.mark.parametrize("form", ["list", "matrix", "half"])
def test_check_finds_lists_that_are_too_short(form):
    """Without a word, energies would lack pairs."""

    def given(x, reach, cell, **options):
        if form == "matrix":
            matrix, _, *shifts = neighbor_list(x, reach, cell, **options)
            return {"neighbor_matrix": matrix} | dict(zip(["neighbor_matrix_shifts"], shifts))
        options |= {"half_fill": form == "half", "return_neighbor_list": True}
        pairs, _, *shifts = neighbor_list(x, reach, cell, **options)
        return {"neighbor_list": pairs, "half_list": form == "half"} | dict(zip(["neighbor_shifts"], shifts))

    slab, systems = torch.tensor([True, True, False]), torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    for cell, options in (
        (CELL, {}),
        (CELL, {"pbc": slab}),
        (None, {}),
        (CELL, {"batch_idx": systems}),
        (None, {"batch_idx": systems}),
    ):
        x = X if cell is not None else 0.05 * X  # where pairs are close without images, too
        argument = "neighbor_matrix" if form == "matrix" else "neighbor_list"
        call = functools.partial(lennard_jones(CUTOFF), x, cell, sigma=1.0, epsilon=1.0, check=True, **options)
        expected = lennard_jones(CUTOFF)(x, cell, sigma=1.0, epsilon=1.0, **options)
        for reach in (CUTOFF, 1.2 * CUTOFF):
            torch.testing.assert_close(call(**given(x, reach, cell, **options)), expected)
        with pytest.raises(ValueError, match=rf"`{argument}` has \d+ pairs within `cutoff` = 3.* reach to the cutoff"):
            call(**given(x, 0.1, cell, **options))
    with pytest.raises(ValueError, match="contains images along an axis that is open"):
        lennard_jones(CUTOFF)(X, CELL, sigma=1.0, epsilon=1.0, check=True, pbc=slab, **given(X, CUTOFF, CELL))
    with pytest.raises(ValueError, match="give `pbc`"):
        lennard_jones(CUTOFF)(X, CELL, sigma=1.0, epsilon=1.0, check=True, **given(X, CUTOFF, CELL, pbc=slab))


# -- NaN and atoms in one place -------------------------------------------------------------------

N = 40
GAS = 7.0 * torch.rand(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
GAS_PAIRS, *_ = neighbor_list(GAS, 2.5, return_neighbor_list=True)
GAS_CHARGES = torch.randn(N, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def per_atom(kind, positions, parameter, pairs=GAS_PAIRS):
    """Energies and forces of all atoms."""
    if kind == "Lennard-Jones":
        return lj.lj_energy_forces(positions, parameter.abs(), 0.3, 2.0, neighbor_list=pairs)
    if kind == "Coulomb":
        return electrostatics.coulomb_energy_forces(positions, parameter, None, 2.0, 0.4, neighbor_list=pairs)
    potential = PairPotential("q1*q2*max(1/r, 0.1*r)*select(step(r - 1), 1, r)", ("q",), cutoff=2.0)
    return potential(positions, q=parameter, neighbor_list=pairs, compute_forces=True)


KINDS = pytest.mark.parametrize("kind", ["Lennard-Jones", "Coulomb", "with kinks"])


@KINDS
@pytest.mark.parametrize("component", [0, 2])
def test_nan_in_a_position_reaches_its_neighbors_and_nobody_else(kind, component):
    before = per_atom(kind, GAS, GAS_CHARGES)
    moved = GAS.clone()
    moved[7, component] = NAN
    touched = torch.zeros(N, dtype=torch.bool)
    touched[7] = True
    touched[GAS_PAIRS[1][GAS_PAIRS[0] == 7].long()] = True
    assert 1 < touched.sum() < N
    for found, old in zip(per_atom(kind, moved, GAS_CHARGES), before, strict=True):
        assert found[touched].isnan().all()
        assert torch.equal(found[~touched], old[~touched])


@KINDS
def test_nan_in_a_parameter_reaches_those_within_the_cutoff_and_nobody_else(kind):
    before = per_atom(kind, GAS, GAS_CHARGES)
    charges = GAS_CHARGES.clone()
    charges[7] = NAN
    close = (GAS - GAS[7]).norm(dim=1) < 2.0
    assert 1 < close.sum() < N
    for found, old in zip(per_atom(kind, GAS, charges), before, strict=True):
        assert found[close].isnan().all()
        assert torch.equal(found[~close], old[~close])


@KINDS
def test_two_atoms_in_one_place_disturb_those_that_interact_with_them_only(kind):
    """Infinite or NaN for the two; the same bits for the others; no crash."""
    before = per_atom(kind, GAS, GAS_CHARGES)
    far = torch.full((2, 3), 50.0, dtype=torch.float64)
    both = torch.tensor([[N, N + 1], [N + 1, N]], dtype=torch.int32)
    charges = torch.cat([GAS_CHARGES, torch.ones(2, dtype=torch.float64)])
    energies, forces = per_atom(kind, torch.cat([GAS, far]), charges, torch.cat([GAS_PAIRS, both], dim=1))
    assert torch.equal(energies[:N], before[0]) and torch.equal(forces[:N], before[1])
    if kind != "with kinks":
        assert not energies[N:].isfinite().any()
    assert forces[N:].isnan().all()


def test_nan_positions_without_a_list_are_an_error():
    with pytest.raises(ValueError, match="`positions`"):
        lj.lj_energy(GAS * NAN, 1.0, 1.0, 2.0)


def test_an_exclusion_is_of_one_system():
    potential, batch_idx = lennard_jones(3.0), torch.tensor([0, 1, 1], dtype=torch.int32)
    with pytest.raises(ValueError, match="`exclusions` joins atoms of different systems"):
        potential(
            torch.rand(3, 3),
            sigma=1.0,
            epsilon=1.0,
            batch_idx=batch_idx,
            neighbor_matrix=torch.full((3, 1), 3, dtype=torch.int32),
            exclusions=torch.tensor([[0], [1]]),
        )
