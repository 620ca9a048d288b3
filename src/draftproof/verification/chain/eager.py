"""Chain verification on NumPy, and on torch on any device, in the pinned arithmetic. On NumPy it defines the bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..._arrays import namespace
from ...numerics.draws import inverse_cdf
from ...rng.streams import RaceStream
from ...sampling.rows import CHUNK, ids_of, race
from ...types import DEAD, Array, Filters, Status, VerifyResult
from .rows import Draws, LogitRows, ProbabilityRows
from .rules import Chains, Choose, Outcome, block_rule, follow_rule, token_rule


def verify(
    target_logits: Array,
    draft_logits: Array | None,
    draft_tokens: Array,
    rule: str,
    filters: Filters,
    draft_filters: Filters,
    prev_tokens: Array | None,
    mask: Array | None,
    draft_mask: Array | None,
    num_draft_tokens: Array,
    eos: Array | None,
    seed: Array,
    offset: Array,
) -> VerifyResult:
    """See ``draftproof.verify``."""
    xp = namespace(target_logits)
    vocab = target_logits.shape[-1]
    draft_vocab = vocab if draft_logits is None else draft_logits.shape[-1]
    ends = _ends(xp, draft_tokens, num_draft_tokens, eos, max(vocab, draft_vocab))
    own_mask = draft_mask is not None

    def run(chunk: slice) -> Outcome:
        tokens = draft_tokens[chunk]
        history = None if prev_tokens is None else prev_tokens[chunk]

        def side(logits: Array, parameters: Filters, allowed: Array | None, mask_vocab: int) -> LogitRows:
            parameters = Filters(*(None if f is None else f[chunk] for f in parameters))
            allowed = None if allowed is None else allowed[chunk]
            return LogitRows(xp, logits[chunk], parameters, history, tokens, allowed, mask_vocab)

        target = side(target_logits, filters, mask, vocab)
        chains = Chains(tokens, ends.length[chunk])
        if rule == "greedy":
            return follow_rule(xp, chains, target.argmax)
        if rule == "match":
            return follow_rule(xp, chains, _racing(xp, target, seed[chunk], offset[chunk]))
        draft = None
        if draft_logits is not None:
            allowed, mask_vocab = (draft_mask, draft_vocab) if own_mask else (mask, vocab)
            draft = side(draft_logits, draft_filters, allowed, mask_vocab)
        ratio_rule = token_rule if rule == "token" else block_rule
        return ratio_rule(xp, chains, target, draft, Draws(xp, seed[chunk], offset[chunk]))

    return _collect(xp, draft_tokens, ends, eos, run, _step(xp, target_logits, filters))


def verify_probs(
    target_probs: Array,
    draft_probs: Array | None,
    draft_tokens: Array,
    rule: str,
    uniform_accept: Array | None,
    uniform_sample: Array | None,
    seed: Array | None,
    offset: Array,
    num_draft_tokens: Array,
    eos: Array | None,
) -> VerifyResult:
    """See ``draftproof.verify_probs``."""
    xp = namespace(target_probs)
    vocab = target_probs.shape[-1]
    draft_vocab = vocab if draft_probs is None else draft_probs.shape[-1]
    ends = _ends(xp, draft_tokens, num_draft_tokens, eos, max(vocab, draft_vocab))

    def run(chunk: slice) -> Outcome:
        chains = Chains(draft_tokens[chunk], ends.length[chunk])
        target = ProbabilityRows(xp, target_probs[chunk])
        if rule == "greedy":
            return follow_rule(xp, chains, target.argmax)
        given = (None if a is None else a[chunk] for a in (seed, offset, uniform_accept, uniform_sample))
        draws = Draws(xp, *given)
        if rule == "match":
            return follow_rule(xp, chains, _drawing(xp, target, draws))
        draft = None if draft_probs is None else ProbabilityRows(xp, draft_probs[chunk])
        ratio_rule = token_rule if rule == "token" else block_rule
        return ratio_rule(xp, chains, target, draft, draws)

    return _collect(xp, draft_tokens, ends, eos, run, max(1, CHUNK // vocab))


def verify_greedy(target: Array, draft_tokens: Array, num_draft_tokens: Array, eos: Array | None) -> VerifyResult:
    """See ``draftproof.verify_greedy``."""
    xp = namespace(target)
    vocab = target.shape[-1]
    ends = _ends(xp, draft_tokens, num_draft_tokens, eos, vocab)
    unfiltered = Filters(xp.full((target.shape[0],), 1.0, "float32", like=target))

    def run(chunk: slice) -> Outcome:
        tokens = draft_tokens[chunk]
        rows = LogitRows(xp, target[chunk], unfiltered, None, tokens, None, vocab)
        return follow_rule(xp, Chains(tokens, ends.length[chunk]), rows.argmax)

    return _collect(xp, draft_tokens, ends, eos, run, max(1, CHUNK // vocab))


class _Ends(NamedTuple):
    """Where each draft ends: its ``length``, whether ``by_eos``, and the status of an invalid id that ended it."""

    length: Array
    by_eos: Array
    status: Array


def _ends(xp: Array, tokens: Array, num_draft_tokens: Array, eos: Array | None, vocab: int) -> _Ends:
    drafted = tokens.shape[1]
    position = xp.arange(drafted, like=tokens)[None, :]
    bad = (tokens < 0) | (tokens >= vocab)
    length = xp.minimum(_first(xp, bad, position), num_draft_tokens)
    invalid = xp.sum((position == length[:, None]) & bad & (tokens != -1) & (position < num_draft_tokens[:, None]))
    by_eos = length < 0
    if eos is not None:
        first = _first(xp, _among(xp, tokens, eos), position)
        by_eos = first < length
        length = xp.where(by_eos, first + 1, length)
        invalid = xp.where(by_eos[:, None], 0, invalid)
    return _Ends(length, by_eos, xp.int32(invalid[:, 0]) * int(Status.INVALID_DRAFT_ID))


def _first(xp: Array, hits: Array, position: Array) -> Array:
    """Index of the first hit of each row, the row's length without one."""
    drafted = hits.shape[1]
    if drafted == 0:
        return xp.sum(hits)[:, 0]
    return -xp.max(xp.where(hits, -position, -drafted))[:, 0]


