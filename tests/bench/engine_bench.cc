// Speed of the whole engine on one model, by the clock of whoever waits for tokens: one rank in
// this process with the real leader, scheduler, plans, runner and sampler, without gRPC. Runs one
// case and prints it as one line of JSON; scripts/bench_peer.sh runs it beside a peer.
// --tokens 1 measures prefill (prompt tokens until the first token), more measures decode: tokens
// while every request is decoding. Many requests start while others are still in their prompts,
// although these are in the prefix cache: give --tokens enough. The result is the median try;
// "between_steps" is the share of all tries' time in which no step ran.

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/time/clock.h"
#include "absl/types/span.h"
#include "fmt/format.h"
#include "kernels/device/cpu_target.h"
#include "nlohmann/json.hpp"
#include "server/base/check.h"
#include "tests/bench/machine_limits.h"
#include "tests/worker/local_group.h"
#include "worker/model/model_layout.h"

namespace weft {
namespace {

struct BenchOptions {
  std::string model_dir;
  std::string dtype = "float16";
  std::string quantization = "none";
  int threads = 2;
  int batch = 1;
  int prompt_tokens = 512;
  int max_tokens = 1;
  float temperature = 0;
  int tries = 3;
  int max_num_batched_tokens = 512;
  int max_model_len = 2048;
};

// When the tokens of one request came.
class TimingSink final : public TokenSink {
 public:
  explicit TimingSink(int max_tokens) { times_.reserve(static_cast<std::size_t>(max_tokens)); }

  void OnEvent(const TokenEvent& event) override {
    CHECK_MSG(event.error.ok(), event.error.ToString());
    MutexLock lock(mutex_);
    if (event.token_id.has_value()) times_.push_back(absl::Now());
    if (event.finish == FinishReason::kNone) return;
    ended_ = true;
    changed_.NotifyAll();
  }
  void OnRefused(const absl::Status& status) override { CHECK_MSG(false, status.ToString()); }

