// One row of logits as the filters see it: dtype, stride, mask and repetition penalty applied while reading, in blocks
// of 64 ids. The row is never copied: only blocks that hold a penalised id are patched, in a block-sized buffer.
// A row is read more than once. If another thread writes to it meanwhile, the result is any, but no read or write may
// leave the arrays, and no loop may run for ever.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "arithmetic.h"
#include "operations.h"
#include "simd.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

constexpr int kBlock = 64;

inline float double_to_float(double x) { return static_cast<float>(x); }
inline float bfloat_to_float(uint16_t h) { return bits_to_float(static_cast<int32_t>(static_cast<uint32_t>(h) << 16)); }

// A block in registers, for questions that do not depend on the order of its ids.
struct BlockValues {
  static constexpr int kRegisters = kBlock / kLanes;
  Floats v[kRegisters];

  DRAFTPROOF_INLINE Floats maxima(NanWatch& nan) const {
    Floats m = larger(v[0], v[1]);
    nan.see(v[0], v[1]);
    for (int i = 2; i < kRegisters; i += 2) {
      nan.see(v[i], v[i + 1]);
      m = larger(m, larger(v[i], v[i + 1]));
    }
    return m;
  }
};

DRAFTPROOF_INLINE BlockValues values_of(const float* from) {
  BlockValues block;
  for (int i = 0; i < BlockValues::kRegisters; ++i) block.v[i] = load(from + i * kLanes);
  return block;
}

template <DType type>
constexpr int64_t kBytes = type == DType::f32 ? 4 : 2;

// A whole block of a contiguous row. Of bfloat16 two ids at once: even ones come first, then odd ones.
template <DType type>
DRAFTPROOF_INLINE BlockValues values_at(const void* data, int64_t b) {
  if constexpr (type == DType::f32) {
    return values_of(static_cast<const float*>(data) + b * kBlock);
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(data) + b * kBlock;
    BlockValues block;
    constexpr int half = BlockValues::kRegisters / 2;
    for (int i = 0; i < half; ++i) {
      if constexpr (type == DType::bf16) {
        const Bits two = load_as<Bits>(from + 2 * i * kLanes);
        block.v[i] = (Floats)(two << 16);
        block.v[half + i] = (Floats)(two & 0xFFFF0000u);
      } else {
        block.v[i] = load_halves(from + i * kLanes);
        block.v[half + i] = load_halves(from + (half + i) * kLanes);
      }
    }
    return block;
  }
}

class Row {
 public:
  // Scratch is kept between rows of a thread; `prepare` binds it to one row.
  void prepare(const RowInput& input, const Patches& history) {
    in_ = input;
    vocab_ = input.vocab;
    blocks_ = (vocab_ + kBlock - 1) / kBlock;
    plain_ = direct() && input.dtype == DType::f32 ? vocab_ / kBlock : 0;
    for (const int32_t block : touched_) penalised_[block] = 0;
    touched_.clear();
    if (input.penalty != 1.0f) mark(history);
  }

  int64_t vocab() const { return vocab_; }
  int64_t blocks() const { return blocks_; }
  int width(int64_t block) const {
    return static_cast<int>(std::min<int64_t>(kBlock, vocab_ - block * kBlock));
  }
  // Whether blocks can be read as they lie in memory, but for penalties.
  bool direct() const { return in_.stride == 1 && in_.mask_kind == MaskKind::none && in_.dtype != DType::f64; }
  const std::vector<int32_t>& touched() const { return touched_; }  // blocks with a penalised id

  // The maxima of blocks as they lie in memory, kLanes whole blocks at a time: visit(first, maxima). Returns the first
  // block not visited. For direct rows.
  template <class Visit>
  DRAFTPROOF_INLINE int64_t visit_maxima(NanWatch& nan, const Visit& visit) const {
    switch (in_.dtype) {
      case DType::f32: return visit_with<DType::f32>(nan, visit);
      case DType::bf16: return visit_with<DType::bf16>(nan, visit);
      default: return visit_with<DType::f16>(nan, visit);
    }
  }

  // Whether the maximum of a block as it lies in memory may not be the one after penalties.
  bool penalty_can_move(int64_t block, float maximum) const {
    for (uint64_t bits = penalised_[block]; bits; bits &= bits - 1) {
      const float logit = raw(block * kBlock + std::countr_zero(bits));
      if (in_.penalty > 1.0f ? logit == maximum : penalised(logit) >= maximum) return true;
    }
    return false;
  }

  // The 64 logits of a block after penalty and mask, -inf beyond the row's end. `buffer` holds them if needed.
  DRAFTPROOF_INLINE const float* load(int64_t block, float* buffer) const {
    if (block < plain_ && !is_penalised(block)) return static_cast<const float*>(in_.data) + block * kBlock;
    return load_slowly(block, buffer);
  }

