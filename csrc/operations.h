// The operations of the core as plain structs: spans in, results out. No Python, no torch.
#pragma once

#include <cstdint>

namespace draftproof {

enum class DType : int32_t { f32, f16, bf16, f64 };
enum class MaskKind : int32_t { none, bytes, bits };
enum class Rule : int32_t { token, block, match, greedy };

// Status bits: draftproof.Status.
constexpr int32_t kNan = 1, kEmptySupport = 2, kInvalidDraftId = 4, kResidualFallback = 8, kOffSupport = 16,
                  kBadProbability = 32;
constexpr int32_t kDead = kNan | kEmptySupport | kBadProbability | 64;

struct Ids {
  const int64_t* ids = nullptr;
  int64_t size = 0;
  int64_t stride = 1;
};

// The history the penalty acts on.
struct Patches {
  Ids before, drafted;
};

// One row of logits or probabilities, in place.
struct RowInput {
  const void* data = nullptr;
  int64_t stride = 1;
  int64_t vocab = 0;
  DType dtype = DType::f32;
  MaskKind mask_kind = MaskKind::none;
  const void* mask = nullptr;
  int64_t mask_stride = 1;
  int64_t mask_vocab = 0;
  float penalty = 1.0f;
};

struct FilterInput {
  float temperature = 1.0f;
  int64_t top_k = kMaxVocabulary;
  float top_p = 1.0f;
  float min_p = 0.0f;

  static constexpr int64_t kMaxVocabulary = int64_t{1} << 22;
};

struct StreamInput {
  uint64_t seed = 0;
  uint64_t offset = 0;
  int64_t draft_index = -1;  // -1: the target's own stream
};

struct Sampled {
  int64_t token = -1;
  float logprob = 0.0f, raw_logprob = 0.0f;
  int64_t kept = 0;
  int32_t status = 0;
};

// A batch of rows: base row plus strides between rows, and parameter columns (stride 0 where a scalar serves all).
template <class T>
struct Column {
  const T* data = nullptr;
  int64_t stride = 0;
  T fallback{};
  T operator[](int64_t i) const { return data ? data[i * stride] : fallback; }
};

struct Filters {
  Column<float> temperature, top_p, min_p, penalty;
  Column<int64_t> top_k;
};

struct Matrix {
  const int64_t* data = nullptr;
  int64_t columns = 0;
  int64_t row_stride = 0, column_stride = 1;
  Ids row(int64_t i) const { return {data + i * row_stride, columns, column_stride}; }
};

// Rows [B, N, V] (N = 1 for sampling) with their masks.
struct Rows {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t vocab = 0;
  int64_t batch_stride = 0, position_stride = 0, stride = 1;
  MaskKind mask_kind = MaskKind::none;
  const void* mask = nullptr;
  int64_t mask_vocab = 0;
  int64_t mask_batch_stride = 0, mask_position_stride = 0, mask_stride = 1;
};

enum class SampleMode : int32_t { token, logprobs };

struct SampleBatch {
  int64_t batch = 0;
  SampleMode mode = SampleMode::token;
  Rows logits;
  Filters filters;
  Matrix history;
  Column<int64_t> seed, offset, draft_index;  // draft_index -1: the target's own stream
  int64_t* tokens = nullptr;
  float *logprobs = nullptr, *raw_logprobs = nullptr;
  int64_t* kept = nullptr;
  int32_t* status = nullptr;
};

struct SampleProbsBatch {
  int64_t batch = 0;
  Rows probs;
  Column<int64_t> seed, offset;
  int64_t* tokens = nullptr;
  int32_t* status = nullptr;
};

struct FilterBatch {
  int64_t batch = 0;
  Rows logits;
  Filters filters;
  Matrix history;
  float* filtered = nullptr;
  int32_t* status = nullptr;
};

struct VerifyBatch {
  int64_t batch = 0, drafted = 0;
  Rule rule = Rule::token;
  bool from_probabilities = false;
  Rows target, draft;  // draft.data null: point masses
  Filters filters, draft_filters;
  Matrix history, draft_tokens;
  Column<int64_t> num_draft_tokens, seed, offset;
  Matrix eos;
  const float *uniform_accept = nullptr, *uniform_sample = nullptr;  // [B, K], [B, K+1], contiguous
  int64_t *num_accepted = nullptr, *next_token = nullptr, *tokens = nullptr, *num_emitted = nullptr;
  bool* eos_hit = nullptr;
  int32_t* status = nullptr;
};

// The largest logits of one row, `count` or as many as reach `distance` below the maximum. Lists have room for `count`.
struct LargestQuery {
  Rows row;
  int64_t count = 1;
  float distance = 0.0f;  // finite
  int64_t* ids = nullptr;
  float* logits = nullptr;
};

// One instruction-set level of the core. Each function of a batch handles its rows [first, last).
struct Level {
  const char* name;
  void (*sample)(const SampleBatch&, int64_t first, int64_t last);
  void (*sample_probs)(const SampleProbsBatch&, int64_t first, int64_t last);
  void (*filter_logits)(const FilterBatch&, int64_t first, int64_t last);
  void (*verify)(const VerifyBatch&, int64_t first, int64_t last);
  int64_t (*largest)(const LargestQuery&);  // returns how many there are; none of a dead row
  float (*read)(const float* data, int64_t size);  // one maximum over the bytes: the floor benchmarks compare with
};

}  // namespace draftproof
