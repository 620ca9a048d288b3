"""The pinned base-2 logarithm: min-p thresholds and log-probabilities."""

from __future__ import annotations

from ..types import Array
from .constants import LOG2
from .polynomial import horner, split

_SMALLEST_NORMAL = 2.0**-126


def log2(xp: Array, x: Array) -> Array:
    """Return float32 ``log2(x)`` for positive finite float32 x.

    Exactness
    ---------
    Relative error at most 2.05e-7, measured over all float32 x in [2**-40, 2**22).
    """
    small = x < _SMALLEST_NORMAL
    exponent, fraction = split(xp, xp.where(small, x * 2.0**32, x))
    exponent = xp.where(small, exponent - 32.0, exponent)
    return exponent + fraction * horner(fraction, LOG2)
