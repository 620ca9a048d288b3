"""The pinned arithmetic against real numbers: error bounds of the functions, exactness of the integers.

The figures in the docstrings of ``numerics`` are measured over every float32 input by the slow tests and committed in
``tests/results/numerics.json``, which ``python tests/test_numerics.py`` writes anew (three minutes).
"""

from __future__ import annotations

import bisect
import importlib.util
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import draftproof
from draftproof._arrays import NumpyArrays as xp
from draftproof._arrays import namespace
from draftproof.numerics import constants
from draftproof.numerics.draws import fixed_point, fixed_point_of_uniform, inverse_cdf, race_keys
from draftproof.numerics.exp2 import exp2, exponent, scale
from draftproof.numerics.log2 import log2
from draftproof.numerics.masses import masses, probabilities, probability_masses, residual_masses, theta
from draftproof.numerics.noise import exponential, uniform
from draftproof.numerics.polynomial import split

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "numerics.json"
CHUNK = 1 << 20
each_library = pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])

# The ends of the exhaustive runs, as float32 bits of |t| and x. Below 2**-27 the result is 1: the term added to 1 is
# less than half a unit in the last place below 1, which is 2**-25.
EXP2_BITS = (int(np.float32(2.0**-27).view(np.int32)), int(np.float32(40.0).view(np.int32)) + 1)
LOG2_BITS = (int(np.float32(2.0**-40).view(np.int32)), int(np.float32(2.0**22).view(np.int32)))


def floats(bits: Any) -> Any:
    return np.asarray(bits).astype(np.int32).view(np.float32)


def consecutive(start: int, stop: int) -> Iterator[Any]:
    return (np.arange(low, min(low + CHUNK, stop)) for low in range(start, stop, CHUNK))


def around(values: Iterable[float], width: int, limits: tuple[int, int]) -> Iterator[Any]:
    """Yield the bits of all floats within ``width`` places of each value, inside the limits."""
    for value in values:
        centre = int(np.float32(value).view(np.int32))
        yield np.arange(max(limits[0], centre - width), min(limits[1], centre + width))


# --- what is measured -------------------------------------------------------------------------------------------------


def measure_exp2(runs: Iterable[Any]) -> dict[str, Any]:
    """Measure ``exp2(-x)`` on runs of ascending bits of x; rises are counted within a run and across runs."""
    inputs, worst, at, rises, lowest_rise, step, excess = 0, 0.0, 0.0, 0, 0.0, 0, 0
    last = least = int(np.float32(1.0).view(np.int32))
    for run in runs:
        t = -floats(run)
        weight = exp2(xp, t)
        error = np.abs(weight.astype(np.float64) / np.exp2(t.astype(np.float64)) - 1)
        if error.max() > worst:
            worst, at = float(error.max()), float(t[error.argmax()])
        bits = np.concatenate([[last], weight.view(np.int32)])
        up = np.diff(bits)
        rises, step = rises + int((up > 0).sum()), max(step, int(up.max()))
        lowest_rise = float(t[up > 0].min(initial=lowest_rise))
        lowest = np.minimum.accumulate(np.minimum(bits, least))
        excess = max(excess, int((bits - lowest).max()))
        inputs, last, least = inputs + run.size, int(bits[-1]), int(lowest[-1])
    return {
        "inputs": inputs,
        "relative_error": worst,
        "worst_at": at,
        "rises": rises,
        "lowest_rise_at": lowest_rise,
        "largest_rise_ulp": step,
        "largest_excess_over_a_larger_t_ulp": excess,
    }


def measure_log2(runs: Iterable[Any]) -> dict[str, Any]:
    inputs, relative, absolute, at = 0, 0.0, 0.0, 0.0
    for run in runs:
        x = floats(run)
        x = x[x != 1.0]
        real = np.log2(x.astype(np.float64))
        error = np.abs(log2(xp, x).astype(np.float64) - real)
        absolute, share = max(absolute, float(error.max())), error / np.abs(real)
        if share.max() > relative:
            relative, at = float(share.max()), float(x[share.argmax()])
        inputs += run.size
    return {"inputs": inputs, "relative_error": relative, "worst_at": at, "absolute_error": absolute}


