"""Problems that run the kernels: small systems whose results tests compare, with the lanes of a GPU and without.

Rows are as long as a warp has lanes, or one shorter or longer, once and twice; there are rows and systems without
anything, and several systems.
"""

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch

import nvalchemiops.torch.ops  # noqa: F401  # all operators, and with them all kernels
from nvalchemiops.interactions.pair import moments as moment_kernels
from nvalchemiops.interactions.pair import sum as pair_kernels
from nvalchemiops.interactions.pair.derivatives import CELL, GLOBALS, PARAMETERS, POSITIONS, WEIGHTS
from nvalchemiops.interactions.pair.potentials import moment_short_range
from nvalchemiops.kernels.moments import count
from nvalchemiops.kernels.simd import WARP
from nvalchemiops.kernels.sorting import ROWS
from nvalchemiops.launch import registered_kernels
from nvalchemiops.neighbors.rows import NO_PADDING
from nvalchemiops.torch.interactions.dispersion.coefficients import d3_coefficients
from nvalchemiops.torch.interactions.dispersion.three_body import three_body_derivatives
from nvalchemiops.torch.launch import launch
from nvalchemiops.torch.neighbors import neighbor_list
from nvalchemiops.torch.neighbors.pairs import measure_pairs
from nvalchemiops.torch.neighbors.rows import _inspect as inspect_rows
from nvalchemiops.torch.operators.chains import move_chains
from nvalchemiops.torch.operators.fourier import fourier_gather, fourier_spread
from nvalchemiops.torch.operators.influence import mesh_influence, multiply_by_influence
from nvalchemiops.torch.operators.lattice import lattice_of, shortest_vectors, usable_cells
from nvalchemiops.torch.operators.mesh import mesh_columns, mesh_gather, mesh_spread
from nvalchemiops.torch.operators.noise import chi_square_noise, normal_noise, places_in_systems
from nvalchemiops.torch.operators.segments import system_sums
from nvalchemiops.torch.operators.sorting import counted_rows, pointers_of_sorted, sort_rows

LENGTHS = (0, 1, 31, 32, 33, 64, 65)
"""Of rows, and atoms of systems."""

F64 = torch.float64
Problem = Callable[[], list[torch.Tensor]]


