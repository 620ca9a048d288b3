// The one pass over a row that every operation makes: block maxima, and for a race bounds on the blocks' arrivals.
#include <cmath>

#include "law.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {
namespace {

// log2 of the words plus a constant, never too large: the fraction field of a float lies below its logarithm.
Floats logarithm_below(Bits words) {
  const Floats halves = __builtin_convertvector((Ints)(words >> 1), Floats) + 0.25f;
  return __builtin_convertvector((Ints)halves, Floats) * 0x1p-23f;
}

}  // namespace

int32_t Law::prepare(const RowInput& input, const Patches& history, const FilterInput& filters,
                     const StreamInput* stream, bool weighed) {
  filters_ = filters;
  row_.prepare(input, history);
  greedy_ = filters.temperature == 0.0f;
  listed_ = !greedy_ && filters.top_k < row_.vocab();
  temperature_ = greedy_ ? 1.0f : filters.temperature;
  scale_ = scale_of(temperature_);
  int32_t status;
  if (stream && !greedy_ && !listed_) {
    const WideStream noise(stream_of(*stream, Purpose::race_block, Purpose::draft_block));
    status = scan(&noise, false);
  } else {
    // At a scale near 0 the distance to the maximum may overflow where that to the reference does not.
    status = scan(nullptr, weighed && !greedy_ && !listed_ && scale_ > 0x1p-122f);
  }
  if (status) return status;
  end_ = {-kInfinity, row_.vocab()};
  narrowed_ = false;
  total_ = -1;
  total_bounds_ = {-1, -1};
  coarse_total_ = -1.0;
  candidates_.clear();
  min_t_ = !greedy_ && filters.min_p > 0.0f ? log2_pinned(filters.min_p) : -kInfinity;
  if (listed_) list_top_k();
  return 0;
}

int32_t Law::scan(const WideStream* noise, bool weighed) {
  const int64_t blocks = row_.blocks(), padded = (blocks + kLanes - 1) / kLanes * kLanes;
  maxima_.resize(padded);
  if (noise) bounds_.resize(padded);
  rough_total_ = weighed && row_.touched().empty() ? 0.0 : -1.0;  // a penalty may raise a logit
  NanWatch nan;
  int64_t first = 0;
  if (row_.direct())
    first = row_.visit_maxima(
        nan, [&](int64_t group, Floats maxima) DRAFTPROOF_ALWAYS { scan_group(group, maxima, noise); });
  alignas(64) float buffer[kBlock];
  for (; first < blocks; first += kLanes) {
    const auto get = [&](int64_t b) {
      return b < blocks ? values_of(row_.load(b, buffer)).maxima(nan) : all(-kInfinity);
    };
    scan_group(first, maxima<kLanes>(get, first), noise);
  }
  if (nan.seen()) return kNan;
  move_penalised_maxima();
  Floats largest = all(-kInfinity);
  for (int64_t b = 0; b < padded; b += kLanes) largest = larger(largest, load(&maxima_[b]));
  maximum_ = largest_lane(largest);
  return maximum_ == -kInfinity ? kEmptySupport : 0;
}

DRAFTPROOF_INLINE void Law::scan_group(int64_t first, Floats maxima, const WideStream* noise) {
  store(&maxima_[first], maxima);
  if (rough_total_ >= 0.0) weigh_group(first, maxima);
  if (!noise) return;
  const WideWords words = noise->from(first / 2);
  store(&bounds_[first], logarithm_below(WideWords::pair(words.w[0], words.w[2])) - maxima * scale_);
}

// While the group is in the nearest cache. A row without a reference, or far above it, has no rough weight.
[[gnu::noinline]] void Law::weigh_group(int64_t first, Floats maxima) {
  const float largest = largest_lane(maxima);
  if (first == 0) reference_ = largest;
  if (!(std::abs(reference_) < kInfinity && (largest - reference_) * scale_ <= kReach)) {
    rough_total_ = -1.0;
    return;
  }
  alignas(64) float buffer[kBlock];
  const Floats reference = all(reference_);
  Floats sum = {};
  for (int64_t b = first; b < std::min(first + kLanes, row_.blocks()); ++b) {
    const float* l = row_.load(b, buffer);
    sum += sum_of_block([&](int i) DRAFTPROOF_ALWAYS { return Fine::exp2(load(l + i) - reference, scale_); });
  }
  rough_total_ += sum_of_lanes(sum);
}

