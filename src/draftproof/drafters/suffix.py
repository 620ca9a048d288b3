"""Draft by continuing the longest suffix of the sequence that occurs earlier in it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

from .automaton import SuffixAutomaton
from .base import Noise
from .checks import check_count
from .tables import BY_AGREEMENT, FIRST, TableState, agreement, length_class


class SuffixDrafter:
    """Copies what followed the most recent earlier occurrence of the longest suffix of the sequence that has one.

    Other than `NgramDrafter` it knows the length of the match up to ``depth``, from a single token on, and how often
    each continuation occurred. The chance of a drafted token is learnt by the length of the match behind it and by
    what else has followed the two tokens before it: nothing known, always this, mostly this, mostly others. A match
    that reaches the end of the sequence goes on into its own copy.

    The drafts are deterministic: point masses, without logits.

    Parameters
    ----------
    depth : int
        Longest match that is told apart from longer ones, at least 3.
    capacity : int
        Tokens remembered, at least 3: when there are more the older half is forgotten.

    Raises
    ------
    ValueRangeError, DtypeError
        ``depth`` or ``capacity`` is below 3, or no int.

    Notes
    -----
    A suffix automaton (Blumer et al. 1985; SAM decoding, Hu et al. 2024, arXiv 2411.10666): reading a token costs
    O(matched length), guessing one O(1). Memory: below 600 bytes a remembered token, 20 MB at the default capacity.

    Examples
    --------
    >>> import numpy as np
    >>> from draftproof import SamplingParams
    >>> from draftproof.drafters import SuffixDrafter
    >>> state = SuffixDrafter().start()
    >>> draft = state.propose(np.array([5, 6, 7, 8, 5, 6, 7]), 3, params=SamplingParams(), seed=0, offset=7)
    >>> draft.tokens, [round(chance, 2) for chance in draft.acceptance]
    (array([8, 5, 6]), [0.6, 0.69, 0.69])
    """

    has_q = False
    noise: Noise = None
    estimates = True

    def __init__(self, depth: int = 32, capacity: int = 1 << 15) -> None:
        self.depth = check_count("depth", depth, 3)
        self.capacity = check_count("capacity", capacity, 3)

    def start(self) -> SuffixState:
        """Return the state for a new sequence."""
        return SuffixState(self.depth, self.capacity)


class SuffixState(TableState):
    """The suffixes of one sequence."""

    def __init__(self, depth: int, capacity: int) -> None:
        self._depth = depth
        self._capacity = capacity
        super().__init__(BY_AGREEMENT)

    def clear(self) -> None:
        """Start with an empty text."""
        self._automaton = SuffixAutomaton(self._depth)

    def read(self, tokens: list[int]) -> None:
        """Add the tokens to the automaton; build it anew from the recent half when it is full."""
        if len(self._automaton.text) + len(tokens) > self._capacity:
            tokens = (self._automaton.text + tokens)[-(self._capacity // 2) :]
            self.clear()
        for token in tokens:
            self._automaton.append(token)

    def guess(self) -> Iterator[tuple[int, int]]:
        """Yield what followed the match."""
        automaton = self._automaton
        text, matched = automaton.text, automaton.matched
        if matched == 0:
            return
        following, counts = automaton.next, automaton.counts
        single = following[0]
        before, last = text[-2:]
        # The pair at the end of the text has occurred once without a token after it.
        end = following[single[before]][last]
        for length, at in enumerate(cycle(range(automaton.earlier, len(text))), matched):
            token = text[at]
            pair = following[single[before]].get(last, 0)
            agreed = agreement(counts[following[pair].get(token, 0)], counts[pair] - (pair == end))
            yield token, len(FIRST) * agreed + length_class(length)
            before, last = last, token
