"""The launches that look at rows: best ranks, ends, masses."""

from __future__ import annotations

import triton
import triton.language as tl

from ....numerics.triton_math import from_order_key, order_key, scale
from ....rng.triton_philox import block_race
from ....sampling.kernels.rows import (
    BLOCK,
    LEAST_KEY,
    NAN_KEY,
    end_of_min_p,
    first_maximum,
    ids_of_blocks,
    key_of_rank,
    load_logits,
    rank_of_key,
)
from ....sampling.kernels.search import end_of_top_k, end_of_top_p
from .chains import draft_end
from .rows import best_rank, chunk_ids, chunk_masses, open_position, status_of_row

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def position_of(scratch, b, number, GATED: tl.constexpr):
    """Return the position a program works on: its number, or the one its sequence has come to."""
    if GATED:
        number = tl.load(scratch.state + b)
    return number


@triton.jit
def _row_of(scratch, chains, b, length, positions, extra, GATED: tl.constexpr):
    """Return ``(of_draft, i, number, wanted)`` of a program whose second axis runs over target and draft positions."""
    axis = tl.program_id(1)
    of_draft = axis >= positions
    i = position_of(scratch, b, tl.where(of_draft, axis - positions, axis), GATED)
    wanted = (i >= 0) & (i < tl.where(of_draft, length, length + extra))
    number = b.to(tl.int64) * (2 * chains.drafted + 1) + tl.where(of_draft, chains.drafted + 1 + i, i)
    return of_draft, i, number, wanted


