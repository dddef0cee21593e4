"""Programs that are run under the checker, in a process of their own: ``python -m tests.checker.programs NAME``.

Atoms stand in clusters of 1, 2, 32, 33, 34 and 66, far from each other, so that rows of neighbors have 0, 1, 31, 32, 33
and 65 entries: fewer than a warp has lanes, as many, and more.
"""

import json
import sys
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import warp as wp

from nvalchemiops.interactions.pair import sum as pairs
from nvalchemiops.interactions.pair.potentials import moment_short_range
from nvalchemiops.kernels.mesh import splines
from nvalchemiops.kernels.moments import count
from nvalchemiops.kernels.programs import program_kernel
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.kernels.sorting import ROWS
from nvalchemiops.launch import registered_kernels
from nvalchemiops.layout import GPU, replaced_layout
from nvalchemiops.neighbors.grid import N_FAULTS, end_rows, sort_atoms
from nvalchemiops.neighbors.rows import NO_PADDING
from nvalchemiops.neighbors.staleness import stale_kernel
from nvalchemiops.torch import neighbors, ops  # noqa: F401  # all kernels are registered
from nvalchemiops.torch.interactions import electrostatics
from nvalchemiops.torch.interactions.dispersion import D3Parameters, RationalDamping, d3_dispersion
from nvalchemiops.torch.interactions.dispersion.coefficients import d3_coefficients
from nvalchemiops.torch.interactions.pair.exclusions import exclusion_rows
from nvalchemiops.torch.interactions.pair.moments import sum_moments
from nvalchemiops.torch.interactions.pair.system import PairSystem
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.neighbors import rows, search
from nvalchemiops.torch.neighbors.formats import full_to_half, get_neighbor_matrix_from_neighbor_list
from nvalchemiops.torch.neighbors.pairs import list_geometry, matrix_geometry
from nvalchemiops.torch.operators import fourier, mesh
from nvalchemiops.torch.operators.chains import move_chains
from nvalchemiops.torch.operators.lattice import shortest_vectors
from nvalchemiops.torch.operators.noise import chi_square_noise, normal_noise, places_in_systems
from nvalchemiops.torch.operators.segments import system_sums
from nvalchemiops.torch.operators.sorting import counted_rows, pointers_of_sorted, sort_rows
from tests.checker.launches import Fault
from tests.checker.session import checked
from tests.support.potentials import TABLE
from tests.support.systems import ALL, System, batch, csr, triclinic

SIZES = (1, 2, 32, 33, 34, 66)
RADIUS = 1.2
CUTOFF = 3.0
"""More than clusters are wide."""

CPU_ONLY = (sort_atoms, end_rows, program_kernel, stale_kernel)
"""Factories of kernels that are launched on a CPU only."""


def cluster(n_atoms: int, rng: np.random.Generator, nearest: float = 0.35) -> np.ndarray:
    """Positions in a sphere, none of them close to another."""
    positions = np.zeros((0, 3))
    while len(positions) < n_atoms:
        new = rng.uniform(-RADIUS, RADIUS, 3)
        if np.linalg.norm(new) < RADIUS and (np.linalg.norm(positions - new, axis=1) > nearest).all():
            positions = np.concatenate([positions, new[None]])
    return positions


def clusters(sizes: tuple[int, ...] = SIZES, seed: int = 1) -> System:
    """Clusters along the axes of one skewed cell, some across its boundary."""
    rng = np.random.default_rng(seed)
    cell = np.array([[14.0, 0.0, 0.0], [2.0, 14.0, 0.0], [-1.5, 2.2, 15.0]])
    places = np.array([(a, b, c) for a in (0.0, 0.5) for b in (0.0, 0.5) for c in (0.0, 0.5)]) @ cell
    positions = np.concatenate([cluster(n, rng) + place for n, place in zip(sizes, places)])
    charges = rng.normal(size=len(positions))
    return System.of(positions, charges - charges.mean(), cell)


ONE = clusters()
MANY = batch(*(clusters((n,), seed=n) for n in SIZES), triclinic(7))
SYSTEMS = (ONE, MANY)
PRECISIONS = (torch.float64, torch.float32)


