"""Rows as kernels see them: logits after penalty and mask, and the rank of a token as one integer.

A rank is ``order_key(logit) << 32 | (2**31 - 1 - id)``: the larger of two ranks is the token that comes first (logit
descending, id ascending). Every filter keeps the tokens from some rank up, so a filtered row is a row and its ``end``,
the least rank that is kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...numerics.triton_math import div, exponent, from_order_key, least_exponent, load_row, order_key, penalise
from ...types import Status

BLOCK = tl.constexpr(64)
LAST_ID = tl.constexpr((1 << 31) - 1)
_INFINITY = tl.constexpr(float("inf"))
_KEY_OF_INFINITY = tl.constexpr(0x7F800000)
LEAST_KEY = tl.constexpr(-0x7F800000)  # of the lowest finite logit
NAN_KEY = tl.constexpr(0x7FFFFFFF)
_LOWEST = tl.constexpr(-(1 << 63))
_NAN = tl.constexpr(int(Status.NAN))
_EMPTY_SUPPORT = tl.constexpr(int(Status.EMPTY_SUPPORT))


class Rows(NamedTuple):
    """Rows of logits with their penalty and mask. A row's logits lie side by side."""

    logits: Any
    stride: Any
    vocab: Any
    seen: Any  # int32 [B, ceil(V / 32)], a bit for each id of the history, or None
    penalty: Any  # float32 [B]
    mask: Any  # uint8 [B, V], int32 [B, ceil(V / 32)], or None
    mask_stride: Any
    each: Any = 1  # rows that share their penalty and filters, one after the other


class Stream(NamedTuple):
    """The race of each row, int64 [B]; without draft indices it is the target's own."""

    seed: Any
    offset: Any
    draft_index: Any


class Scanned(NamedTuple):
    """What the scan leaves of the rows."""

    maxima: Any  # int32 [B, blocks], the key of each block's maximum
    holders: Any  # float32 [B, blocks], the logit of the id that holds a block's least exponential; or None
    best: Any  # int64 [B, programs], rank of the maximum, with the number of its first block for an id
    programs: Any


@triton.jit
def open_row(rows, b):
    """Return row b as the tuple that ``load_logits`` takes."""
    seen, mask, rate = rows.seen, rows.mask, 1.0
    if rows.seen is not None:
        seen += b.to(tl.int64) * tl.cdiv(rows.vocab, 32)
        rate = tl.load(rows.penalty + owner_of(rows, b))
    if rows.mask is not None:
        mask += b.to(tl.int64) * rows.mask_stride
    return rows.logits + b.to(tl.int64) * rows.stride, rows.vocab, seen, rate, mask


@triton.jit
def owner_of(rows, b):
    """Return the place of row b's penalty and filters."""
    return b // rows.each


@triton.jit
def open_stream(stream, b):
    """Return ``(seed, offset, draft index)`` of row b."""
    index = -1
    if stream.draft_index is not None:
        index = tl.load(stream.draft_index + b)
    return tl.load(stream.seed + b), tl.load(stream.offset + b), index


@triton.jit
def blocks_of(rows, b):
    """Return ``(blocks, start)``: the number of blocks of a row, and where those of row b start."""
    blocks = tl.cdiv(rows.vocab, BLOCK)
    return blocks, b.to(tl.int64) * blocks


@triton.jit
def load_logits(row, ids):
    """Return the float32 logits of int32 ids after penalty and mask; -inf beyond the vocabulary."""
    logits, vocab, seen, rate, mask = row
    inside = (ids >= 0) & (ids < vocab)
    x = load_row(logits + ids, inside)
    if seen is not None:
        x = tl.where(_bit(seen, ids, inside), penalise(x, rate), x)
    if mask is not None:
        if mask.dtype.element_ty == tl.int32:
            allowed = _bit(mask, ids, inside)
        else:
            allowed = tl.load(mask + ids, mask=inside, other=0) != 0
        x = tl.where(allowed, x, -_INFINITY)
    return x


@triton.jit
def _bit(words, ids, inside):
    return ((tl.load(words + (ids >> 5), mask=inside, other=0) >> (ids & 31)) & 1) != 0


@triton.jit
def mark_seen(seen, words, history, history_stride, length, vocab, WIDTH: tl.constexpr):
    """Set the bit of each id of a row's history. Grid (B,); ``seen`` is zeroed."""
    b = tl.program_id(0).to(tl.int64)
    for first in range(0, length, WIDTH):
        at = first + tl.arange(0, WIDTH)
        mark(seen + b * words, vocab, tl.load(history + b * history_stride + at, mask=at < length, other=-1))


@triton.jit
def mark(words, vocab, ids):
    """Set the bits of the ids that are in the vocabulary."""
    inside = (ids >= 0) & (ids < vocab)
    bit = tl.where(inside, 1, 0) << (ids & 31).to(tl.int32)
    tl.atomic_or(words + (ids >> 5), bit, mask=inside, sem="relaxed")


@triton.jit
def rank(x, ids):
    """Return the rank of tokens, int64."""
    return rank_of_key(order_key(x), ids)


@triton.jit
def rank_of_key(key, ids):
    # Ids below 0, which stand for no token, must not reach the key's bits.
    return (key.to(tl.int64) << 32) | ((ids & LAST_ID) ^ LAST_ID).to(tl.int64)


@triton.jit
def key_of_rank(value):
    return (value >> 32).to(tl.int32)


@triton.jit
def id_of_rank(value):
    return ((value & LAST_ID) ^ LAST_ID).to(tl.int32)


@triton.jit
def best_of_row(scanned, b, PROGRAMS: tl.constexpr):
    """Return the highest of the ranks that the programs of a scan left."""
    lane = tl.arange(0, PROGRAMS)
    ranks = tl.load(
        scanned.best + b.to(tl.int64) * scanned.programs + lane, mask=lane < scanned.programs, other=_LOWEST
    )
    return tl.max(ranks, axis=0)


@triton.jit
def status_of_key(key):
    """Return the status of a row whose maximum has the key."""
    return tl.where(key > _KEY_OF_INFINITY, _NAN, tl.where(key < LEAST_KEY, _EMPTY_SUPPORT, 0))


@triton.jit
def first_maximum(row, best):
    """Return the lowest id of the row's maximum."""
    ids = id_of_rank(best) * BLOCK + tl.arange(0, BLOCK)
    return tl.min(tl.where(order_key(load_logits(row, ids)) == key_of_rank(best), ids, LAST_ID), axis=0)


@triton.jit
def midpoint(low, high):
    """Return ``floor((low + high) / 2)`` of integers whose sum may overflow."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def first_key(high, least, MEASURE: tl.constexpr, a, b):
    """Return the lowest key of a finite logit whose measure is at least ``least``.

    ``MEASURE(logit, a, b)`` does not fall where the logit rises, and reaches ``least`` at ``high``.
    """
    low = tl.full([], LEAST_KEY - 1, tl.int32)
    for _ in range(32):
        middle = midpoint(low, high)
        reaches = (MEASURE(from_order_key(middle), a, b) >= least) & (middle > low)
        high = tl.where(reaches, middle, high)
        low = tl.where(reaches, low, middle)
    return high


@triton.jit
def quotient(logit, temperature, _):
    """Return what top-k ranks by."""
    return div(logit, temperature)


@triton.jit
def end_of_min_p(maximum, c, min_p):
    """Return the least rank that min-p keeps."""
    return first_key(order_key(maximum), least_exponent(min_p), exponent, maximum, c).to(tl.int64) << 32


@triton.jit
def open_blocks(is_open):
    """Return ``(places, count)`` of the blocks of a chunk that are open, for ``pick``."""
    places = tl.cumsum(is_open.to(tl.int32), axis=0)
    return tl.where(is_open, places - 1, -1), tl.max(places, axis=0)


@triton.jit
def pick(places, start, block, STEP: tl.constexpr):
    """Return the open blocks in places [start, start + STEP); -1 where there are fewer."""
    hit = places[None, :] == (start + tl.arange(0, STEP))[:, None]
    return tl.max(tl.where(hit, block[None, :], -1), axis=1)


@triton.jit
def ids_of_blocks(block):
    """Return the ids of blocks, [n, 64]; below 0 for a block below 0."""
    return block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