def measure_exponential(runs: Iterable[Any]) -> dict[str, Any]:
    inputs, worst, at, smallest, largest = 0, 0.0, 0, math.inf, 0.0
    for word in runs:
        value = exponential(xp, word).astype(np.float64)
        error = np.abs(value / -np.log1p(-uniform(xp, word).astype(np.float64)) - 1)
        if error.max() > worst:
            worst, at = float(error.max()), int(word[error.argmax()])
        smallest, largest = min(smallest, float(value.min())), max(largest, float(value.max()))
        inputs += word.size
    return {"inputs": inputs, "relative_error": worst, "worst_at": at, "smallest": smallest, "largest": largest}


def distinct_words() -> Iterator[Any]:
    """Yield one word for every distinct float32 of a word, hence for every distinct uniform."""
    yield from consecutive(0, 1 << 24)
    for shift in range(1, 9):
        yield from (run << shift for run in consecutive(1 << 23, 1 << 24))
    yield np.array([(1 << 32) - 1])


MEASUREMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "exp2": lambda: measure_exp2(consecutive(*EXP2_BITS)),
    "log2": lambda: measure_log2(consecutive(*LOG2_BITS)),
    "exponential": lambda: measure_exponential(distinct_words()),
}
COMMITTED = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_exhaustive_figures_are_the_committed_ones(name: str) -> None:
    # The real logarithms are the C library's in float64: their last bit moves the error by 1e-9 of itself.
    assert MEASUREMENTS[name]() == pytest.approx(COMMITTED[name], rel=1e-6)


@pytest.mark.parametrize(
    ("function", "figure"),
    [
        (exp2, COMMITTED["exp2"]["relative_error"]),
        (log2, COMMITTED["log2"]["relative_error"]),
        (exponential, COMMITTED["exponential"]["relative_error"]),
    ],
    ids=MEASUREMENTS,
)
def test_docstring_states_the_measured_error(function: Any, figure: float) -> None:
    stated = float(re.search(r"[Rr]elative error at most (\d\.\d+e-\d+)", function.__doc__)[1])
    assert figure <= stated < 1.01 * figure


# --- the functions, on a dense part of what the slow tests exhaust ----------------------------------------------------


def test_exp2_error_on_every_octave_and_edge() -> None:
    # Whole and half numbers: where the power of two and the polynomial's branch change. Powers of two: the spacing.
    edges = [*np.arange(0.5, 40.5, 0.5), *(2.0**k for k in range(-26, 6))]
    stride = np.arange(EXP2_BITS[0], EXP2_BITS[1], 523)
    result = measure_exp2([stride])
    assert result["relative_error"] <= COMMITTED["exp2"]["relative_error"]
    assert result["largest_excess_over_a_larger_t_ulp"] <= 1
    near = measure_exp2(around(sorted(set(edges)), 2000, EXP2_BITS))
    assert near["relative_error"] <= COMMITTED["exp2"]["relative_error"]
    assert near["largest_excess_over_a_larger_t_ulp"] <= 1


def test_exp2_is_exact_on_whole_numbers_and_one_near_zero() -> None:
    whole = -np.arange(41, dtype=np.float32)
    assert exp2(xp, whole).tolist() == [2.0**-n for n in range(41)]
    tiny = -floats(np.append(np.arange(0, EXP2_BITS[0], 1021), EXP2_BITS[0]))
    assert (exp2(xp, tiny) == 1.0).all()


def test_exp2_is_zero_below_the_cut_and_for_nan() -> None:
    below = np.nextafter(np.float32(-40.0), np.float32(-41.0))
    with np.errstate(invalid="ignore"):
        t = np.array([below, -1e30, -np.inf, np.nan], dtype=np.float32)
        assert exp2(xp, t).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_log2_error_on_every_octave_and_edge() -> None:
    worst = COMMITTED["log2"]["relative_error"]
    assert measure_log2([np.arange(LOG2_BITS[0], LOG2_BITS[1], 1021)])["relative_error"] <= worst
    edges = sorted(m * 2.0**k for k in range(-40, 22) for m in (1.0, 1.5))
    assert measure_log2(around(edges, 500, LOG2_BITS))["relative_error"] <= worst


def test_log2_of_all_other_positive_floats_and_of_powers_of_two() -> None:
    bits = np.concatenate([np.arange(1, LOG2_BITS[0], 2003), np.arange(LOG2_BITS[1], 0x7F800000, 2003)])
    powers = np.arange(-149, 128)
    with np.errstate(over="ignore"):
        assert measure_log2([bits])["relative_error"] <= COMMITTED["log2"]["relative_error"]
        assert log2(xp, np.ldexp(np.float32(1.0), powers).astype(np.float32)).tolist() == powers.tolist()


