"""How many tokens to draft: the width, zero included, that is expected to gain the most time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

from .. import _numpy as np
from ..drafters.checks import check_count, kind_of
from ..errors import DtypeError, ValueRangeError

# Of all the time, what may go into probes that gain nothing.
_PROBES = 0.01
# How fast old rounds are forgotten: some 20 count.
_MEMORY = 0.95
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
    """The same width every round: what an int ``k`` stands for."""

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

    Examples
    --------
    >>> interpolate({0: 1.0, 2: 1.5, 3: 2.0})
    (1.0, 1.25, 1.5, 2.0)
    """
    between = [
        low + (high - low) * i / (end - start)
        for (start, low), (end, high) in pairwise(sorted(knots.items()))
        for i in range(end - start)
    ]
    return (*between, knots[max(knots)])


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
        self._clock = _Clock(costs) if measure else None
        self.costs = costs
        self._estimates = estimates
        self._shares = _Shares(len(costs) - 1)
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
        self._tokens = _MEMORY * self._tokens + accepted + 1
        self._spent = _MEMORY * self._spent + cost
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


class _Shares:
    """How often the draft at each position was accepted when those before it were."""

    def __init__(self, most: int) -> None:
        self._tested = [0.0] * most
        self._accepted = [0.0] * most

    def record(self, width: int, accepted: int) -> None:
        for i in range(min(width, accepted + 1)):
            self._tested[i] = _MEMORY * self._tested[i] + 1
            self._accepted[i] = _MEMORY * self._accepted[i] + (i < accepted)

    def rates(self, width: int) -> list[float]:
        """Estimates, each drawn to the one before it by the weight of one round; 0.6 before there is any."""
        rates, rate = [], 0.6
        for tested, accepted in zip(self._tested[:width], self._accepted[:width], strict=True):
            rate = (accepted + rate) / (tested + 1)
            rates.append(rate)
        return rates


class _Clock:
    """Moves a cost table towards the times measured, in place.

    A step follows a measurement only so far, so that a round that was interrupted does no lasting harm.
    """

    def __init__(self, costs: list[float]) -> None:
        self._costs = costs
        self._first = np.array(costs[1:])
        self._widths = np.arange(1, len(costs))
        self._unit = 0.0
        self._rounds = 0

    def record(self, width: int, seconds: float) -> None:
        self._rounds += 1
        if self._rounds == 1 or seconds <= 0:
            # The first round computes the prompt; a clock may be too coarse for a small model.
            return
        cost, costs = self._costs[width], np.array(self._costs[1:])
        self._unit = self._unit or seconds / cost
        excess = max(-0.5, min(0.5, seconds / self._unit / cost - 1))
        if excess > 0:
            # Interruptions only ever lengthen.
            excess /= 2
        # The time of a round without drafts; below, what others cost in relation to it.
        self._unit *= 1 + excess * max(0.1 if width == 0 else 0.02, 1 / self._rounds)
        step = 0.01 * (self._first - costs)
        if width > 0:
            # Neighbours follow the measurement, the others in proportion.
            near = np.maximum(0.0, 1 - 2 * abs(self._widths - width) / (self._widths + width))
            ratio = np.minimum(2.0, (costs - 0.95) / (cost - 0.95))
            step += excess * cost * (0.25 * near + 0.2 * (1 - near) * ratio)
        self._costs[1:] = np.maximum(1.0, costs + step).tolist()


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
