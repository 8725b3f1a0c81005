#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "worker/engine/step_plan.h"
#include "worker/model/shard_layout.h"

namespace weft {

// The block tables and sampling parameters of a rank's slots, kept from step to step by plans'
// deltas. One thread.
class SlotTable {
 public:
  SlotTable(std::int32_t max_num_seqs, std::int32_t max_blocks_per_seq);

  // Applies a plan's deltas, which DecodeStep() has checked.
  void Apply(const StepPlan& plan);

  const std::int32_t* block_table() const {
    return block_table_.data();
  }  // [max_num_seqs, max_blocks_per_seq]
  absl::Span<const std::int32_t> block_tables() const { return block_table_; }
  const std::int32_t* BlocksOf(std::int32_t slot) const {
    return block_table_.data() + static_cast<std::size_t>(slot) * max_blocks_per_seq_;
  }
  std::int32_t max_blocks_per_seq() const { return max_blocks_per_seq_; }
  std::int32_t Block(std::int32_t slot, std::int64_t index) const {
    return block_table_[static_cast<std::size_t>(slot) * max_blocks_per_seq_ + index];
  }
  const SamplingParams& sampling(std::int32_t slot) const { return sampling_[slot]; }

 private:
  std::int32_t max_blocks_per_seq_;
  std::vector<std::int32_t> block_table_;
  std::vector<SamplingParams> sampling_;
};

// What one rank derives from a plan: per row, where it is and what it sees locally. The only
// place where a plan's global positions meet ShardLayout.
struct StepRows {
  // Rows of one sequence: [first_row, first_row + num_rows), positions from first_position on.
  struct Sequence {
    std::int32_t first_row;
    std::int32_t num_rows;
    std::int32_t slot;
    std::int64_t first_position;
  };

  // All of [num_rows], in the plan's order.
  std::vector<std::int64_t> position;
  std::vector<std::int32_t> slot;
  std::vector<std::int32_t> visible_len;      // L_r(position + 1): never L_r(L) - k
  std::vector<std::int32_t> first_visible;    // without a window: 0
  std::vector<std::int32_t> first_in_window;  // L_r(max(0, position + 1 - window))
  // Rows whose K and V this rank stores, and where.
  std::vector<std::int32_t> owned_row;
  std::vector<std::int64_t> owned_kv_slot;  // block id * B + offset in the block
  // Rows that are scored or sampled from.
  std::vector<std::int32_t> logits_row;
  std::vector<Sequence> sequences;

  explicit StepRows(std::int32_t max_rows);
  std::int32_t num_rows() const { return static_cast<std::int32_t>(position.size()); }

  // Overwrites all of it. `window` 0: there is none. Allocates nothing within max_rows.
  void Build(const StepPlan& plan, const SlotTable& slots, const ShardLayout& layout,
             std::int64_t window);
};

}  // namespace weft
