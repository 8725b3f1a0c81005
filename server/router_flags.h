#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/options.h"
#include "server/tls_files.h"

namespace weft {

// How a router listens and what it lets wait. One table for weft-router, which acts on it, and for
// `weft serve`, which passes it on.
struct RouterFlags {
  std::string host = "127.0.0.1";
  std::int32_t port = 50051;
  std::vector<std::string> listen;  // instead of host and port
  TlsFiles tls;                     // of clients' connections

  std::string api_keys_file;

  bool skip_tokenizer_init = false;
  std::int32_t tokenizer_threads = 2;

  // Of one request.
  std::int64_t max_prompt_bytes = std::int64_t{16} << 20;
  std::int64_t max_prompt_tokens = std::int64_t{2} << 20;
  std::int32_t max_chat_messages = 4096;
  std::int32_t max_n = 128;
  std::int32_t max_stop_strings = 16;
  std::int64_t max_stop_string_bytes = 1024;
  std::int32_t max_stop_token_ids = 128;
  std::int32_t max_bad_words = 128;
  std::int32_t max_bad_word_tokens = 64;
  std::int32_t max_logit_bias = 1024;
  std::int32_t max_logprobs = 20;
  std::int32_t max_detokenize_tokens = 1 << 20;

  // Of all of them.
  std::int32_t max_requests = 16384;
  std::int32_t max_queued_requests = 1024;
  std::string routing_policy = "prefix-aware";
  std::int64_t routing_request_tokens = 128;
  bool access_log = true;
  absl::Duration dns_refresh_interval = absl::Seconds(5);
  std::int32_t max_waiting_per_group = 1024;
  std::int32_t max_attempts = 3;
  double retry_budget_ratio = 0.2;
  std::int32_t retry_budget_min = 100;
  absl::Duration min_retry_backoff = absl::Milliseconds(50);
  absl::Duration max_retry_backoff = absl::Seconds(1);
  std::int32_t max_replays = 3;
  std::int32_t breaker_failures = 5;
  absl::Duration breaker_open_time = absl::Seconds(5);
  absl::Duration slow_start = absl::Seconds(10);
  absl::Duration first_token_timeout = absl::InfiniteDuration();
  std::int32_t pd_min_prefill_tokens = 128;
  std::int64_t max_stream_buffer_bytes = std::int64_t{1} << 20;
  absl::Duration queue_timeout = absl::Seconds(30);
  absl::Duration drain_timeout = absl::Seconds(30);

  // Of connections: to clients, and where it says so to groups.
  std::int64_t max_message_bytes = std::int64_t{64} << 20;
  absl::Duration keepalive_interval = absl::Seconds(30);
  absl::Duration keepalive_timeout = absl::Seconds(10);
  absl::Duration min_ping_interval = absl::Seconds(10);
  absl::Duration max_connection_age = absl::InfiniteDuration();
  absl::Duration max_connection_age_grace = absl::InfiniteDuration();
  std::int32_t max_concurrent_streams = 4096;
  std::int64_t memory_quota_bytes = std::int64_t{2} << 30;
  absl::Duration heartbeat_timeout = absl::Seconds(3);
  absl::Duration min_reconnect_backoff = absl::Milliseconds(100);
  absl::Duration max_reconnect_backoff = absl::Seconds(1);

  // Adds every flag; `this` must outlive `parser`.
  void AddTo(OptionParser& parser);

  // `listen`, else host:port.
  std::vector<std::string> ListenAddresses() const;

  // After parser.Parse(): the arguments that set the same in a weft-router.
  static std::vector<std::string> Arguments(const OptionParser& parser);

 private:
  void AddRequestLimitsTo(OptionParser& parser);
  void AddConnectionLimitsTo(OptionParser& parser);
};

}  // namespace weft
