// Top-k: the survivors, ranked, and what the other filters and the race make of them.
#include <limits>

#include "law.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {
namespace {

// A logit's place in the ranking as an integer, smaller is higher; zeros of either sign are equal.
int64_t rank_key(const Candidate& c) {
  const int32_t bits = float_to_bits(c.logit + 0.0f);
  const int32_t ascending = bits ^ (bits >> 31 & 0x7FFFFFFF);
  return static_cast<int64_t>(~ascending) * (int64_t{1} << 32) + c.id;
}

bool ranked(const Candidate& a, const Candidate& b) { return rank_key(a) < rank_key(b); }

// Few candidates are ranked by counting those above: no branch to mispredict.
void rank(const std::vector<Candidate>& from, std::vector<Candidate>& to) {
  constexpr size_t kFew = 192;
  const size_t n = from.size();
  to.resize(n);
  if (n > kFew) {
    std::copy(from.begin(), from.end(), to.begin());
    std::sort(to.begin(), to.end(), ranked);
    return;
  }
  alignas(64) int64_t key[kFew], above[kFew];
  for (size_t i = 0; i < n; ++i) key[i] = rank_key(from[i]);
  const size_t padded = (n + 7) / 8 * 8;
  for (size_t i = n; i < padded; ++i) key[i] = 0;
  std::fill(above, above + padded, 0);
  for (size_t j = 0; j < n; ++j)
    for (size_t i = 0; i < padded; ++i) above[i] += key[j] < key[i];
  for (size_t i = 0; i < n; ++i) to[above[i]] = from[i];
}

}  // namespace

int64_t Law::maxima_reaching(float bound) const {
  const Floats wanted = all(bound);
  int64_t count = 0;
  for (size_t b = 0; b < maxima_.size(); b += kLanes) count += std::popcount(reaching(load(&maxima_[b]), wanted));
  return count;
}

int64_t Law::logits_reaching(float bound) const {
  const Floats wanted = all(bound);
  int64_t count = 0;
  alignas(64) float buffer[kBlock];
  for (int64_t b = 0; b < row_.blocks(); ++b) {
    if (!(maxima_[b] >= bound)) continue;
    const float* l = row_.load(b, buffer);
    for (int i = 0; i < kBlock; i += kLanes) count += std::popcount(reaching(load(l + i), wanted));
  }
  return count;
}

// A value that at least k block maxima reach, or logits where there are fewer blocks, close to the k-th of them; -inf
// if none is found.
float Law::bound_of_kth(int64_t k) const {
  if (!(maximum_ < kInfinity)) return -kInfinity;
  float low = -kInfinity, high = maximum_;
  float step = std::max(1.0f, std::fabs(maximum_) * 0x1p-3f);
  for (int round = 0; round < 24; ++round) {
    const float middle = low == -kInfinity ? high - step : low + (high - low) * 0.5f;
    if (!(middle < high) || !(middle > low)) break;
    const int64_t count = row_.blocks() < k ? logits_reaching(middle) : maxima_reaching(middle);
    if (count < k) {
      high = middle;
      step *= 2.0f;
    } else {
      low = middle;
      if (count <= k + k / 4 + 4) break;
    }
  }
  return low;
}

// The k-th largest block maximum bounds the k-th logit from below, so only blocks that reach the bound are read again.
void Law::list_top_k() {
  const int64_t k = std::max<int64_t>(filters_.top_k, 1);
  const float bound = bound_of_kth(k);
  // A logit just below the bound may still divide to the same quotient; beyond a few steps (overflow) take them all.
  float lowest = bound;
  for (int step = 0; lowest > -kInfinity; ++step) {
    const float below = std::nextafter(lowest, -kInfinity);
    if (!(below / temperature_ >= bound / temperature_)) break;
    lowest = step < 8 ? below : -kInfinity;
  }
  list_reaching(lowest);
  rank(unsorted_, candidates_);
  if (static_cast<int64_t>(candidates_.size()) > k) {
    const float kth = candidates_[k - 1].logit / temperature_;
    const auto end = std::find_if(candidates_.begin() + k, candidates_.end(),
                                  [&](const Candidate& c) { return !(c.logit / temperature_ >= kth); });
    candidates_.erase(end, candidates_.end());
  }
}

const std::vector<Candidate>& Law::largest(int64_t count, float distance) {
  list_reaching(std::max(bound_of_kth(count), maximum_ - distance));
  candidates_.resize(std::min<size_t>(unsorted_.size(), count));
  std::partial_sort_copy(unsorted_.begin(), unsorted_.end(), candidates_.begin(), candidates_.end(), ranked);
  return candidates_;
}

