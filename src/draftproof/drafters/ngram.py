"""Draft by looking up what followed the last words before (prompt lookup)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import cycle

from .base import Noise
from .checks import check_count
from .tables import FIRST, TableState, length_class


class NgramDrafter:
    """Copies the tokens that followed an earlier occurrence of the sequence's last n-gram.

    The longest n wins, from ``max_ngram`` down to ``min_ngram``; among equal n the most recent occurrence. Without a
    match of ``min_ngram`` tokens nothing is drafted, so text that does not repeat costs plain decoding. A match that
    reaches the end of the sequence goes on into its own copy: a loop is drafted to the full width.

    The drafts are deterministic: point masses, without logits. Their chances are learnt by the length of the match.

    Parameters
    ----------
    max_ngram : int
        Longest n-gram looked up, at least ``min_ngram``.
    min_ngram : int
        Shortest, at least 1.
    capacity : int
        How many distinct n-grams of each length are remembered; the one not seen for longest is forgotten first.

    Raises
    ------
    ValueRangeError, DtypeError
        A number is too small, or no int.

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
    estimates = True

    def __init__(self, max_ngram: int = 8, min_ngram: int = 2, capacity: int = 1 << 16) -> None:
        least = check_count("min_ngram", min_ngram, 1)
        self.sizes = range(check_count("max_ngram", max_ngram, least), least - 1, -1)
        self.capacity = check_count("capacity", capacity, 1)

    def start(self) -> NgramState:
        """Return the state for a new sequence."""
        return NgramState(self.sizes, self.capacity)


class NgramState(TableState):
    """The n-grams of one sequence, each with the position after its last occurrence."""

    # As wide as asked.
    least = 0.0

    def __init__(self, sizes: range, capacity: int) -> None:
        self._sizes = sizes
        self._capacity = capacity
        super().__init__(FIRST)

    def clear(self) -> None:
        """Start with an empty text."""
        self._text: list[int] = []
        self._after: dict[int, OrderedDict[tuple[int, ...], int]] = {n: OrderedDict() for n in self._sizes}

    def read(self, tokens: list[int]) -> None:
        """Index the n-grams that now have a token after them."""
        for token in tokens:
            end = len(self._text)
            # Not the last one, which would find itself.
            for n, after in self._after.items():
                if n <= end:
                    gram = tuple(self._text[end - n : end])
                    after[gram] = end
                    after.move_to_end(gram)
                    if len(after) > self._capacity:
                        after.popitem(last=False)
            self._text.append(token)

    def guess(self) -> Iterator[tuple[int, int]]:
        """Yield what followed the best match; one near the end of the sequence repeats with its period."""
        for n, after in self._after.items():
            start = after.get(tuple(self._text[-n:]))
            if start is not None:
                for i, at in enumerate(cycle(range(start, len(self._text)))):
                    yield self._text[at], length_class(n + i)
