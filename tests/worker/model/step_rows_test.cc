#include "worker/model/step_rows.h"

#include <random>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using Rng = std::mt19937;

int Draw(Rng& rng, int low, int high) { return std::uniform_int_distribution<>(low, high)(rng); }

constexpr std::int32_t kMaxRows = 64;
constexpr std::int32_t kMaxSlots = 5;
constexpr std::int32_t kMaxBlocks = 12;

// Sequences at random places of a model of kMaxBlocks blocks, with block tables of random ids.
StepPlan RandomPlan(Rng& rng, int block_size) {
  StepPlan plan;
  const int num_sequences = Draw(rng, 1, kMaxSlots);
  std::vector<std::int32_t> ids(1000);
  for (int i = 0; i < 1000; ++i) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), rng);
  int next_id = 0;
  for (int s = 0; s < num_sequences; ++s) {
    const int num_rows = Draw(rng, 1, kMaxRows / kMaxSlots);
    const int first = Draw(rng, 0, kMaxBlocks * block_size - num_rows);
    plan.sequences.push_back({.slot = (s * 3 + 1) % kMaxSlots,
                              .num_rows = num_rows,
                              .first_position = first,
                              .num_sampled = Draw(rng, 0, num_rows)});
    plan.sequences.back().num_scored = Draw(rng, 0, num_rows - plan.sequences.back().num_sampled);
    plan.token_ids.resize(plan.token_ids.size() + num_rows, 7);
    // In two deltas, the second one later in the table.
    const int cut = Draw(rng, 1, kMaxBlocks - 1);
    for (const auto& [begin, count] : {std::pair(0, cut), std::pair(cut, kMaxBlocks - cut)}) {
      plan.table_deltas.push_back(
          {.slot = plan.sequences.back().slot, .first_index = begin, .num_blocks = count});
      for (int i = 0; i < count; ++i) plan.delta_blocks.push_back(ids[next_id++]);
    }
  }
  return plan;
}

// By brute force: how many of the positions [0, end) are rank r's.
std::int64_t CountOwned(std::int64_t end, int n, int interleave, int r) {
  std::int64_t count = 0;
  for (std::int64_t p = 0; p < end; ++p) count += p / interleave % n == r;
  return count;
}

void CheckRows(const StepRows& rows, const StepPlan& plan, int n, int interleave, int block_size,
               int r, std::int64_t window) {
  std::size_t row = 0;
  std::vector<std::int32_t> owned_row;
  std::vector<std::int64_t> owned_kv_slot;
  std::vector<std::int32_t> logits_row;
  std::size_t sequence_index = 0;
  for (const PlanSequence& sequence : plan.sequences) {
    const std::int32_t* blocks = plan.delta_blocks.data() + sequence_index++ * kMaxBlocks;
    for (int i = 0; i < sequence.num_rows; ++i, ++row) {
      const std::int64_t p = sequence.first_position + i;
      ASSERT_EQ(rows.position[row], p);
      ASSERT_EQ(rows.slot[row], sequence.slot);
      ASSERT_EQ(rows.visible_len[row], CountOwned(p + 1, n, interleave, r)) << "position " << p;
      const std::int64_t first = window == 0 ? 0 : std::max<std::int64_t>(0, p + 1 - window);
      ASSERT_EQ(rows.first_in_window[row], CountOwned(first, n, interleave, r)) << "position " << p;
      if (p / interleave % n == r) {
        const std::int64_t block_start = p / block_size * block_size;
        const std::int64_t offset =
            CountOwned(p, n, interleave, r) - CountOwned(block_start, n, interleave, r);
        owned_row.push_back(static_cast<std::int32_t>(row));
        owned_kv_slot.push_back(blocks[p / block_size] * (block_size / n) + offset);
      }
      if (i >= sequence.num_rows - sequence.num_sampled - sequence.num_scored) {
        logits_row.push_back(static_cast<std::int32_t>(row));
      }
    }
  }
  ASSERT_EQ(rows.num_rows(), static_cast<std::int32_t>(row));
  EXPECT_EQ(rows.owned_row, owned_row);
  EXPECT_EQ(rows.owned_kv_slot, owned_kv_slot);
  EXPECT_EQ(rows.logits_row, logits_row);
}

