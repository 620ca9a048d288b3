"""Sampling on NumPy, and on torch on any device, in the pinned arithmetic. On NumPy it defines the bits."""

from __future__ import annotations

from .._arrays import namespace
from ..numerics.constants import LN2
from ..numerics.draws import fixed_point, inverse_cdf
from ..numerics.exp2 import exp2, exponent, scale
from ..numerics.log2 import log2
from ..numerics.masses import masses, probability_masses
from ..rng.streams import RaceStream, emit_words
from ..types import DEAD, Array, Filters, SampleResult
from .rows import CHUNK, Rows, checked_probabilities, ids_of, kept, law, race, row_chunks

_REMOVED = float("-inf")
_NAN = float("nan")


def sample(
    logits: Array,
    filters: Filters,
    prev_tokens: Array | None,
    mask: Array | None,
    seed: Array,
    offset: Array,
    draft_index: Array | None,
) -> tuple[Array, Array]:
    """See ``draftproof.sample``."""
    xp = namespace(logits)
    batch = logits.shape[0]
    tokens = xp.full((batch,), -1, "int64", like=logits)
    status = xp.full((batch,), 0, "int32", like=logits)
    for chunk, rows in row_chunks(xp, logits, filters, prev_tokens, mask):
        column = race(xp, rows, _stream(seed, offset, draft_index, chunk))
        status[chunk] = rows.status
        tokens[chunk] = xp.where(rows.status == 0, ids_of(xp, rows.ids, column), -1)
    return tokens, status


def sample_with_logprobs(
    logits: Array,
    filters: Filters,
    prev_tokens: Array | None,
    mask: Array | None,
    seed: Array,
    offset: Array,
    draft_index: Array | None,
) -> SampleResult:
    """See ``draftproof.sample_with_logprobs``."""
    xp = namespace(logits)
    batch = logits.shape[0]
    tokens = xp.full((batch,), -1, "int64", like=logits)
    logprobs = xp.full((batch,), _NAN, "float32", like=logits)
    raw_logprobs = xp.full((batch,), _NAN, "float32", like=logits)
    count = xp.full((batch,), 0, "int64", like=logits)
    status = xp.full((batch,), 0, "int32", like=logits)
    for chunk, rows in row_chunks(xp, logits, filters, prev_tokens, mask):
        column = race(xp, rows, _stream(seed, offset, draft_index, chunk))
        alive = rows.status == 0
        drawn = xp.where(alive, ids_of(xp, rows.ids, column), 0)
        greedy = rows.filters.temperature == 0.0
        filtered = _log_probability(xp, xp.take(rows.t, column), law(xp, rows).total)
        tokens[chunk] = xp.where(alive, drawn, -1)
        logprobs[chunk] = xp.where(alive, xp.where(greedy, 0.0, filtered)[:, 0], _NAN)
        raw = _raw_log_probability(xp, logits[chunk], drawn[:, None])[:, 0]
        raw_logprobs[chunk] = xp.where(alive & (raw == raw), raw, _NAN)  # NaN has many bit patterns, the result one
        count[chunk] = xp.where(alive, xp.sum(_kept_logits(xp, rows) > _REMOVED)[:, 0], 0)
        status[chunk] = rows.status
    return SampleResult(tokens, logprobs, raw_logprobs, count, status)


def sample_probs(probs: Array, seed: Array, offset: Array) -> tuple[Array, Array]:
    """See ``draftproof.sample_probs``."""
    xp = namespace(probs)
    batch, vocab = probs.shape
    tokens = xp.full((batch,), -1, "int64", like=probs)
    status = xp.full((batch,), 0, "int32", like=probs)
    step = max(1, CHUNK // vocab)
    for start in range(0, batch, step):
        chunk = slice(start, start + step)
        row, flags = checked_probabilities(xp, probs[chunk])
        words = emit_words(seed[chunk, None], offset[chunk, None], 0)
        column = inverse_cdf(xp, fixed_point(*words), probability_masses(xp, row))
        status[chunk] = flags
        tokens[chunk] = xp.where(flags == 0, column[:, 0], -1)
    return tokens, status


def filter_logits(
    logits: Array, filters: Filters, prev_tokens: Array | None, mask: Array | None
) -> tuple[Array, Array]:
    """See ``draftproof.filter_logits``."""
    xp = namespace(logits)
    batch, vocab = logits.shape
    filtered = xp.full((batch, vocab), _REMOVED, "float32", like=logits)
    status = xp.full((batch,), 0, "int32", like=logits)
    for chunk, rows in row_chunks(xp, logits, filters, prev_tokens, mask):
        values = _kept_logits(xp, rows)
        if rows.ids is None:
            filtered[chunk] = values
        else:
            row, slot = xp.nonzero(rows.ids < vocab)
            spread = xp.full((rows.ids.shape[0], vocab), _REMOVED, "float32", like=logits)
            spread[row, rows.ids[row, slot]] = values[row, slot]
            filtered[chunk] = spread
        status[chunk] = rows.status
    dead = (status & DEAD) != 0
    if xp.any(dead):
        filtered = xp.where(dead[:, None], _NAN, filtered)
    return filtered, status


def _stream(seed: Array, offset: Array, draft_index: Array | None, chunk: slice) -> RaceStream:
    index = None if draft_index is None else draft_index[chunk, None]
    return RaceStream(seed[chunk, None], offset[chunk, None], index)


def _kept_logits(xp: Array, rows: Rows) -> Array:
    greedy = rows.filters.temperature == 0.0
    scaled = rows.logits / xp.where(greedy, 1.0, rows.filters.temperature)
    return xp.where(kept(xp, rows), scaled, _REMOVED)


def _log_probability(xp: Array, t: Array, total: Array) -> Array:
    return (t - log2(xp, xp.float32(total) * 2.0**-40)) * LN2


def _raw_log_probability(xp: Array, logits: Array, token: Array) -> Array:
    """Log-softmax of the logits as given, at one token."""
    rows = xp.float32(logits)
    one = xp.full((1, 1), 1.0, "float32", like=logits)
    t = exponent(xp, rows, xp.max(rows), scale(xp, one))
    return _log_probability(xp, xp.take(t, token), xp.sum(masses(xp, exp2(xp, t))))
