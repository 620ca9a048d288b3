// One native register of floats and the few things the kernels do with it that no loop expresses well.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "arithmetic.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
// Kernels live in registers: a call would spill them all.
#define DRAFTPROOF_ALWAYS __attribute__((always_inline))  // of a lambda
#define DRAFTPROOF_INLINE DRAFTPROOF_ALWAYS inline

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint64_t Wides __attribute__((vector_size(4 * kLanes)));

// From and to any address.
template <class V>
inline V load_as(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
inline Floats load(const float* from) { return load_as<Floats>(from); }
template <class V>
inline void store(void* to, V value) {
  std::memcpy(to, &value, sizeof value);
}
inline Floats all(float value) { return Floats{} + value; }

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7FFFu) << 13;
  // Scaling by 2^112 moves the exponent into place and makes half subnormals normal; it is exact.
  const float finite = bits_to_float(static_cast<int32_t>(magnitude)) * 0x1p112f;
  const uint32_t special = magnitude | 0x7F800000u;
  const uint32_t bits = (h & 0x7C00u) == 0x7C00u ? special : static_cast<uint32_t>(float_to_bits(finite));
  return bits_to_float(static_cast<int32_t>(bits | sign));
}

inline Floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(load_as<__m256i>(from));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtph_ps(load_as<__m128i>(from));
#else
  Floats wide;
  for (int i = 0; i < kLanes; ++i) wide[i] = half_to_float(from[i]);
  return wide;
#endif
}

// The larger of two; any of them where one is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (Floats)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

// One bit for each lane of a comparison's result.
inline uint32_t bits_of(Ints truth) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)truth);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)truth));
#elif defined(__x86_64__)
  return static_cast<uint32_t>(_mm_movemask_ps((__m128)truth));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= (truth[i] & 1u) << i;
  return bits;
#endif
}

// The lanes where a >= b, and where a > b, as bits.
inline uint32_t reaching(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GE_OQ);
#else
  return bits_of(a >= b);
#endif
}
inline uint32_t above(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ);
#else
  return bits_of(a > b);
#endif
}
constexpr uint32_t kEveryLane = (1u << kLanes) - 1;

// Remembers whether any value was NaN.
class NanWatch {
 public:
  void see(Floats a, Floats b) {
#if defined(__AVX512F__)
    seen_ = _kor_mask16(seen_, _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q));
#elif defined(__AVX2__)
    seen_ |= (Ints)_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_UNORD_Q);
#elif defined(__x86_64__)
    seen_ |= (Ints)_mm_cmpunord_ps((__m128)a, (__m128)b);
#else
    seen_ |= (a != a) | (b != b);
#endif
  }
#if defined(__AVX512F__)
  bool seen() const { return seen_ != 0; }

 private:
  __mmask16 seen_ = 0;
#else
  bool seen() const { return bits_of(seen_) != 0; }

 private:
  Ints seen_ = {};
#endif
};

// The products of the low halves of each 64 bits.
inline Wides multiply_low(Wides a, uint32_t b) {
#if defined(__AVX512F__)
  return (Wides)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (Wides)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__x86_64__)
  return (Wides)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xFFFFFFFFu) * uint64_t{b};
#endif
}

// a has groups of G lanes, b as many: the maxima of the first and second half of each group, a's groups before b's.
template <int G, int... I>
DRAFTPROOF_INLINE Floats halve(Floats a, Floats b, std::integer_sequence<int, I...>) {
  constexpr int half = kLanes / 2;
  constexpr auto from = [](int i) { return i / half * kLanes + i % half / (G / 2) * G + i % (G / 2); };
  return larger(__builtin_shufflevector(a, b, from(I)...), __builtin_shufflevector(a, b, from(I) + G / 2 ...));
}

// The maxima over each of N registers get(first) .. get(first + N - 1), in kLanes / N lanes each; N = kLanes leaves one
// lane a register.
template <int N, class Get>
DRAFTPROOF_INLINE Floats maxima(const Get& get, int64_t first) {
  if constexpr (N == 1) {
    return get(first);
  } else {
    const Floats a = maxima<N / 2>(get, first), b = maxima<N / 2>(get, first + N / 2);
    return halve<2 * kLanes / N>(a, b, std::make_integer_sequence<int, kLanes>{});
  }
}

