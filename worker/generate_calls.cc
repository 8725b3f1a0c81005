#include "worker/generate_calls.h"

#include <atomic>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "fmt/format.h"
#include "server/error_reason.h"
#include "worker/generate_request.h"

namespace weft {

// What all calls of a leader share.
struct GenerateCalls::Table {
  // OK when `call` may run; then `older` is what it takes the place of, if anything.
  absl::Status Enter(const std::shared_ptr<Call>& call, std::shared_ptr<Call>& older);
  void Leave(const Call& call);

  std::atomic<std::int64_t> num_open_calls{0};
  std::atomic<std::int64_t> stream_buffer_bytes{0};
  Mutex mutex;
  struct Running {
    const Call* address = nullptr;  // whose place it is
    std::weak_ptr<Call> call;
  };
  absl::flat_hash_map<std::string, Running> by_id ABSL_GUARDED_BY(mutex);
  absl::flat_hash_map<const Call*, std::weak_ptr<Call>> all ABSL_GUARDED_BY(mutex);
};

// Tokens from the engine thread to the reader.
class GenerateCalls::Call final : public TokenSink {
 public:
  Call(std::shared_ptr<Table> table, Leader& leader, std::string request_id, std::uint64_t attempt)
      : request_id(std::move(request_id)),
        attempt(attempt),
        table_(std::move(table)),
        leader_(leader) {}
  ~Call() override { table_->Leave(*this); }

  void Attach(std::shared_ptr<CallWriter> writer) { writer_ = std::move(writer); }

  // Call it once Enter() has let it in.
  void Submit(EngineRequest request, const std::shared_ptr<Call>& self) {
    const absl::StatusOr<RequestId> id = leader_.Submit(std::move(request), self);
    if (!id.ok()) return OnRefused(id.status());
    id_ = static_cast<std::uint64_t>(*id);
    if (cancelled_) leader_.Cancel(*id);
  }

  // Frees what the request holds; at once, or as soon as its id is known.
  void Cancel() {
    cancelled_ = true;
    if (const std::uint64_t id = id_; id != 0) leader_.Cancel(RequestId{id});
  }
  void End(const absl::Status& status) {
    writer_->Finish(status);
    Cancel();
  }

  void ContinueKv(const v1::ContinueKvRequest& request) {
    const std::uint64_t id = id_;
    if (id == 0) return;  // nobody knows yet that it waits
    std::optional<std::int32_t> first_token;
    if (request.has_first_token()) first_token = request.first_token();
    leader_.ContinueKv(RequestId{id}, first_token, request.failure());
  }

  void OnRefused(const absl::Status& status) override {
    table_->Leave(*this);
    writer_->Finish(status);
  }

  void OnEvent(const TokenEvent& event) override {
    // Before the reader hears of the end: it may use the id again.
    if (event.finish != FinishReason::kNone) table_->Leave(*this);
    switch (event.finish) {
      case FinishReason::kAborted:
        writer_->Finish(absl::CancelledError("cancelled"));
        return;
      case FinishReason::kDeadline:
        writer_->Finish(absl::DeadlineExceededError("the request's deadline has passed"));
        return;
      case FinishReason::kError:
        writer_->Finish(absl::IsUnavailable(event.error)
                            ? WithReason(event.error, kReasonKvTransferFailed)
                            : event.error);
        return;
      case FinishReason::kHandedOff:
        break;
      default:
        if (event.kv_took.has_value()) return;  // the leader's alone
        if (!writer_->Write(ToResponse(event))) Cancel();
    }
    if (event.finish != FinishReason::kNone) writer_->Finish(absl::OkStatus());
  }

  const std::string request_id;
  const std::uint64_t attempt;

