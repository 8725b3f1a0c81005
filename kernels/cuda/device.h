#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/linear.h"
#include "kernels/cuda/nccl.h"
#include "kernels/cuda/stream.h"
#include "kernels/device/device_stream.h"

namespace weft::kernels::cuda {

// A GPU of this process: activations in fp32, products of what they are rounded to in the weights'
// dtype.
class CudaDevice final : public DeviceStream {
 public:
  // Makes `index` the calling thread's device; `host` outlives the result. FAILED_PRECONDITION
  // "no CUDA device" where there is none, INVALID_ARGUMENT for an index that there is not.
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Open(int index, CpuStream& host);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  std::string_view name() const override { return name_; }
  CpuStream& host() override { return host_; }
  absl::StatusOr<std::int64_t> FreeBytes() override;
  absl::StatusOr<std::unique_ptr<DeviceStream>> NewStream() override;
  absl::Status BindThread() override;
  absl::Status Synchronize() override;
  absl::StatusOr<void*> Allocate(std::int64_t bytes) override;
  void Free(void* data) override;
  absl::StatusOr<void*> AllocateHost(std::int64_t bytes) override;
  void FreeHost(void* data) override;
  absl::Status CopyToDevice(void* to, const void* from, std::int64_t bytes) override;
  absl::Status CopyToHost(void* to, const void* from, std::int64_t bytes) override;
  absl::Status Reserve(const DeviceScratch& scratch) override;
  absl::Status BeginCapture() override;
  absl::StatusOr<std::unique_ptr<DeviceGraph>> EndCapture() override;
  absl::Status Launch(const DeviceGraph& graph) override;
  absl::StatusOr<DeviceGroupId> NewGroupId() override;
  absl::StatusOr<std::unique_ptr<DeviceCommunicator>> JoinGroup(const DeviceGroup& group) override;

  absl::Status CombineExperts(const kernels::CombineExpertsParams& p) override;
  absl::Status Embedding(const kernels::EmbeddingParams& p) override;
  absl::Status FilteredSample(const FilteredSampleParams& p) override;
  absl::Status GatherRows(const kernels::GatherRowsParams& p) override;
  absl::Status GqaAttention(const kernels::GqaAttentionParams& p, void* workspace) override;
  std::int64_t GqaAttentionWorkspaceBytes(std::int32_t max_rows, std::int32_t num_q_heads,
                                          std::int32_t value_dim) const override;
  absl::Status GroupedLinear(const DeviceGroupedLinearParams& p) override;
  absl::Status GumbelArgmax(const GumbelArgmaxParams& p) override;
  absl::Status KvAppend(const kernels::KvAppendParams& p) override;
  absl::Status KvCopy(const KvCopyParams& p) override;
  absl::Status Linear(const LinearParams& p) override;
  absl::Status LseMerge(const kernels::LseMergeParams& p) override;
  absl::Status LseScale(const kernels::LseScaleParams& p) override;
  absl::Status PackHeads(const kernels::HeadExchangeParams& p, const float* heads, float padding,
                         float* parts) override;
  absl::Status RmsNorm(const kernels::RmsNormParams& p) override;
  absl::Status Rope(const kernels::RopeParams& p) override;
  absl::Status RouteRows(const RouteRowsParams& p) override;
  absl::Status SiluMul(const kernels::SiluMulParams& p) override;
  absl::Status SortByExpert(const SortByExpertParams& p) override;
  absl::Status UnpackHeads(const kernels::HeadExchangeParams& p, const float* parts,
                           float* heads) override;

 private:
  CudaDevice(int index, std::string name, CpuStream& host, std::unique_ptr<CudaStream> stream,
             std::unique_ptr<Matmul> matmul);
  absl::Status CheckGroups();

  const int index_;
  const std::string name_;
  CpuStream& host_;
  const std::unique_ptr<CudaStream> stream_;
  const std::unique_ptr<Matmul> matmul_;   // null in what NewStream() gives
  std::vector<NcclCommunicator*> groups_;  // that are joined; each takes itself out
  std::int64_t rounded_bytes_ = 0;
  void* rounded_ = nullptr;  // a product's x in the dtype of its weight
  void* argmax_workspace_ = nullptr;
};

}  // namespace weft::kernels::cuda
