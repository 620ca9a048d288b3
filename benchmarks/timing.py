"""Times of the contestants of one cell: bursts, equal but for slow calls, in turns, in a new order every round."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .contestants.base import Contestant

BURST = 5
FEWEST, MOST = 3, 60
TURN = 0.01
"""Seconds that a burst may take: a longer call is a turn of its own, and its own warm-up."""
SETTLE = 0.01
"""Pause before a burst where others may use threads: OpenMP's go on spinning for a while after their work."""


class Times(NamedTuple):
    """Seconds of the timed calls by contestant, and the cores that other processes used meanwhile."""

    calls: dict[str, list[float]]
    others: float


class _Clock:
    """Runs one contestant: call after call, buffer after buffer."""

    def __init__(self, contestant: Contestant, start: int, settle: float) -> None:
        self.name, self._call, self._prepare, self._enter = contestant
        self._settle = settle
        self._next = start
        self._begin()
        self.spent = self._timed()
        self._calls = max(1, min(BURST, int(TURN / self.spent)))
        self._long = self.spent > TURN
        self.times = [self.spent] if self._long else []

    def _begin(self) -> None:
        if self._settle:
            time.sleep(self._settle)
        if self._enter is not None:
            self._enter()

    def _timed(self) -> float:
        argument = self._next if self._prepare is None else self._prepare(self._next)
        self._next += 1
        start = time.perf_counter()
        self._call(argument)
        return time.perf_counter() - start

    def burst(self) -> None:
        self._begin()
        if not self._long:
            self.spent += self._timed()
        for _ in range(self._calls):
            self.times.append(self._timed())
            self.spent += self.times[-1]

    def done(self, share: float) -> bool:
        return len(self.times) >= MOST or (len(self.times) >= FEWEST and self.spent >= share)


def measure(contestants: Sequence[Contestant], buffers: int, seconds: float, settle: bool) -> Times:
    """Time a cell for about ``seconds``, more where ``FEWEST`` calls of a slow contestant take longer."""
    wall, own, busy = time.perf_counter(), time.process_time(), _busy()
    # Far apart in the buffers: who followed another one would find its rows in the caches.
    starts = [number * buffers // len(contestants) for number in range(len(contestants))]
    pause = SETTLE if settle else 0.0
    clocks = [_Clock(contestant, start, pause) for contestant, start in zip(contestants, starts, strict=True)]
    share = seconds / len(clocks)
    while active := [clock for clock in clocks if not clock.done(share)]:
        for clock in random.sample(active, len(active)):
            clock.burst()
    elapsed = time.perf_counter() - wall
    others = (_busy() - busy - (time.process_time() - own)) / elapsed
    return Times({clock.name: clock.times for clock in clocks}, max(others, 0.0))


def quantiles(times: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 90th percentile."""
    return statistics.median(times), sorted(times)[min(len(times) - 1, int(0.9 * len(times)))]


def _busy() -> float:
    """Return the seconds that all cores have been busy since the start, stolen time included; nan off Linux."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return float("nan")
    ticks = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK")
