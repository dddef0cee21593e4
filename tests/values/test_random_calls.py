"""Arguments that nobody would think of, but valid: the results are those of slow references; never a crash.

`tests/arguments/test_random_mistakes.py` is about such that are not valid. ``HYPOTHESIS_PROFILE=long`` runs the
campaigns for minutes.
"""

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from nvalchemiops.notices import NeighborListWarning
from nvalchemiops.torch import neighbors
from nvalchemiops.torch.interactions import electrostatics, lj
from nvalchemiops.torch.neighbors import rebuild_detection
from nvalchemiops.torch.neighbors.formats import full_to_half, get_neighbor_matrix_from_neighbor_list
from tests.reference import pair as pair_reference
from tests.reference.ewald import everything
from tests.reference.neighbors import half_of, lattice
from tests.support.campaigns import CELL, ONE, Q, X, examples
from tests.support.systems import ALL
from tests.values.test_neighbors_exact import Case, cells, first_atoms, random_case, together

pytestmark = pytest.mark.usefixtures("no_hanging")

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


def memory_as_arguments(
    rng: np.random.Generator, options: dict[str, Any], n_rows: int, periodic: bool, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Memory for some of the results, of any width, that holds what was there before."""
    width, memory = int(rng.integers(0, 60)), {}
    for name, trailing in (("neighbor_matrix", ()), ("neighbor_matrix_shifts", (3,))):
        if rng.random() < 0.3 and (periodic or not trailing):
            memory[name] = torch.full((n_rows, width, *trailing), 77, dtype=torch.int32)
    if not memory and options["max_neighbors"] is not None:
        width = options["max_neighbors"]
    if rng.random() < 0.3:
        memory["num_neighbors"] = torch.full((n_rows,), 77, dtype=torch.int32)
    slots = (width,) if options["return_neighbor_list"] else (n_rows, width)
    for name, trailing in (("neighbor_distances", ()), ("neighbor_vectors", (3,))):
        if rng.random() < 0.2:
            memory[name] = torch.full((*slots, *trailing), 77.0, dtype=dtype)
    return memory


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
def test_lists_of_any_arguments_are_exact(seed, dtype, method):
    """Whatever width and memory are given: what is returned has all pairs, and the memory the first columns of it."""
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
    memory = memory_as_arguments(rng, options, len(rows), periodic, dtype)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", NeighborListWarning)
        results = list(neighbors.neighbor_list(positions, cutoff, method=method, **systems, **options, **memory))
    assert_filled(memory, results, options, said, periodic)
    geometry = results[2 + periodic :]
    if not periodic:
        results[2:] = [torch.zeros(*(results[0].shape[1:] if as_list else results[0].shape), 3, dtype=torch.int32)]
    found = pairs_found(results[:3], options, rows, n_atoms)
    assert as_set(certain) <= as_set(found) <= as_set(possible)

    system = np.repeat(np.arange(len(cases)), [len(case.positions) for case in cases])[found[:, 0]]
    x, vectors = positions.double().numpy(), cells.double().numpy()[system]
    d = x[found[:, 1]] - x[found[:, 0]] + np.einsum("pa,pab->pb", found[:, 2:], vectors)
    filled = torch.arange(results[0].shape[1]) < results[1][:, None] if not as_list else slice(None)
    has_distances = options["return_distances"] or "neighbor_distances" in memory
    wanted = [np.linalg.norm(d, axis=1)] * has_distances
    wanted += [d] * (options["return_vectors"] or "neighbor_vectors" in memory)
    for tensor, exact in zip(geometry, wanted, strict=True):
        assert tensor.dtype == dtype
        scale = 1.0 + np.abs(x).max(initial=0.0) + np.abs(d).max(initial=0.0)
        np.testing.assert_allclose(tensor[filled].numpy(), exact, rtol=0, atol=4.0 * torch.finfo(dtype).eps * scale)


def assert_filled(
    memory: dict[str, torch.Tensor], results: list[torch.Tensor], options: dict[str, Any], said: list, periodic: bool
) -> None:
    """The memory holds what is returned, as far as it goes; the width is that which was asked for, if all fits."""
    as_list = options["return_neighbor_list"]
    counts = results[1].diff() if as_list else results[1]
    if "num_neighbors" in memory:
        assert torch.equal(memory["num_neighbors"], counts) and (as_list or results[1] is memory["num_neighbors"])
    columns = [t.shape[1] for t in memory.values() if t.ndim > 1 and not (as_list and t.is_floating_point())]
    width = columns[0] if columns else options["max_neighbors"]
    fits = width is None or max(counts.tolist(), default=0) <= width
    assert as_list or width is None or (results[0].shape[1] == width if fits else results[0].shape[1] > width)

    floats = [name for name in ("distances", "vectors") if options[f"return_{name}"] or f"neighbor_{name}" in memory]
    names = ["neighbor_matrix", "num_neighbors", *["neighbor_matrix_shifts"] * periodic]
    returned = dict(zip([*names, *(f"neighbor_{name}" for name in floats)], results, strict=True))
    for name in memory.keys() - {"num_neighbors"}:
        given, whole = memory[name], returned[name]
        if not as_list:
            assert (whole is given) == fits and torch.equal(given, whole[:, :width])
        elif given.is_floating_point():
            n = min(len(given), len(whole))
            assert torch.equal(given[:n], whole[:n])
            fits = fits and len(given) >= len(whole)
        else:
            for row, first, count in zip(given, results[1].tolist(), counts.tolist()):
                of_row = (whole[1] if name == "neighbor_matrix" else whole)[first : first + min(count, width)]
                assert torch.equal(row[: len(of_row)], of_row)
    assert bool(said) != fits and all(w.filename == __file__ for w in said)


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
    assert results[0].dtype == (torch.float64 if name == "DSF" else dtype)
    for found, right in zip((results[0], results[1][:n], results[2]), exact):
        assert found is results[0] or found.dtype == dtype
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
    assert energies.dtype == torch.float64
    for found, right in zip((energies, forces[:n], slopes[:n], virial), exact, strict=True):
        assert found is energies or found.dtype == dtype
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


def test_an_empty_batch_has_a_method_and_empty_sums():
    empty = {"positions": X[:0], "charges": Q[:0], "cell": CELL[:0], "batch_idx": ONE.batch_idx[:0]}
    assert neighbors.suggest_neighbor_list_method(torch.tensor([0])) == "naive"
    for function in (electrostatics.ewald_summation, electrostatics.particle_mesh_ewald):
        assert function(**empty, alpha=0.8).shape == (0,)
