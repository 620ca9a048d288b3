"""Filtered rows, and what is known of a row once its end is found."""

from __future__ import annotations

import triton
import triton.language as tl

from ...numerics.triton_math import div
from .rows import best_of_row, key_of_rank, load_logits, open_row, rank, status_of_key

_INFINITY = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))


@triton.jit
def write(
    logits,
    stride,
    vocab,
    seen,
    penalty,
    mask,
    mask_stride,
    temperature,
    ends,
    partial,
    programs,
    filtered,
    status,
    PROGRAMS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write ``RN(l / T)`` where a token is kept, -inf elsewhere, NaN in dead rows. Grid (B, tiles of WIDTH ids)."""
    b = tl.program_id(0)
    row = open_row(b, logits, stride, vocab, seen, penalty, mask, mask_stride)
    flags = status_of_key(key_of_rank(best_of_row(partial, b, programs, PROGRAMS)))
    tl.store(status + b, flags)
    ids = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    x = load_logits(row, ids)
    values = tl.where(rank(x, ids) >= tl.load(ends + b), scaled(x, tl.load(temperature + b)), -_INFINITY)
    values = tl.where(flags == 0, values, _NAN)
    tl.store(filtered + b.to(tl.int64) * vocab + ids, values, mask=ids < vocab)


@triton.jit
def scaled(x, temperature):
    """Return ``RN(l / T)``; l at temperature 0."""
    return div(x, tl.where(temperature == 0.0, 1.0, temperature))
