"""The C++ template of the loop over an atom's row of neighbors.

The kernels of `nvalchemiops.interactions.pair.sum` and `nvalchemiops.interactions.pair.moments` are made from it. These
modules supply the text for the placeholders ``@name@`` that differ between kernels; `body` fills in the others. What a
CPU does with several neighbors at once is in `loop_in_vectors`, what the lanes of a GPU do in `loop_in_warps`.
"""

import hashlib
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import warp as wp

from nvalchemiops.interactions.pair import loop_in_vectors, loop_in_warps
from nvalchemiops.kernels.native import by_device, native_kernel, signature
from nvalchemiops.kernels.simd import WARP, lanes_of
from nvalchemiops.kernels.special import scalar_functions, vector_functions
from nvalchemiops.neighbors.rows import HOW_TO_SORT, NO_PADDING, NOWHERE

FAULTS = {
    1: "`neighbor_list` or `neighbor_matrix` holds an atom that does not exist, or with `half_list` a pair twice",
    2: "`neighbor_list` must be sorted by its first row, and `neighbor_ptr` must fit it, from 0 to the number of pairs"
    + HOW_TO_SORT,
    3: "`batch_idx` holds a system that does not exist",
    4: "`species` holds a species that the tables do not have",
}
"""Messages about invalid indices, by number. A kernel on a CPU reports the highest number that it finds.

Kernels never read memory at an invalid index; the results of the atom are NaN.
"""

NO_NUMBER = 5
"""Number for rows whose results are NaN without an error.

The reason is a position that is not finite, a cell that is NaN, an image along a zero lattice vector (an open axis), or
a neighbor search that failed to find the neighbors.
"""

