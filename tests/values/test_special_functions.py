"""Elementary and special functions of the generated kernels: their coefficients, and how accurate they are.

The coefficients are computed again from the definitions with 60 digits. The accuracy is that of a pair potential whose
distance, or a parameter, is the argument; the exact values are those of mpmath for the same argument.
"""

import functools

import mpmath
import pytest
import torch

from nvalchemiops.kernels import special
from nvalchemiops.torch.interactions.pair import PairPotential

UNITS = {torch.float64: 1e-16, torch.float32: 6e-8}
DOUBLE, SINGLE = special.ARITHMETIC["float64"], special.ARITHMETIC["float32"]
INF, NAN = float("inf"), float("nan")


def interpolated(function, low, high, count):
    """Coefficients, in powers, of the Chebyshev interpolation of a function with ``count`` nodes on an interval."""
    middle, half = (mpmath.mpf(high) + low) / 2, (mpmath.mpf(high) - low) / 2
    angles = [mpmath.pi * (k + mpmath.mpf(1) / 2) / count for k in range(count)]
    values = [function(middle + half * mpmath.cos(angle)) for angle in angles]
    series = [2 * sum(v * mpmath.cos(n * a) for v, a in zip(values, angles)) / count for n in range(count)]
    series[0] /= 2
    # powers of u = (x - middle)/half from T_n = 2 u T_(n-1) - T_(n-2), then of x
    before, now, powers = [mpmath.mpf(1)], [mpmath.mpf(0), mpmath.mpf(1)], [mpmath.mpf(0)] * count
    for coefficient in series:
        powers = [p + coefficient * (before[k] if k < len(before) else 0) for k, p in enumerate(powers)]
        following = [mpmath.mpf(0), *(2 * c for c in now)]
        before, now = now, [c - (before[k] if k < len(before) else 0) for k, c in enumerate(following)]
    result = [mpmath.mpf(0)] * count
    for n, p in enumerate(powers):
        for k in range(n + 1):
            result[k] += p / half**n * mpmath.binomial(n, k) * (-middle) ** (n - k)
    return result


def erfcx_of_t(t):
    """(1 + 2x) exp(x^2) erfc(x) at x = K (1 + t)/(1 - t)."""
    x = special.ERFCX_CENTER * (1 + t) / (1 - t)
    return (1 + 2 * x) * mpmath.exp(x * x) * mpmath.erfc(x)


def erf_of_square(y):
    root = mpmath.sqrt(y)
    return mpmath.erf(root) / root


@pytest.mark.parametrize(
    ("name", "function", "low", "high"),
    [
        ("erfcx", erfcx_of_t, "-1", "1"),
        ("erf", erf_of_square, "0", "1"),
        ("exp", mpmath.exp, "-log(2)/2", "log(2)/2"),
    ],
    ids=["erfcx", "erf", "exp"],
)
@pytest.mark.parametrize(("constants", "tolerance"), [(DOUBLE, 1e-16), (SINGLE, 1e-9)], ids=["float64", "float32"])
def test_coefficients_are_those_of_chebyshev_interpolation(constants, tolerance, name, function, low, high):
    """The stored polynomial is the interpolating one; the powers themselves are known to fewer digits."""
    stored = getattr(constants, name)
    with mpmath.workdps(60):
        low, high = ({"log(2)/2": mpmath.log(2) / 2, "-log(2)/2": -mpmath.log(2) / 2}.get(e, e) for e in (low, high))
        low, high = mpmath.mpf(low), mpmath.mpf(high)
        expected = interpolated(function, low, high, len(stored))
        difference = [mpmath.mpf(found) - exact for found, exact in zip(stored, expected, strict=True)][::-1]
        points = [low + (high - low) * k / 300 for k in range(301)]
        assert max(abs(mpmath.polyval(difference, x)) for x in points) <= tolerance


@functools.cache
def potential(text):
    return PairPotential(text, (), ("x",))


def of(text, x):
    """The function of a global parameter x, for many values at once."""
    x = x if torch.is_tensor(x) else torch.tensor(x, dtype=torch.float64)
    n = x.shape[0]
    i = torch.arange(2 * n, dtype=torch.int32)
    positions = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=x.dtype).repeat(n, 1)
    return potential(text)(
        positions,
        neighbor_list=torch.stack([i, i ^ 1]),
        batch_idx=i // 2,
        num_systems=n,
        x=x,
        energy_reduction="system",
    )


