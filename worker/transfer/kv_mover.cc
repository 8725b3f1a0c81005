#include "worker/transfer/kv_mover.h"

#include <utility>

#include "absl/time/clock.h"
#include "server/base/check.h"
#include "server/base/log.h"

namespace weft {

KvMover::KvMover(std::unique_ptr<Fabric> fabric, const KvRank& rank, const KvMoverOptions& options,
                 OnReport on_report, std::unique_ptr<kernels::DeviceStream> device, KvCopier copier)
    : fabric_(std::move(fabric)),
      rank_(rank),
      on_report_(std::move(on_report)),
      device_(std::move(device)),
      copier_(std::move(copier)),
      sender_(*fabric_, rank_, copier_, options),
      receiver_(*fabric_, rank_, copier_, options) {
  fabric_->Receive(Channel::kKv, [this](std::uint32_t, absl::Span<const std::byte> payload) {
    HandleMessage(payload);
  });
  thread_ = std::thread([this] { Run(); });
}

KvMover::~KvMover() {
  Stop();
  fabric_.reset();
}

void KvMover::Stop() {
  if (!thread_.joinable()) return;
  stop_ = true;
  fabric_->Wake();
  thread_.join();
}

void KvMover::OnStepBegin(const StepPlan& plan, const SlotTable& slots) {
  if (plan.kv_ops.empty()) return;
  {
    MutexLock lock(mutex_);
    for (const KvOp& op : plan.kv_ops) {
      switch (op.kind) {
        case KvOp::Kind::kReceive:
          receiver_.Open(op, slots, step_reports_);
          break;
        case KvOp::Kind::kSend:
          sender_.Open(op);
          break;
        case KvOp::Kind::kSendRows:
          sender_.AddRows(op, slots);
          break;
        case KvOp::Kind::kClose:
          sender_.Close(op.transfer);
          receiver_.Close(op.transfer);
          break;
      }
    }
  }
  fabric_->Wake();
  Tell(step_reports_);
}

void KvMover::OnLayerStored(std::int32_t layer) {
  {
    MutexLock lock(mutex_);
    if (!sender_.OnLayerStored(layer)) return;
  }
  fabric_->Wake();
}

void KvMover::OnStepEnd() {
  {
    MutexLock lock(mutex_);
    if (!sender_.OnStepEnd()) return;
  }
  fabric_->Wake();
}

void KvMover::Tell(std::vector<KvReport>& reports) {
  for (const KvReport& report : reports) {
    if (report.kind == KvReport::Kind::kFailed) {
      spdlog::warn("kv transfer {:016x}: {}", report.transfer, report.error);
    }
    on_report_(report);
  }
  reports.clear();
}

void KvMover::HandleMessage(absl::Span<const std::byte> payload) {
  const absl::StatusOr<KvMessage> message = DecodeKvMessage(payload);
  if (!message.ok()) {
    spdlog::warn("kv: {}", std::string(message.status().message()));
    return;
  }
  MutexLock lock(mutex_);
  switch (message->type) {
    case KvMessageType::kHello:
      receiver_.OnHello(*message);
      break;
    case KvMessageType::kOffer:
    case KvMessageType::kRows:
      receiver_.OnRows(*message, absl::Now(), reports_);
      break;
    default:
      sender_.OnAnswer(*message, absl::Now());
  }
}

void KvMover::Run() {
  if (device_ != nullptr) {
    const absl::Status bound = device_->BindThread();
    CHECK_MSG(bound.ok(), std::string(bound.message()));
  }
  absl::Time next_sweep = absl::Now();
  while (!stop_) {
    bool moved = fabric_->Progress();
    const absl::Time now = absl::Now();
    absl::Duration idle;
    {
      MutexLock lock(mutex_);
      moved |= sender_.Pump(now, reports_);
      idle = sender_.IdleFor(now);
      if (now >= next_sweep) {
        receiver_.DropDeadPeers();
        next_sweep = now + absl::Seconds(1);
      }
    }
    Tell(reports_);
    if (!moved) fabric_->Wait(idle);
  }
}

KvCounters KvMover::counters() const {
  KvCounters counters;
  MutexLock lock(mutex_);
  sender_.AddTo(counters);
  receiver_.AddTo(counters);
  return counters;
}

}  // namespace weft