  void Wait() {
    MutexLock lock(mutex_);
    while (!ended_) changed_.Wait(mutex_);
  }
  // Of each token. After Wait().
  absl::Span<const absl::Time> times() const ABSL_NO_THREAD_SAFETY_ANALYSIS { return times_; }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<absl::Time> times_ ABSL_GUARDED_BY(mutex_);
};

EngineRequest RandomRequest(const BenchOptions& options, std::int32_t vocab_size, unsigned seed) {
  std::minstd_rand rng(seed);
  std::uniform_int_distribution<std::int32_t> uniform(0, vocab_size - 1);
  EngineRequest request;
  for (int i = 0; i < options.prompt_tokens; ++i) {
    request.prompt_token_ids.push_back(uniform(rng));
  }
  request.max_tokens = options.max_tokens;
  request.ignore_eos = true;
  request.sampling = {.temperature = options.temperature, .seed = seed};
  return request;
}

// Of all tries.
struct Clock {
  absl::Duration all;       // from the first request on until the last has ended
  absl::Duration in_steps;  // of that
};

// Tokens per second of one try.
double RunOnce(const BenchOptions& options, LocalGroup& group, unsigned seed, Clock& clock) {
  std::vector<std::shared_ptr<TimingSink>> sinks;
  std::vector<EngineRequest> requests;
  const std::int32_t vocab_size = group.model(0).config.vocab_size;
  for (int i = 0; i < options.batch; ++i) {
    requests.push_back(RandomRequest(options, vocab_size, seed * 1000 + i + 1));
    sinks.push_back(std::make_shared<TimingSink>(options.max_tokens));
  }
  const absl::Duration steps_before = group.progress(0).step_time();
  const absl::Time start = absl::Now();
  for (int i = 0; i < options.batch; ++i) {
    const auto id = group.leader().Submit(std::move(requests[i]), sinks[i]);
    CHECK_MSG(id.ok(), id.status().ToString());
  }
  absl::Time all_started = start;
  absl::Time first_ended = absl::InfiniteFuture();
  absl::Time all_ended = start;
  for (const auto& sink : sinks) {
    sink->Wait();
    all_started = std::max(all_started, sink->times().front());
    first_ended = std::min(first_ended, sink->times().back());
    all_ended = std::max(all_ended, sink->times().back());
  }
  clock.all += all_ended - start;
  clock.in_steps += group.progress(0).step_time() - steps_before;
  if (options.max_tokens == 1) {
    return options.batch * options.prompt_tokens / absl::ToDoubleSeconds(all_started - start);
  }
  std::int64_t tokens = 0;
  for (const auto& sink : sinks) {
    for (const absl::Time time : sink->times()) tokens += time > all_started && time <= first_ended;
  }
  CHECK_MSG(first_ended > all_started, "some requests ended before all decoded: more --tokens");
  return static_cast<double>(tokens) / absl::ToDoubleSeconds(first_ended - all_started);
}

std::unique_ptr<LocalGroup> StartGroup(const BenchOptions& options) {
  LocalGroupOptions group;
  group.model.model_dir = options.model_dir;
  group.model.dtype = ParseDType(options.dtype);
  CHECK_MSG(group.model.dtype.has_value(), fmt::format("no dtype {}", options.dtype));
  group.model.quantization = ParseQuantization(options.quantization);
  CHECK_MSG(group.model.quantization.has_value() == (options.quantization != "none"),
            fmt::format("no quantization {}", options.quantization));
  group.model.kv_cache_dtype = DType::kFloat16;  // the default of `weft serve` and of llama.cpp
  group.model.max_num_batched_tokens = options.max_num_batched_tokens;
  group.model.max_model_len = options.max_model_len;
  group.model.max_num_seqs = std::max(64, options.batch);
  group.model.num_blocks = options.batch * (options.max_model_len / 128 + 3);
  group.threads_per_rank = options.threads;
  auto started = LocalGroup::Start(group);
  CHECK_MSG(started.ok(), started.status().ToString());
  return std::move(*started);
}

void Run(const BenchOptions& options) {
  const std::unique_ptr<LocalGroup> group = StartGroup(options);
  // Warms caches, pages and threads; when decoding also the prefix cache.
  const bool decode = options.max_tokens > 1;
  BenchOptions warm_up = options;
  warm_up.max_tokens = 1;
  Clock clock;
  RunOnce(warm_up, *group, 0, clock);
  clock = {};
  // The group's threads sleep while the limits are measured.
  kernels::CpuStream stream(options.threads);
  const auto before = kernels::MeasureMachineLimits(stream);
  std::vector<double> tries;
  for (int i = 0; i < options.tries; ++i)
    tries.push_back(RunOnce(options, *group, decode ? 0 : i + 1, clock));
  const auto after = kernels::MeasureMachineLimits(stream);
  std::sort(tries.begin(), tries.end());

  const RankModel& model = group->model(0);
  const DecoderWeights& weights = model.weights;
  // What a step reads: of two tables, only the head's.
  const bool tied = weights.lm_head.out_features() == 0;
  const std::int64_t bytes = weights.SizeBytes() - (tied ? 0 : weights.embedding.size_bytes());
  const std::int64_t table = std::int64_t{model.config.vocab_size} * model.config.hidden_size;
  const std::int64_t count =
      CountWeights(model.config, model.layout, false).total() - (tied ? 0 : table);
  const WeightFormat format = weights.layers[0].o.format();
  const nlohmann::json result = {
      {"tokens_per_second", tries[tries.size() / 2]},
      {"between_steps", 1 - absl::FDivDuration(clock.in_steps, clock.all)},
      {"weight_bytes", bytes},
      {"flops_per_token", 2.0 * static_cast<double>(count)},
      {"bytes_per_second", std::max(before.bytes_per_second, after.bytes_per_second)},
      {"flops_per_second", std::max(before.PeakOf(format), after.PeakOf(format))},
      {"cpu_target", kernels::CpuTargetName()},
  };
  fmt::print("{}\n", result.dump());
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  weft::BenchOptions options;
  CLI::App app("Speed of the whole engine, one rank, no gRPC");
  app.add_option("--model", options.model_dir)->required();
  app.add_option("--dtype", options.dtype)->capture_default_str();
  app.add_option("--quantization", options.quantization)->capture_default_str();
  app.add_option("--threads", options.threads)->capture_default_str();
  app.add_option("--batch", options.batch)->capture_default_str();
  app.add_option("--prompt", options.prompt_tokens)->capture_default_str();
  app.add_option("--tokens", options.max_tokens)->capture_default_str();
  app.add_option("--temperature", options.temperature)->capture_default_str();
  app.add_option("--tries", options.tries)->capture_default_str();
  app.add_option("--max-num-batched-tokens", options.max_num_batched_tokens)->capture_default_str();
  app.add_option("--max-model-len", options.max_model_len)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::Status target = weft::kernels::InitCpuTarget();
  CHECK_MSG(target.ok(), target.ToString());
  weft::Run(options);
  return 0;
}
