#include "worker/model/step_arrays.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "server/base/status_macros.h"

namespace weft {

absl::StatusOr<StepArrays> StepArrays::Create(std::int32_t max_rows, std::int32_t max_num_seqs,
                                              std::int32_t max_blocks_per_seq,
                                              std::int32_t rotary_dim, kernels::Stream& stream) {
  StepArrays arrays;
  arrays.max_blocks_per_seq_ = max_blocks_per_seq;
  for (auto* ids : {&arrays.token_ids_, &arrays.slot_, &arrays.visible_len_, &arrays.first_visible_,
                    &arrays.first_in_window_, &arrays.owned_row_, &arrays.logits_row_}) {
    ASSIGN_OR_RETURN(*ids, Mirror<std::int32_t>::Create(max_rows, stream));
  }
  ASSIGN_OR_RETURN(arrays.owned_kv_slot_, Mirror<std::int64_t>::Create(max_rows, stream));
  const std::int64_t table = std::int64_t{max_rows} * rotary_dim / 2;
  for (auto* angles : {&arrays.cos_, &arrays.sin_, &arrays.owned_cos_, &arrays.owned_sin_}) {
    ASSIGN_OR_RETURN(*angles, Mirror<float>::Create(table, stream));
  }
  if (stream.device() != kernels::DeviceKind::kCpu) {
    const std::int64_t blocks = std::int64_t{max_num_seqs} * max_blocks_per_seq;
    ASSIGN_OR_RETURN(arrays.tables_, Mirror<std::int32_t>::Create(blocks, stream));
  }
  return arrays;
}

std::int64_t StepArrays::size_bytes() const {
  std::int64_t bytes = owned_kv_slot_.size_bytes() + tables_.size_bytes();
  for (const auto* ids : {&token_ids_, &slot_, &visible_len_, &first_visible_, &first_in_window_,
                          &owned_row_, &logits_row_}) {
    bytes += ids->size_bytes();
  }
  for (const auto* angles : {&cos_, &sin_, &owned_cos_, &owned_sin_}) bytes += angles->size_bytes();
  return bytes;
}

absl::Status StepArrays::Send(const StepRows& rows, absl::Span<const std::int32_t> token_ids,
                              const StepSizes& sizes, const RopeFrequencies& rope,
                              kernels::Stream& stream) {
  // The values, then `value_of(i)` up to `size`.
  const auto send = [&](const auto& mirror, const auto& values, std::int32_t size,
                        const auto& value_of) {
    std::copy(values.begin(), values.end(), mirror.host());
    auto count = static_cast<std::int32_t>(values.size());
    for (; count < size; ++count) mirror.host()[count] = value_of(count);
    return mirror.Send(count, stream);
  };
  const auto zero = [](std::int32_t) { return 0; };
  const auto same = [](std::int32_t row) { return row; };
  RETURN_IF_ERROR(send(token_ids_, token_ids, sizes.rows, zero));
  RETURN_IF_ERROR(send(slot_, rows.slot, sizes.rows, zero));
  RETURN_IF_ERROR(send(visible_len_, rows.visible_len, sizes.rows, zero));
  RETURN_IF_ERROR(send(first_visible_, rows.first_visible, sizes.rows, zero));
  RETURN_IF_ERROR(send(first_in_window_, rows.first_in_window, sizes.rows, zero));
  RETURN_IF_ERROR(send(owned_row_, rows.owned_row, sizes.owned, same));
  RETURN_IF_ERROR(
      send(owned_kv_slot_, rows.owned_kv_slot, sizes.owned, [](std::int32_t) { return -1; }));
  RETURN_IF_ERROR(send(logits_row_, rows.logits_row, sizes.logits, same));

  const std::size_t half = rope.inv_freq.size();
  float* cos = cos_.host();
  float* sin = sin_.host();
  for (std::size_t i = 0; i < rows.position.size(); ++i) {
    const auto position = static_cast<float>(rows.position[i]);
    for (std::size_t j = 0; j < half; ++j) {
      const float angle = position * rope.inv_freq[j];
      cos[i * half + j] = std::cos(angle) * rope.attention_scaling;
      sin[i * half + j] = std::sin(angle) * rope.attention_scaling;
    }
  }
  for (std::size_t i = 0; i < rows.owned_row.size(); ++i) {
    const std::size_t at = static_cast<std::size_t>(rows.owned_row[i]) * half;
    std::memcpy(owned_cos_.host() + i * half, cos + at, half * sizeof(float));
    std::memcpy(owned_sin_.host() + i * half, sin + at, half * sizeof(float));
  }
  const auto send_angles = [&](const Mirror<float>& angles, std::size_t count, std::int32_t size) {
    const std::size_t all = std::max(count, static_cast<std::size_t>(size));
    std::fill(angles.host() + count * half, angles.host() + all * half, 0.0F);
    return angles.Send(static_cast<std::int64_t>(all * half), stream);
  };
  RETURN_IF_ERROR(send_angles(cos_, rows.position.size(), sizes.rows));
  RETURN_IF_ERROR(send_angles(sin_, rows.position.size(), sizes.rows));
  RETURN_IF_ERROR(send_angles(owned_cos_, rows.owned_row.size(), sizes.owned));
  return send_angles(owned_sin_, rows.owned_row.size(), sizes.owned);
}

absl::Status StepArrays::SendTables(const SlotTable& slots, kernels::Stream& stream) {
  const bool copied = tables_.size_bytes() > 0;
  block_table_ = copied ? tables_.data() : slots.block_table();
  return copied ? tables_.Send(slots.block_tables(), stream) : absl::OkStatus();
}

}  // namespace weft
