"""Where a round's draft comes from: ``draft_step`` or a drafter, as wide as the policy says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._arrays import is_torch
from ..drafters.base import DraftState
from ..drafters.checks import check_count, check_methods, is_drafter, kind_of
from ..errors import ValueRangeError
from ..types import Array, SamplingParams
from .callbacks import Checked, Ids, frozen, logits_of, read_draft
from .draft_length import LengthPolicy
from .rules import Verifier
from .stopping import usable


class DraftSource:
    """The drafts of one sequence, checked, and cut where nothing after is of use or worth its cost."""

    def __init__(self, draft_step: Any, length: LengthPolicy, verify: Verifier, kind: Callable[[Ids], Any]) -> None:
        self._step = draft_step
        self._verify = verify
        self._kind = kind
        self._state: DraftState | None = None
        if is_drafter(draft_step):
            self._state = draft_step.start()
            check_methods(f"the state from {kind_of(draft_step)}.start", self._state, "propose", "accept")
        self.length = length.start(draft_step, verify.rule)
        check_methods(f"the state from {kind_of(length)}.start", self.length, "limit", "cut", "record")

    def __call__(self, context: Ids, most: int, seed: int) -> Checked:
        """Return at most ``most`` tokens that may follow ``context``."""
        width = self._checked("limit", self.length.limit(most), most)
        if width == 0:
            return Checked([], None)
        if self._state is None:
            source, result = "draft_step", self._step(self._kind(context), width)
        else:
            source = f"{kind_of(self._state)}.propose"
            params = SamplingParams(temperature=0.0) if self._verify.rule == "greedy" else self._verify.params
            result = self._state.propose(context, width, params=params, seed=seed, offset=len(context))
        tokens, rows, acceptance = read_draft(result, width, source)
        n = usable(tokens, self._verify.eos)
        # What a draft drawn from rows turned out to be must not decide whether a ratio rule sees it.
        if acceptance is not None and (rows is None or self._verify.rule in ("greedy", "match")):
            n = self._checked("cut", self.length.cut(acceptance[:n]), n)
        return Checked(tokens[:n], rows[:n] if rows is not None and n else None)

    def _checked(self, method: str, width: Any, most: int) -> int:
        """Check what the policy decided."""
        source = f"the width from {kind_of(self.length)}.{method}"
        width = check_count(source, width)
        if width > most:
            raise ValueRangeError(f"{source} must be at most {most}, as asked for, got {width}: give {most} or less")
        return width

    def learn(self, width: int, accepted: int, next_token: int, rows: Array, seconds: float) -> None:
        """Tell policy and drafter how the draft fared; ``rows`` is a view of its own, which becomes read-only."""
        self.length.record(width, accepted, seconds)
        if self._state is not None:
            if self._verify.rows == "probs":
                rows = logits_of(rows)
            self._state.accept(accepted, next_token, rows if is_torch(rows) else frozen(rows))
