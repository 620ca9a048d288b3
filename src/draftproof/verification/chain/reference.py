"""What verification of a chain of drafts means: one request at a time, in exact arithmetic.

p is the target, q the draft. Row i of ``target`` and of ``draft`` is the law after i drafts; rows sum to 1, and may be
computed only when read: a rule reads no row it does not need. ``draft`` is None for point masses, drafts that no law
was sampled for. ``choose`` is the only source of randomness. A rule returns the number of accepted drafts and the token
that follows them. The functions named like operations, at the end, loop over a batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, Protocol

from ... import _numpy as np
from ...rng.uniforms import Choose, Masses, Uniforms
from ...sampling.reference import (
    DeadRow,
    allowed_logits,
    allowed_of,
    checked_probabilities,
    filtered,
    history_of,
    params_of,
    rounded,
)
from ...types import Array, Filters, SamplingParams, Status, VerifyResult


class Laws(Protocol):
    """Rows by index: a list, or rows computed when read."""

    def __getitem__(self, index: int, /) -> Masses:
        """Return row ``index``."""


Rule = Callable[[Laws, Laws | None, Sequence[int], Choose], tuple[int, int]]


# --- the rules -------------------------------------------------------------------------------------------------------


def token(target: Laws, draft: Laws | None, tokens: Sequence[int], choose: Choose) -> tuple[int, int]:
    """Accept each draft with probability min(1, p/q) (Leviathan et al. 2023, Chen et al. 2023)."""
    draft = point_masses(tokens) if draft is None else draft
    for i, x in enumerate(tokens):
        p, q = target[i], draft[i]
        if not choose.bernoulli(ratio(at(p, x), at(q, x)), draw=("accept", i)):
            return i, choose.categorical(correction(p, q), draw=("emit", i))
    n = len(tokens)
    return n, choose.categorical(target[n], draw=("emit", n))


def block(target: Laws, draft: Laws | None, tokens: Sequence[int], choose: Choose) -> tuple[int, int]:
    """Accept the longest prefix that passes its test, whether or not shorter ones do (Sun et al. 2025)."""
    draft = point_masses(tokens) if draft is None else draft
    n = len(tokens)
    P = prefix_scales(target, draft, tokens)
    for i in range(n, 0, -1):
        if choose.bernoulli(P[n] if i == n else keep_probability(P[i], target[i], draft[i]), draw=("accept", i - 1)):
            break
    else:
        i = 0
    emit = target[n] if i == n else correction(target[i], draft[i], P[i])
    return i, choose.categorical(emit, draw=("emit", i))


def match(target: Laws, draft: Laws | None, tokens: Sequence[int], choose: Choose) -> tuple[int, int]:
    """Draw the target's own token at each position and go on while the drafts guessed it (Daliri et al. 2024)."""
    for i, x in enumerate(tokens):
        y = choose.race(target[i], draw=("race", i))
        if y != x:
            return i, y
    n = len(tokens)
    return n, choose.race(target[n], draw=("race", n))


def greedy(target: Laws, draft: Laws | None, tokens: Sequence[int], choose: Choose) -> tuple[int, int]:
    """Go on while the drafts are the target's most likely tokens, the lowest id where several tie."""
    for i, x in enumerate(tokens):
        if x != argmax(target[i]):
            return i, argmax(target[i])
    n = len(tokens)
    return n, argmax(target[n])


RULES: dict[str, Rule] = {"token": token, "block": block, "match": match, "greedy": greedy}


# --- their parts -----------------------------------------------------------------------------------------------------


def law(masses: Masses) -> Masses:
    """Normalise a row by its own sum."""
    total = sum(masses)
    return [Fraction(m, total) if isinstance(m, int) else m / total for m in masses]


def at(row: Masses, x: int) -> Any:
    """Return the probability of an id, 0 where it lies outside the row's vocabulary."""
    return row[x] if x < len(row) else 0


def argmax(row: Masses) -> int:
    """Return the lowest id among the largest entries."""
    return max(range(len(row)), key=row.__getitem__)


def point_masses(tokens: Sequence[int]) -> Laws:
    """Return the laws of drafts that were certain."""
    return [[0] * x + [1] for x in tokens]


def ratio(p: Any, q: Any) -> Any:
    """Return min(1, p/q), with 0/0 = 0: a token that the target cannot emit is never accepted."""
    return 0 if p == 0 else 1 if p >= q else p / q


