#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "client/batch.h"
#include "client/bench_load.h"
#include "client/bench_sessions.h"
#include "client/bench_stats.h"
#include "client/client_run.h"
#include "client/commands.h"
#include "client/prompts_file.h"
#include "client/server_info.h"
#include "fmt/format.h"
#include "grpcpp/channel.h"
#include "server/base/log.h"
#include "server/base/output.h"
#include "server/base/status_macros.h"
#include "server/grpc_server.h"

namespace weft {
namespace {

constexpr std::int32_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();
// Random prompts are all made before the first is sent: a GiB of token ids.
constexpr std::int64_t kMaxRandomTokens = std::int64_t{1} << 28;
constexpr std::int32_t kMaxPrompts = 10'000'000;
constexpr std::int32_t kDefaultPrompts = 100;
// Groups tell routers how they are every 500 ms: what a run did is known after that.
constexpr absl::Duration kStateInterval = absl::Milliseconds(700);

struct BenchFlags {
  std::string dataset = "random";
  AgenticLoad agentic;
  std::optional<std::string> prompts_file;
  std::optional<std::int32_t> num_prompts;
  std::int32_t random_input_len = 1024;
  std::int32_t random_output_len = 128;
  double random_range_ratio = 0;
  double temperature = 0;
  std::uint64_t seed = 0;

  std::optional<std::int32_t> max_concurrency;
  std::optional<double> request_rate;
  double burstiness = 1;
  std::int32_t num_warmups = 1;

  std::string format = "text";

  void AddTo(OptionParser& parser);
  // INVALID_ARGUMENT for flags that do not go together.
  absl::Status Check() const;
  BenchLoad Load() const { return {max_concurrency, request_rate, burstiness}; }
};

void BenchFlags::AddTo(OptionParser& parser) {
  parser.Group("Prompts");
  parser.AddChoice("--dataset", &dataset, {"random", "agentic"},
                   "random: prompts that have nothing in common; agentic: sessions whose prompts "
                   "grow turn by turn");
  parser.Add("--num-prompts", &num_prompts,
             "Requests to send; 100, or those of --prompts-file, which are sent again if need be",
             Range(1, kMaxPrompts));
  parser.Add("--random-input-len", &random_input_len, "Tokens of a random prompt",
             Range(1, kMaxInt32));
  parser.Add("--random-output-len", &random_output_len, "Tokens to generate for one",
             Range(1, kMaxInt32));
  parser.Add("--random-range-ratio", &random_range_ratio,
             "How far both lengths vary, as a part of them", Range(0, 1));
  parser.Add("--prompts-file", &prompts_file,
             "Instead of random ones: a JSON object per line, as weft generate reads it");
  parser.Add("--agentic-sessions", &agentic.num_sessions, "Sessions", Range(1, kMaxInt32));
  parser.Add("--agentic-turns", &agentic.num_turns, "Requests of one, one after the other",
             Range(1, kMaxInt32));
  parser.Add("--agentic-prefix-len", &agentic.prefix_len, "Tokens that all sessions begin with",
             Range(0, kMaxInt32));
  parser.Add("--agentic-session-len", &agentic.session_len,
             "Tokens of its own behind those that a session begins with", Range(0, kMaxInt32));
  parser.Add("--agentic-turn-len", &agentic.turn_len, "Tokens that a turn adds to the prompt",
             Range(1, kMaxInt32));
  parser.Add("--agentic-output-len", &agentic.output_len, "Tokens to generate in a turn",
             Range(1, kMaxInt32));
  parser.Add("--temperature", &temperature, "Of requests that do not say", Range(0, 100));
  parser.Add("--seed", &seed, "Of prompts and arrivals");
  parser.Group("Load");
  parser.Add("--max-concurrency", &max_concurrency,
             "Requests, or sessions, under way at a time; default: all", Range(1, kMaxInt32));
  parser.Add(
      "--request-rate", &request_rate,
      "Requests a second, by a Poisson process; default: as fast as --max-concurrency allows",
      Range(1e-6, 1e6));
  parser.Add("--burstiness", &burstiness,
             "Shape of the gamma-distributed gaps; 1 is Poisson, below is burstier",
             Range(1e-3, 1e6));
  parser.Add("--num-warmups", &num_warmups, "Requests sent before, one by one, and not counted",
             Range(0, kMaxInt32));
  parser.Group("Output");
  parser.AddChoice("--format", &format, {"text", "json"}, "text: the table of vllm bench serve");
}

absl::Status BenchFlags::Check() const {
  const std::int64_t random_tokens =
      std::int64_t{num_prompts.value_or(kDefaultPrompts)} * random_input_len;
  if (dataset == "random" && !prompts_file && random_tokens > kMaxRandomTokens) {
    return absl::InvalidArgumentError(
        fmt::format("--num-prompts times --random-input-len are {} tokens; at most {} are allowed",
                    random_tokens, kMaxRandomTokens));
  }
  if (dataset != "agentic" || (!request_rate && !prompts_file)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{} does not go with --dataset=agentic, whose turns wait for each other",
                  request_rate ? "--request-rate" : "--prompts-file"));
}

// Those of the file; with random prompts none yet: they need the server's vocabulary.
absl::StatusOr<std::vector<v1::GenerateRequest>> FilePrompts(const BenchFlags& flags) {
  std::vector<v1::GenerateRequest> requests;
  if (!flags.prompts_file) return requests;
  v1::SamplingParams defaults;
  defaults.set_temperature(static_cast<float>(flags.temperature));
  ASSIGN_OR_RETURN(requests, ReadPromptsFile(*flags.prompts_file, defaults));
  const auto num_in_file = requests.size();
  const auto wanted =
      static_cast<std::size_t>(flags.num_prompts.value_or(static_cast<std::int32_t>(num_in_file)));
  requests.resize(std::min(wanted, num_in_file));
  for (std::size_t i = 0; requests.size() < wanted; ++i) requests.push_back(requests[i]);
  return requests;
}

BenchSample SampleOf(const Completion& completion, const RequestTiming& timing) {
  BenchSample sample = {.ok = completion.status.ok() && !timing.tokens.empty(),
                        .input_tokens = completion.usage.prompt_tokens(),
                        .output_tokens = completion.usage.completion_tokens(),
                        .cached_tokens = completion.usage.cached_tokens()};
  if (!sample.ok) return sample;
  sample.time_to_first_token = timing.tokens.front() - timing.start;
  sample.latency = timing.tokens.back() - timing.start;
  for (std::size_t i = 1; i < timing.tokens.size(); ++i) {
    sample.inter_token.push_back(timing.tokens[i] - timing.tokens[i - 1]);
  }
  return sample;
}

constexpr absl::Duration kTellInterval = absl::Seconds(10);

// What came of the load.
struct BenchResult {
  std::vector<BenchSample> samples;
  absl::Duration wall_time;
  std::string first_error;
  absl::Time last_told = absl::Now();

