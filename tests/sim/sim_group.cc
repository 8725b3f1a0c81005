#include "tests/sim/sim_group.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "server/base/check.h"
#include "server/error_reason.h"
#include "tests/worker/engine/block_index.h"
#include "worker/generate_request.h"

namespace weft::sim {
namespace {

constexpr Duration kHeartbeat{500'000};

absl::Status Broken() { return absl::UnavailableError("the connection is broken"); }

}  // namespace

// Both ends of one stream. The router's end is done once it was told the end; the group's end lives
// as long as the group does.
class SimGroup::Wire : public LeaderClient::Stream, public std::enable_shared_from_this<Wire> {
 public:
  explicit Wire(SimGroup& group) : group_(group) {}

  void Start() override {
    group_.wires_.push_back(weak_from_this());
    Later(group_.Delay(), [this] {
      if (done_) return;
      if (group_.life_ == nullptr) {
        EndHere(Broken());
      } else if (!group_.IsHung()) {
        Arrive();
      }
    });
  }
  void Cancel() override {
    Later(Duration(1), [this] { EndHere(absl::CancelledError("cancelled by the router")); });
    Later(group_.Delay(), [this] {
      if (group_.life_ != nullptr && !group_.IsHung()) Cancelled();
    });
  }
  // The group has died.
  void Break() {
    Later(group_.Delay(), [this] { EndHere(Broken()); });
  }
  bool done() const { return done_; }

 protected:
  // At the group.
  virtual void Arrive() = 0;
  virtual void Cancelled() {}
  // At the router, once.
  virtual void TellEnd(const absl::Status& status) = 0;

  void Later(Duration delay, std::function<void()> event) {
    group_.time_.After(delay, [self = shared_from_this(), event = std::move(event)] { event(); });
  }
  // After everything that was sent before.
  void Send(std::function<void()> event) {
    last_arrival_ = std::max(last_arrival_ + Duration(1), group_.time_.now() + group_.Delay());
    Later(last_arrival_ - group_.time_.now(), std::move(event));
  }
  void EndHere(const absl::Status& status) {
    if (std::exchange(done_, true)) return;
    TellEnd(status);
  }

  SimGroup& group_;

 private:
  Duration last_arrival_{0};
  bool done_ = false;
};

class SimGroup::WatchWire final : public Wire {
 public:
  WatchWire(SimGroup& group, LeaderClient::WatchHandler& handler)
      : Wire(group), handler_(handler) {}

  void SendState(v1::GroupState state) {
    Send([this, state = std::move(state)] {
      if (!done()) handler_.OnState(state);
    });
  }

 private:
  void Arrive() override;
  void TellEnd(const absl::Status& status) override { handler_.OnWatchEnd(status); }

  LeaderClient::WatchHandler& handler_;
};

class SimGroup::GenerateWire final : public Wire, public StreamSink<v1::WorkerGenerateResponse> {
 public:
  using Writer = StreamWriter<v1::WorkerGenerateResponse>;

  GenerateWire(SimGroup& group, const v1::WorkerGenerateRequest& request, Duration deadline,
               LeaderClient::GenerateHandler& handler)
      : Wire(group), request_(request), deadline_(deadline), handler_(handler) {}

  void Start() override {
    if (deadline_ < Duration::max()) {
      Later(std::max(Duration(0), deadline_ - group_.time_.now()),
            [this] { EndHere(absl::DeadlineExceededError("Deadline Exceeded")); });
    }
    Wire::Start();
  }

  // At the group.
  absl::Time deadline() const {
    return deadline_ == Duration::max() ? absl::InfiniteFuture()
                                        : absl::UnixEpoch() + absl::FromChrono(deadline_);
  }
  Writer& writer() { return *writer_; }
  RequestId id{};  // once the engine has it

 private:
  void Arrive() override {
    writer_ = std::make_unique<Writer>(
        *this, StreamWriterOptions<v1::WorkerGenerateResponse>{
                   .size_bytes = ResponseBytes, .merge = MergeResponses, .on_cancel = [this] {
                     group_.CancelRequest(id);
                   }});
    group_.Accept(std::static_pointer_cast<GenerateWire>(shared_from_this()), request_);
  }
  void Cancelled() override {
    if (writer_ != nullptr && !finished_) writer_->OnCancel();
  }
  void TellEnd(const absl::Status& status) override { handler_.OnGenerateEnd(status); }

  void StartWrite(const v1::WorkerGenerateResponse& message) override {
    Send([this, copy = v1::WorkerGenerateResponse(message)]() mutable {
      if (!done()) handler_.OnResponse(copy);
      if (group_.life_ != nullptr) writer_->OnWriteDone(!done());
    });
  }
  void Finish(const absl::Status& status) override {
    finished_ = true;
    Send([this, status] {
      EndHere(status);
      writer_->OnDone();
    });
  }

  const v1::WorkerGenerateRequest request_;
  const Duration deadline_;
  LeaderClient::GenerateHandler& handler_;
  std::unique_ptr<Writer> writer_;
  bool finished_ = false;
};

class SimGroup::Client final : public LeaderClient {
 public:
  explicit Client(SimGroup& group) : group_(group) {}
  std::shared_ptr<Stream> WatchState(WatchHandler& handler, bool) override {
    return std::make_shared<WatchWire>(group_, handler);
  }
  std::shared_ptr<Stream> Generate(const v1::WorkerGenerateRequest& request,
                                   std::chrono::system_clock::time_point deadline,
                                   GenerateHandler& handler) override {
    const auto at = deadline == std::chrono::system_clock::time_point::max()
                        ? Duration::max()
                        : std::chrono::duration_cast<Duration>(deadline.time_since_epoch());
    return std::make_shared<GenerateWire>(group_, request, at, handler);
  }
  void ContinueKv(v1::ContinueKvRequest) override { CHECK_MSG(false, "no group here takes KV"); }

 private:
  SimGroup& group_;
};

struct SimGroup::Life {
  struct Result {
    std::uint64_t step;
    std::vector<std::int32_t> token_ids;
  };

  std::unique_ptr<Engine> engine;  // null while loading
  std::unique_ptr<SimulatedGroup> ranks;
  BlockIndex cached_blocks;
  bool hung = false;
  bool executing = false;
  std::deque<Result> results;
  std::map<RequestId, std::shared_ptr<GenerateWire>> requests;
  std::vector<std::weak_ptr<WatchWire>> watchers;
  std::uint64_t planned = 0;
  std::uint64_t executed = 0;
};

SimGroup::SimGroup(VirtualTime& time, Oracle& oracle, const Options& options)
    : time_(time), oracle_(oracle), options_(options) {
  Restart();
}
SimGroup::~SimGroup() = default;

std::unique_ptr<LeaderClient> SimGroup::NewClient() { return std::make_unique<Client>(*this); }

bool SimGroup::IsHung() const { return life_ != nullptr && life_->hung; }

void SimGroup::InThisLife(Duration delay, std::function<void(Life&)> event) {
  time_.After(delay, [life = std::weak_ptr<Life>(life_), event = std::move(event)] {
    const std::shared_ptr<Life> alive = life.lock();
    if (alive != nullptr && !alive->hung) event(*alive);
  });
}

void SimGroup::Restart() {
  CHECK(life_ == nullptr);
  life_ = std::make_shared<Life>();
  InThisLife(Duration(0), [this](Life& life) { Heartbeat(life); });
  InThisLife(Duration(Draw(time_.random(), 1'000, 2'000'000)), [this](Life& life) {
    life.engine = *Engine::Create(options_.engine);
    life.ranks = std::make_unique<SimulatedGroup>(options_.engine, options_.model, oracle_);
    for (const auto& watcher : life.watchers) {
      if (const auto wire = watcher.lock()) wire->SendState(State(life));
    }
  });
}

void SimGroup::Kill() {
  CHECK(life_ != nullptr);
  ++num_deaths_;
  life_ = nullptr;
  for (const auto& wire : std::exchange(wires_, {})) {
    if (const auto open = wire.lock()) open->Break();
  }
}

void SimGroup::Hang() { life_->hung = true; }

bool SimGroup::Idle() const {
  if (life_ == nullptr || life_->engine == nullptr) return true;
  const EngineStats stats = life_->engine->Stats();
  return life_->requests.empty() && !life_->engine->HasWork() && life_->results.empty() &&
         life_->planned == life_->executed && stats.num_free_blocks == stats.num_blocks &&
         stats.num_running == 0 && stats.num_waiting == 0 &&
         stats.num_cached_blocks == life_->cached_blocks.size();
}

std::string SimGroup::Describe() const {
  if (life_ == nullptr) return "dead";
  if (life_->engine == nullptr) return "loading";
  const EngineStats stats = life_->engine->Stats();
  return fmt::format(
      "{}{} requests, {} running, {} waiting, {} of {} blocks free, {} of {} steps run",
      life_->hung ? "hung, " : "", life_->requests.size(), stats.num_running, stats.num_waiting,
      stats.num_free_blocks, stats.num_blocks, life_->executed, life_->planned);
}

v1::GroupState SimGroup::State(const Life& life) const {
  v1::GroupState state;
  v1::GroupInfo& group = *state.mutable_group();
  const bool ready = life.engine != nullptr;
  group.set_ready(ready);
  group.set_state(ready ? "ready" : "loading");
  group.set_max_model_len(options_.engine.max_model_len);
  state.set_vocab_size(options_.engine.vocab_size);
  if (!ready) return state;
  const EngineStats stats = life.engine->Stats();
  group.set_num_blocks(stats.num_blocks);
  group.set_num_free_blocks(stats.num_free_blocks);
  group.set_num_requests_running(stats.num_running);
  group.set_num_requests_waiting(stats.num_waiting);
  return state;
}

void SimGroup::WatchWire::Arrive() {
  Life& life = *group_.life_;
  life.watchers.push_back(std::static_pointer_cast<WatchWire>(shared_from_this()));
  SendState(group_.State(life));
}

void SimGroup::Heartbeat(Life& life) {
  std::erase_if(life.watchers, [](const auto& watcher) {
    const auto wire = watcher.lock();
    return wire == nullptr || wire->done();
  });
  for (const auto& watcher : life.watchers) watcher.lock()->SendState(State(life));
  InThisLife(kHeartbeat, [this](Life& again) { Heartbeat(again); });
}

void SimGroup::Accept(const std::shared_ptr<GenerateWire>& wire,
                      const v1::WorkerGenerateRequest& request) {
  Life& life = *life_;
  if (life.engine == nullptr) {
    wire->writer().Finish(WithReason(absl::UnavailableError("loading"), kReasonNotReady));
    return;
  }
  absl::StatusOr<EngineRequest> made =
      ToEngineRequest(request, {.vocab_size = options_.engine.vocab_size}, {}, wire->deadline());
  absl::Status status = made.status();
  if (status.ok()) status = CheckRequest(*made, life.engine->options());
  if (status.ok()) {
    made->id = RequestId{next_request_++};
    wire->id = made->id;
    oracle_.Add(*made);
    status = life.engine->Add(*std::move(made), time_.AbslNow());
  }
  if (!status.ok()) {
    wire->writer().Finish(absl::IsResourceExhausted(status) ? WithReason(status, kReasonOverloaded)
                                                            : status);
    return;
  }
  life.requests.emplace(wire->id, wire);
  PlanSteps(life);
}

void SimGroup::CancelRequest(RequestId id) {
  if (life_ == nullptr || life_->engine == nullptr || !life_->requests.contains(id)) return;
  // As the leader does: at the next turn of the engine, never inside of one.
  InThisLife(Duration(0), [this, id](Life& life) {
    life.engine->Cancel(id);
    PlanSteps(life);
  });
}

// As Leader::PlanSteps().
void SimGroup::PlanSteps(Life& life) {
  for (;;) {
    std::optional<StepResult> result;
    Life::Result oldest;
    if (!life.results.empty()) {
      oldest = std::move(life.results.front());
      life.results.pop_front();
      result = StepResult{.step = oldest.step, .token_ids = oldest.token_ids};
    }
    const StepPlan* plan = life.engine->Step(time_.AbslNow(), result);
    if (plan != nullptr) {
      life.ranks->Launch(*plan);
      ++life.planned;
      ++num_steps_;
    }
    life.cached_blocks.Apply(life.engine->TakeBlockChanges());
    DeliverEvents(life);
    if (plan == nullptr && !result.has_value()) break;
  }
  RunRanks(life);
  if (const absl::Time deadline = life.engine->NextDeadline(); deadline != absl::InfiniteFuture()) {
    const auto wait = absl::ToChronoMicroseconds(deadline - time_.AbslNow());
    InThisLife(std::max(Duration(0), wait), [this](Life& again) {
      if (again.engine->NextDeadline() <= time_.AbslNow()) PlanSteps(again);
    });
  }
}

void SimGroup::RunRanks(Life& life) {
  if (life.executing || life.planned == life.executed) return;
  life.executing = true;
  const Duration step_time(Draw(time_.random(), 100, options_.max_step_time.count()));
  InThisLife(step_time, [this](Life& again) {
    const StepResult result = again.ranks->Execute();
    ++again.executed;
    again.results.push_back({result.step, {result.token_ids.begin(), result.token_ids.end()}});
    again.executing = false;
    PlanSteps(again);
  });
}

void SimGroup::DeliverEvents(Life& life) {
  for (const TokenEvent& event : life.engine->TakeEvents()) {
    const auto at = life.requests.find(event.id);
    ASSERT_TRUE(at != life.requests.end()) << "news of a request that has ended";
    const std::shared_ptr<GenerateWire> wire = at->second;
    if (event.finish != FinishReason::kNone) {
      num_cached_tokens_ += event.num_cached_tokens;
      life.requests.erase(at);
    }
    switch (event.finish) {
      case FinishReason::kAborted:
        wire->writer().Finish(absl::CancelledError("cancelled"));
        break;
      case FinishReason::kDeadline:
        wire->writer().Finish(absl::DeadlineExceededError("the request's deadline has passed"));
        break;
      case FinishReason::kError:
        wire->writer().Finish(event.error);
        break;
      default:
        wire->writer().Write(ToResponse(event));
        if (event.finish != FinishReason::kNone) wire->writer().Finish(absl::OkStatus());
    }
  }
}

}  // namespace weft::sim
