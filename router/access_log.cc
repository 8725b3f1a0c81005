#include "router/access_log.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "nlohmann/json.hpp"
#include "server/base/log.h"
#include "server/error_reason.h"
#include "server/finish_reason.h"
#include "spdlog/sinks/stdout_sinks.h"

namespace weft {
namespace {

bool IsHex(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool IsZero(std::string_view text) { return text.find_first_not_of('0') == text.npos; }

}  // namespace

bool IsTraceparent(std::string_view value) {
  // version - trace id - parent id - flags
  if (value.size() != 55 || !value.starts_with("00-") || value[35] != '-' || value[52] != '-') {
    return false;
  }
  const std::string_view trace = value.substr(3, 32);
  const std::string_view parent = value.substr(36, 16);
  return IsHex(trace) && IsHex(parent) && IsHex(value.substr(53)) && !IsZero(trace) &&
         !IsZero(parent);
}

void AccessRecord::SetRequestId(const std::string& request_id) {
  MutexLock lock(mutex_);
  request_id_ = request_id;
}

void AccessRecord::OnPlaced(const std::string& group) {
  MutexLock lock(mutex_);
  group_ = group;
  ++placements_;
}

void AccessRecord::OnMessage(const v1::GenerateResponse& message, absl::Time now) {
  MutexLock lock(mutex_);
  prompt_tokens_ = message.usage().prompt_tokens();
  cached_tokens_ = message.usage().cached_tokens();
  completion_tokens_ += message.token_ids_size();
  if (message.token_ids_size() > 0 && !first_token_) first_token_ = now;
}

std::string AccessRecord::Line(const absl::Status& status, v1::FinishReason finish_reason,
                               absl::Time now) const {
  MutexLock lock(mutex_);
  nlohmann::ordered_json line;
  line["time"] = absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", now, absl::UTCTimeZone());
  line["request_id"] = request_id_;
  if (!tenant_.empty()) line["tenant"] = tenant_;
  if (!traceparent_.empty()) line["traceparent"] = traceparent_;
  line["status"] = absl::StatusCodeToString(status.code());
  const std::string reason =
      status.ok() ? std::string(FinishReasonName(finish_reason)) : ReasonOf(status);
  if (!reason.empty()) line["reason"] = reason;
  line["prompt_tokens"] = prompt_tokens_;
  line["cached_tokens"] = cached_tokens_;
  line["completion_tokens"] = completion_tokens_;
  if (!group_.empty()) line["group"] = group_;
  line["placements"] = placements_;
  if (first_token_) line["first_token_seconds"] = absl::ToDoubleSeconds(*first_token_ - start_);
  line["seconds"] = absl::ToDoubleSeconds(now - start_);
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

AccessLog NewAccessLog() {
  auto logger =
      std::make_shared<spdlog::logger>("access", std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern("%v");
  logger->flush_on(spdlog::level::info);
  return [logger](const std::string& line) { logger->info("{}", line); };
}

}  // namespace weft
