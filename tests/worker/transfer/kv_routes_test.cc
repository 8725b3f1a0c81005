#include "worker/transfer/kv_routes.h"

#include <map>
#include <random>
#include <utility>
#include <vector>

#include "tests/worker/transfer/kv_testing.h"
#include "worker/transfer/kv_message.h"
#include "worker/transfer/kv_rows.h"

namespace weft {
namespace {

int Draw(std::mt19937& random, int from, int to) {
  return std::uniform_int_distribution<int>(from, to)(random);
}

HeadCounts DrawHeads(std::mt19937& random) {
  const int kv = Draw(random, 1, 5);
  return {.num_q_heads = kv * Draw(random, 1, 4), .num_kv_heads = kv};
}

constexpr int kPairs = 400;

TEST(KvRoutesTest, EveryPositionOfEveryHeadComesOnceFromARankThatHasIt) {
  for (int seed = 0; seed < kPairs; ++seed) {
    std::mt19937 random(seed);
    const HeadCounts heads = DrawHeads(random);
    const LayoutOptions a = DrawLayout(random, heads);
    const LayoutOptions b = DrawLayout(random, heads);
    SCOPED_TRACE(fmt::format("seed {}: {} KV heads of {}; {} -> {}", seed, heads.num_kv_heads,
                             heads.num_q_heads, Describe(a), Describe(b)));
    const auto from = LayoutsOfGroup(a, heads);
    const auto to = LayoutsOfGroup(b, heads);
    ASSERT_TRUE(from.ok() && to.ok());
    std::map<std::tuple<int, std::int64_t, int>, int> count;  // receiver, position, head
    const std::int64_t end = 3 * std::max(*a.block_size, *b.block_size) + Draw(random, 0, 9);
    for (const KvRoute& route : PlanKvRoutes(*from, *to)) {
      const ShardLayout& sender = (*from)[route.from_rank];
      const IndexRange held = sender.GroupKvHeads();
      ASSERT_TRUE(route.heads.begin >= held.begin && route.heads.end <= held.end);
      ForEachSharedUnit(sender, (*to)[route.to_rank], 0, end, [&](std::int64_t p, int n) {
        for (int i = 0; i < n; ++i) {
          for (int h = route.heads.begin; h < route.heads.end; ++h) {
            ++count[{route.to_rank, p + i, h}];
          }
        }
        return true;
      });
    }
    std::size_t wanted = 0;
    for (const ShardLayout& receiver : *to) {
      const IndexRange held = receiver.GroupKvHeads();
      for (std::int64_t p = 0; p < end; ++p) {
        if (!receiver.Owns(p)) continue;
        for (int h = held.begin; h < held.end; ++h, ++wanted) {
          const int seen = count[{receiver.rank(), p, h}];
          ASSERT_EQ(seen, 1) << "rank " << receiver.rank() << " position " << p << " head " << h;
        }
      }
    }
    EXPECT_EQ(count.size(), wanted);
  }
}

// Replicated heads: 4 ranks hold the one KV head each; the receivers' 4 take one of each.
TEST(KvRoutesTest, TakesReplicatedHeadsFromTheLeastLoadedCopy) {
  const HeadCounts heads{.num_q_heads = 4, .num_kv_heads = 1};
  const auto layouts = LayoutsOfGroup({.tensor_parallel_size = 4}, heads);
  ASSERT_TRUE(layouts.ok());
  std::vector<int> given(4);
  for (const KvRoute& route : PlanKvRoutes(*layouts, *layouts)) ++given[route.from_rank];
  EXPECT_EQ(given, (std::vector<int>{1, 1, 1, 1}));
  for (int seed = 0; seed < kPairs; ++seed) {
    std::mt19937 random(seed);
    const LayoutOptions a = DrawLayout(random, heads);
    const LayoutOptions b = DrawLayout(random, heads);
    const auto from = LayoutsOfGroup(a, heads);
    const auto to = LayoutsOfGroup(b, heads);
    ASSERT_TRUE(from.ok() && to.ok());
    std::vector<int> load(a.tensor_parallel_size);
    for (const KvRoute& route : PlanKvRoutes(*from, *to)) load[route.from_rank] += 1;
    const auto [least, most] = std::minmax_element(load.begin(), load.end());
    EXPECT_LE(*most - *least, 1) << "seed " << seed << ": " << Describe(a) << " -> " << Describe(b);
  }
}

// What the messages carry, between real caches: what belongs to the receiver arrives, and nothing
// else is touched.
TEST(KvRowsTest, MessagesBringEveryByteWhereItBelongs) {
  for (int seed = 0; seed < kPairs; ++seed) {
    std::mt19937 random(seed);
    const HeadCounts heads = DrawHeads(random);
    const LayoutOptions a = DrawLayout(random, heads);
    const LayoutOptions b = DrawLayout(random, heads);
    const bool latent = heads.num_kv_heads == 1 && Draw(random, 0, 1) == 1;
    const KvCacheShape shape = {
        .num_layers = 2,
        .head_dim = 8 * Draw(random, 1, 2),
        .value_dim = latent ? 0 : 8,
        .dtype = Draw(random, 0, 1) == 0 ? DType::kFloat16 : DType::kFloat32};
    const std::int64_t end = Draw(random, 1, 3 * std::max(*a.block_size, *b.block_size));
    const std::int64_t first = Draw(random, 0, static_cast<int>(end) - 1);
    SCOPED_TRACE(fmt::format("seed {}: {} KV heads of {}; {} -> {}; [{}, {})", seed,
                             heads.num_kv_heads, heads.num_q_heads, Describe(a), Describe(b), first,
                             end));
    KvGroup from(a, heads, shape, end, random);
    KvGroup to(b, heads, shape, end, random);
    from.Fill(0, end);
    std::vector<std::byte> buffer(
        static_cast<std::size_t>(Draw(random, 16, 40) * KvRowBytes(shape, heads.num_kv_heads)));
    for (const KvRoute& route : PlanKvRoutes(from.layouts, to.layouts)) {
      const KvBlocks source = {.cache = from.caches[route.from_rank],
                               .layout = from.layouts[route.from_rank],
                               .table = from.table};
      const KvBlocks sink = {.cache = to.caches[route.to_rank],
                             .layout = to.layouts[route.to_rank],
                             .table = to.table};
      for (std::int32_t layer = 0; layer < shape.num_layers; ++layer) {
        for (std::int64_t at = first; at < end;) {
          KvRowRange range = {
              .layer = layer, .heads = route.heads, .first_position = at, .end_position = end};
          const std::int64_t bytes = PackKvRows(source, sink.layout, range, absl::MakeSpan(buffer));
          ASSERT_TRUE(range.end_position > at) << "no progress";
          ASSERT_EQ(bytes, CountKvRows(source.layout, sink.layout, at, range.end_position) *
                               KvRowBytes(shape, route.heads.size()));
          ScatterKvRows(sink, source.layout, range,
                        absl::MakeConstSpan(buffer).first(static_cast<std::size_t>(bytes)));
          at = range.end_position;
        }
      }
    }
    EXPECT_EQ(to.CountWrong(first, end), 0);
    EXPECT_EQ(to.CountWrong(0, first, /*empty=*/true), 0);
  }
}

TEST(KvMessageTest, DecodesWhatWasEncoded) {
  const KvMessage message = {.type = KvMessageType::kRows,
                             .connection = 0x0123456789abcdef,
                             .rank = 3,
                             .transfer = 77,
                             .range = {.layer = 5,
                                       .heads = {2, 4},
                                       .first_position = std::int64_t{1} << 40,
                                       .end_position = (std::int64_t{1} << 40) + 7},
                             .checksum = 99};
  std::vector<std::byte> bytes(kKvHeaderBytes);
  EncodeKvHeader(message, bytes.data());
  const auto decoded = DecodeKvMessage(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->type, message.type);
  EXPECT_EQ(decoded->connection, message.connection);
  EXPECT_EQ(decoded->rank, 3);
  EXPECT_EQ(decoded->transfer, 77u);
  EXPECT_EQ(decoded->range.layer, 5);
  EXPECT_EQ(decoded->range.heads, (IndexRange{2, 4}));
  EXPECT_EQ(decoded->range.first_position, std::int64_t{1} << 40);
  EXPECT_EQ(decoded->range.end_position, (std::int64_t{1} << 40) + 7);
  EXPECT_EQ(decoded->checksum, 99u);
}

// Any damage to the header is refused or gives a message whose fields are in range.
TEST(KvMessageTest, TakesNoDamagedHeaderForMore) {
  std::mt19937 random(1);
  std::vector<std::byte> good(kKvHeaderBytes + 8);
  KvMessage message = {.type = KvMessageType::kRows, .range = {.heads = {0, 2}, .end_position = 9}};
  message.payload = absl::MakeConstSpan(good).subspan(kKvHeaderBytes);
  EncodeKvHeader(message, good.data());
  for (int i = 0; i < 20000; ++i) {
    std::vector<std::byte> bytes = good;
    for (int k = Draw(random, 1, 4); k > 0; --k) {
      bytes[Draw(random, 0, kKvHeaderBytes - 1)] = static_cast<std::byte>(Draw(random, 0, 255));
    }
    if (Draw(random, 0, 3) == 0) bytes.resize(Draw(random, 0, static_cast<int>(bytes.size())));
    const auto decoded = DecodeKvMessage(bytes);
    if (!decoded.ok()) continue;
    EXPECT_GE(decoded->range.first_position, 0);
    EXPECT_GE(decoded->range.end_position, decoded->range.first_position);
    EXPECT_GE(decoded->range.heads.begin, 0);
    EXPECT_GE(decoded->range.heads.size(), 0);
    EXPECT_EQ(decoded->payload.size(), 8u);
  }
}

}  // namespace
}  // namespace weft
