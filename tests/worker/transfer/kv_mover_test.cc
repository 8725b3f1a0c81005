#include "worker/transfer/kv_mover.h"

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "server/base/log.h"
#include "tests/worker/transfer/kv_testing.h"
#include "weft/v1/worker.pb.h"

namespace weft {
namespace {

// Made before there are threads: ThreadSanitizer does not see how spdlog's library makes it once.
[[maybe_unused]] const spdlog::logger* const kLogger = spdlog::default_logger_raw();

constexpr std::uint64_t kTransfer = 0x1234;

// A group whose ranks have movers and are told of steps by the test.
class MovingGroup {
 public:
  using MakeFabric = std::function<std::unique_ptr<Fabric>()>;
  MovingGroup(
      const LayoutOptions& options, const HeadCounts& heads, const KvCacheShape& shape,
      std::int64_t max_len, const KvMoverOptions& mover, std::mt19937& random,
      const std::string& format = "kv",
      const MakeFabric& make_fabric = [] { return MakeLocalFabric("kv"); })
      : kv(options, heads, shape, max_len, random) {
    endpoint.set_format(format);
    endpoint.set_tensor_parallel_size(options.tensor_parallel_size);
    endpoint.set_decode_context_parallel_size(options.decode_context_parallel_size);
    endpoint.set_block_size(kv.layouts[0].block_size());
    endpoint.set_cp_kv_cache_interleave_size(kv.layouts[0].interleave());
    for (std::int32_t r = 0; r < options.tensor_parallel_size; ++r) {
      std::unique_ptr<Fabric> fabric = make_fabric();
      endpoint.add_fabric_addresses(fabric->LocalAddress());
      slots.emplace_back(1, static_cast<std::int32_t>(kv.table.size()));
      movers.push_back(std::make_unique<KvMover>(std::move(fabric), kv.Rank(r, format), mover,
                                                 [this, r](const KvReport& report) {
                                                   MutexLock lock(mutex_);
                                                   last_[r] = report;
                                                   seen_[{r, report.kind}] = true;
                                                 }));
    }
  }

  void BeginStep(std::vector<KvOp> ops) {
    StepPlan plan;
    if (!std::exchange(table_sent_, true)) {
      plan.table_deltas = {{.slot = 0, .num_blocks = static_cast<std::int32_t>(kv.table.size())}};
      plan.delta_blocks = kv.table;
    }
    plan.kv_ops = std::move(ops);
    for (std::size_t r = 0; r < movers.size(); ++r) {
      slots[r].Apply(plan);
      movers[r]->OnStepBegin(plan, slots[r]);
    }
  }
  // A step that computes [first, end).
  void ComputeStep(std::vector<KvOp> ops, std::int64_t first, std::int64_t end) {
    BeginStep(std::move(ops));
    for (std::int32_t layer = 0; layer < kv.caches[0].shape().num_layers; ++layer) {
      kv.FillLayer(layer, first, end);
      for (const auto& mover : movers) mover->OnLayerStored(layer);
    }
    for (const auto& mover : movers) mover->OnStepEnd();
  }

  // That every rank has reported `kind`.
  bool WaitForAll(KvReport::Kind kind) {
    return WaitFor([this, kind]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      for (std::size_t r = 0; r < movers.size(); ++r) {
        if (!seen_[{static_cast<int>(r), kind}]) return false;
      }
      return true;
    });
  }
  // That some rank has failed; its reason.
  std::string WaitForFailure() {
    std::string error;
    WaitFor([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      for (const auto& [rank, report] : last_) {
        if (report.kind == KvReport::Kind::kFailed) error = report.error;
      }
      return !error.empty();
    });
    return error;
  }
  KvCounters Counters() const {
    KvCounters sum;
    for (const auto& mover : movers) {
      const KvCounters one = mover->counters();
      sum.sent_bytes += one.sent_bytes;
      sum.received_bytes += one.received_bytes;
      sum.read_bytes += one.read_bytes;
      sum.dropped_messages += one.dropped_messages;
    }
    return sum;
  }
  std::shared_ptr<const std::string> Target() const {
    v1::KvTarget target;
    target.set_transfer_id(kTransfer);
    *target.mutable_endpoint() = endpoint;
    return std::make_shared<const std::string>(target.SerializeAsString());
  }

  // Their threads report to what is below.
  ~MovingGroup() { movers.clear(); }

  KvGroup kv;
  v1::KvEndpoint endpoint;
  std::vector<SlotTable> slots;
  std::vector<std::unique_ptr<KvMover>> movers;

