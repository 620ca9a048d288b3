// What follows a draft: a draw from the residual, or from the row after the last draft.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "quick_residual.h"
#include "sequence.h"
#include "threads.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

// The residual of a target law against a draft law: its sum, and a draw from it.
template <class L>
class Residual {
 public:
  Residual(const L& p, const L* q, int64_t token, float scale)
      : p_(p), q_(q), token_(token), scale_(scale), p_factor_(reciprocal(p.total())),
        q_factor_(q ? reciprocal(q->total()) : 0.0f) {}

  int64_t sum() {
    if (!q_) return p_.total() - p_.mass(token_);
    int64_t total = 0;
    if constexpr (requires { p_.candidates(); }) {
      if (p_.listed()) {
        list_.clear();
        for (const Candidate& c : p_.candidates())
          if (p_.keeps(c.logit, c.id)) list_.push_back({c.id, mass(p_.mass(c.id), q_->mass(c.id))});
        std::sort(list_.begin(), list_.end());
        for (const auto& [id, mass] : list_) total += mass;
        return total;
      }
    }
    sums_.resize((p_.row().blocks() + kTile - 1) / kTile);
    parallel_rows(static_cast<int64_t>(sums_.size()), kSharedBlocks / kTile, [&](int64_t first, int64_t last) {
      for (int64_t tile = first; tile < last; ++tile) sums_[tile] = sum_of_tile(tile * kTile);
    });
    for (const int64_t sum : sums_) total += sum;
    return total;
  }

  // After `sum`, which gave `total` above 0.
  int64_t draw(int64_t fraction, int64_t total) {
    if (!q_) return p_.draw_without(fraction, token_, total);
    const int64_t threshold = scaled_threshold(fraction, total);
    int64_t prefix = 0;
    if (p_.listed()) {
      for (const auto& [id, mass] : list_)
        if ((prefix += mass) > threshold) return id;
      return -1;  // unreachable: the threshold is below the total
    }
    size_t tile = 0;
    for (; tile + 1 < sums_.size() && prefix + sums_[tile] <= threshold; ++tile) prefix += sums_[tile];
    alignas(64) float rest[kBlock];
    for (int64_t b = static_cast<int64_t>(tile) * kTile; b < p_.row().blocks(); ++b) {
      if (!block(b, rest)) continue;
      for (int i = 0; i < kBlock; ++i)
        if ((prefix += static_cast<int64_t>(rest[i])) > threshold) return b * kBlock + i;
    }
    return -1;  // unreachable: the threshold is below the total
  }

 private:
  int64_t mass(int64_t p, int64_t q) const {
    return residual_mass(scale_, static_cast<float>(p) * p_factor_, static_cast<float>(q) * q_factor_);
  }
  int64_t sum_of_tile(int64_t start) const {
    WideSum sum;
    alignas(64) float rest[kBlock];
    for (int64_t b = start; b < std::min(start + kTile, p_.row().blocks()); ++b) {
      if (!block(b, rest)) continue;
      for (int i = 0; i < kBlock; i += kLanes) sum.add(load(rest + i));
    }
    return sum.total();
  }
  // The residual masses of a block, not yet truncated.
  bool block(int64_t b, float* rest) const {
    alignas(64) float q[kBlock];
    if (!p_.block_masses(b, rest)) return false;
    const bool drafted = b < q_->row().blocks() && q_->block_masses(b, q);
    for (int i = 0; i < kBlock; i += kLanes) {
      const Floats target = load(rest + i) * p_factor_ * scale_;
      const Floats draft = drafted ? load(q + i) * q_factor_ : Floats{};
      store(rest + i, larger(target - draft, Floats{}) * 0x1p61f);
    }
    return true;
  }

  static constexpr int64_t kTile = 16;  // blocks whose sum is kept
  const L& p_;
  const L* q_;
  int64_t token_;
  float scale_, p_factor_, q_factor_;
  std::vector<int64_t> sums_;  // of each tile
  std::vector<std::pair<int64_t, int64_t>> list_;
};

template <class L>
void draw_bonus(const Sequence& s, L& p, int64_t position, Outcome& outcome) {
  outcome.status |= s.prepare(p, true, position);
  if (outcome.status & kDead) return;
  p.narrow();
  outcome.next_token = p.draw(s.emit(position));
}

template <class L>
void draw_correction(const Sequence& s, const L& p, const L* q, float scale, int64_t position, Outcome& outcome) {
  if constexpr (std::is_same_v<L, Law>)
    if (q && QuickResidual::can_draw(p, *q))
      if (const auto token = QuickResidual(p, *q, scale).draw(s.emit(position))) {
        outcome.next_token = *token;
        return;
      }
  Residual<L> residual(p, q, s.draft(position), scale);
  const int64_t total = residual.sum();
  if (total == 0) {
    outcome.status |= kResidualFallback;
    outcome.next_token = p.draw(s.emit(position));
  } else {
    outcome.next_token = residual.draw(s.emit(position), total);
  }
}

// Prepare both laws of a tested position; false if one is dead. All that a test will ask of a row is found while the
// row is in the cache.
template <class L>
bool prepare_pair(const Sequence& s, L& p, L& q, int64_t position, Outcome& outcome) {
  const auto prepare = [&](L& law, bool target) {
    const int32_t status = s.prepare(law, target, position);
    outcome.status |= status;
    if (status & kDead) return;
    law.narrow();
    law.total_bounds();
  };
  prepare(p, true);
  if (!s.point_mass()) prepare(q, false);
  return !(outcome.status & kDead);
}

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
