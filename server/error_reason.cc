#include "server/error_reason.h"

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace weft {
namespace {

constexpr char kReasonPayload[] = "weft/reason";
constexpr char kRetryPayload[] = "weft/retry_after";  // absl::FormatDuration()

// When to try again: a queue moves within a step or so, a group restarts in seconds; another router
// is there at once.
struct Passing {
  std::string_view reason;
  int retry_after_ms;
};
constexpr Passing kPassing[] = {{kReasonOverloaded, 500},       {kReasonDraining, 100},
                                {kReasonRankLost, 1000},        {kReasonNotReady, 1000},
                                {kReasonConcurrencyLimit, 500}, {kReasonRateLimit, 1000}};

std::optional<std::string> Payload(const absl::Status& status, const char* url) {
  const absl::optional<absl::Cord> payload = status.GetPayload(url);
  if (!payload.has_value()) return std::nullopt;
  return std::string(*payload);
}

}  // namespace

absl::Status WithReason(absl::Status status, std::string_view reason) {
  status.SetPayload(kReasonPayload, absl::Cord(absl::string_view(reason.data(), reason.size())));
  return status;
}

std::string ReasonOf(const absl::Status& status) {
  return Payload(status, kReasonPayload).value_or("");
}

absl::Status WithRetryAfter(absl::Status status, absl::Duration delay) {
  status.SetPayload(kRetryPayload, absl::Cord(absl::FormatDuration(delay)));
  return status;
}

std::optional<absl::Duration> RetryAfterOf(const absl::Status& status) {
  const std::optional<std::string> text = Payload(status, kRetryPayload);
  if (absl::Duration delay; text.has_value() && absl::ParseDuration(*text, &delay)) return delay;
  const std::string reason = ReasonOf(status);
  for (const Passing& passing : kPassing) {
    if (passing.reason == reason) return absl::Milliseconds(passing.retry_after_ms);
  }
  return std::nullopt;
}

}  // namespace weft
