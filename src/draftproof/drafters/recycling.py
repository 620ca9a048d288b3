"""Draft from the target's own candidates (Token Recycling, Luo et al. 2024, arXiv 2408.08696), as a chain."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator

from ..types import Array
from .base import Noise
from .candidates import most_likely
from .checks import check_count
from .tables import TableState

# What older candidates count for when there are new ones.
_KEPT = 0.5
_SHARES = (0.1, 0.2, 0.4, 0.6, 0.8)

Key = int | tuple[int, int]


class RecyclingDrafter:
    """Drafts what the target found most likely when it last stood after the same two tokens, or the same one.

    After each round the most likely tokens of the target's last row go into a table, with weights that fall with their
    distance from the maximum; older ones fade. A draft follows the heaviest candidates from token to token. Its chance
    is learnt by the share that a candidate has of the weight in its entry.

    The drafts are deterministic: point masses, without logits.

    Parameters
    ----------
    candidates : int
        Kept for each entry, at least 1.
    capacity : int
        Entries kept, at least 1; the one updated longest ago is forgotten first.

    Raises
    ------
    ValueRangeError, DtypeError
        ``candidates`` or ``capacity`` is below 1, or no int.

    Notes
    -----
    Memory: below 900 bytes an entry of 8 candidates, 8 MB at the default capacity.

    Examples
    --------
    >>> import numpy as np
    >>> from draftproof import SamplingParams
    >>> from draftproof.drafters import RecyclingDrafter
    >>> state, options = RecyclingDrafter().start(), {"params": SamplingParams(), "seed": 0}
    >>> len(state.propose(np.array([4, 2]), 1, **options, offset=2).tokens)
    0
    >>> state.accept(0, 2, np.array([[0, 1, 7, 2, 6]], dtype=np.float32))  # after 4, 2
    >>> state.propose(np.array([4, 2, 2]), 1, **options, offset=3).tokens
    array([2])
    """

    has_q = False
    noise: Noise = None
    estimates = True

    def __init__(self, candidates: int = 8, capacity: int = 1 << 13) -> None:
        self.candidates = check_count("candidates", candidates, 1)
        self.capacity = check_count("capacity", capacity, 1)

    def start(self) -> RecyclingState:
        """Return the state for a new sequence."""
        return RecyclingState(self.candidates, self.capacity)


class RecyclingState(TableState):
    """What the target has said in one sequence."""

    def __init__(self, candidates: int, capacity: int) -> None:
        self._candidates = candidates
        self._capacity = capacity
        super().__init__([score + shift for shift in (-0.5, 0.0) for score in (-2.5, -2.0, -1.5, -1.0, -0.5, 0.0)])

    def clear(self) -> None:
        """Start with no entries."""
        self._table: OrderedDict[Key, dict[int, float]] = OrderedDict()
        self._end = [-1, -1]
        self._heard: dict[int, float] = {}

    def accept(self, num_accepted: int, next_token: int, target_logits: Array) -> None:
        """Note the candidates of the last row, where the target had its say and the draft did not."""
        self._heard = most_likely(target_logits[-1], self._candidates)

    def read(self, tokens: list[int]) -> None:
        """Enter the candidates under the tokens before the one that came of them, the last."""
        ids = self._end + tokens
        if self._heard:
            before, last = ids[-3:-1]
            self._enter(last, self._heard)
            self._enter((before, last), self._heard)
        self._heard, self._end = {}, ids[-2:]

    def _enter(self, key: Key, candidates: dict[int, float]) -> None:
        old = self._table.pop(key, None)
        if old:
            weights = {token: _KEPT * weight for token, weight in old.items()}
            for token, weight in candidates.items():
                weights[token] = weights.get(token, 0.0) + weight
            heaviest = sorted(weights, key=weights.__getitem__, reverse=True)[: self._candidates]
            candidates = {token: weights[token] for token in heaviest}
        self._table[key] = candidates
        if len(self._table) > self._capacity:
            self._table.popitem(last=False)

    def guess(self) -> Iterator[tuple[int, int]]:
        """Yield the heaviest candidate after the last tokens, and so on."""
        before, last = self._end
        while True:
            weights = self._table.get((before, last))
            exact = weights is not None
            weights = weights or self._table.get(last)
            if not weights:
                return
            # The heaviest stands first.
            token, weight = next(iter(weights.items()))
            share = weight / sum(weights.values())
            yield token, (len(_SHARES) + 1) * exact + bisect_left(_SHARES, share)
            before, last = last, token
