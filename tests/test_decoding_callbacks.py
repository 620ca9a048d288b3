"""The draft/verify loop and the caller's functions: what they get, what they may return, what they may raise."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import draftproof
from draftproof import SpeculativeDecoder
from draftproof.decoding import DraftLength
from draftproof.drafters import ModelDrafter, NgramDrafter
from draftproof.errors import DtypeError, ShapeError, ValueRangeError
from draftproof.testing import TableModel, decode
from draftproof.types import Draft
from remedies import refused

VOCAB = 11
TARGET = TableModel(seed=1, vocab=VOCAB)
PROMPT = [3, 1, 4]
KINDS = {"list": list, "numpy": np.array, "torch": torch.tensor}


def own_drafts(prefix: list[int], k: int) -> tuple[list[int], Any]:
    """Argmax drafts with their rows turned to point masses: a function of the prefix alone."""
    rows = TableModel(4)(prefix, [0] * (k - 1))
    tokens = rows.argmax(axis=1).tolist()
    return tokens, np.where(np.eye(VOCAB)[tokens] > 0, 0, -np.inf).astype(np.float32)


def test_callbacks_get_the_kind_of_the_prompt() -> None:
    kinds = []

    def draft(prefix: Any, _: int) -> tuple[Any, None]:
        kinds.append(type(prefix))
        return prefix[:1], None

    def target(prefix: Any, proposed: Any) -> Any:
        kinds.extend([type(prefix), type(proposed)])
        return TARGET(prefix, proposed)

    for kind, expected in (("list", list), ("numpy", np.ndarray), ("torch", torch.Tensor)):
        kinds.clear()
        out = SpeculativeDecoder(draft, target).generate(KINDS[kind](PROMPT), max_new=5)
        assert {*kinds, type(out)} == {expected}
        assert list(out) == decode(TARGET, PROMPT, 5, None)


def test_callbacks_may_change_what_they_get() -> None:
    def draft(prefix: list[int], k: int) -> tuple[list[int], None]:
        tokens = [prefix[-1]] * k
        prefix.clear()
        return tokens, None

    assert SpeculativeDecoder(draft, TARGET).generate(PROMPT, max_new=8) == decode(TARGET, PROMPT, 8, None)


class Fails:
    """Calls a function, but raises in the calls with the given numbers."""

    def __init__(self, call: Any, at: set[int], error: type[BaseException] = OSError) -> None:
        self.call, self.at, self.error, self.calls = call, at, error, 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls in self.at:
            raise self.error("broken")
        return self.call(*arguments)


@pytest.mark.parametrize("rule", ["greedy", "token", "block", "match"])
@pytest.mark.parametrize("where", ["draft", "target", "target rows", "target values"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_nothing_is_lost_to_an_exception(where: str, rule: str, error: type[BaseException]) -> None:
    """Calls 1, 3 and 4 fail: at the very start, after a round, and once more when repeated."""
    arguments = {"k": 3, "greedy": rule == "greedy", "rule": rule, "seed": 6}
    undisturbed = SpeculativeDecoder(own_drafts, TARGET, **arguments).generate(PROMPT, max_new=20)
    calls = itertools.count(1)

    def target(prefix: list[int], proposed: list[int]) -> Any:
        rows = TARGET(prefix, proposed)
        if next(calls) not in (1, 3, 4):
            return rows
        return rows[1:] if where == "target rows" else np.full_like(rows, np.nan)

    draft = Fails(own_drafts, {1, 3, 4}, error) if where == "draft" else own_drafts
    if where in ("draft", "target"):
        target = Fails(TARGET, {1, 3, 4} if where == "target" else set(), error)
        expected = error
    else:
        expected = ShapeError if where == "target rows" else ValueRangeError
    decoder = SpeculativeDecoder(draft, target, **arguments)
    stream = decoder.stream(PROMPT, max_new=20)
    got: list[int] = []
    lengths = []

    def read() -> None:
        for token, _ in stream:
            got.append(token)

    for _ in range(3):
        with pytest.raises(expected):
            read()
        assert stream.tokens == got == undisturbed[: len(got)]
        lengths.append(len(got))
    assert lengths[0] == 0 < lengths[1] == lengths[2]
    assert decoder.resume() == undisturbed
    assert decoder.stats.tokens == 20


def test_exceptions_after_the_round_lose_nothing() -> None:
    """A drafter's `accept` may raise too: the round before it stands."""

    class State:
        def propose(self, context: Any, width: int, **_: Any) -> Draft:
            return Draft(np.full(width, 5), None)

        def accept(self, num_accepted: int, next_token: int, target_logits: Any) -> None:
            raise OSError("broken")

    class Drafter:
        has_q, noise = False, None
        start = staticmethod(State)

    decoder = SpeculativeDecoder(Drafter(), TARGET, k=2)
    stream = decoder.stream(PROMPT, max_new=6)
    got: list[int] = []
    failures = 0
    while not stream.finished and failures < 10:
        try:
            got.append(next(stream).token)
        except OSError:
            failures += 1
    assert [*got, *(token for token, _ in stream)] == decode(TARGET, PROMPT, 6, None)
    assert failures == decoder.stats.rounds - 1