 private:
  const std::shared_ptr<Table> table_;
  Leader& leader_;
  std::shared_ptr<CallWriter> writer_;
  std::atomic<std::uint64_t> id_{0};
  std::atomic<bool> cancelled_{false};
};

absl::Status GenerateCalls::Table::Enter(const std::shared_ptr<Call>& call,
                                         std::shared_ptr<Call>& older) {
  MutexLock lock(mutex);
  if (!call->request_id.empty()) {
    Running& running = by_id[call->request_id];
    older = running.call.lock();
    if (older != nullptr && older->attempt >= call->attempt) {
      return absl::AlreadyExistsError(fmt::format("request {} runs here as attempt {}; this is {}",
                                                  call->request_id, older->attempt, call->attempt));
    }
    running = {.address = call.get(), .call = call};
  }
  all.emplace(call.get(), call);
  return absl::OkStatus();
}

void GenerateCalls::Table::Leave(const Call& call) {
  MutexLock lock(mutex);
  // Only one that was let in has a place to give back, and only until a newer one takes it.
  if (all.erase(&call) == 0) return;
  const auto at = by_id.find(call.request_id);
  if (at != by_id.end() && at->second.address == &call) by_id.erase(at);
}

GenerateCalls::GenerateCalls(std::int64_t max_stream_buffer_bytes)
    : max_stream_buffer_bytes_(max_stream_buffer_bytes), table_(std::make_shared<Table>()) {}
GenerateCalls::~GenerateCalls() = default;

MuxWriterOptions GenerateCalls::StreamOptions() const {
  return {.max_bytes = max_stream_buffer_bytes_,
          .size_bytes = ResponseBytes,
          .merge = MergeResponses,
          .total_buffered_bytes = &table_->stream_buffer_bytes};
}

void GenerateCalls::Start(MuxWriter& mux, std::uint64_t number, Leader& leader,
                          const std::string& request_id, std::uint64_t attempt,
                          EngineRequest request) {
  const auto call = std::make_shared<Call>(table_, leader, request_id, attempt);
  // Lives as long as the call's writer.
  table_->num_open_calls.fetch_add(1);
  std::shared_ptr<void> open(nullptr,
                             [table = table_](void*) { table->num_open_calls.fetch_sub(1); });
  std::shared_ptr<CallWriter> writer =
      mux.Open(number, [open = std::move(open), weak = std::weak_ptr<Call>(call)] {
        if (const auto running = weak.lock()) running->Cancel();
      });
  if (writer == nullptr) return;
  call->Attach(std::move(writer));
  std::shared_ptr<Call> older;
  if (const absl::Status entered = table_->Enter(call, older); !entered.ok()) {
    call->OnRefused(entered);
    return;
  }
  if (older != nullptr) {
    older->End(absl::AbortedError(fmt::format("attempt {} has taken over", attempt)));
  }
  call->Submit(std::move(request), call);
}

absl::Status GenerateCalls::ContinueKv(const v1::ContinueKvRequest& request) {
  std::shared_ptr<Call> call;
  {
    MutexLock lock(table_->mutex);
    const auto at = table_->by_id.find(request.request_id());
    if (at != table_->by_id.end()) call = at->second.call.lock();
  }
  if (call == nullptr || call->attempt != request.attempt()) {
    return absl::NotFoundError(fmt::format("attempt {} of request {} does not run here",
                                           request.attempt(), request.request_id()));
  }
  call->ContinueKv(request);
  return absl::OkStatus();
}

void GenerateCalls::EndAll(const absl::Status& status) {
  std::vector<std::shared_ptr<Call>> calls;
  {
    MutexLock lock(table_->mutex);
    for (const auto& [address, call] : table_->all) {
      if (auto running = call.lock()) calls.push_back(std::move(running));
    }
  }
  for (const auto& call : calls) call->End(status);
}

std::int64_t GenerateCalls::num_open_calls() const { return table_->num_open_calls.load(); }

std::int64_t GenerateCalls::stream_buffer_bytes() const {
  return table_->stream_buffer_bytes.load(std::memory_order_relaxed);
}

std::int64_t GenerateCalls::num_running_ids() const {
  MutexLock lock(table_->mutex);
  return static_cast<std::int64_t>(table_->by_id.size());
}

}  // namespace weft
