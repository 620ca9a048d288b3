// One sequence of a batch to verify: its rows, drafts, history and random numbers.
#pragma once

#include <algorithm>

#include "law.h"
#include "operations.h"
#include "probability_law.h"
#include "sampling.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

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

inline bool contains(const Ids& ids, int64_t token) {
  for (int64_t i = 0; i < ids.size; ++i)
    if (ids.ids[i * ids.stride] >= 0 && ids.ids[i * ids.stride] == token) return true;
  return false;
}

inline Ends ends_of(const Ids& drafts, int64_t count, const Ids& eos, int64_t vocab) {
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
    if (batch.rule == Rule::greedy) return law.prepare(row, history(position), {.temperature = 0.0f});
    if (batch.rule != Rule::match) return law.prepare(row, history(position), filters_at(filters, i), nullptr, true);
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

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
