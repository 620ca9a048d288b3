"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""

from __future__ import annotations

from ..types import Array

_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10

Words = tuple[Array, Array, Array, Array]


def philox(counter: Words, key: tuple[Array, Array]) -> Words:
    """Return the four output words of the counter under the key.

    All words are 32-bit values held in Python ints or int64 arrays that broadcast against each other. The 64-bit
    products may wrap: masking keeps their low and high halves right all the same.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1 = ((product_1 >> 32) & _MASK) ^ c1 ^ k0, product_1 & _MASK
        c2, c3 = ((product_0 >> 32) & _MASK) ^ c3 ^ k1, product_0 & _MASK
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def key_of(seed: Array) -> tuple[Array, Array]:
    """Split 64-bit seeds (Python ints or the int64 bits of a seed) into the two key words."""
    return seed & _MASK, (seed >> 32) & _MASK
