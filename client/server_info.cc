#include "client/server_info.h"

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "google/protobuf/util/json_util.h"
#include "grpcpp/client_context.h"
#include "server/base/format_bytes.h"
#include "server/grpc_status.h"

namespace weft {
absl::StatusOr<v1::GetServerInfoResponse> FetchServerInfo(v1::Inference::Stub& stub,
                                                          absl::Duration timeout) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  v1::GetServerInfoResponse info;
  const grpc::Status status = stub.GetServerInfo(&context, {}, &info);
  if (!status.ok()) return FromGrpcStatus(status);
  return info;
}

std::int32_t FetchVocabSize(v1::Inference::Stub& stub, absl::Duration timeout) {
  constexpr std::int32_t kLeast = 256;  // every vocabulary has at least the bytes
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  v1::GetModelInfoResponse info;
  const grpc::Status status = stub.GetModelInfo(&context, {}, &info);
  return status.ok() && info.vocab_size() > 0 ? info.vocab_size() : kLeast;
}

std::string FormatServerInfo(const v1::GetServerInfoResponse& info) {
  std::string text = fmt::format("weft {}, {} group{}\n", info.version(), info.groups_size(),
                                 info.groups_size() == 1 ? "" : "s");
  if (!info.metrics_address().empty()) {
    text += fmt::format("metrics  http://{}/metrics\n", info.metrics_address());
  }
  for (const v1::GroupInfo& group : info.groups()) {
    text += fmt::format("\n{}  {}\n", group.address(), group.state());
    if (group.tensor_parallel_size() == 0) continue;  // its leader was never heard of
    const int used = group.num_blocks() - group.num_free_blocks();
    text += fmt::format("  model    {}, {} tokens at most, weights {}, KV {}\n", group.model(),
                        group.max_model_len(), group.dtype(), group.kv_cache_dtype());
    text += fmt::format("  layout   {}\n", DescribeLayout(group));
    for (const std::string& warning : group.warnings()) {
      text += fmt::format("  note     {}\n", warning);
    }
    text += fmt::format("  KV used  {} of {} blocks ({:.1f} %)\n", used, group.num_blocks(),
                        group.num_blocks() == 0 ? 0.0 : 100.0 * used / group.num_blocks());
    if (group.prefix_caching()) {
      text += fmt::format(
          "  cache    {} blocks, {} of {} prompt tokens found ({:.1f} %), {} evicted\n",
          group.num_cached_blocks(), group.prefix_cache_hits(), group.prefix_cache_queries(),
          group.prefix_cache_queries() == 0
              ? 0.0
              : 100.0 * static_cast<double>(group.prefix_cache_hits()) /
                    static_cast<double>(group.prefix_cache_queries()),
          group.prefix_cache_evictions());
    }
    text += fmt::format("  requests {} running, {} waiting\n", group.num_requests_running(),
                        group.num_requests_waiting());
    text += fmt::format("  {:>4}  {:>8}  {:>12}  {:>12}  {:>11}  {:>11}  {:>11}  {}\n", "rank",
                        "pid", "sent", "received", "weights", "KV", "workspace", "metrics");
    for (const v1::RankInfo& rank : group.ranks()) {
      text += fmt::format("  {:>4}  {:>8}  {:>12}  {:>12}  {:>11}  {:>11}  {:>11}  {}\n",
                          rank.rank(), rank.pid(), FormatBytes(rank.fabric_sent_bytes()),
                          FormatBytes(rank.fabric_received_bytes()),
                          FormatBytes(static_cast<std::uint64_t>(rank.weight_bytes())),
                          FormatBytes(static_cast<std::uint64_t>(rank.kv_bytes())),
                          FormatBytes(static_cast<std::uint64_t>(rank.workspace_bytes())),
                          rank.metrics_address().empty() ? "none" : rank.metrics_address());
    }
  }
  return text;
}

std::string ServerInfoToJson(const v1::GetServerInfoResponse& info) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string json;
  (void)google::protobuf::util::MessageToJsonString(info, &json, options);
  return json;
}

std::string DescribeLayout(const v1::GroupInfo& group) {
  return fmt::format(
      "{} rank{}, KV cache sharded by position over {}, blocks of {} tokens in runs of {}, "
      "{} KV bytes per token per rank, exchange {}",
      group.tensor_parallel_size(), group.tensor_parallel_size() == 1 ? "" : "s",
      group.decode_context_parallel_size(), group.block_size(), group.cp_kv_cache_interleave_size(),
      group.kv_bytes_per_token_per_rank(), group.dcp_comm_backend());
}

}  // namespace weft
