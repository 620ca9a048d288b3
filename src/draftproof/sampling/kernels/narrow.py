"""The end of a filtered row: the least rank that the filters keep. Exact, and without a sort of the row.

One program a row. The few tokens among which the end must be are listed and ranked: with top-k those that reach the
k-th largest block maximum, with top-p those in the bracket. Where a list overflows the row is searched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...numerics.triton_math import from_order_key, mass, order_key, scale, theta, weight
from .bracket import next_bracket
from .rows import (
    BLOCK,
    LEAST_KEY,
    best_of_row,
    blocks_of,
    end_of_min_p,
    first_maximum,
    ids_of_blocks,
    key_of_rank,
    load_logits,
    midpoint,
    open_blocks,
    open_row,
    owner_of,
    pick,
    rank,
    rank_of_key,
    status_of_key,
)
from .search import MAXIMA, end_of_mass, end_of_top_k, end_of_top_p, first_with_quotient, last, tally
from .weigh import checks_top_p

_LOWEST = tl.constexpr(-(1 << 63))
_HIGHEST = tl.constexpr((1 << 63) - 1)
_AFTER_KEYS = tl.constexpr(1 << 31)


class Listed(NamedTuple):
    """Lists of ranks. A count above the size of a list says that it is not whole."""

    ranks: Any  # int64 [B, SIZE]
    counts: Any  # int32 [B]


@triton.jit
def gather(
    rows,
    filters,
    scanned,
    rounds,
    listed,
    PROGRAMS: tl.constexpr,
    PIVOTS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """List the tokens among which top-k or top-p ends a row; ``rounds`` is the last round or None. Grid (B,)."""
    b = tl.program_id(0)
    own = owner_of(rows, b)
    row = open_row(rows, b)
    blocks, start_of_row = blocks_of(rows, b)
    maxima = scanned.maxima + start_of_row
    best = best_of_row(scanned, b, PROGRAMS)
    low = tl.full([], _AFTER_KEYS, tl.int64)
    high = low
    if status_of_key(key_of_rank(best)) == 0:
        if filters.top_k is not None:
            k = tl.load(filters.top_k + own)
            heat = tl.load(filters.temperature + own)
            if (k < rows.vocab) & (heat > 0.0):
                low = _least_of_top_k(row, maxima, k, heat, best, CHUNK, STEP)
        if rounds is not None and checks_top_p(rows, filters, b):
            low, high, _, _ = next_bracket(rounds, tl.load(filters.top_p + own), scanned, b, PROGRAMS, PIVOTS)
    found = tl.full([], 0, tl.int32)
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        places, count = open_blocks(tl.load(maxima + block, mask=block < blocks, other=LEAST_KEY - 1) >= low)
        for start in range(0, count, STEP):
            if found <= SIZE:
                ids = ids_of_blocks(pick(places, start, block, STEP))
                x = load_logits(row, ids)
                inside = tl.reshape((order_key(x) >= low) & (order_key(x) < high), [STEP * BLOCK])
                place = found + tl.cumsum(inside.to(tl.int32), axis=0) - 1
                ranks = tl.reshape(rank(x, ids), [STEP * BLOCK])
                tl.store(listed.ranks + b.to(tl.int64) * SIZE + place, ranks, mask=inside & (place < SIZE))
                found += tl.sum(inside.to(tl.int32), axis=0)
    tl.store(listed.counts + b, found)


@triton.jit
def _least_of_top_k(row, maxima, k, temperature, best, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return a key, int64, that all tokens of top-k reach and few others; the k-th block maximum bounds it."""
    low = tl.full([], LEAST_KEY, tl.int64)
    if tally(row, maxima, low << 32, 0.0, 0.0, MAXIMA, CHUNK, STEP) >= k:
        high = key_of_rank(best).to(tl.int64) + 1
        low = last(row, maxima, low, high, k, k + (k >> 2) + 4, 0.0, 0.0, MAXIMA, 32, CHUNK, STEP)
    return first_with_quotient(low, temperature)


