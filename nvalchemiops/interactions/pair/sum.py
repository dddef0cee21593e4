"""The kernel of all pair potentials: an atom sums a formula over its row of neighbors.

A kernel is generated for each `Request` (which derivatives of which formula) and precision. The same kernel serves
lists and matrices, one system and batches, and any padding. It is in gather form: each atom writes only its own
results. So results do not depend on the number of threads, nor on padding or pairs beyond the cutoff, which are dropped
before anything is added.

The body is C++. On a CPU, neighbors within the cutoff are collected and evaluated in vectors (`lanes_of`). On a GPU,
the lanes of a warp share a row, and each lane evaluates a neighbor. Both compute in the precision of the positions (a
CPU in float64 where float32 might not do, see `Variant.arithmetic`), and sum in float64.
"""

import re
from typing import Any, NamedTuple

from nvalchemiops.interactions.pair import derivatives, loop, loop_in_warps, potentials
from nvalchemiops.interactions.pair.derivatives import CELL, GLOBALS, PARAMETERS, POSITIONS, VIRIAL, WEIGHTS, Request
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.loop import Array
from nvalchemiops.kernels.simd import lanes_of
from nvalchemiops.launch import kernel_variants


class Variant(NamedTuple):
    """The choices for which a kernel is generated.

    Attributes
    ----------
    request : Request
    precision : str
        "float32" or "float64": that of positions and results.
    periodic : bool
        Whether there are shifts and cells.
    n_species : int
        Number of species in tables of parameters; 0 without tables.
    """

    request: Request
    precision: str
    periodic: bool
    n_species: int

    def __str__(self) -> str:
        """A short name."""
        energy, _, _ = self.formula.expression.partition(";")
        return " ".join([energy, *self.request.directions, "->", self.request.outputs, self.precision])

    @property
    def formula(self) -> Formula:
        """The potential."""
        return self.request.formula

    @property
    def arithmetic(self) -> str:
        """The precision in which a CPU evaluates pairs: float32 where its range and digits are certain to suffice."""
        if self.precision == "float32" and (self.request.directions or derivatives.has_high_powers(self.formula)):
            return "float64"
        return self.precision

    @property
    def form(self) -> loop.Form:
        """The properties on which the loop depends."""
        request, formula = self.request, self.formula
        keeps_shifts = CELL in request.outputs or any(CELL in d for d in request.directions)
        has_globals = bool(formula.global_parameters)
        return loop.Form(self.periodic, request.excluding, keeps_shifts, has_globals, self.n_species)

    @property
    def n_parameters(self) -> int:
        """Number of columns of the parameters of atoms: one for each parameter, and for each table one per species."""
        return len(self.formula.per_atom) + len(self.formula.per_pair) * self.n_species


def width_of_sums(outputs: str, n_globals: int) -> dict[str, int]:
    """Number of columns of each output that is summed over systems, in order."""
    widths = {CELL: 9, GLOBALS: n_globals, VIRIAL: 9}
    return {letter: width for letter, width in widths.items() if letter in outputs}


def inputs_of(variant: Variant) -> list[Array]:
    """Arrays that the kernel reads, in order."""
    formula, directions = variant.formula, variant.request.directions
    arrays = [Array("positions", "real", 2)]
    arrays += [Array("cell", "real", 3)] * variant.periodic
    arrays += [Array("parameters", "real", 2)] * bool(variant.n_parameters)
    arrays += [Array("global_parameters", "real", 2)] * bool(formula.global_parameters)
    arrays += [Array("weights", "real", 1)] * variant.request.weights
    for letter, name, ndim in (
        (POSITIONS, "positions", 3),
        (CELL, "cell", 4),
        (PARAMETERS, "parameters", 3),
        (GLOBALS, "global_parameters", 3),
        (WEIGHTS, "weights", 2),
    ):
        if any(letter in d for d in directions):
            arrays.append(Array(f"direction_{name}", "real", ndim))
    return arrays + variant.form.inputs()


