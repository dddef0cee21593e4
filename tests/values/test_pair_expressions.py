"""The language of pair potentials: what an expression means, what is refused and where, and what its kernels cost.

Meaning is compared with Python's own arithmetic and with torch: values, first and second derivatives.
"""

import functools
import math
import re

import pytest
import sympy
import torch

from nvalchemiops.interactions.pair.expression import MAX_LENGTH, Formula, pair_energy, self_energy, symbols_of
from nvalchemiops.torch.interactions.pair import PairPotential
from tests.support.processes import python_says

R = 1.3
CHARGES = {"per_atom": ("q",)}


def value(text, r=R, **given):
    """The value at a distance, with global parameters, by sympy."""
    formula = Formula(text, (), tuple(given))
    symbols = symbols_of(formula)
    places = {symbols.squared: sympy.Float(r, 30) ** 2, symbols.cutoff: 7.0}
    places |= dict(zip(symbols.of_system, given.values()))
    return float(pair_energy(formula).subs(places))


def same(a, b, *names):
    """Whether two texts mean one expression."""
    return pair_energy(Formula(a, (), names)) == pair_energy(Formula(b, (), names))


# -- grammar --------------------------------------------------------------------------------------

ARITHMETIC = [
    "1 + 2*r",
    "1 - 2 - r",
    "8/r/2",
    "2/r*3",
    "-r**2",
    "(-r)**2",
    "2**-r",
    "2**3**0.5*r",
    "-2**-r**2",
    "- - -r",
    "+r - +2",
    "2*-r",
    "r**2/2*r - (1 - (2 - (3 - r)))",
    "3 - r*2**2 + 4/2**r",
    "r**0.5",
    "r**-1.5",
    "1e-3*r + 2.5E+2 + .5 + 3. + 1_000",
]


@pytest.mark.parametrize("text", ARITHMETIC)
def test_arithmetic_is_pythons_and_a_caret_is_a_power(text):
    expected = eval(text, {"r": R})
    assert value(text) == pytest.approx(expected, rel=1e-13)
    assert same(text.replace("**", "^"), text)
    assert same(text.replace("**", "\t^\n "), text)


def test_decimal_fractions_are_exact():
    """0.1 is a tenth: nothing is rounded before the whole expression is."""
    for text, exact in (("0.1", (1, 10)), ("1e-3", (1, 1000)), ("2.50", (5, 2)), ("3", (3, 1))):
        assert pair_energy(Formula(f"{text}*r")).coeff(pair_energy(Formula("r"))) == sympy.Rational(*exact)
    assert same("0.1*r + 0.2*r", "0.3*r")


@pytest.mark.parametrize(
    "text",
    [
        "a + b; a = 2*b; b = r + 1",
        "a + b; b = r + 1; a = 2*b",
        "a+b;a=2*b;b=r+1;",
        "\n  a\n + b\n;\n a\t= 2*\n b; b = r +\n 1\n;\n",
        "a + b; a = (c)*b; b = c - 1 + r; c = d; d = 2",
    ],
)
def test_definitions_come_in_any_order_with_any_spaces(text):
    assert same(text, "3*(r + 1)")


def test_texts_of_sympy_are_read():
    r, k = sympy.symbols("r k", positive=True)
    expression = k * sympy.erfc(r / 2) * sympy.exp(-k * r) / sympy.sqrt(r) + sympy.Rational(1, 3) * sympy.tanh(r) ** 2
    assert value(str(expression), k=0.7) == pytest.approx(float(expression.subs({r: R, k: 0.7})), rel=1e-14)


def test_a_definition_is_a_value_and_no_text():
    assert same("a*2; a = r + 1", "(r + 1)*2")
    assert same("2^a; a = 1 + r", "2^(1 + r)")


def test_a_definition_may_have_the_name_of_a_parameter_of_atoms():
    formula = Formula("q/r; q = q1*q2", ("q",))
    assert pair_energy(formula) == pair_energy(Formula("q1*q2/r", ("q",)))


