"""Integer masses: what probabilities are made of, so that sums do not depend on their order."""

from __future__ import annotations

from ..types import Array
from .constants import MASS_ONE, RESIDUAL_ONE, TOP_P_BITS, TOP_P_SLACK_BITS


def masses(xp: Array, weights: Array) -> Array:
    """Return ``f = trunc(w * 2**40)`` as int64; w is 0 or in [2**-40, 1], so f is 0 only where w is."""
    return xp.int64(weights * float(MASS_ONE))


def probability_masses(xp: Array, probabilities: Array) -> Array:
    """Return the masses of rows of probabilities, ``trunc(v * 2**(40 - e))`` with ``2**(e-1) <= row maximum < 2**e``.

    Rows are normalised by their own sum, so the scale of the input does not matter. All-zero rows give zeros.
    """
    shift = 40 - xp.exponent(xp.max(probabilities))
    half = shift >> 1
    return xp.int64(probabilities * _power_of_two(xp, half) * _power_of_two(xp, shift - half))


def _power_of_two(xp: Array, exponent: Array) -> Array:
    return xp.from_bits((exponent + 127) << 23)


def theta(xp: Array, top_p: Array, total: Array) -> Array:
    """Return the mass that top-p keeps of ``total``: a token stays iff the mass ranked above it is below theta.

    The slack of 2**-21 of the mass covers logits that are logarithms of decimal probabilities: 0.5 and 0.3 at
    ``top_p=0.8`` must keep two tokens although their float32 masses do not add up to exactly 0.8.
    """
    low = (1 << TOP_P_BITS) - 1
    share = xp.int64(top_p * float(1 << TOP_P_BITS))
    product = share * (total >> TOP_P_BITS) + ((share * (total & low) + low) >> TOP_P_BITS)
    return product - (total >> TOP_P_SLACK_BITS)


def reciprocal(xp: Array, total: Array) -> Array:
    """Return ``RN(1 / f32(W))``."""
    total = xp.float32(total)
    return xp.full_like(total, 1.0) / total


def probabilities(xp: Array, mass: Array, total: Array) -> Array:
    """Return ``p = RN(f32(f) * RN(1 / f32(W)))``."""
    return xp.float32(mass) * reciprocal(xp, total)


def residual_masses(xp: Array, scale: Array | float, target: Array, draft: Array) -> Array:
    """Return ``trunc(max(RN(RN(P * p) - q), 0) * 2**61)``: the residual law of the ratio rules, as integers."""
    return xp.int64(xp.maximum(target * scale - draft, 0.0) * RESIDUAL_ONE)
