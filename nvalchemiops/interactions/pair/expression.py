"""Conversion of the text of a pair potential to a sympy expression. The text is parsed, never executed.

The grammar is that of arithmetic in Python, with ``^`` as another way to write ``**``. Definitions may follow after
semicolons, in any order, as in ``"4*epsilon*((sigma/r)**12 - (sigma/r)**6); sigma = (sigma1 + sigma2)/2; ..."``.
Parameters of the two atoms end in 1 and 2. The conventions are those of OpenMM's custom forces.
"""

import ast
import functools
import keyword
import math
import operator
import random
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nvalchemiops.arguments import hint
from nvalchemiops.interactions.pair.lazy_sympy import sympy

MAX_LENGTH = 10_000
"""Most characters in an expression. A longer one is probably a mistake, and would take minutes to differentiate."""

MAX_EXPONENT = 200
"""Largest numeric exponent: r**200 overflows or underflows if r changes by a factor of 35."""

MAX_NUMBER = 1e300

SAMPLES = 150
"""Number of random points at which an expression is compared with the two atoms exchanged."""

SEPARATOR = "|"
"""Separates the parts of `Formula.text`; expressions must not contain it."""

RESERVED = ("r", "cutoff", "r_switch", "pi")
"""Names that parameters cannot have: the distance, the cutoff, the distance at which switching begins, and pi."""


class Formula(NamedTuple):
    """A pair potential as it was written: everything on which its kernels depend.

    Attributes
    ----------
    expression : str
    per_atom, global_parameters, per_pair : tuple of str
        Parameters of each atom, of the system, and of each pair of species.
    shifted : bool
        Subtract the value at the cutoff.
    switched : bool
        Switch the energy off smoothly between ``r_switch`` and ``cutoff``.
    self_energy : str
        Self energy of an atom as a function of its parameters; none by default.
    """

    expression: str
    per_atom: tuple[str, ...] = ()
    global_parameters: tuple[str, ...] = ()
    per_pair: tuple[str, ...] = ()
    shifted: bool = False
    switched: bool = False
    self_energy: str = ""

    @property
    def text(self) -> str:
        """The formula as a string, which `read` converts back, in any process."""
        # joined by hand, so that torch.compile can trace it
        names = [",".join(group) for group in (self.per_atom, self.global_parameters, self.per_pair)]
        flags = "shifted" * self.shifted + "switched" * self.switched
        return SEPARATOR.join([self.expression, *names, flags, self.self_energy])

    @staticmethod
    @functools.cache
    def read(text: str) -> "Formula":
        """The formula whose `Formula.text` is ``text``."""
        expression, *groups, flags, alone = text.split(SEPARATOR)
        own, shared, tables = (tuple(group.split(",")) if group else () for group in groups)
        return Formula(expression, own, shared, tables, "shifted" in flags, "switched" in flags, alone)


class Symbols(NamedTuple):
    """The variables of the energy of a pair. Parameters of atoms appear twice, once for each atom."""

    squared: "sympy.Symbol"  # square of the distance
    own: tuple["sympy.Symbol", ...]  # parameters of the first atom
    other: tuple["sympy.Symbol", ...]  # and of the second one
    of_pair: tuple["sympy.Symbol", ...]
    of_system: tuple["sympy.Symbol", ...]
    cutoff: "sympy.Symbol"
    r_switch: "sympy.Symbol"


def check_names(formula: Formula) -> None:
    """Raise unless the declared names are distinct identifiers that are not reserved."""
    seen: dict[str, str] = {name: "is reserved" for name in (*RESERVED, *FUNCTIONS)}
    for kind in ("per_atom", "global_parameters", "per_pair"):
        names = getattr(formula, kind)
        for name in names:
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError(f"`{kind}` must hold names of parameters, got {name!r}")
            if keyword.iskeyword(name):
                raise ValueError(f"`{kind}`: a parameter cannot be called '{name}', which is a word of Python")
            for written in (name + "1", name + "2") if kind == "per_atom" else (name,):
                if written in seen:
                    raise ValueError(f"`{kind}`: the symbol '{written}' of '{name}' {seen[written]}")
                seen[written] = f"is taken by `{kind}`"
    names = [*formula.per_atom, *formula.global_parameters, *formula.per_pair]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"the parameter '{name}' is declared twice: names must be unique")


