"""Rewriting of formulas whose exponentials are out of range where the formula is not."""

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

    lengths = sympy.Symbol("s", positive=True), sympy.Symbol("cutoff", positive=True)  # of shifts

    def grows(x: Any) -> bool:
        factors = (f.as_base_exp() for term in sympy.Add.make_args(x) for f in sympy.Mul.make_args(term))
        return any(grows(e) if base == sympy.E else base.has(*lengths) and e.is_positive for base, e in factors)

    def may_be_infinite(x: Any) -> bool:
        """Whether this exponent grows, unlike that of ``exp(-a^2 r^2)``, which error functions have."""
        known = x.replace(
            lambda e: type(e).__name__ == "Select" and all(part.is_nonnegative for part in e.args[1:]),
            lambda e: sympy.Dummy(positive=True),
        )
        return not known.is_nonpositive and grows(x.expand())

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
        found = without_infinities(with_scaled_sums(product))
        # a step where its factors may be infinite: zero times infinity
        factors = sympy.Mul.make_args(found)
        steps = [f for f in factors if type(f).__name__ == "Step"]
        if steps and any(may_be_infinite(e.args[0]) for e in found.atoms(sympy.exp, sympy.sinh, sympy.cosh)):
            condition, others = sympy.Mul(*steps), sympy.Mul(*(f for f in factors if f not in steps))
            # zero, but for parameters that are NaN
            symbols = sorted(others.free_symbols, key=sympy.default_sort_key)
            return Select(condition, others, condition * Step(sympy.Add(*symbols)))
        return found

    def terms_of(x: Any) -> list[Any]:
        """The terms of a sum, with exponentials for powers of hyperbolic functions; none if there is one term."""
        found, left = [], list(sympy.Add.make_args(x))
        while left:
            term = left.pop()
            powers = [f.as_base_exp() for f in sympy.Mul.make_args(term)]
            powers = [(b, n) for b, n in powers if b.func in (sympy.sinh, sympy.cosh) and n.is_Integer and n > 0]
            base, n = next((p for p in powers if grows(p[0].args[0].expand())), (sympy.S.One, 0))
            if n:  # n + 1 terms: each factor by itself would have 2^n
                (y,), sign = base.args, 1 if base.func == sympy.cosh else -1
                rest = term / (2 * base) ** n
                left += [rest * sympy.binomial(n, k) * sign**k * sympy.exp((n - 2 * k) * y) for k in range(n + 1)]
            else:
                found.append(term)
        return found if len(found) > 1 else []

    def exponents_of(x: Any) -> list[Any]:
        """Exponents of the terms of a sum that may be large, or all of them if the whole sum may fall off."""
        found = {split(term)[1] for term in terms_of(x)}
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
        size = Largest(largest, -largest) if falls_off(split(term)[1] for term in terms_of(x)) else largest
        is_large = Step(size - LARGE_EXPONENT)
        divided = sympy.Add(*(times(rest, y - largest) for rest, y in map(split, terms_of(x))))
        return Select(is_large, divided, x), Select(is_large, largest, sympy.S.Zero)

    def with_scaled_factors(rest: Any, outer: Any) -> tuple[Any, Any]:
        """A product whose factors are `scaled`, and the sum of exponents."""
        found = sympy.S.One
        for base, e in (f.as_base_exp() for f in sympy.Mul.make_args(rest)):
            smaller, exponent = scaled(base) if e.is_number else (base, sympy.S.Zero)
            found, outer = found * smaller**e, outer + e * exponent
        return found, outer

    def grow_together(x: Any, y: Any) -> bool:
        there, here = (z.expand().as_coefficients_dict() for z in (x, y))
        return any(there[term] * number > 0 for term, number in here.items() if term.has(*lengths))

    def with_scaled_sums(product: Any) -> Any:
        """``exp(x) - exp(-x)`` by sums with exponentials, or times ``exp(-2 x)``, is infinity times zero at large x."""
        rest, outer = split(product)
        powers = [f.as_base_exp() for f in sympy.Mul.make_args(rest)]
        above, below = (
            [x for base, e in powers if e.is_number and e * sign > 0 for x in exponents_of(base)] for sign in (1, -1)
        )
        if any(base.has(sympy.sinh, sympy.cosh) for base, _ in powers):  # others are left to `without_infinities`
            above.append(outer)
        if not any(grow_together(x, y) for x in above for y in (*below, -outer)):
            return product
        return times(*with_scaled_factors(rest, outer))

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
        smaller, exponent = with_scaled_factors(*split(x))
        return sympy.log(smaller) + exponent

    if not expression.has(sympy.exp, sympy.sinh, sympy.cosh):
        return expression
    return expression.replace(lambda e: e.is_Mul, regrouped).replace(sympy.log, logarithm)
