"""Elementary and special functions as C++ for generated kernels; on a CPU, for vectors of numbers (`lanes_of`).

Warp compiles kernels for the CPU without automatic vectorisation, and calls the C library for each number. Here, `exp`,
`sqrt` and the error functions work on vectors; the other functions call the library for each number. On a GPU, where
each thread evaluates one pair, all functions are those of CUDA.

The C++ defines the types ``lanes`` (a value for each of several pairs), ``condition`` (the result of comparing two
``lanes``), ``one`` (a value shared by all pairs) and, on a CPU, ``doubles`` (as many float64 numbers, for sums over
pairs), and a function ``<name>_lanes`` for each requested name.

``lower_gamma(a, x)`` is ``x^-a γ(a, x)``, a form of the incomplete gamma function that is smooth at zero, for x >= 0
and positive integers and half-integers a. It is a series of positive terms up to x = 80, and ``x^-a Γ(a)`` beyond,
where the difference is less than rounding.

``scaled_erfc(x)`` is ``erfcx(x) = exp(x^2) erfc(x)`` for x >= 0.

Relative accuracy on the CPU, in units of 1e-16 (float32: 6e-8): exp 3.5; erfcx 4.5. ``erfc(x)`` is ``exp(-x^2)
erfcx(x)``, in which the relative rounding error of x^2 is multiplied by x^2. The force needs the same exponential, so
`erfc_from` and `erf_from` take it as an argument.

Coefficients are those of Chebyshev interpolation, converted to powers (`tests/values/test_special_functions.py`
computes them again). The variable (x - K)/(x + K), which maps all x >= 0 to a finite interval, is that of
M. M. Shepherd and J. G. Laframboise, Math. Comp. 36, 249 (1981), doi:10.1090/S0025-5718-1981-0595058-X.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nvalchemiops.kernels.native import filled
from nvalchemiops.kernels.simd import lanes_of

ERFCX_CENTER = 3.0
"""K in the variable t = (x - K)/(x + K)."""


class Arithmetic(NamedTuple):
    """Constants of the functions in one precision. Polynomials are given by the coefficients of increasing powers.

    Attributes
    ----------
    erfcx : tuple of float
        (1 + 2x) exp(x^2) erfc(x) for x >= 0, in powers of t.
    erf : tuple of float
        erf(x) / x for 0 <= x <= 1, in powers of x^2.
    exp : tuple of float
        exp(x) for |x| <= log(2) / 2, in powers of x.
    low, high : float
        Where exp(x) begins to be 0, and ends to be a number.
    two_parts : (float, float)
        log(2) as a number with few bits, so that its products with exponents are exact, and the rest.
    mantissa, bias : int
        Number of stored bits of a mantissa, and one less than the bias of exponents.
    large : float
        Numbers whose square is a number with room to spare.
    """

    erfcx: tuple[float, ...]
    erf: tuple[float, ...]
    exp: tuple[float, ...]
    low: float
    high: float
    two_parts: tuple[float, float]
    mantissa: int
    bias: int
    large: float


# fmt: off
ARITHMETIC = {
    "float64": Arithmetic(
        erfcx=(
            1.2530080582697296, -0.13562110612458117, -0.04756229435342038, 0.1296451587027594,
            -0.11927366341676002, 0.0683080273440099, -0.023770514891530075, 0.0025293918156939696,
            0.0018886900977441495, -0.0007798322696543306, -0.00010515831297813128, 0.0001250993424583729,
            4.94412434222366e-06, -2.0100542268525612e-05, -7.187883834404266e-07, 3.472370944977168e-06,
            3.3669790806407595e-07, -6.166011460398726e-07, -1.205414228648938e-07, 1.0183620603842736e-07,
            2.7843881265502222e-08, -1.3312919661038687e-08, -3.1813541434969274e-09, 9.862533510345587e-10,
        ),
        erf=(
            1.1283791670955126, -0.3761263890318375, 0.11283791670954882, -0.026866170645077334,
            0.005223977624823223, -0.0008548326981129666, 0.00012055331122299266, -1.4925595519506043e-05,
            1.6461004480962034e-06, -1.6350354461959655e-07, 1.4660051998394848e-08, -1.1373902296430911e-09,
            5.958930743134941e-11,
        ),
        exp=(
            1.0, 1.0, 0.5000000000000019, 0.16666666666666702,
            0.04166666666648808, 0.008333333333309526, 0.0013888888952318045, 0.00019841269909219843,
            2.480148547921643e-05, 2.755722495611072e-06, 2.7632640675430235e-07, 2.5114870219497476e-08,
        ),
        low=-708.0, high=709.78, two_parts=(0.6931471803691238, 1.9082149292705877e-10),
        mantissa=52, bias=1022, large=1e100,
    ),
    "float32": Arithmetic(
        erfcx=(
            1.253008056, -0.1356211001, -0.04756215615, 0.1296447209, -0.1192752814, 0.06831319672,
            -0.0237635597, 0.002506778672, 0.001875060246, -0.0007340820504, -9.253769126e-05, 8.007454975e-05,
        ),
        erf=(
            1.128379166, -0.3761262667, 0.1128359472, -0.02685421201, 0.005189087423, -0.0008016864287,
            7.875875063e-05,
        ),
        exp=(1.0, 1.000000038, 0.5000000047, 0.1666641551, 0.0416663529, 0.008375126398, 0.001394110843),
        low=-86.9, high=88.72, two_parts=(0.693359375, -2.1219444005469057e-04),
        mantissa=23, bias=126, large=1e18,
    ),
}
# fmt: on
"""The constants by precision."""


def _polynomial(coefficients: Sequence[float], x: str) -> str:
    """C++ for a polynomial: Horner's rule for even and odd powers of ``x`` separately, which run in parallel.

    The variable ``square`` must hold the square of ``x``. Products and sums are fused: Warp compiles without, and the
    chain of operations is what a pair waits for.
    """
    chains = []
    for part in (coefficients[::2], coefficients[1::2]):
        text = f"lanes({part[-1]!r})"
        for c in reversed(part[:-1]):
            text = f"__builtin_elementwise_fma({text}, square, lanes({c!r}))"
        chains.append(text)
    return f"__builtin_elementwise_fma({chains[1]}, {x}, {chains[0]})"


_EXP = """
    const auto exp_lanes = [](lanes x) {
        // 2^n exp(y) with |y| <= log(2) / 2; beyond the ends 0 and infinity, and a NaN stays one
        const lanes inside = x < @low@ ? lanes(@low@) : x > @high@ ? lanes(@high@) : x;
        // added to this number, n stands in the last bits
        const one shift = @shift@;
        union { lanes value; condition bits; } sum = {inside * one(1.4426950408889634) + shift}, scale;
        const lanes n = sum.value - shift;
        const lanes y = (inside - n * one(@most_of_log_2@)) - n * one(@rest_of_log_2@);
        scale.bits = (sum.bits + @bias@) << @mantissa@;  // 2^(n - 1): 2^1024 is no number
        const lanes square = y * y, value = @exp@ * scale.value * one(2.0);
        return x < @low@ ? lanes(0.0) : x > @high@ ? lanes(__builtin_inf()) : value;
    };
