#include "worker/rank_process.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "kernels/device/cpu_target.h"
#include "kernels/device/cuda_module.h"
#include "server/base/bounded_time.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"
#include "server/grpc_server.h"
#include "server/secret.h"
#include "server/ticker.h"
#include "server/tls.h"
#include "worker/join_client.h"
#include "worker/leader.h"
#include "worker/rank.h"
#include "worker/rank_metrics.h"
#include "worker/stats_line.h"
#include "worker/worker_service.h"

namespace weft {
namespace {

// How often a rank's counters reach the leader's WatchState.
constexpr auto kInfoInterval = std::chrono::milliseconds(500);
// What the followers of a group that cannot start get to hear why.
constexpr absl::Duration kLastWordsTimeout = absl::Seconds(2);

// Errors of the group are not the user's; everything else that stops a start is.
bool IsGroupError(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status) || absl::IsInternal(status) ||
         absl::IsDeadlineExceeded(status);
}

// The last words of this process: one line, then the exit code.
int Fail(const RankProcessOptions& options, const absl::Status& status) {
  std::fprintf(stderr, "weft-worker: rank %d: %s\n", options.rank,
               std::string(status.message()).c_str());
  return IsGroupError(status) ? kExitGroupLost : kExitConfigError;
}

// Ends the process at once: the group is lost, whatever the other threads are doing.
[[noreturn]] void ExitGroupLost(std::int32_t rank, const std::string& why) {
  std::fprintf(stderr, "weft-worker: rank %d: the group is lost: %s\n", rank, why.c_str());
  std::_Exit(kExitGroupLost);
}

int AllowedCpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return CPU_COUNT(&set);
}

RankModelOptions ModelOptionsOf(const RankProcessOptions& options) {
  const GroupFlags& flags = options.group;
  return {.model_dir = flags.model,
          .layout = {.tensor_parallel_size = flags.tensor_parallel_size,
                     .decode_context_parallel_size = flags.decode_context_parallel_size,
                     .block_size = flags.block_size,
                     .interleave = flags.cp_kv_cache_interleave_size,
                     .min_block_size = flags.device == Device::kCpu ? 128 : 256,
                     .replicate_query = flags.dcp_replicate_query},
          .device = flags.device,
          .features = flags.Features(),
          .rank = options.rank,
          .dtype = ParseDType(flags.dtype),
          .quantization = ParseQuantization(flags.quantization),
          .kv_cache_dtype = ParseDType(flags.kv_cache_dtype),
          .max_model_len = flags.MaxModelLen(),
          .max_num_seqs = flags.max_num_seqs,
          .max_num_batched_tokens = flags.max_num_batched_tokens,
          .exchange = *ParseDcpExchange(flags.dcp_comm_backend),
          .expert_parallel = flags.enable_expert_parallel,
          .num_blocks = flags.num_gpu_blocks_override,
          .kv_cache_memory_bytes = flags.kv_cache_memory_bytes,
          .local_ranks = options.local_ranks};
}

KvMoverOptions KvMoverOptionsOf(const KvTransferConfig& config, const KvTransferFlags& flags) {
  KvMoverOptions options = {.layerwise = config.layerwise,
                            .staging_bytes = config.buffer_bytes,
                            .window_bytes = flags.kv_transfer_window_bytes,
                            .checksum = flags.kv_transfer_checksum,
                            .shared_memory = config.shared_memory,
                            .bandwidth_limit = flags.kv_transfer_bandwidth_limit};
  options.message_bytes =
      std::min(options.message_bytes, std::max<std::int64_t>(1, config.buffer_bytes / 8));
  return options;
}

// Waits for SIGTERM on a thread of its own. Until there is something to finish first, the process
// just ends.
class SignalWatch {
 public:
  explicit SignalWatch(TerminationSignals& signals)
      : signals_(signals), thread_([this] {
          if (signals_.Wait() == 0) return;
          std::function<void()> handler;
          {
            MutexLock lock(mutex_);
            signalled_ = true;
            handler = handler_;
          }
          if (handler == nullptr) std::_Exit(0);
          handler();
        }) {}
  ~SignalWatch() {
    signals_.Wake();
    thread_.join();
  }