@functools.cache
def symbols_of(formula: Formula) -> Symbols:
    """The sympy symbols for a formula, named as the generated code names them."""

    def numbered(prefix: str, names: Sequence[str]) -> tuple[Any, ...]:
        return tuple(sympy.Symbol(f"{prefix}{k}", real=True) for k in range(len(names)))

    return Symbols(
        sympy.Symbol("s", positive=True),
        numbered("own", formula.per_atom),
        numbered("other", formula.per_atom),
        numbered("table", formula.per_pair),
        numbered("shared", formula.global_parameters),
        sympy.Symbol("cutoff", positive=True),
        sympy.Symbol("r_switch", positive=True),
    )


@functools.cache
def pair_energy(formula: Formula) -> Any:
    """The energy of a pair closer than the cutoff, as a sympy expression of the symbols of the formula (`symbols_of`).

    Raises
    ------
    ValueError
        The expression cannot be read, uses an unknown symbol or function, or does not use a declared parameter; the
        message says which and where. Or its value changes when the two atoms are exchanged.
    """
    check_names(formula)
    symbols = symbols_of(formula)
    known: dict[str, Any] = {
        "r": sympy.sqrt(symbols.squared),
        "pi": sympy.pi,
        "cutoff": symbols.cutoff,
        "r_switch": symbols.r_switch,
    }
    for name, own, other in zip(formula.per_atom, symbols.own, symbols.other):
        known |= {name + "1": own, name + "2": other}
    known |= dict(zip(formula.global_parameters, symbols.of_system))
    known |= dict(zip(formula.per_pair, symbols.of_pair))

    energy = _Reader("expression", formula.expression, known, formula.per_atom).read()
    _check_uses(energy, formula, symbols)
    _check_symmetry(energy, symbols)
    if formula.shifted:
        at_cutoff = without_absolutes(energy.subs(symbols.squared, symbols.cutoff**2))
        # what a selection does not take may be infinite
        taken = at_cutoff.replace(lambda e: type(e).__name__ == "Select", lambda _: sympy.Dummy())
        if taken.has(*_no_numbers()):
            at_cutoff = _limit_at_cutoff(energy, symbols)
        if at_cutoff is None:
            raise ValueError("`shifted`: `expression` is not finite at the cutoff")
        energy -= at_cutoff
    if formula.switched:
        energy *= _switch(sympy.sqrt(symbols.squared), symbols)
    return energy


def _limit_at_cutoff(energy: Any, symbols: Symbols) -> Any:
    """The limit at the cutoff from below, as of ``(cutoff - r)^3 log(cutoff - r)``; None if it is not finite."""
    if energy.atoms(*_own_functions()):
        return None
    r, below = sympy.Dummy(positive=True), sympy.Dummy(positive=True)
    at = energy.subs(symbols.squared, r**2).subs(r, symbols.cutoff - below)
    try:
        found = sympy.limit(at, below, 0, "+")
        if not at.subs(below, symbols.cutoff / 1000).subs(dict.fromkeys(at.free_symbols, 1.5)).is_real:
            return None  # the logarithm of something negative
    except (ArithmeticError, NotImplementedError, RecursionError, TypeError, ValueError):
        return None
    return None if found.has(*_no_numbers(), sympy.I, sympy.Limit, below) else found


def _no_numbers() -> tuple[Any, ...]:
    """What sympy has in place of numbers that do not exist, the last of them for ``atan(1/0)``."""
    return sympy.zoo, sympy.nan, sympy.oo, -sympy.oo, sympy.AccumBounds


