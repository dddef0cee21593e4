"""Derivatives of the energy of a pair, to any order, written as C++.

Let F(y) = Σ_pairs ω u(r, p_i, p_j, θ) be the weighted energy, where ω = (w_i + w_j)/2 is the weight of a pair, and y
collects all variables: positions, cell, parameters and weights. The family of functions

    T_n(y; v_1 .. v_n) = gradient with respect to y of the n-fold derivative of F in the directions v_1 .. v_n

is closed under differentiation. If v is the incoming gradient of T_n in a backward pass, the gradient with respect to y
is T_{n+1}(y; v_1 .. v_n, v), and the gradient with respect to v_k is T_n with v in place of v_k. T_0 contains the
forces (with opposite sign) and, as the gradient with respect to the weights, the energies of the atoms. F is linear in
the weights: if a direction changes only the weights, the derivative is the function one order lower with this direction
as weights.

The geometry enters only through scalar products: s = d.d of the displacement d, b_k = d.δ_k and c_kl = δ_k.δ_l, where
δ_k is the change of d in direction v_k. In the direction v_k, s changes by 2 b_k, b_l by c_kl, and parameters and
weights by their parts of v_k. So each derivative G of F is again a function of scalars, and its gradient with respect
to d is 2 ∂G/∂s d + Σ_k ∂G/∂b_k δ_k.
"""

import functools
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from nvalchemiops.interactions.pair.exponentials import prepared
from nvalchemiops.interactions.pair.expression import (
    Formula,
    Select,
    pair_energy,
    self_energy,
    symbols_of,
    without_absolutes,
)
from nvalchemiops.interactions.pair.lazy_sympy import sympy
from nvalchemiops.kernels.kept_text import kept_text
from nvalchemiops.kernels.special import FUNCTIONS

POSITIONS, CELL, PARAMETERS, GLOBALS, WEIGHTS, VIRIAL = "r", "c", "p", "g", "w", "v"
"""Letters of the variables that a direction changes, and of the requested gradients.

The gradient with respect to the weights is the energies of the atoms.
"""


class Request(NamedTuple):
    """The requested member of the family of derivatives, and the requested parts of it.

    Attributes
    ----------
    formula : Formula
    directions : tuple of str
        For each direction, the letters of the variables that it changes.
    outputs : str
        The letters of the requested gradients.
    weights : bool
        Whether atoms have weights other than one.
    excluding : bool
        Whether some pairs are excluded or scaled by a factor.
    """

    formula: Formula
    directions: tuple[str, ...]
    outputs: str
    weights: bool = False
    excluding: bool = False

    @property
    def moves(self) -> tuple[bool, ...]:
        """Which directions change displacements."""
        return tuple(POSITIONS in d or CELL in d for d in self.directions)


class Program(NamedTuple):
    """Statements and results in C++, as lists and dicts that can be stored as JSON.

    Attributes
    ----------
    inputs : list of str
        Names of the symbols that are used, sorted.
    shared, of_pair : list of str
        Statements that are the same for all pairs of an atom, and those of each pair.
    results : dict
        Code for "energy", "derivative", "derivative<k>", "own<m>", "table<m>" and "shared<m>", and for the self energy
        of an atom and its derivatives: "self_energy", "self_own<m>" and "self_shared<m>".
    functions : list of str
        Names of the functions that are called.
    """

    inputs: list[str]
    shared: list[str]
    of_pair: list[str]
    results: dict[str, str]
    functions: list[str]


FILES = (__file__, *(str(sys.modules[f.__module__].__file__) for f in (Formula, prepared)))
"""The source files on which programs depend."""


@functools.cache
def program(request: Request) -> Program:
    """Statements that compute the requested parts of ``T_n`` for one pair."""
    return Program(*kept_text(FILES, request, lambda: printed(derivatives(request))))


@functools.cache
def has_high_powers(formula: Formula) -> bool:
    """Whether the energy of a pair has powers beyond the second, which leave the range of float32 in some units."""

    def found() -> bool:
        squared = symbols_of(formula).squared
        powers = (p for p in pair_energy(formula).atoms(sympy.Pow) if p.exp.is_number and not p.base.is_number)
        return any(bool(abs(p.exp) > (1 if p.base == squared else 2)) for p in powers)

    return kept_text(FILES, ("high powers", formula), found)


def printed(results: Mapping[str, Any], definitions: Mapping[Any, Any] | None = None) -> Program:
    """Statements that compute the expressions ``results``.

    The expressions contain the symbols of a formula (`symbols_of`), and symbols that ``definitions`` defines in order.
    """
    return _Printer(results, definitions or {}).program()


