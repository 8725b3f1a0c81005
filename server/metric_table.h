#pragma once

#include <span>

// Every metric of Weft, in one table: name, help and buckets. Whoever counts something names it by
// its entry here, so that nothing is exported that is not listed, and no name is written twice.
//
// Prefix weft_, base units (seconds, bytes, ratios), _total on counters only. Names after the
// prefix and buckets are vLLM's where it has them, so that dashboards carry over. Every series of
// a process has the label model_name; the other labels are named in the help.

namespace weft {

struct CounterSpec {
  const char* name;
  const char* help;
};
struct GaugeSpec {
  const char* name;
  const char* help;
};
struct HistogramSpec {
  const char* name;
  const char* help;
  std::span<const double> buckets;
};

namespace metrics {

// --- Buckets.

inline constexpr double kFirstTokenBuckets[] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1,
                                                0.25,  0.5,   0.75, 1,    2.5,  5,    7.5,  10,
                                                20,    40,    80,   160,  640,  2560};
inline constexpr double kTokenTimeBuckets[] = {
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
inline constexpr double kRequestTimeBuckets[] = {
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
inline constexpr double kTokensBuckets[] = {
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 1e5, 2e5, 5e5, 1e6};
inline constexpr double kIterationTokensBuckets[] = {1,   8,    16,   32,   64,   128,  256,
                                                     512, 1024, 2048, 4096, 8192, 16384};

// --- The leader of a group: its engine and requests.

inline constexpr GaugeSpec kNumRequestsRunning = {
    "weft_num_requests_running", "Requests that have KV blocks and take part in steps"};
inline constexpr GaugeSpec kNumRequestsWaiting = {"weft_num_requests_waiting",
                                                  "Requests that wait for KV blocks or a place"};
inline constexpr GaugeSpec kKvCacheUsageRatio = {"weft_kv_cache_usage_ratio",
                                                 "KV blocks in use, of all; 1 is full"};
inline constexpr CounterSpec kNumPreemptions = {
    "weft_num_preemptions_total", "Requests that lost their KV blocks and were computed again"};
inline constexpr CounterSpec kPrefixCacheQueries = {
    "weft_prefix_cache_queries_total",
    "Tokens of admitted requests that were looked up in the prefix cache"};
inline constexpr CounterSpec kPrefixCacheHits = {"weft_prefix_cache_hits_total",
                                                 "Tokens of these whose KV was found"};
inline constexpr CounterSpec kPrefixCacheEvictions = {
    "weft_prefix_cache_evictions_total", "KV blocks that left the prefix cache for other tokens"};
inline constexpr CounterSpec kPromptTokens = {"weft_prompt_tokens_total",
                                              "Prompt tokens of admitted requests"};
inline constexpr CounterSpec kGenerationTokens = {"weft_generation_tokens_total",
                                                  "Tokens generated"};
inline constexpr CounterSpec kRequestSuccess = {
    "weft_request_success_total",
    "Requests that have ended, by finished_reason: stop, length, abort (also at a deadline, and by "
    "the "
    "router at a stop string), error"};
inline constexpr HistogramSpec kTimeToFirstToken = {
    "weft_time_to_first_token_seconds", "From the arrival of a request to its first token",
    kFirstTokenBuckets};
inline constexpr HistogramSpec kInterTokenLatency = {
    "weft_inter_token_latency_seconds", "Between two tokens of a request", kTokenTimeBuckets};
inline constexpr HistogramSpec kRequestTimePerOutputToken = {
    "weft_request_time_per_output_token_seconds",
    "Mean time between the tokens of a request; of requests with two tokens or more",
    kTokenTimeBuckets};
inline constexpr HistogramSpec kE2eRequestLatency = {
    "weft_e2e_request_latency_seconds",
    "From the arrival of a request to its end, however it ended", kRequestTimeBuckets};
inline constexpr HistogramSpec kRequestQueueTime = {
    "weft_request_queue_time_seconds",
    "From the arrival of a request to its first step, or to its end if it had none",
    kRequestTimeBuckets};
inline constexpr HistogramSpec kRequestPrefillTime = {
    "weft_request_prefill_time_seconds",
    "From the first step of a request to its first token or its end; 0 if it had no step",
    kRequestTimeBuckets};
inline constexpr HistogramSpec kRequestDecodeTime = {
    "weft_request_decode_time_seconds",
    "From the first token of a request to its end; 0 if it had none", kRequestTimeBuckets};
inline constexpr HistogramSpec kRequestPromptTokens = {
    "weft_request_prompt_tokens", "Prompt tokens of a request, however it ended", kTokensBuckets};
inline constexpr HistogramSpec kRequestGenerationTokens = {
    "weft_request_generation_tokens", "Tokens generated for a request, however it ended",
    kTokensBuckets};
inline constexpr HistogramSpec kIterationTokens = {
    "weft_iteration_tokens", "Tokens computed in a step", kIterationTokensBuckets};
inline constexpr GaugeSpec kRankKvTokens = {
    "weft_rank_kv_tokens", "Tokens of running requests whose KV a rank holds, by rank"};

// --- Every rank.

inline constexpr GaugeSpec kRankStepId = {"weft_rank_step_id", "The last step a rank has run"};
inline constexpr CounterSpec kRankStepSeconds = {
    "weft_rank_step_seconds_total",
    "Time a rank has spent in steps; what is left of the clock's is between them"};
inline constexpr GaugeSpec kRankLastProgress = {
    "weft_rank_last_progress_timestamp_seconds",
    "When a rank last began, ended or got on with a step; Unix time, to half a second"};
inline constexpr CounterSpec kRankCollectiveWait = {
    "weft_rank_collective_wait_seconds_total",
    "Time a rank has spent in collectives: for the slowest rank, and for the messages"};
inline constexpr CounterSpec kRankCollectiveReceivedBytes = {
    "weft_rank_collective_received_bytes_total", "Payload of collectives from other ranks"};
inline constexpr CounterSpec kRankFabricSentBytes = {"weft_rank_fabric_sent_bytes_total",
                                                     "Plans and collectives sent to other ranks"};
inline constexpr CounterSpec kRankFabricReceivedBytes = {
    "weft_rank_fabric_received_bytes_total", "Plans and collectives received from other ranks"};
inline constexpr GaugeSpec kRankMemory = {"weft_rank_memory_bytes",
                                          "Memory of a rank by kind: weights, kv, workspace"};

// --- Every rank with --kv-transfer-config.

inline constexpr CounterSpec kKvTransferBytes = {
    "weft_kv_transfer_bytes_total",
    "KV exchanged with other groups, by rank, direction (sent, received) and rank of the other "
    "group"};
inline constexpr CounterSpec kKvTransferOverlappedBytes = {
    "weft_kv_transfer_overlapped_bytes_total",
    "KV sent while the prompt it is of was still being computed, by rank"};
inline constexpr CounterSpec kKvTransferFailed = {
    "weft_kv_transfer_failed_total",
    "Transfers that failed, by rank and reason: peer (it was lost or refused), rejected (the other "
    "side gave up), rows (what came was wrong)"};
inline constexpr CounterSpec kKvTransferDroppedMessages = {
    "weft_kv_transfer_dropped_messages_total",
    "Messages of transfers that were over when they came, by rank"};
inline constexpr GaugeSpec kKvTransferInflight = {
    "weft_kv_transfer_inflight", "Transfers that are open, by rank and direction: sent, received"};

// --- Leaders with it.

inline constexpr HistogramSpec kKvTransferSeconds = {
    "weft_kv_transfer_seconds",
    "From the reservation of a transfer, or its first chunk, to its end; of those that were done",
    kRequestTimeBuckets};
inline constexpr CounterSpec kKvTransferExpired = {"weft_kv_transfer_expired_total",
                                                   "Transfers that ended for want of progress"};

// --- The router.

inline constexpr CounterSpec kRouterRequests = {
    "weft_router_requests_total",
    "Requests that have ended, by outcome (the gRPC status) and reason: of an OK one why it "
    "finished, else the ErrorInfo reason or none; with --api-keys-file by tenant, too"};
inline constexpr CounterSpec kRouterRejects = {
    "weft_router_rejects_total",
    "Requests that ended before any group took them, by reason: the ErrorInfo reason, else the "
    "gRPC status"};
inline constexpr GaugeSpec kRouterRequestsInFlight = {"weft_router_requests_in_flight",
                                                      "Generate calls that have not ended"};
inline constexpr GaugeSpec kRouterQueuedRequests = {
    "weft_router_queued_requests",
    "Requests that wait, by stage: tokenize (for a thread), place (for a group that takes them)"};
inline constexpr CounterSpec kRouterRetries = {
    "weft_router_retries_total", "Requests placed again after a group could not take them"};
inline constexpr CounterSpec kRouterReplays = {
    "weft_router_replays_total", "Samples that went on elsewhere after their group was lost"};
inline constexpr CounterSpec kRouterHandoffs = {
    "weft_router_handoffs_total",
    "Prompts that one group was to compute for another, by outcome: done; failed, short: computed "
    "by the other one after all"};
inline constexpr CounterSpec kRouterPlacements = {"weft_router_placements_total",
                                                  "Requests given to a group, by group"};
inline constexpr GaugeSpec kRouterBreakerOpen = {
    "weft_router_breaker_open",
    "1 while a group, by group, is asked last because its streams fail"};
inline constexpr CounterSpec kRouterPromptTokens = {
    "weft_router_prompt_tokens_total", "Tokens of prompts, each time that one was placed"};
inline constexpr CounterSpec kRouterCachedTokens = {
    "weft_router_cached_prompt_tokens_total",
    "Of those, tokens that the chosen group had in its prefix cache, as far as the router knew"};
inline constexpr GaugeSpec kRouterIndexBlocks = {
    "weft_router_prefix_index_blocks", "Blocks of a group's prefix cache that the router knows"};
inline constexpr GaugeSpec kRouterIndexBytes = {"weft_router_prefix_index_bytes",
                                                "Memory of what it knows of them"};
inline constexpr GaugeSpec kRouterGroups = {"weft_router_groups", "Groups behind the router"};
inline constexpr GaugeSpec kRouterGroupsReady = {"weft_router_groups_ready",
                                                 "Groups that take requests"};

// --- Routers and leaders.

inline constexpr GaugeSpec kDrainDeadline = {"weft_drain_deadline_timestamp_seconds",
                                             "Until when a process that was told to end finishes "
                                             "what it has; Unix time, 0 before it is told"};
inline constexpr GaugeSpec kStreamBufferBytes = {
    "weft_stream_buffer_bytes", "What waits in this process for slow readers of token streams"};

}  // namespace metrics
}  // namespace weft
