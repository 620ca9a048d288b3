// Running an operation in every way, and comparing what it says with what it should.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>

#include "levels.h"
#include "threads.h"
#include "inputs.h"

namespace fuzz {
namespace {

struct Way {
  const Level& level;
  Form form;
  int threads;
};

template <class F>
void each_way(F f) {
  for (const Level* level : available_levels())
    for (const Form form : {Form::given, Form::packed, Form::widened})
      for (const int threads : {1, 3})
        if (threads == 1 || form == Form::given) f(Way{*level, form, threads});
}

template <class Batch>
void run(const Way& way, const Batch& batch, void (*operation)(const Batch&, int64_t, int64_t)) {
  set_num_threads(way.threads);
  parallel_rows(batch.batch, 1, [&](int64_t first, int64_t last) { operation(batch, first, last); });
}

// Memory that ends where the results do, full of what no operation answers.
template <class T>
std::unique_ptr<T[]> results(int64_t size) {
  std::unique_ptr<T[]> memory(new T[size]);
  std::memset(static_cast<void*>(memory.get()), 0x5B, size * sizeof(T));
  return memory;
}

// Says what a failing row was.
std::function<void(int64_t)> describe;

void print(const char* name, const RowsInput& rows, int64_t i, int64_t position) {
  std::fprintf(stderr, "%s[%lld, %lld] of %lld (dtype %d, mask %d):", name, static_cast<long long>(i),
               static_cast<long long>(position), static_cast<long long>(rows.shape[2]), static_cast<int>(rows.dtype),
               static_cast<int>(rows.kind));
  const auto row = rows.row(i, position);
  const auto allowed = rows.mask(i, position);
  for (size_t id = 0; id < row.size() && id < 400; ++id)
    std::fprintf(stderr, id < allowed.size() && !allowed[id] ? " (%.9g)" : " %.9g", static_cast<double>(row[id]));
  std::fprintf(stderr, "\n");
}
void print(const char* name, const plain::Filters& f) {
  std::fprintf(stderr, "%s: temperature %.9g, top_k %lld, top_p %.9g, min_p %.9g, penalty %.9g\n", name,
               static_cast<double>(f.temperature), static_cast<long long>(f.top_k), static_cast<double>(f.top_p),
               static_cast<double>(f.min_p), static_cast<double>(f.penalty));
}
void print(const char* name, const std::vector<int64_t>& numbers) {
  std::fprintf(stderr, "%s:", name);
  for (const int64_t n : numbers) std::fprintf(stderr, " %lld", static_cast<long long>(n));
  std::fprintf(stderr, "\n");
}

inline bool same(float a, float b) {
  return std::bit_cast<int32_t>(a) == std::bit_cast<int32_t>(b) || (std::isnan(a) && std::isnan(b));
}
inline bool same(int64_t a, int64_t b) { return a == b; }

template <class T>
void expect(const Way& way, const char* what, int64_t row, int64_t column, T got, T expected) {
  if (same(got, expected)) return;
  std::fprintf(stderr, "%s of row %lld, column %lld: got %.9g, expected %.9g (level %s, form %d, %d threads)\n", what,
               static_cast<long long>(row), static_cast<long long>(column), static_cast<double>(got),
               static_cast<double>(expected), way.level.name, static_cast<int>(way.form), way.threads);
  describe(row);
  std::abort();
}
void expect(const Way& way, const char* what, int64_t row, int64_t got, int64_t expected) {
  expect<int64_t>(way, what, row, 0, got, expected);
}

}  // namespace
}  // namespace fuzz
