#include "client/batch.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/time/clock.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"
#include "server/base/mutex.h"
#include "server/grpc_status.h"

namespace weft {
namespace {

// The requests of one RunBatch(). Every call that ends starts the next one.
class Batch {
 public:
  Batch(v1::Inference::Stub& stub, const std::vector<v1::GenerateRequest>& requests,
        const BatchOptions& options)
      : stub_(stub), requests_(requests), options_(options), slots_(requests.size()) {}

  BatchStats Run();

 private:
  struct Slot {
    bool ended = false;
    absl::Duration time_to_first_token = absl::InfiniteDuration();
    Completion completion;
  };
  class Call;

  void StartNext();
  void OnCallEnd(std::size_t index, Slot slot);

  v1::Inference::Stub& stub_;
  const std::vector<v1::GenerateRequest>& requests_;
  const BatchOptions& options_;

  Mutex mutex_;
  CondVar ended_;
  std::size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mutex_);
};

// One stream. Deletes itself when gRPC is done with it.
class Batch::Call final : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  Call(Batch& batch, std::size_t index) : batch_(batch), index_(index), start_(absl::Now()) {}

  void Start() {
    batch_.stub_.async()->Generate(&context_, &batch_.requests_[index_], this);
    StartRead(&response_);
    StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (response_.token_ids_size() > 0 && slot_.completion.token_ids.empty()) {
      slot_.time_to_first_token = absl::Now() - start_;
    }
    slot_.completion.Append(response_);
    if (batch_.options_.on_message) batch_.options_.on_message(index_, response_);
    response_.Clear();
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    slot_.ended = true;
    // Who was told how it finished has everything: a server that shuts down closes the connection
    // behind its last status, and a write of ours into that loses the status.
    if (slot_.completion.finish_reason == v1::FINISH_REASON_UNSPECIFIED) {
      slot_.completion.status = FromGrpcStatus(status);
    }
    slot_.completion.error_reason = ReasonOf(slot_.completion.status);
    // Our context goes before the end is told: who waits for it may drop the channel next, and the
    // last reference to a channel must not go on one of gRPC's own threads.
    Batch& batch = batch_;
    const std::size_t index = index_;
    Slot slot = std::move(slot_);
    delete this;
    batch.OnCallEnd(index, std::move(slot));
  }

 private:
  Batch& batch_;
  const std::size_t index_;
  const absl::Time start_;
  Slot slot_;
  grpc::ClientContext context_;
  v1::GenerateResponse response_;
};

void Batch::StartNext() {
  std::size_t index = 0;
  {
    MutexLock lock(mutex_);
    if (next_ == requests_.size()) return;
    index = next_++;
  }
  (new Call(*this, index))->Start();
}

void Batch::OnCallEnd(std::size_t index, Slot slot) {
  StartNext();  // first: the batch may be gone once its last slot has ended
  MutexLock lock(mutex_);
  slots_[index] = std::move(slot);
  ended_.NotifyAll();
}

BatchStats Batch::Run() {
  const absl::Time start = absl::Now();
  const std::size_t at_once =
      std::min(requests_.size(), static_cast<std::size_t>(std::max(1, options_.concurrency)));
  for (std::size_t i = 0; i < at_once; ++i) StartNext();

  BatchStats stats;
  absl::Duration first_tokens;
  std::int64_t num_first_tokens = 0;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    Slot slot;
    {
      MutexLock lock(mutex_);
      while (!slots_[i].ended) ended_.Wait(mutex_);
      slot = std::move(slots_[i]);
    }
    if (options_.on_completion) options_.on_completion(i, slot.completion);
    stats.failed += slot.completion.status.ok() ? 0 : 1;
    stats.prompt_tokens += slot.completion.usage.prompt_tokens();
    stats.completion_tokens += slot.completion.usage.completion_tokens();
    if (slot.time_to_first_token != absl::InfiniteDuration()) {
      first_tokens += slot.time_to_first_token;
      ++num_first_tokens;
    }
  }
  stats.wall_time = absl::Now() - start;
  if (num_first_tokens > 0) stats.time_to_first_token = first_tokens / num_first_tokens;
  return stats;
}

}  // namespace

BatchStats RunBatch(v1::Inference::Stub& stub, const std::vector<v1::GenerateRequest>& requests,
                    const BatchOptions& options) {
  return Batch(stub, requests, options).Run();
}

}  // namespace weft
