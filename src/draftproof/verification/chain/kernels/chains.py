"""Where a draft ends, which row is which, and the random numbers of a round."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....numerics.triton_math import fixed_point, fraction, uniform
from ....rng.triton_philox import accept_word, emit_words
from ....types import Status

_INVALID = tl.constexpr(int(Status.INVALID_DRAFT_ID))


class Chains(NamedTuple):
    """Drafts of a batch and their randomness; None where something is not given."""

    drafted: Any  # K
    eos_width: Any  # E
    vocab: Any  # ids at or above it end a draft
    tokens: Any  # int64 [B, K]
    lengths: Any  # int64 [B]
    eos: Any  # int64 [B, E]
    seed: Any = None  # int64 [B]
    offset: Any = None
    uniform_accept: Any = None  # float32 [B, K]
    uniform_sample: Any = None  # float32 [B, K+1]


@triton.jit
def draft_end(chains, b, POSITIONS: tl.constexpr):
    """Return ``(length, by_eos, status)`` of a draft; POSITIONS is a power of two above K."""
    position = tl.arange(0, POSITIONS)
    token = load_drafts(chains, b, POSITIONS)
    count = tl.load(chains.lengths + b).to(tl.int32)
    bad = (token < 0) | (token >= chains.vocab)
    length = tl.min(tl.where(bad | (position >= count), position, POSITIONS), axis=0)
    invalid = (position == length) & (position < count) & (token != -1)
    status = tl.max(tl.where(invalid, _INVALID, 0), axis=0)
    by_eos = length < 0
    if chains.eos is not None:
        first = tl.min(tl.where(_among(chains, b, token), position, POSITIONS), axis=0)
        by_eos = first < length
        length = tl.where(by_eos, first + 1, length)
        status = tl.where(by_eos, 0, status)
    return length, by_eos, status


@triton.jit
def load_drafts(chains, b, POSITIONS: tl.constexpr):
    """Return the drafted ids, int64 [POSITIONS], -1 beyond."""
    position = tl.arange(0, POSITIONS)
    return tl.load(chains.tokens + b * chains.drafted + position, mask=position < chains.drafted, other=-1)


@triton.jit
def _among(chains, b, token):
    """Return whether each token is one of the row's eos ids."""
    hit = tl.zeros_like(token) != 0
    for e in range(chains.eos_width):
        end = tl.load(chains.eos + b * chains.eos_width + e)
        hit = hit | ((token == end) & (end >= 0))
    return hit


@triton.jit
def is_eos(chains, b, token):
    """Return whether a token is one of the row's eos ids."""
    hit = tl.zeros_like(token) != 0
    if chains.eos is not None:
        hit = _among(chains, b, token)
    return hit


@triton.jit
def accept_uniform(chains, b, i):
    """Return the uniform that decides on draft i."""
    if chains.uniform_accept is not None:
        u = tl.load(chains.uniform_accept + b * chains.drafted + i)
    else:
        u = uniform(accept_word(tl.load(chains.seed + b), tl.load(chains.offset + b), i))
    return u


@triton.jit
def emit_fraction(chains, b, i, FOLLOW: tl.constexpr):
    """Return the 62-bit fraction that draws the token after i accepted drafts.

    With FOLLOW it is the one with which rule match draws position i from probabilities.
    """
    if chains.uniform_sample is not None:
        R = fixed_point(tl.load(chains.uniform_sample + b * (chains.drafted + 1) + i), 62)
    else:
        offset = tl.load(chains.offset + b)
        if FOLLOW:
            w0, w1 = emit_words(tl.load(chains.seed + b), offset + i, i * 0)
        else:
            w0, w1 = emit_words(tl.load(chains.seed + b), offset, i)
        R = fraction(w0, w1)
    return R
