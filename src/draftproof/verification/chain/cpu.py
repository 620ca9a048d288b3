"""Chain verification in the C++ core: the bits of eager on NumPy, one sequence at a time."""

from __future__ import annotations

from ..._native import call
from ...types import Array, Filters, VerifyResult

# To the core, None means that the draft's filter is the target's.
_OFF = Filters(1.0, 0, 1.0, 0.0, 1.0)


def verify(
    target_logits: Array,
    draft_logits: Array | None,
    draft_tokens: Array,
    rule: str,
    filters: Filters,
    draft_filters: Filters,
    prev_tokens: Array | None,
    mask: Array | None,
    draft_mask: Array | None,
    num_draft_tokens: Array,
    eos: Array | None,
    seed: Array | None,
    offset: Array | None,
) -> VerifyResult:
    """See ``draftproof.verify``."""
    drafts = (off if column is None else column for off, column in zip(_OFF, draft_filters, strict=True))
    given = (target_logits, draft_logits, draft_tokens, rule, *filters, *drafts, prev_tokens, mask, draft_mask)
    return VerifyResult(*call("verify", *given, num_draft_tokens, eos, seed, offset))


def verify_probs(
    target_probs: Array,
    draft_probs: Array | None,
    draft_tokens: Array,
    rule: str,
    uniform_accept: Array | None,
    uniform_sample: Array | None,
    seed: Array | None,
    offset: Array,
    num_draft_tokens: Array,
    eos: Array | None,
) -> VerifyResult:
    """See ``draftproof.verify_probs``."""
    given = (target_probs, draft_probs, draft_tokens, rule, uniform_accept, uniform_sample, seed, offset)
    return VerifyResult(*call("verify_probs", *given, num_draft_tokens, eos))


def verify_greedy(target: Array, draft_tokens: Array, num_draft_tokens: Array, eos: Array | None) -> VerifyResult:
    """See ``draftproof.verify_greedy``."""
    return VerifyResult(*call("verify_greedy", target, draft_tokens, num_draft_tokens, eos))
