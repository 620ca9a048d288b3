"""The end of a filtered row: the least rank that the filters keep. Exact, and without a sort of the row.

One program a row. With top-k it is found in the list that ``gather`` leaves. Without, or where the list overflows, by
bisection: a tally reads only the blocks whose maximum reaches the rank in question, which soon are few.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.triton_math import exponent, from_order_key, mass, order_key, scale, theta, weight
from .rows import (
    BLOCK,
    LEAST_KEY,
    best_of_row,
    blocks_of,
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
    rank,
    rank_of_key,
    status_of_key,
)
from .weigh import MASS, MAXIMA, TOKENS, tally

_MIN_EXPONENT = tl.constexpr(-40.0)
_LOWEST = tl.constexpr(-(1 << 63))
_HIGHEST = tl.constexpr((1 << 63) - 1)


@triton.jit
def gather(
    rows,
    filters,
    scanned,
    ranks,
    counts,
    PROGRAMS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """List the ranks of the tokens that top-k may keep: ``ranks`` int64 [B, SIZE], ``counts`` int32 [B]. Grid (B,).

    The k-th largest block maximum bounds the k-th largest logit. A count above SIZE says that the list is not whole.
    """
    b = tl.program_id(0)
    row = open_row(rows, b)
    blocks, start_of_row = blocks_of(rows, b)
    maxima = scanned.maxima + start_of_row
    best = best_of_row(scanned, b, PROGRAMS)
    k = tl.load(filters.top_k + b)
    heat = tl.load(filters.temperature + b)
    found = tl.full([], 0, tl.int32)
    if (status_of_key(key_of_rank(best)) == 0) & (heat > 0.0) & (k < rows.vocab):
        low = tl.full([], LEAST_KEY, tl.int64)
        if tally(row, maxima, low << 32, 0.0, 0.0, MAXIMA, CHUNK, STEP) >= k:
            high = key_of_rank(best).to(tl.int64) + 1
            low = last(row, maxima, low, high, k, k + (k >> 2) + 4, 0.0, 0.0, MAXIMA, 32, CHUNK, STEP)
        least = quotient(from_order_key(low.to(tl.int32)), heat, 0.0)
        for first in range(0, blocks, CHUNK):
            block = first + tl.arange(0, CHUNK)
            top = tl.load(maxima + block, mask=block < blocks, other=LEAST_KEY - 1)
            places, count = open_blocks((top >= LEAST_KEY) & (quotient(from_order_key(top), heat, 0.0) >= least))
            for start in range(0, count, STEP):
                if found <= SIZE:
                    ids = ids_of_blocks(pick(places, start, block, STEP))
                    x = load_logits(row, ids)
                    listed = (order_key(x) >= LEAST_KEY) & (quotient(x, heat, 0.0) >= least)
                    listed = tl.reshape(listed, [STEP * BLOCK])
                    place = found + tl.cumsum(listed.to(tl.int32), axis=0) - 1
                    value = tl.reshape(rank(x, ids), [STEP * BLOCK])
                    tl.store(ranks + b.to(tl.int64) * SIZE + place, value, mask=listed & (place < SIZE))
                    found += tl.sum(listed.to(tl.int32), axis=0)
    tl.store(counts + b, found)


@triton.jit
def narrow(
    rows,
    filters,
    scanned,
    ranks,
    counts,
    ends,
    PROGRAMS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Leave the end of each row, int64 [B]. Grid (B,).

    At temperature 0 only the first maximum is kept. Without SEARCH the ends of rows without top-k leave out top-p.
    """
    b = tl.program_id(0)
    row = open_row(rows, b)
    _, start = blocks_of(rows, b)
    maxima = scanned.maxima + start
    best = best_of_row(scanned, b, PROGRAMS)
    heat = tl.load(filters.temperature + b)
    end = tl.full([], LEAST_KEY, tl.int64) << 32
    if status_of_key(key_of_rank(best)) == 0:
        if heat == 0.0:
            end = rank_of_key(key_of_rank(best), first_maximum(row, best))
        else:
            maximum = from_order_key(key_of_rank(best))
            c = scale(heat)
            p = 1.0
            if filters.top_p is not None:
                p = tl.load(filters.top_p + b)
            searched = SEARCH
            if filters.top_k is not None:
                k = tl.load(filters.top_k + b)
                if k < rows.vocab:
                    found = tl.load(counts + b)
                    searched = found > SIZE
                    if searched:
                        end = end_of_top_k(row, maxima, k, heat, maximum, c, CHUNK, STEP) << 32
                    else:
                        end = _end_of_list(ranks + b.to(tl.int64) * SIZE, found, k, p, heat, maximum, c, SIZE)
            if searched & (p < 1.0):
                end = end_of_top_p(row, maxima, key_of_rank(end), p, maximum, c, CHUNK, STEP)
            if filters.min_p is not None:
                end = tl.maximum(end, end_of_min_p(maximum, c, tl.load(filters.min_p + b)))
    tl.store(ends + b, end)


