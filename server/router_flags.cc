#include "server/router_flags.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>

#include "fmt/format.h"

namespace weft {
namespace {

constexpr std::int32_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

// Every flag of AddTo(), and CommonFlags', which a router has as well.
constexpr std::array<std::string_view, 15> kNames = {
    "--model",
    "--served-model-name",
    "--log-level",
    "--host",
    "--port",
    "--listen",
    "--skip-tokenizer-init",
    "--tokenizer-threads",
    "--max-prompt-bytes",
    "--max-stop-token-ids",
    "--max-queued-requests",
    "--max-attempts",
    "--max-stream-buffer-bytes",
    "--queue-timeout",
    "--drain-timeout",
};

}  // namespace

void RouterFlags::AddTo(OptionParser& parser) {
  parser.Group("Router");
  parser.Add("--host", &host, "Address to listen on; 0.0.0.0 or [::] for all of this host's");
  parser.Add("--port,-p", &port, "0 picks a free one", Range(0, 65535));
  parser.Add("--listen", &listen,
             "Instead of --host and --port: HOST:PORT or unix-abstract:NAME, several with commas");
  parser.Add("--skip-tokenizer-init", &skip_tokenizer_init,
             "No tokenizer: prompts are token ids, and no text comes back");
  parser.Add("--tokenizer-threads", &tokenizer_threads, "Threads that tokenize prompts",
             Range(1, 256));
  parser.AddBytes("--max-prompt-bytes", &max_prompt_bytes, "Longest text prompt");
  parser.Add("--max-stop-token-ids", &max_stop_token_ids, "Stop tokens of one request",
             Range(0, kMaxInt32));
  parser.Add("--max-queued-requests", &max_queued_requests,
             "Requests that may wait for a tokenizer thread, and for a group to be ready",
             Range(1, kMaxInt32));
  parser.Add("--max-attempts", &max_attempts,
             "Groups that may refuse a request as not ready or draining before it fails",
             Range(1, 1000));
  parser.AddBytes("--max-stream-buffer-bytes", &max_stream_buffer_bytes,
                  "What a slow reader may leave in the router before it loses its stream");
  parser.Add("--queue-timeout", &queue_timeout, "How long a request waits for a group to be ready");
  parser.Add("--drain-timeout", &drain_timeout,
             "How long requests in flight may go on after SIGTERM");
}

std::vector<std::string> RouterFlags::ListenAddresses() const {
  if (!listen.empty()) return listen;
  return {fmt::format("{}:{}", host, port)};
}

std::vector<std::string> RouterFlags::Arguments(const OptionParser& parser) {
  return parser.Arguments([](std::string_view name) {
    return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
  });
}

}  // namespace weft
