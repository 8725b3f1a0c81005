#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/buffer.h"
#include "kernels/device/mirror.h"
#include "kernels/device/stream.h"
#include "kernels/filtered_sample.h"
#include "kernels/gumbel_argmax.h"
#include "worker/engine/step_plan.h"
#include "worker/group/communicator.h"
#include "worker/model/attention_layer.h"
#include "worker/model/decoder_weights.h"
#include "worker/model/kv_cache.h"
#include "worker/model/logits_processor.h"
#include "worker/model/model_config.h"
#include "worker/model/moe_layer.h"
#include "worker/model/sampler.h"
#include "worker/model/shard_layout.h"
#include "worker/model/step_arrays.h"
#include "worker/model/step_observer.h"
#include "worker/model/step_rows.h"

namespace weft {

struct RunnerOptions {
  std::int32_t max_num_seqs = 64;             // slots, and rows with logits of a step
  std::int32_t max_num_batched_tokens = 256;  // rows of a step
  std::int64_t max_model_len = 0;
  DcpExchange exchange = DcpExchange::kAgRs;
  // Grows while a step runs, once a layer, for the watchdog; may be null.
  std::atomic<std::uint64_t>* progress = nullptr;
  std::optional<MlaForm> mla_form;  // of a prompt's rows; absent: the cheapest
  bool round_to_bfloat16 = false;   // see kernels::GqaAttentionParams
  // Bring the logits of every row that has some to the leader, for tests against references.
  bool gather_all_logits = false;
  StepObserver* observer = nullptr;  // may be null
};

// What a step gives, on rank 0 and valid until the next one; empty on the other ranks.
struct StepOutput {
  absl::Span<const std::int32_t> token_ids;  // of sampled rows, in the plan's order
  absl::Span<PositionLogprobs> logprobs;     // as in StepResult
};

// Executes plans on one rank: embed, layers, logits of the rows that need them, the next tokens.
// All ranks of the group run the same plan; they meet in the collectives of `world` (all T ranks)
// and `dcp` (this rank's DCP group).
//
// Allocates nothing after Create() but for sequences with LogitsParams. Threading: the rank's
// executor thread.
class RankRunner {
 public:
  // The largest collective it will ask `world` for, for FabricCommunicatorOptions::max_bytes;
  // DcpAttention knows that of `dcp`.
  static std::int64_t MaxCollectiveBytes(const ModelConfig& config, const ShardLayout& layout,
                                         const RunnerOptions& options);

  // All references outlive the runner.
  static absl::StatusOr<std::unique_ptr<RankRunner>> Create(
      const ModelConfig& config, const ShardLayout& layout, const DecoderWeights& weights,
      KvCache& cache, Communicator& world, Communicator& dcp, const RunnerOptions& options,
      kernels::Stream& stream);

  // On a device: records the steps that only decode, to be replayed from here on. All ranks at
  // once, before the first step.
  absl::Status CaptureGraphs();

  // Runs one step. `previous_tokens` are the previous step's sampled tokens, for rows that refer
  // to them. Errors are those of the collectives and end the group.
  absl::StatusOr<StepOutput> Execute(const StepPlan& plan,
                                     absl::Span<const std::int32_t> previous_tokens);

  // With gather_all_logits, on rank 0: the logits of the `index`-th row of the last step that has
  // some.
  absl::Span<const float> Logits(std::int32_t index) const;

  std::int64_t workspace_bytes() const;
  // The collectives of steps that were replayed, which communicators do not see.
  const CollectiveCounters& replayed_collectives() const { return replayed_; }

 private:
  RankRunner(const ModelConfig& config, const ShardLayout& layout, const DecoderWeights& weights,
             Communicator& world, Communicator& dcp, const RunnerOptions& options,
             kernels::Stream& stream, std::unique_ptr<AttentionLayer> attention);

