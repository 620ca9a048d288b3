"""What drafters that guess from a table have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar

from .. import _numpy as np
from ..types import Array, Draft, SamplingParams
from .chances import Chances


class TableState(ABC):
    """Guesses from what was read, and learns how good its guesses are, verified or not.

    Each context shows how the guess before it fared or would have fared. So a state learns by looking on, in rounds
    without a draft too, and so do the members of a mix whose guess was not taken.

    Parameters
    ----------
    first : sequence of float
        The score of each kind of guess before any test, as in `Chances`.
    """

    # A guess ends where it is not even this likely that all of it is accepted.
    least: ClassVar[float] = 0.01

    def __init__(self, first: Sequence[float]) -> None:
        self._chances = Chances(first)
        self._known = 0
        self._guessed: list[int] = []
        self._kinds: list[int] = []
        self.clear()

    @abstractmethod
    def clear(self) -> None:
        """Set up the tables, with nothing read."""

    @abstractmethod
    def read(self, tokens: list[int]) -> None:
        """Take in the tokens that are new in the sequence."""

    @abstractmethod
    def guess(self) -> Iterator[tuple[int, int]]:
        """Yield the tokens that may follow, each with the kind of guess it is."""

    def propose(self, context: Any, width: int, *, params: SamplingParams, seed: int, offset: int) -> Draft:
        """Return the guess with its chances."""
        new = context[self._known :].tolist()
        if new:
            self._chances.learn(self._kinds, self._guessed, new)
            self._guessed, self._kinds = [], []
            try:
                self.read(new)
            except BaseException:
                # Ctrl-C may leave a table in two minds: the next round reads everything again.
                self._known = 0
                self.clear()
                raise
            self._known += len(new)
        guessed, kinds, chances = [], [], []
        known: dict[int, float] = {}
        reached, least = 1.0, self.least
        for token, kind in islice(self.guess(), width):
            chance = known.get(kind)
            if chance is None:
                chance = known[kind] = self._chances(kind)
            reached *= chance
            if reached < least:
                break
            guessed.append(token)
            kinds.append(kind)
            chances.append(chance)
        self._guessed, self._kinds = guessed, kinds
        return Draft(np.array(guessed, dtype=np.int64), None, chances)

    def accept(self, num_accepted: int, next_token: int, target_logits: Array) -> None:  # noqa: B027
        """Do nothing: the next context tells."""


def length_class(matched: int) -> int:
    """Return the class of a match length, from 0 to 7: 1, 2, 3, 4 to 5, to 8, to 12, to 20, above."""
    return _CLASSES[min(matched, len(_CLASSES) - 1)]


_CLASSES = [sum(m > border for border in (1, 2, 3, 5, 8, 12, 20)) for m in range(22)]
FIRST = (-1.2, -0.2, 0.4, 0.8, 1.2, 1.6, 2.0, 2.5)
"""Scores of these classes before any test."""
BY_AGREEMENT = tuple(score + shift for shift in (0.0, 0.5, -0.5, -1.0) for score in FIRST)
"""Scores of kinds that tell apart, in each `agreement`, the classes of length."""


def agreement(same: int, times: int) -> int:
    """Return how often a token followed, ``same`` of ``times``: 0 seen once at most, 1 always, 2 mostly, 3 less."""
    return 0 if times <= 1 else 1 if same == times else 2 if 2 * same >= times else 3
