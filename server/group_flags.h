#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/capabilities.h"
#include "server/kv_transfer_flags.h"
#include "server/options.h"

namespace weft {

// What every program of a cluster wants to know.
struct CommonFlags {
  std::string model;
  std::string served_model_name;
  std::string log_level = "info";

  // Adds every flag; `this` must outlive `parser`.
  void AddTo(OptionParser& parser);

  // NOT_FOUND or INVALID_ARGUMENT when `model` is no directory that can be looked into.
  absl::Status CheckModelDir() const;

  // The name requests may give: served_model_name, else the last part of `model`.
  std::string ServedModelName() const;
};

// What makes a group: the model, its layout, and the engine's limits. One table for weft-worker,
// which acts on it, and for `weft serve` and `weft generate`, which pass it on. Names are vLLM's
// where it has them.
struct GroupFlags : CommonFlags {
  Device device = Device::kCpu;
  std::int32_t tensor_parallel_size = 1;
  std::int32_t decode_context_parallel_size = 1;
  std::int32_t prefill_context_parallel_size = 1;
  std::optional<std::int32_t> cp_kv_cache_interleave_size;
  std::optional<std::int32_t> block_size;
  std::string dcp_comm_backend = "ag_rs";
  bool dcp_replicate_query = false;
  bool enable_expert_parallel = false;
  bool enforce_eager = false;
  bool use_nccl_symm_mem = false;
  // Known so that it is refused with a reason; see capabilities.h.
  std::string speculative_config;

  std::string max_model_len = "auto";
  std::int32_t max_num_seqs = 64;
  std::int32_t max_num_batched_tokens = 256;
  std::int32_t max_num_waiting = 1024;
  bool async_scheduling = true;
  bool enable_prefix_caching = true;

  std::string dtype = "auto";
  std::string quantization = "none";
  std::string kv_cache_dtype = "auto";
  std::optional<std::int64_t> kv_cache_memory_bytes;
  std::optional<std::int32_t> num_gpu_blocks_override;

  std::optional<std::int32_t> threads_per_rank;
  absl::Duration stall_timeout = absl::Seconds(3);
  absl::Duration min_restart_backoff = absl::Milliseconds(200);  // doubles ...
  absl::Duration max_restart_backoff = absl::Seconds(5);         // ... up to this
  absl::Duration log_stats_interval = absl::Seconds(10);         // 0: never
  std::int32_t force_preemption_every = 0;                       // for tests; 0: never

  KvTransferFlags kv_transfer;

  // Adds every flag, CommonFlags' too; `this` must outlive `parser`.
  void AddTo(OptionParser& parser);

  // What of the capability table these flags ask for.
  std::vector<Feature> Features() const;

  // INVALID_ARGUMENT for what no group can be, as far as it shows without reading the model.
  absl::Status Check() const;

  // max_model_len as a number; nothing for "auto". Good after Check().
  std::optional<std::int64_t> MaxModelLen() const;

  // After parser.Parse(): the arguments that set the same in a weft-worker, WorkerLimits' too.
  static std::vector<std::string> Arguments(const OptionParser& parser);
};

// The most that one request may ask of a worker. The names of the flags are the router's, so that a
// `weft serve` that is given one passes it to both.
struct WorkerLimits {
  std::int32_t max_logprobs = 20;  // -1: the vocabulary
  std::int32_t max_stop_token_ids = 128;
  std::int32_t max_logit_bias = 1024;
  std::int32_t max_allowed_token_ids = 1 << 20;
  // A router makes several sequences of a bad word.
  std::int32_t max_bad_word_sequences = 4096;
  std::int32_t max_bad_word_sequence_tokens = 2048;
  std::int64_t max_stream_buffer_bytes = std::int64_t{1} << 20;  // of one slow reader

  void AddTo(OptionParser& parser);
};

// A number of tokens, at least 1, perhaps with a suffix: k, m are 1000 and its square, K, M 1024
// and its. Nothing for anything else.
std::optional<std::int64_t> ParseTokens(std::string_view text);

// "auto" (nothing), or tokens. INVALID_ARGUMENT for anything else, and for less than 2: a prompt
// token and one more.
absl::StatusOr<std::optional<std::int64_t>> ParseModelLen(std::string_view text);

}  // namespace weft
