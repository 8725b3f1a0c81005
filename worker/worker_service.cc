#include "worker/worker_service.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "server/base/status_macros.h"
#include "server/error_reason.h"
#include "server/grpc_status.h"
#include "server/grpc_stream.h"

namespace weft {
namespace {

constexpr auto kHeartbeat = std::chrono::milliseconds(500);

// One Worker.Generate: tokens from the engine thread into the stream.
class GenerateCall final : public TokenSink {
 public:
  using Response = v1::WorkerGenerateResponse;

  // `cancel` ends the request; any thread, any time.
  GenerateCall(std::shared_ptr<StreamWriter<Response>> writer, std::function<void()> cancel)
      : writer_(std::move(writer)), cancel_(std::move(cancel)) {}

  void OnRefused(const absl::Status& status) override { writer_->Finish(status); }

  void OnEvent(const TokenEvent& event) override {
    Response response;
    if (event.token_id.has_value()) response.add_token_ids(*event.token_id);
    switch (event.finish) {
      case FinishReason::kNone:
        break;
      case FinishReason::kEos:
      case FinishReason::kStopToken:
        response.set_finish_reason(v1::FINISH_REASON_STOP);
        break;
      case FinishReason::kLength:
        response.set_finish_reason(v1::FINISH_REASON_LENGTH);
        break;
      case FinishReason::kAborted:
        writer_->Finish(absl::CancelledError("cancelled"));
        return;
      case FinishReason::kDeadline:
        writer_->Finish(absl::DeadlineExceededError("the request's deadline has passed"));
        return;
      case FinishReason::kError:
        writer_->Finish(event.error);
        return;
    }
    if (!writer_->Write(std::move(response))) cancel_();
    if (event.finish != FinishReason::kNone) writer_->Finish(absl::OkStatus());
  }

