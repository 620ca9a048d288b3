"""The race over a row: bounds on every block from its maximum and its least exponential, then the few that can win."""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.triton_math import from_order_key, heaviest, noise, race_key, scale, theta, weight
from ...rng.triton_philox import block_race, token_words
from .rows import (
    BLOCK,
    LAST_ID,
    LEAST_KEY,
    best_of_row,
    blocks_of,
    end_of_min_p,
    first_maximum,
    ids_of_blocks,
    key_of_rank,
    load_logits,
    open_blocks,
    open_row,
    open_stream,
    pick,
    rank,
    status_of_key,
)
from .search import MASS, tally
from .weigh import checks_top_p, sum_of_shares

_INFINITY = tl.constexpr(float("inf"))
_NOBODY = tl.constexpr((0x7F800000 << 32) | ((1 << 31) - 1))


@triton.jit
def race(
    rows,
    filters,
    stream,
    scanned,
    ends,
    tokens,
    status,
    ranks,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Leave each row's token and status: its first maximum at temperature 0, else the winner of its race. Grid (B,).

    Without ``ends`` the race is over the tokens that min-p keeps. ``ranks`` [B] or None: the token's rank.
    """
    b = tl.program_id(0)
    row = open_row(rows, b)
    _, start = blocks_of(rows, b)
    best = best_of_row(scanned, b, PROGRAMS)
    flags = status_of_key(key_of_rank(best))
    heat = tl.load(filters.temperature + b)
    token = tl.full([], -1, tl.int32)
    if flags == 0:
        if heat == 0.0:
            token = first_maximum(row, best)
        else:
            maximum = from_order_key(key_of_rank(best))
            c = scale(heat)
            end = tl.full([], LEAST_KEY, tl.int64) << 32
            if ends is not None:
                end = tl.load(ends + b)
            elif filters.min_p is not None:
                end = end_of_min_p(maximum, c, tl.load(filters.min_p + b))
            maxima, holders = scanned.maxima + start, scanned.holders + start
            token = race_row(row, open_stream(stream, b), maxima, holders, maximum, c, end, CHUNK, STEP)
    tl.store(tokens + b, token.to(tl.int64))
    tl.store(status + b, flags)
    if ranks is not None:
        tl.store(ranks + b, rank(load_logits(row, token), token))


@triton.jit(do_not_specialize=["programs"])
def redraw(
    rows,
    filters,
    stream,
    scanned,
    ranks,
    sums,
    tokens,
    programs,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Replace tokens that lie outside the top-p set. Grid (B,).

    A winner outside the set proves that the set lies strictly above it, where the race is run again.
    """
    b = tl.program_id(0)
    if checks_top_p(rows, filters, b):
        best = best_of_row(scanned, b, PROGRAMS)
        if status_of_key(key_of_rank(best)) == 0:
            row = open_row(rows, b)
            _, start = blocks_of(rows, b)
            maxima, holders = scanned.maxima + start, scanned.holders + start
            maximum = from_order_key(key_of_rank(best))
            c = scale(tl.load(filters.temperature + b))
            total, above, _ = sum_of_shares(sums, b, programs, PROGRAMS)
            limit = theta(tl.load(filters.top_p + b), total)
            end = tl.load(ranks + b) + 1
            while above >= limit:
                token = race_row(row, open_stream(stream, b), maxima, holders, maximum, c, end, CHUNK, STEP)
                tl.store(tokens + b, token.to(tl.int64))
                end = rank(load_logits(row, token), token) + 1
                above = tally(row, maxima, end, maximum, c, MASS, CHUNK, STEP)


@triton.jit
def race_row(row, stream, maxima, holders, maximum, c, end, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Return the id of the winner among the tokens of rank ``end`` and above.

    The holders' keys bound the winner's. A block can win only if its least exponential, over a weight that none of its
    tokens exceeds, is within the bound.
    """
    blocks = tl.cdiv(row[1], BLOCK)
    seed, offset, draft_index = stream
    bound = tl.full([], _INFINITY, tl.float32)
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        least, holder = block_race(seed, block, offset, draft_index)
        x = tl.load(holders + block, mask=block < blocks, other=-_INFINITY)
        key = race_key(least, weight(x, maximum, c))
        bound = tl.minimum(bound, tl.min(tl.where(rank(x, block * BLOCK + holder) >= end, key, _INFINITY), axis=0))
    best = tl.full([], _NOBODY, tl.int64)
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        top = tl.load(maxima + block, mask=block < blocks, other=LEAST_KEY - 1)
        least, _ = block_race(seed, block, offset, draft_index)
        w = weight(from_order_key(top), maximum, c)
        can_win = (top >= key_of_rank(end)) & (w > 0.0) & (race_key(least, heaviest(w)) <= bound)
        places, count = open_blocks(can_win)
        for start in range(0, count, STEP):
            ids, key = _keys(row, stream, pick(places, start, block, STEP), maximum, c, end, STEP)
            packed = (key.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ids.to(tl.int64)
            packed = tl.where(key < _INFINITY, packed, _NOBODY)
            best = tl.minimum(best, tl.min(tl.min(packed, axis=1), axis=0))
            bound = tl.minimum(bound, key_of_rank(best).to(tl.float32, bitcast=True))
    return (best & LAST_ID).to(tl.int32)


@triton.jit
def _keys(row, stream, block, maximum, c, end, STEP: tl.constexpr):
    """Return the ids of a few blocks and their keys in the race; infinite for blocks below 0 and ranks below end."""
    seed, offset, draft_index = stream
    ids = ids_of_blocks(block)
    x = load_logits(row, ids)
    least, holder = block_race(seed, block, offset, draft_index)
    quads = block[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    w0, w1, w2, w3 = token_words(seed, quads, offset, draft_index)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [STEP, BLOCK])
    arrival = tl.where((ids & (BLOCK - 1)) == holder[:, None], least[:, None], least[:, None] + noise(words))
    return ids, tl.where(rank(x, ids) >= end, race_key(arrival, weight(x, maximum, c)), _INFINITY)