def serial_search() -> None:
    """What a search does on a CPU before and after its kernels, with the lanes of a GPU in them."""
    with replaced_layout("cpu", GPU._replace(serial=True)):
        for system in (*SYSTEMS, batch(*SYSTEMS, *SYSTEMS)):
            for half in (False, True):
                arguments = (system.positions, CUTOFF, system.cell)
                options = {"batch_idx": system.batch_idx, "half_fill": half}
                neighbors.neighbor_list(*arguments, **options, return_neighbor_list=True)
                neighbors.neighbor_list(*arguments, **options)


def search_program() -> None:
    """Lists, matrices, half lists, chosen atoms and systems; distances; faults of lists."""
    for system in SYSTEMS:
        n_systems = len(system.cell)
        for dtype in PRECISIONS:
            x, _, cell, system_of = system.to(dtype)
            for half in (False, True):
                found = neighbors.neighbor_list(
                    x, CUTOFF, cell, batch_idx=system_of, half_fill=half, return_neighbor_list=True
                )
                neighbors.neighbor_list(x, CUTOFF, cell, batch_idx=system_of, half_fill=half)
                for ties in ("keep", "index"):
                    options = {"batch_idx": system_of, "nearest": 7, "ties": ties, "symmetric": half}
                    neighbors.neighbor_list(x, CUTOFF, cell, half_fill=half, **options)
            if system is ONE:
                counts = found[1].diff()
                full = csr(system, CUTOFF)["neighbor_ptr"].diff()
                assert set(full.tolist()) == {n - 1 for n in SIZES} and counts.sum() * 2 == full.sum()
            near = csr(system.to(dtype), CUTOFF)
            for positions in (x, x + 20.0):
                list_geometry(positions, near["neighbor_list"], near["neighbor_shifts"], cell, batch_idx=system_of)
            matrix, counts, shifts = neighbors.neighbor_list(x, CUTOFF, cell, batch_idx=system_of)
            matrix_geometry(x, matrix, counts, shifts, cell, batch_idx=system_of)
            given = rows.GivenNeighbors(*near.values())
            found = rows.rows_of(given, x, periodic=True)
            rows._inspect(
                x.double(),
                cell.double(),
                system_of,
                found.pointers,
                found.neighbors,
                found.shifts,
                0,
                found.padding,
                found.first,
            )
            neighbors.neighbor_list(x, CUTOFF, batch_idx=system_of)
            for uncounted in (system_of, system_of.flip(0)):
                neighbors.neighbor_list(x, CUTOFF, batch_idx=uncounted, max_neighbors=90, check=False)
            neighbors.neighbor_list(x, CUTOFF, cell, torch.tensor([True, False, True]), batch_idx=system_of)
            first = torch.cat([system_of.new_zeros(1), torch.bincount(system_of).cumsum(0).int()])
            targets = torch.arange(0, len(x), 3, dtype=torch.int32)
            query = (x, CUTOFF, cell, None, system_of, first, targets, False, 0, 0, 0.0, False)
            memory = [targets.new_zeros((len(targets), *rest)) for rest in ((90,), (), (90, 3))]
            search.fill_neighbor_matrix(*query, torch.arange(n_systems) % 2 == 0, -1, *memory)
            shortest_vectors(cell.double())


@cache
def near_of(number: int) -> dict[str, torch.Tensor]:
    """The neighbors in one of `SYSTEMS`."""
    return csr(SYSTEMS[number], CUTOFF)


def registered_pairs(precision: str) -> Callable[[], None]:
    """Each kernel of pairs that is registered, on lists, matrices with padding, and matrices of half the rows."""

    def program() -> None:
        variants = {v: None for v in (*pairs._COMMON, *pairs._EWALD, *pairs._NEARBY) if v.precision == precision}
        for number, variant in enumerate(variants):
            system = SYSTEMS[number % 2].to(getattr(torch, precision))
            for form in ("list", "matrix"):
                run_pair_kernel(variant, system, form)

    return program


