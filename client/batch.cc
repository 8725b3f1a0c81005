#include "client/batch.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "grpcpp/client_context.h"
#include "grpcpp/support/client_callback.h"
#include "server/base/mutex.h"
#include "server/grpc_status.h"

namespace weft {
namespace {

// The requests of one RunBatch().
class Batch {
 public:
  Batch(v1::Inference::Stub& stub, const std::vector<v1::GenerateRequest>& requests,
        const BatchOptions& options)
      : stub_(stub),
        requests_(requests),
        options_(options),
        slots_(requests.size()),
        contexts_(requests.size()) {}

  BatchStats Run();

 private:
  struct Slot {
    bool ended = false;
    Completion completion;
    RequestTiming timing;
  };
  class Call;

  // When the next request may be sent; InfiniteFuture while others have to end first.
  absl::Time NextSend(absl::Time start) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OnCallEnd(std::size_t index, Slot slot);
  bool GoesOn() const { return !options_.go_on || options_.go_on(); }
  void Stop();
  void Report(std::size_t index, const Slot& slot, BatchStats& stats);

  v1::Inference::Stub& stub_;
  const std::vector<v1::GenerateRequest>& requests_;
  const BatchOptions& options_;

  Mutex mutex_;
  CondVar changed_;
  std::size_t num_sent_ ABSL_GUARDED_BY(mutex_) = 0;
  std::size_t num_ended_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Slot> slots_ ABSL_GUARDED_BY(mutex_);
  std::vector<grpc::ClientContext*> contexts_ ABSL_GUARDED_BY(mutex_);  // of calls under way
};

// One stream. Deletes itself when gRPC is done with it.
class Batch::Call final : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  Call(Batch& batch, std::size_t index) : batch_(batch), index_(index) {}

  void Start() {
    slot_.timing.start = absl::Now();
    {
      MutexLock lock(batch_.mutex_);
      batch_.contexts_[index_] = &context_;
    }
    batch_.stub_.async()->Generate(&context_, &batch_.requests_[index_], this);
    StartRead(&response_);
    StartCall();
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (response_.token_ids_size() > 0) slot_.timing.tokens.push_back(absl::Now());
    slot_.completion.Append(response_);
    if (batch_.options_.on_message) batch_.options_.on_message(index_, response_);
    if (!batch_.GoesOn()) context_.TryCancel();
    response_.Clear();
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    slot_.ended = true;
    slot_.timing.end = absl::Now();
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
    {
      MutexLock lock(batch.mutex_);
      batch.contexts_[index] = nullptr;
    }
    Slot slot = std::move(slot_);
    delete this;
    batch.OnCallEnd(index, std::move(slot));
  }

 private:
  Batch& batch_;
  const std::size_t index_;
  Slot slot_;
  grpc::ClientContext context_;
  v1::GenerateResponse response_;
};

absl::Time Batch::NextSend(absl::Time start) const {
  if (num_sent_ == requests_.size() || num_sent_ - num_ended_ >= options_.concurrency) {
    return absl::InfiniteFuture();
  }
  return options_.send_at.empty() ? start : start + options_.send_at[num_sent_];
}

void Batch::OnCallEnd(std::size_t index, Slot slot) {
  MutexLock lock(mutex_);
  slots_[index] = std::move(slot);
  ++num_ended_;
  changed_.NotifyAll();
}

void Batch::Stop() {
  MutexLock lock(mutex_);
  for (; num_sent_ < slots_.size(); ++num_sent_, ++num_ended_) {
    slots_[num_sent_].ended = true;
    slots_[num_sent_].completion.status = absl::CancelledError("not sent");
  }
  for (grpc::ClientContext* context : contexts_) {
    if (context != nullptr) context->TryCancel();
  }
}

void Batch::Report(std::size_t index, const Slot& slot, BatchStats& stats) {
  if (options_.on_completion) options_.on_completion(index, slot.completion, slot.timing);
  stats.failed += slot.completion.status.ok() ? 0 : 1;
  stats.prompt_tokens += slot.completion.usage.prompt_tokens();
  stats.completion_tokens += slot.completion.usage.completion_tokens();
}

// Sends what may be sent, else reports what has ended, else waits for one or the other.
BatchStats Batch::Run() {
  const absl::Time start = absl::Now();
  BatchStats stats;
  absl::Duration first_tokens;
  std::int64_t num_first_tokens = 0;
  for (std::size_t reported = 0; reported < requests_.size();) {
    std::optional<std::size_t> to_send;
    Slot ended;
    {
      MutexLock lock(mutex_);
      const absl::Time next_send = NextSend(start);
      if (next_send <= absl::Now()) {
        to_send = num_sent_++;
      } else if (slots_[reported].ended) {
        ended = std::move(slots_[reported]);
      } else {
        const absl::Duration wait = std::min(next_send - absl::Now(), absl::Hours(1));
        changed_.WaitUntil(mutex_,
                           std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(wait));
        continue;
      }
    }
    if (to_send) {
      (new Call(*this, *to_send))->Start();
      continue;
    }
    Report(reported++, ended, stats);
    if (!GoesOn()) Stop();
    if (!ended.timing.tokens.empty()) {
      first_tokens += ended.timing.tokens.front() - ended.timing.start;
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
