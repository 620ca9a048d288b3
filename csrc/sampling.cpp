// sample, sample_with_logprobs, sample_probs and filter_logits over rows of a batch; the largest logits of one row.
#include "sampling.h"

#include <cmath>

namespace draftproof {
namespace DRAFTPROOF_LEVEL {
namespace {

constexpr float kNaN = __builtin_nanf("");

StreamInput stream_at(const Column<int64_t>& seed, const Column<int64_t>& offset, int64_t i, int64_t draft_index) {
  return {static_cast<uint64_t>(seed[i]), static_cast<uint64_t>(offset[i]), draft_index};
}

float log_probability(float t, int64_t total) {
  return (t - log2_pinned(static_cast<float>(total) * 0x1p-40f)) * kLn2;
}

Sampled with_logprobs(Law& law, Law& raw, const RowInput& input, int64_t token) {
  Sampled result;
  result.token = token;
  law.narrow();
  result.kept = law.kept();
  result.logprob = law.greedy() ? 0.0f : log_probability(law.t_of(law.logit(token)), law.total());
  RowInput plain = input;
  plain.mask_kind = MaskKind::none;
  plain.penalty = 1.0f;
  const int32_t status = raw.prepare(plain, {}, {});
  if (status) {
    result.raw_logprob = kNaN;
    return result;
  }
  raw.narrow();
  result.raw_logprob = log_probability(raw.t_of(raw.logit(token)), raw.total());
  return result;
}

}  // namespace

RowInput row_at(const Rows& rows, int64_t i, int64_t position, float penalty) {
  const int64_t size = rows.dtype == DType::f32 ? 4 : rows.dtype == DType::f64 ? 8 : 2;
  RowInput row;
  row.data = static_cast<const char*>(rows.data) + (i * rows.batch_stride + position * rows.position_stride) * size;
  row.stride = rows.stride;
  row.vocab = rows.vocab;
  row.dtype = rows.dtype;
  row.penalty = penalty;
  if (rows.mask_kind != MaskKind::none) {
    const int64_t unit = rows.mask_kind == MaskKind::bytes ? 1 : 4;
    row.mask_kind = rows.mask_kind;
    row.mask = static_cast<const char*>(rows.mask) +
               (i * rows.mask_batch_stride + position * rows.mask_position_stride) * unit;
    row.mask_stride = rows.mask_stride;
    row.mask_vocab = rows.mask_vocab;
  }
  return row;
}

FilterInput filters_at(const Filters& f, int64_t i) {
  FilterInput filters;
  filters.temperature = f.temperature[i];
  filters.top_k = f.top_k[i];
  filters.top_p = f.top_p[i];
  filters.min_p = f.min_p[i];
  return filters;
}

void sample(const SampleBatch& batch, int64_t first, int64_t last) {
  thread_local Law law, raw;
  for (int64_t i = first; i < last; ++i) {
    const RowInput input = row_at(batch.logits, i, 0, batch.filters.penalty[i]);
    const StreamInput stream = stream_at(batch.seed, batch.offset, i, batch.draft_index[i]);
    const int32_t status = law.prepare(input, {batch.history.row(i), {}}, filters_at(batch.filters, i), &stream);
    Sampled result;
    if (!status) result.token = law.race(stream);
    if (batch.mode == SampleMode::logprobs) {
      if (status) {
        result.logprob = result.raw_logprob = kNaN;
      } else {
        result = with_logprobs(law, raw, input, result.token);
      }
      batch.logprobs[i] = result.logprob;
      batch.raw_logprobs[i] = result.raw_logprob;
      batch.kept[i] = result.kept;
    }
    batch.tokens[i] = result.token;
    batch.status[i] = status;
  }
}

void sample_probs(const SampleProbsBatch& batch, int64_t first, int64_t last) {
  thread_local ProbabilityLaw law;
  for (int64_t i = first; i < last; ++i) {
    const int32_t status = law.prepare(row_at(batch.probs, i, 0, 1.0f));
    batch.status[i] = status;
    batch.tokens[i] = -1;
    if (status) continue;
    law.narrow();
    const Stream stream(static_cast<uint64_t>(batch.seed[i]), static_cast<uint64_t>(batch.offset[i]), Purpose::emit, 0);
    const Words words = philox(stream, 0);
    batch.tokens[i] = law.draw(fraction_of(words.w[0], words.w[1]));
  }
}

void filter_logits(const FilterBatch& batch, int64_t first, int64_t last) {
  thread_local Law law;
  for (int64_t i = first; i < last; ++i) {
    float* out = batch.filtered + i * batch.logits.vocab;
    const RowInput input = row_at(batch.logits, i, 0, batch.filters.penalty[i]);
    const int32_t status = law.prepare(input, {batch.history.row(i), {}}, filters_at(batch.filters, i));
    batch.status[i] = status;
    std::fill(out, out + batch.logits.vocab, status ? kNaN : -kInfinity);
    if (status) continue;
    law.narrow();
    if (law.listed()) {
      for (const Candidate& c : law.candidates())
        if (law.keeps(c.logit, c.id)) out[c.id] = c.logit / law.temperature();
      continue;
    }
    alignas(64) float buffer[kBlock];
    for (int64_t b = 0; b < law.row().blocks(); ++b) {
      const float* l = law.row().load(b, buffer);
      for (int j = 0; j < law.row().width(b); ++j)
        if (l[j] > -kInfinity && law.keeps(l[j], b * kBlock + j)) out[b * kBlock + j] = l[j] / law.temperature();
    }
  }
}

int64_t largest(const LargestQuery& query) {
  thread_local Law law;
  FilterInput greedy;
  greedy.temperature = 0.0f;
  if (law.prepare(row_at(query.row, 0, 0, 1.0f), {}, greedy)) return 0;
  int64_t n = 0;
  for (const Candidate& c : law.largest(query.count, query.distance)) {
    query.ids[n] = c.id;
    query.logits[n++] = c.logit;
  }
  return n;
}

float read(const float* data, int64_t size) {
  Floats lanes[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      const Floats v = load(data + i + kLanes * j);
      lanes[j] = v > lanes[j] ? v : lanes[j];
    }
  float best = -kInfinity;
  for (const Floats& lane : lanes)
    for (int j = 0; j < kLanes; ++j) best = lane[j] > best ? lane[j] : best;
  for (; i < size; ++i) best = data[i] > best ? data[i] : best;
  return best;
}

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
