// The filtered law of one row: every filter keeps a prefix of the ranking (logit descending, id ascending), so a law is
// the row, its maximum and scale, and where the prefix ends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "arithmetic.h"
#include "rough.h"
#include "row.h"
#include "simd.h"
#include "wide_philox.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

// A place in the ranking. Before: ranked strictly above.
struct Rank {
  float logit;
  int64_t id;
};
inline bool ranked_above(float logit, int64_t id, const Rank& r) {
  return logit > r.logit || (logit == r.logit && id < r.id);
}

struct Candidate {
  float logit;
  int64_t id;
};

// The row's own stream, or that of a draft.
inline Stream stream_of(const StreamInput& s, Purpose target, Purpose draft) {
  const bool own = s.draft_index < 0;
  return Stream(s.seed, s.offset, own ? target : draft, own ? 0u : static_cast<uint32_t>(s.draft_index));
}

// Blocks of one row that are worth another thread, where every id costs a power of two. Fewer do not pay: the row is in
// the cache of the first thread.
constexpr int64_t kSharedBlocks = 4096;

// The integer masses of a block.
inline int64_t sum_of(const float* masses) {
  IntegerSum sum;
  for (int i = 0; i < kBlock; i += kLanes) sum.add(load(masses + i));
  return sum.total();
}

// First id whose prefix of masses exceeds floor(fraction * total / 2^62), with one token's mass taken as 0; `total` is
// the sum of the rest and above 0.
template <class L>
int64_t draw_by_blocks(const L& law, int64_t fraction, int64_t total, int64_t without) {
  const int64_t threshold = scaled_threshold(fraction, total);
  int64_t prefix = 0;
  alignas(64) float masses[kBlock];
  for (int64_t b = 0; b < law.row().blocks(); ++b) {
    if (!law.block_masses(b, masses)) continue;
    if (without >= 0 && without / kBlock == b) masses[without % kBlock] = 0.0f;
    const int64_t block = sum_of(masses);
    if (prefix + block <= threshold) {
      prefix += block;
      continue;
    }
    for (int i = 0; i < kBlock; ++i) {
      prefix += static_cast<int64_t>(masses[i]);
      if (prefix > threshold) return b * kBlock + i;
    }
  }
  return -1;  // unreachable: the threshold is below the total
}

// How many powers of two a logit may weigh more than the reference of a row's rough weight, and the maximum less.
constexpr float kReach = 60.0f;

class Law {
 public:
  // Reads the row once. Returns the status; nothing else may be called on a dead row. A race over the row needs its
  // `stream` now, and who will ask for `total_bounds` should say so: which blocks can win and what the row roughly
  // weighs is found on the way.
  int32_t prepare(const RowInput& input, const Patches& history, const FilterInput& filters,
                  const StreamInput* stream = nullptr, bool weighed = false);

  // Lowest id among the maxima.
  int64_t argmax() const;

  // The token that wins the keyed race over the kept set.
  int64_t race(const StreamInput& stream) {
    if (greedy_) return argmax();
    return listed_ ? race_listed(stream) : race_row(stream);
  }

  // Find the end of the kept prefix and its mass. Needed for anything but `race`.
  void narrow() {
    if (narrowed_) return;
    narrowed_ = true;
    if (greedy_) {
      end_ = {maximum_, argmax() + 1};
      total_ = int64_t{1} << 40;
    } else if (listed_) {
      narrow_listed();
    } else {
      narrow_row();
    }
  }

  // The mass of the kept set. After `narrow`.
  int64_t total() const;
  void know_total(int64_t total) const { total_ = total; }  // found by someone else
  // The same, or bounds on it where those are cheaper.
  struct Bounds {
    int64_t low, high;
  };
  Bounds total_bounds() const;

  // Weights of a block's logits within 0.35 %, times `factor`; of the kept set, where `can_be_rough`.
  bool can_be_rough() const { return whole() && maximum_ < kInfinity && scale_ < 0x1p100f; }
  DRAFTPROOF_INLINE Floats rough_weights(Floats logits, float factor) const {
    return Fine::exp2(logits - maximum_, scale_) * factor;
  }
  // The masses of a block of a whole law, where `can_be_rough`; false if all are 0.
  DRAFTPROOF_INLINE bool whole_masses(int64_t block, float* masses) const {
    if (!alive(block)) return false;
    alignas(64) float buffer[kBlock];
    const float* l = row_.load(block, buffer);
    for (int i = 0; i < kBlock; i += kLanes)
      store(masses + i, truncated(masses_at((load(l + i) - maximum_) * scale_)));
    return true;
  }
  float t_of(float logit) const { return exponent(logit, maximum_, scale_); }
  float weight(float logit) const { return exp2_pinned(t_of(logit)); }
  float logit(int64_t id) const { return row_.at(id); }
  const Row& row() const { return row_; }
  float temperature() const { return temperature_; }
  bool listed() const { return listed_; }
  bool greedy() const { return greedy_; }
  const std::vector<Candidate>& candidates() const { return candidates_; }  // by rank, top-k survivors
  // By rank, the first `count` of the row without filters, as far as they reach `distance` below the maximum.
  const std::vector<Candidate>& largest(int64_t count, float distance);

