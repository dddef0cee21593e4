"""Sums over pairs of moments: derivatives of a radial function with respect to both positions, contracted with moments.

With derivatives numbered as in `nvalchemiops.kernels.moments`, the result of atom i with neighbors j is

    out_i^a = Σ_j Σ_b m_j^b ∂_i^a ∂_j^b u(|x_j - x_i|; p_i, p_j, θ)

The sum S = Σ_i g_i^a out_i^a is symmetric in g and m. So its derivatives are sums of the same kind:

* with respect to m: the sum ``out`` of g;
* with respect to a position: the sums of g and of m with one more derivative;
* with respect to a parameter p: such sums with ∂u/∂p instead of u;
* with respect to the cell: the sum over pairs of the shift times the derivative with respect to the displacement.

If the cell changes in a direction h', a displacement changes by δ = shift h', and the derivative of S is the same sum
with (δ.∇) u instead of u. So sums with any number of such directions are closed under differentiation.

**Contraction.** No tensor of derivatives of u is formed. Let d = x_j - x_i, s = d.d and B_n = (-2 d/ds)^n u. For a
homogeneous polynomial f of degree λ, Hobson's theorem (E. W. Hobson, Proc. London Math. Soc. 24, 55 (1892)) gives

    f(∂) u = Σ_t (-1)^(λ-t) B_(λ-t) Q_t(d),    Q_t = Δ^t f(d) / (2^t t!)

The moments of j of one order are the coefficients of such a polynomial. Let T_k^l be this sum with B_(n+k) instead of
B_n and ∂^l Q_t instead of Q_t. Then ∂_a T_k^l = T_k^(l+a) - d_a T_(k+1)^l, so a derivative of any order is a sum of few
products of a power of d and a T, with the coefficients of Hermite polynomials.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

from nvalchemiops.interactions.pair import loop, potentials
from nvalchemiops.interactions.pair.derivatives import CELL, FILES, VIRIAL, Program, printed
from nvalchemiops.interactions.pair.expression import Formula, pair_energy, symbols_of, without_absolutes
from nvalchemiops.interactions.pair.lazy_sympy import sympy
from nvalchemiops.interactions.pair.loop import Array
from nvalchemiops.kernels.kept_text import kept_text
from nvalchemiops.kernels.moments import Component, components, count
from nvalchemiops.kernels.simd import LANES
from nvalchemiops.launch import kernel_variants

GATHERED = "m"
"""Letter of the sums ``out`` of each atom, in addition to those of `nvalchemiops.interactions.pair.derivatives`."""


class Variant(NamedTuple):
    """The choices for which a kernel is generated.

    Attributes
    ----------
    formula : Formula
        The radial function u.
    by : tuple of str
        Parameters with respect to which u is differentiated: "own<m>" of the atom, "other<m>" of its neighbors, and
        global ones, "shared<m>".
    source : int
        Highest order of the moments of neighbors.
    derivatives : int
        Highest order, in the sums ``out`` of each atom, of derivatives with respect to the position of the atom.
    row : int
        Highest order of the moments of the atom itself, for the sums over pairs.
    outputs : str
        Letters of the results: sums ``out`` of each atom (m), gradient with respect to the cell (c), virial (v).
    n_directions : int
        Number of directions of the cell.
    n_channels : int
    precision : str
        "float32" or "float64": that of positions and results.
    periodic : bool
        Whether there are shifts and cells.
    excluding : bool
        Whether some pairs are excluded or scaled by a factor.
    apart : bool
        Whether an atom has other parameters as the atom of a row than as a neighbor.
    """

    formula: Formula
    by: tuple[str, ...]
    source: int
    derivatives: int
    row: int
    outputs: str
    n_directions: int
    n_channels: int
    precision: str
    periodic: bool
    excluding: bool
    apart: bool

    def __str__(self) -> str:
        """A short name."""
        energy, _, _ = self.formula.expression.partition(";")
        orders = f"{self.source}->{self.derivatives}"
        return " ".join([energy, *self.by, "of moments", orders, self.outputs, self.precision])

    @property
    def order(self) -> int:
        """Highest order of derivatives of u with respect to the position of the atom."""
        orders = [self.derivatives] * (GATHERED in self.outputs)
        orders += [self.row + 1] * self.sums_pairs
        return max(orders) + self.n_directions

    @property
    def sums_pairs(self) -> bool:
        """Whether there are sums over pairs, which need the moments of the atom of a row."""
        return CELL in self.outputs or VIRIAL in self.outputs

    @property
    def form(self) -> loop.Form:
        """The properties on which the loop depends."""
        keeps_shifts = CELL in self.outputs or self.n_directions > 0
        return loop.Form(self.periodic, self.excluding, keeps_shifts, bool(self.formula.global_parameters))


def width_of_sums(outputs: str) -> dict[str, int]:
    """Number of columns of each output that is summed over systems, in order."""
    return {letter: 9 for letter in (CELL, VIRIAL) if letter in outputs}


def inputs_of(variant: Variant) -> list[Array]:
    """Arrays that the kernel reads, in order."""
    formula = variant.formula
    arrays = [Array("moments", "real", 3)]
    arrays += [Array("row_moments", "real", 3)] * variant.sums_pairs
    arrays += [Array("positions", "real", 2)]
    arrays += [Array("cell", "real", 3)] * variant.periodic
    arrays += [Array("parameters", "real", 2)] * bool(formula.per_atom)
    arrays += [Array("row_parameters", "real", 2)] * variant.apart
    arrays += [Array("global_parameters", "real", 2)] * bool(formula.global_parameters)
    arrays += [Array("direction_cell", "real", 4)] * bool(variant.n_directions)
    return arrays + variant.form.inputs()


def outputs_of(variant: Variant) -> list[Array]:
    """Arrays that the kernel writes, in order."""
    arrays = [Array("gathered", "real", 3)] * (GATHERED in variant.outputs)
    arrays += [Array("sums", "float64", 2)] * bool(width_of_sums(variant.outputs))
    return [*arrays, Array("fault", "int32", 1)]


_EWALD = [
    Variant(potentials.moment_short_range(False), (), n, n + 1, -1, GATHERED, 0, 1, precision, True, False, False)
    for precision in ("float64", "float32")
    for n in (1, 2)
]
"""Kernels of Ewald sums of dipoles and quadrupoles: energies, forces and gradients with respect to moments."""


@kernel_variants(*((variant,) for variant in _EWALD))
def moment_kernel(variant: Variant) -> Any:
    """The kernel for ``variant``, compiled at its first launch and kept on disk under a hash of its content.

    Its parameters are ``offset``, the arrays of `inputs_of`, the numbers of `loop.SCALARS` and the arrays of
    `outputs_of`.
    """
    return loop.kernel("pair_moments", source(variant), variant.precision, inputs_of(variant), outputs_of(variant))


# -- the radial function --------------------------------------------------------------------------


@functools.cache
def radial(formula: Formula, by: tuple[str, ...], order: int) -> tuple[Program, list[str]]:
    """Statements for B_0 to B_order, in two parts: those generated from sympy expressions, then those that define B_n.

    B_(n+1) is computed from B_n where ``s B_(n+1) - (2n + 1) B_n`` is a shorter expression than B_(n+1), as it is for a
    function divided by r.
    """
    program, lines = kept_text((*FILES, __file__), (formula, by, order), lambda: _radial(formula, by, order))
    return Program(*program), lines


def _radial(formula: Formula, by: tuple[str, ...], order: int) -> list[Any]:
    """The result of `radial`, as lists and strings."""
    symbols = symbols_of(formula)
    s = symbols.squared
    function = pair_energy(formula)
    named = {str(x): x for x in (*symbols.own, *symbols.other, *symbols.of_system)}
    for name in by:
        function = without_absolutes(function.diff(named[name]))
    function, definitions = _without_constants(function, s)
    parts, lines, current = {"B0": function}, ["const lanes B0 = {B0};"], function
    for n in range(order):
        following = sympy.expand(without_absolutes(-2 * current.diff(s)))
        rest = sympy.expand(s * following - (2 * n + 1) * sympy.expand(current))
        if rest.count_ops() + 2 < following.count_ops():
            parts["inverse"] = 1 / s
            text = f"one({2 * n + 1}.0) * B{n}"
            if rest != 0:
                parts[f"rest{n}"] = rest
                text = f"({text} + {{rest{n}}})"
            lines.append(f"const lanes B{n + 1} = {text} * {{inverse}};")
        else:
            parts[f"B{n + 1}"] = following
            lines.append(f"const lanes B{n + 1} = {{B{n + 1}}};")
        current = following
    screened = [] if by else _screened(function, s)
    for k, (weight, inverse_length) in enumerate(screened):
        parts |= {f"weight{k}": weight, f"kappa{k}": inverse_length, f"square{k}": inverse_length**2}
    if screened:
        parts["charge"] = sympy.Add(*(weight for weight, _ in screened))
        lines = [line.replace("const lanes B", "lanes B") for line in lines] + _overlapping(len(screened), order)
    program = printed(parts, definitions)
    of_results = {name: f"lanes({text})" for name, text in program.results.items()}
    return [program, [line.format(**of_results) for line in lines]]


def _screened(function: Any, s: Any) -> list[tuple[Any, Any]]:
    """The weights c and the κ of a function ``Σ c erfc(κ r)/r`` whose weights may add up to zero; otherwise nothing."""
    found = []
    for term in sympy.Add.make_args(function):
        weight, inverse_length = term * sympy.sqrt(s), sympy.S.Zero
        for screening in weight.atoms(sympy.erfc):
            weight, inverse_length = weight / screening, screening.args[0] / sympy.sqrt(s)
        if weight.has(s) or inverse_length.has(s):
            return []
        found.append((weight, inverse_length))
    charge = sympy.Add(*(weight for weight, _ in found))
    return [] if charge.is_number and charge != 0 else found


def _overlapping(n_terms: int, order: int) -> list[str]:
    """Statements for B_n of ``Σ c erfc(κ r)/r`` at κ r < 1, including r = 0, if the weights c add up to zero.

    The function is then ``-Σ c erf(κ r)/r``, and the usual statements would subtract large numbers. With x = (κ r)²
    and ``G_n = x^-(n + 1/2) γ(n + 1/2, x)``, a series of positive terms, ``B_n = -Σ c 2^n κ^(2n+1) G_n / sqrt(π)`` and
    ``(n + 1/2) G_n = x G_(n+1) + exp(-x)``. Source: NIST Digital Library of Mathematical Functions, 8.7.1 and 8.8.1.
    """
    lines = ["condition overlap = {charge} == one(0.0);"]
    lines += [f"overlap = overlap & ({{square{k}}} * s < one(1.0));" for k in range(n_terms)]
    lines += ["#if defined(__CUDA_ARCH__)", "const bool any_overlap = overlap;", "#else", "bool any_overlap = false;"]
    lines += ["for (int l = 0; l < LANES; ++l) any_overlap |= overlap[l] != 0;".replace("LANES", str(LANES)), "#endif"]
    lines += ["if (any_overlap) {{", *(f"    lanes sum{n} = one(0.0);" for n in range(order + 1))]
    size, terms = 1.0, 0
    while size > 1e-17:
        size /= order + 1.5 + terms
        terms += 1
    for k in range(n_terms):
        lines += [f"    const lanes y{k} = overlap ? {{square{k}}} * s : lanes(one(0.0));"]
        lines += [f"    const lanes decay{k} = exp_lanes(-y{k});"]
        series = "one(1.0)"
        for j in reversed(range(terms)):
            series = f"(one(1.0) + y{k} * one({1.0 / (order + 1.5 + j)!r}) * {series})"
        lines += [f"    lanes series{k} = {series} * decay{k} * one({1.0 / (order + 0.5)!r});"]
        lines += [f"    lanes scale{k} = {{weight{k}}} * {{kappa{k}}} * one({-1.0 / math.sqrt(math.pi)!r});"]
        powers = [f"scale{k}"]
        for n in range(order):
            lines += [f"    const lanes scale{k}_{n + 1} = one(2.0) * {{square{k}}} * {powers[-1]};"]
            powers.append(f"scale{k}_{n + 1}")
        for n in range(order, -1, -1):
            lines += [f"    sum{n} += {powers[n]} * series{k};"]
            if n:
                update = f"(y{k} * series{k} + decay{k}) * one({1.0 / (n - 0.5)!r})"
                lines += [f"    series{k} = {update};"]
    return [*lines, *(f"    B{n} = overlap ? sum{n} : B{n};" for n in range(order + 1)), "}}"]


def _without_constants(function: Any, s: Any) -> tuple[Any, dict[Any, Any]]:
    """``function`` with its parts that are constant in s replaced by symbols, and the definitions of these symbols.

    Steps count as constant. Otherwise such parts, which may be long, would be repeated in all derivatives.
    """
    definitions: dict[Any, Any] = {}
    names: dict[Any, Any] = {}

    def named(part: Any) -> Any:
        if part.is_number or part.is_Symbol:
            return part
        if part not in names:
            names[part] = sympy.Symbol(f"constant{len(names)}", real=True)
            definitions[names[part]] = part
        return names[part]

    def convert(part: Any) -> Any:
        if type(part).__name__ == "Step":
            return named(part)
        if part == s or not part.args:
            return part
        arguments = [convert(a) for a in part.args]
        if not any(a.has(s) for a in arguments):
            return part.func(*arguments)
        if part.is_Add or part.is_Mul:
            moving = [a for a in arguments if a.has(s)]
            fixed = part.func(*(a for a in arguments if not a.has(s)))
            number, rest = fixed.as_coeff_Mul() if part.is_Mul else (0, fixed)
            return part.func(number, named(rest), *moving)
        return part.func(*(a if a.has(s) else named(a) for a in arguments))

    return convert(function), definitions


# -- contraction ----------------------------------------------------------------------------------


class _Contraction:
    """Statements for the derivatives, at an atom, of the potential of a neighbor's moments in one channel.

    ``moments`` holds the names of the moments by their `components`. All other names begin with ``prefix``, except for
    powers of the displacement, which channels share.
    """

    def __init__(self, order: int, prefix: str, moments: dict[Component, str], powers: dict[Component, str]) -> None:
        self.order, self.prefix, self.moments, self.powers = order, prefix, moments, powers
        self.statements: list[str] = []
        self.known: dict[Any, str] = {}

    def keep(self, key: Any, text: str) -> str:
        """A name for the value of ``text``: a new one, unless ``text`` is the name of a moment, or empty for zero."""
        if text and text not in self.moments.values():
            name = f"{self.prefix}{len(self.statements)}"
            self.statements.append(f"const lanes {name} = {text};")
            text = name
        self.known[key] = text
        return text

    def power(self, exponents: Component) -> str:
        """A product of components of the displacement."""
        if sum(exponents) == 1:
            return f"d{exponents.index(1)}"
        if exponents not in self.powers:
            axis = max(range(3), key=lambda a: exponents[a])
            lower = self.power(_changed(exponents, axis, -1))
            self.powers[exponents] = name = "p" + "".join(map(str, exponents))
            self.statements.append(f"const lanes {name} = {lower} * d{axis};")
        return self.powers[exponents]

    def polynomial(self, order: int, t: int, raised: Component) -> str:
        """``∂^raised Q_t`` of the moments of one order."""
        key = ("Q", order, t, raised)
        if key in self.known:
            return self.known[key]
        degree = order - 2 * t - sum(raised)
        if degree > 0:  # Euler's theorem of homogeneous functions
            text = " + ".join(f"d{a} * {self.polynomial(order, t, _changed(raised, a, 1))}" for a in range(3))
            if degree > 1:
                text = f"one({1.0 / degree!r}) * ({text})"
        else:
            text = ""
            for exponents, name in self.moments.items():
                # exponents of the monomial that the derivatives `raised` leave to the t Laplacians
                rest = [e - r for e, r in zip(exponents, raised)]
                if sum(exponents) != order or any(r < 0 or r % 2 for r in rest):
                    continue
                halves = [r // 2 for r in rest]
                ways = math.factorial(t) / math.prod(map(math.factorial, halves))
                number = ways * math.prod(map(math.factorial, exponents)) / (2**t * math.factorial(t))
                text += (" + " if text else "") + (name if number == 1 else f"one({number!r}) * {name}")
        return self.keep(key, text)

    def chain(self, k: int, raised: Component) -> str:
        """``T_k^raised``; empty if zero."""
        key = ("T", k, raised)
        if key in self.known:
            return self.known[key]
        text = ""
        for order in range(sum(raised), self.order + 1):
            for t in range((order - sum(raised)) // 2 + 1):
                sign = "-" if (order - t) % 2 else "+" if text else ""
                text = f"{text} {sign} B{order - t + k} * {self.polynomial(order, t, raised)}".strip()
        return self.keep(key, text)

    def derivative(self, component: Component) -> str:
        """``∂^component`` of the potential with respect to the displacement."""
        key = ("F", component)
        if key in self.known:
            return self.known[key]
        text = ""
        for raised in components(sum(component)):
            if any(r > c for r, c in zip(raised, component)):
                continue
            left = [c - r for c, r in zip(component, raised)]
            ways = math.prod(map(math.comb, component, raised))
            for pairs in itertools.product(*(range(n // 2 + 1) for n in left)):
                # a derivative left brings a factor d, or removes the factor d of another: `pairs` counts the latter
                number = ways
                for n, p in zip(left, pairs):
                    number *= math.factorial(n) // (2**p * math.factorial(p) * math.factorial(n - 2 * p))
                exponents = (left[0] - 2 * pairs[0], left[1] - 2 * pairs[1], left[2] - 2 * pairs[2])
                k = sum(left) - sum(pairs)
                value = self.chain(k, raised)
                if not value:
                    continue
                factors = [f"one({number}.0)"] * (number != 1)
                factors += [self.power(exponents), value] if any(exponents) else [value]
                sign = "-" if k % 2 else "+" if text else ""
                text = f"{text} {sign} {' * '.join(factors)}".strip()
        return self.keep(key, text)

    def along(self, component: Component, n_directions: int) -> str:
        """The same as `derivative`, differentiated along the first ``n_directions`` directions ``e<n>_<axis>``."""
        if n_directions == 0:
            return self.derivative(component)
        key = ("D", component, n_directions)
        if key in self.known:
            return self.known[key]
        values = [self.along(_changed(component, a, 1), n_directions - 1) for a in range(3)]
        text = " + ".join(f"e{n_directions - 1}_{a} * {value}" for a, value in enumerate(values))
        return self.keep(key, text)


def _changed(component: Component, axis: int, step: int) -> Component:
    a, b, c = (n + step * (axis == k) for k, n in enumerate(component))
    return a, b, c


# -- the body -------------------------------------------------------------------------------------


def source(variant: Variant) -> str:
    """The C++ that sums the row of atom i."""
    formula, n_channels, n_directions = variant.formula, variant.n_channels, variant.n_directions
    program, chain = radial(formula, variant.by, variant.source + variant.order)
    n_moments, n_gathered = count(variant.source), count(variant.derivatives) * (GATHERED in variant.outputs)

    shared: list[str] = []
    for k in range(n_directions):
        places = [f"direction_cell.data[9 * ({k}LL * cell.shape[0] + system) + {c}]" for c in range(9)]
        shared.append(loop.vector(f"h_d{k}", places))
    n, n_globals = len(formula.per_atom), len(formula.global_parameters)
    source_of_own = "row_parameters" if variant.apart else "parameters"
    given = {f"own{m}": f"{source_of_own}.data[{n}LL * i + {m}]" for m in range(n)}
    given |= {f"shared{m}": f"global_parameters.data[{n_globals} * system + {m}]" for m in range(n_globals)}
    shared += loop.loads(program.inputs, "one", given)
    if variant.sums_pairs:
        n_row = count(variant.row)
        for c in range(n_channels):
            shared += [
                f"const one g{c}_{b} = row_moments.data[{n_channels * n_row}LL * i + {c * n_row + b}];"
                for b in range(n_row)
            ]
    shared += program.shared

    data = ["const lanes s = d0 * d0 + d1 * d1 + d2 * d2;"]
    others = {f"other{m}": f"take(parameters.data + {m}, {n})" for m in range(n)}
    data += loop.loads(program.inputs, "lanes", others)
    for k in range(n_directions):
        for a in range(3):
            change = " + ".join(f"shift{c} * h_d{k}[{3 * c + a}]" for c in range(3))
            data.append(f"const lanes e{k}_{a} = {change};")

    evaluation = [*program.of_pair, *chain]
    if variant.excluding:
        evaluation = [line.replace("const lanes B", "lanes B", 1) if line in chain else line for line in evaluation]
        evaluation += [f"B{k} *= factor;" for k in range(variant.source + variant.order + 1)]
    powers: dict[Component, str] = {}
    totals: dict[str, str] = {}
    gradient: list[list[str]] = [[], [], []]
    for c in range(n_channels):
        moments = {}
        for b, component in enumerate(components(variant.source)):
            moments[component] = f"m{c}_{b}"
            place = c * n_moments + b
            evaluation.append(f"const lanes m{c}_{b} = take(moments.data + {place}, {n_channels * n_moments});")
        contraction = _Contraction(variant.source, f"t{c}_", moments, powers)
        if n_gathered:
            for a, component in enumerate(components(variant.derivatives)):
                value = contraction.along(component, n_directions)
                totals[f"m{c}_{a}"] = f"-{value}" if sum(component) % 2 else value
        if variant.sums_pairs:
            for axis in range(3):
                for b, component in enumerate(components(variant.row)):
                    value = contraction.along(_changed(component, axis, 1), n_directions)
                    sign = "-" if sum(component) % 2 else ""
                    gradient[axis].append(f"{sign}g{c}_{b} * {value}")
        evaluation += contraction.statements
    if variant.sums_pairs:
        evaluation += [f"const lanes f{a} = {' + '.join(gradient[a])};" for a in range(3)]
    if CELL in variant.outputs:
        totals |= {f"h{c}{a}": f"shift{c} * f{a}" for c in range(3) for a in range(3)}
    if VIRIAL in variant.outputs:
        totals |= {f"v{a}{b}": f"-d{a} * f{b}" for a in range(3) for b in range(3)}
    results = [
        f"gathered.data[{n_channels * n_gathered}LL * i + {c * n_gathered + a}] = sum_m{c}_{a};"
        for c in range(n_channels)
        for a in range(n_gathered)
    ]
    columns = [name for name in totals if not name.startswith("m")]
    results += [f"sums.data[{len(columns)}LL * i + {k}] = sum_{name};" for k, name in enumerate(columns)]
    return loop.body(
        variant.form,
        variant.precision,
        program.functions,
        {name: f"lanes({value})" for name, value in totals.items()},
        shared=shared,
        data=data,
        evaluation=evaluation,
        results=results,
        arithmetic="float64",  # recurrences of Coulomb functions lose digits at small distances
    )