void Law::list_reaching(float lowest) {
  unsorted_.clear();
  alignas(64) float buffer[kBlock];
  const Floats wanted = all(lowest);
  for (int64_t first = 0; first < row_.blocks(); first += kLanes)
    for (uint32_t open = reaching(load(&maxima_[first]), wanted); open; open &= open - 1) {
      const int64_t b = first + std::countr_zero(open);
      if (b >= row_.blocks()) break;
      const float* l = row_.load(b, buffer);
      uint64_t hits = 0;
      for (int i = 0; i < kBlock; i += kLanes) hits |= static_cast<uint64_t>(reaching(load(l + i), wanted)) << i;
      for (; hits; hits &= hits - 1) {
        const int i = std::countr_zero(hits);
        if (l[i] > -kInfinity) unsorted_.push_back({l[i], b * kBlock + i});
      }
    }
}

// The mass that top-p keeps of the list.
int64_t Law::listed_limit() const {
  if (!(filters_.top_p < 1.0f)) return std::numeric_limits<int64_t>::max();
  int64_t total = 0;
  for (const Candidate& c : candidates_) total += mass_of(weight(c.logit));
  return theta(filters_.top_p, total);
}

// Cut the ranked list to the kept prefix: top-p over the whole list, then min-p.
void Law::narrow_listed() {
  const int64_t limit = listed_limit();
  int64_t above = 0;
  size_t n = 0;
  for (; n < candidates_.size() && above < limit && t_of(candidates_[n].logit) >= min_t_; ++n)
    above += mass_of(weight(candidates_[n].logit));
  if (n > 0) end_ = {candidates_[n - 1].logit, candidates_[n - 1].id + 1};
  total_ = above;
}

int64_t Law::race_listed(const StreamInput& input) const {
  const int64_t limit = listed_limit();
  const WideStream token(stream_of(input, Purpose::race_token, Purpose::draft_token));
  const WideStream block(stream_of(input, Purpose::race_block, Purpose::draft_block));
  int64_t above = 0;
  Winner best{kInfinity, candidates_.empty() ? -1 : candidates_[0].id, -kInfinity};
  constexpr int kBatch = kLanes;
  for (size_t start = 0; start < candidates_.size(); start += kBatch) {
    const int n = static_cast<int>(std::min<size_t>(kBatch, candidates_.size() - start));
    alignas(64) uint32_t own[kBatch], shared[kBatch];
    alignas(64) bool holds[kBatch];
    alignas(64) float weights[kBatch], key[kBatch];
    const Candidate* c = candidates_.data() + start;
    for (int half = 0; half < kBatch; half += kLanes / 2) {
      Wides token_counter = {}, block_counter = {};
      for (int i = 0; i < kLanes / 2 && half + i < n; ++i) {
        token_counter[i] = static_cast<uint64_t>(c[half + i].id >> 2);
        block_counter[i] = static_cast<uint64_t>(c[half + i].id >> 7);
      }
      const WideWords tokens = token(token_counter), blocks = block(block_counter);
      for (int i = 0; i < kLanes / 2 && half + i < n; ++i) {
        const int64_t id = c[half + i].id;
        const int odd = static_cast<int>(id >> 6 & 1);
        own[half + i] = static_cast<uint32_t>(tokens.w[id & 3][i]);
        shared[half + i] = static_cast<uint32_t>(blocks.w[2 * odd][i]);
        holds[half + i] = static_cast<uint32_t>(blocks.w[2 * odd + 1][i]) >> 26 == (id & 63);
      }
    }
    for (int i = n; i < kBatch; ++i) own[i] = shared[i] = holds[i] = 0;
    for (int i = 0; i < kBatch; ++i) weights[i] = weight(i < n ? c[i].logit : maximum_);
    for (int i = 0; i < kBatch; ++i) {
      const float least = exponential(shared[i]) * (1.0f / kBlock);
      key[i] = (holds[i] ? least : least + exponential(own[i])) / weights[i];
    }
    for (int i = 0; i < n; ++i) {
      if (!(above < limit) || !(t_of(c[i].logit) >= min_t_)) return best.id;
      above += mass_of(weights[i]);
      if (weights[i] > 0.0f && (key[i] < best.key || (key[i] == best.key && c[i].id < best.id)))
        best = {key[i], c[i].id, c[i].logit};
    }
  }
  return best.id;
}

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
