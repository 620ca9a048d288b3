"""The most likely tokens of a row, by the core and without it, against a sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftproof.drafters import RecyclingDrafter, candidates
from draftproof.drafters.candidates import most_likely
from proposing import propose


@pytest.fixture(params=["core", "no core"])
def _core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no core":
        monkeypatch.setattr(candidates, "core", None)


KINDS = {
    "numpy": np.asarray,
    "strided": lambda row: np.stack([row, row], axis=1)[:, 0],
    "float64": lambda row: np.asarray(row, np.float64),
    "torch": torch.tensor,
    "bfloat16": lambda row: torch.tensor(row).bfloat16(),
    "grad": lambda row: torch.tensor(row, requires_grad=True),
}


@pytest.mark.usefixtures("_core")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 5, 64, 130, 5000])
def test_most_likely(kind: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for count in (1, 2, 8, 8, 8, 70, 200):
        row = KINDS[kind](rng.permutation(vocab).astype(np.float32) / 8)
        found = most_likely(row, count)
        values = row.tolist()
        best = max(values)
        # Of bfloat16 logits some are equal, and torch may rank those as it likes.
        ranked = sorted(range(vocab), key=lambda i: (-values[i], i))[:count]
        weighed = [i for i in ranked if best - values[i] < 40]
        assert [values[i] for i in found] == [values[i] for i in weighed]
        if kind != "bfloat16":
            assert list(found) == weighed
        assert list(found.values()) == [2.0 ** -round((best - values[i]) / np.log(2)) for i in found]


@pytest.mark.usefixtures("_core")
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_most_likely_of_infinite_logits(kind: str) -> None:
    def found(row: list[float], count: int) -> dict[int, float]:
        return most_likely(KINDS[kind](np.array(row, np.float32)), count)

    assert found([1, -np.inf, np.inf, 0, np.inf], 4) == {2: 1.0, 4: 1.0}
    assert found([1, -np.inf, -np.inf], 3) == {0: 1.0}
    assert found([np.nan] * 3, 2).keys() <= {0, 1, 2}
    assert found([-np.inf] * 3, 2).keys() <= {0, 1, 2}


@pytest.mark.usefixtures("_core")
@pytest.mark.parametrize("vocab", [3, 600, 5000])
@pytest.mark.parametrize("masked", [-np.inf, np.finfo(np.float32).min])
def test_most_likely_of_equal_logits(vocab: int, masked: float) -> None:
    """The lower ids, also where a mask leaves fewer than asked for, or one logit is NaN."""
    row = np.zeros(vocab, np.float32)
    assert list(most_likely(row, 3)) == [0, 1, 2]
    row[:] = masked
    row[[0, vocab - 1]] = 1
    assert most_likely(row, 3) == {0: 1.0, vocab - 1: 1.0}
    row[1] = np.nan
    assert len(most_likely(row, 2)) <= 2


@pytest.mark.usefixtures("_core")
def test_more_candidates_than_tokens() -> None:
    state = RecyclingDrafter(candidates=10**30).start()
    propose(state, [1])
    state.accept(0, 1, np.array([[0, 2, 1]], np.float32))
    assert propose(state, [1, 1]).tokens.tolist()[:2] == [1, 1]
