"""Drafters against brute force."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftproof import SamplingParams, SpeculativeDecoder, sample
from draftproof.drafters import ModelDrafter, NgramDrafter
from draftproof.errors import DtypeError, ValueRangeError
from draftproof.testing import TableModel, decode
from draftproof.types import Draft
from remedies import refused

VOCAB = 11
TARGET = TableModel(seed=1, vocab=VOCAB)
PROMPT = [3, 1, 4]


def looked_up(ids: list[int], width: int, longest: int, shortest: int) -> list[int]:
    """Longest, then most recent earlier occurrence of the last n tokens, read on into its own copy: by brute force."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if len(ids) >= n and ids[end - n : end] == ids[-n:]:
                copy = list(ids)
                for i in range(width):
                    copy.append(copy[end + i])
                return copy[len(ids) :]
    return []


@pytest.mark.parametrize(("longest", "shortest"), [(8, 2), (3, 2), (2, 2), (4, 1), (5, 4)])
def test_ngrams_against_brute_force(longest: int, shortest: int) -> None:
    rng = np.random.default_rng(longest)
    for alphabet in (1, 2, 4, 30):
        state = NgramDrafter(longest, shortest).start()
        ids: list[int] = []
        found = 0
        while len(ids) < 150:
            ids += rng.integers(alphabet, size=rng.integers(0, 6)).tolist()
            width = int(rng.integers(1, 7))
            draft = state.propose(np.array(ids, np.int64), width, params=SamplingParams(), seed=0, offset=len(ids))
            assert draft.logits is None
            assert draft.tokens.tolist() == looked_up(ids, width, longest, shortest)
            found += len(draft.tokens) > 0
        assert found > 0 or alphabet == 30


def test_ngrams_draft_nothing_on_one_token() -> None:
    state = NgramDrafter().start()
    assert len(state.propose(np.array([7, 8, 9, 7]), 4, params=SamplingParams(), seed=0, offset=4).tokens) == 0
    assert state.propose(np.array([7, 8, 9, 7, 8]), 2, params=SamplingParams(), seed=0, offset=5).tokens.tolist() == [
        9,
        7,
    ]


def test_ngram_memory_is_bounded() -> None:
    """The pair seen longest ago is forgotten; one seen again stays."""
    state = NgramDrafter(max_ngram=2, capacity=4).start()
    ids = [1, 2, 3, 4, 1, 2, 9, 8, 1, 2]

    def propose(more: list[int]) -> list[int]:
        seen = np.array(ids + more)
        return state.propose(seen, 1, params=SamplingParams(), seed=0, offset=len(seen)).tokens.tolist()

    assert propose([]) == [9]
    assert propose([5, 3, 4]) == []
    assert len(state._after[2]) == 4


@pytest.mark.parametrize("noise", ["private", "shared", None])
def test_model_drafts_are_what_they_say(noise: Any) -> None:
    params = SamplingParams(0.9, 7, None, None, 1.4)
    context = np.array(PROMPT)
    draft = ModelDrafter(TARGET, noise=noise).start().propose(context, 5, params=params, seed=3, offset=3)
    ids = list(PROMPT)
    for i, token in enumerate(draft.tokens.tolist()):
        row = TARGET(ids, [])
        named = asdict(params) | ({} if noise else {"temperature": 0.0})
        stream = {"offset": 3, "draft_index": i} if noise == "private" else {"offset": 3 + i}
        assert token == sample(row, **named, prev_tokens=np.array([ids]), seed=3, **stream)[0]
        if noise == "private":
            assert (draft.logits[i] == row[0]).all()
        ids.append(token)
    assert len(ids) == 8
    assert (draft.logits is None) == (noise != "private")
    with refused(ValueRangeError, "noise must be"):
        ModelDrafter(TARGET, noise="own")


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (None, r"step must be a function \(prefix, proposed\) -> rows, got NoneType"),
        ("llama", "step must be .*, got str"),
        (TableModel, "step must be .*, got the class TableModel: make an object of it"),
        (
            SimpleNamespace(get_input_embeddings=list),
            r"pass CausalLM\(model\), from draftproof.integrations",
        ),
    ],
)
def test_a_draft_model_is_called(step: Any, text: str) -> None:
    with refused(DtypeError, text):
        ModelDrafter(step)


@pytest.mark.parametrize("cost", [-0.1, float("nan"), float("inf"), "0.2", None])
def test_cost_of_a_draft_model(cost: Any) -> None:
    with refused(ValueRangeError, "cost must be at least 0 and finite"):
        ModelDrafter(TARGET, cost=cost)
    assert ModelDrafter(TARGET).cost == 0.2


def test_drafters_are_told_what_happened() -> None:
    told: list[tuple[int, int, int]] = []

    class State:
        def propose(self, context: Any, width: int, *, params: Any, seed: int, offset: int) -> Draft:
            assert offset == len(context)
            assert not context.flags.writeable
            assert params == SamplingParams(temperature=0.0)
            right = np.array(output[offset - 3 : offset - 3 + width])
            return Draft(right if offset == 3 else (right + 1) % VOCAB, None)

        def accept(self, num_accepted: int, next_token: int, target_logits: Any) -> None:
            assert not target_logits.flags.writeable
            told.append((num_accepted, next_token, target_logits.shape[0]))

    class Drafter:
        has_q, noise = False, None
        start = staticmethod(State)

    output = decode(TARGET, PROMPT, 5, None)
    assert SpeculativeDecoder(Drafter(), TARGET, k=2).generate(PROMPT, max_new=5) == output
    # After the last round there is nothing left to draft.
    assert told == [(2, output[2], 3), (0, output[3], 1)]
