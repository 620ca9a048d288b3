// A draw from the residual of two whole laws in one pass over both rows, before their totals are known.
//
// With totals P and Q, a token of masses p and q has the residual max(0, s p / P - q / Q). Bounds on the totals tell for
// most tokens on which side of 0 it is; the others are put aside. Of those surely above 0 the sums of p and of q are
// enough: when the pass is over, P and Q are known, and so is the residual of each tile, but for the rounding of its
// tokens. Bounds on that tell which token is drawn, or that it takes all roundings to tell.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <mutex>
#include <optional>
#include <vector>

#include "law.h"
#include "threads.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

class QuickResidual {
 public:
  static bool can_draw(const Law& p, const Law& q) {
    return p.can_be_rough() && q.can_be_rough() && p.row().blocks() == q.row().blocks();
  }

  QuickResidual(const Law& p, const Law& q, float scale) : p_(p), q_(q), scale_(scale) {
    const Range in_p = range_of(p), in_q = range_of(q);
    p_factor_ = static_cast<float>(scale / in_p.middle);
    q_factor_ = static_cast<float>(1.0 / in_q.middle);
    least_ = static_cast<float>(in_p.middle / in_p.high / (in_q.middle / in_q.low) * (1.0 - kRounding));
    most_ = static_cast<float>(in_p.middle / in_p.low / (in_q.middle / in_q.high) * (1.0 + kRounding));
  }

  // The token, or nothing where bounds do not tell.
  std::optional<int64_t> draw(int64_t fraction) {
    tiles_.assign((p_.row().blocks() + kTile - 1) / kTile, {});
    parallel_rows(static_cast<int64_t>(tiles_.size()), kSharedBlocks / kTile,
                  [&](int64_t first, int64_t last) { read(first, last); });
    if (full_) return std::nullopt;
    p_.know_total(p_total_);
    q_.know_total(q_total_);
    const float p_factor = reciprocal(p_total_), q_factor = reciprocal(q_total_);
    for (const Aside& a : aside_)
      tiles_[a.id / (kTile * kBlock)].aside += residual_mass(scale_, a.p * p_factor, a.q * q_factor);
    return find(static_cast<double>(fraction) * 0x1p-62, p_factor, q_factor);
  }

 private:
  struct Range {
    double low, middle, high;
  };
  static Range range_of(const Law& law) {
    const auto [low, high] = law.total_bounds();
    return {static_cast<double>(low), (static_cast<double>(low) + static_cast<double>(high)) / 2,
            static_cast<double>(high)};
  }

  struct Tile {
    int64_t p = 0, q = 0;  // masses of the tokens surely above 0
    int64_t aside = 0;     // residual masses of the tokens put aside
  };
  struct Aside {
    int32_t id;
    float p, q;
  };

  // Sums of the tiles [first, last), and what has to be put aside there.
  void read(int64_t first, int64_t last) {
    IntegerSum p_total, q_total;
    std::vector<Aside> aside;
    const auto tiles = static_cast<int64_t>(tiles_.size());
    for (int64_t tile = first; tile < last && !full_; ++tile) {
      // A share for each tile, and some to begin with: laws that are too alike are soon known.
      const int64_t most = kMostAside * (last - first + 7 * (tile + 1 - first)) / (8 * tiles);
      IntegerSum p_sum, q_sum;
      for (int64_t b = tile * kTile; b < std::min((tile + 1) * kTile, p_.row().blocks()); ++b) {
        alignas(64) float p[kBlock], q[kBlock];
        if (!masses(b, p, q)) continue;
        uint64_t open = 0;
        for (int i = 0; i < kBlock; i += kLanes) {
          const Floats target = load(p + i) * p_factor_, draft = load(q + i) * q_factor_;
          const uint32_t sure = above(target * least_, draft);
          p_total.add(load(p + i), sure, p_sum);
          q_total.add(load(q + i), sure, q_sum);
          open |= static_cast<uint64_t>(above(target * most_, draft) & ~sure) << i;
        }
        if (static_cast<int64_t>(aside.size()) + std::popcount(open) > most) full_ = true;
        for (; open && !full_; open &= open - 1) {
          const int i = std::countr_zero(open);
          aside.push_back({static_cast<int32_t>(b * kBlock + i), p[i], q[i]});
        }
      }
      tiles_[tile] = {p_sum.total(), q_sum.total(), 0};
    }
    const std::lock_guard lock(mutex_);
    p_total_ += p_total.total();
    q_total_ += q_total.total();
    if (aside_.empty()) {
      aside_.swap(aside);
    } else {
      aside_.insert(aside_.end(), aside.begin(), aside.end());
    }
  }

