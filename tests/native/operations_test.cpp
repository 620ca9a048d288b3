// Operations of several callers side by side under ThreadSanitizer: the scratch that each thread keeps is its own.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "levels.h"
#include "threads.h"

namespace {

using namespace draftproof;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::_Exit(1);
}

struct Drawn {
  std::vector<int64_t> tokens;
  std::vector<float> filtered;
};

// Operations keep scratch per thread; rows of several kinds make it grow, shrink and change its shape.
Drawn draw(const Level& level, const std::vector<float>& logits, int64_t rows, int64_t vocab, float top_p, int64_t top_k) {
  Drawn drawn{std::vector<int64_t>(rows), std::vector<float>(rows * vocab)};
  std::vector<int32_t> status(rows), more_status(rows);
  SampleBatch sampling;
  sampling.batch = rows;
  sampling.logits.data = logits.data();
  sampling.logits.vocab = sampling.logits.batch_stride = vocab;
  sampling.filters.temperature.fallback = sampling.filters.penalty.fallback = 1.0f;
  sampling.filters.top_p.fallback = top_p;
  sampling.filters.top_k.fallback = top_k;
  sampling.seed.fallback = 7;
  sampling.draft_index.fallback = -1;
  sampling.tokens = drawn.tokens.data();
  sampling.status = status.data();
  parallel_rows(rows, 1, [&](int64_t first, int64_t last) { level.sample(sampling, first, last); });
  FilterBatch filtering;
  filtering.batch = rows;
  filtering.logits = sampling.logits;
  filtering.filters = sampling.filters;
  filtering.filtered = drawn.filtered.data();
  filtering.status = more_status.data();
  parallel_rows(rows, 1, [&](int64_t first, int64_t last) { level.filter_logits(filtering, first, last); });
  return drawn;
}

void side_by_side(const Level& level) {
  struct Case {
    int64_t rows, vocab, top_k;
    float top_p;
    std::vector<float> logits;
    Drawn expected;
  };
  std::vector<Case> cases;
  set_num_threads(1);
  for (const int64_t vocab : {1, 63, 300, 2000})
    for (const int64_t top_k : {int64_t{20}, FilterInput::kMaxVocabulary})
      for (const float top_p : {1.0f, 0.7f}) {
        Case c{5, vocab, top_k, top_p, std::vector<float>(5 * vocab), {}};
        for (size_t i = 0; i < c.logits.size(); ++i) c.logits[i] = std::sin(static_cast<float>(i * i % 1001)) * 5;
        c.expected = draw(level, c.logits, c.rows, vocab, top_p, top_k);
        cases.push_back(std::move(c));
      }
  set_num_threads(3);
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i)
    callers.emplace_back([&, i] {
      for (size_t turn = 0; turn < 3 * cases.size(); ++turn) {
        const Case& c = cases[(turn * 5 + i) % cases.size()];
        const Drawn drawn = draw(level, c.logits, c.rows, c.vocab, c.top_p, c.top_k);
        require(drawn.tokens == c.expected.tokens, "tokens do not depend on threads");
        require(drawn.filtered == c.expected.filtered, "filtered logits do not depend on threads");
      }
    });
  for (auto& caller : callers) caller.join();
}

}  // namespace

int main() {
  for (const Level* level : available_levels()) side_by_side(*level);
  std::puts("operations side by side: passed");
}