def run_pair_kernel(variant: pairs.Variant, system: System, form: str, bad: int | None = None) -> None:
    """Launch a kernel of pairs with arrays of random numbers; with ``bad``, with many atoms of this number in rows."""
    x, _, cell, system_of = system
    rng = torch.Generator().manual_seed(5)
    n_atoms, n_systems, formula = len(x), len(cell), variant.formula
    near = near_of(int(n_systems > 1))
    row_begin, first = near["neighbor_ptr"], near["neighbor_list"][0].contiguous()
    slots, shifts, width, padding = near["neighbor_list"][1].clone(), near["neighbor_shifts"], 0, NO_PADDING
    if form == "matrix":
        matrix, _, shifts = get_neighbor_matrix_from_neighbor_list(*near.values(), fill_value=n_atoms)
        row_begin = first = None
        slots, shifts, width, padding = matrix.flatten(), shifts.flatten(0, 1), matrix.shape[1], n_atoms
    if bad is not None:
        slots[::7] = bad
    given = {
        "positions": x,
        "cell": cell,
        "parameters": torch.rand(n_atoms, variant.n_parameters, generator=rng, dtype=x.dtype) + 0.5,
        "global_parameters": torch.rand(n_systems, len(formula.global_parameters), generator=rng, dtype=x.dtype) + 0.3,
        "weights": torch.rand(n_atoms, generator=rng, dtype=x.dtype),
        "batch_idx": system_of if n_systems > 1 else None,
        "row_begin": row_begin,
        "first": first,
        "neighbors": slots,
        "shifts": shifts,
    }
    arrays = [given[a.name] for a in pairs.inputs_of(variant)]
    n_columns = sum(pairs.width_of_sums(variant.request.outputs, len(formula.global_parameters)).values())
    shapes = {"position_gradients": (n_atoms, 3), "parameter_gradients": (n_atoms, variant.n_parameters)}
    shapes |= {"energies": (n_atoms,), "sums": (n_atoms, n_columns), "fault": (1,)}
    results = []
    for array in pairs.outputs_of(variant):
        dtype = {"real": x.dtype, "float64": torch.float64, "int32": torch.int32}[array.element]
        results.append(torch.empty(shapes[array.name], dtype=dtype))
    launch(pairs.pair_kernel(variant), n_atoms, [*arrays, width, padding, CUTOFF, 0.0], results, lanes=WARP)
    assert bad is not None or all(r.isfinite().all() for r in results[:-1])


def moments_program() -> None:
    """Moments of points, registered kernels, and of Gaussians, differentiated, with exclusions; lists and matrices."""
    rng = torch.Generator().manual_seed(5)
    for number, form in enumerate(("list", "matrix")):
        near = near_of(number)
        given = rows.GivenNeighbors(near["neighbor_list"], near["neighbor_ptr"], near["neighbor_shifts"])
        if form == "matrix":
            matrix, _, shifts = get_neighbor_matrix_from_neighbor_list(
                *near.values(), fill_value=len(SYSTEMS[number][0])
            )
            given = rows.GivenNeighbors(neighbor_matrix=matrix, matrix_shifts=shifts, fill_value=len(matrix))
        for precision in (torch.float64, torch.float32):
            x, q, cell, system_of = SYSTEMS[number].to(precision)
            found = rows.rows_of(given, x, periodic=True)
            assert found is not None
            system = PairSystem(x, cell, system_of if len(cell) > 1 else None, len(cell), found)
            alpha = torch.full((len(cell), 1), 0.4, dtype=x.dtype)
            moments = torch.rand(len(x), 1, 10, generator=rng, dtype=x.dtype)
            for n_moments in (4, 10):
                of_points = (moment_short_range(False), system, moments[..., :n_moments].contiguous(), None, alpha)
                results = sum_moments(*of_points, forces=True, cutoff=CUTOFF)
                assert results.energies.isfinite().all()
        exclusions = exclusion_rows(torch.tensor([[0, 4, 5, 9, 70], [3, 5, 9, 30, 4]]), None, x)
        x.requires_grad_()
        of_gaussians = (moment_short_range(True), system, moments[..., :4].contiguous(), q.unsqueeze(1).abs(), alpha)
        results = sum_moments(*of_gaussians, forces=True, virial=True, cutoff=CUTOFF, exclusions=exclusions)
        assert results.forces is not None
        torch.autograd.grad(results.forces.square().sum() + results.energies.sum(), x)


