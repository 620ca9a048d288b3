"""Sampling in the C++ core: the bits of eager on NumPy, near the cost of reading the logits."""

from __future__ import annotations

from .._native import call
from ..types import Array, Filters, SampleResult


def sample(
    logits: Array,
    filters: Filters,
    prev_tokens: Array | None,
    mask: Array | None,
    seed: Array,
    offset: Array,
    draft_index: Array | None,
) -> tuple[Array, Array]:
    """See ``draftproof.sample``."""
    tokens, status = call("sample", logits, *filters, prev_tokens, mask, seed, offset, draft_index)
    return tokens, status


def sample_with_logprobs(
    logits: Array,
    filters: Filters,
    prev_tokens: Array | None,
    mask: Array | None,
    seed: Array,
    offset: Array,
    draft_index: Array | None,
) -> SampleResult:
    """See ``draftproof.sample_with_logprobs``."""
    return SampleResult(*call("sample_with_logprobs", logits, *filters, prev_tokens, mask, seed, offset, draft_index))


def sample_probs(probs: Array, seed: Array, offset: Array) -> tuple[Array, Array]:
    """See ``draftproof.sample_probs``."""
    tokens, status = call("sample_probs", probs, seed, offset)
    return tokens, status


def filter_logits(
    logits: Array, filters: Filters, prev_tokens: Array | None, mask: Array | None
) -> tuple[Array, Array]:
    """See ``draftproof.filter_logits``."""
    filtered, status = call("filter_logits", logits, *filters, prev_tokens, mask)
    return filtered, status
