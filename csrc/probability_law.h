// The law of one row of probabilities, normalised by its own sum: the interface that verification asks of `Law` too.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "law.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

class ProbabilityLaw {
 public:
  int32_t prepare(const RowInput& input) {
    row_.prepare(input, {});
    // The bits of valid entries order as they do; those of invalid ones lie above. Adding 0 takes the sign of zeros.
    Bits largest = {};
    double sum = 0.0;
    for (int64_t start = 0; start < row_.blocks(); start += kPart) {
      row_.fetch_ahead(start + 2 * kPart);
      Floats part = {};
      each_block(start, std::min(start + kPart, row_.blocks()), [&](const float* p) DRAFTPROOF_ALWAYS {
        for (int i = 0; i < kBlock; i += kLanes) {
          const Floats v = load(p + i) + 0.0f;
          const Bits bits = (Bits)v;
          largest = bits > largest ? bits : largest;
          part += v;
        }
      });
      for (int i = 0; i < kLanes; ++i) sum += part[i];
    }
    const uint32_t bits = largest_lane(largest);
    if (bits >= 0x7F800000u) return kBadProbability;
    if (bits == 0) return kEmptySupport;
    maximum_ = bits_to_float(static_cast<int32_t>(bits));
    int exponent = 0;
    std::frexp(maximum_, &exponent);
    const int shift = 40 - exponent, half = shift >> 1;
    first_ = power_of_two(half);
    second_ = power_of_two(shift - half);
    total_ = -1;
    bounds_ = bounds_of(std::ldexp(sum, shift));
    return 0;
  }

  void narrow() {}  // there are no filters

  // The sum of the row is a second pass.
  int64_t total() const {
    if (total_ < 0) {
      IntegerSum sum;
      each_block(0, row_.blocks(), [&](const float* p) DRAFTPROOF_ALWAYS {
        for (int i = 0; i < kBlock; i += kLanes) sum.add(load(p + i) * first_ * second_);
      });
      total_ = sum.total();
    }
    return total_;
  }

  Law::Bounds total_bounds() const { return total_ >= 0 || bounds_.high < 0 ? Law::Bounds{total(), total()} : bounds_; }
  const Row& row() const { return row_; }
  bool listed() const { return false; }

  int64_t mass(int64_t id) const { return id >= row_.vocab() ? 0 : static_cast<int64_t>(scaled(row_.at(id))); }

  bool block_masses(int64_t b, float* masses) const {
    alignas(64) float buffer[kBlock];
    const float* p = entries(b, buffer);
    for (int i = 0; i < kBlock; i += kLanes) store(masses + i, truncated(load(p + i) * first_ * second_));
    return true;
  }

  int64_t argmax() const {
    alignas(64) float buffer[kBlock];
    const Floats maximum = all(maximum_);
    for (int64_t b = 0; b < row_.blocks(); ++b) {
      const float* p = entries(b, buffer);
      for (int i = 0; i < kBlock; i += kLanes)
        if (const uint32_t hits = reaching(load(p + i), maximum)) return b * kBlock + i + std::countr_zero(hits);
    }
    return -1;  // unreachable: some entry is the maximum
  }

  int64_t draw(int64_t fraction) const { return draw_without(fraction, -1, total()); }

  int64_t draw_without(int64_t fraction, int64_t token, int64_t total) const {
    return draw_by_blocks(*this, fraction, total, token);
  }

 private:
  // The 64 entries of a block, 0 beyond the row's end.
  DRAFTPROOF_INLINE const float* entries(int64_t b, float* buffer) const {
    const float* p = row_.load(b, buffer);
    if (row_.width(b) == kBlock) return p;
    for (int i = row_.width(b); i < kBlock; ++i) buffer[i] = 0.0f;
    return buffer;
  }
  template <class Visit>
  DRAFTPROOF_INLINE void each_block(int64_t first, int64_t last, const Visit& visit) const {
    alignas(64) float buffer[kBlock];
    for (int64_t b = first; b < last; ++b) visit(entries(b, buffer));
  }

  // Bounds on the total from the sum of the scaled entries in float32: a lane adds no more than kPart blocks, each
  // addition within 2^-24, and truncation takes less than 1 of each entry. A sum beyond the numbers bounds nothing.
  Law::Bounds bounds_of(double sum) const {
    if (!(sum < 0x1p62)) return {-1, -1};
    const double doubt = kPart * kBlock * 0x1p-24;
    const double low = sum * (1.0 - doubt) - static_cast<double>(row_.vocab()), least = 0x1p39;
    return {static_cast<int64_t>(std::max(low, least)), static_cast<int64_t>(sum * (1.0 + doubt)) + 1};
  }

  static float power_of_two(int exponent) { return bits_to_float((exponent + 127) << 23); }
  float scaled(float p) const { return std::trunc(p * first_ * second_); }

  static constexpr int64_t kPart = 16;  // blocks summed in float32

  Row row_;
  float maximum_ = 0.0f, first_ = 1.0f, second_ = 1.0f;
  mutable int64_t total_ = -1;  // once it is known
  Law::Bounds bounds_{-1, -1};
};

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
