"""Horner evaluation and the split of a float32 that both logarithms start from."""

from __future__ import annotations

from ..types import Array

_THREE_QUARTERS = 0x3F400000
_BIAS_STEP = 0x3F800000 - _THREE_QUARTERS


def horner(x: Array, coefficients: tuple[float, ...]) -> Array:
    """Return ``c0 + x*(c1 + x*(...))``, each operation rounded to float32."""
    value = x * coefficients[-1] + coefficients[-2]
    for c in coefficients[-3::-1]:
        value = value * x + c
    return value


def split(xp: Array, x: Array) -> tuple[Array, Array]:
    """Return ``(e, f)`` with ``x = 2**e * (1 + f)`` exactly and ``1 + f`` in [3/4, 3/2); x normal and positive."""
    shifted = xp.int64(xp.bits(x)) + _BIAS_STEP
    exponent = (shifted >> 23) - 127
    significand = xp.from_bits((shifted & 0x7FFFFF) + _THREE_QUARTERS)
    return xp.float32(exponent), significand - 1.0
