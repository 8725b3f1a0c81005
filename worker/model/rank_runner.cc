#include "worker/model/rank_runner.h"

#include <algorithm>
#include <utility>

#include "fmt/format.h"
#include "kernels/elementwise.h"
#include "server/base/ceil_div.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

constexpr std::int64_t kFloat = sizeof(float);

}  // namespace

std::int64_t RankRunner::MaxCollectiveBytes(const ModelConfig& config, const ShardLayout& layout,
                                            const RunnerOptions& options) {
  const std::int64_t tp = layout.tensor_parallel_size();
  const std::int64_t hidden =
      static_cast<std::int64_t>(options.max_num_batched_tokens) * config.hidden_size * kFloat;
  const std::int64_t whole_rows = tp * options.max_num_seqs *
                                  CeilDiv(config.vocab_size, layout.tensor_parallel_size()) *
                                  kFloat;
  return std::max(hidden, whole_rows);
}

RankRunner::RankRunner(const ModelConfig& config, const ShardLayout& layout,
                       const DecoderWeights& weights, Communicator& world, Communicator& dcp,
                       const RunnerOptions& options, kernels::Stream& stream,
                       std::unique_ptr<AttentionLayer> attention)
    : config_(config),
      layout_(layout),
      weights_(weights),
      world_(world),
      dcp_(dcp),
      options_(options),
      stream_(stream),
      host_(kernels::HostOf(stream)),
      rope_(ComputeRopeFrequencies(config.rope, config.rotary_dim)),
      vocab_(layout.Slice(config.vocab_size)),
      padded_vocab_(CeilDiv(config.vocab_size, layout.tensor_parallel_size())),
      attention_(std::move(attention)),
      slots_(options.max_num_seqs,
             static_cast<std::int32_t>((options.max_model_len + layout.block_size() - 1) /
                                       layout.block_size())),
      rows_(options.max_num_batched_tokens),
      sampler_(config.vocab_size) {}

absl::StatusOr<std::unique_ptr<RankRunner>> RankRunner::Create(
    const ModelConfig& config, const ShardLayout& layout, const DecoderWeights& weights,
    KvCache& cache, Communicator& world, Communicator& dcp, const RunnerOptions& options,
    kernels::Stream& stream) {
  ASSIGN_OR_RETURN(std::unique_ptr<AttentionLayer> attention,
                   MakeAttentionLayer(config, layout,
                                      {.max_rows = options.max_num_batched_tokens,
                                       .exchange = options.exchange,
                                       .mla_form = options.mla_form,
                                       .round_to_bfloat16 = options.round_to_bfloat16},
                                      cache, dcp, stream));
  std::unique_ptr<RankRunner> runner(
      new RankRunner(config, layout, weights, world, dcp, options, stream, std::move(attention)));
  if (config.moe.has_value()) {
    ASSIGN_OR_RETURN(runner->moe_,
                     MoeLayer::Create(config, weights, options.max_num_batched_tokens, stream));
  }
  RETURN_IF_ERROR(runner->AllocateWorkspace());
  if (kernels::DeviceStream* const device = kernels::OnDevice(stream)) {
    RETURN_IF_ERROR(device->Reserve({.linear_rows = options.max_num_batched_tokens,
                                     .linear_columns = weights.MaxInFeatures(),
                                     .logits_rows = options.max_num_seqs}));
    runner->ListBuckets();
  }
  return runner;
}

