"""The verdict on each position: whether its rows are alive, and whether its draft is accepted."""

from __future__ import annotations

import triton
import triton.language as tl

from ....numerics.triton_math import accepts, draw_chunk, draw_id, from_order_key, probability, reciprocal, scale
from ....sampling.kernels.race import race_row
from ....sampling.kernels.rows import BLOCK, LEAST_KEY, first_maximum, key_of_rank
from ....types import Status
from .chains import accept_uniform, emit_fraction
from .examine import position_of
from .rows import (
    best_rank,
    chunk_masses,
    load_masses,
    number_of,
    open_position,
    status_of_row,
)

_OFF_SUPPORT = tl.constexpr(int(Status.OFF_SUPPORT))
ACCEPTED = tl.constexpr(1 << 8)
"""Bit of a verdict: the draft is accepted; for rule block: its rows are alive."""


@triton.jit(do_not_specialize=["extra"])
def judge(
    target,
    draft,
    chains,
    scratch,
    extra,
    RULE: tl.constexpr,
    LOGITS: tl.constexpr,
    GATED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
):
    """Leave the verdict on each position, and what the rule needs of it later."""
    b = tl.program_id(0)
    i = position_of(scratch, b, tl.program_id(1), GATED)
    length = tl.load(scratch.draft_ends + b * 3)
    if (i >= 0) & (i < length + extra):
        if (RULE == "token") | (RULE == "block"):
            verdict = _ratio_verdict(target, draft, chains, scratch, b, i, length, RULE, LOGITS, CHUNKS)
        else:
            best = best_rank(target, b, i, CHUNKS)
            verdict = status_of_row(best, LOGITS)
            if verdict == 0:
                row = open_position(target, b, i)
                if RULE == "greedy":
                    choice = first_maximum(row, best).to(tl.int64)
                elif LOGITS:
                    choice = _race(target, chains, scratch, row, best, b, i, GROUP, STEP).to(tl.int64)
                else:
                    chunk, rest = draw_chunk(emit_fraction(chains, b, i, True), load_masses(target, b, i, CHUNKS))
                    masses = chunk_masses(target, b, i, chunk, LOGITS, CHUNK, CHUNKS)
                    choice = draw_id(chunk, rest, masses, CHUNK)
                tl.store(scratch.choices + b * (chains.drafted + 1) + i, choice)
                drafted = tl.load(chains.tokens + b * chains.drafted + i, mask=i < length, other=-1)
                verdict = tl.where(drafted == choice, ACCEPTED, 0)
        tl.store(scratch.verdicts + b * (chains.drafted + 1) + i, verdict)
        alone = tl.num_programs(1) == 1
        tl.store(scratch.state + b, tl.where(verdict >= ACCEPTED, i + 1, -1), mask=alone)


@triton.jit
def _ratio_verdict(
    target, draft, chains, scratch, b, i, length, RULE: tl.constexpr, LOGITS: tl.constexpr, CHUNKS: tl.constexpr
):
    """Return the verdict of rules token and block on position i; leave p, q and the reciprocals of their totals.

    For point masses the place of q's reciprocal holds the probability of all ids but the draft.
    """
    verdict = status_of_row(best_rank(target, b, i, CHUNKS), LOGITS)
    if i < length:
        if draft is not None:
            verdict = verdict | status_of_row(best_rank(draft, b, i, CHUNKS), LOGITS)
        if verdict == 0:
            total = tl.sum(load_masses(target, b, i, CHUNKS), axis=0)
            of_token = tl.load(target.token_mass + number_of(target, b, i))
            inverse = reciprocal(total)
            p = probability(of_token, inverse)
            if draft is None:
                q = tl.full([], 1.0, tl.float32)
                other = probability(total - of_token, inverse)
            else:
                other = reciprocal(tl.sum(load_masses(draft, b, i, CHUNKS), axis=0))
                q = probability(tl.load(draft.token_mass + number_of(draft, b, i)), other)
            chances = scratch.chances + (b * (chains.drafted + 1) + i) * 4
            tl.store(chances, p)
            tl.store(chances + 1, q)
            tl.store(chances + 2, inverse)
            tl.store(chances + 3, other)
            accepted = True
            if RULE == "token":
                accepted = accepts(accept_uniform(chains, b, i), p, q)
            verdict = tl.where(q == 0.0, _OFF_SUPPORT, 0) | tl.where(accepted, ACCEPTED, 0)
    return verdict


@triton.jit
def _race(target, chains, scratch, row, best, b, i, GROUP: tl.constexpr, STEP: tl.constexpr):
    """Return the token that wins the target's own race at position i."""
    heat = tl.load(target.temperature + b)
    if heat == 0.0:
        token = first_maximum(row, best)
    else:
        end = tl.full([], LEAST_KEY, tl.int64) << 32
        if target.ends is not None:
            end = tl.load(target.ends + number_of(target, b, i))
        stream = tl.load(chains.seed + b), tl.load(chains.offset + b) + i, -1
        start = number_of(target, b, i) * tl.cdiv(target.vocab, BLOCK)
        maxima, holders = target.maxima + start, scratch.holders + start
        maximum = from_order_key(key_of_rank(best))
        token = race_row(row, stream, maxima, holders, maximum, scale(heat), end, GROUP, STEP)
    return token
