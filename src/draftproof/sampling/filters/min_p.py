"""Min-p (Nguyen et al., 2024): a token stays iff its probability is at least ``min_p`` times the largest."""

from __future__ import annotations

from ...numerics.log2 import log2
from ...types import Array

_OFF = float("-inf")


def above_min_p(xp: Array, t: Array, min_p: Array) -> Array:
    """Return where ``t >= log2(min_p)``: ``t`` [b, C] is the distance to the maximum, ``min_p`` [b, 1] in [0, 1]."""
    on = min_p > 0.0
    return t >= xp.where(on, log2(xp, xp.where(on, min_p, 1.0)), _OFF)
