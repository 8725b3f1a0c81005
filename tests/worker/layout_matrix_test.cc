// Law 2: in fp32 the layout never changes the answer. Cells of checkpoint x layout x block size x
// interleave x traffic x exchange x planning ahead x replicated queries x expert parallelism x
// prefix caching x rows of a step, each against the reference's greedy tokens: a pairwise covering
// set and 300 drawn by seed; those of one checkpoint with WEFT_ALL_CELLS=NAME, and part I of N of
// the full product with WEFT_ALL_CELLS=I/N, which ctest runs as layout_matrix_full_I (long). In the
// full product families beside Llama have three block sizes, and always several requests at once.

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "gtest/gtest.h"
#include "tests/golden.h"
#include "tests/pairwise.h"
#include "tests/worker/family_checkpoints.h"
#include "tests/worker/local_group.h"

namespace weft {
namespace {

constexpr std::pair<int, int> kRanks[] = {{1, 1}, {2, 1}, {2, 2}, {3, 1},
                                          {3, 3}, {4, 1}, {4, 2}, {4, 4}};
constexpr int kInterleaves[] = {1, 4, 0};  // 0: all of a block's tokens on a rank (B)
constexpr int kBlockSizes[] = {8, 16, 48, 128};
constexpr int kChunks[] = {1, 7, 16, 256};  // rows of a step: of all sequences, so of a prompt
enum Traffic { kAlone, kMixed, kPreempted, kNumTraffic };
constexpr std::size_t kAllTokens = 1000;
// There are over a hundred thousand cells. Behind prompts of 1, 7, 33 and 130 tokens so many go
// over the edge of a block of 8, 16 and 48; that of 128 is in the prompt.
constexpr std::size_t kTokensOfFullProduct = 16;
const char* const kTrafficNames[] = {"alone", "mixed", "preempted"};

struct Layout {
  std::string checkpoint;
  int tp, dcp, block_size, interleave;
  Traffic traffic;
  DcpExchange exchange;
  bool async;
  bool replicate_query;
  bool expert_parallel;
  bool prefix_caching;
  int chunk;

