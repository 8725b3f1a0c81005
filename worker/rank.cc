#include "worker/rank.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "fmt/format.h"
#include "kernels/device/device_stream.h"
#include "server/base/bounded_time.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

// The collectives in which all ranks meet before the first step.
constexpr std::int64_t kMeetingBytesPerRank = 256;
constexpr absl::Duration kMeetingTimeout = absl::Minutes(2);

PlanLimits LimitsOf(const RankModel& model, const GroupAgreement& agreement,
                    const RankOptions& options) {
  const std::int32_t v = model.layout.block_size();
  return {.max_num_seqs = options.max_num_seqs,
          .max_num_batched_tokens = options.max_num_batched_tokens,
          .max_blocks_per_seq = static_cast<std::int32_t>((agreement.max_model_len + v - 1) / v),
          .num_blocks = agreement.num_blocks,
          .vocab_size = model.config.vocab_size,
          .max_model_len = agreement.max_model_len};
}

RunnerOptions RunnerOptionsOf(const RankModel& model, const GroupAgreement& agreement,
                              const RankOptions& options, Progress& progress) {
  return {.max_num_seqs = options.max_num_seqs,
          .max_num_batched_tokens = options.max_num_batched_tokens,
          .max_model_len = agreement.max_model_len,
          .exchange = options.exchange,
          .progress = &progress.ticks(),
          .mla_form = options.mla_form,
          .round_to_bfloat16 = model.dtype == DType::kBFloat16,
          .gather_all_logits = options.gather_all_logits};
}

}  // namespace

bool Progress::MovedOrIdle(std::uint64_t signs) {
  const bool busy = busy_.load(std::memory_order_relaxed);
  const std::uint64_t now = ticks_.load(std::memory_order_relaxed) + steps() + signs;
  const bool moved = now != seen_;
  seen_ = now;
  return moved || !busy;
}

void Progress::Observe(std::uint64_t signs) {
  const std::uint64_t now = ticks_.load(std::memory_order_relaxed) + steps() + signs;
  if (now != observed_) Touch();
  observed_ = now;
}

absl::Status Progress::CheckLiveness(absl::Duration timeout) const {
  if (!busy_.load(std::memory_order_relaxed)) return absl::OkStatus();
  const absl::Duration silence = absl::Now() - last_progress();
  if (silence <= timeout) return absl::OkStatus();
  return absl::UnavailableError(
      fmt::format("step {} has made no progress for {:.1f} s; {} are allowed", steps() + 1,
                  absl::ToDoubleSeconds(silence), absl::FormatDuration(timeout)));
}

Rank::Rank(const RankModel& model, const GroupAgreement& agreement, const RankOptions& options,
           Fabric& fabric, Progress& progress)
    : model_(model),
      agreement_(agreement),
      options_(options),
      fabric_(fabric),
      progress_(progress),
      limits_(LimitsOf(model, agreement, options)) {
  previous_tokens_.reserve(options.max_num_seqs);
}

absl::StatusOr<std::unique_ptr<Rank>> Rank::Start(const RankModel& model,
                                                  const GroupAgreement& agreement,
                                                  const RankOptions& options, Fabric& fabric,
                                                  kernels::Stream& stream, Progress& progress,
                                                  std::unique_ptr<KvTransferSetup> kv) {
  std::unique_ptr<Rank> rank(new Rank(model, agreement, options, fabric, progress));
  ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> meeting, rank->Connect(stream));
  ASSIGN_OR_RETURN(rank->cache_, KvCache::Create(model.kv_shape, agreement.num_blocks, stream));
  RunnerOptions runner_options = RunnerOptionsOf(model, agreement, options, progress);
  if (kv != nullptr) {
    const KvRank kv_rank = KvRankOf(model, rank->cache_);
    std::unique_ptr<kernels::DeviceStream> side;
    if (kernels::DeviceStream* const device = kernels::OnDevice(stream)) {
      ASSIGN_OR_RETURN(side, device->NewStream());
    }
    ASSIGN_OR_RETURN(
        KvCopier copier,
        KvCopier::Create(model.kv_shape, KvMessageBytes(kv_rank, kv->options), side.get()));
    rank->kv_mover_ =
        std::make_unique<KvMover>(std::move(kv->fabric), kv_rank, kv->options,
                                  std::move(kv->on_report), std::move(side), std::move(copier));
    runner_options.observer = rank->kv_mover_.get();
  }
  ASSIGN_OR_RETURN(rank->runner_,
                   RankRunner::Create(model.config, model.layout, model.weights, rank->cache_,
                                      *rank->world_, *rank->dcp_, runner_options, stream));
  RETURN_IF_ERROR(rank->MeetOthers(*meeting, kernels::HostOf(stream)));
  if (options.graphs) RETURN_IF_ERROR(rank->runner_->CaptureGraphs());
  return rank;
}

