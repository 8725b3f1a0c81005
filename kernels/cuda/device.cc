#include "kernels/cuda/device.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "kernels/cuda/attention.h"
#include "kernels/cuda/elementwise.h"
#include "kernels/cuda/filtered_sample.h"
#include "kernels/cuda/grouped_linear.h"
#include "kernels/cuda/gumbel_argmax.h"
#include "kernels/cuda/kv_append.h"
#include "kernels/cuda/kv_copy.h"
#include "kernels/cuda/lse_merge.h"
#include "kernels/cuda/memory.h"
#include "kernels/cuda/moe.h"
#include "kernels/elementwise.h"
#include "kernels/head_exchange.h"
#include "kernels/linear.h"
#include "kernels/lse_merge.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"

namespace weft::kernels::cuda {
namespace {

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(cudaGraphExec_t exec) : exec_(exec) {}
  ~CudaGraph() override { cudaGraphExecDestroy(exec_); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;
  cudaGraphExec_t exec() const { return exec_; }

 private:
  const cudaGraphExec_t exec_;
};

HeadExchangeParams ExchangeOf(const kernels::HeadExchangeParams& p) {
  return {.part_begin = p.part_begin,
          .num_parts = p.num_parts,
          .num_rows = p.num_rows,
          .padded_heads = p.padded_heads,
          .head_dim = p.head_dim,
          .part_stride = p.part_stride};
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Open(int index, CpuStream& host) {
  int count = 0;
  // Whatever is wrong with the driver, there is nothing to compute on.
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    return absl::FailedPreconditionError(
        fmt::format("no CUDA device: {}",
                    error == cudaSuccess ? "the driver has none" : cudaGetErrorString(error)));
  }
  if (index >= count) {
    return absl::InvalidArgumentError(fmt::format(
        "CUDA device {} is asked for, one for each rank of this host; there are {}", index, count));
  }
  RETURN_IF_ERROR(StatusOf(cudaSetDevice(index), "cudaSetDevice"));
  cudaDeviceProp properties;
  RETURN_IF_ERROR(StatusOf(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties"));
  ASSIGN_OR_RETURN(std::unique_ptr<CudaStream> stream, CudaStream::Create());
  ASSIGN_OR_RETURN(std::unique_ptr<Matmul> matmul, Matmul::Create());
  return std::unique_ptr<CudaDevice>(
      new CudaDevice(index, properties.name, host, std::move(stream), std::move(matmul)));
}

CudaDevice::CudaDevice(int index, std::string name, CpuStream& host,
                       std::unique_ptr<CudaStream> stream, std::unique_ptr<Matmul> matmul)
    : index_(index),
      name_(std::move(name)),
      host_(host),
      stream_(std::move(stream)),
      matmul_(std::move(matmul)) {}

CudaDevice::~CudaDevice() {
  Free(rounded_);
  Free(argmax_workspace_);
}

absl::StatusOr<std::int64_t> CudaDevice::FreeBytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  RETURN_IF_ERROR(StatusOf(cudaMemGetInfo(&free, &total), "cudaMemGetInfo"));
  return static_cast<std::int64_t>(free);
}

absl::StatusOr<std::unique_ptr<DeviceStream>> CudaDevice::NewStream() {
  ASSIGN_OR_RETURN(std::unique_ptr<CudaStream> stream, CudaStream::Create());
  return std::unique_ptr<CudaDevice>(
      new CudaDevice(index_, name_, host_, std::move(stream), nullptr));
}

absl::Status CudaDevice::BindThread() { return StatusOf(cudaSetDevice(index_), "cudaSetDevice"); }

absl::StatusOr<void*> CudaDevice::Allocate(std::int64_t bytes) {
  return AllocateOnDevice(bytes, name_);
}

void CudaDevice::Free(void* data) { cudaFree(data); }

absl::StatusOr<void*> CudaDevice::AllocateHost(std::int64_t bytes) {
  void* data = nullptr;
  RETURN_IF_ERROR(StatusOf(cudaMallocHost(&data, static_cast<std::size_t>(bytes)),
                           fmt::format("{} bytes of pinned memory", bytes).c_str()));
  return data;
}

void CudaDevice::FreeHost(void* data) { cudaFreeHost(data); }

absl::Status CudaDevice::CopyToDevice(void* to, const void* from, std::int64_t bytes) {
  return StatusOf(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice,
                                  stream_->handle()),
                  "copy to the device");
}

absl::Status CudaDevice::CopyToHost(void* to, const void* from, std::int64_t bytes) {
  return StatusOf(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost,
                                  stream_->handle()),
                  "copy to the host");
}

absl::Status CudaDevice::Reserve(const DeviceScratch& scratch) {
  CHECK(rounded_ == nullptr && argmax_workspace_ == nullptr);
  rounded_bytes_ = std::int64_t{scratch.linear_rows} * scratch.linear_columns * 2;
  ASSIGN_OR_RETURN(rounded_, Allocate(rounded_bytes_));
  ASSIGN_OR_RETURN(argmax_workspace_, Allocate(GumbelArgmaxWorkspaceBytes(scratch.logits_rows)));
  return absl::OkStatus();
}

absl::Status CudaDevice::BeginCapture() {
  return StatusOf(cudaStreamBeginCapture(stream_->handle(), cudaStreamCaptureModeThreadLocal),
                  "cudaStreamBeginCapture");
}

absl::StatusOr<std::unique_ptr<DeviceGraph>> CudaDevice::EndCapture() {
  cudaGraph_t graph = nullptr;
  RETURN_IF_ERROR(
      StatusOf(cudaStreamEndCapture(stream_->handle(), &graph), "cudaStreamEndCapture"));
  cudaGraphExec_t exec = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&exec, graph, 0);
  cudaGraphDestroy(graph);
  RETURN_IF_ERROR(StatusOf(error, "cudaGraphInstantiate"));
  return std::make_unique<CudaGraph>(exec);
}

absl::Status CudaDevice::Launch(const DeviceGraph& graph) {
  NoteLaunch("a graph of a step");
  return StatusOf(cudaGraphLaunch(static_cast<const CudaGraph&>(graph).exec(), stream_->handle()),
                  "cudaGraphLaunch");
}

absl::StatusOr<DeviceGroupId> CudaDevice::NewGroupId() {
  ASSIGN_OR_RETURN(const NcclApi* nccl, Nccl());
  NcclUniqueId id;
  if (const NcclResult result = nccl->get_unique_id(&id); result != kNcclSuccess) {
    return absl::UnavailableError(fmt::format(
        "ncclGetUniqueId: {}: {}", nccl->get_error_string(result), nccl->get_last_error(nullptr)));
  }
  DeviceGroupId bytes;
  std::memcpy(bytes.data(), id.internal, bytes.size());
  return bytes;
}

absl::StatusOr<std::unique_ptr<DeviceCommunicator>> CudaDevice::JoinGroup(
    const DeviceGroup& group) {
  ASSIGN_OR_RETURN(const NcclApi* nccl, Nccl());
  return NcclCommunicator::Join(*nccl, group, stream_->handle(), groups_);
}

absl::Status CudaDevice::CheckGroups() {
  for (NcclCommunicator* const group : groups_) RETURN_IF_ERROR(group->Check());
  return absl::OkStatus();
}

absl::Status CudaDevice::Synchronize() {
  if (groups_.empty()) return stream_->Synchronize();
  // A collective whose peer is gone never ends by itself: whoever waits has to look.
  constexpr absl::Duration kBusy = absl::Microseconds(100);
  const absl::Duration timeout = groups_.front()->stall_timeout();
  const absl::Time start = absl::Now();
  for (;;) {
    ASSIGN_OR_RETURN(const bool done, stream_->Query());
    RETURN_IF_ERROR(CheckGroups());
    if (done) return absl::OkStatus();
    const absl::Duration waited = absl::Now() - start;
    if (waited > timeout) break;
    if (waited > kBusy) absl::SleepFor(absl::Microseconds(20));
  }
  const absl::Status stalled = absl::UnavailableError(
      fmt::format("{} has not finished in {} what was launched: a rank is gone, or stalls", name_,
                  absl::FormatDuration(timeout)));
  for (NcclCommunicator* const group : groups_) group->End(stalled).IgnoreError();
  return stalled;
}

absl::Status CudaDevice::CombineExperts(const kernels::CombineExpertsParams& p) {
  return cuda::CombineExperts<float>({.in = p.in,
                                      .place_of = p.place_of,
                                      .weights = p.weights,
                                      .residual = p.residual,
                                      .out = p.out,
                                      .num_rows = p.num_rows,
                                      .top_k = p.top_k,
                                      .size = p.size},
                                     *stream_);
}

absl::Status CudaDevice::Embedding(const kernels::EmbeddingParams& p) {
  const auto embed = [&]<typename W>(W) {
    return cuda::Embedding<W>({.weight = reinterpret_cast<const W*>(p.weight->data()),
                               .ids = p.ids,
                               .out = p.out,
                               .num_rows = p.num_rows,
                               .first_row = p.first_row,
                               .num_weight_rows = p.weight->out_features(),
                               .size = p.weight->in_features()},
                              *stream_);
  };
  switch (*DTypeOf(p.weight->format())) {
    case DType::kFloat32:
      return embed(float());
    case DType::kBFloat16:
      return embed(BFloat16());
    case DType::kFloat16:
      return embed(Float16());
  }
  return absl::InternalError("Embedding: unreachable");
}

absl::Status CudaDevice::FilteredSample(const FilteredSampleParams& p) {
  return cuda::FilteredSample(p, *stream_);
}

absl::Status CudaDevice::GatherRows(const kernels::GatherRowsParams& p) {
  return cuda::GatherRows<float>(
      {.in = p.in, .index = p.index, .out = p.out, .num_rows = p.num_rows, .size = p.size},
      *stream_);
}

absl::Status CudaDevice::GqaAttention(const kernels::GqaAttentionParams& p, void* workspace) {
  return cuda::GqaAttention<float>(
      {.q = p.q,
       .out = p.out,
       .geometry = p,
       .max_visible_len = p.max_blocks_per_seq * p.block_tokens_per_rank},
      workspace, *stream_);
}

std::int64_t CudaDevice::GqaAttentionWorkspaceBytes(std::int32_t max_rows, std::int32_t num_q_heads,
                                                    std::int32_t value_dim) const {
  return cuda::GqaAttentionWorkspaceBytes(max_rows, num_q_heads, value_dim,
                                          std::numeric_limits<std::int32_t>::max() / 2);
}

absl::Status CudaDevice::GroupedLinear(const DeviceGroupedLinearParams& p) {
  const MatrixGroup& weights = *p.weights;
  const auto multiply = [&]<typename W>(W) {
    return cuda::GroupedLinear<W>(
        {.x = p.x,
         .row_of = p.row_of,
         .expert_begin = p.expert_begin,
         .weights = reinterpret_cast<const W* const*>(weights.addresses()),
         .y = p.y,
         .num_experts = static_cast<std::int32_t>(weights.size()),
         .max_rows = p.max_rows,
         .in_features = weights[0].in_features(),
         .out_features = weights[0].out_features(),
         .x_stride = p.x_stride,
         .y_stride = p.y_stride,
         .x_expert_stride = p.x_group_stride,
         .y_expert_stride = p.y_group_stride},
        *stream_);
  };
  switch (*DTypeOf(weights[0].format())) {
    case DType::kFloat32:
      return multiply(float());
    case DType::kBFloat16:
      return multiply(BFloat16());
    case DType::kFloat16:
      return multiply(Float16());
  }
  return absl::InternalError("GroupedLinear: unreachable");
}

absl::Status CudaDevice::GumbelArgmax(const GumbelArgmaxParams& p) {
  return cuda::GumbelArgmax(p, argmax_workspace_, *stream_);
}

absl::Status CudaDevice::KvAppend(const kernels::KvAppendParams& p) {
  return cuda::KvAppend<float>({.k = p.k,
                                .v = p.v,
                                .slots = p.slots,
                                .k_blocks = p.k_blocks,
                                .v_blocks = p.v_blocks,
                                .num_rows = p.num_rows,
                                .num_kv_heads = p.num_kv_heads,
                                .head_dim = p.head_dim,
                                .block_tokens_per_rank = p.block_tokens_per_rank,
                                .kv_stride = p.kv_stride,
                                .kv_dtype = p.kv_dtype},
                               *stream_);
}

absl::Status CudaDevice::KvCopy(const KvCopyParams& p) { return cuda::KvCopy(p, *stream_); }

absl::Status CudaDevice::Linear(const LinearParams& p) {
  const PackedMatrix& weight = *p.weight;
  const DType dtype = *DTypeOf(weight.format());
  MatmulParams product = {.x = p.x,
                          .weight = weight.data(),
                          .bias = p.bias,
                          .residual = p.residual,
                          .y = p.y,
                          .num_rows = p.num_rows,
                          .in_features = weight.in_features(),
                          .out_features = weight.out_features(),
                          .x_stride = p.x_stride,
                          .y_stride = p.y_stride,
                          .dtype = dtype};
  if (dtype != DType::kFloat32) {
    CHECK(std::int64_t{p.num_rows} * weight.in_features() * 2 <= rounded_bytes_);
    const auto round = [&]<typename T>(T) {
      return RoundRows<T>({.x = p.x,
                           .out = static_cast<T*>(rounded_),
                           .num_rows = p.num_rows,
                           .size = weight.in_features(),
                           .x_stride = p.x_stride},
                          *stream_);
    };
    RETURN_IF_ERROR(dtype == DType::kBFloat16 ? round(BFloat16()) : round(Float16()));
    product.x = rounded_;
    product.x_stride = weight.in_features();
  }
  return matmul_->Run(product, *stream_);
}

absl::Status CudaDevice::LseMerge(const kernels::LseMergeParams& p) {
  return cuda::LseMerge<float>({.parts = p.parts,
                                .lse = p.lse,
                                .part_stride = p.part_stride,
                                .lse_stride = p.lse_stride,
                                .out = p.out,
                                .merged_lse = p.merged_lse,
                                .num_parts = p.num_parts,
                                .num_rows = p.num_rows,
                                .num_heads = p.num_heads,
                                .padded_heads = p.num_heads,
                                .head_dim = p.head_dim},
                               *stream_);
}

absl::Status CudaDevice::LseScale(const kernels::LseScaleParams& p) {
  return cuda::LseScale<float>({.out = p.out,
                                .lse = p.lse,
                                .num_parts = p.num_parts,
                                .part = p.part,
                                .num_rows = p.num_rows,
                                .num_heads = p.num_heads,
                                .head_dim = p.head_dim},
                               *stream_);
}

absl::Status CudaDevice::PackHeads(const kernels::HeadExchangeParams& p, const float* heads,
                                   float padding, float* parts) {
  return cuda::PackHeads<float>(ExchangeOf(p), heads, padding, parts, *stream_);
}

absl::Status CudaDevice::UnpackHeads(const kernels::HeadExchangeParams& p, const float* parts,
                                     float* heads) {
  return cuda::UnpackHeads<float>(ExchangeOf(p), parts, heads, *stream_);
}

absl::Status CudaDevice::RmsNorm(const kernels::RmsNormParams& p) {
  return cuda::RmsNorm<float>({.x = p.x,
                               .residual = nullptr,
                               .weight = p.weight,
                               .sum = nullptr,
                               .out = p.out,
                               .num_rows = p.num_rows,
                               .size = p.size,
                               .eps = p.eps,
                               .num_heads = p.num_heads,
                               .row_stride = p.row_stride},
                              *stream_);
}

absl::Status CudaDevice::Rope(const kernels::RopeParams& p) {
  return cuda::Rope<float>({.x = p.x,
                            .cos = p.cos,
                            .sin = p.sin,
                            .num_rows = p.num_rows,
                            .num_heads = p.num_heads,
                            .head_dim = p.head_dim,
                            .row_stride = p.row_stride,
                            .head_stride = p.head_stride,
                            .out = p.out,
                            .out_row_stride = p.out_row_stride,
                            .out_head_stride = p.out_head_stride},
                           *stream_);
}

absl::Status CudaDevice::RouteRows(const RouteRowsParams& p) {
  return cuda::RouteRows(p, *stream_);
}

absl::Status CudaDevice::SiluMul(const kernels::SiluMulParams& p) {
  return cuda::SiluMul<float>(
      {.gate_up = p.gate_up, .out = p.out, .num_rows = p.num_rows, .size = p.size}, *stream_);
}

absl::Status CudaDevice::SortByExpert(const SortByExpertParams& p) {
  return cuda::SortByExpert(p, *stream_);
}

}  // namespace weft::kernels::cuda
