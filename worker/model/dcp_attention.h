#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "kernels/device/mirror.h"
#include "kernels/device/stream.h"
#include "kernels/head_exchange.h"
#include "worker/group/communicator.h"
#include "worker/model/shard_layout.h"

namespace weft {

// How partial attention is exchanged and merged, --dcp-comm-backend.
enum class DcpExchange : std::uint8_t {
  kAgRs,  // all-gather LSE, scale own output, reduce-scatter over heads
  kA2a,   // every peer gets its heads of output and LSE; the receiver merges
};
std::optional<DcpExchange> ParseDcpExchange(std::string_view name);
std::string_view DcpExchangeName(DcpExchange exchange);

// The two exchanges around local attention: queries of the whole DCP group before it, partial
// outputs merged back to their heads' ranks after it. With N = 1 nothing moves; where every rank
// projects the queries of its whole group, only outputs do.
//
// Per-head messages are padded to layout.PaddedQHeads() heads a rank, so that all parts are equal.
// Control flow depends on num_rows alone (law 4). Allocates nothing after Create(). One thread.
class DcpAttention {
 public:
  // `dcp` connects the ranks of this rank's DCP group and outlives this.
  static absl::StatusOr<DcpAttention> Create(const ShardLayout& layout, std::int32_t q_dim,
                                             std::int32_t out_dim, std::int32_t max_rows,
                                             DcpExchange exchange, Communicator& dcp,
                                             kernels::Stream& stream);

  // The largest collective it will ask for, for FabricCommunicatorOptions::max_bytes.
  static std::int64_t MaxCollectiveBytes(const ShardLayout& layout, std::int32_t q_dim,
                                         std::int32_t out_dim, std::int32_t max_rows);

  // Where to write the queries that this rank projects (ShardLayout::ProjectedQHeads()) for a step
  // of `num_rows`: [num_rows, heads, q_dim], query_stride() floats from row to row.
  float* Queries(std::int32_t num_rows) const;
  std::int64_t query_stride() const { return query_stride_; }

  // Sends Queries() around if the ranks have different ones. The result is [num_rows, group q
  // heads, q_dim], valid until the next call.
  absl::StatusOr<const float*> GatherQueries(std::int32_t num_rows, kernels::Stream& stream);

  // Where attention writes: [num_rows, group q heads, out_dim] and [num_rows, group q heads].
  float* PartialOutput() const { return partial_.as<float>(); }
  float* PartialLse() const { return partial_lse_.as<float>(); }

  // Merges partial outputs over the group. The result is this rank's heads, valid until the next
  // call: [num_rows, PaddedQHeads(), out_dim], merged_stride() floats from row to row.
  absl::StatusOr<const float*> Merge(std::int32_t num_rows, kernels::Stream& stream);
  std::int64_t merged_stride() const { return merged_stride_; }
  // After Merge(), until the next call: the log-sum-exp of all partial outputs of this rank's
  // heads, merged_lse_stride() floats from row to row.
  absl::StatusOr<const float*> MergedLse(std::int32_t num_rows, kernels::Stream& stream);
  std::int64_t merged_lse_stride() const { return n_ > 1 ? padded_heads_ : group_heads_; }

  std::int64_t workspace_bytes() const;

 private:
  absl::StatusOr<const float*> MergeAgRs(std::int32_t num_rows, kernels::Stream& stream);
  absl::StatusOr<const float*> MergeA2a(std::int32_t num_rows, kernels::Stream& stream);
  kernels::HeadExchangeParams Exchange(std::int32_t num_rows, std::int32_t head_dim,
                                       std::int64_t part_stride) const;

  Communicator* dcp_ = nullptr;
  DcpExchange exchange_ = DcpExchange::kAgRs;
  std::int32_t n_ = 1;  // N
  std::int32_t padded_heads_ = 0;
  std::int32_t group_heads_ = 0;
  bool gathers_queries_ = false;
  std::int64_t query_stride_ = 0;   // floats from row to row of what this rank projects
  std::int64_t merged_stride_ = 0;  // and of the merged output
  std::int32_t q_dim_ = 0;
  std::int32_t out_dim_ = 0;
  kernels::Mirror<std::int32_t> part_begin_;  // [N + 1] group heads of each rank

  kernels::Buffer gathered_q_;   // [N, rows, padded, q_dim]
  kernels::Buffer group_q_;      // [rows, group heads, q_dim]
  kernels::Buffer partial_;      // [rows, group heads, out_dim]
  kernels::Buffer partial_lse_;  // [rows, group heads]
  kernels::Buffer send_;         // [N, rows * padded * (out_dim + 1)]
  kernels::Buffer receive_;      // as send_
  kernels::Buffer merged_;       // [rows, padded, out_dim]
  kernels::Buffer merged_lse_;   // [rows, padded]
};

}  // namespace weft
