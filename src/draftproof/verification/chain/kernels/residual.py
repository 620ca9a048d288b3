"""The residual of a target row against a draft row, and the scales P_i of rule block."""

from __future__ import annotations

import triton
import triton.language as tl

from ....numerics.triton_math import div, probability, rho
from ....types import DEAD
from .chains import accept_uniform
from .judge import ACCEPTED
from .rows import chunk_masses

_DEAD = tl.constexpr(DEAD)
_RESIDUAL_UNIT = tl.constexpr(2.0**-61)


@triton.jit(do_not_specialize=["chunks"])
def residual_sums(
    target,
    draft,
    chains,
    scratch,
    chunks,
    RULE: tl.constexpr,
    LOGITS: tl.constexpr,
    POSITIONS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Leave the residual mass of each chunk: of the rejected position for rule token, of every one for rule block."""
    chunk, b = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    length = tl.load(scratch.draft_ends + b * 3)
    if RULE == "token":
        i, verdict = first_stop(scratch, chains, b, length, POSITIONS)
        scale = tl.full([], 1.0, tl.float32)
        wanted = (i < length) & ((verdict & _DEAD) == 0)
    else:
        i = tl.program_id(1)
        scale, wanted = _scale_at(scratch, chains, b, i, length)
    if wanted:
        masses = residual_masses(target, draft, chains, scratch, b, i, chunk, scale, LOGITS, CHUNK, CHUNKS)
        number = b.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        tl.store(scratch.residuals + number * chunks + chunk, tl.sum(masses, axis=0))


@triton.jit
def residual_masses(
    target, draft, chains, scratch, b, i, chunk, scale, LOGITS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Return the residual masses of a chunk at position i, int64 [CHUNK]."""
    chances = scratch.chances + (b * (chains.drafted + 1) + i) * 4
    p = probability(chunk_masses(target, b, i, chunk, LOGITS, CHUNK, CHUNKS), tl.load(chances + 2))
    q = probability(chunk_masses(draft, b, i, chunk, LOGITS, CHUNK, CHUNKS), tl.load(chances + 3))
    return rho(scale, p, q)


@triton.jit
def load_residuals(target, chains, scratch, b, i, EACH: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the residual masses of position i by chunk, int64 [CHUNKS]; without EACH only one position has any."""
    number = b.to(tl.int64)
    if EACH:
        number = number * chains.drafted + i
    at = tl.arange(0, CHUNKS)
    return tl.load(scratch.residuals + number * target.chunks + at, mask=at < target.chunks, other=0)


@triton.jit
def first_stop(scratch, chains, b, length, POSITIONS: tl.constexpr):
    """Return the first position whose draft is not accepted, and its verdict; off support counts if it ever was."""
    position = tl.arange(0, POSITIONS)
    inside = position <= length
    verdicts = tl.load(scratch.verdicts + b * (chains.drafted + 1) + position, mask=inside, other=0)
    stop = tl.min(tl.where(verdicts >= ACCEPTED, POSITIONS, position), axis=0)
    seen = tl.max(tl.where((position < stop) & inside, verdicts & (ACCEPTED - 1), 0), axis=0)
    return stop, tl.sum(tl.where(position == stop, verdicts, 0), axis=0) | seen


@triton.jit
def _next_scale(chances, scale):
    """Return P of the next position from P and the chances of this one."""
    q = tl.load(chances + 1)
    joint = scale * tl.load(chances)
    share = div(joint, tl.where(q > 0.0, q, 1.0))
    return tl.where(joint == 0.0, 0.0, tl.where(joint >= q, 1.0, share))


@triton.jit
def _scale_at(scratch, chains, b, i, length):
    """Return P of a position, and whether it is one of the draft that is reached alive."""
    at = b * (chains.drafted + 1)
    scale = tl.full([], 1.0, tl.float32)
    j = tl.full([], 0, tl.int32)
    alive = i < length
    while (j <= i) & alive:
        alive = tl.load(scratch.verdicts + at + j) >= ACCEPTED
        if alive & (j < i):
            scale = _next_scale(scratch.chances + (at + j) * 4, scale)
        j += 1
    return scale, alive


@triton.jit
def block_stop(target, draft, chains, scratch, b, length, CHUNKS: tl.constexpr):
    """Return ``(tau, P, status)`` of rule block: the longest prefix that passes its test, and P at its end."""
    at = b * (chains.drafted + 1)
    scale = tl.full([], 1.0, tl.float32)
    scale_of_tau = scale
    status = tl.full([], 0, tl.int32)
    tau = tl.full([], 0, tl.int32)
    i = tl.full([], 0, tl.int32)
    alive = i < length
    while alive:
        verdict = tl.load(scratch.verdicts + at + i)
        status = status | (verdict & (ACCEPTED - 1))
        alive = verdict >= ACCEPTED
        if alive:
            chances = scratch.chances + (at + i) * 4
            if i > 0:
                chance = _stop_chance(target, draft, chains, scratch, b, i, scale, CHUNKS)
                if accept_uniform(chains, b, i - 1) < chance:
                    tau = i
                    scale_of_tau = scale
            scale = _next_scale(chances, scale)
            i += 1
            alive = i < length
            if (i == length) & (accept_uniform(chains, b, i - 1) < scale):
                tau = i
    return tau, scale_of_tau, status


@triton.jit
def _stop_chance(target, draft, chains, scratch, b, i, scale, CHUNKS: tl.constexpr):
    """Return ``h_i = S / (S + 1 - P)``, 1 for 0/0."""
    if draft is None:
        rest = scale * tl.load(scratch.chances + (b * (chains.drafted + 1) + i) * 4 + 3)
    else:
        sums = load_residuals(target, chains, scratch, b, i, True, CHUNKS)
        rest = tl.sum(sums, axis=0).to(tl.float32) * _RESIDUAL_UNIT
    whole = rest + (1.0 - scale)
    return tl.where(whole > 0.0, div(rest, tl.where(whole > 0.0, whole, 1.0)), 1.0)


@triton.jit
def settle(target, draft, chains, scratch, CHUNKS: tl.constexpr):
    """Leave the position after a wholly accepted draft of rule block, -1 where another row gives the token."""
    b = tl.program_id(0)
    length = tl.load(scratch.draft_ends + b * 3)
    tau, _, status = block_stop(target, draft, chains, scratch, b, length, CHUNKS)
    tl.store(scratch.state + b, tl.where((tau == length) & ((status & _DEAD) == 0), length, -1))
