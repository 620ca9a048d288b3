#include "levels.h"

#include <atomic>

namespace draftproof {

#if defined(__x86_64__)
namespace x86_64_v2 { extern const Level level; }
namespace x86_64_v3 { extern const Level level; }
namespace x86_64_v4 { extern const Level level; }
#else
namespace baseline { extern const Level level; }
#endif

std::vector<const Level*> available_levels() {
  std::vector<const Level*> levels;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) levels.push_back(&x86_64_v4::level);
  if (__builtin_cpu_supports("x86-64-v3")) levels.push_back(&x86_64_v3::level);
  if (__builtin_cpu_supports("x86-64-v2")) levels.push_back(&x86_64_v2::level);
#else
  levels.push_back(&baseline::level);
#endif
  return levels;
}

namespace {
std::atomic<const Level*> chosen{nullptr};
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