def test_cutoff_and_pi_are_known():
    assert value("r/cutoff + pi") == pytest.approx(R / 7.0 + math.pi, rel=1e-14)


@pytest.mark.parametrize("name", ["\N{GREEK SMALL LETTER EPSILON}", "\N{MICRO SIGN}", "\N{GREEK SMALL LETTER MU}"])
def test_names_may_be_greek(name):
    """Python reads the micro sign as the letter mu; so must the names that are declared."""
    potential = PairPotential(f"{name}1*{name}2/r^3", (name,))
    assert potential.formula.per_atom


# -- functions against torch ----------------------------------------------------------------------


# text, the same in torch as a function of r and three parameters
GROUPS = {
    "elementary": {
        "sqrt(r)": lambda r, a, b, c: r.sqrt(),
        "exp(-a*r)": lambda r, a, b, c: torch.exp(-a * r),
        "log(b*r)": lambda r, a, b, c: torch.log(b * r),
        "sin(r)": lambda r, a, b, c: r.sin(),
        "cos(b*r)": lambda r, a, b, c: torch.cos(b * r),
        "tan(r/4)": lambda r, a, b, c: torch.tan(r / 4),
        "asin(r/5)": lambda r, a, b, c: torch.asin(r / 5),
        "acos(r/5)": lambda r, a, b, c: torch.acos(r / 5),
        "atan(r)": lambda r, a, b, c: r.atan(),
        "sinh(r/2)": lambda r, a, b, c: torch.sinh(r / 2),
        "cosh(r/2)": lambda r, a, b, c: torch.cosh(r / 2),
        "tanh(a*r)": lambda r, a, b, c: torch.tanh(a * r),
    },
    "error functions": {
        "erf(a*r)": lambda r, a, b, c: torch.erf(a * r),
        "erf(r - 2)": lambda r, a, b, c: torch.erf(r - 2),
        "erfc(a*r)/r": lambda r, a, b, c: torch.erfc(a * r) / r,
        "erfc(2 - r)": lambda r, a, b, c: torch.erfc(2 - r),
        "erfcx(b*r)": lambda r, a, b, c: torch.special.erfcx(b * r),
        "erfcx(r - 2)": lambda r, a, b, c: torch.special.erfcx(r - 2),
        "erfc(a)*r": lambda r, a, b, c: torch.erfc(a) * r,
        "erf(b)*exp(-r^2)*erfc(r)": lambda r, a, b, c: torch.erf(b) * torch.exp(-(r**2)) * torch.erfc(r),
    },
    "powers": {
        "r^3": lambda r, a, b, c: r**3,
        "r^-7": lambda r, a, b, c: r**-7.0,
        "r^2.5": lambda r, a, b, c: r**2.5,
        "r^-0.5": lambda r, a, b, c: r**-0.5,
        "r^-1.5": lambda r, a, b, c: r**-1.5,
        "r^0.23": lambda r, a, b, c: r**0.23,
        "r^(-1/3)": lambda r, a, b, c: r ** (-1.0 / 3.0),
        "(a/r)^12": lambda r, a, b, c: (a / r) ** 12,
        "(r - 2)^3": lambda r, a, b, c: (r - 2) ** 3,
        "(1 + r)^-2": lambda r, a, b, c: (1 + r) ** -2.0,
        "(1 + r)^-1.5": lambda r, a, b, c: (1 + r) ** -1.5,
        "r^b": lambda r, a, b, c: r**b,
        "(a + r)^-c": lambda r, a, b, c: (a + r) ** -c,
        "b^r": lambda r, a, b, c: b**r,
        "r^r": lambda r, a, b, c: r**r,
        "a^b*r^15": lambda r, a, b, c: a**b * r**15,
    },
    "constants": {
        "abs(-3)*abs(r)": lambda r, a, b, c: 3 * r,
        "min(2, 3)*max(2, 3)*r": lambda r, a, b, c: 6 * r,
        "(step(-1) + step(0) + 2*step(1))*r": lambda r, a, b, c: 3 * r,
        "select(0, 1, r^2)": lambda r, a, b, c: r**2,
    },
    "kinks": {
        "abs(r - 2)^3": lambda r, a, b, c: (r - 2).abs() ** 3,
        "min(r, 4/r)": lambda r, a, b, c: torch.minimum(r, 4 / r),
        "max(r^2, 4*r)": lambda r, a, b, c: torch.maximum(r**2, 4 * r),
        "min(a, b)*r^2": lambda r, a, b, c: torch.minimum(a, b) * r**2,
        "step(r - 2)*r^2": lambda r, a, b, c: torch.where(r >= 2, r**2, 0 * r),
        "step(2 - r)*exp(r)": lambda r, a, b, c: torch.where(r <= 2, r.exp(), 0 * r),
        "select(step(r - 2), r^3, 1/r)": lambda r, a, b, c: torch.where(r >= 2, r**3, 1 / r),
        "select(r - 2, r, -1)": lambda r, a, b, c: r,
        "select(step(r - 2), sqrt(r - 2), 0)": lambda r, a, b, c: torch.where(r >= 2, (r - 2).abs().sqrt(), 0 * r),
    },
}
DISTANCES = torch.tensor([0.31, 0.7, 1.0, 1.9, 2.3, 3.1, 4.9], dtype=torch.float64)
PARAMETERS = [0.8, 1.7, 2.2]