def potentials_program() -> None:
    """Each ready-made potential; that with tables also with exclusions, from half a list, differentiated twice."""
    for number, case in enumerate(TABLE):
        system = SYSTEMS[number % 2]
        x, _, cell, system_of = system
        of = {"batch_idx": system_of} if len(cell) > 1 else {}
        parameters = case.parameters(system)
        case.evaluate(
            x, cell, parameters, CUTOFF, **near_of(number % 2), **of, compute_forces=True, compute_virial=True
        )
        if case.name != "lj tables":
            continue
        bonds = torch.tensor([[0, 4, 5, 9, 70], [3, 5, 9, 30, 4]])
        half = full_to_half(*near_of(number % 2).values())
        near = dict(zip(near_of(0), half)) | {"half_list": True, "exclusions": bonds}
        for dtype in PRECISIONS:
            leaf = x.to(dtype).requires_grad_()
            energies = case.evaluate(leaf, cell.to(dtype), parameters, CUTOFF, **near, **of)
            energies = energies[0] if isinstance(energies, tuple) else energies
            (first,) = torch.autograd.grad(energies.square().sum(), leaf, create_graph=True)
            first.square().sum().backward()


def segments_program() -> None:
    """Sums of systems of all sizes, over the size of a block and beyond that of a launch without blocks."""
    rng = torch.Generator().manual_seed(2)
    for sizes in (SIZES, (0, 1, 0, 255, 256, 257, 600), (1,), (1000,), (9000, 20, 0, 8000)):
        for dtype in PRECISIONS:
            for columns in (1, 9, 40):
                values = torch.randn(sum(sizes), columns, generator=rng, dtype=dtype)
                system_of = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), torch.tensor(sizes))
                if len(sizes) > 1:
                    system_sums(values, system_of[torch.randperm(sum(sizes), generator=rng)], len(sizes))
                else:
                    system_sums(values, None, 1)


def sorting_program() -> None:
    """Rows of entries, and counts of as many rows as a warp adds up, fewer, and more."""
    rng = torch.Generator().manual_seed(6)
    fault = torch.zeros(N_FAULTS, dtype=torch.int32)
    for n in (0, *SIZES, ROWS, ROWS + 1, 33 * ROWS + 7):
        rows = torch.randint(1, 40, (n,), generator=rng, dtype=torch.int32)
        sort_rows(rows, 41)
        pointers_of_sorted(rows.sort().values, 41)
        counted_rows(rows, fault)


def dynamics_program() -> None:
    """Chains of systems, and noise of atoms and systems."""
    for sizes in (SIZES, (0, 1, 0, 300), (1,)):
        n = len(sizes)
        system_of = torch.repeat_interleave(torch.arange(n, dtype=torch.int32), torch.tensor(sizes))
        seeds = (torch.arange(n), torch.arange(n), torch.tensor(3))
        normal_noise(*seeds, system_of, places_in_systems(system_of, n), 0, sum(sizes), 3)
        normal_noise(*seeds, None, None, 0, n, 1, True)
        chi_square_noise(*seeds, torch.full((n,), 0.7, dtype=torch.float64), 0)
        for length in (1, 4):
            zeros, ones = torch.zeros(n, length, dtype=torch.float64), torch.ones(n, dtype=torch.float64)
            move_chains(zeros, zeros, *[ones] * 3, 1.0 + zeros, ones, 2)


