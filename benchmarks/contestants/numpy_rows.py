"""NumPy written with care: partitions instead of sorts where they do, one row at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..cells import CALL, SAMPLING
from ..rows import Buffer
from .base import Contestant, Given

HEAD = 1024
"""How many of the largest logits top-p looks at before it sorts the row."""


def contestant(name: str, given: Given) -> Contestant | None:
    """Return NumPy on float32 rows; it has no bfloat16."""
    cell = given.cell
    if cell.dtype != "float32" or cell.operation == CALL:
        return None
    rng = np.random.default_rng(0)
    work = _verifier(cell.rule, rng) if cell.verifies else _sampler(SAMPLING[cell.operation], given.history, rng)
    return Contestant(name, lambda i: work(given.buffer(i)))


def _sampler(
    settings: dict[str, float], history: np.ndarray, rng: np.random.Generator
) -> Callable[[Buffer], np.ndarray | list[int]]:
    if settings.get("temperature") == 0.0:
        return lambda buffer: buffer.target.argmax(-1)
    return lambda buffer: [_draw(row, ids, settings, rng) for row, ids in zip(buffer.target, history, strict=True)]


def _draw(row: np.ndarray, ids: np.ndarray, settings: dict[str, float], rng: np.random.Generator) -> int:
    if penalty := settings.get("repetition_penalty"):
        row = row.copy()
        penalised = row[ids]
        row[ids] = np.where(penalised < 0, penalised * penalty, penalised / penalty)
    temperature, k, top_p = settings.get("temperature", 1.0), settings.get("top_k"), settings.get("top_p")
    if k is None and top_p is None:
        return _inverse(_weights(row, temperature), rng)
    best = _largest(row, int(k or HEAD))
    weights = _weights(row[best], temperature)
    total = weights.sum() if k else _weights(row, temperature).sum()
    before = np.cumsum(weights) - weights
    if k is None and before[-1] + weights[-1] < top_p * total:
        best = np.argsort(-row)
        weights = _weights(row[best], temperature)
        before = np.cumsum(weights) - weights
    weights = weights * (before < top_p * total)
    return int(best[_inverse(weights * (weights >= settings.get("min_p", 0.0)), rng)])


def _largest(row: np.ndarray, count: int) -> np.ndarray:
    best = np.argpartition(row, len(row) - count)[-count:]
    return best[np.argsort(-row[best])]


def _weights(row: np.ndarray, temperature: float) -> np.ndarray:
    return np.exp((row - row.max()) / np.float32(temperature))


def _inverse(weights: np.ndarray, rng: np.random.Generator) -> int:
    sums = np.cumsum(weights)
    return int(np.searchsorted(sums, rng.random(dtype=np.float32) * sums[-1], side="right"))


def _verifier(rule: str, rng: np.random.Generator) -> Callable[[Buffer], object]:
    if rule == "greedy":
        return _greedy
    if rule == "match":
        return lambda buffer: [_match(*request, rng) for request in zip(buffer.target, buffer.tokens, strict=True)]
    logits = rule != "probs"
    return lambda buffer: [_ratio(*request, logits, rng) for request in zip(*buffer, strict=True)]


def _greedy(buffer: Buffer) -> tuple[np.ndarray, np.ndarray]:
    best = buffer.target.argmax(-1)
    accepted = np.cumprod(best[:, :-1] == buffer.tokens, axis=1).sum(1)
    return accepted, best[np.arange(len(best)), accepted]


def _match(target: np.ndarray, tokens: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    for i, row in enumerate(target):
        token = _inverse(_weights(row, 1.0), rng)
        if i == len(tokens) or token != tokens[i]:
            break
    return i, token


def _ratio(
    target: np.ndarray, draft: np.ndarray, tokens: np.ndarray, logits: bool, rng: np.random.Generator
) -> tuple[int, int]:
    """Rejection sampling of one request, row by row, until a draft is rejected."""
    for i, token in enumerate(tokens):
        p, q = (_softmax(target[i]), _softmax(draft[i])) if logits else (target[i], draft[i])
        if rng.random(dtype=np.float32) * q[token] >= p[token]:
            return i, _inverse(np.maximum(p - q, 0), rng)
    return len(tokens), _inverse(_weights(target[-1], 1.0) if logits else target[-1], rng)


def _softmax(row: np.ndarray) -> np.ndarray:
    weights = _weights(row, 1.0)
    return weights / weights.sum()