  // Ask for the first lines from a block on, which will be read later.
  DRAFTPROOF_INLINE void fetch_ahead(int64_t block) const {
    if (plain_ > 0) fetch<sizeof(float)>(block);
  }

  float at(int64_t id) const {
    if (id < 0 || !allowed(id)) return -kInfinity;
    const bool patched = is_penalised(id / kBlock) && (penalised_[id / kBlock] >> (id % kBlock) & 1);
    return patched ? penalised(raw(id)) : raw(id);
  }

 private:
  // The processor's own prefetching begins anew at each page. Any address may be asked for.
  template <int64_t bytes>
  DRAFTPROOF_INLINE void fetch(int64_t block) const {
    const auto ahead = reinterpret_cast<uintptr_t>(in_.data) + block * kBlock * bytes;
    for (int line = 0; line < 8; ++line) __builtin_prefetch(reinterpret_cast<const char*>(ahead + 64 * line));
  }

  template <DType type, class Visit>
  DRAFTPROOF_INLINE int64_t visit_with(NanWatch& nan, const Visit& visit) const {
    const int64_t end = vocab_ / (kBlock * kLanes) * kLanes;
    NanWatch seen = nan;
    for (int64_t first = 0; first < end; first += kLanes) {
      fetch<kBytes<type>>(first + 2 * kLanes);
      visit(first, maxima<kLanes>([&](int64_t b)
                                      DRAFTPROOF_ALWAYS { return values_at<type>(in_.data, b).maxima(seen); },
                                  first));
    }
    nan = seen;
    return end;
  }

  [[gnu::noinline]] const float* load_slowly(int64_t block, float* buffer) const {
    widen(block, buffer);
    if (is_penalised(block))
      for (uint64_t bits = penalised_[block]; bits; bits &= bits - 1) {
        float& logit = buffer[std::countr_zero(bits)];
        logit = penalised(logit);
      }
    if (in_.mask_kind != MaskKind::none) mask(block, buffer);
    return buffer;
  }

  float penalised(float logit) const { return logit < 0.0f ? logit * in_.penalty : logit / in_.penalty; }

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
      case MaskKind::bytes:
        return id >= in_.mask_vocab || static_cast<const uint8_t*>(in_.mask)[id * in_.mask_stride] != 0;
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
        case DType::f64: convert(static_cast<const double*>(in_.data) + start, n, buffer, double_to_float); break;
        case DType::f16: widen_halves(static_cast<const uint16_t*>(in_.data) + start, n, buffer); break;
        default: convert(static_cast<const uint16_t*>(in_.data) + start, n, buffer, bfloat_to_float); break;
      }
    } else {
      for (int i = 0; i < n; ++i) buffer[i] = raw(start + i);
    }
    for (int i = n; i < kBlock; ++i) buffer[i] = -kInfinity;
  }

  static void widen_halves(const uint16_t* from, int n, float* to) {
    if (n == kBlock) {
      for (int i = 0; i < kBlock; i += kLanes) store(to + i, load_halves(from + i));
    } else {
      convert(from, n, to, half_to_float);
    }
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
    if (in_.mask_stride != 1 || start + kBlock > in_.mask_vocab) {
      for (int i = 0; i < width(block); ++i)
        if (!allowed(start + i)) buffer[i] = -kInfinity;
    } else if (in_.mask_kind == MaskKind::bytes) {
      const uint8_t* keep = static_cast<const uint8_t*>(in_.mask) + start;
      for (int i = 0; i < kBlock; ++i) buffer[i] = keep[i] ? buffer[i] : -kInfinity;
    } else {
      const int32_t* words = static_cast<const int32_t*>(in_.mask) + start / 32;
      for (int half = 0; half < 2; ++half)
        for (int i = 0; i < 32; ++i)
          buffer[32 * half + i] = words[half] >> i & 1 ? buffer[32 * half + i] : -kInfinity;
    }
  }

  // One bit per id removes repetitions.
  void mark(const Patches& history) {
    if (static_cast<int64_t>(penalised_.size()) < blocks_) penalised_.resize(blocks_, 0);
    for (const auto& part : {history.before, history.drafted})
      for (int64_t i = 0; i < part.size; ++i) {
        const int64_t id = part.ids[i * part.stride];
        if (id < 0 || id >= vocab_) continue;
        uint64_t& bits = penalised_[id / kBlock];
        if (bits == 0) touched_.push_back(static_cast<int32_t>(id / kBlock));
        bits |= uint64_t{1} << (id % kBlock);
      }
  }

  bool is_penalised(int64_t block) const { return !touched_.empty() && penalised_[block] != 0; }

  RowInput in_{};
  int64_t vocab_ = 0, blocks_ = 0;
  int64_t plain_ = 0;                // blocks before this one are read in place, but for penalties
  std::vector<uint64_t> penalised_;  // per block, the ids of the history
  std::vector<int32_t> touched_;     // the blocks that have any
};

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