 private:
  const std::shared_ptr<StreamWriter<Response>> writer_;
  const std::function<void()> cancel_;
};

std::int64_t ResponseBytes(const v1::WorkerGenerateResponse& response) {
  return 16 + 4 * static_cast<std::int64_t>(response.token_ids_size());
}

bool MergeResponses(v1::WorkerGenerateResponse& into, v1::WorkerGenerateResponse& next) {
  into.mutable_token_ids()->MergeFrom(next.token_ids());
  into.set_finish_reason(next.finish_reason());
  return true;
}

std::int64_t StateBytes(const v1::GroupState&) { return 1; }

// A watcher that lags only needs the newest state.
bool ReplaceState(v1::GroupState& into, v1::GroupState& next) {
  into = std::move(next);
  return true;
}

// A field that would be ignored silently is refused; its neutral value is not.
absl::Status RefuseUnsupported(const v1::SamplingParams& in) {
  const std::pair<const char*, bool> fields[] = {
      {"min_p", in.min_p() != 0},
      {"presence_penalty", in.presence_penalty() != 0},
      {"frequency_penalty", in.frequency_penalty() != 0},
      {"repetition_penalty", in.has_repetition_penalty() && in.repetition_penalty() != 1},
      {"min_tokens", in.min_tokens() != 0},
      {"logit_bias", !in.logit_bias().empty()},
      {"allowed_token_ids", !in.allowed_token_ids().empty()},
      {"bad_words_token_ids", !in.bad_words_token_ids().empty()},
      {"logprobs", in.has_logprobs()},
      {"prompt_logprobs", in.has_prompt_logprobs()},
  };
  for (const auto& [name, given] : fields) {
    if (given) return absl::InvalidArgumentError(fmt::format("{} is not supported yet", name));
  }
  return absl::OkStatus();
}

absl::StatusOr<EngineRequest> ToEngineRequest(const v1::WorkerGenerateRequest& request,
                                              absl::Span<const std::int32_t> eos_token_ids,
                                              absl::Time deadline) {
  const v1::SamplingParams& in = request.sampling();
  if (!in.has_seed()) {
    return absl::InvalidArgumentError("sampling.seed is missing; routers always give one");
  }
  RETURN_IF_ERROR(RefuseUnsupported(in));
  EngineRequest out;
  out.priority = request.priority();
  out.prompt_token_ids.assign(request.prompt_token_ids().begin(), request.prompt_token_ids().end());
  out.resume_token_ids.assign(request.resume_token_ids().begin(), request.resume_token_ids().end());
  if (in.has_max_tokens()) out.max_tokens = in.max_tokens();
  out.stop_token_ids.assign(in.stop_token_ids().begin(), in.stop_token_ids().end());
  out.eos_token_ids.assign(eos_token_ids.begin(), eos_token_ids.end());
  out.ignore_eos = in.ignore_eos();
  if (in.has_temperature()) out.sampling.temperature = in.temperature();
  if (in.has_top_p()) out.sampling.top_p = in.top_p();
  if (in.has_top_k()) out.sampling.top_k = std::max(0, in.top_k());  // -1 is off, too
  out.sampling.seed = in.seed();
  out.deadline = deadline;
  return out;
}

}  // namespace

// A follower's place in the group, for as long as its process lives. gRPC's reactor rules: one
// read and one write in flight; Finish() once.
class WorkerService::JoinStream final
    : public grpc::ServerBidiReactor<v1::JoinRequest, v1::JoinResponse> {
 public:
  explicit JoinStream(WorkerService& service) : service_(service) { StartRead(&request_); }

  void Answer(const v1::JoinResponse& response) {
    if (finished_) return;
    response_ = response;
    StartWrite(&response_);
  }
  std::int32_t rank() const { return rank_; }
  void FinishOnce(const absl::Status& status) {
    if (!finished_.exchange(true)) Finish(ToGrpcStatus(status));
  }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) {
      FinishOnce(absl::OkStatus());
      return;
    }
    if (rank_ == 0) {
      absl::Status joined;
      {
        // Whoever sees the table complete must find this stream's rank, to answer it.
        MutexLock lock(service_.mutex_);
        joined = service_.joins_.Join({.rank = request_.rank(),
                                       .fabric_address = request_.fabric_address(),
                                       .num_blocks = request_.num_blocks(),
                                       .agreed = request_.agreed()});
        if (joined.ok()) rank_ = request_.rank();
      }
      if (!joined.ok()) {
        FinishOnce(joined);
        // Two processes believe they are this rank: the group cannot be trusted.
        if (absl::IsAlreadyExists(joined)) service_.on_follower_lost_(request_.rank(), joined);
        return;
      }
    }
    if (request_.has_info()) {
      MutexLock lock(service_.mutex_);
      auto& ranks = service_.ranks_;
      if (static_cast<std::size_t>(rank_) >= ranks.size()) ranks.resize(rank_ + 1);
      ranks[rank_] = request_.info();
    }
    StartRead(&request_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) FinishOnce(absl::OkStatus());
  }
  void OnCancel() override { FinishOnce(absl::CancelledError("cancelled")); }

  void OnDone() override {
    {
      MutexLock lock(service_.mutex_);
      auto& streams = service_.join_streams_;
      streams.erase(std::remove(streams.begin(), streams.end(), this), streams.end());
    }
    if (rank_ != 0) {
      service_.on_follower_lost_(rank_, absl::UnavailableError("its Join stream has ended"));
    }
    delete this;
  }

  WorkerService& service_;
  v1::JoinRequest request_;
  v1::JoinResponse response_;
  std::atomic<std::int32_t> rank_{0};
  std::atomic<bool> finished_{false};
};

WorkerService::WorkerService(
    JoinTable& joins, std::uint64_t generation,
    std::function<void(std::int32_t rank, const absl::Status&)> on_follower_lost)
    : joins_(joins), generation_(generation), on_follower_lost_(std::move(on_follower_lost)) {
  state_.mutable_group()->set_state("loading");
  ticker_ = std::thread([this] { TickLoop(); });
}

WorkerService::~WorkerService() { Stop(); }

void WorkerService::Stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  if (ticker_.joinable()) ticker_.join();
  leader_ = nullptr;
}

void WorkerService::SetState(std::string state) {
  {
    MutexLock lock(mutex_);
    state_.mutable_group()->set_state(std::move(state));
  }
  Publish();
}

void WorkerService::AnswerJoins(const v1::JoinResponse& response) {
  MutexLock lock(mutex_);
  for (JoinStream* stream : join_streams_) {
    if (stream->rank() != 0) stream->Answer(response);
  }
}

void WorkerService::RefuseJoins(const absl::Status& status) {
  MutexLock lock(mutex_);
  for (JoinStream* stream : join_streams_) stream->FinishOnce(status);
}

void WorkerService::SetReady(Leader& leader, const v1::GroupState& info) {
  {
    MutexLock lock(mutex_);
    leader_ = &leader;
    state_ = info;
    state_.mutable_group()->set_state("ready");
    state_.mutable_group()->set_ready(true);
  }
  Publish();
}

void WorkerService::SetRankInfo(const v1::RankInfo& info) {
  MutexLock lock(mutex_);
  if (ranks_.empty()) ranks_.resize(1);
  ranks_[0] = info;
}

