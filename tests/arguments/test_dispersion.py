"""Bad arguments of DFT-D3 raise an error that names them; nothing is silently wrong."""

import functools

import pytest
import torch

from nvalchemiops.torch.interactions.dispersion import (
    DFTD3,
    D3Parameters,
    RationalDamping,
    ZeroDamping,
    d3_dispersion,
    dftd3,
)
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.mistakes import assert_named
from tests.support.molecules import F64, PBE, molecule, parameters, solid
from tests.values.test_dispersion_tables import draw

NAN, INF = float("nan"), float("inf")
OTHER = torch.device("meta")  # any other device
ICE = solid("dry ice")
X, Z, CELL = ICE.positions, ICE.numbers, ICE.cell
N = len(Z)
CUTOFF = 9.0
STATES, STATES_OF_HYDROCARBONS = parameters().states([6, 8]), parameters().states([1, 6])
PAIRS, PTR, SHIFTS = neighbor_list(X, CUTOFF, CELL, return_neighbor_list=True)
MATRIX, _, MATRIX_SHIFTS = neighbor_list(X, CUTOFF, CELL, max_neighbors=int(PTR.diff().max()) + 1)
LIST = {"neighbor_list": PAIRS, "neighbor_ptr": PTR, "neighbor_shifts": SHIFTS}
WIDE = {"neighbor_matrix": MATRIX, "neighbor_matrix_shifts": MATRIX_SHIFTS}
IDX = (torch.arange(N) % 2).int()
ONE = torch.tensor(1.0, dtype=F64)

IN_ORDER = {"positions": X, "numbers": Z, "cell": CELL}
FUNCTIONS = {
    "d3_dispersion": (
        d3_dispersion,
        IN_ORDER | {"damping": PBE, "parameters": STATES, "cutoff": CUTOFF},
    ),
    "dftd3": (
        dftd3,
        IN_ORDER
        | {"a1": PBE.a1, "a2": PBE.a2, "s8": PBE.s8, "d3_params": STATES, "cutoff": CUTOFF}
        | {("unit_shifts" if name == "neighbor_shifts" else name): value for name, value in LIST.items()},
    ),
}


def of_both():
    """(error, name of the argument, the bad value and whatever else must change with it), with a list given."""
    for value in (Z.double(), Z.tolist(), Z.to(torch.int16), Z.bool(), None):
        yield TypeError, "numbers", {"numbers": value}
    for value in (Z[1:], Z[None], Z.to(OTHER), torch.cat([Z, Z])):
        yield ValueError, "numbers", {"numbers": value}
    # elements
    for bad in (-1, -6, 7, 104, 1000, 2**31 - 1, -(2**31)):
        yield ValueError, rf"`numbers` holds the elements \[{bad}\]", {"numbers": torch.where(Z == 6, bad, Z)}
    yield ValueError, r"parameters are for 6, 8", {"numbers": Z + 1}

    # cutoffs
    for name in ("coordination_cutoff", "three_body_cutoff"):
        for value in (0.0, -1.0, NAN, INF):
            yield ValueError, name, {name: value}
        for value in ("long", [1.0, 2.0], 1j, True):
            yield TypeError, name, {name: value}

    # numbers
    for name in ("k1", "k3", "s9"):
        for value in ("steep", None, 1j, [1.0]):
            yield TypeError, name, {name: value}
        yield TypeError if name == "k3" else ValueError, name, {name: torch.ones(3, dtype=F64)}


def of_d3_dispersion():
    yield from ((error, name, LIST | options) for error, name, options in of_both())
    for error, name, options in of_both():
        # without a list
        if name in ("numbers", "coordination_cutoff", "k1", "k3"):
            yield error, name, options
    yield ValueError, "neighbor_list", {"cutoff": None}
    for value in ("pbe", tuple(PBE), None, PBE._asdict()):
        yield TypeError, "`damping`", {"damping": value}
    for kind, names in ((RationalDamping(0.4, 4.0, 0.8), PBE._fields), (ZeroDamping(1.2, 0.8), ZeroDamping._fields)):
        for name in names:
            for value in ("strong", None, torch.tensor(True), torch.tensor(1j)):
                yield TypeError, f"`{name}`", {"damping": kind._replace(**{name: value}), "parameters": STATES}
            for value in (torch.ones(3, dtype=F64), ONE.to(OTHER), torch.ones(1, 1, dtype=F64)):
                yield ValueError, f"`{name}`", {"damping": kind._replace(**{name: value}), "parameters": STATES}
    for value in (None, "d3", {}, tuple(STATES)):
        yield TypeError, "`parameters`", {"parameters": value}
    yield ValueError, "`parameters`", {"parameters": parameters().states([6, 8], OTHER)}
    yield ValueError, "r0ab", {"parameters": STATES._replace(pair_radii=None), "damping": ZeroDamping(1.2, 0.8)}
    yield ValueError, "r0ab", {"parameters": STATES._replace(pair_radii=None), "s9": 1.0}

    for value in (0.0, -1.0, NAN, INF, CUTOFF, 1.5 * CUTOFF):
        yield ValueError, "smoothing", {"smoothing": value}
    yield ValueError, "smoothing", {"smoothing": 4.0, "coordination_cutoff": 4.0}
    yield TypeError, "smoothing", {"smoothing": "a little"}
    yield ValueError, "`cutoff`", {**LIST, "smoothing": 2.0, "cutoff": None}
    for value in ("total", None, 1):
        yield ValueError, "energy_reduction", {"energy_reduction": value}
    for value in (torch.ones(2, dtype=torch.bool), torch.ones(3, 3, dtype=torch.bool)):
        yield ValueError, "pbc", {"pbc": value}