def energies_of(text, names, at, parameters, **options):
    """Energies of isolated pairs at distances ``at``, with global parameters (n_pairs, n_names)."""
    n = at.shape[0]
    direction = torch.tensor([0.48, -0.6, 0.64], dtype=at.dtype)
    positions = torch.stack([torch.zeros(n, 3, dtype=at.dtype), at[:, None] * direction], dim=1).reshape(-1, 3)
    i = torch.arange(2 * n, dtype=torch.int32)
    potential = PairPotential(text, (), names)
    return potential(
        positions,
        neighbor_list=torch.stack([i, i ^ 1]),
        batch_idx=i // 2,
        num_systems=n,
        energy_reduction="system",
        **dict(zip(names, parameters.T.contiguous())),
        **options,
    )


@functools.cache
def derivatives_of(group):
    """Value and two derivatives (3, n_functions, n_distances) of all functions of a group, from one kernel each."""
    texts = list(GROUPS[group])
    weights = [f"weight{k}" for k in range(len(texts))]
    text = " + ".join(f"{w}*({t})" for w, t in zip(weights, texts))
    n = len(DISTANCES)
    at = DISTANCES.repeat(len(texts)).requires_grad_()
    one_of = torch.eye(len(texts), dtype=torch.float64).repeat_interleave(n, dim=0)
    others = torch.tensor(PARAMETERS, dtype=torch.float64).expand(len(at), 3)
    names = (*weights, *(name for name in "abc" if any(name in _names(t) for t in texts)))
    others = others[:, [k for k, name in enumerate("abc") if name in names]]
    energies = energies_of(text, names, at, torch.cat([one_of, others], dim=1))
    (first,) = torch.autograd.grad(energies.sum(), at, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), at)
    return torch.stack([energies, first, second]).detach().reshape(3, len(texts), n)


def _names(text):
    return re.findall(r"[a-z_]\w*", text)


@pytest.mark.parametrize(("group", "text"), [(g, t) for g, texts in GROUPS.items() for t in texts])
def test_functions_and_two_derivatives_equal_torch(group, text):
    found = derivatives_of(group)[:, list(GROUPS[group]).index(text)]
    r = DISTANCES.clone().requires_grad_()
    expected = GROUPS[group][text](r, *torch.tensor(PARAMETERS, dtype=torch.float64))
    (first,) = torch.autograd.grad(expected.sum(), r, create_graph=True)
    second = torch.autograd.grad(first.sum(), r)[0] if first.requires_grad else torch.zeros_like(r)
    for a, b in zip(found, (expected, first, second), strict=True):
        b = b.detach().nan_to_num(0.0)  # torch's where gives NaN where the other branch has an infinite slope
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_exponents_are_differentiable():
    """du/dn of (1/r)^n, by the parameter that is the exponent."""
    n = torch.full((len(DISTANCES), 1), 2.7, dtype=torch.float64, requires_grad=True)
    energies = energies_of("r^-n", ("n",), DISTANCES, n)
    (found,) = torch.autograd.grad(energies.sum(), n)
    torch.testing.assert_close(found[:, 0], -DISTANCES.log() * DISTANCES**-2.7)


