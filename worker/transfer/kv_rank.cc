#include "worker/transfer/kv_rank.h"

#include "fmt/format.h"
#include "server/base/check.h"
#include "worker/transfer/kv_routes.h"

namespace weft {

std::string KvFormatOf(const RankModel& model) {
  return fmt::format("{} of checkpoint {:016x} in {}, {} layers of {} heads with {} + {} values",
                     DTypeName(model.kv_shape.dtype), model.fingerprint, FormatName(model.weight_format),
                     model.kv_shape.num_layers, model.config.num_kv_heads, model.kv_shape.head_dim,
                     model.kv_shape.value_dim);
}

KvRank KvRankOf(const RankModel& model, const KvCache& cache) {
  const ShardLayout& own = model.layout;
  KvRank rank = {
      .cache = &cache,
      .rank = own.rank(),
      .layout = {.tensor_parallel_size = own.tensor_parallel_size(),
                 .decode_context_parallel_size = own.decode_context_parallel_size(),
                 .block_size = own.block_size(),
                 .interleave = own.interleave()},
      .heads = {.num_q_heads = model.config.num_q_heads, .num_kv_heads = model.config.num_kv_heads},
      .format = KvFormatOf(model)};
  absl::StatusOr<std::vector<ShardLayout>> group = LayoutsOfGroup(rank.layout, rank.heads);
  CHECK_MSG(group.ok(), std::string(group.status().message()));
  rank.group = *std::move(group);
  return rank;
}

}  // namespace weft
