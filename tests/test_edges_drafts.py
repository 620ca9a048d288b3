"""Where drafts end; vocabularies, masks and penalties of target and draft."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from draftproof import Status
from edges import (
    EVERY,
    HISTORY,
    INF,
    NAN,
    ROWS,
    RULES,
    SEEDS,
    Arrays,
    System,
    check_layout,
    make_round,
    packed,
    penalised,
    pick,
    same,
)

# --- where a draft ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_ragged_drafts(system: System, rule: str) -> None:
    """``num_draft_tokens``, -1, and an invalid id end a draft alike: as if the arrays ended there."""
    target, draft, tokens, seed, offset = make_round()
    given = {"rule": rule, "seed": seed, "offset": offset}
    for n, rows in itertools.product(range(4), (draft, None)):
        short = system("verify", target[:, : n + 1], None if rows is None else rows[:, :n], tokens[:, :n], **given)
        length = np.full(24, n)
        check_end(system("verify", target, rows, tokens, num_draft_tokens=length, **given), short, n, 0)
        check_end(system("verify", target, rows, tokens, num_draft_tokens=n, **given), short, n, 0)
        # Whatever follows the end is not looked at, ids out of range included.
        for end, flag in ((-1, 0), (-(2**40), 4), (6, 4)) if n < 3 else ():
            cut = tokens.copy()
            cut[:, n], cut[:, n + 1 :] = end, 2**50
            check_end(system("verify", target, rows, cut, **given), short, n, flag)
            check_end(system("verify", target, rows, cut, num_draft_tokens=n, **given), short, n, 0)


def check_end(result: Any, short: Any, n: int, flag: int) -> None:
    same(result._replace(tokens=result.tokens[:, : n + 1], status=result.status ^ flag), short)
    assert (result.tokens[:, n + 1 :] == -1).all()


@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_end_of_sequence(system: System, rule: str) -> None:
    """The draft is cut after its first eos; if that is accepted, emission ends with it and the bonus is only told."""
    target, draft, tokens, seed, offset = make_round(64)
    given = {"rule": rule, "seed": seed, "offset": offset, "temperature": 0.5, "check": False}
    rng = np.random.default_rng(2)
    per_row = rng.integers(-1, 6, (64, 2))
    length = rng.integers(0, 4, 64)
    finishes = 0
    for eos in (0, np.array([1, 4]), per_row, -1, np.array([], int)):
        ids = np.broadcast_to(np.atleast_1d(eos), (64, np.atleast_1d(eos).shape[-1]))
        ends = [[int(t) in set(ids[b]) - {-1} for t in tokens[b, : length[b]]] for b in range(64)]
        n = np.array([e.index(True) + 1 if any(e) else len(e) for e in ends])
        by_eos = np.array([any(e) for e in ends])
        cut = system("verify", target, draft, tokens, num_draft_tokens=n, **given)
        finished = by_eos & (cut.num_accepted == n)
        finishes += finished.sum()
        next_ends = (cut.next_token[:, None] == np.where(ids < 0, -2, ids)).any(1)
        laid_out = cut.tokens.copy()
        laid_out[finished, n[finished]] = -1
        expected = cut._replace(
            tokens=laid_out, num_emitted=cut.num_emitted - finished, eos_hit=finished | (next_ends & ~finished)
        )
        result = system("verify", target, draft, tokens, num_draft_tokens=length, eos=eos, **given)
        same(result, expected)
        check_layout(result, tokens)
        # A bad bonus row after an accepted eos spoils nothing but the bonus; rows beyond it are never read.
        spoilt = target.copy()
        spoilt[np.arange(64), n] = NAN
        spoilt[np.arange(4) > n[:, None]] = NAN
        late = system("verify", spoilt, draft, tokens, num_draft_tokens=length, eos=eos, **given)
        same(pick(late, finished), pick(expected._replace(next_token=np.full(64, -1)), finished))
        other = ~finished & (cut.num_accepted < n)
        same(pick(late, other), pick(expected, other))
    assert finishes > 10


@EVERY
def test_invalid_id_after_an_eos_is_not_seen(system: System) -> None:
    target, _, tokens, _, _ = make_round(1)
    tokens[0] = [target[0, 0].argmax(), 77, 0]
    result = system("verify_greedy", target, tokens, eos=int(tokens[0, 0]))
    assert (result.status[0], result.num_accepted[0], result.eos_hit[0]) == (0, 1, True)
    assert system("verify_greedy", target, tokens).status[0] == Status.INVALID_DRAFT_ID
    # It says what ended the draft, whatever was accepted.
    tokens[0, 0] = (tokens[0, 0] + 1) % 6
    result = system("verify_greedy", target, tokens)
    assert (result.num_accepted[0], result.status[0]) == (0, Status.INVALID_DRAFT_ID)


@EVERY
def test_information(system: System) -> None:
    """OFF_SUPPORT and RESIDUAL_FALLBACK, for the tests that were made and no others; the tokens are right."""

    def run(p: Any, q: Any, tokens: list[int], rule: str = "token", u: float = 0.5) -> tuple[int, int, int]:
        p, q = np.array([p], np.float32), np.array([q], np.float32)
        uniforms = np.full((1, 3), u, np.float32)
        given = {"uniform_accept": uniforms[:, :2], "uniform_sample": uniforms}
        result = system("verify_probs", p, q, np.array([tokens]), rule=rule, **given)
        return int(result.num_accepted[0]), int(result.next_token[0]), int(result.status[0])

    half, first, second = [0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]
    for rule in ("token", "block"):
        # q(0) = 0 < p(0): accepted, and the caller learns that the draft was not drawn from q.
        assert run([half, half, second], [second, half], [0, 1], rule) == (2, 1, Status.OFF_SUPPORT)
        # p = q = 0 at the draft, p = q elsewhere: rejected, nothing left in the residual, drawn from p.
        assert run([second, second, first], [second, second], [0, 1], rule, 0.0) == (0, 1, 24)
    # The second test is not made by token, and is by block.
    assert run([first, first, first], [second, second], [1, 0]) == (0, 0, 0)
    assert run([first, first, first], [second, second], [1, 0], "block") == (0, 0, Status.OFF_SUPPORT)


# --- vocabularies, masks, penalties -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "min_p": 0.02}], ids=["", "all"]
)
@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_draft_vocabulary(system: System, rule: str, filters: dict[str, Any]) -> None:
    """A draft vocabulary of another size is the same as -inf where one side has no logit."""

    def padded(rows: Arrays, vocab: int) -> Arrays:
        return np.pad(rows, ((0, 0), (0, 0), (0, vocab - rows.shape[-1])), constant_values=-INF)

    for draft_vocab in (4, 9):
        target, draft, tokens, seed, offset = make_round(48, 3, 6, draft_vocab)
        given = {"rule": rule, "seed": seed, "offset": offset, **filters}
        result = system("verify", target, draft, tokens, **given)
        same(result, system("verify", padded(target, 9), padded(draft, 9), tokens, **given))
        assert (result.status & Status.INVALID_DRAFT_ID == 0).all()
        assert result.tokens.max() < 6
        check_layout(result, tokens)
        if rule in ("token", "block"):
            probs = system("verify_probs", np.exp(target), np.exp(draft), tokens, rule=rule, seed=seed)
            zeros = [np.where(np.isinf(padded(rows, 9)), 0, np.exp(padded(rows, 9))) for rows in (target, draft)]
            same(probs, system("verify_probs", *zeros, tokens, rule=rule, seed=seed))


@pytest.mark.parametrize("vocab", [1, 6, 31, 32, 33, 64, 70])
@EVERY
def test_mask(system: System, vocab: int) -> None:
    """A mask, bool or packed, is -inf where it forbids: bits at or above V are ignored."""
    rng = np.random.default_rng(vocab)
    rows = rng.normal(size=(5, vocab)).astype(np.float32)
    mask = rng.random((5, vocab)) < 0.5
    mask[np.arange(5), rng.integers(0, vocab, 5)] = True
    by_hand = np.where(mask, rows, -INF).astype(np.float32)
    for form in (mask, packed(mask)):
        for given in ({}, {"top_k": 3}, {"top_p": 0.7, "temperature": np.array([0, 1, 0.5, 2, 1])}):
            same(system("filter_logits", rows, mask=form, **given), system("filter_logits", by_hand, **given))
            same(system("sample", rows, mask=form, seed=SEEDS, **given), system("sample", by_hand, seed=SEEDS, **given))


@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_mask_per_position(system: System, rule: str) -> None:
    """In verification each position has its mask; it acts on the draft too, unless the draft has its own."""
    rng = np.random.default_rng(8)
    for draft_vocab in (6, 4, 9):
        target, draft, tokens, seed, offset = make_round(24, 3, 6, draft_vocab)
        given = {"rule": rule, "seed": seed, "offset": offset, "top_p": 0.95}
        mask = rng.random(target.shape) < 0.7
        mask[..., 0] = True
        own = rng.random(draft.shape) < 0.7
        own[..., 0] = True
        hidden = np.where(mask, target, -INF).astype(np.float32)
        # What the target's mask does not speak of is allowed in the draft.
        spoken = np.pad(mask[:, :3], ((0, 0), (0, 0), (0, 3)), constant_values=True)[..., :draft_vocab]
        alike = system("verify", hidden, np.where(spoken, draft, -INF).astype(np.float32), tokens, **given)
        apart = system("verify", hidden, np.where(own, draft, -INF).astype(np.float32), tokens, **given)
        for form, own_form in ((mask, own), (packed(mask), packed(own))):
            same(system("verify", target, draft, tokens, mask=form, **given), alike)
            same(system("verify", target, draft, tokens, mask=form, draft_mask=own_form, **given), apart)
        allowed = np.take_along_axis(mask, np.maximum(alike.tokens, 0)[..., None], -1)[..., 0]
        assert allowed[alike.tokens >= 0].all()
        same(
            system("verify", target, draft, tokens, draft_mask=own, **given),
            system("verify", target, np.where(own, draft, -INF).astype(np.float32), tokens, **given),
        )


@EVERY
def test_penalty(system: System) -> None:
    rows = np.concatenate([ROWS[:, :5], np.tile(np.float32([-0.0, INF, -INF]), (5, 1))], 1)
    for penalty in (1.3, 0.5):
        by_hand = np.array([penalised(r, penalty, h) for r, h in zip(rows, HISTORY.tolist(), strict=True)])
        for ids in (HISTORY, HISTORY.astype(np.int32)):
            result = system("filter_logits", rows, repetition_penalty=penalty, prev_tokens=ids)
            same(result, by_hand)
    # Without a history there is nothing to penalise.
    same(system("filter_logits", rows, repetition_penalty=2.0), rows)


@pytest.mark.parametrize("history", [HISTORY, None], ids=["history", "none"])
@pytest.mark.parametrize("rule", RULES)
@EVERY
def test_penalty_sees_earlier_drafts(system: System, rule: str, history: Arrays) -> None:
    """Position i is penalised for the history and the drafts before it, on both sides, each by its own penalty."""
    for draft_vocab in (6, 9):
        target, draft, tokens, seed, offset = make_round(5, 3, 6, draft_vocab)
        before = [[]] * 5 if history is None else history.tolist()

        def by_hand(rows: Arrays, penalty: float) -> Arrays:
            return np.array(
                [
                    [penalised(row, penalty, before[b] + tokens[b, :i].tolist()) for i, row in enumerate(rows[b])]  # noqa: B023
                    for b in range(5)
                ]
            )

        given = {"rule": rule, "seed": seed, "offset": offset, "temperature": 0.8}
        for own in (None, 1, 0.5):
            result = system(
                "verify", target, draft, tokens, repetition_penalty=1.7, draft_repetition_penalty=own,
                prev_tokens=history, **given,
            )  # fmt: skip
            rows = by_hand(target, 1.7), by_hand(draft, own or 1.7)
            same(result, system("verify", *rows, tokens, **given))


@pytest.mark.parametrize("rule", ["token", "block"])
@EVERY
def test_draft_parameters_default_to_the_targets(system: System, rule: str) -> None:
    target, draft, tokens, seed, offset = make_round()
    given: dict[str, Any] = {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2}
    streams = {"rule": rule, "seed": seed, "offset": offset}
    own = {f"draft_{name}": value for name, value in given.items()}
    result = system("verify", target, draft, tokens, **given, **streams)
    same(result, system("verify", target, draft, tokens, **given, **own, **streams))
    # Off is a value of its own.
    off = {"draft_temperature": 1, "draft_top_k": 0, "draft_top_p": 1, "draft_min_p": 0, "draft_repetition_penalty": 1}
    plain = system("verify", target, draft, tokens, **given, **off, **streams)
    assert not np.array_equal(plain.tokens, result.tokens)
