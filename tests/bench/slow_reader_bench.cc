// What a slow reader costs the other clients of a router: their inter-token latency while one more
// client reads its stream, and while it does not, in alternating rounds of one run.
//
//   slow_reader_bench --address HOST:PORT [--clients 100] [--rounds 5] [--output-len 64]
//
// scripts/bench_slow_reader.sh starts what it needs.

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "client/batch.h"
#include "client/bench_load.h"
#include "client/bench_stats.h"
#include "fmt/format.h"
#include "grpcpp/client_context.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "server/base/mutex.h"
#include "server/options.h"

namespace weft {
namespace {

// HTTP/2's smallest useful window: what is beyond it waits in the router.
constexpr int kWindowBytes = 1 << 10;

// A client that asks for a long answer and either reads it or reads its first message only.
class LongReader final : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  LongReader(v1::Inference::Stub& stub, std::int32_t max_tokens, bool reads) : reads_(reads) {
    for (std::int32_t id = 5; id < 13; ++id) request_.mutable_token_ids()->add_ids(id);
    request_.mutable_sampling()->set_max_tokens(max_tokens);
    request_.mutable_sampling()->set_ignore_eos(true);
    stub.async()->Generate(&context_, &request_, this);
    AddHold();
    StartRead(&response_);
    StartCall();
    MutexLock lock(mutex_);
    while (!started_) changed_.Wait(mutex_);
  }
  // Cancels the call.
  ~LongReader() override {
    context_.TryCancel();
    RemoveHold();
    MutexLock lock(mutex_);
    while (!done_) changed_.Wait(mutex_);
  }
  std::int64_t num_tokens() const { return num_tokens_; }

  void OnReadDone(bool ok) override {
    num_tokens_ += response_.token_ids_size();
    if (ok && reads_) StartRead(&response_);
    MutexLock lock(mutex_);
    started_ = true;
    changed_.NotifyAll();
  }
  void OnDone(const grpc::Status&) override {
    MutexLock lock(mutex_);
    done_ = true;
    changed_.NotifyAll();
  }

 private:
  const bool reads_;
  grpc::ClientContext context_;
  v1::GenerateRequest request_;
  v1::GenerateResponse response_;
  std::atomic<std::int64_t> num_tokens_ = 0;
  Mutex mutex_;
  CondVar changed_;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

std::shared_ptr<grpc::Channel> Connect(const std::string& address, std::optional<int> window) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  if (window) {
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, *window);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  }
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

// The 99th percentile of the inter-token latency of `requests`, all under way at once; nothing when
// one failed.
std::optional<double> MeasureP99Ms(v1::Inference::Stub& stub,
                                   const std::vector<v1::GenerateRequest>& requests) {
  std::vector<absl::Duration> gaps;
  BatchOptions options = {.concurrency = requests.size()};
  options.on_completion = [&](std::size_t, const Completion&, const RequestTiming& timing) {
    for (std::size_t i = 1; i < timing.tokens.size(); ++i) {
      gaps.push_back(timing.tokens[i] - timing.tokens[i - 1]);
    }
  };
  if (RunBatch(stub, requests, options).failed > 0) return std::nullopt;
  return absl::ToDoubleMilliseconds(Percentile(gaps, 99));
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

int Main(int argc, char** argv) {
  std::string address = "127.0.0.1:50051";
  std::int32_t clients = 100;
  std::int32_t rounds = 5;
  std::int32_t output_len = 64;
  std::int32_t long_len = 100000;
  OptionParser parser("slow_reader_bench", "What one slow reader costs the other clients.");
  parser.Add("--address", &address, "A running router");
  parser.Add("--clients", &clients, "With the slow one", Range(2, 65536));
  parser.Add("--rounds", &rounds, "Of each kind", Range(1, 1000));
  parser.Add("--output-len", &output_len, "Tokens for each of the others", Range(2, 65536));
  parser.Add("--long-len", &long_len, "Tokens for the slow one, which outlasts a round",
             Range(2, 1 << 20));
  if (const std::optional<int> exit_code = parser.Parse(argc, argv)) return *exit_code;

  const auto stub = v1::Inference::NewStub(Connect(address, std::nullopt));
  const auto long_stub = v1::Inference::NewStub(Connect(address, kWindowBytes));
  const std::vector<v1::GenerateRequest> requests =
      MakeRandomPrompts({.num_prompts = clients - 1, .input_len = 8, .output_len = output_len});
  std::vector<double> p99_ms[2];  // [reads]
  for (int round = 0; round < 2 * rounds + 1; ++round) {
    const bool reads = round % 2 == 0;
    LongReader reader(*long_stub, long_len, reads);
    const std::optional<double> p99 = MeasureP99Ms(*stub, requests);
    if (!p99) {
      fmt::print(stderr, "slow_reader_bench: a request failed\n");
      return 1;
    }
    fmt::print("{:>6}  the last client {:<14}  p99 ITL of the others {:8.2f} ms\n",
               round == 0 ? "warm" : fmt::format("{}", (round + 1) / 2),
               reads ? "reads" : "does not read", *p99);
    std::fflush(stdout);
    if (round > 0) p99_ms[reads].push_back(*p99);
  }
  const double with_reader = Median(p99_ms[1]);
  const double with_slow = Median(p99_ms[0]);
  const double change = with_slow / with_reader - 1;
  fmt::print(
      "p99 inter-token latency of {} clients, median of {} rounds: {:.2f} ms beside one more that "
      "reads, {:.2f} ms beside one that does not: {:+.1f} % (allowed: +10 %)\n",
      clients - 1, rounds, with_reader, with_slow, 100 * change);
  return change <= 0.1 ? 0 : 1;
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) { return weft::Main(argc, argv); }
