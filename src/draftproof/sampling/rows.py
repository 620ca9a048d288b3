"""From logits to filtered rows, and from filtered rows to a law or a drawn token: the portable batched text.

Shared by the eager implementations of sampling and verification. Shapes are ``[b, C]`` where C is the vocabulary, or
the number of top-k survivors; per-row values are columns ``[b, 1]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..numerics.draws import race_keys
from ..numerics.exp2 import exp2, exponent, scale
from ..numerics.masses import masses
from ..rng.streams import RaceStream, race_noise
from ..types import Array, Filters, Status
from .filters import above_min_p, apply_mask, check_winner, keep_top_k, keep_top_p, penalise

CHUNK = 1 << 18
"""Elements that are worked on at once: a chunk of rows stays in the L2 cache."""


class Rows(NamedTuple):
    """Rows after penalty, mask, temperature and top-k."""

    ids: Array | None  # int64 [b, C] ascending; None when column j is id j
    logits: Array  # float32 [b, C]
    t: Array  # float32 [b, C], scaled distance to the row maximum
    weights: Array  # float32 [b, C]; one-hot in greedy rows
    filters: Filters  # columns [b, 1]
    status: Array  # int32 [b]
    vocab: int


class Law(NamedTuple):
    """The filtered law of each row, as integer masses."""

    ids: Array | None  # as in Rows
    mass: Array  # int64 [b, C], 0 outside the kept set
    total: Array  # int64 [b, 1]
    status: Array  # int32 [b]
    vocab: int


def row_chunks(
    xp: Array, logits: Array, filters: Filters, history: Array | None, mask: Array | None
) -> Iterator[tuple[slice, Rows]]:
    """Yield slices of the batch with their prepared rows; one row expanded over the batch is prepared once."""
    batch, vocab = logits.shape
    inputs = [a for a in (logits, *filters, history, mask) if a is not None]
    shared = None
    if all(xp.same_row(a) for a in inputs):
        shared = prepare(xp, *(_cut(a, slice(0, 1)) for a in (logits, filters, history, mask)))
    step = max(1, CHUNK // (vocab if shared is None else shared.logits.shape[-1]))
    for start in range(0, batch, step):
        rows = slice(start, start + step)
        yield rows, shared or prepare(xp, *(_cut(a, rows) for a in (logits, filters, history, mask)))


def _cut(value: Array | Filters | None, rows: slice) -> Array:
    if isinstance(value, Filters):
        return Filters(*(_cut(f, rows) for f in value))
    return None if value is None else value[rows]


def columns(filters: Filters) -> Filters:
    """Return the filters as columns ``[b, 1]``."""
    return Filters(*(None if f is None else f[:, None] for f in filters))


def prepare(xp: Array, logits: Array, filters: Filters, history: Array | None, mask: Array | None) -> Rows:
    """Apply penalty, mask, temperature and top-k to rows of logits.

    A dead row (NaN, nothing allowed) is flagged and goes on as a row of zeros, so that no arithmetic meets it.
    """
    vocab = logits.shape[-1]
    filters = columns(filters)
    rows, maximum, status = allowed_logits(xp, logits, filters, history, mask)
    greedy = filters.temperature == 0.0
    temperature = xp.where(greedy, 1.0, filters.temperature)
    ids = None
    if filters.top_k is not None:
        ids, rows = keep_top_k(xp, rows, temperature, xp.minimum(filters.top_k, vocab))
    t = exponent(xp, rows, maximum, scale(xp, temperature))
    if not xp.any(greedy):
        weights = exp2(xp, t)
    else:
        column = xp.arange(rows.shape[-1], like=rows)[None, :]
        weights = xp.float32(column == xp.argmax(rows))
        if xp.any(~greedy):
            weights = xp.where(greedy, weights, exp2(xp, t))
    return Rows(ids, rows, t, weights, filters, status, vocab)


def allowed_logits(
    xp: Array, logits: Array, filters: Filters, history: Array | None, mask: Array | None
) -> tuple[Array, Array, Array]:
    """Return ``(logits, maximum, status)`` after penalty and mask; ``filters`` are columns."""
    rows = xp.float32(logits)
    if filters.repetition_penalty is not None and history is not None:
        penalty = filters.repetition_penalty[:, 0]
        rows = penalise(xp, rows, penalty, history)
    if mask is not None:
        rows = apply_mask(xp, rows, mask)
    maximum = xp.max(rows)
    nan = xp.isnan(maximum)
    dead = nan | (maximum == -float("inf"))
    flag = xp.where(nan, int(Status.NAN), int(Status.EMPTY_SUPPORT))
    status = xp.int32(xp.where(dead, flag, 0)[:, 0])
    if xp.any(dead):
        rows, maximum = xp.where(dead, 0.0, rows), xp.where(dead, 0.0, maximum)
    return rows, maximum, status


def kept(xp: Array, rows: Rows) -> Array:
    """Return each row's kept set as bool ``[b, C]``, tokens of mass 0 included; only the maximum in greedy rows."""
    result = rows.logits > -float("inf")
    if rows.filters.top_p is not None:
        result = result & keep_top_p(xp, rows.logits, masses(xp, rows.weights), rows.filters.top_p)
    if rows.filters.min_p is not None:
        result = result & above_min_p(xp, rows.t, rows.filters.min_p)
    return xp.where(rows.filters.temperature == 0.0, rows.weights > 0.0, result)


def law(xp: Array, rows: Rows) -> Law:
    """Return the integer masses of the filtered law."""
    mass = masses(xp, rows.weights)
    if rows.filters.top_p is not None or rows.filters.min_p is not None:
        mass = xp.where(kept(xp, rows), mass, 0)
    return Law(rows.ids, mass, xp.sum(mass), rows.status, rows.vocab)


def race(xp: Array, rows: Rows, stream: RaceStream) -> Array:
    """Return the column that wins the keyed race over each row's kept set, ``[b, 1]``."""
    weights = rows.weights
    greedy = rows.filters.temperature == 0.0
    if not xp.any(~greedy):
        return xp.broadcast(xp.argmax(weights), (stream.seed.shape[0], 1))
    if rows.filters.min_p is not None:
        weights = xp.where(greedy | above_min_p(xp, rows.t, rows.filters.min_p), weights, 0.0)
    keys = race_keys(xp, race_noise(xp, stream, rows.ids, rows.vocab), weights)
    winner = xp.argmin(keys)
    if rows.filters.top_p is None:
        return winner
    return check_winner(xp, rows.logits, masses(xp, rows.weights), rows.filters.top_p, keys, winner)


def ids_of(xp: Array, ids: Array | None, column: Array) -> Array:
    """Return the token ids ``[b]`` of columns ``[b, 1]``."""
    return (column if ids is None else xp.take(ids, column))[:, 0]


def checked_probabilities(xp: Array, probs: Array) -> tuple[Array, Array]:
    """Return ``(rows, status)``: float32 rows of probabilities, a bad one flagged and replaced by ones."""
    rows = xp.float32(probs)
    bad = ~((rows >= 0.0) & (rows < float("inf")))
    any_bad = xp.sum(bad) > 0
    empty = xp.sum(rows > 0.0) == 0
    flag = xp.where(any_bad, int(Status.BAD_PROBABILITY), xp.where(empty, int(Status.EMPTY_SUPPORT), 0))
    return xp.where(any_bad | empty, 1.0, rows), xp.int32(flag[:, 0])
