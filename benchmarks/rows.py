"""Rows of logits, and the buffers of a cell: so many that a cold row is in no cache, a shared one in no core's own."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

import draftproof

from .cells import PENALISED, Cell
from .profiles import FILE, knots

SHARED_BYTES = 16 << 20
BANK_ROWS = (64, 1024)
MOST_BUFFERS = 128


def cold_bytes() -> int:
    """Return four times the size of the cache that cores share, so that rotating over as many bytes leaves it cold."""
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    return 4 * (int(size.read_text().strip().removesuffix("K")) << 10 if size.exists() else 32 << 20)


def bank(shape: str, vocab: int, rows: int) -> np.ndarray:
    """Return float32 logits ``[rows, vocab]``.

    ``real`` rows fall with the rank as a model's own do (profiles.npy, stretched in the logarithm of the rank),
    ``zipf`` rows as -1.2 log(rank) with noise, each in random order; ``flat`` rows are standard normal, the adverse
    case.
    """
    rng = np.random.default_rng([rows, vocab])
    if shape == "flat":
        return rng.standard_normal((rows, vocab), dtype=np.float32)
    rank = np.log(np.arange(1, vocab + 1))
    made = np.empty((rows, vocab), dtype=np.float32)
    profiles = np.load(FILE)
    own = np.log(knots(49152)) / np.log(49152)
    for i in range(rows):
        if shape == "real":
            made[i] = np.interp(rank / rank[-1], own, profiles[i % len(profiles)])
        else:
            made[i] = -1.2 * rank + 0.3 * rng.standard_normal(vocab)
        rng.shuffle(made[i])
    return made


class Buffer(NamedTuple):
    """One call's worth of input. Logits of drafts and the tokens only where the cell verifies."""

    target: np.ndarray
    draft: np.ndarray | None = None
    tokens: np.ndarray | None = None


class Data(NamedTuple):
    """The buffers that the calls of a cell rotate over, and the ids whose repetition is penalised."""

    buffers: list[Buffer]
    history: np.ndarray


def data(cell: Cell) -> Data:
    """Return the buffers of a cell: float32 ``[B, V]``, or ``[B, K+1, V]`` and ``[B, K, V]`` where it verifies.

    Probabilities instead of logits for ``verify probs``. The cells that follow one another share them.
    """
    if cell.verifies:
        kind = cell.rule if cell.rule in ("greedy", "probs") else "sampled"
        made = _verification(cell.shape, cell.vocab, cell.batch, cell.drafted, kind)
    else:
        made = _sampling(cell.shape, cell.vocab, cell.batch)
    if cell.cache == "cold":
        return made
    bytes_each = 4 * cell.vocab * cell.batch
    return made._replace(buffers=made.buffers[: 1 if cell.cache == "warm" else max(1, SHARED_BYTES // bytes_each)])


@lru_cache(maxsize=3)
def _bank(shape: str, vocab: int) -> np.ndarray:
    fewest, most = BANK_ROWS
    return bank(shape, vocab, min(most, max(fewest, cold_bytes() // (4 * vocab))))


@lru_cache(maxsize=1)
def _sampling(shape: str, vocab: int, batch: int) -> Data:
    rows = _bank(shape, vocab)
    history = np.random.default_rng(vocab).integers(0, vocab, (batch, PENALISED))
    starts = range(0, len(rows) - batch + 1, batch)
    # In random order, so that nothing reads on into the next call's rows.
    return Data([Buffer(rows[i : i + batch]) for i in random.Random(vocab).sample(starts, len(starts))], history)


@lru_cache(maxsize=3)
def _verification(shape: str, vocab: int, batch: int, drafted: int, kind: str) -> Data:
    if kind == "sampled":
        return Data(_drafted_buffers(shape, vocab, batch, drafted), np.zeros((batch, 0), dtype=np.int64))
    made = _verification(shape, vocab, batch, drafted, "sampled")
    change = _greedy_drafts if kind == "greedy" else _probabilities
    return made._replace(buffers=[change(buffer) for buffer in made.buffers])


def _drafted_buffers(shape: str, vocab: int, batch: int, drafted: int) -> list[Buffer]:
    """Draft logits are the target's with normal noise of 0.9; drafts are drawn from them."""
    rng = np.random.default_rng([vocab, batch, drafted])
    rows = _bank(shape, vocab)
    noise = 0.9 * rng.standard_normal(4 * vocab, dtype=np.float32)
    buffers = []
    enough = -(-cold_bytes() // (4 * vocab * batch * (2 * drafted + 1)))
    for number in range(min(MOST_BUFFERS, max(2, enough))):
        target = rows[rng.integers(0, len(rows), batch * (drafted + 1))].reshape(batch, drafted + 1, vocab)
        draft = target[:, :drafted].copy()
        for row in draft.reshape(-1, vocab):
            start = rng.integers(0, 3 * vocab)
            row += noise[start : start + vocab]
        tokens = [draftproof.sample(draft[:, i], seed=number, offset=1000, draft_index=i) for i in range(drafted)]
        buffers.append(Buffer(target, draft, np.stack(tokens, axis=1)))
    return buffers


def _greedy_drafts(buffer: Buffer) -> Buffer:
    """Three drafts of four are the target's most likely token."""
    rng = np.random.default_rng(0)
    best = buffer.target[:, :-1].argmax(-1)
    return buffer._replace(tokens=np.where(rng.random(best.shape) < 0.75, best, buffer.tokens))


def _probabilities(buffer: Buffer) -> Buffer:
    return buffer._replace(target=_softmax(buffer.target), draft=_softmax(buffer.draft))


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