// Direct rows were read without penalties. A penalty moves a block's maximum only if the maximum is a penalised id, or
// a penalised logit has risen above it.
void Law::move_penalised_maxima() {
  alignas(64) float buffer[kBlock];
  for (const int32_t b : row_.touched()) {
    if (!row_.penalty_can_move(b, maxima_[b])) continue;
    NanWatch nan;
    const float before = maxima_[b];
    maxima_[b] = largest_lane(values_of(row_.load(b, buffer)).maxima(nan));
    // The bound of a larger maximum holds for a smaller one too; a raised one leaves no bound.
    if (maxima_[b] > before && static_cast<size_t>(b) < bounds_.size()) bounds_[b] = -kInfinity;
  }
}

int64_t Law::argmax() const {
  alignas(64) float buffer[kBlock];
  const Floats maximum = all(maximum_);
  for (int64_t first = 0; first < row_.blocks(); first += kLanes) {
    const uint32_t hits = reaching(load(&maxima_[first]), maximum);
    if (hits == 0) continue;
    const int64_t b = first + std::countr_zero(hits);
    const float* l = row_.load(b, buffer);
    for (int i = 0; i < kBlock; i += kLanes)
      if (const uint32_t found = reaching(load(l + i), maximum)) return b * kBlock + i + std::countr_zero(found);
  }
  return -1;  // unreachable: some block holds the maximum
}

// Not yet truncated.
DRAFTPROOF_INLINE Floats Law::masses_of(Floats logits) const {
  if (maximum_ == kInfinity) return logits == maximum_ ? all(kMassOne) : Floats{};
  return masses_at((logits - maximum_) * scale_);
}

bool Law::block_masses(int64_t b, float* masses) const {
  if (greedy_) {
    const int64_t only = end_.id - 1 - b * kBlock;
    for (int i = 0; i < kBlock; ++i) masses[i] = i == only ? kMassOne : 0.0f;
    return 0 <= only && only < kBlock;
  }
  if (!(maxima_[b] >= end_.logit) || !alive(b)) return false;
  alignas(64) float buffer[kBlock];
  const float* l = row_.load(b, buffer);
  for (int i = 0; i < kBlock; i += kLanes) store(masses + i, truncated(masses_of(load(l + i))));
  if (end_.logit > -kInfinity || min_t_ > -kInfinity)
    for (int i = 0; i < kBlock; ++i) {
      const int32_t id = static_cast<int32_t>(b * kBlock + i);
      const bool in = (l[i] > end_.logit || (l[i] == end_.logit && id < static_cast<int32_t>(end_.id))) &&
                      exponent(l[i], maximum_, scale_) >= min_t_;
      masses[i] = in ? masses[i] : 0.0f;
    }
  return true;
}

int64_t Law::kept() const {
  if (greedy_) return 1;
  int64_t count = 0;
  if (listed_) {
    for (const Candidate& c : candidates_) count += keeps(c.logit, c.id) && c.logit / temperature_ > -kInfinity;
    return count;
  }
  alignas(64) float buffer[kBlock];
  for (int64_t b = 0; b < row_.blocks(); ++b) {
    if (!(maxima_[b] >= end_.logit)) continue;
    const float* l = row_.load(b, buffer);
    for (int i = 0; i < kBlock; ++i)
      count += l[i] > -kInfinity && keeps(l[i], b * kBlock + i) && l[i] / temperature_ > -kInfinity;
  }
  return count;
}

int64_t Law::draw_without(int64_t fraction, int64_t token, int64_t total) const {
  if (!listed_) return draw_by_blocks(*this, fraction, total, token);
  const int64_t threshold = scaled_threshold(fraction, total);
  std::vector<Candidate> kept;
  for (const Candidate& c : candidates_)
    if (keeps(c.logit, c.id) && c.id != token) kept.push_back(c);
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
