"""What the length of a draft is decided by: how often drafts were accepted so far, and the time that widths take."""

from __future__ import annotations

from .. import _numpy as np

MEMORY = 0.95
"""How fast old rounds are forgotten: some 20 count."""

# No round is believed to take more, or less, than what was expected by a larger share than this.
_MOST = 0.5
# Interruptions only ever lengthen: what a round took longer counts for less.
_LONGER = 0.5
# Steps of the time of a round without drafts: by such a round, and by one whose own cost may be what is wrong.
_UNIT, _UNIT_BY_DRAFTS = 0.1, 0.02
# Steps of the costs of widths near a measured one, of those far from it, and of all back to the first table.
_NEAR, _FAR, _BACK = 0.25, 0.2, 0.01
# Far from it costs follow in proportion to what they are above one forward, but twofold at most. A little less than
# one forward, so that it is no division by 0 where drafts cost nothing.
_FORWARD, _TWOFOLD = 0.95, 2.0


class Shares:
    """How often the draft at each position was accepted when those before it were."""

    def __init__(self, most: int) -> None:
        self._tested = [0.0] * most
        self._accepted = [0.0] * most

    def record(self, width: int, accepted: int) -> None:
        """Count a round."""
        for i in range(min(width, accepted + 1)):
            self._tested[i] = MEMORY * self._tested[i] + 1
            self._accepted[i] = MEMORY * self._accepted[i] + (i < accepted)

    def rates(self, width: int) -> list[float]:
        """Return estimates, each drawn to the one before it by the weight of one round; 0.6 before there is any."""
        rates, rate = [], 0.6
        for tested, accepted in zip(self._tested[:width], self._accepted[:width], strict=True):
            rate = (accepted + rate) / (tested + 1)
            rates.append(rate)
        return rates


class Clock:
    """Moves a cost table towards the times measured, in place.

    A step follows a measurement only so far, so that a round that was interrupted does no lasting harm.
    """

    def __init__(self, costs: list[float]) -> None:
        self._costs = costs
        self._first = np.array(costs[1:])
        self._widths = np.arange(1, len(costs))
        # The time of a round without drafts; costs are what others take in relation to it.
        self._unit = 0.0
        self._rounds = 0

    def record(self, width: int, seconds: float) -> None:
        """Learn from a round of this width."""
        self._rounds += 1
        if self._rounds == 1 or seconds <= 0:
            # The first round computes the prompt; a clock may be too coarse for a small model.
            return
        cost, costs = self._costs[width], np.array(self._costs[1:])
        self._unit = self._unit or seconds / cost
        excess = max(-_MOST, min(_MOST, seconds / self._unit / cost - 1))
        if excess > 0:
            excess *= _LONGER
        self._unit *= 1 + excess * max(_UNIT if width == 0 else _UNIT_BY_DRAFTS, 1 / self._rounds)
        step = _BACK * (self._first - costs)
        if width > 0:
            # 1 at the width itself, 0 from a third of it down and from three times as much up.
            near = np.maximum(0.0, 1 - 2 * abs(self._widths - width) / (self._widths + width))
            ratio = np.minimum(_TWOFOLD, (costs - _FORWARD) / (cost - _FORWARD))
            step += excess * cost * (_NEAR * near + _FAR * (1 - near) * ratio)
        self._costs[1:] = np.maximum(1.0, costs + step).tolist()
