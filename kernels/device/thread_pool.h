#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"

namespace weft::kernels {

// The compute threads of one rank: the calling thread and num_threads - 1 workers. Workers spin
// for a bounded time after a job and then sleep, since ranks share cores.
//
// Threading: one caller at a time (the rank's executor). Allocates nothing after construction.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  // Another value whenever a task was started since: a sign of life from inside a long job. Any
  // thread.
  std::uint64_t num_claims() const;

  // Runs task(index, thread) for every index in [0, num_tasks), thread in [0, num_threads), and
  // returns when all have returned. Indices are handed out in increasing order; which thread gets
  // which is unspecified, so results must not depend on it.
  void ParallelFor(std::int64_t num_tasks,
                   absl::FunctionRef<void(std::int64_t index, int thread)> task);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft::kernels
