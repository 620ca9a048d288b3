"""The tokens that a row of logits holds most likely."""

from __future__ import annotations

import math

from .. import _numpy as np
from .._arrays import is_torch
from .._native import core
from ..types import Array

# Candidates this far below the maximum are none.
_FAR = 40
_LN2 = math.log(2)


def most_likely(row: Array, count: int) -> dict[int, float]:
    """Return the ``count`` most likely tokens of logits ``[V]``, heaviest first: 1, and half for each ln 2 below.

    Of equal logits the lower ids, except where torch ranks them; of a row with NaN any tokens, or none.
    """
    weights: dict[int, float] = {}
    best = None
    for token, logit in largest(row, count).items():
        best = logit if best is None else best
        # Of equal values, infinite ones too, the difference is 0.
        gap = best - logit if logit < best else 0.0
        if gap < _FAR:
            weights[token] = math.ldexp(1.0, -round(gap / _LN2))
    return weights


def largest(row: Array, count: int) -> dict[int, float]:
    """Return the ``count`` largest logits by token, largest first, or as many of them as weigh anything."""
    count = min(count, len(row))
    found: dict[int, float] | None = core and core.largest(row, count, _FAR)
    if found is not None:
        return found
    if is_torch(row):
        values, ids = (part.tolist() for part in row.topk(count))
        return dict(zip(ids, values, strict=True))
    # NaN is above all.
    reaching = (~(row < np.partition(row, -count)[-count])).nonzero()[0]
    ids = reaching[(-row[reaching]).argsort(kind="stable")[:count]]
    return dict(zip(ids.tolist(), row[ids].tolist(), strict=True))
