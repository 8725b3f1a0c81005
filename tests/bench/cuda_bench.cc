// Measures the CUDA backend on a GPU: a JSON line a figure, flushed as it is known. What
// scripts/gpu_check.sh runs, a group at a time.

#include "tests/bench/cuda_bench.h"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>

#include "CLI/CLI.hpp"
#include "server/base/status_macros.h"

namespace weft::bench {

using kernels::cuda::StatusOf;

absl::StatusOr<std::unique_ptr<CudaBench>> CudaBench::Create(bool dry_run, double copy_bytes_per_s,
                                                             double bf16_flops) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    return absl::FailedPreconditionError("no CUDA device: nothing to measure");
  }
  RETURN_IF_ERROR(StatusOf(cudaSetDevice(0), "cudaSetDevice"));
  ASSIGN_OR_RETURN(auto stream, kernels::cuda::CudaStream::Create());
  std::unique_ptr<CudaBench> bench(new CudaBench(dry_run, std::move(stream)));
  bench->copy_bytes_per_s = copy_bytes_per_s;
  bench->bf16_flops = bf16_flops;
  bench->flush_bytes_ = dry_run ? 1 << 10 : std::int64_t{256} << 20;  // several times any L2
  RETURN_IF_ERROR(StatusOf(
      cudaMalloc(&bench->flush_, static_cast<std::size_t>(bench->flush_bytes_)), "cudaMalloc"));
  RETURN_IF_ERROR(StatusOf(cudaEventCreate(&bench->start_), "cudaEventCreate"));
  RETURN_IF_ERROR(StatusOf(cudaEventCreate(&bench->end_), "cudaEventCreate"));
  return bench;
}

CudaBench::~CudaBench() {
  FreeAll();
  cudaFree(flush_);
  if (start_ != nullptr) cudaEventDestroy(start_);
  if (end_ != nullptr) cudaEventDestroy(end_);
}

absl::StatusOr<std::byte*> CudaBench::Zeros(std::int64_t bytes) {
  void* data = nullptr;
  RETURN_IF_ERROR(StatusOf(cudaMalloc(&data, static_cast<std::size_t>(bytes)), "cudaMalloc"));
  allocated_.push_back(data);
  RETURN_IF_ERROR(
      StatusOf(cudaMemsetAsync(data, 0, static_cast<std::size_t>(bytes), stream_->handle()),
               "cudaMemsetAsync"));
  return static_cast<std::byte*>(data);
}

absl::StatusOr<std::int32_t*> CudaBench::Indices(const std::vector<std::int32_t>& values) {
  const std::size_t bytes = values.size() * sizeof(std::int32_t);
  ASSIGN_OR_RETURN(std::byte * data, Zeros(static_cast<std::int64_t>(bytes)));
  RETURN_IF_ERROR(StatusOf(
      cudaMemcpyAsync(data, values.data(), bytes, cudaMemcpyHostToDevice, stream_->handle()),
      "cudaMemcpyAsync"));
  RETURN_IF_ERROR(stream_->Synchronize());  // before `values` goes
  return reinterpret_cast<std::int32_t*>(data);
}

void CudaBench::FreeAll() {
  for (void* const data : std::exchange(allocated_, {})) cudaFree(data);
}

absl::StatusOr<double> CudaBench::Seconds(absl::FunctionRef<absl::Status()> call) {
  const int num_calls = dry_run_ ? 1 : 10;
  const int num_replays = dry_run_ ? 1 : 20;
  RETURN_IF_ERROR(call());  // what is chosen at the first call is chosen now
  RETURN_IF_ERROR(stream_->Synchronize());
  RETURN_IF_ERROR(
      StatusOf(cudaStreamBeginCapture(stream_->handle(), cudaStreamCaptureModeThreadLocal),
               "cudaStreamBeginCapture"));
  for (int i = 0; i < num_calls; ++i) RETURN_IF_ERROR(call());
  cudaGraph_t graph = nullptr;
  RETURN_IF_ERROR(
      StatusOf(cudaStreamEndCapture(stream_->handle(), &graph), "cudaStreamEndCapture"));
  cudaGraphExec_t exec = nullptr;
  RETURN_IF_ERROR(StatusOf(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate"));
  cudaGraphDestroy(graph);
  std::vector<float> milliseconds;
  for (int i = 0; i < num_replays; ++i) {
    cudaMemsetAsync(flush_, i, static_cast<std::size_t>(flush_bytes_), stream_->handle());
    cudaEventRecord(start_, stream_->handle());
    cudaGraphLaunch(exec, stream_->handle());
    cudaEventRecord(end_, stream_->handle());
    RETURN_IF_ERROR(stream_->Synchronize());
    cudaEventElapsedTime(&milliseconds.emplace_back(), start_, end_);
  }
  cudaGraphExecDestroy(exec);
  std::nth_element(milliseconds.begin(), milliseconds.begin() + num_replays / 2,
                   milliseconds.end());
  return milliseconds[num_replays / 2] / 1e3 / num_calls;
}

void CudaBench::Report(std::string_view group, std::string_view name, double seconds, double bytes,
                       double flops, double share) {
  const double memory = copy_bytes_per_s > 0 ? bytes / copy_bytes_per_s : 0;
  const double compute = bf16_flops > 0 ? flops / bf16_flops : 0;
  const double reached = std::max(memory, compute) / std::max(seconds, 1e-12);
  const bool pass = dry_run_ || reached >= share;
  all_pass &= pass;
  Print({{"group", group},
         {"name", name},
         {"us", seconds * 1e6},
         {"gb_per_s", bytes / seconds / 1e9},
         {"tflops", flops / seconds / 1e12},
         {"bound", compute > memory ? "compute" : "memory"},
         {"share_of_ceiling", reached},
         {"wanted", share},
         {"pass", pass}});
}

void CudaBench::Print(nlohmann::ordered_json line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft;
  CLI::App app("Measures the CUDA backend on GPU 0; JSON lines.");
  std::string group;
  bool dry_run = false;
  double copy = 0;
  double flops = 0;
  app.add_option("group", group, "peaks, gqa, mla, merge or steps")->required();
  app.add_flag("--dry-run", dry_run, "Tiny shapes, once");
  app.add_option("--copy-bytes-per-s", copy, "What \"peaks\" has found, for shares of it");
  app.add_option("--bf16-flops", flops, "Likewise");
  CLI11_PARSE(app, argc, argv);
  const auto bench = bench::CudaBench::Create(dry_run, copy, flops);
  absl::Status status = bench.status();
  if (status.ok()) {
    status = group == "peaks"   ? bench::MeasurePeaks(**bench)
             : group == "gqa"   ? bench::MeasureGqa(**bench)
             : group == "mla"   ? bench::MeasureMla(**bench)
             : group == "merge" ? bench::MeasureMerge(**bench)
             : group == "steps" ? bench::MeasureSteps(**bench)
                                : absl::InvalidArgumentError("no such group: " + group);
  }
  if (!status.ok()) {
    std::fprintf(stderr, "cuda_bench: %s\n", std::string(status.message()).c_str());
    return 2;
  }
  return (*bench)->all_pass ? 0 : 1;
}