void WorkerService::StartDrain() {
  draining_ = true;
  {
    MutexLock lock(mutex_);
    state_.mutable_group()->set_state("draining");
    state_.mutable_group()->set_ready(false);
  }
  Publish();
}

v1::GroupState WorkerService::CurrentState() {
  v1::GroupState state = state_;
  state.set_seq(state_seq_++);
  v1::GroupInfo& group = *state.mutable_group();
  group.set_generation(generation_);
  if (const Leader* leader = leader_.load(); leader != nullptr) {
    const EngineStats stats = leader->Stats();
    group.set_num_blocks(stats.num_blocks);
    group.set_num_free_blocks(stats.num_free_blocks);
    group.set_num_requests_running(stats.num_running);
    group.set_num_requests_waiting(stats.num_waiting);
  }
  for (const v1::RankInfo& rank : ranks_) *group.add_ranks() = rank;
  return state;
}

void WorkerService::Publish() {
  v1::GroupState state;
  std::vector<std::shared_ptr<StateWriter>> writers;
  {
    MutexLock lock(mutex_);
    state = CurrentState();
    std::erase_if(watchers_, [](const std::weak_ptr<StateWriter>& w) { return w.expired(); });
    for (const std::weak_ptr<StateWriter>& watcher : watchers_) {
      if (auto writer = watcher.lock()) writers.push_back(std::move(writer));
    }
  }
  for (const std::shared_ptr<StateWriter>& writer : writers) writer->Write(state);
}

void WorkerService::TickLoop() {
  auto next = std::chrono::steady_clock::now() + kHeartbeat;
  for (;;) {
    {
      MutexLock lock(mutex_);
      while (!stopping_ && wake_.WaitUntil(mutex_, next)) {
      }
      if (stopping_) return;
    }
    next += kHeartbeat;
    Publish();
  }
}

grpc::ServerWriteReactor<v1::WorkerGenerateResponse>* WorkerService::Generate(
    grpc::CallbackServerContext* context, const v1::WorkerGenerateRequest* request) {
  struct Cancelled {
    std::atomic<std::uint64_t> id{0};
  };
  const auto cancelled = std::make_shared<Cancelled>();
  Leader* const leader = leader_.load();
  const auto cancel = [cancelled, leader] {
    if (const std::uint64_t id = cancelled->id; id != 0) leader->Cancel(RequestId{id});
  };
  auto* stream = new GrpcStream<v1::WorkerGenerateResponse>(
      {.size_bytes = ResponseBytes, .merge = MergeResponses, .on_cancel = cancel});
  const auto writer = stream->writer();
  if (leader == nullptr || draining_) {
    writer->Finish(
        draining_
            ? WithReason(absl::UnavailableError("this group drains"), kReasonDraining)
            : WithReason(absl::UnavailableError("this group is still loading"), kReasonNotReady));
    return stream;
  }
  std::vector<std::int32_t> eos_token_ids;
  {
    MutexLock lock(mutex_);
    eos_token_ids.assign(state_.eos_token_ids().begin(), state_.eos_token_ids().end());
  }
  absl::StatusOr<EngineRequest> engine_request =
      ToEngineRequest(*request, eos_token_ids, absl::FromChrono(context->deadline()));
  if (!engine_request.ok()) {
    writer->Finish(engine_request.status());
    return stream;
  }
  const auto call = std::make_shared<GenerateCall>(writer, cancel);
  const absl::StatusOr<RequestId> id = leader->Submit(*std::move(engine_request), call);
  if (!id.ok()) {
    writer->Finish(id.status());
  } else {
    cancelled->id = static_cast<std::uint64_t>(*id);
  }
  return stream;
}

grpc::ServerBidiReactor<v1::JoinRequest, v1::JoinResponse>* WorkerService::Join(
    grpc::CallbackServerContext*) {
  auto* stream = new JoinStream(*this);
  MutexLock lock(mutex_);
  join_streams_.push_back(stream);
  return stream;
}

grpc::ServerWriteReactor<v1::GroupState>* WorkerService::WatchState(grpc::CallbackServerContext*,
                                                                    const v1::WatchStateRequest*) {
  auto* stream = new GrpcStream<v1::GroupState>(
      {.max_messages = 4, .size_bytes = StateBytes, .merge = ReplaceState});
  const auto writer = stream->writer();
  v1::GroupState state;
  {
    MutexLock lock(mutex_);
    state = CurrentState();
    watchers_.push_back(writer);
  }
  writer->Write(std::move(state));
  return stream;
}

}  // namespace weft
