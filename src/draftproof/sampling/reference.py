"""What sampling means: one row of logits at a time, in real arithmetic.

A row passes penalty, mask, temperature, top-k, top-p and min-p, then one token is drawn. ``kept`` takes masses of any
exact kind, so that the same text runs on Fractions. The functions named like operations, at the end, loop over a batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from .. import _numpy as np
from ..rng.uniforms import Choose, Draw, Masses, Uniforms
from ..types import Array, Filters, SampleResult, SamplingParams, Status

# The share of the mass by which top-p may fall short: logits that are logarithms of decimal probabilities are rounded.
TOP_P_SLACK = Fraction(1, 1 << 21)


class DeadRow(Exception):
    """A row that is no law: its status, and its index in the round."""

    def __init__(self, status: Status, index: int = 0) -> None:
        super().__init__(status.name)
        self.status, self.index = status, index


class Filtered(NamedTuple):
    """A row after the filters."""

    logits: list[float]  # RN(l / T), -inf where not kept
    masses: list[float]  # 0 where not kept; not normalised


# --- one row ---------------------------------------------------------------------------------------------------------


def penalise(logits: Sequence[float], penalty: float, history: Collection[int]) -> list[float]:
    """Push the logit of each id in the history towards minus infinity, once (Keskar et al. 2019)."""
    present = set(history)
    return rounded([(v * penalty if v < 0 else v / penalty) if x in present else v for x, v in enumerate(logits)])


def weights(logits: Sequence[float], temperature: float) -> list[float]:
    """Return ``exp((l - max) / T)``; at temperature 0 all weight is on the lowest id among the maxima."""
    top = max(logits)
    if temperature == 0:
        first = logits.index(top)
        return [float(x == first) for x in range(len(logits))]
    return [1.0 if v == top else math.exp((v - top) / temperature) for v in logits]


def kept(
    ranks: Sequence[float],
    scores: Sequence[float],
    masses: Masses,
    top_k: int | None = None,
    top_p: Any = None,
    min_p: Any = None,
) -> list[int]:
    """Return the ids that pass top-k, then top-p on the survivors, then min-p: best first.

    ``ranks`` order the tokens (ties by id, -inf is out), ``scores`` decide ties at the k-th place. For given masses,
    pass them three times.
    """
    order = sorted((x for x, r in enumerate(ranks) if r > -math.inf), key=lambda x: (-ranks[x], x))
    if top_k is not None and 0 < top_k < len(order):
        order = [x for x in order if scores[x] >= scores[order[top_k - 1]]]
    if top_p is not None and top_p < 1:
        limit = (top_p - TOP_P_SLACK) * sum(masses[x] for x in order)
        above: Any = 0
        survivors: list[int] = []
        for x in order:
            if survivors and above >= limit:
                break
            survivors.append(x)
            above += masses[x]
        order = survivors
    if min_p is not None:
        order = [x for x in order if masses[x] >= min_p * masses[order[0]]]
    return order


def allowed_logits(
    logits: Sequence[float], params: SamplingParams, history: Collection[int], allowed: Sequence[bool] | None
) -> list[float]:
    """Return the logits after penalty and mask."""
    if params.repetition_penalty is not None:
        logits = penalise(logits, params.repetition_penalty, history)
    if allowed is not None:
        logits = [v if ok else -math.inf for v, ok in zip(logits, allowed, strict=True)]
    if any(math.isnan(v) for v in logits):
        raise DeadRow(Status.NAN)
    if max(logits) == -math.inf:
        raise DeadRow(Status.EMPTY_SUPPORT)
    return list(logits)


def filtered(
    logits: Sequence[float],
    params: SamplingParams,
    history: Collection[int] = (),
    allowed: Sequence[bool] | None = None,
) -> Filtered:
    """Apply all filters to one row of float32 logits.

    Examples
    --------
    >>> filtered([0.0, 2.0, 1.0], SamplingParams(temperature=2.0, top_k=2)).logits
    [-inf, 1.0, 0.5]
    """
    row = allowed_logits(logits, params, history, allowed)
    masses = weights(row, params.temperature)
    if params.temperature == 0:
        ids, scores = [masses.index(1.0)], row
    else:
        scores = rounded([v / params.temperature for v in row])
        ids = kept(row, scores, masses, params.top_k, params.top_p, params.min_p)
    stays = set(ids)
    return Filtered(
        [s if x in stays else -math.inf for x, s in enumerate(scores)],
        [m if x in stays else 0.0 for x, m in enumerate(masses)],
    )


def sample_one(row: Filtered, choose: Choose, draft_index: int | None = None) -> int:
    """Draw a token of a filtered row: by the target's own race, or as private draft ``draft_index`` of a round."""
    draw: Draw = ("race", 0) if draft_index is None else ("draft", draft_index)
    return choose.race(row.masses, draw=draw)