  // Runs `handler` on a signal, on the watch's thread.
  void OnSignal(std::function<void()> handler) {
    MutexLock lock(mutex_);
    if (signalled_) std::_Exit(0);
    handler_ = std::move(handler);
  }

 private:
  TerminationSignals& signals_;
  Mutex mutex_;
  bool signalled_ ABSL_GUARDED_BY(mutex_) = false;
  std::function<void()> handler_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

// What both kinds of rank do: load, start, report.
class RankProcess {
 public:
  RankProcess(const RankProcessOptions& options, SupervisorLink& link)
      : options_(options),
        model_options_(ModelOptionsOf(options)),
        registry_(options.group.ServedModelName()),
        stream_(options.group.threads_per_rank.value_or(
            std::max(1, AllowedCpus() / options.local_ranks))),
        link_(link),
        kv_config_(*ParseKvTransferConfig(options.group.kv_transfer.kv_transfer_config)) {
    link_.SetHealthCheck([this] { return progress_.MovedOrIdle(stream_.pool().num_claims()); });
  }
  ~RankProcess() { link_.SetHealthCheck(nullptr); }

  // First: probes are answered while the model loads.
  absl::Status StartMetrics() {
    constexpr std::int32_t kFirstPort = 9401;
    ASSIGN_OR_RETURN(metrics_server_,
                     MetricsServer::Start(options_.metrics, kFirstPort + options_.rank, registry_));
    SetProbes([this] { return CheckLiveness(); }, nullptr);
    return absl::OkStatus();
  }
  // Null readiness: not yet.
  void SetProbes(MetricsServer::Check liveness, MetricsServer::Check readiness) {
    if (metrics_server_ == nullptr) return;
    metrics_server_->SetLiveness(std::move(liveness));
    metrics_server_->SetReadiness(std::move(readiness));
  }
  absl::Status CheckLiveness() const {
    return progress_.CheckLiveness(options_.group.stall_timeout);
  }
  void Observe() { progress_.Observe(stream_.pool().num_claims()); }

  absl::Status Load() {
    RETURN_IF_ERROR(OpenDevice());
    const absl::Time start = absl::Now();
    absl::Time next_report = start + absl::Seconds(1);
    ASSIGN_OR_RETURN(model_, RankModel::Load(model_options_, stream(), [&](int done, int of) {
                       if (absl::Now() < next_report) return;
                       next_report = absl::Now() + absl::Seconds(1);
                       spdlog::info("loaded {} of {} layers", done, of);
                     }));
    if (options_.group.tensor_parallel_size == 1) {
      fabric_ = MakeLocalFabric("alone");
    } else {
      ASSIGN_OR_RETURN(fabric_, MakeUcxFabric());
    }
    if (kv_config_.role != KvRole::kNone) {
      ASSIGN_OR_RETURN(kv_fabric_, MakeUcxFabric(UcxReach::kBetweenGroups));
      kv_fabric_address_ = kv_fabric_->LocalAddress();
    }
    spdlog::info("loaded {:.1f} MB of weights as {} in {:.2f} s; {} threads on {}",
                 static_cast<double>(model_->weights.SizeBytes()) / 1e6,
                 FormatName(model_->weight_format), absl::ToDoubleSeconds(absl::Now() - start),
                 stream_.pool().num_threads(), kernels::CpuTargetName());
    return absl::OkStatus();
  }

  // Nothing for --device=cpu.
  absl::Status OpenDevice() {
    if (model_options_.device == Device::kCpu) return absl::OkStatus();
    const auto module = model_options_.device == Device::kCuda ? kernels::CudaModule::kCuda
                                                               : kernels::CudaModule::kEmulated;
    ASSIGN_OR_RETURN(
        device_, kernels::OpenCudaDevice(module, options_.rank % options_.local_ranks, stream_));
    spdlog::info("computing on {}", device_->name());
    return absl::OkStatus();
  }
  kernels::Stream& stream() {
    return device_ != nullptr ? *device_ : static_cast<kernels::Stream&>(stream_);
  }

  // `on_kv_report` is called until StopKv().
  absl::Status Start(const GroupAgreement& agreement, KvMover::OnReport on_kv_report) {
    std::unique_ptr<KvTransferSetup> kv;
    if (kv_fabric_ != nullptr) {
      kv = std::make_unique<KvTransferSetup>(
          KvTransferSetup{.fabric = std::move(kv_fabric_),
                          .options = KvMoverOptionsOf(kv_config_, options_.group.kv_transfer),
                          .on_report = std::move(on_kv_report)});
    }
    ASSIGN_OR_RETURN(rank_,
                     Rank::Start(*model_, agreement,
                                 {.max_num_seqs = options_.group.max_num_seqs,
                                  .max_num_batched_tokens = options_.group.max_num_batched_tokens,
                                  .exchange = model_options_.exchange,
                                  .stall_timeout = options_.group.stall_timeout,
                                  .graphs = model_options_.device != Device::kCpu &&
                                            !options_.group.enforce_eager,
                                  .symmetric_memory = options_.group.use_nccl_symm_mem},
                                 *fabric_, stream(), progress_, std::move(kv)));
    spdlog::info("memory: {:.1f} MB weights, {:.1f} MB KV, {:.1f} MB workspace",
                 static_cast<double>(model_->weights.SizeBytes()) / 1e6,
                 static_cast<double>(rank_->kv_bytes()) / 1e6,
                 static_cast<double>(rank_->workspace_bytes()) / 1e6);
    reader_ = ReadRank(registry_, *rank_, progress_, options_.rank, model_->weights.SizeBytes());
    return absl::OkStatus();
  }

  void StopKv() {
    if (rank_ != nullptr && rank_->kv_mover() != nullptr) rank_->kv_mover()->Stop();
  }

  RankOffer Offer() const {
    return {.rank = options_.rank,
            .fabric_address = fabric_->LocalAddress(),
            .num_blocks = model_->num_blocks,
            .kv_fabric_address = kv_fabric_address_,
            .agreed = model_->Agreement(model_options_)};
  }

  v1::RankInfo Info() const {
    v1::RankInfo info;
    info.set_rank(options_.rank);
    info.set_pid(getpid());
    if (metrics_server_ != nullptr) info.set_metrics_address(metrics_server_->address());
    if (rank_ == nullptr) return info;
    const FabricCounters counters = rank_->counters().fabric;
    info.set_fabric_sent_bytes(counters.sent_bytes);
    info.set_fabric_received_bytes(counters.received_bytes);
    info.set_weight_bytes(model_->weights.SizeBytes());
    info.set_kv_bytes(rank_->kv_bytes());
    info.set_workspace_bytes(rank_->workspace_bytes());
    return info;
  }

  const RankModel& model() const { return *model_; }
  Rank& rank() { return *rank_; }
  MetricRegistry& registry() { return registry_; }

