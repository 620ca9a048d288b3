"""What is handed out: filtered rows and log-probabilities."""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.triton_math import exponent, from_order_key, log_probability, scale
from .rows import best_of_row, key_of_rank, load_logits, open_row, quotient, rank, status_of_key
from .weigh import sum_of_shares

_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))


@triton.jit
def write(rows, filters, scanned, ends, filtered, status, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr):
    """Write ``RN(l / T)`` where a token is kept, -inf elsewhere, NaN in dead rows. Grid (B, tiles of WIDTH ids)."""
    b = tl.program_id(0)
    flags = status_of_key(key_of_rank(best_of_row(scanned, b, PROGRAMS)))
    tl.store(status + b, flags)
    ids = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    x = load_logits(open_row(rows, b), ids)
    heat = tl.load(filters.temperature + b)
    values = quotient(x, tl.where(heat == 0.0, 1.0, heat), 0.0)
    values = tl.where(rank(x, ids) >= tl.load(ends + b), values, -_INFINITY)
    tl.store(filtered + b.to(tl.int64) * rows.vocab + ids, tl.where(flags == 0, values, _NAN), mask=ids < rows.vocab)


@triton.jit
def conclude(
    rows,
    filters,
    scanned,
    raw_rows,
    raw_scanned,
    tokens,
    sums,
    raw_sums,
    logprobs,
    raw_logprobs,
    kept,
    PROGRAMS: tl.constexpr,
):
    """Leave the log-probabilities of each row's token, and how many tokens are kept. Grid (B,)."""
    b = tl.program_id(0)
    key = key_of_rank(best_of_row(scanned, b, PROGRAMS))
    token = tl.load(tokens + b).to(tl.int32)
    heat = tl.load(filters.temperature + b)
    _, total, count = sum_of_shares(sums, b, scanned.programs, PROGRAMS)
    raw_total, _, _ = sum_of_shares(raw_sums, b, scanned.programs, PROGRAMS)
    t = exponent(load_logits(open_row(rows, b), token), from_order_key(key), scale(heat))
    raw_maximum = from_order_key(key_of_rank(best_of_row(raw_scanned, b, PROGRAMS)))
    raw_t = exponent(load_logits(open_row(raw_rows, b), token), raw_maximum, scale(tl.full([], 1.0, tl.float32)))
    alive = status_of_key(key) == 0
    logprob = tl.where(heat == 0.0, 0.0, log_probability(t, total))
    tl.store(logprobs + b, tl.where(alive, logprob, _NAN))
    # NaN where the mask forbids one; of its bit patterns the same on every device.
    raw_logprob = log_probability(raw_t, raw_total)
    tl.store(raw_logprobs + b, tl.where(alive & (raw_logprob == raw_logprob), raw_logprob, _NAN))
    tl.store(kept + b, tl.where(alive, count, 0))