SKELETON = """
    typedef @real@ real;
#if defined(__CUDA_ARCH__)
    const int lane = threadIdx.x & @last_thread@;
    typedef unsigned place;
#else
    const int lane = 0;
    typedef long long place;
#endif
    const int n_atoms = positions.shape[0];
    const bool is_list = row_begin.shape[0] > 0;
    const long long begin = is_list ? row_begin.data[i] : static_cast<long long>(i) * width;
    long long end = is_list ? row_begin.data[i + 1] : begin + width;
    int broken = 0;
    if (begin < 0 || begin > end || end > neighbors.shape[0] || (i == 0 && begin > 0)
        || (first.shape[0] > 0 && first.shape[0] < end)) broken = 2;
    // a list in memory that has room for more says so by the entry after its last one
    else if (i == n_atoms - 1 && end < neighbors.shape[0]) {
        const int *entries = first.shape[0] > 0 ? first.data : neighbors.data;
        if ((first.shape[0] > 0 && first.shape[0] == end) || entries[end] != @no_padding@
            || (end > 0 && entries[end - 1] == @no_padding@)) broken = 2;
    }
    @checks@
    // An infinite position is beyond every cutoff, and must give NaN all the same.
    const auto has_place = [&](int j) {
        const real *x = positions.data + 3LL * j;
        return bool((fabs(x[0]) < INFINITY) & (fabs(x[1]) < INFINITY) & (fabs(x[2]) < INFINITY));
    };
    if (!has_place(i)) broken = @no_number@;
    if (broken) end = begin;

#if defined(__CUDA_ARCH__)
    @scalar_functions@
    typedef one exact;
#else
    @vector_functions@
    typedef double exact;  // for differences of positions, also in float32: a distance is short beside coordinates
#endif
    const real *own = positions.data + 3LL * i;
    const exact x_i[3] = {exact(own[0]), exact(own[1]), exact(own[2])};
    @cell@
    const one cutoff = cutoff_distance, r_switch = switch_distance, cutoff_squared = cutoff * cutoff;
    @shared@

    const auto displacement = [&](int j, const int *shift, bool has_shift, one *result) {
        const real *x_j = positions.data + 3LL * static_cast<place>(j);
        exact d[3];
        for (int a = 0; a < 3; ++a) d[a] = exact(x_j[a]) - x_i[a];
        @image@
        for (int a = 0; a < 3; ++a) result[a] = static_cast<one>(d[a]);
    };
    @is_nearest@
    struct Neighbor {
        int j, row, shift[3];
        one d[3], factor;
        bool close;
    };
    const auto read = [&](place slot, Neighbor &it) {
        it.j = neighbors.data[slot];
        it.row = first.shape[0] > 0 ? first.data[slot] : i;
        @shift@
    };
#if defined(__CUDA_ARCH__)
    real zero = 0;  // NaN if a neighbor has no place
#endif
    // Looks at the neighbor that was read from a slot; false for padding, as which the atom itself counts, too. A
    // distance that is NaN counts as close.
    const auto look_at = [&](place slot, Neighbor &it) {
        const bool is_padding = it.j == padding && padding > @no_padding@, is_ours = it.row == i;
        const bool is_atom = is_ours && !is_padding && it.j >= 0 && it.j < n_atoms;
        if (!is_atom && (!is_ours || !is_padding)) broken = is_ours ? 1 : 2;
#if defined(__CUDA_ARCH__)
        it.j = is_atom ? it.j : i;  // lanes stay together, and read what is not used
#else
        if (!is_atom) return false;
#endif
        displacement(it.j, it.shift, is_atom, it.d);
        @look@
        const one squared = it.d[0] * it.d[0] + it.d[1] * it.d[1] + it.d[2] * it.d[2];
        const bool is_neighbor = it.j != i || squared != one(0);
        it.close = !(squared >= cutoff_squared);
#if defined(__CUDA_ARCH__)
        for (int a = 0; a < 3; ++a) zero += positions.data[3LL * static_cast<place>(it.j) + a] * real(0);
#else
        if (!(squared < INFINITY) && !has_place(it.j)) broken = @no_number@;
#endif
        return is_atom && is_neighbor;
    };

#if defined(__CUDA_ARCH__)
@turns_of_warps@#else
@turns_of_vectors@#endif
    const double error = broken ? INFINITY - INFINITY : 0.0;
    @errors@
    if (lane > 0) return;
#if !defined(__CUDA_ARCH__)
    // of the faults of all rows the highest number, whichever thread is first; on a GPU none is read
    if (broken && broken != @no_number@ && fault.shape[0] > 0) {
        int highest = __atomic_load_n(fault.data, __ATOMIC_RELAXED);
        while (highest < broken && !__atomic_compare_exchange_n(
            fault.data, &highest, broken, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    }
#endif
    @results@
""".replace("@turns_of_warps@", loop_in_warps.TURNS).replace("@turns_of_vectors@", loop_in_vectors.TURNS)

CELL = by_device(
    f"""
bool is_open[3], any_open = false;
{{
    double sum = 0.0;
    for (int c = 0; c < 3; ++c) {{
        const real *v = cell.data + 9LL * system + 3 * c;
        is_open[c] = v[0] == 0 && v[1] == 0 && v[2] == 0;
        any_open |= is_open[c];
        sum += v[0] + v[1] + v[2];
    }}
    if (sum != sum) broken = {NO_NUMBER};
}}
if (!broken && begin < end && neighbors.data[begin] == i && (shifts.data[3 * begin] == {NOWHERE}
    || shifts.data[3 * begin] == -{NOWHERE})) broken = {NO_NUMBER};
const auto points_nowhere = [&](const int *shift) {{
    return any_open && ((is_open[0] && shift[0]) || (is_open[1] && shift[1]) || (is_open[2] && shift[2]));
}};
""",
    f"""
// each of nine lanes looks at a component; the last check of those of a CPU is made where the image is read
const real component = lane < 9 ? cell.data[9LL * system + lane] : real(0);
const unsigned vectors = __ballot_sync(0xffffffffu, component != 0);
if (__any_sync(0xffffffffu, component != component)) broken = {NO_NUMBER};
const auto points_nowhere = [=](const int *shift) {{
    const bool found_none = (shift[0] == {NOWHERE}) | (shift[0] == -{NOWHERE});
    const bool open[3] = {{(vectors & 7) == 0, (vectors & 56) == 0, (vectors & 448) == 0}};
    return bool(found_none | (open[0] & (shift[0] != 0)) | (open[1] & (shift[1] != 0)) | (open[2] & (shift[2] != 0)));
}};
""",
)

