#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/mutex.h"
#include "server/base/read_file.h"
#include "server/secret.h"

namespace weft {

struct TenantLimits {
  std::int64_t max_concurrent_requests = 0;  // 0: any number
  std::int64_t tokens_per_minute = 0;        // of prompts and completions; 0: any number
  std::int64_t burst_tokens = 0;             // that may come at once after a pause
  std::int32_t min_priority = 0;             // lower comes before others' requests
};

// One tenant and what it uses. Thread-safe. `now` never goes back by much: a wall clock will do.
class Tenant : public std::enable_shared_from_this<Tenant> {
 public:
  Tenant(std::string name, const TenantLimits& limits, absl::Time now);

  const std::string& name() const { return name_; }

  // New limits; what is used stays.
  void SetLimits(const TenantLimits& limits);

  // A request's place among those that run; given back when it is destroyed.
  class Place {
   public:
    explicit Place(std::shared_ptr<Tenant> tenant) : tenant_(std::move(tenant)) {}
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

   private:
    const std::shared_ptr<Tenant> tenant_;
  };

  // RESOURCE_EXHAUSTED when the tenant's requests are as many as they may be
  // (CONCURRENCY_LIMIT_EXCEEDED), or have had more tokens than they may (RATE_LIMIT_EXCEEDED);
  // INVALID_ARGUMENT for a priority before those that it may ask for.
  absl::StatusOr<std::unique_ptr<Place>> StartRequest(absl::Time now, std::int32_t priority = 0);

  // Charges a prompt: RESOURCE_EXHAUSTED (RATE_LIMIT_EXCEEDED), saying when to come back, when
  // tokens of earlier ones are still owed; a prompt of any length goes once none are.
  absl::Status TakePrompt(std::int64_t tokens, absl::Time now);
  // Charges tokens that were generated; later requests wait for them.
  void AddCompletion(std::int64_t tokens, absl::Time now);

 private:
  absl::Status CheckRate() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Refill(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string name_;
  mutable Mutex mutex_;
  TenantLimits limits_ ABSL_GUARDED_BY(mutex_);
  std::int64_t num_requests_ ABSL_GUARDED_BY(mutex_) = 0;
  double tokens_ ABSL_GUARDED_BY(mutex_);  // that may be taken; below 1: none, below 0: owed
  absl::Time filled_ ABSL_GUARDED_BY(mutex_);
};

// Who may use this router: the file of --api-keys-file,
//   {"tenants": [{"name": "a", "api_keys": ["..."], "max_concurrent_requests": 8,
//                 "tokens_per_minute": 60000, "burst_tokens": 60000, "min_priority": -10}]}
// where the limits may be missing: burst_tokens is a minute's by default, min_priority 0.
// Thread-safe.
class Tenants {
 public:
  // INVALID_ARGUMENT says what is wrong with the file, without a key.
  static absl::StatusOr<std::unique_ptr<Tenants>> Load(const std::string& path);

  // Whose key `token` is. UNAUTHENTICATED without one, or with one that nobody has.
  absl::StatusOr<std::shared_ptr<Tenant>> Authenticate(std::optional<std::string_view> token) const;

  // Reads the file again if it has changed. One that is wrong is logged, once, and changes nothing.
  // Tenants who are in both keep what they have used.
  void Reload();

 private:
  struct Key {
    SecretDigest digest;
    std::shared_ptr<Tenant> tenant;
  };
  // What a file says.
  struct Entry {
    std::string name;
    std::vector<SecretDigest> keys;
    TenantLimits limits;
  };

  explicit Tenants(std::string path) : path_(std::move(path)) {}
  static absl::StatusOr<std::vector<Entry>> Parse(const std::string& path);
  void Set(const std::vector<Entry>& entries);

  const std::string path_;
  FileStamp stamp_{};  // of the file that was read last; Load() and Reload()
  mutable Mutex mutex_;
  std::vector<Key> keys_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::shared_ptr<Tenant>> tenants_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft
