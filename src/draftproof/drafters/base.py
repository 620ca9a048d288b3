"""What a drafter is."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from ..types import Array, Draft, SamplingParams

Noise = Literal["private", "shared"] | None


class DraftState(Protocol):
    """A drafter at work on one sequence."""

    def propose(self, context: Any, width: int, *, params: SamplingParams, seed: int, offset: int) -> Draft:
        """Return at most ``width`` tokens that may follow ``context``.

        ``context`` is the whole sequence, int64 ``[L]``, a read-only NumPy array; ``offset`` equals ``L``. A state may
        be asked twice for the same context (a round that failed is repeated) and must then answer the same. An id
        below 0 ends the draft.

        With ``noise="private"`` draft i is ``sample(logits[i], **params, prev_tokens=context + drafts before i,
        seed=seed, offset=offset, draft_index=i)``; with ``noise="shared"`` it is drawn at ``offset + i`` without
        ``draft_index``.
        """
        ...

    def accept(self, num_accepted: int, next_token: int, target_logits: Array) -> None:
        """Learn how the draft fared; ``target_logits`` are the target's rows of the emitted positions, read-only."""
        ...


class Drafter(Protocol):
    """Proposes tokens for the target to verify.

    ``has_q`` says whether drafts come with the logits they were drawn from; without them a draft is a point mass.
    ``noise`` says what randomness they use: None for none, "private" for the streams that rules token and block need,
    "shared" for the target's own, which is exact under rule match only.
    """

    has_q: bool
    noise: Noise

    def start(self) -> DraftState:
        """Return the state for a new sequence."""
        ...
