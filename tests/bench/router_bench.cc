// What a router costs for each token message, beside the least that a gRPC relay can cost.
//
//   router_bench leader --listen ADDRESS [--rate 10]     a group that costs nothing: tokens by the
//   clock router_bench relay --listen ADDRESS --leader ADDRESS   passes the leader's messages on,
//   as they are router_bench load --router ADDRESS --router-pid P --relay ADDRESS --relay-pid P
//   [--streams 1000]
//
// scripts/bench_router.sh starts what it needs. The load is the same for both and far below what
// they can bear; compared is the processor time that they take for it.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "fmt/format.h"
#include "grpcpp/channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "nlohmann/json.hpp"
#include "router/prefix_index.h"
#include "server/base/check.h"
#include "server/base/mutex.h"
#include "server/grpc_mux_stream.h"
#include "server/grpc_server.h"
#include "server/grpc_stream.h"
#include "server/options.h"
#include "server/signals.h"
#include "server/ticker.h"
#include "weft/v1/inference.grpc.pb.h"
#include "weft/v1/worker.grpc.pb.h"

namespace weft {
namespace {

constexpr char kGenerate[] = "/weft.v1.Inference/Generate";
constexpr char kWorkerGenerate[] = "/weft.v1.Worker/Generate";
constexpr int kSlices = 20;  // of a token's time: streams do not all have theirs at once

template <typename Message>
grpc::ByteBuffer ToBuffer(const Message& message) {
  grpc::ByteBuffer buffer;
  bool own = false;
  (void)grpc::GenericSerialize<grpc::ProtoBufferWriter, Message>(message, &buffer, &own);
  return buffer;
}

// --- The group.

class FreeLeader final : public v1::Worker::CallbackService {
 public:
  explicit FreeLeader(double rate)
      : ticker_(std::chrono::milliseconds(static_cast<int>(1000 / (rate * kSlices))),
                [this] { Tick(); }) {
    token_.add_token_ids(7);
  }

  grpc::ServerBidiReactor<v1::GenerateCommand, v1::GenerateEvents>* Generate(
      grpc::CallbackServerContext*) override {
    return new GrpcMuxStream(
        {.size_bytes = [](const v1::WorkerGenerateResponse&) { return std::int64_t{1}; }},
        [this](v1::WorkerGenerateRequest&, absl::Time, MuxWriter& mux, std::uint64_t call) {
          MutexLock lock(mutex_);
          slices_[next_++ % kSlices].push_back(mux.Open(call, nullptr));
        });
  }

  grpc::ServerWriteReactor<v1::GroupState>* WatchState(grpc::CallbackServerContext*,
                                                       const v1::WatchStateRequest*) override {
    v1::GroupState state;
    state.set_vocab_size(1000);
    v1::GroupInfo& group = *state.mutable_group();
    group.set_ready(true);
    group.set_state("ready");
    group.set_max_model_len(1 << 30);
    auto* stream = new GrpcStream<v1::GroupState>(
        {.size_bytes = [](const v1::GroupState&) { return std::int64_t{1}; }});
    stream->writer()->Write(state);
    MutexLock lock(mutex_);
    watchers_.push_back(stream->writer());
    state_ = std::move(state);
    return stream;
  }

 private:
  void Tick() {
    std::vector<std::shared_ptr<CallWriter>> due;
    {
      MutexLock lock(mutex_);
      auto& slice = slices_[tick_ % kSlices];
      due = slice;
      if (tick_++ % kSlices == 0) {
        std::erase_if(watchers_, [this](const auto& watcher) { return !watcher->Write(state_); });
      }
    }
    std::size_t ended = 0;
    for (auto& writer : due) {
      if (writer != nullptr && writer->Write(token_)) continue;
      ++ended;
      writer = nullptr;
    }
    if (ended == 0) return;
    MutexLock lock(mutex_);
    auto& slice = slices_[(tick_ - 1) % kSlices];
    for (std::size_t i = 0; i < due.size(); ++i) {
      if (due[i] == nullptr) slice[i] = nullptr;
    }
    std::erase(slice, nullptr);
  }