  absl::Status AllocateWorkspace();
  absl::Status PrepareStep(const StepPlan& plan, absl::Span<const std::int32_t> previous_tokens);
  // On devices, steps that only decode are launched for one of a few numbers of rows.
  void ListBuckets();
  std::optional<std::size_t> BucketOf(const StepPlan& plan) const;
  absl::Status SendSampling();
  // All that a step computes before the host sees anything of it.
  absl::Status LaunchStep();
  absl::Status RunLayers();
  absl::Status RunMlp(std::int32_t layer);
  // x = residual + this rank's part of MLP(normed).
  absl::Status RunDenseMlp(const DecoderLayerWeights& weights, const float* residual);
  absl::Status ComputeLogits();
  void TakeLogitsDeltas(const StepPlan& plan, absl::Span<const std::int32_t> previous_tokens);
  // What is to be done with each row that has logits.
  void ListLogitsRows(const StepPlan& plan);
  bool FiltersOnDevice(const SamplingParams& params) const {
    return params.HasFilter() && !params.whole_row && stream_.device() != kernels::DeviceKind::kCpu;
  }
  absl::Status DrawTokens();
  // Of the rows in filtered_index_, into filtered_.
  absl::Status DrawFiltered();
  absl::Status SampleRows();
  absl::Status GatherWholeRows();
  // Leader: fills sampled_tokens_ and logprobs_.
  absl::Status FinishRows();
  absl::StatusOr<std::int32_t> SampleWholeRow(std::int32_t index);
  double LogSumExp(std::int32_t index) const;
  absl::Status CheckPlanIsEverywhere(const StepPlan& plan);

  const ModelConfig& config_;
  const ShardLayout layout_;
  const DecoderWeights& weights_;
  Communicator& world_;
  const Communicator& dcp_;
  const RunnerOptions options_;
  kernels::Stream& stream_;
  kernels::CpuStream& host_;
  const RopeFrequencies rope_;
  const IndexRange vocab_;           // this rank's slice
  const std::int32_t padded_vocab_;  // ceil(vocab_size / T): a rank's part of a whole row
  const std::unique_ptr<AttentionLayer> attention_;
  std::optional<MoeLayer> moe_;
  SlotTable slots_;
  StepRows rows_;
  Sampler sampler_;

  StepSizes launched_;
  std::vector<std::int32_t> buckets_;  // of rows, ascending; empty on the CPU
  // A step of a bucket's rows, recorded.
  struct Graph {
    std::unique_ptr<kernels::DeviceGraph> recorded;
    CollectiveCounters collectives;  // in it
  };
  std::vector<Graph> graphs_;  // [buckets] after CaptureGraphs()
  CollectiveCounters replayed_;

  std::vector<std::int32_t> token_ids_;  // [rows]
  kernels::Buffer x_;                    // [rows, hidden]
  kernels::Buffer normed_;               // [rows, hidden]
  kernels::Buffer gate_up_;              // [rows, 2 * own intermediate]; on a device
  kernels::Buffer activated_;            // [rows, own intermediate]
  StepArrays arrays_;
  kernels::Buffer logits_;             // [logits rows, padded_vocab]
  kernels::Mirror<float> whole_send_;  // [whole rows, padded_vocab]
  // On the host.
  kernels::Buffer whole_rows_;  // leader: [T, whole rows, padded_vocab]
  kernels::Buffer whole_row_;   // leader: [whole rows, vocab]
  kernels::Buffer processed_;   // leader: [vocab]

  std::vector<LogitsProcessor> processors_;  // leader: [max_num_seqs]
  std::vector<PositionLogprobs> logprobs_;

  // Per row with logits.
  struct LogitsRow {
    std::int32_t slot = 0;
    bool sampled = false;  // else scored
  };
  std::vector<LogitsRow> logits_rows_;
  kernels::Mirror<float> temperature_;
  kernels::Mirror<std::uint64_t> seed_;
  kernels::Mirror<std::int64_t> sample_position_;
  kernels::Mirror<kernels::ArgmaxResult> best_;  // own candidates
  std::vector<kernels::ArgmaxResult> all_best_;  // leader: [T, logits rows]
  std::vector<std::int32_t> whole_index_;        // which of them are gathered whole
  kernels::Mirror<std::int32_t> whole_index_for_kernels_;
  std::vector<std::int32_t> filtered_index_;  // which of them devices filter
  kernels::Mirror<kernels::FilteredRow> filtered_rows_;
  kernels::Buffer filtered_logits_;                   // [T, filtered rows, padded_vocab]
  kernels::Mirror<kernels::FilteredToken> filtered_;  // leader
  std::vector<std::int32_t> sampled_tokens_;
};

}  // namespace weft
