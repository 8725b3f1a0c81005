#include "server/kv_transfer_flags.h"

#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "server/base/parse_json.h"
#include "server/base/quoted.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

constexpr std::string_view kFlag = "--kv-transfer-config";
constexpr std::string_view kKeys = "kv_connector, kv_role, mode, kv_buffer_size, shared_memory";
constexpr std::size_t kMostShown = 100;
constexpr std::int64_t kMinBuffer = std::int64_t{1} << 10;
constexpr std::int64_t kMaxBuffer = std::int64_t{1} << 30;

absl::Status Wrong(std::string_view key, const nlohmann::ordered_json& seen,
                   std::string_view allowed) {
  return absl::InvalidArgumentError(fmt::format("{}: {} is {}; allowed is {}", kFlag, key,
                                                seen.dump().substr(0, kMostShown), allowed));
}

absl::Status ReadKey(const std::string& key, const nlohmann::ordered_json& value,
                     KvTransferConfig& config) {
  if (key == "kv_connector") {
    if (value == "UcxConnector") return absl::OkStatus();
    return Wrong(key, value, "\"UcxConnector\"");
  }
  if (key == "kv_role") {
    for (const KvRole role : {KvRole::kProducer, KvRole::kConsumer, KvRole::kBoth}) {
      if (value == std::string(KvRoleName(role))) {
        config.role = role;
        return absl::OkStatus();
      }
    }
    return Wrong(key, value, "\"kv_producer\", \"kv_consumer\" or \"kv_both\"");
  }
  if (key == "mode") {
    config.layerwise = value == "layerwise";
    if (config.layerwise || value == "blockwise") return absl::OkStatus();
    return Wrong(key, value, "\"layerwise\" or \"blockwise\"");
  }
  if (key == "kv_buffer_size") {
    if (value.is_number_integer() && value >= kMinBuffer && value <= kMaxBuffer) {
      config.buffer_bytes = value.get<std::int64_t>();
      return absl::OkStatus();
    }
    return Wrong(key, value,
                 fmt::format("a number of bytes from {} to {}", kMinBuffer, kMaxBuffer));
  }
  if (key == "shared_memory") {
    if (!value.is_boolean()) return Wrong(key, value, "true or false");
    config.shared_memory = value.get<bool>();
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      fmt::format("{}: unknown key \"{}\"; known are {}", kFlag, key, kKeys));
}

}  // namespace

std::string_view KvRoleName(KvRole role) {
  switch (role) {
    case KvRole::kProducer:
      return "kv_producer";
    case KvRole::kConsumer:
      return "kv_consumer";
    case KvRole::kBoth:
      return "kv_both";
    case KvRole::kNone:
      break;
  }
  return "";
}

absl::StatusOr<KvTransferConfig> ParseKvTransferConfig(std::string_view text) {
  KvTransferConfig config;
  if (text.empty()) return config;
  const absl::StatusOr<nlohmann::ordered_json> parsed = ParseJson(text);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("{} is {}: {}", kFlag, Quoted(text), std::string(parsed.status().message())));
  }
  const nlohmann::ordered_json& json = *parsed;
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        fmt::format("{} is {}; a JSON object is wanted, with kv_role", kFlag, Quoted(text)));
  }
  for (const auto& [key, value] : json.items()) RETURN_IF_ERROR(ReadKey(key, value, config));
  if (config.role == KvRole::kNone) {
    return absl::InvalidArgumentError(
        fmt::format("{}: kv_role is missing: kv_producer, kv_consumer or kv_both", kFlag));
  }
  return config;
}

void KvTransferFlags::AddTo(OptionParser& parser) {
  parser.Group("Hand-off of prompts between groups");
  parser.Add("--kv-transfer-config", &kv_transfer_config,
             "JSON: {\"kv_role\": kv_producer (computes prompts), kv_consumer (continues them) or "
             "kv_both; \"mode\": layerwise or blockwise; \"kv_buffer_size\": bytes; "
             "\"shared_memory\": false for UCX alone}");
  parser.Add("--kv-transfer-checksum", &kv_transfer_checksum,
             "Check every message of KV; for tests and doubters");
  parser.AddBytes("--kv-transfer-bandwidth-limit", &kv_transfer_bandwidth_limit,
                  "What a rank sends in a second at most; 0: no limit");
  parser.AddBytes("--kv-transfer-window-bytes", &kv_transfer_window_bytes,
                  "What may be on its way from one rank to another before it is taken");
  parser.Add("--kv-transfer-lease", &kv_transfer_lease,
             "Without progress for so long a transfer ends, and the prompt is computed again");
}

}  // namespace weft
