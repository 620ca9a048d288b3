"""The first read of a row: the maximum of every block of 64 ids, and what the race needs of a block."""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.triton_math import order_key
from ...rng.triton_philox import block_race
from .rows import BLOCK, NAN_KEY, ids_of_blocks, load_logits, open_row, open_stream, rank_of_key

_INFINITY = tl.constexpr(float("inf"))
_LEAST = tl.constexpr(-(1 << 31))


@triton.jit
def scan_blocks(row, first, last, maxima, TILE: tl.constexpr):
    """Return the partial rank of blocks [first, last), and leave the keys of their maxima unless that is None.

    The partial's key is that of the largest logit, NAN_KEY if one is NaN; its id is the first block that has it.
    """
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], _LEAST, tl.int32)
    where = tl.full([TILE], 0, tl.int32)
    largest = tl.full([TILE, BLOCK], 0, tl.int32)
    for start in range(first, last, TILE):
        block = start + lane
        inside = block < last
        x = load_logits(row, ids_of_blocks(tl.where(inside, block, -1)))
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        key = order_key(tl.max(tl.maximum(x, -_INFINITY), axis=1))
        if maxima is not None:
            tl.store(maxima + block, key, mask=inside)
        higher = key > best
        where = tl.where(higher, block, where)
        best = tl.where(higher, key, best)
    nan = tl.max(largest) > 0x7F800000
    return tl.max(rank_of_key(tl.where(nan, NAN_KEY, best), where), axis=0)


@triton.jit
def scan(
    logits,
    stride,
    vocab,
    seen,
    penalty,
    mask,
    mask_stride,
    temperature,
    seed,
    offset,
    draft_index,
    maxima,
    holders,
    partial,
    share,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Leave ``maxima`` int32 [B, blocks], ``partial`` int64 [B, programs], and the logit of each block's holder.

    Grid (B, programs); a program has ``share`` blocks. ``holders`` float32 [B, blocks]; None if no race follows.
    """
    b = tl.program_id(0)
    blocks = tl.cdiv(vocab, BLOCK)
    row = open_row(b, logits, stride, vocab, seen, penalty, mask, mask_stride)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, blocks)
    at = b.to(tl.int64) * blocks
    best = scan_blocks(row, first, last, maxima + at, TILE)
    tl.store(partial + b.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), best)
    if holders is not None:
        _leave_holders(
            row, first, last, tl.load(temperature + b), open_stream(b, seed, offset, draft_index), holders + at, WIDE
        )


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
