#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/stream.h"
#include "nlohmann/json.hpp"

namespace weft::bench {

// How the GPU's check measures: the median of 20 replays of a graph of 10 calls, each replay after
// what is in the L2 cache has been overwritten. A dry run, under emulation or to see that it goes,
// has tiny shapes and few replays.
class CudaBench {
 public:
  // `copy_bytes_per_s` and `bf16_flops`: the ceilings that were measured before, or 0.
  static absl::StatusOr<std::unique_ptr<CudaBench>> Create(bool dry_run, double copy_bytes_per_s,
                                                           double bf16_flops);
  ~CudaBench();
  CudaBench(const CudaBench&) = delete;
  CudaBench& operator=(const CudaBench&) = delete;

  bool dry_run() const { return dry_run_; }
  kernels::cuda::CudaStream& stream() { return *stream_; }
  // The shape's size, or that of a dry run.
  std::int32_t Size(std::int32_t real, std::int32_t dry) const { return dry_run_ ? dry : real; }

  // Device memory, of zeros, until the next FreeAll().
  absl::StatusOr<std::byte*> Zeros(std::int64_t bytes);
  absl::StatusOr<std::int32_t*> Indices(const std::vector<std::int32_t>& values);
  void FreeAll();

  // Of one call.
  absl::StatusOr<double> Seconds(absl::FunctionRef<absl::Status()> call);

  // A line of JSON: `name`, what `seconds` makes of the bytes and operations that the call has to
  // do at least, and whether that reaches `share` of the ceiling that binds.
  void Report(std::string_view group, std::string_view name, double seconds, double bytes,
              double flops, double share);
  void Print(nlohmann::ordered_json line);

  double copy_bytes_per_s = 0;
  double bf16_flops = 0;
  bool all_pass = true;

 private:
  CudaBench(bool dry_run, std::unique_ptr<kernels::cuda::CudaStream> stream)
      : dry_run_(dry_run), stream_(std::move(stream)) {}

  const bool dry_run_;
  const std::unique_ptr<kernels::cuda::CudaStream> stream_;
  std::vector<void*> allocated_;
  void* flush_ = nullptr;
  std::int64_t flush_bytes_ = 0;
  cudaEvent_t start_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

// The groups. Errors are the device's; what is too slow is reported, and no error.
absl::Status MeasurePeaks(CudaBench& bench);
absl::Status MeasureGqa(CudaBench& bench);
absl::Status MeasureMla(CudaBench& bench);
absl::Status MeasureMerge(CudaBench& bench);
// Whole steps, by the code that serves: needs no CudaBench::Seconds().
absl::Status MeasureSteps(CudaBench& bench);

}  // namespace weft::bench