def excess(p: Masses, q: Masses, scale: Any = 1) -> Masses:
    """Return max(scale * p - q, 0) over the target's vocabulary."""
    return [max(scale * p_x - at(q, x), 0) for x, p_x in enumerate(p)]


def correction(p: Masses, q: Masses, scale: Any = 1) -> Masses:
    """Return the residual masses, or p where rounding has left none."""
    masses = excess(p, q, scale)
    return masses if any(masses) else p


def prefix_scales(target: Laws, draft: Laws, tokens: Sequence[int]) -> list[Any]:
    """Return P_0..P_n of block verification: what is left, after i drafts, of the target's claim on them."""
    scales: list[Any] = [1]
    for i, x in enumerate(tokens):
        scales.append(ratio(scales[i] * at(target[i], x), at(draft[i], x)))
    return scales


def keep_probability(scale: Any, p: Masses, q: Masses) -> Any:
    """Return the probability that block verification keeps a prefix that could have gone on (0/0 = 1)."""
    mass = sum(excess(p, q, scale))
    return mass / (mass + (1 - scale)) if mass else int(scale == 1)


# --- one request -----------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """What one request gets from a round of verification."""

    num_accepted: int
    next_token: int
    emitted: list[int]
    eos_hit: bool
    status: Status


def drafts_of(
    tokens: Sequence[int], num_draft_tokens: int, vocab: int, eos: Collection[int] = ()
) -> tuple[list[int], Status]:
    """Return the drafts to verify: those before the end, cut after their first eos."""
    drafts: list[int] = []
    for x in tokens[:num_draft_tokens]:
        if not 0 <= x < vocab:
            return drafts, Status.OK if x == -1 else Status.INVALID_DRAFT_ID
        drafts.append(x)
        if x in eos:
            break
    return drafts, Status.OK


def verify_one(
    rule: Rule,
    target: Laws,
    draft: Laws | None,
    tokens: Sequence[int],
    eos: Collection[int],
    choose: Choose,
) -> Round:
    """Run a rule on the drafts of one request and say what is emitted."""
    n = len(tokens)
    ends = n > 0 and tokens[-1] in eos
    try:
        accepted, next_token = rule(target, draft, tokens, choose)
        status = _information(rule, target, draft, tokens, accepted)
    except DeadRow as dead:
        if not (ends and dead.index == n):
            return Round(0, -1, [], False, dead.status)
        # The row after an accepted eos is read for a token that nobody needs.
        accepted, next_token, status = n, -1, _information(rule, target, draft, tokens, n)
    if ends and accepted == n:
        return Round(n, next_token, list(tokens), True, status)
    return Round(accepted, next_token, [*tokens[:accepted], next_token], next_token in eos, status)


def _information(rule: Rule, target: Laws, draft: Laws | None, tokens: Sequence[int], accepted: int) -> Status:
    """Return the status of the tests that were made."""
    if draft is None or rule not in (token, block):
        return Status.OK
    status = Status.OK
    n = len(tokens)
    tested = n if rule is block else min(accepted + 1, n)
    if any(at(draft[i], tokens[i]) == 0 for i in range(tested)):
        status |= Status.OFF_SUPPORT
    if accepted < n:
        scale = prefix_scales(target, draft, tokens)[accepted] if rule is block else 1
        if not any(excess(target[accepted], draft[accepted], scale)):
            status |= Status.RESIDUAL_FALLBACK
    return status


class LazyLaws:
    """Rows that are computed when a rule reads them; a dead row is an error only then."""

    def __init__(self, row: Callable[[int], Masses]) -> None:
        self._row = functools.cache(row)

    def __getitem__(self, index: int, /) -> Masses:
        try:
            return self._row(index)
        except DeadRow as dead:
            raise DeadRow(dead.status, index) from None


