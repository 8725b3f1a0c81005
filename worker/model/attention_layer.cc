#include "worker/model/attention_layer.h"

#include <utility>

#include "worker/model/gqa_layer.h"
#include "worker/model/mla_layer.h"

namespace weft {

absl::StatusOr<std::unique_ptr<AttentionLayer>> MakeAttentionLayer(const ModelConfig& config,
                                                                   const ShardLayout& layout,
                                                                   std::int32_t max_rows,
                                                                   PagedAttention attention) {
  return config.mla.has_value() ? MlaLayer::Create(config, layout, max_rows, std::move(attention))
                                : GqaLayer::Create(config, layout, max_rows, std::move(attention));
}

}  // namespace weft
