#include "router/request_registry.h"

#include <utility>

#include "fmt/format.h"
#include "server/error_reason.h"

namespace weft {

absl::Status RouterDrains() {
  return WithReason(absl::UnavailableError("this router stops; ask another one"), kReasonDraining);
}

absl::Status RequestRegistry::CheckDrain() const {
  MutexLock lock(mutex_);
  return draining_ ? RouterDrains() : absl::OkStatus();
}

absl::Status RequestRegistry::Add(const std::string& request_id, std::weak_ptr<GenerateCall> call) {
  MutexLock lock(mutex_);
  if (draining_) return RouterDrains();
  if (static_cast<std::int64_t>(calls_.size()) >= max_requests_) {
    return WithReason(absl::ResourceExhaustedError(fmt::format(
                          "{} requests are in flight already (--max-requests)", calls_.size())),
                      kReasonOverloaded);
  }
  if (!calls_.try_emplace(request_id, std::move(call)).second) {
    return absl::AlreadyExistsError(
        fmt::format("request_id \"{}\" is in use by a request in flight", request_id));
  }
  return absl::OkStatus();
}

void RequestRegistry::Remove(const std::string& request_id) {
  MutexLock lock(mutex_);
  calls_.erase(request_id);
}

std::shared_ptr<GenerateCall> RequestRegistry::Find(const std::string& request_id) const {
  MutexLock lock(mutex_);
  const auto found = calls_.find(request_id);
  return found == calls_.end() ? nullptr : found->second.lock();
}

std::vector<std::shared_ptr<GenerateCall>> RequestRegistry::All() const {
  std::vector<std::shared_ptr<GenerateCall>> all;
  MutexLock lock(mutex_);
  for (const auto& [id, weak] : calls_) {
    if (auto call = weak.lock()) all.push_back(std::move(call));
  }
  return all;
}

void RequestRegistry::OpenStream() {
  MutexLock lock(mutex_);
  ++num_streams_;
}

void RequestRegistry::CloseStream() {
  MutexLock lock(mutex_);
  if (--num_streams_ == 0) idle_.NotifyAll();
}

void RequestRegistry::StartDrain() {
  MutexLock lock(mutex_);
  draining_ = true;
}

bool RequestRegistry::WaitForNoStreams(std::chrono::steady_clock::time_point deadline) {
  MutexLock lock(mutex_);
  while (num_streams_ > 0) {
    if (!idle_.WaitUntil(mutex_, deadline)) return num_streams_ == 0;
  }
  return true;
}

}  // namespace weft