@functools.cache
def self_energy(formula: Formula) -> Any:
    """The self energy of an atom as a sympy expression of its parameters, or None. Raises as `pair_energy` does."""
    if not formula.self_energy:
        return None
    symbols = symbols_of(formula)
    known = {"pi": sympy.pi, "cutoff": symbols.cutoff, "r_switch": symbols.r_switch}
    for name in known.keys() & set(formula.per_atom):
        if re.search(rf"\b{name}\b", formula.self_energy):
            raise ValueError(
                f"`self_energy`: '{name}' is reserved, and a parameter in `per_atom`: rename the parameter"
            )
    known |= dict(zip(formula.per_atom, symbols.own)) | dict(zip(formula.global_parameters, symbols.of_system))
    return _Reader("self_energy", formula.self_energy, known, ()).read()


def _switch(r: Any, symbols: Symbols) -> Any:
    """1 up to ``r_switch``, then 1 - 10 x^3 + 15 x^4 - 6 x^5, whose first two derivatives vanish at both ends."""
    x = (r - symbols.r_switch) / (symbols.cutoff - symbols.r_switch)
    return Select(Step(x), 1 + x**3 * (-10 + x * (15 - 6 * x)), 1)


def _check_uses(energy: Any, formula: Formula, symbols: Symbols) -> None:
    alone = self_energy(formula)
    used = energy.free_symbols | (set() if alone is None else alone.free_symbols)
    for kind, groups in (
        ("per_atom", tuple(zip(symbols.own, symbols.other))),
        ("global_parameters", tuple((g,) for g in symbols.of_system)),
        ("per_pair", tuple((t,) for t in symbols.of_pair)),
    ):
        for name, group in zip(getattr(formula, kind), groups):
            if not used.intersection(group):
                raise ValueError(f"`{kind}` declares '{name}', but the energy does not depend on it")


def _check_symmetry(energy: Any, symbols: Symbols) -> None:
    """Raise unless the energy is the same with the two atoms exchanged, and is a real number somewhere."""
    import mpmath

    exchanged = energy.xreplace(dict(zip((*symbols.own, *symbols.other), (*symbols.other, *symbols.own))))
    arguments = sorted({*energy.free_symbols, *exchanged.free_symbols}, key=str)
    functions: dict[str, Callable[..., Any]] = {
        "Step": lambda x: int(x >= 0),
        "Select": lambda c, a, b: a if c else b,
    }

    def in_range(name: str, x: Any) -> Any:
        """The function by mpmath, which would take more memory than there is for the argument exp(1e12)."""
        if abs(x) > MAX_NUMBER:
            raise OverflowError
        return getattr(mpmath, name)(x)

    def lower_gamma(a: Any, x: Any) -> Any:
        """Likewise: the integral to infinity, where the rest is nothing and takes forever, as does exp(1e12)."""
        if x < -1e4:
            raise OverflowError
        return (mpmath.gamma(a) if x > 1e4 else mpmath.gammainc(a, 0, x)) * x**-a

    def power(base: Any, exponent: Any) -> Any:
        """Likewise: without an end for 2**exp(1e12)."""
        if abs(exponent) > MAX_NUMBER:
            raise OverflowError
        return base**exponent

    functions |= {name: functools.partial(in_range, name) for name in _ELEMENTARY}
    functions |= {"Power": power, "LowerGamma": lower_gamma}
    modules: list[Any] = [functions, "mpmath"]
    both = []
    for expression in (energy, exchanged):
        limited = expression.replace(
            lambda e: e.is_Pow and not e.exp.is_number, lambda e: sympy.Function("Power")(*e.as_base_exp())
        )
        both.append(sympy.lambdify(arguments, limited, modules))
    source = random.Random(0)
    compared = 0
    for n in range(SAMPLES):
        # over several decades of distance, because a step may be anywhere
        ranges = {symbols.squared: (0.01, 1000.0), symbols.cutoff: (0.3, 30.0), symbols.r_switch: (0.2, 10.0)}
        point = [
            math.exp(source.uniform(*map(math.log, ranges.get(a, (0.3, 2.0) if n % 2 else (0.01, 100.0)))))
            for a in arguments
        ]
        if n % 3 == 0:  # charges have either sign; lengths are positive
            point = [p if a in ranges else source.choice((p, -p)) for a, p in zip(arguments, point)]
        try:
            there, back = (f(*map(mpmath.mpf, point)) for f in both)
        except (ArithmeticError, TypeError, ValueError):  # outside of the domain of a function
            continue
        if not all(mpmath.isfinite(value) and mpmath.im(value) == 0 for value in (there, back)):
            continue
        compared += 1
        if exchanged == energy:
            return
        if abs(there - back) > 1e-9 * (abs(there) + abs(back)) + 1e-12:
            r = math.sqrt(dict(zip(arguments, point)).get(symbols.squared, 1))
            raise ValueError(
                "`expression` is not symmetric: its value changes when the two atoms are exchanged, but a pair has no "
                f"order. At r = {r:.3f} with random parameters, its "
                f"values are {float(mpmath.re(there)):.6g} and {float(mpmath.re(back)):.6g}. Write it symmetrically, "
                "for instance as the mean of both orders"
            )
    if not compared:
        raise ValueError(f"`expression` is not a finite real number at any of {SAMPLES} random points")