  // Of both laws; false if all are 0.
  DRAFTPROOF_INLINE bool masses(int64_t b, float* p, float* q) const {
    const bool in_p = p_.whole_masses(b, p), in_q = q_.whole_masses(b, q);
    if (!in_p) std::fill(p, p + kBlock, 0.0f);
    if (!in_q) std::fill(q, q + kBlock, 0.0f);
    return in_p || in_q;
  }

  // The residual mass of a tile, and how far it may be off: each product of a token and the difference are rounded, and
  // the draft's part is below the target's. Then the mass is truncated.
  struct Sum {
    double value = 0.0, error = 0.0;
    void operator+=(const Sum& other) {
      value += other.value;
      error += other.error;
    }
  };
  Sum sum_of(const Tile& tile, float p_factor, float q_factor) const {
    const double p = static_cast<double>(tile.p) * p_factor * scale_, q = static_cast<double>(tile.q) * q_factor;
    const double rounding = (scale_ == 1.0f ? 2.0 : 3.0) * 0x1.01p-24;
    return {(p - q) * 0x1p61 + static_cast<double>(tile.aside), p * rounding * 0x1p61 + kTile * kBlock};
  }

  // The token at which the residual so far exceeds `fraction` of all: the sums elsewhere are off by so much that it
  // makes a difference only near the borders of a token.
  std::optional<int64_t> find(double fraction, float p_factor, float q_factor) const {
    std::vector<Sum> sums;
    Sum all, before;
    for (const Tile& tile : tiles_) all += sums.emplace_back(sum_of(tile, p_factor, q_factor));
    size_t tile = 0;
    for (; tile + 1 < sums.size() && before.value + sums[tile].value <= fraction * all.value; ++tile)
      before += sums[tile];
    const double after = all.value - before.value - sums[tile].value;
    const double after_error = all.error - before.error - sums[tile].error;
    const std::vector<int64_t> exact = residuals(static_cast<int64_t>(tile), p_factor, q_factor);
    double whole = before.value + after;
    for (const int64_t mass : exact) whole += static_cast<double>(mass);
    const double error = (1.0 - fraction) * before.error + fraction * after_error + whole * 0x1p-40;
    double beyond = before.value - fraction * whole;
    if (tile > 0 && beyond >= -error) return std::nullopt;
    for (size_t i = 0; i < exact.size(); ++i) {
      if (exact[i] == 0) continue;
      beyond += static_cast<double>(exact[i]);
      if (beyond > error) return static_cast<int64_t>(tile) * kTile * kBlock + static_cast<int64_t>(i);
      if (beyond >= -error) return std::nullopt;
    }
    return std::nullopt;
  }

  std::vector<int64_t> residuals(int64_t tile, float p_factor, float q_factor) const {
    std::vector<int64_t> exact(kTile * kBlock);
    alignas(64) float p[kBlock], q[kBlock];
    for (int64_t b = 0; b < kTile && tile * kTile + b < p_.row().blocks(); ++b) {
      if (!masses(tile * kTile + b, p, q)) continue;
      for (int i = 0; i < kBlock; ++i)
        exact[b * kBlock + i] = residual_mass(scale_, p[i] * p_factor, q[i] * q_factor);
    }
    return exact;
  }

  static constexpr int64_t kTile = 16;        // blocks whose sums are kept
  static constexpr int64_t kMostAside = 4096;  // tokens: 48 KiB
  static constexpr double kRounding = 1e-6;   // of a few products in float32

  const Law &p_, &q_;
  float scale_, p_factor_, q_factor_;
  float least_, most_;  // bounds on what the ratio of target to draft may have to be multiplied with
  std::vector<Tile> tiles_;
  std::vector<Aside> aside_;
  int64_t p_total_ = 0, q_total_ = 0;
  std::atomic<bool> full_{false};  // too many to put aside
  std::mutex mutex_;
};

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
