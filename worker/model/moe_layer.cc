#include "worker/model/moe_layer.h"

#include <algorithm>

#include "kernels/elementwise.h"
#include "kernels/moe.h"
#include "server/base/status_macros.h"

namespace weft {

absl::StatusOr<MoeLayer> MoeLayer::Create(const ModelConfig& config, const DecoderWeights& weights,
                                          std::int32_t max_rows, kernels::Stream& stream) {
  const MoeConfig& moe = *config.moe;
  std::int64_t num_local = 0;
  std::int64_t width = 0;
  for (const DecoderLayerWeights& layer : weights.layers) {
    if (layer.moe.down.empty()) continue;
    num_local = static_cast<std::int64_t>(layer.moe.down.size());
    width = layer.moe.down[0].in_features();
  }
  MoeLayer layer;
  layer.config_ = &config;
  const std::int64_t rows = max_rows;
  // A row's experts are different ones, so no more of them can be here than are held.
  const std::int64_t routed = rows * std::min<std::int64_t>(moe.experts_per_token, num_local);
  layer.products_.resize(num_local);
  constexpr std::int64_t f = sizeof(float);
  constexpr std::int64_t id = sizeof(std::int32_t);
  using kernels::Buffer;
  for (Buffer* ids : {&layer.experts_, &layer.place_of_, &layer.row_of_}) {
    ASSIGN_OR_RETURN(*ids, Buffer::Allocate(rows * moe.experts_per_token * id, stream));
  }
  ASSIGN_OR_RETURN(layer.expert_begin_, Buffer::Allocate((num_local + 1) * id, stream));
  // On a device products gather their rows.
  if (stream.device() == kernels::DeviceKind::kCpu) {
    ASSIGN_OR_RETURN(layer.routed_x_, Buffer::Allocate(routed * config.hidden_size * f, stream));
  } else {
    ASSIGN_OR_RETURN(layer.gate_up_, Buffer::Allocate(routed * 2 * width * f, stream));
  }
  ASSIGN_OR_RETURN(layer.logits_, Buffer::Allocate(rows * moe.num_experts * f, stream));
  ASSIGN_OR_RETURN(layer.scratch_, Buffer::Allocate(rows * 2 * moe.num_experts * f, stream));
  ASSIGN_OR_RETURN(layer.weights_, Buffer::Allocate(rows * moe.experts_per_token * f, stream));
  ASSIGN_OR_RETURN(layer.activated_, Buffer::Allocate(routed * width * f, stream));
  ASSIGN_OR_RETURN(layer.routed_y_, Buffer::Allocate(routed * config.hidden_size * f, stream));
  return layer;
}

std::int64_t MoeLayer::workspace_bytes() const {
  std::int64_t bytes = 0;
  for (const kernels::Buffer* buffer :
       {&experts_, &place_of_, &row_of_, &logits_, &scratch_, &weights_, &routed_x_, &gate_up_,
        &activated_, &routed_y_}) {
    bytes += buffer->size_bytes();
  }
  return bytes;
}

absl::Status MoeLayer::Route(const MoeWeights& weights, const float* normed, std::int32_t num_rows,
                             kernels::Stream& stream) {
  const MoeConfig& moe = *config_->moe;
  RETURN_IF_ERROR(kernels::Linear({.x = normed,
                                   .weight = &weights.router,
                                   .bias = nullptr,
                                   .residual = nullptr,
                                   .y = logits_.as<float>(),
                                   .num_rows = num_rows,
                                   .x_stride = config_->hidden_size,
                                   .y_stride = moe.num_experts},
                                  stream));
  RETURN_IF_ERROR(kernels::RouteRows({.logits = logits_.as<float>(),
                                      .bias = weights.score_bias.data(),
                                      .experts = experts_.as<std::int32_t>(),
                                      .weights = weights_.as<float>(),
                                      .scratch = scratch_.as<float>(),
                                      .num_rows = num_rows,
                                      .num_experts = moe.num_experts,
                                      .top_k = moe.experts_per_token,
                                      .score = moe.score,
                                      .group_score = moe.group_score,
                                      .num_groups = moe.num_groups,
                                      .top_groups = moe.groups_per_token,
                                      .normalize = moe.normalize,
                                      .scale = moe.scale},
                                     stream));
  return kernels::SortByExpert({.experts = experts_.as<std::int32_t>(),
                                .row_of = row_of_.as<std::int32_t>(),
                                .place_of = place_of_.as<std::int32_t>(),
                                .expert_begin = expert_begin_.as<std::int32_t>(),
                                .num_rows = num_rows,
                                .top_k = moe.experts_per_token,
                                .first_expert = weights.first_expert,
                                .num_local = static_cast<std::int32_t>(weights.down.size())},
                               stream);
}

absl::Status MoeLayer::RunExperts(const kernels::MatrixGroup& weights, const float* x, float* y,
                                  kernels::Stream& stream) {
  const std::int32_t* begins = expert_begin_.as<std::int32_t>();
  for (std::size_t e = 0; e < weights.size(); ++e) {
    const kernels::PackedMatrix& weight = weights[e];
    const std::int64_t begin = begins[e];
    const std::int64_t out = weight.product_features();
    products_[e] = {.x = x + begin * weight.in_features(),
                    .weight = &weight,
                    .bias = nullptr,
                    .residual = nullptr,
                    .y = y + begin * out,
                    .num_rows = begins[e + 1] - begins[e],
                    .x_stride = weight.in_features(),
                    .y_stride = out};
  }
  return kernels::GroupedLinear(products_, stream);
}

absl::Status MoeLayer::RunExpertsOnHost(const MoeWeights& weights, const float* normed,
                                        kernels::Stream& stream) {
  const std::int32_t routed = expert_begin_.as<std::int32_t>()[weights.down.size()];
  RETURN_IF_ERROR(kernels::GatherRows({.in = normed,
                                       .index = row_of_.as<std::int32_t>(),
                                       .out = routed_x_.as<float>(),
                                       .num_rows = routed,
                                       .size = config_->hidden_size},
                                      stream));
  RETURN_IF_ERROR(
      RunExperts(weights.gate_up, routed_x_.as<float>(), activated_.as<float>(), stream));
  return RunExperts(weights.down, activated_.as<float>(), routed_y_.as<float>(), stream);
}

absl::Status MoeLayer::RunExpertsOnDevice(const MoeWeights& weights, const float* normed,
                                          std::int32_t num_rows, kernels::DeviceStream& device) {
  const auto num_local = static_cast<std::int32_t>(weights.down.size());
  const std::int32_t width = weights.down[0].in_features();
  const std::int32_t max_rows = num_rows * std::min(config_->moe->experts_per_token, num_local);
  RETURN_IF_ERROR(device.GroupedLinear({.x = normed,
                                        .weights = &weights.gate_up,
                                        .y = gate_up_.as<float>(),
                                        .max_rows = max_rows,
                                        .x_stride = config_->hidden_size,
                                        .y_stride = 2 * width,
                                        .row_of = row_of_.as<std::int32_t>(),
                                        .expert_begin = expert_begin_.as<std::int32_t>()}));
  // Rows behind those that are routed hold anything, and nobody looks at what comes of them.
  RETURN_IF_ERROR(kernels::SiluMul({.gate_up = gate_up_.as<float>(),
                                    .out = activated_.as<float>(),
                                    .num_rows = max_rows,
                                    .size = width},
                                   device));
  return device.GroupedLinear({.x = activated_.as<float>(),
                               .weights = &weights.down,
                               .y = routed_y_.as<float>(),
                               .max_rows = max_rows,
                               .x_stride = width,
                               .y_stride = config_->hidden_size,
                               .expert_begin = expert_begin_.as<std::int32_t>()});
}

absl::Status MoeLayer::Run(const MoeWeights& weights, const float* normed, const float* residual,
                           float* x, std::int32_t num_rows, kernels::Stream& stream) {
  RETURN_IF_ERROR(Route(weights, normed, num_rows, stream));
  kernels::DeviceStream* const device = kernels::OnDevice(stream);
  RETURN_IF_ERROR(device == nullptr ? RunExpertsOnHost(weights, normed, stream)
                                    : RunExpertsOnDevice(weights, normed, num_rows, *device));
  return kernels::CombineExperts({.in = routed_y_.as<float>(),
                                  .place_of = place_of_.as<std::int32_t>(),
                                  .weights = weights_.as<float>(),
                                  .residual = residual,
                                  .out = x,
                                  .num_rows = num_rows,
                                  .top_k = config_->moe->experts_per_token,
                                  .size = config_->hidden_size},
                                 stream);
}

}  // namespace weft
