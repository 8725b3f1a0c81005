// The router, groups and slow readers in virtual time: groups die, hang and come back, messages
// take their time, readers lag and leave. Whatever happens, every request ends with the tokens of
// the plain computation or with an error that has a cause, blocks return, and no step is lost.
//
// A failure prints its seed and commit. WEFT_SIM_SEED=n runs that seed alone, WEFT_SIM_SEEDS=n that
// many instead of 2,000.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "router/cluster.h"
#include "router/generate_call.h"
#include "router/request_registry.h"
#include "server/error_reason.h"
#include "spdlog/spdlog.h"
#include "tests/sim/sim_group.h"
#include "tests/sim/virtual_time.h"

namespace weft::sim {
namespace {

constexpr Duration kTick{50'000};
constexpr std::int64_t kSmallBuffer = 100;
constexpr std::chrono::milliseconds kShortQueueTimeout{500};
constexpr Duration kNoEndInSight = std::chrono::minutes(20);

// What all seeds together have seen; guards against a test that tests nothing.
struct Coverage {
  std::map<std::string, int> ends;  // by finish reason or error
  int deaths = 0;
  double replays = 0;
  std::uint64_t steps = 0;
  std::int64_t cached_tokens = 0;
};

// One client: its request, its reading, and what came of it.
class SimClient final : public StreamSink<v1::GenerateResponse> {
 public:
  struct Plan {
    v1::GenerateRequest request;
    Duration arrival{0};
    Duration read_time{0};  // of a message
    std::optional<Duration> leaves_after;
    std::optional<Duration> deadline_after;
  };

  SimClient(VirtualTime& time, const GenerateContext& context, Plan plan)
      : time_(time), context_(context), plan_(std::move(plan)) {
    time_.After(plan_.arrival, [this] { Start(); });
  }

  const Plan& plan() const { return plan_; }
  bool ended() const { return ended_; }
  const absl::Status& status() const { return status_; }
  Duration ended_at() const { return ended_at_; }
  // The client went away, or its deadline passed, before the end.
  bool left() const { return left_; }
  const std::vector<std::int32_t>& tokens(std::int32_t index) { return tokens_[index]; }
  v1::FinishReason finish(std::int32_t index) { return finish_[index]; }

 private:
  using Writer = StreamWriter<v1::GenerateResponse>;

  void Start() {
    const Duration deadline =
        plan_.deadline_after ? time_.now() + *plan_.deadline_after : Duration::max();
    auto call = std::make_shared<GenerateCall>(context_, plan_.request,
                                               plan_.deadline_after
                                                   ? time_.SystemTime(deadline)
                                                   : std::chrono::system_clock::time_point::max());
    StreamWriterOptions<v1::GenerateResponse> options = ResponseStreamOptions(context_);
    options.on_cancel = [weak = std::weak_ptr<GenerateCall>(call)] {
      if (const auto alive = weak.lock()) alive->End(absl::CancelledError("cancelled"));
    };
    writer_ = std::make_shared<Writer>(*this, std::move(options));
    if (plan_.leaves_after) time_.After(*plan_.leaves_after, [this] { Leave(); });
    if (plan_.deadline_after) time_.After(*plan_.deadline_after, [this] { Leave(); });
    call->Start(writer_);
  }
  void Leave() {
    if (ended_) return;
    left_ = true;
    writer_->OnCancel();
  }

  void StartWrite(const v1::GenerateResponse& message) override {
    EXPECT_FALSE(ended_) << "a message after the end";
    std::vector<std::int32_t>& tokens = tokens_[message.index()];
    EXPECT_EQ(finish_[message.index()], v1::FINISH_REASON_UNSPECIFIED)
        << "a message after the last";
    tokens.insert(tokens.end(), message.token_ids().begin(), message.token_ids().end());
    finish_[message.index()] = message.finish_reason();
    time_.After(plan_.read_time, [this] { writer_->OnWriteDone(true); });
  }
  void Finish(const absl::Status& status) override {
    EXPECT_FALSE(ended_) << "two ends";
    ended_ = true;
    ended_at_ = time_.now();
    status_ = status;
    time_.After(Duration(1), [this] { writer_->OnDone(); });
  }

  VirtualTime& time_;
  const GenerateContext& context_;
  const Plan plan_;
  std::shared_ptr<Writer> writer_;
  std::map<std::int32_t, std::vector<std::int32_t>> tokens_;
  std::map<std::int32_t, v1::FinishReason> finish_;
  bool ended_ = false;
  bool left_ = false;
  Duration ended_at_{0};
  absl::Status status_;
};

class Simulation {
 public:
  explicit Simulation(std::uint64_t seed) : time_(seed), random_(time_.random()), oracle_(model_) {
    DrawGroups();
    DrawRouter();
    DrawClients();
    DrawFaults();
  }

  void Run(Coverage& coverage) {
    time_.After(Duration(0), [this] { Tick(); });
    while (!Done()) {
      if (!time_.RunOne() || time_.now() > kNoEndInSight) {
        ADD_FAILURE() << "no end in sight\n" << Describe();
      }
      // What is in flight holds what would be destroyed.
      if (testing::Test::HasFailure()) std::abort();
    }
    for (const auto& client : clients_) CheckEnd(*client, coverage);
    EXPECT_TRUE(registry_.All().empty());
    coverage.replays += metric_registry_.Get(metrics::kRouterReplays).Value();
    over_ = true;
    for (const auto& group : groups_) {
      coverage.deaths += group->num_deaths();
      coverage.steps += group->num_steps();
      coverage.cached_tokens += group->num_cached_tokens();
      if (group->alive()) group->Kill();  // its connections go, so that the cluster can
    }
    while (time_.RunOne()) {
    }
    cluster_ = nullptr;
  }

 private:
  void DrawGroups() {
    SimGroup::Options options;
    options.model = model_;
    EngineOptions& engine = options.engine;
    engine.vocab_size = model_.vocab_size;
    engine.block_size = static_cast<std::int32_t>(Draw(random_, 1, 8));
    engine.max_model_len = 48;
    engine.num_blocks =
        static_cast<std::int32_t>(48 / engine.block_size + 1 + Draw(random_, 0, 30));
    engine.max_num_seqs = static_cast<std::int32_t>(Draw(random_, 1, 8));
    engine.max_num_batched_tokens = static_cast<std::int32_t>(Draw(random_, 1, 32));
    engine.max_num_waiting = OneIn(random_, 5) ? 2 : 1000;
    engine.async_scheduling = OneIn(random_, 2);
    engine.enable_prefix_caching = !OneIn(random_, 4);
    options.max_delay = Duration(OneIn(random_, 4) ? 400'000 : 5'000);
    const std::int64_t num_groups = Draw(random_, 1, 3);
    for (std::int64_t i = 0; i < num_groups; ++i) {
      groups_.push_back(std::make_unique<SimGroup>(time_, oracle_, options));
    }
  }

  void DrawRouter() {
    ClusterOptions options;
    for (std::size_t i = 0; i < groups_.size(); ++i) options.addresses.push_back(std::to_string(i));
    options.link.connect = [this](const std::string& address) {
      return groups_[std::stoul(address)]->NewClient();
    };
    options.link.now = [this] { return time_.SteadyNow(); };
    options.system_now = [this] { return time_.SystemTime(time_.now()); };
    options.ticks_itself = false;
    options.max_waiting = OneIn(random_, 5) ? 3 : 1000;
    if (OneIn(random_, 3)) options.queue_timeout = kShortQueueTimeout;
    queue_timeout_ = options.queue_timeout;
    cluster_ = std::make_unique<Cluster>(std::move(options));
    context_.cluster = cluster_.get();
    context_.registry = &registry_;
    context_.metrics = &metrics_;
    if (OneIn(random_, 3)) context_.max_replays = 0;
    if (OneIn(random_, 2)) context_.max_stream_buffer_bytes = kSmallBuffer;
  }

  void DrawClients() {
    const std::int64_t num_clients = Draw(random_, 1, 20);
    for (std::int64_t i = 1; i <= num_clients; ++i) {
      SimClient::Plan plan;
      plan.request.set_request_id(fmt::format("request {}", i));
      // Some begin alike.
      const std::int64_t length = Draw(random_, 1, 40);
      const std::int64_t alike = OneIn(random_, 2) ? Draw(random_, 0, length) : 0;
      for (std::int64_t t = 0; t < length; ++t) {
        plan.request.mutable_token_ids()->add_ids(
            t < alike ? static_cast<std::int32_t>(t % model_.vocab_size) : DrawToken());
      }
      if (OneIn(random_, 4)) plan.request.set_cache_salt("salt");
      v1::SamplingParams& sampling = *plan.request.mutable_sampling();
      sampling.set_seed(static_cast<std::uint64_t>(i) * 1000);
      sampling.set_max_tokens(static_cast<std::int32_t>(Draw(random_, 1, 30)));
      if (OneIn(random_, 2)) sampling.add_stop_token_ids(DrawToken());
      if (OneIn(random_, 4)) sampling.set_n(static_cast<std::int32_t>(Draw(random_, 2, 4)));
      plan.request.set_priority(static_cast<std::int32_t>(Draw(random_, 0, 1)));
      plan.arrival = Duration(Draw(random_, 0, 6'000'000));
      plan.read_time = Duration(OneIn(random_, 5) ? Draw(random_, 100'000, 3'000'000)
                                                  : Draw(random_, 10, 5'000));
      if (OneIn(random_, 6)) plan.leaves_after = Duration(Draw(random_, 0, 3'000'000));
      if (OneIn(random_, 6)) plan.deadline_after = Duration(Draw(random_, 1'000, 5'000'000));
      clients_.push_back(std::make_unique<SimClient>(time_, context_, std::move(plan)));
    }
  }

  void DrawFaults() {
    const std::int64_t num_faults = std::max<std::int64_t>(0, Draw(random_, -1, 4));
    for (std::int64_t i = 0; i < num_faults; ++i) {
      SimGroup& group = *groups_[Draw(random_, 0, static_cast<std::int64_t>(groups_.size()) - 1)];
      const Duration at(Draw(random_, 0, 8'000'000));
      const Duration hangs(OneIn(random_, 2) ? 0 : Draw(random_, 1, 30'000'000));
      const Duration down(Draw(random_, 10'000, 4'000'000));
      time_.After(at, [this, &group, hangs, down] {
        if (over_ || !group.alive() || group.IsHung()) return;  // one fault at a time
        fault_times_.push_back(time_.now());
        if (hangs > Duration(0)) group.Hang();
        time_.After(hangs, [this, &group, down] {
          if (over_) return;
          group.Kill();
          time_.After(down, [this, &group] {
            if (!over_) group.Restart();
          });
        });
      });
    }
  }

  std::int32_t DrawToken() {
    return static_cast<std::int32_t>(Draw(random_, 0, model_.vocab_size - 1));
  }

  void Tick() {
    if (over_) return;
    cluster_->Tick(time_.SteadyNow());
    time_.After(kTick, [this] { Tick(); });
  }

  bool Done() const {
    for (const auto& client : clients_) {
      if (!client->ended()) return false;
    }
    for (const auto& group : groups_) {
      if (!group->Idle() || group->IsHung()) return false;
    }
    return true;
  }

  std::string Describe() const {
    std::string text = fmt::format("at {} us\n", time_.now().count());
    for (const auto& group : groups_) text += "group: " + group->Describe() + "\n";
    for (const auto& client : clients_) {
      if (!client->ended()) text += client->plan().request.request_id() + " has not ended\n";
    }
    return text;
  }

  // What sample `index` gives if nothing goes wrong.
  std::pair<std::vector<std::int32_t>, v1::FinishReason> Expected(
      const v1::GenerateRequest& request, std::int32_t index) const {
    const v1::SamplingParams& sampling = request.sampling();
    std::vector<std::int32_t> tokens(request.token_ids().ids().begin(),
                                     request.token_ids().ids().end());
    std::vector<std::int32_t> output;
    for (;;) {
      const std::int32_t token = model_.NextToken(sampling.seed() + index, tokens);
      tokens.push_back(token);
      output.push_back(token);
      const auto& stops = sampling.stop_token_ids();
      if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
        return {output, v1::FINISH_REASON_STOP};
      }
      if (static_cast<std::int32_t>(output.size()) == sampling.max_tokens() ||
          tokens.size() == 48) {
        return {output, v1::FINISH_REASON_LENGTH};
      }
    }
  }

  void CheckEnd(SimClient& client, Coverage& coverage) {
    const v1::GenerateRequest& request = client.plan().request;
    SCOPED_TRACE(fmt::format("{}: {}", request.request_id(), client.status().ToString()));
    for (std::int32_t i = 0; i < std::max(1, request.sampling().n()); ++i) {
      const auto [tokens, finish] = Expected(request, i);
      const std::vector<std::int32_t>& got = client.tokens(i);
      ASSERT_LE(got.size(), tokens.size());
      EXPECT_TRUE(std::equal(got.begin(), got.end(), tokens.begin())) << "sample " << i;
      if (!client.status().ok()) continue;
      EXPECT_EQ(got.size(), tokens.size()) << "sample " << i;
      EXPECT_EQ(client.finish(i), finish) << "sample " << i;
      ++coverage.ends[v1::FinishReason_Name(finish)];
    }
    if (client.status().ok()) return;
    const std::string reason = ReasonOf(client.status());
    ++coverage.ends[reason.empty() ? std::string(absl::StatusCodeToString(client.status().code()))
                                   : reason];
    EXPECT_TRUE(HasCause(client, reason)) << "nothing explains that error";
  }

  bool HasCause(const SimClient& client, const std::string& reason) const {
    if (client.left()) return true;
    // Routers and leaders keep it, too.
    if (absl::IsDeadlineExceeded(client.status())) return client.plan().deadline_after.has_value();
    int deaths = 0;
    for (const auto& group : groups_) deaths += group->num_deaths();
    const bool died = deaths > 0;
    // It went on elsewhere as often as it may.
    if (reason == kReasonRankLost) {
      return deaths > static_cast<int>(context_.max_replays) && LostInTime(client);
    }
    // Loading takes up to two seconds.
    if (reason == kReasonNotReady) return died || queue_timeout_ == kShortQueueTimeout;
    if (reason == kReasonOverloaded) return true;  // queues are drawn short
    if (reason == kReasonSlowReader) return context_.max_stream_buffer_bytes == kSmallBuffer;
    return false;
  }

  // A lost group's streams end within 5 s of the fault, for readers that keep up.
  bool LostInTime(const SimClient& client) const {
    if (client.plan().read_time >= Duration(100'000)) return true;
    return std::any_of(fault_times_.begin(), fault_times_.end(), [&](Duration fault) {
      const Duration since = client.ended_at() - fault;
      return since >= Duration(0) && since <= std::chrono::seconds(5);
    });
  }

  const SimulatedModel model_;
  VirtualTime time_;
  Random& random_;
  Oracle oracle_;
  std::vector<std::unique_ptr<SimGroup>> groups_;
  RequestRegistry registry_{1000};
  MetricRegistry metric_registry_{"simulated"};
  RouterMetrics metrics_{metric_registry_};
  GenerateContext context_;
  std::chrono::milliseconds queue_timeout_{0};
  std::unique_ptr<Cluster> cluster_;
  std::vector<std::unique_ptr<SimClient>> clients_;
  std::vector<Duration> fault_times_;
  bool over_ = false;  // no more faults, restarts and ticks
};

std::string Commit() {
  std::string commit;
  std::FILE* git = popen("git -C '" WEFT_SOURCE_DIR "' describe --always --dirty 2>/dev/null", "r");
  if (git == nullptr) return commit;
  for (int c; (c = std::fgetc(git)) != EOF && c != '\n';) commit += static_cast<char>(c);
  pclose(git);
  return commit;
}

std::uint64_t Number(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

TEST(SimTest, EveryRequestEndsBlocksReturnAndNoStepIsLost) {
  spdlog::set_level(spdlog::level::off);
  const bool one = std::getenv("WEFT_SIM_SEED") != nullptr;
  const std::uint64_t first = Number("WEFT_SIM_SEED", 0);
  const std::uint64_t count = one ? 1 : Number("WEFT_SIM_SEEDS", 2000);
  const std::string commit = Commit();
  Coverage coverage;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE(fmt::format("WEFT_SIM_SEED={} at commit {}", seed, commit));
    Simulation(seed).Run(coverage);
    if (HasFailure()) return;
  }
  std::string ends;
  for (const auto& [name, times] : coverage.ends) ends += fmt::format(" {} {}", name, times);
  std::printf("%llu seeds, %llu steps, %d deaths, %.0f replays; ends:%s\n",
              static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(coverage.steps), coverage.deaths, coverage.replays,
              ends.c_str());
  if (one) return;
  EXPECT_GT(coverage.replays, 0);
  EXPECT_GT(coverage.cached_tokens, 0) << "no prompt was found in a prefix cache";
  for (const std::string_view seen :
       {std::string_view("FINISH_REASON_STOP"), std::string_view("FINISH_REASON_LENGTH"),
        std::string_view("CANCELLED"), kReasonRankLost, kReasonNotReady, kReasonOverloaded,
        kReasonSlowReader}) {
    EXPECT_GT(coverage.ends[std::string(seen)], 0) << seen;
  }
}

}  // namespace
}  // namespace weft::sim
