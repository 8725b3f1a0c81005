#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/mutex.h"
#include "worker/engine/kv_report.h"
#include "worker/group/fabric.h"
#include "worker/model/kv_cache.h"
#include "worker/model/shard_layout.h"
#include "worker/model/step_observer.h"
#include "worker/transfer/kv_receiver.h"
#include "worker/transfer/kv_sender.h"

namespace weft {

// Moves the KV of one rank to and from ranks of other groups, on a thread of its own beside the
// executor. What to move comes with the plans, as KvOps; what comes of it goes to `on_report`.
//
// The KV cache is shared with the executor without a lock: a transfer only touches positions that
// the plans have given to it, and OnStepBegin() of a plan that closes it does not return before
// the last touch.
class KvMover final : public StepObserver {
 public:
  // On the executor's thread or ours, with no lock held; may block for a moment.
  using OnReport = std::function<void(const KvReport& report)>;

  // Takes over `fabric`: all its use from here on is on this mover's thread. The cache outlives it;
  // where that is in a device's memory, `copier` is made for it on a stream of its own, `device`.
  KvMover(std::unique_ptr<Fabric> fabric, const KvRank& rank, const KvMoverOptions& options,
          OnReport on_report, std::unique_ptr<kernels::DeviceStream> device = nullptr,
          KvCopier copier = {});
  ~KvMover() override;
  KvMover(const KvMover&) = delete;
  KvMover& operator=(const KvMover&) = delete;

  void OnStepBegin(const StepPlan& plan, const SlotTable& slots) override;
  void OnLayerStored(std::int32_t layer) override;
  void OnStepEnd() override;

  // Ends the thread: no report comes from it any more. After the last step; the destructor does it,
  // too.
  void Stop();

  // Any thread.
  KvCounters counters() const;

 private:
  void Run();
  void Tell(std::vector<KvReport>& reports);
  void HandleMessage(absl::Span<const std::byte> payload) ABSL_LOCKS_EXCLUDED(mutex_);

  std::unique_ptr<Fabric> fabric_;  // destroyed first: until then it may read what is being sent
  const KvRank rank_;
  const OnReport on_report_;
  const std::unique_ptr<kernels::DeviceStream> device_;
  KvCopier copier_ ABSL_GUARDED_BY(mutex_);
  mutable Mutex mutex_;
  KvSender sender_ ABSL_GUARDED_BY(mutex_);
  KvReceiver receiver_ ABSL_GUARDED_BY(mutex_);
  std::vector<KvReport> reports_;       // of the fabric's thread; reused
  std::vector<KvReport> step_reports_;  // of the executor's
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace weft
