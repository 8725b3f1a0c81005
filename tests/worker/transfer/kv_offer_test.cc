// KV that a receiver reads in the memory of the sender: what it reads has to be what was offered.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/worker/transfer/kv_testing.h"
#include "weft/v1/worker.pb.h"
#include "worker/group/shared_memory.h"
#include "worker/group/ucx_address.h"
#include "worker/transfer/kv_message.h"
#include "worker/transfer/kv_receiver.h"
#include "worker/transfer/kv_rows.h"

namespace weft {
namespace {

constexpr std::uint64_t kTransfer = 7;
constexpr std::int64_t kLength = 32;
constexpr std::uint64_t kOffset = 192;  // of the message that is offered
constexpr KvCacheShape kShape = {
    .num_layers = 1, .head_dim = 16, .value_dim = 16, .dtype = DType::kFloat16};
constexpr HeadCounts kHeads = {.num_q_heads = 2, .num_kv_heads = 2};
const LayoutOptions kLayout = {.tensor_parallel_size = 1, .block_size = 16, .interleave = 16};

// A receiver, and a sender of this process that the test plays.
class KvOfferTest : public ::testing::Test {
 protected:
  KvOfferTest()
      : from_(kLayout, kHeads, kShape, kLength, random_),
        to_(kLayout, kHeads, kShape, kLength, random_),
        slots_(1, 4) {
    sender_fabric_->Receive(Channel::kKv, [this](std::uint32_t, absl::Span<const std::byte> bytes) {
      const auto message = DecodeKvMessage(bytes);
      EXPECT_TRUE(message.ok());
      answers_.push_back(message->type);
      if (message->type == KvMessageType::kWelcome) reads_ = message->transfer == 1;
    });
    from_.Fill(0, kLength);
    rank_ = to_.Rank(0);
    receiver_ = std::make_unique<KvReceiver>(*receiver_fabric_, rank_, copier_, KvMoverOptions{});
    StepPlan plan;
    plan.table_deltas = {{.slot = 0, .num_blocks = static_cast<std::int32_t>(to_.table.size())}};
    plan.delta_blocks = to_.table;
    slots_.Apply(plan);
    Reopen();
  }

  static std::unique_ptr<Fabric> NewFabric() {
    auto fabric = MakeUcxFabric(UcxReach::kBetweenGroups);
    EXPECT_TRUE(fabric.ok()) << fabric.status();
    return *std::move(fabric);
  }
  // The transfer, as if nothing had come of it.
  void Reopen() {
    receiver_->Close(kTransfer);
    receiver_->Open({.kind = KvOp::Kind::kReceive, .transfer = kTransfer, .end_position = kLength},
                    slots_, reports_);
  }

  void Greet(const SharedMemory& staging) {
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
                        .transfer = static_cast<std::uint64_t>(staging.descriptor()),
                        .payload = absl::MakeConstSpan(
                            reinterpret_cast<const std::byte*>(text.data()), text.size())});
    NextAnswer();
  }

  static SharedMemory Staging(const Fabric& owner) {
    absl::StatusOr<SharedMemory> staging = SharedMemory::Create(1 << 16, owner.LocalAddress());
    EXPECT_TRUE(staging.ok()) << staging.status();
    return *std::move(staging);
  }

  // The whole message of all rows, as a sender has it at kOffset in its staging; its bytes.
  std::uint64_t Stage() {
    KvMessage rows = {.type = KvMessageType::kRows,
                      .connection = connection_,
                      .transfer = kTransfer,
                      .range = {.heads = {0, 2}, .end_position = kLength}};
    const std::size_t bytes = kLength * KvRowBytes(from_.caches[0].shape(), 2);
    const auto payload = staging_.bytes().subspan(kOffset + kKvHeaderBytes, bytes);
    EXPECT_EQ(PackKvRows({from_.caches[0], from_.layouts[0], from_.table}, to_.layouts[0],
                         rows.range, payload),
              static_cast<std::int64_t>(payload.size()));
    rows.payload = payload;
    EncodeKvHeader(rows, header());
    return kKvHeaderBytes + bytes;
  }
  std::byte* header() const { return staging_.bytes().data() + kOffset; }

