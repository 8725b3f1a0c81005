#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/base/mutex.h"

namespace weft {

class GenerateCall;

// UNAVAILABLE (DRAINING).
absl::Status RouterDrains();

// The requests in flight at this router, by request id, and their streams. Thread-safe.
class RequestRegistry {
 public:
  explicit RequestRegistry(std::int64_t max_requests) : max_requests_(max_requests) {}

  // ALREADY_EXISTS        the id is in use;
  // RESOURCE_EXHAUSTED    max_requests are in flight (OVERLOADED);
  // RouterDrains()        after StartDrain().
  absl::Status Add(const std::string& request_id, std::weak_ptr<GenerateCall> call);
  void Remove(const std::string& request_id);

  // Null when there is none.
  std::shared_ptr<GenerateCall> Find(const std::string& request_id) const;
  std::vector<std::shared_ptr<GenerateCall>> All() const;

  // A stream counts from before its request is added until its status has gone out; so does another
  // call that may take long.
  void OpenStream();
  void CloseStream();
  // From now on every Add() fails.
  void StartDrain();
  // RouterDrains() after StartDrain().
  absl::Status CheckDrain() const;
  // False when streams are still open at `deadline`.
  bool WaitForNoStreams(std::chrono::steady_clock::time_point deadline);

 private:
  const std::int64_t max_requests_;
  mutable Mutex mutex_;
  CondVar idle_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  std::int64_t num_streams_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, std::weak_ptr<GenerateCall>> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft
