#include "server/group_flags.h"

#include <charconv>
#include <filesystem>
#include <limits>
#include <system_error>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

constexpr std::int32_t kMaxRanks = 1024;
// Memory is set aside for these at start.
constexpr std::int32_t kMaxRows = 1 << 16;
constexpr std::int32_t kMaxWaiting = 1 << 20;
constexpr std::int32_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

absl::StatusOr<std::int64_t> SuffixFactor(std::string_view suffix) {
  if (suffix.empty()) return 1;
  if (suffix == "k") return 1000;
  if (suffix == "K") return 1024;
  if (suffix == "m") return 1000 * 1000;
  if (suffix == "M") return 1024 * 1024;
  return absl::InvalidArgumentError("unknown suffix");
}

}  // namespace

void CommonFlags::AddTo(OptionParser& parser) {
  parser.Group("Model");
  parser.Add("--model,MODEL_DIR", &model, "Directory of the model, in Hugging Face's format");
  parser.Add("--served-model-name", &served_model_name,
             "Name in requests; default: the last part of the model's path");
  parser.Group("Log");
  parser.AddChoice("--log-level", &log_level, {"debug", "info", "warn", "error"},
                   "What is written to standard error");
}

absl::Status CommonFlags::CheckModelDir() const {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(model, error);
  if (status.type() == std::filesystem::file_type::not_found) {
    return absl::NotFoundError(fmt::format("{}: there is no such directory (--model)", model));
  }
  if (status.type() == std::filesystem::file_type::directory) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{}: {} (--model)", model,
                  error ? error.message() : "is a file; the directory of the model is wanted"));
}

std::string CommonFlags::ServedModelName() const {
  if (!served_model_name.empty()) return served_model_name;
  std::string_view path = model;
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  return std::string(path.substr(path.rfind('/') + 1));
}

void WorkerLimits::AddTo(OptionParser& parser) {
  parser.Group("Limits of a request");
  parser.Add(
      "--max-logprobs", &max_logprobs,
      "Most probable tokens told with each token; -1: the vocabulary, also for requests that "
      "ask for -1",
      Range(-1, kMaxInt32));
  parser.Add("--max-stop-token-ids", &max_stop_token_ids, "Entries of stop_token_ids",
             Range(0, kMaxInt32));
  parser.Add("--max-logit-bias", &max_logit_bias, "Entries of logit_bias", Range(0, kMaxInt32));
  parser.Add("--max-allowed-token-ids", &max_allowed_token_ids, "Entries of allowed_token_ids",
             Range(0, kMaxInt32));
  parser.Add("--max-bad-word-sequences", &max_bad_word_sequences, "Sequences in bad_words",
             Range(0, kMaxInt32));
  parser.Add("--max-bad-word-sequence-tokens", &max_bad_word_sequence_tokens,
             "Tokens of one of them", Range(0, kMaxInt32));
  parser.AddBytes("--max-stream-buffer-bytes", &max_stream_buffer_bytes,
                  "What may wait for a slow reader before its request ends with "
                  "RESOURCE_EXHAUSTED; many logprobs need more");
}

void GroupFlags::AddTo(OptionParser& parser) {
  const std::vector<std::string> dtypes = {"auto", "float32", "bfloat16", "float16"};
  CommonFlags::AddTo(parser);

  parser.Group("Precision and length");
  parser.AddChoice("--dtype", &dtype, dtypes, "Of the weights; auto: as stored");
  parser.AddChoice("--quantization", &quantization, {"none", "int8", "int4"},
                   "Of the large weights, made at load: integers in groups of 32 with a scale");
  parser.Add("--max-model-len", &max_model_len,
             "Tokens of prompt and completion together: a number, with k, K, m or M behind it, or "
             "auto: the model's, lowered to what fits");

  parser.Group("Layout");
  parser.AddEnum("--device", &device,
                 {{"cpu", Device::kCpu}, {"cuda", Device::kCuda}, {"cuda-emu", Device::kCudaEmu}},
                 "What the ranks compute on: cuda is one GPU a rank, and has been run on none yet; "
                 "cuda-emu is the same on the CPU, for tests");
  parser.Add(
      "--enforce-eager", &enforce_eager,
      "With --device=cuda: launch the kernels of a step that decodes one by one, not as a graph");
  parser.Add("--use-nccl-symm-mem", &use_nccl_symm_mem,
             "With --device=cuda and several ranks: what they exchange is in NCCL's symmetric "
             "memory, where a GPU reaches the others' (vLLM: VLLM_USE_NCCL_SYMM_MEM); NCCL 2.27");
  parser.Add("--tensor-parallel-size,-tp", &tensor_parallel_size, "Ranks of the group",
             Range(1, kMaxRanks));
  parser.Add("--decode-context-parallel-size,-dcp", &decode_context_parallel_size,
             "Ranks that share the KV cache of a sequence by position; divides the above",
             Range(1, kMaxRanks));
  parser.Add("--prefill-context-parallel-size,-pcp", &prefill_context_parallel_size, "Only 1");
  parser.Add("--cp-kv-cache-interleave-size", &cp_kv_cache_interleave_size,
             "Consecutive tokens on one rank; default: the largest divisor of a block's tokens per "
             "rank that is at most 16",
             Range(1, kMaxInt32));
  parser.Add("--block-size", &block_size,
             "Tokens of a KV block over all ranks that share it (vLLM counts per rank); default: "
             "128 or a little more",
             Range(1, kMaxInt32));
  parser.AddChoice("--dcp-comm-backend", &dcp_comm_backend, {"ag_rs", "a2a"},
                   "How ranks exchange partial attention");
  parser.Add("--dcp-replicate-query", &dcp_replicate_query,
             "Every rank projects the queries of its whole DCP group: more weights, one exchange a "
             "layer fewer");
  parser.Add("--enable-expert-parallel", &enable_expert_parallel,
             "Share out whole experts over the ranks, not each expert's width");

  parser.Group("Engine");
  parser.Add("--max-num-seqs", &max_num_seqs, "Sequences in one step", Range(1, kMaxRows));
  parser.Add("--max-num-batched-tokens", &max_num_batched_tokens, "Tokens in one step",
             Range(1, kMaxRows));
  parser.Add("--max-num-waiting", &max_num_waiting,
             "Requests that a group takes beside --max-num-seqs", Range(1, kMaxWaiting));
  parser.Add("--speculative-config", &speculative_config, "Refused: tokens are not drafted");
  parser.Add("--async-scheduling", &async_scheduling, "Plan a step while the one before runs");
  parser.Add("--enable-prefix-caching", &enable_prefix_caching,
             "Keep the KV blocks of what was computed, until others need them, for requests that "
             "begin alike and have the same cache_salt");

  parser.Group("Memory");
  parser.AddChoice("--kv-cache-dtype", &kv_cache_dtype, dtypes, "Of the KV cache");
  parser.AddBytes("--kv-cache-memory-bytes", &kv_cache_memory_bytes,
                  "KV cache per rank; default: what is there and useful, at most 2 GiB");
  parser.Add("--num-gpu-blocks-override", &num_gpu_blocks_override,
             "KV blocks, whatever the memory", Range(1, kMaxInt32));

  parser.Group("Processes");
  parser.Add("--threads-per-rank", &threads_per_rank,
             "Compute threads; default: the allowed CPUs over the ranks of this host",
             Range(1, 1024));
  parser.Add("--stall-timeout", &stall_timeout, "Without progress for so long, a rank is killed");
  parser.Add("--min-restart-backoff", &min_restart_backoff,
             "How long a group that was lost is down before it starts again; doubles each time");
  parser.Add("--max-restart-backoff", &max_restart_backoff, "And at most");
  parser.Add("--log-stats-interval", &log_stats_interval,
             "How often the leader logs throughput, requests and KV use while there is work; 0s: "
             "never");
  parser.Add("--force-preemption-every", &force_preemption_every,
             "For tests: preempt a sequence every so many steps; 0: never", Range(0, kMaxInt32));
  kv_transfer.AddTo(parser);
}

