// Block verification (Sun et al., 2025).
#pragma once

#include <optional>
#include <vector>

#include "residual.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

// Rule block. Which prefix is taken depends on all pairs of rows, but mostly bounds decide, from rough weights; exact
// masses are formed where they leave a doubt, and to draw.
template <class L>
class Block {
 public:
  struct Pair {
    L p, q;
  };

  Block(const Sequence& s, std::vector<Pair>& pairs) : s_(s), pairs_(pairs), n_(s.ends.length) {
    if (static_cast<int64_t>(pairs.size()) <= n_) pairs.resize(n_ + 1);
  }

  Outcome decide() {
    Outcome outcome;
    scales_.assign(n_ + 1, {1.0f, 1.0f});
    accepted_.assign(n_ + 1, std::nullopt);
    for (int64_t i = 0; i < n_; ++i) {
      if (!prepare_pair(s_, pairs_[i].p, pairs_[i].q, i, outcome)) return outcome;
      if (!s_.point_mass() && pairs_[i].q.mass(s_.draft(i)) == 0) outcome.status |= kOffSupport;
      // Now, while both rows are in the cache.
      if (i > 0) accepted_[i] = roughly_accepts(i, s_.accept(i - 1));
      bound_scale(i + 1);
    }
    int64_t tau = n_;
    while (tau > 0 && !accepts(tau)) --tau;
    outcome.accepted = tau;
    if (tau == n_) {
      draw_bonus(s_, pairs_[n_].p, n_, outcome);
    } else {
      draw_correction(s_, pairs_[tau].p, draft_law(tau), scale(tau), tau, outcome);
    }
    return outcome;
  }

 private:
  struct Range {
    float low, high;
  };

  const L* draft_law(int64_t i) const { return s_.point_mass() ? nullptr : &pairs_[i].q; }

  // P_{i+1} from P_i and totals: it falls with the total of p and rises with that of q, under rounding too.
  float next(float scale, int64_t i, int64_t p_total, int64_t q_total) const {
    const float joint = scale * (static_cast<float>(pairs_[i].p.mass(s_.draft(i))) * reciprocal(p_total));
    const float q =
        s_.point_mass() ? 1.0f : static_cast<float>(pairs_[i].q.mass(s_.draft(i))) * reciprocal(q_total);
    return joint == 0.0f ? 0.0f : joint >= q ? 1.0f : joint / q;
  }

  void bound_scale(int64_t i) {
    const auto p = pairs_[i - 1].p.total_bounds();
    const auto q = s_.point_mass() ? p : pairs_[i - 1].q.total_bounds();
    scales_[i] = {next(scales_[i - 1].low, i - 1, p.high, q.low), next(scales_[i - 1].high, i - 1, p.low, q.high)};
  }

  // P_i, exact: from the last one before it that bounds tell exactly, often 1.
  float scale(int64_t i) const {
    int64_t known = i;
    while (scales_[known].low != scales_[known].high) --known;
    float scale = scales_[known].low;
    for (int64_t j = known; j < i; ++j)
      scale = next(scale, j, pairs_[j].p.total(), s_.point_mass() ? 0 : pairs_[j].q.total());
    return scale;
  }

  // Whether the uniform of draft i - 1 lies below h_i.
  bool accepts(int64_t i) const {
    const float u = s_.accept(i - 1);
    if (i == n_) return u < scales_[i].low || (u < scales_[i].high && u < scale(i));
    if (accepted_[i]) return *accepted_[i];
    const float here = scale(i);
    const L& p = pairs_[i].p;
    const float rest =
        s_.point_mass()
            ? here * (static_cast<float>(p.total() - p.mass(s_.draft(i))) * reciprocal(p.total()))
            : static_cast<float>(Residual<L>(p, draft_law(i), s_.draft(i), here).sum()) * 0x1p-61f;
    const float whole = rest + (1.0f - here);
    return u < (whole > 0.0f ? rest / whole : 1.0f);
  }

  // h = S / (S + 1 - P) rises with S and with P; S is the residual's sum. Where P = 1, h is 1; as S is at most P but for
  // rounding, so is h. Rough weights are within 0.36 %, and so are the totals: p and q are within 0.75 % each, and S
  // moves no more than P does.
  std::optional<bool> roughly_accepts(int64_t i, float u) const {
    if (scales_[i].low == 1.0f) return true;
    if (u > scales_[i].high + 1e-5f) return false;
    if constexpr (requires(const L& l) { l.rough_weights(Floats{}, 1.0f); }) {
      const L& p = pairs_[i].p;
      if (s_.point_mass() || !p.can_be_rough() || !pairs_[i].q.can_be_rough()) return std::nullopt;
      const auto [least, most] = scales_[i];
      const double s = rough_residual(p, pairs_[i].q, least), doubt = 0.0075 * (least + 1.0);
      const double low = s - doubt, high = s + doubt + (most - least);
      if (low > 0.0 && u < low / (low + 1.0 - least) - 1e-5) return true;
      if (u > high / (high + 1.0 - most) + 1e-5) return false;
    }
    return std::nullopt;
  }

  static double rough_residual(const L& p, const L& q, float scale) {
    constexpr int64_t tile = 16;  // blocks summed in float32
    const auto factor = [](const L& law) {
      const auto [low, high] = law.total_bounds();
      return static_cast<float>(0x1p41 / (static_cast<double>(low) + static_cast<double>(high)));
    };
    const float p_factor = factor(p) * scale, q_factor = factor(q);
    const int64_t blocks = p.row().blocks(), drafted = q.row().blocks();
    std::vector<double> sums((blocks + tile - 1) / tile);
    parallel_rows(static_cast<int64_t>(sums.size()), kSharedBlocks / tile, [&](int64_t first, int64_t last) {
      alignas(64) float p_buffer[kBlock], q_buffer[kBlock];
      for (int64_t t = first; t < last; ++t) {
        Floats sum = {};
        for (int64_t b = t * tile; b < std::min((t + 1) * tile, blocks); ++b) {
          const float* target = p.row().load(b, p_buffer);
          const float* draft = b < drafted ? q.row().load(b, q_buffer) : nullptr;
          for (int i = 0; i < kBlock; i += kLanes) {
            const Floats in_q = draft ? q.rough_weights(load(draft + i), q_factor) : Floats{};
            sum += larger(p.rough_weights(load(target + i), p_factor) - in_q, Floats{});
          }
        }
        for (int i = 0; i < kLanes; ++i) sums[t] += sum[i];
      }
    });
    double total = 0.0;
    for (const double sum : sums) total += sum;
    return total;
  }

  const Sequence& s_;
  std::vector<Pair>& pairs_;
  const int64_t n_;
  std::vector<Range> scales_;  // bounds on each P_i
  std::vector<std::optional<bool>> accepted_;  // where bounds decide
};

template <class L>
Outcome block_rule(const Sequence& s) {
  thread_local std::vector<typename Block<L>::Pair> pairs;
  return Block<L>(s, pairs).decide();
}

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
