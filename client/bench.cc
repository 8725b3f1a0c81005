#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/batch.h"
#include "client/bench_load.h"
#include "client/bench_stats.h"
#include "client/client_run.h"
#include "client/commands.h"
#include "client/output.h"
#include "client/prompts_file.h"
#include "client/server_info.h"
#include "fmt/format.h"
#include "grpcpp/channel.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/grpc_server.h"

namespace weft {
namespace {

constexpr std::int32_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

struct BenchFlags {
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
  BenchLoad Load() const { return {max_concurrency, request_rate, burstiness}; }
};

void BenchFlags::AddTo(OptionParser& parser) {
  parser.Group("Prompts");
  parser.Add("--num-prompts", &num_prompts,
             "Requests to send; 100, or those of --prompts-file, which are sent again if need be",
             Range(1, kMaxInt32));
  parser.Add("--random-input-len", &random_input_len, "Tokens of a random prompt",
             Range(1, kMaxInt32));
  parser.Add("--random-output-len", &random_output_len, "Tokens to generate for one",
             Range(1, kMaxInt32));
  parser.Add("--random-range-ratio", &random_range_ratio,
             "How far both lengths vary, as a part of them", Range(0, 1));
  parser.Add("--prompts-file", &prompts_file,
             "Instead of random ones: a JSON object per line, as weft generate reads it");
  parser.Add("--temperature", &temperature, "Of requests that do not say", Range(0, 100));
  parser.Add("--seed", &seed, "Of prompts and arrivals");
  parser.Group("Load");
  parser.Add("--max-concurrency", &max_concurrency, "Requests under way at a time; default: all",
             Range(1, kMaxInt32));
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
                        .output_tokens = completion.usage.completion_tokens()};
  if (!sample.ok) return sample;
  sample.time_to_first_token = timing.tokens.front() - timing.start;
  sample.latency = timing.tokens.back() - timing.start;
  for (std::size_t i = 1; i < timing.tokens.size(); ++i) {
    sample.inter_token.push_back(timing.tokens[i] - timing.tokens[i - 1]);
  }
  return sample;
}

// Sends the load and prints the result: a ClientFunction.
int SendAndMeasure(const std::string& address, const BenchFlags& flags, const std::string& model,
                   std::vector<v1::GenerateRequest> requests, const std::atomic<bool>& cancelled) {
  const auto stub = v1::Inference::NewStub(NewGrpcChannel(address));
  if (requests.empty()) {
    requests = MakeRandomPrompts({.num_prompts = flags.num_prompts.value_or(100),
                                  .input_len = flags.random_input_len,
                                  .output_len = flags.random_output_len,
                                  .range_ratio = flags.random_range_ratio,
                                  .vocab_size = FetchVocabSize(*stub, absl::Seconds(5)),
                                  .seed = flags.seed});
    for (v1::GenerateRequest& request : requests) {
      request.mutable_sampling()->set_temperature(static_cast<float>(flags.temperature));
    }
  }
  for (v1::GenerateRequest& request : requests) request.set_model(model);

  std::string first_error;
  const auto keep_error = [&](const Completion& completion) {
    if (completion.status.ok() || !first_error.empty()) return;
    first_error = std::string(completion.status.message());
  };
  const std::vector<v1::GenerateRequest> warmups(static_cast<std::size_t>(flags.num_warmups),
                                                 requests[0]);
  RunBatch(*stub, warmups, {.concurrency = 1});

  std::vector<BenchSample> samples;
  BatchOptions options = {
      .concurrency = static_cast<std::size_t>(flags.max_concurrency.value_or(kMaxInt32)),
      .send_at = MakeArrivals(requests.size(), flags.request_rate, flags.burstiness, flags.seed)};
  options.on_completion = [&](std::size_t, const Completion& completion,
                              const RequestTiming& timing) {
    samples.push_back(SampleOf(completion, timing));
    keep_error(completion);
  };
  const BatchStats stats = RunBatch(*stub, requests, options);
  if (cancelled) return 1;
  const BenchSummary summary = Summarize(samples, stats.wall_time);
  PrintOut(flags.format == "json" ? BenchToJson(summary, flags.Load()) + "\n"
                                  : FormatBenchTable(summary, flags.Load()));
  if (summary.failed == 0) return 0;
  fmt::print(stderr, "weft bench: {} of {} requests failed; the first: {}\n", summary.failed,
             requests.size(), first_error);
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
  if (status.ok()) status = CheckServerFlags(server, group, parser);
  if (!status.ok()) {
    fmt::print(stderr, "weft bench: {}\n", std::string(status.message()));
    return kExitConfigError;
  }
  return RunClient(
      server, group, parser, [&](const std::string& address, const std::atomic<bool>& cancelled) {
        return SendAndMeasure(address, flags, group.served_model_name, *requests, cancelled);
      });
}

}  // namespace weft
