#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "server/base/mutex.h"
#include "server/grpc_server.h"
#include "server/mux_writer.h"
#include "server/stream_writer.h"
#include "weft/v1/worker.grpc.pb.h"

namespace weft {

// A leader without a group: the test says when it is ready, what it answers, and when it dies.
// Thread-safe.
class FakeWorker {
 public:
  // One call of Worker.Generate, played by the test.
  class Call {
   public:
    const v1::WorkerGenerateRequest& request() const { return request_; }
    absl::Time deadline() const { return deadline_; }
    // False once the call has ended.
    bool Send(absl::Span<const std::int32_t> ids,
              v1::FinishReason finish = v1::FINISH_REASON_UNSPECIFIED);
    bool Send(v1::WorkerGenerateResponse response) { return writer_->Write(std::move(response)); }
    void End(absl::Status status = absl::OkStatus()) { writer_->Finish(std::move(status)); }
    // Returns once the router has cancelled or is gone.
    void WaitUntilCancelled();

   private:
    friend class FakeWorker;
    v1::WorkerGenerateRequest request_;
    absl::Time deadline_;
    std::shared_ptr<CallWriter> writer_;
    Mutex mutex_;
    CondVar changed_;
    bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  };

  // What WatchState says: ready, 64 tokens of 300 ids.
  static v1::GroupState ReadyState();

  // Listens at `address` and answers WatchState with `state` every 20 ms.
  explicit FakeWorker(std::string address, v1::GroupState state = ReadyState());
  ~FakeWorker();

  // The oldest call that no test has taken yet; waits for one.
  std::shared_ptr<Call> TakeCall();
  int num_calls_waiting();

  void SetState(v1::GroupState state);
  // Leaves streams open and says nothing more, as a stopped process does.
  void FallSilent();
  // New calls are refused with this status instead of being given to the test.
  void RefuseCalls(absl::Status status);
  int num_refused();
  // Ends as a killed process does. Start() is a new process at the same address.
  void Kill();
  void Start();

 private:
  class Service;

  void Beat();

  const std::string address_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<GrpcServer> server_;

  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool silent_ ABSL_GUARDED_BY(mutex_) = false;
  int num_refused_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
  v1::GroupState state_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Call>> calls_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<StreamWriter<v1::GroupState>>> watchers_ ABSL_GUARDED_BY(mutex_);
  std::thread beat_;
};

// An abstract socket address that no other test has.
std::string UniqueAddress(std::string_view role);

}  // namespace weft
