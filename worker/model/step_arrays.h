#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/mirror.h"
#include "kernels/device/stream.h"
#include "worker/model/model_config.h"
#include "worker/model/step_rows.h"

namespace weft {

// What the kernels of a step are launched for: what the step has, or more.
struct StepSizes {
  std::int32_t rows = 0;
  std::int32_t owned = 0;
  std::int32_t logits = 0;
};

// What kernels read of a step's rows and of the slots' block tables, where they can: on a device
// that is a copy, as of the last Send(). One thread.
class StepArrays {
 public:
  static absl::StatusOr<StepArrays> Create(std::int32_t max_rows, std::int32_t max_num_seqs,
                                           std::int32_t max_blocks_per_seq, std::int32_t rotary_dim,
                                           kernels::Stream& stream);

  // Overwrites all of it; `token_ids` are the rows'. Up to `sizes` it is filled up: with rows of
  // token 0 that see nothing, rows that are owned but not stored, and rows that have logits. The
  // stream has run everything before.
  absl::Status Send(const StepRows& rows, absl::Span<const std::int32_t> token_ids,
                    const StepSizes& sizes, const RopeFrequencies& rope, kernels::Stream& stream);
  // Tables changed.
  absl::Status SendTables(const SlotTable& slots, kernels::Stream& stream);

  const std::int32_t* token_ids() const { return token_ids_.data(); }  // [num_rows]
  // As in StepRows.
  const std::int32_t* slot() const { return slot_.data(); }
  const std::int32_t* visible_len() const { return visible_len_.data(); }
  const std::int32_t* first_visible() const { return first_visible_.data(); }
  const std::int32_t* first_in_window() const { return first_in_window_.data(); }
  const std::int32_t* owned_row() const { return owned_row_.data(); }
  const std::int64_t* owned_kv_slot() const { return owned_kv_slot_.data(); }
  const std::int32_t* logits_row() const { return logits_row_.data(); }

  const float* cos() const { return cos_.data(); }  // [num_rows, rotary_dim / 2]
  const float* sin() const { return sin_.data(); }
  const float* owned_cos() const { return owned_cos_.data(); }  // [owned rows, rotary_dim / 2]
  const float* owned_sin() const { return owned_sin_.data(); }

  // As in SlotTable.
  const std::int32_t* block_table() const { return block_table_; }
  std::int32_t max_blocks_per_seq() const { return max_blocks_per_seq_; }

  std::int64_t size_bytes() const;

 private:
  template <typename T>
  using Mirror = kernels::Mirror<T>;

  std::int32_t max_blocks_per_seq_ = 0;
  Mirror<std::int32_t> token_ids_;
  Mirror<std::int32_t> slot_;
  Mirror<std::int32_t> visible_len_;
  Mirror<std::int32_t> first_visible_;
  Mirror<std::int32_t> first_in_window_;
  Mirror<std::int32_t> owned_row_;
  Mirror<std::int64_t> owned_kv_slot_;
  Mirror<std::int32_t> logits_row_;
  Mirror<float> cos_;
  Mirror<float> sin_;
  Mirror<float> owned_cos_;
  Mirror<float> owned_sin_;
  Mirror<std::int32_t> tables_;  // empty on the CPU
  const std::int32_t* block_table_ = nullptr;
};

}  // namespace weft