def test_one_sided_derivatives_at_kinks():
    """At a kink one of the two is taken: finite, and never a mean or a NaN."""
    kinks = {"abs(r - 2)": (-1, 1), "min(r, 2)": (1, 0), "max(r, 2)": (0, 1), "step(r - 2)": (0,)}
    for text, slopes in kinks.items():
        at = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
        direction = torch.tensor([[0.0, 0, 0], [1.0, 0, 0]], dtype=torch.float64)
        energies = PairPotential(text)(at * direction, neighbor_list=torch.tensor([[0, 1], [1, 0]]))
        (slope,) = torch.autograd.grad(energies.sum(), at)
        assert slope.item() in slopes, text


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("q1/r", "q1^2*q2/r", "(q1 - q2)/r", "q1*q2/r + 1e-6*q1", "select(q1, q2, r)"),
        # at large distances or parameters only
        *("q1*q2/r + step(r - 3)*q1", "q1*q2/r + q1*max(0, r - 9)", "q1*q2 + q1*step(q2 - 5)"),
        # of negative parameters
        *("abs(q1)*q2/r", "q1*q2/r*step(-q1)", "sqrt(q1^2)*q2/r"),
    ],
)
def test_a_pair_has_no_order(text):
    with pytest.raises(ValueError, match="not symmetric"):
        PairPotential(text, **CHARGES)


@pytest.mark.parametrize(
    "text",
    [
        "(q1^2 - q2^2)/(q1 - q2)/r",
        "abs(q1 - q2)/r",
        "max(q1, q2)*r",
        "select(step(q1 - q2), q1, q2)",
        "(q1 - q2)*(q1 - q2)*r",
        "(q1 + q2)^2/r - q2*q1*4 - (q1 - q2)^2/r",
        "atan(q1/q2) + atan(q2/q1) + r",
    ],
)
def test_what_is_symmetric_in_value_is_accepted(text):
    PairPotential(text, **CHARGES)


def test_a_comparison_outside_of_the_domain_is_no_crash():
    """The comparison of both orders meets sqrt(r - 1) at r < 1."""
    PairPotential("(q1^2 - q2^2)/(q1 - q2)*step(sqrt(r - 1))", **CHARGES)
    # and, at some distances, numbers of more digits than there is memory
    for text in ("tanh(exp(r^20))", "r^exp(r^9)", "lower_gamma(0.5, exp(r^9))", "lower_gamma(3, -exp(r^9))"):
        pair_energy(Formula(text))