absl::StatusOr<std::unique_ptr<Communicator>> Rank::Connect(kernels::Stream& stream) {
  const ShardLayout& layout = model_.layout;
  const std::int32_t tp = layout.tensor_parallel_size();
  if (tp > 1) {
    fabric_.Receive(Channel::kPlan, [this](std::uint32_t from, absl::Span<const std::byte> bytes) {
      if (from != 0 || received_ - taken_ == kInboxSlots) {
        inbox_status_ = absl::InternalError(
            fmt::format("unexpected plan from rank {} ({} wait)", from, received_ - taken_));
        return;
      }
      inbox_[received_++ % kInboxSlots].assign(bytes.begin(), bytes.end());
    });
  }
  std::vector<std::uint32_t> tags;
  for (std::int32_t r = 0; r < tp; ++r) {
    tags.push_back(static_cast<std::uint32_t>(r));
    peers_.push_back({});
    if (r == layout.rank()) continue;
    ASSIGN_OR_RETURN(peers_.back(), fabric_.Connect(agreement_.fabric_addresses[r],
                                                    static_cast<std::uint32_t>(layout.rank())));
  }

  if (tp == 1) {
    world_ = MakeSelfCommunicator();
    dcp_ = MakeSelfCommunicator();
    return MakeSelfCommunicator();
  }
  const std::shared_ptr<CollectiveMux> mux = MakeCollectiveMux(fabric_);
  const RunnerOptions runner_options = RunnerOptionsOf(model_, agreement_, options_, progress_);
  const auto make = [&](std::uint32_t id, std::int32_t first, std::int32_t count,
                        std::int64_t max_bytes, absl::Duration stall_timeout) {
    return MakeFabricCommunicator(mux, layout.rank() - first,
                                  absl::MakeSpan(peers_).subspan(first, count),
                                  absl::MakeSpan(tags).subspan(first, count),
                                  {.id = id,
                                   .max_bytes = max_bytes,
                                   .stall_timeout = stall_timeout,
                                   .progress = &progress_.ticks()});
  };
  const std::int32_t dcp = layout.decode_context_parallel_size();
  world_ = make(0, 0, tp, RankRunner::MaxCollectiveBytes(model_.config, layout, runner_options),
                options_.stall_timeout);
  dcp_ = dcp == 1 ? MakeSelfCommunicator()
                  : make(1 + layout.dcp_group(), layout.dcp_group() * dcp, dcp,
                         MaxAttentionCollectiveBytes(model_.config, layout,
                                                     options_.max_num_batched_tokens),
                         options_.stall_timeout);
  // Ranks get here at different times: some have more to allocate, or a slower disk.
  std::unique_ptr<Communicator> meeting =
      make(1 + tp, 0, tp, kMeetingBytesPerRank * tp, kMeetingTimeout);
  if (kernels::DeviceStream* const device = kernels::OnDevice(stream)) {
    RETURN_IF_ERROR(ConnectDevices(*meeting, *device));
  }
  return meeting;
}

absl::Status Rank::ConnectDevices(Communicator& meeting, kernels::DeviceStream& device) {
  struct Ids {
    kernels::DeviceGroupId world;
    kernels::DeviceGroupId dcp;
  };
  static_assert(sizeof(Ids) <= kMeetingBytesPerRank);
  const ShardLayout& layout = model_.layout;
  const std::int32_t dcp = layout.decode_context_parallel_size();
  const std::int32_t first = layout.dcp_group() * dcp;
  Ids own{};
  if (layout.rank() == 0) {
    ASSIGN_OR_RETURN(own.world, device.NewGroupId());
  }
  if (dcp > 1 && layout.rank() == first) {
    ASSIGN_OR_RETURN(own.dcp, device.NewGroupId());
  }
  std::vector<Ids> all(meeting.size());
  RETURN_IF_ERROR(meeting.AllGather(&own, all.data(), sizeof(own), device.host()));
  const auto join = [&](const kernels::DeviceGroupId& id, std::int32_t first_rank,
                        std::unique_ptr<Communicator>& communicator) -> absl::Status {
    ASSIGN_OR_RETURN(std::unique_ptr<kernels::DeviceCommunicator> joined,
                     device.JoinGroup({.id = id,
                                       .rank = layout.rank() - first_rank,
                                       .size = communicator->size(),
                                       .join_timeout = kMeetingTimeout,
                                       .stall_timeout = options_.stall_timeout,
                                       .symmetric_memory = options_.symmetric_memory}));
    communicator = MakeDeviceCommunicator(std::move(communicator), std::move(joined));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(join(all[0].world, 0, world_));
  return dcp > 1 ? join(all[first].dcp, first, dcp_) : absl::OkStatus();
}

absl::Status Rank::MeetOthers(Communicator& meeting, kernels::Stream& stream) {
  struct Entry {
    std::uint64_t fingerprint;
    std::int64_t max_model_len;
    std::int64_t num_blocks;
  };
  const Entry own{model_.fingerprint, agreement_.max_model_len, agreement_.num_blocks};
  std::vector<Entry> all(world_->size());
  RETURN_IF_ERROR(meeting.AllGather(&own, all.data(), sizeof(own), stream));
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].fingerprint == own.fingerprint && all[r].max_model_len == own.max_model_len &&
        all[r].num_blocks == own.num_blocks) {
      continue;
    }
    return absl::FailedPreconditionError(fmt::format(
        "rank {} has checkpoint {:016x}, max_model_len {}, {} blocks; rank {} has {:016x}, {}, {}",
        r, all[r].fingerprint, all[r].max_model_len, all[r].num_blocks, model_.layout.rank(),
        own.fingerprint, own.max_model_len, own.num_blocks));
  }
  return absl::OkStatus();
}

absl::Status Rank::FinishSends() {
  const auto deadline = std::chrono::steady_clock::now() + ToBoundedChrono(options_.stall_timeout);
  while (sends_in_flight_ > 0) {
    if (fabric_.Progress()) continue;
    fabric_.Wait(absl::Milliseconds(10));
    if (std::chrono::steady_clock::now() > deadline) {
      return absl::UnavailableError(fmt::format("a follower took no plan for {}",
                                                absl::FormatDuration(options_.stall_timeout)));
    }
  }
  return send_status_;
}

absl::Status Rank::SendPlan(const StepPlan& plan) {
  if (world_->size() == 1) return absl::OkStatus();
  // The previous step's collectives have ended on every rank, so its plan has long arrived; its
  // completions may still wait to be seen.
  RETURN_IF_ERROR(FinishSends());
  EncodeStep(previous_tokens_, plan, message_);
  const absl::Span<const std::byte> bytes(message_);
  for (std::int32_t r = 1; r < world_->size(); ++r) {
    ++sends_in_flight_;
    RETURN_IF_ERROR(
        fabric_.Send(peers_[r], Channel::kPlan, {bytes}, [this](const absl::Status& status) {
          --sends_in_flight_;
          send_status_.Update(status);
        }));
  }
  return absl::OkStatus();
}

absl::StatusOr<StepOutput> Rank::RunStep(const StepPlan& plan) {
  progress_.BeginStep();
  RETURN_IF_ERROR(SendPlan(plan));
  ASSIGN_OR_RETURN(const StepOutput output, Execute(plan));
  previous_tokens_.assign(output.token_ids.begin(), output.token_ids.end());
  EndStep();
  return output;
}

absl::Status Rank::RunMessage(absl::Span<const std::byte> message) {
  RETURN_IF_ERROR(DecodeStep(message, limits_, previous_tokens_, plan_));
  return Execute(plan_).status();
}

absl::StatusOr<StepOutput> Rank::Execute(const StepPlan& plan) {
  absl::StatusOr<StepOutput> output = runner_->Execute(plan, previous_tokens_);
  if (output.ok()) return output;
  return absl::Status(output.status().code(), fmt::format("step {}: {}", plan.step,
                                                          std::string(output.status().message())));
}

absl::Status Rank::Follow(const std::atomic<bool>& stop) {
  while (!stop.load(std::memory_order_relaxed)) {
    if (received_ == taken_) {
      RETURN_IF_ERROR(inbox_status_);
      if (!fabric_.Progress()) fabric_.Wait(absl::Seconds(1));
      continue;
    }
    progress_.BeginStep();
    RETURN_IF_ERROR(RunMessage(inbox_[taken_ % kInboxSlots]));
    ++taken_;
    EndStep();
  }
  return absl::OkStatus();
}

void Rank::EndStep() {
  progress_.EndStep();
  const CollectiveCounters world = world_->Counters();
  const CollectiveCounters dcp = dcp_->Counters();
  const CollectiveCounters& replayed = runner_->replayed_collectives();
  MutexLock lock(counters_mutex_);
  counters_ = {.fabric = fabric_.Counters(),
               .collective_received_bytes =
                   world.received_bytes + dcp.received_bytes + replayed.received_bytes,
               .collective_wait = world.waiting + dcp.waiting};
}

RankCounters Rank::counters() const {
  MutexLock lock(counters_mutex_);
  return counters_;
}

}  // namespace weft
