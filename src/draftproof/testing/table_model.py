"""A model small enough to try drafters and loops on, and plain decoding to compare with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np

from ..sampling import sample
from ..types import SamplingParams


class TableModel:
    """A target whose row depends on the last two tokens, bit for bit whatever else is in the call.

    A ``target_step`` for `SpeculativeDecoder` and a ``step`` for `ModelDrafter`: ``(prefix, proposed) -> rows``,
    float32 ``[len(proposed) + 1, vocab]``. Missing tokens and ids outside the vocabulary count as 0.

    Parameters
    ----------
    seed : int
        Of the normal logits.
    vocab : int
        Number of tokens; the table has its cube.
    scale : float
        Standard deviation of the logits.

    Examples
    --------
    >>> model = TableModel(seed=1)
    >>> (model([3, 1], [4, 1])[1:] == model([3, 1, 4], [1])).all()
    np.True_
    """

    def __init__(self, seed: int, vocab: int = 11, scale: float = 2.0) -> None:
        self.rows = np.random.default_rng(seed).normal(scale=scale, size=(vocab, vocab, vocab)).astype(np.float32)
        self.vocab = vocab

    def __call__(self, prefix: Iterable[Any], proposed: Any) -> Any:
        """Return the rows after the prefix and after each proposed token."""
        ids = [0, 0, *(int(t) if 0 <= t < self.vocab else 0 for t in chain(prefix, proposed))]
        at = range(len(ids) - len(proposed) - 1, len(ids))
        return np.stack([self.rows[ids[i - 1], ids[i]] for i in at])


def decode(target: Any, prompt: list[int], n: int, params: SamplingParams | None = None, seed: int = 0) -> list[int]:
    """Return n tokens decoded without drafts: argmax, or with ``params`` a `sample` at each position.

    Examples
    --------
    >>> from draftproof import SpeculativeDecoder
    >>> from draftproof.drafters import NgramDrafter
    >>> model = TableModel(seed=1)
    >>> SpeculativeDecoder(NgramDrafter(), model).generate([3, 1, 4], max_new=20) == decode(model, [3, 1, 4], 20)
    True
    """
    ids = list(prompt)
    for _ in range(n):
        row = target(ids, [])
        if params is None:
            ids.append(int(row[0].argmax()))
        else:
            seen = np.array([ids]) if params.repetition_penalty else None
            ids.append(int(sample(row, **asdict(params), prev_tokens=seen, seed=seed, offset=len(ids))[0]))
    return ids[len(prompt) :]
