#include "levels.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace draftproof {

#if defined(__x86_64__)
namespace x86_64_v2 { extern const Level level; }
namespace x86_64_v3 { extern const Level level; }
namespace x86_64_v4 { extern const Level level; }
#elif defined(__aarch64__)
namespace aarch64_neon { extern const Level level; }
#else
namespace baseline { extern const Level level; }
#endif

namespace {

std::atomic<const Level*> chosen{nullptr};

#if defined(__x86_64__)
// The instructions of the x86-64 levels that compilers may emit, and whether the system saves the registers they use.
// Compilers have a builtin for this, but older ones do not know the levels, and on Windows it does not link.
int x86_64_version() {
  unsigned a, b, c, d;
  const auto has = [](unsigned word, unsigned bits) { return (word & bits) == bits; };
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 1;
  const unsigned features = c;
  // SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT
  if (!has(features, 1u << 0 | 1u << 9 | 1u << 13 | 1u << 19 | 1u << 20 | 1u << 23)) return 1;
  // FMA, MOVBE, OSXSAVE, AVX, F16C
  if (!has(features, 1u << 12 | 1u << 22 | 1u << 27 | 1u << 28 | 1u << 29)) return 2;
  unsigned saved, high;
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (!has(saved, 0x06)) return 2;
  // LZCNT; BMI1, AVX2, BMI2
  if (!__get_cpuid(0x80000001, &a, &b, &c, &d) || !has(c, 1u << 5)) return 2;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !has(b, 1u << 3 | 1u << 5 | 1u << 8)) return 2;
  // AVX512 F, DQ, CD, BW, VL
  return has(saved, 0xE0) && has(b, 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31) ? 4 : 3;
}
#endif

}  // namespace

std::vector<const Level*> available_levels() {
#if defined(__x86_64__)
  static const int version = x86_64_version();
  std::vector<const Level*> levels;
  if (version >= 4) levels.push_back(&x86_64_v4::level);
  if (version >= 3) levels.push_back(&x86_64_v3::level);
  if (version >= 2) levels.push_back(&x86_64_v2::level);
  return levels;
#elif defined(__aarch64__)
  return {&aarch64_neon::level};
#else
  return {&baseline::level};
#endif
}

const Level& active_level() {
  const Level* level = chosen.load(std::memory_order_relaxed);
  if (!level) {
    level = available_levels().front();
    chosen.store(level, std::memory_order_relaxed);
  }
  return *level;
}

bool set_level(const std::string& name) {
  for (const Level* level : available_levels())
    if (name == level->name) {
      chosen.store(level, std::memory_order_relaxed);
      return true;
    }
  return false;
}

}  // namespace draftproof
