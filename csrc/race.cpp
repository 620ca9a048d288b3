// The race over a row: only blocks that can win are looked into, the likeliest first, and in them only ids that can.
// Blocks and ids are taken in batches, so that their noise is computed side by side.
#include "law.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {
namespace {

constexpr int kBatch = 16;

// The words of each of a batch of counters.
void words_of(const WideStream& stream, const uint32_t* counter, uint32_t (*word)[kBatch]) {
  for (int i = 0; i < kBatch; i += kLanes / 2) {
    Wides wide;
    for (int j = 0; j < kLanes / 2; ++j) wide[j] = counter[i + j];
    const WideWords w = stream(wide);
    for (int k = 0; k < 4; ++k)
      for (int j = 0; j < kLanes / 2; ++j) word[k][i + j] = static_cast<uint32_t>(w.w[k][j]);
  }
}

}  // namespace

struct Law::Race {
  const WideStream block, token;
  const Rank limit;  // only tokens ranked above it run
  Winner best{kInfinity, -1, -kInfinity};
  int64_t blocks[kBatch], ids[kBatch];
  int open = 0, waiting = 0;
  float least[kBatch], logit[kBatch];
  bool holds[kBatch];
};

// Draw, then check: a winner outside the top-p set proves that the set lies above it, and the race is run again there.
int64_t Law::race_row(const StreamInput& stream) {
  const WideStream block(stream_of(stream, Purpose::race_block, Purpose::draft_block));
  const WideStream token(stream_of(stream, Purpose::race_token, Purpose::draft_token));
  Rank limit{-kInfinity, row_.vocab()};
  for (;;) {
    Race race{block, token, limit};
    run(race);
    const Rank rank{race.best.logit, race.best.id};
    if (rank.id < 0 || !(filters_.top_p < 1.0f) || top_p_holds(rank)) return rank.id;
    limit = rank;
  }
}

void Law::run(Race& race) const {
  race.blocks[race.open++] = least_bound();
  enter_blocks(race);
  Floats highest = highest_bound(race.best.key);
  const Floats lowest = all(race.limit.logit);
  for (int64_t first = 0; first < row_.blocks(); first += kLanes) {
    uint32_t open = ~above(load(&bounds_[first]), highest) & reaching(load(&maxima_[first]), lowest) & kEveryLane;
    for (; open; open &= open - 1) {
      race.blocks[race.open] = std::min(first + std::countr_zero(open), row_.blocks() - 1);
      if (++race.open < kBatch) continue;
      enter_blocks(race);
      highest = highest_bound(race.best.key);
    }
  }
  enter_blocks(race);
}

// Let the ids of the open blocks run: one by one where few of them can win, else all of the block.
void Law::enter_blocks(Race& race) const {
  if (race.open == 0) return;
  alignas(64) uint32_t counter[kBatch], word[4][kBatch];
  alignas(64) float least[kBatch], lowest[kBatch], earliest[kBatch];
  for (int i = race.open; i < kBatch; ++i) race.blocks[i] = race.blocks[0];
  for (int i = 0; i < kBatch; ++i) counter[i] = static_cast<uint32_t>(race.blocks[i] / 2);
  words_of(race.block, counter, word);
  for (int i = 0; i < kBatch; ++i) {
    const bool odd = race.blocks[i] & 1;
    least[i] = exponential(odd ? word[2][i] : word[0][i]) * (1.0f / kBlock);
    earliest[i] = least[i] / heaviest(race.blocks[i]);
    // An id wins only if least / weight is no larger than the best key; the slack covers rounding.
    lowest[i] = race.best.key < kInfinity ? (log2_pinned(least[i] / race.best.key) - 0.001f) / scale_ : -kInfinity;
  }
  alignas(64) float buffer[kBlock];
  for (int i = 0; i < race.open; ++i) {
    if (!(earliest[i] <= race.best.key)) continue;
    const int64_t b = race.blocks[i];
    const int holder = static_cast<int>((b & 1 ? word[3][i] : word[1][i]) >> 26);
    const float* l = row_.load(b, buffer);
    uint64_t open = ids_above(l, lowest[i]);
    if (std::popcount(open) > 4) {
      enter_block(race, b, l, least[i], holder);
      continue;
    }
    for (; open; open &= open - 1) {
      const int at = std::countr_zero(open);
      enter_id(race, b * kBlock + at, l[at], least[i], at == holder);
    }
  }
  race.open = 0;
  enter_ids(race);
}

inline void Law::enter_id(Race& race, int64_t id, float logit, float least, bool holds) const {
  if (!ranked_above(logit, id, race.limit) || !(t_of(logit) >= min_t_)) return;
  race.ids[race.waiting] = id;
  race.logit[race.waiting] = logit;
  race.least[race.waiting] = least;
  race.holds[race.waiting] = holds;
  if (++race.waiting == kBatch) enter_ids(race);
}

void Law::enter_ids(Race& race) const {
  if (race.waiting == 0) return;
  alignas(64) uint32_t counter[kBatch], word[4][kBatch], own[kBatch];
  alignas(64) float key[kBatch];
  for (int i = race.waiting; i < kBatch; ++i) {
    race.ids[i] = 0;
    race.logit[i] = maximum_;  // weight 1
    race.least[i] = 0.0f;
  }
  for (int i = 0; i < kBatch; ++i) counter[i] = static_cast<uint32_t>(race.ids[i] / 4);
  words_of(race.token, counter, word);
  for (int i = 0; i < kBatch; ++i) own[i] = word[race.ids[i] & 3][i];
  for (int i = 0; i < kBatch; ++i) key[i] = race.least[i] + exponential(own[i]);
  for (int i = 0; i < race.waiting; ++i) key[i] = race.holds[i] ? race.least[i] : key[i];
  for (int i = 0; i < kBatch; ++i) key[i] = key[i] / exp2_pinned(exponent(race.logit[i], maximum_, scale_));
  for (int i = 0; i < race.waiting; ++i) finish(race.best, key[i], race.logit[i], race.ids[i]);
  race.waiting = 0;
}

void Law::enter_block(Race& race, int64_t b, const float* l, float least, int holder) const {
  alignas(64) uint32_t word[kBlock];
  alignas(64) float key[kBlock];
  const auto finish_at = [&](int i) {
    const int64_t id = b * kBlock + i;
    if (ranked_above(l[i], id, race.limit) && t_of(l[i]) >= min_t_) finish(race.best, key[i], l[i], id);
  };
  key[holder] = least / weight(l[holder]);
  finish_at(holder);
  Bits smallest = ~Bits{};
  for (int i = 0; i < kBlock; i += 2 * kLanes) {
    const WideWords w = race.token.from((b * kBlock + i) / 4);
    const Bits pairs[2] = {WideWords::pair(w.w[0], w.w[1]), WideWords::pair(w.w[2], w.w[3])};
    for (int j = 0; j < kLanes; j += 2)
      for (int half = 0; half < 2; ++half)
        std::memcpy(word + i + 2 * j + 2 * half, reinterpret_cast<const char*>(&pairs[half]) + 4 * j, 8);
    for (const Bits& pair : pairs) smallest = smallest < pair ? smallest : pair;
  }
  // An exponential is at least its uniform, and the smallest word has the smallest: most blocks are ruled out before
  // any logarithm.
  const float reach = (race.best.key * heaviest(b) - least) * kBlockSlack;
  if (!(uniform(~largest_lane(~smallest)) <= reach)) return;
  for (int i = 0; i < kBlock; ++i) key[i] = least + exponential(word[i]);
  key[holder] = least;
  for (int i = 0; i < kBlock; ++i) key[i] = key[i] / exp2_pinned(exponent(l[i], maximum_, scale_));
  for (int i = 0; i < kBlock; i += kLanes)
    for (uint32_t early = reaching(all(race.best.key), load(key + i)); early; early &= early - 1)
      finish_at(i + std::countr_zero(early));
}

inline void Law::finish(Winner& best, float key, float logit, int64_t id) {
  if ((key < best.key || (key == best.key && id < best.id)) && key < kInfinity) best = {key, id, logit};
}

// No weight in the block is larger: a weight may exceed that of a larger logit by a unit in the last place.
inline float Law::heaviest(int64_t b) const {
  return exp2_pinned(exponent(maxima_[b], maximum_, scale_)) * kBlockSlack;
}

// The ids of a block whose logit lies no further below the row's maximum than `lowest`, a negative number.
inline uint64_t Law::ids_above(const float* l, float lowest) const {
  uint64_t open = 0;
  for (int i = 0; i < kBlock; i += kLanes)
    open |= static_cast<uint64_t>(~above(all(lowest), load(l + i) - maximum_) & kEveryLane) << i;
  return open;
}

// Blocks with a bound above this cannot hold a key as small as `key`. The constants undo those of logarithm_below; the
// slack covers its rounding and that of bounds of blocks with a weight above 0.
Floats Law::highest_bound(float key) const {
  if (!(key < kInfinity)) return all(kInfinity);
  const float shift = maximum_ * scale_;
  return all((log2_pinned(key) + 164.0f - shift) + (0.001f + (std::fabs(shift) + 64.0f) * 0x1p-19f));
}

int64_t Law::least_bound() const {
  Floats least = load(&bounds_[0]);
  for (int64_t b = kLanes; b < static_cast<int64_t>(maxima_.size()); b += kLanes)
    least = -larger(-load(&bounds_[b]), -least);
  const Floats wanted = all(-largest_lane(-least));
  for (int64_t b = 0; b < row_.blocks(); b += kLanes)
    if (const uint32_t hits = reaching(wanted, load(&bounds_[b])))
      return std::min(b + std::countr_zero(hits), row_.blocks() - 1);
  return 0;  // no bound is a number: any block will do
}

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
