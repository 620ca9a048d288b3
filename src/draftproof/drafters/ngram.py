"""Draft by looking up what followed the last words before (prompt lookup)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from ..errors import ValueRangeError
from ..types import Array, Draft, SamplingParams
from .base import Noise


class NgramDrafter:
    """Copies the tokens that followed an earlier occurrence of the sequence's last n-gram.

    The longest n wins, from ``max_ngram`` down to ``min_ngram``; among equal n the most recent occurrence. Without a
    match of ``min_ngram`` tokens nothing is drafted, so text that does not repeat costs plain decoding. A match that
    reaches the end of the sequence goes on into its own copy: a loop is drafted to the full width.

    The drafts are deterministic: point masses, without logits.

    Parameters
    ----------
    max_ngram : int
        Longest n-gram looked up, at least ``min_ngram``.
    min_ngram : int
        Shortest, at least 1.
    capacity : int
        How many distinct n-grams of each length are remembered; the one not seen for longest is forgotten first.

    Notes
    -----
    An index of n-grams grows with the sequence: a round costs a look-up per n and the indexing of the new tokens,
    whatever the length of the context. At most ``capacity`` entries per n are kept.

    Examples
    --------
    >>> import numpy as np
    >>> from draftproof import SamplingParams
    >>> from draftproof.drafters import NgramDrafter
    >>> state = NgramDrafter().start()
    >>> state.propose(np.array([5, 6, 7, 8, 5, 6]), 3, params=SamplingParams(), seed=0, offset=6).tokens
    array([7, 8, 5])
    """

    has_q = False
    noise: Noise = None

    def __init__(self, max_ngram: int = 8, min_ngram: int = 2, capacity: int = 1 << 16) -> None:
        least = {"min_ngram": 1, "max_ngram": min_ngram, "capacity": 1}
        for name, value in (("min_ngram", min_ngram), ("max_ngram", max_ngram), ("capacity", capacity)):
            if value < least[name]:
                raise ValueRangeError(f"{name} must be at least {least[name]}, got {value}")
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.capacity = capacity

    def start(self) -> NgramState:
        """Return the state for a new sequence."""
        return NgramState(self.sizes, self.capacity)


class NgramState:
    """The n-grams of one sequence, each with the position after its last occurrence."""

    def __init__(self, sizes: range, capacity: int) -> None:
        self._capacity = capacity
        self._tokens: list[int] = []
        self._after: dict[int, OrderedDict[tuple[int, ...], int]] = {n: OrderedDict() for n in sizes}

    def propose(self, context: Any, width: int, *, params: SamplingParams, seed: int, offset: int) -> Draft:
        """Return the ``width`` tokens that followed the best match, or none."""
        self._extend(context[len(self._tokens) :].tolist())
        match = self._match()
        copied = self._tokens[match : match + width] if match is not None else []
        # A match that ends near the end of the sequence repeats with this period.
        period = len(copied)
        while 0 < len(copied) < width:
            copied.append(copied[len(copied) - period])
        return Draft(np.array(copied, dtype=np.int64), None)

    def accept(self, num_accepted: int, next_token: int, target_logits: Array) -> None:
        """Do nothing: the next context tells."""

    def _extend(self, new: list[int]) -> None:
        for token in new:
            end = len(self._tokens)
            # Indexed once a token follows, so that the last n-gram never finds itself.
            for n, after in self._after.items():
                if n <= end:
                    gram = tuple(self._tokens[end - n : end])
                    after[gram] = end
                    after.move_to_end(gram)
                    if len(after) > self._capacity:
                        after.popitem(last=False)
            self._tokens.append(token)

    def _match(self) -> int | None:
        for n, after in self._after.items():
            position = after.get(tuple(self._tokens[-n:]))
            if position is not None:
                return position
        return None
