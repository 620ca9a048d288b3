"""The last launch: the token that follows the accepted drafts, and the results."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....numerics.triton_math import draw_chunk, draw_id
from ....types import DEAD, Status
from .chains import emit_fraction, is_eos, load_drafts
from .judge import ACCEPTED
from .residual import block_stop, first_stop, load_residuals, residual_masses
from .rows import chunk_ids, chunk_masses, load_masses, number_of

_DEAD = tl.constexpr(DEAD)
_FALLBACK = tl.constexpr(int(Status.RESIDUAL_FALLBACK))


class Results(NamedTuple):
    """``VerifyResult`` in the making."""

    num_accepted: Any
    next_token: Any
    tokens: Any
    num_emitted: Any
    eos_hit: Any
    status: Any


@triton.jit
def conclude(
    target,
    draft,
    chains,
    scratch,
    results,
    RULE: tl.constexpr,
    LOGITS: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Find where each draft is left, draw the token that follows, and write the results."""
    b = tl.program_id(0)
    length = tl.load(scratch.draft_ends + b * 3)
    by_eos = tl.load(scratch.draft_ends + b * 3 + 1) != 0
    end_status = tl.load(scratch.draft_ends + b * 3 + 2)
    scale = tl.full([], 1.0, tl.float32)
    if RULE == "block":
        tau, scale, status = block_stop(target, draft, chains, scratch, b, length, CHUNKS)
        if (tau == length) & ((status & _DEAD) == 0):
            status = status | tl.load(scratch.verdicts + b * (chains.drafted + 1) + tau)
    else:
        tau, status = first_stop(scratch, chains, b, length, POSITIONS)
    next_token = tl.full([], -1, tl.int64)
    if (status & _DEAD) == 0:
        if (RULE == "token") | (RULE == "block"):
            next_token, fallback = _draw(
                target, draft, chains, scratch, b, tau, length, scale, RULE, LOGITS, CHUNK, CHUNKS
            )
            status = status | fallback
        else:
            next_token = tl.load(scratch.choices + b * (chains.drafted + 1) + tau)
    _write(results, chains, b, tau, next_token, status, by_eos & (tau == length), end_status, POSITIONS)


@triton.jit
def _draw(
    target,
    draft,
    chains,
    scratch,
    b,
    tau,
    length,
    scale,
    RULE: tl.constexpr,
    LOGITS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Draw the correction or the bonus; return it and the flag of a residual without mass."""
    corrects = tau < length
    of_target = load_masses(target, b, tau, CHUNKS)
    token = tl.load(chains.tokens + b * chains.drafted + tau, mask=corrects, other=-1)
    sums = of_target
    if corrects:
        if draft is None:
            own = tl.arange(0, CHUNKS) == (token // CHUNK).to(tl.int32)
            sums = of_target - tl.where(own, tl.load(target.token_mass + number_of(target, b, tau)), 0)
        else:
            sums = load_residuals(target, chains, scratch, b, tau, RULE == "block", CHUNKS)
    empty = tl.sum(sums, axis=0) == 0
    chunk, rest = draw_chunk(emit_fraction(chains, b, tau, False), tl.where(empty, of_target, sums))
    masses = chunk_masses(target, b, tau, chunk, LOGITS, CHUNK, CHUNKS)
    if corrects & (empty == 0):
        if draft is None:
            masses = tl.where(chunk_ids(chunk, CHUNK) == token, 0, masses)
        else:
            masses = residual_masses(target, draft, chains, scratch, b, tau, chunk, scale, LOGITS, CHUNK, CHUNKS)
    return draw_id(chunk, rest, masses, CHUNK), tl.where(empty, _FALLBACK, 0)


@triton.jit
def _write(results, chains, b, tau, next_token, status, finished, end_status, POSITIONS: tl.constexpr):
    """Write a row of the results.

    The bonus after an accepted eos is not emitted: a bad row there spoils nothing.
    """
    status = tl.where(finished & (next_token < 0), status & ~_DEAD, status) & (ACCEPTED - 1) | end_status
    alive = (status & _DEAD) == 0
    accepted = tl.where(alive, tau, 0)
    next_token = tl.where(alive, next_token, -1)
    emitted = tl.where(alive, tau + 1 - finished.to(tl.int32), 0)
    position = tl.arange(0, POSITIONS)
    follows = (position == accepted) & (position < emitted)
    tokens = tl.where(position < accepted, load_drafts(chains, b, POSITIONS), tl.where(follows, next_token, -1))
    tl.store(results.tokens + b * (chains.drafted + 1) + position, tokens, mask=position <= chains.drafted)
    tl.store(results.num_accepted + b, accepted.to(tl.int64))
    tl.store(results.next_token + b, next_token)
    tl.store(results.num_emitted + b, emitted.to(tl.int64))
    hit = finished | is_eos(chains, b, next_token)
    tl.store(results.eos_hit + b, (alive & hit).to(tl.uint8))
    tl.store(results.status + b, status)
