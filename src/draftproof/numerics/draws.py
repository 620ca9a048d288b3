"""The two ways to draw from a law: a race of exponentials, and the inverse of the cumulative masses."""

from __future__ import annotations

from ..types import Array

_LIMB = (1 << 31) - 1
_INFINITY = float("inf")


def race_keys(xp: Array, noise: Array, weights: Array) -> Array:
    """Return the arrival times ``RN(E / w)``; a weight of 0 never arrives. The least (key, id) wins."""
    live = weights > 0.0
    return xp.where(live, noise / xp.where(live, weights, 1.0), _INFINITY)


def fixed_point(word0: Array, word1: Array) -> Array:
    """Return the 62-bit fraction R of two Philox words."""
    return (word0 << 30) | (word1 >> 2)


def fixed_point_of_uniform(xp: Array, uniform: Array) -> Array:
    """Return ``R = trunc(u * 2**62)`` of a float32 uniform in [0, 1)."""
    return xp.int64(uniform * 2.0**62)


def inverse_cdf(xp: Array, fraction: Array, mass: Array) -> Array:
    """Return the first column whose inclusive prefix sum exceeds ``floor(R * W / 2**62)``.

    ``fraction`` int64 [b, 1], ``mass`` int64 [b or 1, C] with row sums W in (0, 2**62]. A column of mass 0 is never
    returned, and the walk cannot run off the end: the threshold is below W.
    """
    prefix = xp.cumsum(mass)
    total = prefix[:, -1:]
    high, low = fraction >> 31, fraction & _LIMB
    total_high, total_low = total >> 31, total & _LIMB
    threshold = high * total_high + ((high * total_low + low * total_high + ((low * total_low) >> 31)) >> 31)
    return xp.first_above(prefix, threshold)
