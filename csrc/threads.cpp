#include "threads.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace draftproof {
namespace {

struct Job {
  const std::function<void(int64_t, int64_t)>* work;
  int64_t rows, grain;
  std::atomic<int64_t> next{0}, finished{0};

  // Work on pieces until none is left to begin.
  void help() {
    for (;;) {
      const int64_t first = next.fetch_add(grain, std::memory_order_relaxed);
      if (first >= rows) return;
      const int64_t last = std::min(first + grain, rows);
      (*work)(first, last);
      finished.fetch_add(last - first, std::memory_order_release);
      finished.notify_all();
    }
  }
};

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

  // Where the system gives no more threads, those that there are do the work, at worst the caller alone.
  void submit(const std::shared_ptr<Job>& job, int helpers) {
    const std::lock_guard lock(mutex_);
    try {
      while (started_ < helpers) {
        std::thread([this] { loop(); }).detach();
        ++started_;
      }
    } catch (const std::system_error&) {
    }
    for (int i = 0; i < std::min(helpers, started_); ++i) queue_.push_back(job);
    wake_.notify_all();
  }

 private:
  static Pool*& current() {
    static Pool* pool = new Pool;
    return pool;
  }

  void loop() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [this] { return !queue_.empty(); });
        job = std::move(queue_.front());
        queue_.pop_front();
      }
      job->help();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> queue_;
  int started_ = 0;
};

std::atomic<int> threads{0};

}  // namespace

int num_threads() {
  const int n = threads.load(std::memory_order_relaxed);
  return n > 0 ? n : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void set_num_threads(int n) { threads.store(n, std::memory_order_relaxed); }

void parallel_rows(int64_t rows, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
  const int64_t pieces = (rows + grain - 1) / grain;
  const int helpers = static_cast<int>(std::min<int64_t>(num_threads(), pieces)) - 1;
  if (helpers <= 0) {
    if (rows > 0) work(0, rows);
    return;
  }
  const auto job = std::make_shared<Job>();
  job->work = &work;
  job->rows = rows;
  job->grain = grain;
  Pool::instance().submit(job, helpers);
  job->help();
  for (int64_t done = job->finished.load(std::memory_order_acquire); done < rows;
       done = job->finished.load(std::memory_order_acquire))
    job->finished.wait(done, std::memory_order_acquire);
}

}  // namespace draftproof