def derivatives(request: Request) -> dict[str, Any]:
    """The requested parts of ``T_n`` of a pair and of an atom as sympy expressions, named as in `Program.results`."""
    formula, outputs = request.formula, request.outputs
    symbols = symbols_of(formula)
    omega, weight = sympy.Symbol("omega", real=True), sympy.Symbol("w_i", real=True)
    alone = self_energy(formula)
    pair, atom = omega * pair_energy(formula), weight * (0 if alone is None else alone)
    products: list[tuple[int, Any]] = []  # number k and symbol b_k of the directions so far
    for k, parts in enumerate(request.directions):
        changes: list[tuple[Any, Any]] = []
        if request.moves[k]:
            b = sympy.Symbol(f"b{k}", real=True)
            changes += [(symbols.squared, 2 * b)]
            changes += [(other, sympy.Symbol(f"c{earlier}_{k}", real=True)) for earlier, other in products]
        if PARAMETERS in parts:
            changes += [(x, direction_of(x, k)) for x in (*symbols.own, *symbols.other, *symbols.of_pair)]
        if GLOBALS in parts:
            changes += [(x, direction_of(x, k)) for x in symbols.of_system]
        if WEIGHTS in parts:
            changes += [(omega, sympy.Symbol(f"eta{k}", real=True)), (weight, direction_of(weight, k))]
        pair, atom = (
            without_absolutes(sympy.Add(*(_along(f, x, change, symbols.squared) for x, change in changes)))
            for f in (pair, atom)
        )
        if request.moves[k]:
            products.append((k, b))
    results: dict[str, Any] = {}
    if WEIGHTS in outputs:
        # the weight omega of a pair also contains the factor of a scaled pair
        factor = sympy.Symbol("factor", real=True) if request.excluding else 1
        results |= {"energy": factor * pair.diff(omega), "self_energy": atom.diff(weight)}
    if set(outputs) & {POSITIONS, CELL, VIRIAL}:
        results["derivative"] = 2 * pair.diff(symbols.squared)
        results |= {f"derivative{k}": pair.diff(b) for k, b in products}
    if PARAMETERS in outputs:
        results |= {str(x): pair.diff(x) for x in (*symbols.own, *symbols.of_pair)}
        results |= {f"self_{x}": atom.diff(x) for x in symbols.own}
    if GLOBALS in outputs:
        results |= {str(x): pair.diff(x) for x in symbols.of_system}
        results |= {f"self_{x}": atom.diff(x) for x in symbols.of_system}
    fixed = {} if request.weights else {weight: 1}
    if not (request.weights or request.excluding):
        fixed[omega] = 1
    results = {name: without_absolutes(result.subs(fixed)) for name, result in results.items()}
    return {name: result for name, result in results.items() if result != 0 or not name.startswith("self_")}


def _along(f: Any, x: Any, change: Any, squared: Any) -> Any:
    """``change`` times the slope by x; zero without a change, also where a root has no slope, as for epsilon = 0."""
    slope = f.diff(x)
    has_root = any(p.base.has(x) and not (p.exp.is_Integer or p.base.has(squared)) for p in f.atoms(sympy.Pow))
    return change * (Select(change, slope, sympy.S.Zero) if has_root else slope)


def direction_of(symbol: Any, k: int) -> Any:
    """The symbol for the change of ``symbol`` in direction k."""
    return sympy.Symbol(f"{symbol}_d{k}", real=True)


def is_shared(name: str) -> bool:
    """Whether this symbol has the same value for all pairs of an atom."""
    return name.startswith(("own", "shared", "w_i")) or name in ("cutoff", "r_switch")


class _Code(NamedTuple):
    text: str
    shared: bool  # the same for all pairs of an atom