def _among(xp: Array, tokens: Array, eos: Array) -> Array:
    """Whether each token [b, K] is one of the row's eos ids [b, E]; -1 is padding."""
    return xp.sum((tokens[:, :, None] == eos[:, None, :]) & (eos >= 0)[:, None, :])[:, :, 0] > 0


def _racing(xp: Array, target: LogitRows, seed: Array, offset: Array) -> Choose:
    """Rule match from logits: the target's own race at each position."""

    def choose(i: int, rows: Array) -> tuple[Array, Array]:
        prepared = target.rows(i, rows)
        column = race(xp, prepared, RaceStream(seed[rows, None], offset[rows, None] + i))
        return ids_of(xp, prepared.ids, column), prepared.status

    return choose


def _drawing(xp: Array, target: ProbabilityRows, draws: Draws) -> Choose:
    """Rule match from probabilities: the inverse CDF at each position."""

    def choose(i: int, rows: Array) -> tuple[Array, Array]:
        law = target.law(i, rows)
        return inverse_cdf(xp, draws.follow(i, rows), law.mass)[:, 0], law.status

    return choose


def _step(xp: Array, logits: Array, filters: Filters) -> int:
    """Sequences a chunk: by the vocabulary, or by the top-k survivors where one row serves the whole batch."""
    width = logits.shape[-1]
    if filters.top_k is not None and all(xp.same_row(a) for a in (logits, *filters) if a is not None):
        width = min(width, int(filters.top_k[0]))
    return max(1, CHUNK // width)


def _collect(
    xp: Array, tokens: Array, ends: _Ends, eos: Array | None, run: Callable[[slice], Outcome], step: int
) -> VerifyResult:
    """Run a rule chunk by chunk and lay out its results."""
    batch, drafted = tokens.shape
    parts = [run(slice(start, start + step)) for start in range(0, batch, step)]
    accepted, next_token, status = (
        xp.concat([getattr(part, name) for part in parts], 0) if parts else xp.full((0,), 0, dtype, like=tokens)
        for name, dtype in (("accepted", "int64"), ("next_token", "int64"), ("status", "int32"))
    )
    finished = ends.by_eos & (accepted == ends.length)
    # The bonus after an accepted eos is not emitted: a bad row there spoils nothing.
    spoilt = finished & (next_token < 0)
    status = xp.where(spoilt, status & ~DEAD, status) | ends.status
    alive = (status & DEAD) == 0
    accepted = xp.where(alive, accepted, 0)
    next_token = xp.where(alive, next_token, -1)
    emitted = xp.where(alive, accepted + 1 - xp.int64(finished), 0)
    position = xp.arange(drafted + 1, like=tokens)[None, :]
    padded = xp.concat([tokens, xp.full((batch, 1), -1, "int64", like=tokens)], 1)
    laid_out = xp.where(position < accepted[:, None], padded, -1)
    follows = (position == accepted[:, None]) & (position < emitted[:, None])
    laid_out = xp.where(follows, next_token[:, None], laid_out)
    hit = finished
    if eos is not None:
        hit = hit | (~finished & _among(xp, next_token[:, None], eos)[:, 0])
    return VerifyResult(accepted, next_token, laid_out, emitted, hit & alive, status)
