#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/model/model_config.h"
#include "worker/model/shard_layout.h"
#include "worker/plan/roofline.h"

namespace weft {

// How an element is stored, served here or not: "float32", "bfloat16", "float16", "fp8", "nvfp4"
// (with its scales).
std::optional<double> StorageBytes(std::string_view dtype);

struct PlanOptions {
  std::optional<std::int32_t> tensor_parallel_size;          // absent: powers of two
  std::optional<std::int32_t> decode_context_parallel_size;  // absent: all that divide T
  std::optional<std::int32_t> block_size;
  std::optional<std::int32_t> interleave;
  bool a2a_exchange = false;
  bool replicate_query = false;
  bool expert_parallel = false;
  double weight_bytes = 2;  // of an element
  double kv_bytes = 2;
  double wire_bytes = 4;
  // Memory of a rank for weights and KV together, else for KV.
  std::optional<std::int64_t> memory_bytes;
  std::int64_t kv_memory_bytes = 0;
  std::vector<std::int64_t> contexts;  // tokens of a sequence
  std::int64_t max_num_seqs = 1024;    // of one step, for what depends on the batch
  std::optional<Gpu> gpu;              // for estimates of time
};

// What a layout gives for sequences of `context` tokens. Of ranks that differ, the fullest counts.
struct LayoutPlan {
  std::int32_t tensor_parallel_size = 1;
  std::int32_t decode_context_parallel_size = 1;
  std::int32_t block_size = 0;
  std::int32_t interleave = 0;
  std::int64_t context = 0;
  double kv_bytes_per_token_per_rank = 0;  // of a token of any rank's: what a rank stores / N
  double kv_copies = 0;
  std::int64_t weight_bytes_per_rank = 0;
  std::int64_t kv_memory_bytes = 0;  // of that rank
  std::int64_t kv_tokens = 0;        // of the group
  std::int64_t max_sequences = 0;
  std::int64_t batch = 0;  // sequences of a step: max_sequences, up to max_num_seqs
  // Received by a rank in a layer of a decode step of that batch: queries and partial outputs.
  std::int64_t dcp_wire_bytes_per_layer = 0;
  // Estimates, with a GPU: of a step of that batch, and of one sequence.
  std::optional<StepEstimate> step;
  std::optional<double> tokens_per_second;
  // One sequence of this context (and of 1024 tokens) against N = 1: above 1 it is slower.
  std::optional<double> single_slowdown;
  std::optional<double> short_slowdown;
  // From how many tokens on a single sequence is no slower than with N = 1; absent: never.
  std::optional<std::int64_t> break_even_context;
  std::string note;
  bool recommended = false;
};

// A plan of every layout asked for and every context, by T, N and context. INVALID_ARGUMENT where
// the only layout asked for cannot be, and says what is allowed.
absl::StatusOr<std::vector<LayoutPlan>> PlanLayouts(const ModelConfig& config,
                                                    const PlanOptions& options);

// Marks the best of `plans` for its longest context, and says why: the most tokens per second and
// rank; without estimates the most sequences per rank; of equals the smallest N, then T.
std::string Recommend(absl::Span<LayoutPlan> plans);

}  // namespace weft
