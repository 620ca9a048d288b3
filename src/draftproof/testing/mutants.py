"""Wrong ways to speculate, by name: each was a real bug somewhere or is one edit away.

``MUTANTS[name]`` is the library's own system, ``original``, and the same with one part replaced, ``system``. Its
``check`` passes on the first and raises AssertionError on the second.

Examples
--------
>>> mutant = MUTANTS["correction drawn from the target"]
>>> mutant.check(mutant.original)
>>> mutant.check(mutant.system)  # doctest: +ELLIPSIS
Traceback (most recent call last):
AssertionError: the law is off by 0.0987 on Model(vocab=3, drafted=2, mode='generic', seed=0, ...)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..rng.streams import Purpose
from ..rng.uniforms import Choose, Draw, Masses, Uniforms, counter
from ..sampling import reference as sampling
from ..verification.chain import reference as chain
from ..verification.chain.reference import argmax, at, correction, excess, point_masses, ratio
from .checks import batch, eos_law, filtered_law, kept, on_grid, point_mass_law, ragged_law, sampled_law, streams
from .speculation import Model, System, Tokens, propose


@dataclass(frozen=True)
class Mutant:
    """A system with one part replaced, and the check that tells it from the original."""

    description: str
    check: Callable[[System], None]
    original: System
    system: System


MUTANTS: dict[str, Mutant] = {}


def _add(
    name: str, description: str, check: Callable[[System], None], *, of: chain.Rule = chain.token, **parts: Any
) -> None:
    original = System(rule=of)
    MUTANTS[name] = Mutant(description, check, original, dataclasses.replace(original, **parts))


# --- rule token ------------------------------------------------------------------------------------------------------


def _token(
    accept: Callable[[Any, Any], Any] = ratio,
    correct: Callable[[Masses, Masses, int], Masses] = lambda p, q, _: correction(p, q),
    bonus: Callable[[chain.Laws, int], Masses] = lambda target, n: target[n],
    row: Callable[[int], int] = lambda i: i,
) -> chain.Rule:
    def token(target: chain.Laws, draft: chain.Laws | None, tokens: Sequence[int], choose: Choose) -> tuple[int, int]:
        draft = point_masses(tokens) if draft is None else draft
        for i, x in enumerate(tokens):
            p, q = target[i], draft[i]
            if x < 0 or not choose.bernoulli(accept(at(p, x), at(q, x)), draw=("accept", i)):
                return i, choose.categorical(correct(target[row(i)], q, x), draw=("emit", i))
        n = len(tokens)
        return n, choose.categorical(bonus(target, n), draw=("emit", n))

    return token


def _or(masses: Masses, p: Masses) -> Masses:
    return masses if any(masses) else p


def _without(p: Masses, x: int) -> Masses:
    return _or([0 if y == x else p_y for y, p_y in enumerate(p)], p)


def _distance(p: Masses, q: Masses) -> Masses:
    return _or([abs(p_x - q_x) for p_x, q_x in zip(p, q, strict=True)], p)


_add(
    "correction drawn from the target",
    "p instead of the residual",
    sampled_law,
    rule=_token(correct=lambda p, _q, _x: p),
)
_add(
    "rejected token masked",
    "p without the rejected token instead of the residual",
    sampled_law,
    rule=_token(correct=lambda p, _, x: _without(p, x)),
)
_add(
    "absolute residual",
    "|p - q| instead of max(p - q, 0)",
    sampled_law,
    rule=_token(correct=lambda p, q, _: _distance(p, q)),
)
_add(
    "argmax correction",
    "the most likely token on rejection",
    sampled_law,
    rule=_token(correct=lambda p, _q, _x: point_masses([argmax(p)])[0]),
)
_add(
    "correction row off by one",
    "the residual of the row after the rejection",
    sampled_law,
    rule=_token(row=lambda i: i + 1),
)
_add("p and q swapped", "accepts with min(1, q/p)", sampled_law, rule=_token(lambda p, q: ratio(q, p)))
_add("accepts iff p >= q", "compares without a uniform", sampled_law, rule=_token(lambda p, q: int(p >= q)))
_add(
    "accepts 5 % too often",
    "min(1, 1.05 p/q)",
    sampled_law,
    rule=_token(lambda p, q: ratio(p * Fraction(21, 20), q)),
)
_add(
    "flattened bonus",
    "a bonus that takes all possible tokens alike",
    sampled_law,
    rule=_token(bonus=lambda target, n: [int(p_x > 0) for p_x in target[n]]),
)
_add(
    "bonus row off by one",
    "the bonus from the row of the last draft",
    sampled_law,
    rule=_token(bonus=lambda target, n: target[max(n - 1, 0)]),
)
_add(
    "point mass not removed",
    "a rejected draft without a law can be drawn again",
    point_mass_law,
    rule=_token(correct=lambda p, _q, _x: p),
)
_add(
    "-1 is a rejection",
    "the token after the end of a draft from the residual instead of the target",
    ragged_law,
    rule=_token(),
    drafts_of=lambda tokens, *_: (tokens[: tokens.index(-1) + 1] if -1 in tokens else tokens, None),
)
_add(
    "rows not normalised", "masses taken for probabilities", sampled_law, law=lambda masses: list(map(Fraction, masses))
)
_add("q = 0 accepts", "0/0 counts as 1", on_grid, rule=_token(lambda p, q: ratio(p, q) if q else 1))


class _AtMost(Uniforms):
    """Accepts on ``u <= r``."""

    def bernoulli(self, probability: Any, *, draw: Draw) -> bool:
        return bool(self._uniform(draw) <= probability)


_add("u <= r", "accepts a token of probability 0 when u is 0", on_grid, interpreter=_AtMost)


# --- rule block ------------------------------------------------------------------------------------------------------


def _block(
    test_scale: Callable[[Any], Any] = lambda scale: scale,
    emit_scale: Callable[[Any], Any] = lambda scale: scale,
    row: Callable[[int], int] = lambda i: i,
    scale: Callable[[Any, Any, Any], Any] = lambda P, p, q: ratio(P * p, q),
    *,
    in_order: bool = False,
) -> chain.Rule:
    def block(target: chain.Laws, draft: chain.Laws | None, tokens: Sequence[int], choose: Choose) -> tuple[int, int]:
        draft = point_masses(tokens) if draft is None else draft
        n = len(tokens)
        P: list[Any] = [1]
        for i, x in enumerate(tokens):
            P.append(scale(P[i], at(target[i], x), at(draft[i], x)))
        passed = []
        for i in range(1, n + 1):
            S = Fraction(sum(excess(target[row(i)], draft[row(i)], test_scale(P[i])))) if i < n else None
            h = P[n] if S is None else S / (S + 1 - P[i]) if S else int(P[i] == 1)
            passed.append(choose.bernoulli(h, draw=("accept", i - 1)))
        tau = passed.index(False) if in_order and False in passed else n - [*passed[::-1], True].index(True)
        emit = target[n] if tau == n else correction(target[tau], draft[tau], emit_scale(P[tau]))
        return tau, choose.categorical(emit, draw=("emit", tau))

    return block


_add(
    "block tests the unscaled residual",
    "S_i = sum max(p - q, 0) in the acceptance",
    sampled_law,
    of=chain.block,
    rule=_block(test_scale=lambda _: 1),
)
_add(
    "block draws the unscaled residual",
    "the correction from max(p - q, 0) instead of max(P p - q, 0)",
    sampled_law,
    of=chain.block,
    rule=_block(emit_scale=lambda _: 1),
)
_add(
    "block stops at a failed test",
    "the drafts before the first failed test, not those before the last passed one",
    sampled_law,
    of=chain.block,
    rule=_block(in_order=True),
)
_add(
    "block residual row off by one",
    "S_i from the row that draft i was drawn from",
    sampled_law,
    of=chain.block,
    rule=_block(row=lambda i: i - 1),
)
_add(
    "block caps each ratio",
    "P_i = P_(i-1) min(1, p/q) instead of min(1, P_(i-1) p/q)",
    sampled_law,
    of=chain.block,
    rule=_block(scale=lambda P, p, q: P * ratio(p, q)),
)


# --- rules match and greedy ------------------------------------------------------------------------------------------


def _match_again(
    target: chain.Laws, draft: chain.Laws | None, tokens: Sequence[int], choose: Choose
) -> tuple[int, int]:
    accepted, y = chain.match(target, draft, tokens, choose)
    return accepted, y if accepted == len(tokens) else choose.categorical(target[accepted], draw=("emit", accepted))


def _greedy_last(target: chain.Laws, _: Any, tokens: Sequence[int], __: Any) -> tuple[int, int]:
    rows = [target[i] for i in range(len(tokens) + 1)]
    last = [len(row) - 1 - argmax(row[::-1]) for row in rows]
    accepted = next((i for i, x in enumerate(tokens) if x != last[i]), len(tokens))
    return accepted, last[accepted]


_add(
    "match draws again",
    "a new draw after a mismatch instead of the token that did not match",
    sampled_law,
    of=chain.match,
    rule=_match_again,
)
_add("greedy takes the last maximum", "the highest id on ties", sampled_law, of=chain.greedy, rule=_greedy_last)


# --- around the rule -------------------------------------------------------------------------------------------------


def _argmax_drafts(model: Model, law: Callable[[Tokens], Masses], prefix: Tokens, _: Choose) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < model.drafted:
        tokens.append(argmax(law(prefix + tuple(tokens))))
    return tokens


def _confident_drafts(model: Model, law: Callable[[Tokens], Masses], prefix: Tokens, choose: Choose) -> list[int]:
    tokens = propose(model, law, prefix, choose)
    for i, x in enumerate(tokens):
        q = chain.law(law(prefix + tuple(tokens[:i])))
        if x >= 0 and q[x] < Fraction(1, 3):
            return tokens[:i] + [-1] * (model.drafted - i)
    return tokens


def _emits_bonus(*args: Any) -> chain.Round:
    outcome = chain.verify_one(*args)
    return outcome._replace(emitted=[*args[3][: outcome.num_accepted], outcome.next_token])


_add("argmax draft with a law", "a draft that was certain, verified with p/q", sampled_law, propose=_argmax_drafts)
_add(
    "unlikely draft dropped",
    "a draft cut where q is low, as if it had ended there",
    sampled_law,
    propose=_confident_drafts,
)
_add(
    "bonus after eos",
    "the bonus is emitted although an accepted eos has ended the text",
    eos_law,
    verify_one=_emits_bonus,
)
_add(
    "draft not filtered",
    "filtered drafts, verified with their unfiltered law",
    filtered_law,
    warp_draft=lambda _, masses: masses,
)
_add(
    "target not filtered",
    "drafts verified against the unfiltered target",
    filtered_law,
    warp_target=lambda _, masses: masses,
)


# --- streams ---------------------------------------------------------------------------------------------------------


def _rekeyed(kind: str, key: Callable[[int, int], Any]) -> Callable[[Draw, int], Any]:
    """Return the stream table with one entry, a function of index and round offset, replaced."""
    return lambda draw, offset: key(draw[1], offset) if draw[0] == kind else counter(draw, offset)


_add(
    "one stream for draft and correction",
    "a token that the draft's noise just refused is favoured by the same noise",
    streams,
    counter=_rekeyed("emit", lambda i, offset: (Purpose.DRAFT_TOKEN, offset, i)),
)
_add(
    "one stream for draft and test",
    "a draft is accepted by the uniform that drew it",
    streams,
    counter=_rekeyed("accept", lambda i, offset: (Purpose.DRAFT_TOKEN, offset, i)),
)
_add(
    "one uniform for all tests",
    "the tests of a round share their uniform",
    streams,
    counter=_rekeyed("accept", lambda _, offset: (Purpose.ACCEPT, offset, 0)),
)
_add(
    "private drafts keyed by position",
    "block looks at drafts beyond tau, which the next round then draws again",
    streams,
    of=chain.block,
    counter=_rekeyed("draft", lambda i, offset: (Purpose.DRAFT_TOKEN, offset + i, 0)),
)
_add(
    "match keyed by round",
    "the target's race at draft i of every round is the same",
    streams,
    of=chain.match,
    counter=_rekeyed("race", lambda i, _: (Purpose.RACE_TOKEN, i, 0)),
)
_add(
    "offset left out",
    "all rounds share their tests",
    streams,
    counter=_rekeyed("accept", lambda i, _: (Purpose.ACCEPT, 0, i)),
)
_add("one seed for all rows", "a scalar seed is every row's seed", batch, row_seeds=lambda seed, _: seed)


# --- filters ---------------------------------------------------------------------------------------------------------


_KEPT: Callable[..., list[int]] = sampling.kept


def _top_p_off(by: int) -> Callable[..., list[int]]:
    def kept(*masses: Masses, top_p: Any = None, **filters: Any) -> list[int]:
        return _KEPT(*masses, top_p=None if top_p is None else top_p + by * sampling.TOP_P_SLACK, **filters)

    return kept


def _k_tokens(*masses: Masses, top_k: int | None = None, **filters: Any) -> list[int]:
    order = _KEPT(*masses)[: top_k or None]
    return [x for x in _KEPT(*masses, top_k=top_k, **filters) if x in order]


def _top_p_of_all(*masses: Masses, top_k: int | None = None, **filters: Any) -> list[int]:
    order = _KEPT(*masses, top_k=top_k)
    return [x for x in _KEPT(*masses, **filters) if x in order]


def _min_p_of_total(*masses: Masses, min_p: Any = None, **filters: Any) -> list[int]:
    return [x for x in _KEPT(*masses, **filters) if min_p is None or masses[0][x] >= min_p * sum(masses[0])]


_add("top-p slack of the wrong sign", "keeps a token too many at a decimal boundary", kept, kept=_top_p_off(2))
_add("top-p without slack", "keeps a token too many where logits were rounded", kept, kept=_top_p_off(1))
_add("top-k drops ties", "keeps k tokens of those that tie at the k-th place", kept, kept=_k_tokens)
_add("top-p of all tokens", "measures the mass before top-k", kept, kept=_top_p_of_all)
_add("min-p of the total", "compares with the total mass instead of the largest", kept, kept=_min_p_of_total)