class _Reader:
    """Reads one expression with its definitions, by walking its Python syntax tree."""

    def __init__(self, label: str, text: str, known: dict[str, Any], per_atom: Sequence[str]) -> None:
        if len(text) > MAX_LENGTH:
            raise ValueError(f"`{label}` has {len(text)} characters, more than {MAX_LENGTH}")
        self.label = label
        self.text = text
        for character in "#\\" + SEPARATOR:  # comments and line continuations of Python are not part of the grammar
            if character in text:
                raise self.error(f"'{character}' is not known here", text.index(character))
        self.known = dict(known)
        self.per_atom = per_atom
        self.definitions: dict[str, tuple[str, int]] = {}
        self.reading: list[str] = []

    def read(self) -> Any:
        parts: list[tuple[str, int]] = []
        start = 0
        for part in self.text.split(";"):
            parts.append((part, start))
            start += len(part) + 1
        (energy, at), *definitions = parts
        for part, where in definitions:
            if not part.strip():
                continue
            match = re.match(r"\s*([^\W\d]\w*)\s*=(?!=)", part)
            if not match:
                raise self.error("a definition must read `name = expression`", where + len(part) - len(part.lstrip()))
            name = unicodedata.normalize("NFKC", match[1])  # as Python spells it
            if name in self.known or name in FUNCTIONS or name in self.definitions:
                raise self.error(f"the name '{name}' is taken", where + match.start(1))
            self.definitions[name] = (part[match.end() :], where + match.end())
        try:
            result = self.parse(energy, at)
            for name in self.definitions:
                self.symbol(name, self.definitions[name][1])
        except (RecursionError, MemoryError):  # Python's parser has a stack of its own
            raise ValueError(f"`{self.label}` is nested too deeply") from None
        result = without_absolutes(result)
        if result.has(sympy.I):
            raise ValueError(f"`{self.label}` is not real: it takes a root or a logarithm of something negative")
        return result

    def error(self, message: str, position: int) -> ValueError:
        begin = max(0, position - 40)
        excerpt = self.text[begin : position + 40].replace("\n", " ")
        return ValueError(
            f"`{self.label}`, column {position + 1}: {message}\n    {excerpt}\n    {' ' * (position - begin)}^"
        )

    def parse(self, part: str, offset: int) -> Any:
        # Python's ^ binds more loosely than +, so it is replaced by ** first; `columns` maps back to the given text
        text, columns = "", []
        for column, c in enumerate(part):
            c = "**" if c == "^" else " " if c.isspace() else c
            text += c
            columns += [offset + column] * len(c)
        columns.append(offset + len(part))
        skipped = len(text) - len(text.lstrip())
        text = text.lstrip()
        if not text.strip():
            raise self.error("an expression is missing", offset)
        try:
            tree = ast.parse(text, mode="eval")
        except SyntaxError as error:
            at = min(skipped + (error.offset or 1) - 1, len(columns) - 1)
            raise self.error(f"not an arithmetic expression ({error.msg})", columns[at]) from None
        except ValueError as error:
            raise self.error(f"not an arithmetic expression ({error})", offset) from None
        encoded = text.encode()
        return self.convert(tree.body, lambda node: columns[skipped + len(encoded[: node.col_offset].decode())])

    def symbol(self, name: str, position: int) -> Any:
        if name in self.known:
            return self.known[name]
        if name in self.definitions:
            if name in self.reading:
                raise self.error(f"'{name}' is defined by itself", position)
            self.reading.append(name)
            self.known[name] = self.parse(*self.definitions[name])
            self.reading.pop()
            return self.known[name]
        if name in self.per_atom:
            raise self.error(
                f"'{name}' belongs to each atom: write {name}1 and {name}2, or define it, as in "
                f"`; {name} = ({name}1 + {name}2)/2`",
                position,
            )
        raise self.error(f"unknown symbol '{name}'{hint(name, [*self.known, *self.definitions])}", position)

    def convert(self, node: ast.AST, column: Callable[[Any], int]) -> Any:
        """The sympy expression for one node of the syntax tree."""
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                if not abs(value) <= MAX_NUMBER:
                    raise self.error("the number is too large", column(node))
                result: Any = sympy.Rational(repr(value))  # exact decimal fractions
            case ast.Name(id=name):
                result = self.symbol(name, column(node))
            case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
                result = self.convert(operand, column)
                result = -result if isinstance(sign, ast.USub) else result
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.convert(left, column), self.convert(right, column)
                if type(op) not in _OPERATORS:
                    raise self.error(f"the operator {type(op).__name__} is not known here", column(node))
                if isinstance(op, ast.Pow) and b.is_number:
                    if not abs(b) <= MAX_EXPONENT:
                        raise self.error(f"the exponent is larger than {MAX_EXPONENT}", column(right))
                    if a.is_number:
                        self.check_constant(lambda: float(a) ** float(b), column(node))
                if isinstance(op, ast.Div) and b == 0:
                    raise self.error("this is not finite", column(node))
                result = _OPERATORS[type(op)](a, b)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
                result = self.call(name, [self.convert(a, column) for a in arguments], column(node))
            case ast.Compare():
                raise self.error("comparisons are not known here: use step(x), which is 1 for x >= 0", column(node))
            case _:
                raise self.error(f"{type(node).__name__} is not known here", column(node))
        if result.is_number:
            if result.has(sympy.zoo, sympy.nan, sympy.oo, -sympy.oo):
                raise self.error("this is not finite", column(node))
            self.check_constant(lambda: float(result), column(node))
            if result.is_Rational and max(abs(result.p), result.q) > 10**100:
                result = sympy.Float(result, 40)  # a power of a decimal fraction
        return result

    def check_constant(self, value: Callable[[], Any], position: int) -> None:
        """Raise unless the value is a real number of at most `MAX_NUMBER`."""
        try:
            number = value()
        except ZeroDivisionError:
            raise self.error("this is not finite", position) from None
        except OverflowError:
            number = math.inf
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(number, complex) or math.isnan(number):
            raise self.error("this is not a real number", position)
        if abs(number) > MAX_NUMBER:
            raise self.error("the number is too large", position)

    def call(self, name: str, arguments: list[Any], position: int) -> Any:
        if name not in FUNCTIONS:
            raise self.error(f"unknown function '{name}'{hint(name, FUNCTIONS)}", position)
        count, make = FUNCTIONS[name]
        if len(arguments) != count:
            raise self.error(f"{name} takes {count} argument{'s' * (count > 1)}, got {len(arguments)}", position)
        if hasattr(math, name) and all(a.is_number for a in arguments):
            # checked first, because sympy may take forever to evaluate a huge argument
            self.check_constant(lambda: getattr(math, name)(*map(float, arguments)), position)
        try:
            return make(*arguments)
        except ValueError as error:
            raise self.error(str(error), position) from None


