"""Where a round's draft comes from: ``draft_step`` or a drafter, as wide as the policy says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._arrays import is_torch
from ..drafters.base import DraftState
from ..types import Array, SamplingParams
from .callbacks import Checked, Ids, frozen, read_draft
from .draft_length import LengthPolicy
from .rules import Verifier
from .stopping import usable


class DraftSource:
    """The drafts of one sequence, checked, and cut where nothing after is of use or worth its cost."""

    def __init__(self, draft_step: Any, length: LengthPolicy, verify: Verifier, kind: Callable[[Ids], Any]) -> None:
        self._step = draft_step
        self._verify = verify
        self._kind = kind
        self._state: DraftState | None = draft_step.start() if hasattr(draft_step, "start") else None
        self.length = length.start(draft_step, verify.rule)

    def __call__(self, context: Ids, most: int, seed: int) -> Checked:
        """Return at most ``most`` tokens that may follow ``context``."""
        width = self.length.limit(most)
        if width == 0:
            return Checked([], None)
        if self._state is None:
            source, result = "draft_step", self._step(self._kind(context), width)
        else:
            source = f"{type(self._state).__name__}.propose"
            params = SamplingParams(temperature=0.0) if self._verify.rule == "greedy" else self._verify.params
            result = self._state.propose(context, width, params=params, seed=seed, offset=len(context))
        tokens, rows, acceptance = read_draft(result, width, source)
        n = usable(tokens, self._verify.eos)
        # What a draft drawn from rows turned out to be must not decide whether a ratio rule sees it.
        if acceptance is not None and (rows is None or self._verify.rule in ("greedy", "match")):
            n = self.length.cut(acceptance[:n])
        return Checked(tokens[:n], rows[:n] if rows is not None and n else None)

    def learn(self, width: int, accepted: int, next_token: int, rows: Array, seconds: float) -> None:
        """Tell policy and drafter how the draft fared; ``rows`` is a view of its own, which becomes read-only."""
        self.length.record(width, accepted, seconds)
        if self._state is not None:
            self._state.accept(accepted, next_token, rows if is_torch(rows) else frozen(rows))
