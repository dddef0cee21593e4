"""Arguments that nobody would think of: the right result, or an error that names one of them; never a crash.

Two kinds of campaigns. *Mixtures* are valid, however odd: their results are compared with slow references. *Mistakes*
replace one or two arguments of a call in order by whatever comes: either the call is refused by name, or what comes
back is finite. Tables in the other folders say which mistake is which error; here they are found blindly.

``HYPOTHESIS_PROFILE=long`` runs the campaigns for minutes.
"""

import faulthandler
import functools
import inspect
import math
import re
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors
from nvalchemiops.torch import neighbors, spline
from nvalchemiops.torch.autograd import NotDifferentiableError
from nvalchemiops.torch.interactions import electrostatics, lj
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors import rebuild_detection
from nvalchemiops.torch.neighbors.formats import full_to_half, get_neighbor_matrix_from_neighbor_list
from tests.neighbors.test_exactness import Case, cells, first_atoms, random_case, together
from tests.reference import pair as pair_reference
from tests.reference.ewald import everything
from tests.reference.neighbors import half_of, lattice
from tests.systems import batch, triclinic

NAMED = (ValueError, TypeError, NeighborOverflowError, NotDifferentiableError)
PATIENCE = 120.0
"""Seconds after which an example counts as hanging: then all stacks are printed and the process ends."""

LONG = settings.get_current_profile_name() == "long"


def examples(number: int, long: int) -> settings:
    return settings(max_examples=long if LONG else number, suppress_health_check=list(HealthCheck))


# -- mistakes -------------------------------------------------------------------------------------

CUTOFF = 3.0
ONE = triclinic(5)
TWO = batch(triclinic(4), triclinic(3, seed=2))
X, Q, CELL = ONE[:3]
PAIRS, PTR, SHIFTS = neighbors.neighbor_list(X, CUTOFF, CELL, return_neighbor_list=True)
MATRIX, COUNT, MATRIX_SHIFTS = neighbors.neighbor_list(X, CUTOFF, CELL, fill_value=-1)
PBC = torch.ones(3, dtype=torch.bool)
MESH = (8, 9, 10)
FIELD = torch.sin(torch.arange(720.0, dtype=torch.float64)).view(MESH)
INDICES = torch.tensor([[1, 0, 0], [0, 1, -1]])
SPECIES = torch.tensor([0, 1, 0, 1, 1], dtype=torch.int32)
LISTED = {"neighbor_list": PAIRS, "neighbor_ptr": PTR, "neighbor_shifts": SHIFTS}
AS_MATRIX = {"neighbor_matrix": MATRIX, "neighbor_matrix_shifts": MATRIX_SHIFTS}
BATCH = {"positions": TWO.positions, "cell": TWO.cell, "batch_idx": TWO.batch_idx}
PERIODIC = {"positions": X, "cell": CELL, "pbc": PBC}
CHARGED = {"positions": X, "charges": Q, "cell": CELL}
ALL = {"compute_forces": True, "compute_charge_gradients": True, "compute_virial": True}
FIXED = {"alpha": 0.8, "k_cutoff": 3.0}
EXCLUDED = {"exclusions": torch.tensor([[0, 1], [2, 3]]), "exclusion_factors": torch.tensor([0.0, 0.5]).double()}
GATHER = {"positions": X, "charges": Q, "mesh": FIELD, "cell": CELL, "spline_order": 4}
MOVED = {"reference_positions": X, "current_positions": X + 0.1, "skin_distance_threshold": 0.2}
LJ = {"positions": X, "sigma": 1.0, "epsilon": Q.abs(), "cutoff": CUTOFF, "cell": CELL}


@functools.cache
def general() -> PairPotential:
    return PairPotential("scale*q1*q2*A/r", ("q",), ("scale",), ("A",), cutoff=CUTOFF)


def call_general(positions, cell=None, **options):
    return general()(positions, cell, **options)


def call_verlet(positions, cell=None, pbc=None, batch_idx=None, cutoff=CUTOFF, skin=0.5, **options):
    verlet = neighbors.VerletList(cutoff, skin, **options)
    return verlet(positions, cell, pbc, batch_idx)


ROWS = {
    "neighbor_matrix": torch.zeros(5, 60, dtype=torch.int32),
    "neighbor_matrix_shifts": torch.zeros(5, 60, 3, dtype=torch.int32),
    "num_neighbors": torch.zeros(5, dtype=torch.int32),
}
PAIR_OPTIONS = {**LISTED, "check": True, "energy_reduction": "system", "num_systems": 1, "batch_idx": ONE.batch_idx}

