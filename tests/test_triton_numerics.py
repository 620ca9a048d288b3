"""The Triton texts of the pinned arithmetic and of the streams, against the NumPy texts, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl

from draftproof._arrays import NumpyArrays as xp
from draftproof.numerics import draws, exp2, log2, masses
from draftproof.numerics import noise as exponential
from draftproof.numerics import triton_math as tm
from draftproof.rng import streams
from draftproof.rng import triton_philox as tp
from draftproof.sampling.filters import above_min_p
from draftproof.sampling.filters.penalty import penalise

if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

N = 1 << 14
BLOCK = 1024


@triton.jit
def _apply(F: tl.constexpr, out, a, b, c, n, ARGUMENTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(a + at, mask=inside, other=1)
    if ARGUMENTS == 1:
        value = F(x)
    elif ARGUMENTS == 2:
        value = F(x, tl.load(b + at, mask=inside, other=1))
    else:
        value = F(x, tl.load(b + at, mask=inside, other=1), tl.load(c + at, mask=inside, other=1))
    tl.store(out + at, value, mask=inside)


def run(function: Any, dtype: Any, *arguments: Any) -> Any:
    given = [torch.from_numpy(np.array(np.broadcast_to(a, (N,)))) for a in arguments]
    out = torch.zeros(N, dtype=dtype)
    padded = given + [given[0]] * (3 - len(given))
    _apply[(triton.cdiv(N, BLOCK),)](function, out, *padded, N, len(given), BLOCK)
    return out.numpy()


def floats(low: float, high: float) -> Any:
    """Values spread over the bits between two floats of one sign, ends included."""
    ends = np.array([low, high], dtype=np.float32).view(np.int32).astype(np.int64)
    return np.linspace(ends[0], ends[1], N).round().astype(np.int32).view(np.float32)


random = np.random.default_rng(7)
ANY = random.integers(-(2**31), 2**31, N).astype(np.int32).view(np.float32)
ANY[:9] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4e38, -3.4e38]
WORDS = np.concatenate([np.array([0, 1, 2**32 - 1, 2**31, 2**32 - 128]), random.integers(0, 2**32, N - 5)])
WORD32 = WORDS.astype(np.uint32)
BELOW_ZERO = floats(-1e-38, -42.0)
WEIGHTS = np.where(random.random(N) < 0.1, np.float32(0), exp2.exp2(xp, BELOW_ZERO))
MASSES = masses.masses(xp, WEIGHTS)
TOTALS = random.integers(1 << 40, 1 << 62, N)
UNIT = floats(1e-45, 1.0)
LARGEST = floats(1e-45, 3.4e38)[::-1]
FRACTIONS = draws.fixed_point(WORDS, WORDS[::-1])
NORMAL = random.normal(size=N).astype(np.float32)
RATES = np.abs(NORMAL[::-1]) + np.float32(0.1)


def limb_product(fraction: Any, total: Any) -> Any:
    return np.array([(int(r) * int(w)) >> 62 for r, w in zip(fraction, total, strict=True)])


CASES: dict[str, Callable[[], tuple[Any, Any, tuple[Any, ...]]]] = {
    "log2": lambda: (tm.log2_pinned, log2.log2(xp, floats(1e-45, 3.4e38)), (floats(1e-45, 3.4e38),)),
    "uniform": lambda: (tm.uniform, exponential.uniform(xp, WORDS), (WORD32,)),
    "noise": lambda: (tm.noise, exponential.exponential(xp, WORDS), (WORD32,)),
    "scale": lambda: (tm.scale, exp2.scale(xp, floats(1e-45, 3.4e38)), (floats(1e-45, 3.4e38),)),
    "exp2": lambda: (tm.exp2, exp2.exp2(xp, BELOW_ZERO), (BELOW_ZERO,)),
    "exp2 of anything": lambda: (tm.exp2, exp2.exp2(xp, -np.abs(ANY)), (-np.abs(ANY),)),
    "exponent": lambda: (tm.exponent, exp2.exponent(xp, ANY, ANY[::-1], RATES), (ANY, ANY[::-1], RATES)),
    "mass": lambda: (tm.mass, MASSES, (WEIGHTS,)),
    "theta": lambda: (tm.theta, np.maximum(masses.theta(xp, UNIT, TOTALS), 1), (UNIT, TOTALS)),
    "min-p": lambda: (_above, above_min_p(xp, BELOW_ZERO, UNIT).astype(np.int32), (BELOW_ZERO, UNIT)),
    "race key": lambda: (tm.race_key, draws.race_keys(xp, RATES, WEIGHTS), (RATES, WEIGHTS)),
    "penalty": lambda: (tm.penalise, penalise(xp, ANY[:, None], RATES, np.zeros((N, 1), int))[:, 0], (ANY, RATES)),
    "reciprocal": lambda: (tm.reciprocal, masses.reciprocal(xp, TOTALS), (TOTALS,)),
    "residual": lambda: (tm.rho, masses.residual_masses(xp, UNIT, UNIT[::-1], UNIT**2), (UNIT, UNIT[::-1], UNIT**2)),
    "injected": lambda: (
        _injected,
        draws.fixed_point_of_uniform(xp, floats(1e-45, 1 - 2**-24)),
        (floats(1e-45, 1 - 2**-24),),
    ),
    "fraction": lambda: (tm.fraction, FRACTIONS, (WORD32, WORD32[::-1])),
    "probability mass": lambda: (
        tm.probability_mass,
        masses.probability_masses(xp, np.stack([UNIT * LARGEST, LARGEST], axis=1))[:, 0],
        (UNIT * LARGEST, LARGEST),
    ),
    "limbs": lambda: (tm.mul_shift62, limb_product(FRACTIONS, TOTALS), (FRACTIONS, TOTALS)),
}


@triton.jit
def _above(t, min_p):
    return (t >= tm.least_exponent(min_p)).to(tl.int32)


@triton.jit
def _injected(u):
    return tm.fixed_point(u, 62)


@pytest.mark.parametrize("name", CASES)
def test_arithmetic_has_the_bits_of_numpy(name: str) -> None:
    with np.errstate(all="ignore"):
        function, expected, arguments = CASES[name]()
        got = run(function, torch.from_numpy(np.array(expected[:1])).dtype, *arguments)
    integers = np.int32 if expected.dtype.itemsize == 4 else np.int64
    number = expected == expected
    assert number.any()
    np.testing.assert_array_equal(got.view(integers)[number], np.array(expected).view(integers)[number])
    assert (got[~number] != got[~number]).all()


def test_order_keys_order_as_the_floats_do() -> None:
    values = ANY[~np.isnan(ANY)]
    keys = run(tm.order_key, torch.int32, np.resize(values, N))[: len(values)]
    order = np.argsort(keys, kind="stable")
    assert (np.diff(values[order]) >= 0.0)[np.isfinite(np.diff(values[order]))].all()
    assert (keys[:-1] == keys[1:]).tolist() == (values[:-1] == values[1:]).tolist()
    np.testing.assert_array_equal(run(tm.from_order_key, torch.float32, np.resize(keys, N))[: len(values)], values)


@triton.jit
def _arrivals(seed, ids, offset, draft_index):
    w0, w1, w2, w3 = tp.token_words(seed, ids >> 2, offset, draft_index)
    low = tl.where((ids & 1) == 0, w0, w1)
    high = tl.where((ids & 1) == 0, w2, w3)
    own = tm.noise(tl.where((ids & 2) == 0, low, high))
    least, holder = tp.block_race(seed, ids >> 6, offset, draft_index)
    return tl.where((ids & 63) == holder, least, least + own)


@triton.jit
def _races(seed, offset, index, vocab, tokens, accept, emit, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    s, o, i = tl.load(seed + row), tl.load(offset + row), tl.load(index + row)
    ids = tl.arange(0, BLOCK)
    tl.store(tokens + row * vocab + ids, _arrivals(s, ids, o, i), mask=ids < vocab)
    w0, w1 = tp.emit_words(s, o, tl.maximum(i, 0))
    tl.store(accept + row, tp.accept_word(s, o, tl.maximum(i, 0)))
    tl.store(emit + row, tm.fraction(w0, w1))


def test_streams_have_the_words_of_numpy() -> None:
    seeds = np.array([0, 1, -1, 0x0123456789ABCDEF, -(2**63)])
    offsets = np.array([0, 2**32 - 1, 2**63 - 1, 2**32 + 7, 5])
    index = np.array([-1, 0, 300, 2**24 - 1, -1])
    vocab = 300
    given = [torch.from_numpy(a) for a in (seeds, offsets, index)]
    tokens, accept, emit = torch.zeros(5, vocab), torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    _races[(5,)](*given, vocab, tokens, accept, emit, 512)
    for row in range(5):
        seed, offset = seeds[row : row + 1, None], offsets[row : row + 1, None]
        number = None if index[row] < 0 else int(index[row])
        expected = streams.race_noise(xp, streams.RaceStream(seed, offset, number), None, vocab)
        np.testing.assert_array_equal(tokens[row].numpy(), expected[0])
        assert int(accept[row]) == int(streams.accept_word(seed, offset, max(int(index[row]), 0))[0, 0])
        words = streams.emit_words(seed, offset, max(int(index[row]), 0))
        assert int(emit[row]) == int(draws.fixed_point(*words)[0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_widen_exactly(dtype: Any) -> None:
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    values = (bits * 65535 + 12345 if dtype == torch.float32 else bits).to(kind).view(dtype)
    out = torch.zeros(len(values))
    _widen[(triton.cdiv(len(values), BLOCK),)](values, out, BLOCK)
    expected = values.float()
    number = ~torch.isnan(expected)
    assert torch.equal(out.view(torch.int32)[number], expected.view(torch.int32)[number])
    assert torch.isnan(out[~number]).all()


@triton.jit
def _widen(values, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tm.load_row(values + at, at >= 0))