def test_stop_iteration_is_not_the_end() -> None:
    decoder = SpeculativeDecoder(Fails(own_drafts, {2}, StopIteration), TARGET)
    with refused(RuntimeError, "StopIteration"):
        decoder.generate(PROMPT, max_new=10)
    assert decoder.resume() == decode(TARGET, PROMPT, 10, None)


@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        ([1, 2], ShapeError, "draft_step must return rows"),
        ([1], ShapeError, "draft_step must return a pair"),
        (7, ShapeError, "draft_step must return a pair"),
        (([1, 2, 3], None), ShapeError, "draft_step must return at most 2 tokens, as asked for, got 3"),
        (([[1, 2]], None), ShapeError, r"the tokens from draft_step must be one sequence .*, got \[1, 2\]"),
        (([[1], [2, 3]], None), ShapeError, "the tokens from draft_step must be one sequence .*, got list"),
        ((5, None), ShapeError, "the tokens from draft_step must be one sequence .*, got int"),
        ((None, None), ShapeError, "the tokens from draft_step must be one sequence .*, got NoneType"),
        (("ab", None), DtypeError, "the tokens from draft_step must be .*, got str: tokenize it first"),
        (([0.5], None), DtypeError, "the tokens from draft_step must be integer token ids below .*, got float64"),
        (
            ([2**63], None),
            ValueRangeError,
            r"the tokens from draft_step must be below 2\*\*63, got 9",
        ),
        (([2**70], None), DtypeError, r"the tokens from draft_step must be integer token ids below 2\*\*63"),
        (([1, 2], [[0.5], [0.5, 0.5]]), ShapeError, r"draft_step must return rows \[2, vocab\]"),
        (([1, 2], [["a"], ["b"]]), ShapeError, r"draft_step must return rows \[2, vocab\]"),
        (Draft(np.array([1, 2]), None, 5), ShapeError, r"draft_step must return acceptance \[2\].*, got 5"),
        (Draft(np.array([1]), None, ["a"]), ShapeError, r"draft_step must return acceptance \[1\], a number a token"),
        (Draft(np.array([1]), None, [1.5]), ValueRangeError, r"acceptance from draft_step must be in \[0, 1\]"),
        (Draft(np.array([1]), None, [np.nan]), ValueRangeError, r"acceptance from draft_step must be in \[0, 1\]"),
        ((np.array([1, 2]), np.zeros((3, VOCAB))), ShapeError, r"draft_step must return rows \[2, vocab\].*\[3, 11\]"),
        (([1, 2], np.zeros(VOCAB)), ShapeError, r"draft_step must return rows \[2, vocab\]"),
    ],
)
def test_wrong_drafts(returned: Any, error: type[Exception], text: str) -> None:
    if returned == [1, 2]:
        returned = ([1, 2], 0.5)
    with refused(error, text):
        SpeculativeDecoder(lambda *_: returned, TARGET, k=2).generate(PROMPT)


@pytest.mark.parametrize("rows", [np.zeros((2, VOCAB)), np.zeros((1, 3, VOCAB)), [0.0] * 3, None])
def test_wrong_target_rows(rows: Any) -> None:
    with refused(ShapeError, r"target_step must return rows \[3, vocab\]"):
        SpeculativeDecoder(lambda *_: ([1, 2], None), lambda *_: rows, k=2).generate(PROMPT)


@pytest.mark.parametrize(
    ("prompt", "error", "text"),
    [
        ([[1, 2]], ShapeError, "one row of a batch"),
        (torch.ones((1, 3), dtype=torch.int64), ShapeError, r"got \[1, 3\]"),
        ([[1], [2, 3]], ShapeError, "prompt_ids must be one sequence .*, got list: pass one row"),
        (None, ShapeError, "got NoneType"),
        ([0.5], DtypeError, "prompt_ids must be integer token ids"),
        ([1, -1], ValueRangeError, "prompt_ids must be at least 0, got -1"),
        (np.array([2**63], np.uint64), ValueRangeError, r"prompt_ids must be below 2\*\*63, got 9223372036854775808"),
    ],
)
def test_wrong_prompts(prompt: Any, error: type[Exception], text: str) -> None:
    with refused(error, text):
        SpeculativeDecoder(own_drafts, TARGET).generate(prompt)


