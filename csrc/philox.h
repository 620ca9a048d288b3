// Philox4x32-10 (Salmon et al., 2011) and the counters of the named streams.
#pragma once

#include <cstdint>

namespace draftproof {
inline namespace DRAFTPROOF_LEVEL {

enum class Purpose : uint32_t {
  race_token = 0,
  race_block = 1,
  draft_token = 2,
  draft_block = 3,
  accept = 4,
  emit = 5,
  row_seed = 6,
};

struct Words {
  uint32_t w[4];
};

// What selects a stream: everything of key and counter but c0.
struct Stream {
  uint32_t key0, key1;
  uint32_t offset_low, offset_high;
  uint32_t tag;  // purpose << 24 | index

  Stream(uint64_t seed, uint64_t offset, Purpose purpose, uint32_t index)
      : key0(static_cast<uint32_t>(seed)),
        key1(static_cast<uint32_t>(seed >> 32)),
        offset_low(static_cast<uint32_t>(offset)),
        offset_high(static_cast<uint32_t>(offset >> 32)),
        tag(static_cast<uint32_t>(purpose) << 24 | index) {}
};

inline Words philox(const Stream& s, uint32_t c0) {
  uint32_t a = c0, b = s.offset_low, c = s.offset_high, d = s.tag;
  uint32_t k0 = s.key0, k1 = s.key1;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(a) * 0xD2511F53u;
    const uint64_t p1 = static_cast<uint64_t>(c) * 0xCD9E8D57u;
    const uint32_t na = static_cast<uint32_t>(p1 >> 32) ^ b ^ k0;
    const uint32_t nc = static_cast<uint32_t>(p0 >> 32) ^ d ^ k1;
    b = static_cast<uint32_t>(p1);
    d = static_cast<uint32_t>(p0);
    a = na;
    c = nc;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{a, b, c, d}};
}

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
