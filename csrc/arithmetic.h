// The pinned arithmetic: the same float32 operations in the same order as draftproof/numerics, one element at a time.
// Written without branches so that loops over it vectorise. Compile with -ffp-contract=off: no fused multiply-add.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace draftproof {
inline namespace DRAFTPROOF_LEVEL {

constexpr float kInfinity = __builtin_inff();
constexpr float kLog2e = 1.4426950216293335f;
constexpr float kLn2 = 0.6931471824645996f;
constexpr float kFltMax = 3.4028234663852886e38f;
constexpr float kMassOne = 1099511627776.0f;  // 2^40
constexpr float kBlockSlack = 1.0f + 0x1p-20f;
constexpr int64_t kMaxVocab = int64_t{1} << 22;

inline float bits_to_float(int32_t bits) { return std::bit_cast<float>(bits); }
inline int32_t float_to_bits(float value) { return std::bit_cast<int32_t>(value); }

// 2^r for r in [-1/2, 1/2]; F is a float or a register of them.
template <class F>
inline F exp2_near_zero(F r) {
  F h = r * 0.00015353361959569156f + 0.0013398875016719103f;
  h = h * r + 0.00961843691766262f;
  h = h * r + 0.055503323674201965f;
  h = h * r + 0.24022647738456726f;
  h = h * r + 0.6931471824645996f;
  return h * r + 1.0f;
}

// t in [-40, 0] -> 2^t; below -40 and NaN -> 0.
inline float exp2_pinned(float t) {
  const bool live = t >= -40.0f;
  const float x = live ? t : 0.0f;
  const float n = std::floor(x + 0.5f);
  const float power = exp2_near_zero(x - n);
  const float scaled = bits_to_float(float_to_bits(power) + (static_cast<int32_t>(n) << 23));
  return live ? scaled : 0.0f;
}

// The scaled distance of a logit to the row maximum, 0 at the maximum itself.
inline float exponent(float logit, float maximum, float scale) {
  const float t = (logit - maximum) * scale;
  return logit == maximum ? 0.0f : t;
}

inline float scale_of(float temperature) {
  const float c = kLog2e / temperature;
  return c < kFltMax ? c : kFltMax;
}

struct Split {
  float exponent, fraction;
};

inline Split split(float x) {
  const int32_t shifted = float_to_bits(x) + (0x3F800000 - 0x3F400000);
  const int32_t e = (shifted >> 23) - 127;
  return {static_cast<float>(e), bits_to_float((shifted & 0x7FFFFF) + 0x3F400000) - 1.0f};
}

// RN(word). Below AVX-512 compilers convert unsigned integers with a fused multiply-add; the two halves here are exact,
// so their sum is rounded once, as it should be, without one.
inline float float_of(uint32_t word) {
#if defined(__x86_64__) && !defined(__AVX512F__)
  const auto half = [](uint32_t bits) { return static_cast<float>(static_cast<int32_t>(bits)); };
  return half(word >> 16) * 65536.0f + half(word & 0xFFFF);
#else
  return static_cast<float>(word);
#endif
}

inline float uniform(uint32_t word) {
  const float u = (float_of(word) + 0.5f) * 0x1p-32f;
  return u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;
}

// A standard exponential from 32 random bits.
inline float exponential(uint32_t word) {
  const float u = uniform(word);
  const Split s = split(1.0f - u);
  const float f = s.exponent == 0.0f ? -u : s.fraction;
  float h = f * 0.05411171168088913f + -0.12076719105243683f;
  h = h * f + 0.1499449908733368f;
  h = h * f + -0.16824312508106232f;
  h = h * f + 0.1997591257095337f;
  h = h * f + -0.2499321848154068f;
  h = h * f + 0.3333359360694885f;
  h = h * f + -0.5000006556510925f;
  h = h * f + 1.0f;
  return -s.exponent * kLn2 - f * h;
}

// The pinned base-2 logarithm of a positive finite float.
inline float log2_pinned(float x) {
  const bool small = x < 0x1p-126f;
  const Split s = split(small ? x * 0x1p32f : x);
  const float e = small ? s.exponent - 32.0f : s.exponent;
  const float f = s.fraction;
  float h = f * 0.07806669920682907f + -0.17423023283481598f;
  h = h * f + 0.21632489562034607f;
  h = h * f + -0.2427235245704651f;
  h = h * f + 0.2881914973258972f;
  h = h * f + -0.36057591438293457f;
  h = h * f + 0.4809020757675171f;
  h = h * f + -0.7213484644889832f;
  h = h * f + 1.4426950216293335f;
  return e + f * h;
}

inline int64_t mass_of(float weight) { return static_cast<int64_t>(weight * kMassOne); }

// The mass that top-p keeps of a total; at least 1, which keeps the first token.
inline int64_t theta(float top_p, int64_t total) {
  const int64_t low = (int64_t{1} << 30) - 1;
  const int64_t share = static_cast<int64_t>(top_p * 0x1p30f);
  const int64_t kept = share * (total >> 30) + ((share * (total & low) + low) >> 30) - (total >> 21);
  return kept > 1 ? kept : 1;
}

// floor(R * W / 2^62) for R < 2^62, W <= 2^62.
inline int64_t scaled_threshold(int64_t fraction, int64_t total) {
  return static_cast<int64_t>((static_cast<unsigned __int128>(fraction) * static_cast<uint64_t>(total)) >> 62);
}

inline int64_t fraction_of(uint32_t word0, uint32_t word1) {
  return static_cast<int64_t>(static_cast<uint64_t>(word0) << 30 | word1 >> 2);
}

inline float reciprocal(int64_t total) { return 1.0f / static_cast<float>(total); }

inline int64_t residual_mass(float scale, float target, float draft) {
  const float rest = target * scale - draft;
  return static_cast<int64_t>((rest > 0.0f ? rest : 0.0f) * 0x1p61f);
}

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
