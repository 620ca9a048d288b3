"""How a round is verified: the rule, fixed for all rounds, with its parameters."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from operator import index
from typing import Any, Literal

from .. import _checks
from .. import _numpy as np
from ..drafters.base import Drafter
from ..drafters.checks import kind_of
from ..errors import DtypeError, ValueRangeError
from ..types import DEAD, Array, SamplingParams, VerifyResult
from ..verification import verify, verify_greedy, verify_probs
from .callbacks import Checked, Ids, as_kind

Rule = Literal["greedy", "token", "block", "match"]


@dataclass(frozen=True)
class Verifier:
    """A rule, what the callbacks return, the sampling parameters and the ids that end a sequence."""

    rule: Rule
    rows: Literal["logits", "probs"]
    params: SamplingParams
    eos: frozenset[int]

    def __call__(self, rows: Array, draft: Checked, context: Ids, seed: int) -> VerifyResult:
        """Verify the draft of the round that starts where ``context`` ends; raise if a row it needs has no law."""
        result = self._verify(rows, draft, context, seed)
        status = int(result.status[0])
        if status & DEAD:
            where = f"{len(context)} tokens (prompt included)"
            raise ValueRangeError(f"a row of the target or the draft after {where} {_checks.death(status)}")
        return result

    def _verify(self, rows: Array, draft: Checked, context: Ids, seed: int) -> VerifyResult:
        tokens = as_kind(np.array([draft.tokens], dtype=np.int64), rows)
        eos = sorted(self.eos) or None
        if self.rule == "greedy":
            return verify_greedy(rows[None], tokens, eos=eos, check=False)
        q = None if draft.rows is None or self.rule == "match" else as_kind(draft.rows, rows)[None]
        common: dict[str, Any] = {"rule": self.rule, "eos": eos, "seed": seed, "offset": len(context), "check": False}
        if self.rows == "probs":
            return verify_probs(rows[None], q, tokens, **common)
        seen = None if self.params.repetition_penalty is None else as_kind(context.copy(), rows)[None]
        return verify(rows[None], q, tokens, **asdict(self.params), prev_tokens=seen, **common)

    def check(self, greedy: bool, seed: int | None, draft_step: Any) -> None:
        """Refuse what is out of range or does not go together, before a model has run for nothing."""
        if seed is not None:
            _checks.seed(_integer(seed), _one_row())
        _checks.one_of("rule", self.rule, _checks.RULES)
        _checks.one_of("rows", self.rows, ("logits", "probs"))
        if greedy != (self.rule == "greedy"):
            remedy = f"pass greedy={not greedy}, or leave the rule out"
            raise ValueRangeError(f"rule {self.rule!r} needs greedy={not greedy}, got greedy={greedy}: {remedy}")
        filtered = self._filtered()
        if filtered and greedy:
            raise ValueRangeError(f"greedy=True takes no sampling parameters, got {self.params}: pass greedy=False")
        if filtered and self.rows == "probs":
            raise ValueRangeError(f"rows='probs' takes no sampling parameters, got {self.params}: filter the rows")
        drafter: Drafter | None = draft_step if hasattr(draft_step, "start") else None
        if drafter is not None and drafter.has_q and self.rows == "probs":
            remedy = "return logits from target_step too"
            raise ValueRangeError(f"rows must be 'logits' with a drafter that returns logits, got 'probs': {remedy}")
        if drafter is not None and drafter.noise == "shared" and self.rule != "match":
            got = f"{self.rule!r}: pass greedy=False and rule='match', or a drafter with other noise"
            raise ValueRangeError(f"rule must be 'match' when drafts share the target's noise, got {got}")

    def _filtered(self) -> bool:
        """Whether any parameter has an effect; raise for one out of range."""
        named, row = asdict(self.params), _one_row()
        on = [name for name, value in named.items() if _checks.per_row(name, value, row, vocab=1 << 62) is not None]
        return on != ["temperature"] or named["temperature"] != 1


def _integer(seed: Any) -> int:
    with suppress(TypeError):
        if not isinstance(seed, bool):
            return index(seed)
    raise DtypeError(f"seed must be an int, since there is one sequence, got {kind_of(seed)}: pass an int, or None")


def _one_row() -> Array:
    return np.zeros((1, 1), dtype=np.float32)
