"""The published interface of spec-decode-ops, and the signatures of all four."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftproof
import draftproof.compat.nuvec as nv
import draftproof.compat.spec_decode_ops as sdo
import draftproof.compat.spec_verify as spec
import draftproof.compat.spec_verify_xpu as xpu
from published import BOTH, Arrays, assert_law, mismatched, softmax, torch

DRAWS = 200_000


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (
            sdo.sample,
            "logits, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=None, prev_tokens=None,"
            " seed=0, offset=0",
        ),
        (
            sdo.filter_logits,
            "logits, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=None, prev_tokens=None",
        ),
        (sdo.verify, "target_logits, draft_logits, draft_tokens, temperature=1.0, seed=0, offset=0"),
        (xpu.verify, "draft_tokens, draft_probs, target_probs, uniform_accept=None, uniform_sample=None"),
        (spec.verify_greedy, "target_probs, draft_tokens"),
        (
            spec.verify,
            "target_probs, draft_probs, draft_tokens, uniform_accept=None, uniform_sample=None, *, generator=None,"
            " seed=None",
        ),
        (spec.SpeculativeDecoder, "draft_step, target_step, k=4, greedy=True, generator=None, seed=None"),
        (spec.SpeculativeDecoder.generate, "self, prompt_ids, max_new=128"),
        (nv.accept_greedy, "logits, draft, eos"),
        (nv.accept_sampled, "probs, draft, draft_probs, eos, key"),
        (nv.read, "result"),
    ],
)
def test_published_signature(function: Callable[..., Any], signature: str) -> None:
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    assert str(inspect.Signature(parameters)) == f"({signature})"


FILTERS = [
    {},
    {"temperature": 0.7},
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2},
]


class TestSpecDecodeOps:
    """Published: kept sets of the processors, law, reproducibility, composition."""

    @staticmethod
    def history(filters: dict[str, Any], rows: Arrays) -> dict[str, Any]:
        """The filters, with a history where the penalty needs one."""
        if "repetition_penalty" not in filters:
            return filters
        return filters | {"prev_tokens": np.broadcast_to(np.array([3, 60, 3, -1]), (len(rows), 4))}

    @BOTH
    def test_sample_call(self, put: Any) -> None:
        logits = put(np.random.default_rng(0).normal(size=(5, 1000)).astype(np.float32))
        tokens = sdo.sample(logits, temperature=0.8, top_k=50, top_p=0.95, seed=1234, offset=7)
        assert type(tokens) is type(logits)
        assert (tuple(tokens.shape), str(tokens.dtype).removeprefix("torch.")) == ((5,), "int64")
        same = draftproof.sample(logits, temperature=0.8, top_k=50, top_p=0.95, seed=1234, offset=7)
        assert tokens.tolist() == same.tolist()
        assert sdo.sample(logits).tolist() == draftproof.sample(logits, seed=0).tolist()
        history = put(np.array([[4, 5, -1]] * 5))
        assert sdo.sample(logits, 0.8, 50, 0.95, 0.1, 1.5, history, 1234, 7).tolist() == (
            draftproof.sample(
                logits,
                temperature=0.8,
                top_k=50,
                top_p=0.95,
                min_p=0.1,
                repetition_penalty=1.5,
                prev_tokens=history,
                seed=1234,
                offset=7,
            ).tolist()
        )

    def test_kept_sets_of_the_processors(self) -> None:
        transformers = pytest.importorskip("transformers")
        logits = torch.tensor(np.random.default_rng(1).normal(scale=2.5, size=(64, 1000)).astype(np.float32))
        history = torch.tensor([[3, 600, 3]] * 64)
        chain = transformers.LogitsProcessorList(
            [
                transformers.RepetitionPenaltyLogitsProcessor(1.2),
                transformers.TemperatureLogitsWarper(0.8),
                transformers.TopKLogitsWarper(50),
                transformers.TopPLogitsWarper(0.95),
                transformers.MinPLogitsWarper(0.02),
            ]
        )
        for end in (2, 3, 4, 5):
            expected = transformers.LogitsProcessorList(chain[:end])(history, logits.clone())
            values = [0.8, 50, 0.95, 0.02]
            names = ["temperature", "top_k", "top_p", "min_p"]
            filters = dict(zip(names[: end - 1], values, strict=False))
            ours = sdo.filter_logits(logits, **filters, repetition_penalty=1.2, prev_tokens=history)
            assert ours.dtype == torch.float32
            assert torch.equal(ours, expected)

    @pytest.mark.parametrize("filters", FILTERS, ids=str)
    def test_law(self, filters: dict[str, Any]) -> None:
        row = np.random.default_rng(2).normal(scale=2, size=(1, 64)).astype(np.float32)
        law = softmax(sdo.filter_logits(row, **self.history(filters, row))[0])
        rows = np.broadcast_to(row, (DRAWS, 64))
        assert_law(sdo.sample(rows, **self.history(filters, rows), seed=5), law)

    @BOTH
    def test_reproducible(self, put: Any) -> None:
        logits = put(np.zeros((64, 50), np.float32))
        first = sdo.sample(logits, seed=9, offset=1).tolist()
        assert sdo.sample(logits, seed=9, offset=1).tolist() == first
        assert np.mean(np.equal(sdo.sample(logits, seed=9, offset=2).tolist(), first)) < 0.2
        assert np.mean(np.equal(sdo.sample(logits, seed=10, offset=1).tolist(), first)) < 0.2

    @BOTH
    def test_verify_call(self, put: Any) -> None:
        rng = np.random.default_rng(3)
        target, draft = rng.normal(size=(200, 5, 40)), rng.normal(size=(200, 4, 40))
        arguments = [put(target.astype(np.float32)), put(draft.astype(np.float32)), put(rng.integers(0, 40, (200, 4)))]
        accept_len, out = sdo.verify(*arguments, temperature=0.8, seed=1234, offset=7)
        assert [str(x.dtype).removeprefix("torch.") for x in (accept_len, out)] == ["int64", "int64"]
        assert (tuple(accept_len.shape), tuple(out.shape)) == ((200,), (200, 5))
        result = draftproof.verify(*arguments, rule="token", temperature=0.8, seed=1234, offset=7)
        assert (accept_len.tolist(), out.tolist()) == (result.num_accepted.tolist(), result.tokens.tolist())
        assert set(accept_len.tolist()) >= {0, 1, 2}
        for b, accepted in enumerate(accept_len.tolist()):
            assert out[b, :accepted].tolist() == arguments[2][b, :accepted].tolist()
            assert (out[b, : accepted + 1] >= 0).all()
            assert (out[b, accepted + 1 :] == -1).all()
        positional = sdo.verify(*arguments, 0.8, 1234, 7)
        assert positional[1].tolist() == out.tolist()
        assert (
            sdo.verify(*arguments)[1].tolist() == sdo.verify(*arguments, temperature=1.0, seed=0, offset=0)[1].tolist()
        )

    def test_filtered_speculation_composes(self) -> None:
        target, draft = mismatched(64, 0.7, seed=4)
        filters = {"temperature": 0.8, "top_k": 30, "top_p": 0.95}
        target, draft = (sdo.filter_logits(row[None], **filters) for row in (target, draft))
        tokens = sdo.sample(np.broadcast_to(draft, (DRAWS, 64)), seed=6)[:, None]
        rows = np.broadcast_to(target, (DRAWS, 2, 64))
        accept_len, out = sdo.verify(rows, np.broadcast_to(draft, (DRAWS, 1, 64)), tokens, seed=6)
        assert_law(out[:, 0], softmax(target[0]))
        assert_law(out[accept_len == 1, 1], softmax(target[0]))
        rate = np.minimum(softmax(target[0]), softmax(draft[0])).sum()
        assert abs(accept_len.mean() - rate) < 4 * np.sqrt(rate * (1 - rate) / DRAWS)

    def test_greedy(self) -> None:
        logits = np.random.default_rng(7).normal(size=(8, 3, 30)).astype(np.float32)
        best = logits.argmax(-1)
        assert (sdo.sample(logits[:, 0], temperature=0) == best[:, 0]).all()
        accept_len, out = sdo.verify(logits, logits[:, :2], best[:, :2], temperature=0)
        assert (accept_len == 2).all()
        assert (out == best).all()


@pytest.mark.parametrize(
    ("name", "draws", "bounds"),
    [
        ("sampler_tv", 4_200_000, {"worst_tv": 1.9e-3, "draws_on_masked_tokens": 0}),
        ("first_token_tv", 2_100_000, {"tv": 3.4e-3}),
        (
            "accepted_length",
            50_000_000,
            {"rate_error": 4e-4, "rate_standard_errors": 4, "law_error": 3e-4, "law_standard_errors": 4},
        ),
    ],
)
def test_committed_results(name: str, draws: int, bounds: dict[str, float]) -> None:
    """What the slow tests measured stands beside them and keeps the published bounds."""
    result = json.loads((Path(__file__).parent / "results" / f"compat_{name}.json").read_text())
    assert result["draws"] >= draws
    assert result["bound"] == bounds
    assert all(result["figure"][key] <= bound for key, bound in bounds.items())