class Model:
    """Looks like a model of transformers, which can be called, and wants other arguments."""

    def __call__(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return input_ids

    def get_input_embeddings(self) -> None:
        return None


MODEL = Model()


class Shared(NgramDrafter):
    noise = "shared"


@pytest.mark.parametrize(
    ("draft", "arguments", "text"),
    [
        (own_drafts, {"temperature": 0.5}, "greedy=True takes no sampling parameters"),
        (own_drafts, {"top_k": 5}, "greedy=True takes no sampling parameters"),
        (own_drafts, {"repetition_penalty": 1.2}, "greedy=True takes no sampling parameters"),
        (own_drafts, {"greedy": False, "rows": "probs", "top_p": 0.9}, "rows='probs' takes no sampling parameters"),
        (own_drafts, {"rule": "token"}, "rule 'token' needs greedy=False"),
        (own_drafts, {"rule": "greedy", "greedy": False}, "rule 'greedy' needs greedy=True"),
        (own_drafts, {"rule": "best", "greedy": False}, "rule must be one of"),
        (own_drafts, {"rows": "scores"}, "rows must be one of logits, probs"),
        (own_drafts, {"k": -1}, "k must be at least 0"),
        (own_drafts, {"k": 2.5}, "k must be an int, got float"),
        (own_drafts, {"k": "4"}, "k must be an int, got str"),
        (own_drafts, {"k": True}, "k must be an int, got bool"),
        (own_drafts, {"seed": [1, 2]}, "seed must be an int, since there is one sequence, got list: pass an int, or"),
        (own_drafts, {"seed": np.array([1])}, "seed must be an int, since there is one sequence, got ndarray"),
        (own_drafts, {"seed": 0.5}, "seed must be an int, .* got float"),
        (own_drafts, {"seed": True}, "seed must be an int, .* got bool"),
        (own_drafts, {"eos": -2}, "eos must be at least -1, got -2: pad with -1"),
        (own_drafts, {"eos": 1.5}, r"eos must be integer token ids below 2\*\*63, got float64: give ints"),
        (own_drafts, {"eos": [[1], [2, 3]]}, "eos must be one sequence .*, got list"),
        (own_drafts, {"eos": "</s>"}, "eos must be .*, got str: tokenize it first"),
        (own_drafts, {"eos": [2**63]}, r"eos must be below 2\*\*63"),
        (own_drafts, {"k": DraftLength}, "k must be an int, got the class DraftLength: .* such as DraftLength"),
        (own_drafts, {"k": NgramDrafter()}, "k must be an int, got NgramDrafter: pass a number of tokens"),
        (own_drafts, {"k": None}, "k must be an int, got NoneType"),
        (None, {}, r"draft_step must be a function \(prefix, k\) .* a drafter such as NgramDrafter\(\), got NoneType"),
        ("ngram", {}, "draft_step must be a function .* or a drafter .*, got str"),
        (NgramDrafter, {}, "draft_step must be .*, got the class NgramDrafter: make an object of it"),
        (MODEL, {}, r"draft_step must be .*, got Model: pass ModelDrafter\(CausalLM\(model\)\), from draftproof.integ"),
        (SimpleNamespace(start=list), {}, r"draft_step must have start\(\), has_q .* with has_q None, noise 'missing'"),
        (SimpleNamespace(start=list, has_q=1, noise=None), {}, "with has_q 1, noise None: pass a drafter"),
        (SimpleNamespace(start=list, has_q=False, noise="odd"), {}, "with has_q False, noise 'odd'"),
        (Shared(), {"greedy": False, "rule": "token"}, "rule must be 'match'"),
        (Shared(), {"greedy": False, "rule": "block"}, "rule must be 'match'"),
        (Shared(), {}, "rule must be 'match'"),
        (ModelDrafter(TARGET), {"rows": "probs"}, "rows must be 'logits'"),
    ],
)
def test_refused(draft: Any, arguments: dict[str, Any], text: str) -> None:
    with refused((ShapeError, DtypeError, ValueRangeError), text):
        SpeculativeDecoder(draft, TARGET, **arguments)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (None, r"target_step must be a function \(prefix, proposed\) -> rows, got NoneType"),
        ("llama", "target_step must be .*, got str"),
        (Model, "target_step must be .*, got the class Model: make an object of it"),
        (
            MODEL,
            r"target_step must be .*, got Model: pass CausalLM\(model\), from draftproof.integrations",
        ),
        (NgramDrafter(), "target_step must be .*, got NgramDrafter"),
    ],
)
def test_wrong_targets(target: Any, text: str) -> None:
    with refused(DtypeError, text):
        SpeculativeDecoder(own_drafts, target)


