#include "router/tenants.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "server/base/log.h"
#include "server/base/parse_json.h"
#include "server/base/status_macros.h"
#include "server/error_reason.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::uintmax_t kMaxFileBytes = std::uintmax_t{16} << 20;
constexpr std::size_t kMaxNameBytes = 64;
constexpr std::int64_t kMaxLimit = std::int64_t{1} << 50;

// Names are labels of metrics and parts of ids: nothing that separates anything.
bool IsName(std::string_view name) {
  return !name.empty() && name.size() <= kMaxNameBytes &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                  c == '-' || c == '_' || c == '.';
         });
}

absl::Status ReadLimit(const Json& tenant, const char* field, std::int64_t& limit) {
  const auto found = tenant.find(field);
  if (found == tenant.end()) return absl::OkStatus();
  if (found->is_number_integer() && *found >= 1 && *found <= kMaxLimit) {
    limit = found->get<std::int64_t>();
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      fmt::format("{} is {}; a number from 1 to {} is allowed, or none", field,
                  found->is_number() ? found->dump() : found->type_name(), kMaxLimit));
}

absl::StatusOr<TenantLimits> ReadLimits(const Json& tenant) {
  TenantLimits limits;
  RETURN_IF_ERROR(ReadLimit(tenant, "max_concurrent_requests", limits.max_concurrent_requests));
  RETURN_IF_ERROR(ReadLimit(tenant, "tokens_per_minute", limits.tokens_per_minute));
  limits.burst_tokens = limits.tokens_per_minute;
  RETURN_IF_ERROR(ReadLimit(tenant, "burst_tokens", limits.burst_tokens));
  if (limits.tokens_per_minute == 0 && limits.burst_tokens != 0) {
    return absl::InvalidArgumentError("burst_tokens needs tokens_per_minute");
  }
  if (const auto found = tenant.find("min_priority"); found != tenant.end()) {
    if (!found->is_number_integer() || *found < INT32_MIN || *found > 0) {
      return absl::InvalidArgumentError(
          fmt::format("min_priority is {}; a number from {} to 0 is allowed, or none",
                      found->is_number() ? found->dump() : found->type_name(), INT32_MIN));
    }
    limits.min_priority = found->get<std::int32_t>();
  }
  return limits;
}

absl::StatusOr<std::vector<SecretDigest>> ReadKeys(const Json& tenant) {
  const auto found = tenant.find("api_keys");
  if (found == tenant.end() || !found->is_array() || found->empty()) {
    return absl::InvalidArgumentError("api_keys is not a list of one or more keys");
  }
  std::vector<SecretDigest> keys;
  for (const Json& key : *found) {
    if (!key.is_string() || !IsSecret(key.get_ref<const std::string&>())) {
      return absl::InvalidArgumentError(fmt::format(
          "api_keys[{}] is not a text of 1 to 4096 visible ASCII characters", keys.size()));
    }
    keys.emplace_back(key.get_ref<const std::string&>());
  }
  return keys;
}

absl::Status CheckFields(const Json& object, std::initializer_list<std::string_view> allowed) {
  for (const auto& [field, value] : object.items()) {
    if (std::find(allowed.begin(), allowed.end(), field) != allowed.end()) continue;
    // Not said which: it may be a key that went astray.
    return absl::InvalidArgumentError(
        fmt::format("it has another field than {}", fmt::join(allowed, ", ")));
  }
  return absl::OkStatus();
}

}  // namespace

// --- One tenant.

Tenant::Tenant(std::string name, const TenantLimits& limits, absl::Time now)
    : name_(std::move(name)),
      limits_(limits),
      tokens_(static_cast<double>(limits.burst_tokens)),
      filled_(now) {}

void Tenant::SetLimits(const TenantLimits& limits) {
  MutexLock lock(mutex_);
  // Who had no limit before has a whole burst.
  if (limits_.tokens_per_minute == 0) tokens_ = static_cast<double>(limits.burst_tokens);
  limits_ = limits;
  tokens_ = std::min(tokens_, static_cast<double>(limits.burst_tokens));
}

Tenant::Place::~Place() {
  MutexLock lock(tenant_->mutex_);
  --tenant_->num_requests_;
}

absl::StatusOr<std::unique_ptr<Tenant::Place>> Tenant::StartRequest(absl::Time now,
                                                                    std::int32_t priority) {
  MutexLock lock(mutex_);
  if (priority < limits_.min_priority) {
    return absl::InvalidArgumentError(fmt::format(
        "priority is {}; this tenant may ask for {} and up", priority, limits_.min_priority));
  }
  if (limits_.max_concurrent_requests > 0 && num_requests_ >= limits_.max_concurrent_requests) {
    return WithReason(
        absl::ResourceExhaustedError(fmt::format(
            "{} requests of this tenant are in flight, as many as may be", num_requests_)),
        kReasonConcurrencyLimit);
  }
  Refill(now);
  RETURN_IF_ERROR(CheckRate());
  ++num_requests_;
  return std::make_unique<Place>(shared_from_this());
}

absl::Status Tenant::TakePrompt(std::int64_t tokens, absl::Time now) {
  MutexLock lock(mutex_);
  Refill(now);
  RETURN_IF_ERROR(CheckRate());
  tokens_ -= static_cast<double>(tokens);
  return absl::OkStatus();
}

void Tenant::AddCompletion(std::int64_t tokens, absl::Time now) {
  MutexLock lock(mutex_);
  Refill(now);
  tokens_ -= static_cast<double>(tokens);
}