def fourier_program() -> None:
    """Sums at k-vectors, with derivatives, of all systems."""
    rng = torch.Generator().manual_seed(3)
    for system in SYSTEMS:
        n_atoms, n_systems = len(system.charges), len(system.cell)
        begin = torch.cat([system.batch_idx.new_zeros(1), torch.bincount(system.batch_idx).cumsum(0).int()])
        order = torch.arange(n_atoms, dtype=torch.int32)
        per_system = torch.tensor([1, 31, 32, 33, 65, 3, 40][:n_systems], dtype=torch.int32)
        point_begin = torch.cat([per_system.new_zeros(1), per_system.cumsum(0).int()])
        points = torch.randint(0, 4, (int(point_begin[-1]), 3), generator=rng, dtype=torch.int32)
        coordinates = torch.randn(n_atoms, 3, generator=rng, dtype=torch.float64)
        for given in (None, order):
            plan = (coordinates, given, begin, points, point_begin)
            for derivatives in (0, 1, 2):
                moments = torch.randn(n_atoms, 2, count(derivatives), generator=rng, dtype=torch.float64)
                field = torch.randn(2, len(points), 4, 2, generator=rng, dtype=torch.float64)
                if derivatives < 2:
                    fourier.fourier_spread(moments, *plan, derivatives)
                fourier.fourier_gather(field, *plan, derivatives)


def mesh_program() -> None:
    """Splines of all orders that are registered, on meshes as small as they may be, and wider than a warp."""
    rng = torch.Generator().manual_seed(4)
    orders = dict.fromkeys((*splines.COMMON, *((order, "float64") for order in splines.ORDERS)))
    for system in SYSTEMS:
        n_atoms, n_systems = len(system.charges), len(system.cell)
        for order, precision in orders:
            dtype = getattr(torch, precision)
            for sizes in ((order, order + 1, order), (order + 4, order, 37)):
                if system is MANY and sizes[2] > 30:
                    continue
                coordinates = torch.rand(n_atoms, 3, generator=rng, dtype=torch.float64) * torch.tensor(sizes) * 2 - 3
                of = (system.batch_idx if n_systems > 1 else None, n_systems)
                columns = mesh.mesh_columns(coordinates, *of, sizes, order)
                for derivatives in (0, 1, 2):
                    moments = torch.randn(n_atoms, 2, count(derivatives), generator=rng, dtype=dtype)
                    plan = (coordinates, *of, *columns, sizes, order, derivatives)
                    if derivatives < 2:
                        mesh.mesh_spread(moments, *plan)
                    field = torch.randn(n_systems, 2, *sizes, generator=rng, dtype=dtype)
                    mesh.mesh_gather(field, *plan)


def charges_program() -> None:
    """Ewald sums of both kinds with all that they give, and the gradient of their gradient."""
    for system in SYSTEMS:
        for dtype in PRECISIONS:
            x, q, cell, system_of = system.to(dtype)
            of = {"batch_idx": system_of} if len(cell) > 1 else {}
            alpha = torch.full((len(cell),), 0.7, dtype=dtype)
            near = csr(system.to(dtype), CUTOFF)
            electrostatics.ewald_summation(x, q, cell, alpha, miller_bounds=(3, 2, 3), **near, **of, **ALL)
            electrostatics.particle_mesh_ewald(x, q, cell, alpha, None, (9, 10, 12), 5, **near, **of, **ALL)
            leaves = [t.clone().requires_grad_() for t in (x, q, cell)]
            energies = electrostatics.ewald_summation(*leaves, alpha, miller_bounds=(2, 3, 2), **near, **of)
            found = torch.autograd.grad(energies.square().sum(), leaves, create_graph=True)
            sum(t.square().sum() for t in found).backward()


def dispersion_program() -> None:
    """D3 with triples, lists and matrices, energies and forces, and the gradient of energies."""
    states = D3Parameters.load().states([1, 6, 8])
    damping = RationalDamping(0.43, 4.4, 0.79, 0.9)
    cutoffs = {"cutoff": CUTOFF, "coordination_cutoff": CUTOFF, "three_body_cutoff": 2.0, "smoothing": 0.5}
    for dtype in PRECISIONS:
        for system, form in ((clusters((1, 2, 32, 33)), "list"), (batch(clusters((34,)), clusters((66,))), "matrix")):
            x, q, cell, system_of = system.to(dtype)
            numbers = torch.tensor([1, 6, 8], dtype=torch.int32)[(q.abs() * 100).long() % 3]
            of = {"batch_idx": system_of} if len(cell) > 1 else {}
            call = (numbers, damping, states, cell)
            near = csr(system.to(dtype), CUTOFF)
            if form == "list":
                d3_dispersion(x, *call, s9=1.0, **of, **near, **cutoffs, compute_forces=True, compute_virial=True)
                continue
            matrix, _, shifts = neighbors.neighbor_list(x, CUTOFF, cell, batch_idx=system_of)
            near = {"neighbor_matrix": matrix, "neighbor_matrix_shifts": shifts}
            leaf = x.clone().requires_grad_()
            d3_dispersion(leaf, *call, s9=1.0, **of, **near, **cutoffs)[0].square().sum().backward()


