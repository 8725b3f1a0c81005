#include "kernels/device/thread_pool.h"

#include <sched.h>

#include <atomic>
#include <thread>
#include <vector>

#include "hwy/cache_control.h"
#include "server/base/check.h"
#include "server/base/mutex.h"

namespace weft::kernels {
namespace {

// About 50 us of pauses, then about as long of yields, before a thread sleeps: the gaps between
// the launches of a step are shorter, and waking a sleeper costs about as much.
constexpr int kSpins = 1500;
constexpr int kYields = 100;

// True if `ready` came true within the bound.
template <typename Ready>
bool SpinUntil(const Ready& ready) {
  for (int i = 0; i < kSpins; ++i) {
    if (ready()) return true;
    hwy::Pause();
  }
  for (int i = 0; i < kYields; ++i) {
    if (ready()) return true;
    sched_yield();
  }
  return false;
}

using Task = absl::FunctionRef<void(std::int64_t index, int thread)>;

// A claim word: the job's number above, the next index to hand out below. An index is claimed by
// compare-and-swap on the whole word, so a worker that read the fields of a job that has ended
// cannot claim anything of the next one.
constexpr int kIndexBits = 32;
constexpr std::uint64_t kIndexMask = (std::uint64_t{1} << kIndexBits) - 1;
constexpr std::uint64_t kClosed = kIndexMask;

}  // namespace

struct ThreadPool::Impl {
  explicit Impl(int num_threads) {
    for (int thread = 1; thread < num_threads; ++thread) {
      workers.emplace_back([this, thread] { WorkerLoop(thread); });
    }
  }

  ~Impl() {
    {
      MutexLock lock(mutex);
      stopping.store(true);
    }
    wake_workers.NotifyAll();
    for (std::thread& worker : workers) worker.join();
  }

  void Run(std::int64_t tasks, Task work) {
    const std::uint64_t job = (claim.load(std::memory_order_relaxed) >> kIndexBits) + 1;
    // Closed while the fields change: who sees a new field also sees that its old word is stale.
    claim.store(job << kIndexBits | kClosed, std::memory_order_relaxed);
    task.store(&work, std::memory_order_release);
    num_tasks.store(tasks, std::memory_order_release);
    finished.store(0, std::memory_order_relaxed);
    claim.store(job << kIndexBits, std::memory_order_seq_cst);
    if (sleeping_workers.load(std::memory_order_seq_cst) > 0) {
      { MutexLock lock(mutex); }
      wake_workers.NotifyAll();
    }
    RunTasks(/*thread=*/0);
    const auto done = [&] { return finished.load(std::memory_order_acquire) == tasks; };
    if (SpinUntil(done)) return;
    MutexLock lock(mutex);
    caller_sleeps.store(true, std::memory_order_seq_cst);
    while (finished.load(std::memory_order_seq_cst) != tasks) wake_caller.Wait(mutex);
    caller_sleeps.store(false, std::memory_order_relaxed);
  }

  // Claims and runs until nothing is left.
  void RunTasks(int thread) {
    std::int64_t ran = 0;
    std::uint64_t word = claim.load(std::memory_order_acquire);
    for (;;) {
      const auto index = static_cast<std::int64_t>(word & kIndexMask);
      const Task* const work = task.load(std::memory_order_acquire);
      if (index >= num_tasks.load(std::memory_order_acquire)) break;
      if (!claim.compare_exchange_weak(word, word + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
        // Only the caller opens a job, and not while this thread holds part of one: a new job
        // here means that nothing of the old one was claimed.
        continue;
      }
      (*work)(index, thread);
      ++ran;
      word = claim.load(std::memory_order_acquire);
    }
    if (ran == 0) return;
    const std::int64_t total = finished.fetch_add(ran, std::memory_order_seq_cst) + ran;
    if (thread != 0 && caller_sleeps.load(std::memory_order_seq_cst) &&
        total == num_tasks.load(std::memory_order_relaxed)) {
      { MutexLock lock(mutex); }
      wake_caller.NotifyOne();
    }
  }

  void WorkerLoop(int thread) {
    std::uint64_t seen = 0;
    for (;;) {
      const auto ready = [&] {
        return claim.load(std::memory_order_seq_cst) >> kIndexBits != seen ||
               stopping.load(std::memory_order_relaxed);
      };
      if (!SpinUntil(ready)) {
        MutexLock lock(mutex);
        sleeping_workers.fetch_add(1, std::memory_order_seq_cst);
        while (!ready()) wake_workers.Wait(mutex);
        sleeping_workers.fetch_sub(1, std::memory_order_seq_cst);
      }
      if (stopping.load()) return;
      seen = claim.load(std::memory_order_acquire) >> kIndexBits;
      RunTasks(thread);
    }
  }

  // The job. A claim word published with it orders what is read after.
  alignas(64) std::atomic<std::uint64_t> claim{kClosed};
  std::atomic<const Task*> task{nullptr};
  std::atomic<std::int64_t> num_tasks{0};
  alignas(64) std::atomic<std::int64_t> finished{0};

  alignas(64) Mutex mutex;  // for sleeping only
  CondVar wake_workers;
  CondVar wake_caller;
  std::atomic<int> sleeping_workers{0};
  std::atomic<bool> caller_sleeps{false};
  std::atomic<bool> stopping{false};
  std::vector<std::thread> workers;
  std::atomic<std::uint64_t> run_alone{0};  // tasks that were not claimed; written by the caller
};

ThreadPool::ThreadPool(int num_threads) {
  CHECK(num_threads >= 1);
  impl_ = std::make_unique<Impl>(num_threads);
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::num_threads() const { return static_cast<int>(impl_->workers.size()) + 1; }

std::uint64_t ThreadPool::num_claims() const {
  return impl_->claim.load(std::memory_order_relaxed) +
         impl_->run_alone.load(std::memory_order_relaxed);
}

void ThreadPool::ParallelFor(std::int64_t num_tasks, Task task) {
  DCHECK(num_tasks < static_cast<std::int64_t>(kClosed));
  if (num_tasks <= 1 || impl_->workers.empty()) {
    for (std::int64_t index = 0; index < num_tasks; ++index) {
      impl_->run_alone.store(impl_->run_alone.load(std::memory_order_relaxed) + 1,
                             std::memory_order_relaxed);
      task(index, 0);
    }
    return;
  }
  impl_->Run(num_tasks, task);
}

}  // namespace weft::kernels
