"""The draft/verify loop on table models: what it emits, when it stops, what it counts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

import draftproof
from draftproof import SamplingParams, SpeculativeDecoder, sample, verify
from draftproof.decoding.cache import reusable
from draftproof.drafters import ModelDrafter, NgramDrafter
from draftproof.testing import TableModel, decode

VOCAB = 11
TARGET = TableModel(seed=1, vocab=VOCAB)
PROMPT = [3, 1, 4]
KINDS = {"list": list, "numpy": np.array, "torch": torch.tensor}


def fixed_draft(style: str, output: list[int], start: int) -> Any:
    """Return a ``draft_step`` for an output known beforehand; it notes what it proposed where."""
    rng = np.random.default_rng(5)

    def draft(prefix: Any, k: int) -> tuple[list[int], None]:
        at = len(prefix) - start
        right = output[at : at + k]
        tokens = {
            "perfect": right,
            "anti-perfect": [(t + 1) % VOCAB for t in right],
            "random": [t if rng.random() < 0.7 else int(rng.integers(VOCAB)) for t in right],
            "invalid": [t if rng.random() < 0.5 else int(rng.choice([-1, -7, VOCAB, 10**6])) for t in right],
            "none": [],
        }[style]
        draft.proposed[at] = tokens
        return tokens, None

    draft.proposed = {}
    return draft


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["perfect", "anti-perfect", "random", "invalid", "none"])
@pytest.mark.parametrize(
    "params",
    [None, SamplingParams(), SamplingParams(0.7, 5, 0.9, 0.02, 1.3), SamplingParams(temperature=0.0)],
    ids=["greedy", "match", "match-filtered", "match-at-0"],
)
def test_output_is_that_of_plain_decoding(params: SamplingParams | None, style: str, kind: str) -> None:
    output = decode(TARGET, PROMPT, 24, params, seed=9)
    draft = fixed_draft(style, output, len(PROMPT))
    arguments = {"greedy": True} if params is None else {"greedy": False, "rule": "match", **asdict(params)}

    def target(prefix: Any, proposed: Any) -> Any:
        # No model can read padding.
        assert all(token >= 0 for token in proposed)
        return TARGET(prefix, proposed)

    decoder = SpeculativeDecoder(draft, target, k=3, seed=9, **arguments)
    events = list(decoder.stream(KINDS[kind](PROMPT), max_new=24))
    assert [token for token, _ in events] == output
    # Each round accepts the longest common prefix of its draft and the output; the token after it is not a draft.
    expected: list[bool] = []
    while len(expected) < 24:
        tokens = draft.proposed.get(len(expected), [])
        rest = output[len(expected) :]
        accepted = next((i for i, t in enumerate(tokens) if t != rest[i]), len(tokens))
        expected += [*[True] * accepted, False]
    assert [drafted for _, drafted in events] == expected
    assert decoder.stats.accepted == sum(expected)


@pytest.mark.parametrize("rule", ["token", "block", "match"])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(0.8, 6, None, None, 1.2)], ids=["plain", "filtered"]
)
def test_rounds_are_verify_calls(rule: str, params: SamplingParams) -> None:
    """The loop is this: drafts of private noise, one `verify` a round, offsets that count all tokens before."""
    model, seed, limit, k = TableModel(2), 17, 20, 3
    named = asdict(params)
    ids = list(PROMPT)
    while (width := min(k, len(PROMPT) + limit - len(ids) - 1)) >= 0:
        drafts: list[int] = []
        rows = np.zeros((width, VOCAB), np.float32)
        for i in range(width):
            rows[i] = model(ids, drafts)[-1]
            seen = np.array([ids + drafts])
            drawn = sample(rows[i : i + 1], **named, prev_tokens=seen, seed=seed, offset=len(ids), draft_index=i)
            drafts.append(int(drawn[0]))
        q = rows[None] if rule != "match" and width else None
        result = verify(
            TARGET(ids, drafts)[None],
            q,
            np.array([drafts], dtype=np.int64).reshape(1, width),
            rule=rule,
            **named,
            prev_tokens=np.array([ids]),
            seed=seed,
            offset=len(ids),
        )
        ids += result.tokens[0, : int(result.num_emitted[0])].tolist()
    decoder = SpeculativeDecoder(ModelDrafter(model), TARGET, k=k, greedy=False, rule=rule, seed=seed, **named)
    assert decoder.generate(PROMPT, max_new=limit) == ids[len(PROMPT) :]


# huggingface/transformers PR 46993, issue 47195: prompt lookup went past the maximum length.
@pytest.mark.parametrize("max_new", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("rule", ["greedy", "token", "block", "match"])
def test_maximum_length_is_exact(rule: str, max_new: int) -> None:
    widths: list[int] = []

    def draft(_: list[int], k: int) -> tuple[list[int], None]:
        widths.append(k)
        return [0] * k, None

    zeros = np.eye(VOCAB, dtype=np.float32)[[0] * 20] * 50
    decoder = SpeculativeDecoder(
        draft, lambda _, proposed: zeros[: len(proposed) + 1], k=10, greedy=rule == "greedy", rule=rule, seed=1
    )
    assert decoder.generate([0, 0, 0, 0], max_new=max_new) == [0] * max_new
    # All drafts fit: one round, no draft where a single token is left.
    assert widths == ([max_new - 1] if max_new > 1 else [])
    assert decoder.stats.rounds == (1 if max_new else 0)


# transformers issues 47912 and 31301: an eos accepted in the middle of a block must end the output there.
# transformers PR 46790: no eos at all (None, or an empty list) must work.
@pytest.mark.parametrize("rule", ["greedy", "token", "block", "match"])
@pytest.mark.parametrize("eos", [None, [], "int", "list", "padded"])
def test_eos_ends_the_output(rule: str, eos: Any) -> None:
    params = None if rule == "greedy" else SamplingParams(temperature=0.0)
    output = decode(TARGET, PROMPT, 20, params)
    end = output[6]
    stop = output.index(end) if isinstance(eos, str) else 19
    given = {"int": end, "list": [end, VOCAB + 3], "padded": np.array([-1, end, -1])}.get(eos) if eos else eos
    for style in ("perfect", "anti-perfect", "random", "none"):
        decoder = SpeculativeDecoder(
            fixed_draft(style, output, len(PROMPT)),
            TARGET,
            k=9,
            greedy=rule == "greedy",
            rule=rule,
            eos=given,
            seed=2,
            temperature=1.0 if rule == "greedy" else 0.0,
        )
        events = list(decoder.stream(PROMPT, max_new=20))
        assert [token for token, _ in events] == output[: stop + 1]
        # Accepted, the eos counts as a draft; emitted as correction or bonus it does not.
        if style == "perfect" and stop < 9:
            assert events[-1].drafted
        if style == "none":
            assert not any(drafted for _, drafted in events)


def test_drafts_after_an_eos_are_not_looked_at() -> None:
    asked: list[list[int]] = []

    def target(prefix: list[int], proposed: list[int]) -> Any:
        asked.append(proposed)
        return TARGET(prefix, proposed)

    next(SpeculativeDecoder(lambda *_: ([5, 7, 5, 6], None), target, eos=7).stream(PROMPT))
    assert asked[0] == [5, 7]


@pytest.mark.parametrize("rule", ["greedy", "token", "block", "match"])
def test_the_row_after_an_accepted_eos_is_not_needed(rule: str) -> None:
    row = np.where(np.arange(VOCAB) == 7, 50, 0).astype(np.float32)
    rows = np.stack([row, np.full_like(row, np.nan)])
    decoder = SpeculativeDecoder(lambda *_: ([7], None), lambda *_: rows, greedy=rule == "greedy", rule=rule, eos=7)
    assert decoder.generate(PROMPT, max_new=5) == [7]


# transformers issue 48039: a stop string that ends in the middle of a block must be seen there.
def test_a_reader_can_stop_inside_a_block() -> None:
    output = decode(TARGET, PROMPT, 12, None)
    decoder = SpeculativeDecoder(fixed_draft("perfect", output, len(PROMPT)), TARGET, k=8)
    stream = decoder.stream(PROMPT, max_new=12)
    assert [next(stream).token for _ in range(3)] == output[:3]
    assert decoder.stats.rounds == 1
    assert [token for token, _ in stream] == output[3:]


# transformers issue 40739: the draft length that was asked for was ignored.
def test_width_is_what_was_asked_for() -> None:
    widths = set()

    def draft(_: list[int], k: int) -> tuple[list[int], None]:
        widths.add(k)
        return [], None

    SpeculativeDecoder(draft, TARGET, k=3).generate(PROMPT, max_new=9)
    assert widths == {3, 2, 1}


def test_stats() -> None:
    """Rounds of 4 drafts: the first wrong at its third token, the second all right, the last cut to one."""
    output = decode(TARGET, PROMPT, 10, None)

    def draft(prefix: list[int], k: int) -> tuple[list[int], None]:
        at = len(prefix) - len(PROMPT)
        tokens = output[at : at + k]
        if at == 0:
            tokens[2] = (tokens[2] + 1) % VOCAB
        return tokens, None

    decoder = SpeculativeDecoder(draft, TARGET, k=4)
    assert decoder.stats.tokens == 0
    decoder.generate(PROMPT, max_new=10)
    stats = decoder.stats
    assert (stats.tokens, stats.rounds, stats.target_forwards) == (10, 3, 3)
    assert (stats.drafted, stats.accepted) == (9, 7)
    assert stats.drafted_by_position == [3, 2, 2, 2]
    assert stats.accepted_by_position == [3, 2, 1, 1]
    assert stats.tokens_per_forward == pytest.approx(10 / 3)
    assert stats.acceptance == pytest.approx(7 / 9)
    assert set(stats.seconds) == {"draft", "target", "verify"}
    assert all(seconds > 0 for seconds in stats.seconds.values())


def test_seeds() -> None:
    """None draws a seed for each sequence; given again it gives the sequence again."""
    decoder = SpeculativeDecoder(NgramDrafter(), TARGET, greedy=False)
    first = decoder.generate(PROMPT, max_new=30)
    seed = decoder.generation.seed
    assert decoder.generate(PROMPT, max_new=30) != first
    assert decoder.generation.seed != seed
    again = SpeculativeDecoder(NgramDrafter(), TARGET, greedy=False, seed=seed)
    assert again.generate(PROMPT, max_new=30) == first == again.generate(PROMPT, max_new=30)


def test_empty_prompt() -> None:
    assert SpeculativeDecoder(NgramDrafter(), TARGET).generate([], max_new=6) == decode(TARGET, [], 6, None)


def test_reusable_against_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        held, ids = (rng.integers(2, size=rng.integers(1, 7)) for _ in range(2))
        rows = int(rng.integers(1, len(ids) + 1))
        expected = 0
        while expected < min(len(held), len(ids) - rows) and held[expected] == ids[expected]:
            expected += 1
        assert reusable(held, ids, rows) == expected


def test_public_name() -> None:
    assert draftproof.SpeculativeDecoder is SpeculativeDecoder