absl::Status RankRunner::AllocateWorkspace() {
  const std::int64_t rows = options_.max_num_batched_tokens;
  const std::int64_t sampled = options_.max_num_seqs;
  std::int32_t intermediate = 0;  // of any layer's MLP
  for (const DecoderLayerWeights& layer : weights_.layers) {
    intermediate = std::max(intermediate, layer.down.in_features());
  }
  const std::int64_t tp = layout_.tensor_parallel_size();
  using kernels::Buffer;
  ASSIGN_OR_RETURN(x_, world_.Allocate(rows * config_.hidden_size * kFloat, stream_));
  ASSIGN_OR_RETURN(normed_, Buffer::Allocate(rows * config_.hidden_size * kFloat, stream_));
  if (kernels::OnDevice(stream_) != nullptr) {
    ASSIGN_OR_RETURN(gate_up_, Buffer::Allocate(rows * 2 * intermediate * kFloat, stream_));
  }
  ASSIGN_OR_RETURN(activated_, Buffer::Allocate(rows * intermediate * kFloat, stream_));
  ASSIGN_OR_RETURN(arrays_,
                   StepArrays::Create(options_.max_num_batched_tokens, options_.max_num_seqs,
                                      slots_.max_blocks_per_seq(), config_.rotary_dim, stream_));
  ASSIGN_OR_RETURN(logits_, Buffer::Allocate(sampled * padded_vocab_ * kFloat, stream_));
  ASSIGN_OR_RETURN(whole_send_, kernels::Mirror<float>::Create(sampled * padded_vocab_, stream_));
  ASSIGN_OR_RETURN(temperature_, kernels::Mirror<float>::Create(sampled, stream_));
  ASSIGN_OR_RETURN(seed_, kernels::Mirror<std::uint64_t>::Create(sampled, stream_));
  ASSIGN_OR_RETURN(sample_position_, kernels::Mirror<std::int64_t>::Create(sampled, stream_));
  ASSIGN_OR_RETURN(best_, kernels::Mirror<kernels::ArgmaxResult>::Create(sampled, stream_));
  ASSIGN_OR_RETURN(whole_index_for_kernels_,
                   kernels::Mirror<std::int32_t>::Create(sampled, stream_));
  if (kernels::OnDevice(stream_) != nullptr) {
    ASSIGN_OR_RETURN(filtered_rows_,
                     kernels::Mirror<kernels::FilteredRow>::Create(sampled, stream_));
    ASSIGN_OR_RETURN(filtered_, kernels::Mirror<kernels::FilteredToken>::Create(sampled, stream_));
    ASSIGN_OR_RETURN(filtered_logits_,
                     world_.Allocate(tp * sampled * padded_vocab_ * kFloat, stream_));
  }
  if (layout_.rank() == 0) {
    ASSIGN_OR_RETURN(whole_rows_, Buffer::Allocate(tp * sampled * padded_vocab_ * kFloat));
    ASSIGN_OR_RETURN(whole_row_, Buffer::Allocate(sampled * config_.vocab_size * kFloat));
    ASSIGN_OR_RETURN(processed_, Buffer::Allocate(config_.vocab_size * kFloat));
    processors_.resize(sampled);
  }
  token_ids_.resize(rows);
  RETURN_IF_ERROR(arrays_.SendTables(slots_, stream_));
  all_best_.resize(tp * sampled);
  whole_index_.reserve(sampled);
  filtered_index_.reserve(sampled);
  logits_rows_.reserve(sampled);
  sampled_tokens_.reserve(sampled);
  return absl::OkStatus();
}

std::int64_t RankRunner::workspace_bytes() const {
  std::int64_t bytes =
      attention_->workspace_bytes() + arrays_.size_bytes() + whole_send_.size_bytes();
  if (moe_.has_value()) bytes += moe_->workspace_bytes();
  for (const kernels::Buffer* buffer :
       {&x_, &normed_, &gate_up_, &activated_, &logits_, &whole_rows_, &whole_row_, &processed_,
        &filtered_logits_}) {
    bytes += buffer->size_bytes();
  }
  return bytes;
}

void RankRunner::ListBuckets() {
  const std::int32_t most = std::min(options_.max_num_seqs, options_.max_num_batched_tokens);
  for (std::int32_t rows = 1; rows < most; rows += rows < 8 ? rows : 8) buckets_.push_back(rows);
  buckets_.push_back(most);
}

absl::Status RankRunner::CaptureGraphs() {
  kernels::DeviceStream& device = *kernels::OnDevice(stream_);
  const auto collectives = [&] {
    const CollectiveCounters world = world_.Counters();
    const CollectiveCounters dcp = dcp_.Counters();
    return CollectiveCounters{.operations = world.operations + dcp.operations,
                              .received_bytes = world.received_bytes + dcp.received_bytes};
  };
  for (const std::int32_t rows : buckets_) {
    launched_ = {.rows = rows, .owned = rows, .logits = rows};
    RETURN_IF_ERROR(arrays_.Send(rows_, {}, launched_, rope_, stream_));
    RETURN_IF_ERROR(SendSampling());
    // Once as it is: what connects, chooses and allocates at its first call may not do so in a
    // graph.
    RETURN_IF_ERROR(LaunchStep());
    RETURN_IF_ERROR(stream_.Synchronize());
    const CollectiveCounters before = collectives();
    RETURN_IF_ERROR(device.BeginCapture());
    RETURN_IF_ERROR(LaunchStep());
    Graph& graph = graphs_.emplace_back();
    ASSIGN_OR_RETURN(graph.recorded, device.EndCapture());
    const CollectiveCounters after = collectives();
    graph.collectives = {.operations = after.operations - before.operations,
                         .received_bytes = after.received_bytes - before.received_bytes};
  }
  return absl::OkStatus();
}

std::optional<std::size_t> RankRunner::BucketOf(const StepPlan& plan) const {
  if (buckets_.empty() || plan.sequences.empty()) return std::nullopt;
  for (const PlanSequence& sequence : plan.sequences) {
    if (sequence.num_rows != 1 || sequence.num_sampled != 1) return std::nullopt;
  }
  return std::lower_bound(buckets_.begin(), buckets_.end(), plan.num_rows()) - buckets_.begin();
}

absl::Status RankRunner::PrepareStep(const StepPlan& plan,
                                     absl::Span<const std::int32_t> previous_tokens) {
  slots_.Apply(plan);
  TakeLogitsDeltas(plan, previous_tokens);
  rows_.Build(plan, slots_, layout_, config_.sliding_window);
  for (std::int32_t i = 0; i < plan.num_rows(); ++i) {
    const std::int32_t id = plan.token_ids[i];
    // A row after a failed one (-1) runs as token 0; the engine drops its result.
    token_ids_[i] = id >= 0 ? id : std::max(0, previous_tokens[~id]);
  }
  ListLogitsRows(plan);
  launched_ = {.rows = rows_.num_rows(),
               .owned = static_cast<std::int32_t>(rows_.owned_row.size()),
               .logits = static_cast<std::int32_t>(rows_.logits_row.size())};
  if (const std::optional<std::size_t> bucket = BucketOf(plan)) {
    const std::int32_t rows = buckets_[*bucket];
    launched_ = {.rows = rows, .owned = rows, .logits = rows};
  }
  if (!plan.table_deltas.empty()) RETURN_IF_ERROR(arrays_.SendTables(slots_, stream_));
  RETURN_IF_ERROR(arrays_.Send(rows_, absl::MakeConstSpan(token_ids_).first(plan.num_rows()),
                               launched_, rope_, stream_));
  return SendSampling();
}

absl::Status RankRunner::RunMlp(std::int32_t layer) {
  const DecoderLayerWeights& weights = weights_.layers[layer];
  const std::int32_t intermediate = weights.down.in_features();
  const std::int32_t num_rows = launched_.rows;
  RETURN_IF_ERROR(kernels::RmsNorm({.x = x_.as<float>(),
                                    .weight = weights.post_attention_norm.data(),
                                    .out = normed_.as<float>(),
                                    .num_rows = num_rows,
                                    .size = config_.hidden_size,
                                    .eps = config_.rms_norm_eps},
                                   stream_));
  // Rank 0 adds the residual, the sum over ranks brings it everywhere.
  const float* residual = layout_.rank() == 0 ? x_.as<float>() : nullptr;
  if (config_.HasExperts(layer)) {
    RETURN_IF_ERROR(
        moe_->Run(weights.moe, normed_.as<float>(), residual, x_.as<float>(), num_rows, stream_));
    residual = x_.as<float>();
  }
  if (intermediate > 0) RETURN_IF_ERROR(RunDenseMlp(weights, residual));
  return world_.AllReduceSum(x_.as<float>(),
                             static_cast<std::int64_t>(num_rows) * config_.hidden_size,
                             DType::kFloat32, stream_);
}