  std::string Name() const {
    return fmt::format(
        "{} T={} N={} V={} I={} {} {} {}{}{}{}, {} rows a step", checkpoint, tp, dcp, block_size,
        interleave, kTrafficNames[traffic], DcpExchangeName(exchange),
        async ? "planning ahead" : "step by step", replicate_query ? ", queries replicated" : "",
        expert_parallel ? ", whole experts" : "", prefix_caching ? ", prefixes cached" : "", chunk);
  }
};

Layout LayoutOf(const Cell& cell) {
  const auto [tp, dcp] = kRanks[cell[1]];
  const int block_size = kBlockSizes[cell[2]];
  const int per_rank = block_size / dcp;
  static const std::vector<std::string> checkpoints = PresentFamilyCheckpoints();
  return {.checkpoint = checkpoints[cell[0]],
          .tp = tp,
          .dcp = dcp,
          .block_size = block_size,
          .interleave = kInterleaves[cell[3]] == 0 ? per_rank : kInterleaves[cell[3]],
          .traffic = static_cast<Traffic>(cell[4]),
          .exchange = cell[5] == 0 ? DcpExchange::kAgRs : DcpExchange::kA2a,
          .async = cell[6] == 0,
          .replicate_query = cell[7] == 1,
          .expert_parallel = cell[8] == 1,
          .prefix_caching = cell[9] == 1,
          .chunk = kChunks[cell[10]]};
}

bool HasExperts(const std::string& checkpoint) {
  static auto& known = *new std::map<std::string, bool>();
  const auto [found, absent] = known.try_emplace(checkpoint);
  if (absent) found->second = LoadModelConfig(*GoldenPath(checkpoint))->moe.has_value();
  return found->second;
}

bool InFullProduct(const Cell& cell) {
  const Layout layout = LayoutOf(cell);
  return layout.checkpoint.starts_with("llama") ||
         (layout.block_size != 48 && layout.traffic != kAlone);
}

std::vector<Cell> ValidCells() {
  const auto checkpoints = static_cast<int>(PresentFamilyCheckpoints().size());
  return FullProduct({checkpoints, 8, 4, 3, kNumTraffic, 2, 2, 2, 2, 2, 4}, [](const Cell& cell) {
    const Layout layout = LayoutOf(cell);
    if (layout.replicate_query && layout.dcp == 1) return false;
    if (layout.expert_parallel && (layout.tp == 1 || !HasExperts(layout.checkpoint))) return false;
    return layout.interleave > 0 && layout.block_size % (layout.dcp * layout.interleave) == 0;
  });
}

LocalGroupOptions OptionsOf(const Layout& layout, const std::filesystem::path& dir) {
  LocalGroupOptions options;
  options.model.model_dir = dir;
  options.model.layout = {.tensor_parallel_size = layout.tp,
                          .decode_context_parallel_size = layout.dcp,
                          .block_size = layout.block_size,
                          .interleave = layout.interleave,
                          .replicate_query = layout.replicate_query};
  options.model.max_model_len = 192;
  options.model.exchange = layout.exchange;
  options.model.expert_parallel = layout.expert_parallel;
  options.rank.stall_timeout = absl::Seconds(20);
  options.async_scheduling = layout.async;
  options.enable_prefix_caching = layout.prefix_caching;
  const int blocks_of_one = (192 + layout.block_size - 1) / layout.block_size;
  options.model.num_blocks = 8 * blocks_of_one;
  options.model.max_num_batched_tokens = layout.chunk;
  if (layout.traffic == kPreempted) {
    options.model.num_blocks = 2 * blocks_of_one;
    options.force_preemption_every = 5;
  }
  return options;
}

// Of what the reference generated, the tokens behind the first `num_done` and before `end`.
EngineRequest RequestFor(const GoldenPrompt& prompt, std::size_t num_done, std::size_t end) {
  EngineRequest request;
  request.prompt_token_ids = prompt.ids;
  request.prompt_token_ids.insert(request.prompt_token_ids.end(), prompt.greedy.begin(),
                                  prompt.greedy.begin() + static_cast<std::ptrdiff_t>(num_done));
  request.max_tokens = static_cast<std::int32_t>(end - num_done);
  request.ignore_eos = true;
  request.sampling.temperature = 0;
  return request;
}

// What the cells of a run have seen.
struct Seen {
  int preempted = 0;
  int cached = 0;
};

// Runs the golden prompts, behind `num_done` tokens of each completion and up to `max_tokens`.
void RunPrompts(const Layout& layout, const Golden& golden, LocalGroup& group, std::size_t num_done,
                std::size_t max_tokens, Seen& seen) {
  std::vector<EngineRequest> requests;
  std::vector<std::vector<std::int32_t>> expected;
  for (const char* name : {"len1", "len7", "len33", "len130"}) {
    const GoldenPrompt& prompt = golden.Prompt(name);
    const std::size_t end = std::min(max_tokens, prompt.greedy.size());
    requests.push_back(RequestFor(prompt, num_done, end));
    expected.emplace_back(prompt.greedy.begin() + static_cast<std::ptrdiff_t>(num_done),
                          prompt.greedy.begin() + static_cast<std::ptrdiff_t>(end));
  }
  std::vector<Completion> completions;
  if (layout.traffic == kAlone) {
    for (EngineRequest& request : requests) {
      completions.push_back(group.Generate({std::move(request)}).front());
    }
  } else {
    completions = group.Generate(std::move(requests));
  }
  for (std::size_t i = 0; i < completions.size(); ++i) {
    EXPECT_TRUE(completions[i].status.ok()) << layout.Name() << ": " << completions[i].status;
    EXPECT_EQ(completions[i].token_ids, expected[i])
        << layout.Name() << ", prompt " << i << ", from token " << num_done;
    seen.preempted += completions[i].num_preemptions > 0;
    seen.cached += completions[i].num_cached_tokens > 0;
  }
}

// With prefix caching, once more: the same prompts, which are found up to their last block, and as
// next turns, behind what was generated.
void RunCell(const Layout& layout, std::size_t max_tokens, Seen& seen) {
  const auto dir = GoldenPath(layout.checkpoint);
  EXPECT_TRUE(dir.has_value());
  const Golden golden = LoadGolden(*dir);
  auto group = LocalGroup::Start(OptionsOf(layout, *dir));
  EXPECT_TRUE(group.ok()) << layout.Name() << ": " << group.status();
  if (!group.ok()) return;

  RunPrompts(layout, golden, **group, 0, max_tokens, seen);
  if (layout.prefix_caching) {
    for (const std::size_t num_done : {0, 5}) {
      RunPrompts(layout, golden, **group, num_done, max_tokens, seen);
    }
  }
  EXPECT_TRUE((*group)->status().ok()) << layout.Name() << ": " << (*group)->status();
  // Planning ahead leaves one more step to run after the last token.
  EngineStats stats = (*group)->leader().Stats();
  for (int i = 0; i < 1000 && stats.num_free_blocks != stats.num_blocks; ++i) {
    absl::SleepFor(absl::Milliseconds(1));
    stats = (*group)->leader().Stats();
  }
  EXPECT_EQ(stats.num_free_blocks, stats.num_blocks) << layout.Name();
}

void RunCells(const std::vector<Cell>& cells, std::size_t max_tokens) {
  Seen seen;
  int forced = 0;
  int caching = 0;
  for (const Cell& cell : cells) {
    const Layout layout = LayoutOf(cell);
    RunCell(layout, max_tokens, seen);
    forced += layout.traffic == kPreempted;
    caching += layout.prefix_caching;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_TRUE(forced == 0 || seen.preempted > 0) << "the preempting cells never preempted";
  EXPECT_TRUE(caching == 0 || seen.cached > 0) << "the caching cells never found anything";
  std::printf("%zu cells; %d requests were preempted, %d found a prefix\n", cells.size(),
              seen.preempted, seen.cached);
}

TEST(LayoutMatrixTest, EveryPairOfChoicesGivesTheReferencesTokens) {
  RunCells(PairwiseCover(ValidCells()), kAllTokens);
}

TEST(LayoutMatrixTest, DrawnCellsGiveTheReferencesTokens) {
  const char* text = std::getenv("WEFT_SEED");
  const unsigned seed = text == nullptr ? 20261129u : std::strtoul(text, nullptr, 10);
  SCOPED_TRACE(fmt::format("WEFT_SEED={}", seed));
  RunCells(DrawCells(ValidCells(), 300, seed), kAllTokens);
}

TEST(LayoutMatrixTest, EveryCellGivesTheReferencesTokens) {
  const char* which = std::getenv("WEFT_ALL_CELLS");
  if (which == nullptr) return;
  std::vector<Cell> cells = ValidCells();
  std::erase_if(cells, [](const Cell& cell) { return !InFullProduct(cell); });
  int part = 0;
  int num_parts = 0;
  if (std::sscanf(which, "%d/%d", &part, &num_parts) == 2) {
    std::vector<Cell> mine;
    for (int i = part; i < static_cast<int>(cells.size()); i += num_parts) mine.push_back(cells[i]);
    cells = std::move(mine);
  } else {
    std::erase_if(cells, [which](const Cell& cell) { return LayoutOf(cell).checkpoint != which; });
  }
  ASSERT_FALSE(cells.empty()) << "neither a checkpoint nor a part: " << which;
  RunCells(cells, kTokensOfFullProduct);
}

}  // namespace
}  // namespace weft