def checked_probabilities(row: Sequence[float]) -> list[float]:
    """Return a row of probabilities that has a law once normalised."""
    if not all(0 <= p < math.inf for p in row):
        raise DeadRow(Status.BAD_PROBABILITY)
    if not any(row):
        raise DeadRow(Status.EMPTY_SUPPORT)
    return list(row)


# --- reading a batch -------------------------------------------------------------------------------------------------


def rounded(values: Array) -> list[float]:
    """Return the values rounded to float32."""
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float32).tolist()


def params_of(filters: Filters, b: int) -> SamplingParams:
    """Return the filters of row b."""
    values: list[Any] = [None if f is None else f[b].item() for f in filters]
    return SamplingParams(*values)


def allowed_of(mask: Array, vocab: int) -> list[bool]:
    """Return one row of a mask, bool ``[V]`` or packed int32 words, as bools."""
    if mask.dtype == np.bool_:
        return mask.tolist()
    return [bool(int(mask[x >> 5]) >> (x & 31) & 1) for x in range(vocab)]


def history_of(prev_tokens: Array | None, b: int) -> list[int]:
    """Return the token history of row b; padding stays and names no token."""
    return [] if prev_tokens is None else prev_tokens[b].tolist()


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
    result = sample_with_logprobs(logits, filters, prev_tokens, mask, seed, offset, draft_index)
    return result.tokens, result.status


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
    rows: list[tuple[int, float, float, int, int]] = []
    for b, values in enumerate(logits):
        raw = rounded(values)
        try:
            row = _filtered_row(raw, filters, prev_tokens, mask, b)
        except DeadRow as dead:
            rows.append((-1, math.nan, math.nan, 0, dead.status))
            continue
        index = None if draft_index is None else int(draft_index[b])
        x = sample_one(row, Uniforms(int(seed[b]), int(offset[b])), index)
        count = sum(v > -math.inf for v in row.logits)
        rows.append((x, _log_probability(row.masses, x), _log_probability(weights(raw, 1.0), x), count, 0))
    columns = zip(*rows, strict=True) if rows else [()] * 5
    dtypes = (np.int64, np.float32, np.float32, np.int64, np.int32)
    return SampleResult(*(np.array(c, dtype=d) for c, d in zip(columns, dtypes, strict=True)))


def sample_probs(probs: Array, seed: Array, offset: Array) -> tuple[Array, Array]:
    """See ``draftproof.sample_probs``."""
    rows: list[tuple[int, int]] = []
    for b, values in enumerate(probs):
        try:
            row = checked_probabilities(rounded(values))
        except DeadRow as dead:
            rows.append((-1, dead.status))
            continue
        rows.append((Uniforms(int(seed[b]), int(offset[b])).categorical(row, draw=("emit", 0)), 0))
    tokens, status = zip(*rows, strict=True) if rows else ((), ())
    return np.array(tokens, dtype=np.int64), np.array(status, dtype=np.int32)


def filter_logits(
    logits: Array, filters: Filters, prev_tokens: Array | None, mask: Array | None
) -> tuple[Array, Array]:
    """See ``draftproof.filter_logits``."""
    result = np.full(logits.shape, np.nan, dtype=np.float32)
    status = np.zeros(len(logits), dtype=np.int32)
    for b, values in enumerate(logits):
        try:
            result[b] = _filtered_row(rounded(values), filters, prev_tokens, mask, b).logits
        except DeadRow as dead:
            status[b] = dead.status
    return result, status


def _filtered_row(
    row: list[float], filters: Filters, prev_tokens: Array | None, mask: Array | None, b: int
) -> Filtered:
    allowed = None if mask is None else allowed_of(mask[b], len(row))
    return filtered(row, params_of(filters, b), history_of(prev_tokens, b), allowed)


def _log_probability(masses: Sequence[float], x: int) -> float:
    return math.log(masses[x] / math.fsum(masses)) if masses[x] > 0 else -math.inf