std::vector<Feature> GroupFlags::Features() const {
  std::vector<Feature> features = {Feature::kChunkedPrefill, Feature::kPreemption};
  const auto add = [&](bool asked, Feature feature) {
    if (asked) features.push_back(feature);
  };
  add(decode_context_parallel_size > 1, Feature::kDecodeContextParallel);
  add(dcp_comm_backend == "a2a", Feature::kA2aExchange);
  add(dcp_replicate_query, Feature::kReplicatedQueries);
  add(enable_expert_parallel, Feature::kExpertParallel);
  add(enable_prefix_caching, Feature::kPrefixCaching);
  add(async_scheduling, Feature::kAsyncScheduling);
  add(!kv_transfer.kv_transfer_config.empty(), Feature::kKvTransfer);
  add(prefill_context_parallel_size != 1, Feature::kPrefillContextParallel);
  add(!speculative_config.empty(), Feature::kSpeculativeDecoding);
  return features;
}

absl::Status GroupFlags::Check() const {
  if (model.empty()) {
    return absl::InvalidArgumentError("no model: give --model DIR or the directory itself");
  }
  RETURN_IF_ERROR(CheckCapabilitiesOfAnyModel(device, Features()));
  if (tensor_parallel_size % decode_context_parallel_size != 0) {
    return absl::InvalidArgumentError(
        fmt::format("--decode-context-parallel-size is {}; it has to divide "
                    "--tensor-parallel-size, which is {}",
                    decode_context_parallel_size, tensor_parallel_size));
  }
  if (stall_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("--stall-timeout is 0; it has to be longer");
  }
  if (max_restart_backoff < min_restart_backoff) {
    return absl::InvalidArgumentError(fmt::format(
        "--max-restart-backoff is {}; it has to be at least --min-restart-backoff, "
        "which is {}",
        absl::FormatDuration(max_restart_backoff), absl::FormatDuration(min_restart_backoff)));
  }
  if (kv_transfer.kv_transfer_lease <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("--kv-transfer-lease is 0; it has to be longer");
  }
  RETURN_IF_ERROR(ParseKvTransferConfig(kv_transfer.kv_transfer_config).status());
  return ParseModelLen(max_model_len).status();
}

std::optional<std::int64_t> GroupFlags::MaxModelLen() const {
  const auto parsed = ParseModelLen(max_model_len);
  CHECK(parsed.ok());
  return *parsed;
}

std::vector<std::string> GroupFlags::Arguments(const OptionParser& parser) {
  // Nothing of the caller's own.
  GroupFlags flags;
  WorkerLimits limits;
  OptionParser worker("", "");
  flags.AddTo(worker);
  limits.AddTo(worker);
  return parser.Arguments([&worker](std::string_view name) { return worker.Has(name); });
}

std::optional<std::int64_t> ParseTokens(std::string_view text) {
  std::int64_t number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, number);
  const auto factor = SuffixFactor({end, static_cast<std::size_t>(last - end)});
  if (error != std::errc() || !factor.ok() || number > kMaxInt32 / *factor || number < 1) {
    return std::nullopt;
  }
  return number * *factor;
}

absl::StatusOr<std::optional<std::int64_t>> ParseModelLen(std::string_view text) {
  if (text == "auto") return std::nullopt;
  const std::optional<std::int64_t> tokens = ParseTokens(text);
  if (tokens.value_or(0) < 2) {
    return absl::InvalidArgumentError(fmt::format(
        "--max-model-len is \"{}\"; auto, or 2 to {}, with k, K, m or M behind it, is allowed",
        text, kMaxInt32));
  }
  return tokens;
}

}  // namespace weft
