"""The law of a random program, exactly: every branch is followed, with its weight as a Fraction."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import Any, TypeVar

from ..rng.uniforms import Choose, Masses

Outcome = TypeVar("Outcome", bound=Hashable)


class ReusedDraw(AssertionError):
    """A program used one draw name, which is one random number, for two choices."""


def enumerate_law(
    program: Callable[[Choose], Outcome], *, uniforms: Sequence[Fraction] | None = None, shared: bool = False
) -> dict[Outcome, Fraction]:
    """Return the probability of each outcome of ``program(choose)``.

    The program is replayed once for every combination of choices it can make, so it must be a pure function of them.

    Parameters
    ----------
    program
        A function of a ``Choose``: it asks ``bernoulli(probability, draw=...)``, ``categorical(masses, draw=...)`` and
        ``race(masses, draw=...)``, and returns something hashable. Probabilities and masses are Fractions or ints.
    uniforms
        The law when each choice is made by one of these uniforms in [0, 1), all equally likely and every combination
        once, instead of by all of [0, 1). Times a power of their number this counts outcomes, which a batched
        implementation must meet exactly. ``midpoints`` gives a grid.

    shared
        True lets a program use a name again: it then stands for the same uniform, and every choice is by inverse CDF.
        This measures what reuse does to a law.

    Returns
    -------
    dict
        Outcome to Fraction; the Fractions are positive.

    Raises
    ------
    ReusedDraw
        If one run of the program uses a draw name twice, unless ``shared``.
    AssertionError
        If the probabilities do not add up to 1, or a choice has no mass.

    Exactness
    ---------
    Exhaustive in choices, in rational arithmetic: two laws are equal if and only if the results are ``==``.

    Examples
    --------
    >>> def program(choose):
    ...     heads = choose.bernoulli(Fraction(1, 3), draw=("accept", 0))
    ...     return choose.categorical([1, 3], draw=("emit", 0)) if heads else 1
    >>> enumerate_law(program)
    {0: Fraction(1, 12), 1: Fraction(11, 12)}
    >>> enumerate_law(program, uniforms=midpoints(4))
    {0: Fraction(1, 16), 1: Fraction(15, 16)}
    """
    law: dict[Outcome, Fraction] = {}
    path: list[int] | None = []
    while path is not None:
        branch = _Branch(path, uniforms, shared)
        outcome = program(branch)
        law[outcome] = law.get(outcome, Fraction(0)) + branch.weight
        path = branch.next_path()
    total = sum(law.values())
    if total != 1:
        raise AssertionError(f"the probabilities add up to {total}")
    return law


class _Branch:
    """Follows one path of choices, the first option where the path ends."""

    def __init__(self, path: list[int], uniforms: Sequence[Fraction] | None, shared: bool) -> None:
        self.weight = Fraction(1)
        self._path, self._uniforms, self._shared = path, uniforms, shared
        self._taken: list[tuple[int, int]] = []
        # What is known of each uniform so far.
        self._ranges: dict[Any, tuple[Fraction, Fraction]] = {}

    def bernoulli(self, probability: Any, *, draw: Any) -> bool:
        return self._choose([probability, 1 - probability], draw) == 0

    def categorical(self, masses: Masses, *, draw: Any) -> int:
        return self._choose(masses, draw)

    race = categorical

    def next_path(self) -> list[int] | None:
        """The next path in order, None after the last."""
        while self._taken:
            option, options = self._taken.pop()
            if option + 1 < options:
                return [*(o for o, _ in self._taken), option + 1]
        return None

    def _choose(self, masses: Masses, draw: Any) -> int:
        if draw in self._ranges and not self._shared:
            raise ReusedDraw(f"draw {draw!r} is used twice")
        low, high = self._ranges.get(draw, (Fraction(0), Fraction(1)))
        options = []
        for x, (start, end) in enumerate(itertools.pairwise(self._shares(masses, draw))):
            start, end = max(start, low), min(end, high)
            if start < end and (weight := self._measure(start, end)):
                options.append((x, start, end, weight))
        depth = len(self._taken)
        option = self._path[depth] if depth < len(self._path) else 0
        self._taken.append((option, len(options)))
        x, start, end, weight = options[option]
        self._ranges[draw] = start, end
        self.weight *= weight / self._measure(low, high)
        return x

    def _shares(self, masses: Masses, draw: Any) -> list[Fraction]:
        prefix = list(itertools.accumulate(masses))
        if min(masses) < 0 or prefix[-1] <= 0:
            raise AssertionError(f"draw {draw!r} chooses by {list(map(str, masses))}, which is no law")
        return [Fraction(0), *(Fraction(mass, prefix[-1]) for mass in prefix)]

    def _measure(self, start: Fraction, end: Fraction) -> Fraction:
        if self._uniforms is None:
            return end - start
        below = bisect.bisect_left(self._uniforms, end) - bisect.bisect_left(self._uniforms, start)
        return Fraction(below, len(self._uniforms))


def midpoints(n: int) -> list[Fraction]:
    """Return the midpoints of n equal cells of [0, 1).

    Examples
    --------
    >>> [str(u) for u in midpoints(2)]
    ['1/4', '3/4']
    """
    return [Fraction(2 * j + 1, 2 * n) for j in range(n)]
