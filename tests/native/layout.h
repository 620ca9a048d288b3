// Arrays of up to three axes in memory of their own, at the strides a fuzzer asks for. The memory ends where the outermost
// items end, so that the address sanitizer sees every step beyond.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "bytes.h"

namespace fuzz {

using Shape = std::array<int64_t, 3>;

struct Laid {
  std::shared_ptr<char> memory;
  void* data = nullptr;  // of item (0, 0, 0)
  Shape strides{};       // in items
};

inline int64_t count(const Shape& shape) { return shape[0] * shape[1] * shape[2]; }

// 2^40 bytes of addresses; only pages that are written to cost memory, until no array uses them.
class AddressSpace {
 public:
  static std::shared_ptr<char> take() {
    if (!start()) return nullptr;
    ++users_;
    return {start() + kSize / 2 + 4096 * taken_++, [](char*) {
              if (--users_ > 0) return;
              madvise(start(), kSize, MADV_DONTNEED);
              taken_ = 0;
            }};
  }

 private:
  static constexpr int64_t kSize = int64_t{1} << 40;
  static char* start() {
    static void* const p = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : static_cast<char*>(p);
  }
  static inline int64_t users_ = 0, taken_ = 0;
};

template <class T>
void spread(const std::vector<T>& items, const Shape& shape, const Laid& laid) {
  auto from = items.begin();
  for (int64_t a = 0; a < shape[0]; ++a)
    for (int64_t b = 0; b < shape[1]; ++b)
      for (int64_t c = 0; c < shape[2]; ++c)
        static_cast<T*>(laid.data)[a * laid.strides[0] + b * laid.strides[1] + c * laid.strides[2]] = *from++;
}

template <class T>
Laid at_strides(const std::vector<T>& items, const Shape& shape, const Shape& strides) {
  int64_t low = 0, high = 0;
  for (int axis = 0; axis < 3; ++axis)
    (strides[axis] < 0 ? low : high) += std::max<int64_t>(shape[axis] - 1, 0) * strides[axis];
  const size_t size = count(shape) == 0 ? 0 : (high - low + 1) * sizeof(T);
  Laid laid;
  laid.memory = {static_cast<char*>(std::malloc(size)), std::free};
  laid.data = laid.memory.get() - low * static_cast<int64_t>(sizeof(T)) * (size != 0);
  laid.strides = strides;
  spread(items, shape, laid);
  return laid;
}

template <class T>
Laid contiguous(const std::vector<T>& items, const Shape& shape) {
  return at_strides(items, shape, {shape[1] * shape[2], shape[2], 1});
}

// Items so far apart that 32 bits do not count the bytes between them.
template <class T>
Laid far_apart(const std::vector<T>& items, const Shape& shape, const std::shared_ptr<char>& memory) {
  const int64_t step = ((int64_t{1} << 31) + 64) / static_cast<int64_t>(sizeof(T));
  const Laid laid{memory, memory.get(), {-step * shape[1], step, step * shape[1] * shape[0]}};
  spread(items, shape, laid);
  return laid;
}

// Strides of every sign, axes in any order, axes of one item with strides that mean nothing. An axis that repeats its
// first item may have stride 0.
template <class T>
Laid lay(Bytes& bytes, const std::vector<T>& items, const Shape& shape, const std::array<bool, 3>& repeats = {}) {
  const int kind = static_cast<int>(bytes.below(8));
  if (kind < 2 || count(shape) == 0) return contiguous(items, shape);
  if (kind == 2 && count(shape) <= 128)
    if (const auto memory = AddressSpace::take()) return far_apart(items, shape, memory);
  static constexpr int kOrders[6][3] = {{2, 1, 0}, {2, 0, 1}, {1, 2, 0}, {1, 0, 2}, {0, 1, 2}, {0, 2, 1}};
  const int* const order = kOrders[bytes.below(6)];
  const int64_t form = bytes.take(2);
  Shape strides{};
  int64_t extent = 1;
  for (int i = 0; i < 3; ++i) {
    const int axis = order[i];
    const int64_t bits = form >> (4 * i);
    if (shape[axis] == 1) {
      strides[axis] = bits & 1 ? int64_t{1} << 40 : bits & 2 ? -(int64_t{1} << 40) : bits & 4 ? 0 : 1;
    } else if (repeats[axis] && (bits & 8)) {
      strides[axis] = 0;
    } else {
      const int64_t step = extent * (1 + (bits & 3) * (bits & 3)) + (extent > 1 ? bits & 3 : 0);
      strides[axis] = bits & 4 ? -step : step;
      extent = step * (shape[axis] - 1) + extent;
    }
  }
  return at_strides(items, shape, strides);
}

}  // namespace fuzz