class Policy:
    """Decides as it is told."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def start(self, drafter: Any, rule: str) -> Any:
        return self.answers.get("start", self)

    def limit(self, most: int) -> Any:
        return self.answers.get("limit", min(most, 3))

    def cut(self, acceptance: Any) -> Any:
        return self.answers.get("cut", len(acceptance))

    def record(self, width: int, accepted: int, seconds: float) -> None:
        pass


@pytest.mark.parametrize(
    ("answers", "error", "text"),
    [
        ({"limit": -1}, ValueRangeError, "the width from Policy.limit must be at least 0, got -1"),
        ({"limit": 10}, ValueRangeError, "the width from Policy.limit must be at most 9, as asked for, got 10"),
        ({"limit": None}, DtypeError, "the width from Policy.limit must be an int, got NoneType"),
        ({"limit": 1.5}, DtypeError, "the width from Policy.limit must be an int, got float"),
        ({"cut": 0.5}, DtypeError, "the width from Policy.cut must be an int, got float"),
        ({"cut": 3}, ValueRangeError, "the width from Policy.cut must be at most 2, as asked for, got 3"),
        ({"cut": -1}, ValueRangeError, "the width from Policy.cut must be at least 0, got -1"),
        (
            {"start": None},
            DtypeError,
            r"the state from Policy.start must be .* cut\(\), record\(\), got NoneType",
        ),
    ],
    ids=str,
)
def test_wrong_policies(answers: dict[str, Any], error: type[Exception], text: str) -> None:
    def draft(_: Any, k: int) -> Draft:
        return Draft(np.array([1, 2][:k]), None, [0.5, 0.5][:k])

    right = SpeculativeDecoder(draft, TARGET, k=Policy()).generate(PROMPT, max_new=10)
    assert right == decode(TARGET, PROMPT, 10, None)
    with refused(error, text):
        SpeculativeDecoder(draft, TARGET, k=Policy(**answers)).generate(PROMPT, max_new=10)


def test_wrong_states() -> None:
    class Stateless(NgramDrafter):
        def start(self) -> Any:
            return None

    with refused(DtypeError, r"Stateless.start must be .* propose\(\), accept\(\), got NoneType"):
        SpeculativeDecoder(Stateless(), TARGET).generate(PROMPT)


@pytest.mark.parametrize(
    ("max_new", "error", "text"),
    [
        (-1, ValueRangeError, "at least 0"),
        (2.5, DtypeError, "an int, got float"),
        (None, DtypeError, "an int, got None"),
    ],
)
def test_wrong_lengths(max_new: Any, error: type[Exception], text: str) -> None:
    with refused(error, f"max_new must be {text}"):
        SpeculativeDecoder(own_drafts, TARGET).generate(PROMPT, max_new=max_new)


def test_accepted_combinations() -> None:
    """Off values are no sampling parameters; the default rule follows from what the drafter has."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert SpeculativeDecoder(own_drafts, TARGET, **off).rule == "greedy"
    assert SpeculativeDecoder(own_drafts, TARGET, greedy=False, rows="probs", **off).rule == "token"
    assert SpeculativeDecoder(NgramDrafter(), TARGET, greedy=False).rule == "match"
    assert SpeculativeDecoder(NgramDrafter(), TARGET, greedy=False, rule="token").rule == "token"
    assert SpeculativeDecoder(ModelDrafter(TARGET), TARGET, greedy=False).rule == "token"
    assert SpeculativeDecoder(ModelDrafter(TARGET, noise="shared"), TARGET, greedy=False).rule == "match"
    with pytest.raises(ValueRangeError, match="max_new"):
        SpeculativeDecoder(own_drafts, TARGET).generate(PROMPT, max_new=-1)
    with pytest.raises(ValueRangeError, match="resume"):
        SpeculativeDecoder(own_drafts, TARGET).resume()


