"""Masses of rows: of the whole row, and of the tokens from a rank up."""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.triton_math import from_order_key, mass, scale, weight
from .rows import (
    best_of_row,
    blocks_of,
    ids_of_blocks,
    key_of_rank,
    load_logits,
    open_row,
    owner_of,
    quotient,
    rank,
)

_INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["share"])
def weigh(
    rows,
    filters,
    scanned,
    ends,
    sums,
    share,
    CHECK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Leave the shares of three sums, int64 [B, programs, 3]. Grid (B, programs).

    The mass of the row; that of the tokens whose rank is at least ``ends`` [B]; and how many of these have a divided
    logit above -inf. For CHECK, which passes over rows that need no check of top-p: of the tokens ranked above, and
    they are not counted.
    """
    b = tl.program_id(0)
    needed = tl.full([], 1, tl.int1)
    if CHECK:
        needed = checks_top_p(rows, filters, b)
    if needed:
        row = open_row(rows, b)
        blocks, _ = blocks_of(rows, b)
        maximum = from_order_key(key_of_rank(best_of_row(scanned, b, PROGRAMS)))
        heat = tl.load(filters.temperature + b)
        heat = tl.where(heat == 0.0, 1.0, heat)
        c = scale(heat)
        end = tl.load(ends + b) + CHECK
        first = tl.program_id(1) * share
        last = tl.minimum(first + share, blocks)
        total = tl.full([TILE], 0, tl.int64)
        part = tl.full([TILE], 0, tl.int64)
        count = tl.full([TILE], 0, tl.int32)
        for start in range(first, last, TILE):
            block = start + tl.arange(0, TILE)
            ids = ids_of_blocks(tl.where(block < last, block, -1))
            x = load_logits(row, ids)
            masses = mass(weight(x, maximum, c))
            reaches = rank(x, ids) >= end
            total += tl.sum(masses, axis=1)
            part += tl.sum(tl.where(reaches, masses, 0), axis=1)
            if CHECK == 0:
                count += tl.sum((reaches & (quotient(x, heat, 0.0) > -_INFINITY)).to(tl.int32), axis=1)
        sums += (b.to(tl.int64) * scanned.programs + tl.program_id(1)) * 3
        tl.store(sums, tl.sum(total, axis=0))
        tl.store(sums + 1, tl.sum(part, axis=0))
        tl.store(sums + 2, tl.sum(count, axis=0).to(tl.int64))


@triton.jit
def checks_top_p(rows, filters, b):
    """Return whether row b draws first and checks against top-p then; rows with top-k have a list instead."""
    own = owner_of(rows, b)
    checks = (tl.load(filters.top_p + own) < 1.0) & (tl.load(filters.temperature + own) > 0.0)
    if filters.top_k is not None:
        checks = checks & (tl.load(filters.top_k + own) >= rows.vocab)
    return checks


@triton.jit
def sum_of_shares(sums, b, programs, PROGRAMS: tl.constexpr):
    """Return the three sums of row b."""
    lane = tl.arange(0, PROGRAMS)
    at = sums + (b.to(tl.int64) * programs + lane) * 3
    inside = lane < programs
    total = tl.sum(tl.load(at, mask=inside, other=0), axis=0)
    part = tl.sum(tl.load(at + 1, mask=inside, other=0), axis=0)
    return total, part, tl.sum(tl.load(at + 2, mask=inside, other=0), axis=0)
