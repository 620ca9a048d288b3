"""What every kernel is given: rows and scratch, and how a row becomes integer masses, a chunk at a time.

A row is split into chunks of ids, one program each. The first launch leaves the best rank of every chunk, the next one
its mass; whoever comes later reduces these few numbers. No masses of single ids are stored: they are formed again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....numerics.triton_math import from_order_key, mass, probability_mass, scale, weight
from ....sampling.kernels.rows import (
    LEAST_KEY,
    NAN_KEY,
    first_maximum,
    key_of_rank,
    load_logits,
    rank,
    rank_of_key,
    status_of_key,
)
from ....types import Status

_EMPTY = tl.constexpr(int(Status.EMPTY_SUPPORT))
_BAD = tl.constexpr(int(Status.BAD_PROBABILITY))
_LOWEST = tl.constexpr(-(1 << 63))


class Rows(NamedTuple):
    """Rows ``[B, N, V]`` of one side, logits or probabilities, their filters, and what launches leave of them.

    Filters are those of logits; None where one is off.
    """

    entries: Any  # ids lie side by side
    batch: Any  # strides, in elements
    position: Any
    count: Any  # N
    vocab: Any
    chunks: Any  # of a row
    temperature: Any  # float32 [B]
    penalty: Any  # float32 [B]
    seen: Any  # int32 [B, N, words], a bit for each id of the history
    words: Any
    mask: Any  # uint8 [B, N, V] or int32 [B, N, words]
    mask_batch: Any
    mask_position: Any
    best: Any  # int64 [B, N, chunks], the best rank, with the block in place of the id
    maxima: Any  # int32 [B, N, blocks], keys, for filters and races
    ends: Any  # int64 [B, N], the least rank that the filters keep
    masses: Any  # int64 [B, N, chunks]
    token_mass: Any  # int64 [B, N], of the draft token


class Scratch(NamedTuple):
    """What launches leave of the sequences."""

    draft_ends: Any  # int32 [B, 3]: length, whether by eos, status
    holders: Any  # float32 [B, K+1, blocks], for races: the logits of the ids that hold a block's least exponential
    residuals: Any  # int64 [B, 1 or K, chunks of the target]
    verdicts: Any  # int32 [B, K+1], status and whether the draft is accepted
    chances: Any  # float32 [B, K+1, 4]
    choices: Any  # int64 [B, K+1], what rules match and greedy emit
    state: Any  # int32 [B], the position to look at next, -1 once decided


@triton.jit
def number_of(rows, b, i):
    """Return the number of a row on its side, int64."""
    return b.to(tl.int64) * rows.count + i


@triton.jit
def open_position(rows, b, i):
    """Return position i of sequence b as the tuple that ``load_logits`` takes."""
    b, i = b.to(tl.int64), i.to(tl.int64)
    seen, mask, rate = rows.seen, rows.mask, 1.0
    if rows.seen is not None:
        seen += (b * rows.count + i) * rows.words
        rate = tl.load(rows.penalty + b)
    if rows.mask is not None:
        mask += b * rows.mask_batch + i * rows.mask_position
    return rows.entries + b * rows.batch + i * rows.position, rows.vocab, seen, rate, mask


@triton.jit
def chunk_ids(chunk, CHUNK: tl.constexpr):
    """Return the ids of a chunk, int32."""
    return chunk * CHUNK + tl.arange(0, CHUNK)


@triton.jit
def status_of_row(best, LOGITS: tl.constexpr):
    """Return the status of a row whose best rank is given."""
    key = key_of_rank(best)
    status = status_of_key(key)
    if not LOGITS:
        status = tl.where(key == NAN_KEY, _BAD, tl.where(key == 0, _EMPTY, 0))
    return status


@triton.jit
def best_rank(rows, b, i, CHUNKS: tl.constexpr):
    """Return the best rank of a row."""
    return tl.max(load_chunks(rows.best, rows, b, i, _LOWEST, CHUNKS), axis=0)


@triton.jit
def load_chunks(values, rows, b, i, other, CHUNKS: tl.constexpr):
    """Return a row's values by chunk, int64 [CHUNKS]."""
    at = tl.arange(0, CHUNKS)
    return tl.load(values + number_of(rows, b, i) * rows.chunks + at, mask=at < rows.chunks, other=other)


@triton.jit
def load_masses(rows, b, i, CHUNKS: tl.constexpr):
    """Return a row's masses by chunk, int64 [CHUNKS]."""
    return load_chunks(rows.masses, rows, b, i, 0, CHUNKS)


@triton.jit
def chunk_masses(rows, b, i, chunk, LOGITS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the masses of a chunk of a live row, int64 [CHUNK]."""
    ids = chunk_ids(chunk, CHUNK)
    row = open_position(rows, b, i)
    x = load_logits(row, ids)
    best = best_rank(rows, b, i, CHUNKS)
    maximum = from_order_key(key_of_rank(best))
    if LOGITS:
        heat = tl.load(rows.temperature + b)
        end = tl.full([], LEAST_KEY, tl.int64) << 32
        if rows.ends is not None:
            end = tl.load(rows.ends + number_of(rows, b, i))
        elif heat == 0.0:
            end = rank_of_key(key_of_rank(best), first_maximum(row, best))
        masses = mass(weight(x, maximum, scale(tl.where(heat == 0.0, 1.0, heat))))
        masses = tl.where(rank(x, ids) >= end, masses, 0)
    else:
        masses = probability_mass(tl.where(ids < rows.vocab, x, 0.0), maximum)
    return masses