  v1::WorkerGenerateResponse token_;
  Mutex mutex_;
  std::vector<std::shared_ptr<CallWriter>> slices_[kSlices] ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<StreamWriter<v1::GroupState>>> watchers_ ABSL_GUARDED_BY(mutex_);
  v1::GroupState state_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::uint64_t tick_ ABSL_GUARDED_BY(mutex_) = 0;
  Ticker ticker_;  // last: ends first
};

// --- The relay: what a hop costs without a router in it.

using GenericStub = grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>;

// One message at a time, from the leader's stream to the client's. Both ends have to be done before
// it goes.
class RelayedStream final {
 public:
  RelayedStream(GenericStub& stub, const grpc::ByteBuffer& request)
      : client_(*this), server_(*this), request_(request) {
    stub.PrepareBidiStreamingCall(&context_, kWorkerGenerate, {}, &client_);
    client_.StartWrite(&request_);  // the last one, but its end would be the call's
    client_.StartRead(&message_);
    client_.StartCall();
  }
  grpc::ServerWriteReactor<grpc::ByteBuffer>* server() { return &server_; }

 private:
  struct Client final : grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
    explicit Client(RelayedStream& stream) : stream(stream) {}
    void OnReadDone(bool ok) override {
      if (ok) stream.server_.StartWrite(&stream.message_);
    }
    void OnDone(const grpc::Status& status) override {
      stream.server_.Finish(status);
      stream.OneDone();
    }
    RelayedStream& stream;
  };
  struct Server final : grpc::ServerWriteReactor<grpc::ByteBuffer> {
    explicit Server(RelayedStream& stream) : stream(stream) {}
    void OnWriteDone(bool ok) override {
      if (ok) {
        stream.client_.StartRead(&stream.message_);
      } else {
        stream.context_.TryCancel();
      }
    }
    void OnCancel() override { stream.context_.TryCancel(); }
    void OnDone() override { stream.OneDone(); }
    RelayedStream& stream;
  };

  void OneDone() {
    if (done_.fetch_add(1) == 1) delete this;
  }

  grpc::ClientContext context_;
  Client client_;
  Server server_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer message_;
  std::atomic<int> done_{0};
};

class RelayService final
    : public v1::Inference::WithRawCallbackMethod_Generate<v1::Inference::Service> {
 public:
  explicit RelayService(const std::string& leader)
      : stub_(NewGrpcChannel(leader, {.retries = false})) {}
  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext*,
                                                       const grpc::ByteBuffer*) override {
    static const grpc::ByteBuffer request = [] {
      v1::GenerateCommand start;
      start.set_call(1);
      start.mutable_start();
      return ToBuffer(start);
    }();
    return (new RelayedStream(stub_, request))->server();
  }

 private:
  GenericStub stub_;
};

// --- The clients.

struct Counts {
  std::atomic<std::int64_t> messages{0};
  std::atomic<std::int64_t> bytes{0};
  std::atomic<int> started{0};
  std::atomic<int> ended{0};
};

class Reader final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  Reader(GenericStub& stub, const grpc::ByteBuffer& request, Counts& counts)
      : request_(request), counts_(counts) {
    stub.PrepareBidiStreamingCall(&context_, kGenerate, {}, this);
    StartWriteLast(&request_, {});
    StartRead(&message_);
    StartCall();
  }
  void Cancel() { context_.TryCancel(); }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (!std::exchange(started_, true)) ++counts_.started;
    counts_.messages.fetch_add(1, std::memory_order_relaxed);
    StartRead(&message_);
  }
  void OnDone(const grpc::Status& status) override {
    if (status.error_code() != grpc::StatusCode::CANCELLED) {
      fmt::print(stderr, "router_bench: a stream has ended: {} {}\n",
                 static_cast<int>(status.error_code()), status.error_message());
    }
    ++counts_.ended;
  }

  grpc::ClientContext context_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer message_;
  Counts& counts_;
  bool started_ = false;
};

// Seconds of processor time, and bytes in memory, of a process.
struct Usage {
  double cpu_seconds = 0;
  double resident_bytes = 0;
};