def test_exponential_error_on_a_dense_part_of_the_words() -> None:
    low = np.arange(0, 1 << 16)
    result = measure_exponential([low, np.arange(0, 1 << 32, 4099), (1 << 32) - 1 - low, low << 16])
    assert result["relative_error"] <= COMMITTED["exponential"]["relative_error"]
    assert result["smallest"] == pytest.approx(2.0**-33, rel=1e-9)
    assert result["largest"] == COMMITTED["exponential"]["largest"] < 16.64


def test_uniform_is_inside_the_unit_interval_and_monotone() -> None:
    words = np.concatenate([np.arange(0, 1 << 16), np.arange(1 << 16, (1 << 32) - 1, 65537), [(1 << 32) - 1]])
    u = uniform(xp, words)
    assert u.dtype == np.float32
    assert u[0] == 2.0**-33
    assert u[-1] == 1 - 2.0**-24
    assert (np.diff(u) >= 0).all()
    # 24 bits of k + 1/2, rounded to nearest; the words that round to 2**32 take the float below.
    middle = words[words < (1 << 32) - 128]
    assert np.abs(uniform(xp, middle).astype(np.float64) * 2.0**32 - middle - 0.5).max() <= 128.5


def test_split_is_exact() -> None:
    x = floats(np.arange(0x00800000, 0x7F800000, 1009))
    e, f = split(xp, x)
    assert (np.ldexp(1.0 + f.astype(np.float64), e.astype(np.int64)) == x).all()
    assert ((f >= -0.25) & (f < 0.5)).all()


# --- constants --------------------------------------------------------------------------------------------------------


def test_constants_are_float32_and_what_they_are_called() -> None:
    for value in (constants.LOG2E, constants.LN2, *constants.EXP2, *constants.LOG1P, *constants.LOG2):
        assert float(np.float32(value)) == value
    assert np.float32(constants.LOG2E) == np.float32(1 / math.log(2))
    assert np.float32(constants.LN2) == np.float32(math.log(2))
    assert np.finfo(np.float32).max == constants.FLT_MAX
    assert np.float32(constants.MAX_UNIFORM) == np.nextafter(np.float32(1.0), np.float32(0.0))


@pytest.mark.parametrize("name", ["EXP2", "LOG1P", "LOG2"])
def test_polynomials_are_derived_by_the_script(name: str) -> None:
    spec = importlib.util.spec_from_file_location("fit_constants", ROOT / "docs" / "fit_constants.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    fitted = np.array(script.fit(script.TARGETS[name]), dtype=np.float32)
    places = fitted.view(np.int32) - np.array(getattr(constants, name), dtype=np.float32).view(np.int32)
    # Another LAPACK may round a coefficient the other way.
    assert np.abs(places).max() <= 1


# --- weights and masses -----------------------------------------------------------------------------------------------


def test_scale_and_exponent() -> None:
    temperatures = np.array([1.0, 0.7, 1e30, 1e-30, 1e-39], dtype=np.float32)
    with np.errstate(over="ignore"):
        factor = scale(xp, temperatures)
    assert factor[0] == constants.LOG2E
    assert factor[1] == np.float32(constants.LOG2E) / np.float32(0.7)
    assert factor[-1] == constants.FLT_MAX
    logits = np.array([[np.inf, np.inf, 0.0, -np.inf]], dtype=np.float32)
    with np.errstate(invalid="ignore"):
        assert exponent(xp, logits, xp.max(logits), factor[:1, None]).tolist() == [[0.0, 0.0, -np.inf, -np.inf]]
    rows = np.array([[3.0, 2.9, -4.0]], dtype=np.float32)
    expected = [(np.float32(v) - np.float32(3.0)) * factor[1] for v in rows[0]]
    assert exponent(xp, rows, xp.max(rows), factor[1:2, None])[0].tolist() == expected


def test_masses_are_the_weights_in_whole_units() -> None:
    t = -floats(np.arange(EXP2_BITS[0], EXP2_BITS[1], 1999))
    weight = np.concatenate([exp2(xp, t), [np.float32(0.0), np.float32(1.0), np.float32(2.0**-40)]])
    bits = weight.view(np.int32).astype(np.int64)
    # The same by shifting: how a backend without a float to int64 conversion forms them.
    significand, places = (bits & 0x7FFFFF) | 0x800000, 127 - (bits >> 23)
    shifted = np.where(bits == 0, 0, (significand << 17) >> np.minimum(places, 63))
    mass = masses(xp, weight)
    assert mass.dtype == np.int64
    assert (mass == shifted).all()
    assert ((mass == 0) == (weight == 0)).all()
    assert all(int(f) == math.floor(Fraction(float(w)) * 2**40) for f, w in zip(mass[::97], weight[::97], strict=True))
    lowest_set = mass & -mass
    assert (mass < lowest_set << 24).all() or (mass[mass > 0] // lowest_set[mass > 0] < 1 << 24).all()


def test_theta_is_the_share_rounded_up_less_the_slack() -> None:
    draw = random.Random(1)
    shares = [0.0, 1.0, 0.5, 0.8, 0.9, 0.95, 2.0**-30, 2.0**-31, 1e-45, *(draw.random() for _ in range(300))]
    totals = [1, 2**21 - 1, 2**21, 2**30, 2**40, 2**62 - 1, 2**62, *(draw.randrange(1, 2**62) for _ in range(100))]
    cases = list(itertools.product(shares, totals))
    top_p = np.array([p for p, _ in cases], dtype=np.float32)
    total = np.array([w for _, w in cases], dtype=np.int64)
    for p, w, kept in zip(top_p, total.tolist(), theta(xp, top_p, total).tolist(), strict=True):
        share = math.floor(Fraction(float(p)) * 2**30)
        assert kept == math.ceil(Fraction(share * w, 2**30)) - w // 2**21


def test_theta_of_decimal_probabilities_keeps_what_users_expect() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.2]], dtype=np.float32))
    mass = masses(xp, exp2(xp, exponent(xp, logits, xp.max(logits), np.full((1, 1), constants.LOG2E, np.float32))))
    limit = theta(xp, np.array([[0.8]], dtype=np.float32), xp.sum(mass))
    above = np.cumsum(mass) - mass[0]
    assert (above < limit[0]).tolist() == [True, True, False]


