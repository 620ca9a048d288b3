// What the operations mean, to the bit: docs/arithmetic.md and docs/streams.md written down once more, one row at a time
// and without a thought for speed. Shares nothing with csrc but the result it must agree with.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

namespace plain {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kNan = 1, kEmpty = 2, kInvalidId = 4, kFallback = 8, kOffSupport = 16, kBadProbability = 32;
constexpr int32_t kDead = kNan | kEmpty | kBadProbability;
using Wide = unsigned __int128;
using Masses = std::vector<int64_t>;

// --- elementary functions ---------------------------------------------------------------------------------------------

template <size_t n>
float horner(float x, const float (&c)[n]) {
  float value = c[n - 1];
  for (size_t i = n - 1; i-- > 0;) value = value * x + c[i];
  return value;
}

inline void split(float x, float& e, float& f) {
  const int32_t shifted = std::bit_cast<int32_t>(x) + (0x3F800000 - 0x3F400000);
  e = static_cast<float>((shifted >> 23) - 127);
  f = std::bit_cast<float>((shifted & 0x7FFFFF) + 0x3F400000) - 1.0f;
}

inline float exp2(float t) {
  constexpr float c[] = {0.6931471824645996f,  0.24022647738456726f,   0.055503323674201965f,
                         0.00961843691766262f, 0.0013398875016719103f, 0.00015353361959569156f};
  if (!(t >= -40.0f)) return 0.0f;
  const float n = std::floor(t + 0.5f);
  const float r = t - n;
  return std::ldexp(1.0f + r * horner(r, c), static_cast<int>(n));
}

inline float log2(float x) {
  constexpr float c[] = {1.4426950216293335f,  -0.7213484644889832f, 0.4809020757675171f,
                         -0.36057591438293457f, 0.2881914973258972f, -0.2427235245704651f,
                         0.21632489562034607f, -0.17423023283481598f, 0.07806669920682907f};
  const bool small = x < 0x1p-126f;
  float e, f;
  split(small ? x * 0x1p32f : x, e, f);
  return (small ? e - 32.0f : e) + f * horner(f, c);
}

inline float uniform(uint32_t word) {
  return std::min((static_cast<float>(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
}

inline float exponential(uint32_t word) {
  constexpr float c[] = {1.0f, -0.5000006556510925f, 0.3333359360694885f, -0.2499321848154068f, 0.1997591257095337f,
                         -0.16824312508106232f, 0.1499449908733368f, -0.12076719105243683f, 0.05411171168088913f};
  const float u = uniform(word);
  float e, f;
  split(1.0f - u, e, f);
  if (e == 0.0f) f = -u;
  return -e * 0.6931471824645996f - f * horner(f, c);
}

// --- streams ----------------------------------------------------------------------------------------------------------

struct Stream {
  uint64_t seed, offset;
  uint32_t word(uint32_t purpose, uint32_t index, uint32_t c0, int which) const {
    uint32_t c[] = {c0, static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), purpose << 24 | index};
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
      const uint32_t next[] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(b),
                               static_cast<uint32_t>(a >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(a)};
      std::copy(next, next + 4, c);
    }
    return c[which];
  }
  uint64_t fraction(uint32_t index) const {
    return uint64_t{word(5, index, 0, 0)} << 30 | word(5, index, 0, 1) >> 2;
  }
  // The exponential of a token; draft_index -1 is the target's own race.
  float noise(int64_t id, int64_t draft_index) const {
    const uint32_t purpose = draft_index < 0 ? 0 : 2, index = draft_index < 0 ? 0 : static_cast<uint32_t>(draft_index);
    const uint32_t pair = static_cast<uint32_t>(id >> 7);
    const int odd = static_cast<int>(id >> 6 & 1);
    const float least = exponential(word(purpose + 1, index, pair, 2 * odd)) * 0x1p-6f;
    if (word(purpose + 1, index, pair, 2 * odd + 1) >> 26 == (id & 63)) return least;
    return least + exponential(word(purpose, index, static_cast<uint32_t>(id >> 2), id & 3));
  }
};

// --- laws -------------------------------------------------------------------------------------------------------------

struct Filters {
  float temperature = 1.0f, top_p = 1.0f, min_p = 0.0f, penalty = 1.0f;
  int64_t top_k = 0;  // at most 0, or at least the vocabulary: off
};

struct Law {
  int32_t status = 0;
  bool greedy = false;
  std::vector<float> logits, divided, t, weights;  // logits after penalty and mask
  std::vector<int64_t> kept;                       // ids, best first; tokens of mass 0 included
  Masses masses;                                   // 0 where not kept
  int64_t total = 0;
  int64_t mass(int64_t id) const { return id < static_cast<int64_t>(masses.size()) ? masses[id] : 0; }
};

inline int64_t theta(float top_p, int64_t total) {
  const Wide share = static_cast<Wide>(top_p * 0x1p30f), unit = Wide{1} << 30;
  const Wide kept = (share * static_cast<Wide>(total) + unit - 1) / unit;
  return std::max<int64_t>(static_cast<int64_t>(kept) - (total >> 21), 1);
}

inline std::vector<float> allowed_logits(std::vector<float> row, float penalty, std::vector<int64_t> history,
                                         const std::vector<uint8_t>& allowed) {
  const int64_t vocab = static_cast<int64_t>(row.size());
  std::sort(history.begin(), history.end());
  history.erase(std::unique(history.begin(), history.end()), history.end());
  for (const int64_t id : history)
    if (id >= 0 && id < vocab) row[id] = row[id] < 0.0f ? row[id] * penalty : row[id] / penalty;
  for (int64_t id = 0; id < std::min<int64_t>(vocab, allowed.size()); ++id)
    if (!allowed[id]) row[id] = -kInfinity;
  return row;
}

inline Law law_of(const std::vector<float>& row, const Filters& filters, const std::vector<int64_t>& history,
                  const std::vector<uint8_t>& allowed) {
  Law law;
  law.logits = allowed_logits(row, filters.penalty, history, allowed);
  const auto& l = law.logits;
  const int64_t vocab = static_cast<int64_t>(l.size());
  for (const float x : l)
    if (std::isnan(x)) law.status = kNan;
  if (law.status) return law;
  const float m = *std::max_element(l.begin(), l.end());
  if (m == -kInfinity) {
    law.status = kEmpty;
    return law;
  }
  law.greedy = filters.temperature == 0.0f;
  const float T = law.greedy ? 1.0f : filters.temperature;
  const float c = std::min(1.4426950216293335f / T, std::numeric_limits<float>::max());
  law.masses.assign(vocab, 0);
  for (const float x : l) {
    law.divided.push_back(x / T);
    law.t.push_back(x == m ? 0.0f : (x - m) * c);
    law.weights.push_back(exp2(law.t.back()));
  }
  if (law.greedy) {
    const int64_t first = std::find(l.begin(), l.end(), m) - l.begin();
    law.kept = {first};
    law.total = law.masses[first] = int64_t{1} << 40;
    return law;
  }
  float kth = -kInfinity;
  if (filters.top_k > 0 && filters.top_k < vocab) {
    auto s = law.divided;
    std::sort(s.begin(), s.end(), std::greater<>());
    kth = s[filters.top_k - 1];
  }
  std::vector<int64_t> order;
  for (int64_t id = 0; id < vocab; ++id)
    if (law.divided[id] >= kth && l[id] > -kInfinity) order.push_back(id);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return l[a] > l[b] || (l[a] == l[b] && a < b); });
  int64_t whole = 0, above = 0;
  for (const int64_t id : order) whole += static_cast<int64_t>(law.weights[id] * 0x1p40f);
  const int64_t limit = filters.top_p < 1.0f ? theta(filters.top_p, whole) : std::numeric_limits<int64_t>::max();
  for (const int64_t id : order) {
    if (above >= limit || (filters.min_p > 0.0f && !(law.t[id] >= log2(filters.min_p)))) break;
    law.kept.push_back(id);
    law.masses[id] = static_cast<int64_t>(law.weights[id] * 0x1p40f);
    above += law.masses[id];
  }
  law.total = above;
  return law;
}