inline Floats floor_of(Floats a) {
#if defined(__AVX512F__)
  return (Floats)_mm512_roundscale_ps((__m512)a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (Floats)_mm256_floor_ps((__m256)a);
#elif defined(__x86_64__)
  return (Floats)_mm_floor_ps((__m128)a);
#else
  for (int i = 0; i < kLanes; ++i) a[i] = std::floor(a[i]);
  return a;
#endif
}
// For values of at least 0.
inline Floats truncated(Floats a) { return floor_of(a); }

// The pinned 2^t times 2^40: masses before they are truncated.
DRAFTPROOF_INLINE Floats masses_at(Floats t) {
#if defined(__AVX512F__)
  const __mmask16 live = _mm512_cmp_ps_mask((__m512)t, _mm512_set1_ps(-40.0f), _CMP_GE_OQ);
  const Floats n = floor_of(t + 0.5f);
  return (Floats)_mm512_maskz_scalef_ps(live, (__m512)exp2_near_zero(t - n), (__m512)(n + 40.0f));
#else
  const Ints live = t >= -40.0f;
  const Floats x = (Floats)((Ints)t & live);
  const Floats n = floor_of(x + 0.5f);
  const Ints bits = (Ints)exp2_near_zero(x - n) + (__builtin_convertvector(n, Ints) << 23);
  return (Floats)(bits & live) * kMassOne;
#endif
}

template <class V>
inline auto largest_lane(V a) {
  std::remove_cvref_t<decltype(a[0])> lanes[kLanes];
  std::memcpy(lanes, &a, sizeof lanes);
  for (int n = kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] = lanes[i + n] > lanes[i] ? lanes[i + n] : lanes[i];
  return lanes[0];
}

// The sum of floats in [0, 2^61], each truncated to an integer.
class WideSum {
 public:
  void add(Floats a) {
#if defined(__AVX512DQ__)
    const __m512i low = _mm512_cvttps_epi64(_mm512_castps512_ps256((__m512)a));
    const __m512i high = _mm512_cvttps_epi64(_mm512_extractf32x8_ps((__m512)a, 1));
    sum_ += (Wides)_mm512_add_epi64(low, high);
#else
    for (int i = 0; i < kLanes; ++i) sum_[i / 2] += static_cast<uint64_t>(static_cast<int64_t>(a[i]));
#endif
  }
  int64_t total() const {
    uint64_t total = 0;
    for (int i = 0; i < kLanes / 2; ++i) total += sum_[i];
    return static_cast<int64_t>(total);
  }

 private:
  Wides sum_ = {};
};

// The sum of floats in [0, 2^40], each truncated to an integer: exact, in any order.
class IntegerSum {
 public:
#if defined(__AVX512DQ__)
  void add(Floats a) {
    const __m512i low = _mm512_cvttps_epi64(_mm512_castps512_ps256((__m512)a));
    const __m512i high = _mm512_cvttps_epi64(_mm512_extractf32x8_ps((__m512)a, 1));
    sum_ = _mm512_add_epi64(sum_, _mm512_add_epi64(low, high));
  }
  // And to another sum the lanes whose bits are set in `part`.
  void add(Floats a, uint32_t part, IntegerSum& other) {
    const __mmask16 open = part;
    const __m512i low = _mm512_cvttps_epi64(_mm512_castps512_ps256((__m512)a));
    const __m512i high = _mm512_cvttps_epi64(_mm512_extractf32x8_ps((__m512)a, 1));
    sum_ = _mm512_add_epi64(sum_, _mm512_add_epi64(low, high));
    other.sum_ = _mm512_mask_add_epi64(other.sum_, open & 0xFF, other.sum_, low);
    other.sum_ = _mm512_mask_add_epi64(other.sum_, open >> 8, other.sum_, high);
  }
  int64_t total() const { return _mm512_reduce_add_epi64(sum_); }

 private:
  __m512i sum_ = _mm512_setzero_si512();
#else
  // Doubles hold integers to 2^53; values are at most 2^40.
  void add(Floats a) {
    float lanes[kLanes];
    store(lanes, truncated(a));
    for (int i = 0; i < kLanes; ++i) part_[i] += static_cast<double>(lanes[i]);
    if (++added_ == 4096) flush();
  }
  void add(Floats a, uint32_t part, IntegerSum& other) {
    add(a);
    Ints bit;
    for (int i = 0; i < kLanes; ++i) bit[i] = 1 << i;
    other.add((Floats)((Ints)a & (((Ints{} + static_cast<int32_t>(part)) & bit) == bit)));
  }
  int64_t total() {
    flush();
    return sum_;
  }

 private:
  void flush() {
    for (double& lane : part_) {
      sum_ += static_cast<int64_t>(lane);
      lane = 0.0;
    }
    added_ = 0;
  }

  alignas(32) double part_[kLanes] = {};
  int64_t sum_ = 0;
  int added_ = 0;
#endif
};

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
