// The law of one row of probabilities, normalised by its own sum: the interface that verification asks of `Law` too.
#pragma once

#include <bit>
#include <cmath>

#include "law.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

class ProbabilityLaw {
 public:
  int32_t prepare(const RowInput& input) {
    row_.prepare(input, {});
    alignas(64) float buffer[kBlock];
    float largest = 0.0f;
    bool bad = false;
    for (int64_t b = 0; b < row_.blocks(); ++b) {
      const float* p = row_.load(b, buffer);
      const int n = row_.width(b);
      float block = 0.0f;
      int outside = 0;
      for (int i = 0; i < n; ++i) {
        outside |= !(p[i] >= 0.0f) | !(p[i] < kInfinity);
        block = p[i] > block ? p[i] : block;
      }
      bad |= outside != 0;
      largest = block > largest ? block : largest;
    }
    if (bad) return kBadProbability;
    if (largest == 0.0f) return kEmptySupport;
    maximum_ = largest;
    int exponent = 0;
    std::frexp(largest, &exponent);
    const int shift = 40 - exponent, half = shift >> 1;
    first_ = power_of_two(half);
    second_ = power_of_two(shift - half);
    total_ = -1;
    return 0;
  }

  // The sum of the row is a second pass; the rules that read one probability ask for it, argmax does not.
  void narrow() {
    if (total_ >= 0) return;
    total_ = 0;
    alignas(64) float masses[kBlock];
    for (int64_t b = 0; b < row_.blocks(); ++b) {
      block_masses(b, masses);
      total_ += sum_of(masses);
    }
  }

  int64_t total() const { return total_; }
  const Row& row() const { return row_; }
  bool listed() const { return false; }

  int64_t mass(int64_t id) const { return id >= row_.vocab() ? 0 : static_cast<int64_t>(scaled(row_.at(id))); }

  bool block_masses(int64_t b, float* masses) const {
    alignas(64) float buffer[kBlock];
    const float* p = row_.load(b, buffer);
    const int n = row_.width(b);
    for (int i = 0; i < n; ++i) masses[i] = scaled(p[i]);
    for (int i = n; i < kBlock; ++i) masses[i] = 0.0f;
    return true;
  }

  int64_t argmax() const {
    for (int64_t id = 0; id < row_.vocab(); ++id)
      if (row_.at(id) == maximum_) return id;
    return -1;  // unreachable: some entry is the maximum
  }

  int64_t draw(int64_t fraction) const { return draw_without(fraction, -1, total_); }

  int64_t draw_without(int64_t fraction, int64_t token, int64_t total) const {
    return draw_by_blocks(*this, fraction, total, token);
  }

 private:
  static float power_of_two(int exponent) { return bits_to_float((exponent + 127) << 23); }
  float scaled(float p) const { return std::trunc(p * first_ * second_); }

  Row row_;
  float maximum_ = 0.0f, first_ = 1.0f, second_ = 1.0f;
  int64_t total_ = -1;
};

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