def coefficients_program() -> None:
    """Coefficients of D3, fewer than a warp has lanes, as many, and more."""
    row = torch.arange(40, dtype=torch.int32) % 3
    states = (row, torch.rand(3, 7, dtype=torch.float64), torch.arange(21, dtype=torch.int32).view(3, 7))
    for n_coefficients in (1, 31, 32, 33, 65):
        vectors = torch.rand(22, n_coefficients, dtype=torch.float64)
        for derivative in (0, 1):
            d3_coefficients(torch.rand(40, dtype=torch.float64), *states, vectors, -4.0, derivative)


def bad_input_program() -> None:
    """Indices of what does not exist, in many rows: no memory beyond arrays is touched, and no race decides."""
    for dtype in PRECISIONS:
        x, q, cell, system_of = ONE.to(dtype)
        near = csr(ONE.to(dtype), CUTOFF)
        alpha = torch.full((1,), 0.7, dtype=dtype)
        pairs_of = near["neighbor_list"].clone()
        for bad in (len(x), -1, 2**31 - 1):
            pairs_of[1, ::7] = bad
            wrong = near | {"neighbor_list": pairs_of}
            electrostatics.ewald_real_space(x, q, cell, alpha, **wrong, compute_forces=True)
        nowhere = x.clone()
        nowhere[::5] = float("nan")
        nowhere[1::5] = float("inf")
        electrostatics.ewald_real_space(nowhere, q, cell, alpha, **near, compute_forces=True)
        given = rows.GivenNeighbors(pairs_of, near["neighbor_ptr"], near["neighbor_shifts"])
        found = rows.rows_of(given, x, periodic=True)
        wide = (x.double(), cell.double(), system_of, found.pointers, found.neighbors, found.shifts)
        rows._inspect(*wide, 0, found.padding, found.first)
        list_geometry(x, pairs_of, near["neighbor_shifts"], cell, batch_idx=system_of)
        variant = next(v for v in pairs._EWALD if v.precision == str(dtype)[6:] and v.request.outputs == "wr")
        for bad in (len(x), -1, 2**31 - 1):
            run_pair_kernel(variant, ONE.to(dtype), "list", bad)


PROGRAMS: dict[str, Callable[[], None]] = {
    "search": search_program,
    "serial search": serial_search,
    "pairs in float64": registered_pairs("float64"),
    "pairs in float32": registered_pairs("float32"),
    "potentials": potentials_program,
    "moments": moments_program,
    "segments": segments_program,
    "sorting": sorting_program,
    "dynamics": dynamics_program,
    "fourier": fourier_program,
    "mesh": mesh_program,
    "charges": charges_program,
    "dispersion": dispersion_program,
    "coefficients": coefficients_program,
    "bad input": bad_input_program,
}


def gpu_kernels() -> set[str]:
    """Names of all registered kernels that are launched on a GPU."""
    not_there = {factory().key for factory in CPU_ONLY}
    return {build().key for _, build in registered_kernels()} - not_there


def main() -> None:
    """Run the program that is named, and print what was found; ``all``: all of them, whose accesses are counted."""
    wp.config.quiet = True
    name = sys.argv[1]
    chosen = list(PROGRAMS.values()) if name == "all" else [PROGRAMS[name]]
    fault = None
    for number in range(len(SYSTEMS)):
        near_of(number)  # not checked each time
    with checked(checks=name != "all") as done:
        try:
            for program in chosen:
                program()
        except Fault as found:
            fault = str(found)
    missing = sorted(gpu_kernels() - {work.kernel for work in done}) if name == "all" else None
    print(json.dumps({"fault": fault, "launches": len(done), "missing": missing}))


if __name__ == "__main__":
    main()
