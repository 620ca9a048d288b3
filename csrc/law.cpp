#include "law.h"

#include <limits>

namespace draftproof {
namespace DRAFTPROOF_LEVEL {
namespace {

inline float widest(Floats m) {
  if constexpr (kLanes == 4) {
    const float low = m[0] > m[1] ? m[0] : m[1], high = m[2] > m[3] ? m[2] : m[3];
    return low > high ? low : high;
  } else {
    float lanes[kLanes];
    std::memcpy(lanes, &m, sizeof lanes);
    typedef float Four __attribute__((vector_size(16)));
    Four best, part;
    std::memcpy(&best, lanes, sizeof best);
    for (int i = 4; i < kLanes; i += 4) {
      std::memcpy(&part, lanes + i, sizeof part);
      best = best > part ? best : part;
    }
    const float low = best[0] > best[1] ? best[0] : best[1], high = best[2] > best[3] ? best[2] : best[3];
    return low > high ? low : high;
  }
}

// Maximum of 64 logits; `nan` collects the largest magnitude bits, which NaN alone lifts above infinity's.
inline float maximum_of_block(const float* l, Ints& nan) {
  constexpr int kRegisters = kBlock / kLanes;
  Floats m[2];
  for (int i = 0; i < kRegisters; ++i) {
    const Floats v = *reinterpret_cast<const Floats*>(l + i * kLanes);
    const Ints magnitude = (Ints)v & 0x7FFFFFFF;
    nan = magnitude > nan ? magnitude : nan;
    m[i & 1] = i < 2 ? v : v > m[i & 1] ? v : m[i & 1];
  }
  return widest(m[0] > m[1] ? m[0] : m[1]);
}

// Minimum of 64 arrival times, none of them NaN.
inline float minimum_of_block(const float* key) {
  float lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = key[i];
  for (int part = 16; part < kBlock; part += 16)
    for (int i = 0; i < 16; ++i) lanes[i] = key[part + i] < lanes[i] ? key[part + i] : lanes[i];
  float least = lanes[0];
  for (int i = 1; i < 16; ++i) least = lanes[i] < least ? lanes[i] : least;
  return least;
}

// 2^t within 2e-4 for t in [-40, 0] and not more than 2^-39 for t below: for bounds, never for a result.
inline Floats exp2_rough(Floats t) {
  const Floats x = t > -40.0f ? t : Floats{} - 40.0f;
  const Ints n = __builtin_convertvector(x, Ints);  // towards zero, so x - n + 1 is in (0, 1]
  const Floats r = x - __builtin_convertvector(n, Floats) + 1.0f;
  const Floats power = 1.0f + r * (0.69583282f + r * (0.22606716f + r * 0.07810251f));
  return (Floats)((Ints)power + ((n - 1) << 23));
}

inline double total_of(const Floats& lanes) {
  double sum = 0.0;
  for (int i = 0; i < kLanes; ++i) sum += lanes[i];
  return sum;
}

inline void philox_many(const Stream& stream, const uint32_t* counter, int n, uint32_t* w0, uint32_t* w1, uint32_t* w2,
                        uint32_t* w3) {
  for (int i = 0; i < n; ++i) {
    const Words w = philox(stream, counter[i]);
    w0[i] = w.w[0];
    w1[i] = w.w[1];
    w2[i] = w.w[2];
    w3[i] = w.w[3];
  }
}

Stream stream_of(const StreamInput& s, Purpose target, Purpose draft) {
  const bool own = s.draft_index < 0;
  return Stream(s.seed, s.offset, own ? target : draft, own ? 0u : static_cast<uint32_t>(s.draft_index));
}

inline bool arrives_first(float key, int64_t id, float best_key, int64_t best_id) {
  return key < best_key || (key == best_key && id < best_id);
}

}  // namespace

int32_t Law::block_maxima() {
  const int64_t blocks = row_.blocks();
  maxima_.resize(blocks);
  alignas(64) float buffer[kBlock];
  Ints nan = {};
  if (racing_) {
    held_.resize(blocks);
    for (int64_t b = 0; b < blocks; ++b) {
      const float* l = row_.load(b, buffer);
      maxima_[b] = maximum_of_block(l, nan);
      held_[b] = l[holder_[b]];  // -inf beyond the row's end
    }
  } else {
    for (int64_t b = 0; b < blocks; ++b) maxima_[b] = maximum_of_block(row_.load(b, buffer), nan);
  }
  int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = std::max(largest, nan[i]);
  if (largest > 0x7F800000) return kNan;
  maximum_ = -kInfinity;
  for (int64_t b = 0; b < blocks; ++b) maximum_ = maxima_[b] > maximum_ ? maxima_[b] : maximum_;
  return maximum_ == -kInfinity ? kEmptySupport : 0;
}

int64_t Law::count_reaching(float bound) const {
  int32_t count = 0;
  for (const float m : maxima_) count += m >= bound;
  return count;
}

// A value that at least k block maxima reach, close to the k-th of them; -inf if there are fewer blocks.
float Law::bound_of_kth(int64_t k) const {
  if (row_.blocks() < k || !(maximum_ < kInfinity)) return -kInfinity;
  float low = -kInfinity, high = maximum_;
  float step = std::max(1.0f, std::fabs(maximum_) * 0x1p-3f);
  for (int round = 0; round < 24; ++round) {
    const float middle = low == -kInfinity ? high - step : low + (high - low) * 0.5f;
    if (!(middle < high) || !(middle > low)) break;
    const int64_t count = count_reaching(middle);
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

// Survivors of top-k: the k-th largest block maximum bounds the k-th logit from below, so only blocks that reach the
// bound are read again.
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
  candidates_.clear();
  alignas(64) float buffer[kBlock];
  for (int64_t b = 0; b < row_.blocks(); ++b) {
    if (!(maxima_[b] >= lowest)) continue;
    const float* l = row_.load(b, buffer);
    for (int part = 0; part < kBlock; part += 16) {
      int hits = 0;
      for (int i = part; i < part + 16; ++i) hits += l[i] >= lowest;
      if (hits == 0) continue;
      for (int i = part; i < part + 16; ++i)
        if (l[i] >= lowest && l[i] > -kInfinity) candidates_.push_back({l[i], b * kBlock + i});
    }
  }
  std::sort(candidates_.begin(), candidates_.end(), by_rank);
  if (static_cast<int64_t>(candidates_.size()) > k) {
    const float kth = candidates_[k - 1].logit / temperature_;
    const auto end = std::find_if(candidates_.begin() + k, candidates_.end(),
                                  [&](const Candidate& c) { return !(c.logit / temperature_ >= kth); });
    candidates_.erase(end, candidates_.end());
  }
}

// Cut the ranked list to the kept prefix: top-p over the whole list, then min-p.
void Law::narrow_listed() {
  int64_t whole = 0;
  if (filters_.top_p < 1.0f)
    for (const Candidate& c : candidates_) whole += mass_of(weight(c.logit));
  const int64_t limit = filters_.top_p < 1.0f ? theta(filters_.top_p, whole) : std::numeric_limits<int64_t>::max();
  int64_t above = 0;
  size_t n = 0;
  for (; n < candidates_.size() && above < limit && t_of(candidates_[n].logit) >= min_t_; ++n)
    above += mass_of(weight(candidates_[n].logit));
  if (n > 0) end_ = {candidates_[n - 1].logit, candidates_[n - 1].id + 1};
  total_ = above;
}

int64_t Law::race_listed(const StreamInput& input) const {
  int64_t whole = 0;
  if (filters_.top_p < 1.0f)
    for (const Candidate& c : candidates_) whole += mass_of(weight(c.logit));
  const int64_t limit = filters_.top_p < 1.0f ? theta(filters_.top_p, whole) : std::numeric_limits<int64_t>::max();
  const Stream token = stream_of(input, Purpose::race_token, Purpose::draft_token);
  const Stream block = stream_of(input, Purpose::race_block, Purpose::draft_block);
  int64_t above = 0, best_id = candidates_.empty() ? -1 : candidates_[0].id;
  float best_key = kInfinity;
  constexpr int kBatch = 64;
  for (size_t start = 0; start < candidates_.size(); start += kBatch) {
    const int n = static_cast<int>(std::min<size_t>(kBatch, candidates_.size() - start));
    alignas(64) uint32_t counter[kBatch], pair[kBatch], w[4][kBatch], v[4][kBatch];
    alignas(64) float key[kBatch], weights[kBatch];
    for (int i = 0; i < n; ++i) {
      const int64_t id = candidates_[start + i].id;
      counter[i] = static_cast<uint32_t>(id >> 2);
      pair[i] = static_cast<uint32_t>(id >> 7);
      weights[i] = weight(candidates_[start + i].logit);
    }
    philox_many(token, counter, n, w[0], w[1], w[2], w[3]);
    philox_many(block, pair, n, v[0], v[1], v[2], v[3]);
    for (int i = 0; i < n; ++i) {
      const int64_t id = candidates_[start + i].id;
      const int odd = static_cast<int>(id >> 6 & 1);
      const float least = exponential(v[2 * odd][i]) * (1.0f / kBlock);
      const bool holds = (id & 63) == v[2 * odd + 1][i] >> 26;
      const float own = least + exponential(w[id & 3][i]);
      key[i] = (holds ? least : own) / weights[i];
    }
    for (int i = 0; i < n; ++i) {
      if (!(above < limit) || !(t_of(candidates_[start + i].logit) >= min_t_)) return best_id;
      above += mass_of(weights[i]);
      if (weights[i] > 0.0f && arrives_first(key[i], candidates_[start + i].id, best_key, best_id)) {
        best_key = key[i];
        best_id = candidates_[start + i].id;
      }
    }
  }
  return best_id;
}

void Law::block_noise(const StreamInput& input) {
  const Stream stream = stream_of(input, Purpose::race_block, Purpose::draft_block);
  const int64_t blocks = row_.blocks();
  constexpr int kBatch = 64;
  least_.resize(blocks + 2 * kBatch);  // whole batches are written
  holder_.resize(blocks + 2 * kBatch);
  for (int64_t start = 0; start < blocks; start += 2 * kBatch) {
    alignas(64) uint32_t counter[kBatch], w[4][kBatch];
    alignas(64) float even[kBatch], odd[kBatch];
    for (int i = 0; i < kBatch; ++i) counter[i] = static_cast<uint32_t>(start / 2 + i);
    philox_many(stream, counter, kBatch, w[0], w[1], w[2], w[3]);
    for (int i = 0; i < kBatch; ++i) even[i] = exponential(w[0][i]) * (1.0f / kBlock);
    for (int i = 0; i < kBatch; ++i) odd[i] = exponential(w[2][i]) * (1.0f / kBlock);
    float* least = least_.data() + start;
    uint8_t* holder = holder_.data() + start;
    for (int i = 0; i < kBatch; ++i) {
      least[2 * i] = even[i];
      least[2 * i + 1] = odd[i];
    }
    for (int i = 0; i < kBatch; ++i) {
      holder[2 * i] = static_cast<uint8_t>(w[1][i] >> 26);
      holder[2 * i + 1] = static_cast<uint8_t>(w[3][i] >> 26);
    }
  }
}

// The race over the tokens ranked above `limit`. Holders give a first bound; a block whose least arrival cannot beat it
// is never expanded.
Law::Winner Law::race_above(const StreamInput& input, const Rank& limit) {
  const int64_t blocks = row_.blocks();
  Winner best{kInfinity, -1, -kInfinity};
  scratch_.resize(blocks);
  for (int64_t b = 0; b < blocks; ++b)
    scratch_[b] = least_[b] / exp2_pinned(exponent(held_[b], maximum_, scale_));
  for (int64_t b = 0; b < blocks; ++b) {
    if (!(scratch_[b] < best.key)) continue;
    const int64_t id = b * kBlock + holder_[b];
    if (ranked_above(held_[b], id, limit) && t_of(held_[b]) >= min_t_) best = {scratch_[b], id, held_[b]};
  }
  for (int64_t b = 0; b < blocks; ++b)
    scratch_[b] = least_[b] / (exp2_pinned(exponent(maxima_[b], maximum_, scale_)) * kBlockSlack);
  const Stream stream = stream_of(input, Purpose::race_token, Purpose::draft_token);
  for (int64_t b = 0; b < blocks; ++b)
    if (scratch_[b] <= best.key && maxima_[b] >= limit.logit) expand(stream, b, limit, best);
  return best;
}

// Let every token of a block run.
void Law::expand(const Stream& stream, int64_t b, const Rank& limit, Winner& best) const {
  alignas(64) float buffer[kBlock], key[kBlock];
  alignas(64) uint32_t counter[kBlock / 4], w[4][kBlock / 4], word[kBlock];
  const float* l = row_.load(b, buffer);
  for (int i = 0; i < kBlock / 4; ++i) counter[i] = static_cast<uint32_t>(b * (kBlock / 4) + i);
  philox_many(stream, counter, kBlock / 4, w[0], w[1], w[2], w[3]);
  const float least = least_[b];
  // An exponential is at least its uniform, and the smallest word has the smallest: most blocks are ruled out before any
  // logarithm. The holder has been seen.
  uint32_t smallest = w[0][0];
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < kBlock / 4; ++i) smallest = w[j][i] < smallest ? w[j][i] : smallest;
  const float reach = (best.key * (exp2_pinned(t_of(maxima_[b])) * kBlockSlack) - least) * kBlockSlack;
  if (best.key < kInfinity && !(uniform(smallest) <= reach)) return;
  for (int i = 0; i < kBlock / 4; ++i)
    for (int j = 0; j < 4; ++j) word[4 * i + j] = w[j][i];
  for (int i = 0; i < kBlock; ++i) key[i] = least + exponential(word[i]);
  key[holder_[b]] = least;
  for (int i = 0; i < kBlock; ++i) key[i] = key[i] / exp2_pinned(exponent(l[i], maximum_, scale_));
  if (!(minimum_of_block(key) <= best.key)) return;
  for (int i = 0; i < kBlock; ++i) {
    const int64_t id = b * kBlock + i;
    if (arrives_first(key[i], id, best.key, best.id) && key[i] < kInfinity && ranked_above(l[i], id, limit) &&
        t_of(l[i]) >= min_t_)
      best = {key[i], id, l[i]};
  }
}

// Bounds on the row's mass and on the mass ranked above a token, from one pass of rough weights: each is within 5e-4 of
// the pinned one, sums in float32 stay within 1e-5, and a token that the pinned weights drop counts at most 2^-39.
Law::Bounds Law::rough_masses(const Rank& rank) const {
  alignas(64) float buffer[kBlock];
  double sum = 0.0, above = 0.0, reaching = 0.0;
  constexpr int64_t kFlush = 32;  // blocks whose weights are summed in float32
  for (int64_t start = 0; start < row_.blocks(); start += kFlush) {
    Floats all = {}, over = {}, at_least = {};
    for (int64_t b = start; b < std::min(start + kFlush, row_.blocks()); ++b) {
      const float* l = row_.load(b, buffer);
      const bool reaches = maxima_[b] >= rank.logit;
      for (int part = 0; part < kBlock; part += kLanes) {
        const Floats v = *reinterpret_cast<const Floats*>(l + part);
        const Floats w = exp2_rough((v - maximum_) * scale_);
        all += w;
        if (!reaches) continue;
        over += v > rank.logit ? w : Floats{};
        at_least += v >= rank.logit ? w : Floats{};
      }
    }
    sum += total_of(all);
    above += total_of(over);
    reaching += total_of(at_least);
  }
  const double dropped = static_cast<double>(row_.vocab()) * 0x1p-38;
  const auto low = [&](double x) { return static_cast<int64_t>(std::max(0.0, x * (1.0 - 1e-3) - dropped) * 0x1p40); };
  const auto high = [&](double x) { return static_cast<int64_t>((x * (1.0 + 1e-3) + dropped) * 0x1p40); };
  return {low(sum), high(sum), low(above), high(reaching)};
}

// Whether the top-p set holds a token. Exact: bounds decide only where they leave no doubt; theta may step back by 2
// units where the mass grows.
bool Law::top_p_holds(const Rank& rank) {
  const float p = filters_.top_p;
  if (rank.logit == maximum_ && rank.id == argmax()) return true;
  if (whole_ < 0 && maximum_ < kInfinity) {
    if (count_reaching(rank.logit) * 8 <= row_.blocks()) {
      const auto [above, scanned] = mass_above(rank);
      if (above + 2 < theta(p, scanned)) return true;
    }
    const Bounds bounds = rough_masses(rank);
    if (bounds.above_high + 2 < theta(p, bounds.low)) return true;
    if (bounds.above_low > theta(p, bounds.high) + 2) return false;
  }
  if (whole_ < 0) whole_ = row_mass();
  return mass_above(rank).first < theta(p, whole_);
}

// Draw, then check: a winner outside the top-p set proves that the set lies above it, and the race is run again there.
int64_t Law::race_row(const StreamInput& input) {
  Rank limit{-kInfinity, row_.vocab()};
  whole_ = -1;
  for (;;) {
    const Winner winner = race_above(input, limit);
    const Rank rank{winner.logit, winner.id};
    if (winner.id < 0 || !(filters_.top_p < 1.0f) || top_p_holds(rank)) return winner.id;
    limit = rank;
  }
}

int64_t Law::row_mass() const {
  int64_t sum = 0;
  alignas(64) float buffer[kBlock], masses[kBlock];
  for (int64_t b = 0; b < row_.blocks(); ++b) {
    if (!(t_of(maxima_[b]) >= -40.0f)) continue;
    const float* l = row_.load(b, buffer);
    masses_of(l, masses);
    sum += sum_of(masses);
  }
  return sum;
}

// The mass ranked above a token, and all mass of the blocks that reach it.
std::pair<int64_t, int64_t> Law::mass_above(const Rank& rank) const {
  int64_t above = 0, scanned = 0;
  alignas(64) float buffer[kBlock], masses[kBlock];
  for (int64_t b = 0; b < row_.blocks(); ++b) {
    if (!(maxima_[b] >= rank.logit)) continue;
    const float* l = row_.load(b, buffer);
    masses_of(l, masses);
    scanned += sum_of(masses);
    const int32_t id = static_cast<int32_t>(b * kBlock), end = static_cast<int32_t>(rank.id);
    for (int i = 0; i < kBlock; ++i)
      masses[i] = (l[i] > rank.logit || (l[i] == rank.logit && id + i < end)) ? masses[i] : 0.0f;
    above += sum_of(masses);
  }
  return {above, scanned};
}

void Law::narrow_row() {
  if (filters_.top_p < 1.0f) cut_row_at_top_p(filters_.top_p, row_mass());
  total_ = 0;
  alignas(64) float masses[kBlock];
  for (int64_t b = 0; b < row_.blocks(); ++b) {
    if (block_masses(b, masses)) total_ += sum_of(masses);
  }
}

// Exact end of the top-p prefix: masses by bins of t, then the one bin where theta is crossed, ranked.
void Law::cut_row_at_top_p(float top_p, int64_t total) {
  constexpr int kBins = 1024;
  const int64_t limit = theta(top_p, total);
  std::vector<int64_t> bins(kBins, 0);
  const auto bin_of = [](float t) { return static_cast<int>(std::clamp(-t * 25.6f, 0.0f, kBins - 1.0f)); };
  alignas(64) float buffer[kBlock];
  const auto each = [&](auto&& visit) {
    for (int64_t b = 0; b < row_.blocks(); ++b) {
      if (!(t_of(maxima_[b]) >= -40.0f)) continue;
      const float* l = row_.load(b, buffer);
      for (int i = 0; i < kBlock; ++i) {
        const float t = t_of(l[i]);
        if (t >= -40.0f) visit(l[i], b * kBlock + i, t);
      }
    }
  };
  each([&](float, int64_t, float t) { bins[bin_of(t)] += mass_of(exp2_pinned(t)); });
  int64_t above = 0;
  int crossing = 0;
  while (crossing < kBins - 1 && above + bins[crossing] < limit) above += bins[crossing++];
  candidates_.clear();
  each([&](float l, int64_t id, float t) {
    if (bin_of(t) == crossing) candidates_.push_back({l, id});
  });
  std::sort(candidates_.begin(), candidates_.end(), by_rank);
  for (const Candidate& c : candidates_) {
    if (!(above < limit)) break;
    end_ = {c.logit, c.id + 1};
    above += mass_of(weight(c.logit));
  }
  candidates_.clear();
}

int64_t Law::draw_from(int64_t fraction, int64_t total, int64_t without) const {
  if (!listed_) return draw_by_blocks(*this, fraction, total, without);
  const int64_t threshold = scaled_threshold(fraction, total);
  std::vector<Candidate> kept;
  for (const Candidate& c : candidates_)
    if (keeps(c.logit, c.id) && c.id != without) kept.push_back(c);
  std::sort(kept.begin(), kept.end(), [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  int64_t prefix = 0;
  for (const Candidate& c : kept) {
    prefix += mass_of(weight(c.logit));
    if (prefix > threshold) return c.id;
  }
  return -1;  // unreachable: the threshold is below the total
}

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