def random(*shape, seed=0, dtype=F64):
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape, low, high, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def pointers(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


# atoms of as many systems as there are lengths, in no order
IN_SYSTEMS = torch.repeat_interleave(torch.arange(len(LENGTHS), dtype=torch.int32), torch.tensor(LENGTHS))[
    torch.randperm(sum(LENGTHS), generator=torch.Generator().manual_seed(3))
]


# -- rows of neighbors ----------------------------------------------------------------------------


INPUTS = {
    POSITIONS: "positions",
    CELL: "cell",
    PARAMETERS: "parameters",
    GLOBALS: "global_parameters",
    WEIGHTS: "weights",
}


class Rows:
    """Atoms on a grid, each moved a bit, with rows of any neighbors: some of them beyond the cutoff of 4."""

    cutoff, r_switch, n_atoms, n_systems = 4.0, 3.0, 45, 2

    def __init__(self, precision, bad=None):
        """With ``bad``, many neighbors have this number, which no atom has."""
        real = getattr(torch, precision)
        at = torch.cartesian_prod(torch.arange(5), torch.arange(3), torch.arange(3)).double()
        self.positions = (1.4 * at + 0.2 * random(self.n_atoms, 3).tanh()).to(real)
        cell = torch.tensor([[[8.0, 0, 0], [1, 7, 0], [-1, 2, 9]], [[9.0, 1, 0], [0, 8, 1], [0, 0, 7]]], dtype=F64)
        self.cell = cell.to(real)
        self.batch_idx = integers(self.n_atoms, low=0, high=self.n_systems)
        lengths = (LENGTHS * 7)[: self.n_atoms]
        self.row_begin = pointers(lengths)
        self.first = torch.repeat_interleave(torch.arange(self.n_atoms).int(), torch.tensor(lengths))
        # no atom is its own neighbor, and none is there twice in one image
        steps = torch.randn(self.n_atoms, self.n_atoms - 1, generator=torch.Generator().manual_seed(1)).argsort(1) + 1
        slot = torch.arange(len(self.first)) - self.row_begin[self.first.long()]
        self.neighbors = (self.first + steps[self.first.long(), slot % steps.shape[1]]).int() % self.n_atoms
        if bad is not None:
            self.neighbors[3::7] = bad
        moved = (slot % 2 == 1) != (slot >= steps.shape[1])
        self.shifts = torch.where(moved.unsqueeze(1), integers(len(slot), 3, low=-1, high=2, seed=2), 0)
        self.shifts[:, 0] += moved * (self.shifts == 0).all(1)

    def matrix(self, width=67):
        """The same neighbors in a matrix, with padding before, between and behind them."""
        index = torch.full((self.n_atoms, width), -7, dtype=torch.int32)
        shifts = torch.zeros(self.n_atoms, width, 3, dtype=torch.int32)
        slot = torch.arange(len(self.first)) - self.row_begin[self.first.long()]
        # rows that do not fill the matrix begin at its second column, and leave out the fourth
        starts = (self.row_begin.diff() < width - 2)[self.first.long()].int()
        slot = slot + starts * (1 + (slot >= 2))
        index[self.first.long(), slot], shifts[self.first.long(), slot] = self.neighbors, self.shifts
        return index.flatten(), shifts.flatten(0, 1)


def pair_sums(variant, bad=None) -> Problem:
    rows, formula, request = Rows(variant.precision, bad), variant.formula, variant.request
    real, n = rows.positions.dtype, rows.n_atoms
    n_globals = len(formula.global_parameters)
    given = {"positions": rows.positions, "cell": rows.cell, "batch_idx": rows.batch_idx}
    # diameters and depths, or charges, around one; shared parameters are inverse lengths or factors
    given["parameters"] = 1.0 + 0.4 * random(n, variant.n_parameters, dtype=real).tanh()
    given["global_parameters"] = 0.5 + 0.1 * random(rows.n_systems, n_globals, dtype=real).tanh()
    given["weights"] = random(n, seed=4, dtype=real)
    given["species"] = integers(n, low=0, high=max(variant.n_species, 1))
    excluded = (LENGTHS[::-1] * 7)[:n]  # atoms that are neighbors or not, in some of their images
    given["excluded_begin"], given["excluded"] = pointers(excluded), integers(sum(excluded), low=0, high=n, seed=6)
    given["excluded_factors"] = random(sum(excluded), seed=7).abs()
    for letter, name in INPUTS.items():
        times = sum(letter in direction for direction in request.directions)
        given[f"direction_{name}"] = random(times, *given[name].shape, seed=5, dtype=real)
    written = pair_kernels.outputs_of(variant)
    sums = sum(pair_kernels.width_of_sums(request.outputs, n_globals).values())
    widths = {"energies": (), "position_gradients": (3,), "parameter_gradients": (variant.n_parameters,)}
    widths["sums"] = (sums,)
    in_list = {"row_begin": rows.row_begin, "first": rows.first, "neighbors": rows.neighbors, "shifts": rows.shifts}
    neighbors, shifts = rows.matrix()
    in_matrix = {"row_begin": None, "first": None, "neighbors": neighbors, "shifts": shifts}

    def problem():
        found = []
        for form, width, padding in ((in_list, 0, NO_PADDING), (in_matrix, 67, -7)):
            outputs = [
                None
                if a.name == "fault"
                else torch.full((n, *widths[a.name]), torch.nan, dtype=F64 if a.element == "float64" else real)
                for a in written
            ]
            arrays = [(given | form)[a.name] for a in pair_kernels.inputs_of(variant)]
            numbers = [width, padding, rows.cutoff, rows.r_switch]
            launch(pair_kernels.pair_kernel(variant), n, [*arrays, *numbers], outputs, lanes=WARP)
            found += [output for output in outputs if output is not None]
        return found

    return problem


def moment_sums(variant) -> Problem:
    rows, formula = Rows(variant.precision), variant.formula
    real, n = rows.positions.dtype, rows.n_atoms
    given = {"positions": rows.positions, "cell": rows.cell, "batch_idx": rows.batch_idx}
    given["moments"] = random(n, variant.n_channels, count(variant.source), dtype=real)
    given["row_moments"] = random(n, variant.n_channels, count(variant.row), seed=2, dtype=real)
    given["parameters"] = random(n, len(formula.per_atom), seed=3, dtype=real).abs()
    given["row_parameters"] = random(n, len(formula.per_atom), seed=4, dtype=real).abs()
    given["global_parameters"] = 0.5 + 0.1 * random(rows.n_systems, len(formula.global_parameters), dtype=real).tanh()
    given["direction_cell"] = random(variant.n_directions, *rows.cell.shape, seed=5, dtype=real)
    given |= {"row_begin": rows.row_begin, "first": rows.first, "neighbors": rows.neighbors, "shifts": rows.shifts}
    widths = {"gathered": (variant.n_channels, count(variant.derivatives))}
    widths["sums"] = (sum(moment_kernels.width_of_sums(variant.outputs).values()),)
    written = [a for a in moment_kernels.outputs_of(variant) if a.name != "fault"]

    def problem():
        outputs = [torch.empty(n, *widths[a.name], dtype=torch.float64 if a.name == "sums" else real) for a in written]
        arrays = [given[a.name] for a in moment_kernels.inputs_of(variant)]
        numbers = [0, NO_PADDING, rows.cutoff, rows.r_switch]
        launch(moment_kernels.moment_kernel(variant), n, [*arrays, *numbers], [*outputs, None], lanes=WARP)
        return outputs

    return problem


MOMENTS = moment_kernels.Variant(
    moment_short_range(True), ("own0",), 1, 2, 1, "mcv", 1, 2, "float64", True, False, True
)
"""Gaussians of two kinds, several channels, a direction, and sums over pairs."""


def triples(precision) -> Problem:
    rows = Rows(precision)
    real = rows.positions.dtype
    n_coefficients = 37
    coefficients = random(rows.n_atoms, n_coefficients, dtype=real)
    species, radii = integers(rows.n_atoms, low=0, high=3), 1.0 + random(3, 3, dtype=real).abs()
    described = (coefficients, species, radii + radii.T, rows.batch_idx, rows.n_systems)
    neighbors, shifts = rows.matrix()
    forms = [(rows.row_begin, rows.neighbors, rows.shifts, 0, NO_PADDING), (None, neighbors, shifts, 67, -7)]
    weights = random(rows.n_atoms, seed=4, dtype=real)

    def problem():
        found = []
        for form, given in zip(forms, (None, weights)):
            found += three_body_derivatives(rows.positions, rows.cell, *described, *form, 30, 4.0, 3.0, given)
        return found

    return problem


def coefficients(derivative) -> Problem:
    n_atoms, n_references = 40, 5
    found = []
    for n_coefficients in (1, 31, 32, 33, 65):
        places = integers(7, n_references, low=0, high=12)
        vectors = torch.cat([random(11, n_coefficients), torch.zeros(1, n_coefficients, dtype=F64)])
        references = random(7, n_references, seed=1).abs() * 3.0
        row = integers(n_atoms, low=0, high=7)
        found.append((random(n_atoms, seed=2).abs() * 4.0, row, references, places, vectors, -4.0, derivative))
    return lambda: [result for arguments in found for result in d3_coefficients(*arguments)]


def distances(precision) -> Problem:
    rows = Rows(precision)
    neighbors, shifts = rows.matrix()
    described = (rows.positions, rows.cell, rows.batch_idx, None)
    rows.neighbors[3] = 1000  # no atom
    return lambda: [
        *measure_pairs(*described, rows.first, rows.neighbors, rows.shifts, None, 0, NO_PADDING),
        *measure_pairs(*described, None, neighbors, shifts, None, 67, -7),
    ]


def inspections(bad=None) -> Problem:
    rows = Rows("float64", bad)
    system = (rows.positions, rows.cell, rows.batch_idx)
    neighbors, shifts = rows.matrix()
    return lambda: [
        *inspect_rows(*system, rows.row_begin, rows.neighbors, rows.shifts, 0, NO_PADDING, rows.first),
        *inspect_rows(*system, None, neighbors, shifts, 67, -7, None),
    ]


# -- searches -------------------------------------------------------------------------------------


def sorted_list(pairs, ptr, shifts=None):
    """A list with the neighbors of each atom in one order; and where its rows begin."""
    entries = pairs.T if shifts is None else torch.cat([pairs.T, shifts], 1)
    rows = entries.tolist()
    ends = ptr.tolist()
    found = [entry for begin, end in zip(ends, ends[1:]) for entry in sorted(rows[begin:end])]
    return [torch.tensor(found).reshape(entries.shape), ptr]


def sorted_matrix(index, number, shifts):
    """The same for a matrix, padding and all; and how long its rows are."""
    rows = torch.cat([index.unsqueeze(2), shifts], 2).tolist()
    found = [sorted(row[:n]) + row[n:] for row, n in zip(rows, number.tolist())]
    return [torch.tensor(found), number]


def searches() -> Problem:
    """Dense and sparse systems, one of them empty; lists, matrices, half lists, some rows, more than there is room."""
    numbers = (65, 0, 200, 1, 33)
    batch_idx = torch.repeat_interleave(torch.arange(5, dtype=torch.int32), torch.tensor(numbers))
    cell = torch.tensor([[9.0, 0, 0], [2, 8, 0], [-1, 2, 7]], dtype=F64) + 0.3 * random(5, 3, 3)
    cell[2, 2] += 3.0 * cell[2, 0]  # skewed, where the bins lie along other vectors
    x = 12.0 * random(sum(numbers), 3)
    pbc = torch.tensor([[True] * 3, [True] * 3, [True, False, True], [True] * 3, [False] * 3])
    targets = torch.tensor([4, 0, 4, 250])
    options = {"cell": cell, "pbc": pbc, "batch_idx": batch_idx}
    room = {"max_neighbors": 120}

    def problem():
        lists = [
            neighbor_list(x, 3.5, return_neighbor_list=True, half_fill=half, method=method, **options)
            for half, method in ((False, None), (True, None), (False, "batch_naive"))
        ]
        lists += [neighbor_list(x[:n], 3.5, return_neighbor_list=True) for n in LENGTHS]
        around = {"batch_idx": batch_idx, "method": "batch_cell_list"}  # bins go round the ring of each system
        lists += [neighbor_list(x, 3.5, return_neighbor_list=True, **around)]
        # rows that share candidates, and differ in how many bins they reach
        cells = [edge * torch.eye(3, dtype=F64) for edge in (9.5, 10.5, 11.5)]
        lists += [neighbor_list(x, 4.0, cell, return_neighbor_list=True) for cell in cells]
        chosen = ({}, {"half_fill": True}, {"target_indices": targets})
        matrices = [neighbor_list(x, 3.5, **options, **room, **more) for more in chosen]
        matrices += [neighbor_list(x, 0.5, **options, max_neighbors=1)]
        parts = [sorted_list(*found) for found in lists] + [sorted_matrix(*found) for found in matrices]
        return [part for each in parts for part in each]

    return problem


def searches_near_the_cutoff() -> Problem:
    """Distances that float32 cannot compare with the cutoff, numbers that it cannot hold, long lines of candidates."""
    grid = torch.cartesian_prod(*[torch.arange(4.0, dtype=F64)] * 3)
    rotation = torch.linalg.qr(random(3, 3)).Q
    x = grid @ rotation + torch.tensor([100.3, -0.7, 1e-3], dtype=F64)
    cell = torch.tensor([[4.0, 0, 0], [8.0, 4, 0], [-4.0, 12.0, 4]], dtype=F64) @ rotation
    cutoffs = (1.0, 2**0.5 * (1.0 + 1e-15), 2.0 * (1.0 - 1e-15), 5**0.5 * (1.0 + 1e-8), 3.0 * (1.0 - 1e-8))
    crowd = torch.cat([grid, 0.3 * random(8500, 3) + 1.0])  # more than 255 for each lane
    few = {"target_indices": torch.tensor([21, 22, 37]), "return_neighbor_list": True, "method": "naive"}

    def problem():
        lists = [neighbor_list(x, cutoff, return_neighbor_list=True) for cutoff in cutoffs]
        lists += [
            neighbor_list(scale * x, scale * 2.0, scale * cell, return_neighbor_list=True)
            for scale in (1.0, 1e-21, 1e21, 1e38)
        ]
        lists += [  # atoms and their own images
            neighbor_list(x[:3], 4.0 * (1.0 + step), 4.0 * rotation, return_neighbor_list=True, half_fill=half)
            for step, half in ((-1e-8, False), (1e-8, False), (1e-8, True))
        ]
        wide = 1e12 * torch.eye(3, dtype=F64)  # some atoms are at its other end, where places have few digits
        steps = (-4e-5, -2e-5, 0.0, 2e-5, 4e-5)
        lists += [neighbor_list(x - 100.0, 1.0 + step, wide, return_neighbor_list=True) for step in steps]
        lists += [neighbor_list(crowd, 1.9, **few)]
        apart = torch.tensor([0.0, 2.0**30 + 63.0, 2.0**30 + 65.0], dtype=F64)  # in one bin
        x_apart = torch.stack([apart, 0.0 * apart, 0.0 * apart], 1).repeat(40, 1)
        systems = torch.arange(40, dtype=torch.int32).repeat_interleave(3)
        lists += [neighbor_list(x_apart, 5.0, batch_idx=systems, return_neighbor_list=True)]
        return [part for found in lists for part in sorted_list(*found)]

    return problem


def uncounted_systems() -> Problem:
    """Nobody knows how many systems there are, or reads it: in order or not, few numbers or numbers far apart."""
    numbers = torch.tensor([65, 0, 200, 1, 33])
    in_order = torch.repeat_interleave(torch.arange(5, dtype=torch.int32), numbers)
    generator = torch.Generator().manual_seed(0)
    mixed = in_order[torch.randperm(len(in_order), generator=generator)]
    x, missing = 9.0 * random(len(in_order), 3), in_order.clone()
    missing[torch.tensor([0, 77])] = -3
    given = [in_order, in_order.flip(0), mixed, 5 + 10**8 * in_order, 5 + 10**8 * mixed, missing]
    given += [in_order[:1], in_order[:0], mixed.long() << 40]

    def problem():
        found = [neighbor_list(x[: len(g)], 3.5, batch_idx=g, max_neighbors=200, check=False) for g in given]
        return [part for matrix, count in found for part in (matrix.sort(1).values, count)]

    return problem


def nearest_searches() -> Problem:
    """Rows shorter and longer than what is selected of them, crystals with ties, some atoms, either atom's choice."""
    numbers = (65, 0, 40, 1)
    batch_idx = torch.repeat_interleave(torch.arange(4, dtype=torch.int32), torch.tensor(numbers))
    cell = torch.tensor([[9.0, 0, 0], [2, 8, 0], [-1, 2, 7]], dtype=F64).expand(4, 3, 3)
    x = torch.cat([10.0 * random(65, 3), torch.cartesian_prod(*[torch.arange(5.0, dtype=F64)] * 3)[:41]])
    systems = {"cell": cell, "batch_idx": batch_idx, "return_neighbor_list": True}
    targets = torch.tensor([4, 0, 4, 70])

    def problem():
        chosen = [{"ties": ties, "symmetric": s} for ties in ("keep", "index") for s in (False, True)]
        chosen += [{"target_indices": targets}, {"symmetric": True, "half_fill": True, "ties": "index"}]
        lists = [neighbor_list(x, 3.6, nearest=k, **systems, **more) for k in (1, 33) for more in chosen]
        # rows of up to 250, several times what a warp holds before it selects
        lists += [neighbor_list(x, 7.5, nearest=k, **systems, ties=ties) for k, ties in ((31, "keep"), (34, "index"))]
        return [part for found in lists for part in sorted_list(*found)]

    return problem


def lattices() -> Problem:
    cells = 5.0 * random(130, 3, 3)
    return lambda: [shortest_vectors(cells).to(F64)]


def judged_cells(precision) -> Problem:
    """Regular, with open axes, with dependent vectors, and not finite."""
    cells = 5.0 * random(130, 3, 3, dtype=getattr(torch, precision))
    cells[::5, 1], cells[1::5, 2], cells[2::10, 0, 1] = 0.0, 4.0 * cells[1::5, 0], torch.inf
    return lambda: [usable_cells(cells, may_be_open) for may_be_open in (False, True)]


def inverted_cells() -> Problem:
    cells = 5.0 * random(130, 3, 3)
    return lambda: [*lattice_of(cells, None, 0)[:3]]


def coordinates(precision) -> Problem:
    """For one cell, and for one of each atom; and back."""
    x, cells = random(130, 3, dtype=getattr(torch, precision)), 5.0 * random(6, 3, 3)
    system_of = integers(130, low=0, high=6)

    def problem():
        lattices = [lattice_of(cells[:1], None, 130), lattice_of(cells, system_of, 130)]
        return [way(x) for lattice in lattices for way in (lattice.fractional, lattice.cartesian)]

    return problem


# -- dynamics -------------------------------------------------------------------------------------


def chains() -> Problem:
    """Of one, three and five thermostats."""
    n = 130
    states = [random(2, n, length, seed=length) for length in (1, 3, 5)]
    others, times = random(3, n).abs(), 0.1 * random(n).abs()
    masses = [0.1 + state[0].abs() for state in states]
    return lambda: [f for state, q in zip(states, masses) for f in move_chains(*state, *others, q, times, 2)]


def noise() -> Problem:
    """Of atoms of all systems, and of systems."""
    n_systems, places = len(LENGTHS), places_in_systems(IN_SYSTEMS, len(LENGTHS))
    seeds = (torch.arange(n_systems), 5 * torch.arange(n_systems), torch.tensor(1 << 40))
    degrees = torch.tensor([0.0, 0.5, 1.0, 2.0, 3.0, 50.0, 51.5], dtype=F64)
    return lambda: [
        normal_noise(*seeds, IN_SYSTEMS, places, 0, len(places), 5),
        normal_noise(*seeds, None, None, 1, n_systems, 1, True),
        chi_square_noise(*seeds, degrees, 2),
    ]


# -- sums -----------------------------------------------------------------------------------------


def fourier(op, derivatives) -> Problem:
    """Rows of k-vectors and single ones, inside and beyond the table; fewer atoms and points than a part has, or more.

    Systems are in reverse order in one of the two.
    """
    row = [[2, 1, n] for n in range(30)] + [[2, 2, n] for n in range(5, 38)] + [[3, 2, 16], [3, 2, 17], [50, 2, 18]]
    problems = []
    for lengths in (LENGTHS, (140, 3)):
        system = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
        order, n = torch.sort(system, stable=True)[1].int(), sum(lengths)
        points = torch.cat([torch.tensor(row, dtype=torch.int32), integers(n - len(row), 3, low=0, high=6)])
        plan = (3.0 * random(n, 3), order, pointers(lengths), points, pointers(lengths[::-1]), derivatives)
        moments, field = random(n, 2, count(derivatives)), random(2, n, 4, 2)
        problems.append((moments if op is fourier_spread else field, *plan))
    return lambda: [op(*problem) for problem in problems]


def splines(order, derivatives=1, precision="float64") -> Problem:
    """A mesh with longer rows than a warp, one with tiles that are not whole, and the smallest one."""
    real, coordinates = getattr(torch, precision), 20.0 * random(sum(LENGTHS), 3)
    moments = random(sum(LENGTHS), 2, count(derivatives), dtype=real)
    n_systems, least = len(LENGTHS), max(order, 8)

    def problem():
        found = []
        for mesh in ((least, least + 1, 40), (least + 1, least, least + 2), (order, order + 1, order)):
            columns = mesh_columns(coordinates, IN_SYSTEMS, n_systems, mesh, order)
            plan = (coordinates, IN_SYSTEMS, n_systems, *columns, mesh, order, derivatives)
            field = random(n_systems, 2, *mesh, dtype=real)
            found += [mesh_gather(field, *plan)]
            if derivatives < 2:
                found += [mesh_spread(moments, *plan)]
        return found

    return problem


def influences(precision) -> Problem:
    """Rows along z that are longer and shorter than a warp, of all planes and of some; alone, and times meshes."""
    lattice, single = lattice_of(5.0 * random(3, 3, 3), None, 0), precision == "float32"
    given = (lattice.metric, lattice.volume, random(3).abs() + 0.1)

    def factors(*shape):
        return random(*shape).abs() + 0.1

    def problem():
        found = []
        for exponent, (planes, length, mesh, first) in itertools.product(
            (1, 6), (((3, 4), 41, (3, 4, 80), (0, 0)), ((5, 2), 3, (5, 6, 7), (3, 1)))
        ):
            arguments = *given, factors(*planes, 1), factors(1, 1, length), mesh, first, exponent
            density = random(3, 2, *planes, length, 2, dtype=getattr(torch, precision))
            found += [
                *mesh_influence(*arguments, True, single),
                multiply_by_influence(density, *arguments, True),
                density,
            ]
        return found

    return problem


def sorted_rows() -> Problem:
    """Rows without entries, at both ends too; entries of one row and of none; rows that are not in order."""
    rows = [integers(n, low=2, high=9, seed=n) for n in LENGTHS]

    def problem():
        found = [t for row in rows for t in sort_rows(row, 12)]
        return [*found, *(pointers_of_sorted(row.sort().values, 12) for row in rows), pointers_of_sorted(rows[-1], 12)]

    return problem


def row_counts() -> Problem:
    """As many rows as a warp adds up, one more, and many; faults in several places."""
    counts = [integers(n, low=0, high=2**20, seed=n) for n in (*LENGTHS, ROWS, ROWS + 1, 5 * ROWS + 7)]
    fault = integers(40, low=0, high=9)
    fault[37] = 9

    def problem():
        return [t for count in counts for t in counted_rows(count, fault)]

    return problem


def system_totals(precision) -> Problem:
    real = getattr(torch, precision)
    many = torch.cat([IN_SYSTEMS, torch.full((20_000,), 7, dtype=torch.int32)])
    values = random(len(many), 33, dtype=real)

    def problem():
        few = [system_sums(values[: len(IN_SYSTEMS), :n].contiguous(), IN_SYSTEMS, 8) for n in (1, 3, 9, 33)]
        one = [system_sums(values[:n], None, 1) for n in LENGTHS]
        return [*few, *one, system_sums(values[:, :3].contiguous(), many, 9)]

    return problem


# -- what runs the kernels of the library -----------------------------------------------------------

CPU_ONLY = {"prepare_search", "sort_atoms", "end_rows", "compact_neighbors", "program_kernel", "stale_kernel"}
"""Kernels for the layout of a CPU, which on a GPU nothing launches."""

RUNS: dict[str, Callable[..., Problem]] = {
    "pair_kernel": pair_sums,
    "moment_kernel": moment_sums,
    "three_body": triples,
    "coefficients": coefficients,
    "measure_pairs": distances,
    "inspect_rows": inspections,
    "search_neighbors": searches,
    "search_nearest": nearest_searches,
    "describe_systems": searches,
    "locate_atoms": searches,
    "place_atoms": searches,
    "number_systems": uncounted_systems,
    "shortest_vectors": lattices,
    "usable_cells": judged_cells,
    "lattice_geometry": inverted_cells,
    "transform_vectors": coordinates,
    "tabulate_influence": influences,
    "phase_tables": lambda: fourier(fourier_spread, 1),
    "fourier_coefficients": lambda: fourier(fourier_gather, 1),
    "fourier_spread": lambda derivatives: fourier(fourier_spread, derivatives),
    "fourier_gather": lambda derivatives: fourier(fourier_gather, derivatives),
    "find_columns": splines,
    "spline_stencils": splines,
    "spline_spread": splines,
    "spline_gather": splines,
    "begin_rows": sorted_rows,
    "add_counts": row_counts,
    "sum_rows": system_totals,
    "chain_kernel": chains,
    "normal_numbers": noise,
    "chi_square_numbers": noise,
}
"""What runs the variants of each kernel."""


def is_for_a_cpu(name):
    return name.partition("(")[0] in CPU_ONLY


KERNELS = {
    name: build for name, build in registered_kernels() if name.partition("(")[0] in RUNS and not is_for_a_cpu(name)
}


def kernels_by_problem() -> dict[tuple[Any, ...], list[str]]:
    """Which kernels the same problem runs."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for name, build in KERNELS.items():
        problem = RUNS[name.partition("(")[0]]
        arguments = inspect.signature(problem).bind(*build.args)
        arguments.apply_defaults()
        found.setdefault((problem, *arguments.args), []).append(name)
    return found