def test_probabilities_are_two_rounded_operations() -> None:
    draw = np.random.default_rng(2)
    mass = draw.integers(0, 1 << 40, size=(50, 40)) >> draw.integers(0, 40, size=(50, 40))
    total = xp.sum(mass)
    p = probabilities(xp, mass, total)
    assert p.dtype == np.float32
    assert (p == mass.astype(np.float32) * (np.float32(1.0) / total.astype(np.float32))).all()
    real = mass / total
    # f32(f) is exact for real masses; here three roundings and that of f itself.
    assert np.abs(p - real)[mass > 0].max() <= (4 * 2.0**-24 * real[mass > 0]).max()


def test_residual_masses_are_whole_and_stay_below_2_to_the_62() -> None:
    draw = np.random.default_rng(3)
    p, q = (draw.dirichlet(np.full(30, 0.3), size=40).astype(np.float32) for _ in range(2))
    for factor in (1.0, 0.375):
        rho = residual_masses(xp, factor, p, q)
        expected = [
            [math.floor(max(Fraction(float(np.float32(factor * a) - b)), 0) * 2**61) for a, b in zip(x, y, strict=True)]
            for x, y in zip(p, q, strict=True)
        ]
        assert rho.tolist() == expected
        assert (xp.sum(rho) < 2**62).all()
    assert not residual_masses(xp, 1.0, p, p).any()


@each_library
@pytest.mark.parametrize("largest", [1.0, 0.75, 2.0**-126, 2.0**-140, 2.0**-149, 3e38, 2.0**127, 1e-30])
def test_probability_masses_of_any_scale(largest: float, convert: Callable[[Any], Any]) -> None:
    draw = np.random.default_rng(4)
    top = np.float32(largest)
    rows = (draw.random((4, 60)) * 2.0 ** -draw.integers(0, 45, (4, 60)) * float(top)).astype(np.float32)
    rows[:, 7], rows[:, 8] = top, 0.0
    e = math.frexp(float(top))[1]
    expected = [[math.floor(Fraction(float(v)) * Fraction(2) ** (40 - e)) for v in row] for row in rows]
    library = namespace(convert(rows))
    assert probability_masses(library, convert(rows)).tolist() == expected
    assert not probability_masses(library, convert(np.zeros((2, 3), np.float32))).any()


def test_log_probabilities_within_the_stated_bound() -> None:
    draw = np.random.default_rng(7)
    for spread, temperature in ((0.5, 1.0), (6.0, 1.0), (3.0, 0.3)):
        logits = (draw.standard_normal((400, 300)) * spread).astype(np.float32)
        result = draftproof.sample_with_logprobs(logits, temperature=temperature, seed=np.arange(400))
        for found, divisor in ((result.logprobs, float(np.float32(temperature))), (result.raw_logprobs, 1.0)):
            scores = logits.astype(np.float64) / divisor
            real = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
            real = np.take_along_axis(real, result.tokens[:, None], axis=1)[:, 0]
            assert (np.abs(found - real) <= 3e-7 * np.abs(real) + 3e-6).all()


