// What the operations are measured against: one maximum over the bytes of some rows, and one pass that turns some rows
// into pinned masses and adds them. Plain loops over blocks that the compiler vectorises; csrc/arithmetic.h holds the
// arithmetic. Two threads share the rows' pieces; the caller takes pieces too and sleeps for nobody.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "arithmetic.h"

using namespace draftproof;

namespace {

constexpr int64_t kPiece = 16384;  // elements: 64 KiB
constexpr int64_t kWorthSharing = 1 << 17;

struct Work {
  const float* const* rows;
  const float* maxima;
  int64_t count, vocab;
  int64_t pieces() const { return (vocab + kPiece - 1) / kPiece; }
};

float largest(const float* x, int64_t size) {
  float lanes[64];
  std::fill(lanes, lanes + 64, -__builtin_inff());
  int64_t i = 0;
  for (; i + 64 <= size; i += 64)
    for (int j = 0; j < 64; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
  float best = *std::max_element(lanes, lanes + 64);
  for (; i < size; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// At temperature 1, of finite logits. A mass is a whole number below 2^41, so a piece's sums in double lanes are exact.
int64_t mass(const float* x, int64_t size, float maximum) {
  constexpr int kBlock = 128, kLanes = 16;
  double lanes[kLanes] = {};
  float masses[kBlock];
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock) {
    for (int j = 0; j < kBlock; ++j) masses[j] = std::trunc(exp2_pinned((x[i + j] - maximum) * kLog2e) * kMassOne);
    for (int k = 0; k < kBlock; k += kLanes)
      for (int j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(masses[k + j]);
  }
  int64_t sum = 0;
  for (const double lane : lanes) sum += static_cast<int64_t>(lane);
  for (; i < size; ++i) sum += mass_of(exp2_pinned((x[i] - maximum) * kLog2e));
  return sum;
}

int64_t piece(const Work& work, int64_t index) {
  const int64_t row = index / work.pieces(), start = index % work.pieces() * kPiece;
  const float* x = work.rows[row] + start;
  const int64_t size = std::min(kPiece, work.vocab - start);
  return work.maxima ? mass(x, size, work.maxima[row]) : static_cast<int64_t>(largest(x, size));
}

std::atomic<const Work*> shared{nullptr};
std::atomic<int64_t> next, sum, begun{0}, running{0};

int64_t take(const Work& work) {
  int64_t mine = 0;
  for (int64_t i; (i = next.fetch_add(1)) < work.count * work.pieces();) mine += piece(work, i);
  return mine;
}

void help() {
  for (int64_t seen = 0;; seen = begun.load()) {
    begun.wait(seen);
    running.fetch_add(1);
    if (const Work* work = shared.load()) sum.fetch_add(take(*work));
    running.fetch_sub(1);
  }
}

}  // namespace

// Without maxima the rows are only read. Returns the sum of all masses, of the truncated maxima of the pieces otherwise.
extern "C" int64_t draftproof_floor(const float* const* rows, const float* maxima, int64_t count, int64_t vocab,
                                    int threads) {
  const Work work{rows, maxima, count, vocab};
  if (threads < 2 || count * vocab < kWorthSharing) {
    int64_t total = 0;
    for (int64_t i = 0; i < count * work.pieces(); ++i) total += piece(work, i);
    return total;
  }
  static std::thread helper = [] {
    std::thread t(help);
    t.detach();
    return t;
  }();
  next = 0, sum = 0;
  shared = &work;
  begun.fetch_add(1);
  begun.notify_one();
  const int64_t mine = take(work);
  shared = nullptr;
  while (running.load()) {
  }
  return mine + sum.load();
}