NAMES = {"global_parameters": ("epsilon", "a"), "per_atom": ("q",)}
REFUSED = [  # text, column, part of the message
    ("1/r + x*a", 7, "unknown symbol 'x'"),
    ("4*epsilno", 3, "did you mean 'epsilon'"),
    ("4*q/r", 3, "q1 and q2"),
    ("1/r + q", 7, "belongs to each atom"),
    ("R", 1, "unknown symbol 'R'"),
    ("expp(r)", 1, "unknown function 'expp'; did you mean 'exp'"),
    ("1 + foo(r)", 5, "unknown function 'foo'; known are abs"),
    ("1/r + exp(r, 2)", 7, "exp takes 1 argument, got 2"),
    ("1/r + min(r)", 7, "min takes 2 arguments, got 1"),
    ("select(r, 1)", 1, "select takes 3 arguments, got 2"),
    ("exp()", 1, "exp takes 1 argument, got 0"),
    ("1/r + * 2", 7, "not an arithmetic expression"),
    ("1/r)", 4, "unmatched"),
    ("2*(1/r", 3, "never closed"),
    ("1/r 2", None, "not an arithmetic expression"),
    ("1/r +", None, "not an arithmetic expression"),
    ("a = 3", None, "not an arithmetic expression"),
    ("1/r; a = 3", 6, "'a' is taken"),
    ("1 + (r < 2)", 6, "step"),
    ("r == 2", 1, "step"),
    ("2 + 'a'", 5, "Constant"),
    ("2 + r.real", 5, "Attribute"),
    ("(1).__class__", None, "Attribute"),
    ("exp(x=r)", 1, "Call"),
    ("exp(*r)", 5, "Starred"),
    ("exp(r)(r)", 1, "Call"),
    ("2*(lambda: r)", 4, "Lambda"),
    ("1 + [r for r in r]", 5, "ListComp"),
    ("__import__(r)", 1, "unknown function '__import__'"),
    ("__import__('os').system('ls')", None, "not known here|unknown function"),
    ("r if r else 2", 1, "IfExp"),
    ("r and 2", 1, "BoolOp"),
    ("not r", 1, "operator|UnaryOp"),
    ("2 + ~r", 5, "operator|UnaryOp"),
    ("r // 2", 1, "FloorDiv"),
    ("r % 2", 1, "Mod"),
    ("r @ r", 1, "MatMult"),
    ("r | 2", 3, "not known here"),
    ("2 + r[0]", 5, "Subscript"),
    ("(r, r)", 1, "Tuple"),
    ("f'{r}'", 1, "JoinedStr"),
    ("True*r", 1, "Constant"),
    ("2j*r", 1, "Constant"),
    ("(y := r)", None, "NamedExpr"),
    ("", 1, "missing"),
    ("  \n ", 1, "missing"),
    (";a0 = 2", 1, "missing"),
    ("b; b = ", 7, "missing"),
    ("1/r; 2*r", 6, "definition must read"),
    ("1/r; b == r", 6, "definition must read"),
    ("1/r; 2b = r", 6, "definition must read"),
    ("1/r; b = x", 10, "unknown symbol 'x'"),
    ("1/r; b =\n   2*x", 15, "unknown symbol 'x'"),
    ("b; b = 1/r; b = 2", 13, "'b' is taken"),
    ("1/r; r = 2", 6, "'r' is taken"),
    ("1/r; exp = 2", 6, "'exp' is taken"),
    ("1/r; q1 = 2", 6, "'q1' is taken"),
    ("1/r; pi = 3", 6, "'pi' is taken"),
    ("b; b = b + 1", 8, "defined by itself"),
    ("b; b = c; c = 2*b", 17, "defined by itself"),
    ("1/r; b = c; c = b", None, "defined by itself"),
    ("1/0", 1, "not finite"),
    ("2 + 1/(r - r)", 5, "not finite"),
    ("0^-1", 1, "not finite"),
    ("log(0)", 1, "not a real number"),
    ("1/r; b = 1/(2 - 2)", 10, "not finite"),
    ("epsilon*a/0 + q1*q2", 1, "not finite"),
    ("q1*q2 + exp(r/sin(pi))", 13, "not finite"),
    ("tan(pi/2)*r", 1, "not finite"),
    ("1/r + lower_gamma(r, 1)", 7, "first argument of lower_gamma"),
    ("r\0", None, "not an arithmetic expression"),
    ("9**9**9", 4, "exponent"),
    ("r^9^9", 3, "exponent"),
    ("2 + r^(9^9)", 8, "exponent|too large"),
    ("r^-1000", 3, "exponent"),
    ("((9^200)^200)^200", 2, "too large"),
    ("1e200*1e200*r", 1, "too large"),
    ("1e301", 1, "too large"),
    ("1e999*r", 1, "too large"),
    ("9" * 400, 1, "too large"),
    ("9" * 5000, 1, "not an arithmetic expression"),
    ("(" * 500 + "r" + ")" * 500, None, "nested"),
    *((text, None, "column .* (large|finite)") for text in ("exp(1000)*r", "sinh(1000)/r", "exp(exp(100))*r")),
    *((text, None, "column") for text in ("cosh(-900) + r", "sqrt(-1)/r", "log(-2)*r", "asin(2) + r", "(-8)^(1/3)*r")),
    *(
        (text, None, "not real|not a finite real number|column")
        for text in ("(-2)^0.5*r", "sqrt(-r)", "epsilon*a*q1*q2*log(-2 - r^2)")
    ),
]