def errors(text, function, x):
    """Relative errors, in units of rounding, of a function that pairs evaluate in vectors."""
    found = of(text, x)
    with mpmath.workdps(40):
        exact = [function(mpmath.mpf(v)) for v in x.tolist()]
        return torch.tensor([float(abs(mpmath.mpf(f) / e - 1)) for f, e in zip(found.tolist(), exact)]) / UNITS[x.dtype]


def spread(low, high, count=3000, dtype=torch.float64):
    at = torch.linspace(low, high, count, dtype=torch.float64) + 1e-3 * torch.rand(
        count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ) * (high - low)
    return at.to(dtype)


# r is 1 for every pair: it keeps the argument from being common to all of them, so that vectors are used
EXP, ERFC, ERF = "exp(x*r)", "erfc(x*r)", "erf(x*r)"


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (-0.34, 0.34, torch.float64),
        (-30.0, 30.0, torch.float64),
        (-707.0, 708.0, torch.float64),
        (-0.34, 0.34, torch.float32),
        (-86.0, 88.0, torch.float32),
    ],
)
def test_exp(low, high, dtype):
    assert errors(EXP, mpmath.exp, spread(low, high, dtype=dtype)).max() <= 3.5


def test_exp_near_its_halves_of_a_power_of_two():
    x = (torch.arange(-900, 900, dtype=torch.float64) + 0.5) * 0.6931471805599453
    x = torch.cat([x, x.nextafter(torch.tensor(INF)), x.nextafter(torch.tensor(-INF))])
    x = x[(x > -707.0) & (x < 709.0)]
    assert errors(EXP, mpmath.exp, x).max() <= 3.5


def test_limits_of_exp_in_float32():
    found = of(EXP, torch.tensor([0.0, 88.7, 88.8, 1e30, INF, -87.0, -120.0, -1e30, -INF, NAN], dtype=torch.float32))
    assert found[0].item() == 1.0
    assert found[1].item() == pytest.approx(float(mpmath.exp(mpmath.mpf(float(torch.tensor(88.7))))), rel=3e-7)
    assert found[2:5].tolist() == [INF] * 3
    assert found[5:9].tolist() == [0.0] * 4
    assert found[9].isnan()


def test_limits_of_the_error_functions_in_float32():
    x = torch.tensor([0.0, -0.0, 10.0, 1e12, 3e38, INF, -5.0, -1e12, -3e38, -INF, NAN], dtype=torch.float32)
    assert of(ERFC, x)[:10].tolist() == pytest.approx([1.0, 1.0, *[0.0] * 4, *[2.0] * 4], rel=3e-7, abs=1e-37)
    assert of(ERF, x)[:10].tolist() == [0.0, 0.0, *[1.0] * 4, *[-1.0] * 4]
    assert of(ERFC, x)[10].isnan() and of(ERF, x)[10].isnan()


def test_limits_of_exp():
    x = [0.0, -0.0, 709.7, 709.79, 800.0, 1e300, INF, -709.0, -750.0, -1e300, -INF, NAN]
    found = of(EXP, x)
    assert found[:2].tolist() == [1.0, 1.0]
    assert found[2].item() == pytest.approx(float(mpmath.exp(709.7)), rel=1e-14)
    assert found[3:7].tolist() == [INF] * 4
    assert found[7].item() <= 1e-307  # without denormal numbers
    assert found[8:11].tolist() == [0.0] * 3
    assert found[11].isnan()


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        *((low, high, torch.float64) for low, high in [(0.0, 1.0), (1.0, 6.0), (6.0, 26.4), (-1.0, 0.0), (-7.0, -1.0)]),
        *((low, high, torch.float32) for low, high in [(0.0, 1.0), (1.0, 9.0), (-1.0, 0.0), (-7.0, -1.0)]),
    ],
)
def test_erfc(low, high, dtype):
    """Within what erfcx and exp promise, and the rounding of x^2, which the exponential amplifies by x^2."""
    x = spread(low, high, dtype=dtype)
    bound = 4.5 + 2.5 + 1.2 * x.abs().clamp(min=1.0) ** 2
    found = errors(ERFC, mpmath.erfc, x)
    assert (found <= bound).all(), (found / bound).max()


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("erfc(6 - x*r)", lambda v: mpmath.erfc(6 - v)),
        ("erfc(7 - x*r) - erfc(6 - x*r)", lambda v: mpmath.erfc(7 - v) - mpmath.erfc(6 - v)),
    ],
)
def test_erfc_of_a_falling_argument_keeps_its_digits(text, function):
    """sympy makes 2 - erfc(x - 6) of it."""
    x = spread(0.0, 5.0, 100)
    found = errors(text, function, x)
    assert (found <= 7.0 + 3.5 * (6.0 - x) ** 2).all(), found.max()


