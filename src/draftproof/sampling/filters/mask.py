"""Allowed-token masks: bool ``[b, V]``, or packed int32 ``[b, ceil(V/32)]``, bit ``v & 31`` of word ``v >> 5``."""

from __future__ import annotations

from ...types import Array

_FORBIDDEN = float("-inf")


def apply_mask(xp: Array, logits: Array, mask: Array) -> Array:
    """Return ``logits`` with -inf where the mask forbids; bits of the last word at or above V are ignored."""
    if xp.dtype_name(mask) == "int32":
        mask = unpack(xp, mask, logits.shape[-1])
    return xp.where(mask, logits, _FORBIDDEN)


def unpack(xp: Array, words: Array, vocab: int) -> Array:
    """Return the bool mask ``[b, vocab]`` of packed ``words``."""
    bits = (xp.int64(words)[:, :, None] >> xp.arange(32, like=words)) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab] != 0