@triton.jit(do_not_specialize=["positions", "extra"])
def row_scan(
    target,
    draft,
    chains,
    scratch,
    positions,
    extra,
    LOGITS: tl.constexpr,
    GATED: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Leave the best rank of each chunk, and where a filter or race follows the maxima of its blocks."""
    chunk, b = tl.program_id(0) % scratch.chunks, tl.program_id(0) // scratch.chunks
    if GATED:
        length = tl.load(scratch.draft_ends + b * 3)
    else:
        length, by_eos, status = draft_end(chains, b, POSITIONS)
        if (chunk == 0) & (tl.program_id(1) == 0):
            tl.store(scratch.draft_ends + b * 3, length)
            tl.store(scratch.draft_ends + b * 3 + 1, by_eos.to(tl.int32))
            tl.store(scratch.draft_ends + b * 3 + 2, status)
    of_draft, i, number, wanted = _row_of(scratch, chains, b, length, positions, extra, GATED)
    if wanted:
        if draft is None:
            best = _scan_chunk(target, chains, scratch, number, b, i, chunk, LOGITS, CHUNK)
        elif of_draft:
            best = _scan_chunk(draft, chains, scratch, number, b, i, chunk, LOGITS, CHUNK)
        else:
            best = _scan_chunk(target, chains, scratch, number, b, i, chunk, LOGITS, CHUNK)
        tl.store(scratch.best + number * scratch.chunks + chunk, best)


@triton.jit
def _scan_chunk(rows, chains, scratch, number, b, i, chunk, LOGITS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the best rank of a chunk, its first block in place of the id; its key is NAN_KEY if an entry is bad."""
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    row = open_position(rows, b, i)
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    x = load_logits(row, ids_of_blocks(block))
    good = x == x
    if not LOGITS:
        good = (x < _INFINITY) & ((x >= 0.0) | (ids_of_blocks(block) >= rows.vocab))
    key = tl.max(tl.where(good, order_key(x), NAN_KEY), axis=1)
    inside = block * BLOCK < rows.vocab
    if scratch.maxima is not None:
        tl.store(scratch.maxima + number * scratch.blocks + block, key, mask=inside)
    if scratch.holders is not None:
        _, holder = block_race(tl.load(chains.seed + b), block, tl.load(chains.offset + b) + i, -1)
        holders = scratch.holders + (b.to(tl.int64) * (chains.drafted + 1) + i) * scratch.blocks
        tl.store(holders + block, load_logits(row, block * BLOCK + holder), mask=inside)
    return tl.max(rank_of_key(key, block), axis=0)


@triton.jit(do_not_specialize=["positions", "extra"])
def row_ends(
    target,
    draft,
    chains,
    scratch,
    positions,
    extra,
    GATED: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
):
    """Leave the least rank that the filters keep of each row; at temperature 0 that of its first maximum."""
    b = tl.program_id(0)
    length = tl.load(scratch.draft_ends + b * 3)
    of_draft, i, number, wanted = _row_of(scratch, chains, b, length, positions, extra, GATED)
    if wanted:
        if draft is None:
            end = _end_of_row(target, scratch, number, b, i, CHUNKS, GROUP, STEP)
        elif of_draft:
            end = _end_of_row(draft, scratch, number, b, i, CHUNKS, GROUP, STEP)
        else:
            end = _end_of_row(target, scratch, number, b, i, CHUNKS, GROUP, STEP)
        tl.store(scratch.ends + number, end)


@triton.jit
def _end_of_row(rows, scratch, number, b, i, CHUNKS: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr):
    row = open_position(rows, b, i)
    maxima = scratch.maxima + number * scratch.blocks
    best = best_rank(scratch, number, CHUNKS)
    heat = tl.load(rows.temperature + b)
    end = tl.full([], LEAST_KEY, tl.int64) << 32
    if status_of_row(best, True) == 0:
        if heat == 0.0:
            end = rank_of_key(key_of_rank(best), first_maximum(row, best))
        else:
            maximum = from_order_key(key_of_rank(best))
            c = scale(heat)
            if rows.top_k is not None:
                k = tl.load(rows.top_k + b)
                if k < rows.vocab:
                    end = end_of_top_k(row, maxima, k, heat, maximum, c, GROUP, STEP) << 32
            if rows.top_p is not None:
                p = tl.load(rows.top_p + b)
                if p < 1.0:
                    end = end_of_top_p(row, maxima, key_of_rank(end), p, maximum, c, GROUP, STEP)
            if rows.min_p is not None:
                end = tl.maximum(end, end_of_min_p(maximum, c, tl.load(rows.min_p + b)))
    return end


@triton.jit(do_not_specialize=["positions", "extra"])
def row_masses(
    target,
    draft,
    chains,
    scratch,
    positions,
    extra,
    LOGITS: tl.constexpr,
    GATED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Leave the mass of each chunk of the rows that are alive, and that of the draft token."""
    chunk, b = tl.program_id(0) % scratch.chunks, tl.program_id(0) // scratch.chunks
    length = tl.load(scratch.draft_ends + b * 3)
    of_draft, i, number, wanted = _row_of(scratch, chains, b, length, positions, extra, GATED)
    if wanted:
        status = status_of_row(best_rank(scratch, number, CHUNKS), LOGITS)
        if status == 0:
            vocab = target.vocab
            if draft is None:
                masses = chunk_masses(target, scratch, number, b, i, chunk, LOGITS, CHUNK, CHUNKS)
            elif of_draft:
                masses = chunk_masses(draft, scratch, number, b, i, chunk, LOGITS, CHUNK, CHUNKS)
                vocab = draft.vocab
            else:
                masses = chunk_masses(target, scratch, number, b, i, chunk, LOGITS, CHUNK, CHUNKS)
            tl.store(scratch.masses + number * scratch.chunks + chunk, tl.sum(masses, axis=0))
            token = tl.load(chains.tokens + b * chains.drafted + i, mask=i < chains.drafted, other=-1)
            # One program writes it, chunk 0 where no chunk holds the token.
            inside = (token >= 0) & (token < vocab)
            if chunk == tl.where(inside, token, 0).to(tl.int32) // CHUNK:
                of_token = tl.where((chunk_ids(chunk, CHUNK) == token) & inside, masses, 0)
                tl.store(scratch.token_mass + number, tl.sum(of_token, axis=0))
