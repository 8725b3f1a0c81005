// KV that a receiver reads in the memory of the sender: what it reads has to be what was offered.

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/worker/transfer/kv_testing.h"
#include "weft/v1/worker.pb.h"
#include "worker/transfer/kv_message.h"
#include "worker/transfer/kv_receiver.h"
#include "worker/transfer/kv_rows.h"

namespace weft {
namespace {

constexpr std::uint64_t kTransfer = 7;
constexpr std::int64_t kLength = 32;
constexpr KvCacheShape kShape = {
    .num_layers = 1, .head_dim = 16, .value_dim = 16, .dtype = DType::kFloat16};
constexpr HeadCounts kHeads = {.num_q_heads = 2, .num_kv_heads = 2};
const LayoutOptions kLayout = {.tensor_parallel_size = 1, .block_size = 16, .interleave = 16};

std::uint64_t AddressOf(const void* memory) {
  return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(memory));
}

// A receiver, and a sender of this process that the test plays.
class KvOfferTest : public ::testing::Test {
 protected:
  KvOfferTest()
      : from_(kLayout, kHeads, kShape, kLength, random_),
        to_(kLayout, kHeads, kShape, kLength, random_),
        slots_(1, 4) {
    auto sender = MakeUcxFabric(UcxReach::kBetweenGroups);
    auto receiver = MakeUcxFabric(UcxReach::kBetweenGroups);
    EXPECT_TRUE(sender.ok() && receiver.ok());
    sender_fabric_ = *std::move(sender);
    receiver_fabric_ = *std::move(receiver);
    sender_fabric_->Receive(Channel::kKv, [this](std::uint32_t, absl::Span<const std::byte> bytes) {
      const auto message = DecodeKvMessage(bytes);
      EXPECT_TRUE(message.ok());
      answers_.push_back(message->type);
      if (message->type == KvMessageType::kWelcome) reads_ = message->transfer == 1;
    });
    from_.Fill(0, kLength);
    rank_ = to_.Rank(0);
    receiver_ = std::make_unique<KvReceiver>(*receiver_fabric_, rank_, KvMoverOptions{});
    StepPlan plan;
    plan.table_deltas = {{.slot = 0, .num_blocks = static_cast<std::int32_t>(to_.table.size())}};
    plan.delta_blocks = to_.table;
    slots_.Apply(plan);
    receiver_->Open({.kind = KvOp::Kind::kReceive, .transfer = kTransfer, .end_position = kLength},
                    slots_, reports_);
  }

  // Says where it is that `connection_` is to be found.
  void Greet(const void* connection) {
    v1::KvEndpoint hello;
    hello.set_format("kv");
    hello.set_tensor_parallel_size(1);
    hello.set_decode_context_parallel_size(1);
    hello.set_block_size(16);
    hello.set_cp_kv_cache_interleave_size(16);
    hello.add_fabric_addresses(sender_fabric_->LocalAddress());
    const std::string text = hello.SerializeAsString();
    receiver_->OnHello({.type = KvMessageType::kHello,
                        .connection = connection_,
                        .transfer = AddressOf(connection),
                        .payload = absl::MakeConstSpan(
                            reinterpret_cast<const std::byte*>(text.data()), text.size())});
    NextAnswer();
  }

  // The whole message of all rows, as a sender has it in its staging.
  std::vector<std::byte> Staged() {
    KvMessage rows = {.type = KvMessageType::kRows,
                      .connection = connection_,
                      .transfer = kTransfer,
                      .range = {.heads = {0, 2}, .end_position = kLength}};
    std::vector<std::byte> staged(kKvHeaderBytes +
                                  kLength * KvRowBytes(from_.caches[0].shape(), 2));
    const auto payload = absl::MakeSpan(staged).subspan(kKvHeaderBytes);
    EXPECT_EQ(PackKvRows({from_.caches[0], from_.layouts[0], from_.table}, to_.layouts[0],
                         rows.range, payload),
              static_cast<std::int64_t>(payload.size()));
    rows.payload = payload;
    EncodeKvHeader(rows, staged.data());
    return staged;
  }

