"""Top-k (Fan et al., 2018) by value: every token that ties with the k-th stays, as in transformers."""

from __future__ import annotations

from ...types import Array

_REMOVED = float("-inf")


def keep_top_k(xp: Array, logits: Array, temperature: Array, k: Array) -> tuple[Array, Array]:
    """Return ``(ids, logits)`` [b, C] of the tokens with ``RN(l / T) >= RN(l_(k) / T)``, ids ascending.

    ``temperature`` float32 and ``k`` int64 in [1, V], both [b, 1]. C is the largest count of the batch; shorter rows
    are padded with logit -inf and id V. Tokens at -inf are not kept: they cannot be drawn.
    """
    scaled = logits / temperature
    kept = (scaled >= xp.kth_largest(scaled, k)) & (logits > _REMOVED)
    return compact(xp, kept, logits)


def compact(xp: Array, kept: Array, values: Array) -> tuple[Array, Array]:
    """Return the columns where ``kept`` [b, V] holds and their values, left-aligned, padded with V and -inf."""
    batch, vocab = kept.shape
    rows, columns = xp.nonzero(kept)
    counts = xp.sum(kept)[:, 0]
    starts = xp.cumsum(counts) - counts
    width = int(counts.max())
    slot = xp.arange(rows.shape[0], like=kept) - starts[rows]
    ids = xp.full((batch, width), vocab, "int64", like=kept)
    kept_values = xp.full((batch, width), _REMOVED, "float32", like=kept)
    ids[rows, slot] = columns
    kept_values[rows, slot] = values[rows, columns]
    return ids, kept_values
