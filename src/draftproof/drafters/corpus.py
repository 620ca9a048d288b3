"""Draft by continuing the sequence as earlier texts went on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import DtypeError
from .automaton import SuffixAutomaton
from .base import Noise
from .checks import check_count, check_ids, kind_of
from .tables import BY_AGREEMENT, FIRST, TableState, agreement, length_class

_SEPARATOR = -1


class CorpusDrafter:
    """Proposes what followed most often, in a corpus, the longest suffix of the sequence that occurs there.

    The corpus is whatever the sequences to come will resemble: earlier outputs, documents, code. The chance of a
    drafted token is learnt by the length of the match behind it and by its share of what followed there. All
    sequences share the corpus; `add` extends it between them or while they run.

    The drafts are deterministic given the corpus: point masses, without logits.

    Parameters
    ----------
    texts : iterable of sequences of int
        Token ids, at least 0.
    depth : int
        Longest match that is told apart from longer ones, at least 1.

    Raises
    ------
    ValueRangeError, DtypeError, ShapeError
        A text is no sequence of ids of at least 0, or ``depth`` no int of at least 1.

    Notes
    -----
    A suffix automaton with counts, as SuffixDecoding's tree (Oliaro et al. 2024, arXiv 2411.04975). Reading a token
    costs O(matched length), guessing one O(1) once its candidates were compared. Memory: below 600 bytes a token.

    Examples
    --------
    >>> import numpy as np
    >>> from draftproof import SamplingParams
    >>> from draftproof.drafters import CorpusDrafter
    >>> state = CorpusDrafter([[1, 2, 3], [1, 2, 4], [1, 2, 4, 5]]).start()
    >>> state.propose(np.array([9, 1, 2]), 4, params=SamplingParams(), seed=0, offset=3).tokens
    array([4, 5])
    """

    has_q = False
    noise: Noise = None
    estimates = True

    def __init__(self, texts: Iterable[Any], depth: int = 32) -> None:
        self.depth = check_count("depth", depth, 1)
        # One more: what may follow a match is counted too.
        self.automaton = SuffixAutomaton(self.depth + 1)
        self._likeliest: dict[int, tuple[int, int]] = {}
        if not isinstance(texts, Iterable):
            raise DtypeError(f"texts must be sequences of token ids, got {kind_of(texts)}: pass a list of them")
        for text in texts:
            self.add(text)

    def add(self, text: Any) -> None:
        """Add a text, token ids, to the corpus."""
        before = len(self.automaton.text)
        try:
            for token in (*check_ids("text", text).tolist(), _SEPARATOR):
                self.automaton.append(token)
        except BaseException:
            # Ctrl-C may leave the automaton in two minds: it is built anew from the texts before.
            texts, self.automaton = self.automaton.text[:before], SuffixAutomaton(self.depth + 1)
            for token in texts:
                self.automaton.append(token)
            raise
        finally:
            self._likeliest.clear()

    def likeliest(self, state: int) -> tuple[int, int]:
        """Return the token that followed most often, the more recent of equals, and its `agreement`."""
        if state not in self._likeliest:
            counts, ends, following = self.automaton.counts, self.automaton.ends, self.automaton.next[state]
            token = max(following, key=lambda t: (counts[following[t]], ends[following[t]]))
            agreed = agreement(counts[following[token]], sum(counts[s] for s in following.values()))
            self._likeliest[state] = token, agreed
        return self._likeliest[state]

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Return the longest suffix of a match and ``token`` that occurs, within ``depth``."""
        state, matched = self.automaton.advance(state, matched, token)
        matched = min(matched, self.depth)
        return self.automaton.settle(state, matched), matched

    def start(self) -> CorpusState:
        """Return the state for a new sequence."""
        return CorpusState(self)


class CorpusState(TableState):
    """Where in the corpus one sequence stands."""

    def __init__(self, drafter: CorpusDrafter) -> None:
        self._drafter = drafter
        super().__init__(BY_AGREEMENT)

    def clear(self) -> None:
        """Stand at no match."""
        self._state = self._matched = 0

    def read(self, tokens: list[int]) -> None:
        """Follow the tokens."""
        state, matched = self._here()
        for token in tokens:
            state, matched = self._drafter.advance(state, matched, token)
        self._state, self._matched = state, matched

    def guess(self) -> Iterator[tuple[int, int]]:
        """Yield what followed most often."""
        state, matched = self._here()
        while matched > 0:
            token, agreed = self._drafter.likeliest(state)
            if token == _SEPARATOR:
                return
            yield token, len(FIRST) * agreed + length_class(matched)
            state, matched = self._drafter.advance(state, matched, token)

    def _here(self) -> tuple[int, int]:
        # The corpus may have grown.
        return self._drafter.automaton.settle(self._state, self._matched), self._matched
