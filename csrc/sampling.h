#pragma once

#include "law.h"
#include "probability_law.h"

namespace draftproof {
namespace DRAFTPROOF_LEVEL {

RowInput row_at(const Rows& rows, int64_t i, int64_t position, float penalty);
FilterInput filters_at(const Filters& filters, int64_t i);

void sample(const SampleBatch& batch, int64_t first, int64_t last);
void sample_probs(const SampleProbsBatch& batch, int64_t first, int64_t last);
void filter_logits(const FilterBatch& batch, int64_t first, int64_t last);
int64_t largest(const LargestQuery& query);
float read(const float* data, int64_t size);

}  // namespace DRAFTPROOF_LEVEL
}  // namespace draftproof