  void Add(const Completion& completion, const RequestTiming& timing) {
    samples.push_back(SampleOf(completion, timing));
    if (const absl::Time now = absl::Now(); now - last_told > kTellInterval) {
      last_told = now;
      PrintErr("weft bench: {} requests have ended\n", samples.size());
    }
    if (completion.status.ok() || !first_error.empty()) return;
    first_error = std::string(completion.status.message());
  }
};

// One by one, before anything is measured.
void WarmUp(v1::Inference::Stub& stub, const BenchFlags& flags, v1::GenerateRequest request) {
  request.set_cache_salt("warm-up");  // what is measured finds nothing of it
  RunBatch(stub, std::vector(static_cast<std::size_t>(flags.num_warmups), request),
           {.concurrency = 1});
}

BenchResult RunRequests(v1::Inference::Stub& stub, const BenchFlags& flags,
                        const std::string& model, std::vector<v1::GenerateRequest> requests) {
  if (requests.empty()) {
    requests = MakeRandomPrompts({.num_prompts = flags.num_prompts.value_or(kDefaultPrompts),
                                  .input_len = flags.random_input_len,
                                  .output_len = flags.random_output_len,
                                  .range_ratio = flags.random_range_ratio,
                                  .vocab_size = FetchVocabSize(stub, absl::Seconds(5)),
                                  .seed = flags.seed});
    for (v1::GenerateRequest& request : requests) {
      request.mutable_sampling()->set_temperature(static_cast<float>(flags.temperature));
    }
  }
  for (v1::GenerateRequest& request : requests) request.set_model(model);
  WarmUp(stub, flags, requests[0]);

  BenchResult result;
  BatchOptions options = {
      .concurrency = static_cast<std::size_t>(flags.max_concurrency.value_or(kMaxInt32)),
      .send_at = MakeArrivals(requests.size(), flags.request_rate, flags.burstiness, flags.seed)};
  options.on_completion = [&](std::size_t, const Completion& completion,
                              const RequestTiming& timing) { result.Add(completion, timing); };
  result.wall_time = RunBatch(stub, requests, options).wall_time;
  return result;
}

BenchResult RunAgentic(v1::Inference::Stub& stub, const BenchFlags& flags,
                       const std::string& model) {
  AgenticLoad load = flags.agentic;
  load.seed = flags.seed;
  load.vocab_size = FetchVocabSize(stub, absl::Seconds(5));
  const auto prepare = [&](v1::GenerateRequest& request) {
    request.set_model(model);
    request.mutable_sampling()->set_temperature(static_cast<float>(flags.temperature));
  };
  v1::GenerateRequest warmup = AgenticSession(load, 0).NextTurn();
  prepare(warmup);
  WarmUp(stub, flags, warmup);

  BenchResult result;
  result.wall_time = RunSessions(stub, load, flags.max_concurrency.value_or(kMaxInt32), prepare,
                                 [&](const Completion& completion, const RequestTiming& timing) {
                                   result.Add(completion, timing);
                                 });
  return result;
}

// Totals of all groups; zeros when the server does not tell.
BenchServer FetchTotals(v1::Inference::Stub& stub) {
  BenchServer totals;
  const auto info = FetchServerInfo(stub, absl::Seconds(5));
  if (!info.ok()) return totals;
  for (const v1::GroupInfo& group : info->groups()) {
    totals.evictions += static_cast<std::int64_t>(group.prefix_cache_evictions());
    totals.preemptions += static_cast<std::int64_t>(group.num_preemptions());
    totals.peak_running += group.peak_requests_running();
  }
  return totals;
}

// Sends the load and prints the result: a ClientFunction.
int SendAndMeasure(const std::shared_ptr<grpc::Channel>& channel, const BenchFlags& flags,
                   const std::string& model, std::vector<v1::GenerateRequest> requests,
                   const std::atomic<bool>& cancelled) {
  const auto stub = v1::Inference::NewStub(channel);
  const BenchServer before = FetchTotals(*stub);
  const BenchResult result = flags.dataset == "agentic"
                                 ? RunAgentic(*stub, flags, model)
                                 : RunRequests(*stub, flags, model, std::move(requests));
  if (cancelled) return 1;
  absl::SleepFor(kStateInterval);
  BenchServer server = FetchTotals(*stub);
  server.evictions -= before.evictions;
  server.preemptions -= before.preemptions;
  const BenchSummary summary = Summarize(result.samples, result.wall_time);
  PrintOut(flags.format == "json" ? BenchToJson(summary, flags.Load(), server) + "\n"
                                  : FormatBenchTable(summary, flags.Load(), server));
  if (summary.failed == 0) return 0;
  PrintErr("weft bench: {} of {} requests failed; the first: {}\n", summary.failed,
           result.samples.size(), result.first_error);
  return 1;
}

}  // namespace

