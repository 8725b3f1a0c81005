#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/device_stream.h"
#include "worker/leader.h"
#include "worker/rank.h"

namespace weft {

struct LocalGroupOptions {
  RankModelOptions model;  // `rank` is ignored
  RankOptions rank;        // sizes and exchange are taken from `model`
  bool async_scheduling = true;
  bool enable_prefix_caching = true;
  std::int32_t force_preemption_every = 0;
  int threads_per_rank = 1;
  // What rank r computes on, beside its threads; null: on those.
  std::function<absl::StatusOr<std::unique_ptr<kernels::DeviceStream>>(int rank,
                                                                       kernels::CpuStream& host)>
      open_device;
  std::optional<KvMoverOptions> kv;  // exchanges KV with other groups
  absl::Duration kv_lease = absl::Seconds(30);
  // Runs on rank 0's thread instead of the leader's plans, which then must not be asked for any.
  std::function<absl::Status(Rank& rank)> drive;
};

struct Completion {
  absl::Status status;
  std::vector<std::int32_t> token_ids;
  std::vector<PositionLogprobs> logprobs;
  std::vector<PositionLogprobs> prompt_logprobs;
  FinishReason finish = FinishReason::kNone;
  std::int32_t num_preemptions = 0;
  std::int32_t num_cached_tokens = 0;
};

// A whole group in one process: every rank is a thread, messages go over local fabrics; leader,
// engine, plans (encoded and decoded) and collectives are the real ones.
//
// Threading: one thread uses it.
class LocalGroup {
 public:
  static absl::StatusOr<std::unique_ptr<LocalGroup>> Start(const LocalGroupOptions& options);
  // Waits for `drive`.
  ~LocalGroup();

  // Runs all requests at once and waits for the last.
  std::vector<Completion> Generate(std::vector<EngineRequest> requests);

  Leader& leader() { return *leader_; }
  const RankModel& model(int rank) const { return models_[rank]; }
  const Progress& progress(int rank) const { return *progress_[rank]; }
  std::int64_t max_model_len() const { return agreement_.max_model_len; }
  // With `kv`: where its ranks take KV.
  const std::vector<std::string>& kv_addresses() const { return kv_addresses_; }
  // Of all ranks together.
  KvCounters kv_counters() const;
  // What ended the group, OK while it runs.
  absl::Status status() const;

 private:
  LocalGroup() = default;

  GroupAgreement agreement_;
  std::vector<std::unique_ptr<Fabric>> fabrics_;
  std::vector<std::unique_ptr<Fabric>> kv_fabrics_;  // until the ranks take them
  std::vector<std::string> kv_addresses_;
  std::vector<std::unique_ptr<kernels::CpuStream>> cpus_;
  std::vector<std::unique_ptr<kernels::DeviceStream>> devices_;  // or null
  std::vector<kernels::Stream*> streams_;                        // of one of these two
  std::vector<RankModel> models_;
  std::vector<std::unique_ptr<Progress>> progress_;
  std::unique_ptr<Leader> leader_;
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::vector<const KvMover*> kv_movers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft
