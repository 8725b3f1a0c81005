#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device_communicator.h"
#include "kernels/device/stream.h"

namespace weft::kernels {

struct CombineExpertsParams;
struct DeviceGroupedLinearParams;
struct EmbeddingParams;
struct FilteredSampleParams;
struct GatherRowsParams;
struct GqaAttentionParams;
struct GumbelArgmaxParams;
struct HeadExchangeParams;
struct KvAppendParams;
struct KvCopyParams;
struct LinearParams;
struct LseMergeParams;
struct LseScaleParams;
struct RmsNormParams;
struct RopeParams;
struct RouteRowsParams;
struct SiluMulParams;
struct SortByExpertParams;

// What the largest step asks for, beside the arguments of its launches.
struct DeviceScratch {
  std::int32_t linear_rows = 0;     // of any product
  std::int32_t linear_columns = 0;  // in_features of any
  std::int32_t logits_rows = 0;     // of GumbelArgmax()
};

// Launches that were recorded, with their arguments, to be run again at once. Ends before its
// stream.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
};

// A stream of a device with a memory of its own: what kernels/*.h launch there, and that memory.
// The functions of kernels/*.h hand themselves over to it; their contracts hold, but all pointers
// are to the device's memory, and everything is asynchronous: Synchronize() has the first error.
class DeviceStream : public Stream {
 public:
  DeviceKind device() const final { return DeviceKind::kCuda; }

  // For people, as "NVIDIA H200".
  virtual std::string_view name() const = 0;
  // For what the host does of a step, on memory of its own.
  virtual CpuStream& host() = 0;
  virtual absl::StatusOr<std::int64_t> FreeBytes() = 0;
  // Another stream of this device, not for products, for a thread that calls BindThread() first.
  virtual absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() = 0;
  virtual absl::Status BindThread() = 0;

  // 256-byte aligned; what is in it is undefined. RESOURCE_EXHAUSTED with the size when it cannot
  // be had. Never while steps run.
  virtual absl::StatusOr<void*> Allocate(std::int64_t bytes) = 0;
  virtual void Free(void* data) = 0;
  // Of the host, from which copies are asynchronous.
  virtual absl::StatusOr<void*> AllocateHost(std::int64_t bytes) = 0;
  virtual void FreeHost(void* data) = 0;
  // The host's side stays as it is, or untouched, until Synchronize().
  virtual absl::Status CopyToDevice(void* to, const void* from, std::int64_t bytes) = 0;
  virtual absl::Status CopyToHost(void* to, const void* from, std::int64_t bytes) = 0;
  // Before the first launch: nothing is allocated after it.
  virtual absl::Status Reserve(const DeviceScratch& scratch) = 0;

  // What is launched in between is recorded instead of run. In it nothing may be new to the stream
  // (launch it once before), wait, or allocate.
  virtual absl::Status BeginCapture() = 0;
  virtual absl::StatusOr<std::unique_ptr<DeviceGraph>> EndCapture() = 0;
  virtual absl::Status Launch(const DeviceGraph& graph) = 0;

  // Of one of the devices that are to join; for all of them.
  virtual absl::StatusOr<DeviceGroupId> NewGroupId() = 0;
  // Waits for the others. UNAVAILABLE when they do not come, UNIMPLEMENTED without what devices
  // exchange by (NCCL). With a group joined, Synchronize() waits for its stall_timeout at most.
  virtual absl::StatusOr<std::unique_ptr<DeviceCommunicator>> JoinGroup(
      const DeviceGroup& group) = 0;

  virtual absl::Status CombineExperts(const CombineExpertsParams& params) = 0;
  virtual absl::Status Embedding(const EmbeddingParams& params) = 0;
  virtual absl::Status FilteredSample(const FilteredSampleParams& params) = 0;
  virtual absl::Status GatherRows(const GatherRowsParams& params) = 0;
  virtual absl::Status GqaAttention(const GqaAttentionParams& params, void* workspace) = 0;
  virtual std::int64_t GqaAttentionWorkspaceBytes(std::int32_t max_rows, std::int32_t num_q_heads,
                                                  std::int32_t value_dim) const = 0;
  virtual absl::Status GroupedLinear(const DeviceGroupedLinearParams& params) = 0;
  virtual absl::Status GumbelArgmax(const GumbelArgmaxParams& params) = 0;
  virtual absl::Status KvAppend(const KvAppendParams& params) = 0;
  virtual absl::Status KvCopy(const KvCopyParams& params) = 0;
  virtual absl::Status Linear(const LinearParams& params) = 0;
  virtual absl::Status LseMerge(const LseMergeParams& params) = 0;
  virtual absl::Status LseScale(const LseScaleParams& params) = 0;
  virtual absl::Status PackHeads(const HeadExchangeParams& params, const float* heads,
                                 float padding, float* parts) = 0;
  virtual absl::Status RmsNorm(const RmsNormParams& params) = 0;
  virtual absl::Status Rope(const RopeParams& params) = 0;
  virtual absl::Status RouteRows(const RouteRowsParams& params) = 0;
  virtual absl::Status SiluMul(const SiluMulParams& params) = 0;
  virtual absl::Status SortByExpert(const SortByExpertParams& params) = 0;
  virtual absl::Status UnpackHeads(const HeadExchangeParams& params, const float* parts,
                                   float* heads) = 0;
};

// Null on the CPU.
inline DeviceStream* OnDevice(Stream& stream) {
  return stream.device() == DeviceKind::kCpu ? nullptr : static_cast<DeviceStream*>(&stream);
}
inline const DeviceStream* OnDevice(const Stream& stream) {
  return stream.device() == DeviceKind::kCpu ? nullptr : static_cast<const DeviceStream*>(&stream);
}

inline absl::StatusOr<std::shared_ptr<void>> AllocatePinned(DeviceStream& device,
                                                            std::int64_t bytes) {
  absl::StatusOr<void*> data = device.AllocateHost(bytes);
  if (!data.ok()) return data.status();
  return std::shared_ptr<void>(*data, [&device](void* at) { device.FreeHost(at); });
}

// The CPU that drives `stream`, or is it.
inline CpuStream& HostOf(Stream& stream) {
  DeviceStream* const device = OnDevice(stream);
  return device != nullptr ? device->host() : static_cast<CpuStream&>(stream);
}

}  // namespace weft::kernels
