#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

// What works with what: the one table of which features each kind of attention has on each device.
// A combination that is refused is refused at start, never at run time.

namespace weft {

// kCudaEmu: the CUDA backend on the CPU, for tests.
enum class Device : std::uint8_t { kCpu, kCuda, kCudaEmu };
enum class AttentionKind : std::uint8_t { kGqa, kSlidingWindow, kMla, kSparseMla };
enum class Feature : std::uint8_t {
  kDecodeContextParallel,
  kA2aExchange,
  kReplicatedQueries,
  kExpertParallel,
  kChunkedPrefill,
  kPrefixCaching,
  kPreemption,
  kAsyncScheduling,
  kKvTransfer,
  kPrefillContextParallel,
  kSpeculativeDecoding,
};

inline constexpr std::array kDevices = {Device::kCpu, Device::kCuda, Device::kCudaEmu};
inline constexpr std::array kAttentionKinds = {AttentionKind::kGqa, AttentionKind::kSlidingWindow,
                                               AttentionKind::kMla, AttentionKind::kSparseMla};
inline constexpr std::array kFeatures = {Feature::kDecodeContextParallel,
                                         Feature::kA2aExchange,
                                         Feature::kReplicatedQueries,
                                         Feature::kExpertParallel,
                                         Feature::kChunkedPrefill,
                                         Feature::kPrefixCaching,
                                         Feature::kPreemption,
                                         Feature::kAsyncScheduling,
                                         Feature::kKvTransfer,
                                         Feature::kPrefillContextParallel,
                                         Feature::kSpeculativeDecoding};

// For people: the flag where there is one.
std::string_view DeviceName(Device device);
std::string_view AttentionKindName(AttentionKind kind);
std::string_view FeatureName(Feature feature);

// kExperimental: served, with a warning at start and in GetServerInfo.
enum class Support : std::uint8_t { kSupported, kExperimental, kRefused };

struct Capability {
  Support support = Support::kSupported;
  std::string_view reason;  // of anything but kSupported; what is allowed in its place
};

// A rule holds for the cells that all of its lists name; an empty list names all.
struct CapabilityRule {
  std::vector<Device> devices;
  std::vector<AttentionKind> kinds;
  std::vector<Feature> features;
  Capability capability;
};

// The table: the first rule that holds for a cell decides it, and what no rule holds for is
// supported.
absl::Span<const CapabilityRule> CapabilityRules();

Capability CapabilityOf(Device device, AttentionKind kind, Feature feature,
                        absl::Span<const CapabilityRule> rules = CapabilityRules());

// The warnings of what is experimental among `features`. INVALID_ARGUMENT, naming the feature and
// why, for the first that is refused.
absl::StatusOr<std::vector<std::string>> CheckCapabilities(
    Device device, AttentionKind kind, absl::Span<const Feature> features,
    absl::Span<const CapabilityRule> rules = CapabilityRules());

// The same as far as it shows before the model is read: an error if every kind gets one.
absl::Status CheckCapabilitiesOfAnyModel(Device device, absl::Span<const Feature> features);

}  // namespace weft