Usage UsageOf(std::int32_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::stringstream text;
  text << file.rdbuf();
  const std::string all = text.str();
  std::istringstream fields(all.substr(std::min(all.size(), all.rfind(')') + 2)));
  std::vector<std::string> field;
  for (std::string word; fields >> word;) field.push_back(word);
  CHECK(field.size() > 21);  // the third of `man proc` comes first
  return {.cpu_seconds = (std::stod(field[11]) + std::stod(field[12])) /
                         static_cast<double>(sysconf(_SC_CLK_TCK)),
          .resident_bytes = std::stod(field[21]) * static_cast<double>(sysconf(_SC_PAGESIZE))};
}

struct Target {
  std::string address;
  std::int32_t pid = 0;
};

struct Measured {
  double messages_per_second = 0;
  double messages_per_cpu_second = 0;
  double bytes_per_stream = 0;
};

struct LoadOptions {
  std::int32_t streams = 1000;
  std::int32_t rounds = 5;
  double seconds = 5;
};

Measured Measure(const Target& target, const LoadOptions& load) {
  constexpr int kConnections = 4;
  std::vector<std::unique_ptr<GenericStub>> stubs;
  for (int i = 0; i < kConnections; ++i) {
    stubs.push_back(std::make_unique<GenericStub>(NewGrpcChannel(target.address, {})));
  }
  v1::GenerateRequest request;
  for (int id = 5; id < 13; ++id) request.mutable_token_ids()->add_ids(id);
  request.mutable_sampling()->set_max_tokens(1 << 20);
  request.mutable_sampling()->set_ignore_eos(true);
  const grpc::ByteBuffer bytes = ToBuffer(request);
  Counts counts;
  std::vector<std::unique_ptr<Reader>> readers;
  const auto open = [&](int count) {
    for (int i = 0; i < count; ++i) {
      readers.push_back(
          std::make_unique<Reader>(*stubs[readers.size() % stubs.size()], bytes, counts));
    }
    while (counts.started < static_cast<int>(readers.size()) && counts.ended == 0) {
      absl::SleepFor(absl::Milliseconds(10));
    }
  };
  open(kConnections);  // connections and threads are no stream's
  const Usage idle = UsageOf(target.pid);
  open(load.streams - kConnections);
  absl::SleepFor(absl::Seconds(1));
  const Usage before = UsageOf(target.pid);
  const std::int64_t messages = counts.messages;
  const absl::Time start = absl::Now();
  absl::SleepFor(absl::Seconds(load.seconds));
  const Usage after = UsageOf(target.pid);
  const auto count = static_cast<double>(counts.messages - messages);
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  for (const auto& reader : readers) reader->Cancel();
  while (counts.ended < load.streams) absl::SleepFor(absl::Milliseconds(10));
  return {.messages_per_second = count / seconds,
          .messages_per_cpu_second = count / (after.cpu_seconds - before.cpu_seconds),
          .bytes_per_stream =
              (after.resident_bytes - idle.resident_bytes) / (load.streams - kConnections)};
}