inline Law law_of_probabilities(const std::vector<float>& row) {
  Law law;
  for (const float p : row)
    if (!(p >= 0.0f && p < kInfinity)) law.status = kBadProbability;
  const float m = *std::max_element(row.begin(), row.end());
  if (!law.status && m == 0.0f) law.status = kEmpty;
  if (law.status) return law;
  int e = 0;
  std::frexp(m, &e);
  law.logits = row;
  // As in float32: what is below 2^-149 after the first of two factors counts for nothing after both.
  for (const float p : row) law.masses.push_back(static_cast<int64_t>(std::ldexp(static_cast<double>(p), 40 - e)));
  law.total = std::accumulate(law.masses.begin(), law.masses.end(), int64_t{0});
  return law;
}

inline int64_t argmax(const Law& law) {
  return std::max_element(law.logits.begin(), law.logits.end()) - law.logits.begin();
}

// --- draws ------------------------------------------------------------------------------------------------------------

inline int64_t race(const Law& law, const Stream& stream, int64_t draft_index) {
  if (law.greedy) return law.kept[0];
  std::pair<float, int64_t> best{kInfinity, -1};
  for (const int64_t id : law.kept)
    if (law.masses[id] > 0) best = std::min(best, {stream.noise(id, draft_index) / law.weights[id], id});
  return best.second;
}

