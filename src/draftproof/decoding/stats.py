"""What a generation did and where its time went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counts and times of one generation.

    ``tokens`` were emitted in ``rounds``, with ``target_forwards`` calls of the target (a round repeated after an
    exception may call it again). Of the ``drafted`` tokens that were verified, ``accepted`` were accepted; the lists
    give both for each position in the draft. ``seconds`` has the wall time of the phases "draft", "target" and
    "verify"; a device that works asynchronously is waited for in "verify".

    Examples
    --------
    >>> import numpy as np
    >>> from draftproof import SpeculativeDecoder
    >>> target = lambda prefix, proposed: np.eye(3, dtype=np.float32)[[1] * (len(proposed) + 1)]  # always 1
    >>> decoder = SpeculativeDecoder(lambda prefix, k: ([1, 1, 2][:k], None), target)
    >>> tokens = decoder.generate([1], max_new=6)
    >>> decoder.stats.rounds, decoder.stats.accepted_by_position, decoder.stats.drafted_by_position
    (2, [2, 2, 0], [2, 2, 1])
    >>> decoder.stats.tokens_per_forward
    3.0
    """

    tokens: int = 0
    rounds: int = 0
    target_forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("draft", "target", "verify"), 0.0))

    @property
    def tokens_per_forward(self) -> float:
        """Tokens emitted per call of the target; 1 without drafts."""
        return self.tokens / self.target_forwards if self.target_forwards else 0.0

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that was accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def record(self, drafted: int, accepted: int, emitted: int) -> None:
        """Count one round."""
        self.rounds += 1
        self.tokens += emitted
        self.drafted += drafted
        self.accepted += accepted
        for counts, reached in ((self.drafted_by_position, drafted), (self.accepted_by_position, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for position in range(reached):
                counts[position] += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``seconds[name]``, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