absl::Status RankRunner::RunDenseMlp(const DecoderLayerWeights& weights, const float* residual) {
  const std::int32_t intermediate = weights.down.in_features();
  const std::int32_t num_rows = launched_.rows;
  const bool gated = weights.gate_up.gated();
  RETURN_IF_ERROR(kernels::Linear({.x = normed_.as<float>(),
                                   .weight = &weights.gate_up,
                                   .bias = weights.gate_up_bias.data(),
                                   .residual = nullptr,
                                   .y = gated ? activated_.as<float>() : gate_up_.as<float>(),
                                   .num_rows = num_rows,
                                   .x_stride = config_.hidden_size,
                                   .y_stride = (gated ? 1 : 2) * intermediate},
                                  stream_));
  if (!gated) {
    RETURN_IF_ERROR(kernels::SiluMul({.gate_up = gate_up_.as<float>(),
                                      .out = activated_.as<float>(),
                                      .num_rows = num_rows,
                                      .size = intermediate},
                                     stream_));
  }
  return kernels::Linear({.x = activated_.as<float>(),
                          .weight = &weights.down,
                          .bias = weights.down_bias.data(),
                          .residual = residual,
                          .y = x_.as<float>(),
                          .num_rows = num_rows,
                          .x_stride = intermediate,
                          .y_stride = config_.hidden_size},
                         stream_);
}