def outputs_of(variant: Variant) -> list[Array]:
    """Arrays that the kernel writes, in order."""
    outputs = variant.request.outputs
    arrays = [Array("energies", "real", 1)] * (WEIGHTS in outputs)
    arrays += [Array("position_gradients", "real", 2)] * (POSITIONS in outputs)
    arrays += [Array("parameter_gradients", "real", 2)] * (PARAMETERS in outputs)
    arrays += [Array("sums", "float64", 2)] * bool(width_of_sums(outputs, 1))
    return [*arrays, Array("fault", "int32", 1)]


_COMMON = [
    Variant(Request(formula, (), outputs, weights), "float64", True, 0)
    for formula in (potentials.lennard_jones(), potentials.COULOMB, potentials.EWALD_REAL_SPACE, potentials.DSF)
    for outputs, weights in (("wr", False), ("wrv", False), ("r", True))
]
"""Kernels of common calls: energies with forces, also with virial, and the backward pass of energies to positions."""

_EWALD = [
    Variant(Request(potentials.ewald_short_range(1), (), outputs, outputs[0] != WEIGHTS), precision, True, 0)
    for precision in ("float64", "float32")
    for outputs in ("w", "wr", "wrv", "wp", "wrp", "wrpv", "r", "c", "p", "rc", "rp", "cp", "rcp")
]
"""Kernels of Ewald sums with one charge per atom: energies with first derivatives, and backward passes of energies."""


_NEARBY = [
    Variant(Request(potentials.coulomb_nearby(), (), "wr", False), precision, True, 0)
    for precision in ("float64", "float32")
]
"""Kernels of the forces of near neighbors, from which Ewald sums estimate the size of forces."""


@kernel_variants(*((variant,) for variant in (*_COMMON, *_EWALD, *_NEARBY)))
def pair_kernel(variant: Variant) -> Any:
    """The kernel for ``variant``, compiled at its first launch and kept on disk under a hash of its content.

    Its parameters are ``offset``, the arrays of `inputs_of`, the numbers of `loop.SCALARS` and the arrays of
    `outputs_of`.
    """
    return loop.kernel("pair_sum", source(variant), variant.precision, inputs_of(variant), outputs_of(variant))


# -- the body -------------------------------------------------------------------------------------


def source(variant: Variant) -> str:
    """The C++ that sums the row of atom i."""
    program = derivatives.program(variant.request)
    evaluation = [*program.of_pair]
    if "derivative" in program.results:
        evaluation += [f"const lanes g{a} = {_gradient(program, a)};" for a in range(3)]
    return loop.body(
        variant.form,
        variant.precision,
        program.functions,
        _totals(variant, program),
        shared=[*_data_of_atom(variant, program), *program.shared],
        data=_data_of_pair(variant, program),
        evaluation=evaluation,
        results=_results(variant, program),
        tables=_lines_of_tables(variant, program) if variant.n_species else loop.NO_TABLES,
        arithmetic=variant.arithmetic,
    )


def _lines_of_tables(variant: Variant, program: derivatives.Program) -> dict[str, list[str]]:
    columns = [(k * variant.n_species, f"lanes({program.results[name]})") for k, name in enumerate(_tables(program))]
    n_sums, lanes = len(columns) * variant.n_species, lanes_of(variant.arithmetic)
    return {
        "take_both": [
            "const auto take_both = [&](const real *from, long long stride) {",
            "    lanes values;",
            f"    for (int l = 0; l < {lanes}; ++l)",
            "        values[l] = from[stride * i + species.data[j[l]]] + from[stride * j[l] + own_species];",
            "    return one(0.5) * values;",
            "};",
        ],
        "take_both_gpu": [
            "const auto take_both = [&](const real *from, long long stride) {",
            "    return one(0.5) * (from[stride * i + species.data[it.j]] + from[stride * it.j + own_species]);",
            "};",
        ],
        "table_sums": [f"double table_sums[{n_sums}] = {{}};"] * bool(columns),
        "tables": [
            f"for (int l = 0; l < {lanes} && at + l < n; ++l) table_sums[{column} + species.data[j[l]]] += {value}[l];"
            for column, value in columns
        ],
        "tables_gpu": [f"table_sums[{column} + species.data[it.j]] += {value};" for column, value in columns],
        "reduce_tables": loop_in_warps.added_up([f"table_sums[{t}]" for t in range(n_sums)]),
    }


def _number_of(letter: str, k: int, variant: Variant) -> int:
    """The index of direction k among the directions with this letter, which alone are stored."""
    return sum(letter in d for d in variant.request.directions[:k])


def _data_of_atom(variant: Variant, program: derivatives.Program) -> list[str]:
    """Lines that load the data shared by all pairs of an atom."""
    formula, n = variant.formula, variant.n_parameters
    n_own, n_globals = len(formula.per_atom), len(formula.global_parameters)
    lines = []
    if variant.request.weights:
        lines.append("const one w_i = weights.data[i];")
    names = [("", "", 0)] + [(f"_d{k}", "direction_", k) for k in range(len(variant.request.directions))]
    for suffix, prefix, k in names:
        at = {letter: f"{_number_of(letter, k, variant)}LL" if suffix else "0LL" for letter in "rcpgw"}
        place = f"{prefix}parameters.data[({at[PARAMETERS]} * n_atoms + i) * {n}"
        given = {f"own{m}{suffix}": f"{place} + {m}]" for m in range(n_own)}
        place = f"{prefix}global_parameters.data[({at[GLOBALS]} * global_parameters.shape[0] + system) * {n_globals}"
        given |= {f"shared{m}{suffix}": f"{place} + {m}]" for m in range(n_globals)}
        lines += loop.loads(program.inputs, "one", given)
        if not suffix:
            continue
        parts = variant.request.directions[k]
        if POSITIONS in parts:
            row = f"3 * ({at[POSITIONS]} * n_atoms + i)"
            lines.append(loop.vector(f"x_i{suffix}", [f"direction_positions.data[{row} + {a}]" for a in range(3)]))
        if CELL in parts:
            row = f"9 * ({at[CELL]} * cell.shape[0] + system)"
            lines.append(loop.vector(f"h{suffix}", [f"direction_cell.data[{row} + {c}]" for c in range(9)]))
        if f"w_i{suffix}" in program.inputs or f"eta{k}" in program.inputs:
            lines.append(f"const one w_i{suffix} = direction_weights.data[{at[WEIGHTS]} * n_atoms + i];")
    return lines


def _data_of_pair(variant: Variant, program: derivatives.Program) -> list[str]:
    """Lines that load or compute the variables of a pair."""
    formula, n, directions = variant.formula, variant.n_parameters, variant.request.directions
    lines = ["const lanes s = d0 * d0 + d1 * d1 + d2 * d2;"]
    names = [("", "parameters.data")]
    moved: list[int] = []
    for k, parts in enumerate(directions):
        at = f"{_number_of(PARAMETERS, k, variant)}LL * n_atoms * {n}"
        names.append((f"_d{k}", f"direction_parameters.data + {at}"))
        if not variant.request.moves[k]:
            continue
        for a in range(3):
            change = []
            if POSITIONS in parts:
                row = f"3LL * {_number_of(POSITIONS, k, variant)} * n_atoms + {a}"
                change.append(f"(take(direction_positions.data + {row}, 3) - x_i_d{k}[{a}])")
            if CELL in parts:
                change.append("(" + " + ".join(f"shift{c} * h_d{k}[{3 * c + a}]" for c in range(3)) + ")")
            lines.append(f"const lanes d{a}_d{k} = {' + '.join(change)};")
        lines.append(f"const lanes b{k} = {_dot('', f'_d{k}')};")
        lines += [f"const lanes c{earlier}_{k} = {_dot(f'_d{earlier}', f'_d{k}')};" for earlier in moved]
        moved.append(k)
    for suffix, start in names:
        given = {f"other{m}{suffix}": f"take({start} + {m}, {n})" for m in range(len(formula.per_atom))}
        for m in range(len(formula.per_pair)):
            column = len(formula.per_atom) + m * variant.n_species
            given[f"table{m}{suffix}"] = f"take_both({start} + {column}, {n})"
        lines += loop.loads(program.inputs, "lanes", given)
    for suffix in ("", *(f"_d{k}" for k in range(len(directions)))):
        name = f"eta{suffix.removeprefix('_d')}" if suffix else "omega"
        if name not in program.inputs:
            continue
        factors = ["factor"] * variant.request.excluding
        if suffix:
            at = f"{_number_of(WEIGHTS, int(suffix[2:]), variant)}LL * n_atoms"
            factors.append(f"one(0.5) * (w_i{suffix} + take(direction_weights.data + {at}, 1))")
        elif variant.request.weights:
            factors.append("one(0.5) * (w_i + take(weights.data, 1))")
        lines.append(f"const lanes {name} = {' * '.join(factors)};")
    return lines


