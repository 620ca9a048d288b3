"""The pinned arithmetic as Triton functions: the operations of the other modules here, in the same order.

Kernels that use them are compiled without fused multiply-add and without flushing of subnormals (``OPTIONS``): each
float32 operation is rounded on its own. Division is ``tl.div_rn``, and integers are int64 that do not overflow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import constants

_LOG2E = tl.constexpr(constants.LOG2E)
_LN2 = tl.constexpr(constants.LN2)
_FLT_MAX = tl.constexpr(constants.FLT_MAX)
_EXP2 = tl.constexpr(constants.EXP2)
_LOG1P = tl.constexpr(constants.LOG1P)
_LOG2 = tl.constexpr(constants.LOG2)
_MIN_EXPONENT = tl.constexpr(float(constants.MIN_EXPONENT))
_SLACK_BITS = tl.constexpr(constants.TOP_P_SLACK_BITS)
_TOP_P_BITS = tl.constexpr(constants.TOP_P_BITS)
_TOP_P_LOW = tl.constexpr((1 << constants.TOP_P_BITS) - 1)
_WORD_STEP = tl.constexpr(constants.MIN_UNIFORM_STEP)
_MAX_UNIFORM = tl.constexpr(constants.MAX_UNIFORM)
_HEAVIEST = tl.constexpr(1.0 + 2.0**-20)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_TWO_32 = tl.constexpr(2.0**32)
_MASS_UNIT = tl.constexpr(2.0**-40)
_THREE_QUARTERS = tl.constexpr(0x3F400000)
_BIAS_STEP = tl.constexpr(0x3F800000 - 0x3F400000)
_LIMB = tl.constexpr((1 << 31) - 1)
_INFINITY = tl.constexpr(float("inf"))


OPTIONS = {"enable_fp_fusion": False, **({"enable_reflect_ftz": False} if torch.version.cuda else {})}
"""Compiler options of every launch: each operation rounded on its own, subnormals kept."""


@triton.jit
def load_row(pointers, inside):
    """Return float32 values, -inf outside. bfloat16 is widened by its bits, which keeps subnormals."""
    if pointers.dtype.element_ty == tl.bfloat16:
        bits = tl.load(pointers, mask=inside, other=0.0).to(tl.int16, bitcast=True)
        values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, values, -_INFINITY)


@triton.jit
def div(a, b):
    """Return ``RN(a / b)``."""
    return tl.div_rn(a, b)


@triton.jit
def _horner(x, C: tl.constexpr, DEGREE: tl.constexpr):
    value = x * C[DEGREE] + C[DEGREE - 1]
    for i in tl.static_range(2, DEGREE + 1):
        value = value * x + C[DEGREE - i]
    return value


@triton.jit
def _split(x):
    shifted = x.to(tl.int32, bitcast=True) + _BIAS_STEP
    exponent = (shifted >> 23) - 127
    significand = ((shifted & 0x7FFFFF) + _THREE_QUARTERS).to(tl.float32, bitcast=True)
    return exponent.to(tl.float32), significand - 1.0


@triton.jit
def log2_pinned(x):
    """Return the base-2 logarithm of positive finite values."""
    small = x < _SMALLEST_NORMAL
    exponent, fraction = _split(tl.where(small, x * _TWO_32, x))
    exponent = tl.where(small, exponent - 32.0, exponent)
    return exponent + fraction * _horner(fraction, _LOG2, 8)


@triton.jit
def uniform(word):
    """Return the uniform in (0, 1) of a uint32 word."""
    return tl.minimum((word.to(tl.float32) + 0.5) * _WORD_STEP, _MAX_UNIFORM)


@triton.jit
def noise(word):
    """Return the standard exponential of a uint32 word."""
    u = uniform(word)
    exponent, fraction = _split(1.0 - u)
    fraction = tl.where(exponent == 0.0, -u, fraction)
    return -exponent * _LN2 - fraction * _horner(fraction, _LOG1P, 8)


@triton.jit
def scale(temperature):
    """Return ``c = min(RN(LOG2E / T), FLT_MAX)`` for T > 0."""
    return tl.minimum(div(tl.full([], _LOG2E, tl.float32), temperature), _FLT_MAX)


@triton.jit
def exponent(logit, maximum, c):
    """Return ``t``, the scaled distance to the maximum; 0 at the maximum, an infinite one too."""
    return tl.where(logit == maximum, 0.0, (logit - maximum) * c)


@triton.jit
def exp2(t):
    """Return ``2**t``; 0 below -40 and for NaN."""
    live = t >= _MIN_EXPONENT
    t = tl.where(live, t, 0.0)
    n = tl.floor(t + 0.5)
    r = t - n
    power = _horner(r, _EXP2, 5) * r + 1.0
    scaled = (power.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)).to(tl.float32, bitcast=True)
    return tl.where(live, scaled, 0.0)


@triton.jit
def weight(logit, maximum, c):
    """Return the weight of a logit, float32 in {0} and [2**-40, 1]."""
    return exp2(exponent(logit, maximum, c))


@triton.jit
def heaviest(weight_of_largest):
    """Return a bound on every weight of a group from that of its largest logit."""
    return weight_of_largest * _HEAVIEST


@triton.jit
def mass(w):
    """Return ``trunc(w * 2**40)``, int64, of a weight."""
    bits = w.to(tl.int32, bitcast=True)
    significand = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64) << 17
    return tl.where(bits == 0, 0, significand >> tl.minimum(127 - (bits >> 23), 63).to(tl.int64))


@triton.jit
def fixed_point(x, BITS: tl.constexpr):
    """Return ``trunc(x * 2**BITS)``, int64, of ``x >= 0`` whose result is below 2**63."""
    bits = x.to(tl.int32, bitcast=True)
    significand = ((bits & 0x7FFFFF) | 0x800000).to(tl.int64)
    left = (bits >> 23) + (BITS - 150)
    up = significand << tl.maximum(left, 0).to(tl.int64)
    down = significand >> tl.minimum(tl.maximum(-left, 0), 63).to(tl.int64)
    return tl.where(left > 0, up, down)


@triton.jit
def theta(top_p, total):
    """Return the mass that top-p keeps of ``total``; at least 1, which keeps the first token."""
    share = fixed_point(top_p, _TOP_P_BITS)
    product = share * (total >> _TOP_P_BITS) + ((share * (total & _TOP_P_LOW) + _TOP_P_LOW) >> _TOP_P_BITS)
    return tl.maximum(product - (total >> _SLACK_BITS), 1)


@triton.jit
def least_exponent(min_p):
    """Return the smallest t that min-p keeps, -inf where it is off."""
    on = min_p > 0.0
    return tl.where(on, log2_pinned(tl.where(on, min_p, 1.0)), -_INFINITY)


@triton.jit
def race_key(arrival, w):
    """Return ``RN(E / w)``; a weight of 0 never arrives."""
    live = w > 0.0
    return tl.where(live, div(arrival, tl.where(live, w, 1.0)), _INFINITY)


@triton.jit
def order_key(x):
    """Return int32 that order as the floats do, -0.0 equal to 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_order_key(key):
    """Return the float of ``order_key``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def penalise(logit, rate):
    """Return ``l < 0 ? RN(l * r) : RN(l / r)``."""
    return tl.where(logit < 0.0, logit * rate, div(logit, rate))


@triton.jit
def reciprocal(total):
    """Return ``RN(1 / f32(W))``."""
    return div(tl.full([], 1.0, tl.float32), total.to(tl.float32))


@triton.jit
def probability(f, inverse):
    """Return ``p = RN(f32(f) * RN(1 / f32(W)))``."""
    return f.to(tl.float32) * inverse


@triton.jit
def accepts(u, target, draft):
    """Return whether a draft is accepted, ``RN(u * q) < p``."""
    return u * draft < target


@triton.jit
def rho(scale_of_target, target, draft):
    """Return the residual mass ``trunc(max(RN(RN(P * p) - q), 0) * 2**61)``, int64."""
    return fixed_point(tl.maximum(target * scale_of_target - draft, 0.0), 61)


@triton.jit
def fraction(word0, word1):
    """Return the 62-bit fraction R of two words."""
    return (word0.to(tl.int64) << 30) | (word1 >> 2).to(tl.int64)


@triton.jit
def mul_shift62(R, W):
    """Return ``floor(R * W / 2**62)`` for R in [0, 2**62), W in [0, 2**62]."""
    r1, r0 = R >> 31, R & _LIMB
    w1, w0 = W >> 31, W & _LIMB
    return r1 * w1 + ((r1 * w0 + r0 * w1 + ((r0 * w0) >> 31)) >> 31)


@triton.jit
def log_probability(t, total):
    """Return ``RN(RN(t - log2(RN(f32(W) * 2**-40))) * LN2)``."""
    return (t - log2_pinned(total.to(tl.float32) * _MASS_UNIT)) * _LN2


@triton.jit
def probability_mass(value, maximum):
    """Return ``trunc(v * 2**(40 - e))``, int64, of probabilities of a row whose largest is in [2**(e-1), 2**e)."""
    small = maximum < _SMALLEST_NORMAL
    bits = tl.where(small, maximum * _TWO_32, maximum).to(tl.int32, bitcast=True)
    shift = tl.where(small, 198, 166) - (bits >> 23)
    half = shift >> 1
    return fixed_point(value * _power_of_two(half) * _power_of_two(shift - half), 0)


@triton.jit
def _power_of_two(n):
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def draw_chunk(R, sums):
    """Return the chunk in which the inverse CDF of R falls, given the masses of chunks, and what is left of r there."""
    r = mul_shift62(R, tl.sum(sums, axis=0))
    prefix = tl.cumsum(sums, axis=0)
    before = prefix <= r
    return tl.sum(before.to(tl.int32), axis=0), r - tl.max(tl.where(before, prefix, 0), axis=0)


@triton.jit
def draw_id(chunk, rest, masses, CHUNK: tl.constexpr):
    """Return the first id of a chunk of CHUNK ids whose prefix of masses exceeds ``rest``, int64."""
    before = tl.cumsum(masses, axis=0) <= rest
    return (chunk * CHUNK + tl.sum(before.to(tl.int32), axis=0)).to(tl.int64)