"""

_ERFCX = """
    const auto erfcx_lanes = [](lanes x) {  // for x >= 0
        x = x > @large@ ? lanes(@large@) : x;  // its square must be a number
        const lanes twice = one(1.0) + one(2.0) * x, share = one(1.0) / ((x + one(@center@)) * twice);
        const lanes t = (x - one(@center@)) * twice * share, square = t * t;
        return @erfcx@ * (x + one(@center@)) * share;
    };
"""

_ERFC_FROM = """
    const auto erfc_from_lanes = [=](lanes x, lanes exponential) {
        const lanes tail = erfcx_lanes(x < 0.0 ? -x : x) * exponential;
        return x < 0.0 ? one(2.0) - tail : tail;
    };
"""

_ERF_FROM = """
    const auto erf_from_lanes = [=](lanes x, lanes exponential) {
        const lanes size = x < 0.0 ? -x : x, y = x * x, square = y * y;
        const lanes far = one(1.0) - erfcx_lanes(size) * exponential;
        return size < 1.0 ? x * @erf@ : x < 0.0 ? -far : far;
    };
"""

_SCALED_ERFC = """
    const auto scaled_erfc_lanes = erfcx_lanes;
    const auto scaled_erfc_one = [=](one x) {
        const lanes values = erfcx_lanes(lanes(x));
        return static_cast<one>(values[0]);
    };
"""

_BY_LIBRARY = ("log", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh")

_VECTOR_TYPES = """
    typedef @one@ one;
    typedef one lanes __attribute__((ext_vector_type(@lanes@)));
    typedef double doubles __attribute__((ext_vector_type(@lanes@)));
    typedef decltype(lanes(0.0) < lanes(0.0)) condition;
    const auto sqrt_lanes = [](lanes x) { return __builtin_elementwise_sqrt(x); };
    const auto exp_one = [](one x) { return wp::exp(x); };
    const auto sqrt_one = [](one x) { return wp::sqrt(x); };
    const auto pow_one = [](one x, one y) { return wp::pow(x, y); };
    const auto erfc_from_one = [](one x, one) { return wp::erfc(x); };
    const auto erf_from_one = [](one x, one) { return wp::erf(x); };
