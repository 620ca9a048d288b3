// Choices from a fuzzer's bytes, taken from their front; zeros once they are used up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace fuzz {

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : next_(data), left_(size) {}

  uint64_t take(int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes && left_ > 0; ++i, ++next_, --left_) value |= static_cast<uint64_t>(*next_) << (8 * i);
    return value;
  }
  // In [0, n), n >= 1.
  int64_t below(int64_t n) { return static_cast<int64_t>(take(n <= 256 ? 1 : n <= 65536 ? 2 : 4) % static_cast<uint64_t>(n)); }
  bool chance(int in_256) { return static_cast<int>(take(1)) < in_256; }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }
  bool empty() const { return left_ == 0; }

 private:
  const uint8_t* next_;
  size_t left_;
};

// Many values from few bytes (splitmix64).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

}  // namespace fuzz
