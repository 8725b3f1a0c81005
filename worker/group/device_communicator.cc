#include "kernels/device/device_communicator.h"

#include <utility>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"
#include "worker/group/communicator.h"

namespace weft {
namespace {

constexpr std::int64_t kFloatBytes = sizeof(float);

class DeviceGroupCommunicator final : public Communicator {
 public:
  DeviceGroupCommunicator(std::unique_ptr<Communicator> host,
                          std::unique_ptr<kernels::DeviceCommunicator> device)
      : host_(std::move(host)), device_(std::move(device)) {
    CHECK(host_->rank() == device_->rank() && host_->size() == device_->size());
  }

  int rank() const override { return device_->rank(); }
  int size() const override { return device_->size(); }

  absl::StatusOr<kernels::Buffer> Allocate(std::int64_t bytes, kernels::Stream& stream) override {
    if (OnHost(stream) || bytes == 0) return host_->Allocate(bytes, stream);
    ASSIGN_OR_RETURN(void* data, device_->Allocate(bytes));
    return kernels::Buffer::Of(
        std::shared_ptr<void>(data, [this](void* memory) { device_->Free(memory); }), bytes);
  }
  absl::Status AllReduceSum(void* data, std::int64_t count, DType dtype,
                            kernels::Stream& stream) override {
    if (OnHost(stream)) return host_->AllReduceSum(data, count, dtype, stream);
    RETURN_IF_ERROR(CheckSum(dtype));
    // As of a ring: a reduce-scatter and an all-gather.
    return Counted(device_->AllReduceSum(static_cast<float*>(data), count),
                   2 * count * kFloatBytes / size());
  }
  absl::Status AllGather(const void* in, void* out, std::int64_t bytes_per_rank,
                         kernels::Stream& stream) override {
    if (OnHost(stream)) return host_->AllGather(in, out, bytes_per_rank, stream);
    return Counted(device_->AllGather(in, out, bytes_per_rank), bytes_per_rank);
  }
  absl::Status ReduceScatterSum(const void* in, void* out, std::int64_t count_per_rank, DType dtype,
                                kernels::Stream& stream) override {
    if (OnHost(stream)) return host_->ReduceScatterSum(in, out, count_per_rank, dtype, stream);
    RETURN_IF_ERROR(CheckSum(dtype));
    return Counted(device_->ReduceScatterSum(static_cast<const float*>(in),
                                             static_cast<float*>(out), count_per_rank),
                   count_per_rank * kFloatBytes);
  }
  absl::Status AllToAll(const void* in, void* out, std::int64_t bytes_per_rank,
                        kernels::Stream& stream) override {
    if (OnHost(stream)) return host_->AllToAll(in, out, bytes_per_rank, stream);
    return Counted(device_->AllToAll(in, out, bytes_per_rank), bytes_per_rank);
  }
  absl::Status Gather(const void* in, void* out, std::int64_t bytes_per_rank,
                      kernels::Stream& stream) override {
    CHECK_MSG(OnHost(stream), "what is gathered on one rank is the host's");
    return host_->Gather(in, out, bytes_per_rank, stream);
  }

  CollectiveCounters Counters() const override {
    CollectiveCounters counters = host_->Counters();
    counters.operations += operations_;
    counters.received_bytes += received_bytes_;
    return counters;
  }
  std::int64_t workspace_bytes() const override { return host_->workspace_bytes(); }
  void Abort() override {
    host_->Abort();
    device_->Abort();
  }

 private:
  static bool OnHost(const kernels::Stream& stream) {
    return stream.device() == kernels::DeviceKind::kCpu;
  }
  static absl::Status CheckSum(DType dtype) {
    if (dtype == DType::kFloat32) return absl::OkStatus();
    return absl::UnimplementedError(
        fmt::format("sums over ranks are of float32 only, not {}", DTypeName(dtype)));
  }
  absl::Status Counted(absl::Status status, std::int64_t bytes_of_each_peer) {
    if (!status.ok()) return status;
    ++operations_;
    received_bytes_ += static_cast<std::uint64_t>(bytes_of_each_peer * (size() - 1));
    return status;
  }

  const std::unique_ptr<Communicator> host_;
  const std::unique_ptr<kernels::DeviceCommunicator> device_;
  std::uint64_t operations_ = 0;
  std::uint64_t received_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Communicator> MakeDeviceCommunicator(
    std::unique_ptr<Communicator> host, std::unique_ptr<kernels::DeviceCommunicator> device) {
  return std::make_unique<DeviceGroupCommunicator>(std::move(host), std::move(device));
}

}  // namespace weft
