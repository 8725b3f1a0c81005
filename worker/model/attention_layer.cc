#include "worker/model/attention_layer.h"

#include <algorithm>
#include <utility>

#include "server/base/status_macros.h"
#include "worker/model/gqa_layer.h"
#include "worker/model/mla_layer.h"

namespace weft {

absl::StatusOr<std::unique_ptr<AttentionLayer>> MakeAttentionLayer(
    const ModelConfig& config, const ShardLayout& layout, const AttentionOptions& options,
    KvCache& cache, Communicator& dcp, kernels::Stream& stream) {
  ASSIGN_OR_RETURN(PagedAttention paged,
                   PagedAttention::Create(config, layout, options.max_rows, options.exchange,
                                          options.round_to_bfloat16, cache, dcp, stream));
  if (!config.mla.has_value()) {
    return GqaLayer::Create(config, layout, options.max_rows, std::move(paged), stream);
  }
  return MlaLayer::Create(config, layout, options, std::move(paged), cache, dcp, stream);
}

std::int64_t MaxAttentionCollectiveBytes(const ModelConfig& config, const ShardLayout& layout,
                                         std::int32_t max_rows) {
  const std::int64_t merge = DcpAttention::MaxCollectiveBytes(layout, config.head_dim,
                                                              MergedDim(config, layout), max_rows);
  return CanDecompress(config)
             ? std::max(merge, MlaPrefill::MaxCollectiveBytes(config, layout, max_rows))
             : merge;
}

}  // namespace weft
