"""The heavy validations of spec-decode-ops: laws at millions of draws. Each writes what it measured to ``results/``."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import draftproof.compat.spec_decode_ops as sdo

pytestmark = pytest.mark.slow

VOCAB, K = 64, 4
SEED = 20261201
"""Fixed before the first run: library seeds and NumPy seeds of all tests here."""

HISTORY = np.array([[3, 60, 3, -1]])
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "top_k, top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "all": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2},
    "greedy": {"temperature": 0},
}


def softmax(logits: Any) -> Any:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def filtered_law(
    row: Any,
    temperature: float = 1.0,
    top_k: int = VOCAB,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
) -> Any:
    """Float64 law of one row without ties: the filters one after the other, as their definitions read."""
    logits = row.astype(np.float64)
    seen = np.unique(HISTORY[HISTORY >= 0])
    logits[seen] *= np.where(logits[seen] < 0, repetition_penalty, 1 / repetition_penalty)
    if temperature == 0:
        return (logits == logits.max()).astype(np.float64)
    law = softmax(logits / temperature)
    order = np.argsort(-law)
    law[order[top_k:]] = 0
    law /= law.sum()
    above = np.cumsum(law[order]) - law[order]
    law[order[above >= top_p]] = 0
    law[law < min_p * law.max()] = 0
    return law / law.sum()


def batches(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the number and the length of each batch."""
    for number, start in enumerate(range(0, total, size)):
        yield number, min(size, total - start)


def record(name: str, seeds: Any, draws: int, start: float, figure: dict[str, Any], bound: dict[str, float]) -> None:
    """Write the result, then hold it to its bound."""
    result = {
        "command": "python -m pytest -m slow tests/test_compat_slow.py",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seeds": seeds,
        "draws": draws,
        "seconds": round(time.perf_counter() - start),
        "figure": figure,
        "bound": bound,
    }
    path = Path(__file__).parent / "results" / f"compat_{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    assert all(figure[key] <= limit for key, limit in bound.items())


def test_sampler_tv() -> None:
    """Total variation to the analytic law at 4.2e6 draws of each filter setting, and no draw of a masked token."""
    start, draws = time.perf_counter(), 4_200_000
    row = np.random.default_rng(SEED).normal(scale=1.5, size=(1, VOCAB)).astype(np.float32)
    distances, masked = {}, 0
    for name, filters in SETTINGS.items():
        counts = np.zeros(VOCAB, np.int64)
        for number, size in batches(draws, 100_000):
            history = {"prev_tokens": np.broadcast_to(HISTORY, (size, 4))} if "repetition_penalty" in filters else {}
            rows = np.broadcast_to(row, (size, VOCAB))
            counts += np.bincount(sdo.sample(rows, **filters, **history, seed=SEED, offset=number), minlength=VOCAB)
        law = filtered_law(row[0], **filters)
        distances[name] = float(np.abs(counts / draws - law).sum() / 2)
        masked += int(counts[law == 0].sum())
    figure = {"worst_tv": max(distances.values()), "draws_on_masked_tokens": masked, "tv": distances}
    seeds = f"{SEED} for the row and for sample, offset = number of the batch of 100000 rows"
    record("sampler_tv", seeds, draws, start, figure, {"worst_tv": 1.9e-3, "draws_on_masked_tokens": 0})


def mismatched() -> tuple[Any, Any, float]:
    """Target and draft logits, float32 ``[V]``, and the exact ``sum min(p, q)``."""
    rng = np.random.default_rng(SEED)
    target = rng.normal(size=VOCAB).astype(np.float32)
    draft = (target + rng.normal(size=VOCAB)).astype(np.float32)
    return target, draft, float(np.minimum(softmax(target.astype(float)), softmax(draft.astype(float))).sum())


def test_first_token_tv() -> None:
    """Total variation of the first emitted token to the target at 2.1e6 rounds, drafts drawn by ``sample``."""
    start, draws = time.perf_counter(), 2_100_000
    target, draft, overlap = mismatched()
    counts = np.zeros(VOCAB, np.int64)
    for number, size in batches(draws, 100_000):
        row = np.broadcast_to(draft, (size, VOCAB))
        tokens = np.stack([sdo.sample(row, seed=SEED, offset=K * number + i) for i in range(K)], axis=1)
        rows = np.broadcast_to(target, (size, K + 1, VOCAB)), np.broadcast_to(draft, (size, K, VOCAB))
        counts += np.bincount(sdo.verify(*rows, tokens, seed=SEED, offset=number)[1][:, 0], minlength=VOCAB)
    tv = float(np.abs(counts / draws - softmax(target.astype(np.float64))).sum() / 2)
    seeds = f"{SEED} for the rows, for sample and for verify, offset = number of the batch of 100000 rounds"
    record("first_token_tv", seeds, draws, start, {"tv": tv, "overlap": overlap}, {"tv": 3.4e-3})


def test_accepted_length() -> None:
    """Acceptance rate and the law of the accepted length of k = 4 drafts at 5e7 rounds."""
    start, draws = time.perf_counter(), 50_000_000
    target, draft, overlap = mismatched()
    cdf = np.cumsum(softmax(draft.astype(np.float64)))
    rng = np.random.default_rng(SEED)
    counts = np.zeros(K + 1, np.int64)
    for number, size in batches(draws, 100_000):
        tokens = np.searchsorted(cdf, rng.random((size, K)) * cdf[-1], side="right")
        rows = np.broadcast_to(target, (size, K + 1, VOCAB)), np.broadcast_to(draft, (size, K, VOCAB))
        counts += np.bincount(sdo.verify(*rows, tokens, seed=SEED, offset=number)[0], minlength=K + 1)
    law = overlap ** np.arange(K + 1) * np.append(np.full(K, 1 - overlap), 1.0)
    errors = np.abs(counts / draws - law)
    rate_error = abs(1 - counts[0] / draws - overlap)
    figure = {
        "overlap": overlap,
        "rate_error": float(rate_error),
        "rate_standard_errors": float(rate_error / np.sqrt(overlap * (1 - overlap) / draws)),
        "law_error": float(errors.max()),
        "law_standard_errors": float((errors / np.sqrt(law * (1 - law) / draws)).max()),
        "counts": counts.tolist(),
    }
    bound = {"rate_error": 4e-4, "rate_standard_errors": 4, "law_error": 3e-4, "law_standard_errors": 4}
    seeds = f"{SEED} for the rows, the drafts and verify, offset = number of the batch of 100000 rounds"
    record("accepted_length", seeds, draws, start, figure, bound)