 private:
  template <typename Condition>
  bool WaitFor(Condition condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::chrono::steady_clock::now() < deadline) {
      {
        MutexLock lock(mutex_);
        if (condition()) return true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }

  bool table_sent_ = false;
  Mutex mutex_;
  std::map<int, KvReport> last_ ABSL_GUARDED_BY(mutex_);
  std::map<std::pair<int, KvReport::Kind>, bool> seen_ ABSL_GUARDED_BY(mutex_);
};

KvOp Receive(std::int64_t first, std::int64_t end) {
  return {.kind = KvOp::Kind::kReceive,
          .transfer = kTransfer,
          .first_position = first,
          .end_position = end};
}
KvOp Send(const MovingGroup& to, std::int64_t first) {
  return {.kind = KvOp::Kind::kSend,
          .transfer = kTransfer,
          .first_position = first,
          .end_position = first,
          .target = to.Target()};
}
KvOp Rows(std::int64_t first, std::int64_t end, bool last) {
  return {.kind = KvOp::Kind::kSendRows,
          .last = last,
          .transfer = kTransfer,
          .first_position = first,
          .end_position = end};
}
KvOp CloseOp() { return {.kind = KvOp::Kind::kClose, .transfer = kTransfer}; }

const KvCacheShape kShape = {
    .num_layers = 3, .head_dim = 16, .value_dim = 16, .dtype = DType::kFloat16};

// A prompt in chunks between random layouts, layerwise and blockwise; `first` positions are at the
// receiver already, and the sender has a prefix cached.
TEST(KvMoverTest, MovesAPromptBetweenAnyTwoLayouts) {
  for (int seed = 0; seed < 24; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&random](int from, int to) {
      return std::uniform_int_distribution<int>(from, to)(random);
    };
    const int kv_heads = draw(1, 3);
    const HeadCounts heads = {.num_q_heads = kv_heads * draw(1, 3), .num_kv_heads = kv_heads};
    const LayoutOptions a = DrawLayout(random, heads);
    const LayoutOptions b = DrawLayout(random, heads);
    const std::int64_t end = draw(1, 200);
    const std::int64_t first = draw(0, static_cast<int>(end) - 1);
    const std::int64_t cached = draw(0, static_cast<int>(end) - 1);
    KvMoverOptions options = {.layerwise = draw(0, 1) == 1,
                              .message_bytes = draw(1, 4000),
                              .window_bytes = draw(1, 8000),
                              .checksum = draw(0, 1) == 1};
    SCOPED_TRACE(fmt::format("seed {}: {} -> {}, [{}, {}), {} cached, {}", seed, Describe(a),
                             Describe(b), first, end, cached,
                             options.layerwise ? "layerwise" : "blockwise"));
    MovingGroup from(a, heads, kShape, end, options, random);
    MovingGroup to(b, heads, kShape, end, options, random);
    to.BeginStep({Receive(first, end)});
    ASSERT_TRUE(to.WaitForAll(KvReport::Kind::kOpened));
    from.kv.Fill(0, cached);
    for (std::int64_t at = cached; at < end;) {
      const std::int64_t next = std::min<std::int64_t>(end, at + draw(1, 80));
      std::vector<KvOp> ops;
      if (at == cached) ops.push_back(Send(to, first));
      ops.push_back(Rows(std::min(at, next), next, next == end));
      from.ComputeStep(std::move(ops), at, next);
      at = next;
    }
    ASSERT_TRUE(from.WaitForAll(KvReport::Kind::kDone)) << from.WaitForFailure();
    ASSERT_TRUE(to.WaitForAll(KvReport::Kind::kDone));
    from.BeginStep({CloseOp()});
    to.BeginStep({CloseOp()});
    EXPECT_EQ(to.kv.CountWrong(first, end), 0);
    EXPECT_EQ(to.kv.CountWrong(0, first, /*empty=*/true), 0);
    EXPECT_EQ(from.Counters().sent_bytes, to.Counters().received_bytes);
    for (std::size_t r = 0; r < from.movers.size(); ++r) {
      std::vector<std::int64_t> received(to.movers.size());
      for (std::size_t s = 0; s < received.size(); ++s) {
        const std::vector<std::int64_t> by_peer = to.movers[s]->counters().received_from;
        if (r < by_peer.size()) received[s] = by_peer[r];
      }
      std::vector<std::int64_t> sent = from.movers[r]->counters().sent_to;
      sent.resize(received.size());
      EXPECT_EQ(sent, received) << "rank " << r;
    }
    EXPECT_EQ(to.Counters().dropped_messages, 0);
  }
}

// Processes of one host, over UCX: rows are read where the sender has them, unless one side will
// not.
TEST(KvMoverTest, ReadsWhatIsInTheMemoryOfThisHost) {
  const auto ucx = [] {
    auto fabric = MakeUcxFabric(UcxReach::kBetweenGroups);
    EXPECT_TRUE(fabric.ok()) << fabric.status();
    return *std::move(fabric);
  };
  for (int i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    std::mt19937 random(i);
    const bool sender_may = i % 2 == 0, receiver_may = i < 2;
    const HeadCounts heads = {.num_q_heads = 4, .num_kv_heads = 2};
    KvMoverOptions options = {.message_bytes = 700, .staging_bytes = 3000, .checksum = true};
    options.shared_memory = sender_may;
    MovingGroup from({.tensor_parallel_size = 2, .block_size = 16, .interleave = 1}, heads, kShape,
                     100, options, random, "kv", ucx);
    options.shared_memory = receiver_may;
    MovingGroup to({.tensor_parallel_size = 4,
                    .decode_context_parallel_size = 2,
                    .block_size = 32,
                    .interleave = 4},
                   heads, kShape, 100, options, random, "kv", ucx);
    to.BeginStep({Receive(0, 100)});
    ASSERT_TRUE(to.WaitForAll(KvReport::Kind::kOpened));
    from.ComputeStep({Send(to, 0), Rows(0, 100, true)}, 0, 100);
    ASSERT_TRUE(from.WaitForAll(KvReport::Kind::kDone)) << from.WaitForFailure();
    ASSERT_TRUE(to.WaitForAll(KvReport::Kind::kDone));
    from.BeginStep({CloseOp()});
    to.BeginStep({CloseOp()});
    EXPECT_EQ(to.kv.CountWrong(0, 100), 0);
    EXPECT_EQ(to.Counters().read_bytes,
              sender_may && receiver_may ? to.Counters().received_bytes : 0);
  }
}

// A sender that wakes up after the receiver's blocks have been given to somebody else.
TEST(KvMoverTest, DropsWhatComesForAForgottenTransfer) {
  std::mt19937 random(1);
  const HeadCounts heads = {.num_q_heads = 2, .num_kv_heads = 2};
  const LayoutOptions layout = {.tensor_parallel_size = 1, .block_size = 16, .interleave = 1};
  MovingGroup from(layout, heads, kShape, 64, {}, random);
  MovingGroup to(layout, heads, kShape, 64, {}, random);
  to.BeginStep({Receive(0, 64)});
  from.ComputeStep({Send(to, 0), Rows(0, 32, false)}, 0, 32);
  to.BeginStep({CloseOp()});
  to.kv.Fill(0, 0);
  from.ComputeStep({Rows(32, 64, true)}, 32, 64);
  EXPECT_EQ(from.WaitForFailure(), "the decode group has given the transfer up");
  EXPECT_GT(to.Counters().dropped_messages, 0);
  EXPECT_EQ(to.kv.CountWrong(32, 64, /*empty=*/true), 0);
}

TEST(KvMoverTest, SendsNothingToAGroupOfAnotherFormat) {
  std::mt19937 random(1);
  const HeadCounts heads = {.num_q_heads = 2, .num_kv_heads = 2};
  const LayoutOptions layout = {.tensor_parallel_size = 1, .block_size = 16, .interleave = 1};
  MovingGroup from(layout, heads, kShape, 64, {}, random, "kv of model a");
  MovingGroup to(layout, heads, kShape, 64, {}, random, "kv of model b");
  to.BeginStep({Receive(0, 64)});
  from.ComputeStep({Send(to, 0), Rows(0, 64, true)}, 0, 64);
  EXPECT_EQ(from.WaitForFailure(),
            "the KV of the decode group is kv of model b; this group has kv of model a");
  EXPECT_EQ(to.Counters().received_bytes, 0);
  // A router that is wrong about it: the receiver refuses, and says why.
  MovingGroup liar(layout, heads, kShape, 64, {}, random, "kv of model a");
  to.endpoint.set_format("kv of model a");
  liar.ComputeStep({Send(to, 0), Rows(0, 64, true)}, 0, 64);
  EXPECT_EQ(liar.WaitForFailure(),
            "the KV of the prefill group is kv of model a; this group has kv of model b");
  EXPECT_EQ(to.Counters().received_bytes, 0);
}

TEST(KvMoverTest, ReportsAPeerThatIsGone) {
  std::mt19937 random(1);
  const HeadCounts heads = {.num_q_heads = 2, .num_kv_heads = 2};
  const LayoutOptions layout = {.tensor_parallel_size = 1, .block_size = 16, .interleave = 1};
  MovingGroup from(layout, heads, kShape, 64, {}, random);
  auto to = std::make_unique<MovingGroup>(layout, heads, kShape, 64, KvMoverOptions{}, random);
  to->BeginStep({Receive(0, 64)});
  from.ComputeStep({Send(*to, 0), Rows(0, 32, false)}, 0, 32);
  to.reset();
  from.ComputeStep({Rows(32, 64, true)}, 32, 64);
  EXPECT_EQ(from.WaitForFailure(), "the peer is gone");
}

}  // namespace
}  // namespace weft
