"""Top-p (Holtzman et al., 2019): a token stays iff the mass ranked strictly above it is below theta. No sort.

Rank is logit descending, id ascending. A draw is checked after it is made (``check_winner``); where the whole kept
set is wanted, the boundary is found by bisection over the ordered bits of the logits (``keep_top_p``).
"""

from __future__ import annotations

from ...numerics.masses import theta
from ...types import Array

_NEVER = float("inf")


def _threshold(xp: Array, top_p: Array, mass: Array) -> tuple[Array, Array]:
    """Return ``(theta, off)``; theta is at least 1, which keeps the first token."""
    return xp.maximum(theta(xp, top_p, xp.sum(mass)), 1), top_p >= 1.0


def check_winner(xp: Array, logits: Array, mass: Array, top_p: Array, keys: Array, winner: Array) -> Array:
    """Return the winner of the race over the kept set, given the winner of a race over more tokens.

    A winner inside the kept set has also won there. One outside proves that the kept set lies strictly above it, so
    the race is run again, with the same arrival times, over the tokens ranked above. All arguments [b or 1, C] or
    [b, 1]; ``keys`` are the arrival times.
    """
    limit, off = _threshold(xp, top_p, mass)
    column = xp.arange(logits.shape[-1], like=logits)[None, :]
    while True:
        value = xp.take(logits, winner)
        above = (logits > value) | ((logits == value) & (column < winner))
        outside = ~off & (xp.sum(xp.where(above, mass, 0)) >= limit)
        if not xp.any(outside):
            return winner
        keys = xp.where(outside & ~above, _NEVER, keys)
        winner = xp.where(outside, xp.argmin(keys), winner)


def keep_top_p(xp: Array, logits: Array, mass: Array, top_p: Array) -> Array:
    """Return the kept set as bool [b, C]: exact in the integer masses, ties of the boundary cut by id.

    Invariant of the bisection: the mass of the keys above ``high`` is below theta, that above ``low`` is not.
    """
    limit, off = _threshold(xp, top_p, mass)
    key = _ordered_bits(xp, logits)
    high = xp.max(key)
    low = -xp.max(xp.where(mass > 0, -key, -high)) - 1
    while xp.any(high - low > 1):
        middle = (low + high) >> 1
        below = xp.sum(xp.where(key > middle, mass, 0)) < limit
        high = xp.where(below, middle, high)
        low = xp.where(below, low, middle)
    above, tied = key > high, key == high
    # Equal logits have equal masses: the tie keeps as many ids as start below theta.
    mass_of_tie = xp.max(xp.where(tied, mass, 0))
    room = limit - xp.sum(xp.where(above, mass, 0))
    places = (room + mass_of_tie - 1) // xp.maximum(mass_of_tie, 1)
    return off | above | (tied & (xp.cumsum(tied) <= places))


def _ordered_bits(xp: Array, values: Array) -> Array:
    """Return int64 that order as the floats do; adding 0 makes -0.0 and 0.0 equal."""
    bits = xp.int64(xp.bits(values + 0.0))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