CELL_VECTORS = by_device(
    """
double h[9];
for (int c = 0; c < 9; ++c) h[c] = cell.data[9LL * system + c];
""",
    "const real *const h = cell.data + 9LL * system;",  # read for each image: 18 registers are worth more
)

IMAGE = f"""
if (has_shift && (shift[0] | shift[1] | shift[2])) {{
    // The difference and the image may be long and cancel: a GPU, too, rounds only their sum to single precision.
    for (int a = 0; a < 3; ++a)
        d[a] = (double(x_j[a]) - double(x_i[a]))
            + (shift[0] * double(h[a]) + shift[1] * double(h[3 + a]) + shift[2] * double(h[6 + a]));
    if (points_nowhere(shift)) broken = {NO_NUMBER};
}}
"""

IS_NEAREST = """
// Whether no other image of the same neighbor is closer. Of two at one distance, both atoms choose the same. Those
// along an open axis, 0 to 2, do not count; it is -1 if all are periodic.
const auto is_nearest = [&](long long slot, int open) {
    const auto squared_at = [&](long long place) {
        one d[3];
        displacement(neighbors.data[place], shifts.data + 3 * place, true, d);
        return d[0] * d[0] + d[1] * d[1] + d[2] * d[2];
    };
    const int j = neighbors.data[slot], *shift = shifts.data + 3 * slot;
    if (open >= 0 && shift[open]) return false;
    for (long long place = begin; place < end; ++place) {
        if (place == slot || neighbors.data[place] != j) continue;
        const one mine = squared_at(slot), other = squared_at(place);
        const int *image = shifts.data + 3 * place;
        if (open >= 0 && image[open]) continue;
        int order = 0;
        for (int a = 2; a >= 0; --a) order = image[a] < shift[a] ? -1 : image[a] > shift[a] ? 1 : order;
        if (other < mine || (other == mine && order == (i < j ? -1 : 1))) return false;
    }
    return true;
};
"""

ALWAYS_NEAREST = "const auto is_nearest = [](long long, int) { return true; };"

NO_ATOM = -1
"""In the place of an excluded atom: kernels make the row NaN."""

OPEN_AXIS = 29
"""The bit of an excluded atom's number from which on the open axis is, 0 to 2, if the number is negative."""


def filled_lines(text: str, pieces: dict[str, list[str]], numbers: dict[str, Any]) -> list[str]:
    """The lines of ``text`` with placeholders filled in.

    A ``@name@`` alone on its line is replaced by the lines ``pieces[name]``, any other by ``numbers[name]``.
    """
    lines: list[str] = []
    for line in text.splitlines():
        whole = re.fullmatch(r"( *)@(\w+)@", line)
        if whole:
            lines += [whole[1] + piece for piece in pieces[whole[2]]]
        else:
            lines.append(re.sub(r"@(\w+)@", lambda match: str(numbers[match[1]]), line))
    return lines


class Array(NamedTuple):
    """An array that is an argument of a kernel."""

    name: str
    element: str  # "real", or a Warp scalar type
    ndim: int


SCALARS = {
    "width": wp.int32,  # of a neighbor matrix
    "padding": wp.int32,  # value of entries that are not neighbors
    "cutoff_distance": wp.float64,
    "switch_distance": wp.float64,
}
"""Scalar arguments of a kernel, between its inputs and its outputs."""


def kernel(name: str, body: str, precision: str, inputs: list[Array], outputs: list[Array]) -> Any:
    """The kernel with this body. Its name contains a hash of its content."""
    real = getattr(wp, precision)

    def types(arrays: list[Array]) -> dict[str, Any]:
        return {a.name: wp.array(dtype=getattr(wp, a.element, real), ndim=a.ndim) for a in arrays}

    digest = hashlib.sha256(f"{body}{inputs}{outputs}".encode()).hexdigest()[:20]
    parameters = signature(i=wp.int32, **types(inputs), **SCALARS, **types(outputs))
    return native_kernel(f"{name}_{digest}", body, lanes=True)(parameters)


