#include <algorithm>
#include <cstring>
#include <utility>

#include "fmt/format.h"
#include "kernels/device/device_stream.h"
#include "server/base/status_macros.h"
#include "worker/group/communicator.h"

namespace weft {
namespace {

class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> host, std::int64_t max_bytes,
                     std::shared_ptr<void> in, std::shared_ptr<void> out)
      : host_(std::move(host)), max_bytes_(max_bytes), in_(std::move(in)), out_(std::move(out)) {}

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }

  absl::Status AllReduceSum(void* data, std::int64_t count, DType dtype,
                            kernels::Stream& stream) override {
    const std::int64_t bytes = count * DTypeBytes(dtype);
    return Run(stream, data, bytes, data, bytes,
               [&](const void* from, void* to, kernels::Stream& host) {
                 if (from != to) std::memcpy(to, from, static_cast<std::size_t>(bytes));
                 return host_->AllReduceSum(to, count, dtype, host);
               });
  }
  absl::Status AllGather(const void* in, void* out, std::int64_t bytes_per_rank,
                         kernels::Stream& stream) override {
    return Run(stream, in, bytes_per_rank, out, bytes_per_rank * size(),
               [&](const void* from, void* to, kernels::Stream& host) {
                 return host_->AllGather(from, to, bytes_per_rank, host);
               });
  }
  absl::Status ReduceScatterSum(const void* in, void* out, std::int64_t count_per_rank, DType dtype,
                                kernels::Stream& stream) override {
    const std::int64_t part = count_per_rank * DTypeBytes(dtype);
    return Run(stream, in, part * size(), out, part,
               [&](const void* from, void* to, kernels::Stream& host) {
                 return host_->ReduceScatterSum(from, to, count_per_rank, dtype, host);
               });
  }
  absl::Status AllToAll(const void* in, void* out, std::int64_t bytes_per_rank,
                        kernels::Stream& stream) override {
    return Run(stream, in, bytes_per_rank * size(), out, bytes_per_rank * size(),
               [&](const void* from, void* to, kernels::Stream& host) {
                 return host_->AllToAll(from, to, bytes_per_rank, host);
               });
  }
  absl::Status Gather(const void* in, void* out, std::int64_t bytes_per_rank,
                      kernels::Stream& stream) override {
    return Run(stream, in, bytes_per_rank, out, rank() == 0 ? bytes_per_rank * size() : 0,
               [&](const void* from, void* to, kernels::Stream& host) {
                 return host_->Gather(from, to, bytes_per_rank, host);
               });
  }

  CollectiveCounters Counters() const override { return host_->Counters(); }
  std::int64_t workspace_bytes() const override {
    return host_->workspace_bytes() + 2 * max_bytes_;
  }
  void Abort() override { host_->Abort(); }

 private:
  // collective(in, out, stream): on the host's copies, or on the host's own memory as it is.
  template <typename Collective>
  absl::Status Run(kernels::Stream& stream, const void* in, std::int64_t in_bytes, void* out,
                   std::int64_t out_bytes, const Collective& collective) {
    kernels::DeviceStream* const device = kernels::OnDevice(stream);
    if (device == nullptr) return collective(in, out, stream);
    if (const std::int64_t bytes = std::max(in_bytes, out_bytes); bytes > max_bytes_) {
      return absl::InvalidArgumentError(
          fmt::format("a collective of {} bytes; at most {} are allowed", bytes, max_bytes_));
    }
    RETURN_IF_ERROR(device->CopyToHost(in_.get(), in, in_bytes));
    RETURN_IF_ERROR(device->Synchronize());  // what left out_ before has, too
    RETURN_IF_ERROR(collective(in_.get(), out_.get(), device->host()));
    return device->CopyToDevice(out, out_.get(), out_bytes);
  }

  const std::unique_ptr<Communicator> host_;
  const std::int64_t max_bytes_;
  const std::shared_ptr<void> in_;  // [max_bytes_]
  const std::shared_ptr<void> out_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> MakeStagedCommunicator(
    std::unique_ptr<Communicator> host, std::int64_t max_bytes, kernels::DeviceStream& device) {
  ASSIGN_OR_RETURN(std::shared_ptr<void> in, kernels::AllocatePinned(device, max_bytes));
  ASSIGN_OR_RETURN(std::shared_ptr<void> out, kernels::AllocatePinned(device, max_bytes));
  return std::make_unique<StagedCommunicator>(std::move(host), max_bytes, std::move(in),
                                              std::move(out));
}

}  // namespace weft
