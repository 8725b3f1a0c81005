#include "worker/model/step_rows.h"

#include <algorithm>

namespace weft {

SlotTable::SlotTable(std::int32_t max_num_seqs, std::int32_t max_blocks_per_seq)
    : max_blocks_per_seq_(max_blocks_per_seq),
      block_table_(static_cast<std::size_t>(max_num_seqs) * max_blocks_per_seq),
      sampling_(max_num_seqs) {}

void SlotTable::Apply(const StepPlan& plan) {
  const std::int32_t* blocks = plan.delta_blocks.data();
  for (const BlockTableDelta& delta : plan.table_deltas) {
    std::copy_n(blocks, delta.num_blocks,
                block_table_.begin() +
                    static_cast<std::ptrdiff_t>(delta.slot) * max_blocks_per_seq_ +
                    delta.first_index);
    blocks += delta.num_blocks;
  }
  for (const SamplingDelta& delta : plan.sampling_deltas) sampling_[delta.slot] = delta.params;
}

StepRows::StepRows(std::int32_t max_rows) {
  position.reserve(max_rows);
  slot.reserve(max_rows);
  visible_len.reserve(max_rows);
  first_visible.reserve(max_rows);
  first_in_window.reserve(max_rows);
  owned_row.reserve(max_rows);
  owned_kv_slot.reserve(max_rows);
  logits_row.reserve(max_rows);
  sequences.reserve(max_rows);
}

void StepRows::Build(const StepPlan& plan, const SlotTable& slots, const ShardLayout& layout,
                     std::int64_t window) {
  for (auto* column :
       {&slot, &visible_len, &first_visible, &first_in_window, &owned_row, &logits_row}) {
    column->clear();
  }
  position.clear();
  owned_kv_slot.clear();
  sequences.clear();

  for (const PlanSequence& sequence : plan.sequences) {
    sequences.push_back({.first_row = num_rows(),
                         .num_rows = sequence.num_rows,
                         .slot = sequence.slot,
                         .first_position = sequence.first_position});
    for (std::int32_t i = 0; i < sequence.num_rows; ++i) {
      const std::int64_t p = sequence.first_position + i;
      const std::int32_t row = num_rows();
      position.push_back(p);
      slot.push_back(sequence.slot);
      visible_len.push_back(static_cast<std::int32_t>(layout.LocalLength(p + 1)));
      first_visible.push_back(0);
      const std::int64_t first = window == 0 ? 0 : std::max<std::int64_t>(0, p + 1 - window);
      first_in_window.push_back(static_cast<std::int32_t>(layout.LocalLength(first)));
      if (layout.Owns(p)) {
        const std::int64_t block = slots.Block(sequence.slot, layout.BlockIndex(p));
        owned_row.push_back(row);
        owned_kv_slot.push_back(block * layout.block_tokens_per_rank() + layout.OffsetInBlock(p));
      }
      if (i >= sequence.num_rows - sequence.num_sampled - sequence.num_scored)
        logits_row.push_back(row);
    }
  }
}

}  // namespace weft