class Form(NamedTuple):
    """The properties of rows and atoms on which the loop depends.

    Attributes
    ----------
    periodic : bool
        Whether there are shifts and cells.
    excluding : bool
        Whether some pairs are excluded or scaled by a factor.
    keeps_shifts : bool
        Whether the shift of a neighbor is needed apart from its displacement.
    has_globals : bool
        Whether there are global parameters.
    n_species : int
        Number of species in tables of parameters; 0 without tables.
    """

    periodic: bool
    excluding: bool
    keeps_shifts: bool
    has_globals: bool
    n_species: int = 0

    @property
    def n_systems(self) -> str:
        """C++ for the number of systems; empty if the loop does not need the system of an atom."""
        if self.periodic:
            return "cell.shape[0]"
        return "global_parameters.shape[0]" if self.has_globals else ""

    def inputs(self) -> list[Array]:
        """Arrays that describe rows: the last inputs of a kernel."""
        arrays = [Array("batch_idx", "int32", 1)] * bool(self.n_systems)
        arrays += [Array("row_begin", "int32", 1), Array("first", "int32", 1), Array("neighbors", "int32", 1)]
        arrays += [Array("shifts", "int32", 2)] * self.periodic
        arrays += [Array("species", "int32", 1)] * bool(self.n_species)
        if self.excluding:
            arrays += [Array("excluded_begin", "int32", 1), Array("excluded", "int32", 1)]
            arrays += [Array("excluded_factors", "float64", 1)]
        return arrays


NO_TABLES: dict[str, list[str]] = {
    name: [] for name in ("take_both", "take_both_gpu", "table_sums", "tables", "tables_gpu", "reduce_tables")
}
"""Placeholders for the lines that tables of parameters need."""


def loads(inputs: Sequence[str], kind: str, values: Mapping[str, str]) -> list[str]:
    """Declarations of those variables, with these values, that are among the ``inputs`` of a program."""
    return [f"const {kind} {name} = {value};" for name, value in values.items() if name in inputs]


def vector(name: str, values: Sequence[str]) -> str:
    """The declaration of an array with these values."""
    return f"const one {name}[{len(values)}] = {{{', '.join(f'one({value})' for value in values)}}};"


