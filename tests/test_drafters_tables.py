"""Drafters that guess from tables, against brute force: what they propose, what they remember, how they learn."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.drafters import (
    CorpusDrafter,
    MixDrafter,
    ModelDrafter,
    NgramDrafter,
    RecyclingDrafter,
    SuffixDrafter,
)
from draftproof.drafters.automaton import SuffixAutomaton
from draftproof.drafters.chances import Chances
from draftproof.drafters.mix import promise
from draftproof.errors import DtypeError, ShapeError, ValueRangeError
from draftproof.testing import TableModel
from draftproof.types import Draft
from proposing import propose
from remedies import refused

# Repetitive ones too: few letters, or pieces of a sentence again and again.
PIECES = st.lists(st.sampled_from([[7], [1, 2, 3], [1, 2, 4], [1, 2, 3, 5, 6]]), max_size=12)
TEXTS = st.one_of(
    st.lists(st.integers(0, 1), max_size=40),
    st.lists(st.integers(0, 4), max_size=40),
    PIECES.map(lambda pieces: [token for piece in pieces for token in piece]),
)


def ends(text: list[int], piece: list[int]) -> list[int]:
    """Where a piece ends in a text."""
    return [end for end in range(len(piece), len(text) + 1) if text[end - len(piece) : end] == piece]


@settings(max_examples=60)
@given(TEXTS, st.sampled_from([1, 2, 3, 50]))
def test_automaton_knows_all_substrings(text: list[int], depth: int) -> None:
    automaton = SuffixAutomaton(depth)
    for i, token in enumerate(text):
        automaton.append(token)
        seen = text[: i + 1]
        matched = max(m for m in range(min(depth, i) + 1) if m == 0 or ends(seen[:-1], seen[-m:]))
        assert automaton.matched == matched
        if matched:
            assert automaton.earlier == ends(seen[:-1], seen[-matched:])[-1]
    for length in range(1, depth + 1):
        for start in range(len(text) - length + 1):
            piece, state = text[start : start + length], 0
            for token in piece:
                state = automaton.next[state][token]
            assert (automaton.counts[state], automaton.ends[state]) == (len(ends(text, piece)), ends(text, piece)[-1])


@settings(max_examples=60)
@given(TEXTS, TEXTS)
def test_automaton_follows_another_text(text: list[int], other: list[int]) -> None:
    """The longest suffix of what was read that occurs in the text, while the text grows too."""
    automaton, state, matched = SuffixAutomaton(4), 0, 0
    for i, token in enumerate(other):
        for letter in text[2 * i : 2 * i + 2]:
            automaton.append(letter)
        state, matched = automaton.advance(automaton.settle(state, matched), matched, token)
        seen, known = other[: i + 1], automaton.text
        # What grew since does not lengthen a match behind the last token.
        assert matched <= max(m for m in range(min(4, len(seen)) + 1) if m == 0 or ends(known, seen[-m:]))
        assert matched == 0 or ends(known, seen[-matched:])
    whole, state, matched = SuffixAutomaton(4), 0, 0
    for letter in text:
        whole.append(letter)
    for i, token in enumerate(other):
        state, matched = whole.advance(state, matched, token)
        seen = other[: i + 1]
        assert matched == max(m for m in range(min(4, len(seen)) + 1) if m == 0 or ends(text, seen[-m:]))


def continued(ids: list[int], width: int, depth: int) -> list[int]:
    """What followed the most recent earlier occurrence of the longest suffix, read on into its own copy."""
    for m in range(min(depth, len(ids) - 1), 0, -1):
        if found := ends(ids[:-1], ids[-m:]):
            copy = list(ids)
            for i in range(width):
                copy.append(copy[found[-1] + i])
            return copy[len(ids) :]
    return []


@given(TEXTS, st.data())
def test_suffixes(text: list[int], data: st.DataObject) -> None:
    state = SuffixDrafter(depth=5).start()
    state.least = 0.0
    at = 0
    while at < len(text):
        at += data.draw(st.integers(1, 5))
        draft = propose(state, text[:at])
        assert draft.tokens.tolist() == continued(text[:at], 6, 5)
        again = propose(state, text[:at])
        assert (draft.tokens.tolist(), draft.acceptance) == (again.tokens.tolist(), again.acceptance)


@given(TEXTS)
def test_suffix_chances_follow_agreement(text: list[int]) -> None:
    """Before any test the chance is a function of the length of the match and of what else followed the last two."""
    state = SuffixDrafter(depth=5).start()
    state.least = 0.0
    draft = propose(state, text)
    ids = list(text)
    for token, kind in zip(draft.tokens.tolist(), state._kinds, strict=True):
        after = [text[end] for end in ends(text, ids[-2:]) if end < len(text)]
        same = after.count(token)
        agreement = 0 if len(after) < 2 else 1 if same == len(after) else 2 if 2 * same >= len(after) else 3
        assert kind // 8 == agreement
        ids.append(token)


@given(st.lists(TEXTS, max_size=4), TEXTS)
def test_corpus(texts: list[list[int]], ids: list[int]) -> None:
    """The most frequent continuation of the longest suffix, step by step; of equals the most recent."""
    whole = [token for text in texts for token in (*text, -1)]
    drafter = CorpusDrafter(texts, depth=3)
    state = drafter.start()
    state.least = 0.0
    expected: list[int] = []
    while len(expected) < 6:
        seen = ids + expected
        matched = max(m for m in range(min(3, len(seen)) + 1) if m == 0 or ends(whole, seen[-m:]))
        after = [whole[end] for end in ends(whole, seen[-matched:]) if end < len(whole)] if matched else []
        if not after:
            break
        counts = Counter(after)
        last = {token: at for at, token in enumerate(after)}
        token = max(counts, key=lambda t: (counts[t], last[t]))
        if token < 0:
            break
        expected.append(token)
    assert propose(state, ids).tokens.tolist() == expected


def test_corpus_grows() -> None:
    drafter = CorpusDrafter([[1, 2, 3]])
    state = drafter.start()
    assert propose(state, [0, 1, 2]).tokens.tolist() == [3]
    drafter.add(np.array([1, 2, 9]))
    drafter.add([1, 2, 9, 8])
    assert propose(state, [0, 1, 2]).tokens.tolist() == [9, 8]
    assert propose(drafter.start(), [5, 1, 2]).tokens.tolist() == [9, 8]


def test_recycling_against_a_table() -> None:
    """One candidate an entry: what the target last found most likely after the same two tokens, else the same one."""
    model, rng = TableModel(seed=3), np.random.default_rng(5)
    state = RecyclingDrafter(candidates=1).start()
    state.least = 0.0
    latest: dict[Any, int] = {}
    ids = [1, 2, 3]
    for _ in range(200):
        expected: list[int] = []
        while len(expected) < 4:
            before, last = (ids + expected)[-2:]
            token = latest.get((before, last), latest.get(last))
            if token is None:
                break
            expected.append(token)
        assert propose(state, ids, 4).tokens.tolist() == expected
        emitted = rng.integers(0, 6, size=rng.integers(1, 4)).tolist()
        rows = model(ids, emitted[:-1])
        state.accept(len(emitted) - 1, emitted[-1], rows)
        before, last = (ids + emitted[:-1])[-2:]
        latest[before, last] = latest[last] = int(rows[-1].argmax())
        ids += emitted
    assert len(latest) > 30


def test_recycling_weighs_what_it_heard() -> None:
    """Weights fall by half for each ln 2 below the maximum, to the nearest power, and by half when new ones come."""
    state = RecyclingDrafter().start()
    ids = [9, 1]
    for best in ({5: 0, 6: -1}, {7: 0, 6: -1}, {8: 0, 6: -0.5}):
        for row, token in ((best, 9), ({2: 0}, 1)):
            propose(state, ids)
            logits = np.full((1, 10), -50, np.float32)
            logits[0, list(row)] = list(row.values())
            state.accept(0, token, logits)
            ids.append(token)
    propose(state, ids)
    assert state._table[1] == state._table[9, 1] == {8: 1.0, 6: 0.5 + 0.5 * (0.5 + 0.5 * 0.5), 7: 0.5, 5: 0.25}


class Fixed:
    """Proposes the same with the same chances; notes what it is told."""

    has_q, noise, estimates = False, None, True

    def __init__(self, tokens: list[int], chances: list[float]) -> None:
        self.draft = Draft(np.array(tokens, np.int64), None, chances)
        self.told: list[int] = []

    def start(self) -> Any:
        return self

    def propose(self, context: Any, width: int, **_: Any) -> Draft:
        return self.draft

    def accept(self, num_accepted: int, next_token: int, target_logits: Any) -> None:
        self.told.append(next_token)


def test_mix_takes_the_most_promising() -> None:
    short, long, none = Fixed([1], [0.95]), Fixed([2] * 9, [0.9] * 9), Fixed([], [])
    assert propose(MixDrafter([none, short, long]).start(), [0], 9).tokens.tolist() == [2] * 9
    assert propose(MixDrafter([none, short, Fixed([3] * 3, [0.3] * 3)]).start(), [0]).tokens.tolist() == [1]
    assert propose(MixDrafter([none]).start(), [0]).tokens.tolist() == []
    mix = MixDrafter([short, long]).start()
    mix.accept(0, 7, np.zeros((1, 3)))
    assert short.told == long.told == [7]


@given(st.lists(st.floats(0, 1), max_size=9))
def test_promise(chances: list[float]) -> None:
    expected = [sum(np.prod(chances[:i]) for i in range(n + 1)) / (1.3 + 0.1 * n) for n in range(1, len(chances) + 1)]
    assert promise(chances) == pytest.approx(max([1.0, *expected]))


def test_a_mix_learns_which_drafter_is_right() -> None:
    """After 1, 2 comes 3, as before in the text; the corpus knows nothing but 9 there, and at first is asked first."""
    text = [token for i in range(20) for token in (1, 2, 3, 100 + i)]
    state = MixDrafter([CorpusDrafter([[1, 2, 9] * 9]), SuffixDrafter()]).start()
    first = [propose(state, text[:at], 1).tokens.tolist() for at in range(6, 80, 4)]
    assert first[0] == [9]
    assert first[4:] == [[3]] * len(first[4:])


@pytest.mark.parametrize("drafter", [NgramDrafter, SuffixDrafter, lambda: CorpusDrafter([[1, 2, 3] * 20])])
def test_chances_follow_the_text(drafter: Any) -> None:
    """In a text that goes on repeating they rise above 0.9; when each guess turns out wrong they fall below 0.2."""
    state = drafter().start()
    ids = [1, 2, 3] * 3
    first = propose(state, ids).acceptance
    for i in range(40):
        ids.append(1 + i % 3)
        draft = propose(state, ids, 4)
    assert draft.acceptance[0] > max(0.9, first[0])
    for i in range(60):
        ids += [100 + i, 1, 2]
        draft = propose(state, ids, 4)
    assert len(draft.acceptance) == 0 or draft.acceptance[0] < 0.2


def test_chances_are_calibrated() -> None:
    """Kinds that come true with probabilities of their own: estimates follow within the noise of their memory.

    The step 0.35 + 0.25 remembers some 1 / (0.6 p (1 - p)) tests; 300 averages of 40 estimates are within 0.05.
    """
    rng = np.random.default_rng(1)
    chances = Chances([0.0, 0.0, 0.0])
    seen: list[list[float]] = [[], [], []]
    for _ in range(3000):
        for kind, rate in enumerate((0.1, 0.5, 0.9)):
            chances.learn([kind], [1], [int(rng.random() < rate)])
            seen[kind].append(chances(kind))
    assert [np.mean(s[300:]) for s in seen] == pytest.approx([0.1, 0.5, 0.9], abs=0.05)


def test_only_the_first_wrong_guess_is_a_test() -> None:
    chances = Chances([0.0, 1.0, 0.0])
    chances.learn([0, 1, 2], [5, 6, 7], [5, 9, 7])
    assert chances._own[0] > 0
    assert chances._own[1] < 1
    assert chances._own[2] == 0


@pytest.mark.parametrize(
    ("drafter", "limit"),
    [
        (NgramDrafter(capacity=500), 500 * 1400),
        (SuffixDrafter(capacity=500), 500 * 600),
        (RecyclingDrafter(capacity=500), 500 * 950),
    ],
    ids=["ngram", "suffix", "recycling"],
)
@pytest.mark.parametrize("alphabet", [1, 50, 2000])
def test_memory_is_bounded(drafter: Any, limit: int, alphabet: int) -> None:
    """In bytes after 5,000 tokens, of which 500 may be remembered. The n-gram drafter keeps the text itself too."""
    rng = np.random.default_rng(0)
    ids = rng.integers(alphabet, size=5000)
    rows = rng.normal(size=(50, 1, 2000)).astype(np.float32)
    tracemalloc.start()
    state = drafter.start()
    for at in range(2, 5000, 4 if isinstance(drafter, RecyclingDrafter) else 100):
        propose(state, ids[:at])
        state.accept(0, 0, rows[at % 50])
    traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*draftproof*drafters*")])
    tracemalloc.stop()
    used = sum(trace.size for trace in traces.traces)
    assert used - (40 * len(ids) if isinstance(drafter, NgramDrafter) else 0) < limit


def test_forgotten_text_is_not_proposed() -> None:
    state = SuffixDrafter(capacity=8).start()
    assert propose(state, [1, 2, 3, 4, 1, 2], 1).tokens.tolist() == [3]
    assert propose(state, [1, 2, 3, 4, 1, 2, 7, 8, 9, 1, 2], 1).tokens.tolist() == []
    assert propose(state, [1, 2, 3, 4, 1, 2, 7, 8, 9, 1, 2, 5, 9], 1).tokens.tolist() == [1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SuffixDrafter(depth=2), "depth must be at least 3, got 2"),
        (lambda: SuffixDrafter(capacity=2), "capacity must be at least 3, got 2"),
        (lambda: CorpusDrafter([], depth=0), "depth must be at least 1, got 0"),
        (lambda: CorpusDrafter([[1, -1]]), "text must be at least 0, got -1: remove padding"),
        (lambda: CorpusDrafter([[2**63]]), r"text must be below 2\*\*63, got 9223372036854775808"),
        (lambda: RecyclingDrafter(0), "candidates must be at least 1, got 0"),
        (lambda: RecyclingDrafter(capacity=0), "capacity must be at least 1, got 0"),
        (lambda: MixDrafter([]), "drafters must be at least one, got none"),
        (lambda: MixDrafter([ModelDrafter(TableModel(1))]), "got ModelDrafter: use it alone"),
        (lambda: MixDrafter([ModelDrafter(TableModel(1), noise=None)]), "got ModelDrafter: use it alone"),
        (lambda: NgramDrafter(1, 2), "max_ngram must be at least 2, got 1"),
        (lambda: NgramDrafter(2, 0), "min_ngram must be at least 1, got 0"),
        (lambda: NgramDrafter(capacity=0), "capacity must be at least 1, got 0"),
    ],
)
def test_refused(make: Any, text: str) -> None:
    with refused(ValueRangeError, text):
        make()


@pytest.mark.parametrize("value", [2.5, "3", None, True, float("nan"), np.float32(8)])
@pytest.mark.parametrize(
    ("drafter", "names"),
    [
        (NgramDrafter, ["max_ngram", "min_ngram", "capacity"]),
        (SuffixDrafter, ["depth", "capacity"]),
        (RecyclingDrafter, ["candidates", "capacity"]),
        (lambda **depth: CorpusDrafter([], **depth), ["depth"]),
    ],
    ids=["ngram", "suffix", "recycling", "corpus"],
)
def test_counts_must_be_ints(drafter: Any, names: list[str], value: Any) -> None:
    for name in names:
        with refused(DtypeError, f"^{name} must be an int, got {type(value).__name__}: "):
            drafter(**{name: value})
        drafter(**{name: np.int64(8)})


@pytest.mark.parametrize(
    ("texts", "error", "text"),
    [
        ("hello", DtypeError, "text must be one sequence of token ids, got str: tokenize it first"),
        (["hello"], DtypeError, "text must be one sequence of token ids, got str: tokenize it first"),
        ([SimpleNamespace(input_ids=[1])], DtypeError, "got SimpleNamespace: pass its input_ids, one row"),
        ([[1.7, 2.2]], DtypeError, "text must be integer token ids below .*, got float64"),
        ([[True]], DtypeError, "got bool"),
        ([["a"]], DtypeError, "text must be integer token ids"),
        ([[2**70]], DtypeError, "text must be integer token ids"),
        ([1, 2], ShapeError, "text must be one sequence .*, got int"),
        ([[[1, 2]]], ShapeError, r"text must be one sequence .*, got \[1, 2\]"),
        ([[[1], [2, 3]]], ShapeError, "text must be one sequence .*, got list"),
        ([None], ShapeError, "got NoneType"),
        (5, DtypeError, "texts must be sequences of token ids, got int: pass a list of them"),
        (None, DtypeError, "texts must be sequences of token ids, got NoneType"),
    ],
)
def test_wrong_corpora(texts: Any, error: type[Exception], text: str) -> None:
    with refused(error, text):
        CorpusDrafter(texts)


@pytest.mark.parametrize(
    ("drafters", "text"),
    [
        (SuffixDrafter(), "drafters must be a sequence of drafters, got SuffixDrafter: pass a list"),
        (SuffixDrafter, "drafters must be a sequence of drafters, got the class SuffixDrafter"),
        (5, "drafters must be a sequence of drafters, got int"),
        ([5], r"drafters must have start\(\), .*, got int: pass a drafter"),
        ("mix", r"drafters must have start\(\), .*, got str"),
        ([SuffixDrafter], r"drafters must have start\(\), .*, got the class SuffixDrafter"),
        ([None], r"drafters must have start\(\), .*, got NoneType"),
    ],
)
def test_wrong_members_of_a_mix(drafters: Any, text: str) -> None:
    with refused(DtypeError, text):
        MixDrafter(drafters)


def test_members_of_a_mix_that_misbehave() -> None:
    class Member(Fixed):
        def start(self) -> Any:
            return self.draft and self

    member = Member([1], np.array([0.9]))  # type: ignore[arg-type]
    assert propose(MixDrafter([member, SuffixDrafter()]).start(), [0]).tokens.tolist() == [1]
    member.draft = ([1], None)  # type: ignore[assignment]
    with refused(DtypeError, r"Member.propose must return a Draft, got tuple"):
        propose(MixDrafter([member]).start(), [0])
    member.draft = None  # type: ignore[assignment]
    with refused(DtypeError, r"Member.start must be an object with propose\(\), accept\(\), got NoneType"):
        MixDrafter([member]).start()
