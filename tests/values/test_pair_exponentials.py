"""Exponentials in pair potentials: energies and derivatives where they, or sums of them, are out of range."""

import functools
import math

import numpy as np
import pytest
import sympy
import torch
from scipy.special import erfc, erfcx

from nvalchemiops.interactions.pair.derivatives import Request, derivatives, printed
from nvalchemiops.interactions.pair.exponentials import in_range, prepared, with_shared_exponential
from nvalchemiops.interactions.pair.expression import Formula, symbols_of
from nvalchemiops.torch.interactions.pair import PairPotential


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 20.0), (torch.float64, 90.0)])
def test_functions_that_fall_off_have_forces_at_any_distance(dtype, far):
    """Where their exponentials are infinite, too, also with terms that are zero and with numbers as factors."""
    text = "1/(1 + x + step(r - 99)) + 1/cosh(k*(r - 5))^2 + exp(-r)/(1 + exp(20*r - 100)); x = exp(k*(r - 5))"
    text = f"1/(x + 1/x + 2) + exp(-k*r^2)*(1 + exp(k*r)) + {text}"
    at = torch.tensor([0.02, 4.9, 5.2, far / 2, far], dtype=dtype)
    directions = torch.tensor([0.48, -0.6, 0.64], dtype=dtype)
    positions = torch.stack([torch.zeros(5, 3, dtype=dtype), at[:, None] * directions], dim=1).flatten(0, 1)
    i = torch.arange(10)
    _, forces = PairPotential(text, (), ("k",))(
        positions, neighbor_list=torch.stack([i, i ^ 1]), compute_forces=True, k=20.0
    )
    r = at.double().requires_grad_()
    x = 20.0 * (r - 5.0)
    expected = (1.0 + torch.exp(-r)) * torch.sigmoid(-x) + 4.0 * torch.sigmoid(2.0 * x) * torch.sigmoid(-2.0 * x)
    expected = expected + torch.sigmoid(x) * torch.sigmoid(-x)
    expected = expected + torch.exp(-20.0 * r**2) + torch.exp(20.0 * (r - r**2))
    (slope,) = torch.autograd.grad(expected.sum(), r)
    found = (forces[::2].double() * directions).sum(1)
    torch.testing.assert_close(found, slope, rtol=2e-5 if dtype == torch.float32 else 1e-12, atol=1e-30)


