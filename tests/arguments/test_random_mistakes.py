"""Arguments that are wrong in ways that nobody would think of: refused by name, or harmless; never a crash.

One or two arguments of a call in order are replaced by whatever comes: either the call is refused by name, or what
comes back is finite. Tables in the other folders say which mistake is which error; here they are found blindly.

``HYPOTHESIS_PROFILE=long`` runs the campaign for minutes.
"""

import functools
import inspect
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvalchemiops.neighbors import NeighborOverflowError
from nvalchemiops.neighbors.neighbor_utils import estimate_max_neighbors
from nvalchemiops.torch import neighbors, spline
from nvalchemiops.torch.interactions import electrostatics, lj
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors import rebuild_detection
from tests.support.campaigns import CELL, NAMED, ONE, Q, X, examples
from tests.support.systems import ALL, batch, triclinic

pytestmark = pytest.mark.usefixtures("no_hanging")

# -- mistakes -------------------------------------------------------------------------------------

CUTOFF = 3.0
TWO = batch(triclinic(4), triclinic(3, seed=2))
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
    "suggest_neighbor_list_method": (
        neighbors.suggest_neighbor_list_method,
        {"batch_ptr": torch.tensor([0, 4, 7], dtype=torch.int32), **BATCH, "cutoff": CUTOFF},
    ),
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


def stand_ins(argument: str) -> list[Any]:
    """Values of any kind."""
    if argument == "accuracy":  # a sum with hundreds of digits takes its time, even of five atoms
        return [number for number in NUMBERS if number != 1e-300] + OTHERS
    if argument == "device":  # integers are GPUs where torch is built for them, and errors of torch without a driver
        return [value for value in NUMBERS + OTHERS if not isinstance(value, int)]
    return NUMBERS + OTHERS


@st.composite
def mistakes(draw, name: str) -> dict[str, Any]:
    """Other values for one or two of the arguments of a call, also for such that were left out."""
    function, good = CALLS[name]
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    changed = draw(st.lists(st.sampled_from([*good, *good, *known]), min_size=1, max_size=2, unique=True))
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
