"""The random streams as Triton functions; ``streams.py`` names the draws.

Seeds and offsets are int64 scalars that the kernel has loaded. Words are uint32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..numerics.triton_math import noise
from . import streams

BLOCK = tl.constexpr(streams.BLOCK)
_PER_BLOCK = tl.constexpr(1.0 / streams.BLOCK)
_RACE_TOKEN = tl.constexpr(int(streams.Purpose.RACE_TOKEN))
_RACE_BLOCK = tl.constexpr(int(streams.Purpose.RACE_BLOCK))
_TO_DRAFT = tl.constexpr(int(streams.Purpose.DRAFT_TOKEN) - int(streams.Purpose.RACE_TOKEN))
_ACCEPT = tl.constexpr(int(streams.Purpose.ACCEPT))
_EMIT = tl.constexpr(int(streams.Purpose.EMIT))


@triton.jit
def philox(seed, c0, offset, purpose_index):
    """Return the four words of a counter; ``c0`` int32 of any shape, ``purpose_index`` is ``purpose << 24 | index``."""
    low = (offset & 0xFFFFFFFF).to(tl.uint32)
    high = ((offset >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, c0.to(tl.uint32), low, high, purpose_index.to(tl.uint32))


@triton.jit
def _purpose(NAME: tl.constexpr, draft_index):
    """Return ``purpose << 24 | index`` of a race: the target's own for a negative draft index."""
    private = draft_index >= 0
    return (tl.where(private, NAME + _TO_DRAFT, NAME) << 24) | tl.where(private, draft_index, 0).to(tl.int32)


@triton.jit
def token_words(seed, quad, offset, draft_index):
    """Return the own words of ids ``4 * quad`` to ``4 * quad + 3``."""
    return philox(seed, quad, offset, _purpose(_RACE_TOKEN, draft_index))


@triton.jit
def block_words(seed, pair, offset, draft_index):
    """Return ``(minimum, holder, minimum, holder)`` words of blocks ``2 * pair`` and ``2 * pair + 1``."""
    return philox(seed, pair, offset, _purpose(_RACE_BLOCK, draft_index))


@triton.jit
def block_noise(minimum_word, holder_word):
    """Return the least exponential of a block, and the position in it of the id that has it."""
    return noise(minimum_word) * _PER_BLOCK, (holder_word >> 26).to(tl.int32)


@triton.jit
def block_race(seed, block, offset, draft_index):
    """Return ``block_noise`` of blocks, one counter each."""
    w0, w1, w2, w3 = block_words(seed, block >> 1, offset, draft_index)
    even = (block & 1) == 0
    return block_noise(tl.where(even, w0, w2), tl.where(even, w1, w3))


@triton.jit
def accept_word(seed, offset, index):
    """Return the word behind the uniform that accepts or rejects draft ``index`` of the round."""
    w0, _, _, _ = philox(seed, index * 0, offset, index | (_ACCEPT << 24))
    return w0


@triton.jit
def emit_words(seed, offset, index):
    """Return the two words behind the correction or bonus drawn after ``index`` accepted drafts."""
    w0, w1, _, _ = philox(seed, index * 0, offset, index | (_EMIT << 24))
    return w0, w1
