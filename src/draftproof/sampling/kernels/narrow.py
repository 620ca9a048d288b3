"""The end of a filtered row: the least rank that the filters keep. Exact, by bisection over keys, without a sort.

One program a row. A tally reads only the blocks whose maximum reaches the key in question, which soon are few.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.triton_math import (
    exponent,
    from_order_key,
    mass,
    order_key,
    scale,
    theta,
    weight,
)
from .rows import (
    BLOCK,
    LEAST_KEY,
    best_of_row,
    end_of_min_p,
    first_key,
    first_maximum,
    ids_of_blocks,
    key_of_rank,
    load_logits,
    midpoint,
    open_blocks,
    open_row,
    pick,
    quotient,
    rank_of_key,
    status_of_key,
)

_MAXIMA = tl.constexpr(0)
_TOKENS = tl.constexpr(1)
_MASS = tl.constexpr(2)
_MIN_EXPONENT = tl.constexpr(-40.0)


@triton.jit
def tally(row, maxima, key, maximum, c, OF: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return how many block maxima or tokens have the key or a higher one, or the mass of those tokens. int64."""
    blocks = tl.cdiv(row[1], BLOCK)
    total = tl.full([], 0, tl.int64)
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        is_open = tl.load(maxima + block, mask=block < blocks, other=LEAST_KEY - 1) >= key
        if OF == _MAXIMA:
            total += tl.sum(is_open.to(tl.int32), axis=0)
        else:
            places, count = open_blocks(is_open)
            for start in range(0, count, STEP):
                x = load_logits(row, ids_of_blocks(pick(places, start, block, STEP)))
                reaches = order_key(x) >= key
                if OF == _TOKENS:
                    total += tl.sum(tl.sum(reaches.to(tl.int32), axis=1), axis=0)
                else:
                    total += tl.sum(tl.sum(tl.where(reaches, mass(weight(x, maximum, c)), 0), axis=1), axis=0)
    return total


@triton.jit
def last_key(row, maxima, low, high, target, maximum, c, OF: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return the highest key whose tally reaches the target, given that ``low`` reaches it and ``high`` does not."""
    step = 0
    while low + 1 < high:
        # Halves of the values close in on ordinary rows, halves of the keys on any row.
        middle = midpoint(low, high)
        value = order_key(from_order_key(low) * 0.5 + from_order_key(high) * 0.5)
        middle = tl.where(((step & 1) == 0) & (value > low) & (value < high), value, middle)
        reaches = tally(row, maxima, middle, maximum, c, OF, CHUNK, STEP) >= target
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle)
        step += 1
    return low


@triton.jit
def end_of_top_k(row, maxima, k, temperature, maximum, c, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return the lowest key that top-k keeps: every token whose divided logit is at least that of the k-th."""
    low = tl.full([], LEAST_KEY, tl.int32)
    high = order_key(maximum) + 1
    if tally(row, maxima, low, maximum, c, _MAXIMA, CHUNK, STEP) >= k:
        low = last_key(row, maxima, low, high, k, maximum, c, _MAXIMA, CHUNK, STEP)
    if tally(row, maxima, low, maximum, c, _TOKENS, CHUNK, STEP) >= k:
        low = last_key(row, maxima, low, high, k, maximum, c, _TOKENS, CHUNK, STEP)
        least = quotient(from_order_key(low), temperature, 0.0)
        low = first_key(low, least, quotient, temperature, 0.0)
    return low


@triton.jit
def end_of_top_p(row, maxima, floor, top_p, maximum, c, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return the least rank that top-p keeps of the tokens whose key is at least ``floor``."""
    low = tl.maximum(first_key(order_key(maximum), _MIN_EXPONENT, exponent, maximum, c), floor)
    limit = theta(top_p, tally(row, maxima, low, maximum, c, _MASS, CHUNK, STEP))
    key = last_key(row, maxima, low, order_key(maximum) + 1, limit, maximum, c, _MASS, CHUNK, STEP)
    above = tally(row, maxima, key + 1, maximum, c, _MASS, CHUNK, STEP)
    with_ties = tally(row, maxima, key, maximum, c, _MASS, CHUNK, STEP)
    one = mass(weight(from_order_key(key), maximum, c))
    end = key.to(tl.int64) << 32
    if with_ties - one >= limit:
        end = rank_of_key(key, _last_tie(row, maxima, key, one, limit - above, CHUNK, STEP))
    return end


@triton.jit
def _last_tie(row, maxima, key, one, room, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return the last id of the key before which its ties, of mass ``one`` each, have a mass below ``room``."""
    blocks = tl.cdiv(row[1], BLOCK)
    before = tl.full([], 0, tl.int64)
    last = tl.full([], 0, tl.int32)
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        places, count = open_blocks(tl.load(maxima + block, mask=block < blocks, other=LEAST_KEY - 1) >= key)
        for start in range(0, count, STEP):
            ids = ids_of_blocks(pick(places, start, block, STEP))
            tied = tl.reshape(order_key(load_logits(row, ids)) == key, [STEP * BLOCK])
            masses = tl.where(tied, one, 0)
            kept = tied & (before + tl.cumsum(masses, axis=0) - masses < room)
            last = tl.maximum(last, tl.max(tl.where(kept, tl.reshape(ids, [STEP * BLOCK]), 0), axis=0))
            before += tl.sum(masses, axis=0)
    return last


@triton.jit
def narrow(
    logits,
    stride,
    vocab,
    seen,
    penalty,
    mask,
    mask_stride,
    temperature,
    top_k,
    top_p,
    min_p,
    maxima,
    partial,
    programs,
    ends,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Leave the ``end`` of each row, int64 [B]: that of its first maximum at temperature 0. Grid (B,)."""
    b = tl.program_id(0)
    row = open_row(b, logits, stride, vocab, seen, penalty, mask, mask_stride)
    maxima += b.to(tl.int64) * tl.cdiv(vocab, BLOCK)
    best = best_of_row(partial, b, programs, PROGRAMS)
    heat = tl.load(temperature + b)
    end = tl.full([], LEAST_KEY, tl.int64) << 32
    if status_of_key(key_of_rank(best)) == 0:
        if heat == 0.0:
            end = rank_of_key(key_of_rank(best), first_maximum(row, best))
        else:
            maximum = from_order_key(key_of_rank(best))
            c = scale(heat)
            if top_k is not None:
                k = tl.load(top_k + b)
                if k < vocab:
                    end = end_of_top_k(row, maxima, k, heat, maximum, c, CHUNK, STEP).to(tl.int64) << 32
            if top_p is not None:
                p = tl.load(top_p + b)
                if p < 1.0:
                    end = end_of_top_p(row, maxima, key_of_rank(end), p, maximum, c, CHUNK, STEP)
            if min_p is not None:
                end = tl.maximum(end, end_of_min_p(maximum, c, tl.load(min_p + b)))
    tl.store(ends + b, end)
