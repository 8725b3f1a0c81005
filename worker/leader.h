#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/mutex.h"
#include "server/bounded_queue.h"
#include "worker/block_log.h"
#include "worker/engine/engine.h"
#include "worker/leader_metrics.h"
#include "worker/rank.h"

namespace weft {

// Takes the news of one request. Called on the engine thread, which must not wait: hand over and
// return. After a `finish` other than kNone it is not called again.
class TokenSink {
 public:
  virtual ~TokenSink() = default;
  virtual void OnEvent(const TokenEvent& event) = 0;
  // The request was refused; OnEvent() is not called.
  virtual void OnRefused(const absl::Status& status) = 0;
};

// The leader of a group: feeds requests to the engine, plans to the executor, tokens to the
// sinks. The engine has a thread of its own; the executor is whoever calls RunExecutor(), and runs
// step k while the engine plans step k + 1.
//
// Thread-safe but for RunExecutor(), which is for one thread.
class Leader {
 public:
  // `engine` is used by the engine thread only from here on. `metrics` may be null.
  Leader(std::unique_ptr<Engine> engine, std::int32_t max_num_waiting,
         LeaderMetrics* metrics = nullptr);
  ~Leader();
  Leader(const Leader&) = delete;
  Leader& operator=(const Leader&) = delete;

  // Checks a request (CheckRequest()) and hands it over; `request.id` is overwritten and returned.
  // RESOURCE_EXHAUSTED when the queue to the engine is full. That max_num_waiting are queued comes
  // by OnRefused().
  absl::StatusOr<RequestId> Submit(EngineRequest request, std::shared_ptr<TokenSink> sink);
  // Ends a request at the next step with kAborted; ids that have ended are ignored. Never waits:
  // sinks may call it.
  void Cancel(RequestId id);

  // As Engine's; they never wait.
  void ContinueKv(RequestId id, std::optional<std::int32_t> first_token, std::string failure);
  void OnKvReport(KvReport report);

  // Runs plans on `rank` until Stop() (OK) or an error of the group. Then no request makes
  // progress any more.
  absl::Status RunExecutor(Rank& rank);
  // Ends RunExecutor() and the engine thread. Idempotent.
  void Stop();

  // As of the end of the last engine step.
  EngineStats Stats() const;
  // Likewise: positions with KV of each running request.
  std::vector<std::int64_t> KvLengths() const;
  // What is in the prefix cache; nothing without prefix caching.
  const BlockLog& block_log() const { return block_log_; }
  // Requests handed over and not ended.
  std::int64_t num_requests() const { return num_requests_.load(std::memory_order_relaxed); }

 private:
  struct Message {
    RequestId id{};
    EngineRequest request;
    std::shared_ptr<TokenSink> sink;
    absl::Time arrival;
  };
  struct Active {
    std::shared_ptr<TokenSink> sink;
    RequestTimes times;
  };

  void EngineLoop();
  // Adds what has come, then cancels. `inbox` is scratch.
  void HandleInbox(std::vector<Message>& inbox);
  void DeliverEvents();
  // Takes a result if one is there, and plans a step if the engine has something to run and the
  // executor has room; whether there was either.
  bool PlanStep();
  std::optional<StepResult> TakeResult();

  std::unique_ptr<Engine> engine_;
  LeaderMetrics* const metrics_;
  BlockLog block_log_;
  BoundedQueue<Message> inbox_;
  std::atomic<std::uint64_t> next_id_{1};
  std::atomic<std::int64_t> num_requests_{0};
  absl::flat_hash_map<RequestId, Active> active_;  // engine thread
  std::vector<std::int64_t> next_kv_lengths_;      // likewise

  // Between the engine thread and the executor. Plans are copied into two slots in turn: at most
  // two steps are ever in flight.
  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<RequestId> cancelled_ ABSL_GUARDED_BY(mutex_);
  struct KvContinuation {
    RequestId id{};
    std::optional<std::int32_t> first_token;
    std::string failure;
  };
  std::vector<KvContinuation> kv_continuations_ ABSL_GUARDED_BY(mutex_);
  std::vector<KvReport> kv_reports_ ABSL_GUARDED_BY(mutex_);
  StepPlan
      plans_[2];  // slot step % 2: the engine writes before it counts, the executor reads after
  std::uint64_t planned_ ABSL_GUARDED_BY(mutex_) = 0;   // plans handed over
  std::uint64_t executed_ ABSL_GUARDED_BY(mutex_) = 0;  // plans run
  struct Result {
    std::uint64_t step = 0;
    std::vector<std::int32_t> token_ids;
    std::vector<PositionLogprobs> logprobs;
  };
  Result results_[2];                // likewise
  std::uint64_t results_taken_ = 0;  // engine thread
  EngineStats stats_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::int64_t> kv_lengths_ ABSL_GUARDED_BY(mutex_);

  std::thread engine_thread_;
};

}  // namespace weft