# name: function and arguments in order, with as many of them as go together
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "neighbor_list": (
        neighbors.neighbor_list,
        {**PERIODIC, "cutoff": CUTOFF, "fill_value": -1, "max_neighbors": 60, "return_vectors": True},
    ),
    "neighbor_list, batch": (
        neighbors.neighbor_list,
        {
            **BATCH,
            "cutoff": CUTOFF,
            "batch_ptr": torch.tensor([0, 4, 7], dtype=torch.int32),
            "pbc": PBC.expand(2, 3),
            "cutoff2": 2.0,
            "method": None,
            "half_fill": True,
            "return_neighbor_list": True,
        },
    ),
    "neighbor_list, memory": (
        neighbors.neighbor_list,
        {
            **PERIODIC,
            "cutoff": CUTOFF,
            **ROWS,
            "rebuild_flags": torch.ones(1, dtype=torch.bool),
            "neighbor_distances": torch.zeros(5, 60, dtype=torch.float64),
        },
    ),
    "neighbor_list, open": (neighbors.neighbor_list, {"positions": X, "cutoff": CUTOFF, "method": "naive"}),
    "cell_list": (
        neighbors.cell_list,
        {**PERIODIC, "cutoff": CUTOFF, "target_indices": torch.tensor([3, 0], dtype=torch.int32)},
    ),
    "naive_neighbor_list": (neighbors.naive_neighbor_list, {**PERIODIC, "cutoff": CUTOFF, "return_distances": True}),
    "batch_cell_list": (neighbors.batch_cell_list, {**BATCH, "pbc": PBC, "cutoff": CUTOFF, "max_neighbors": 60}),
    "batch_naive_neighbor_list": (neighbors.batch_naive_neighbor_list, {**BATCH, "pbc": PBC, "cutoff": CUTOFF}),
    "naive_neighbor_list_dual_cutoff": (
        neighbors.naive_neighbor_list_dual_cutoff,
        {**PERIODIC, "cutoff1": CUTOFF, "cutoff2": 2.0, "max_neighbors1": 60},
    ),
    "batch_naive_neighbor_list_dual_cutoff": (
        neighbors.batch_naive_neighbor_list_dual_cutoff,
        {**BATCH, "pbc": PBC, "cutoff1": CUTOFF, "cutoff2": 2.0, "fill_value": 7},
    ),
    "suggest_neighbor_list_method": (neighbors.suggest_neighbor_list_method, {**BATCH, "cutoff": CUTOFF}),
    "estimate_cell_list_sizes": (neighbors.estimate_cell_list_sizes, {"cell": CELL, "pbc": PBC, "cutoff": 1.0}),
    "estimate_batch_cell_list_sizes": (
        neighbors.estimate_batch_cell_list_sizes,
        {"cell": TWO.cell, "pbc": PBC, "cutoff": 1.0, "max_nbins": 100, "min_cells_per_dimension": 2},
    ),
    "estimate_max_neighbors": (
        estimate_max_neighbors,
        {"cutoff": 5.0, "atomic_density": 0.1, "safety_factor": 1.5, "max_neighbors_lower_bound": 20},
    ),
    "VerletList": (call_verlet, {**BATCH, "pbc": PBC, "cutoff": CUTOFF, "skin": 0.5}),
    **{
        name: (getattr(rebuild_detection, name), MOVED | {"cell": CELL[0], "cell_inv": CELL[0].inverse(), "pbc": PBC})
        for name in ("neighbor_list_needs_rebuild", "check_neighbor_list_rebuild_needed")
    },
    "batch_neighbor_list_needs_rebuild": (
        rebuild_detection.batch_neighbor_list_needs_rebuild,
        MOVED | {"batch_idx": ONE.batch_idx, "num_systems": 1, "cell": CELL, "pbc": PBC},
    ),
    **{
        name: (getattr(rebuild_detection, name), {"current_positions": X, "cell": CELL, "pbc": PBC})
        for name in ("cell_list_needs_rebuild", "check_cell_list_rebuild_needed")
    },
    "batch_cell_list_needs_rebuild": (
        rebuild_detection.batch_cell_list_needs_rebuild,
        {"current_positions": TWO.positions, "batch_idx": TWO.batch_idx, "cell": TWO.cell, "pbc": PBC},
    ),
    "PairPotential": (
        call_general,
        {
            "positions": X,
            "cell": CELL,
            "q": Q,
            "scale": 1.0,
            "A": torch.ones(2, 2).double(),
            "species": SPECIES,
            "compute_gradients": ("q", "A"),
            **PAIR_OPTIONS,
            **EXCLUDED,
        },
    ),
    "lj_energy": (lj.lj_energy, {**LJ, **AS_MATRIX, "fill_value": -1, "mixing": "geometric", "r_switch": 2.0}),
    "lj_forces": (lj.lj_forces, {**LJ, "pbc": PBC, "neighbor_cutoff": None}),
    "lj_energy_forces": (lj.lj_energy_forces, {**LJ, **LISTED, "neighbor_cutoff": 3.5}),
    "lj_energy_forces_virial": (lj.lj_energy_forces_virial, {**LJ, **PAIR_OPTIONS}),
    "coulomb_energy": (electrostatics.coulomb_energy, {**CHARGED, "cutoff": CUTOFF, "alpha": 0.3, **LISTED}),
    "coulomb_forces": (electrostatics.coulomb_forces, {**CHARGED, "cutoff": CUTOFF, **AS_MATRIX, "fill_value": -1}),
    "coulomb_energy_forces": (
        electrostatics.coulomb_energy_forces,
        {**CHARGED, "cutoff": CUTOFF, "batch_idx": ONE.batch_idx, "half_list": False},
    ),
    "dsf_coulomb": (
        electrostatics.dsf_coulomb,
        {
            **CHARGED,
            "cutoff": CUTOFF,
            "alpha": 0.2,
            "batch_idx": ONE.batch_idx,
            **AS_MATRIX,
            "fill_value": -1,
            "num_systems": 1,
            "device": "cpu",
            "compute_virial": True,
        },
    ),
    "ewald_real_space": (electrostatics.ewald_real_space, {**CHARGED, "alpha": 0.8, **LISTED, **ALL}),
    "ewald_reciprocal_space": (
        electrostatics.ewald_reciprocal_space,
        {**CHARGED, "k_vectors": None, **FIXED, "batch_idx": ONE.batch_idx, **ALL},
    ),
    "ewald_summation": (
        electrostatics.ewald_summation,
        {**CHARGED, **FIXED, **LISTED, **ALL, "batch_idx": ONE.batch_idx, "pbc": PBC, **EXCLUDED},
    ),
    "ewald_summation, open choices": (
        electrostatics.ewald_summation,
        {**CHARGED, "accuracy": 1e-4, "cutoff": 4.0, "hybrid_forces": True, "energy_reduction": "atom"},
    ),
    "ewald_summation, box": (
        electrostatics.ewald_summation,
        {**CHARGED, "alpha": 0.8, "miller_bounds": (2, 2, 2), **AS_MATRIX, "mask_value": -1},
    ),
    "ewald_summation, indices": (
        electrostatics.ewald_summation,
        {
            **CHARGED,
            "alpha": 0.8,
            "miller_indices": INDICES,
            **AS_MATRIX,
            "mask_value": -1,
        },
    ),
    "particle_mesh_ewald": (
        electrostatics.particle_mesh_ewald,
        {**CHARGED, "alpha": 0.8, "mesh_dimensions": MESH, "spline_order": 4, **LISTED, **ALL, "pbc": PBC, **EXCLUDED},
    ),
    "particle_mesh_ewald, open choices": (
        electrostatics.particle_mesh_ewald,
        {**CHARGED, "accuracy": 1e-3, "mesh_spacing": 0.6, "cutoff": 4.0, "batch_idx": ONE.batch_idx},
    ),
    "pme_reciprocal_space": (
        electrostatics.pme_reciprocal_space,
        {**CHARGED, "alpha": 0.8, "mesh_dimensions": MESH, "volume": torch.ones(()).double(), **ALL},
    ),
    "compute_slab_correction": (
        electrostatics.compute_slab_correction,
        {**CHARGED, "pbc": torch.tensor([True, True, False]), "batch_idx": ONE.batch_idx, **ALL},
    ),
    "prepare_wave_vectors": (electrostatics.prepare_wave_vectors, {"cell": CELL, "k_cutoff": 3.0}),
    "prepare_mesh": (
        electrostatics.prepare_mesh,
        {"cell": CELL, "alpha": 0.8, "mesh_dimensions": MESH, "spline_order": 4},
    ),
    "estimate_ewald_parameters": (
        electrostatics.estimate_ewald_parameters,
        {"positions": X, "cell": CELL, "batch_idx": ONE.batch_idx, "accuracy": 1e-5},
    ),
    "estimate_pme_parameters": (
        electrostatics.estimate_pme_parameters,
        {
            "positions": X,
            "cell": CELL,
            "accuracy": 1e-4,
            "real_space_cutoff": 4.0,
            "mesh_safety_factor": 1.1,
            "spline_order": 6,
            "fft_padding_fraction": 0.5,
        },
    ),
    "estimate_pme_mesh_dimensions": (
        electrostatics.estimate_pme_mesh_dimensions,
        {"cell": CELL, "alpha": 0.8, "accuracy": 1e-4, "mesh_safety_factor": 1.1, "fft_padding_fraction": 0.1},
    ),
    "mesh_spacing_to_dimensions": (
        electrostatics.mesh_spacing_to_dimensions,
        {"cell": CELL, "mesh_spacing": torch.full((1, 3), 0.5), "spline_order": 4, "fft_padding_fraction": 0.1},
    ),
    "generate_k_vectors_ewald_summation": (
        electrostatics.generate_k_vectors_ewald_summation,
        {"cell": CELL, "k_cutoff": 3.0},
    ),
    "generate_ewald_miller_indices": (
        electrostatics.generate_ewald_miller_indices,
        {"cell": CELL, "k_cutoff": 3.0, "miller_bounds": (2, 1, 2)},
    ),
    "k_vectors_from_miller_indices": (
        electrostatics.k_vectors_from_miller_indices,
        {"cell": CELL, "miller_indices": INDICES},
    ),
    **{
        name: (
            getattr(electrostatics, name),
            {"cell": CELL, "mesh_dimensions": MESH, "reciprocal_cell": CELL[0].inverse() * 6.283},
        )
        for name in ("generate_k_vectors_pme", "generate_k_squared_pme")
    },
    "compute_bspline_moduli_1d": (
        electrostatics.compute_bspline_moduli_1d,
        {"miller_indices": torch.arange(5), "mesh_N": 8, "spline_order": 4},
    ),
    "bspline_weight": (spline.bspline_weight, {"u": Q, "order": 4}),
    "spline_spread": (
        spline.spline_spread,
        {"positions": X, "values": Q, "cell": CELL, "mesh_dims": MESH, "spline_order": 4, "batch_idx": ONE.batch_idx},
    ),
    "spline_spread_channels": (
        spline.spline_spread_channels,
        {"positions": X, "values": Q[:, None], "cell": CELL, "mesh_dims": MESH},
    ),
    "spline_gather": (spline.spline_gather, {"positions": X, "mesh": FIELD, "cell": CELL, "cell_inv_t": CELL[0]}),
    "spline_gather_channels": (
        spline.spline_gather_channels,
        {"positions": X, "mesh": FIELD[None, None], "cell": CELL, "batch_idx": ONE.batch_idx},
    ),
    "spline_gather_vec3": (spline.spline_gather_vec3, GATHER | {"mesh": FIELD[..., None].expand(*MESH, 3)}),
    "spline_gather_with_force": (spline.spline_gather_with_force, GATHER),
    "spline_gather_gradient": (
        spline.spline_gather_gradient,
        GATHER | {"mesh": FIELD[None], "batch_idx": ONE.batch_idx},
    ),
    "compute_bspline_deconvolution": (
        spline.compute_bspline_deconvolution,
        {"mesh_dims": MESH, "spline_order": 5, "device": "cpu"},
    ),
    "compute_bspline_deconvolution_1d": (
        spline.compute_bspline_deconvolution_1d,
        {"n": 9, "spline_order": 5, "device": torch.device("cpu")},
    ),
}

