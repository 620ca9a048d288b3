// Chain verification, one sequence at a time: position by position, stopping at the first rejection where the rule does.
#include "verification.h"

#include <optional>

#include "sampling.h"
#include "threads.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {
namespace {

// Where a draft ends, and why.
struct Ends {
  int64_t length = 0;
  bool by_eos = false;
  int32_t status = 0;
};

struct Outcome {
  int64_t accepted = 0, next_token = -1;
  int32_t status = 0;
};

bool contains(const Ids& ids, int64_t token) {
  for (int64_t i = 0; i < ids.size; ++i)
    if (ids.ids[i * ids.stride] >= 0 && ids.ids[i * ids.stride] == token) return true;
  return false;
}

Ends ends_of(const Ids& drafts, int64_t count, const Ids& eos, int64_t vocab) {
  Ends ends;
  for (; ends.length < count; ++ends.length) {
    const int64_t token = drafts.ids[ends.length * drafts.stride];
    if (token < 0 || token >= vocab) {
      ends.status = token == -1 ? 0 : kInvalidDraftId;
      break;
    }
    if (contains(eos, token)) {
      ++ends.length;
      ends.by_eos = true;
      break;
    }
  }
  return ends;
}

// Everything the rules ask about one sequence.
struct Sequence {
  const VerifyBatch& batch;
  int64_t i;
  Ids drafts;
  Ends ends;

  int64_t draft(int64_t position) const { return drafts.ids[position * drafts.stride]; }

  Patches history(int64_t position) const {
    return {batch.history.row(i), {drafts.ids, position, drafts.stride}};
  }
  int32_t prepare(Law& law, bool target, int64_t position) const {
    const Filters& filters = target ? batch.filters : batch.draft_filters;
    const RowInput row = row_at(target ? batch.target : batch.draft, i, position, filters.penalty[i]);
    if (batch.rule == Rule::greedy) return law.prepare(row, history(position), {});
    if (batch.rule != Rule::match) return law.prepare(row, history(position), filters_at(filters, i));
    const StreamInput stream = race_at(position);
    return law.prepare(row, history(position), filters_at(filters, i), &stream);
  }
  // The target's own race, which rule match runs at each position.
  StreamInput race_at(int64_t position) const {
    return {static_cast<uint64_t>(batch.seed[i]), static_cast<uint64_t>(batch.offset[i] + position), -1};
  }
  int32_t prepare(ProbabilityLaw& law, bool target, int64_t position) const {
    return law.prepare(row_at(target ? batch.target : batch.draft, i, position, 1.0f));
  }
  Words words(Purpose purpose, int64_t offset, int64_t index) const {
    const Stream stream(static_cast<uint64_t>(batch.seed[i]), static_cast<uint64_t>(batch.offset[i] + offset), purpose,
                        static_cast<uint32_t>(index));
    return philox(stream, 0);
  }
  float accept(int64_t index) const {
    if (batch.uniform_accept) return batch.uniform_accept[i * batch.drafted + index];
    return uniform(words(Purpose::accept, 0, index).w[0]);
  }
  int64_t emit(int64_t index) const {
    if (batch.uniform_sample) return injected(index);
    const Words w = words(Purpose::emit, 0, index);
    return fraction_of(w.w[0], w.w[1]);
  }
  int64_t follow(int64_t position) const {
    if (batch.uniform_sample) return injected(position);
    const Words w = words(Purpose::emit, position, 0);
    return fraction_of(w.w[0], w.w[1]);
  }
  int64_t injected(int64_t index) const {
    return static_cast<int64_t>(batch.uniform_sample[i * (batch.drafted + 1) + index] * 0x1p62f);
  }
  bool point_mass() const { return batch.draft.data == nullptr; }
};

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