@pytest.mark.parametrize(("text", "column", "message"), REFUSED, ids=[t[:24] for t, *_ in REFUSED])
def test_refusals_say_what_and_where(text, column, message):
    with pytest.raises(ValueError, match=message) as caught:
        PairPotential(text, **NAMES)
    said = str(caught.value)
    assert "`expression`" in said
    if column is not None:
        assert f"column {column}:" in said
        _, excerpt, mark = said.splitlines()
        shown = text.replace("\n", " ")[max(0, column - 41) : column + 39]
        assert excerpt == "    " + shown
        assert mark == " " * (4 + min(column - 1, 40)) + "^"


def test_columns_are_counted_in_characters():
    with pytest.raises(ValueError, match="column 15:"):
        PairPotential("σ1*σ2*σ1*σ2 * /r", ("σ",))
    with pytest.raises(ValueError, match="column 11:"):
        PairPotential("σ1*σ2*r^2*x", ("σ",))


@pytest.mark.parametrize(
    "text",
    [
        "-" * 5000 + "r",
        "-" * 9900 + "r",
        "+".join(["r"] * 4000),
        "exp(" * 1500 + "r" + ")" * 1500,
        "a0; " + "; ".join(f"a{k} = a{k + 1} + 1" for k in range(500)) + "; a500 = r",
    ],
    ids=["signs", "more signs", "sum", "calls", "definitions"],
)
def test_deep_nesting_is_refused_without_a_crash(text):
    with pytest.raises(ValueError, match=r"nested|parenthes"):
        PairPotential(text)


def test_too_long():
    with pytest.raises(ValueError, match=f"`expression` has {MAX_LENGTH + 1} characters"):
        PairPotential(" " * MAX_LENGTH + "r")
    PairPotential("r" + " " * (MAX_LENGTH - 1))


@pytest.mark.parametrize("text", ["1.0001^100*r", "1e-301*r", "0.9999^200*r"])
def test_constants_of_ordinary_size_are_accepted(text):
    """Whatever their numerators and denominators are."""
    assert value(text) == pytest.approx(eval(text.replace("^", "**"), {"r": R}), rel=1e-12)


@pytest.mark.parametrize("text", ["1/r # repulsion\n + 3", "1/r # repulsion"])
def test_a_comment_never_swallows_what_follows(text):
    """Comments are refused, or end with their line; a term is never lost."""
    try:
        found = value(text)
    except ValueError as refusal:
        assert "column" in str(refusal)
    else:
        assert found == pytest.approx(1 / R + 3 * text.count("3"))


@pytest.mark.parametrize("text", [None, 3, b"1/r", ["1/r"]])
def test_only_strings_are_expressions(text):
    with pytest.raises(TypeError, match="`expression` must be a string"):
        PairPotential(text)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("global_parameters", {"global_parameters": ("b",)}),
        ("per_pair", {"per_pair": ("b",)}),
        ("per_atom", {"per_atom": ("b",)}),
        ("global_parameters", {"global_parameters": ("r",)}),
        ("global_parameters", {"global_parameters": ("pi",)}),
        ("global_parameters", {"global_parameters": ("exp",)}),
        ("per_pair", {"per_pair": ("cutoff",)}),
        ("per_pair", {"per_pair": ("r_switch",)}),
        ("global_parameters", {"global_parameters": ("2b",)}),
        ("global_parameters", {"global_parameters": ("b c",)}),
        ("global_parameters", {"global_parameters": (3,)}),
        ("global_parameters", {"global_parameters": ("b", "b")}),
        ("global_parameters", {"per_atom": ("q",), "global_parameters": ("q1",)}),
        ("per_pair", {"global_parameters": ("b",), "per_pair": ("b",)}),
    ],
)
def test_declared_names_are_used_and_distinct(argument, options):
    with pytest.raises(ValueError, match=f"`{argument}`"):
        PairPotential("1/r", **options)


