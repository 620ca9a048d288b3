"""How likely a table's guess is to be accepted: learnt while it guesses."""

from __future__ import annotations

from collections.abc import Sequence

# Steps of the score of one kind of guess, and of what all kinds share.
_OWN, _SHARED = 0.35, 0.4


class Chances:
    """Estimates of acceptance for kinds of guesses, numbered from 0, that follow what happens.

    The estimate of a kind is ``s(own + shared)``, s a sigmoid. After every test both scores move by the error, as in
    logistic regression: in a text where guesses come true all kinds gain at once, and old tests are forgotten. A score
    is a pure function of outcomes, computed with IEEE operations alone, so decisions on it repeat on any machine.

    Parameters
    ----------
    first : sequence of float
        The score of each kind before any test; s(-2) = 0.12, s(0) = 0.5, s(2) = 0.88.
    """

    def __init__(self, first: Sequence[float]) -> None:
        self._own = list(first)
        self._shared = 0.0

    def __call__(self, kind: int) -> float:
        """Return the estimated probability that a guess of this kind is accepted."""
        # The logistic function within 0.024, by the Padé approximant of tanh, which reaches 1 at 3.
        half = (self._own[kind] + self._shared) / 2
        if not -3 < half < 3:
            return float(half > 0)
        square = half * half
        return 0.5 + 0.5 * half * (27 + square) / (27 + 9 * square)

    def learn(self, kinds: Sequence[int], guess: Sequence[int], came: Sequence[int]) -> None:
        """Learn from what ``came`` in the place of a ``guess``: its tokens up to the first that was wrong are tests."""
        for kind, guessed, token in zip(kinds, guess, came, strict=False):
            error = (guessed == token) - self(kind)
            self._own[kind] += _OWN * error
            self._shared += _SHARED * error
            if guessed != token:
                break
