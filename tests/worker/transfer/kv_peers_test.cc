// What a rank remembers of ranks of other groups that come and go, and what it leaves when it goes.

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/worker/transfer/kv_testing.h"
#include "weft/v1/worker.pb.h"
#include "worker/transfer/kv_mover.h"

namespace weft {
namespace {

constexpr std::int64_t kLength = 32;
constexpr KvCacheShape kShape = {
    .num_layers = 1, .head_dim = 16, .value_dim = 16, .dtype = DType::kFloat16};
constexpr HeadCounts kHeads = {.num_q_heads = 2, .num_kv_heads = 2};
const LayoutOptions kLayout = {.tensor_parallel_size = 1, .block_size = 16, .interleave = 16};

// Its peers welcome whoever greets them, and take no rows.
class WelcomingFabric final : public Fabric {
 public:
  // As a real one may until it is gone.
  ~WelcomingFabric() override {
    std::vector<std::byte> read;
    for (const auto& [span, done] : untaken_) read.insert(read.end(), span.begin(), span.end());
    if (bytes_read != nullptr) *bytes_read = read;
  }
  std::string LocalAddress() const override { return "here"; }
  absl::StatusOr<PeerId> Connect(std::string_view, std::uint32_t) override {
    connected.insert(next_id_);
    return PeerId{next_id_++};
  }
  void Receive(Channel, Handler handler) override { handler_ = std::move(handler); }
  absl::Status Send(PeerId peer, Channel, absl::Span<const absl::Span<const std::byte>> spans,
                    Done done) override {
    EXPECT_TRUE(connected.contains(static_cast<std::uint32_t>(peer)));
    const absl::StatusOr<KvMessage> message = DecodeKvMessage(spans[0]);
    EXPECT_TRUE(message.ok()) << message.status();
    if (message->type == KvMessageType::kRows) {
      untaken_.emplace_back(spans[0], std::move(done));
      ++num_rows;
      return absl::OkStatus();
    }
    if (message->type == KvMessageType::kHello) greeted = message->connection;
    done(absl::OkStatus());
    return absl::OkStatus();
  }
  absl::Status PeerStatus(PeerId peer) const override {
    EXPECT_TRUE(connected.contains(static_cast<std::uint32_t>(peer)));
    return all_die ? absl::UnavailableError("gone") : absl::OkStatus();
  }
  void Disconnect(PeerId peer) override {
    EXPECT_EQ(connected.erase(static_cast<std::uint32_t>(peer)), 1u);
    for (const auto& [span, done] : std::exchange(untaken_, {})) done(absl::CancelledError(""));
  }
  bool Progress() override {
    if (!greeted.has_value() || handler_ == nullptr) return false;
    std::vector<std::byte> bytes(kKvHeaderBytes);
    EncodeKvHeader(Welcome(), bytes.data());
    greeted.reset();
    handler_(0, bytes);
    return true;
  }
  void Wait(absl::Duration) override {
    if (!Progress()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  void Wake() override {}
  FabricCounters Counters() const override { return {}; }

  KvMessage Welcome() const {
    return {.type = KvMessageType::kWelcome, .connection = greeted.value_or(0)};
  }

  std::set<std::uint32_t> connected;
  std::optional<std::uint64_t> greeted;
  bool all_die = false;
  std::atomic<int> num_rows = 0;
  std::vector<std::byte>* bytes_read = nullptr;  // by the destructor

 private:
  std::uint32_t next_id_ = 0;
  Handler handler_;
  std::vector<std::pair<absl::Span<const std::byte>, Done>> untaken_;
};

std::string Endpoint(const std::string& address) {
  v1::KvEndpoint endpoint;
  endpoint.set_format("kv");
  endpoint.set_tensor_parallel_size(1);
  endpoint.set_decode_context_parallel_size(1);
  endpoint.set_block_size(16);
  endpoint.set_cp_kv_cache_interleave_size(16);
  endpoint.add_fabric_addresses(address);
  return endpoint.SerializeAsString();
}

std::vector<KvOp> SendAll(std::uint64_t transfer, const std::string& address) {
  v1::KvTarget target;
  target.mutable_endpoint()->ParseFromString(Endpoint(address));
  return {
      {.kind = KvOp::Kind::kSend,
       .transfer = transfer,
       .target = std::make_shared<const std::string>(target.SerializeAsString())},
      {.kind = KvOp::Kind::kSendRows, .last = true, .transfer = transfer, .end_position = kLength}};
}

class KvPeersTest : public ::testing::Test {
 protected:
  KvPeersTest() : kv_(kLayout, kHeads, kShape, kLength, random_), rank_(kv_.Rank(0)) {
    plan_.table_deltas = {{.slot = 0, .num_blocks = static_cast<std::int32_t>(kv_.table.size())}};
    plan_.delta_blocks = kv_.table;
    slots_.Apply(plan_);
    kv_.Fill(0, kLength);
  }
  template <typename Side>
  static std::int32_t Peers(const Side& side) {
    KvCounters counters;
    side.AddTo(counters);
    return counters.peers;
  }

  std::mt19937 random_{1};
  KvGroup kv_;
  KvRank rank_;
  KvCopier copier_;
  StepPlan plan_;
  SlotTable slots_{1, 4};
};

TEST_F(KvPeersTest, ASenderForgetsRanksThatWereStartedAgain) {
  WelcomingFabric fabric;
  KvSender sender(fabric, rank_, copier_, {.staging_bytes = 1 << 16});
  absl::Time now = absl::UnixEpoch();
  for (std::uint64_t transfer = 1; transfer <= 10000; ++transfer) {
    std::vector<KvReport> reports;
    const std::vector<KvOp> ops = SendAll(transfer, fmt::format("life {}", transfer));
    sender.Open(ops[0]);
    sender.AddRows(ops[1], slots_);
    sender.OnStepEnd();
    sender.Pump(now, reports);
    sender.OnAnswer(fabric.Welcome(), now);
    sender.Pump(now, reports);
    ASSERT_EQ(fabric.num_rows, static_cast<int>(transfer));
    fabric.all_die = true;
    sender.Pump(now, reports);
    fabric.all_die = false;
    ASSERT_EQ(reports.size(), 1u);
    ASSERT_EQ(reports[0].error, "gone");
    sender.Close(transfer);
    now += absl::Seconds(1);
    ASSERT_LE(fabric.connected.size(), 1u);
    ASSERT_LE(Peers(sender), 10);
  }
}

TEST_F(KvPeersTest, AReceiverHasOneConnectionOfEachRankThatIsThere) {
  WelcomingFabric fabric;
  KvReceiver receiver(fabric, rank_, copier_, {});
  const auto greet = [&](std::uint64_t connection, const std::string& address) {
    const std::string hello = Endpoint(address);
    receiver.OnHello({.type = KvMessageType::kHello,
                      .connection = connection,
                      .payload = absl::MakeConstSpan(
                          reinterpret_cast<const std::byte*>(hello.data()), hello.size())});
  };
  for (std::uint64_t connection = 1; connection <= 10000; ++connection) {
    greet(connection, fmt::format("rank {}", connection % 3));
    ASSERT_LE(fabric.connected.size(), 3u);
  }
  EXPECT_EQ(Peers(receiver), 3);
  fabric.all_die = true;
  receiver.DropDeadPeers();
  EXPECT_EQ(Peers(receiver), 0);
  EXPECT_TRUE(fabric.connected.empty());
}

// The fabric reads them until it is gone.
TEST_F(KvPeersTest, AMoverThatEndsKeepsWhatIsBeingSent) {
  auto made = std::make_unique<WelcomingFabric>();
  WelcomingFabric& fabric = *made;
  std::vector<std::byte> read;
  fabric.bytes_read = &read;
  {
    // So long that it shares no memory with the cache: it is unmapped when it is freed.
    KvMover mover(std::move(made), rank_, {.staging_bytes = 64 << 20}, [](const KvReport&) {});
    plan_.kv_ops = SendAll(1, "there");
    mover.OnStepBegin(plan_, slots_);
    mover.OnLayerStored(0);
    mover.OnStepEnd();
    while (fabric.num_rows == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const absl::StatusOr<KvMessage> rows = DecodeKvMessage(read);
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(rows->range.end_position, kLength);
}

}  // namespace
}  // namespace weft