def _sympy(name: str) -> Callable[..., Any]:
    def make(*arguments: Any) -> Any:
        return getattr(sympy, name)(*arguments)

    return make


def Step(x: Any) -> Any:
    """1 for x >= 0, otherwise 0; its derivative is defined as zero."""
    return _own_functions()[0](x)


def Select(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition is not zero, ``b`` elsewhere."""
    return _own_functions()[1](condition, a, b)


def Largest(*numbers: Any) -> Any:
    """The largest of some numbers, in what kernels compute: ``max`` is a selection, which can be differentiated."""
    return _own_functions()[3](*numbers)


def LowerGamma(a: Any, x: Any) -> Any:
    """``x^-a γ(a, x)``, a form of the incomplete gamma function.

    Its derivative with respect to x is minus the same function of a + 1.
    """
    if not (a.is_Rational and a > 0 and (2 * a).is_Integer):
        raise ValueError("the first argument of lower_gamma must be a positive integer or half-integer")
    return _own_functions()[2](a, x)


@functools.cache
def _own_functions() -> tuple[Any, Any, Any, Any]:
    """The classes of these sympy functions, made on first use: importing this module must not import sympy."""

    class Real(sympy.Function):
        def _eval_is_real(self) -> bool:
            return True

    class LowerGamma(Real):
        nargs = 2

        def fdiff(self, argindex: int = 1) -> Any:
            a, x = self.args
            return -self.func(a + 1, x) if argindex == 2 else sympy.S.Zero

    class Step(Real):
        nargs = 1

        @classmethod
        def eval(cls, x: Any) -> Any:
            return sympy.Integer(1 if x >= 0 else 0) if x.is_number and x.is_real else None

        def _eval_derivative(self, x: Any) -> Any:
            return sympy.S.Zero

    class Select(Real):
        nargs = 3

        @classmethod
        def eval(cls, condition: Any, a: Any, b: Any) -> Any:
            if a == b:
                return a
            return (b if condition == 0 else a) if condition.is_number else None

        def _eval_derivative(self, x: Any) -> Any:
            condition, a, b = self.args
            return self.func(condition, a.diff(x), b.diff(x))

    class Largest(Real):
        """Of any number of numbers."""

    return Step, Select, LowerGamma, Largest


@functools.cache
def _erfc() -> Any:
    """As in sympy, but for ``erfc(a - r)``, of which that makes ``2 - erfc(r - a)``, without digits where small."""

    class erfc(sympy.erfc):
        @classmethod
        def eval(cls, x: Any) -> Any:
            return None if x.could_extract_minus_sign() else super().eval(x)

    return erfc


def _absolute(x: Any) -> Any:
    return x * (2 * Step(x) - 1)


def without_absolutes(expression: Any) -> Any:
    """The same expression with ``Abs`` and ``sign``, which sympy makes of roots of squares, replaced by `Step`.

    So are powers of zero, of which sympy has no derivative: 0 for a positive exponent, 1 for none.
    """
    of_zero = {e: Step(-e.exp) / Step(e.exp) for e in expression.atoms(sympy.Pow) if e.base == 0}
    expression = expression.xreplace(of_zero)
    if not expression.has(sympy.Abs, sympy.sign):
        return expression
    return expression.replace(sympy.Abs, _absolute).replace(sympy.sign, lambda x: 2 * Step(x) - 1)


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {ast.Add: operator.add, ast.Sub: operator.sub}
_OPERATORS |= {ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Pow: operator.pow}

_ELEMENTARY = ("sqrt", "exp", "log", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "erf", "erfc")

FUNCTIONS: dict[str, tuple[int, Callable[..., Any]]] = {
    **{name: (1, _sympy(name)) for name in _ELEMENTARY},
    "erfc": (1, lambda x: _erfc()(x)),
    "erfcx": (1, lambda x: _sympy("exp")(x**2) * _erfc()(x)),  # one function of kernels where x > 0
    "abs": (1, _absolute),
    "min": (2, lambda a, b: Select(Step(b - a), a, b)),
    "max": (2, lambda a, b: Select(Step(a - b), a, b)),
    "step": (1, Step),
    "select": (3, Select),
    "lower_gamma": (2, LowerGamma),
}
"""Functions that expressions may contain, with their number of arguments.

``step(x)`` is 1 for x >= 0 and otherwise 0; ``select(c, a, b)`` is a where c is not zero, otherwise b;
``lower_gamma(a, x)`` is ``x^-a γ(a, x)`` for a positive integer or half-integer a;
``erfcx(x)`` is ``exp(x^2) erfc(x)``.
"""
