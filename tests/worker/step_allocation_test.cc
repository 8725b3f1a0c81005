// Law 7: a steady decode step allocates nothing, on any thread of any rank. In a binary of its own:
// it replaces malloc.

#include <atomic>
#include <cstdlib>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "server/base/status_macros.h"
#include "tests/golden.h"
#include "tests/worker/local_group.h"

namespace {
std::atomic<std::uint64_t> num_allocations{0};  // of all threads
}  // namespace

extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t count, std::size_t bytes);
void* __libc_realloc(void* memory, std::size_t bytes);

void* malloc(std::size_t bytes) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(bytes);
}
void* calloc(std::size_t count, std::size_t bytes) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, bytes);
}
void* realloc(void* memory, std::size_t bytes) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(memory, bytes);
}
}

namespace weft {
namespace {

constexpr int kNumSeqs = 4;
constexpr int kMaxLen = 480;
constexpr int kBlockSize = 16;

// Sequences of every way to sample, all with their whole block tables from the first step on.
StepPlan FirstPlan() {
  StepPlan plan;
  for (int slot = 0; slot < kNumSeqs; ++slot) {
    const SamplingParams ways[kNumSeqs] = {{.temperature = 0},
                                           {.temperature = 0.8F, .seed = 1},
                                           {.top_p = 0.9F, .seed = 2},
                                           {.top_p = 0.8F, .top_k = 30, .seed = 3}};
    plan.sampling_deltas.push_back({.slot = slot, .params = ways[slot]});
    constexpr int kBlocks = kMaxLen / kBlockSize;
    plan.table_deltas.push_back({.slot = slot, .first_index = 0, .num_blocks = kBlocks});
    for (int i = 0; i < kBlocks; ++i) plan.delta_blocks.push_back(slot * kBlocks + i);
    plan.sequences.push_back({.slot = slot, .num_rows = 7, .num_sampled = 1});
    plan.token_ids.insert(plan.token_ids.end(), 7, 3 + slot);
  }
  return plan;
}

// One row a sequence, which reads the token of the step before.
void MakeDecode(std::int64_t position, StepPlan& plan) {
  for (int slot = 0; slot < kNumSeqs; ++slot) {
    plan.sequences[slot].num_rows = 1;
    plan.sequences[slot].first_position = position;
    plan.token_ids[slot] = ~slot;
  }
  ++plan.step;
}

class StepAllocationTest : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Checkpoints, StepAllocationTest,
                         ::testing::Values("llama_gqa", "qwen3_moe_nonorm", "deepseek_v2_lite"));

TEST_P(StepAllocationTest, ASteadyDecodeStepAllocatesNothing) {
  WEFT_GOLDEN_OR_SKIP(dir, GetParam());
  struct Layout {
    int tp, dcp;
    DcpExchange exchange;
    int threads;
  };
  for (const Layout& layout : {Layout{1, 1, DcpExchange::kAgRs, 2},
                               {2, 2, DcpExchange::kAgRs, 1},
                               {2, 2, DcpExchange::kA2a, 2},
                               {3, 3, DcpExchange::kAgRs, 1},
                               {4, 2, DcpExchange::kA2a, 1}}) {
    SCOPED_TRACE(
        fmt::format("T={} N={} {}", layout.tp, layout.dcp, DcpExchangeName(layout.exchange)));
    LocalGroupOptions options;
    options.model.model_dir = dir;
    options.model.layout = {.tensor_parallel_size = layout.tp,
                            .decode_context_parallel_size = layout.dcp,
                            .block_size = layout.dcp == 3 ? 3 * kBlockSize : kBlockSize,
                            .interleave = 4};
    options.model.exchange = layout.exchange;
    options.model.max_model_len = kMaxLen;
    options.model.num_blocks = kNumSeqs * kMaxLen / kBlockSize;
    options.rank.stall_timeout = absl::Seconds(20);
    options.threads_per_rank = layout.threads;
    std::uint64_t allocations = 0;
    bool ran = false;
    options.drive = [&](Rank& rank) -> absl::Status {
      StepPlan plan = FirstPlan();
      if (layout.dcp == 3) {
        for (BlockTableDelta& delta : plan.table_deltas) delta.num_blocks /= 3;
        plan.delta_blocks.resize(plan.delta_blocks.size() / 3);
      }
      plan.step = 1;
      RETURN_IF_ERROR(rank.RunStep(plan).status());
      plan.Clear();
      plan.step = 1;
      plan.sequences.resize(kNumSeqs);
      plan.token_ids.resize(kNumSeqs);
      for (int slot = 0; slot < kNumSeqs; ++slot) {
        plan.sequences[slot] = {.slot = slot, .num_sampled = 1};
      }
      // Pools grow to what is ever in flight: more or less of it as threads happen to run.
      std::int64_t position = 7;
      for (; position < 100; ++position) {
        MakeDecode(position, plan);
        RETURN_IF_ERROR(rank.RunStep(plan).status());
      }
      const std::uint64_t before = num_allocations.load();
      for (; position < 400; ++position) {
        MakeDecode(position, plan);
        RETURN_IF_ERROR(rank.RunStep(plan).status());
      }
      allocations = num_allocations.load() - before;
      ran = true;
      return absl::OkStatus();
    };
    { const auto group = LocalGroup::Start(options); }
    EXPECT_TRUE(ran);
    EXPECT_EQ(allocations, 0U);
  }
}

}  // namespace
}  // namespace weft