absl::Status RankRunner::RunLayers() {
  const std::int32_t num_rows = launched_.rows;
  const std::int64_t x_count = static_cast<std::int64_t>(num_rows) * config_.hidden_size;
  const AttentionStep step{.rows = rows_,
                           .slots = slots_,
                           .arrays = arrays_,
                           .num_rows = num_rows,
                           .num_owned = launched_.owned,
                           .cos = arrays_.cos(),
                           .sin = arrays_.sin(),
                           .owned_cos = arrays_.owned_cos(),
                           .owned_sin = arrays_.owned_sin()};

  RETURN_IF_ERROR(kernels::Embedding({.weight = &weights_.embedding,
                                      .ids = arrays_.token_ids(),
                                      .out = x_.as<float>(),
                                      .num_rows = num_rows,
                                      .first_row = vocab_.begin},
                                     stream_));
  RETURN_IF_ERROR(world_.AllReduceSum(x_.as<float>(), x_count, DType::kFloat32, stream_));

  attention_->BeginStep(step);
  for (std::int32_t layer = 0; layer < config_.num_layers; ++layer) {
    const DecoderLayerWeights& weights = weights_.layers[layer];
    RETURN_IF_ERROR(kernels::RmsNorm({.x = x_.as<float>(),
                                      .weight = weights.input_norm.data(),
                                      .out = normed_.as<float>(),
                                      .num_rows = num_rows,
                                      .size = config_.hidden_size,
                                      .eps = config_.rms_norm_eps},
                                     stream_));
    RETURN_IF_ERROR(attention_->Run(layer, weights, step, normed_.as<float>(),
                                    layout_.rank() == 0 ? x_.as<float>() : nullptr, x_.as<float>(),
                                    stream_));
    // On a device it is so when the step has run, not when it has been launched.
    if (options_.observer != nullptr && kernels::OnDevice(stream_) == nullptr) {
      options_.observer->OnLayerStored(layer);
    }
    RETURN_IF_ERROR(world_.AllReduceSum(x_.as<float>(), x_count, DType::kFloat32, stream_));
    RETURN_IF_ERROR(RunMlp(layer));
    if (options_.progress != nullptr) options_.progress->fetch_add(1, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

absl::Status RankRunner::ComputeLogits() {
  const std::int32_t num_sampled = launched_.logits;
  // The layers are done: normed_ is free for the rows with logits.
  float* sampled_x = normed_.as<float>();
  RETURN_IF_ERROR(kernels::GatherRows({.in = x_.as<float>(),
                                       .index = arrays_.logits_row(),
                                       .out = sampled_x,
                                       .num_rows = num_sampled,
                                       .size = config_.hidden_size},
                                      stream_));
  RETURN_IF_ERROR(kernels::RmsNorm({.x = sampled_x,
                                    .weight = weights_.final_norm.data(),
                                    .out = sampled_x,
                                    .num_rows = num_sampled,
                                    .size = config_.hidden_size,
                                    .eps = config_.rms_norm_eps},
                                   stream_));
  return kernels::Linear({.x = sampled_x,
                          .weight = &weights_.head(),
                          .bias = nullptr,
                          .residual = nullptr,
                          .y = logits_.as<float>(),
                          .num_rows = num_sampled,
                          .x_stride = config_.hidden_size,
                          .y_stride = padded_vocab_},
                         stream_);
}

absl::Status RankRunner::LaunchStep() {
  RETURN_IF_ERROR(RunLayers());
  if (launched_.logits == 0) return absl::OkStatus();
  RETURN_IF_ERROR(ComputeLogits());
  return DrawTokens();
}

// Of the raw logits of a row: from the ranks' own.
absl::Status RankRunner::CheckPlanIsEverywhere([[maybe_unused]] const StepPlan& plan) {
#ifndef NDEBUG
  std::uint64_t hash = 14695981039346656037u;  // FNV-1a
  const auto mix = [&hash](std::int64_t value) {
    hash = (hash ^ static_cast<std::uint64_t>(value)) * 1099511628211u;
  };
  mix(static_cast<std::int64_t>(plan.step));
  for (const PlanSequence& s : plan.sequences) {
    for (std::int64_t value : {std::int64_t{s.slot}, std::int64_t{s.num_rows}, s.first_position,
                               std::int64_t{s.num_sampled}, std::int64_t{s.num_scored}}) {
      mix(value);
    }
  }
  for (std::int32_t i = 0; i < plan.num_rows(); ++i) mix(token_ids_[i]);
  for (std::int32_t block : plan.delta_blocks) mix(block);
  std::vector<std::uint64_t> all(world_.size());
  RETURN_IF_ERROR(world_.AllGather(&hash, all.data(), sizeof(hash), host_));
  for (std::size_t r = 0; r < all.size(); ++r) {
    CHECK_MSG(all[r] == hash, fmt::format("step {}: rank {} runs another plan than rank {}",
                                          plan.step, r, layout_.rank()));
  }
#endif
  return absl::OkStatus();
}

absl::StatusOr<StepOutput> RankRunner::Execute(const StepPlan& plan,
                                               absl::Span<const std::int32_t> previous_tokens) {
  const std::int32_t num_logits = plan.num_logits_rows();
  CHECK(plan.num_rows() <= options_.max_num_batched_tokens && num_logits <= options_.max_num_seqs);
  sampled_tokens_.clear();
  logprobs_.clear();
  RETURN_IF_ERROR(PrepareStep(plan, previous_tokens));
  RETURN_IF_ERROR(CheckPlanIsEverywhere(plan));
  if (options_.observer != nullptr) options_.observer->OnStepBegin(plan, slots_);
  const std::optional<std::size_t> bucket = BucketOf(plan);
  if (plan.num_rows() == 0) {
    // Nobody is told of more plans than there is room for: a step ends when all have begun it.
    RETURN_IF_ERROR(world_.AllGather(nullptr, nullptr, 0, host_));
  } else if (bucket.has_value() && !graphs_.empty()) {
    const Graph& graph = graphs_[*bucket];
    RETURN_IF_ERROR(kernels::OnDevice(stream_)->Launch(*graph.recorded));
    replayed_.operations += graph.collectives.operations;
    replayed_.received_bytes += graph.collectives.received_bytes;
  } else {
    RETURN_IF_ERROR(LaunchStep());
  }
  if (num_logits > 0) RETURN_IF_ERROR(SampleRows());
  RETURN_IF_ERROR(stream_.Synchronize());
  if (options_.observer != nullptr) options_.observer->OnStepEnd();
  return StepOutput{.token_ids = sampled_tokens_, .logprobs = absl::MakeSpan(logprobs_)};
}

}  // namespace weft