def test_the_law_of_probability_rows_within_the_stated_bound() -> None:
    # The row that comes nearest to the bound: all but the first lose almost a unit.
    row = np.full(1000, np.nextafter(np.float32(2.0**-40), np.float32(0)))
    row[0] = 0.5
    distances = []
    for p in (row, np.random.default_rng(9).random(1000).astype(np.float32)):
        given, held = [Fraction(float(v)) for v in p], probability_masses(xp, p[None])[0].tolist()
        law = [Fraction(m, sum(held)) - v / sum(given) for m, v in zip(held, given, strict=True)]
        distances.append(float(sum(max(d, 0) for d in law)))
    assert max(distances) <= 1000 * 2.0**-39
    assert max(distances) > 0.99 * 999 * 2.0**-39


# --- draws ------------------------------------------------------------------------------------------------------------


def fractions_and_masses() -> Iterator[tuple[int, list[int]]]:
    draw = random.Random(5)
    for _ in range(400):
        mass = [draw.choice([0, 1, draw.randrange(1 << 40), draw.randrange(1 << 57)]) for _ in range(20)]
        yield draw.choice([0, 1, 2**62 - 1, 2**61, draw.randrange(2**62)]), [*mass, 1]
    for r in (0, 2**31 - 1, 2**31, 2**62 - 2**31, 2**62 - 1):
        yield r, [1, 2**62 - 1]
        yield r, [2**62]
        yield r, [0, 2**61, 0, 2**61, 0]


@each_library
def test_inverse_cdf_is_the_walk_over_exact_integers(convert: Callable[[Any], Any]) -> None:
    for r, mass in fractions_and_masses():
        prefix = list(itertools.accumulate(mass))
        expected = bisect.bisect_right(prefix, r * prefix[-1] // 2**62)
        assert mass[expected] > 0
        # One row, one row for several draws, a row for each.
        for draws, rows in ((1, 1), (3, 1), (3, 3)):
            fraction, masses = convert(np.array([[r]] * draws)), convert(np.array([mass] * rows))
            assert inverse_cdf(namespace(masses), fraction, masses).tolist() == [[expected]] * draws


@each_library
def test_the_threshold_of_the_inverse_cdf_is_exact_to_the_unit(convert: Callable[[Any], Any]) -> None:
    draw = random.Random(6)
    for _ in range(1000):
        total, r = draw.randrange(3, 2**62 + 1), draw.randrange(2**62)
        if draw.random() < 0.2:
            total, r = 2**62 - draw.randrange(2**31), 2**62 - 1 - draw.randrange(2**31)
        threshold = r * total // 2**62
        # A mass of 1 that covers the threshold alone.
        mass = convert(np.array([[threshold, 1, total - threshold - 1]]))
        assert inverse_cdf(namespace(mass), convert(np.array([[r]])), mass).tolist() == [[1]]


def test_fixed_points() -> None:
    words = (np.array([0, (1 << 32) - 1, 0x12345678]), np.array([3, (1 << 32) - 1, 0x9ABCDEF0]))
    expected = [(a << 32 | b) >> 2 for a, b in zip(*(w.tolist() for w in words), strict=True)]
    assert fixed_point(*words).tolist() == expected
    u = np.array([0.0, 0.5, 1 - 2.0**-24, 2.0**-33, 0.3], dtype=np.float32)
    assert fixed_point_of_uniform(xp, u).tolist() == [math.floor(Fraction(float(v)) * 2**62) for v in u]


def test_race_keys_are_one_division_and_weight_zero_never_arrives() -> None:
    noise, weight = (np.random.default_rng(8).random((2, 100, 50)) + 0.01).astype(np.float32)
    weight[:, 7] = 0.0
    expected = np.divide(noise, weight, out=np.full_like(noise, np.inf), where=weight > 0)
    assert (race_keys(xp, noise, weight) == expected).all()
    assert not (noise * (np.float32(1.0) / np.maximum(weight, np.float32(0.01))) == expected).all()


if __name__ == "__main__":
    RESULTS.write_text(json.dumps({name: measure() for name, measure in MEASUREMENTS.items()}, indent=2) + "\n")
