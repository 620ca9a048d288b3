"""How many tokens to draft: the width, zero included, that is expected to gain the most time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

from ..drafters.checks import check_count, kind_of
from ..errors import DtypeError, ValueRangeError
from .estimates import MEMORY, Clock, Shares

# Of all the time, what may go into probes that gain nothing.
_PROBES = 0.01
# A draft that was rejected leaves room for twice what was accepted of it, or for this.
_AFTER_MISS = 15


_COSTS_REMEDY = "pass those of COSTS, or what interpolate() makes of your measurements"


class LengthState(Protocol):
    """Decides for one sequence. Every round calls ``limit``, perhaps ``cut``, and ``record``."""

    def limit(self, most: int) -> int:
        """Return the width to ask of the drafter, at most ``most``. It depends on rounds that are over, on nothing
        else, and is therefore safe under every rule.
        """
        ...

    def cut(self, acceptance: Sequence[float]) -> int:
        """Return how many of the drafted tokens to verify, given the chance of each after those before it.

        Only for point masses, and for any draft under rules greedy and match: see `DraftLength`.
        """
        ...

    def record(self, width: int, accepted: int, seconds: float) -> None:
        """Learn from a round that verified ``width`` tokens and took ``seconds`` in all."""
        ...


class LengthPolicy(Protocol):
    """What ``k`` may be: makes a state for each sequence."""

    def start(self, drafter: Any, rule: str) -> LengthState:
        """Return the state for a new sequence with this drafter (or ``draft_step``) and rule."""
        ...


class FixedLength:
    """The same width every round: what an int ``k`` stands for.

    Parameters
    ----------
    k : int
        Most tokens drafted in a round; 0 is plain decoding.

    Raises
    ------
    ValueRangeError, DtypeError
        ``k`` is below 0, or no int.

    Examples
    --------
    >>> from draftproof.decoding import FixedLength
    >>> state = FixedLength(4).start(None, "greedy")
    >>> state.limit(9), state.limit(3), state.cut([0.9, 0.1])
    (4, 3, 2)
    """

    def __init__(self, k: int) -> None:
        self.k = check_count("k", k)

    def start(self, drafter: Any, rule: str) -> FixedLength:
        """Return itself: there is nothing to learn."""
        return self

    def limit(self, most: int) -> int:
        return min(self.k, most)

    def cut(self, acceptance: Sequence[float]) -> int:
        return len(acceptance)

    def record(self, width: int, accepted: int, seconds: float) -> None:
        pass


def interpolate(knots: dict[int, float]) -> tuple[float, ...]:
    """Return a cost table for all widths from 0 to the largest knot, straight between the knots.

    Parameters
    ----------
    knots : dict of int to float
        The cost of a round with so many drafts, in any unit, for a few widths, 0 among them.

    Raises
    ------
    ValueRangeError, DtypeError
        There is no cost for width 0, or a width is below 0 or no int.

    Examples
    --------
    >>> from draftproof.decoding import DraftLength, interpolate
    >>> interpolate({0: 1.0, 2: 1.5, 3: 2.0})
    (1.0, 1.25, 1.5, 2.0)
    >>> policy = DraftLength(interpolate({0: 20.1, 7: 23.5, 63: 41.0}))  # milliseconds
    """
    widths = sorted(check_count("widths in knots", width) for width in knots)
    if widths[:1] != [0]:
        raise ValueRangeError(f"knots must have the cost at width 0, got {knots}: measure a round without drafts too")
    between = [
        low + (high - low) * i / (end - start)
        for (start, low), (end, high) in pairwise((width, knots[width]) for width in widths)
        for i in range(end - start)
    ]
    return (*between, knots[widths[-1]])


COSTS = {
    "float32": interpolate(
        {0: 1, 1: 1.55, 3: 1.55, 4: 1.77, 7: 1.92, 11: 2.07, 15: 2.3, 23: 2.65, 31: 3.07, 32: 3.3, 47: 3.97, 63: 4.8}
    ),
    "bfloat16": interpolate(
        {0: 1, 1: 1.04, 3: 1.06, 4: 1.12, 7: 1.15, 11: 1.32, 15: 1.4, 23: 1.6, 31: 1.84, 47: 2.36, 63: 2.77}
    ),
}
"""What a forward on 1 + w tokens costs, in forwards on one token, by dtype: SmolLM2-135M on one core (Zen 4), where two
or three tokens of float32 are fed as four.
"""


class DraftLength:
    """Chooses the width that maximises expected tokens per time; what ``k="auto"`` stands for.

    A width w is worth the tokens it is expected to add, ``a_1 + a_1 a_2 + ...`` up to w, less what its forward costs
    beyond that of one token, at the current rate of tokens per cost (Dinkelbach's method for a ratio). The chances a_i
    are those that come with a draft (``Draft.acceptance``), else the shares accepted so far at each position. Where
    no width is worth its cost nothing is drafted, except for a rare probe of one token; all probes together lose
    at most 1 % of the time. Drafters that estimate need no probes: they see without verification how they would
    have fared. A draft that was rejected leaves room for twice what was accepted of it, at least 15.

    Parameters
    ----------
    costs : sequence of float
        The cost of a round with w drafts at index w, in any unit; its length sets the largest width. ``COSTS`` has
        measured tables by dtype, `interpolate` makes one from a few measurements.
    measure : bool
        Refine ``costs`` by the time that rounds take, under rules greedy and match only. False: decisions are the same
        in every run, which matters for models whose rows depend on the width of the forward (bfloat16). ``k="auto"``
        measures unless a seed is given.

    Raises
    ------
    ValueRangeError, DtypeError
        ``costs`` is empty or holds anything but positive finite numbers.

    Notes
    -----
    Exactness: the output under greedy and match does not depend on widths, given equal rows. Under token and block it
    does, so there the decisions look at no clock: the same seed gives the same tokens. Their law is the target's as
    long as a width never depends on tokens that it drops (a stopping time): ``limit`` decides before anything is drawn.
    ``cut`` sees the draft, so the loop calls it under these rules for point masses only, whose tokens are
    no draws but functions of what was there before.

    Examples
    --------
    >>> state = DraftLength(costs=[1, 1.1, 1.2, 2.2]).start(None, "greedy")
    >>> state.cut([0.9, 0.8, 0.8]), state.cut([0.9, 0.1]), state.cut([0.05, 0.9])
    (2, 1, 0)
    """

    def __init__(self, costs: Sequence[float] = COSTS["float32"], *, measure: bool = True) -> None:
        try:
            table = [float(cost) for cost in costs]
        except (TypeError, ValueError):
            raise DtypeError(f"costs must be numbers, one a width from 0 on, got {costs!r}: {_COSTS_REMEDY}") from None
        if not table or not all(0 < cost < float("inf") for cost in table):
            raise ValueRangeError(
                f"costs must be positive and finite, one a width from 0 on, got {costs!r}: {_COSTS_REMEDY}"
            )
        self.costs = tuple(cost / table[0] for cost in table)
        self.measure = measure
        self._measured: dict[float, list[float]] = {}

    def start(self, drafter: Any, rule: str) -> AdaptiveLength:
        """Return the state for a new sequence; what was measured in those before stays, what was counted does not."""
        cost, estimates = getattr(drafter, "cost", 0.0), getattr(drafter, "estimates", False)
        costs = [c + cost * width for width, c in enumerate(self.costs)]
        measure = self.measure and rule in ("greedy", "match")
        if measure:
            costs = self._measured.setdefault(cost, costs)
        return AdaptiveLength(costs, estimates=estimates, measure=measure)


class AdaptiveLength:
    """Decides for one sequence. ``costs``, in rounds without drafts, are those it reckons with now."""

    def __init__(self, costs: list[float], *, estimates: bool, measure: bool) -> None:
        self._clock = Clock(costs) if measure else None
        self.costs = costs
        self._estimates = estimates
        self._shares = Shares(len(costs) - 1)
        # Decayed sums; their quotient is the rate.
        self._tokens = self._spent = 1.0
        self._elapsed = self._lost = 0.0
        self._probing = False
        self._most = len(costs) - 1

    def limit(self, most: int) -> int:
        most = min(most, self._most)
        if self._estimates or most == 0:
            return most
        width = self.cut(self._shares.rates(most))
        extra = self.costs[1] - 1
        self._probing = width == 0 and self._lost + extra <= _PROBES * self._elapsed
        return 1 if self._probing else width

    def cut(self, acceptance: Sequence[float]) -> int:
        # Never below the rate of plain decoding, which is always to be had.
        rate = max(1.0, self._tokens / self._spent)
        width, best, reached, expected = 0, 0.0, 1.0, 0.0
        for i, (chance, cost) in enumerate(zip(acceptance, self.costs[1:], strict=False), 1):
            reached *= chance
            expected += reached
            worth = expected - rate * (cost - 1)
            if worth > best:
                width, best = i, worth
        return width

    def record(self, width: int, accepted: int, seconds: float) -> None:
        cost = self.costs[width]
        self._tokens = MEMORY * self._tokens + accepted + 1
        self._spent = MEMORY * self._spent + cost
        self._elapsed += cost
        if self._probing:
            # An accepted one gained a round: the next may follow at once.
            self._lost = max(0.0, self._lost + cost - 1 - accepted)
        self._shares.record(width, accepted)
        if width > 0:
            room = max(self._most, 2 * width) if accepted == width else max(_AFTER_MISS, 2 * accepted)
            self._most = min(room, len(self.costs) - 1)
        if self._clock:
            self._clock.record(width, seconds)


def draft_length(k: int | Literal["auto"] | LengthPolicy, *, measure: bool = True) -> LengthPolicy:
    """Return the policy that ``k`` stands for; ``measure`` is what "auto" does.

    Raises
    ------
    DtypeError, ValueRangeError
        ``k`` is no int, "auto" or policy, or is below 0.
    """
    if isinstance(k, str) and k == "auto":
        return DraftLength(measure=measure)
    # A drafter has a start() too.
    if not isinstance(k, int | str | type) and callable(getattr(k, "start", None)) and not hasattr(k, "has_q"):
        return k
    try:
        return FixedLength(k)  # type: ignore[arg-type]
    except DtypeError:
        remedy = "pass a number of tokens, 'auto' or a policy such as DraftLength()"
        raise DtypeError(f"k must be an int, got {kind_of(k)}: {remedy}") from None
