"""Where a round's draft comes from: ``draft_step`` or a drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._arrays import is_torch
from ..drafters.base import DraftState
from ..types import Array, SamplingParams
from .callbacks import Checked, Ids, frozen, read_draft
from .rules import Verifier
from .stopping import usable


class DraftSource:
    """The drafts of one sequence, from ``draft_step`` or a drafter, checked and cut where nothing after is of use."""

    def __init__(self, draft_step: Any, kind: Callable[[Ids], Any]) -> None:
        self._step = draft_step
        self._kind = kind
        self._state: DraftState | None = draft_step.start() if hasattr(draft_step, "start") else None

    def __call__(self, context: Ids, width: int, verify: Verifier, seed: int) -> Checked:
        """Return at most ``width`` tokens that may follow ``context``."""
        if width == 0:
            return Checked([], None)
        if self._state is None:
            source, result = "draft_step", self._step(self._kind(context), width)
        else:
            source = f"{type(self._state).__name__}.propose"
            params = SamplingParams(temperature=0.0) if verify.rule == "greedy" else verify.params
            result = self._state.propose(context, width, params=params, seed=seed, offset=len(context))
        tokens, rows = read_draft(result, width, source)
        n = usable(tokens, verify.eos)
        return Checked(tokens[:n], rows[:n] if rows is not None and n else None)

    def accept(self, num_accepted: int, next_token: int, rows: Array) -> None:
        """Tell a drafter how its draft fared; ``rows`` is a view of its own, which becomes read-only."""
        if self._state is not None:
            self._state.accept(num_accepted, next_token, rows if is_torch(rows) else frozen(rows))