"""

_LOWER_GAMMA = """
    const auto lower_gamma_number = [=](auto a, auto x) {
        typedef decltype(x) number;
        if (!(x <= number(80))) {
            // Γ(a) x^-a for a half of a whole number; also for NaN
            number value = wp::pow(x, -a), at = wp::floor(a);
            at = a - at > number(0.25) ? number(0.5) : number(1);
            if (at < number(0.75)) value *= number(1.772453850905516);
            for (; at < a - number(0.25); at += number(1)) value *= at;
            return value;
        }
        number term = number(1) / a, sum = term;
        for (int n = 1; n < 400 && term > number(1e-17) * sum; ++n) {
            term *= x / (a + number(n));
            sum += term;
        }
        return sum * wp::exp(-x);
    };
    const auto lower_gamma_one = [=](one a, one x) { return lower_gamma_number(a, x); };
"""

_NEEDS = {"erfc_from": ("exp", "erfcx"), "erf_from": ("exp", "erfcx"), "scaled_erfc": ("erfcx",)}
_VECTOR = {"exp": _EXP, "erfcx": _ERFCX, "erfc_from": _ERFC_FROM, "erf_from": _ERF_FROM, "sqrt": ""}
_VECTOR["scaled_erfc"] = _SCALED_ERFC


def _one_by_one(name: str, function: str, *arguments: str) -> str:
    """C++ for a function of vectors that calls ``function`` for each number."""
    vectors = ", ".join(f"lanes {a}" for a in arguments)
    numbers = ", ".join(f"static_cast<one>({a}[l])" for a in arguments)
    return f"""
    const auto {name}_lanes = [=]({vectors}) {{
        lanes result;
        for (int l = 0; l < @lanes@; ++l) result[l] = {function}({numbers});
        return result;
    }};
"""


_VECTOR["pow"] = _one_by_one("pow", "wp::pow", "x", "y")
_VECTOR["lower_gamma"] = _LOWER_GAMMA + _one_by_one("lower_gamma", "lower_gamma_number", "a", "x")
for _name in _BY_LIBRARY:
    _VECTOR[_name] = f"""
    const auto {_name}_one = [](one x) {{ return wp::{_name}(x); }};
{_one_by_one(_name, f"wp::{_name}", "x")}"""


_SCALAR_TYPES = """
    typedef real one;
    typedef one lanes;
    typedef bool condition;
    const auto sqrt_one = [](one x) { return ::sqrt(x); };
    const auto exp_one = [](one x) { return ::exp(x); };
    const auto pow_one = [](one x, one y) { return ::pow(x, y); };
    const auto erfc_from_one = [](one x, one exponential) {
        return x < one(0) ? one(2) - ::erfcx(-x) * exponential : ::erfcx(x) * exponential;
    };
    const auto erf_from_one = [](one x, one) { return ::erf(x); };
    const auto sqrt_lanes = sqrt_one;
    const auto exp_lanes = exp_one;
    const auto pow_lanes = pow_one;
    const auto erfc_from_lanes = erfc_from_one;
    const auto erf_from_lanes = erf_from_one;
"""


def vector_functions(names: Iterable[str], precision: str) -> str:
    """C++ for the types and for the functions of these names, for vectors of numbers on the CPU."""
    wanted: list[str] = []
    for name in names:
        wanted += [n for n in (*_NEEDS.get(name, ()), name) if n not in wanted]
    constants = ARITHMETIC[precision]
    most, rest = constants.two_parts
    values = {
        "one": {"float32": "float", "float64": "double"}[precision],
        "lanes": lanes_of(precision),
        "center": ERFCX_CENTER,
        "shift": 1.5 * 2.0**constants.mantissa,
        "most_of_log_2": most,
        "rest_of_log_2": rest,
        "erfcx": _polynomial(constants.erfcx, "t"),
        "erf": _polynomial(constants.erf, "y"),
        "exp": _polynomial(constants.exp, "y"),
    }
    return filled(_VECTOR_TYPES + "".join(_VECTOR[name] for name in wanted), **constants._asdict() | values)


def scalar_functions(names: Iterable[str]) -> str:
    """The same as `vector_functions` for single numbers of the C type ``real`` on a GPU, which the caller defines."""
    names = list(names)
    text = _SCALAR_TYPES
    if "lower_gamma" in names:
        text += f"{_LOWER_GAMMA}    const auto lower_gamma_lanes = lower_gamma_one;\n"
    for name in names:
        if name in _BY_LIBRARY or name == "scaled_erfc":
            function = "erfcx" if name == "scaled_erfc" else name
            text += f"    const auto {name}_one = [](one x) {{ return ::{function}(x); }};\n"
            text += f"    const auto {name}_lanes = {name}_one;\n"
    return text


FUNCTIONS = frozenset(_VECTOR)
"""Names of the functions that `vector_functions` and `scalar_functions` provide."""
