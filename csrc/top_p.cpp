// Masses of a whole row, rough and exact; whether top-p holds a token, and where it ends.
#include <atomic>
#include <bit>
#include <cmath>
#include <optional>

#include "law.h"
#include "threads.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {
namespace {

constexpr int64_t kFlush = 32;  // blocks whose weights are summed in float32
constexpr int64_t kMostMass = int64_t{1} << 62;

// The ids of a block that have this logit.
uint64_t ids_at(const float* l, float logit) {
  uint64_t equal = 0;
  for (int i = 0; i < kBlock; i += kLanes)
    equal |= static_cast<uint64_t>(bits_of(load(l + i) == all(logit))) << i;
  return equal;
}

}  // namespace

// Bounds on a mass from a sum of rough weights. Sums in float32 over few blocks stay within 1e-4; a token that the
// pinned weights drop counts at most 2^-39; no row has a mass above 2^62.
template <class Rough>
Law::Bounds Law::bounds_of(double sum) const {
  const double dropped = static_cast<double>(row_.vocab()) * 0x1p-38;
  const double low = sum * (1.0 / Rough::kHigh - 1e-4) - dropped, high = sum * (1.0 / Rough::kLow + 1e-4) + dropped;
  return {static_cast<int64_t>(std::max(0.0, low) * 0x1p40), static_cast<int64_t>(std::min(0x1p22, high) * 0x1p40)};
}

// Whether the top-p set holds a token. Exact: bounds decide only where they leave no doubt.
bool Law::top_p_holds(const Rank& rank) const {
  if (rank.logit == maximum_ && rank.id == argmax()) return true;
  if (maximum_ < kInfinity && scale_ < 0x1p100f)
    if (const auto holds = roughly_holds(rank)) return *holds;
  const auto [above, total] = exact_above(rank);
  return above < theta(filters_.top_p, total);
}

// The rough weights of the blocks from `start` on, where `counts` says so. Which blocks reach a rank is as good as random:
// a branch for each would be mispredicted every other time.
template <class Rough, class Counts>
DRAFTPROOF_INLINE double Law::rough_sum(int64_t start, float least, const Counts& counts) const {
  alignas(64) float buffer[kBlock];
  const Floats maximum = all(maximum_), wanted = all(least);
  Floats sum = {};
  for (int64_t first = start; first < std::min(start + kFlush, row_.blocks()); first += kLanes)
    for (uint32_t open = reaching(load(&maxima_[first]), wanted); open; open &= open - 1) {
      const int64_t b = first + std::countr_zero(open);
      if (b >= row_.blocks()) break;
      const float* l = row_.load(b, buffer);
      sum += sum_of_block([&](int i) DRAFTPROOF_ALWAYS {
        const Floats v = load(l + i);
        return counts(v) ? Rough::exp2(v - maximum, scale_) : Floats{};
      });
    }
  return sum_of_lanes(sum);
}

// The mass that reaches the rank is needed whole, of the rest only enough.
std::optional<bool> Law::roughly_holds(const Rank& rank) const {
  const Floats wanted = all(rank.logit);
  double sum = 0.0;
  for (int64_t start = 0; start < row_.blocks(); start += kFlush)
    sum += rough_sum<Coarse>(start, rank.logit, [&](Floats v) DRAFTPROOF_ALWAYS { return v >= wanted; });
  const Bounds reaching = bounds_of<Coarse>(sum);
  double below = 0.0, doubt = 0.0;
  if (coarse_total_ < 0.0) {
    // Nothing below the rank weighs more than it does.
    const double most = static_cast<double>(row_.vocab()) * weight(rank.logit);
    if (refused(rank, reaching, bounds_of<Coarse>(most))) return false;
    for (int64_t start = 0; start < row_.blocks(); start += kFlush) {
      below += rough_sum<Coarse>(start, -kInfinity, [&](Floats v) DRAFTPROOF_ALWAYS { return v < wanted; });
      if (held(reaching, bounds_of<Coarse>(below))) return true;
    }
    coarse_total_ = sum + below;
  } else {
    below = coarse_total_ - sum;
    doubt = coarse_total_ * 1e-4;  // the sums are rounded, and so is their difference
  }
  if (held(reaching, bounds_of<Coarse>(below - doubt))) return true;
  if (refused(rank, reaching, bounds_of<Coarse>(below + doubt))) return false;
  return std::nullopt;
}

// Theta of the mass that reaches a rank and of that below it. It grows with both, by less than they do, but for the 2
// units that it may step back each time.
int64_t Law::theta_of(int64_t reaching, int64_t below) const {
  return theta(filters_.top_p, std::min(reaching + below, kMostMass));
}

// Where more mass reaches the rank, less of it is surely inside.
bool Law::held(const Bounds& reaching, const Bounds& below) const {
  return reaching.high + 4 < theta_of(reaching.high, below.low);
}

// The mass that reaches a rank, less the token itself and the ties behind it, is the mass above it.
bool Law::refused(const Rank& rank, const Bounds& reaching, const Bounds& below) const {
  const int64_t limit = theta_of(reaching.low, below.high) + 4;
  if (reaching.low <= limit) return false;
  alignas(64) float buffer[kBlock];
  int64_t ties = 0;
  const int64_t own = rank.id / kBlock;
  for (int64_t b = own; b < row_.blocks(); ++b) {
    if (!(maxima_[b] >= rank.logit)) continue;
    const uint64_t equal = ids_at(row_.load(b, buffer), rank.logit);
    ties += std::popcount(b > own ? equal : equal & ~uint64_t{0} << rank.id % kBlock);
  }
  return reaching.low - ties * mass_of(weight(rank.logit)) > limit;
}