inline int64_t inverse_cdf(const Masses& masses, uint64_t fraction) {
  const int64_t total = std::accumulate(masses.begin(), masses.end(), int64_t{0});
  const int64_t threshold = static_cast<int64_t>(Wide{fraction} * static_cast<Wide>(total) >> 62);
  int64_t prefix = 0, id = 0;
  while ((prefix += masses[id]) <= threshold) ++id;
  return id;
}

inline float log_probability(float t, int64_t total) {
  return (t - log2(static_cast<float>(total) * 0x1p-40f)) * 0.6931471824645996f;
}

inline float raw_log_probability(const std::vector<float>& row, int64_t token) {
  const Law law = law_of(row, {}, {}, {});
  return law.status ? std::numeric_limits<float>::quiet_NaN() : log_probability(law.t[token], law.total);
}

// --- verification -----------------------------------------------------------------------------------------------------

enum class Rule { token, block, match, greedy };

struct Draft {
  std::vector<int64_t> ids;  // those to verify
  bool by_eos = false;
  int32_t status = 0;
};

inline Draft draft_of(const std::vector<int64_t>& ids, int64_t count, const std::vector<int64_t>& eos, int64_t vocab) {
  Draft draft;
  for (int64_t i = 0; i < count && !draft.by_eos; ++i) {
    if (ids[i] < 0 || ids[i] >= vocab) {
      draft.status = ids[i] == -1 ? 0 : kInvalidId;
      break;
    }
    draft.ids.push_back(ids[i]);
    draft.by_eos = std::find(eos.begin(), eos.end(), ids[i]) != eos.end();
  }
  return draft;
}

struct Verified {
  int64_t accepted = 0, next = -1, emitted = 0;
  bool eos_hit = false;
  int32_t status = 0;
};