  KvMessageType Offer(const KvOffer& offer) {
    receiver_->OnRows(
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
  KvCopier copier_;
  std::unique_ptr<Fabric> sender_fabric_ = NewFabric(), receiver_fabric_ = NewFabric();
  SharedMemory staging_ = Staging(*sender_fabric_);
  std::unique_ptr<KvReceiver> receiver_;
  std::vector<KvReport> reports_;
  std::vector<KvMessageType> answers_;
  bool reads_ = false;
  const std::string address_ = sender_fabric_->LocalAddress();
};

TEST_F(KvOfferTest, StoresWhatIsOffered) {
  Greet(staging_);
  EXPECT_TRUE(reads_);
  EXPECT_EQ(Offer({kOffset, Stage()}), KvMessageType::kTaken);
  EXPECT_EQ(to_.CountWrong(0, kLength), 0);
  EXPECT_EQ(reports_.back().kind, KvReport::Kind::kDone);
}

TEST_F(KvOfferTest, DoesNotReadWhatIsNotTheSenders) {
  Greet(Staging(*receiver_fabric_));
  EXPECT_FALSE(reads_);
}

TEST_F(KvOfferTest, DoesNotReadWhatCanShrink) {
  FabricAddress owner = *DecodeFabricAddress(address_);
  const int descriptor = memfd_create("test", MFD_CLOEXEC);
  ASSERT_GE(descriptor, 0);
  ASSERT_EQ(ftruncate(descriptor, 1 << 16), 0);
  ASSERT_EQ(pwrite(descriptor, &owner.key, sizeof(owner.key), 0),
            static_cast<ssize_t>(sizeof(owner.key)));
  EXPECT_FALSE(PeerMemory::Open(address_, descriptor).has_value());
  close(descriptor);
}

TEST_F(KvOfferTest, DoesNotReadWhatIsNoMemory) {
  EXPECT_TRUE(PeerMemory::Open(address_, staging_.descriptor()).has_value());
  int pipe_ends[2];
  ASSERT_EQ(pipe2(pipe_ends, O_CLOEXEC), 0);
  EXPECT_FALSE(PeerMemory::Open(address_, pipe_ends[0]).has_value());
  EXPECT_FALSE(PeerMemory::Open(address_, pipe_ends[1]).has_value());
  close(pipe_ends[0]);
  close(pipe_ends[1]);
  EXPECT_FALSE(PeerMemory::Open(address_, pipe_ends[0]).has_value());
  EXPECT_FALSE(PeerMemory::Open(address_, -1).has_value());
  EXPECT_FALSE(PeerMemory::Open("no address", staging_.descriptor()).has_value());
}

TEST_F(KvOfferTest, RefusesWhatWasWithdrawn) {
  Greet(staging_);
  const std::uint64_t bytes = Stage();
  std::memset(header(), 0, kKvHeaderBytes);
  EXPECT_EQ(Offer({kOffset, bytes}), KvMessageType::kRejected);
  EXPECT_EQ(reports_.back().kind, KvReport::Kind::kFailed);
  EXPECT_EQ(reports_.back().error, "what the prefill rank has offered is not there any more");
  EXPECT_EQ(to_.CountWrong(0, kLength, /*empty=*/true), 0);
}

TEST_F(KvOfferTest, RefusesWhatHasMadeRoomForOtherRows) {
  Greet(staging_);
  const std::uint64_t bytes = Stage();
  KvMessage other = *DecodeKvMessage({header(), bytes});
  other.range.end_position = kLength - 16;
  EncodeKvHeader(other, header());
  EXPECT_EQ(Offer({kOffset, bytes}), KvMessageType::kRejected);
  EXPECT_EQ(reports_.back().error, "what the prefill rank has offered is not there any more");
  EXPECT_EQ(to_.CountWrong(0, kLength, /*empty=*/true), 0);
}

TEST_F(KvOfferTest, RefusesPlacesThatAreNotInTheStaging) {
  const std::uint64_t size = staging_.bytes().size();
  const std::uint64_t bytes = Stage();
  const KvOffer wrong[] = {{size - bytes + 1, bytes}, {size, kKvHeaderBytes}, {~0ull, bytes},
                           {kOffset, ~0ull},          {kOffset, size + 1},    {kOffset, 63},
                           {~0ull - 63, 64}};
  Greet(staging_);
  for (const KvOffer& offer : wrong) {
    SCOPED_TRACE(offer.offset);
    EXPECT_EQ(Offer(offer), KvMessageType::kRejected);
    EXPECT_THAT(reports_.back().error, ::testing::HasSubstr("are offered"));
    Reopen();
  }
  EXPECT_EQ(Offer({kOffset, bytes}), KvMessageType::kTaken);
}

}  // namespace
}  // namespace weft
