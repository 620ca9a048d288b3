// Rows of a batch over a few threads. The caller works too and only waits for rows that somebody has begun, so a helper
// that never gets a core costs nothing.
#pragma once

#include <cstdint>
#include <functional>

namespace draftproof {

int num_threads();
void set_num_threads(int n);

// Call `work(first, last)` over [0, rows), which may be blocks of one row too, in pieces of `grain`, on at most
// num_threads() threads. From inside one of several pieces it is one call on the same thread. Denormals are kept
// meanwhile. Throws what `work` throws.
void parallel_rows(int64_t rows, int64_t grain, const std::function<void(int64_t, int64_t)>& work);

}  // namespace draftproof