class _Printer:
    """Writes expressions as statements: each subexpression once, with those that pairs share in a separate list."""

    def __init__(self, results: Mapping[str, Any], definitions: Mapping[Any, Any]) -> None:
        self.functions: list[str] = []
        self.inputs: set[str] = set()
        self.statements: dict[bool, list[str]] = {True: [], False: []}
        self.done: dict[Any, _Code] = {}
        self.squared = sympy.Symbol("s", positive=True)
        self.quotients: dict[Any, Any] = {}  # symbols by their expressions
        expressions = [self.with_quotients(prepared(e)) for e in results.values()]
        # replace powers of the distance by symbols, which the search for common subexpressions cannot split
        found = [p for e in (*expressions, *self.quotients) for p in e.atoms(sympy.Pow) if p.base == self.squared]
        powers = {p for p in found if p.exp.is_Rational}
        self.has_root = any(not p.exp.is_Integer for p in powers)
        self.powers = {sympy.Symbol(f"power{p.exp}", positive=True): p for p in powers}
        expressions = [e.xreplace({p: symbol for symbol, p in self.powers.items()}) for e in expressions]
        for symbol, expression in definitions.items():
            self.done[symbol] = self.code(prepared(expression))
        for quotient, symbol in self.quotients.items():
            self.done[symbol] = self.code(quotient)
        parts, reduced = sympy.cse(expressions, symbols=sympy.numbered_symbols("part", real=True), order="canonical")
        for symbol, expression in parts:
            self.done[symbol] = self.code(expression)
        self.results = {name: self.code(e).text for name, e in zip(results, reduced)}

    def with_quotients(self, expression: Any) -> Any:
        """Powers of ``b²/s`` and ``s/b²`` in place of products such as ``b^12 s^-6``, from the third power of b on.

        The factors may be out of the range of float32 where their product is not, or have few digits left there:
        ``s^-8``, in the second derivative of a Lennard-Jones potential, is 1e-41 at 400 pm.
        """

        def regrouped(product: Any) -> Any:
            factors = [factor.as_base_exp() for factor in product.args]
            of_s = next((e for b, e in factors if b == self.squared and e.is_Rational), 0)
            sign, left, new = 1 if of_s < 0 else -1, int(abs(of_s)), []
            for base, exponent in factors:
                if exponent.is_Integer and exponent * sign > 2 and not base.is_number and not base.has(self.squared):
                    n = min(int(exponent) * sign // 2, left)
                    if n:
                        quotient = (base**2 / self.squared) ** sign
                        name = sympy.Symbol(f"quotient{len(self.quotients)}", nonnegative=True)
                        new.append((self.quotients.setdefault(quotient, name) / quotient) ** n)
                        left -= n
            return sympy.Mul(product, *new)

        return expression.replace(lambda e: e.is_Mul and e.has(self.squared), regrouped)

    def program(self) -> Program:
        return Program(sorted(self.inputs), self.statements[True], self.statements[False], self.results, self.functions)

    def keep(self, text: str, shared: bool) -> _Code:
        """A name for the value of ``text``: a new one, unless ``text`` is already a name or a number."""
        if re.fullmatch(r"\w+|one\([-+.\w]+\)", text):
            return _Code(text, shared)
        name = f"{'a' if shared else 'x'}{len(self.statements[shared])}"
        self.statements[shared].append(f"const {'one' if shared else 'lanes'} {name} = {text};")
        return _Code(name, shared)

    def code(self, expression: Any) -> _Code:
        found = self.done.get(expression)
        if found is None:
            found = self.done[expression] = self.print(expression)
        return found

    def print(self, expression: Any) -> _Code:
        if expression in self.powers:
            return self.code(self.powers[expression])
        if expression.is_Symbol:
            self.inputs.add(str(expression))
            return _Code(str(expression), is_shared(str(expression)))
        if expression.is_number:
            if not expression.is_finite:
                return self.keep("one(0.0) / one(0.0)", True)  # a derivative that does not exist
            return _Code(f"one({float(expression)!r})", True)
        if expression.is_Add:
            return self.sum(expression)
        if expression.is_Mul:
            return self.product(expression)
        if expression.is_Pow:
            return self.power(expression.base, expression.exp)
        return self.call(expression)

    def sum(self, expression: Any) -> _Code:
        sums: dict[bool, str] = {}
        for term in expression.as_ordered_terms():
            negative = term.as_coeff_Mul()[0].is_negative
            code = self.code(-term if negative else term)
            sign = "-" if negative else "+" if code.shared in sums else ""
            sums[code.shared] = f"{sums.get(code.shared, '')} {sign} {code.text}".strip()
        return self.join(sums, "+")

    def join(self, groups: Mapping[bool, str], operator: str) -> _Code:
        if True not in groups:
            return self.keep(groups[False], False)
        shared = self.keep(groups[True], True)
        if False not in groups:
            return shared
        other = groups[False]
        return self.keep(f"{shared.text} {operator} {other}" if other[0] != "-" else f"{shared.text} {other}", False)

    def product(self, expression: Any) -> _Code:
        above: dict[bool, list[str]] = {True: [], False: []}
        below: dict[bool, list[str]] = {True: [], False: []}
        for factor in expression.args:
            base, exponent = factor.as_base_exp()
            inverted = exponent.is_number and exponent.is_negative and base != self.squared and not base.is_number
            code = self.code(base**-exponent if inverted else factor)
            (below if inverted else above)[code.shared].append(code.text)
        groups = {}
        for shared in (True, False):
            text = " * ".join(above[shared])
            if below[shared]:
                text = f"{text or 'one(1.0)'} / ({' * '.join(below[shared])})"
            if text:
                groups[shared] = text
        if True in groups and False in groups and not above[False]:
            # one division instead of a division and a product
            shared_part = self.keep(groups[True], True)
            return self.keep(f"{shared_part.text} / ({' * '.join(below[False])})", False)
        return self.join(groups, "*")

    def power(self, base: Any, exponent: Any) -> _Code:
        half = sympy.Rational(1, 2)
        if exponent.is_Integer and exponent > 0:
            return self.integer_power(base, int(exponent))
        if base == self.squared and exponent.is_Rational and exponent < 0 and exponent.q <= 2 and exponent != -half:
            return self.inverse_power_of_distance(exponent)
        if exponent.is_Integer:
            code = self.code(base**-exponent)
            return self.keep(f"one(1.0) / {code.text}", code.shared)
        if exponent.is_Rational and exponent.q == 2:
            root = sympy.Symbol("root of") * base
            if root not in self.done:
                code = self.code(base)
                self.done[root] = self.keep(f"{self.function('sqrt', code.shared)}({code.text})", code.shared)
            if exponent == half:
                return self.done[root]
            if exponent == -half:
                return self.keep(f"one(1.0) / {self.done[root].text}", self.done[root].shared)
            factor = self.code(base ** (exponent.p // 2))
            return self.keep(f"{factor.text} * {self.done[root].text}", factor.shared)
        a, b = self.code(base), self.code(exponent)
        shared = a.shared and b.shared
        return self.keep(f"{self.function('pow', shared)}({self.wide(a, shared)}, {self.wide(b, shared)})", shared)

    def inverse_power_of_distance(self, exponent: Any) -> _Code:
        """A power of s from the inverse of s or of its root, each of which is computed only once."""
        inverse_root = self.squared ** -sympy.Rational(1, 2)
        if exponent == -1 and not self.has_root:
            return self.keep(f"one(1.0) / {self.code(self.squared).text}", False)
        if exponent == -1:
            a = b = self.code(inverse_root)
        elif not exponent.is_Integer:
            a, b = self.code(self.squared**exponent / inverse_root), self.code(inverse_root)
        elif exponent % 2:
            a, b = self.code(self.squared ** (exponent + 1)), self.code(1 / self.squared)
        else:
            a = b = self.code(self.squared ** (exponent / 2))
        return self.keep(f"{a.text} * {b.text}", False)

    def integer_power(self, base: Any, exponent: int) -> _Code:
        a = self.code(base ** (exponent // 2 if exponent % 2 == 0 else exponent - 1))
        b = a if exponent % 2 == 0 else self.code(base)
        return self.keep(f"{a.text} * {b.text}", a.shared)

    def call(self, expression: Any) -> _Code:
        name = {"LowerGamma": "lower_gamma"}.get(type(expression).__name__, type(expression).__name__.lower())
        arguments = [self.code(a) for a in expression.args]
        shared = all(a.shared for a in arguments)
        texts = [self.wide(a, shared) for a in arguments]
        if name == "step":
            kind = "one" if shared else "lanes"
            (x,) = texts
            return self.keep(f"{x} >= one(0.0) ? {kind}(one(1.0)) : {x} < one(0.0) ? {kind}(one(0.0)) : {x}", shared)
        if name == "select":
            condition, a, b = texts
            # a NaN as condition gives NaN
            text = f"{condition} == one(0.0) ? {b} : {condition} == {condition} ? {a} : {condition}"
            return self.keep(text, shared)
        if name == "largest":
            found = self.keep(texts[0], shared)
            for text in texts[1:]:
                found = self.keep(f"{found.text} >= {text} ? {found.text} : {text}", shared)
            return found
        return self.keep(f"{self.function(name, shared)}({', '.join(texts)})", shared)

    def wide(self, code: _Code, shared: bool) -> str:
        return f"lanes({code.text})" if code.shared and not shared else code.text

    def function(self, name: str, shared: bool) -> str:
        if name not in FUNCTIONS:
            raise NotImplementedError(f"there is no C++ for the function {name}")
        if name not in self.functions:
            self.functions.append(name)
        return f"{name}_{'one' if shared else 'lanes'}"