@pytest.mark.parametrize("rule", ["greedy", "token", "block", "match"])
def test_probability_rows(rule: str) -> None:
    """One-hot probabilities leave no choice: every rule gives the argmax, with and without draft rows."""

    def target(prefix: list[int], proposed: list[int]) -> Any:
        return np.eye(VOCAB, dtype=np.float32)[TARGET(prefix, proposed).argmax(axis=1)]

    def draft(prefix: list[int], k: int) -> tuple[list[int], Any]:
        tokens = own_drafts(prefix, k)[0]
        return tokens, np.eye(VOCAB, dtype=np.float32)[tokens] if len(prefix) % 2 else None

    decoder = SpeculativeDecoder(draft, target, greedy=rule == "greedy", rule=rule, rows="probs", seed=4)
    assert decoder.generate(PROMPT, max_new=20) == decode(TARGET, PROMPT, 20, None)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_drafters_get_logits_of_probability_rows(library: str) -> None:
    """Zeros become -inf, without a warning."""
    told: list[Any] = []

    class Listener(NgramDrafter):
        def start(self) -> Any:
            state = super().start()
            state.accept = lambda _, __, rows: told.append(rows)  # type: ignore[method-assign]
            return state

    row = np.array([0.5, 0.25, 0.25, 0.0], dtype=np.float32)
    given = row[None] if library == "numpy" else torch.from_numpy(row[None].copy())
    decoder = SpeculativeDecoder(Listener(), lambda *_: given, k=0, rows="probs", greedy=False, rule="match", seed=1)
    decoder.generate([0], max_new=3)
    with np.errstate(divide="ignore"):
        expected = np.log(row)
    assert len(told) == 2
    assert all(type(rows) is type(given) and np.array_equal(rows[0], expected) for rows in told)
    assert np.array_equal(given[0], row)


def test_torch_and_numpy_rows_mix() -> None:
    """Draft rows may come from another array library, and in another precision, than the target's."""

    def draft(prefix: list[int], k: int) -> tuple[list[int], Any]:
        tokens, rows = own_drafts(prefix, k)
        return tokens, torch.from_numpy(rows).to(torch.bfloat16).requires_grad_()

    arguments = {"greedy": False, "rule": "block", "seed": 8}
    expected = SpeculativeDecoder(own_drafts, TARGET, **arguments).generate(PROMPT, max_new=16)
    assert SpeculativeDecoder(draft, TARGET, **arguments).generate(PROMPT, max_new=16) == expected

    def target(prefix: list[int], proposed: list[int]) -> Any:
        return torch.from_numpy(TARGET(prefix, proposed)).requires_grad_()

    assert SpeculativeDecoder(own_drafts, target, **arguments).generate(PROMPT, max_new=16) == expected


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("hello", "prompt_ids must be one sequence of token ids, got str: tokenize it first"),
        (type("BatchEncoding", (), {"input_ids": [1]})(), "got BatchEncoding: pass its input_ids, one row"),
    ],
)
def test_text_is_no_prompt(prompt: Any, text: str) -> None:
    decoder = SpeculativeDecoder(lambda *_: ([], None), lambda *_: np.zeros((1, 3), np.float32))
    with refused(draftproof.DtypeError, text):
        decoder.generate(prompt)


@pytest.mark.parametrize(
    ("bad", "rule", "rows", "text"),
    [
        (np.nan, "greedy", "logits", "a row of the target or the draft after 4 tokens .* holds NaN .*: mend the model"),
        (np.nan, "token", "logits", "a row of the target or the draft after 4 tokens .* holds NaN .*: mend the model"),
        (-np.inf, "match", "logits", "after 4 tokens .* has no token left"),
        (-1.0, "token", "probs", "after 4 tokens .* holds a negative, NaN or infinite probability: pass finite"),
    ],
)
def test_dead_rows_say_where(bad: float, rule: Any, rows: Any, text: str) -> None:
    """Not which row of a batch of one, and not how to leave the check out, which a loop cannot."""

    def target(prefix: Any, proposed: Any) -> np.ndarray:
        made = np.full((len(proposed) + 1, 3), 1 / 3, dtype=np.float32)
        if len(prefix) >= 4:
            made[0] = bad
        return made

    decoder = SpeculativeDecoder(lambda *_: ([], None), target, greedy=rule == "greedy", rule=rule, rows=rows)
    with pytest.raises(ValueRangeError, match=text) as error:
        decoder.generate([1, 2], max_new=9)
    assert "check=False" not in str(error.value)
    assert len(decoder.generation.tokens) == 2