def _dot(a: str, b: str) -> str:
    return " + ".join(f"d{c}{a} * d{c}{b}" for c in range(3))


def _gradient(program: derivatives.Program, a: int) -> str:
    """The derivative of a pair's contribution with respect to component a of its displacement."""
    terms = [f"{program.results['derivative']} * d{a}"]
    for name, value in program.results.items():
        if re.fullmatch(r"derivative\d+", name):
            terms.append(f"{value} * d{a}_d{name.removeprefix('derivative')}")
    return " + ".join(terms)


def _tables(program: derivatives.Program) -> list[str]:
    return [name for name in program.results if name.startswith("table")]


def _totals(variant: Variant, program: derivatives.Program) -> dict[str, str]:
    """Names of the sums over a row, and the term that a pair adds to each."""
    outputs, results = variant.request.outputs, program.results
    totals = {}
    if WEIGHTS in outputs:
        totals["energy"] = results["energy"]
    if POSITIONS in outputs:
        totals |= {f"x{a}": f"g{a}" for a in range(3)}
    if CELL in outputs:
        totals |= {f"h{c}{a}": f"shift{c} * g{a}" for c in range(3) for a in range(3)}
    if VIRIAL in outputs:
        totals |= {f"v{a}{b}": f"g{a} * d{b}" for a in range(3) for b in range(a, 3)}
    totals |= {name: value for name, value in results.items() if re.fullmatch(r"(own|shared)\d+", name)}
    return {name: f"lanes({value})" for name, value in totals.items()}


def _alone(program: derivatives.Program, name: str) -> str:
    """The contribution of the self energy to a result, as text to append."""
    value = program.results.get(f"self_{name}")
    return f" + {value}" if value else ""


def _results(variant: Variant, program: derivatives.Program) -> list[str]:
    """Lines that store the results. Each pair is in two rows, so sums over pairs are halved."""
    outputs, formula = variant.request.outputs, variant.formula
    lines = []
    if WEIGHTS in outputs:
        lines.append(f"energies.data[i] = 0.5 * sum_energy{_alone(program, 'energy')};")
    if POSITIONS in outputs:
        lines += [f"position_gradients.data[3LL * i + {a}] = -sum_x{a};" for a in range(3)]
    if PARAMETERS in outputs:
        n = variant.n_parameters
        place = f"parameter_gradients.data[{n}LL * i + {{}}]"
        lines += [f"{place.format(m)} = sum_own{m}{_alone(program, f'own{m}')};" for m in range(len(formula.per_atom))]
        if _tables(program):
            first, count = len(formula.per_atom), len(_tables(program)) * variant.n_species
            store = f"{place.format(f'{first} + t')} = 0.5 * table_sums[t] + error;"
            lines.append(f"for (int t = 0; t < {count}; ++t) {store}")
    columns = []
    if CELL in outputs:
        columns += [f"0.5 * sum_h{c}{a}" for c in range(3) for a in range(3)]
    if GLOBALS in outputs:
        columns += [
            f"0.5 * sum_shared{m}{_alone(program, f'shared{m}')}" for m in range(len(formula.global_parameters))
        ]
    if VIRIAL in outputs:
        columns += [f"-0.5 * sum_v{min(a, b)}{max(a, b)}" for a in range(3) for b in range(3)]
    return lines + [f"sums.data[{len(columns)}LL * i + {c}] = {value};" for c, value in enumerate(columns)]
