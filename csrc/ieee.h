#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace draftproof {

// Flush-to-zero and denormals-are-zero are the caller's business outside, ours inside: off.
class IeeeScope {
#if defined(__x86_64__)
  unsigned saved_ = _mm_getcsr();

 public:
  IeeeScope() { _mm_setcsr(saved_ & ~0x8040u); }
  ~IeeeScope() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  uint64_t saved_;

 public:
  IeeeScope() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~(uint64_t{1} << 24)));
  }
  ~IeeeScope() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }
#endif
};

}  // namespace draftproof