absl::Status Tenant::CheckRate() const {
  if (limits_.tokens_per_minute == 0 || tokens_ >= 1) return absl::OkStatus();
  const double per_second = static_cast<double>(limits_.tokens_per_minute) / 60;
  const absl::Duration wait =
      absl::Ceil(absl::Seconds((1 - tokens_) / per_second), absl::Milliseconds(1));
  return WithRetryAfter(
      WithReason(absl::ResourceExhaustedError(
                     fmt::format("this tenant has had its {} tokens a minute; more are there in {}",
                                 limits_.tokens_per_minute, absl::FormatDuration(wait))),
                 kReasonRateLimit),
      wait);
}

void Tenant::Refill(absl::Time now) {
  if (now > filled_) {
    const double minutes = absl::FDivDuration(now - filled_, absl::Minutes(1));
    tokens_ = std::min(tokens_ + minutes * static_cast<double>(limits_.tokens_per_minute),
                       static_cast<double>(limits_.burst_tokens));
  }
  filled_ = now;
}

// --- All of them.

absl::StatusOr<std::unique_ptr<Tenants>> Tenants::Load(const std::string& path) {
  std::unique_ptr<Tenants> tenants(new Tenants(path));
  tenants->stamp_ = StampFile(path);
  ASSIGN_OR_RETURN(const std::vector<Entry> entries, Parse(path));
  tenants->Set(entries);
  return tenants;
}

void Tenants::Reload() {
  const FileStamp stamp = StampFile(path_);
  if (stamp == stamp_) return;
  stamp_ = stamp;
  const absl::StatusOr<std::vector<Entry>> entries = Parse(path_);
  if (!entries.ok()) {
    spdlog::warn("the tenants stay as they are: {}", std::string(entries.status().message()));
    return;
  }
  Set(*entries);
  spdlog::info("{} has changed: {} tenants", path_, entries->size());
}

void Tenants::Set(const std::vector<Entry>& entries) {
  MutexLock lock(mutex_);
  std::map<std::string, std::shared_ptr<Tenant>> tenants;
  keys_.clear();
  for (const Entry& entry : entries) {
    std::shared_ptr<Tenant>& tenant = tenants[entry.name];
    if (const auto before = tenants_.find(entry.name); before != tenants_.end()) {
      tenant = before->second;
      tenant->SetLimits(entry.limits);
    } else {
      tenant = std::make_shared<Tenant>(entry.name, entry.limits, absl::Now());
    }
    for (const SecretDigest& key : entry.keys) keys_.push_back({key, tenant});
  }
  tenants_ = std::move(tenants);
}

absl::StatusOr<std::shared_ptr<Tenant>> Tenants::Authenticate(
    std::optional<std::string_view> token) const {
  if (!token) {
    return absl::UnauthenticatedError(
        "no API key; send metadata \"authorization\" with \"Bearer \" and the key");
  }
  const SecretDigest digest(*token);
  std::shared_ptr<Tenant> found;
  MutexLock lock(mutex_);
  // All of them, so that the time tells nothing about where it is.
  for (const Key& key : keys_) {
    if (key.digest.Equals(digest)) found = key.tenant;
  }
  if (found == nullptr) return absl::UnauthenticatedError("the API key is nobody's here");
  return found;
}

absl::StatusOr<std::vector<Tenants::Entry>> Tenants::Parse(const std::string& path) {
  const auto wrong = [&path](std::string_view why) {
    return absl::InvalidArgumentError(fmt::format("--api-keys-file: {}: {}", path, why));
  };
  const absl::StatusOr<std::string> text = ReadFile(path, kMaxFileBytes);
  if (!text.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("--api-keys-file: {}", std::string(text.status().message())));
  }
  // What is wrong with it may quote a key.
  const Json file = ParseJson(*text).value_or(Json());
  if (!file.is_object() || !file.contains("tenants") || !file["tenants"].is_array()) {
    return wrong("it is no JSON object with a list \"tenants\"");
  }
  if (absl::Status status = CheckFields(file, {"tenants"}); !status.ok()) {
    return wrong(std::string(status.message()));
  }
  std::vector<Entry> entries;
  for (const Json& tenant : file["tenants"]) {
    const std::string where = fmt::format("tenants[{}]", entries.size());
    if (!tenant.is_object() || !tenant.contains("name") || !tenant["name"].is_string() ||
        !IsName(tenant["name"].get_ref<const std::string&>())) {
      return wrong(fmt::format("{} has no name of 1 to {} letters, digits, '-', '_' and '.'", where,
                               kMaxNameBytes));
    }
    Entry entry = {.name = tenant["name"]};
    absl::Status status =
        CheckFields(tenant, {"name", "api_keys", "max_concurrent_requests", "tokens_per_minute",
                             "burst_tokens", "min_priority"});
    const absl::StatusOr<TenantLimits> limits = ReadLimits(tenant);
    absl::StatusOr<std::vector<SecretDigest>> keys = ReadKeys(tenant);
    status.Update(limits.status());
    status.Update(keys.status());
    for (const Entry& other : entries) {
      if (other.name == entry.name) status.Update(absl::AlreadyExistsError("the name is taken"));
      for (const SecretDigest& key : keys.ok() ? *keys : std::vector<SecretDigest>()) {
        for (const SecretDigest& taken : other.keys) {
          if (!key.Equals(taken)) continue;
          status.Update(absl::AlreadyExistsError(
              fmt::format("one of its keys is one of \"{}\", too", other.name)));
        }
      }
    }
    if (!status.ok()) {
      return wrong(
          fmt::format("{} (\"{}\"): {}", where, entry.name, std::string(status.message())));
    }
    entry.keys = *std::move(keys);
    entry.limits = *limits;
    entries.push_back(std::move(entry));
  }
  return entries;
}

}  // namespace weft
