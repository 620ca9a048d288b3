"""Where top-p ends a row, to within a few tokens: rounds of pivots, each shared between all programs.

A round weighs what reaches each of a few keys. The next one starts from the two between which the limit is crossed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...numerics.triton_math import from_order_key, mass, order_key, scale, theta, weight
from .rows import (
    LEAST_KEY,
    best_of_row,
    blocks_of,
    ids_of_blocks,
    key_of_rank,
    load_logits,
    open_row,
    owner_of,
    status_of_key,
)
from .search import range_of_mass
from .weigh import checks_top_p


class Round(NamedTuple):
    """What a round leaves: its bracket, and the shares of the masses that reach its pivots."""

    bracket: Any  # int64 [B, 4]: low, high, mass that reaches high, limit (0 in the first round)
    masses: Any  # int64 [B, programs, pivots]


@triton.jit(do_not_specialize=["share"])
def narrow_bracket(
    rows,
    filters,
    scanned,
    before,
    after,
    share,
    PROGRAMS: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Leave the round ``after`` the one ``before``, which is None for the first. Grid (B, programs)."""
    b = tl.program_id(0)
    own = owner_of(rows, b)
    best = best_of_row(scanned, b, PROGRAMS)
    if checks_top_p(rows, filters, b) & (status_of_key(key_of_rank(best)) == 0):
        maximum = from_order_key(key_of_rank(best))
        c = scale(tl.load(filters.temperature + own))
        if before is None:
            low, high = range_of_mass(maximum, c)
            above = tl.full([], 0, tl.int64)
            limit = above
        else:
            top_p = tl.load(filters.top_p + own)
            low, high, above, limit = next_bracket(before, top_p, scanned, b, PROGRAMS, PIVOTS)
        if tl.program_id(1) == 0:
            bracket = after.bracket + b.to(tl.int64) * 4
            tl.store(bracket, low)
            tl.store(bracket + 1, high)
            tl.store(bracket + 2, above)
            tl.store(bracket + 3, limit)
        masses = _weigh_pivots(rows, scanned, b, share, low, high, maximum, c, PIVOTS, TILE)
        at = (b.to(tl.int64) * scanned.programs + tl.program_id(1)) * PIVOTS
        tl.store(after.masses + at + tl.arange(0, PIVOTS), masses)


@triton.jit
def _weigh_pivots(rows, scanned, b, share, low, high, maximum, c, PIVOTS: tl.constexpr, TILE: tl.constexpr):
    """Return this program's share of the masses that reach the pivots, int64 [PIVOTS]."""
    row = open_row(rows, b)
    blocks, start_of_row = blocks_of(rows, b)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, blocks)
    pivots = _pivots(low, high, PIVOTS)[None, None, :]
    masses = tl.zeros([TILE, 64, PIVOTS], tl.int64)
    for start in range(first, last, TILE):
        block = start + tl.arange(0, TILE)
        top = tl.load(scanned.maxima + start_of_row + block, mask=block < last, other=LEAST_KEY - 1)
        if tl.max(top, axis=0) >= low:
            x = load_logits(row, ids_of_blocks(tl.where(top >= low, block, -1)))
            reaches = order_key(x)[:, :, None] >= pivots
            masses += tl.where(reaches, mass(weight(x, maximum, c))[:, :, None], 0)
    return tl.sum(tl.sum(masses, axis=0), axis=0)


@triton.jit
def next_bracket(before, top_p, scanned, b, PROGRAMS: tl.constexpr, PIVOTS: tl.constexpr):
    """Return ``(low, high, above, limit)``: the mass that reaches low is at least the limit, that of high less."""
    bracket = before.bracket + b.to(tl.int64) * 4
    low, high = tl.load(bracket), tl.load(bracket + 1)
    above, limit = tl.load(bracket + 2), tl.load(bracket + 3)
    program, pivot = tl.arange(0, PROGRAMS)[:, None], tl.arange(0, PIVOTS)[None, :]
    at = (b.to(tl.int64) * scanned.programs + program) * PIVOTS + pivot
    masses = tl.sum(tl.load(before.masses + at, mask=program < scanned.programs, other=0), axis=0)
    # The first pivot is low, which in the first round all mass reaches.
    limit = tl.where(limit == 0, theta(top_p, tl.max(masses, axis=0)), limit)
    pivots = _pivots(low, high, PIVOTS).to(tl.int64)
    reaches = masses >= limit
    above = tl.maximum(above, tl.max(tl.where(reaches, 0, masses), axis=0))
    high = tl.minimum(high, tl.min(tl.where(reaches, high, pivots), axis=0))
    return tl.maximum(low, tl.max(tl.where(reaches, pivots, low), axis=0)), high, above, limit


@triton.jit
def _pivots(low, high, PIVOTS: tl.constexpr):
    """Return keys from low to below high, int32 [PIVOTS], as far apart in value as can be."""
    least, most = from_order_key(low.to(tl.int32)), from_order_key(high.to(tl.int32))
    lane = tl.arange(0, PIVOTS)
    keys = order_key(least + (most - least) * (lane.to(tl.float32) * (1.0 / PIVOTS)))
    keys = tl.minimum(tl.maximum(keys, low.to(tl.int32)), (high - 1).to(tl.int32))
    return tl.where(lane == 0, low.to(tl.int32), keys)
