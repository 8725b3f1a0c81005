// Law 2 across groups: a prompt that is computed by one group and continued by another gives the
// reference's tokens, whatever the layouts of the two. Cells of checkpoint x two layouts x block
// sizes x interleaves x traffic x mode x prefix caching: a pairwise covering set; part I of N of
// all of them with WEFT_ALL_CELLS=I/N, which ctest runs as pd_matrix_full_I (long).

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "gtest/gtest.h"
#include "tests/golden.h"
#include "tests/pairwise.h"
#include "tests/worker/pd_pair.h"

namespace weft {
namespace {

constexpr std::pair<int, int> kRanks[] = {{1, 1}, {2, 1}, {2, 2}, {4, 1}, {4, 2}, {4, 4}};
constexpr int kInterleaves[] = {1, 4, 0};  // 0: all of a block's tokens on a rank (B)
constexpr int kBlockSizes[] = {16, 48};
// GQA, GQA with uneven heads, MLA.
const char* const kCheckpoints[] = {"llama_gqa", "llama_odd", "deepseek_v2_lite"};

struct Side {
  int tp, dcp, block_size, interleave;
};
struct Pair {
  std::string checkpoint;
  Side prefill, decode;
  bool together;  // all requests at once, in small chunks
  bool layerwise;
  bool again;  // everything a second time, of which both groups then have a part cached

  std::string Name() const {
    return fmt::format("{} T={} N={} V={} I={} -> T={} N={} V={} I={}, {}, {}, {}", checkpoint,
                       prefill.tp, prefill.dcp, prefill.block_size, prefill.interleave, decode.tp,
                       decode.dcp, decode.block_size, decode.interleave,
                       together ? "together" : "alone", layerwise ? "layerwise" : "blockwise",
                       again ? "twice" : "once");
  }
};

Side SideOf(int ranks, int block_size, int interleave) {
  const auto [tp, dcp] = kRanks[ranks];
  const int v = kBlockSizes[block_size];
  return {tp, dcp, v, kInterleaves[interleave] == 0 ? v / dcp : kInterleaves[interleave]};
}

Pair PairOf(const Cell& cell) {
  return {.checkpoint = kCheckpoints[cell[0]],
          .prefill = SideOf(cell[1], cell[3], cell[5]),
          .decode = SideOf(cell[2], cell[4], cell[6]),
          .together = cell[7] == 1,
          .layerwise = cell[8] == 0,
          .again = cell[9] == 1};
}

std::vector<Cell> ValidCells() {
  return FullProduct({3, 6, 6, 2, 2, 3, 3, 2, 2, 2}, [](const Cell& cell) {
    const Pair pair = PairOf(cell);
    for (const Side& side : {pair.prefill, pair.decode}) {
      if (side.block_size % (side.dcp * side.interleave) != 0) return false;
    }
    return true;
  });
}

LocalGroupOptions OptionsOf(const Pair& pair, const Side& side, const std::filesystem::path& dir) {
  LocalGroupOptions options;
  options.model.model_dir = dir;
  options.model.layout = {.tensor_parallel_size = side.tp,
                          .decode_context_parallel_size = side.dcp,
                          .block_size = side.block_size,
                          .interleave = side.interleave};
  options.model.max_model_len = 192;
  options.model.num_blocks = 8 * (192 / side.block_size);
  options.rank.stall_timeout = absl::Seconds(20);
  if (pair.together) options.model.max_num_batched_tokens = 29;
  options.enable_prefix_caching = pair.again;
  options.kv = KvMoverOptions{
      .layerwise = pair.layerwise, .message_bytes = 2048, .window_bytes = 8192, .checksum = true};
  return options;
}

void ExpectAllBlocksBack(LocalGroup& group, const std::string& name) {
  EngineStats stats = group.leader().Stats();
  for (int i = 0; i < 2000 && (stats.num_free_blocks != stats.num_blocks ||
                               group.kv_counters().sending + group.kv_counters().receiving > 0);
       ++i) {
    absl::SleepFor(absl::Milliseconds(1));
    stats = group.leader().Stats();
  }
  EXPECT_EQ(stats.num_free_blocks, stats.num_blocks) << name;
  EXPECT_EQ(group.kv_counters().sending + group.kv_counters().receiving, 0) << name;
}

std::vector<EngineRequest> Requests(const Golden& golden,
                                    std::vector<std::vector<std::int32_t>>& expected) {
  std::vector<EngineRequest> requests;
  for (const char* name : {"len1", "len7", "len33", "len130"}) {
    const GoldenPrompt& prompt = golden.Prompt(name);
    EngineRequest request;
    request.prompt_token_ids = prompt.ids;
    request.max_tokens = static_cast<std::int32_t>(prompt.greedy.size());
    request.ignore_eos = true;
    request.sampling.temperature = 0;
    requests.push_back(std::move(request));
    expected.push_back(prompt.greedy);
  }
  return requests;
}

void GenerateAndCompare(const Pair& pair, const Golden& golden, PdPair& both,
                        const std::string& failure) {
  std::vector<std::vector<std::int32_t>> expected;
  std::vector<EngineRequest> requests = Requests(golden, expected);
  std::vector<Completion> completions;
  if (pair.together) {
    completions = both.Generate(std::move(requests), failure);
  } else {
    for (EngineRequest& request : requests) {
      completions.push_back(both.Generate({std::move(request)}, failure).front());
    }
  }
  for (std::size_t i = 0; i < completions.size(); ++i) {
    EXPECT_TRUE(completions[i].status.ok()) << pair.Name() << ": " << completions[i].status;
    EXPECT_EQ(completions[i].token_ids, expected[i]) << pair.Name() << ", prompt " << i;
  }
}

void RunPair(const Pair& pair, const std::string& failure = "") {
  const auto dir = GoldenPath(pair.checkpoint);
  ASSERT_TRUE(dir.has_value());
  const Golden golden = LoadGolden(*dir);
  auto prefill = LocalGroup::Start(OptionsOf(pair, pair.prefill, *dir));
  auto decode = LocalGroup::Start(OptionsOf(pair, pair.decode, *dir));
  ASSERT_TRUE(prefill.ok() && decode.ok()) << pair.Name() << prefill.status() << decode.status();
  PdPair both(**prefill, **decode);
  const int times = pair.again ? 2 : 1;
  for (int i = 0; i < times; ++i) GenerateAndCompare(pair, golden, both, failure);
  EXPECT_EQ(both.num_recomputed(), failure.empty() ? 0 : 4 * times) << pair.Name();
  EXPECT_EQ(both.num_cached() > 0, pair.again) << pair.Name();
  ExpectAllBlocksBack(**prefill, pair.Name());
  ExpectAllBlocksBack(**decode, pair.Name());
  if (failure.empty()) {
    EXPECT_EQ((*prefill)->kv_counters().sent_bytes, (*decode)->kv_counters().received_bytes);
    EXPECT_EQ((*decode)->kv_counters().dropped_messages, 0);
  }
}

std::vector<Cell> Chosen() {
  const char* const which = std::getenv("WEFT_ALL_CELLS");
  int part = 0, num_parts = 0;
  if (which == nullptr || std::sscanf(which, "%d/%d", &part, &num_parts) != 2) {
    return PairwiseCover(ValidCells());
  }
  const std::vector<Cell> cells = ValidCells();
  std::vector<Cell> mine;
  for (std::size_t i = part; i < cells.size(); i += num_parts) mine.push_back(cells[i]);
  return mine;
}

TEST(PdMatrixTest, EveryPairOfChoicesGivesTheReferencesTokens) {
  const std::vector<Cell> cells = Chosen();
  for (const Cell& cell : cells) {
    RunPair(PairOf(cell));
    if (::testing::Test::HasFailure()) return;
  }
  std::printf("%zu pairs of layouts\n", cells.size());
}

// The router gives up on the prefill group, whatever has been sent by then.
TEST(PdMatrixTest, AFailedTransferIsComputedOnTheDecodeGroup) {
  for (const bool together : {false, true}) {
    RunPair({.checkpoint = "llama_gqa",
             .prefill = {1, 1, 16, 16},
             .decode = {2, 2, 16, 4},
             .together = together,
             .layerwise = true,
             .again = false},
            "for a test");
  }
}

}  // namespace
}  // namespace weft
