#include "server/capabilities.h"

#include <algorithm>

#include "absl/status/status.h"
#include "fmt/format.h"
#include "server/base/check.h"

namespace weft {
namespace {

template <typename T>
bool Names(const std::vector<T>& list, T value) {
  return list.empty() || std::find(list.begin(), list.end(), value) != list.end();
}

const CapabilityRule* FindRule(Device device, AttentionKind kind, Feature feature,
                               absl::Span<const CapabilityRule> rules) {
  for (const CapabilityRule& rule : rules) {
    if (Names(rule.devices, device) && Names(rule.kinds, kind) && Names(rule.features, feature)) {
      return &rule;
    }
  }
  return nullptr;
}

// What a rule is about, for a message.
std::string Subject(const CapabilityRule& rule, AttentionKind kind, Feature feature) {
  if (rule.features.empty()) {
    return std::string(rule.kinds.empty() ? DeviceName(rule.devices[0]) : AttentionKindName(kind));
  }
  return rule.kinds.empty()
             ? std::string(FeatureName(feature))
             : fmt::format("{} with {}", FeatureName(feature), AttentionKindName(kind));
}

}  // namespace

std::string_view DeviceName(Device device) {
  switch (device) {
    case Device::kCpu:
      return "--device=cpu";
    case Device::kCuda:
      return "--device=cuda";
    case Device::kCudaEmu:
      return "--device=cuda-emu";
  }
  CheckFailed(__FILE__, __LINE__, "device", "unreachable");
}

std::string_view AttentionKindName(AttentionKind kind) {
  switch (kind) {
    case AttentionKind::kGqa:
      return "GQA";
    case AttentionKind::kSlidingWindow:
      return "sliding window";
    case AttentionKind::kMla:
      return "MLA";
    case AttentionKind::kSparseMla:
      return "sparse MLA";
  }
  CheckFailed(__FILE__, __LINE__, "kind", "unreachable");
}

std::string_view FeatureName(Feature feature) {
  switch (feature) {
    case Feature::kDecodeContextParallel:
      return "decode context parallelism";
    case Feature::kA2aExchange:
      return "--dcp-comm-backend=a2a";
    case Feature::kReplicatedQueries:
      return "--dcp-replicate-query";
    case Feature::kExpertParallel:
      return "--enable-expert-parallel";
    case Feature::kChunkedPrefill:
      return "chunked prefill";
    case Feature::kPrefixCaching:
      return "--enable-prefix-caching";
    case Feature::kPreemption:
      return "preemption";
    case Feature::kAsyncScheduling:
      return "--async-scheduling";
    case Feature::kKvTransfer:
      return "--kv-transfer-config";
    case Feature::kPrefillContextParallel:
      return "--prefill-context-parallel-size";
    case Feature::kSpeculativeDecoding:
      return "--speculative-config";
  }
  CheckFailed(__FILE__, __LINE__, "feature", "unreachable");
}

absl::Span<const CapabilityRule> CapabilityRules() {
  static const auto& rules = *new std::vector<CapabilityRule>{
      {.kinds = {AttentionKind::kSparseMla},
       .capability = {Support::kRefused,
                      "attention to the keys that an indexer picks is not "
                      "there; models with dense attention are served"}},
      {.features = {Feature::kPrefillContextParallel},
       .capability = {Support::kRefused,
                      "only 1 is supported: prefill shares the ranks of decode"}},
      {.features = {Feature::kSpeculativeDecoding},
       .capability = {Support::kRefused, "tokens are not drafted; leave it out"}},
  };
  return rules;
}

Capability CapabilityOf(Device device, AttentionKind kind, Feature feature,
                        absl::Span<const CapabilityRule> rules) {
  const CapabilityRule* const rule = FindRule(device, kind, feature, rules);
  return rule == nullptr ? Capability{} : rule->capability;
}

absl::StatusOr<std::vector<std::string>> CheckCapabilities(Device device, AttentionKind kind,
                                                           absl::Span<const Feature> features,
                                                           absl::Span<const CapabilityRule> rules) {
  std::vector<std::string> warnings;
  for (const Feature feature : features) {
    const CapabilityRule* const rule = FindRule(device, kind, feature, rules);
    if (rule == nullptr || rule->capability.support == Support::kSupported) continue;
    const std::string subject = Subject(*rule, kind, feature);
    if (rule->capability.support == Support::kRefused) {
      return absl::InvalidArgumentError(fmt::format("{}: {}", subject, rule->capability.reason));
    }
    warnings.push_back(fmt::format("{}: experimental: {}", subject, rule->capability.reason));
  }
  return warnings;
}

absl::Status CheckCapabilitiesOfAnyModel(Device device, absl::Span<const Feature> features) {
  absl::Status first;
  for (const AttentionKind kind : kAttentionKinds) {
    const absl::Status status = CheckCapabilities(device, kind, features).status();
    if (status.ok()) return status;
    first.Update(status);
  }
  return first;
}

}  // namespace weft