  // Whether u < h, h = S / (S + 1 - P) and S the residual's sum, from rough weights; none where they leave a doubt: p
  // and q are each within 0.4 %.
  std::optional<bool> roughly_accepts(float u) const {
    if constexpr (requires { p_.rough_weights(Floats{}, 1.0f); }) {
      if (!q_ || !p_.can_be_rough() || !q_->can_be_rough()) return std::nullopt;
      const double s = rough_sum(), rest = 1.0 - static_cast<double>(scale_), doubt = 0.004 * (scale_ + 1.0);
      if (s - doubt <= 0.0) return std::nullopt;
      const double low = (s - doubt) / (s - doubt + rest), high = (s + doubt) / (s + doubt + rest);
      if (u < low - 1e-5) return true;
      if (u > high + 1e-5) return false;
    }
    return std::nullopt;
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
  double rough_sum() const {
    std::vector<double> parts((p_.row().blocks() + kTile - 1) / kTile);
    parallel_rows(static_cast<int64_t>(parts.size()), kSharedBlocks / kTile, [&](int64_t first, int64_t last) {
      alignas(64) float p_buffer[kBlock], q_buffer[kBlock];
      for (int64_t tile = first; tile < last; ++tile) {
        Floats sum = {};
        for (int64_t b = tile * kTile; b < std::min((tile + 1) * kTile, p_.row().blocks()); ++b) {
          const float* p = p_.row().load(b, p_buffer);
          const bool drafted = b < q_->row().blocks();
          const float* q = drafted ? q_->row().load(b, q_buffer) : nullptr;
          for (int i = 0; i < kBlock; i += kLanes) {
            const Floats target = p_.rough_weights(load(p + i), p_factor_ * scale_ * kMassOne);
            const Floats draft = drafted ? q_->rough_weights(load(q + i), q_factor_ * kMassOne) : Floats{};
            sum += larger(target - draft, Floats{});
          }
        }
        for (int i = 0; i < kLanes; ++i) parts[tile] += sum[i];
      }
    });
    double total = 0.0;
    for (const double part : parts) total += part;
    return total;
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
float probability(const L& law, int64_t token) {
  return static_cast<float>(law.mass(token)) * reciprocal(law.total());
}

// Probabilities fall as the total grows, under rounding too: bounds on the totals decide most tests.
template <class L>
bool accepts(float u, const L& p, const L* q, int64_t token) {
  const float p_mass = static_cast<float>(p.mass(token));
  const float q_mass = q ? static_cast<float>(q->mass(token)) : 1.0f;
  const auto test = [&](int64_t p_total, int64_t q_total) {
    return u * (q ? q_mass * reciprocal(q_total) : 1.0f) < p_mass * reciprocal(p_total);
  };
  const auto in_p = p.total_bounds();
  const auto in_q = q ? q->total_bounds() : in_p;
  if (test(in_p.high, in_q.low)) return true;
  if (!test(in_p.low, in_q.high)) return false;
  return test(p.total(), q ? q->total() : 0);
}

template <class L>
void draw_bonus(const Sequence& s, L& p, int64_t position, Outcome& outcome) {
  outcome.status |= s.prepare(p, true, position);
  if (outcome.status & kDead) return;
  p.narrow();
  outcome.next_token = p.draw(s.emit(position));
}

template <class L>
void draw_correction(const Sequence& s, const L& p, const L* q, float scale, int64_t position, Outcome& outcome) {
  Residual<L> residual(p, q, s.draft(position), scale);
  const int64_t total = residual.sum();
  if (total == 0) {
    outcome.status |= kResidualFallback;
    outcome.next_token = p.draw(s.emit(position));
  } else {
    outcome.next_token = residual.draw(s.emit(position), total);
  }
}

// Prepare both laws of a tested position; false if one is dead.
template <class L>
bool prepare_pair(const Sequence& s, L& p, L& q, int64_t position, Outcome& outcome) {
  outcome.status |= s.prepare(p, true, position);
  if (!s.point_mass()) outcome.status |= s.prepare(q, false, position);
  if (outcome.status & kDead) return false;
  p.narrow();
  if (!s.point_mass()) q.narrow();
  return true;
}

template <class L>
Outcome token_rule(const Sequence& s, L& p, L& q) {
  Outcome outcome;
  for (int64_t i = 0; i < s.ends.length; ++i) {
    if (!prepare_pair(s, p, q, i, outcome)) return outcome;
    const L* drafted = s.point_mass() ? nullptr : &q;
    if (drafted && drafted->mass(s.draft(i)) == 0) outcome.status |= kOffSupport;
    if (!accepts(s.accept(i), p, drafted, s.draft(i))) {
      draw_correction(s, p, drafted, 1.0f, i, outcome);
      return outcome;
    }
    outcome.accepted = i + 1;
  }
  draw_bonus(s, p, s.ends.length, outcome);
  return outcome;
}

// Whether rule block takes the first i drafts, if it takes no more.
template <class L>
bool accepts_prefix(const Sequence& s, const L& p, const L& q, float scale, int64_t i) {
  const float u = s.accept(i - 1);
  float rest;
  if (s.point_mass()) {
    rest = scale * (static_cast<float>(p.total() - p.mass(s.draft(i))) * reciprocal(p.total()));
  } else {
    Residual<L> residual(p, &q, s.draft(i), scale);
    if (const auto accepted = residual.roughly_accepts(u)) return *accepted;
    rest = static_cast<float>(residual.sum()) * 0x1p-61f;
  }
  const float whole = rest + (1.0f - scale);
  return u < (whole > 0.0f ? rest / whole : 1.0f);
}

template <class L>
Outcome block_rule(const Sequence& s, L& p, L& q) {
  Outcome outcome;
  const int64_t n = s.ends.length;
  thread_local std::vector<float> scale;  // P_i
  scale.assign(n + 1, 1.0f);
  for (int64_t i = 0; i < n; ++i) {
    if (!prepare_pair(s, p, q, i, outcome)) return outcome;
    const float here = scale[i];
    if (i > 0 && accepts_prefix(s, p, q, here, i)) outcome.accepted = i;
    const float p_token = probability(p, s.draft(i));
    const float q_token = s.point_mass() ? 1.0f : probability(q, s.draft(i));
    if (q_token == 0.0f) outcome.status |= kOffSupport;
    const float joint = here * p_token;
    scale[i + 1] = joint == 0.0f ? 0.0f : joint >= q_token ? 1.0f : joint / q_token;
  }
  if (n > 0 && s.accept(n - 1) < scale[n]) outcome.accepted = n;
  const int64_t tau = outcome.accepted;
  if (tau == n) {
    draw_bonus(s, p, n, outcome);
  } else {
    Outcome again;  // the pair of position tau is good: it has been read
    prepare_pair(s, p, q, tau, again);
    draw_correction(s, p, s.point_mass() ? nullptr : &q, scale[tau], tau, outcome);
  }
  return outcome;
}

template <class L, class F>
Outcome follow_rule(const Sequence& s, L& p, F choose) {
  Outcome outcome;
  for (int64_t i = 0;; ++i) {
    outcome.status |= s.prepare(p, true, i);
    if (outcome.status & kDead) {
      outcome.next_token = -1;
      return outcome;
    }
    outcome.next_token = choose(i);
    if (i >= s.ends.length || s.draft(i) != outcome.next_token) return outcome;
    outcome.accepted = i + 1;
  }
}

Outcome decide(const Sequence& s, Law& p, Law& q) {
  switch (s.batch.rule) {
    case Rule::token: return token_rule(s, p, q);
    case Rule::block: return block_rule(s, p, q);
    case Rule::greedy: return follow_rule(s, p, [&](int64_t) { return p.argmax(); });
    default:
      return follow_rule(s, p, [&](int64_t i) { return p.race(s.race_at(i)); });
  }
}

Outcome decide(const Sequence& s, ProbabilityLaw& p, ProbabilityLaw& q) {
  switch (s.batch.rule) {
    case Rule::token: return token_rule(s, p, q);
    case Rule::block: return block_rule(s, p, q);
    case Rule::greedy: return follow_rule(s, p, [&](int64_t) { return p.argmax(); });
    default:
      return follow_rule(s, p, [&](int64_t i) {
        p.narrow();
        return p.draw(s.follow(i));
      });
  }
}

void write(const Sequence& s, Outcome outcome) {
  const VerifyBatch& batch = s.batch;
  const bool finished = s.ends.by_eos && outcome.accepted == s.ends.length;
  // The bonus after an accepted eos is not emitted: a bad row there spoils nothing.
  if (finished && outcome.next_token < 0) outcome.status &= ~kDead;
  outcome.status |= s.ends.status;
  const bool alive = (outcome.status & kDead) == 0;
  if (!alive) outcome = {0, -1, outcome.status};
  int64_t* tokens = batch.tokens + s.i * (batch.drafted + 1);
  std::fill(tokens, tokens + batch.drafted + 1, int64_t{-1});
  for (int64_t i = 0; i < outcome.accepted; ++i) tokens[i] = s.draft(i);
  const int64_t emitted = alive ? outcome.accepted + (finished ? 0 : 1) : 0;
  if (alive && !finished) tokens[outcome.accepted] = outcome.next_token;
  batch.num_accepted[s.i] = outcome.accepted;
  batch.next_token[s.i] = outcome.next_token;
  batch.num_emitted[s.i] = emitted;
  batch.eos_hit[s.i] = alive && (finished || contains(batch.eos.row(s.i), outcome.next_token));
  batch.status[s.i] = outcome.status;
}

template <class L>
void verify_with(const VerifyBatch& batch, int64_t first, int64_t last) {
  thread_local L p, q;
  const int64_t vocab = batch.draft.data ? std::max(batch.target.vocab, batch.draft.vocab) : batch.target.vocab;
  for (int64_t i = first; i < last; ++i) {
    const Ids drafts = batch.draft_tokens.row(i);
    const Ends ends = ends_of(drafts, batch.num_draft_tokens[i], batch.eos.row(i), vocab);
    const Sequence sequence{batch, i, drafts, ends};
    write(sequence, decide(sequence, p, q));
  }
}

}  // namespace

void verify(const VerifyBatch& batch, int64_t first, int64_t last) {
  if (batch.from_probabilities) {
    verify_with<ProbabilityLaw>(batch, first, last);
  } else {
    verify_with<Law>(batch, first, last);
  }
}

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