// Rows: `target(i)` and `draft(i)` give laws; `draft` is empty for point masses. Draws: `accept(i)` a uniform, `emit(i)`
// a fraction, `follow(i, law)` the target's own token.
template <class Target, class DraftRows, class Draws>
Verified verify(Rule rule, const Draft& drafts, const std::vector<int64_t>& eos, Target target, DraftRows draft,
                bool point_mass, Draws draws) {
  const int64_t n = static_cast<int64_t>(drafts.ids.size());
  Verified v;
  const auto residual = [&](int64_t i, float P) {
    const Law p = target(i);
    Masses rho = p.masses;
    if (point_mass) {
      if (drafts.ids[i] < static_cast<int64_t>(rho.size())) rho[drafts.ids[i]] = 0;
      return rho;
    }
    const Law q = draft(i);
    const float over_p = 1.0f / static_cast<float>(p.total), over_q = 1.0f / static_cast<float>(q.total);
    for (int64_t id = 0; id < static_cast<int64_t>(rho.size()); ++id) {
      const float here = static_cast<float>(p.masses[id]) * over_p, there = static_cast<float>(q.mass(id)) * over_q;
      rho[id] = static_cast<int64_t>(std::max(P * here - there, 0.0f) * 0x1p61f);
    }
    return rho;
  };
  const auto sum = [](const Masses& masses) { return std::accumulate(masses.begin(), masses.end(), int64_t{0}); };
  const auto probability = [](const Law& law, int64_t id) {
    return static_cast<float>(law.mass(id)) * (1.0f / static_cast<float>(law.total));
  };
  // Both laws of a tested position; none if one is dead.
  const auto pair = [&](int64_t i) -> std::optional<std::pair<float, float>> {
    const Law p = target(i);
    const Law q = point_mass ? Law{} : draft(i);
    v.status |= p.status | q.status;
    if (v.status & kDead) return {};
    const float q_x = point_mass ? 1.0f : probability(q, drafts.ids[i]);
    if (q_x == 0.0f) v.status |= kOffSupport;
    return std::pair{probability(p, drafts.ids[i]), q_x};
  };
  const auto correct = [&](int64_t i, float P) {
    const Masses rho = residual(i, P);
    if (sum(rho) == 0) v.status |= kFallback;
    v.next = inverse_cdf(sum(rho) == 0 ? target(i).masses : rho, draws.emit(i));
  };
  const auto bonus = [&] {
    const Law p = target(n);
    v.status |= p.status;
    if (!p.status) v.next = inverse_cdf(p.masses, draws.emit(n));
  };
  if (rule == Rule::token) {
    while (v.accepted < n) {
      const auto tested = pair(v.accepted);
      if (!tested) break;
      if (!(draws.accept(v.accepted) * tested->second < tested->first)) {
        correct(v.accepted, 1.0f);
        break;
      }
      ++v.accepted;
    }
    if (v.accepted == n) bonus();
  } else if (rule == Rule::block) {
    std::vector<float> P{1.0f};
    for (int64_t i = 0; i < n; ++i) {
      const auto tested = pair(i);
      if (!tested) break;
      const float a = P[i] * tested->first;
      P.push_back(a == 0.0f ? 0.0f : a >= tested->second ? 1.0f : a / tested->second);
    }
    if (!(v.status & kDead)) {
      for (int64_t i = 1; i <= n; ++i) {
        float h = P[i];
        if (i < n) {
          const Law p = target(i);
          const float S = point_mass
                              ? P[i] * (static_cast<float>(p.total - p.mass(drafts.ids[i])) * (1.0f / static_cast<float>(p.total)))
                              : static_cast<float>(sum(residual(i, P[i]))) * 0x1p-61f;
          const float whole = S + (1.0f - P[i]);
          h = whole == 0.0f ? 1.0f : S / whole;
        }
        if (draws.accept(i - 1) < h) v.accepted = i;
      }
      if (v.accepted == n) bonus();
      else correct(v.accepted, P[v.accepted]);
    }
  } else {
    for (;; ++v.accepted) {
      const Law p = target(v.accepted);
      v.status |= p.status;
      v.next = p.status ? -1 : rule == Rule::greedy ? argmax(p) : draws.follow(v.accepted, p);
      if (p.status || v.accepted == n || drafts.ids[v.accepted] != v.next) break;
    }
  }
  const bool finished = drafts.by_eos && v.accepted == n;
  if (finished && v.next < 0) v.status &= ~kDead;
  v.status |= drafts.status;
  if (v.status & kDead) return {0, -1, 0, false, v.status};
  v.emitted = v.accepted + !finished;
  v.eos_hit = finished || std::find(eos.begin(), eos.end(), v.next) != eos.end();
  return v;
}

}  // namespace plain
