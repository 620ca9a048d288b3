// The filtered law of one row: every filter keeps a prefix of the ranking (logit descending, id ascending), so a law is
// the row, its maximum and scale, and where the prefix ends.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "arithmetic.h"
#include "philox.h"
#include "row.h"

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
// Masses are integers, and 64 of them stay below 2^53: the sum is exact in double, in any order.
inline int64_t sum_of(const float* masses) {
  double lanes[8] = {};
  for (int i = 0; i < kBlock; i += 8)
    for (int j = 0; j < 8; ++j) lanes[j] += static_cast<double>(masses[i + j]);
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return static_cast<int64_t>(sum);
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

inline bool by_rank(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

class Law {
 public:
  // Reads the row once. Returns the status; nothing else may be called on a dead row. A race over the row needs its
  // `stream` now: the holders' logits are picked up on the way.
  int32_t prepare(const RowInput& input, const Patches& history, const FilterInput& filters,
                  const StreamInput* stream = nullptr) {
    filters_ = filters;
    row_.prepare(input, history);
    greedy_ = filters.temperature == 0.0f;
    listed_ = !greedy_ && filters.top_k < row_.vocab();
    racing_ = stream && !greedy_ && !listed_;
    if (racing_) block_noise(*stream);
    temperature_ = greedy_ ? 1.0f : filters.temperature;
    scale_ = scale_of(temperature_);
    const int32_t status = block_maxima();
    if (status) return status;
    end_ = {-kInfinity, row_.vocab()};
    narrowed_ = false;
    candidates_.clear();
    min_t_ = !greedy_ && filters.min_p > 0.0f ? log2_pinned(filters.min_p) : -kInfinity;
    if (listed_) list_top_k();
    return 0;
  }

  // Lowest id among the maxima.
  int64_t argmax() const {
    alignas(64) float buffer[kBlock];
    for (int64_t b = 0; b < row_.blocks(); ++b) {
      if (maxima_[b] != maximum_) continue;
      const float* l = row_.load(b, buffer);
      for (int i = 0; i < kBlock; ++i)
        if (l[i] == maximum_) return b * kBlock + i;
    }
    return -1;  // unreachable: some block holds the maximum
  }

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

  int64_t total() const { return total_; }
  float t_of(float logit) const { return exponent(logit, maximum_, scale_); }
  float weight(float logit) const { return exp2_pinned(t_of(logit)); }
  float logit(int64_t id) const { return row_.at(id); }
  const Row& row() const { return row_; }
  float maximum() const { return maximum_; }
  float temperature() const { return temperature_; }
  bool listed() const { return listed_; }
  bool greedy() const { return greedy_; }
  const std::vector<Candidate>& candidates() const { return candidates_; }  // by rank, top-k survivors

  // Whether a token is in the kept set, for logits above -inf. After `narrow`.
  bool keeps(float logit, int64_t id) const { return ranked_above(logit, id, end_) && t_of(logit) >= min_t_; }

  int64_t mass(int64_t id) const {
    if (id >= row_.vocab()) return 0;
    const float l = row_.at(id);
    if (!(l > -kInfinity) || !keeps(l, id)) return 0;
    return greedy_ ? int64_t{1} << 40 : mass_of(weight(l));
  }

  // The masses of a block inside the kept set; false if there are none. After `narrow`.
  bool block_masses(int64_t b, float* masses) const {
    if (!(maxima_[b] >= end_.logit) || !(t_of(maxima_[b]) >= -40.0f)) return false;
    alignas(64) float buffer[kBlock];
    const float* l = row_.load(b, buffer);
    if (greedy_) {
      for (int i = 0; i < kBlock; ++i) masses[i] = keeps(l[i], b * kBlock + i) ? kMassOne : 0.0f;
      return true;
    }
    masses_of(l, masses);
    if (end_.logit > -kInfinity || min_t_ > -kInfinity)
      for (int i = 0; i < kBlock; ++i) {
        const int32_t id = static_cast<int32_t>(b * kBlock + i);
        const bool in = (l[i] > end_.logit || (l[i] == end_.logit && id < static_cast<int32_t>(end_.id))) &&
                        exponent(l[i], maximum_, scale_) >= min_t_;
        masses[i] = in ? masses[i] : 0.0f;
      }
    return true;
  }

  // Tokens of the kept set whose divided logit is above -inf, as filter_logits shows them.
  int64_t kept() const {
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

  // Draw by inverse CDF from the kept set. After `narrow`.
  int64_t draw(int64_t fraction) const {
    return draw_from(fraction, total_, -1);
  }

  // The same with one token's mass set to 0. The rest has mass `total`, above 0.
  int64_t draw_without(int64_t fraction, int64_t token, int64_t total) const {
    return draw_from(fraction, total, token);
  }

 private:
  int32_t block_maxima();
  void list_top_k();
  int64_t race_listed(const StreamInput& stream) const;
  int64_t race_row(const StreamInput& stream);
  void narrow_listed();
  void narrow_row();
  int64_t draw_from(int64_t fraction, int64_t total, int64_t without) const;

  void masses_of(const float* logits, float* masses) const {
    for (int i = 0; i < kBlock; ++i)
      masses[i] = std::trunc(exp2_pinned(exponent(logits[i], maximum_, scale_)) * kMassOne);
  }
  int64_t count_reaching(float bound) const;
  float bound_of_kth(int64_t k) const;

  struct Winner {
    float key;
    int64_t id;
    float logit;
  };
  Winner race_above(const StreamInput& stream, const Rank& limit);
  void expand(const Stream& stream, int64_t block, const Rank& limit, Winner& best) const;
  void block_noise(const StreamInput& stream);
  int64_t row_mass() const;
  struct Bounds {
    int64_t low, high, above_low, above_high;
  };
  Bounds rough_masses(const Rank& rank) const;
  bool top_p_holds(const Rank& rank);
  std::pair<int64_t, int64_t> mass_above(const Rank& rank) const;
  void cut_row_at_top_p(float top_p, int64_t total);

  FilterInput filters_;
  Row row_;
  std::vector<float> maxima_;  // of each block
  std::vector<float> least_;   // M_b
  std::vector<uint8_t> holder_;
  std::vector<float> held_;    // the holders' logits
  std::vector<Candidate> candidates_;
  std::vector<float> scratch_;
  float maximum_ = 0.0f, scale_ = 1.0f, temperature_ = 1.0f, min_t_ = -kInfinity;
  bool greedy_ = false, listed_ = false, racing_ = false, narrowed_ = false;
  Rank end_{};
  int64_t total_ = 0;
  int64_t whole_ = -1;  // the row's mass before filters, once it is needed
};

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
