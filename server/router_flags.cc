#include "server/router_flags.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string_view>

#include "fmt/format.h"

namespace weft {
namespace {

constexpr std::int32_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

// Every flag of AddTo(), and CommonFlags', which a router has as well.
constexpr std::string_view kNames[] = {
    "--model",
    "--served-model-name",
    "--log-level",
    "--host",
    "--port",
    "--listen",
    "--api-keys-file",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--ssl-ca-certs",
    "--skip-tokenizer-init",
    "--tokenizer-threads",
    "--max-prompt-bytes",
    "--max-prompt-tokens",
    "--max-chat-messages",
    "--max-n",
    "--max-stop-strings",
    "--max-stop-string-bytes",
    "--max-stop-token-ids",
    "--max-bad-words",
    "--max-bad-word-tokens",
    "--max-logit-bias",
    "--max-logprobs",
    "--max-detokenize-tokens",
    "--max-requests",
    "--max-queued-requests",
    "--routing-policy",
    "--routing-request-tokens",
    "--access-log",
    "--dns-refresh-interval",
    "--max-waiting-per-group",
    "--max-attempts",
    "--retry-budget-ratio",
    "--retry-budget-min",
    "--min-retry-backoff",
    "--max-retry-backoff",
    "--max-replays",
    "--breaker-failures",
    "--breaker-open-time",
    "--slow-start",
    "--first-token-timeout",
    "--pd-min-prefill-tokens",
    "--max-stream-buffer-bytes",
    "--queue-timeout",
    "--drain-timeout",
    "--max-message-bytes",
    "--keepalive-interval",
    "--keepalive-timeout",
    "--min-ping-interval",
    "--max-connection-age",
    "--max-connection-age-grace",
    "--max-concurrent-streams",
    "--grpc-memory-quota-bytes",
    "--heartbeat-timeout",
    "--min-reconnect-backoff",
    "--max-reconnect-backoff",
};

}  // namespace

void RouterFlags::AddTo(OptionParser& parser) {
  parser.Group("Router");
  parser.Add("--host", &host, "Address to listen on; 0.0.0.0 or [::] for all of this host's");
  parser.Add("--port,-p", &port, "0 picks a free one", Range(0, 65535));
  parser.Add("--listen", &listen,
             "Instead of --host and --port: HOST:PORT or unix-abstract:NAME, several with commas");
  tls.AddTo(parser, "--",
            "Clients connect by TLS and see this certificate: a PEM file, with those between it "
            "and a CA behind it. Taken anew when it changes, as all files of TLS",
            "Clients need a certificate of one of the CAs in this PEM file");
  parser.Add("--api-keys-file", &api_keys_file,
             "JSON file with tenants, their API keys and limits; a client needs a key then. Taken "
             "anew when it changes");
  parser.Add("--access-log", &access_log,
             "A line of JSON on standard error for each Generate call that has ended, with log levels "
             "info and debug; nothing of prompts and outputs but their lengths");
  parser.Add("--skip-tokenizer-init", &skip_tokenizer_init,
             "No tokenizer: prompts are token ids, and no text comes back");
  parser.Add("--tokenizer-threads", &tokenizer_threads, "Threads that tokenize prompts",
             Range(1, 256));
  AddRequestLimitsTo(parser);
  AddConnectionLimitsTo(parser);
}

void RouterFlags::AddRequestLimitsTo(OptionParser& parser) {
  parser.Group("Limits of a request");
  parser.AddBytes("--max-prompt-bytes", &max_prompt_bytes,
                  "Longest text prompt; of a chat, all messages together");
  const Range count(0, kMaxInt32);
  parser.Add("--max-prompt-tokens", &max_prompt_tokens,
             "Token ids of a prompt that is given as such, and of resume", Range(1, kMaxInt32));
  parser.Add("--max-chat-messages", &max_chat_messages, "Messages of one chat", count);
  parser.Add("--max-n", &max_n, "Samples of one request", Range(1, 65536));
  parser.Add("--max-stop-strings", &max_stop_strings, "Stop strings of one request", count);
  parser.AddBytes("--max-stop-string-bytes", &max_stop_string_bytes,
                  "Longest stop string, and longest bad word");
  parser.Add("--max-stop-token-ids", &max_stop_token_ids, "Stop tokens of one request", count);
  parser.Add("--max-bad-words", &max_bad_words, "Bad words and sequences of one request", count);
  parser.Add("--max-bad-word-tokens", &max_bad_word_tokens, "Tokens of one bad sequence", count);
  parser.Add("--max-logit-bias", &max_logit_bias, "Entries of logit_bias", count);
  parser.Add("--max-logprobs", &max_logprobs, "Most probable tokens that may be asked for", count);
  parser.Add("--max-detokenize-tokens", &max_detokenize_tokens, "Tokens of one Detokenize", count);

  parser.Group("Limits of all requests");
  parser.Add("--max-requests", &max_requests, "Requests in flight at this router",
             Range(1, kMaxInt32));
  parser.Add(
      "--max-queued-requests", &max_queued_requests,
      "Requests that may wait for a tokenizer thread, and samples for a group that takes them",
      Range(1, kMaxInt32));
  parser.Add("--max-waiting-per-group", &max_waiting_per_group,
             "Samples of this router that may wait at a group behind those it runs, if it takes so "
             "many; more wait here, by priority and fairly between tenants",
             Range(0, kMaxInt32));
  parser.Add("--routing-policy", &routing_policy,
             "How a group is chosen: prefix-aware, least-loaded, round-robin or random");
  parser.Add(
      "--routing-request-tokens", &routing_request_tokens,
      "With prefix-aware: tokens of a prompt that count as much as a request that runs there",
      Range(0, kMaxInt32));
  parser.Add("--max-attempts", &max_attempts,
             "Groups that may refuse a request as not ready or draining before it fails",
             Range(1, 1000));
  parser.Add("--retry-budget-ratio", &retry_budget_ratio,
             "Samples that groups refused are placed again as often as this share of the last ten "
             "seconds' samples, and wait otherwise",
             Range(0, 1000));
  parser.Add("--retry-budget-min", &retry_budget_min,
             "And so often in ten seconds however few samples there were", count);
  parser.Add("--min-retry-backoff", &min_retry_backoff,
             "Pause before a group that is overloaded is given one more than it takes, at first");
  parser.Add("--max-retry-backoff", &max_retry_backoff, "And at most");
  parser.Add("--max-replays", &max_replays,
             "Groups that a request may lose, each time going on elsewhere, before it fails",
             Range(0, 1000));
  parser.Add(
      "--breaker-failures", &breaker_failures,
      "Streams in a row that fail, or losses of the group, after which a group is asked last; "
      "0: never",
      count);
  parser.Add("--breaker-open-time", &breaker_open_time,
             "Such a group is given one sample in so long, until one is served");
  parser.Add("--slow-start", &slow_start,
             "How long the share of a group that comes, or comes back, grows; 0s: whole at once");
  parser.Add(
      "--first-token-timeout", &first_token_timeout,
      "A group that has said nothing of a sample for so long is left for another one that has "
      "room; queue and prompt included");
  parser.Add(
      "--pd-min-prefill-tokens", &pd_min_prefill_tokens,
      "Prompts with fewer tokens that are not cached are computed by the decode group itself",
      count);
  parser.AddBytes("--max-stream-buffer-bytes", &max_stream_buffer_bytes,
                  "What a slow reader may leave in the router before it loses its stream");
  parser.Add("--queue-timeout", &queue_timeout,
             "How long a request waits for a group that is ready and takes it");
  parser.Add("--drain-timeout", &drain_timeout,
             "How long requests in flight may go on after SIGTERM");
}

void RouterFlags::AddConnectionLimitsTo(OptionParser& parser) {
  parser.Group("Connections");
  parser.AddBytes("--max-message-bytes", &max_message_bytes,
                  "Largest message, either way, with clients and with groups");
  parser.Add("--keepalive-interval", &keepalive_interval,
             "Silence after which a connection is pinged, also without calls");
  parser.Add("--keepalive-timeout", &keepalive_timeout,
             "An unanswered ping ends the connection after this");
  parser.Add("--min-ping-interval", &min_ping_interval,
             "A client that pings faster than this loses its connection");
  parser.Add("--max-connection-age", &max_connection_age,
             "A client's connection is asked to go after this, so that load spreads anew");
  parser.Add("--max-connection-age-grace", &max_connection_age_grace,
             "How long the calls of such a connection may go on");
  parser.Add("--max-concurrent-streams", &max_concurrent_streams,
             "Calls of one connection at a time; more wait in the client. 0: any number",
             Range(0, kMaxInt32));
  parser.AddBytes("--grpc-memory-quota-bytes", &memory_quota_bytes,
                  "Memory of gRPC's own buffers for all connections; 0: any");
  parser.Add("--dns-refresh-interval", &dns_refresh_interval,
             "How often names of groups (dns:///HOST:PORT) are resolved");
  parser.Add("--heartbeat-timeout", &heartbeat_timeout,
             "A leader that is silent for this long is taken for lost; it speaks every 500 ms");
  parser.Add("--min-reconnect-backoff", &min_reconnect_backoff,
             "Pause before a lost leader is asked for again, at first");
  parser.Add("--max-reconnect-backoff", &max_reconnect_backoff, "And at most");
}

std::vector<std::string> RouterFlags::ListenAddresses() const {
  if (!listen.empty()) return listen;
  return {fmt::format("{}:{}", host, port)};
}

std::vector<std::string> RouterFlags::Arguments(const OptionParser& parser) {
  return parser.Arguments([](std::string_view name) {
    return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
  });
}

}  // namespace weft