def body(
    form: Form,
    precision: str,
    functions: Iterable[str],
    totals: Mapping[str, str],
    *,
    shared: list[str],
    data: list[str],
    evaluation: list[str],
    results: list[str],
    tables: Mapping[str, list[str]] = NO_TABLES,
    arithmetic: str | None = None,
) -> str:
    """The C++ that sums the row of atom i.

    Parameters
    ----------
    form : Form
    precision : str
        "float32" or "float64": that of positions and results.
    functions : iterable of str
        Names of the functions that the lines below call.
    totals : mapping
        Names of the sums over the row, and the term that a pair adds to each.
    shared, data, evaluation, results : list of str
        Lines that load values shared by all pairs, load the data of a pair, evaluate the pair, and store the sums
        ``sum_<name>``.
    tables : mapping
        Lines for the placeholders of `NO_TABLES`.
    arithmetic : str, optional
        The precision in which a CPU evaluates pairs; by default that of positions. On a GPU it is that of positions.
    """
    arithmetic = arithmetic or precision
    lanes = lanes_of(arithmetic)
    functions = list(functions)
    real = {"float32": "float", "float64": "double"}[precision]
    stored = [("factor", "factor")] * form.excluding
    stored += [(f"shift{a}", f"shift[{a}]") for a in range(3)] * form.keeps_shifts
    is_nearest = IS_NEAREST.strip().splitlines() if form.periodic else [ALWAYS_NEAREST]
    numbers = {
        "real": real,
        "no_padding": f"({NO_PADDING + 1} - 1)",  # C++ has no literal for the lowest int32
        "no_number": NO_NUMBER,
        "warp": WARP,
        "last_thread": WARP - 1,
        **loop_in_vectors.numbers_of(lanes),
    }
    lines: dict[str, list[str]] = {
        **tables,
        "shared": shared,
        "evaluation": [*evaluation, *(f"total_{name} += kept({value});" for name, value in totals.items())],
        "totals": [*(f"doubles total_{name} = 0.0;" for name in totals), *tables["table_sums"]],
        "totals_gpu": [*(f"double total_{name} = 0.0;" for name in totals), *tables["table_sums"]],
        "sums": [f"double sum_{name} = add_up(total_{name});" for name in totals],
        "sums_gpu": [f"double sum_{name} = total_{name};" for name in totals]
        + loop_in_warps.added_up([f"sum_{n}" for n in totals]),
        "errors": [f"sum_{name} += error;" for name in totals],
        "results": results,
        "checks": _checks(form),
        "cell": CELL_VECTORS.strip().splitlines() * form.periodic,
        "image": IMAGE.strip().splitlines() * form.periodic,
        "is_nearest": is_nearest * form.excluding,
        "shift": ["for (int a = 0; a < 3; ++a) it.shift[a] = shifts.data[3LL * slot + a];"] * form.periodic,
        "look": _look(form),
        "fast": filled_lines("\n".join(loop_in_vectors.fast(form)), {}, numbers),
        "collect": loop_in_vectors.stored(form, "[m]", "it.factor", "it.shift[a]"),
        "keep": loop_in_vectors.stored(form, "[m]", "block.factor[from]", "block.shift[a][from]"),
        "fill": loop_in_vectors.stored(form, "[m + rest]", "1.0", "0"),
        "data": [*(f"const lanes {name} = load(block.{place});" for name, place in stored), *data],
        "data_gpu": [*(f"const one {name} = it.{place};" for name, place in stored), *data],
        "scalar_functions": textwrap.dedent(scalar_functions(functions)).strip().splitlines(),
        "vector_functions": textwrap.dedent(vector_functions(functions, arithmetic)).strip().splitlines(),
    }
    return "\n".join(filled_lines(SKELETON, lines, numbers)) + "\n"


def _checks(form: Form) -> list[str]:
    lines = []
    if form.n_systems:
        lines += ["int system = batch_idx.shape[0] > 0 ? batch_idx.data[i] : 0;"]
        lines += [f"if (system < 0 || system >= {form.n_systems}) broken = 3, system = 0;"]
    if form.periodic:
        lines += CELL.strip().splitlines()
    if form.n_species:
        lines += ["int own_species = species.data[i];"]
        lines += [f"if (own_species < 0 || own_species >= {form.n_species}) broken = 4, own_species = 0;"]
    return lines


def _look(form: Form) -> list[str]:
    """Lines that load the factor of a pair, and check the species of the neighbor."""
    lines = []
    if form.excluding:
        lines += [
            "if (!is_atom) return false;",
            "it.factor = one(1.0);",
            "for (int e = excluded_begin.data[i]; e < excluded_begin.data[i + 1]; ++e) {",
            "    const int other = excluded.data[e];",
            f"    if (other == {NO_ATOM}) broken = {NO_NUMBER};",
            f"    else if ((other < 0 ? other & {2**OPEN_AXIS - 1} : other) == it.j",
            f"        && is_nearest(slot, other < 0 ? (other >> {OPEN_AXIS}) & 3 : -1))",
            "        it.factor = excluded_factors.data[e];",
            "}",
            "if (it.factor == one(0.0)) {",
            "    it.j = i;",
            "    return false;",
            "}",
        ]
    if form.n_species:
        lines += [
            "const int its_species = species.data[it.j];",
            f"if (its_species < 0 || its_species >= {form.n_species}) {{",
            "    broken = 4;",
            "    it.j = i;  // a GPU reads what depends on the species all the same",
            "    return false;",
            "}",
        ]
    return lines
