#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/base/check.h"
#include "spdlog/spdlog.h"
#include "tests/fuzz/fuzz_input.h"
#include "weft/v1/worker.pb.h"
#include "worker/transfer/kv_copier.h"
#include "worker/transfer/kv_receiver.h"
#include "worker/transfer/kv_sender.h"

namespace weft {
namespace {

constexpr std::uint64_t kReceived = 7, kSent = 8;  // transfers
constexpr std::int32_t kNumBlocks = 6, kTableBlocks = 2;
constexpr KvCacheShape kShape = {.num_layers = 2,
                                 .num_kv_heads = 1,
                                 .head_dim = 4,
                                 .value_dim = 2,
                                 .block_tokens_per_rank = 4,
                                 .dtype = DType::kFloat16};

// Everything that is sent arrives, and nobody answers but the fuzzer.
class OneWayFabric final : public Fabric {
 public:
  std::string LocalAddress() const override { return "here"; }
  absl::StatusOr<PeerId> Connect(std::string_view address, std::uint32_t) override {
    if (address.empty()) return absl::InvalidArgumentError("no address");
    return PeerId{0};
  }
  void Receive(Channel, Handler) override {}
  absl::Status Send(PeerId, Channel, absl::Span<const absl::Span<const std::byte>> spans,
                    Done done) override {
    // What we send we can read.
    const absl::StatusOr<KvMessage> message = DecodeKvMessage(spans[0]);
    CHECK_MSG(message.ok(), std::string(message.status().message()));
    if (message->type == KvMessageType::kHello) greeted = message->connection;
    if (done) done(absl::OkStatus());
    return absl::OkStatus();
  }
  absl::Status PeerStatus(PeerId) const override { return absl::OkStatus(); }
  void Disconnect(PeerId) override {}
  bool Progress() override { return false; }
  void Wait(absl::Duration) override {}
  void Wake() override {}
  FabricCounters Counters() const override { return {}; }

  std::uint64_t greeted = 0;  // the sender's connection
};

KvRank Rank(const KvCache& cache) {
  KvRank rank = {.cache = &cache,
                 .layout = {.tensor_parallel_size = 2,
                            .decode_context_parallel_size = 2,
                            .block_size = 8,
                            .interleave = 2},
                 .heads = {.num_q_heads = 2, .num_kv_heads = 1},
                 .format = "kv"};
  rank.group = *LayoutsOfGroup(rank.layout, rank.heads);
  return rank;
}

std::shared_ptr<const std::string> Target() {
  v1::KvTarget target;
  v1::KvEndpoint& endpoint = *target.mutable_endpoint();
  endpoint.set_format("kv");
  endpoint.set_tensor_parallel_size(1);
  endpoint.set_decode_context_parallel_size(1);
  endpoint.set_block_size(8);
  endpoint.set_cp_kv_cache_interleave_size(8);
  endpoint.add_fabric_addresses("there");
  return std::make_shared<const std::string>(target.SerializeAsString());
}

// Both sides of a rank with a transfer each, in the first blocks.
class Sides {
 public:
  Sides() : slots_(1, kTableBlocks) {
    kernels::CpuStream cpu(1);
    absl::StatusOr<KvCache> cache = KvCache::Create(kShape, kNumBlocks, cpu);
    CHECK(cache.ok());
    cache_.emplace(*std::move(cache));
    std::memset(cache_->k_blocks(0), 0, static_cast<std::size_t>(cache_->size_bytes()));
    rank_ = Rank(*cache_);
    receiver_.emplace(fabric_, rank_, copier_, KvMoverOptions{});
    sender_.emplace(fabric_, rank_, copier_, KvMoverOptions{.message_bytes = 64});
    StepPlan plan;
    plan.table_deltas = {{.slot = 0, .num_blocks = kTableBlocks}};
    plan.delta_blocks = {0, 1};
    slots_.Apply(plan);
    receiver_->Open(
        {.kind = KvOp::Kind::kReceive, .transfer = kReceived, .end_position = 8 * kTableBlocks},
        slots_, reports_);
    sender_->Open({.kind = KvOp::Kind::kSend, .transfer = kSent, .target = Target()});
    sender_->AddRows({.kind = KvOp::Kind::kSendRows,
                      .last = true,
                      .transfer = kSent,
                      .end_position = 8 * kTableBlocks},
                     slots_);
    sender_->OnStepEnd();
    sender_->Pump(now_, reports_);
  }

  // As KvMover does. `to_sender`: the connection is the one that the sender has drawn.
  void Take(absl::Span<const std::byte> piece, bool to_sender) {
    absl::StatusOr<KvMessage> message = DecodeKvMessage(piece);
    if (!message.ok()) return;
    std::vector<std::byte> again(kKvHeaderBytes);
    EncodeKvHeader(*message, again.data());
    CHECK(std::memcmp(again.data(), piece.data(), kKvHeaderBytes) == 0);
    if (to_sender) message->connection = fabric_.greeted;
    switch (message->type) {
      case KvMessageType::kHello:
        receiver_->OnHello(*message);
        break;
      case KvMessageType::kOffer:
      case KvMessageType::kRows:
        receiver_->OnRows(*message, now_, reports_);
        break;
      default:
        sender_->OnAnswer(*message, now_);
    }
    now_ += absl::Milliseconds(100);
    sender_->Pump(now_, reports_);
    if (reports_.size() > 100) reports_.clear();
  }

  // Nobody writes into blocks that a transfer does not have.
  void Check() const {
    for (std::int32_t layer = 0; layer < kShape.num_layers; ++layer) {
      CheckUntouched(cache_->k_blocks(layer), kShape.head_dim);
      CheckUntouched(cache_->v_blocks(layer), kShape.value_dim);
    }
  }

 private:
  static void CheckUntouched(const void* blocks, std::int32_t dim) {
    const int block = kShape.block_tokens_per_rank * dim;
    const auto* values = static_cast<const std::uint16_t*>(blocks);
    for (int i = kTableBlocks * block; i < kNumBlocks * block; ++i) CHECK(values[i] == 0);
  }

  OneWayFabric fabric_;
  std::optional<KvCache> cache_;
  KvRank rank_;
  KvCopier copier_;
  SlotTable slots_;
  std::optional<KvReceiver> receiver_;
  std::optional<KvSender> sender_;
  std::vector<KvReport> reports_;
  absl::Time now_ = absl::UnixEpoch();
};

}  // namespace
}  // namespace weft

// What a rank of another group may say: a greeting with its layout, rows, and answers to rows.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  spdlog::set_level(spdlog::level::off);
  weft::Sides sides;
  for (weft::FuzzInput input(data, size); !input.empty();) {
    const bool to_sender = input.Byte() % 2 == 1;
    sides.Take(input.Piece(), to_sender);
  }
  sides.Check();
  return 0;
}
