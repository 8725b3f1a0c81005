#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/options.h"

namespace weft {

// What a group does in the hand-off of prompts.
enum class KvRole : std::uint8_t { kNone, kProducer, kConsumer, kBoth };

// --kv-transfer-config: vLLM's names, as JSON.
struct KvTransferConfig {
  KvRole role = KvRole::kNone;  // kv_role: kv_producer, kv_consumer or kv_both; required
  bool layerwise = true;        // mode: layerwise or blockwise
  std::int64_t buffer_bytes = std::int64_t{4} << 20;  // kv_buffer_size, of messages on their way
  bool shared_memory = true;  // shared_memory: read KV out of processes of this host, where one may

  bool sends() const { return role == KvRole::kProducer || role == KvRole::kBoth; }
  bool receives() const { return role == KvRole::kConsumer || role == KvRole::kBoth; }
};

// INVALID_ARGUMENT, naming the key, what was seen and what is allowed. "" is no config: kNone.
absl::StatusOr<KvTransferConfig> ParseKvTransferConfig(std::string_view json);

// "kv_producer", ...; "" for kNone.
std::string_view KvRoleName(KvRole role);

// A group's flags for it.
struct KvTransferFlags {
  std::string kv_transfer_config;
  bool kv_transfer_checksum = false;
  std::int64_t kv_transfer_bandwidth_limit = 0;
  std::int64_t kv_transfer_window_bytes = std::int64_t{2} << 20;
  absl::Duration kv_transfer_lease = absl::Seconds(30);

  void AddTo(OptionParser& parser);
};

}  // namespace weft
