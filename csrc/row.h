// One row of logits as the filters see it: dtype, stride, mask and repetition penalty applied while reading, in blocks
// of 64 ids. The row is never copied: only blocks that hold a penalised id are patched, in a block-sized buffer.
// A row is read more than once. If another thread writes to it meanwhile, the result is any, but no read or write may
// leave the arrays, and no loop may run for ever.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "arithmetic.h"
#include "operations.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

constexpr int kBlock = 64;

// One native register of floats, and of the integers that hold their bits.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7FFFu) << 13;
  // Scaling by 2^112 moves the exponent into place and makes half subnormals normal; it is exact.
  const float finite = bits_to_float(static_cast<int32_t>(magnitude)) * 0x1p112f;
  const uint32_t special = magnitude | 0x7F800000u;
  const uint32_t bits = (h & 0x7C00u) == 0x7C00u ? special : static_cast<uint32_t>(float_to_bits(finite));
  return bits_to_float(static_cast<int32_t>(bits | sign));
}

inline float bfloat_to_float(uint16_t h) { return bits_to_float(static_cast<int32_t>(static_cast<uint32_t>(h) << 16)); }

class Row {
 public:
  // Scratch is kept between rows of a thread; `prepare` binds it to one row.
  void prepare(const RowInput& input, const Patches& history) {
    in_ = input;
    vocab_ = input.vocab;
    blocks_ = (vocab_ + kBlock - 1) / kBlock;
    for (const auto& patch : patches_) touched_[patch.first / kBlock] = 0;
    patches_.clear();
    if (input.penalty != 1.0f) collect_patches(history);
  }

  int64_t vocab() const { return vocab_; }
  int64_t blocks() const { return blocks_; }
  int width(int64_t block) const {
    return static_cast<int>(std::min<int64_t>(kBlock, vocab_ - block * kBlock));
  }

  // The 64 logits of a block after penalty and mask, -inf beyond the row's end. `buffer` holds them if needed.
  const float* load(int64_t block, float* buffer) const {
    const bool whole = width(block) == kBlock;
    const bool patched = is_patched(block);
    if (whole && !patched && in_.dtype == DType::f32 && in_.stride == 1 && in_.mask_kind == MaskKind::none)
      return static_cast<const float*>(in_.data) + block * kBlock;
    widen(block, buffer);
    if (patched) patch(block, buffer);
    if (in_.mask_kind != MaskKind::none) mask(block, buffer);
    return buffer;
  }

  float at(int64_t id) const {
    if (id < 0 || !allowed(id)) return -kInfinity;
    if (const uint64_t below = uint64_t{1} << (id % kBlock); !patches_.empty() && (touched_[id / kBlock] & below))
      return patches_[first_[id / kBlock] + std::popcount(touched_[id / kBlock] & (below - 1))].second;
    return raw(id);
  }

 private:
  float raw(int64_t id) const {
    const int64_t at = id * in_.stride;
    switch (in_.dtype) {
      case DType::f32: return static_cast<const float*>(in_.data)[at];
      case DType::f64: return static_cast<float>(static_cast<const double*>(in_.data)[at]);
      case DType::f16: return half_to_float(static_cast<const uint16_t*>(in_.data)[at]);
      default: return bfloat_to_float(static_cast<const uint16_t*>(in_.data)[at]);
    }
  }

  bool allowed(int64_t id) const {
    switch (in_.mask_kind) {
      case MaskKind::none: return true;
      case MaskKind::bytes: return id >= in_.mask_vocab || static_cast<const uint8_t*>(in_.mask)[id * in_.mask_stride] != 0;
      default:
        return id >= in_.mask_vocab ||
               (static_cast<const int32_t*>(in_.mask)[(id >> 5) * in_.mask_stride] >> (id & 31) & 1) != 0;
    }
  }

  void widen(int64_t block, float* buffer) const {
    const int n = width(block);
    const int64_t start = block * kBlock;
    if (in_.stride == 1) {
      switch (in_.dtype) {
        case DType::f32: std::memcpy(buffer, static_cast<const float*>(in_.data) + start, n * sizeof(float)); break;
        case DType::f64: convert(static_cast<const double*>(in_.data) + start, n, buffer, [](double x) { return static_cast<float>(x); }); break;
        case DType::f16: convert(static_cast<const uint16_t*>(in_.data) + start, n, buffer, half_to_float); break;
        default: convert(static_cast<const uint16_t*>(in_.data) + start, n, buffer, bfloat_to_float); break;
      }
    } else {
      for (int i = 0; i < n; ++i) buffer[i] = raw(start + i);
    }
    for (int i = n; i < kBlock; ++i) buffer[i] = -kInfinity;
  }

  template <class T, class F>
  static void convert(const T* from, int n, float* to, F f) {
    if (n == kBlock) {
      for (int i = 0; i < kBlock; ++i) to[i] = f(from[i]);
    } else {
      for (int i = 0; i < n; ++i) to[i] = f(from[i]);
    }
  }

  void mask(int64_t block, float* buffer) const {
    const int64_t start = block * kBlock;
    const int n = width(block);
    for (int i = 0; i < n; ++i)
      if (!allowed(start + i)) buffer[i] = -kInfinity;
  }

  // One bit per id removes repetitions and gives the order.
  void collect_patches(const Patches& history) {
    if (static_cast<int64_t>(touched_.size()) < blocks_) touched_.resize(blocks_, 0);
    for (const auto& part : {history.before, history.drafted})
      for (int64_t i = 0; i < part.size; ++i) {
        const int64_t id = part.ids[i * part.stride];
        if (id >= 0 && id < vocab_) touched_[id / kBlock] |= uint64_t{1} << (id % kBlock);
      }
    if (static_cast<int64_t>(first_.size()) < blocks_) first_.resize(blocks_);
    for (int64_t b = 0; b < blocks_; ++b) {
      first_[b] = static_cast<int32_t>(patches_.size());
      for (uint64_t bits = touched_[b]; bits; bits &= bits - 1) {
        const int64_t id = b * kBlock + std::countr_zero(bits);
        const float l = raw(id);
        patches_.emplace_back(id, l < 0.0f ? l * in_.penalty : l / in_.penalty);
      }
    }
  }

  bool is_patched(int64_t block) const { return !patches_.empty() && touched_[block] != 0; }

  void patch(int64_t block, float* buffer) const {
    const auto* patch = patches_.data() + first_[block];
    for (int left = std::popcount(touched_[block]); left > 0; --left, ++patch)
      buffer[patch->first % kBlock] = patch->second;
  }

  RowInput in_{};
  int64_t vocab_ = 0, blocks_ = 0;
  std::vector<std::pair<int64_t, float>> patches_;  // (id, penalised logit), by id
  std::vector<uint64_t> touched_;                   // per block, the ids that have a patch
  std::vector<int32_t> first_;                      // per block, its first patch
};

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