@pytest.mark.parametrize("text", ["exp((x*r)^2)*erfc(x*r)"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 3.0), (3.0, 1e9), (-4.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scaled_erfc(low, high, dtype, text):
    """Where erfc is zero, too, and the exponential infinite; below zero the exponential is that of a rounded square."""
    x = spread(low, high, 300, dtype)
    found = errors(text, lambda v: mpmath.exp(v * v) * mpmath.erfc(v), x)
    assert (found <= 6.0 + 3.0 * x.clamp(max=0.0) ** 2).all(), found.max()


@pytest.mark.parametrize(("low", "high"), [(-1e-3, 1e-3), (0.0, 1.0), (0.9, 1.1), (1.0, 6.0), (-6.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_erf(low, high, dtype):
    x = spread(low, high, dtype=dtype)
    assert errors(ERF, mpmath.erf, x[x != 0.0]).max() <= 9.0


@pytest.mark.parametrize("exponent", [-300, -160, -20, -9, -8])
def test_erf_of_tiny_arguments_keeps_its_digits(exponent):
    x = torch.tensor([1.234, -5.678], dtype=torch.float64) * 10.0**exponent
    assert errors(ERF, mpmath.erf, x).max() <= 4.0


def test_limits_of_the_error_functions():
    x = [0.0, -0.0, 27.3, 40.0, 1e10, 1e200, INF, -7.0, -40.0, -1e200, -INF, NAN]
    found = of(ERFC, x)
    assert found[:2].tolist() == pytest.approx([1.0, 1.0], rel=4.5e-16)
    assert found[2:7].tolist() == [0.0] * 5
    assert found[7:11].tolist() == [2.0] * 4
    assert found[11].isnan()
    found = of(ERF, x)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2:7].tolist() == [1.0] * 5
    assert found[7:11].tolist() == [-1.0] * 4
    assert found[11].isnan()


def test_erf_and_erfc_add_up_to_one():
    x = spread(-6.0, 6.0)
    torch.testing.assert_close(of(ERF, x) + of(ERFC, x), torch.ones_like(x), rtol=0, atol=3e-15)


def test_functions_of_what_all_pairs_share_are_the_same():
    """erfc(x) of a parameter goes to the C library."""
    x = spread(-3.0, 6.0, 200)
    torch.testing.assert_close(of("r*erfc(x)", x), of(ERFC, x), rtol=2e-14, atol=0)
    torch.testing.assert_close(of("r*erf(x)", x), of(ERF, x), rtol=2e-14, atol=0)
    torch.testing.assert_close(of("r*exp(x)", x), of(EXP, x), rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_number_has_the_same_value_in_every_lane(dtype):
    """Rows of one to 35 neighbors: wherever a pair stands in a vector, its energy has the same bits."""
    x = torch.tensor([0.7], dtype=dtype)
    one = of(ERFC, x).item()
    for n in range(1, 36):
        positions = torch.zeros(n + 1, 3, dtype=dtype)
        positions[1:, 0] = 1.0
        around = torch.stack([torch.zeros(n, dtype=torch.int32), torch.arange(1, n + 1, dtype=torch.int32)])
        back = around.flip(0)
        energies = potential(ERFC)(positions, neighbor_list=torch.cat([around, back], dim=1), x=x)
        assert energies[1:].tolist() == [0.5 * one] * n
        assert energies[0].item() == pytest.approx(0.5 * n * one, rel=torch.finfo(dtype).eps)
