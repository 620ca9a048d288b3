"""What tests of edges share: every backend on arrays of every library, and rounds of verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import draftproof as dp
from draftproof import Status, _dispatch

torch = pytest.importorskip("torch")

Arrays = Any
RULES = ("token", "block", "match", "greedy")
INF, NAN = float("inf"), float("nan")
DEAD = Status.NAN | Status.EMPTY_SUPPORT | Status.BAD_PROBABILITY | Status.BAD_PARAMETER


class System(NamedTuple):
    """A backend on arrays of one library. Called with an operation and NumPy arrays, it returns NumPy arrays."""

    put: Callable[[Arrays], Any]
    backend: str

    def __call__(self, operation: str, *arrays: Any, **given: Any) -> Any:
        def put(value: Any) -> Any:
            return self.put(value) if isinstance(value, np.ndarray) else value

        named = {name: put(value) for name, value in given.items()}
        result = getattr(dp, operation)(*map(put, arrays), **named, backend=self.backend)
        return type(result)(*map(np.asarray, result)) if isinstance(result, tuple) else np.asarray(result)


def tensor(array: Arrays) -> Any:
    return torch.from_numpy(np.array(array))


CPU = [name for name in _dispatch.BACKENDS["cpu"] if dp.backends()["sample"][name] == "available"]
EAGER = System(np.asarray, "eager")
FAST = {f"{kind}-{name}": System(put, name) for name in CPU for kind, put in (("numpy", np.asarray), ("torch", tensor))}
SYSTEMS = {**FAST, "reference": System(np.asarray, "reference")}
EVERY = pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
EVERY_FAST = pytest.mark.parametrize("system", FAST.values(), ids=FAST)


def same(a: Any, b: Any) -> None:
    """Assert that two results agree in every bit."""
    for x, y in zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]:
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def pick(result: Any, rows: Any) -> Any:
    """Some rows of a result."""
    return type(result)(*(a[rows] for a in result)) if isinstance(result, tuple) else result[rows]


class Round(NamedTuple):
    """The arrays of a batch of rounds of which some drafts are accepted and some are not."""

    target: Arrays
    draft: Arrays
    tokens: Arrays
    seed: Arrays
    offset: Arrays

    @property
    def streams(self) -> dict[str, Arrays]:
        return {"seed": self.seed, "offset": self.offset}


def make_round(batch: int = 24, drafted: int = 3, vocab: int = 6, draft_vocab: int | None = None) -> Round:
    rng = np.random.default_rng(5)
    target = rng.normal(size=(batch, drafted + 1, vocab)).astype(np.float32) * 2
    draft = rng.normal(size=(batch, drafted, draft_vocab or vocab)).astype(np.float32)
    # Half of the drafts are what greedy decoding would say.
    tokens = rng.integers(0, draft_vocab or vocab, (batch, drafted))
    tokens = np.where(rng.random(tokens.shape) < 0.5, target[:, :drafted].argmax(-1), tokens)
    return Round(target, draft, tokens, rng.integers(-(2**63), 2**63, batch), rng.integers(0, 1000, batch))


def check_layout(result: Any, tokens: Arrays) -> None:
    """``tokens`` and ``num_emitted`` follow from the accepted drafts, the next token and the end of emission."""
    for b, accepted in enumerate(result.num_accepted):
        emitted = [*tokens[b, :accepted], result.next_token[b]][: result.num_emitted[b]]
        assert result.num_emitted[b] in ((accepted + 1, accepted) if result.status[b] & DEAD == 0 else (0,))
        assert result.tokens[b].tolist() == emitted + [-1] * (tokens.shape[1] + 1 - len(emitted))


ROWS = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)


SEEDS = np.arange(5) * 1001


def packed(mask: Arrays) -> Arrays:
    """The mask as int32 words; bits at or above V are garbage."""
    *lead, vocab = mask.shape
    words = -(-vocab // 32)
    bits = np.random.default_rng(3).random((*lead, words * 32)) < 0.5
    bits[..., :vocab] = mask
    return np.packbits(bits, axis=-1, bitorder="little").view("<i4").reshape(*lead, words).astype(np.int32)


def penalised(rows: Arrays, penalty: float, history: list[int]) -> Arrays:
    """By hand: once per id, ids outside the vocabulary are nobody's."""
    rows = rows.copy()
    for x in set(history):
        if 0 <= x < len(rows):
            rows[x] = rows[x] * np.float32(penalty) if rows[x] < 0 else rows[x] / np.float32(penalty)
    return rows


HISTORY = np.array([[0, 0, 3], [-1, 2, -1], [5, 5, 5], [-1, -1, -1], [99, 6, -7]])