@triton.jit
def _end_of_list(ranks, found, k, p, temperature, maximum, c, SIZE: tl.constexpr):
    """Return the least rank that top-k and top-p keep of a list."""
    place = tl.arange(0, SIZE)
    ordered = tl.sort(tl.load(ranks + place, mask=place < found, other=_LOWEST), descending=True)
    logit = from_order_key(key_of_rank(ordered))
    divided = quotient(logit, temperature, 0.0)
    kept = place < found
    if k <= found:
        kept = kept & (divided >= tl.max(tl.where(place == k - 1, divided, -float("inf")), axis=0))
    if p < 1.0:
        masses = tl.where(kept, mass(weight(logit, maximum, c)), 0)
        prefix = tl.cumsum(masses, axis=0)
        kept = kept & (prefix - masses < theta(p, tl.sum(masses, axis=0)))
    return tl.min(tl.where(kept, ordered, _HIGHEST), axis=0)


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
def end_of_top_k(row, maxima, k, temperature, maximum, c, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return the lowest key that top-k keeps, int64: every token whose divided logit is at least that of the k-th."""
    low = tl.full([], LEAST_KEY, tl.int64)
    high = order_key(maximum).to(tl.int64) + 1
    if tally(row, maxima, low << 32, maximum, c, MAXIMA, CHUNK, STEP) >= k:
        low = last(row, maxima, low, high, k, 0, maximum, c, MAXIMA, 32, CHUNK, STEP)
    if tally(row, maxima, low << 32, maximum, c, TOKENS, CHUNK, STEP) >= k:
        low = last(row, maxima, low, high, k, 0, maximum, c, TOKENS, 32, CHUNK, STEP)
        key = low.to(tl.int32)
        low = first_key(key, quotient(from_order_key(key), temperature, 0.0), quotient, temperature, 0.0).to(tl.int64)
    return low


@triton.jit
def end_of_top_p(row, maxima, floor, top_p, maximum, c, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return the least rank that top-p keeps of the tokens whose key is at least ``floor``."""
    high = order_key(maximum)
    low = tl.maximum(first_key(high, _MIN_EXPONENT, exponent, maximum, c), floor).to(tl.int64)
    limit = theta(top_p, tally(row, maxima, low << 32, maximum, c, MASS, CHUNK, STEP))
    key = last(row, maxima, low, high.to(tl.int64) + 1, limit, 0, maximum, c, MASS, 32, CHUNK, STEP)
    end = key << 32
    one = mass(weight(from_order_key(key.to(tl.int32)), maximum, c))
    if tally(row, maxima, end, maximum, c, MASS, CHUNK, STEP) - one >= limit:
        # Not all ties of the last key fit: the lowest ids stay.
        end = last(row, maxima, end, (key + 1) << 32, limit, 0, maximum, c, MASS, 0, CHUNK, STEP)
    return end