int BenchCommand(int argc, char** argv) {
  GroupFlags group;
  group.log_level = "warn";
  ServerFlags server;
  BenchFlags flags;
  OptionParser parser("weft bench",
                      "Measures a server under load: closed loop with --max-concurrency, open loop "
                      "with --request-rate. Without --address, a router and a group of ranks are "
                      "started for this call and stopped after it.");
  server.AddTo(parser);
  flags.AddTo(parser);
  group.AddTo(parser);
  if (const std::optional<int> exit_code = parser.Parse(argc, argv)) return *exit_code;
  InitLog("weft", group.log_level);
  InitGrpcLog();

  absl::StatusOr<std::vector<v1::GenerateRequest>> requests = FilePrompts(flags);
  absl::Status status = requests.status();
  if (status.ok()) status = flags.Check();
  const absl::StatusOr<GrpcChannelOptions> channel_options =
      CheckServerFlags(server, group, parser);
  status.Update(channel_options.status());
  if (!status.ok()) {
    PrintErr("weft bench: {}\n", std::string(status.message()));
    return kExitConfigError;
  }
  return RunClient(
      server, group, parser, *channel_options,
      [&](const std::shared_ptr<grpc::Channel>& channel, const std::atomic<bool>& cancelled) {
        return SendAndMeasure(channel, flags, group.served_model_name, *requests, cancelled);
      });
}

}  // namespace weft
