// Philox for as many counters at once as a register takes.
#pragma once

#include <cstdint>
#include <utility>

#include "philox.h"
#include "simd.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

// The words of kLanes / 2 counters, each in the low half of 64 bits; the high halves mean nothing.
struct WideWords {
  Wides w[4];

  // Both words of each counter, next to each other.
  static Bits pair(Wides first, Wides second) { return (Bits)((first & 0xFFFFFFFFu) | (second << 32)); }
};

// A stream that answers kLanes / 2 counters at a time.
class WideStream {
 public:
  explicit WideStream(const Stream& s) : b_(s.offset_low), c_(s.offset_high), d_(s.tag) {
    for (uint32_t round = 0; round < 10; ++round) {
      keys_[round][0] = s.key0 + round * 0x9E3779B9u;
      keys_[round][1] = s.key1 + round * 0xBB67AE85u;
    }
  }

  WideWords operator()(Wides a) const {
    Wides b = Wides{} + b_, c = Wides{} + c_, d = Wides{} + d_;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const Wides p0 = multiply_low(a, 0xD2511F53u), p1 = multiply_low(c, 0xCD9E8D57u);
      a = (p1 >> 32) ^ b ^ keys_[round][0];
      c = (p0 >> 32) ^ d ^ keys_[round][1];
      b = p1;
      d = p0;
    }
    return {{a, b, c, d}};
  }

  // The words of counters first, first + 1, ...
  WideWords from(int64_t first) const {
    return (*this)(counting(std::make_integer_sequence<uint64_t, kLanes / 2>{}) + static_cast<uint64_t>(first));
  }

 private:
  template <uint64_t... I>
  static constexpr Wides counting(std::integer_sequence<uint64_t, I...>) {
    return Wides{I...};
  }

  uint64_t b_, c_, d_;
  uint64_t keys_[10][2];
};

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