# --- a batch ---------------------------------------------------------------------------------------------------------


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

    def rows(b: int) -> tuple[Laws, Laws | None]:
        drafts, history = draft_tokens[b].tolist(), history_of(prev_tokens, b)

        def target_row(i: int) -> Masses:
            row = rounded(target_logits[b, i])
            allowed = None if mask is None else allowed_of(mask[b, i], len(row))
            return _law(row, params_of(filters, b), history + drafts[:i], allowed, rule)

        def draft_row(i: int) -> Masses:
            assert draft_logits is not None
            row = rounded(draft_logits[b, i])
            allowed = None
            if draft_mask is not None:
                allowed = allowed_of(draft_mask[b, i], len(row))
            elif mask is not None:
                # The target's mask says nothing about ids that only the draft has.
                vocab = target_logits.shape[-1]
                allowed = (allowed_of(mask[b, i], vocab) + [True] * len(row))[: len(row)]
            return _law(row, params_of(draft_filters, b), history + drafts[:i], allowed, rule)

        return LazyLaws(target_row), None if draft_logits is None else LazyLaws(draft_row)

    vocab = max(a.shape[-1] for a in (target_logits, draft_logits) if a is not None)
    chooses = (Uniforms(int(s), int(o)) for s, o in zip(seed, offset, strict=True))
    return verify_rows(RULES[rule], rows, draft_tokens, num_draft_tokens, vocab, eos, chooses)


def _law(
    row: Sequence[float],
    params: SamplingParams,
    history: Collection[int],
    allowed: Sequence[bool] | None,
    rule: str,
) -> Masses:
    """Return the law of a row of logits; for rule greedy the logits themselves, which no exponential has rounded."""
    if rule == "greedy":
        return allowed_logits(row, params, history, allowed)
    return law(filtered(row, params, history, allowed).masses)


def verify_probs(
    target_probs: Array,
    draft_probs: Array | None,
    draft_tokens: Array,
    rule: str,
    uniform_accept: Array | None,
    uniform_sample: Array | None,
    seed: Array | None,
    offset: Array | None,
    num_draft_tokens: Array,
    eos: Array | None,
) -> VerifyResult:
    """See ``draftproof.verify_probs``."""

    def law_of(row: Array) -> Masses:
        return law(checked_probabilities(rounded(row)))

    def rows(b: int) -> tuple[Laws, Laws | None]:
        target = LazyLaws(lambda i: law_of(target_probs[b, i]))
        return target, None if draft_probs is None else LazyLaws(lambda i: law_of(draft_probs[b, i]))

    def choose(b: int) -> Choose:
        return Uniforms(
            0 if seed is None else int(seed[b]),
            0 if offset is None else int(offset[b]),
            accept=None if uniform_accept is None else rounded(uniform_accept[b]),
            sample=None if uniform_sample is None else rounded(uniform_sample[b]),
            invert=True,
        )

    vocab = max(a.shape[-1] for a in (target_probs, draft_probs) if a is not None)
    chooses = map(choose, range(len(draft_tokens)))
    return verify_rows(RULES[rule], rows, draft_tokens, num_draft_tokens, vocab, eos, chooses)


def verify_greedy(target: Array, draft_tokens: Array, num_draft_tokens: Array, eos: Array | None) -> VerifyResult:
    """See ``draftproof.verify_greedy``."""

    def rows(b: int) -> tuple[Laws, Laws | None]:
        return LazyLaws(lambda i: allowed_logits(rounded(target[b, i]), SamplingParams(), (), None)), None

    chooses = (Uniforms() for _ in draft_tokens)
    return verify_rows(greedy, rows, draft_tokens, num_draft_tokens, target.shape[-1], eos, chooses)


def verify_rows(
    rule: Rule,
    rows: Callable[[int], tuple[Laws, Laws | None]],
    draft_tokens: Array,
    num_draft_tokens: Array,
    vocab: int,
    eos: Array | None,
    chooses: Iterable[Choose],
) -> VerifyResult:
    """Run a rule on each request: ``rows`` gives its target and draft laws, ``chooses`` its choices."""
    batch, k = draft_tokens.shape
    result = VerifyResult(
        np.zeros(batch, np.int64),
        np.zeros(batch, np.int64),
        np.full((batch, k + 1), -1, np.int64),
        np.zeros(batch, np.int64),
        np.zeros(batch, np.bool_),
        np.zeros(batch, np.int32),
    )
    for b, choose in enumerate(chooses):
        ids = [] if eos is None else [x for x in eos[b].tolist() if x >= 0]
        drafts, status = drafts_of(draft_tokens[b].tolist(), int(num_draft_tokens[b]), vocab, ids)
        one = verify_one(rule, *rows(b), drafts, ids, choose)
        result.num_accepted[b], result.next_token[b] = one.num_accepted, one.next_token
        result.tokens[b, : len(one.emitted)], result.num_emitted[b] = one.emitted, len(one.emitted)
        result.eos_hit[b], result.status[b] = one.eos_hit, one.status | status
    return result
