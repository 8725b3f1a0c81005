#include "worker/model/dcp_attention.h"

#include <algorithm>
#include <limits>

#include "kernels/lse_merge.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();

}  // namespace

std::optional<DcpExchange> ParseDcpExchange(std::string_view name) {
  if (name == "ag_rs") return DcpExchange::kAgRs;
  if (name == "a2a") return DcpExchange::kA2a;
  return std::nullopt;
}

std::string_view DcpExchangeName(DcpExchange exchange) {
  return exchange == DcpExchange::kAgRs ? "ag_rs" : "a2a";
}

std::int64_t DcpAttention::MaxCollectiveBytes(const ShardLayout& layout, std::int32_t q_dim,
                                              std::int32_t out_dim, std::int32_t max_rows) {
  const std::int64_t floats_per_head = std::max(q_dim, out_dim + 1);
  // The LSE all-gather carries every head's LSE from every rank.
  const std::int64_t per_row = std::max<std::int64_t>(
      layout.PaddedQHeads() * floats_per_head,
      static_cast<std::int64_t>(layout.PaddedQHeads()) * layout.decode_context_parallel_size());
  return per_row * layout.decode_context_parallel_size() * max_rows * sizeof(float);
}

absl::StatusOr<DcpAttention> DcpAttention::Create(const ShardLayout& layout, std::int32_t q_dim,
                                                  std::int32_t out_dim, std::int32_t max_rows,
                                                  DcpExchange exchange, Communicator& dcp,
                                                  kernels::Stream& stream) {
  DcpAttention a;
  a.dcp_ = &dcp;
  a.exchange_ = exchange;
  a.n_ = layout.decode_context_parallel_size();
  a.padded_heads_ = layout.PaddedQHeads();
  a.group_heads_ = layout.GroupQHeads().size();
  a.q_dim_ = q_dim;
  a.out_dim_ = out_dim;
  const std::int32_t first_rank = layout.dcp_group() * a.n_;
  ASSIGN_OR_RETURN(a.part_begin_, kernels::Mirror<std::int32_t>::Create(a.n_ + 1, stream));
  for (std::int32_t i = 0; i < a.n_; ++i) {
    a.part_begin_.host()[i] = layout.QHeads(first_rank + i).begin - layout.GroupQHeads().begin;
  }
  a.part_begin_.host()[a.n_] = a.group_heads_;
  RETURN_IF_ERROR(a.part_begin_.Send(a.n_ + 1, stream));
  a.gathers_queries_ = layout.GathersQueries();
  // Where a rank has all queries, or all outputs, there is no padding and no copy.
  a.query_stride_ = std::int64_t{q_dim} * (a.gathers_queries_ ? a.padded_heads_ : a.group_heads_);
  a.merged_stride_ = std::int64_t{out_dim} * (a.n_ > 1 ? a.padded_heads_ : a.group_heads_);

  const std::int64_t rows = max_rows;
  const std::int64_t padded = a.padded_heads_;
  constexpr std::int64_t f = sizeof(float);
  ASSIGN_OR_RETURN(a.group_q_,
                   kernels::Buffer::Allocate(rows * a.group_heads_ * q_dim * f, stream));
  ASSIGN_OR_RETURN(a.partial_,
                   kernels::Buffer::Allocate(rows * a.group_heads_ * out_dim * f, stream));
  ASSIGN_OR_RETURN(a.partial_lse_, kernels::Buffer::Allocate(rows * a.group_heads_ * f, stream));
  if (a.n_ == 1) return a;
  const std::int64_t all_lse = rows * padded * a.n_ * a.n_ * f;
  const std::int64_t packed = a.n_ * rows * padded * (out_dim + 1) * f;
  if (a.gathers_queries_) {
    ASSIGN_OR_RETURN(a.gathered_q_, dcp.Allocate(a.n_ * rows * padded * q_dim * f, stream));
  }
  ASSIGN_OR_RETURN(a.send_, dcp.Allocate(packed, stream));
  ASSIGN_OR_RETURN(a.receive_, dcp.Allocate(std::max(packed, all_lse), stream));
  ASSIGN_OR_RETURN(a.merged_, dcp.Allocate(rows * padded * out_dim * f, stream));
  ASSIGN_OR_RETURN(a.merged_lse_, kernels::Buffer::Allocate(rows * padded * f, stream));
  return a;
}

std::int64_t DcpAttention::workspace_bytes() const {
  std::int64_t bytes = 0;
  for (const kernels::Buffer* buffer : {&gathered_q_, &group_q_, &partial_, &partial_lse_, &send_,
                                        &receive_, &merged_, &merged_lse_}) {
    bytes += buffer->size_bytes();
  }
  return bytes;
}

kernels::HeadExchangeParams DcpAttention::Exchange(std::int32_t num_rows, std::int32_t head_dim,
                                                   std::int64_t part_stride) const {
  return {.part_begin = part_begin_.data(),
          .num_parts = n_,
          .num_rows = num_rows,
          .padded_heads = padded_heads_,
          .head_dim = head_dim,
          .part_stride = part_stride};
}

float* DcpAttention::Queries(std::int32_t num_rows) const {
  if (!gathers_queries_) return group_q_.as<float>();
  return gathered_q_.as<float>() +
         static_cast<std::int64_t>(dcp_->rank()) * num_rows * padded_heads_ * q_dim_;
}

absl::StatusOr<const float*> DcpAttention::GatherQueries(std::int32_t num_rows,
                                                         kernels::Stream& stream) {
  if (!gathers_queries_) return group_q_.as<float>();
  const std::int64_t part = static_cast<std::int64_t>(num_rows) * padded_heads_ * q_dim_;
  float* all = gathered_q_.as<float>();
  RETURN_IF_ERROR(dcp_->AllGather(all + dcp_->rank() * part, all,
                                  part * static_cast<std::int64_t>(sizeof(float)), stream));
  RETURN_IF_ERROR(
      kernels::UnpackHeads(Exchange(num_rows, q_dim_, part), all, group_q_.as<float>(), stream));
  return group_q_.as<float>();
}

absl::StatusOr<const float*> DcpAttention::Merge(std::int32_t num_rows, kernels::Stream& stream) {
  if (n_ == 1) return partial_.as<float>();
  return exchange_ == DcpExchange::kAgRs ? MergeAgRs(num_rows, stream) : MergeA2a(num_rows, stream);
}

absl::StatusOr<const float*> DcpAttention::MergedLse(std::int32_t num_rows,
                                                     kernels::Stream& stream) {
  if (n_ == 1) return partial_lse_.as<float>();
  // What Merge() received still holds the LSEs of every rank.
  const std::int64_t heads = static_cast<std::int64_t>(num_rows) * padded_heads_;
  const bool gathered = exchange_ == DcpExchange::kAgRs;
  const float* lse = receive_.as<float>() + (gathered ? dcp_->rank() * heads : heads * out_dim_);
  const std::int64_t stride = gathered ? n_ * heads : heads * (out_dim_ + 1);
  RETURN_IF_ERROR(kernels::LseMerge({.parts = merged_.as<float>(),
                                     .lse = lse,
                                     .part_stride = 0,
                                     .lse_stride = stride,
                                     .out = merged_.as<float>(),
                                     .merged_lse = merged_lse_.as<float>(),
                                     .num_parts = n_,
                                     .num_rows = num_rows,
                                     .num_heads = padded_heads_,
                                     .head_dim = 0},
                                    stream));
  return merged_lse_.as<float>();
}

absl::StatusOr<const float*> DcpAttention::MergeAgRs(std::int32_t num_rows,
                                                     kernels::Stream& stream) {
  const std::int64_t heads = static_cast<std::int64_t>(num_rows) * padded_heads_;  // of one part
  float* outputs = send_.as<float>();     // [N, rows, padded, out_dim]
  float* all_lse = receive_.as<float>();  // [N from, N heads of, rows, padded]
  float* own_lse = all_lse + dcp_->rank() * n_ * heads;
  RETURN_IF_ERROR(kernels::PackHeads(Exchange(num_rows, out_dim_, heads * out_dim_),
                                     PartialOutput(), 0.0f, outputs, stream));
  RETURN_IF_ERROR(
      kernels::PackHeads(Exchange(num_rows, 1, heads), PartialLse(), kEmptyLse, own_lse, stream));
  RETURN_IF_ERROR(dcp_->AllGather(own_lse, all_lse,
                                  n_ * heads * static_cast<std::int64_t>(sizeof(float)), stream));
  RETURN_IF_ERROR(kernels::LseScale({.out = outputs,
                                     .lse = all_lse,
                                     .num_parts = n_,
                                     .part = dcp_->rank(),
                                     .num_rows = n_ * num_rows,
                                     .num_heads = padded_heads_,
                                     .head_dim = out_dim_},
                                    stream));
  RETURN_IF_ERROR(dcp_->ReduceScatterSum(outputs, merged_.as<float>(), heads * out_dim_,
                                         DType::kFloat32, stream));
  return merged_.as<float>();
}

absl::StatusOr<const float*> DcpAttention::MergeA2a(std::int32_t num_rows,
                                                    kernels::Stream& stream) {
  const std::int64_t heads = static_cast<std::int64_t>(num_rows) * padded_heads_;
  const std::int64_t part = heads * (out_dim_ + 1);  // a part's outputs, then its LSEs
  float* send = send_.as<float>();
  float* receive = receive_.as<float>();
  RETURN_IF_ERROR(
      kernels::PackHeads(Exchange(num_rows, out_dim_, part), PartialOutput(), 0.0f, send, stream));
  RETURN_IF_ERROR(kernels::PackHeads(Exchange(num_rows, 1, part), PartialLse(), kEmptyLse,
                                     send + heads * out_dim_, stream));
  RETURN_IF_ERROR(
      dcp_->AllToAll(send, receive, part * static_cast<std::int64_t>(sizeof(float)), stream));
  RETURN_IF_ERROR(kernels::LseMerge({.parts = receive,
                                     .lse = receive + heads * out_dim_,
                                     .part_stride = part,
                                     .lse_stride = part,
                                     .out = merged_.as<float>(),
                                     .merged_lse = nullptr,
                                     .num_parts = n_,
                                     .num_rows = num_rows,
                                     .num_heads = padded_heads_,
                                     .head_dim = out_dim_},
                                    stream));
  return merged_.as<float>();
}

}  // namespace weft
