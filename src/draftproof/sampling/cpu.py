"""Sampling in the C++ core: the bits of eager on NumPy, near the cost of reading the logits."""

from __future__ import annotations

from .._native import Outputs, core, is_bfloat16, view, views
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
    batch = logits.shape[0]
    out = Outputs(logits)
    tokens, status = out.new((batch,), "int64"), out.new((batch,), "int32")
    rows = (view(logits), is_bfloat16(logits), *views(filters), view(prev_tokens), view(mask))
    core.sample(*rows, view(seed), view(offset), view(draft_index), tokens, None, None, None, status)
    return out.arrays[0], out.arrays[1]


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
    batch = (logits.shape[0],)
    out = Outputs(logits)
    results = [out.new(batch, dtype) for dtype in ("int64", "float32", "float32", "int64", "int32")]
    rows = (view(logits), is_bfloat16(logits), *views(filters), view(prev_tokens), view(mask))
    core.sample(*rows, view(seed), view(offset), view(draft_index), *results)
    return SampleResult(*out.arrays)


def sample_probs(probs: Array, seed: Array, offset: Array) -> tuple[Array, Array]:
    """See ``draftproof.sample_probs``."""
    out = Outputs(probs)
    tokens, status = out.new((probs.shape[0],), "int64"), out.new((probs.shape[0],), "int32")
    core.sample_probs(view(probs), is_bfloat16(probs), view(seed), view(offset), tokens, status)
    return out.arrays[0], out.arrays[1]


def filter_logits(
    logits: Array, filters: Filters, prev_tokens: Array | None, mask: Array | None
) -> tuple[Array, Array]:
    """See ``draftproof.filter_logits``."""
    out = Outputs(logits)
    filtered, status = out.new(tuple(logits.shape), "float32"), out.new((logits.shape[0],), "int32")
    rows = (view(logits), is_bfloat16(logits), *views(filters), view(prev_tokens), view(mask))
    core.filter_logits(*rows, filtered, status)
    return out.arrays[0], out.arrays[1]