def test_words_of_python_are_no_names():
    for kind, word in (("global_parameters", "lambda"), ("per_pair", "None"), ("per_atom", "class")):
        with pytest.raises(ValueError, match=f"`{kind}`: .*'{word}', which is a word of Python"):
            PairPotential("r", **{kind: (word,)})


def test_one_name_is_one_parameter():
    """A call could not tell the charge of the atoms from a global one of the same name."""
    with pytest.raises(ValueError, match="'q'"):
        PairPotential("q*q1*q2/r", ("q",), ("q",))
    with pytest.raises(ValueError, match="'q'"):
        PairPotential("q*q1*q2/r", ("q",), (), ("q",))


@pytest.mark.parametrize("name", ["positions", "cell", "species", "check", "batch_idx"])
def test_names_of_arguments_of_the_call_are_taken(name):
    """A parameter with the name of another argument could never be given."""
    with pytest.raises(ValueError, match=name):
        PairPotential(f"{name}*r", (), (name,))


@pytest.mark.parametrize("kind", ["per_atom", "global_parameters", "per_pair"])
def test_a_string_is_no_sequence_of_names(kind):
    with pytest.raises(TypeError, match=f"`{kind}`"):
        PairPotential("sigma*r", **{kind: "sigma"})


def test_the_cutoff_is_needed_where_it_is_used_and_nowhere_else():
    for text, options in (("r/cutoff", {}), ("1/r", {"shifted": True}), ("1/r", {"r_switch": 2.0})):
        with pytest.raises(ValueError, match="`cutoff` is needed"):
            PairPotential(text, **options)
    with pytest.raises(ValueError, match="`cutoff` is needed"):
        PairPotential("q1*q2/r", ("q",), self_energy="q^2/cutoff")
    PairPotential("kcutoff*r", (), ("kcutoff",))  # another name
    PairPotential("1/r; cutoff_squared = 2")


def test_a_switching_distance_that_is_not_given_is_not_zero():
    with pytest.raises(ValueError, match="r_switch"):
        PairPotential("r/r_switch", cutoff=3.0)


def test_what_is_infinite_at_the_cutoff_cannot_be_shifted():
    for text in ("1/(r - cutoff)", "-log(1 - (r/cutoff)^2)", "q1*q2/(cutoff - r)", "(cutoff - r)*log(r - cutoff)"):
        with pytest.raises(ValueError, match="`shifted`"):
            PairPotential(text, ("q",) * ("q1" in text), cutoff=2.0, shifted=True)
    # the limit from below counts
    finite = {
        "(cutoff - r)^3*log(cutoff - r)*q1*q2 + 3/r": 1.5,
        "exp(1/(r - cutoff)) + q1*q2": 0.7**2,
        "atan(1/(cutoff - r))*q1*q2": 0.7**2 * math.pi / 2,
    }
    for text, value in finite.items():
        energy = {}
        for flag in (False, True):
            formula = Formula(text, ("q",), shifted=flag)
            symbols = symbols_of(formula)
            at = {symbols.squared: 1.44, symbols.cutoff: 2, symbols.own[0]: 0.7, symbols.other[0]: 0.7}
            energy[flag] = float(pair_energy(formula).subs(at))
        assert energy[False] - energy[True] == pytest.approx(value, rel=1e-12)
    text = "select(step(r - a), 1/r, 1/(cutoff - r))"  # the second part is not that at the cutoff
    shifted = Formula(text, (), ("a",), shifted=True)
    symbols = symbols_of(shifted)
    at = {symbols.squared: 1, symbols.cutoff: 2, symbols.of_system[0]: 0.5}
    assert float(pair_energy(shifted).subs(at)) == 0.5


