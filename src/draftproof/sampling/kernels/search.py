"""The end of a filtered row by bisection, for one program: any row, without a list.

A tally reads only the blocks whose maximum reaches the rank in question, which soon are few.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.triton_math import exponent, from_order_key, mass, order_key, theta, weight
from .rows import (
    BLOCK,
    LEAST_KEY,
    first_key,
    ids_of_blocks,
    key_of_rank,
    load_logits,
    midpoint,
    open_blocks,
    pick,
    quotient,
    rank,
)

MAXIMA = tl.constexpr(0)
TOKENS = tl.constexpr(1)
MASS = tl.constexpr(2)
_LEAST_EXPONENT = tl.constexpr(-40.0)
_HIGHEST = tl.constexpr((1 << 63) - 1)


@triton.jit
def end_of_top_k(row, maxima, k, temperature, maximum, c, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return the lowest key that top-k keeps, int64: every token whose divided logit is at least that of the k-th."""
    low = tl.full([], LEAST_KEY, tl.int64)
    high = order_key(maximum).to(tl.int64) + 1
    if tally(row, maxima, low << 32, maximum, c, MAXIMA, CHUNK, STEP) >= k:
        low = last(row, maxima, low, high, k, 0, maximum, c, MAXIMA, 32, CHUNK, STEP)
    if tally(row, maxima, low << 32, maximum, c, TOKENS, CHUNK, STEP) >= k:
        low = last(row, maxima, low, high, k, 0, maximum, c, TOKENS, 32, CHUNK, STEP)
        low = first_with_quotient(low, temperature)
    return low


@triton.jit
def end_of_top_p(row, maxima, floor, top_p, maximum, c, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return the least rank that top-p keeps of the tokens whose key is at least ``floor``."""
    low, high = range_of_mass(maximum, c)
    low = tl.maximum(low, floor)
    limit = theta(top_p, tally(row, maxima, low << 32, maximum, c, MASS, CHUNK, STEP))
    return end_of_mass(row, maxima, low, high, limit, maximum, c, CHUNK, STEP)


@triton.jit
def range_of_mass(maximum, c):
    """Return the lowest key with a mass, int64, and a key above all."""
    high = order_key(maximum)
    return first_key(high, _LEAST_EXPONENT, exponent, maximum, c).to(tl.int64), high.to(tl.int64) + 1


@triton.jit
def end_of_mass(row, maxima, low, high, limit, maximum, c, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return the least rank above which the mass is below the limit; it lies between the keys low and high, int64."""
    key = last(row, maxima, low, high, limit, 0, maximum, c, MASS, 32, CHUNK, STEP)
    end = key << 32
    one = mass(weight(from_order_key(key.to(tl.int32)), maximum, c))
    if tally(row, maxima, end, maximum, c, MASS, CHUNK, STEP) - one >= limit:
        # Not all ties of the last key fit: the lowest ids stay.
        end = last(row, maxima, end, (key + 1) << 32, limit, 0, maximum, c, MASS, 0, CHUNK, STEP)
    return end


@triton.jit
def first_with_quotient(key, temperature):
    """Return the lowest key, int64, whose divided logit is that of ``key``."""
    key = key.to(tl.int32)
    return first_key(key, quotient(from_order_key(key), temperature, 0.0), quotient, temperature, 0.0).to(tl.int64)


@triton.jit
def last(
    row,
    maxima,
    low,
    high,
    target,
    enough,
    maximum,
    c,
    OF: tl.constexpr,
    SHIFT: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the highest x, int64, for which the tally of ``x << SHIFT`` reaches the target.

    The tally of ``low`` reaches it, that of ``high`` does not. A lower x will do if its tally is at most ``enough``.
    """
    step = 0
    reached = tl.full([], _HIGHEST, tl.int64)
    while (low + 1 < high) & (reached > enough):
        middle = midpoint(low, high)
        if SHIFT == 32:
            # Halves of the values close in on ordinary rows, halves of the keys on any row.
            value = from_order_key(low.to(tl.int32)) * 0.5 + from_order_key(high.to(tl.int32)) * 0.5
            key = order_key(value).to(tl.int64)
            middle = tl.where(((step & 1) == 0) & (key > low) & (key < high), key, middle)
        found = tally(row, maxima, middle << SHIFT, maximum, c, OF, CHUNK, STEP)
        low = tl.where(found >= target, middle, low)
        high = tl.where(found >= target, high, middle)
        reached = tl.where(found >= target, found, reached)
        step += 1
    return low


@triton.jit
def tally(row, maxima, end, maximum, c, OF: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return how many block maxima or tokens have the rank ``end`` or a higher one, or the mass of those tokens.

    One program; reads only the blocks whose maximum reaches the rank.
    """
    blocks = tl.cdiv(row[1], BLOCK)
    total = tl.full([], 0, tl.int64)
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        is_open = tl.load(maxima + block, mask=block < blocks, other=LEAST_KEY - 1) >= key_of_rank(end)
        if OF == MAXIMA:
            total += tl.sum(is_open.to(tl.int32), axis=0)
        else:
            places, count = open_blocks(is_open)
            for start in range(0, count, STEP):
                ids = ids_of_blocks(pick(places, start, block, STEP))
                x = load_logits(row, ids)
                reaches = rank(x, ids) >= end
                if OF == TOKENS:
                    total += tl.sum(tl.sum(reaches.to(tl.int32), axis=1), axis=0)
                else:
                    total += tl.sum(tl.sum(tl.where(reaches, mass(weight(x, maximum, c)), 0), axis=1), axis=0)
    return total
