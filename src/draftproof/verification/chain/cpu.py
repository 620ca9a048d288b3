"""Chain verification in the C++ core: the bits of eager on NumPy, one sequence at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..._native import Outputs, core, is_bfloat16, view, views
from ...types import Array, Filters, VerifyResult

_DTYPES = ("int64", "int64", "int64", "int64", "bool", "int32")


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
    out = Outputs(target_logits)
    results = _results(out, draft_tokens)
    drafted = draft_logits if rule in ("token", "block") else None
    # Ids outside [0, max(V, Vd)) end a draft under every rule, and Vd is known from the draft's rows alone.
    if drafted is None and draft_logits is not None and draft_logits.shape[-1] > target_logits.shape[-1]:
        drafted = draft_logits
    own = draft_mask is not None
    mask_vocab = (draft_logits if own and draft_logits is not None else target_logits).shape[-1]
    core.verify(
        *(view(target_logits), is_bfloat16(target_logits), view(drafted), is_bfloat16(drafted), view(draft_tokens)),
        *(rule, *views(filters), *views(draft_filters), view(prev_tokens), view(mask)),
        *(view(draft_mask if own else mask), mask_vocab, view(num_draft_tokens), view(eos), view(seed), view(offset)),
        *results,
    )
    return VerifyResult(*out.arrays)


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
    out = Outputs(target_probs)
    results = _results(out, draft_tokens)
    given = (None if u is None else np.ascontiguousarray(view(u)) for u in (uniform_accept, uniform_sample))
    core.verify_probs(
        *(view(target_probs), is_bfloat16(target_probs), view(draft_probs), is_bfloat16(draft_probs)),
        *(view(draft_tokens), rule, *given, view(seed), view(offset), view(num_draft_tokens), view(eos)),
        *results,
    )
    return VerifyResult(*out.arrays)


def verify_greedy(target: Array, draft_tokens: Array, num_draft_tokens: Array, eos: Array | None) -> VerifyResult:
    """See ``draftproof.verify_greedy``."""
    plain = Filters(None)
    return verify(
        target, None, draft_tokens, "greedy", plain, plain, None, None, None, num_draft_tokens, eos, None, None
    )


def _results(out: Outputs, draft_tokens: Array) -> list[Any]:
    batch, drafted = draft_tokens.shape
    shapes = {2: (batch, drafted + 1)}
    return [out.new(shapes.get(i, (batch,)), dtype) for i, dtype in enumerate(_DTYPES)]