def test_self_energies_are_read_alike():
    formula = Formula("q1*q2/r", ("q",), ("alpha",), self_energy="-alpha/sqrt(pi)*q^2")
    own, alpha = symbols_of(formula).own[0], symbols_of(formula).of_system[0]
    assert self_energy(formula) == -alpha / sympy.sqrt(sympy.pi) * own**2
    for text, message in (("q1", "unknown symbol 'q1'"), ("r*q", "unknown symbol 'r'"), ("q +", "not an arithmetic")):
        with pytest.raises(ValueError, match=rf"`self_energy`, column \d+: {message}"):
            PairPotential("q1*q2/r", ("q",), self_energy=text)
    with pytest.raises(ValueError, match="`self_energy`: 'pi' is reserved"):
        PairPotential("pi1*pi2/r", ("pi",), self_energy="pi^2")
    PairPotential("pi1*q1*pi2*q2/r", ("pi", "q"), self_energy="q^2")
    with pytest.raises(TypeError, match="`self_energy`"):
        PairPotential("q1*q2/r", ("q",), self_energy=2.0)
    with pytest.raises(ValueError, match="`self_energy` is not real"):
        PairPotential("q1*q2/r", ("q",), self_energy="sqrt(-q^2)")


def test_a_formula_survives_being_written_down():
    formula = Formula("q1*q2*k/r*A", ("q",), ("k",), ("A",), True, True, "q^2")
    assert Formula.read(formula.text) == formula


# -- processes ------------------------------------------------------------------------------------

SCRIPT = """
import hashlib, json, os, sys, torch
before = {m for m in sys.modules if m.split(".")[0] == "sympy"}
import nvalchemiops.torch.interactions.pair as pair
import nvalchemiops.torch.interactions.lj
added = sorted({m for m in sys.modules if m.split(".")[0] == "sympy"} - before)
cache = os.environ["WARP_CACHE_PATH"]
count = lambda part: sum(part in f for _, folders, _ in os.walk(cache) for f in folders)
at_import = count("wp_")
from nvalchemiops.interactions.pair.derivatives import Request
from nvalchemiops.interactions.pair.expression import Formula
from nvalchemiops.interactions.pair.sum import Variant, source
texts = []
for outputs, directions in (("wrpg", ()), ("rcwpg", ("rcpg", "rcw"))):
    formula = Formula("q1*q2*erfc(k*r)*A/r + max(q1, q2)*exp(-k*r^2)/(q1 + q2)", ("q",), ("k",), ("A",), True, True)
    texts.append(source(Variant(Request(formula, directions, outputs), "float64", False, 2)))
x = torch.tensor([[0.0, 0, 0], [1.0, 0.2, 0.3]], dtype=torch.float64, requires_grad=True)
pairs = torch.tensor([[0, 1], [1, 0]])
kernels = []
for cutoff in (4.0, 5.0):
    for text in ("k*q1*q2/r", "k*q1*q2/r"):
        energies = pair.PairPotential(text, ("q",), ("k",), cutoff=cutoff)(x, neighbor_list=pairs, q=1.0, k=2.0)
        kernels.append(count("pair_sum"))
        energies.sum().backward()
        kernels.append(count("pair_sum"))
digests = [hashlib.sha256(t.encode()).hexdigest() for t in texts]
print(json.dumps({"digests": digests, "at_import": at_import, "added": added, "kernels": kernels}))
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """What two processes that share a kernel cache report, with different orders of sets and dictionaries."""
    reports = []
    cache = str(tmp_path_factory.mktemp("kernels"))
    for seed in ("1", "2"):
        reports.append(python_says(SCRIPT, fresh=True, PYTHONHASHSEED=seed, WARP_CACHE_PATH=cache))
    return reports


@pytest.mark.later
def test_every_process_prints_the_same_source(processes):
    assert processes[0]["digests"] == processes[1]["digests"]


@pytest.mark.later
def test_an_expression_compiles_once_in_its_life(processes):
    """Energies one kernel, gradients another; not again for another potential, cutoff or process."""
    first, second = (report["kernels"] for report in processes)
    assert first == [1, *[2] * 7]
    assert second == [2] * 8


@pytest.mark.later
def test_importing_compiles_nothing_and_imports_no_more_of_sympy_than_torch(processes):
    assert processes[0]["at_import"] == 0
    assert processes[0]["added"] == []
