"""The first read of a row: the maximum of every block of 64 ids, and what the race needs of a block."""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.triton_math import order_key
from ...rng.triton_philox import block_race
from .rows import BLOCK, NAN_KEY, blocks_of, ids_of_blocks, load_logits, open_row, open_stream, rank_of_key

_INFINITY = tl.constexpr(float("inf"))
_LEAST = tl.constexpr(-(1 << 31))


@triton.jit(do_not_specialize=["share"])
def scan(rows, filters, stream, scanned, share, TILE: tl.constexpr, WIDE: tl.constexpr):
    """Leave what is in ``scanned``. Grid (B, programs); a program has ``share`` blocks."""
    b = tl.program_id(0)
    row = open_row(rows, b)
    blocks, start = blocks_of(rows, b)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, blocks)
    best = _scan_blocks(row, first, last, scanned.maxima + start, TILE)
    tl.store(scanned.best + b.to(tl.int64) * scanned.programs + tl.program_id(1), best)
    if scanned.holders is not None:
        heat = tl.load(filters.temperature + b)
        _leave_holders(row, first, last, heat, open_stream(stream, b), scanned.holders + start, WIDE)


@triton.jit
def _scan_blocks(row, first, last, maxima, TILE: tl.constexpr):
    """Leave the keys of the maxima of blocks [first, last), and return the rank of the largest.

    Its key is NAN_KEY if a logit is NaN; its id is the number of the first block that has it.
    """
    best = tl.full([TILE], _LEAST, tl.int32)
    place = tl.full([TILE], 0, tl.int32)
    largest = tl.full([TILE, BLOCK], 0, tl.int32)
    for start in range(first, last, TILE):
        block = start + tl.arange(0, TILE)
        inside = block < last
        x = load_logits(row, ids_of_blocks(tl.where(inside, block, -1)))
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        key = order_key(tl.max(tl.maximum(x, -_INFINITY), axis=1))
        tl.store(maxima + block, key, mask=inside)
        place = tl.where(key > best, block, place)
        best = tl.maximum(best, key)
    nan = tl.max(tl.max(largest, axis=1), axis=0) > 0x7F800000
    return tl.max(rank_of_key(tl.where(nan, NAN_KEY, best), place), axis=0)


@triton.jit
def _leave_holders(row, first, last, temperature, stream, holders, WIDE: tl.constexpr):
    """Leave the logit of the id that holds the least exponential of each block in [first, last)."""
    seed, offset, draft_index = stream
    if temperature > 0.0:
        for start in range(first, last, WIDE):
            block = start + tl.arange(0, WIDE)
            inside = block < last
            _, holder = block_race(seed, block, offset, draft_index)
            tl.store(holders + block, load_logits(row, tl.where(inside, block * BLOCK + holder, -1)), mask=inside)