  // Whether a token is in the kept set, for logits above -inf. After `narrow`.
  bool keeps(float logit, int64_t id) const { return ranked_above(logit, id, end_) && t_of(logit) >= min_t_; }

  int64_t mass(int64_t id) const {
    if (id >= row_.vocab()) return 0;
    const float l = row_.at(id);
    if (!(l > -kInfinity) || !keeps(l, id)) return 0;
    return greedy_ ? int64_t{1} << 40 : mass_of(weight(l));
  }

  // The masses of a block inside the kept set; false if there are none. After `narrow`.
  bool block_masses(int64_t block, float* masses) const;

  // Tokens of the kept set whose divided logit is above -inf, as filter_logits shows them.
  int64_t kept() const;

  // Draw by inverse CDF from the kept set. After `narrow`.
  int64_t draw(int64_t fraction) const { return draw_without(fraction, -1, total()); }

  // The same with one token's mass set to 0. The rest has mass `total`, above 0.
  int64_t draw_without(int64_t fraction, int64_t token, int64_t total) const;

 private:
  // scan.cpp
  int32_t scan(const WideStream* noise, bool weighed);
  void scan_group(int64_t first, Floats maxima, const WideStream* noise);
  void weigh_group(int64_t first, Floats maxima);
  void move_penalised_maxima();
  Floats masses_of(Floats logits) const;
  bool alive(int64_t block) const { return t_of(maxima_[block]) >= -40.0f; }

  // top_k.cpp
  void list_top_k();
  void list_reaching(float lowest);
  int64_t maxima_reaching(float bound) const;
  int64_t logits_reaching(float bound) const;
  float bound_of_kth(int64_t k) const;
  int64_t listed_limit() const;
  void narrow_listed();
  int64_t race_listed(const StreamInput& stream) const;

  // race.cpp
  struct Winner {
    float key;
    int64_t id;
    float logit;
  };
  struct Race;
  int64_t race_row(const StreamInput& stream);
  void run(Race& race) const;
  void enter_blocks(Race& race) const;
  void enter_block(Race& race, int64_t block, const float* logits, float least, int holder) const;
  void enter_id(Race& race, int64_t id, float logit, float least, bool holds) const;
  void enter_ids(Race& race) const;
  static void finish(Winner& best, float key, float logit, int64_t id);
  float heaviest(int64_t block) const;
  uint64_t ids_above(const float* logits, float lowest) const;
  Floats highest_bound(float key) const;
  int64_t least_bound() const;

  // top_p.cpp
  struct Above {
    int64_t above, total;
  };
  // Whether no filter takes anything.
  bool whole() const { return !greedy_ && !listed_ && end_.logit == -kInfinity && min_t_ == -kInfinity; }
  bool top_p_holds(const Rank& rank) const;
  std::optional<bool> roughly_holds(const Rank& rank) const;
  int64_t theta_of(int64_t reaching, int64_t below) const;
  bool held(const Bounds& reaching, const Bounds& below) const;
  bool refused(const Rank& rank, const Bounds& reaching, const Bounds& below) const;
  template <class Rough, class Counts>
  double rough_sum(int64_t start, float least, const Counts& counts) const;
  template <class Rough>
  Bounds bounds_of(double sum) const;
  Above exact_above(const Rank& rank) const;
  int64_t mass_of_row() const;
  int64_t mass_kept() const;
  void narrow_row();
  void cut_row_at_top_p(int64_t limit);

  FilterInput filters_;
  Row row_;
  std::vector<float> maxima_;  // of each block, -inf for padding
  std::vector<float> bounds_;  // of each block: no key of its tokens has a smaller binary logarithm, but for a constant
  std::vector<Candidate> candidates_, unsorted_;
  float maximum_ = 0.0f, scale_ = 1.0f, temperature_ = 1.0f, min_t_ = -kInfinity;
  float reference_ = 0.0f;    // a logit whose weight is 1 in
  double rough_total_ = 0.0;  // the row's rough weight so far; negative if it is not known
  mutable double coarse_total_ = -1.0;  // what the coarse weights of the row sum to, once a check has found it
  bool greedy_ = false, listed_ = false, narrowed_ = false;
  Rank end_{};
  mutable int64_t total_ = -1;  // once it is known
  mutable Bounds total_bounds_{-1, -1};
};

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