// Of an index with many blocks, as a leader tells of them.
double IndexBytesPerBlock() {
  constexpr int kBlocks = 1'000'000;
  PrefixIndex index;
  std::uint64_t random = 88172645463325252;
  for (int done = 0; done < kBlocks;) {
    v1::BlockChanges changes;
    changes.set_snapshot(done == 0);
    for (int i = 0; i < 10'000; ++i, ++done) {
      std::string hash(32, '\0');
      for (char& c : hash) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        c = static_cast<char>(random);
      }
      changes.add_changes()->set_hash(hash);
    }
    changes.set_seq(static_cast<std::uint64_t>(done));
    CHECK(index.Apply(changes));
  }
  return static_cast<double>(index.bytes()) / static_cast<double>(index.size());
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int RunLoad(const Target& router, const Target& relay, const LoadOptions& load,
            const std::string& json_path) {
  std::vector<double> share, memory, speed[2];
  nlohmann::json rounds = nlohmann::json::array();
  for (int round = 0; round < load.rounds; ++round) {
    Measured measured[2];
    for (const int which : {round % 2, 1 - round % 2}) {  // 0: the router
      measured[which] = Measure(which == 0 ? router : relay, load);
      speed[which].push_back(measured[which].messages_per_cpu_second);
      const Measured& m = measured[which];
      fmt::print(
          "{:>3}  {:<6}  {:9.0f} messages/s  {:9.0f} per second and core  {:6.1f} KiB a stream\n",
          round + 1, which == 0 ? "router" : "relay", m.messages_per_second,
          m.messages_per_cpu_second, m.bytes_per_stream / 1024);
      std::fflush(stdout);
      rounds.push_back({{"of", which == 0 ? "router" : "relay"},
                        {"messages_per_second", m.messages_per_second},
                        {"messages_per_cpu_second", m.messages_per_cpu_second},
                        {"bytes_per_stream", m.bytes_per_stream}});
    }
    share.push_back(measured[0].messages_per_cpu_second / measured[1].messages_per_cpu_second);
    if (round == 0) memory.push_back(measured[0].bytes_per_stream);  // later ones find it there
  }
  const double index_bytes = IndexBytesPerBlock();
  fmt::print(
      "{} streams, median of {} rounds: {:.0f} token messages per second and core, the relay "
      "{:.0f}: "
      "{:.0f} % (wanted: 60 %)\nmemory per stream {:.1f} KiB (allowed: 32 KiB), prefix index "
      "{:.1f} "
      "bytes per block\n",
      load.streams, load.rounds, Median(speed[0]), Median(speed[1]), 100 * Median(share),
      memory[0] / 1024, index_bytes);
  if (!json_path.empty()) {
    std::ofstream(json_path) << nlohmann::json({{"date", absl::FormatTime(absl::Now())},
                                                {"streams", load.streams},
                                                {"seconds", load.seconds},
                                                {"rounds", rounds},
                                                {"share_of_relay", Median(share)},
                                                {"bytes_per_stream", memory[0]},
                                                {"index_bytes_per_block", index_bytes}})
                                    .dump(1)
                             << "\n";
  }
  return Median(share) >= 0.6 && memory[0] <= 32 * 1024 ? 0 : 1;
}

int Serve(const std::string& address, grpc::Service& service, TerminationSignals& signals) {
  const auto server = GrpcServer::Start({.listen_addresses = {address}}, {&service});
  CHECK_MSG(server.ok(), std::string(server.status().message()));
  while (signals.Wait(absl::Seconds(1)) == 0) {
  }
  return 0;
}

int Main(int argc, char** argv) {
  TerminationSignals signals;
  const std::string role = argc > 1 ? argv[1] : "";
  std::string listen, leader, json;
  double rate = 10;
  Target router, relay;
  LoadOptions load;
  OptionParser parser("router_bench",
                      "leader, relay or load: what a router costs a token message.");
  parser.Add("--listen", &listen, "Of the leader and the relay");
  parser.Add("--rate", &rate, "Tokens of each stream in a second", Range(0.1, 50));
  parser.Add("--leader", &leader, "Of the relay");
  parser.Add("--router", &router.address, "A weft-router before the leader");
  parser.Add("--router-pid", &router.pid, "Its process");
  parser.Add("--relay", &relay.address, "A relay before the leader");
  parser.Add("--relay-pid", &relay.pid, "Its process");
  parser.Add("--streams", &load.streams, "At a time", Range(10, 100000));
  parser.Add("--rounds", &load.rounds, "Of each", Range(1, 1000));
  parser.Add("--seconds", &load.seconds, "Of each measurement", Range(0.1, 3600));
  parser.Add("--json", &json, "File for the results");
  if (const auto exit_code = parser.Parse(argc - 1, argv + 1)) return *exit_code;
  if (role == "leader") {
    FreeLeader service(rate);
    return Serve(listen, service, signals);
  }
  if (role == "relay") {
    RelayService service(leader);
    return Serve(listen, service, signals);
  }
  return RunLoad(router, relay, load, json);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) { return weft::Main(argc, argv); }
