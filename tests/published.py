"""What tests of the published interfaces share: rows, drafts, and checks of laws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

torch = pytest.importorskip("torch")


Arrays = Any


BOTH = pytest.mark.parametrize("put", [np.asarray, torch.tensor], ids=["numpy", "torch"])


def softmax(logits: Arrays) -> Arrays:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return weights / weights.sum()


def mismatched(vocab: int, overlap: float, seed: int) -> tuple[Arrays, Arrays]:
    """Target and draft logits, float32, with ``sum min(p, q) == overlap``."""
    rng = np.random.default_rng(seed)
    target, error = rng.normal(size=(2, vocab))
    low, high = 0.0, 64.0
    for _ in range(60):
        scale = (low + high) / 2
        met = np.minimum(softmax(target), softmax(target + scale * error)).sum() > overlap
        low, high = (scale, high) if met else (low, scale)
    return target.astype(np.float32), (target + low * error).astype(np.float32)


def draw(rng: np.random.Generator, row: Arrays, size: Any = None) -> Arrays:
    cdf = np.cumsum(np.asarray(row, np.float64))
    return np.searchsorted(cdf, rng.random(size) * cdf[-1], side="right")


def assert_law(tokens: Arrays, law: Arrays) -> None:
    """Chi-square at alpha 1e-6, cells below 10 expected counts merged; nothing where the law has no mass.

    At 2e5 draws and 63 degrees of freedom it finds a law that is off by a total variation of 0.02 nearly always.
    """
    counts = np.bincount(np.asarray(tokens).ravel(), minlength=len(law))
    assert counts[law == 0].sum() == 0
    expected = law * counts.sum()
    big = expected >= 10
    counts, expected = (np.append(x[big], x[~big].sum()) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), max(len(counts) - 1, 1)) > 1e-6


def rows_of(rng: np.random.Generator, shape: tuple[int, ...], concentration: float = 1.0) -> Arrays:
    rows = rng.gamma(concentration, size=shape)
    return (rows / rows.sum(-1, keepdims=True)).astype(np.float32)
