"""From 32 random bits to a uniform in (0, 1) and to a standard exponential."""

from __future__ import annotations

from ..types import Array
from .constants import LN2, LOG1P, MAX_UNIFORM, MIN_UNIFORM_STEP
from .polynomial import horner, split


def uniform(xp: Array, word: Array) -> Array:
    """Return ``u = min(RN(RN(f32(k) + 0.5) * 2**-32), 1 - 2**-24)`` in (0, 1) of a Philox word k, int64."""
    return xp.minimum((xp.float32(word) + 0.5) * MIN_UNIFORM_STEP, MAX_UNIFORM)


def exponential(xp: Array, word: Array) -> Array:
    """Return ``-log(1 - u)`` of ``uniform(word)``: a standard exponential, never 0 and never infinite.

    Exactness
    ---------
    Relative error at most 3.15e-7 against ``-log1p(-u)``, measured over every distinct u. The smallest value is 2**-33,
    the largest 16.64: a token is never lost to an endpoint of the uniform.
    """
    u = uniform(xp, word)
    exponent, fraction = split(xp, 1.0 - u)
    # Near 1 the rounding of 1 - u has eaten the low bits of u; there f = -u is the exact fraction.
    fraction = xp.where(exponent == 0.0, -u, fraction)
    return -exponent * LN2 - fraction * horner(fraction, LOG1P)
