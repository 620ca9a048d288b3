#include "threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "ieee.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace draftproof {
namespace {

// Whether this thread works on a piece of something larger: then it shares no further.
thread_local bool sharing = false;

struct Job {
  const std::function<void(int64_t, int64_t)>* work;
  int64_t rows, grain;
  std::atomic<int64_t> next{0}, finished{0};
  std::once_flag first_failure;
  std::exception_ptr failure;  // of the piece that failed first

  // Work on pieces until none is left to begin.
  void help() {
    const IeeeScope ieee;
    sharing = true;
    take();
    sharing = false;
  }

 private:
  void take() {
    for (;;) {
      const int64_t first = next.fetch_add(grain, std::memory_order_relaxed);
      if (first >= rows) return;
      const int64_t last = std::min(first + grain, rows);
      try {
        (*work)(first, last);
      } catch (...) {
        std::call_once(first_failure, [this] { failure = std::current_exception(); });
      }
      finished.fetch_add(last - first, std::memory_order_release);
      finished.notify_all();
    }
  }
};

// A thread that has just worked is likely to be wanted again: it looks for work a while before it sleeps, and the
// caller for the end of it, since waking a thread costs about as much as reading a row.
constexpr int kSpins = 2000;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads start on first use and live as long as the process; a pool is never destroyed, since they may be running.
// A forked child has none of its parent's threads, so it begins with a pool of its own.
class Pool {
 public:
  static Pool& instance() {
    static const bool watching = [] {
#if defined(__unix__) || defined(__APPLE__)
      pthread_atfork(nullptr, nullptr, [] { current() = new Pool; });
#endif
      return true;
    }();
    static_cast<void>(watching);
    return *current();
  }

  // Where the system gives no more threads or memory, those that there are do the work, at worst the caller alone.
  void submit(const std::shared_ptr<Job>& job, int helpers) {
    const std::lock_guard lock(mutex_);
    try {
      while (started_ < helpers) {
        std::thread([this] { loop(); }).detach();
        ++started_;
      }
    } catch (const std::exception&) {
    }
    try {
      for (int i = 0; i < std::min(helpers, started_); ++i) queue_.push_back(job);
    } catch (const std::bad_alloc&) {  // those that are in the queue already may have begun
    }
    waiting_.store(static_cast<int>(queue_.size()), std::memory_order_relaxed);
    if (asleep_ > 0) wake_.notify_all();
  }

 private:
  static Pool*& current() {
    static Pool* pool = new Pool;
    return pool;
  }

  void loop() {
    for (;;) {
      for (int i = 0; i < kSpins && waiting_.load(std::memory_order_relaxed) == 0; ++i) pause();
      std::shared_ptr<Job> job;
      {
        std::unique_lock lock(mutex_);
        ++asleep_;
        wake_.wait(lock, [this] { return !queue_.empty(); });
        --asleep_;
        job = std::move(queue_.front());
        queue_.pop_front();
        waiting_.store(static_cast<int>(queue_.size()), std::memory_order_relaxed);
      }
      job->help();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> queue_;
  std::atomic<int> waiting_{0};  // jobs in the queue, to look at without the lock
  int started_ = 0, asleep_ = 0;
};

std::atomic<int> threads{0};

}  // namespace

int num_threads() {
  // Asking the system takes longer than drawing from a row.
  static const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const int n = threads.load(std::memory_order_relaxed);
  return n > 0 ? n : cores;
}

void set_num_threads(int n) { threads.store(n, std::memory_order_relaxed); }

void parallel_rows(int64_t rows, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
  const int64_t pieces = (rows + grain - 1) / grain;
  const int helpers = sharing ? 0 : static_cast<int>(std::min<int64_t>(num_threads(), pieces)) - 1;
  if (helpers <= 0) {
    const IeeeScope ieee;
    if (rows > 0) work(0, rows);
    return;
  }
  const auto job = std::make_shared<Job>();
  job->work = &work;
  job->rows = rows;
  job->grain = grain;
  Pool::instance().submit(job, helpers);
  job->help();
  for (int i = 0; i < kSpins && job->finished.load(std::memory_order_acquire) < rows; ++i) pause();
  for (int64_t done = job->finished.load(std::memory_order_acquire); done < rows;
       done = job->finished.load(std::memory_order_acquire))
    job->finished.wait(done, std::memory_order_acquire);
  if (job->failure) std::rethrow_exception(job->failure);
}

}  // namespace draftproof