def test_shifts_that_have_fallen_off_have_derivatives_by_parameters():
    k = torch.tensor(20.0, requires_grad=True)
    potential = PairPotential("1/(1 + exp(k*(r - 5)))", (), ("k",), cutoff=50.0, shifted=True)
    x = torch.tensor([[0.0, 0.0, 0.0], [4.875, 0.0, 0.0]])
    (slope,) = torch.autograd.grad(potential(x, neighbor_list=torch.tensor([[0, 1], [1, 0]]), k=k).sum(), k)
    falls = torch.sigmoid(torch.tensor(2.5))
    torch.testing.assert_close(slope, 0.125 * falls * (1.0 - falls), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize(
    "text", ["1/(1 + exp(r^2 - a))", "1/((1 + exp(a*r - 2))*(1 + exp(a*r - 3)))", "1/(1 + exp(-a*r))"]
)
def test_no_exponential_multiplies_what_falls_off(text):
    """In second derivatives, either, which are the same numbers; ``a`` may be negative."""
    formula = Formula(text, (), ("a",))
    symbols = symbols_of(formula)
    at = {symbols.squared: 1.7, symbols.of_system[0]: 0.9, sympy.Symbol("b0", real=True): 0.3}
    for expression in derivatives(Request(formula, ("r",), "r")).values():
        found = in_range(expression)
        assert float((found / expression).subs(at)) == pytest.approx(1.0, rel=1e-12)
        factors = [f for e in sympy.preorder_traversal(found) if e.is_Mul for f in e.args if isinstance(f, sympy.exp)]
        assert not any(f.has(symbols.squared) for f in factors)


def scaled(x):
    """erfc(x) exp(x^2) for x > 0, erfc(x) below."""
    return torch.where(x > 0.0, torch.special.erfcx(x.clamp(min=0.0)), torch.special.erfc(x.clamp(max=0.0)))


def gaussian(x, width=1.0):
    """exp(-width r^2)."""
    return torch.exp(-width * (0.5 * x + 5.0) ** 2)


SUMS_OF_EXPONENTIALS = {
    "exp(x)*exp(-x)/(exp(x) + exp(-x) + 2)": lambda x: torch.sigmoid(x) * torch.sigmoid(-x),
    "log(1 + exp(x))": torch.nn.functional.softplus,
    "log(exp(x) + exp(-x) + 2)": lambda x: 2.0 * torch.nn.functional.softplus(x) - x,
    "exp(-exp(x))": lambda x: torch.exp(-torch.exp(x.clamp(max=9.0))),
    "step(6 - r)*exp(exp(x))": lambda x: torch.exp(torch.exp(x.clamp(max=2.0))) * (x < 2.0),
    "log(cosh(x))": lambda x: torch.nn.functional.softplus(2.0 * x) - x - math.log(2.0),
    "(1 - exp(x))^6/(1 + exp(x))^6": lambda x: torch.tanh(0.5 * x) ** 6,
    "exp(x)*exp(-2*x)": lambda x: torch.exp(-x),
    "exp(-2*x)*(1 + exp(x))": lambda x: torch.exp(-2.0 * x) + torch.exp(-x),
    "log(exp(-x) + exp(-2*x))": lambda x: torch.nn.functional.softplus(-x) - x,
    "log(exp(-x^2) + exp(-2*x^2 - 1))": lambda x: torch.nn.functional.softplus(-(x**2) - 1.0) - x**2,
    "log((exp(-x) + exp(-2*x))^2)": lambda x: 2.0 * torch.nn.functional.softplus(-x) - 2.0 * x,
    "log(r*exp(-x))": lambda x: torch.log(0.5 * x + 5.0) - x,
    "exp(-2*x)*sqrt(sinh(x)*sinh(2*x))": lambda x: (
        torch.exp(1.5 * x.abs() - 2.0 * x)
        * torch.sqrt(0.25 * torch.expm1(-2.0 * x.abs()) * torch.expm1(-4.0 * x.abs()))
    ),
    "exp(-2*x)*sinh(x)": lambda x: -0.5 * torch.exp(-x) * torch.expm1(-2.0 * x),
    "exp(x)/cosh(x)^2": lambda x: 4.0 * torch.exp(-x) * torch.sigmoid(2.0 * x) ** 2,
    "(cosh(x) - 1)*exp(-2*x)": lambda x: 0.5 * torch.exp(-x) * torch.expm1(-x) ** 2,
    "exp(x)/(1 + exp(x^2))": lambda x: torch.exp(x - torch.nn.functional.softplus(x**2)),
    "exp(x/3)/(1 + exp(x))": lambda x: torch.exp(x / 3.0 - torch.nn.functional.softplus(x)),
    "(exp(-x) + exp(x))^2*exp(-x^2)": lambda x: torch.exp(2.0 * torch.logaddexp(x, -x) - x**2),
    "(1 + exp(x))^2*erfc(x^2/2)": lambda x: (
        torch.special.erfcx(x**2 / 2.0) * torch.exp(2.0 * torch.nn.functional.softplus(x) - x**4 / 4.0)
    ),
    "exp(2*x)/(exp(x) + sinh(x) + 9)^3": lambda x: (
        torch.exp(-x) / (1.0 - 0.5 * torch.expm1(-2.0 * x) + 9.0 * torch.exp(-x)) ** 3
    ),
    "1/(2 + sinh(x))": lambda x: 2.0 / (4.0 + torch.exp(x.clamp(max=700.0)) - torch.exp(-x)),
    "exp(x)/(3 + sinh(x)^2)": lambda x: 4.0 * torch.exp(-x) / (10.0 * torch.exp(-2.0 * x) + 1.0 + torch.exp(-4.0 * x)),
    "1/(3 + cosh(x)^24)": lambda x: 1.0 / (3.0 + torch.cosh(x.clamp(max=28.0)) ** 24),
    "exp(-x^2)*sinh(x)": lambda x: -0.5 * torch.exp(x - x**2) * torch.expm1(-2.0 * x),
    "exp(-r^2)*(1 + exp(2*r))": lambda x: gaussian(x) * (1.0 + torch.exp((x + 10.0).clamp(max=700.0))),
    "exp(-x)*erfc(-x - 20)": lambda x: torch.exp(-x) * torch.special.erfc(-x - 20.0),
    "exp(x)*erfc(x)": lambda x: scaled(x) * torch.exp(x - x.clamp(min=0.0) ** 2),
    "exp(x^2/2)*erfc(x)": lambda x: torch.exp(-(x**2) / 2.0) * torch.special.erfcx(x),
    "erfc(x)*sinh(x)^2": lambda x: (
        scaled(x) * 0.25 * torch.expm1(-2.0 * x) ** 2 * torch.exp(2.0 * x - x.clamp(min=0.0) ** 2)
    ),
    "erfc(r)*(exp(r^2/2) + cosh(2*r^2/3))": lambda x: (
        torch.special.erfcx(0.5 * x + 5.0) * (gaussian(x, 0.5) + 0.5 * gaussian(x, 1 / 3) + 0.5 * gaussian(x, 5 / 3))
    ),
    "exp(-x)/erfc(x)^2*exp(-3*x^2)": lambda x: (
        torch.exp(-x - 3.0 * x**2 + 2.0 * x.clamp(min=0.0) ** 2) / scaled(x) ** 2
    ),
    "log(erfc(x)/exp(-x))": lambda x: torch.log(scaled(x)) - x.clamp(min=0.0) ** 2 + x,
    "log(erfc(x) + exp(-r^2))": lambda x: torch.logaddexp(
        torch.log(scaled(x)) - x.clamp(min=0.0) ** 2, -((0.5 * x + 5.0) ** 2)
    ),
    "1/(1 + (2 + exp(r))^2)": lambda x: (
        torch.exp(-x - 10.0) / (torch.exp(-x - 10.0) + (2.0 * torch.exp(-0.5 * x - 5.0) + 1.0) ** 2)
    ),
    "log(2 + (exp(x/3) + 4*exp(x))^2)": lambda x: torch.logaddexp(
        2.0 * torch.logaddexp(x / 3.0, x + np.log(4.0)), torch.full_like(x, np.log(2.0))
    ),
    "step(6 - r)*sinh(x)": lambda x: torch.sinh(x.clamp(max=2.0)) * (x < 2.0),
}


@pytest.mark.parametrize("text", SUMS_OF_EXPONENTIALS)
def test_sums_of_exponentials_are_finite_at_any_distance(text):
    """Energies and forces; with exponentials that are infinite, or all zero, they were infinite or NaN."""
    formula = Formula(f"{text}; x = 2*(r - 5)")
    squared = symbols_of(formula).squared
    r = torch.tensor([0.5, 4.7, 5.05, 5.3, 30.0, 600.0], dtype=torch.float64, requires_grad=True)
    expected = SUMS_OF_EXPONENTIALS[text](2.0 * (r - 5.0))
    (slope,) = torch.autograd.grad(expected.sum(), r)
    results = {name: prepared(e) for name, e in derivatives(Request(formula, (), "wr")).items()}
    functions = [{"Step": lambda x: np.heaviside(x, 1.0), "Select": lambda c, a, b: np.where(c != 0, a, b)}, "numpy"]
    functions[0] |= {"erfc_from": lambda x, _: erfc(x), "scaled_erfc": erfcx}
    functions[0]["Largest"] = lambda *numbers: functools.reduce(np.maximum, numbers)
    with np.errstate(all="ignore"):
        found = [sympy.lambdify([squared], results[name], functions) for name in ("energy", "derivative")]
        energy, derivative = (torch.as_tensor(f(r.detach().numpy() ** 2)) for f in found)
    torch.testing.assert_close(energy, expected.detach(), rtol=1e-12, atol=1e-30)
    torch.testing.assert_close(derivative * r.detach(), slope, rtol=1e-11, atol=1e-30)


def test_exponentials_that_are_always_finite_are_left_as_they_are():
    """Those of Gaussians are multiplied by a step, in many pairs of all: there is nothing to select."""
    texts = [
        "erfc(a*r)*exp(-a^2*r^2)",
        "step(3 - r)*erfc(a*r)/r",
        "step(3 - r)*erfc(r/select(step(3 - r), 2 + a^2, 1))",
        "log(4 + (a*exp(-r) + exp(-r^2))^2)",
    ]
    for text in [*texts, "log(a + exp(-r) + exp(-a^2*r))", "1/(a + exp(-r) + exp(-2*r))"]:
        for expression in derivatives(Request(Formula(text, (), ("a",)), (), "wrg")).values():
            assert prepared(expression) == with_shared_exponential(expression)


def test_nothing_is_selected_between_factors_that_fall_off_together():
    """Parameters of exponents are usually positive, and the distance is: to select would take twice as long."""
    texts = ["(1 - exp(-a*r))*(1 - exp(-b*r))", "exp(-b*r^2)*(1 - exp(-a*r))", "(1 - exp(1 - r))^2/(a + b)"]
    for text in [*texts, "exp(-a*r)*(1 - exp(-b*(r - a)))"]:
        for expression in derivatives(Request(Formula(text, (), ("a", "b")), (), "wrg")).values():
            assert "Select" not in str(prepared(expression))


def test_the_derivative_of_a_power_of_a_hyperbolic_function_has_its_quotient():
    for above, below in ((sympy.sinh, sympy.cosh), (sympy.cosh, sympy.sinh)):
        x = sympy.Symbol("a", real=True) * sympy.sqrt(symbols_of(Formula("r")).squared)
        quotient = sympy.tanh(x) if below == sympy.cosh else 1 / sympy.tanh(x)
        assert in_range(above(x) * below(x) ** -3) == quotient * below(x) ** -2


def test_a_parameter_that_is_nan_is_seen_beyond_a_step():
    """A step hides exponentials that are infinite, but no mistake."""
    potential = PairPotential("step(6 - r)*a*exp(exp(k*r))", (), ("a", "k"))
    x = torch.tensor([[0.0, 0.0, 0.0], [9.0, 0.0, 0.0]])
    for a, k in ((2.0, torch.nan), (torch.nan, 2.0), (2.0, 2.0)):
        energies, forces = potential(x, neighbor_list=torch.tensor([[0, 1], [1, 0]]), a=a, k=k, compute_forces=True)
        for found in (energies, forces[:, 0]):
            assert found.eq(0.0).all() if a == k else found.isnan().all()


def test_products_of_powers_of_hyperbolic_functions_stay_short():
    """Each is one exponential and a factor; as sums, products of them had products of their numbers of terms."""
    formula = Formula("1/(1 + cosh(0.3*x)^6*cosh(x^2)^2); x = 2*(r - 5)")
    program = printed(derivatives(Request(formula, ("r",), "r")))
    assert len(program.of_pair) < 150  # 357
