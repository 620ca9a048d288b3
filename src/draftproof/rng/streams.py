"""The named random streams: which Philox counter each draw of the library reads.

Key = (seed low, seed high); counter = (c0, offset low, offset high, purpose << 24 | index). ``docs/streams.md`` has the
table. Everything takes ``xp`` first, seeds and offsets as int64 ``[b, 1]``, and returns words as int64 in [0, 2**32).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from ..numerics.noise import exponential
from ..types import Array
from .philox import Words, key_of, philox

_MASK = 0xFFFFFFFF
BLOCK = 64
"""Token ids that share one block word."""


class Purpose(enum.IntEnum):
    """The stream a draw belongs to. Values from 128 on are free for users and never read by the library."""

    RACE_TOKEN = 0
    RACE_BLOCK = 1
    DRAFT_TOKEN = 2
    DRAFT_BLOCK = 3
    ACCEPT = 4
    EMIT = 5
    ROW_SEED = 6


class RaceStream(NamedTuple):
    """Which race is run: the target's own at an absolute position, or private draft ``draft_index`` of a round."""

    seed: Array
    offset: Array
    draft_index: Array | None = None


def words(seed: Array, offset: Array, purpose: Purpose, index: Array | int, c0: Array | int) -> Words:
    """Return the four words of one counter of a stream."""
    counter = (c0, offset & _MASK, (offset >> 32) & _MASK, (int(purpose) << 24) | index)
    return philox(counter, key_of(seed))


def row_seeds(seed: Array, rows: Array) -> Array:
    """Return the seeds of a batch that was given one scalar seed: row 0 keeps it, row b > 0 gets its own.

    ``seed`` int64 of any shape that broadcasts with ``rows``, the row numbers.
    """
    low, high, _, _ = words(seed, rows * 0, Purpose.ROW_SEED, 0, rows)
    derived = (high << 32) | low
    return derived + (seed - derived) * (rows == 0)


def accept_word(seed: Array, offset: Array, index: Array | int) -> Array:
    """Return the word behind the uniform that accepts or rejects draft ``index`` of the round."""
    return words(seed, offset, Purpose.ACCEPT, index, offset * 0)[0]


def emit_words(seed: Array, offset: Array, index: Array | int) -> tuple[Array, Array]:
    """Return the two words behind the correction or bonus drawn after ``index`` accepted drafts."""
    first, second, _, _ = words(seed, offset, Purpose.EMIT, index, offset * 0)
    return first, second


def race_noise(xp: Array, stream: RaceStream, ids: Array | None, vocab: int) -> Array:
    """Return one standard exponential per token id: float32 ``[b, C]`` for ``ids`` ``[b or 1, C]``, all ids if None.

    Two-level noise: for each block of 64 ids one word gives the least of its 64 exponentials and six bits give the
    id that holds it; every other id adds an exponential of its own. By memorylessness these are 64 independent
    standard exponentials, and a block whose least cannot win needs no further words.
    """
    if ids is None:
        token_word, least, holder = _all_words(xp, stream, vocab)
        ids = xp.arange(vocab, like=stream.seed)[None, :]
    else:
        token_word, least, holder = _words_of(xp, stream, ids)
    return xp.where((ids & (BLOCK - 1)) == holder, least, least + exponential(xp, token_word))


def _purposes(stream: RaceStream) -> tuple[Purpose, Purpose, Array | int]:
    if stream.draft_index is None:
        return Purpose.RACE_TOKEN, Purpose.RACE_BLOCK, 0
    return Purpose.DRAFT_TOKEN, Purpose.DRAFT_BLOCK, stream.draft_index


def _all_words(xp: Array, stream: RaceStream, vocab: int) -> tuple[Array, Array, Array]:
    """Return each id's own word, the least of its block and the block's holder, for every id.

    A counter is computed once and its words are spread over the ids they serve.
    """
    token, block, index = _purposes(stream)
    quads = xp.arange(-(-vocab // 4), like=stream.seed)[None, :]
    token_word = xp.interleave(words(stream.seed, stream.offset, token, index, quads))[:, :vocab]
    pairs = xp.arange(-(-vocab // (2 * BLOCK)), like=stream.seed)[None, :]
    w0, w1, w2, w3 = words(stream.seed, stream.offset, block, index, pairs)
    least, holder = _block_noise(xp, xp.interleave((w0, w2)), xp.interleave((w1, w3)))
    return token_word, xp.repeat(least, BLOCK)[:, :vocab], xp.repeat(holder, BLOCK)[:, :vocab]


def _words_of(xp: Array, stream: RaceStream, ids: Array) -> tuple[Array, Array, Array]:
    """Return the same for a few ids: one counter per id and level."""
    token, block, index = _purposes(stream)
    w0, w1, w2, w3 = words(stream.seed, stream.offset, token, index, ids >> 2)
    low = xp.where((ids & 1) == 0, w0, w1)
    high = xp.where((ids & 1) == 0, w2, w3)
    token_word = xp.where((ids & 2) == 0, low, high)
    w0, w1, w2, w3 = words(stream.seed, stream.offset, block, index, ids >> 7)
    even = (ids & BLOCK) == 0
    least, holder = _block_noise(xp, xp.where(even, w0, w2), xp.where(even, w1, w3))
    return token_word, least, holder


def _block_noise(xp: Array, minimum_word: Array, holder_word: Array) -> tuple[Array, Array]:
    return exponential(xp, minimum_word) * (1.0 / BLOCK), holder_word >> 26
