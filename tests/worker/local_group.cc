#include "tests/worker/local_group.h"

#include <algorithm>
#include <utility>

#include "fmt/format.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

class CollectingSink final : public TokenSink {
 public:
  void OnEvent(const TokenEvent& event) override {
    MutexLock lock(mutex_);
    if (event.token_id.has_value()) completion_.token_ids.push_back(*event.token_id);
    if (event.logprobs.has_value()) completion_.logprobs.push_back(*event.logprobs);
    completion_.prompt_logprobs.insert(completion_.prompt_logprobs.end(),
                                       event.prompt_logprobs.begin(), event.prompt_logprobs.end());
    completion_.num_preemptions = event.num_preemptions;
    completion_.num_cached_tokens = event.num_cached_tokens;
    completion_.finish = event.finish;
    completion_.status = event.error;
    ended_ = event.finish != FinishReason::kNone;
    if (ended_) changed_.NotifyAll();
  }
  void OnRefused(const absl::Status& status) override {
    MutexLock lock(mutex_);
    completion_.status = status;
    ended_ = true;
    changed_.NotifyAll();
  }
  Completion Wait() {
    MutexLock lock(mutex_);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!ended_) {
      if (changed_.WaitUntil(mutex_, deadline)) continue;
      completion_.status = absl::DeadlineExceededError("no end after 60 s");
      break;
    }
    return completion_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  Completion completion_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<LocalGroup>> LocalGroup::Start(const LocalGroupOptions& options) {
  std::unique_ptr<LocalGroup> group(new LocalGroup());
  const std::int32_t tp = options.model.layout.tensor_parallel_size;
  for (std::int32_t r = 0; r < tp; ++r) {
    group->cpus_.push_back(std::make_unique<kernels::CpuStream>(options.threads_per_rank));
    group->streams_.push_back(group->cpus_.back().get());
    if (options.open_device != nullptr) {
      ASSIGN_OR_RETURN(std::unique_ptr<kernels::DeviceStream> device,
                       options.open_device(r, *group->cpus_.back()));
      group->streams_.back() = device.get();
      group->devices_.push_back(std::move(device));
    }
    group->progress_.push_back(std::make_unique<Progress>());
    RankModelOptions model_options = options.model;
    model_options.rank = r;
    ASSIGN_OR_RETURN(RankModel model,
                     RankModel::Load(model_options, *group->streams_.back(), [](int, int) {}));
    group->models_.push_back(std::move(model));
    group->fabrics_.push_back(MakeLocalFabric(fmt::format("rank{}", r)));
    group->agreement_.fabric_addresses.push_back(group->fabrics_.back()->LocalAddress());
    group->kv_fabrics_.push_back(options.kv.has_value() ? MakeLocalFabric("kv") : nullptr);
    if (options.kv.has_value()) {
      group->kv_addresses_.push_back(group->kv_fabrics_.back()->LocalAddress());
    }
  }
  std::int32_t blocks = group->models_[0].num_blocks;
  for (const RankModel& model : group->models_) blocks = std::min(blocks, model.num_blocks);
  group->agreement_.num_blocks = blocks;
  ASSIGN_OR_RETURN(group->agreement_.max_model_len,
                   group->models_[0].ResolveMaxModelLen(options.model.max_model_len, blocks));
  ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                   Engine::Create({.block_size = group->models_[0].layout.block_size(),
                                   .num_blocks = blocks,
                                   .max_model_len = group->agreement_.max_model_len,
                                   .max_num_seqs = options.model.max_num_seqs,
                                   .max_num_batched_tokens = options.model.max_num_batched_tokens,
                                   .vocab_size = group->models_[0].config.vocab_size,
                                   .async_scheduling = options.async_scheduling,
                                   .enable_prefix_caching = options.enable_prefix_caching,
                                   .num_ranks = tp,
                                   .kv_lease = options.kv_lease,
                                   .force_preemption_every = options.force_preemption_every}));
  group->leader_ = std::make_unique<Leader>(std::move(engine), 1024);

  RankOptions rank_options = options.rank;
  rank_options.max_num_seqs = options.model.max_num_seqs;
  rank_options.max_num_batched_tokens = options.model.max_num_batched_tokens;
  rank_options.exchange = options.model.exchange;
  for (std::int32_t r = 0; r < tp; ++r) {
    group->threads_.emplace_back(
        [g = group.get(), r, rank_options, drive = options.drive, kv_options = options.kv] {
          absl::Status status;
          std::unique_ptr<KvTransferSetup> kv;
          if (kv_options.has_value()) {
            kv = std::make_unique<KvTransferSetup>(KvTransferSetup{
                .fabric = std::move(g->kv_fabrics_[r]),
                .options = *kv_options,
                .on_report = [g](const KvReport& report) { g->leader_->OnKvReport(report); }});
          }
          auto rank = Rank::Start(g->models_[r], g->agreement_, rank_options, *g->fabrics_[r],
                                  *g->streams_[r], *g->progress_[r], std::move(kv));
          if (rank.ok() && kv_options.has_value()) {
            MutexLock lock(g->mutex_);
            g->kv_movers_.push_back((*rank)->kv_mover());
          }
          if (!rank.ok()) {
            status = rank.status();
          } else if (r > 0) {
            status = (*rank)->Follow(g->stop_);
          } else {
            status = drive ? drive(**rank) : g->leader_->RunExecutor(**rank);
          }
          MutexLock lock(g->mutex_);
          g->kv_movers_.clear();
          g->status_.Update(status);
        });
  }
  return group;
}

LocalGroup::~LocalGroup() {
  if (leader_ != nullptr) leader_->Stop();
  if (!threads_.empty()) threads_[0].join();
  stop_ = true;
  for (std::size_t r = 1; r < threads_.size(); ++r) {
    fabrics_[r]->Wake();
    threads_[r].join();
  }
}

absl::Status LocalGroup::status() const {
  MutexLock lock(mutex_);
  return status_;
}

KvCounters LocalGroup::kv_counters() const {
  KvCounters sum;
  MutexLock lock(mutex_);
  for (const KvMover* mover : kv_movers_) {
    const KvCounters one = mover->counters();
    sum.sent_bytes += one.sent_bytes;
    sum.overlapped_bytes += one.overlapped_bytes;
    sum.received_bytes += one.received_bytes;
    sum.dropped_messages += one.dropped_messages;
    sum.failed_rows += one.failed_rows;
    sum.sending += one.sending;
    sum.receiving += one.receiving;
  }
  return sum;
}

std::vector<Completion> LocalGroup::Generate(std::vector<EngineRequest> requests) {
  std::vector<std::shared_ptr<CollectingSink>> sinks;
  for (EngineRequest& request : requests) {
    sinks.push_back(std::make_shared<CollectingSink>());
    const auto id = leader_->Submit(std::move(request), sinks.back());
    if (!id.ok()) sinks.back()->OnRefused(id.status());
  }
  std::vector<Completion> completions;
  for (const auto& sink : sinks) completions.push_back(sink->Wait());
  return completions;
}

}  // namespace weft