NUMBERS = [
    *(0, 1, -1, 2, 7, 2**31, -(2**31), 2**40, 10**30),
    *(0.0, 0.3, -0.5, 1e-9, 1e-300, 1e300, 1e12, math.nan, math.inf, -math.inf),
]
OTHERS = [
    None,
    True,
    "text",
    "5.0",
    "",
    b"bytes",
    1j,
    (),
    [],
    [1.0, 2.0],
    (1, 2, 3),
    (-1, 8, 8),
    (1.5, 8, 8),
    (8, 8, 8, 8),
    ("a", "b", "c"),
    {},
    object(),
    np.float32(2.0),
    np.int64(3),
    np.ones((5, 3)),
    np.zeros(5, dtype=np.int32),
    torch.tensor(2.0),
    torch.tensor(math.nan, dtype=torch.float64),
    torch.tensor([1.0, math.inf], dtype=torch.float64),
    torch.zeros(0),
    torch.zeros(0, 3, dtype=torch.float64),
    torch.zeros(5, 3),
    torch.zeros(1, 3, 3, dtype=torch.float64),
    torch.zeros(5, dtype=torch.int32),
    torch.zeros(2, 0, dtype=torch.int32),
    torch.tensor([0, 5], dtype=torch.int64),
    torch.zeros(3, dtype=torch.bool),
    torch.zeros(3, 3, dtype=torch.complex128),
    torch.zeros(5, 3, dtype=torch.float64, device="meta"),
    torch.eye(3, dtype=torch.float64).to_sparse(),
    torch.device("meta"),
    "mps",
    torch.float32,
    math.sin,
]

DAMAGE: dict[str, Any] = {
    "half": lambda t: t.half(),
    "float": lambda t: t.float(),
    "double": lambda t: t.double(),
    "int": lambda t: t.int(),
    "long": lambda t: t.long(),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "numpy": lambda t: t.numpy(),
    "list": lambda t: t.tolist(),
    "meta": lambda t: t.to("meta"),
    "one less": lambda t: t[:-1],
    "one more": lambda t: torch.cat([t, t[-1:]]),
    "nothing": lambda t: t[:0],
    "narrow": lambda t: t[..., :-1],
    "flat": lambda t: t.flatten(),
    "unsqueezed": lambda t: t[None],
    "squeezed": lambda t: t.squeeze(),
    "column": lambda t: t[..., None],
    "turned": lambda t: t.mT.contiguous() if t.ndim > 1 else t,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "backwards": lambda t: t.flip(0),
    "doubled": lambda t: torch.cat([t, t], -1),
    "negative": lambda t: -t,
    "zero": lambda t: t * 0,
    "one up": lambda t: t + 1,
    "one down": lambda t: t - 1,
    "huge": lambda t: t * 2**30,
    "vast": lambda t: t * 1e200,
    "tiny": lambda t: t * 1e-200,
    "not a number": lambda t: t * math.nan,
    "infinite": lambda t: t + math.inf,
    "one entry NaN": lambda t: t.double().index_fill(0, torch.tensor([0]), math.nan).to(t.dtype),
    "one entry large": lambda t: t.index_fill(0, torch.tensor([t.shape[0] - 1]), 10**6),
    "one entry negative": lambda t: t.index_fill(0, torch.tensor([0]), -1),
    "flat along an axis": lambda t: torch.cat([t[..., :1], t[..., :1], t[..., 2:]], -1),
    "sparse": lambda t: t.to_sparse(),
    "trained": lambda t: t.clone().requires_grad_(),
    "a subclass": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
}


def damaged(value: torch.Tensor, how: str) -> Any:
    """The tensor made wrong, or left alone where that is impossible."""
    try:
        return DAMAGE[how](value)
    except (RuntimeError, IndexError, TypeError):
        return value


FLAGS = set(ALL) | {"check", "hybrid_forces", "half_list", "shifted", "slab_correction", "wrap_positions"}
"""Switches of sums, which are read as Python reads them. Those of neighbor lists must be True or False."""


def stand_ins(argument: str) -> list[Any]:
    """Values of any kind."""
    if argument in ("mesh_dimensions", "mesh_dims"):
        return NUMBERS + [value for value in OTHERS if not isinstance(value, torch.Tensor)]
    if argument == "accuracy":  # a sum with hundreds of digits takes its time, even of five atoms
        return [number for number in NUMBERS if number != 1e-300] + OTHERS
    return NUMBERS + OTHERS


@st.composite
def mistakes(draw, name: str) -> dict[str, Any]:
    """Other values for one or two of the arguments of a call, also for such that were left out."""
    function, good = CALLS[name]
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    usual, known = ([argument for argument in names if argument not in FLAGS] for names in (good, known))
    changed = draw(st.lists(st.sampled_from([*usual, *usual, *known]), min_size=1, max_size=2, unique=True))
    changes = {}
    for argument in changed:
        value = good.get(argument)
        if isinstance(value, torch.Tensor) and draw(st.integers(0, 3)):
            changes[argument] = damaged(value, draw(st.sampled_from(sorted(DAMAGE))))
        else:
            changes[argument] = draw(st.sampled_from(stand_ins(argument)))
    return changes


def is_finite(value: Any) -> bool:
    """Whether all numbers in it are."""
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu" and value.layout is torch.strided and bool(value.isfinite().all())
    if isinstance(value, (tuple, list)):
        return all(is_finite(v) for v in value)
    return not isinstance(value, (float, complex)) or np.isfinite(value)


def is_moderate(value: Any) -> bool:
    """Whether finite results can be expected of finite values like this one."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point():
            return True
        sizes = value.detach().abs()
        return bool(((sizes < 1e6) & ((sizes > 1e-6) | (sizes == 0))).all())
    return not isinstance(value, (int, float)) or value == 0 or 1e-6 < abs(value) < 1e6


@pytest.fixture(autouse=True)
def _no_hanging():
    """An example that hangs in a kernel cannot be interrupted; the whole process can."""
    faulthandler.dump_traceback_later(PATIENCE * (30.0 if LONG else 1.0), exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def arguments_named(function: Any, error: BaseException) -> set[str]:
    """The arguments whose names stand in a message."""
    known = set(inspect.signature(function).parameters)
    if "options" in known:
        known |= set(inspect.signature(PairPotential.__call__).parameters) | {"q", "scale", "A"}
    if isinstance(error, NeighborOverflowError):
        known |= {name[:-1] for name in known if name[-1] in "12"}  # which of two lists it is, the numbers tell
    return set(re.findall(r"`(\w+)`", str(error))) & known


@pytest.mark.parametrize("name", CALLS)
def test_calls_in_order_are_finite(name):
    """Or mistakes would be looked for in calls that have one already."""
    function, good = CALLS[name]
    assert is_finite(function(**good))


# an atom on top of another or of its own image, a pair of an atom and itself, or the root of a negative depth
MAY_DIVERGE = {"positions", "current_positions", "reference_positions", "cell", "epsilon"}
MAY_DIVERGE |= {"neighbor_shifts", "neighbor_matrix_shifts", "unit_shifts"}


@pytest.mark.parametrize("name", CALLS)
@examples(40, 3000)
@given(data=st.data())
def test_mistakes_are_named_or_harmless(name, data):
    function, good = CALLS[name]
    changes = data.draw(mistakes(name))
    arguments = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in good.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about what float32 cannot reach
        warnings.simplefilter("ignore", RuntimeWarning)  # of numpy, about cells of 1e200
        try:
            found = function(**{**arguments, **changes})
        except NAMED as error:
            assert arguments_named(function, error), f"the message names no argument: {error!r}"
            return
    if all(is_finite(v) and is_moderate(v) for v in changes.values()) and not MAY_DIVERGE & set(changes):
        assert is_finite(found), found


# -- mixtures: neighbor lists ---------------------------------------------------------------------

SEEDS = st.integers(0, 2**32 - 1)
SLACK = {torch.float64: 1e-12, torch.float32: 1e-5}


def one_of(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[int(rng.integers(len(choices)))]


def members(rng: np.random.Generator) -> list[Case]:
    """One to four systems of any kind and size, with one cutoff."""
    cases = [random_case(rng, max_atoms=10) for _ in range(rng.integers(1, 5))]
    cutoff = cases[0].cutoff
    return [Case(c.positions * (cutoff / c.cutoff), c.cell * (cutoff / c.cutoff), c.pbc, cutoff) for c in cases]


def systems_as_arguments(rng: np.random.Generator, cases: list[Case], dtype: torch.dtype) -> dict[str, Any]:
    """Cells, periodicity and division of the atoms, written in one of the ways that are allowed."""
    sizes = torch.tensor([len(case.positions) for case in cases])
    ptr, integer = first_atoms(sizes), one_of(rng, torch.int32, torch.int64)
    idx = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    division = one_of(rng, "batch_idx", "batch_ptr", "both") if len(cases) > 1 else one_of(rng, "batch_ptr", "none")
    described: dict[str, Any] = {}
    if division in ("batch_idx", "both"):
        described["batch_idx"] = idx.to(integer)
    if division in ("batch_ptr", "both"):
        described["batch_ptr"] = ptr.to(integer)
    if rng.random() < 0.2:
        return described | {"cell": None, "pbc": one_of(rng, None, False, [False] * 3, torch.zeros(3).bool())}
    _, cell, pbc = together(cases, dtype)
    single = len(cases) == 1 and rng.random() < 0.5
    written = [pbc, pbc.numpy(), pbc.tolist()]
    if bool((pbc == pbc[0]).all()):
        written += [pbc[0], pbc[0].tolist()]
    if pbc.all():
        written += [None, True]
    cell = cell.mT.contiguous().mT if rng.random() < 0.3 else cell
    return described | {"cell": cell[0] if single else cell, "pbc": one_of(rng, *written)}


def results_as_arguments(rng: np.random.Generator, n_atoms: int) -> dict[str, Any]:
    """What the list should look like."""
    options: dict[str, Any] = {
        "half_fill": bool(rng.random() < 0.5),
        "return_neighbor_list": bool(rng.random() < 0.5),
        "return_vectors": bool(rng.random() < 0.3),
        "return_distances": bool(rng.random() < 0.3),
        "fill_value": one_of(rng, None, -1, 0, n_atoms, 2**31 - 1, np.int64(3)),
        "max_neighbors": one_of(rng, None, None, 0, 1, int(rng.integers(0, 60)), 400),
    }
    if rng.random() < 0.3:
        rows = rng.permutation(n_atoms)[: rng.integers(0, n_atoms + 1)]
        options["target_indices"] = torch.as_tensor(rows, dtype=one_of(rng, torch.int32, torch.int64))
    return options


def pairs_found(results: list[torch.Tensor], options: dict[str, Any], rows: torch.Tensor, n_atoms: int) -> np.ndarray:
    """Rows (i, j, S) of a list or a matrix whose rows belong to these atoms; padding is looked at."""
    first, second, shifts = results
    assert {first.dtype, second.dtype, shifts.dtype} == {torch.int32}
    if options["return_neighbor_list"]:
        assert torch.equal(first[0].long(), rows.repeat_interleave(second.diff()))
        return np.c_[first.T.numpy(), shifts.numpy()]
    filled = torch.arange(first.shape[1]) < second[:, None]
    padding = n_atoms if options["fill_value"] is None else int(options["fill_value"])
    assert (first[~filled] == padding).all() and not shifts[~filled].any()
    return np.c_[rows[filled.nonzero()[:, 0]].numpy(), first[filled].numpy(), shifts[filled].numpy()]


def expected_pairs(cases: list[Case], dtype: torch.dtype, periodic: bool, half: bool, rows: torch.Tensor):
    """The pairs that must be found, and those that may be as well, which are within rounding of the cutoff."""
    both: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    first = 0
    for case in cases:
        case = case if periodic else case._replace(pbc=(False, False, False))
        reference = case.expected(dtype)
        for kept, pairs in zip(both, (reference.certain, reference.possible)):
            pairs = (half_of(pairs) if half else pairs) + [first, first, 0, 0, 0]
            kept.append(pairs[np.isin(pairs[:, 0], rows.numpy())])
        first += len(case.positions)
    return (np.concatenate(kept) for kept in both)


def as_set(pairs: np.ndarray) -> set[tuple[int, ...]]:
    found = {tuple(row) for row in pairs.tolist()}
    assert len(found) == len(pairs), "a pair stands there twice"
    return found


@examples(60, 20_000)
@given(SEEDS, st.sampled_from(list(SLACK)), st.sampled_from(("naive", "cell_list", None)))
def test_lists_of_any_arguments_are_exact_or_overflow(seed, dtype, method):
    rng = np.random.default_rng(seed)
    cases = members(rng)
    positions, cells, _ = together(cases, dtype)
    n_atoms, cutoff = len(positions), cases[0].cutoff
    systems, options = systems_as_arguments(rng, cases, dtype), results_as_arguments(rng, n_atoms)
    if method is not None and {"batch_idx", "batch_ptr"} & set(systems):
        method = "batch_" + method
    periodic, as_list = systems["cell"] is not None, options["return_neighbor_list"]
    rows = options.get("target_indices", torch.arange(n_atoms)).long()
    certain, possible = expected_pairs(cases, dtype, periodic, options["half_fill"], rows)
    room = math.inf if options["max_neighbors"] is None else options["max_neighbors"]
    least, most = (np.bincount(pairs[:, 0], minlength=1).max() for pairs in (certain, possible))

    try:
        results = list(neighbors.neighbor_list(positions, cutoff, method=method, **systems, **options))
    except NeighborOverflowError as error:
        assert room < error.num_neighbors <= most
        return
    assert least <= room
    geometry = results[2 + periodic :]
    if not periodic:
        results[2:] = [torch.zeros(*(results[0].shape[1:] if as_list else results[0].shape), 3, dtype=torch.int32)]
    found = pairs_found(results[:3], options, rows, n_atoms)
    assert as_set(certain) <= as_set(found) <= as_set(possible)

    system = np.repeat(np.arange(len(cases)), [len(case.positions) for case in cases])[found[:, 0]]
    x, vectors = positions.double().numpy(), cells.double().numpy()[system]
    d = x[found[:, 1]] - x[found[:, 0]] + np.einsum("pa,pab->pb", found[:, 2:], vectors)
    filled = torch.arange(results[0].shape[1]) < results[1][:, None] if not as_list else slice(None)
    wanted = [np.linalg.norm(d, axis=1)] * options["return_distances"] + [d] * options["return_vectors"]
    for tensor, exact in zip(geometry, wanted, strict=True):
        assert tensor.dtype == dtype
        scale = 1.0 + np.abs(x).max(initial=0.0) + np.abs(d).max(initial=0.0)
        np.testing.assert_allclose(tensor[filled].numpy(), exact, rtol=0, atol=4.0 * torch.finfo(dtype).eps * scale)


# -- mixtures: sums over pairs, and over all distances --------------------------------------------


class Charged(NamedTuple):
    """Systems in no order, whose atoms keep a distance from each other."""

    positions: torch.Tensor
    charges: torch.Tensor
    cell: torch.Tensor | None
    batch_idx: torch.Tensor
    cutoff: float

    @property
    def n_systems(self) -> int:
        return int(self.batch_idx.max()) + 1 if self.cell is None else len(self.cell)

    def wide(self) -> tuple["Charged", torch.Tensor]:
        """The same numbers in float64, without systems that have no atoms; the numbers of the others."""
        present, idx = torch.unique(self.batch_idx, return_inverse=True)
        cell = None if self.cell is None else self.cell.double()[present]
        return Charged(self.positions.double(), self.charges.double(), cell, idx, self.cutoff), present.long()


def charged_systems(rng: np.random.Generator, dtype: torch.dtype, periodic: bool) -> Charged:
    sizes = rng.integers(0, 6, size=rng.integers(1, 4))
    sizes[-1] = max(sizes[-1], 1)  # or without a cell nobody would know of the last one
    lattices = [cells(rng, one_of(rng, "square", "any angle", "ten degrees"), rng.integers(0, 2)) for _ in sizes]
    cutoff = float(rng.uniform(0.4, 1.5) * min(lattice(c, (True,) * 3)[2].min() for c in lattices))
    placed = [rng.uniform(-1.0, 2.0, (n, 3)) @ c for n, c in zip(sizes, lattices)]
    x, idx = np.concatenate(placed), np.repeat(np.arange(len(sizes)), sizes)
    order = rng.permutation(len(x)) if rng.random() < 0.5 else np.arange(len(x))
    cell = torch.as_tensor(np.stack(lattices)).to(dtype) if periodic else None
    return Charged(
        torch.as_tensor(x[order]).to(dtype),
        torch.as_tensor(rng.normal(size=len(x))).to(dtype),
        cell,
        torch.as_tensor(idx[order]).to(one_of(rng, torch.int32, torch.int64)),
        cutoff,
    )


FORMS = ("built", "list", "list without pointers", "matrix", "matrix with a padding atom", "half list", "half matrix")


def neighbors_as_arguments(system: Charged, form: str, reach: float, shifts_name: str) -> dict[str, Any]:
    """A list of one form; that with a padding atom is for one atom more, which stands last."""
    if form == "built":
        return {}
    x, cell, idx = system.positions, system.cell, system.batch_idx
    order = torch.sort(idx, stable=True)[1]
    found = neighbors.neighbor_list(x[order], reach, cell, None, idx[order], return_neighbor_list=True)
    pairs = order[found[0].long()]
    first, place = torch.sort(pairs[0], stable=True)
    pairs = torch.stack([first, pairs[1][place]]).int()
    ptr = torch.searchsorted(first, torch.arange(len(x) + 1), out_int32=True)
    shifts = [found[2][place]] if cell is not None else []
    half = {"half_list": True} if "half" in form else {}
    if half:
        pairs, ptr, *shifts = full_to_half(pairs, ptr, *shifts)
    if "matrix" in form:
        padding = len(x) if "padding" in form else -1
        matrix, _, *shifts = get_neighbor_matrix_from_neighbor_list(pairs, ptr, *shifts, fill_value=padding)
        if "padding" in form:
            matrix, *shifts = (torch.cat([t, t.new_full((1, *t.shape[1:]), padding)]) for t in (matrix, *shifts))
        images = {"neighbor_matrix_shifts": shifts[0]} if shifts else {}
        return {"neighbor_matrix": matrix, **images, "fill_value": padding, **half}
    images = {shifts_name: shifts[0]} if shifts else {}
    pointers = {} if form == "list without pointers" else {"neighbor_ptr": ptr}
    return {"neighbor_list": pairs, **pointers, **images, **half}


def lj_mixture(rng, system, x, idx, near):
    """Results of the library, and the pair energy with which to compare: parameters, and what is smoothed."""
    n = len(x)
    sigma = torch.full((n,), 0.4 * system.cutoff, dtype=x.dtype)
    shifted, r_switch = one_of(rng, (False, None), (True, 0.7 * system.cutoff))
    results = lj.lj_energy_forces_virial(
        x, sigma, 0.3, system.cutoff, system.cell, shifted=shifted, r_switch=r_switch, batch_idx=idx,
        num_systems=system.n_systems, **near,
    )  # fmt: skip

    def pair(r, v, cutoff):
        return pair_reference.lennard_jones(r, 0.4 * system.cutoff, 0.3)

    return results, pair, {}, {"shifted": shifted, "r_switch": r_switch}


def coulomb_mixture(rng, system, x, idx, near, charges):
    alpha = one_of(rng, 0.0, 0.7, torch.linspace(0.3, 0.9, system.n_systems, dtype=x.dtype))
    if system.cell is None and isinstance(alpha, torch.Tensor):
        alpha = 0.7
    results = electrostatics.coulomb_energy_forces(
        x, charges, system.cell, system.cutoff, alpha, batch_idx=idx, **near
    )  # fmt: skip
    values = torch.as_tensor(alpha, dtype=torch.float64).expand(system.n_systems)

    def pair(r, v, cutoff):
        return v.q1 * v.q2 * torch.erfc(v.alpha * r) / r

    return (*results, None), pair, {"alpha": values}, {}


def dsf_mixture(rng, system, x, idx, near, charges):
    alpha = float(rng.uniform(0.0, 1.0))
    results = electrostatics.dsf_coulomb(
        x, charges, system.cutoff, alpha, system.cell, idx, compute_virial=True, num_systems=system.n_systems,
        device=one_of(rng, None, "cpu", torch.device("cpu")), **near,
    )  # fmt: skip

    def pair(r, v, cutoff):
        return pair_reference.damped_shifted_force(r, v.q1, v.q2, v.alpha, cutoff)

    def alone(v, cutoff):
        return pair_reference.wolf_self(v.q, v.alpha, cutoff)

    values = torch.full((system.n_systems,), alpha, dtype=torch.float64)
    return results, pair, {"alpha": values}, {"alone": alone}


MIXTURES = {"LJ": lj_mixture, "Coulomb": coulomb_mixture, "DSF": dsf_mixture}


@examples(60, 3000)
@given(SEEDS, st.sampled_from(list(SLACK)), st.sampled_from(list(MIXTURES)), st.sampled_from(FORMS), st.booleans())
def test_sums_over_pairs_of_any_arguments_equal_the_definition(seed, dtype, name, form, periodic):
    rng = np.random.default_rng(seed)
    system = charged_systems(rng, dtype, periodic)
    n, (wide, present) = len(system.positions), system.wide()
    pairs = pair_reference.find_pairs(wide.positions, wide.cell, wide.batch_idx, 1.5 * system.cutoff)
    apart = pair_reference.distances_of(wide.positions, wide.cell, pairs)
    assume(not len(apart) or float(apart.min()) > 0.1 * system.cutoff)
    assume(not bool(((apart - system.cutoff).abs() < 1e-5 * system.cutoff).any()))

    shifts_name = "unit_shifts" if name == "DSF" else "neighbor_shifts"
    near = neighbors_as_arguments(system, form, system.cutoff * one_of(rng, 1.0, 1.4), shifts_name)
    x, charges, idx = system.positions, system.charges, system.batch_idx
    if "padding" in form:
        x, charges, idx = torch.cat([x, x[:1]]), torch.cat([charges, charges[:1] * 0]), torch.cat([idx, idx[:1] * 0])
    more = () if name == "LJ" else (charges,)
    results, pair, of_systems, options = MIXTURES[name](rng, system, x, idx, near, *more)

    def energies(x, cell, values):
        parameters = pair_reference.Parameters(values, {k: v[present] for k, v in of_systems.items()})
        return pair_reference.energies(pair, x, cell, parameters, pairs, system.cutoff, **options)

    expected, forces, _, virial = pair_reference.everything(
        energies, wide.positions, wide.cell, {"q": wide.charges} if more else {}, wide.batch_idx
    )
    if name == "DSF":
        expected = torch.zeros(system.n_systems).double().index_add(0, system.batch_idx, expected)
    else:
        results = (results[0][:n], *results[1:])
    exact = [expected, forces] + [torch.zeros(system.n_systems, 3, 3).double()] * (results[2] is not None)
    if results[2] is not None:
        exact[2][present] = virial
    for found, right in zip((results[0], results[1][:n], results[2]), exact):
        assert found.dtype == dtype
        size = float(right.detach().abs().max()) if right.numel() else 0.0
        tolerance = {torch.float32: 2e-3, torch.float64: 1e-9}[dtype]
        torch.testing.assert_close(found.double(), right.detach(), rtol=tolerance, atol=tolerance * max(size, 1e-6))


def converged(system: Charged, alpha: torch.Tensor) -> list[torch.Tensor]:
    """Energies, forces, charge gradients and virial of all systems, by the slow sum at other parameters."""
    n = len(system.positions)
    results = [torch.zeros(n), torch.zeros(n, 3), torch.zeros(n), torch.zeros(system.n_systems, 3, 3)]
    results = [t.double() for t in results]
    for number in range(system.n_systems):
        mine = system.batch_idx == number
        if mine.any():
            other = 1.1 * float(alpha[number])
            found = everything(
                system.positions[mine].double(), system.charges[mine].double(), system.cell[number].double(),
                other, 6.0 / other, 12.0 * other,
            )  # fmt: skip
            for result, part in zip(results[:3], found):
                result[mine] = part.detach()
            results[3][number] = found[3].detach()
    return results


@examples(40, 1500)
@given(SEEDS, st.sampled_from(list(SLACK)), st.sampled_from(["Ewald", "box", "PME"]), st.sampled_from(FORMS))
def test_sums_over_all_distances_of_any_arguments_equal_the_definition(seed, dtype, method, form):
    rng = np.random.default_rng(seed)
    system = charged_systems(rng, dtype, periodic=True)
    if system.n_systems == 1:
        form = form.replace("matrix with a padding atom", "matrix")
    lengths = torch.linalg.det(system.cell.double()).abs() ** (1 / 3)
    alpha = 1.8 / lengths
    x, charges, idx, n = system.positions, system.charges, system.batch_idx, len(system.positions)
    pairs = pair_reference.find_pairs(*system.wide()[0][:1], *system.wide()[0][2:4], 0.3 * float(lengths.min()))
    assume(not len(pairs.i))  # nor are two atoms in one place
    near = neighbors_as_arguments(system, form, 6.0 / float(alpha.min()), "neighbor_shifts")
    near |= {"mask_value": near.pop("fill_value")} if "fill_value" in near else {}
    if "padding" in form:
        x, charges, idx = torch.cat([x, x[:1]]), torch.cat([charges, charges[:1] * 0]), torch.cat([idx, idx[:1] * 0])
    if form == "built":
        near["cutoff"] = 6.0 / float(alpha.min())
    channels = one_of(rng, None, torch.tensor([1.0, -0.5], dtype=dtype))
    given_charges = charges if channels is None else charges[:, None] * channels
    options: dict[str, Any] = {
        "alpha": one_of(rng, alpha, alpha.to(dtype)),
        "batch_idx": idx if system.n_systems > 1 else one_of(rng, idx, None),
        "pbc": one_of(rng, None, True, torch.ones(system.n_systems, 3, dtype=torch.bool), [True] * 3),
        "energy_reduction": one_of(rng, "atom", "system"),
        **near,
    }
    if method == "PME":
        spacing = 0.25 / alpha
        options |= {"spline_order": 8, "mesh_spacing": one_of(rng, spacing, spacing[:, None].expand(-1, 3))}
    elif method == "Ewald":
        options["k_cutoff"] = 12.0 * alpha
    else:
        bounds = system.cell.double().norm(dim=2) * (12.0 * alpha / (2.0 * math.pi))[:, None]
        options["miller_bounds"] = [int(bound) + 1 for bound in bounds.amax(0)]
    function = electrostatics.particle_mesh_ewald if method == "PME" else electrostatics.ewald_summation
    energies, forces, slopes, virial = function(x, given_charges, system.cell, **options, **ALL)

    exact = converged(system, alpha)
    if options["energy_reduction"] == "system":
        exact[0] = torch.zeros(system.n_systems).double().index_add(0, system.batch_idx, exact[0])
    else:
        energies = energies[:n]
    if channels is not None:  # energies, forces and virial are quadratic in the charges
        weights = channels.double()
        exact[0], exact[2] = exact[0][:, None] * weights**2, exact[2][:, None] * weights
        exact[1], exact[3] = exact[1] * weights.square().sum(), exact[3] * weights.square().sum()
    tolerance = 3e-4 if dtype == torch.float32 or method == "PME" else 1e-8
    for found, right in zip((energies, forces[:n], slopes[:n], virial), exact, strict=True):
        assert found.dtype == dtype
        scale = max(float(right.abs().max()), float(exact[0].abs().max()), 1.0 / float(lengths.min()))
        torch.testing.assert_close(found.double(), right, rtol=0, atol=tolerance * scale)


# -- mixtures: what is asked before a call --------------------------------------------------------


@examples(40, 3000)
@given(SEEDS, st.sampled_from(list(SLACK)))
def test_stale_lists_of_any_systems_are_those_whose_atoms_moved(seed, dtype):
    rng = np.random.default_rng(seed)
    n_systems, n_atoms = int(rng.integers(1, 6)), int(rng.integers(0, 20))
    idx = rng.integers(0, n_systems, n_atoms)
    threshold = one_of(rng, 0.0, 0.3, np.float32(0.3), 2)
    before = torch.as_tensor(rng.normal(size=(n_atoms, 3))).to(dtype)
    step = rng.normal(size=(n_atoms, 3)) * (rng.random((n_atoms, 1)) < 0.4)
    after = before + torch.as_tensor(step * one_of(rng, 0.0, 0.1, 1.0, 1e-30)).to(dtype)
    moved = (after.double() - before.double()).norm(dim=1) > float(threshold)
    expected = torch.tensor([bool(moved[idx == number].any()) for number in range(n_systems)])
    tells = one_of(rng, {"num_systems": n_systems}, {"cell": torch.eye(3, dtype=dtype).expand(n_systems, 3, 3)})
    options = {"skin_distance_threshold": threshold, "update_reference_positions": bool(rng.random() < 0.5), **tells}
    reference = before.clone()
    batch_idx = torch.as_tensor(idx, dtype=one_of(rng, torch.int32, torch.int64))
    found = rebuild_detection.batch_neighbor_list_needs_rebuild(reference, after, batch_idx, **options)
    assert torch.equal(found, expected)
    updated = expected[idx][:, None] & torch.tensor(options["update_reference_positions"])
    assert torch.equal(reference, torch.where(updated, after, before))


@examples(40, 3000)
@given(SEEDS, st.integers(3, 8), st.floats(1e-9, 0.3))
def test_estimates_for_any_cells_are_finite_or_refused(seed, order, accuracy):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-2.0, 4.0)
    cell = torch.as_tensor(np.stack([cells(rng, "any angle", rng.integers(0, 3)) for _ in range(3)])) * scale
    sizes = [0, 1, int(rng.integers(2, 5000))]
    idx = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    positions = torch.zeros(sum(sizes), 3, dtype=torch.float64)
    found = electrostatics.estimate_ewald_parameters(positions, cell, idx, accuracy)
    assert all(bool((t.isfinite() & (t > 0)).all()) and t.shape == (3,) for t in found)
    try:
        mesh = electrostatics.estimate_pme_parameters(positions, cell, idx, accuracy, spline_order=order)
    except ValueError as error:
        assert "`accuracy`" in str(error) or "`cell`" in str(error)
        return
    assert min(mesh.mesh_dimensions) >= order
    for tensor in (mesh.alpha, mesh.real_space_cutoff, mesh.mesh_spacing):
        assert bool((tensor.isfinite() & (tensor > 0)).all())
    needed = cell.norm(dim=2) / torch.tensor(mesh.mesh_dimensions)
    torch.testing.assert_close(mesh.mesh_spacing, needed, rtol=1e-12, atol=0)


# -- what the campaigns found, one by one ---------------------------------------------------------


@pytest.mark.parametrize("options", [{"half_list": True}, {"check": True}])
def test_a_matrix_without_columns_is_a_list_without_pairs(options):
    far = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]], dtype=torch.float64)
    empty = torch.zeros(2, 0, dtype=torch.int32)
    assert not lj.lj_energy(far, 1.0, 1.0, 2.0, neighbor_matrix=empty, **options).any()


def test_a_list_of_no_wave_vectors_leaves_the_background():
    for shape in ((0, 3), (1, 0, 3)):
        none = torch.zeros(shape, dtype=torch.float64)
        found = electrostatics.ewald_reciprocal_space(X, Q, CELL, none, 0.8)
        volume = torch.linalg.det(CELL[0]).abs()
        expected = -0.8 / math.sqrt(math.pi) * Q**2 - math.pi * Q * Q.sum() / (2.0 * 0.8**2 * volume)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_an_empty_batch_has_a_method_and_no_ewald_sum():
    nobody = {"positions": X[:0], "cell": CELL[:0], "batch_idx": ONE.batch_idx[:0]}
    assert neighbors.suggest_neighbor_list_method(X[:0], 3.0, batch_idx=ONE.batch_idx[:0]) == "batch_naive"
    for function in (electrostatics.ewald_summation, electrostatics.particle_mesh_ewald):
        with pytest.raises(ValueError, match="`cell`"):
            function(charges=Q[:0], alpha=0.8, **nobody)
