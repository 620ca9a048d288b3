"""The ids that a repetition penalty has to know at each position: the history and the drafts before it."""

from __future__ import annotations

import triton
import triton.language as tl

from ....sampling.kernels.rows import mark
from .chains import load_drafts


@triton.jit(do_not_specialize=["words", "vocab", "length"])
def mark_history(seen, words, vocab, history, length, chains, POSITIONS: tl.constexpr, WIDTH: tl.constexpr):
    """Set the bit of each id in the zeroed ``seen`` int32 [B, N, words]. Grid (B, N)."""
    b, i = tl.program_id(0), tl.program_id(1)
    bits = seen + (b.to(tl.int64) * tl.num_programs(1) + i) * words
    if history is not None:
        for first in range(0, length, WIDTH):
            at = first + tl.arange(0, WIDTH)
            mark(bits, vocab, tl.load(history + b.to(tl.int64) * length + at, mask=at < length, other=-1))
    drafts = load_drafts(chains, b, POSITIONS)
    mark(bits, vocab, tl.where(tl.arange(0, POSITIONS) < i, drafts, -1))
