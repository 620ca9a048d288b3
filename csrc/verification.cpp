// Chain verification, one sequence at a time: position by position, stopping at the first rejection where the rule
// does.
#include "verification.h"

#include "block_rule.h"
#include "residual.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {
namespace {

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
    case Rule::block: return block_rule<Law>(s);
    case Rule::greedy: return follow_rule(s, p, [&](int64_t) { return p.argmax(); });
    default:
      return follow_rule(s, p, [&](int64_t i) { return p.race(s.race_at(i)); });
  }
}

Outcome decide(const Sequence& s, ProbabilityLaw& p, ProbabilityLaw& q) {
  switch (s.batch.rule) {
    case Rule::token: return token_rule(s, p, q);
    case Rule::block: return block_rule<ProbabilityLaw>(s);
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