def of_dftd3():
    yield from of_both()
    without = dict.fromkeys(("neighbor_list", "neighbor_ptr", "unit_shifts"))
    yield ValueError, "neighbor_list", {**without, "cutoff": None}
    for name in ("a1", "a2", "s8", "s6"):
        for value in ("strong", None, torch.tensor(True)):
            yield TypeError, f"`{name}`", {name: value}
        yield ValueError, f"`{name}`", {name: torch.ones(3, dtype=F64)}
    for value in ("d3", {}, tuple(STATES)):
        yield TypeError, "`parameters`|`d3_params`", {"d3_params": value}
    yield ValueError, "`d3_params`.*missing: covalent_radii, r4r2, c6_reference, coord_num_ref", {"d3_params": None}
    yield ValueError, "`d3_params`", {"r4r2": parameters().r4r2}
    for on, off in ((6.0, 5.0), (1e10, 5.0)):
        yield ValueError, "s5_smoothing_off", {"s5_smoothing_on": on, "s5_smoothing_off": off, "cutoff": None}
    for name, values in (("s5_smoothing_on", (-1.0, NAN)), ("s5_smoothing_off", (0.0, -1.0, NAN))):
        for value in values:
            yield ValueError, name, {name: value}
        yield TypeError, name, {name: "far"}
    yield ValueError, "`cutoff`", {"s5_smoothing_on": 5.0, "s5_smoothing_off": 2.0 * CUTOFF}
    yield ValueError, "`device`", {"device": "meta"}
    yield ValueError, "`device`", {"device": "cuda"}
    for value in ("abc", 0.5):
        yield TypeError, "`device`", {"device": value}


@pytest.mark.parametrize(("name", "bad_values"), [("d3_dispersion", of_d3_dispersion), ("dftd3", of_dftd3)])
def test_bad_input_is_an_error_that_names_the_argument(name, bad_values):
    function, in_order = FUNCTIONS[name]
    assert_named(
        (f"{n}-{'-'.join(options)}", functools.partial(function, **in_order | options), error, message)
        for n, (error, message, options) in enumerate(bad_values())
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_arguments_above_are_in_order(name):
    function, in_order = FUNCTIONS[name]
    for more in ({}, WIDE, {"num_systems": 1, "batch_idx": 0 * IDX}, {"numbers": Z.long()}):
        if more is WIDE:
            lists = dict.fromkeys(("neighbor_list", "neighbor_ptr", "unit_shifts")) if name == "dftd3" else {}
            more = more | lists
        assert bool(function(**in_order | more)[0].isfinite().all())


@pytest.mark.parametrize("compute", ["compute_forces", "compute_virial"])
def test_unprepared_parameters_name_elements_too(compute):
    numbers = torch.where(Z == 6, 110, Z)
    with pytest.raises(ValueError, match=r"`numbers`.*elements \[110\]"):
        d3_dispersion(X, numbers, PBE, parameters(), CELL, cutoff=CUTOFF, **{compute: True})


def test_elements_without_data():
    """Parameters that hold some elements only."""
    p = parameters()
    c6ab = p.c6ab[:10, :10].clone()
    c6ab[9], c6ab[:, 9] = 0.0, 0.0
    few = D3Parameters(p.rcov[:10], p.r4r2[:10], c6ab, p.cn_ref[:10], 7)
    assert few.elements == tuple(range(1, 9))
    atoms = molecule("HF")
    with pytest.raises(ValueError, match=r"`numbers`.*elements \[9\]"):
        d3_dispersion(*atoms[:2], PBE, few, cutoff=CUTOFF)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, "`functional`", {"damping": "pbee"}),
        (TypeError, "`damping`", {"damping": 0.5}),
        (TypeError, "`damping`", {"damping": tuple(PBE)}),
        (ValueError, "`damping` must be one of", {"functional": "pbe"}),
        (ValueError, "`functional`", {"functional": "pbee", "damping": "zero"}),
        (TypeError, "`functional`", {"functional": 0.5, "damping": "zero"}),
        (TypeError, "`elements` is missing", {"elements": None}),
        (TypeError, "`elements`", {"elements": 8}),
        (TypeError, "`elements`", {"elements": ["O"]}),
        (TypeError, "`elements`", {"elements": [8.0]}),
        (ValueError, "`elements`", {"elements": []}),
        (ValueError, "elements \\[200\\]", {"elements": [8, 200]}),
        (TypeError, "`parameters`", {"parameters": "d3"}),
        (ValueError, "`cutoff`", {"cutoff": -1.0}),
        (TypeError, "`cutoff`", {"cutoff": "far"}),
        (ValueError, "`coordination_cutoff`", {"coordination_cutoff": 0.0}),
        (ValueError, "`three_body_cutoff`", {"three_body_cutoff": NAN}),
        (ValueError, "`smoothing`", {"smoothing": 40.0}),
        (TypeError, "unknown", {"unknown": 1}),
    ],
)
def test_the_module_looks_at_its_arguments_at_once(error, message, arguments):
    given = {"damping": "pbe", "elements": [1, 8], "parameters": parameters()} | arguments
    with pytest.raises(error, match=message):
        DFTD3(**given)