  KvMessageType Offer(const KvOffer& offer) {
    receiver_->OnOffer(
        {.type = KvMessageType::kOffer,
         .connection = connection_,
         .transfer = kTransfer,
         .range = {.heads = {0, 2}, .end_position = kLength},
         .payload = absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&offer), sizeof(offer))},
        absl::UnixEpoch(), reports_);
    return NextAnswer();
  }
  KvMessageType NextAnswer() {
    for (int i = 0; i < 2000 && answers_.empty(); ++i) {
      receiver_fabric_->Progress();
      sender_fabric_->Wait(absl::Milliseconds(5));
    }
    EXPECT_EQ(answers_.size(), 1u);
    const KvMessageType answer = answers_.empty() ? KvMessageType{} : answers_.front();
    answers_.clear();
    return answer;
  }

  std::mt19937 random_{1};
  const std::uint64_t connection_ = 0x1234567;
  KvGroup from_, to_;
  SlotTable slots_;
  KvRank rank_;
  std::unique_ptr<Fabric> sender_fabric_, receiver_fabric_;
  std::unique_ptr<KvReceiver> receiver_;
  std::vector<KvReport> reports_;
  std::vector<KvMessageType> answers_;
  bool reads_ = false;
};

TEST_F(KvOfferTest, StoresWhatIsOffered) {
  Greet(&connection_);
  EXPECT_TRUE(reads_);
  const std::vector<std::byte> staged = Staged();
  EXPECT_EQ(Offer({AddressOf(staged.data()), staged.size()}), KvMessageType::kTaken);
  EXPECT_EQ(to_.CountWrong(0, kLength), 0);
  EXPECT_EQ(reports_.back().kind, KvReport::Kind::kDone);
}

TEST_F(KvOfferTest, DoesNotReadInAProcessThatIsNotTheSender) {
  const std::uint64_t other = connection_ + 1;
  Greet(&other);
  EXPECT_FALSE(reads_);
}

TEST_F(KvOfferTest, RefusesWhatWasWithdrawn) {
  Greet(&connection_);
  std::vector<std::byte> staged = Staged();
  std::memset(staged.data(), 0, kKvHeaderBytes);
  EXPECT_EQ(Offer({AddressOf(staged.data()), staged.size()}), KvMessageType::kRejected);
  EXPECT_EQ(reports_.back().kind, KvReport::Kind::kFailed);
  EXPECT_EQ(to_.CountWrong(0, kLength, /*empty=*/true), 0);
}

TEST_F(KvOfferTest, RefusesWhatHasMadeRoomForOtherRows) {
  Greet(&connection_);
  std::vector<std::byte> staged = Staged();
  KvMessage other = *DecodeKvMessage(staged);
  other.range.end_position = kLength - 16;
  EncodeKvHeader(other, staged.data());
  EXPECT_EQ(Offer({AddressOf(staged.data()), staged.size()}), KvMessageType::kRejected);
  EXPECT_EQ(reports_.back().error,
            "what the prefill rank has offered has made room for other rows");
  EXPECT_EQ(to_.CountWrong(0, kLength, /*empty=*/true), 0);
}

TEST_F(KvOfferTest, RefusesWhatIsNotThere) {
  Greet(&connection_);
  EXPECT_EQ(Offer({.address = 64, .bytes = 4096}), KvMessageType::kRejected);
  EXPECT_EQ(reports_.back().error, "what the prefill rank has offered is not there any more");
}

TEST_F(KvOfferTest, RefusesSizesThatNoSenderHas) {
  Greet(&connection_);
  const std::vector<std::byte> staged = Staged();
  EXPECT_EQ(Offer({AddressOf(staged.data()), kKvHeaderBytes - 1}), KvMessageType::kRejected);
  EXPECT_EQ(reports_.back().error, "63 bytes are offered; allowed is 64 to 67108864");
}

}  // namespace
}  // namespace weft