 private:
  const RankProcessOptions& options_;
  const RankModelOptions model_options_;
  MetricRegistry registry_;
  Progress progress_;
  kernels::CpuStream stream_;
  std::unique_ptr<kernels::DeviceStream> device_;  // null: the CPU is the device
  SupervisorLink& link_;
  const KvTransferConfig kv_config_;
  std::optional<RankModel> model_;
  std::unique_ptr<Fabric> fabric_;
  std::unique_ptr<Fabric> kv_fabric_;  // until Start()
  std::string kv_fabric_address_;
  std::unique_ptr<Rank> rank_;
  // Look at all of the above.
  std::unique_ptr<MetricRegistry::Reader> reader_;
  std::unique_ptr<MetricsServer> metrics_server_;
};

v1::GroupState DescribeGroup(const RankProcessOptions& options, const RankModel& model,
                             const GroupAgreement& agreement) {
  v1::GroupState state;
  v1::GroupInfo& group = *state.mutable_group();
  group.set_model(options.group.ServedModelName());
  group.set_tensor_parallel_size(model.layout.tensor_parallel_size());
  group.set_decode_context_parallel_size(model.layout.decode_context_parallel_size());
  group.set_block_size(model.layout.block_size());
  group.set_cp_kv_cache_interleave_size(model.layout.interleave());
  group.set_max_model_len(agreement.max_model_len);
  group.set_max_num_seqs(options.group.max_num_seqs);
  group.set_max_num_waiting(options.group.max_num_waiting);
  group.set_kv_bytes_per_token_per_rank(model.kv_shape.BytesPerLocalToken() /
                                        model.layout.decode_context_parallel_size());
  group.set_dtype(std::string(FormatName(model.weight_format)));
  group.set_kv_cache_dtype(std::string(DTypeName(model.kv_shape.dtype)));
  group.set_dcp_comm_backend(options.group.dcp_comm_backend);
  for (const std::string& warning : model.warnings) group.add_warnings(warning);
  if (options.group.enable_prefix_caching) {
    group.set_prefix_caching(true);
    state.set_block_hash_key(BlockHashKey(model.fingerprint, model.layout.block_size()));
  }
  if (const auto kv = ParseKvTransferConfig(options.group.kv_transfer.kv_transfer_config);
      kv.ok() && kv->role != KvRole::kNone) {
    group.set_kv_role(std::string(KvRoleName(kv->role)));
    v1::KvEndpoint& endpoint = *state.mutable_kv();
    endpoint.set_format(KvFormatOf(model));
    endpoint.set_tensor_parallel_size(model.layout.tensor_parallel_size());
    endpoint.set_decode_context_parallel_size(model.layout.decode_context_parallel_size());
    endpoint.set_block_size(model.layout.block_size());
    endpoint.set_cp_kv_cache_interleave_size(model.layout.interleave());
    for (const std::string& address : agreement.kv_fabric_addresses) {
      endpoint.add_fabric_addresses(address);
    }
  }
  state.set_vocab_size(model.config.vocab_size);
  const std::int32_t max_logprobs = options.request_limits.max_logprobs;
  state.set_max_logprobs(max_logprobs == -1 ? model.config.vocab_size : max_logprobs);
  for (std::int32_t id : model.config.eos_token_ids) state.add_eos_token_ids(id);
  return state;
}

// Waits for the followers and settles what the group has; tells the followers.
absl::StatusOr<GroupAgreement> SettleJoins(const RankProcessOptions& options, JoinTable& joins,
                                           RankProcess& process, WorkerService& service) {
  ASSIGN_OR_RETURN(std::vector<RankOffer> offers,
                   joins.WaitForAll(process.Offer(), absl::Now() + options.join_timeout));
  GroupAgreement agreement;
  agreement.num_blocks = offers[0].num_blocks;
  v1::JoinResponse response;
  for (const RankOffer& offer : offers) {
    agreement.fabric_addresses.push_back(offer.fabric_address);
    agreement.kv_fabric_addresses.push_back(offer.kv_fabric_address);
    if (offer.kv_fabric_address.empty() != offers[0].kv_fabric_address.empty()) {
      return absl::FailedPreconditionError(fmt::format(
          "rank {} and rank 0: one has --kv-transfer-config, the other has not", offer.rank));
    }
    agreement.num_blocks = std::min(agreement.num_blocks, offer.num_blocks);
    response.add_fabric_addresses(offer.fabric_address);
  }
  ASSIGN_OR_RETURN(agreement.max_model_len, process.model().ResolveMaxModelLen(
                                                options.group.MaxModelLen(), agreement.num_blocks));
  response.set_num_blocks(agreement.num_blocks);
  response.set_max_model_len(agreement.max_model_len);
  service.AnswerJoins(response);
  return agreement;
}

absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(const GroupFlags& flags, const RankModel& model,
                                                   const GroupAgreement& agreement) {
  return Engine::Create(
      {.block_size = model.layout.block_size(),
       .num_blocks = agreement.num_blocks,
       .max_model_len = agreement.max_model_len,
       .max_num_seqs = flags.max_num_seqs,
       .max_num_batched_tokens = flags.max_num_batched_tokens,
       .max_num_waiting = flags.max_num_waiting,
       .vocab_size = model.config.vocab_size,
       .async_scheduling = flags.async_scheduling,
       .enable_prefix_caching = flags.enable_prefix_caching,
       .block_hash_key = BlockHashKey(model.fingerprint, model.layout.block_size()),
       .num_ranks = flags.tensor_parallel_size,
       .kv_lease = flags.kv_transfer.kv_transfer_lease,
       .force_preemption_every = flags.force_preemption_every});
}

// Null for an interval of 0.
std::unique_ptr<Ticker> StartStatsLog(const Leader& leader, absl::Duration interval) {
  if (interval == absl::ZeroDuration()) return nullptr;
  const std::chrono::milliseconds period =
      absl::ToChronoMilliseconds(std::clamp(interval, absl::Milliseconds(1), absl::Hours(24)));
  return std::make_unique<Ticker>(period, [&leader, line = StatsLine(absl::Now())]() mutable {
    if (const auto text = line.Next(leader.Stats(), absl::Now())) spdlog::info("{}", *text);
  });
}

// Empty without --join-secret-file.
absl::StatusOr<std::string> ReadJoinSecret(const RankProcessOptions& options) {
  if (options.join_secret_file.empty()) return std::string();
  return ReadSecretFile("--join-secret-file", options.join_secret_file);
}

absl::StatusOr<GrpcChannelOptions> JoinChannelOptions(const RankProcessOptions& options) {
  GrpcChannelOptions channel;
  channel.retries = false;  // who leaves waits for the end of its calls
  ASSIGN_OR_RETURN(channel.credentials, NewClientCredentials(options.tls));
  ASSIGN_OR_RETURN(channel.bearer_token, ReadJoinSecret(options));
  return channel;
}

int RunLeader(const RankProcessOptions& options, SignalWatch& signals, SupervisorLink& link) {
  const absl::StatusOr<std::string> secret = ReadJoinSecret(options);
  if (!secret.ok()) return Fail(options, secret.status());
  const std::uint64_t generation = std::random_device{}() | 1u;
  std::atomic<bool> stopping{false};
  JoinTable joins(options.group.tensor_parallel_size);
  WorkerService service(
      joins, generation, options.request_limits,
      [&](std::int32_t rank, const absl::Status& status) {
        if (stopping) return;
        ExitGroupLost(0, fmt::format("rank {}: {}", rank, std::string(status.message())));
      },
      secret->empty() ? std::nullopt : std::optional<SecretDigest>(*secret));
  grpc::Service* services[] = {&service};
  absl::StatusOr<std::unique_ptr<GrpcServer>> server =
      GrpcServer::Start({.listen_addresses = options.listen, .tls = options.tls}, services);
  if (!server.ok()) {
    Fail(options, server.status());
    return kExitConfigError;
  }
  (*server)->SetServing("weft.v1.Worker", false);

  // What is wrong here is reported here: the followers' streams end with us, and not as a loss.
  const auto fail = [&](const absl::Status& status) {
    stopping = true;
    return Fail(options, status);
  };
  RankProcess process(options, link);
  if (absl::Status started = process.StartMetrics(); !started.ok()) {
    fail(started);
    return kExitConfigError;
  }
  if (absl::Status loaded = process.Load(); !loaded.ok()) return fail(loaded);
  service.SetState("waiting for ranks");
  absl::StatusOr<GroupAgreement> agreement = SettleJoins(options, joins, process, service);
  if (!agreement.ok()) {
    stopping = true;
    service.RefuseJoins(agreement.status());
    (*server)->Shutdown(kLastWordsTimeout);  // the followers hear why
    return Fail(options, agreement.status());
  }
  const absl::Status started =
      process.Start(*agreement, [&service](const KvReport& report) { service.OnKvReport(report); });
  if (!started.ok()) return fail(started);
  absl::StatusOr<std::unique_ptr<Engine>> engine =
      MakeEngine(options.group, process.model(), *agreement);
  if (!engine.ok()) return fail(engine.status());
  spdlog::info("ready\n{}prefix caching: {}",
               process.model().Summary(agreement->num_blocks, agreement->max_model_len),
               options.group.enable_prefix_caching ? "on" : "off (--no-enable-prefix-caching)");

  LeaderMetrics metrics(process.registry());
  Leader leader(*std::move(engine), options.group.max_num_waiting, &metrics);
  const auto reader = ReadLeader(process.registry(), leader, process.model().layout,
                                 [&service] { return service.calls().stream_buffer_bytes(); });
  prometheus::Gauge& drain_deadline = process.registry().Get(metrics::kDrainDeadline);
  // SIGTERM: no new requests, finish those that run, then leave; followers leave with us.
  std::promise<void> drained;
  signals.OnSignal([&] {
    spdlog::info("draining {} requests", leader.num_requests());
    (*server)->SetServing("weft.v1.Worker", false);
    drain_deadline.Set(
        static_cast<double>(absl::ToUnixSeconds(absl::Now() + options.drain_timeout)));
    service.StartDrain();
    const auto deadline = std::chrono::steady_clock::now() + ToBoundedChrono(options.drain_timeout);
    // A reader may take longer than its request.
    while ((leader.num_requests() > 0 || service.calls().num_open_calls() > 0) &&
           std::chrono::steady_clock::now() < deadline) {
      absl::SleepFor(absl::Milliseconds(20));
    }
    service.EndRequests();
    leader.Stop();
    drained.set_value();
  });
  service.SetRankInfo(process.Info());
  service.SetReady(leader, DescribeGroup(options, process.model(), *agreement));
  (*server)->SetServing("weft.v1.Worker", true);
  link.ReportReady({{"address", (*server)->addresses().front()}});
  process.SetProbes(
      [&] {
        absl::Status status = process.CheckLiveness();
        status.Update(service.CheckFollowers(options.group.stall_timeout));
        return status;
      },
      [&] { return service.CheckServing(); });
  const absl::Status ended = [&] {
    Ticker info_ticker(kInfoInterval, [&] {
      process.Observe();
      service.SetRankInfo(process.Info());
    });
    const auto stats_ticker = StartStatsLog(leader, options.group.log_stats_interval);
    return leader.RunExecutor(process.rank());
  }();
  if (!ended.ok()) ExitGroupLost(0, std::string(ended.message()));
  drained.get_future().wait();
  stopping = true;
  process.StopKv();
  // The endless streams, and what the drain timeout was too short for, end with it.
  (*server)->Shutdown(absl::Milliseconds(500));
  service.Stop();
  return 0;
}

int RunFollower(const RankProcessOptions& options, SignalWatch& signals, SupervisorLink& link) {
  const absl::StatusOr<GrpcChannelOptions> channel = JoinChannelOptions(options);
  if (!channel.ok()) return Fail(options, channel.status());
  RankProcess process(options, link);
  if (absl::Status started = process.StartMetrics(); !started.ok()) {
    Fail(options, started);
    return kExitConfigError;
  }
  if (absl::Status loaded = process.Load(); !loaded.ok()) return Fail(options, loaded);

  spdlog::info("joining the leader at {}", options.leader_address);
  JoinClient join(options.leader_address, *channel);
  absl::StatusOr<GroupAgreement> agreement =
      join.Join(process.Offer(), process.Info(), options.join_timeout);
  if (!agreement.ok()) return Fail(options, agreement.status());
  std::atomic<bool> stop{false};
  std::atomic<bool> terminating{false};
  std::atomic<bool> failed{false};
  join.WatchEnd([&] {
    if (failed) return;
    // After SIGTERM the leader drains and then ends the stream: that is how we are told to leave.
    if (!terminating) ExitGroupLost(options.rank, "the leader's Join stream has ended");
    std::_Exit(0);
  });
  const absl::Status started =
      process.Start(*agreement, [&join](const KvReport& report) { join.Send(report); });
  if (!started.ok()) {
    failed = true;
    return Fail(options, started);
  }
  link.ReportReady({});
  process.SetProbes([&] { return process.CheckLiveness(); }, [] { return absl::OkStatus(); });
  Ticker ticker(kInfoInterval, [&] {
    process.Observe();
    join.Send(process.Info());
  });
  signals.OnSignal([&] { terminating = true; });
  const absl::Status ended = process.rank().Follow(stop);
  ExitGroupLost(options.rank, std::string(ended.message()));
}

}  // namespace

absl::Status CheckModel(const GroupFlags& flags) {
  return RankModel::Check(ModelOptionsOf({.group = flags}));
}

int RunRankProcess(const RankProcessOptions& options, TerminationSignals& signals,
                   SupervisorLink& link) {
  SignalWatch watch(signals);
  return options.rank == 0 ? RunLeader(options, watch, link) : RunFollower(options, watch, link);
}

}  // namespace weft
