#include <cstring>

#include "worker/group/communicator.h"

namespace weft {
namespace {

class SelfCommunicator final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }

  absl::Status AllReduceSum(void*, std::int64_t, DType, kernels::Stream&) override {
    return Copy(nullptr, nullptr, 0);
  }
  absl::Status AllGather(const void* in, void* out, std::int64_t bytes_per_rank,
                         kernels::Stream&) override {
    return Copy(in, out, bytes_per_rank);
  }
  absl::Status ReduceScatterSum(const void* in, void* out, std::int64_t count_per_rank, DType dtype,
                                kernels::Stream&) override {
    return Copy(in, out, count_per_rank * DTypeBytes(dtype));
  }
  absl::Status AllToAll(const void* in, void* out, std::int64_t bytes_per_rank,
                        kernels::Stream&) override {
    return Copy(in, out, bytes_per_rank);
  }
  absl::Status Gather(const void* in, void* out, std::int64_t bytes_per_rank,
                      kernels::Stream&) override {
    return Copy(in, out, bytes_per_rank);
  }

  CollectiveCounters Counters() const override { return counters_; }
  std::int64_t workspace_bytes() const override { return 0; }
  void Abort() override { aborted_.store(true, std::memory_order_relaxed); }

 private:
  absl::Status Copy(const void* in, void* out, std::int64_t bytes) {
    if (aborted_.load(std::memory_order_relaxed)) return absl::AbortedError("aborted");
    ++counters_.operations;
    if (in != out && bytes > 0) std::memcpy(out, in, static_cast<std::size_t>(bytes));
    return absl::OkStatus();
  }

  CollectiveCounters counters_;
  std::atomic<bool> aborted_{false};
};

}  // namespace

std::unique_ptr<Communicator> MakeSelfCommunicator() {
  return std::make_unique<SelfCommunicator>();
}

}  // namespace weft
