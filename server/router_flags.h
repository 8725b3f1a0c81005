#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/options.h"

namespace weft {

// How a router listens and what it lets wait. One table for weft-router, which acts on it, and for
// `weft serve`, which passes it on.
struct RouterFlags {
  std::string host = "127.0.0.1";
  std::int32_t port = 50051;
  std::vector<std::string> listen;  // instead of host and port

  bool skip_tokenizer_init = false;
  std::int32_t tokenizer_threads = 2;
  std::int64_t max_prompt_bytes = std::int64_t{16} << 20;
  std::int32_t max_stop_token_ids = 128;
  std::int32_t max_queued_requests = 1024;
  std::int32_t max_attempts = 3;
  std::int64_t max_stream_buffer_bytes = std::int64_t{1} << 20;
  absl::Duration queue_timeout = absl::Seconds(30);
  absl::Duration drain_timeout = absl::Seconds(30);

  // Adds every flag; `this` must outlive `parser`.
  void AddTo(OptionParser& parser);

  // `listen`, else host:port.
  std::vector<std::string> ListenAddresses() const;

  // After parser.Parse(): the arguments that set the same in a weft-router.
  static std::vector<std::string> Arguments(const OptionParser& parser);
};

}  // namespace weft
