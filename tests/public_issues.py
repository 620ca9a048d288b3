"""Faults that were reported in public against other samplers and verifiers, as tests of the right behaviour here.

``docs/public-issues.md`` lists every report and the test that stands for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftproof as dp
from draftproof import _dispatch
from draftproof.testing import g_test

torch = pytest.importorskip("torch")

Arrays = Any
INF, NAN = float("inf"), float("nan")
RATIO_RULES = pytest.mark.parametrize("rule", ["token", "block"])
BOTH = pytest.mark.parametrize("put", [np.asarray, lambda a: torch.from_numpy(np.array(a))], ids=["numpy", "torch"])
TESTS = Path(__file__).parent
BACKENDS = [name for name in _dispatch.BACKENDS["cpu"] if dp.backends()["sample"][name] == "available"]


@pytest.fixture(autouse=True, params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each backend of the CPU in turn the one that ``auto`` takes."""
    monkeypatch.setitem(_dispatch.BACKENDS, "cpu", (request.param,))


def rows_of(batch: int, vocab: int, seed: int = 0) -> Arrays:
    return np.random.default_rng(seed).normal(size=(batch, vocab)).astype(np.float32) * 2


def wide(row: Arrays, batch: int) -> Arrays:
    """One row for the whole batch, not copied."""
    return np.broadcast_to(row, (batch, *row.shape))


def softmax(logits: Arrays) -> Arrays:
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def kept(row: Any, **given: Any) -> list[int]:
    """The ids that the filters keep of one row."""
    return np.flatnonzero(dp.filter_logits(np.array([row], np.float32), **given)[0] > -INF).tolist()


def assert_law(tokens: Arrays, law: Arrays, detectable: float) -> None:
    """G-test at level 1e-6, which finds a law this far off in total variation with probability 0.99."""
    result = g_test(np.bincount(np.asarray(tokens).ravel(), minlength=len(law)), law)
    assert result.p_value > 1e-6
    assert result.detectable < detectable


def speculate(target: Arrays, draft: Arrays, batch: int, rule: str, **given: Any) -> Any:
    """Rounds of sampled drafts, one seed each, all on the same rows."""
    seed = np.arange(batch) * 31 + 7
    own = {name: value for name, value in given.items() if name != "mask"}
    tokens = np.stack(
        [
            dp.sample(wide(row, batch), seed=seed, draft_index=i, **own, mask=first(given, i, batch))
            for i, row in enumerate(draft)
        ],
        axis=1,
    )
    if "mask" in given:
        given = {**given, "mask": wide(given["mask"], batch)}
    return dp.verify(wide(target, batch), wide(draft, batch), tokens, rule=rule, seed=seed, **given)


def first(given: dict[str, Any], i: int, batch: int) -> Arrays | None:
    return wide(given["mask"][i], batch) if "mask" in given else None
