"""How a rule's random choices are made: the interface rules are written against, and its reading on uniforms.

A rule asks for a choice by name, ``(kind, index)``, and never sees a random number. ``counter`` says which Philox
counter a name stands for in a round. ``draftproof.testing`` has the other reading, which follows every choice at once.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, Protocol

from .. import _numpy as np
from .streams import BLOCK, Purpose, accept_word, emit_words, words

Masses = Sequence[Any]
"""Non-negative numbers of one kind (Fractions, ints or floats), one per token id; they need not sum to 1."""
Draw = tuple[Literal["draft", "accept", "emit", "race"], int]

LARGEST_UNIFORM = 1 - Fraction(1, 1 << 24)


class Choose(Protocol):
    """The only source of randomness of a rule. ``draw`` names the choice; a rule uses no name twice."""

    def bernoulli(self, probability: Any, *, draw: Draw) -> bool:
        """Return True with the given probability."""

    def categorical(self, masses: Masses, *, draw: Draw) -> int:
        """Return an id with probability proportional to its mass."""

    def race(self, masses: Masses, *, draw: Draw) -> int:
        """Return an id with the same law, drawn so that equal laws under the same name give equal ids."""


def counter(draw: Draw, offset: int) -> tuple[Purpose, int, int]:
    """Return the stream, offset and index that a name stands for in the round that starts at ``offset``.

    A race belongs to the absolute position of its token, every other choice to the round.

    Examples
    --------
    >>> counter(("accept", 1), offset=7)
    (<Purpose.ACCEPT: 4>, 7, 1)
    >>> counter(("race", 1), offset=7)
    (<Purpose.RACE_TOKEN: 0>, 8, 0)
    """
    kind, index = draw
    if kind == "race":
        return Purpose.RACE_TOKEN, offset + index, 0
    return {"draft": Purpose.DRAFT_TOKEN, "accept": Purpose.ACCEPT, "emit": Purpose.EMIT}[kind], offset, index


class Uniforms:
    """Makes each choice from a uniform: one given, or one read from the streams of a seed. Keeps every margin.

    This is what ``backend="reference"`` runs on. Choices are exact in the numbers they are given: Fractions stay
    Fractions, integer masses give bitwise the token of the integer inverse CDF.

    Parameters
    ----------
    seed, offset
        Python ints, as ``draftproof.sample`` takes them for one row.
    accept, sample
        Uniforms in [0, 1] (1 counts as ``1 - 2**-24``): ``accept[i]`` decides ``("accept", i)``, ``sample[i]`` what is
        drawn at i. None reads the streams.
    invert
        True makes ``race`` an inverse CDF too, as in ``verify_probs``; from a seed, on the emit stream at
        ``offset + i``, index 0.

    Attributes
    ----------
    margins
        For each choice made, the distance of its uniform to the nearest one that would have decided otherwise; for a
        race, the relative lead of the winner.

    Examples
    --------
    >>> choose = Uniforms(accept=[0.25], sample=[0.5, 0.875])
    >>> choose.bernoulli(0.5, draw=("accept", 0)), choose.categorical([1, 2, 1], draw=("emit", 1))
    (True, 2)
    >>> choose.margins
    {('accept', 0): 0.25, ('emit', 1): 0.125}
    """

    def __init__(
        self,
        seed: int = 0,
        offset: int = 0,
        *,
        accept: Sequence[Any] | None = None,
        sample: Sequence[Any] | None = None,
        invert: bool = False,
    ) -> None:
        self.seed, self.offset = seed, offset
        self.margins: dict[Draw, float] = {}
        self._accept, self._sample, self._invert = accept, sample, invert

    @property
    def margin(self) -> float:
        """The smallest margin of any choice made so far."""
        return min(self.margins.values(), default=float("inf"))

    def bernoulli(self, probability: Any, *, draw: Draw) -> bool:
        """Return ``u < probability``."""
        u = self._uniform(draw)
        self.margins[draw] = float(abs(u - probability))
        return bool(u < probability)

    def categorical(self, masses: Masses, *, draw: Draw) -> int:
        """Return the first id whose inclusive prefix sum exceeds ``u`` times the total."""
        prefix = list(itertools.accumulate(masses))
        # In Fractions, so that a float product cannot round up to the total and the walk off the end.
        point = Fraction(self._uniform(draw)) * Fraction(prefix[-1])
        x = bisect.bisect_right(prefix, point)
        edges = [edge for edge in (prefix[x] - masses[x], prefix[x]) if 0 < edge < prefix[-1]]
        self.margins[draw] = min((float(abs(Fraction(e) - point) / prefix[-1]) for e in edges), default=float("inf"))
        return x

    def race(self, masses: Masses, *, draw: Draw) -> int:
        """Return the id of the least ``(E / mass, id)``, E the standard exponentials of the stream."""
        if self._invert:
            return self.categorical(masses, draw=draw)
        noise = exponentials(self.seed, *counter(draw, self.offset), len(masses))
        arrivals = [(e / mass, x) for x, (e, mass) in enumerate(zip(noise, masses, strict=True)) if mass > 0]
        first, second = heapq.nsmallest(2, [*arrivals, (float("inf"), -1)])
        self.margins[draw] = float(1 - first[0] / second[0])
        return first[1]

    def _uniform(self, draw: Draw) -> Any:
        kind, index = draw
        given = self._accept if kind == "accept" else self._sample
        if given is not None:
            return min(given[index], LARGEST_UNIFORM)
        _, offset, index = counter(draw, self.offset)
        if kind == "accept":
            return float(uniform(accept_word(self.seed, offset, index)))
        high, low = emit_words(self.seed, offset, index)
        return Fraction((high << 30) | (low >> 2), 1 << 62)


def uniform(word: Any) -> Any:
    """Return ``min((k + 0.5) * 2**-32, 1 - 2**-24)`` of Philox words, rounded to float32 as the fast backends have it.

    A uniform is an input of a rule, so the reference reads the same one; what follows from it is real arithmetic.
    """
    rounded = (np.asarray(word).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return np.minimum(rounded, np.float32(LARGEST_UNIFORM)).astype(np.float64)


def exponentials(seed: int, purpose: Purpose, offset: int, index: int, vocab: int) -> list[float]:
    """Return the standard exponentials of a race, one per id, in float64.

    Of each block of 64 ids one word gives the least exponential and six bits the id that holds it; every other id adds
    one of its own. By memorylessness these are independent.
    """
    tokens = np.stack(words(seed, offset, purpose, index, np.arange(-(-vocab // 4))), axis=1).reshape(-1)[:vocab]
    level = {Purpose.RACE_TOKEN: Purpose.RACE_BLOCK, Purpose.DRAFT_TOKEN: Purpose.DRAFT_BLOCK}[purpose]
    pairs = np.stack(words(seed, offset, level, index, np.arange(-(-vocab // (2 * BLOCK)))), axis=1).reshape(-1, 2)
    least = -np.log1p(-uniform(pairs[:, 0])) / BLOCK
    noise = np.repeat(least, BLOCK)[:vocab] - np.log1p(-uniform(tokens))
    holders = np.arange(len(least)) * BLOCK + (pairs[:, 1] >> 26)
    held = holders < vocab
    noise[holders[held]] = least[held]
    return noise.tolist()
