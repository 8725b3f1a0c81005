#include "worker/worker_service.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/error_reason.h"
#include "server/grpc_mux_stream.h"
#include "server/grpc_status.h"
#include "server/grpc_stream.h"
#include "worker/generate_request.h"

namespace weft {
namespace {

constexpr auto kHeartbeat = std::chrono::milliseconds(500);

std::int64_t StateBytes(const v1::GroupState&) { return 1; }

KvReport FromProto(const v1::KvReport& report) {
  KvReport out = {
      .transfer = report.transfer_id(), .error = report.error(), .bytes = report.bytes()};
  switch (report.kind()) {
    case v1::KvReport::KIND_OPENED:
      out.kind = KvReport::Kind::kOpened;
      break;
    case v1::KvReport::KIND_PROGRESS:
      out.kind = KvReport::Kind::kProgress;
      break;
    case v1::KvReport::KIND_DONE:
      out.kind = KvReport::Kind::kDone;
      break;
    default:
      out.kind = KvReport::Kind::kFailed;
  }
  return out;
}

// A watcher that lags only needs the newest state. It is given no block changes while some wait.
bool ReplaceState(v1::GroupState& into, v1::GroupState& next) {
  if (into.has_block_changes()) next.mutable_block_changes()->Swap(into.mutable_block_changes());
  into = std::move(next);
  return true;
}

std::string Bytes(const BlockHash& hash) { return {hash.begin(), hash.end()}; }

// Of one message, which then has 2.3 MB at most: less than gRPC's own limit of 4 MiB. What is more
// comes with the next beat.
constexpr std::size_t kMaxBlockChanges = 32'768;

void FillProto(const BlockLog::News& news, v1::BlockChanges& out) {
  out.set_snapshot(news.snapshot);
  out.set_seq(news.seq);
  out.mutable_changes()->Reserve(static_cast<int>(news.changes.size()));
  for (const BlockChange& change : news.changes) {
    v1::BlockChange& added = *out.add_changes();
    added.set_hash(Bytes(change.hash));
    if (change.parent.has_value()) added.set_parent_hash(Bytes(*change.parent));
    added.set_removed(change.removed);
  }
}

}  // namespace

// A follower's place in the group, for as long as its process lives. gRPC's reactor rules: one
// read and one write in flight; Finish() once.
class WorkerService::JoinStream final
    : public grpc::ServerBidiReactor<v1::JoinRequest, v1::JoinResponse> {
 public:
  // One that is not `admitted` hears why, and nothing else happens.
  JoinStream(WorkerService& service, const absl::Status& admitted) : service_(service) {
    if (admitted.ok()) {
      StartRead(&request_);
    } else {
      FinishOnce(admitted);
    }
  }

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
                                       .kv_fabric_address = request_.kv_fabric_address(),
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
    if (request_.has_kv_report()) service_.OnKvReport(FromProto(request_.kv_report()));
    if (request_.has_info()) {
      MutexLock lock(service_.mutex_);
      service_.KeepInfo(rank_, request_.info());
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
    JoinTable& joins, std::uint64_t generation, const WorkerLimits& limits,
    std::function<void(std::int32_t rank, const absl::Status&)> on_follower_lost,
    std::optional<SecretDigest> join_secret)
    : joins_(joins),
      generation_(generation),
      limits_(limits),
      on_follower_lost_(std::move(on_follower_lost)),
      join_secret_(join_secret),
      calls_(limits.max_stream_buffer_bytes) {
  state_.mutable_group()->set_state("loading");
  ticker_.emplace(kHeartbeat, [this] { Publish(); });
}

WorkerService::~WorkerService() { Stop(); }

void WorkerService::Stop() {
  ticker_.reset();
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
  KeepInfo(0, info);
}

void WorkerService::KeepInfo(std::int32_t rank, const v1::RankInfo& info) {
  const auto at = static_cast<std::size_t>(rank);
  if (at >= ranks_.size()) {
    ranks_.resize(at + 1);
    ranks_heard_.resize(at + 1, absl::Now());
  }
  ranks_[at] = info;
  ranks_heard_[at] = absl::Now();
}

void WorkerService::OnKvReport(const KvReport& report) {
  if (Leader* const leader = leader_.load(); leader != nullptr) leader->OnKvReport(report);
}

absl::Status WorkerService::CheckFollowers(absl::Duration timeout) {
  MutexLock lock(mutex_);
  const absl::Time now = absl::Now();
  for (std::size_t rank = 1; rank < ranks_heard_.size(); ++rank) {
    const absl::Duration silence = now - ranks_heard_[rank];
    if (silence <= timeout) continue;
    return absl::UnavailableError(
        fmt::format("rank {} has said nothing for {:.1f} s", rank, absl::ToDoubleSeconds(silence)));
  }
  return absl::OkStatus();
}

absl::Status WorkerService::CheckServing() {
  MutexLock lock(mutex_);
  if (state_.group().ready()) return absl::OkStatus();
  return absl::UnavailableError(state_.group().state());
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

void WorkerService::EndRequests() {
  calls_.EndAll(WithReason(absl::UnavailableError("this group drains"), kReasonDraining));
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
    group.set_num_cached_blocks(stats.num_cached_blocks);
    group.set_prefix_cache_queries(stats.prefix_cache_queries);
    group.set_prefix_cache_hits(stats.prefix_cache_hits);
    group.set_prefix_cache_evictions(stats.prefix_cache_evictions);
    group.set_num_preemptions(stats.num_preemptions);
    group.set_peak_requests_running(stats.peak_running);
  }
  for (const v1::RankInfo& rank : ranks_) *group.add_ranks() = rank;
  return state;
}

void WorkerService::Publish() {
  // Until it is written: a state must not overtake a newer one.
  MutexLock publishing(publish_mutex_);
  v1::GroupState state;
  {
    MutexLock lock(mutex_);
    state = CurrentState();
  }
  std::erase_if(watchers_, [](const Watcher& watcher) { return watcher.writer.expired(); });
  for (Watcher& watcher : watchers_) {
    if (const auto writer = watcher.writer.lock()) Tell(watcher, *writer, state);
  }
}

void WorkerService::Tell(Watcher& watcher, StateWriter& writer, v1::GroupState state) {
  const Leader* const leader = leader_.load();
  // One that has not read what it was told last waits, and so does what is new for it.
  if (watcher.block_changes && leader != nullptr && !state.block_hash_key().empty() &&
      writer.buffered_bytes() == 0) {
    const BlockLog::News news = watcher.blocks.Next(leader->block_log(), kMaxBlockChanges);
    if (news.snapshot || !news.changes.empty()) FillProto(news, *state.mutable_block_changes());
  }
  writer.Write(std::move(state));
}

grpc::ServerBidiReactor<v1::GenerateCommand, v1::GenerateEvents>* WorkerService::Generate(
    grpc::CallbackServerContext*) {
  return new GrpcMuxStream(
      calls_.StreamOptions(),
      [this](v1::WorkerGenerateRequest& request, absl::Time deadline, MuxWriter& mux,
             std::uint64_t call) { StartCall(request, deadline, mux, call); });
}

void WorkerService::StartCall(const v1::WorkerGenerateRequest& request, absl::Time deadline,
                              MuxWriter& mux, std::uint64_t call) {
  absl::StatusOr<EngineRequest> accepted = Accept(request, deadline);
  if (accepted.ok()) {
    calls_.Start(mux, call, *leader_, request.request_id(), request.attempt(),
                 *std::move(accepted));
  } else if (const auto writer = mux.Open(call, nullptr); writer != nullptr) {
    writer->Finish(accepted.status());
  }
}

absl::StatusOr<EngineRequest> WorkerService::Accept(const v1::WorkerGenerateRequest& request,
                                                    absl::Time deadline) {
  if (draining_) {
    return WithReason(absl::UnavailableError("this group drains"), kReasonDraining);
  }
  if (leader_ == nullptr) {
    return WithReason(absl::UnavailableError("this group is still loading"), kReasonNotReady);
  }
  spdlog::debug("request {}: attempt {}, {} prompt tokens, traceparent {}", request.request_id(),
                request.attempt(), request.prompt_token_ids_size(),
                request.traceparent().empty() ? "none" : request.traceparent());
  std::vector<std::int32_t> eos_token_ids;
  ModelTokens model;
  std::string kv_format;
  {
    MutexLock lock(mutex_);
    eos_token_ids.assign(state_.eos_token_ids().begin(), state_.eos_token_ids().end());
    model = {.vocab_size = state_.vocab_size(), .eos_token_ids = eos_token_ids};
    kv_format = state_.kv().format();
  }
  ASSIGN_OR_RETURN(EngineRequest accepted, ToEngineRequest(request, model, limits_, deadline));
  RETURN_IF_ERROR(SetHandoff(request, kv_format, accepted));
  return accepted;
}

absl::Status WorkerService::CheckJoinSecret(const grpc::CallbackServerContext& context) const {
  if (!join_secret_) return absl::OkStatus();
  const std::optional<std::string_view> secret = BearerToken(context);
  if (secret && SecretDigest(*secret).Equals(*join_secret_)) return absl::OkStatus();
  return absl::UnauthenticatedError(
      fmt::format("this group admits ranks that know its secret (--join-secret-file); this one "
                  "sent {}",
                  secret ? "another" : "none"));
}

grpc::ServerUnaryReactor* WorkerService::ContinueKv(grpc::CallbackServerContext* context,
                                                    const v1::ContinueKvRequest* request,
                                                    v1::ContinueKvResponse*) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  std::int32_t vocab_size = 0;
  {
    MutexLock lock(mutex_);
    vocab_size = state_.vocab_size();
  }
  absl::Status status;
  if (request->has_first_token() &&
      (request->first_token() < 0 || request->first_token() >= vocab_size)) {
    status = absl::InvalidArgumentError(fmt::format("first_token is {}; 0 to {} are allowed",
                                                    request->first_token(), vocab_size - 1));
  } else {
    status = calls_.ContinueKv(*request);
  }
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

grpc::ServerBidiReactor<v1::JoinRequest, v1::JoinResponse>* WorkerService::Join(
    grpc::CallbackServerContext* context) {
  const absl::Status admitted = CheckJoinSecret(*context);
  if (!admitted.ok()) {
    spdlog::warn("refused a rank that wanted to join from {}: {}", context->peer(),
                 std::string(admitted.message()));
  }
  auto* stream = new JoinStream(*this, admitted);
  MutexLock lock(mutex_);
  join_streams_.push_back(stream);
  return stream;
}

grpc::ServerWriteReactor<v1::GroupState>* WorkerService::WatchState(
    grpc::CallbackServerContext*, const v1::WatchStateRequest* request) {
  auto* stream = new GrpcStream<v1::GroupState>(
      {.max_messages = 4, .size_bytes = StateBytes, .merge = ReplaceState});
  const auto writer = stream->writer();
  MutexLock publishing(publish_mutex_);
  v1::GroupState state;
  {
    MutexLock lock(mutex_);
    state = CurrentState();
  }
  watchers_.push_back({.writer = writer, .block_changes = request->block_changes()});
  Tell(watchers_.back(), *writer, std::move(state));
  return stream;
}

}  // namespace weft
