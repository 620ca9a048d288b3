"""The launches that look at rows: best ranks, then masses."""

from __future__ import annotations

import triton
import triton.language as tl

from ....numerics.triton_math import order_key
from ....rng.triton_philox import block_race
from ....sampling.kernels.rows import BLOCK, NAN_KEY, ids_of_blocks, load_logits, rank_of_key
from .chains import draft_end
from .rows import best_rank, chunk_ids, chunk_masses, number_of, open_position, status_of_row

_INFINITY = tl.constexpr(float("inf"))
_LOWEST = tl.constexpr(-(1 << 63))


@triton.jit
def position_of(scratch, b, number, GATED: tl.constexpr):
    """Return the position a program works on: its number, or the one its sequence has come to."""
    if GATED:
        number = tl.load(scratch.state + b)
    return number


@triton.jit(do_not_specialize=["positions", "extra", "chunks"])
def row_scan(
    target,
    draft,
    chains,
    scratch,
    positions,
    extra,
    chunks,
    LOGITS: tl.constexpr,
    GATED: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Leave the best rank of each chunk, and where a filter or race follows the maxima of its blocks.

    Grid (B * chunks, positions of the target and then of the draft).
    """
    chunk, b = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    if GATED:
        length = tl.load(scratch.draft_ends + b * 3)
    else:
        length, by_eos, status = draft_end(chains, b, POSITIONS)
        if (chunk == 0) & (tl.program_id(1) == 0):
            tl.store(scratch.draft_ends + b * 3, length)
            tl.store(scratch.draft_ends + b * 3 + 1, by_eos.to(tl.int32))
            tl.store(scratch.draft_ends + b * 3 + 2, status)
    of_draft, i, wanted = _row_of(scratch, b, length, positions, extra, GATED)
    if draft is None:
        _scan_chunk(target, chains, scratch, b, i, chunk, wanted, LOGITS, GATED, CHUNK)
    elif of_draft:
        _scan_chunk(draft, chains, scratch, b, i, chunk, wanted, LOGITS, GATED, CHUNK)
    else:
        _scan_chunk(target, chains, scratch, b, i, chunk, wanted, LOGITS, GATED, CHUNK)


@triton.jit
def _row_of(scratch, b, length, positions, extra, GATED: tl.constexpr):
    """Return ``(of_draft, i, wanted)``: the side and position of a program, and whether its sequence needs the row."""
    axis = tl.program_id(1)
    of_draft = axis >= positions
    i = position_of(scratch, b, tl.where(of_draft, axis - positions, axis), GATED)
    return of_draft, i, (i >= 0) & (i < tl.where(of_draft, length, length + extra))


@triton.jit
def _scan_chunk(
    rows, chains, scratch, b, i, chunk, wanted, LOGITS: tl.constexpr, GATED: tl.constexpr, CHUNK: tl.constexpr
):
    """Leave the best rank of a chunk, its first block in place of the id; its key is NAN_KEY if an entry is bad.

    Rows that are not wanted are left as rows without a token, for the search of ends, which asks no sequence.
    """
    at = rows.best + number_of(rows, b, i) * rows.chunks + chunk
    if wanted & (chunk < rows.chunks):
        BLOCKS: tl.constexpr = CHUNK // BLOCK
        row = open_position(rows, b, i)
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        x = load_logits(row, ids_of_blocks(block))
        good = x == x
        if not LOGITS:
            good = (x < _INFINITY) & ((x >= 0.0) | (ids_of_blocks(block) >= rows.vocab))
        key = tl.max(tl.where(good, order_key(x), NAN_KEY), axis=1)
        tl.store(at, tl.max(rank_of_key(key, block), axis=0))
        blocks = tl.cdiv(rows.vocab, BLOCK)
        start = number_of(rows, b, i) * blocks
        if rows.maxima is not None:
            tl.store(rows.maxima + start + block, key, mask=block < blocks)
        if scratch.holders is not None:
            _, holder = block_race(tl.load(chains.seed + b), block, tl.load(chains.offset + b) + i, -1)
            tl.store(scratch.holders + start + block, load_logits(row, block * BLOCK + holder), mask=block < blocks)
    elif not GATED:
        tl.store(at, _LOWEST, mask=(i < rows.count) & (chunk < rows.chunks))


@triton.jit(do_not_specialize=["positions", "extra", "chunks"])
def row_masses(
    target,
    draft,
    chains,
    scratch,
    positions,
    extra,
    chunks,
    LOGITS: tl.constexpr,
    GATED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Leave the mass of each chunk of the rows that are alive, and that of the draft token. Grid as ``row_scan``."""
    chunk, b = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    length = tl.load(scratch.draft_ends + b * 3)
    of_draft, i, wanted = _row_of(scratch, b, length, positions, extra, GATED)
    if wanted:
        if draft is None:
            _weigh_chunk(target, chains, b, i, chunk, LOGITS, CHUNK, CHUNKS)
        elif of_draft:
            _weigh_chunk(draft, chains, b, i, chunk, LOGITS, CHUNK, CHUNKS)
        else:
            _weigh_chunk(target, chains, b, i, chunk, LOGITS, CHUNK, CHUNKS)


@triton.jit
def _weigh_chunk(rows, chains, b, i, chunk, LOGITS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    status = status_of_row(best_rank(rows, b, i, CHUNKS), LOGITS)
    if (status == 0) & (chunk < rows.chunks):
        masses = chunk_masses(rows, b, i, chunk, LOGITS, CHUNK, CHUNKS)
        tl.store(rows.masses + number_of(rows, b, i) * rows.chunks + chunk, tl.sum(masses, axis=0))
        token = tl.load(chains.tokens + b * chains.drafted + i, mask=i < chains.drafted, other=-1)
        inside = (token >= 0) & (token < rows.vocab)
        # One program writes it, chunk 0 where no chunk holds the token.
        if chunk == tl.where(inside, token, 0).to(tl.int32) // CHUNK:
            of_token = tl.where((chunk_ids(chunk, CHUNK) == token) & inside, masses, 0)
            tl.store(rows.token_mass + number_of(rows, b, i), tl.sum(of_token, axis=0))
