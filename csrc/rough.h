// Rough powers of two, for bounds, never for a result.
#pragma once

#include "simd.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

// 2^23 * t read as the bits of a float has the right exponent and a
// linear fraction. Within [1, 1.0616] of 2^t for t = d * scale in [-126, 0], below that at most 2^-126.
struct Coarse {
  static constexpr double kLow = 1.0, kHigh = 1.0616;

  DRAFTPROOF_INLINE static Floats exp2(Floats d, float scale) {
    const Floats bits = larger(d * (scale * 0x1p23f), all(-126.0f * 0x1p23f));
#if defined(__AVX512F__)
    return (Floats)((Ints)_mm512_cvtps_epi32((__m512)bits) + (127 << 23));
#else
    return (Floats)(__builtin_convertvector(bits, Ints) + (127 << 23));
#endif
  }
};
// With a quadratic in the fraction: within 0.35 %.
struct Fine {
  static constexpr double kLow = 1.0 - 0.0035, kHigh = 1.0 + 0.0035;

  DRAFTPROOF_INLINE static Floats exp2(Floats d, float scale) {
    const Floats linear = Coarse::exp2(d, scale);
    const Floats fraction = (Floats)(((Ints)linear & 0x7FFFFF) | 0x3F800000);
    return linear * ((0.233698f * fraction - 0.6941982f) * fraction + 1.4570524f);
  }
};

// Of a block's 64 values. Pairs first: a chain of additions would wait for each one.
template <class F>
DRAFTPROOF_INLINE Floats sum_of_block(const F& at) {
  Floats sum = at(0) + at(kLanes);
  for (int i = 2 * kLanes; i < 64; i += 2 * kLanes) sum += at(i) + at(i + kLanes);
  return sum;
}

inline double sum_of_lanes(Floats lanes) {
  double sum = 0.0;
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