@triton.jit
def narrow(
    rows,
    filters,
    scanned,
    rounds,
    listed,
    ends,
    PROGRAMS: tl.constexpr,
    PIVOTS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Leave the end of each row, int64 [B]: that of its first maximum at temperature 0. Grid (B,).

    Without ``rounds`` the ends of rows with top-p and no top-k leave out top-p.
    """
    b = tl.program_id(0)
    own = owner_of(rows, b)
    row = open_row(rows, b)
    _, start = blocks_of(rows, b)
    maxima = scanned.maxima + start
    best = best_of_row(scanned, b, PROGRAMS)
    heat = tl.load(filters.temperature + own)
    end = tl.full([], LEAST_KEY, tl.int64) << 32
    if status_of_key(key_of_rank(best)) == 0:
        if heat == 0.0:
            end = rank_of_key(key_of_rank(best), first_maximum(row, best))
        else:
            maximum = from_order_key(key_of_rank(best))
            c = scale(heat)
            if filters.top_k is not None and tl.load(filters.top_k + own) < rows.vocab:
                end = _end_of_list(row, maxima, filters, own, listed, b, heat, maximum, c, SIZE, CHUNK, STEP)
            if rounds is not None and checks_top_p(rows, filters, b):
                top_p = tl.load(filters.top_p + own)
                low, high, above, limit = next_bracket(rounds, top_p, scanned, b, PROGRAMS, PIVOTS)
                if tl.load(listed.counts + b) <= SIZE:
                    ranks = _list_of_row(listed, b, SIZE)
                    end = _last_to_reach(ranks, _masses(ranks, maximum, c), limit - above)
                else:
                    end = end_of_mass(row, maxima, low, high, limit, maximum, c, CHUNK, STEP)
            if filters.min_p is not None:
                end = tl.maximum(end, end_of_min_p(maximum, c, tl.load(filters.min_p + own)))
    tl.store(ends + b, end)


@triton.jit
def _end_of_list(
    row,
    maxima,
    filters,
    own,
    listed,
    b,
    temperature,
    maximum,
    c,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the end of a row with top-k, and top-p after it: in the list, or by search where it overflowed."""
    k = tl.load(filters.top_k + own)
    p = 1.0
    if filters.top_p is not None:
        p = tl.load(filters.top_p + own)
    if tl.load(listed.counts + b) <= SIZE:
        ranks = _list_of_row(listed, b, SIZE)
        valid = (ranks > _LOWEST).to(tl.int64)
        kth = _last_to_reach(ranks, valid, tl.minimum(k, tl.sum(valid, axis=0)))
        end = first_with_quotient(kth >> 32, temperature) << 32
        if p < 1.0:
            masses = tl.where(ranks >= end, _masses(ranks, maximum, c), 0)
            end = _last_to_reach(ranks, masses, theta(p, tl.sum(masses, axis=0)))
    else:
        least = end_of_top_k(row, maxima, k, temperature, maximum, c, CHUNK, STEP)
        end = least << 32
        if p < 1.0:
            end = end_of_top_p(row, maxima, least, p, maximum, c, CHUNK, STEP)
    return end


@triton.jit
def _list_of_row(listed, b, SIZE: tl.constexpr):
    """Return the ranks of a list, with the lowest of all for what is not used."""
    place = tl.arange(0, SIZE)
    return tl.load(listed.ranks + b.to(tl.int64) * SIZE + place, mask=place < tl.load(listed.counts + b), other=_LOWEST)


@triton.jit
def _masses(ranks, maximum, c):
    """Return the masses of the tokens of a list, int64; 0 for what is not used."""
    return tl.where(ranks > _LOWEST, mass(weight(from_order_key(key_of_rank(ranks)), maximum, c)), 0)


@triton.jit
def _last_to_reach(ranks, amounts, target):
    """Return the rank which, with those above it, is the first to have the amounts, at least 0, that are asked for."""
    low = tl.min(tl.where(amounts > 0, ranks, _HIGHEST), axis=0)
    high = tl.max(tl.where(amounts > 0, ranks, _LOWEST), axis=0) + 1
    while low + 1 < high:
        middle = midpoint(low, high)
        reaches = tl.sum(tl.where(ranks >= middle, amounts, 0), axis=0) >= target
        low = tl.where(reaches, middle, low)
        high = tl.where(reaches, high, middle)
    return low
