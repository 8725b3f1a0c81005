#pragma once

#include "absl/status/status.h"
#include "kernels/device/thread_pool.h"

namespace weft::kernels {

enum class DeviceKind { kCpu, kCuda };

// An execution queue of one device: launches on it run in order. On the CPU a launch runs to its
// end before it returns; on CUDA it is asynchronous.
//
// Threading: one thread (the rank's executor).
class Stream {
 public:
  virtual ~Stream() = default;
  virtual DeviceKind device() const = 0;
  // Returns when everything launched so far has run, with the first error any of it met.
  virtual absl::Status Synchronize() = 0;
};

// Picks the CPU target on the first construction (kernels/device/cpu_target.h).
class CpuStream final : public Stream {
 public:
  explicit CpuStream(int num_threads);
  DeviceKind device() const override { return DeviceKind::kCpu; }
  absl::Status Synchronize() override { return absl::OkStatus(); }
  ThreadPool& pool() { return pool_; }
  int num_threads() const { return pool_.num_threads(); }

 private:
  ThreadPool pool_;
};

}  // namespace weft::kernels
