"""What all sums over atoms refuse alike: geometry, systems, neighbors, exclusions and flags that are wrong, by name.

Nothing that an index points to is read before the index is known to be in range. What only some of them take,
and lists of neighbors, are in files of their own beside this one.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from nvalchemiops.torch.interactions import electrostatics, lj
from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping, d3_dispersion, dftd3
from nvalchemiops.torch.interactions.pair import PairPotential
from nvalchemiops.torch.neighbors import neighbor_list
from tests.support.mistakes import assert_named
from tests.support.systems import triclinic

NAN, INF, CUTOFF = float("nan"), float("inf"), 3.0
OTHER = torch.device("meta")  # any other device
X, Q, CELL, _ = triclinic(4)
ONES, TABLE = torch.ones(4, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
INDEX = torch.tensor([0, 1, 0, 1], dtype=torch.int32)
PAIRS, PTR, SHIFTS = neighbor_list(X, CUTOFF, CELL, return_neighbor_list=True)
MATRIX, MATRIX_SHIFTS = (  # with padding
    torch.nn.functional.pad(found, pad, value=value)
    for found, pad, value in zip(neighbor_list(X, CUTOFF, CELL)[::2], ((0, 1), (0, 0, 0, 1)), (4, 0))
)
NEAR = {"neighbor_list": PAIRS, "neighbor_ptr": PTR, "neighbor_shifts": SHIFTS}
WIDE = {"neighbor_matrix": MATRIX, "neighbor_matrix_shifts": MATRIX_SHIFTS}


@functools.cache
def general():
    """A potential with parameters of every kind."""
    return PairPotential("scale*q1*q2*A/r", ("q",), ("scale",), ("A",), cutoff=CUTOFF)


@functools.wraps(PairPotential.__call__)
def pair_potential(**options):
    return general()(**options)


SHARED = set(inspect.signature(PairPotential.__call__).parameters) - {"compute_forces", "compute_virial"}
"""Options that the functions of Lennard-Jones pass on."""


class Call(NamedTuple):
    function: Callable
    given: dict[str, Any]
    """Arguments that are in order, beside positions and cell."""
    renamed: Mapping[str, str] = MappingProxyType({})

    def __call__(self, **options):
        options = {"positions": X, "cell": CELL} | self.given | options
        return self.function(**{self.renamed.get(name, name): value for name, value in options.items()})

    @property
    def known(self):
        back = {theirs: ours for ours, theirs in self.renamed.items()}
        names = {back.get(name, name) for name in inspect.signature(self.function).parameters}
        names |= {*self.given, "unknown"}
        return names | (SHARED if "options" in names else set())


CHARGED = {"charges": Q, "cutoff": CUTOFF, "alpha": 0.3}
STATES = D3Parameters.load().states([6, 8])
D3 = {"numbers": torch.where(INDEX == 0, 6, 8), "cutoff": CUTOFF}
CALLS = {
    "PairPotential": Call(pair_potential, {"q": Q, "scale": 1.0, "A": TABLE, "species": INDEX}),
    **{
        name: Call(getattr(lj, name), {"sigma": 1.0, "epsilon": ONES, "cutoff": CUTOFF})
        for name in ("lj_energy", "lj_forces", "lj_energy_forces", "lj_energy_forces_virial")
    },
    **{
        name: Call(getattr(electrostatics, name), CHARGED)
        for name in ("coulomb_energy", "coulomb_forces", "coulomb_energy_forces")
    },
    "dsf_coulomb": Call(electrostatics.dsf_coulomb, CHARGED, {"neighbor_shifts": "unit_shifts"}),
    "ewald_real_space": Call(electrostatics.ewald_real_space, CHARGED, {"fill_value": "mask_value"}),
    "ewald_summation": Call(electrostatics.ewald_summation, CHARGED | {"k_cutoff": 3.0}, {"fill_value": "mask_value"}),
    "particle_mesh_ewald": Call(
        electrostatics.particle_mesh_ewald, CHARGED | {"mesh_dimensions": (8, 9, 10)}, {"fill_value": "mask_value"}
    ),
    "d3_dispersion": Call(d3_dispersion, D3 | {"damping": RationalDamping(0.4, 4.4, 0.8), "parameters": STATES}),
    "dftd3": Call(
        dftd3, D3 | {"a1": 0.4, "a2": 4.4, "s8": 0.8, "d3_params": STATES}, {"neighbor_shifts": "unit_shifts"}
    ),
}


def of_geometry():
    """(error, name of the argument, the bad value and whatever else must change with it)."""
    for value in (X.int(), X.tolist(), X.half(), X.to(torch.complex64), None):
        yield TypeError, "positions", {"positions": value}
    for value in (X[:, :2], X.flatten(), X[None]):
        yield ValueError, "positions", {"positions": value}
    for value in (CELL.half(), CELL[:, [0, 0, 1]].bfloat16(), CELL.tolist()):
        yield TypeError, "cell", {"cell": value}
    for value in (CELL[0][:2], CELL.flatten(), CELL.to(OTHER), CELL * NAN, CELL[:, [0, 0, 1]]):
        yield ValueError, "cell", {"cell": value}
    # in sums over pairs axes with a vector of zeros are open
    yield ValueError, "cell", {"cell": CELL * 0.0, "compute_charge_gradients": True}
    for value in (0.0, -1.0, NAN, INF):
        yield ValueError, "cutoff", {"cutoff": value}
    for value in ("long", [1.0, 2.0], 1j):
        yield TypeError, "cutoff", {"cutoff": value}


def of_parameters():
    for name in ("q", "sigma", "epsilon", "charges"):
        for value in (ONES[:3], torch.ones(4, 2, 1, dtype=torch.float64), ONES[[0, 1, 2, 3, 3]], ONES.to(OTHER)):
            yield ValueError, name, {name: value}
        for value in (ONES.bool(), ONES + 0j, ONES.tolist(), "heavy", None, 1j):
            yield TypeError, name, {name: value}
    yield TypeError, "charges", {"charges": ONES.int()}


def of_systems():
    two = {"cell": CELL.expand(2, 3, 3)}
    yield ValueError, "batch_idx", two
    yield ValueError, "cell|batch_idx", {**two, "batch_idx": INDEX + 1}
    for value in (INDEX[:3], INDEX[None], INDEX.to(OTHER)):
        yield ValueError, "batch_idx", {"batch_idx": value}
    for value in (INDEX.double(), INDEX.tolist()):
        yield TypeError, "batch_idx", {"batch_idx": value}
    for value in (INDEX + 1, INDEX - 1, INDEX * 2**30):
        yield ValueError, "batch_idx", {**two, **NEAR, "batch_idx": value}
    yield ValueError, "num_systems|batch_idx", {"num_systems": 0, "batch_idx": 0 * INDEX, "cell": None}
    yield ValueError, "num_systems", {"num_systems": -1, "batch_idx": 0 * INDEX, "cell": None}
    yield TypeError, "num_systems", {"num_systems": 1.5}
    yield ValueError, "batch_idx", {"num_systems": 2}
    yield ValueError, "cell|batch_idx", {"num_systems": 3, "batch_idx": INDEX + 1, **two}
    for value in (INDEX, INDEX - 1):
        without = {"cell": None, "energy_reduction": "system", "num_systems": 1, "batch_idx": value}
        yield ValueError, "batch_idx", {**without, "neighbor_list": PAIRS[:, :0]}
    yield ValueError, "energy_reduction", {"energy_reduction": "total"}


def of_neighbors():
    yield ValueError, "neighbor_matrix", {**NEAR, "neighbor_matrix": MATRIX}
    for part, value in (("neighbor_ptr", PTR), ("neighbor_shifts", SHIFTS), ("neighbor_matrix_shifts", MATRIX_SHIFTS)):
        yield ValueError, part, {part: value}
    yield ValueError, "neighbor_matrix_shifts", {**NEAR, "neighbor_matrix_shifts": MATRIX_SHIFTS}
    yield ValueError, "fill_value", {"fill_value": 4}
    yield ValueError, "cell", {**NEAR, "cell": None}
    yield ValueError, "neighbor_shifts", {**NEAR, "neighbor_shifts": None}
    for value in (PAIRS[0], PAIRS.T, PAIRS[None], PAIRS.to(OTHER)):
        yield ValueError, "neighbor_list", {**NEAR, "neighbor_list": value}
    for value in (PAIRS.double(), PAIRS.tolist(), PAIRS.bool()):
        yield TypeError, "neighbor_list", {**NEAR, "neighbor_list": value}
    last, first = torch.tensor([[0], [4]]), torch.tensor([[4], [0]])
    for value in (PAIRS.flip(1), PAIRS + last, PAIRS - last, PAIRS * 2**28, PAIRS - first, PAIRS + first):
        yield ValueError, "neighbor_list", {**NEAR, "neighbor_list": value.int()}
        yield ValueError, "neighbor_list", {**NEAR, "neighbor_list": value.int(), "neighbor_ptr": None}
    pointers = [PTR + sign * (torch.arange(5) == k) for k in (1, 2, 3) for sign in (-1, 1)]
    pointers += [PTR[:-1], PTR[None], PTR.to(OTHER), PTR * 2, PTR + 1, PTR - 1, PTR * 0, PTR * 2**26, -PTR, PTR.flip(0)]
    for value in pointers:
        yield ValueError, "neighbor_ptr", {**NEAR, "neighbor_ptr": value}
    for value in (PTR.double(), PTR.tolist()):
        yield TypeError, "neighbor_ptr", {**NEAR, "neighbor_ptr": value}
    for value in (SHIFTS[1:], SHIFTS[:, :2], SHIFTS.to(OTHER)):
        yield ValueError, "neighbor_shifts", {**NEAR, "neighbor_shifts": value}
    yield TypeError, "neighbor_shifts", {**NEAR, "neighbor_shifts": SHIFTS.double()}
    yield ValueError, "cell", {**WIDE, "cell": None}
    yield ValueError, "neighbor_matrix_shifts", {**WIDE, "neighbor_matrix_shifts": None}
    for value in (MATRIX[:3], MATRIX[0], MATRIX.to(OTHER), MATRIX + 1, MATRIX - 1, MATRIX * 2**28):
        yield ValueError, "neighbor_matrix", {**WIDE, "neighbor_matrix": value}
    yield ValueError, "neighbor_matrix", {**WIDE, "fill_value": -1}  # then 4 is no padding
    for value in (MATRIX.double(), MATRIX.tolist()):
        yield TypeError, "neighbor_matrix", {**WIDE, "neighbor_matrix": value}
    for value in (MATRIX_SHIFTS[:, 1:], MATRIX_SHIFTS[..., :2], MATRIX_SHIFTS.to(OTHER)):
        yield ValueError, "neighbor_matrix_shifts", {**WIDE, "neighbor_matrix_shifts": value}
    yield TypeError, "neighbor_matrix_shifts", {**WIDE, "neighbor_matrix_shifts": MATRIX_SHIFTS.double()}
    for value in (1.5, "none"):
        yield TypeError, "fill_value", {**WIDE, "fill_value": value}
    yield ValueError, "half_list", {"half_list": True}


def of_options():
    pair = torch.tensor([[0], [2]])
    for value in ([[0], [4]], [[-1], [2]], [[1], [1]], [[0, 1, 0], [2, 3, 2]], [[0, 2], [2, 0]]):
        yield ValueError, "exclusions", {"exclusions": torch.tensor(value)}
    # sums over all distances name pairs of two systems as well
    two = {"cell": CELL.expand(2, 3, 3), "batch_idx": INDEX, "slab_correction": False}
    yield ValueError, "exclusions", {"exclusions": torch.tensor([[0], [1]]), **two}
    for value in (pair[0], pair.T, pair.to(OTHER)):
        yield ValueError, "exclusions", {"exclusions": value}
    for value in (pair.double(), pair.tolist()):
        yield TypeError, "exclusions", {"exclusions": value}
    yield ValueError, "exclusion_factors", {"exclusion_factors": ONES[:1]}
    for value in (ONES, ONES[0], ONES[:1].to(OTHER), ONES[:1].clone().requires_grad_()):
        yield ValueError, "exclusion_factors", {"exclusions": pair, "exclusion_factors": value}
    for value in ([0.5], 0.5, torch.ones(1, dtype=torch.int32)):
        yield TypeError, "exclusion_factors", {"exclusions": pair, "exclusion_factors": value}
    for flag in ("half_list", "compute_forces", "compute_charge_gradients", "compute_virial", "check", "hybrid_forces"):
        for value in (2, None, "no", torch.tensor(True)):
            yield TypeError, flag, {**NEAR, flag: value}
    yield TypeError, "unknown", {"unknown": 1.0}


def mistakes(call):
    for rows in (of_geometry, of_parameters, of_systems, of_neighbors, of_options):
        for number, (error, argument, options) in enumerate(rows()):
            if set(options) <= call.known:
                names = "|".join({argument, call.renamed.get(argument, argument)})
                yield f"{argument}-{number}", functools.partial(call, **options), error, names


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_mistakes_are_errors_that_name_the_argument(call):
    assert_named(mistakes(call))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_same_calls_without_a_mistake_are_in_order(call):
    for options in ({}, NEAR, WIDE, {"batch_idx": 0 * INDEX}, {"cell": CELL.repeat(2, 1, 1), "batch_idx": INDEX}):
        found = call(**options)
        assert (found if isinstance(found, torch.Tensor) else found[0]).isfinite().all()


def of_lattice_sums():
    """What these alone take."""
    ewald, system = electrostatics.ewald_summation, (X, Q, CELL)
    waves = electrostatics.generate_k_vectors_ewald_summation(CELL, 3.0)
    near, dispersion = {"alpha": 0.8, **NEAR}, electrostatics.power_law(6)
    surface = {"k_cutoff": 3.0, "potential": dispersion, "surface_dielectric": 1.0}
    yield ValueError, "surface_dielectric", functools.partial(ewald, *system, **near, **surface)
    yield TypeError, "k_vectors", functools.partial(ewald, *system, **near, k_vectors=waves + 0j)
    for k_vectors in (waves.to(OTHER), waves[:, :2], waves[0], waves.expand(2, -1, -1)):
        yield ValueError, "k_vectors", functools.partial(ewald, *system, **near, k_vectors=k_vectors)
    yield ValueError, "neighbor_list", functools.partial(electrostatics.ewald_real_space, *system, 0.8)
    mesh = electrostatics.prepare_mesh(CELL, 0.8, (8, 8, 8))
    for options in ({"potential": dispersion}, {"cell": CELL.repeat(2, 1, 1), "batch_idx": INDEX}):
        given = {"positions": X, "charges": Q, "cell": CELL, **NEAR, **options}
        yield ValueError, "prepared", functools.partial(electrostatics.particle_mesh_ewald, **given, prepared=mesh)
    of_mesh = functools.partial(electrostatics.particle_mesh_ewald, *system, **NEAR)
    for order in (4, 11):
        yield ValueError, "spline_order", functools.partial(of_mesh, prepared=mesh, spline_order=order)
    coarse = electrostatics.prepare_mesh(CELL, 0.8, (6, 8, 8), spline_order=6)  # the order 8 on this mesh
    assert of_mesh(prepared=coarse, spline_order=8).shape == Q.shape
    yield ValueError, "k_cutoff", functools.partial(electrostatics.EwaldSummation().prepare, CELL)
    spline = electrostatics.compute_bspline_moduli_1d
    yield TypeError, "miller_indices", functools.partial(spline, INDEX + 0j, 4, 4)
    for bounds in (ONES[:3], PTR[:2]):
        indices = functools.partial(electrostatics.generate_ewald_miller_indices, CELL, 1.0)
        yield ValueError, "miller_bounds", functools.partial(indices, bounds)


def test_mistakes_of_lattice_sums_name_the_argument():
    assert_named((f"{name}-{n}", call, error, f"`{name}`") for n, (error, name, call) in enumerate(of_lattice_sums()))


PARAMETERS = {
    **{"PairPotential": ("q", "scale", "A"), "lj_energy": ("sigma", "epsilon"), "ewald_summation": ("alpha", "widths")},
    **dict.fromkeys(("coulomb_energy", "dsf_coulomb", "ewald_real_space", "particle_mesh_ewald"), ("alpha",)),
}
"""Parameters, whose precision is their own."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_another_precision_are_converted(name):
    """To the dtype of the positions, integers as well. Gradients have that of the parameter, the numbers of float32."""
    call = CALLS[name]
    for parameter in PARAMETERS[name]:
        value = torch.as_tensor(call.given.get(parameter, 0.25), dtype=torch.float32)
        found = []
        for dtype in (torch.float32, torch.float64):
            given = value.to(dtype, copy=True).requires_grad_()
            energies = call(**{parameter: given})
            energies = energies if isinstance(energies, torch.Tensor) else energies[0]
            assert energies.dtype is X.dtype
            found += [energies.detach(), torch.autograd.grad(energies.square().sum(), given)[0]]
            assert found[-1].dtype is dtype
        assert torch.equal(found[0], found[2])
        torch.testing.assert_close(found[1], found[3].float())
        assert found[1].any()
        ones = torch.ones_like(value)
        of_ones, of_integers = (call(**{parameter: given}) for given in (ones, ones.int()))
        assert all(map(torch.equal, of_ones, of_integers))
        with pytest.raises(TypeError, match=f"`{parameter}`"):
            call(**{parameter: ones + 0j})


@pytest.mark.parametrize("name", ["dsf_coulomb", "ewald_real_space"])
def test_messages_use_the_names_of_the_function_that_was_called(name):
    given = {"neighbor_shifts": SHIFTS} if name == "dsf_coulomb" else {"fill_value": 4}
    with pytest.raises(ValueError, match=CALLS[name].renamed[next(iter(given))]):
        CALLS[name](**given)