Law::Bounds Law::total_bounds() const {
  if (total_ >= 0 || !can_be_rough()) return {total(), total()};
  if (total_bounds_.low >= 0) return total_bounds_;
  if (const double shift = (static_cast<double>(maximum_) - reference_) * scale_;
      rough_total_ >= 0.0 && shift <= kReach)
    return total_bounds_ = bounds_of<Fine>(rough_total_ * std::exp2(-shift));
  double sum = 0.0;
  for (int64_t start = 0; start < row_.blocks(); start += kFlush)
    sum += rough_sum<Fine>(start, -kInfinity, [](Floats v) DRAFTPROOF_ALWAYS { return v == v; });
  return total_bounds_ = bounds_of<Fine>(sum);
}

int64_t Law::total() const {
  if (total_ < 0) total_ = whole() ? mass_of_row() : mass_kept();
  return total_;
}

// The mass ranked above a token, and that of the row.
Law::Above Law::exact_above(const Rank& rank) const {
  IntegerSum higher, total;
  int64_t ties = 0;
  alignas(64) float buffer[kBlock], masses[kBlock];
  const Floats wanted = all(rank.logit);
  const int64_t own = rank.id / kBlock;
  for (int64_t b = 0; b < row_.blocks(); ++b) {
    if (!alive(b)) continue;
    const float* l = row_.load(b, buffer);
    for (int i = 0; i < kBlock; i += kLanes) store(masses + i, masses_of(load(l + i)));
    if (!(maxima_[b] >= rank.logit)) {
      for (int i = 0; i < kBlock; i += kLanes) total.add(load(masses + i));
      continue;
    }
    for (int i = 0; i < kBlock; i += kLanes) total.add(load(masses + i), above(load(l + i), wanted), higher);
    if (b > own) continue;
    const uint64_t equal = ids_at(l, rank.logit);
    ties += std::popcount(b < own ? equal : equal & ~(~uint64_t{0} << rank.id % kBlock));
  }
  return {higher.total() + ties * mass_of(weight(rank.logit)), total.total()};
}

void Law::narrow_row() {
  if (filters_.top_p < 1.0f) cut_row_at_top_p(theta(filters_.top_p, mass_of_row()));
}

int64_t Law::mass_kept() const {
  IntegerSum total;
  alignas(64) float masses[kBlock];
  for (int64_t b = 0; b < row_.blocks(); ++b) {
    if (!block_masses(b, masses)) continue;
    for (int i = 0; i < kBlock; i += kLanes) total.add(load(masses + i));
  }
  return total.total();
}

// Before top-p and min-p. Integers: pieces may be added in any order.
int64_t Law::mass_of_row() const {
  std::atomic<int64_t> mass{0};
  parallel_rows(row_.blocks(), kSharedBlocks, [&](int64_t first, int64_t last) {
    IntegerSum sum;
    alignas(64) float buffer[kBlock], masses[kBlock];
    for (int64_t b = first; b < last; ++b) {
      if (!alive(b)) continue;
      const float* l = row_.load(b, buffer);
      for (int i = 0; i < kBlock; i += kLanes) store(masses + i, masses_of(load(l + i)));
      for (int i = 0; i < kBlock; i += kLanes) sum.add(load(masses + i));  // apart: faster than in one loop
    }
    mass += sum.total();
  });
  return mass;
}

// Exact end of the top-p prefix: masses by bins of t, then the one bin where the limit is crossed, ranked.
void Law::cut_row_at_top_p(int64_t limit) {
  constexpr int kBins = 1024;
  std::vector<int64_t> bins(kBins, 0);
  const auto bin_of = [](float t) { return static_cast<int>(std::clamp(-t * 25.6f, 0.0f, kBins - 1.0f)); };
  alignas(64) float buffer[kBlock];
  const auto each = [&](auto&& visit) {
    for (int64_t b = 0; b < row_.blocks(); ++b) {
      if (!alive(b)) continue;
      const float* l = row_.load(b, buffer);
      for (int i = 0; i < kBlock; ++i) {
        // Read once: the sort below must not meet a NaN that another thread has written meanwhile.
        const float logit = *static_cast<const volatile float*>(l + i);
        const float t = t_of(logit);
        if (t >= -40.0f) visit(logit, b * kBlock + i, t);
      }
    }
  };
  each([&](float, int64_t, float t) { bins[bin_of(t)] += mass_of(exp2_pinned(t)); });
  int64_t above = 0;
  int crossing = 0;
  while (crossing < kBins - 1 && above + bins[crossing] < limit) above += bins[crossing++];
  unsorted_.clear();
  each([&](float l, int64_t id, float t) {
    if (bin_of(t) == crossing) unsorted_.push_back({l, id});
  });
  std::sort(unsorted_.begin(), unsorted_.end(),
            [](const Candidate& a, const Candidate& b) { return ranked_above(a.logit, a.id, {b.logit, b.id}); });
  for (const Candidate& c : unsorted_) {
    if (!(above < limit)) break;
    end_ = {c.logit, c.id + 1};
    above += mass_of(weight(c.logit));
  }
}

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
