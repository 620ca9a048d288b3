// The threads of the core under ThreadSanitizer: rows are worked on once each, whoever calls meanwhile, however the number
// of threads changes, and in a forked child too.
#include "threads.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

// A child that goes on after a fork is what one of the tests is about. GCC's sanitizer takes its threads for its parent's.
#if defined(__SANITIZE_THREAD__) && !defined(__clang__)
constexpr bool kForks = false;
#else
constexpr bool kForks = true;
#endif
extern "C" const char* __tsan_default_options() { return "die_after_fork=0:halt_on_error=1:second_deadlock_stack=1"; }

namespace {

using namespace draftproof;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::_Exit(1);
}

// Plain memory, written to by whichever thread gets the row: a row that is worked on twice is a race.
void each_row_once(int64_t rows, int64_t grain) {
  std::vector<int64_t> visits(rows, 0);
  int64_t calls_beyond = 0;
  parallel_rows(rows, grain, [&](int64_t first, int64_t last) {
    if (first < 0 || last > rows || first >= last) ++calls_beyond;
    for (int64_t i = first; i < last; ++i) visits[i] += i + 1;
  });
  require(calls_beyond == 0, "pieces lie within the rows");
  for (int64_t i = 0; i < rows; ++i) require(visits[i] == i + 1, "each row is worked on once");
}

// Whether two threads are ever in the work at the same time.
bool helped() {
  std::atomic<int> inside{0};
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  parallel_rows(2, 1, [&](int64_t, int64_t) {
    ++inside;
    while (inside < 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  });
  return std::chrono::steady_clock::now() < end;
}

void any_number_of_threads() {
  for (int n = 1; n <= 9; ++n) {
    set_num_threads(n);
    require(n == 1 || helped(), "helpers help");
    require(num_threads() == n, "the number of threads is what was set");
    for (const int64_t rows : {0, 1, 2, 7, 64, 1000})
      for (const int64_t grain : {1, 3, 1000}) each_row_once(rows, grain);
  }
}

void concurrent_callers() {
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([i] {
      for (int turn = 0; turn < 1000; ++turn) each_row_once(1 + (turn * 7 + i) % 50, 1 + turn % 3);
    });
  for (auto& caller : callers) caller.join();
}

void changing_the_number_of_threads() {
  std::atomic<bool> done{false};
  std::thread changer([&] {
    for (int n = 1; !done; n = n % 8 + 1) set_num_threads(n);
  });
  concurrent_callers();
  done = true;
  changer.join();
}

// The child has none of its parent's threads and starts its own; its parent may be in the middle of a call.
void forked_children() {
  set_num_threads(3);
  std::atomic<bool> done{false};
  std::thread caller([&] {
    while (!done) each_row_once(40, 1);
  });
  for (int turn = 0; turn < 5; ++turn) {
    const pid_t child = fork();
    require(child >= 0, "fork");
    if (child == 0) {
      alarm(60);  // for a child that waits for threads it does not have
      for (int again = 0; again < 10; ++again) each_row_once(40, 1);
      _exit(helped() ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child works on");
    each_row_once(40, 1);
  }
  done = true;
  caller.join();
}

}  // namespace

int main() {
  any_number_of_threads();
  concurrent_callers();
  changing_the_number_of_threads();
  if (kForks) forked_children();
  std::puts(kForks ? "threads: passed" : "threads: passed, without forks");
}
