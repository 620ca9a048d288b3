"""What a drafter is."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from ..types import Array, Draft, SamplingParams

Noise = Literal["private", "shared"] | None


class DraftState(Protocol):
    """A drafter at work on one sequence."""

    def propose(self, context: Any, width: int, *, params: SamplingParams, seed: int, offset: int) -> Draft:
        """Return at most ``width`` tokens that may follow ``context``.

        ``context`` is the whole sequence, int64 ``[L]``, a read-only NumPy array, and begins with the one of the call
        before; ``offset`` equals ``L``. A state may be asked twice for the same context (a round that failed is
        repeated) and must then answer the same. An id below 0 ends the draft.

        With ``noise="private"`` draft i is ``sample(logits[i], **params, prev_tokens=context + drafts before i,
        seed=seed, offset=offset, draft_index=i)``; with ``noise="shared"`` it is drawn at ``offset + i`` without
        ``draft_index``.

        A draft may be shorter than ``width``. One with ``logits`` may end where it does because of what was known
        before the token after its last was drawn (earlier tokens, any row), never because of that token: dropping a
        token for what it is changes the law under rules token and block.
        """
        ...

    def accept(self, num_accepted: int, next_token: int, target_logits: Array) -> None:
        """Learn how the draft fared; ``target_logits`` are the target's rows of the emitted positions, read-only.

        ``num_accepted`` counts from the first token proposed, of which the loop may have verified only the first few.
        Called after every round, one without drafts included, except the last of a sequence.
        """
        ...


class Drafter(Protocol):
    """Proposes tokens for the target to verify.

    ``has_q`` says whether drafts come with the logits they were drawn from; without them a draft is a point mass.
    ``noise`` says what randomness they use: None for none, "private" for the streams that rules token and block need,
    "shared" for the target's own, which is exact under rule match only.

    Two more attributes may be there. ``estimates`` (False): point masses come with their ``acceptance``, so that the
    width of a round is decided after it is drafted. ``cost`` (0.0): what drafting a token costs, in forwards of the
    target on one token, for the decisions that may not look at a clock.
    """

    has_q: bool
    noise: Noise

    def start(self) -> DraftState:
        """Return the state for a new sequence."""
        ...
