"""Rewriting of formulas whose exponentials are out of range where the formula is not."""

import functools
import math
from collections.abc import Iterable
from typing import Any

from nvalchemiops.interactions.pair.expression import Largest, Select, Step

LARGE_EXPONENT = 5
"""Exponentials of more than this are taken out of sums: exp(88) is infinite in float32, and so are powers of exp(9)."""


def in_range(expression: Any) -> Any:
    """Products such as ``exp(x) (1 + exp(x))^-2`` and ``sinh(x) cosh(x)^-3`` with factors that stay finite at large x.

    The two are ``(exp(-x) + 1)^-1 (1 + exp(x))^-1`` and ``tanh(x) cosh(x)^-2``. Derivatives of functions that fall off
    consist of such products, which would become infinity times zero at distances where the function is zero.
    """
    import sympy

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

    def multiple(y: Any, x: Any) -> int:
        """How often x is in y, rounded for each term: without it y is smaller."""
        there = y.expand().as_coefficients_dict()
        ratios = [there[term] / number for term, number in x.expand().as_coefficients_dict().items()]
        return min(math.ceil(ratio - 0.5) for ratio in ratios)

    def split(product: Any) -> tuple[Any, Any]:
        """All factors but exponentials, and the sum of exponents; sympy leaves ``exp(r - a) exp(a - r)`` as it is."""
        factors = sympy.Mul.make_args(product)
        rest = sympy.Mul(*(f for f in factors if not isinstance(f, sympy.exp)))
        return rest, sympy.Add(*(f.args[0] for f in factors if isinstance(f, sympy.exp)))

    def times(rest: Any, x: Any) -> Any:
        return rest if x.expand() == 0 else rest * sympy.exp(x)

    def divided(base: Any, x: Any) -> Any:
        """The sum by ``exp(x)``; terms without exponentials at once: one may be zero where ``exp(-x)`` is infinite."""
        parts = [split(term) for term in base.args]
        plain = sympy.Add(*(rest for rest, y in parts if y == 0))
        return sympy.Add(plain * sympy.exp(-x), *(times(rest, y - x) for rest, y in parts if y != 0))

    def regrouped(product: Any) -> Any:
        powers = dict(factor.as_base_exp() for factor in product.args if not isinstance(factor, sympy.exp))
        for base, exponent in powers.items():
            if base.func in (sympy.sinh, sympy.cosh) and exponent.is_number and grows(base.args[0].expand()):
                other = (sympy.cosh if base.func == sympy.sinh else sympy.sinh)(*base.args)
                power = powers.get(other, sympy.S.Zero)
                n = min(int(-exponent), int(power)) if power.is_Integer else 0
                if n > 0:
                    quotient = sympy.tanh(*base.args) ** (n if base.func == sympy.cosh else -n)
                    product = product / other**n * base**n * quotient
        rest, outer = split(product)
        exponents = [f.args[0] for f in sympy.Mul.make_args(product) if isinstance(f, sympy.exp)]
        if len(exponents) > 1 and (
            outer.expand() == 0 or any(y.has(sympy.exp) or may_be_infinite(y) for y in exponents)
        ):
            product = times(rest, outer)  # one exponential: exp(y) exp(-exp(y)) is infinity times zero
        found = with_scaled_sums(product)
        found = without_infinities(product) if found == product else found
        # a step where its factors may be infinite: zero times infinity
        factors = sympy.Mul.make_args(found)
        steps = [f for f in factors if type(f).__name__ == "Step"]
        if steps and any(may_be_infinite(e.args[0]) for e in found.atoms(sympy.exp, sympy.sinh, sympy.cosh)):
            condition, others = sympy.Mul(*steps), sympy.Mul(*(f for f in factors if f not in steps))
            # zero, but for parameters that are NaN
            symbols = sorted(others.free_symbols, key=sympy.default_sort_key)
            return Select(condition, others, condition * Step(sympy.Add(*symbols)))
        return found

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
        size = (
            y if y.is_nonnegative else -y if y.is_nonpositive else Largest(*sorted((y, -y), key=sympy.default_sort_key))
        )
        half = (1 + sympy.exp(-2 * size)) / 2
        return half if x.func == sympy.cosh else sympy.tanh(y) * half, size  # tanh has all digits near zero

    def parts_of(product: Any) -> tuple[Any, Any]:
        """A product without exponentials, in its factors neither, and the exponent of what is missing."""
        found, outer = split(product)
        rest = sympy.S.One
        for base, e in (f.as_base_exp() for f in sympy.Mul.make_args(found)):
            smaller, exponent = taken_out(base) if e.is_number else (base, sympy.S.Zero)
            rest, outer = rest * smaller**e, outer + e * exponent
        return rest, outer

    @functools.cache
    def terms_of(x: Any) -> list[tuple[Any, Any]]:
        """The `parts_of` the terms of a sum."""
        return [parts_of(term) for term in x.args] if x.is_Add else []

    def exponents_of(x: Any) -> list[Any]:
        """Exponents of the terms of a sum that may be large, or all of them if the whole sum may fall off."""
        found = {y for _, y in terms_of(x)} or {taken_out(x)[1]}
        found = found if falls_off(found) else {y for y in found if may_be_infinite(y)}
        return sorted(found, key=sympy.default_sort_key)

    def falls_off(exponents: Iterable[Any]) -> bool:
        """Whether no term of a sum with these exponents is left where they fall."""
        return all(grows(y.expand()) for y in exponents)

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

    def directions(x: Any) -> set[int]:
        """Signs that an exponent may have where it is large: 1, -1 or both."""
        found: set[int] = set()
        if x.has(*lengths) and (with_signs(x).is_nonnegative or with_signs(x).is_nonpositive):
            return {1 if with_signs(x).is_nonnegative else -1}
        for term in map(with_signs, sympy.Add.make_args(x.expand())):
            if term.has(*lengths) or not term.is_number or abs(term) > LARGE_EXPONENT:
                found |= {1} if term.is_nonnegative else {-1} if term.is_nonpositive else {1, -1}
        return found

    def grow_together(x: Any, y: Any) -> bool:
        there, here = (z.expand().as_coefficients_dict() for z in (x, y))
        if directions(x) in ({1}, {-1}) and directions(x) == directions(y):
            return True  # such as r and r^2
        if any(type(e).__name__ == "Select" for e in (y, *y.args)):  # of a sum in a sum
            return bool(directions(x) & directions(y))
        return any(there[term] * number > 0 for term, number in here.items() if term.has(*lengths))

    def with_scaled_sums(product: Any) -> Any:
        """``exp(x) - exp(-x)`` by sums with exponentials, or times ``exp(-2 x)``, is infinity times zero at large x."""
        rest, outer = split(product)
        powers = [f.as_base_exp() for f in sympy.Mul.make_args(rest)]
        exponents = [(exponents_of(base), 1 if e > 0 else -1) for base, e in powers if e.is_number]
        if any(base.has(sympy.sinh, sympy.cosh, erfc_from) for base, _ in powers):
            signs = [{sign * d for x in found for d in directions(x)} for found, sign in [*exponents, ([outer], 1)]]
            if not any(-d in there for n, here in enumerate(signs) for d in here for there in signs[:n]):
                return product
        else:  # exponentials by themselves are left to `without_infinities`
            above, below = ([x for found, sign in exponents if sign == s for x in found] for s in (1, -1))
            if not any(grow_together(x, y) for x in above for y in (*below, -outer)):
                return product
        return times(*parts_of(product))

    def without_infinities(product: Any) -> Any:
        rest, outer = split(product)
        found: list[tuple[Any, ...]] = []
        for base, exponent in (factor.as_base_exp() for factor in sympy.Mul.make_args(rest)):
            if base.is_Add and exponent.is_number and exponent <= -1:
                for x in (y for _, y in map(split, base.args) if grows(y.expand())):
                    n = min(int(-exponent), multiple(outer, x))
                    found.append(((outer - n * x).expand() == 0, n, len(found), base, x))
        # first what leaves nothing
        _, n, _, base, x = max((entry for entry in found if entry[1] > 0), default=(False, 0, 0, None, None))
        if n > 0:
            return without_infinities(times(rest * base**n / divided(base, x) ** n, outer - n * x))
        return product

    def logarithm(x: Any) -> Any:
        smaller, exponent = parts_of(x)
        return sympy.log(smaller) + exponent

    if not expression.has(sympy.exp, sympy.sinh, sympy.cosh):
        return expression
    return expression.replace(lambda e: e.is_Mul, regrouped).replace(sympy.log, logarithm)


def with_shared_exponential(expression: Any) -> Any:
    """Replace error functions by functions of x and exp(-x^2), which their derivatives contain as well."""
    import sympy

    erfc_from, erf_from = sympy.Function("erfc_from"), sympy.Function("erf_from")
    expression = expression.replace(sympy.erfc, lambda x: erfc_from(x, sympy.exp(-(x**2))))
    return expression.replace(sympy.erf, lambda x: erf_from(x, sympy.exp(-(x**2))))


def prepared(expression: Any) -> Any:
    """``expression`` with the functions that kernels have, in their range."""
    return in_range(with_shared_exponential(expression))
