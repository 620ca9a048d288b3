"""Draws from rows of probabilities: the largest, the masses by chunks of ids, and the inverse CDF over both."""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.triton_math import draw_chunk, draw_id, fraction, load_row, probability_mass
from ...rng.triton_philox import emit_words
from ...types import Status

_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))
_EMPTY_SUPPORT = tl.constexpr(int(Status.EMPTY_SUPPORT))
_BAD_PROBABILITY = tl.constexpr(int(Status.BAD_PROBABILITY))


@triton.jit
def _load(probs, stride, vocab, b, chunk, CHUNK: tl.constexpr):
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    return tl.where(ids < vocab, load_row(probs + b.to(tl.int64) * stride + ids, ids < vocab), 0.0)


@triton.jit
def _maximum(maxima, b, chunks, CHUNKS: tl.constexpr):
    """Return the largest probability of a row, and its status."""
    lane = tl.arange(0, CHUNKS)
    values = tl.load(maxima + b.to(tl.int64) * chunks + lane, mask=lane < chunks, other=0.0)
    bad = tl.max((values != values).to(tl.int32), axis=0) > 0
    maximum = tl.max(tl.where(values == values, values, 0.0), axis=0)
    return maximum, tl.where(bad, _BAD_PROBABILITY, tl.where(maximum > 0.0, 0, _EMPTY_SUPPORT))


@triton.jit(do_not_specialize=["chunks"])
def scan_probs(probs, stride, vocab, maxima, chunks, CHUNK: tl.constexpr):
    """Leave the largest probability of each chunk, NaN if one is none; float32 [B, chunks]. Grid (B, chunks)."""
    b, chunk = tl.program_id(0), tl.program_id(1)
    values = _load(probs, stride, vocab, b, chunk, CHUNK)
    good = (values >= 0.0) & (values < _INFINITY)
    largest = tl.max(tl.where(good, values, 0.0), axis=0)
    spoilt = tl.min(good.to(tl.int32), axis=0) == 0
    tl.store(maxima + b.to(tl.int64) * chunks + chunk, tl.where(spoilt, _NAN, largest))


@triton.jit(do_not_specialize=["chunks"])
def weigh_probs(probs, stride, vocab, maxima, masses, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Leave the mass of each chunk, int64 [B, chunks]. Grid (B, chunks)."""
    b, chunk = tl.program_id(0), tl.program_id(1)
    maximum, flags = _maximum(maxima, b, chunks, CHUNKS)
    if flags == 0:
        mass = probability_mass(_load(probs, stride, vocab, b, chunk, CHUNK), maximum)
        tl.store(masses + b.to(tl.int64) * chunks + chunk, tl.sum(mass, axis=0))


@triton.jit(do_not_specialize=["chunks"])
def draw_probs(
    probs,
    stride,
    vocab,
    maxima,
    masses,
    chunks,
    seed,
    offset,
    tokens,
    status,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Leave each row's token and status. Grid (B,)."""
    b = tl.program_id(0)
    maximum, flags = _maximum(maxima, b, chunks, CHUNKS)
    token = tl.full([], -1, tl.int64)
    if flags == 0:
        lane = tl.arange(0, CHUNKS)
        sums = tl.load(masses + b.to(tl.int64) * chunks + lane, mask=lane < chunks, other=0)
        word0, word1 = emit_words(tl.load(seed + b), tl.load(offset + b), tl.full([], 0, tl.int32))
        chunk, rest = draw_chunk(fraction(word0, word1), sums)
        mass = probability_mass(_load(probs, stride, vocab, b, chunk, CHUNK), maximum)
        token = draw_id(chunk, rest, mass, CHUNK)
    tl.store(tokens + b, token)
    tl.store(status + b, flags)