TEST(StepRowsTest, EqualsBruteForceOverLayoutsAndPlans) {
  Rng rng(1);
  StepRows rows(kMaxRows);
  for (int n : {1, 2, 3, 4}) {
    for (int interleave : {1, 2, 4}) {
      for (int factor : {1, 3}) {
        const int block_size = n * interleave * factor;
        for (int draw = 0; draw < 5; ++draw) {
          const StepPlan plan = RandomPlan(rng, block_size);
          const std::int64_t window = draw % 2 == 0 ? 0 : Draw(rng, 1, 3 * block_size);
          for (int r = 0; r < n; ++r) {
            SCOPED_TRACE(fmt::format("N={} I={} V={} rank {} draw {} window {}", n, interleave,
                                     block_size, r, draw, window));
            const auto layout = ShardLayout::Create({.tensor_parallel_size = n,
                                                     .decode_context_parallel_size = n,
                                                     .block_size = block_size,
                                                     .interleave = interleave},
                                                    {.num_q_heads = 8, .num_kv_heads = 1}, r);
            ASSERT_TRUE(layout.ok()) << layout.status();
            SlotTable slots(kMaxSlots, kMaxBlocks);
            slots.Apply(plan);
            rows.Build(plan, slots, *layout, window);
            // Of N = 1 the interleave is what it likes.
            CheckRows(rows, plan, n, interleave, block_size, r, window);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// Tables longer than 16 bits count, slots beyond 32.
TEST(StepRowsTest, EqualsBruteForceAroundAMillionTokens) {
  constexpr int kRanks = 4;
  constexpr int kInterleave = 2;
  constexpr int kBlock = 16;
  constexpr std::int64_t kTokens = (1 << 20) + 1;
  constexpr std::int32_t kRows = 2 * kBlock + 1;
  constexpr auto kBlocks = static_cast<std::int32_t>((kTokens + kBlock - 1) / kBlock);
  constexpr std::int32_t kFirstId = 1'000'000'000;
  StepPlan plan;
  plan.step = 1;
  plan.sequences = {
      {.slot = 1, .num_rows = kRows, .first_position = kTokens - kRows, .num_sampled = 1}};
  plan.token_ids.assign(kRows, 7);
  plan.table_deltas = {{.slot = 1, .first_index = 0, .num_blocks = kBlocks}};
  for (int i = 0; i < kBlocks; ++i) plan.delta_blocks.push_back(kFirstId - i);
  std::vector<std::byte> message;
  EncodeStep({}, plan, message);
  StepPlan decoded;
  std::vector<std::int32_t> previous;
  const absl::Status status = DecodeStep(message,
                                         {.max_num_seqs = 2,
                                          .max_num_batched_tokens = kRows,
                                          .max_blocks_per_seq = kBlocks,
                                          .num_blocks = kFirstId + 1,
                                          .vocab_size = 10,
                                          .max_model_len = kTokens},
                                         previous, decoded);
  ASSERT_TRUE(status.ok()) << status;
  SlotTable slots(2, kBlocks);
  slots.Apply(decoded);
  StepRows rows(kRows);
  for (int r = 0; r < kRanks; ++r) {
    const auto layout = ShardLayout::Create({.tensor_parallel_size = kRanks,
                                             .decode_context_parallel_size = kRanks,
                                             .block_size = kBlock,
                                             .interleave = kInterleave},
                                            {.num_q_heads = 8, .num_kv_heads = 1}, r);
    ASSERT_TRUE(layout.ok()) << layout.status();
    rows.Build(decoded, slots, *layout, 0);
    ASSERT_EQ(rows.num_rows(), kRows);
    std::int64_t seen = CountOwned(kTokens - kRows, kRanks, kInterleave, r);
    std::size_t owned = 0;
    for (int i = 0; i < kRows; ++i) {
      const std::int64_t p = kTokens - kRows + i;
      if (p / kInterleave % kRanks == r) {
        const std::int64_t in_block =
            seen - CountOwned(p / kBlock * kBlock, kRanks, kInterleave, r);
        ASSERT_LT(owned, rows.owned_kv_slot.size());
        EXPECT_EQ(rows.owned_kv_slot[owned++],
                  (kFirstId - p / kBlock) * (kBlock / kRanks) + in_block);
        ++seen;
      }
      EXPECT_EQ(rows.visible_len[i], seen) << "position " << p << " of rank " << r;
    }
    EXPECT_EQ(owned, rows.owned_kv_slot.size());
  }
}

TEST(StepRowsTest, ASlotKeepsItsTableAndSamplingUntilADeltaChangesThem) {
  SlotTable slots(2, 4);
  StepPlan plan;
  plan.table_deltas = {{.slot = 1, .first_index = 0, .num_blocks = 2}};
  plan.delta_blocks = {8, 9};
  plan.sampling_deltas = {{.slot = 1, .params = {.temperature = 0.5F, .seed = 3}}};
  slots.Apply(plan);
  plan.Clear();
  plan.table_deltas = {{.slot = 1, .first_index = 2, .num_blocks = 1},
                       {.slot = 0, .first_index = 0, .num_blocks = 1}};
  plan.delta_blocks = {5, 6};
  slots.Apply(plan);
  EXPECT_EQ(slots.Block(1, 0), 8);
  EXPECT_EQ(slots.Block(1, 1), 9);
  EXPECT_EQ(slots.Block(1, 2), 5);
  EXPECT_EQ(slots.Block(0, 0), 6);
  EXPECT_EQ(slots.sampling(1), (SamplingParams{.temperature = 0.5F, .seed = 3}));
}

}  // namespace
}  // namespace weft