def test_what_the_module_decides_cannot_be_given_again():
    model = DFTD3("pbe", [6, 8], parameters())
    for options in ({"cutoff": 5.0}, {"smoothing": None}, {"damping": PBE}, {"unknown": 1}):
        with pytest.raises(TypeError, match=next(iter(options))):
            model(X, Z, CELL, **options)
    with pytest.raises(ValueError, match=r"`numbers` holds the elements \[7\]; the parameters are for 6, 8"):
        model(X, torch.where(Z == 6, 7, Z), CELL)


@pytest.mark.parametrize("tables", [parameters, lambda: D3Parameters(**draw())], ids=["factors", "pair by pair"])
def test_nan_stays_where_it_is(tables):
    """A position that is NaN makes NaN of its atom and of those that have it in their row, of no others."""
    p = tables()
    atoms = molecule("C2H6")
    far = atoms.positions + 1000.0
    x, numbers = torch.cat([atoms.positions, far]), atoms.numbers.repeat(2)
    near = dict(zip(("neighbor_list", "neighbor_ptr"), neighbor_list(x, 20.0, return_neighbor_list=True)))
    before = d3_dispersion(x, numbers, PBE, p, **near, compute_forces=True)
    x[0, 1] = NAN
    found = d3_dispersion(x, numbers, PBE, p, **near, compute_forces=True)
    n = len(atoms.numbers)
    for part, old in zip(found, before):
        assert bool(part[:n].isnan().any()) and torch.equal(part[n:], old[n:])
    assert bool(found[0][0].isnan())
    with pytest.raises(ValueError, match="`positions`"):
        d3_dispersion(x, numbers, PBE, p, cutoff=20.0)


def test_the_cell_does_not_matter_along_an_open_axis():
    """Where ``pbc`` says that it is open, its vector may be anything; a singular cell is refused otherwise."""
    pbc = torch.tensor([True, True, False])
    flat = CELL.clone()
    flat[..., 2, :] = flat[..., 1, :]
    found = d3_dispersion(X, Z, PBE, STATES, flat, cutoff=CUTOFF, pbc=pbc)
    expected = d3_dispersion(X, Z, PBE, STATES, CELL, cutoff=CUTOFF, pbc=pbc)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    with pytest.raises(ValueError, match="`cell` is singular"):
        d3_dispersion(X, Z, PBE, STATES, flat, **LIST)


@pytest.mark.parametrize("place", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_places_that_are_none(place, dtype):
    """With a list, which was made before: the energy is no number, whatever the cutoffs."""
    atoms = molecule("C2H6")
    x = atoms.positions.to(dtype)
    near = {"neighbor_matrix": neighbor_list(x, 20.0)[0], "num_systems": 1}
    x[0, 1] = place
    for options in ({}, {"cutoff": 20.0}):
        energy, forces, coordination = dftd3(
            x, atoms.numbers, *PBE[:3], **near, d3_params=STATES_OF_HYDROCARBONS, **options
        )
        assert bool(energy.isnan().all()) and bool(forces[0].isnan().any()) and bool(coordination[0].isnan())


@pytest.mark.parametrize("row", [[NAN, 0.0, 0.0], [INF, 0.0, 0.0], [0.0, 0.0, 0.0], (CELL[0, 1] - CELL[0, 2]).tolist()])
def test_cells_that_are_none(row):
    """Under the images of a list that was made for another cell."""
    cell = CELL.clone()
    cell[0, 0] = torch.tensor(row, dtype=F64)
    given = IN_ORDER | {"cell": cell}
    for near in (LIST, WIDE):
        try:
            energies, *_ = d3_dispersion(**given, damping=PBE, parameters=STATES, **near, energy_reduction="system")
        except ValueError as error:
            assert "`cell`" in str(error)
        else:
            assert bool(energies.isnan().all())
    find = {"damping": PBE, "parameters": STATES, "cutoff": CUTOFF}
    if any(row):
        with pytest.raises(ValueError, match="`cell`"):
            d3_dispersion(**given, **find)
    else:  # an open axis, of neighbors that are found for this cell
        pbc = (cell != 0.0).any(-1)
        torch.testing.assert_close(
            d3_dispersion(**given, **find), d3_dispersion(**given, **find, pbc=pbc), rtol=0, atol=0
        )
