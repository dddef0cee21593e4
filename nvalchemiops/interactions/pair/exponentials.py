"""Rewriting of formulas whose exponentials are out of range where the formula is not."""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

from nvalchemiops.interactions.pair.expression import Largest, Select, Step
from nvalchemiops.interactions.pair.lazy_sympy import sympy

LARGE_EXPONENT = 5
"""Exponentials of more than this are taken out of sums: exp(88) is infinite in float32, and so are powers of exp(9)."""


def in_range(expression: Any) -> Any:
    """Products such as ``exp(x) (1 + exp(x))^-2`` and ``sinh(x) cosh(x)^-3`` with factors that stay finite at large x.

    Derivatives of functions that fall off consist of such products, which would become infinity times zero at distances
    where the function is zero. A product in which this may happen (``clashes``) is divided by one of its exponentials,
    above and below, as in ``(exp(-x) + 1)^-1 (1 + exp(x))^-1``. If it may then still happen, the product becomes one
    exponential times factors of ordinary size (``parts_of``), where the largest exponential is taken out of each sum.
    """
    erfc_from, scaled_erfc = sympy.Function("erfc_from"), sympy.Function("scaled_erfc")
    lengths = sympy.Symbol("s", positive=True), sympy.Symbol("cutoff", positive=True)  # of shifts

    def grows(x: Any) -> bool:
        factors = (f.as_base_exp() for term in sympy.Add.make_args(x) for f in sympy.Mul.make_args(term))
        return any(grows(e) if base == sympy.E else base.has(*lengths) and e.is_positive for base, e in factors)

    def with_signs(x: Any) -> Any:
        """``x`` with a symbol of known sign for what sympy does not know the sign of."""

        def sign(e: Any) -> int:
            if type(e).__name__ == "Largest":
                positive = any(a.is_nonnegative or -a in e.args for a in e.args)
                return 1 if positive else -all(a.is_nonpositive for a in e.args)
            parts = e.args[1:] if type(e).__name__ == "Select" else ()
            return bool(parts) and all(a.is_nonnegative for a in parts) - all(a.is_nonpositive for a in parts)

        return x.replace(sign, lambda e: sign(e) * sympy.Dummy(positive=True) * lengths[0])

    def may_be_infinite(x: Any) -> bool:
        """Whether this exponent grows, unlike that of ``exp(-a^2 r^2)``, which error functions have."""
        return not with_signs(x).is_nonpositive and grows(x.expand())

    def factors_of(product: Any) -> list[tuple[Any, Any]]:
        return [factor.as_base_exp() for factor in sympy.Mul.make_args(product)]

    def split(product: Any) -> tuple[Any, Any]:
        """All factors but exponentials, and the sum of exponents; sympy leaves ``exp(r - a) exp(a - r)`` as it is."""
        factors = sympy.Mul.make_args(product)
        rest = sympy.Mul(*(f for f in factors if not isinstance(f, sympy.exp)))
        return rest, sympy.Add(*(f.args[0] for f in factors if isinstance(f, sympy.exp)))

    def times(rest: Any, x: Any) -> Any:
        return rest if x.expand() == 0 else rest * sympy.exp(x)

    def taken_out(x: Any) -> tuple[Any, Any]:
        """A factor in range, and the exponent by which it is ``x``: zero but for sums, hyperbolic functions and erfc.

        ``erfc(y)`` is ``exp(-y^2) erfcx(y)``, for y < 0 itself.
        """
        if x.is_Mul:
            return parts_of(x)
        if x.is_Add:
            return scaled(x)
        if x.func not in (sympy.sinh, sympy.cosh, erfc_from) or not grows(x.args[0].expand()):
            return x, sympy.S.Zero
        y = x.args[0]
        if x.func == erfc_from:
            falls, factor = Step(y), scaled_erfc(y)
            if y.is_nonnegative:
                return factor, -(y**2)
            return Select(falls, factor, x), -Select(falls, y**2, sympy.S.Zero)
        size = y if y.is_nonnegative else Largest(*sorted((y, -y), key=sympy.default_sort_key))
        half = (1 + sympy.exp(-2 * size)) / 2
        return half if x.func == sympy.cosh else sympy.tanh(y) * half, size  # tanh has all digits near zero

    def parts_of(product: Any) -> tuple[Any, Any]:
        """A product without exponentials, in its factors neither, and the exponent of what is missing."""
        found, outer = split(product)
        rest = sympy.S.One
        for base, e in factors_of(found):
            smaller, exponent = taken_out(base) if e.is_number else (base, sympy.S.Zero)
            rest, outer = rest * smaller**e, outer + e * exponent
        return rest, outer

    @functools.cache
    def terms_of(x: Any) -> list[tuple[Any, Any]]:
        """The `parts_of` the terms of a sum."""
        return [parts_of(term) for term in x.args] if x.is_Add else []

    def falls_off(exponents: Iterable[Any]) -> bool:
        """Whether no term of a sum with these exponents is left where they fall."""
        return all(grows(y.expand()) for y in exponents)

    @functools.cache
    def exponents_of(x: Any) -> list[Any]:
        """Exponents of the terms of a sum that may be large, or all of them if the whole sum may fall off."""
        found = {y for _, y in terms_of(x)} or {taken_out(x)[1]}
        found = found if falls_off(found) else {y for y in found if may_be_infinite(y)}
        return sorted(found, key=sympy.default_sort_key)

    def scaled(x: Any) -> tuple[Any, Any]:
        """A sum with exponentials, of which the largest is taken out where it is large, and the exponent of that."""
        exponents = exponents_of(x)
        if not exponents:
            return x, sympy.S.Zero
        largest = exponents[0] if len(exponents) == 1 else Largest(*exponents)
        size = Largest(largest, -largest) if falls_off(y for _, y in terms_of(x)) else largest
        is_large = Step(size - LARGE_EXPONENT)
        divided = sympy.Add(*(times(rest, y - largest) for rest, y in terms_of(x)))
        return Select(is_large, divided, x), Select(is_large, largest, sympy.S.Zero)

    @functools.cache
    def directions(x: Any, is_usual: bool) -> set[int]:
        """Signs that an exponent may have: 1, -1 or both; none if it is the same at all distances.

        ``is_usual``: at any distance that is large, if parameters are positive.
        """
        if not x.has(*lengths):
            return set()
        if is_usual:
            unsigned = (p for p in x.free_symbols if p.is_nonnegative is None and p.is_nonpositive is None)
            x = x.xreplace({p: sympy.Dummy(positive=True) for p in unsigned})
        small = (t for t in sympy.Add.make_args(x.expand()) if t.is_number and abs(t) <= LARGE_EXPONENT)
        rest = sympy.Add(*(n * t for t, n in trend(x).items())) if is_usual else x.expand() - sympy.Add(*small)
        for whole in map(with_signs, (x, rest)):
            if whole.is_nonnegative or whole.is_nonpositive:
                return {1 if whole.is_nonnegative else -1}
        return {1, -1}

    def trend(x: Any) -> dict[Any, Any]:
        """The terms that change with distance, with their factors."""
        return {term: n for term, n in x.expand().as_coefficients_dict().items() if term.has(*lengths)}

    def are_opposed(x: Any, y: Any) -> bool:
        """Whether one of two factors' exponents may be large where the other one is small.

        Each is given as the exponent of a term, the signs of it that count, and the sign of the power of the term.
        """
        (a, counted_a, power_a), (b, counted_b, power_b) = x, y
        here, there = trend(power_a * a), trend(power_b * b)
        shared = [there[term] * n for term, n in here.items() if term in there]
        if len(shared) == len(here) == len(there) and all(n > 0 for n in shared):
            return False
        # parameters of both signs count in exp(-k*r)*(1 + exp(-k*r))^-2 and exp(-a*r)*exp(-b*r)
        is_usual = all(n > 0 for n in shared) and len(counted_a & counted_b) == 1
        signs_a, signs_b = directions(a, is_usual) & counted_a, directions(b, is_usual) & counted_b
        return any(power_a * d != power_b * e for d in signs_a for e in signs_b)

    @functools.cache
    def clashes(product: Any) -> bool:
        """Whether a factor may be infinite where another one is zero, or in a term of a sum."""
        sizes = []  # for each factor what `are_opposed` takes
        for base, e in factors_of(product):
            if base.is_Add and any(clashes(term) for term in base.args):
                return True
            if base == sympy.E:
                sizes.append([(e, {1, -1}, 1)])
            elif e.is_number and (exponents := exponents_of(base)):
                counted = {1, -1} if falls_off(y for _, y in terms_of(base)) else {1}
                sizes.append([(y, counted, 1 if e > 0 else -1) for y in exponents])
        pairs = (two for a, b in itertools.combinations(sizes, 2) for two in itertools.product(a, b))
        return any(are_opposed(x, y) for x, y in pairs)

    def divided(product: Any) -> Any:
        """``exp(x) (1 + exp(x))^-2`` as ``(exp(-x) + 1)^-1 (1 + exp(x))^-1``, ``sinh(x) cosh(x)^-3`` by ``tanh(x)``.

        Otherwise with one exponential.
        """
        powers = dict(factors_of(product))
        for a, b in ((sympy.sinh, sympy.cosh), (sympy.cosh, sympy.sinh)):
            for x in (base.args for base, e in powers.items() if base.func == a and e.is_Integer):
                below = powers.get(b(*x), sympy.S.Zero)
                n = min(int(powers[a(*x)]), int(-below)) if below.is_number else 0
                if n > 0:
                    product *= (b(*x) / a(*x)) ** n * sympy.tanh(*x) ** (n if b == sympy.cosh else -n)
        rest, outer = split(product)
        for base, e in factors_of(rest):
            parts = [split(term) for term in base.args] if base.is_Add and e.is_number else []
            for x in (y for _, y in parts if grows(y.expand())):
                n = int(min(-e, *(trend(outer).get(term, 0) / number for term, number in trend(x).items())))
                if n > 0:
                    # terms without exponentials at once: one may be zero where exp(-x) is infinite
                    plain = sympy.Add(*(rest for rest, y in parts if y == 0))
                    new = sympy.Add(plain * sympy.exp(-x), *(times(rest, y - x) for rest, y in parts if y != 0))
                    return divided(times(rest * base**n / new**n, outer - n * x))
        return times(rest, outer)

    def regrouped(product: Any) -> Any:
        found = product
        if clashes(product):
            found = divided(product)
            found = times(*parts_of(product)) if clashes(found) else found
        # a step where its factors may be infinite: zero times infinity
        factors = sympy.Mul.make_args(found)
        steps = [f for f in factors if type(f).__name__ == "Step"]
        if steps and any(may_be_infinite(e.args[0]) for e in found.atoms(sympy.exp, sympy.sinh, sympy.cosh)):
            condition, others = sympy.Mul(*steps), sympy.Mul(*(f for f in factors if f not in steps))
            # zero, but for parameters that are NaN
            symbols = sorted(others.free_symbols, key=sympy.default_sort_key)
            return Select(condition, others, condition * Step(sympy.Add(*symbols)))
        return found

    def logarithm(x: Any) -> Any:
        smaller, exponent = parts_of(x)
        return sympy.log(smaller) + exponent

    if not expression.has(sympy.exp, sympy.sinh, sympy.cosh):
        return expression
    return expression.replace(lambda e: e.is_Mul, regrouped).replace(sympy.log, logarithm)


def with_shared_exponential(expression: Any) -> Any:
    """Replace error functions by functions of x and exp(-x^2), which their derivatives contain as well."""
    erfc_from, erf_from = sympy.Function("erfc_from"), sympy.Function("erf_from")
    expression = expression.replace(sympy.erfc, lambda x: erfc_from(x, sympy.exp(-(x**2))))
    return expression.replace(sympy.erf, lambda x: erf_from(x, sympy.exp(-(x**2))))


def prepared(expression: Any) -> Any:
    """``expression`` with the functions that kernels have, in their range."""
    return in_range(with_shared_exponential(expression))
