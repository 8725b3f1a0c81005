#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/mutex.h"
#include "weft/v1/inference.pb.h"

namespace weft {

// Whether `value` is a traceparent of W3C Trace Context, version 00. Others are to be ignored.
bool IsTraceparent(std::string_view value);

// What the access log tells of one Generate call: who asked, where it went, how long it took, how
// it ended. Nothing of prompts and outputs but their lengths. Thread-safe.
class AccessRecord {
 public:
  AccessRecord(std::string tenant, std::string traceparent, absl::Time now)
      : tenant_(std::move(tenant)), traceparent_(std::move(traceparent)), start_(now) {}

  void SetRequestId(const std::string& request_id);
  void OnPlaced(const std::string& group);
  // A message to the client.
  void OnMessage(const v1::GenerateResponse& message, absl::Time now);

  // One JSON object in one line, once the call has ended.
  std::string Line(const absl::Status& status, v1::FinishReason finish_reason,
                   absl::Time now) const;

 private:
  const std::string tenant_;       // may be empty
  const std::string traceparent_;  // likewise
  const absl::Time start_;
  mutable Mutex mutex_;
  std::string request_id_ ABSL_GUARDED_BY(mutex_);
  std::string group_ ABSL_GUARDED_BY(mutex_);  // the last
  std::int64_t placements_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t prompt_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t cached_tokens_ ABSL_GUARDED_BY(mutex_) = 0;
  std::int64_t completion_tokens_ ABSL_GUARDED_BY(mutex_) = 0;  // of all samples
  std::optional<absl::Time> first_token_ ABSL_GUARDED_BY(mutex_);
};

// Where lines go; null: nowhere.
using AccessLog = std::function<void(const std::string& line)>;
// Standard error, as they are.
AccessLog NewAccessLog();

}  // namespace weft
